"""Low-rank curvature: leading eigenpairs of H from products H v. Nothing of size P × P or N·C × P is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.model_summary import plural
from lapwing.curvature.structure import PRODUCT, Structure, Trial
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError, InputTypeError, warn
from lapwing.linalg import Eigenpairs, leading_eigenpairs
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DenseRows, LowRankCurvature

_ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-7}  # error of a product, relative to the largest eigenvalue
_ROUNDS = 6  # passes that usually suffice; for cost estimates only
_KEPT_AT_ONCE = 8  # blocks of (rank + oversample) vectors that the Krylov method holds at its peak


@dataclass(frozen=True)
class LowRank(Structure):
    """The `rank` leading eigenpairs of H; the rest is dropped. With one noise level per output, those of each part.

    A randomised block Krylov method iterates until ‖H x − θ x‖ ≤ rtol · θ for all pairs, with one pass over the data
    per iteration and at most `max_passes` of them. `seed` is that of the random start.
    """

    rank: int = 100
    rtol: float = 1e-6
    max_passes: int = 40
    oversample: int = 10
    seed: int = 0
    by_products = True
    resumable = True  # the first pass; the iterations that follow start again

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("max_passes", 2), ("oversample", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputTypeError(f"LowRank: {name} must be a whole number, got {type(value).__name__} {value!r}.")
            if value < least:
                raise InputError(f"LowRank: {name} must be at least {least}, got {value}.")
        if not 0 < self.rtol < 1:
            raise InputError(f"LowRank: rtol must lie between 0 and 1, got {self.rtol}.")

    def from_products(self, H: GaussNewton, n_parts: int, first_pass: Sequence[Curvature]) -> list[Curvature]:
        one_hot = torch.eye(n_parts, dtype=torch.float64)
        return [self._part(H, scales) for scales in one_hot]

    def stored_floats(self, layout: ParamLayout) -> int:
        return min(self.rank, layout.p) * layout.p

    def working_floats(self, layout: ParamLayout) -> int:
        return _KEPT_AT_ONCE * min(self.rank + self.oversample, layout.p) * layout.p

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        return rank_bytes(self, work, trial)

    def fit_macs(self, work: Workload) -> float:
        vectors = _ROUNDS * min(self.rank + self.oversample, work.p)
        return work.statistics_macs + (_ROUNDS + vectors * PRODUCT) * work.forward_macs

    def coverage(self, work: Workload) -> str:
        return plural(min(self.rank, work.p), "leading eigenpair")

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored + sizes.dense // 4  # variances use rows in factored form, rarely dense

    def _part(self, H: GaussNewton, scales: Float[Tensor, " g"]) -> Curvature:
        """The leading eigenpairs of Σ_g c_g H_g as rows √θ xᵀ; warns if they have not converged."""
        network = H.jacobian.linearised.network
        generator = torch.Generator().manual_seed(self.seed)
        n = min(self.rank + self.oversample, H.p)
        # Drawn on the CPU, so that every device starts from the same vectors.
        start = torch.randn(n, H.p, generator=generator, dtype=torch.float64).to(network.device)
        pairs = leading_eigenpairs(
            lambda v: H.mv(v, scales),
            start,
            self.rank,
            rtol=self.rtol,
            rounding=_ROUNDING.get(network.dtype or torch.float32, 1e-2),
            max_rounds=self.max_passes,
        )
        if not pairs.converged:
            warn(_not_converged(pairs, self))
        # The Gram matrix of rows √θ xᵀ is Σ θ x xᵀ.
        return LowRankCurvature.of(DenseRows(pairs.values.sqrt()[:, None] * pairs.vectors))


def rank_bytes(structure: Structure, work: Workload, trial: Trial) -> tuple[int, int, int]:
    """Bytes to store, at the peak of a fit (blocks of vectors), at the peak of a prediction (rows, a scaled copy, a
    product)."""
    fit, predict = trial.measured_bytes(Diag())
    stored = structure.stored_bytes(work)
    return stored, 8 * structure.working_floats(work.layout) + fit, 3 * stored + predict


def _not_converged(pairs: Eigenpairs, structure: LowRank) -> str:
    relative = pairs.residuals / pairs.values
    return (
        f"lowrank: after {structure.max_passes} passes {int((relative > structure.rtol).sum())} of "
        f"{len(pairs.values)} eigenpairs have a residual above rtol = {structure.rtol:g} (the largest is "
        f"{float(relative.max()):.1g} of its eigenvalue). Take a larger max_passes, oversample or rtol."
    )
