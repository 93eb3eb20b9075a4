"""Priors with one precision per normalised group.

The scale of a normalised group is arbitrary. With a precision shared with other parameters, evidence and predictions
would depend on that scale; with a precision of its own they do not (Antorán et al., 2022, second recommendation).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lapwing import priors
from lapwing.data import ModelInput
from lapwing.errors import InputError, warn
from lapwing.network.linearised import Linearised
from lapwing.network.module import Network
from lapwing.network.parameters import ParamLayout
from lapwing.network.rule_check import last_layer
from lapwing.priors.gaussian import GaussianPrior
from lapwing.priors.normalised.detect import NormStructure, norm_structure
from lapwing.priors.normalised.example_inputs import example_input
from lapwing.priors.normalised.structural import structural_groups

_NONE = "No normalised group was found: all parameters share one precision."


@dataclass(frozen=True)
class GroupRow:
    """One row of the table of a prior's groups."""

    name: str
    precision: float
    n_parameters: int
    tensors: tuple[str, ...]
    reason: str  # why these parameters share a precision of their own; empty if the user requested the groups


def normalised_prior(linearised: Linearised, x: ModelInput | None, prior: GaussianPrior) -> GaussianPrior:
    """An existing prior with one precision per normalised group, detected on the inputs x (None: on example inputs).

    New groups start at the geometric mean of their parameters' precisions; the prior mean is kept.
    """
    layout = linearised.layout  # detection needs complete tensors, even if only some entries are inferred
    fresh = grouped_by_norms(linearised.network, layout.whole, x, 1.0, 0.0).restricted(layout)
    return priors.regrouped(prior, fresh.on(prior.index.device))


def grouped_by_norms(
    network: Network, layout: ParamLayout, x: ModelInput | None, precision: Any, mean: Any
) -> GaussianPrior:
    """A precision for each normalised group, for all norm scales, all norm shifts, the last layer, and the remainder.

    A network without normalised groups gets a single precision.
    """
    given = example_input(network) if x is None else x
    if given is None:
        found = _unconfirmed(network, layout)
    else:
        found = norm_structure(network, layout, given)
    groups = list(_named(found, layout, _head(network.model, layout, given))) if found.groups else []
    if not groups:
        groups = [("all", layout.names, _NONE)]
    return priors.tensors_together(
        layout,
        {name: tensors for name, tensors, _ in groups},
        precision,
        mean,
        reasons=tuple(reason for _, _, reason in groups),
    )


def group_table(prior: GaussianPrior) -> tuple[GroupRow, ...]:
    """The groups of any prior as table rows."""
    reasons = prior.reasons or ("",) * len(prior.group_names)
    members: dict[int, list[str]] = {g: [] for g in range(len(prior.group_names))}
    for name in prior.layout.names:
        for g in prior.index[prior.layout[name]].unique().tolist():
            members[g].append(name)
    return tuple(
        GroupRow(name, float(prior.precisions[g].detach()), int(prior.P0.sizes[g]), tuple(members[g]), reasons[g])
        for g, name in enumerate(prior.group_names)
    )


def _unconfirmed(network: Network, layout: ParamLayout) -> NormStructure:
    groups = structural_groups(network, layout)
    warn(
        "The model does not run on made-up inputs, so its normalised groups were read off its structure alone "
        f"({len(groups)} found) and not confirmed. Give some inputs: lw.prior(model, ..., data=loader).",
    )
    claimed = {name for group in groups for name in group.names}
    scales, shifts = (_affine(network.model, key) - claimed for key in ("weight", "bias"))
    return NormStructure(
        groups, tuple(n for n in layout.names if n in scales), tuple(n for n in layout.names if n in shifts)
    )


def _affine(model: nn.Module, key: str) -> set[str]:
    """Names of the scales ("weight") or shifts ("bias") of torch's normalisation modules."""
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
    return {f"{path}.{key}" for path, module in model.named_modules() if isinstance(module, norms)}


def _head(model: nn.Module, layout: ParamLayout, x: ModelInput | None) -> frozenset[str]:
    """The parameters of the last layer; without inputs, those of the last module in the layout."""
    if x is None:
        return frozenset(list(layout.modules.values())[-1])
    with suppress(InputError):  # raised if the last layer is frozen
        return frozenset(last_layer(model, x).names)
    return frozenset()


def _named(
    found: NormStructure, layout: ParamLayout, head: frozenset[str]
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(name, tensors, reason) of every non-empty group; they partition the tensors of the layout."""
    taken: set[str] = set()
    proposals = [
        *((group.title, group.names, group.sentence) for group in found.groups),
        ("norm scales", found.scales, "the scales of all normalisation layers share one precision."),
        ("norm shifts", found.shifts, "the shifts of all normalisation layers share one precision."),
        ("last layer", tuple(head), "the last layer, in which the outputs are linear."),
        ("remainder", layout.names, "all that is not normalised."),
    ]
    for name, tensors, reason in proposals:
        own = tuple(n for n in layout.names if n in tensors and n not in taken)
        taken |= set(own)
        if own:
            yield name, own, reason
