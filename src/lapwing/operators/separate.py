"""Gaussian process with independent outputs: a separate copy θ_c of the weights for each output c, with prior P₀.

The kernel has no covariance between outputs, K = diag(K_1 … K_C) with K_c = J_c P₀⁻¹ J_cᵀ over all data. With a
diagonal Λ = diag D the outputs stay independent in the posterior. A softmax couples them, Λ = D − D 1 1ᵀD / w with
w = Σ_c D_c, but only through a sum over classes. With B_c = I + D_c^½ K_c D_c^½, E_c = D_c^½ B_c⁻¹ D_c^½, M = Σ_c E_c

    V_cd = [c = d] (k_cc − k_cᵀ E_c k_c) + k_cᵀ E_c M⁻¹ E_d k_d,
    log det(I + K Λ) = Σ_c log det B_c + log det M − Σ log w.

Rasmussen and Williams (2006), section 3.5; their algorithm omits log det M from the marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.low_rank import LowRankCurvature, LowRankPrecision
from lapwing.operators.root_kernels import RootKernels


@dataclass(frozen=True, eq=False)
class SeparateCurvature(Curvature):
    """Rows D_c^½ J_c of every output c, and D^½ itself for a softmax, which couples the outputs."""

    outputs: tuple[LowRankCurvature, ...]
    output_of: Int[Tensor, " k"]  # the output c of each of a datum's K rows
    tie: Float[Tensor, "c m"] | None = None  # D^½ of all m data for a softmax, Λ = D − D 1 1ᵀD / w

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.outputs[0].p

    @property
    def exact_prior(self) -> bool:  # type: ignore[override]
        """Without coupling, a scalar prior shifts the eigenvalues of every output."""
        return self.tie is None

    def mv(self, v: Float[Tensor, "... p"]) -> NoReturn:
        refuse("a curvature of one set of weights")

    def diagonal(self) -> Float[Tensor, " p"]:
        """Σ_c diag H_c with D in place of Λ: an upper bound on the curvature of a weight summed over its copies."""
        return torch.stack([H.diagonal() for H in self.outputs]).sum(0)

    def spectrum(self) -> Float[Tensor, " r"]:
        if self.tie is None:
            return torch.cat([H.spectrum() for H in self.outputs])
        # Λ = D^½ (I − q qᵀ) D^½ with q = √(D / w). The nonzero eigenvalues of H are those of Π G Π, where
        # G = blockdiag(D_c^½ K_c D_c^½) and Π = I − q qᵀ for every datum's C rows, a projection.
        identity = GroupedDiagonal.identity(self.p, self.outputs[0].root.rows.device)
        halves = [H.scale.sqrt().expand(H.rank) for H in self.outputs]
        each = [h[:, None] * H.root.kernel(identity) * h for H, h in zip(self.outputs, halves, strict=True)]
        q = (self.tie / self.tie.square().sum(0).clamp(min=1e-300).sqrt()).unbind()
        blocks = torch.cat([q_c.diag() for q_c in q])
        G = torch.block_diag(*each)
        G = G - blocks @ (blocks.T @ G)
        return torch.linalg.eigvalsh(G - (G @ blocks) @ blocks.T).clamp(min=0)

    def scaled(self, c: Scalar) -> SeparateCurvature:
        return replace(self, outputs=tuple(H.scaled(c) for H in self.outputs))

    def mixed(self, others: Sequence[Curvature], scales: Float[Tensor, " g"]) -> SeparateCurvature:
        parts = [self, *(H for H in others if isinstance(H, SeparateCurvature))]
        columns = zip(*(part.outputs for part in parts), strict=True)
        joined = tuple(first.as_rows(rest, scales) for first, *rest in columns)
        ties = [part.tie for part in parts if part.tie is not None]
        return replace(self, outputs=joined, tie=torch.cat(ties, 1) if ties else None)

    def plus(self, P0: GroupedDiagonal) -> SeparatePrecision:
        return SeparatePrecision(self, P0)

    def to_dense(self) -> NoReturn:
        refuse("a curvature of one set of weights")


@dataclass(frozen=True, eq=False)
class SeparatePrecision(Precision):
    """The posterior over outputs. There is no single weight vector, so methods that return weights raise."""

    H: SeparateCurvature
    P0: GroupedDiagonal
    has_weights = False
    prefers_large_batches = True

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    @cached_property
    def outputs(self) -> tuple[LowRankPrecision, ...]:
        roots = [H.root for H in self.H.outputs]
        # Kernels of all outputs together share the inputs' Gram matrices. Skip this if exact kernels are cached.
        if not any(root.has_kernels(self.P0) for root in roots):
            RootKernels.compute_together([root.quick for root in roots], self.P0)
        return tuple(H.plus(self.P0) for H in self.H.outputs)

    @cached_property
    def _tied(self) -> Float[Tensor, "m m"]:
        """Cholesky factor of M = Σ_c E_c (m, m). Data with D = 0 get a 1 on the diagonal, so that M stays regular."""
        assert self.H.tie is not None
        M = (self.H.tie.square().sum(0) == 0).double().diag()
        for half, P in zip(self.H.tie, self.outputs, strict=True):
            M = M + half[:, None] * torch.cholesky_inverse(P.factor) * half  # E_c = D_c^½ B_c⁻¹ D_c^½
        return torch.linalg.cholesky(M)

    def mv(self, v: Float[Tensor, "... p"]) -> NoReturn:
        refuse("a precision of one set of weights")

    def solve(self, v: Float[Tensor, "... p"]) -> NoReturn:
        refuse("a covariance of one set of weights")

    def approximate_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """Diagonal approximation. The linear model's mode is still one weight vector shared by all outputs."""
        return v / (self.P0.diagonal + self.H.diagonal())

    def half_solve(self, eps: Float[Tensor, "... p"]) -> NoReturn:
        refuse("draws of one set of weights")

    def copies(self, eps: Float[Tensor, "s c p"], more: Float[Tensor, "s m"]) -> Float[Tensor, "s c p"]:
        """Map standard normal numbers to draws of (θ_1, …, θ_C) around their mean: (s, C, P)."""
        each = torch.stack([P.half_solve(eps[:, c]) for c, P in enumerate(self.outputs)], 1)
        if self.H.tie is None:
            return each
        # + U M⁻¹ Uᵀ with U_c = P₀⁻¹ J_cᵀ E_c = P₀⁻¹ N_cᵀ B_c⁻¹ D_c^½
        u = torch.linalg.solve_triangular(self._tied.T, more.T, upper=True)
        tied = [
            P.pull(torch.cholesky_solve(half[:, None] * u, P.factor).T) / self.P0.diagonal
            for half, P in zip(self.H.tie, self.outputs, strict=True)
        ]
        return each + torch.stack(tied, 1)

    def moved(self, J: Rows, copies: Float[Tensor, "s c p"]) -> Float[Tensor, "s n k"]:
        """J_c θ_c, every output with its own weights: (s, n, k)."""
        f = torch.zeros(len(copies), J.n, J.c, dtype=torch.float64, device=J.device)
        for c, at in self._places(J):
            f[:, :, at] = J.outputs_at(at).mv(copies[:, c]).double()
        return f

    @property
    def n_tied(self) -> int:
        return 0 if self.H.tie is None else self.H.tie.shape[1]

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        V, X = self._zeros(J, J.n, J.c, J.c), self._zeros(J, self.n_tied, J.n, J.c)
        for c, at, own, W in self._whitened(J):
            V[:, at[:, None], at] = own
            if self.n_tied:
                X[:, :, at] = self._through(c, W).reshape(-1, J.n, len(at))
        return V + torch.einsum("mnk,mnl->nkl", X, X)

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        V, X = self._zeros(J, J.n, J.c), self._zeros(J, self.n_tied, J.n, J.c)
        for c, at, own, W in self._whitened(J):
            V[:, at] = own.diagonal(dim1=-2, dim2=-1)
            if self.n_tied:
                X[:, :, at] = self._through(c, W).reshape(-1, J.n, len(at))
        return V + X.square().sum(0)

    def _whitened(self, J: Rows) -> Iterator[tuple[int, Int[Tensor, " t"], Float[Tensor, "n t t"], Tensor]]:
        """For every output: c, its rows, J_c P_c⁻¹ J_cᵀ, and W = L_c⁻¹ D_c^½ k_c, from which that is computed.

        Kernels are computed in the dtype of the rows first, of all outputs together. An output for which their rounding
        would show in the variance (`explained` returns None) is recomputed in float64.
        """
        places = list(self._places(J))
        rows = [J.outputs_at(at).quick() for _, at in places]
        points = [P.H.root.quick.rows for P in self.outputs]
        kernels, owns = points[0].cross_and_own_each(points, rows, self.P0.inverse())
        for (c, at), quick, kernel, own in zip(places, rows, kernels, owns, strict=True):
            P = self.outputs[c]
            W = P.whitened_kernel(kernel)
            V = P.explained(own, W, quick.rounding)
            if V is None:
                exact = J.outputs_at(at)
                W = P.whitened(exact)
                V = P.explained(exact.own(self.P0.inverse()), W, exact.rounding)
                V = P.inv_quad(exact) if V is None else V
            yield c, at, V, W

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        V, X = self._zeros(J, J.n * J.c, J.n * J.c), self._zeros(J, self.n_tied, J.n * J.c)
        for c, at in self._places(J):
            own, flat = J.outputs_at(at), (J.c * torch.arange(J.n, device=J.device)[:, None] + at).flatten()
            V[flat[:, None], flat] = self.outputs[c].inv_gram(own)
            if self.n_tied:
                X[:, flat] = self._through(c, self.outputs[c].whitened(own))
        return V + X.T @ X

    def _places(self, J: Rows) -> Iterator[tuple[int, Int[Tensor, " t"]]]:
        """For every output c, the indices of its rows among a datum's rows: all K rows, or the C rows of one site."""
        output_of = self.H.output_of if J.c == len(self.H.output_of) else torch.arange(J.c)
        for c in range(len(self.outputs)):
            yield c, (output_of == c).nonzero()[:, 0].to(J.device)

    def _zeros(self, J: Rows, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=J.device)

    def _through(self, c: int, W: Float[Tensor, "m j"]) -> Float[Tensor, "m j"]:
        """L_M⁻¹ E_c k_c = L_M⁻¹ D_c^½ L_c⁻ᵀ W with W = L_c⁻¹ D_c^½ k_c."""
        assert self.H.tie is not None
        u = torch.linalg.solve_triangular(self.outputs[c].factor.T, W, upper=True)
        return torch.linalg.solve_triangular(self._tied, self.H.tie[c][:, None] * u, upper=False)

    def inv_diagonal(self) -> NoReturn:
        refuse("variances of one set of weights")

    def logdet(self) -> Scalar:
        # Every output's log det P_c contains log det P₀; the evidence subtracts it once.
        total = torch.stack([P.logdet() for P in self.outputs]).sum() - (len(self.outputs) - 1) * self.P0.logdet()
        if self.H.tie is None:
            return total
        w = self.H.tie.square().sum(0)
        return total + 2 * self._tied.diagonal().log().sum() - w[w > 0].log().sum()

    def to_dense(self) -> NoReturn:
        refuse("a precision of one set of weights")


def refuse(what: str) -> NoReturn:
    raise StructureError(
        f"With independent outputs there is not {what}: every output has its own weights. Use outputs(x), predict(x) "
        'or functions(n), or fit with coupling="full".'
    )
