"""A sketch Y = M Ω of M = Σ_m x_m x_mᵀ (d, d) that never forms M, and the leading eigenpairs that it determines.

Y is a sum over the rows x like M itself: sketches of different data add up exactly. From Y the Nyström approximation
Y (Ωᵀ Y)⁻¹ Yᵀ ⪯ M follows; it is M for rank M ≤ r. What it leaves is known by its trace, as tr M is summed exactly.
Tropp, Yurtsever, Udell and Cevher, "Fixed-rank approximation of a positive-semidefinite matrix from streaming data"
(2017), algorithm 3; Ω is r columns of a cosine transform with random signs, which is orthonormal and quickly formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, State, Tensor
from lapwing.linalg.gram import GramSum, stored_dtype

_SEED = 20_171_128  # every process draws the same Ω: only then do sketches add up
_NOISE = 4.0  # shift ν of M in units of the spectral norm of the rounding errors of Y
_ERROR = 4.0  # of Σ s in units of d ν: what is left of the trace below it is no eigenvalue


@dataclass(frozen=True, eq=False)
class Sketch:
    """Y = M Ω (q, d, r) and tr M of q matrices."""

    Y: Float[Tensor, "q d r"]
    trace: Float[Tensor, " q"]

    @classmethod
    def of(cls, M: Float[Tensor, "q d d"], rank: int) -> Sketch:
        Omega = test_matrix(M.shape[-1], rank, M.dtype, M.device)
        return cls(M @ Omega, M.double().diagonal(dim1=-2, dim2=-1).sum(-1))

    @classmethod
    def of_pairs(cls, values: Float[Tensor, "q k"], U: Float[Tensor, "q d r"], rank: int) -> Sketch:
        """Of M = U diag(s) Uᵀ + ρ (I − U Uᵀ), from values = (s, ρ)."""
        s, rest = values[:, None, :-1].to(U.dtype), values[:, -1].to(U.dtype)[:, None, None]
        d, kept = U.shape[1:]
        Omega = test_matrix(d, rank, U.dtype, U.device)
        inside = U.mT @ Omega
        Y = (U * (s - rest)) @ inside + rest * Omega
        return cls(Y, values[:, :-1].sum(-1) + (d - kept) * values[:, -1])

    def leading(self, energy: float) -> tuple[Float[Tensor, "q k"], Float[Tensor, "q d r"]]:
        """The fewest leading eigenpairs (s, U) that hold this share of the trace; of q matrices equally many.

        The values returned are (s, ρ): ρ is the mean of all other eigenvalues, so that the trace is exact.
        """
        found = [_nystrom(Y) for Y in self.Y]
        kept = max(_count(s, t, energy) for (s, _, _), t in zip(found, self.trace, strict=True))
        s = torch.stack([s[:kept] for s, _, _ in found])
        U = torch.stack([U[:, :kept].to(self.Y.dtype) for _, U, _ in found])
        left, d = self.trace - s.sum(-1), self.Y.shape[1]
        resolved = left > _ERROR * d * self.trace.new_tensor([nu for _, _, nu in found])
        return torch.cat([s, torch.where(resolved, left / max(1, d - kept), 0.0)[:, None]], 1), U


class GramSketch:
    """A running sketch of Σ_m x_m x_mᵀ for rows x (m, q, d): 2 d r multiplications a row, and d r numbers.

    Takes what `GramSum` takes. `omegas` holds the test matrices, which sketches of equal size share.
    """

    def __init__(self, q: int, d: int, rank: int, device: torch.device, omegas: dict[object, Tensor]) -> None:
        self.q, self.d, self.rank, self.device, self.omegas = q, d, rank, device, omegas
        self.Y: Tensor | None = None
        self.trace = torch.zeros(q, dtype=torch.float64, device=device)

    def add(self, x: Float[Tensor, "m q d"], *, ones: bool = False) -> None:
        """Add rows; with `ones`, each with a 1 appended."""
        Y = self._sum(x.dtype)
        x, Omega = x.to(Y.dtype), self._omega(Y.dtype)
        e = x.shape[2]
        z = x @ Omega[:e] + Omega[e] if ones else x @ Omega
        Y[:, :e].baddbmm_(x.permute(1, 2, 0), z.transpose(0, 1))
        self.trace += torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square().sum(0)
        if ones:
            Y[:, e] += z.sum(0)
            self.trace += len(x)

    def add_product(self, product: Float[Tensor, "q d d"]) -> None:
        """Add a sum Σ x xᵀ that was computed elsewhere."""
        Y = self._sum(product.dtype)
        Y.baddbmm_(product.to(Y.dtype), self._omega(Y.dtype).expand(self.q, -1, -1))
        self.trace += product.double().diagonal(dim1=-2, dim2=-1).sum(-1)

    def add_transposed(self, x: Float[Tensor, "m d r"]) -> None:
        """Add Σ_m x_m x_mᵀ for one map, x_m (d, r) with the vectors as columns."""
        self.add(x.mT.reshape(-1, 1, self.d))

    @property
    def empty(self) -> bool:
        return self.Y is None

    def result(self) -> Sketch:
        return Sketch(self._sum(torch.float64), self.trace)

    def state(self) -> State:
        return {"Y": self.Y, "trace": self.trace}

    def restore(self, state: State) -> None:
        self.Y, self.trace = state["Y"], state["trace"]

    def _sum(self, dtype: torch.dtype) -> Float[Tensor, "q d r"]:
        if self.Y is None:
            kept = stored_dtype(self.d, dtype)
            self.Y = torch.zeros(self.q, self.d, self.rank, dtype=kept, device=self.device)
        return self.Y

    def _omega(self, dtype: torch.dtype) -> Float[Tensor, "d r"]:
        key = self.d, self.rank, dtype
        if key not in self.omegas:
            self.omegas[key] = test_matrix(self.d, self.rank, dtype, self.device)
        return self.omegas[key]


RowSum = GramSum | GramSketch  # what rows are added to


def test_matrix(d: int, rank: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d r"]:
    """Ω_ik = σ_i √(2/d) cos(π (i + ½) κ_k / d): random signs σ and different frequencies κ, orthonormal columns."""
    g = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(2, (d, 1), generator=g).double() * 2 - 1
    frequencies = torch.randperm(d, generator=g)[:rank].double()
    angles = torch.outer(torch.arange(d, dtype=torch.float64) + 0.5, frequencies * (torch.pi / d))
    halves = 2.0 - (frequencies == 0).double()  # the constant has squares of mean 1, all other cosines of mean ½
    return (angles.cos_() * (halves / d).sqrt() * signs).to(device, dtype)


def _nystrom(Y: Float[Tensor, "d r"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "d r"], float]:
    """Eigenvalues, descending, and eigenvectors of Y (Ωᵀ Y)⁻¹ Yᵀ, computed for M + ν I and shifted back; and ν."""
    d, r = Y.shape
    Omega = test_matrix(d, r, torch.float64, Y.device)
    # Errors ε |Y_ij| of random sign have a spectral norm of about ε ‖Y‖ (1/√r + 1/√d).
    size = float(torch.linalg.matrix_norm(Y.detach().double()))
    nu = _NOISE * torch.finfo(Y.dtype).eps * size * (r**-0.5 + d**-0.5)
    if nu == 0:
        return Omega.new_zeros(r), Omega, nu
    Y = Y.double().add(Omega, alpha=nu)
    C = Omega.mT @ Y  # Ωᵀ (M + ν I) Ω ⪰ ν I
    c, V = torch.linalg.eigh((C + C.mT) / 2)
    Q, R = torch.linalg.qr(Y @ (V * c.clamp(min=nu).rsqrt()))
    s, W = torch.linalg.eigh(R @ R.mT)
    return (s - nu).clamp(min=0).flip(0), Q @ W.flip(1), nu


def _count(s: Float[Tensor, " r"], trace: Tensor, energy: float) -> int:
    """How many of the leading eigenvalues hold this share of the trace; all that are not zero if they do not."""
    enough = int((s.cumsum(0) < energy * trace).sum()) + 1
    return max(1, min(enough, int((s > 0).sum())))
