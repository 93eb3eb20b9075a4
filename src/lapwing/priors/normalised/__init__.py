"""Normalised groups: parameters before a normalisation layer, whose common scale has no effect; and priors for them."""

from lapwing.priors.normalised.detect import find_normalised_groups
from lapwing.priors.normalised.grouping import (
    GroupRow,
    group_table,
    grouped_by_norms,
    normalised_prior,
)
from lapwing.priors.normalised.groups import GroupEvidence, NormalisedGroup
from lapwing.priors.normalised.plain import cannot_normalise

__all__ = [
    "GroupEvidence",
    "GroupRow",
    "NormalisedGroup",
    "cannot_normalise",
    "find_normalised_groups",
    "group_table",
    "grouped_by_norms",
    "normalised_prior",
]
