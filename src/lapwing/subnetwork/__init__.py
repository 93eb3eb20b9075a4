"""Subnetwork inference: which weights are inferred, and under which prior."""

from lapwing.subnetwork.candidates import Candidates
from lapwing.subnetwork.scaling import CountScaling, JacobianScaling, PriorScaling, Unscaled
from lapwing.subnetwork.scores import Functional, Magnitude, MarginalVariance, RandomScore, Score
from lapwing.subnetwork.selector import Selector, explicit_indices
from lapwing.subnetwork.spec import Subnetwork
from lapwing.subnetwork.swag import Swag

__all__ = [
    "Candidates",
    "CountScaling",
    "Functional",
    "JacobianScaling",
    "Magnitude",
    "MarginalVariance",
    "PriorScaling",
    "RandomScore",
    "Score",
    "Selector",
    "Subnetwork",
    "Swag",
    "Unscaled",
    "explicit_indices",
]
