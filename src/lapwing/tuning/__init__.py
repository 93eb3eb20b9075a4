"""Choose prior precisions and noise: by the evidence, on held-out data, or by sampling-based EM."""

from lapwing.tuning.budget import DEFAULT, EXACT, Budget
from lapwing.tuning.evidence.fixed_point import iterate_fixed_point, take_fixed_point_steps
from lapwing.tuning.evidence.gradient import maximise_evidence
from lapwing.tuning.evidence.joint import (
    Ascent,
    LinearTuning,
    find_mode,
    quadratic_is_exact,
    tune_at_linear_mode,
    with_tolerance,
)
from lapwing.tuning.evidence.state import TuningState
from lapwing.tuning.step import Step, with_resolved_prior
from lapwing.tuning.validation.search import search_validation

__all__ = [
    "DEFAULT",
    "EXACT",
    "Ascent",
    "Budget",
    "LinearTuning",
    "Step",
    "TuningState",
    "find_mode",
    "iterate_fixed_point",
    "maximise_evidence",
    "quadratic_is_exact",
    "search_validation",
    "take_fixed_point_steps",
    "tune_at_linear_mode",
    "with_resolved_prior",
    "with_tolerance",
]
