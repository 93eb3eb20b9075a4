"""The scores of an alarm: numbers per input that measure how uncertain the posterior is there.

Held-out NLL favours small variances: `lw.tune(validation=...)` often multiplies all precisions by ten to a million,
and the variances then no longer depend on the distance from the training data. The scores therefore use the posterior
of the evidence, with the common scale of the precisions undone, around the network's own outputs. No held-out target
enters, so the held-out data of `lw.tune` can also calibrate the alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.calibration.order_statistics import combined_p_values, p_values
from lapwing.data import ModelInput
from lapwing.likelihoods import Bernoulli, Categorical
from lapwing.posterior import Posterior, Readout
from lapwing.predictive import (
    Frame,
    antithetic_draws,
    from_draws,
    from_gaussian,
    pushforward_marginal,
    site_gaussian,
)
from lapwing.predictive.link_rules import DEFAULT
from lapwing.runtime.arguments import seeded
from lapwing.tuning import Step

N_DRAWS = 512  # draws of the outputs of an input
N_FUNCTIONS = 16  # pairs of functions f ± J (θ − θ*), for data with many outputs
WIDER = 0.1  # factor on the evidence's precisions, at which entropies discriminate best
WEIGHTS, TWO_SIDED = (1.0, 1.0, 0.5), (False, False, True)  # of the two entropies and the epistemic share
TINY = 1e-300  # avoids 0/0; below any entropy in float64


def undo_held_out_scale(posterior: Posterior) -> Posterior:
    """The posterior before held-out data rescaled its precisions and moved its mean.

    A prior that was set by hand after tuning is the user's choice, and is kept.
    """
    if posterior.refinement is not None:  # its mean and covariance were computed for this prior
        return posterior
    own = replace(posterior, readout=Readout())
    s = _scale_of_held_out_data(posterior)
    return own if s == 1.0 else _with_precisions(own, 1 / s)


def _scale_of_held_out_data(posterior: Posterior) -> float:
    """The product of all scales chosen on held-out data since the evidence was last maximised."""
    precisions = tuple(posterior.prior.precisions.detach().tolist())
    history = [step for step in posterior.history if isinstance(step, Step)]
    if not history or history[-1].scale is None or history[-1].precisions != precisions:
        return 1.0
    scales = [history[-1].scale]  # a search records its choice last
    for step in reversed(history[:-1]):
        if step.scale is None:
            break
        if step.note.startswith("validation, taken"):
            scales.append(step.scale)
    return prod(scales)


def _with_precisions(posterior: Posterior, times: float) -> Posterior:
    return posterior.with_prior(posterior.prior.with_precisions(posterior.prior.precisions.detach() * times))


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores of inputs under one posterior; `weights` and `two_sided` define how their ranks are combined.

    Classification: the entropy of the network's prediction; the entropy of the predictive distribution under prior
    precisions a tenth of the evidence's; the epistemic share of that entropy; and the variance of the outputs. The
    share can be unusually small as well as large for inputs unlike the training data, so it is two-sided. Regression
    and counts: the variance of the outputs only.
    """

    posterior: Posterior
    wider: Posterior

    @classmethod
    def of(cls, posterior: Posterior) -> Scorer:
        own = undo_held_out_scale(posterior)
        return cls(own, own if own.refinement is not None else _with_precisions(own, WIDER))

    @property
    def classes(self) -> bool:
        return isinstance(self.posterior.likelihood, Bernoulli | Categorical)

    def p_values(self, held: Float[Tensor, "n k"], new: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        if not self.classes:
            return p_values(held[:, 0], new[:, 0])
        return combined_p_values(held, new, WEIGHTS, TWO_SIDED)

    def __call__(self, x: ModelInput) -> Float[Tensor, "n k"]:
        if not self.classes:
            return pushforward_marginal(self.posterior.weights, x).detach().double().sum(-1, keepdim=True)
        at_x = replace(self, posterior=self.posterior.at(x), wider=self.wider.at(x))
        pieces = [at_x._by_functions(x)] if self.posterior.averages_functions else at_x._by_gaussians(x)
        return torch.cat(list(pieces)).detach()

    def _by_gaussians(self, x: ModelInput) -> Iterator[Float[Tensor, "n k"]]:
        """Both priors in one pass over the rows of J."""
        sites, likelihood = self.posterior.sites, self.posterior.likelihood
        for f, J in self.posterior.weights.jacobians(x):
            gaussian = site_gaussian(self.wider.precision, f, J, sites)
            variance = self.posterior.precision.inv_quad_diagonal(J)
            yield self._columns(f, from_gaussian(likelihood, gaussian, self._frame()), variance)

    def _by_functions(self, x: ModelInput) -> Float[Tensor, "n k"]:
        """The same scores from antithetic draws of functions, for data with many outputs."""
        own, wide = (
            antithetic_draws(each.weights, x, each.functions(N_FUNCTIONS).deviations)
            for each in (self.posterior, self.wider)
        )
        by_site = torch.stack([self.posterior.sites.split(f) for f in wide])
        prediction = from_draws(self.posterior.likelihood, by_site, self._frame())
        return self._columns(own.mean(0), prediction, own.var(0, correction=0))

    def _columns(
        self, f: Float[Tensor, "n c"], prediction: Any, variance: Float[Tensor, "n c"]
    ) -> Float[Tensor, "n k"]:
        """Scores of each datum (n, 4); entropies are means over its likelihood terms."""
        network: Any = from_draws(self.posterior.likelihood, self.posterior.sites.split(f)[None], self._frame())
        entropy, epistemic = _per_datum(prediction.entropy), _per_datum(prediction.epistemic)
        share = epistemic / entropy.clamp(min=TINY)
        return torch.stack([_per_datum(network.entropy), entropy, share, variance.double().sum(-1)], -1)

    def _frame(self) -> Frame:
        """In float64: the entropy of a confident prediction would be lost to rounding in float32."""
        return Frame(self.posterior.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))


def _per_datum(v: Tensor) -> Float[Tensor, " n"]:
    return v.double().reshape(len(v), -1).mean(-1)
