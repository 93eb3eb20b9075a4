"""A normalised group: its tensors, its kind, and the numerical evidence for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["exact", "statistical", "structural"]


@dataclass(frozen=True)
class GroupEvidence:
    """Relative change of the outputs when the group is multiplied by k, and the norms that absorb the scale.

    Several groups are scaled at the same time, each by a slightly different factor. None means not measured, as no
    input was available.
    """

    e_half: float | None  # ‖f(k θ_g) − f‖ / ‖f‖ at k ≈ ½, with ε and running statistics scaled along with their input
    e_double: float | None  # the same for k ≈ 2
    e_jacobian: float | None  # ‖J_g θ_g‖ / ‖f‖ in eval mode; about 1 for BatchNorm, whose running statistics are fixed
    layers: tuple[str, ...]  # the normalisation layers whose input scales with the group


@dataclass(frozen=True)
class NormalisedGroup:
    """Tensors whose common scale does not change the network's function.

    "exact": f(k θ_g) = f(θ_g) for every k > 0. "statistical": the same if the running statistics of BatchNorm are
    scaled along, as they would be by further training. "structural": from the network's graph, not tested.
    """

    names: tuple[str, ...]
    kind: Kind
    evidence: GroupEvidence

    @property
    def title(self) -> str:
        """A name for reports: "normalised: body.0.weight, body.0.bias"."""
        return f"normalised: {listed(self.names)}"

    @property
    def sentence(self) -> str:
        e = self.evidence
        by = listed(e.layers) or "the layer itself"
        if e.e_half is None or e.e_double is None or e.e_jacobian is None:
            return f"structural: {by} follows, but no input was at hand to confirm that it absorbs the scale."
        along = " with its running statistics" if self.kind == "statistical" else ""
        return (
            f"{self.kind}: {by}{along} absorbs the scale; multiplied by ½ and 2 the outputs change by "
            f"{e.e_half:.1e} and {e.e_double:.1e} of their norm; ‖Jθ‖/‖f‖ = {e.e_jacobian:.1e}."
        )


def listed(names: tuple[str, ...]) -> str:
    """The first few names, and how many there are."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])}, … ({len(names)} in all)"
