"""The rows of `lw.plan`: per structure, what it keeps, its memory, and its time in gradient epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from lapwing.curvature import Empirical, Exact, Fisher, ModelSummary, Sampled, Structure, Trial, Workload
from lapwing.planning.budget import chunk_floats
from lapwing.planning.choice import Needs, name_of
from lapwing.planning.kind import Kind, resolved
from lapwing.planning.trial_run import TrialRun


@dataclass(frozen=True)
class Line:
    """The cost of a structure on some parameters. Bytes are in addition to the model and the data."""

    structure: str
    params: str
    p: int
    how: str
    exact: bool
    stored_bytes: int
    fit_bytes: int
    predict_bytes: int
    gradient_epochs: float
    fits: bool


@dataclass(frozen=True, eq=False)
class CostQuery(Trial):
    """Some parameters of a model, and how they would be fitted and used for predictions."""

    params: str
    needs: Needs
    trial_run: TrialRun
    kind: Kind  # kind of Fisher; "auto" depends on the structure
    n_inputs: int
    forward_macs: int  # multiplications of a forward pass per datum
    through_body: bool  # False if only the output layer is differentiated

    @property
    def summary(self) -> ModelSummary:
        return self.needs.summary

    @property
    def fisher(self) -> Fisher:
        assert isinstance(self.kind, Fisher)  # resolved by `line`
        return self.kind

    @cached_property
    def work(self) -> Workload:
        columns = n_columns(self.trial_run, self.fisher)
        return replace(self.needs.work, columns=columns, forward_macs=self.forward_macs, through_body=self.through_body)

    def line(self, structure: Structure) -> Line:
        """Coverage and cost of a structure, with the kind of Fisher that it gets."""
        structure = self.needs.resolved(structure)
        return replace(self, kind=resolved(self.kind, structure, self.needs)[0])._line(structure)

    def _line(self, structure: Structure) -> Line:
        stored, fit, predict = self.peak_bytes(structure)
        return Line(
            name_of(structure),
            self.params,
            self.needs.p,
            structure.coverage(self.work),
            structure.exact and isinstance(self.fisher, Exact),
            stored,
            fit,
            predict,
            round(structure.fit_macs(self.work) / (3 * self.forward_macs), 2),
            self.needs.fits(structure) and max(fit, predict) <= self.needs.budget,
        )

    def peak_bytes(self, structure: Structure) -> tuple[int, int, int]:
        """Bytes to store, at the peak of a fit, at the peak of a prediction. What cannot fit is not run."""
        stored, needed = structure.stored_bytes(self.work), structure.needed_bytes(self.work)
        return (stored, needed, needed) if needed > self.needs.budget else structure.peak_bytes(self.work, self)

    def measured_bytes(self, structure: Structure) -> tuple[int, int]:
        # The same number of rows at a time as the fit itself would choose.
        rows = chunk_floats(self.needs.budget, self.needs.needed_bytes(structure))
        columns = -(-self.work.columns // self.needs.n_parts)
        return self.trial_run.peaks(structure, rows, columns, self.n_inputs)


def n_columns(trial_run: TrialRun, fisher: Fisher) -> int:
    """Columns of S per datum for a kind of Fisher, summed over parts."""
    if isinstance(fisher, Sampled):
        return fisher.n_draws * trial_run.n_parts
    if isinstance(fisher, Empirical):
        return trial_run.sites.t
    return trial_run.sites.t * trial_run.roots_per_site


def forward_macs(summary: ModelSummary) -> int:
    """Multiplications of a forward pass per datum; at least 1, as it is a divisor."""
    return max(1, sum(block.macs for block in summary.blocks))


def pass_macs(summary: ModelSummary, n: int) -> float:
    """Multiplications of a forward and backward pass over n data; infinite where the summary does not tell.

    It has no multiplications of layers that are not inferred, or whose Jacobian has no rule.
    """
    linearised = summary.linearised
    whole = len(summary.layout.names) == len(linearised.network.tensors) - len(linearised.network.buffers)
    return 3.0 * forward_macs(summary) * n if whole and not linearised.rest.names else inf
