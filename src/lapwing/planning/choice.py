"""What a structure needs, and which one `auto` takes; refusals come before any work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lapwing.curvature import Block, Diag, Full, Kron, Structure, Survey, Workload
from lapwing.errors import InputError, StructureError
from lapwing.operators import GroupedDiagonal
from lapwing.planning.budget import chunk_floats, in_words
from lapwing.planning.effort import Effort

MOST_FULL = 5_000  # parameters up to which `auto` considers the full matrix
MOST_CUBES = 10**12  # Σ q (i³ + o³) up to which `auto` takes Kronecker factors: about ten minutes on one core
SHORT = 1.0  # seconds, of a fit and the factorisations of tuning, that need no excuse
MOST_FIT_EPOCHS = 6  # gradient epochs that a fit may take where it takes longer
MOST_EPOCHS = 60  # gradient epochs that fit and factorisations may take together: about what training takes
LONG_EIGEN = 60.0  # seconds of eigendecompositions that need no excuse


@dataclass(frozen=True)
class Choice:
    """A structure, how many numbers its rows may take at a time, and why."""

    structure: Structure
    chunk_floats: int
    why: str


@dataclass(frozen=True, eq=False)
class Needs:
    """What is known before the pass: the model's tiles, the parts of the curvature, the budget and the prior."""

    survey: Survey
    n_parts: int
    budget: int
    P0: GroupedDiagonal | None = None  # None: one precision for all
    n_data: int | None = None  # as announced; None when the data do not say

    @property
    def p(self) -> int:
        return self.survey.layout.p

    @cached_property
    def work(self) -> Workload:
        return Workload(self.survey, self.n_parts, self.n_data, self.budget)

    def needed_bytes(self, structure: Structure) -> int:
        """The curvature with what is derived from it once and kept."""
        return structure.needed_bytes(self.work)

    def settled(self, structure: Structure) -> Structure:
        """The structure as it would be fitted: a rank that is left open is what the budget allows."""
        return structure.within(self.survey.layout, self.n_parts, self.budget // 8)

    def fits(self, structure: Structure) -> bool:
        return self.needed_bytes(structure) <= self.budget

    @cached_property
    def effort(self) -> Effort | None:
        """How long structures take; None when the data do not say how many they are."""
        return None if self.n_data is None else Effort(self.survey, self.n_data)

    @property
    def full_takes_long(self) -> bool:
        """Whether the full matrix, with the factorisations of tuning, costs more than it should by default."""
        if self.effort is None:
            return False
        effort, columns = self.effort, self.survey.linearised.k
        fit = effort.seconds(effort.macs(Full(), columns))
        total, epoch = fit + effort.factorisation_seconds(columns), effort.epoch_seconds
        return total > SHORT and (fit > MOST_FIT_EPOCHS * epoch or total > MOST_EPOCHS * epoch)

    @property
    def eigen_takes_long(self) -> bool:
        """Whether the Kronecker factors take longer to decompose than they should by default."""
        if self.survey.cubes > MOST_CUBES:
            return True
        effort = self.effort
        return effort is not None and effort.eigen_seconds > max(LONG_EIGEN, MOST_EPOCHS * effort.epoch_seconds)

    @property
    def selected(self) -> bool:
        """Whether single entries of tensors are inferred: no structure of a layer is left then."""
        return self.survey.layout.selection is not None

    @cached_property
    def kron(self) -> Kron | None:
        """Kronecker blocks that can take the prior: it must be one precision on each."""
        P0 = self.P0
        if self.selected:
            return None
        if P0 is None or P0.isotropic:
            return Kron()
        layers = [tile for tile in self.survey.tiles if tile.maps]
        if all(P0.restricted(tile.whole).isotropic for tile in layers):
            return Kron()
        apart = all(P0.restricted(s).isotropic for tile in layers for s in tile.slices)
        return Kron(bias="separate") if apart else None


def choose(structure: Structure | None, needs: Needs) -> Choice:
    """Check the budget before any work starts; `structure=None` means choose."""
    structure, why = _taken(needs) if structure is None else (needs.settled(structure), "asked for")
    if not needs.fits(structure):
        raise InputError(_too_big(structure, needs))
    return Choice(structure, chunk_floats(needs.budget, needs.needed_bytes(structure)), why)


def refuse_factors_of_a_selection(structure: Structure | None) -> None:
    """Single weights of a layer have no Kronecker factors."""
    if structure is not None and structure.whole_tensors:
        raise StructureError(
            f'structure "{name_of(structure)}" needs whole tensors: a Kronecker product has no meaning for single '
            'weights of a layer. Use structure="full" (the default for a subnetwork), "block", "diag", '
            '"lowrank" or "matrixfree", or infer whole layers: params=[...].'
        )


def _taken(needs: Needs) -> tuple[Structure, str]:
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
    columns = needs.survey.linearised.k
    total = needs.effort.epochs(Full(), columns)
    total += needs.effort.factorisation_seconds(columns) / needs.effort.epoch_seconds
    return f"the full matrix of {parameters} would take about {total:,.0f} gradient epochs with tuning"


def _too_big(structure: Structure, needs: Needs) -> str:
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
