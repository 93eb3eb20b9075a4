"""The interface of a structure: which entries of the curvature are kept, and what that costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lapwing.curvature.accumulator import AccumulatorFactory
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.workload import Workload
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature

PRODUCT = 5  # cost of a product with H in forward passes: about three for the JVP, two for the VJP


@dataclass(frozen=True, eq=False)
class PassPlan:
    """How to run the pass: what is accumulated, over which data, and by what the prior must be rescaled."""

    factory: AccumulatorFactory | None  # None: only the fit statistics
    data: Source
    prior_scale: float = 1.0  # prior rescaling when `data` are a subset


class Trial(ABC):
    """A trial run of the start of a fit and of a prediction, to measure their memory."""

    @abstractmethod
    def measured_bytes(self, structure: Structure) -> tuple[int, int]:
        """Bytes at the peak of a fit and of a prediction, posterior included."""

    @abstractmethod
    def peak_bytes(self, structure: Structure) -> tuple[int, int, int]:
        """Bytes to store, at the peak of a fit, at the peak of a prediction. Structures that cannot fit are not run."""


class Structure(AccumulatorFactory, ABC):
    """Which entries of H are kept. Attributes and methods tell planning, tuning, storage and ranks what they need."""

    additive: bool = False  # whether curvatures of two sets of data add up exactly to that of both
    resumable: bool = False  # whether unfinished sums can be stored in a checkpoint
    by_products: bool = False  # whether it is computed from products H v, one pass each, not from a sum over rows
    streams: bool = False  # whether the posterior needs passes over the data for every product
    whole_tensors: bool = False  # whether it needs whole parameter tensors, so that no single weights can be selected
    takes_any_prior: bool = True  # whether every weight may have its own prior precision
    sketches: bool = False  # whether `fisher="auto"` may use random combinations of a datum's outputs (`Signs`)
    file_values: tuple[type, ...] = ()  # dataclasses in its curvature that only this structure needs in files
    most_rows: int = 1 << 60  # outputs predicted at a time
    exact: bool = False  # whether H is kept without approximation
    all_data: bool = True  # whether the evidence is that of all data, not of a subset
    n_points: int | None = None  # size of the subset of the data, if one is used
    moves_mean: bool = False  # whether the predictive mean is one Newton step from the network
    states_prior: bool = False  # whether an untuned prior is normal use, about which `diagnose()` does not warn

    @property
    def described(self) -> str:
        """A name that tells posteriors of different structures apart."""
        return type(self).__name__.lower()

    def prepared(self, sweep: Pass, data: Source) -> PassPlan:
        """Plan the pass; structures that select data points look at the data here. Most need not."""
        return PassPlan(self.summed, data)

    @property
    def sums_rows(self) -> bool:
        """Whether it is a sum over the rows SᵀJ of all data, for any likelihood."""
        return not self.by_products

    def check_more_data(self) -> None:
        """Raise if the curvature of more data cannot be added."""

    @property
    def summed(self) -> Structure | None:
        """The structure that the first pass accumulates: this one, or a preconditioner; None by products."""
        return None if self.by_products else self

    def from_products(self, H: GaussNewton, n_parts: int, first_pass: Sequence[Curvature]) -> Sequence[Curvature]:
        """Compute the parts from products with H; `first_pass` is what the first pass accumulated."""
        raise NotImplementedError(f"{type(self).__name__} is a sum over rows.")

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> Structure:
        """The same structure with open choices (such as an unset rank) made for `floats` numbers of memory."""
        return self

    @abstractmethod
    def stored_floats(self, layout: ParamLayout) -> int:
        """Upper bound of the numbers stored after the fit."""

    def working_floats(self, layout: ParamLayout) -> int:
        """Numbers needed in addition while products are computed."""
        return 0

    def stored_bytes(self, work: Workload) -> int:
        """Bytes of the curvature itself."""
        return 8 * work.n_parts * self.stored_floats(work.layout)

    def needed_bytes(self, work: Workload) -> int:
        """Bytes of the curvature with what is derived once and stored: the sum of the parts and its factor."""
        kept = self.stored_bytes(work) * (work.n_parts + 2) // work.n_parts
        return kept + 8 * self.working_floats(work.layout)

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        """Bytes to store, at the peak of a fit, at the peak of a prediction; in addition to the model and the data."""
        return self.stored_bytes(work), *trial.measured_bytes(self)

    @property
    def trial_structure(self) -> Structure:
        """The structure that a trial run fits instead; `second_pass_bytes` are added to its result."""
        return self

    def sum_bytes(self, work: Workload) -> int:
        """Bytes of the accumulators during a trial run."""
        return 8 * work.n_parts * (self.stored_floats(work.layout) + work.p)

    def second_pass_bytes(self, work: Workload) -> int:
        """Bytes held by a second pass over the data besides the result of the first."""
        return 0

    def decomposition_bytes(self, work: Workload) -> int:
        """Peak bytes of factorising the precision."""
        return 0

    def predicting_bytes(self, work: Workload, piece: int) -> int:
        """Bytes of a prediction besides the curvature; `piece` is what one piece of the inputs takes."""
        return 24 * self.stored_floats(work.layout) + piece

    def fit_macs(self, work: Workload) -> float:
        """Multiplications per datum: forward pass, gradient of the log likelihood, rows SᵀJ, and accumulating them."""
        return work.pass_macs + work.dense_row_macs + work.columns * self.stored_floats(work.layout) / 2

    def coverage(self, work: Workload) -> str:
        """What is kept of the parameters, for the table of `lw.plan`."""
        return f"{self.stored_floats(work.layout):,} numbers"

    @property
    def smaller(self) -> str:
        """How the structure could take less memory, for the error message when it does not fit."""
        return ""

    @abstractmethod
    def row_floats(self, sizes: RowSizes) -> int:
        """Numbers per row SᵀJ while it is accumulated or contracted."""

    def predicted_floats(self, sizes: RowSizes) -> int:
        """Numbers per row of J while outputs are predicted."""
        return self.row_floats(sizes)
