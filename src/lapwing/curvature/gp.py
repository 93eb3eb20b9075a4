"""Function-space (Gaussian process) posterior, from kernel blocks k(x, x') = J(x) P₀⁻¹ J(x')ᵀ.

    V(x) = k(x, x) − k(x, X) S (I + Sᵀ K S)⁻¹ Sᵀ k(X, x),   S Sᵀ = Λ

With all data and all covariances between outputs this equals the posterior over weights (Woodbury). The options make
it cheaper: a subset of the data, a low-rank kernel, or no covariances between outputs.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral

import torch

from lapwing.curvature.accumulator import Accumulator, AccumulatorFactory
from lapwing.curvature.estimate import PassState, run_passes
from lapwing.curvature.full import DenseAccumulator, Full, gram_macs, rows_or_matrix, rows_or_matrix_bytes
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.points import (
    AtRandom,
    Criterion,
    MostInformative,
    Points,
    choose_points,
)
from lapwing.curvature.separate import Separate, diagonal_roots, softmax_roots
from lapwing.curvature.structure import PassPlan, Structure, Trial
from lapwing.curvature.subspace import BoundedAccumulator, Precomputed, Projected, ProjectedAccumulator, Subspace
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Categorical
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.runtime import distributed

_CRITERIA: dict[str, Criterion] = {"random": AtRandom(), "informative": MostInformative()}
_MOST_ROWS = 1024  # outputs predicted at a time: bounds the kernel between them and the data
_MOST_SEPARATE = 8 * _MOST_ROWS  # the same if every output has a kernel of its own, which is smaller


@dataclass(frozen=True)
class GP(Structure):
    """A posterior over functions: a Gaussian process whose kernel is that of the linearised network.

    `n_points=None` uses all data exactly. With a number, `method` is one of

    - "subset": only these points; `sod_scale` rescales the likelihood or the prior to make up for the other data;
    - "nystrom": all data, projected on the `rank` leading eigenfunctions of the kernel at the points;
    - "inducing": all data, projected on all functions of the points; the evidence is a lower bound.

    `coupling` keeps covariances between outputs ("full"), drops them in the kernel ("independent"), or in kernel and
    likelihood ("diag"). `points` are selected at "random" or are the most "informative" (largest tr Λ). `mean` centres
    predictions at the network's outputs ("network") or one Newton step from them ("newton").
    """

    n_points: int | None = None
    method: str = "subset"
    coupling: str = "full"
    points: str = "random"
    sod_scale: str = "likelihood"
    rank: int | None = None
    mean: str = "network"

    def __post_init__(self) -> None:
        _check_count("n_points", self.n_points)
        _check_count("rank", self.rank)
        _check_word("method", self.method, ("subset", "nystrom", "inducing"))
        _check_word("coupling", self.coupling, ("full", "independent", "diag"))
        _check_word("points", self.points, tuple(_CRITERIA))
        _check_word("sod_scale", self.sod_scale, ("prior", "likelihood", "none"))
        _check_word("mean", self.mean, ("network", "newton"))
        self._check_together()

    def _check_together(self) -> None:
        """Raise for options that exclude each other."""
        if self.sparse and self.n_points is None:
            raise InputError(f'GP(method="{self.method}") needs n_points, the number of points it is made of.')
        if self.sparse and self.coupling != "full":
            raise InputError(
                f'GP(method="{self.method}") keeps the covariances between outputs; coupling="{self.coupling}" goes '
                'with all data or method="subset".'
            )
        if self.rank is not None and self.method != "nystrom":
            raise InputError('GP(rank=...) is the number of eigenfunctions of method="nystrom".')
        if self.mean == "newton" and self.coupling != "full":
            raise InputError(
                f'GP(mean="newton") moves the one set of weights behind all outputs; with coupling="{self.coupling}" '
                'there is none. Use coupling="full".'
            )

    # The prior defines the kernel, so an explicit or default prior is a modelling choice here.
    states_prior = True

    @property
    def sums_rows(self) -> bool:
        return False

    @property
    def moves_mean(self) -> bool:  # type: ignore[override]
        return self.mean == "newton"

    def check_more_data(self) -> None:
        if self.n_points is not None:
            raise StructureError(
                f"updated: the {self.n_points} points of this GP were chosen among the data of the fit, and more data "
                "would ask for others. Fit on all the data together, or use lw.GP() without n_points."
            )

    @property
    def most_rows(self) -> int:  # type: ignore[override]
        return _MOST_ROWS if self.coupling == "full" else _MOST_SEPARATE

    @property
    def sparse(self) -> bool:
        """Whether all data are projected on functions of the points (Nyström or inducing points)."""
        return self.method != "subset"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.n_points is None and self.coupling == "full"

    @property
    def additive(self) -> bool:  # type: ignore[override]
        return self.exact

    @property
    def resumable(self) -> bool:  # type: ignore[override]
        return self.exact

    @property
    def all_data(self) -> bool:  # type: ignore[override]
        return self.n_points is None or self.sparse or self.sod_scale == "likelihood"

    @property
    def described(self) -> str:
        # Merging and comparing posteriors must tell these variants apart.
        what = [] if self.n_points is None else [f"{self.n_points} points", self.method]
        what += [] if self.coupling == "full" else [f"{self.coupling} outputs"]
        return f"gp ({', '.join(what)})" if what else "gp"

    def prepared(self, sweep: Pass, data: Source) -> PassPlan:
        # Nystrom and inducing points need J at the points before the pass over all data: it projects on them.
        if self.n_points is None:
            return PassPlan(self._on_all(sweep), data)
        points = choose_points(sweep, data, self.n_points, _CRITERIA[self.points])
        if self.sparse:
            subspace = Subspace.spanned(_jacobian_at(sweep, points), sweep.P0, self.rank)
            return PassPlan(
                Projected(subspace, BoundedAccumulator if self.method == "inducing" else ProjectedAccumulator), data
            )
        return self._subset(sweep, data, points)

    def _on_all(self, sweep: Pass) -> AccumulatorFactory:
        """The accumulation over all given data, by `coupling`."""
        if self.coupling == "full" or sweep.sites.c == 1:  # a single output has no couplings to drop
            return Full()
        roots = softmax_roots if self.coupling == "independent" else diagonal_roots
        tied = self.coupling == "independent" and isinstance(sweep.likelihood, Categorical)
        return Separate(roots, sweep.sites, tied)

    def _subset(self, sweep: Pass, data: Source, points: Points) -> PassPlan:
        """Curvature of the selected points only, rescaled as `sod_scale` says."""
        factory, weight = self._on_all(sweep), points.n_seen / points.n
        if self.sod_scale != "likelihood":
            return PassPlan(factory, lambda: points.batches, weight if self.sod_scale == "prior" else 1.0)
        # N/M times the curvature of the points; log likelihood and gradient come from all data, in one forward-backward
        # pass.
        parts = run_passes(PassState(sweep, factory), PassPlan(factory, lambda: points.batches))
        factor = torch.tensor(weight, dtype=torch.float64)
        return PassPlan(Precomputed(tuple(part.scaled(factor) for part in parts)), data)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DenseAccumulator(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p**2

    def kernel_bytes(self, work: Workload) -> tuple[int, int]:
        """Bytes of the points' rows, and of the kernels: one of all rows, or one per output. (0, 8 P²) where the P × P
        matrix is smaller; 0 where the number of data is unknown."""
        known = [n for n in (self.n_points, work.n_data) if n is not None]
        n, k = min(known, default=0), work.k
        if self.coupling == "full" and not self.sparse and n * k >= work.p:
            return 0, 8 * work.p**2
        kernels = (n * k) ** 2 if self.coupling == "full" else k * n**2
        return n * work.summary.row_bytes, 8 * kernels

    def stored_bytes(self, work: Workload) -> int:
        return work.n_parts * sum(self.kernel_bytes(work))

    def needed_bytes(self, work: Workload) -> int:
        """The kernel, a scaled copy and its factor, and the rows."""
        return self.stored_bytes(work) + 2 * self.kernel_bytes(work)[1]

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        return rows_or_matrix_bytes(self, work, trial, work.n_rows, work.p)

    def fit_macs(self, work: Workload) -> float:
        return work.pass_macs + work.dense_row_macs + gram_macs(work, work.n_rows)

    def coverage(self, work: Workload) -> str:
        return rows_or_matrix(work.n_rows)

    @property
    def smaller(self) -> str:
        return "fewer points, lw.GP(n_points=...)"

    def row_floats(self, sizes: RowSizes) -> int:
        # Each piece of the inputs is contracted with all points, which costs more memory than its own rows.
        return max(1, sizes.factored // 4)

    def predicted_floats(self, sizes: RowSizes) -> int:
        # Without couplings all points are expanded once for every piece: fewer, larger pieces are faster.
        return self.row_floats(sizes) if self.coupling == "full" else max(1, sizes.factored // 8)


def _check_count(field: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputTypeError(f"GP({field}=...): expected a whole number or None, got {type(value).__name__} {value!r}.")
    if int(value) < 1:
        raise InputError(f"GP({field}=...): expected at least 1, got {value}.")


def _jacobian_at(sweep: Pass, points: Points) -> Jacobian:
    """J (m, k, p) at the points of all ranks, as factors."""
    with closing(replace(sweep, factory=Precomputed(())).pieces(points.batches)) as traced:
        own = [trace.jacobian() for trace, _, _ in traced]
    pieces = (
        own
        if not distributed.is_distributed()
        else [J for some in distributed.gathered([J.formed() for J in own]) for J in some]
    )
    return pieces[0].concatenated(pieces[1:])


def _check_word(field: str, word: object, known: tuple[str, ...]) -> None:
    if word not in known:
        listed = ", ".join(f'"{k}"' for k in known)
        raise InputError(f"GP: {field} is one of {listed}, got {word!r}.")
