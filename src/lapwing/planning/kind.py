"""Resolve `fisher="auto"`: the exact GGN if it is cheap, else an unbiased sketch of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.curvature import Exact, Fisher, Sampled, Signs, Structure
from lapwing.planning.choice import Needs
from lapwing.planning.effort import Effort

MOST_EPOCHS = 3.0  # estimate up to which `auto` is exact; measured fits take up to twice as long
MOST_SECONDS = 0.1  # estimated time up to which `auto` is exact, regardless of epochs
LEAST_ROWS = 1_000  # rows of a sketch; with fewer data, several draws per datum


@dataclass(frozen=True, eq=False)
class AutoFisher:
    """`fisher="auto"`, which is resolved once the structure is known."""

    generator: torch.Generator

    def resolved(self, structure: Structure, needs: Needs) -> tuple[Fisher, str]:
        """The kind of Fisher for a structure, and the reason."""
        columns = needs.summary.linearised.k
        if not structure.sketches:
            return Exact(), "exact curvature, as this structure is made from"
        if needs.summary.linearised.only_last and not needs.selected:
            return Exact(), "exact curvature, which the output layer has in closed form"
        effort = Effort(needs.summary, needs.n_data or 1)
        epochs = effort.epochs(structure, columns)
        outputs = f"{columns:,} output{'s' * (columns != 1)} per datum"
        if epochs <= MOST_EPOCHS:
            return Exact(), f"exact curvature: {outputs}, about {epochs:.2g} gradient epochs"
        if needs.n_data is not None and effort.seconds(effort.macs(structure, columns)) <= MOST_SECONDS:
            return Exact(), "exact curvature: the data are few enough for a fraction of a second"
        n_draws = -(-LEAST_ROWS // (needs.n_data or LEAST_ROWS))
        if n_draws >= columns:
            return Exact(), f"exact curvature: {outputs} are fewer than a sketch of so few data would need"
        saved = f"{outputs} would take about {epochs:.2g} gradient epochs, the sketch {{:.2g}}"
        draws = f"{n_draws} random combination{'s' * (n_draws > 1)} of the outputs per datum"
        why = f"sampled curvature, {draws}: {saved.format(effort.epochs(structure, n_draws))}"
        return Sampled(self.generator, n_draws, Signs()), why


Kind = Fisher | AutoFisher


def resolved(kind: Kind, structure: Structure, needs: Needs) -> tuple[Fisher, str]:
    """The requested kind, or the one that "auto" resolves to, with the reason."""
    return (kind, "") if isinstance(kind, Fisher) else kind.resolved(structure, needs)
