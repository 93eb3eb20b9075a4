"""What a structure needs, and which one `structure="auto"` takes. Refuses before any work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lapwing.curvature import Block, Diag, Full, Kron, ModelSummary, Structure, Workload
from lapwing.errors import InputError, StructureError
from lapwing.operators import GroupedDiagonal
from lapwing.planning.budget import chunk_floats, in_words
from lapwing.planning.effort import EIGEN_SECONDS, Effort

MOST_FULL = 5_000  # parameters up to which `auto` considers the full matrix
MOST_CUBES = 10**12  # Σ q (i³ + o³) up to which `auto` takes Kronecker factors: about ten minutes on one core
SHORT = 1.0  # seconds for fit and factorisations below which `auto` does not compare them with training
MOST_FIT_EPOCHS = 6  # gradient epochs that a longer fit may take
MOST_EPOCHS = 60  # gradient epochs that fit and factorisations may take together: about as long as training
LONG_EIGEN = 60.0  # seconds of eigendecompositions below which `auto` does not compare them with training


@dataclass(frozen=True)
class Choice:
    """A structure, how many numbers its rows may take at a time, and the reason."""

    structure: Structure
    chunk_floats: int
    why: str


@dataclass(frozen=True, eq=False)
class Needs:
    """What the choice depends on, known before the pass: parameter blocks, parts of the curvature, budget and prior."""

    summary: ModelSummary
    n_parts: int
    budget: int
    P0: GroupedDiagonal | None = None  # None: a single precision
    n_data: int | None = None  # None if the loader has no length

    @property
    def p(self) -> int:
        return self.summary.layout.p

    @cached_property
    def work(self) -> Workload:
        return Workload(self.summary, self.n_parts, self.n_data, self.budget)

    def needed_bytes(self, structure: Structure) -> int:
        """Bytes of the curvature, with what is derived from it once and stored."""
        return structure.needed_bytes(self.work)

    def resolved(self, structure: Structure) -> Structure:
        """The structure as it would be fitted: an open rank is set from the budget."""
        return structure.within(self.summary.layout, self.n_parts, self.budget // 8)

    def fits(self, structure: Structure) -> bool:
        return self.needed_bytes(structure) <= self.budget

    @cached_property
    def effort(self) -> Effort | None:
        """Estimated time of structures; None if the number of data is unknown."""
        return None if self.n_data is None else Effort(self.summary, self.n_data)

    @property
    def full_takes_long(self) -> bool:
        """Whether full curvature, with the factorisations of tuning, costs more than `auto` accepts."""
        if self.effort is None:
            return False
        effort, columns = self.effort, self.summary.linearised.k
        fit = effort.seconds(effort.macs(Full(), columns))
        total, epoch = fit + effort.factorisation_seconds(columns), effort.epoch_seconds
        return total > SHORT and (fit > MOST_FIT_EPOCHS * epoch or total > MOST_EPOCHS * epoch)

    @property
    def eigen_takes_long(self) -> bool:
        """Whether the eigendecompositions of Kronecker factors cost more than `auto` accepts."""
        cubes, effort = (self.kron or Kron()).cubes(self.work), self.effort
        if cubes > MOST_CUBES:
            return True
        return effort is not None and EIGEN_SECONDS * cubes > max(LONG_EIGEN, MOST_EPOCHS * effort.epoch_seconds)

    @property
    def selected(self) -> bool:
        """Whether single weights are inferred (a subnetwork): then layers have no Kronecker factors."""
        return self.summary.layout.selection is not None

    @cached_property
    def kron(self) -> Kron | None:
        """Kronecker factors if they can take the prior, which needs one precision per block; else None."""
        P0 = self.P0
        if self.selected:
            return None
        if P0 is None or P0.isotropic:
            return Kron()
        layers = [block for block in self.summary.blocks if block.maps]
        if all(P0.restricted(block.whole).isotropic for block in layers):
            return Kron()
        apart = all(P0.restricted(s).isotropic for block in layers for s in block.slices)
        return Kron(bias="separate") if apart else None


def choose(structure: Structure | None, needs: Needs) -> Choice:
    """Check the budget before any work; `structure=None` chooses automatically."""
    structure, why = _taken(needs) if structure is None else (needs.resolved(structure), "asked for")
    if not needs.fits(structure):
        raise InputError(_too_big(structure, needs))
    return Choice(structure, chunk_floats(needs.budget, needs.needed_bytes(structure)), why)


def refuse_factors_of_a_selection(structure: Structure | None) -> None:
    """Raise for structures with Kronecker factors if single weights are inferred."""
    if structure is not None and structure.whole_tensors:
        raise StructureError(
            f'structure "{name_of(structure)}" needs whole tensors: a Kronecker product has no meaning for single '
            'weights of a layer. Use structure="full" (the default for a subnetwork), "block", "diag", '
            '"lowrank" or "matrixfree", or infer whole layers: params=[...].'
        )


def _taken(needs: Needs) -> tuple[Structure, str]:
    """The automatic choice: full if small and affordable, else Kronecker factors, else the diagonal; with the
    reason."""
    parameters, budget = f"{needs.p:,} parameters", in_words(needs.budget)
    if needs.selected:
        return Full(), f"a subnetwork of {parameters} is chosen to be small enough for the full matrix"
    if needs.p <= MOST_FULL and needs.fits(Full()) and not needs.full_takes_long:
        return Full(), f"{parameters}: the full matrix is exact and affordable"
    no_full = _why_not_full(needs)
    if needs.kron is None:
        return Diag(), f"{no_full}, and Kronecker factors cannot take a prior with several precisions in one tensor"
    if not needs.fits(needs.kron):
        needed = in_words(needs.needed_bytes(needs.kron))
        return Diag(), f"{no_full}, and Kronecker factors would need {needed} of {budget}"
    if needs.eigen_takes_long:
        return Diag(), f"{no_full}, and decomposing the Kronecker factors of such wide layers would take too long"
    return needs.kron, f"{no_full}; Kronecker factors keep the correlations within each layer"


def _why_not_full(needs: Needs) -> str:
    parameters = f"{needs.p:,} parameters"
    if needs.p > MOST_FULL:
        return f"{parameters} are more than the {MOST_FULL:,} up to which the full matrix is taken"
    if not needs.fits(Full()):
        return f"the full matrix of {parameters} does not fit {in_words(needs.budget)}"
    assert needs.effort is not None
    columns = needs.summary.linearised.k
    total = needs.effort.epochs(Full(), columns)
    total += needs.effort.factorisation_seconds(columns) / needs.effort.epoch_seconds
    return f"the full matrix of {parameters} would take about {total:,.0f} gradient epochs with tuning"


def _too_big(structure: Structure, needs: Needs) -> str:
    """The error message, with the structures that would fit."""
    others: list[Structure] = [Block(), Diag()] if needs.selected else [Block(), Kron(), Diag()]
    smaller = [s for s in others if needs.needed_bytes(s) < needs.needed_bytes(structure)]
    fits = [f"{name_of(s)} would take {in_words(needs.needed_bytes(s))}" for s in smaller if needs.fits(s)]
    fits += [structure.smaller] if structure.smaller else []
    advice = ", ".join(fits) or 'infer fewer parameters, e.g. params="last_layer"'
    return (
        f"structure {name_of(structure)} on {needs.p} parameters needs {in_words(needs.needed_bytes(structure))}, more "
        f"than the budget of {in_words(needs.budget)}. Raise `memory`, or take less: {advice}."
    )


def name_of(structure: Structure) -> str:
    return type(structure).__name__.lower()
