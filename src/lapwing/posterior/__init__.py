"""Posterior: the frozen value a user holds, what it shows of the outputs, and what it finds wrong with itself."""

from lapwing.posterior.trained import Epoch, Run, Trained
from lapwing.posterior.value import Posterior, Readout, passes_over
from lapwing.posterior.views import FunctionDraws, JointOutputs, Outputs
from lapwing.posterior.writing import writes_posteriors

__all__ = [
    "Epoch",
    "FunctionDraws",
    "JointOutputs",
    "Outputs",
    "Posterior",
    "Readout",
    "Run",
    "Trained",
    "passes_over",
    "writes_posteriors",
]
