"""Groups of parameters whose common scale the network does not see, and priors that respect them."""

from lapwing.normalised.detect import find_normalised_groups
from lapwing.normalised.grouping import GroupRow, group_table, grouped_by_norms, normalised_prior
from lapwing.normalised.groups import GroupEvidence, NormalisedGroup
from lapwing.normalised.plain import cannot_normalise

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
