"""Memory and time of each structure before any work, and what `auto` takes."""

from lapwing.planning.budget import in_words, parse_memory
from lapwing.planning.choice import Choice, Needs, choose, refuse_factors_of_a_selection
from lapwing.planning.costs import Line, Question, forward_macs, n_columns, pass_macs
from lapwing.planning.kind import Affordable, Kind, settled
from lapwing.planning.plan import Plan, make_plan
from lapwing.planning.rehearsal import Rehearsal
from lapwing.planning.tuning import MOST_STORED, Tuning

__all__ = [
    "MOST_STORED",
    "Affordable",
    "Choice",
    "Kind",
    "Line",
    "Needs",
    "Plan",
    "Question",
    "Rehearsal",
    "Tuning",
    "choose",
    "forward_macs",
    "in_words",
    "make_plan",
    "n_columns",
    "parse_memory",
    "pass_macs",
    "refuse_factors_of_a_selection",
    "settled",
]
