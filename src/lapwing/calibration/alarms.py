"""Out-of-distribution detection with conformal p-values: the share of held-out data that are as unfamiliar as an
input.

Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World" (2005); for novelty detection Bates, Candès, Lei,
Romano and Sesia, "Testing for outliers with conformal p-values" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.calibration.epistemic import Scorer
from lapwing.calibration.held_out import held_out_batches, inputs_alone, scored
from lapwing.errors import InputError, InputTypeError, NumericalError
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.runtime.sandbox import plain_tensors, random_state_kept


@dataclass(frozen=True, eq=False)
class Alarm:
    """`alarm(x)` → a p-value per input. At most a share a of new data like the held-out data get a p-value ≤ a.

    The probability is over held-out data and new datum jointly, which must be exchangeable. The smallest possible
    value is 1 / (n + 1): with 19 held-out data an alarm at 0.05 is possible, with fewer it is not.
    """

    posterior: Posterior
    features: Float[Tensor, "n k"] = field(repr=False)  # of the held-out data

    @property
    def n(self) -> int:
        """Number of held-out data it was calibrated on."""
        return len(self.features)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer.of(self.posterior)

    @plain_tensors()
    def __call__(self, x: Any) -> Float[Tensor, " b"]:
        """P-values of a batch of inputs, or of all rows of a loader or dataset, in the order of the dataset."""
        scorer = self.scorer
        with random_state_kept():
            features = torch.cat([_checked(scorer(piece)) for piece in inputs_alone(self.posterior, x)])
        return scorer.p_values(self.features.to(features), features).to(self.posterior.dtype)

    def __repr__(self) -> str:
        return f"Alarm(n={self.n}, smallest p-value {1 / (self.n + 1):.2g})"


@distributed.collective_call("lw.alarm")
@plain_tensors()
def alarm(posterior: Posterior, held_out: Any, *, progress: bool | None = None) -> Alarm:
    """Calibrate an alarm for out-of-distribution inputs, with a bound on the rate of false alarms.

    Regression and counts: the p-value is the rank of the outputs' variance among the held-out data. Classification
    uses four scores: the entropy of the network's own prediction; the entropy of the predictive distribution under
    prior precisions a tenth of the evidence's; the epistemic share of that entropy (two-sided, with half the weight);
    and the variance of the outputs. Ranks of the first three are combined as log p-values (Fisher's method); the alarm
    is raised by that result or by the rank of the variance. All steps treat the n held-out data and the new one
    symmetrically, so the p-value is exact. If `lw.tune` rescaled the precisions on held-out data, that is undone
    first: the scale with the best NLL on in-distribution data often makes the variances insensitive to unfamiliar
    inputs.

    `held_out`: as for `lw.fit`, or inputs alone; targets are not read. The data given to `lw.tune(validation=...)` may
    be used again, unless they also trained or early-stopped the network; training data may not. Cost: one prediction
    of the held-out data, and one of the new data at every call.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"alarm: expected a Posterior from lw.fit or lw.tune, got {type(posterior).__name__}.")
    scorer = Scorer.of(posterior)
    held = held_out_batches(posterior, held_out)
    features = scored(held, lambda x, _: _checked(scorer(posterior.given(x))), progress=progress)
    if not len(features):
        raise InputError("alarm: there are no held-out data to compare with.")
    return Alarm(posterior, features)


def _checked(features: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    if not bool(torch.isfinite(features).all()):
        row = int((~torch.isfinite(features)).any(-1).nonzero()[0])
        raise NumericalError(
            f"alarm: the output variance at input {row} is not finite. Use a larger prior precision (lw.tune finds "
            "one), or double precision (model.double())."
        )
    return features
