"""A conformal p-value per input: how seldom held-out data look as unfamiliar to the posterior.

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
from lapwing.calibration.held_out import inputs_alone, labelled_or_not, scored
from lapwing.errors import InputError, InputTypeError, NumericalError
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.runtime.sandbox import plain_tensors, random_state_kept


@dataclass(frozen=True, eq=False)
class Alarm:
    """`alarm(x)` → a p-value per input, at most a for at most a share a of new data like the held-out.

    The probability is over the held-out data and the new datum together, which have to be exchangeable. The smallest
    value there is is 1 / (n + 1): 19 held-out data can raise an alarm at 0.05, fewer cannot.
    """

    posterior: Posterior
    features: Float[Tensor, "n k"] = field(repr=False)  # of the held-out data

    @property
    def n(self) -> int:
        """How many held-out data it was calibrated on."""
        return len(self.features)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer.of(self.posterior)

    @plain_tensors()
    def __call__(self, x: Any) -> Float[Tensor, " b"]:
        """P-values of a batch of inputs, or of all rows of a loader or data set, in the order of the data set."""
        scorer = self.scorer
        with random_state_kept():
            features = torch.cat([_checked(scorer(piece)) for piece in inputs_alone(self.posterior, x)])
        return scorer.p_values(self.features.to(features), features).to(self.posterior.dtype)

    def __repr__(self) -> str:
        return f"Alarm(n={self.n}, smallest p-value {1 / (self.n + 1):.2g})"


@distributed.collective_call("lw.alarm")
@plain_tensors()
def alarm(posterior: Posterior, held_out: Any, *, progress: bool | None = None) -> Alarm:
    """An alarm for inputs unlike those the network was trained for, with a bound on false alarms.

    For numbers and counts the variance of the outputs is compared with those of the held-out data. For classes four
    numbers are: the entropy of the network's own answer; the entropy of the predictive distribution under a prior ten
    times wider than the evidence's; the share of it that is epistemic (both ends count, at half the weight); and the
    variance of the outputs. The ranks of the first three are put together as log p-values are; the result and the rank
    of the variance are two chances to raise an alarm. Every step takes the n held-out data and the new one alike, so
    that the p-value is exact. Where held-out data scaled the precisions in `lw.tune`, that is undone first: what is
    best for the NLL of known data is often blind to unknown ones.

    `held_out`: as for `lw.fit`, or the inputs alone; targets are not read. Data that `lw.tune(validation=...)` has seen
    may be used again unless they also trained or stopped the network; training data may not. Cost: one prediction
    of the held-out data, and one of the new data at every call.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"alarm: expected a Posterior from lw.fit or lw.tune, got {type(posterior).__name__}.")
    scorer = Scorer.of(posterior)
    held = labelled_or_not(posterior, held_out)
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
