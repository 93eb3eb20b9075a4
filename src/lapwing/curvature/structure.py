"""Structures: which entries of the curvature are kept, and what that costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.summation import Summation
from lapwing.curvature.workload import Workload
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature

PRODUCT = 5  # forward passes that a product with H takes: three forward with tangents, two backward


@dataclass(frozen=True, eq=False)
class Work:
    """How which data are added up, and what the prior must be multiplied by to go with them."""

    summation: Summation | None  # None: nothing but the statistics
    data: Source
    prior_scale: float = 1.0


class Trial(ABC):
    """The beginning of a fit and of a prediction, done to see what they take."""

    @abstractmethod
    def tried(self, structure: Structure) -> tuple[int, int]:
        """Bytes at the peak of a fit and of a prediction, the posterior included."""

    @abstractmethod
    def peak_bytes(self, structure: Structure) -> tuple[int, int, int]:
        """To store, at the peak of a fit, at the peak of a prediction; what does not fit is not tried."""


class Structure(Summation, ABC):
    """A choice of which entries of H are kept."""

    additive: bool = False  # whether the curvatures of two sets of data add up to that of both, exactly
    resumable: bool = False  # whether its unfinished sums can be written down
    by_products: bool = False  # whether it comes from products with H, pass by pass, not from a sum over rows
    streams: bool = False  # whether its curvature goes back to the data for every product
    whole_tensors: bool = False  # whether it needs whole tensors: no single weights of a layer
    takes_any_prior: bool = True  # whether every weight may have a prior precision of its own
    sketches: bool = False  # whether `fisher="auto"` may add up random combinations of a datum's outputs
    file_values: tuple[type, ...] = ()  # frozen values in its curvature that files hold for this structure alone
    most_rows: int = 1 << 60  # of outputs that are predicted at a time
    exact: bool = False  # whether nothing of H is lost
    all_data: bool = True  # whether the evidence is that of all data
    n_points: int | None = None  # data that stand for all, where the structure chose some
    moves_mean: bool = False  # whether predictions are one Newton step from the network
    states_prior: bool = False  # whether it is used with the prior as it is given, so that an untuned one is no mistake

    @property
    def described(self) -> str:
        """What posteriors of different structures are told apart by."""
        return type(self).__name__.lower()

    def prepared(self, sweep: Pass, data: Source) -> Work:
        """A look at the data before the pass, for structures that must know them; most need none."""
        return Work(self.summed, data)

    @property
    def sums_rows(self) -> bool:
        """Whether it is a sum over the rows of all data, under any likelihood terms."""
        return not self.by_products

    def check_more_data(self) -> None:
        """Raise where the curvature of more data cannot be added."""

    @property
    def summed(self) -> Structure | None:
        """The structure that the first pass sums over rows: this one, unless it comes from products alone."""
        return None if self.by_products else self

    def from_products(self, H: GaussNewton, n_parts: int, near: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts of the curvature, where they come from products; `near` is what the first pass summed."""
        raise NotImplementedError(f"{type(self).__name__} is a sum over rows.")

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> Structure:
        """The same with what it leaves to the memory decided: so many numbers are allowed."""
        return self

    @abstractmethod
    def stored_floats(self, layout: ParamLayout) -> int:
        """Numbers kept after the fit, at most."""

    def working_floats(self, layout: ParamLayout) -> int:
        """Numbers taken besides while products are worked on."""
        return 0

    def stored_bytes(self, work: Workload) -> int:
        """The curvature itself."""
        return 8 * work.n_parts * self.stored_floats(work.layout)

    def needed_bytes(self, work: Workload) -> int:
        """The curvature with what is derived from it once and kept: the sum of the parts and its factor."""
        kept = self.stored_bytes(work) * (work.n_parts + 2) // work.n_parts
        return kept + 8 * self.working_floats(work.layout)

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        """To store, at the peak of a fit, at the peak of a prediction; above the model and the data."""
        return self.stored_bytes(work), *trial.tried(self)

    @property
    def tried_as(self) -> Structure:
        """What a trial fits in its place; `second_pass_bytes` come on top."""
        return self

    def sum_bytes(self, work: Workload) -> int:
        """Of the sums while a fit is tried."""
        return 8 * work.n_parts * (self.stored_floats(work.layout) + work.p)

    def second_pass_bytes(self, work: Workload) -> int:
        """What a second pass over the data holds besides the result of the first."""
        return 0

    def decomposition_bytes(self, work: Workload) -> int:
        """What factorising the precision takes at its peak."""
        return 0

    def predicting_bytes(self, work: Workload, piece: int) -> int:
        """What predictions hold besides the curvature, where a piece of the inputs takes so many bytes."""
        return 24 * self.stored_floats(work.layout) + piece

    def fit_macs(self, work: Workload) -> float:
        """Multiplications per datum: forward, gradient of the log likelihood, columns of SᵀJ, and adding them up."""
        return work.pass_macs + work.dense_row_macs + work.columns * self.stored_floats(work.layout) / 2

    def coverage(self, work: Workload) -> str:
        """What it keeps of these parameters, for the table of `lw.plan`."""
        return f"{self.stored_floats(work.layout):,} numbers"

    @property
    def smaller(self) -> str:
        """How the same structure takes less memory, for the message that refuses it."""
        return ""

    @abstractmethod
    def row_floats(self, sizes: RowSizes) -> int:
        """Numbers one row SᵀJ takes while it is added or contracted."""

    def predicted_floats(self, sizes: RowSizes) -> int:
        """Numbers one row of J takes while outputs are predicted."""
        return self.row_floats(sizes)
