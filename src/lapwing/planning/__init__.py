"""Memory and time of each structure before any work, and the choice of `structure="auto"`."""

from lapwing.planning.budget import in_words, parse_memory
from lapwing.planning.choice import Choice, Needs, choose, refuse_factors_of_a_selection
from lapwing.planning.costs import CostQuery, Line, forward_macs, n_columns, pass_macs
from lapwing.planning.kind import AutoFisher, Kind, resolved
from lapwing.planning.plan import Plan, make_plan
from lapwing.planning.trial_run import TrialRun
from lapwing.planning.tuning import MOST_STORED, Tuning

__all__ = [
    "MOST_STORED",
    "AutoFisher",
    "Choice",
    "CostQuery",
    "Kind",
    "Line",
    "Needs",
    "Plan",
    "TrialRun",
    "Tuning",
    "choose",
    "forward_macs",
    "in_words",
    "make_plan",
    "n_columns",
    "parse_memory",
    "pass_macs",
    "refuse_factors_of_a_selection",
    "resolved",
]
