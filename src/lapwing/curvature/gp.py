"""The Gaussian process view: the posterior over functions, from kernel blocks k(x, x') = J(x) P₀⁻¹ J(x')ᵀ.

    V(x) = k(x, x) − k(x, X) S (I + Sᵀ K S)⁻¹ Sᵀ k(X, x),   S Sᵀ = Λ

With all data and all covariances between outputs it is the Gaussian over weights seen from the other side, and equal to
it. The choices here make it smaller: fewer data, fewer functions, or no covariances between outputs.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Integral

import torch

from lapwing.curvature.estimate import Sums, summed_parts
from lapwing.curvature.full import DenseSum, Full, gram_macs, rows_or_matrix, rows_or_matrix_bytes
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.points import (
    AtRandom,
    Criterion,
    MostInformative,
    Points,
    choose_points,
)
from lapwing.curvature.separate import Separate, diagonal_roots, softmax_roots
from lapwing.curvature.structure import Structure, Trial, Work
from lapwing.curvature.subspace import BoundedSum, Given, Projected, ProjectedSum, Subspace
from lapwing.curvature.summation import Accumulator, Summation
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Categorical
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.runtime import distributed

_CRITERIA: dict[str, Criterion] = {"random": AtRandom(), "informative": MostInformative()}
_MOST_ROWS = 1024  # of outputs predicted at a time: kernels between them and the data stay small
_MOST_SEPARATE = 8 * _MOST_ROWS  # where outputs have kernels of their own


@dataclass(frozen=True)
class GP(Structure):
    """A posterior over functions.

    `n_points=None` uses all data exactly. With a number, `method` says how the points stand for the data: "subset"
    (the rest is left out; `sod_scale` says what makes up for it), or all data seen through functions of the points,
    "nystrom" (the `rank` leading eigenfunctions) and "inducing" (all of them, and the evidence is a lower bound).
    `coupling`: covariances between outputs kept ("full"), dropped in the kernel ("independent"), or in the likelihood
    too ("diag"). `points`: "random" or "informative" (largest tr Λ). `mean`: predictions around the network's outputs,
    or one Newton step from them ("newton").
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
        """Whether all data are seen through functions of the points."""
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
        what = [] if self.n_points is None else [f"{self.n_points} points", self.method]
        what += [] if self.coupling == "full" else [f"{self.coupling} outputs"]
        return f"gp ({', '.join(what)})" if what else "gp"

    def prepared(self, sweep: Pass, data: Source) -> Work:
        if self.n_points is None:
            return Work(self._on_all(sweep), data)
        points = choose_points(sweep, data, self.n_points, _CRITERIA[self.points])
        if self.sparse:
            subspace = Subspace.spanned(_jacobian_at(sweep, points), sweep.P0, self.rank)
            return Work(Projected(subspace, BoundedSum if self.method == "inducing" else ProjectedSum), data)
        return self._subset(sweep, data, points)

    def _on_all(self, sweep: Pass) -> Summation:
        if self.coupling == "full" or sweep.sites.c == 1:  # one output has nothing to be coupled with
            return Full()
        roots = softmax_roots if self.coupling == "independent" else diagonal_roots
        tied = self.coupling == "independent" and isinstance(sweep.likelihood, Categorical)
        return Separate(roots, sweep.sites, tied)

    def _subset(self, sweep: Pass, data: Source, points: Points) -> Work:
        summation, weight = self._on_all(sweep), points.n_seen / points.n
        if self.sod_scale != "likelihood":
            return Work(summation, lambda: points.batches, weight if self.sod_scale == "prior" else 1.0)
        # Curvature of the points times N/M; log likelihood and gradient of all data, which cost one pass.
        parts = summed_parts(Sums(sweep, summation), Work(summation, lambda: points.batches))
        factor = torch.tensor(weight, dtype=torch.float64)
        return Work(Given(tuple(part.scaled(factor) for part in parts)), data)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DenseSum(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p**2

    def kernel_bytes(self, work: Workload) -> tuple[int, int]:
        """Rows of the points, and kernels between them: of all rows, or of each output's. (0, 8 P²) where the matrix
        is the smaller side; nothing where the data do not say how many they are."""
        known = [n for n in (self.n_points, work.n_data) if n is not None]
        n, k = min(known, default=0), work.k
        if self.coupling == "full" and not self.sparse and n * k >= work.p:
            return 0, 8 * work.p**2
        kernels = (n * k) ** 2 if self.coupling == "full" else k * n**2
        return n * work.survey.row_bytes, 8 * kernels

    def stored_bytes(self, work: Workload) -> int:
        return work.n_parts * sum(self.kernel_bytes(work))

    def needed_bytes(self, work: Workload) -> int:
        """With a scaled kernel and its factor; rows stay as they are."""
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
        # Every piece of the inputs meets all points, so pieces are larger than where each is on its own.
        return max(1, sizes.factored // 4)

    def predicted_floats(self, sizes: RowSizes) -> int:
        # Pressed together: all points are written out for every piece, so the fewer pieces the better.
        return self.row_floats(sizes) if self.coupling == "full" else max(1, sizes.factored // 8)


def _check_count(field: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputTypeError(f"GP({field}=...): expected a whole number or None, got {type(value).__name__} {value!r}.")
    if int(value) < 1:
        raise InputError(f"GP({field}=...): expected at least 1, got {value}.")


def _jacobian_at(sweep: Pass, points: Points) -> Jacobian:
    """J of the points of all ranks, as factors."""
    with closing(replace(sweep, summation=Given(())).pieces(points.batches)) as traced:
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
