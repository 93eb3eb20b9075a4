"""Nyström approximation of H from r products with it, used as a preconditioner.

N = (HΩ) (ΩᵀHΩ)⁺ (HΩ)ᵀ for an orthonormal random Ω of r columns. N ⪯ H, and N = H where H has rank r at most.
Frangella, Tropp and Udell (2023), "Randomized Nyström preconditioning".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.low_rank import rank_bytes
from lapwing.curvature.model_summary import plural
from lapwing.curvature.structure import PRODUCT, Structure, Trial
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError, InputTypeError
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DenseRows, GroupedDiagonal, LowRankCurvature

MOST = 64  # largest default rank: each direction costs one product in the fit
_BLOCKS = 3  # blocks of r vectors besides the stored one: Ω, H Ω, and one temporary
_SMALLEST = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative eigenvalue of ΩᵀHΩ below which it is rounding


@dataclass(frozen=True)
class Nystrom(Structure):
    """`rank` random directions of H, one product each, in one pass over the data. `seed` is that of the directions.

    `rank=None` takes as many as the memory allows, up to 64 and up to a quarter of the parameters.
    """

    rank: int | None = None
    seed: int = 0
    by_products = True
    resumable = True  # the first pass; the products start again

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputTypeError(f"Nystrom: {name} must be a whole number, got {type(value).__name__} {value!r}.")
            if value < least:
                raise InputError(f"Nystrom: {name} must be at least {least}, got {value}.")

    def affordable(self, p: int, n_parts: int, floats: int) -> int:
        """The requested rank; if None, the number of directions that fit into `floats` numbers, possibly 0."""
        if self.rank is not None:
            return self.rank
        return min(MOST, -(-p // 4), max(0, floats) // ((n_parts + _BLOCKS) * p))

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> Nystrom:
        return replace(self, rank=max(1, self.affordable(layout.p, n_parts, floats)))

    def from_products(self, H: GaussNewton, n_parts: int, first_pass: Sequence[Curvature]) -> list[Curvature]:
        return [self._part(H, scales) for scales in torch.eye(n_parts, dtype=torch.float64)]

    def stored_floats(self, layout: ParamLayout) -> int:
        return min(self.rank or MOST, layout.p) * layout.p

    def working_floats(self, layout: ParamLayout) -> int:
        return _BLOCKS * self.stored_floats(layout)

    def needed_bytes(self, work: Workload) -> int:
        """Rows only: neither a sum of parts nor a factor is formed."""
        return self.stored_bytes(work) + 8 * self.working_floats(work.layout)

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        return rank_bytes(self, work, trial)

    def fit_macs(self, work: Workload) -> float:
        return work.statistics_macs + (1 + (self.rank or 0) * PRODUCT) * work.forward_macs

    def coverage(self, work: Workload) -> str:
        return plural(self.rank or 0, "random direction")

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored + sizes.dense // 4

    def whitened(self, H: GaussNewton, n_parts: int, P0: GroupedDiagonal) -> list[Curvature]:
        """The same with directions P₀^-½ Ω: a preconditioner of H + P₀ needs H where it is large relative to P₀."""
        half = P0.diagonal.detach().rsqrt()
        return [self._part(H, scales, half) for scales in torch.eye(n_parts, dtype=torch.float64)]

    def _part(self, H: GaussNewton, scales: Float[Tensor, " g"], half: Float[Tensor, " p"] | None = None) -> Curvature:
        """Rows M with MᵀM = (HΩ)(ΩᵀHΩ)⁺(HΩ)ᵀ for H = Σ_g c_g H_g; Ω is scaled by `half` if given."""
        network = H.jacobian.linearised.network
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.randn(H.p, min(self.rank or MOST, H.p), generator=generator, dtype=torch.float64)
        # Drawn on the CPU, so that every device gets the same directions.
        omega = torch.linalg.qr(start).Q.T.to(network.device)
        omega = omega if half is None else omega * half
        smallest = _SMALLEST.get(network.dtype or torch.float32, 1e-2)
        return LowRankCurvature.of(DenseRows(root_of_sketch(omega, H.mv(omega, scales), smallest)))


def root_of_sketch(omega: Float[Tensor, "r p"], Y: Float[Tensor, "r p"], smallest: float) -> Float[Tensor, "k p"]:
    """M (k, p) with MᵀM = Yᵀ (Ω Yᵀ)⁺ Y, for Y = ΩH (r, p).

    Drops eigenvalues of Ω Yᵀ below `smallest` of the largest.
    """
    T = omega @ Y.T
    theta, U = torch.linalg.eigh(0.5 * (T + T.T))  # symmetric up to rounding
    kept = theta > smallest * theta[-1].clamp(min=0)
    kept[-1] = True  # keep at least one row; it is zero if H = 0
    root = theta[kept].clamp(min=torch.finfo(theta.dtype).tiny).sqrt()
    return (U[:, kept] / root).T @ Y
