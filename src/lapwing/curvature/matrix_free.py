"""Matrix-free curvature: all of H through products with the data, and a cheaper structure as a preconditioner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.estimate import estimate
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.nystrom import Nystrom
from lapwing.curvature.structure import Structure, Trial
from lapwing.curvature.workload import Workload
from lapwing.errors import InputTypeError
from lapwing.linalg import CG, Probes, Rademacher
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DiagonalCurvature, MatrixFreeCurvature, MatrixProducts

_VECTORS = 8  # vectors of P numbers held by one conjugate-gradient solve
_NEAR_SHARE = 3  # quarters of the free memory that the preconditioner may take; the passes need the rest
_ROW_FLOATS = 1 << 22


@dataclass(frozen=True)
class MatrixFree(Structure):
    """All of H without storing it: conjugate gradients for solves, stochastic Lanczos quadrature for log det.

    `preconditioner` is another structure (Nystrom, LowRank, Kron, Diag, Ekfac, Block), or None for the prior alone. It
    changes the time and the variance of stochastic estimates, not what is estimated. The rank of Nystrom() is reduced
    to fit the memory of the fit, down to None. Every question to the posterior makes passes over the training data.
    """

    preconditioner: Structure | None = field(default_factory=Nystrom)
    solver: CG = field(default_factory=CG)
    probes: Probes = field(default_factory=Rademacher)
    by_products = True
    additive = True
    exact = True
    streams = True

    def __post_init__(self) -> None:
        expected = (("preconditioner", Structure | None, "lw.Kron()"), ("solver", CG, "lw.CG()"))
        for name, kind, example in (*expected, ("probes", Probes, "lw.Rademacher(16)")):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InputTypeError(f"MatrixFree: {name} must be an object such as {example}, got {value!r}.")
        if isinstance(self.preconditioner, MatrixFree):
            raise InputTypeError(
                "MatrixFree: the preconditioner must be a structure that can be inverted, such as lw.Kron() or "
                "lw.LowRank(50); MatrixFree itself is not."
            )

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> MatrixFree:
        near, room = self.preconditioner, (floats - _VECTORS * layout.p) * _NEAR_SHARE // 4
        if near is None:
            return self
        if isinstance(near, Nystrom) and not near.affordable(layout.p, n_parts, room):
            return replace(self, preconditioner=None)
        return replace(self, preconditioner=near.within(layout, n_parts, room))

    @property
    def whole_tensors(self) -> bool:  # type: ignore[override]
        return self.preconditioner is not None and self.preconditioner.whole_tensors

    @property
    def summed(self) -> Structure | None:
        return None if self.preconditioner is None else self.preconditioner.summed

    def from_products(self, H: GaussNewton, n_parts: int, first_pass: Sequence[Curvature]) -> list[Curvature]:
        """Each part as products with H_g, with the parts of the preconditioner beside it."""
        source = _Streamed(H, n_parts)
        if self.preconditioner is None:
            # H = 0 as preconditioner: its precision is the prior alone.
            nothing = torch.zeros(H.p, dtype=torch.float64, device=source.device)
            first_pass = [DiagonalCurvature(nothing)] * n_parts
        elif self.preconditioner.by_products:
            first_pass = self.preconditioner.from_products(H, n_parts, first_pass)
        one_hot = torch.eye(n_parts, dtype=torch.float64, device=source.device)
        return [
            MatrixFreeCurvature((source,), e, part, self.solver, self.probes)
            for e, part in zip(one_hot, first_pass, strict=True)
        ]

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p if self.preconditioner is None else self.preconditioner.stored_floats(layout)

    def working_floats(self, layout: ParamLayout) -> int:
        return _VECTORS * layout.p

    def stored_bytes(self, work: Workload) -> int:
        return super().stored_bytes(work) if self.preconditioner is None else self.preconditioner.stored_bytes(work)

    def needed_bytes(self, work: Workload) -> int:
        near = 0 if self.preconditioner is None else self.preconditioner.needed_bytes(work)
        return near + 8 * self.working_floats(work.layout)

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        _, fit, predict = trial.peak_bytes(self.preconditioner or Diag())
        return self.stored_bytes(work), fit, predict + 8 * self.working_floats(work.layout) * work.k

    def fit_macs(self, work: Workload) -> float:
        return work.statistics_macs if self.preconditioner is None else self.preconditioner.fit_macs(work)

    def coverage(self, work: Workload) -> str:
        near = self.preconditioner
        if near is None:
            return "products with all of it, preconditioned by the prior alone"
        how = near.coverage(work) if near.by_products else type(near).__name__.lower()
        return f"products with all of it, preconditioned by {how}"

    def row_floats(self, sizes: RowSizes) -> int:
        return _VECTORS * sizes.dense


@dataclass(frozen=True, eq=False)
class _Streamed(MatrixProducts):
    """Products with the curvature of the data that a posterior was fitted on."""

    H: GaussNewton
    n_parts: int

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.H.jacobian.linearised.network.device

    def mv(self, v: Float[Tensor, "m p"], scales: Float[Tensor, " g"]) -> Float[Tensor, "m p"]:
        return self.H.mv(v, scales)

    def draws(self, n: int, scales: Float[Tensor, " g"], generator: torch.Generator) -> Float[Tensor, "n p"]:
        return self.H.draws(n, scales, generator)

    def diagonals(self) -> Float[Tensor, "g p"]:
        return self._diagonals

    # Cached: it takes a pass over the data.
    @cached_property
    def _diagonals(self) -> Float[Tensor, "g p"]:
        """diag H_g (g, p) for each part, exact, by one more pass over the data."""
        found = estimate(
            self.H.jacobian.linearised,
            self.H.likelihood,
            self.H.jacobian.source,
            sites=self.H.sites,
            structure=Diag(),
            fisher=self.H.fisher,
            chunk_floats=_ROW_FLOATS,
            outputs=self.H.outputs,
        )
        return torch.stack([part.diagonal() for part in found.parts])
