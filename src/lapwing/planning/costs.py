"""One line per structure: what it keeps, what it takes, and how many gradient epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from lapwing.curvature import Empirical, Exact, Fisher, Sampled, Structure, Survey, Trial, Workload
from lapwing.planning.budget import chunk_floats
from lapwing.planning.choice import Needs, name_of
from lapwing.planning.kind import Kind, settled
from lapwing.planning.rehearsal import Rehearsal


@dataclass(frozen=True)
class Line:
    """A structure on some parameters: how it covers them, and its cost. Bytes are above the model and the data."""

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
class Question(Trial):
    """Some parameters of a model, and what is to be done with them."""

    params: str
    needs: Needs
    rehearsal: Rehearsal
    kind: Kind  # of curvature; what `auto` takes depends on the structure
    n_inputs: int
    forward_macs: int  # multiplications of one forward pass of the whole network, per datum
    through_body: bool  # whether columns go through the whole network, not the output layer alone

    @property
    def survey(self) -> Survey:
        return self.needs.survey

    @property
    def fisher(self) -> Fisher:
        assert isinstance(self.kind, Fisher)  # `line` settles it first
        return self.kind

    @cached_property
    def work(self) -> Workload:
        columns = n_columns(self.rehearsal, self.fisher)
        return replace(self.needs.work, columns=columns, forward_macs=self.forward_macs, through_body=self.through_body)

    def line(self, structure: Structure) -> Line:
        """What it keeps and takes, with the kind of curvature that goes with it."""
        structure = self.needs.settled(structure)
        return replace(self, kind=settled(self.kind, structure, self.needs)[0])._line(structure)

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
        """To store, at the peak of a fit, at the peak of a prediction; what does not fit is not tried."""
        stored, needed = structure.stored_bytes(self.work), structure.needed_bytes(self.work)
        return (stored, needed, needed) if needed > self.needs.budget else structure.peak_bytes(self.work, self)

    def tried(self, structure: Structure) -> tuple[int, int]:
        rows = chunk_floats(self.needs.budget, self.needs.needed_bytes(structure))
        columns = -(-self.work.columns // self.needs.n_parts)
        return self.rehearsal.peaks(structure, rows, columns, self.n_inputs)


def n_columns(rehearsal: Rehearsal, fisher: Fisher) -> int:
    """Columns of SᵀJ per datum that a kind of curvature takes, of all parts."""
    if isinstance(fisher, Sampled):
        return fisher.n_draws * rehearsal.n_parts
    if isinstance(fisher, Empirical):
        return rehearsal.sites.t
    return rehearsal.sites.t * rehearsal.roots_per_site


def forward_macs(survey: Survey) -> int:
    return max(1, sum(tile.macs for tile in survey.tiles))


def pass_macs(survey: Survey, n: int) -> float:
    """Multiplications of a forward and backward pass over n data; infinite where they cannot be told from the tiles.

    Layers that are not inferred, or whose Jacobian has no rule, have no tile with their multiplications.
    """
    linearised = survey.linearised
    whole = len(survey.layout.names) == len(linearised.network.tensors) - len(linearised.network.buffers)
    return 3.0 * forward_macs(survey) * n if whole and not linearised.rest.names else inf
