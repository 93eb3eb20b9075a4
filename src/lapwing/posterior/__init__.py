"""The frozen posterior: evidence, sampling, predictions, diagnosis."""

from lapwing.posterior.fitted import Readout
from lapwing.posterior.predicting import predicted
from lapwing.posterior.run import Epoch, Run
from lapwing.posterior.trained import Trained
from lapwing.posterior.value import Posterior, passes_over
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
    "predicted",
    "writes_posteriors",
]
