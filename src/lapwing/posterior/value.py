"""`Posterior`, the frozen value that users hold. Its methods call the modules that do the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from lapwing import predictive, priors
from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Sampled, Structure, estimate
from lapwing.data import Batches, ModelInput
from lapwing.data.targets import encoded_batches
from lapwing.errors import InputTypeError, NumericalError, StructureError, warn
from lapwing.likelihoods import Gaussian, Likelihood, Sites
from lapwing.linear_model import Expansion, in_fixed_order
from lapwing.operators import SeparatePrecision
from lapwing.posterior import writing
from lapwing.posterior.described import summary
from lapwing.posterior.diagnosis import Diagnosis
from lapwing.posterior.findings import findings
from lapwing.posterior.fitted import Fitted
from lapwing.posterior.influence import Influence, influence
from lapwing.posterior.predicting import predicted
from lapwing.posterior.sampling import copy_deviations
from lapwing.posterior.views import FunctionDraws, JointOutputs, Outputs
from lapwing.predictive import Prediction
from lapwing.runtime import distributed
from lapwing.runtime.arguments import positive_scale, seeded
from lapwing.runtime.sandbox import plain_tensors, random_state_kept

_MAX_COVARIANCE = 5_000


def passes_over(
    data: Batches, likelihood: Likelihood, sites: Sites, structure: Structure, progress: bool | None
) -> Callable[[], Iterable[tuple[ModelInput, Tensor]]]:
    """(x, encoded y) for an estimator; in a fixed order for structures that make several passes."""
    if structure.by_products:
        return partial(encoded_batches, in_fixed_order(data), likelihood, sites, progress=False)
    return partial(encoded_batches, data, likelihood, sites, progress=progress)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Fitted):
    """N(θ*, P⁻¹) with P = H + P₀ over the weights of a linearised network."""

    # --- the Gaussian over weights -------------------------------------------------------------

    @plain_tensors()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Samples of the weights. Without a generator, the same samples at every call."""
        deviations = self.deviations(n, seeded(generator))
        return (self.centre + deviations).to(self.dtype)

    @plain_tensors()
    def marginal_variance(self) -> Float[Tensor, " p"]:
        return self.precision.inv_diagonal().to(self.dtype)

    @plain_tensors()
    def covariance(self) -> Float[Tensor, "p p"]:
        """P⁻¹; raises for more than 5,000 parameters."""
        if self.layout.p > _MAX_COVARIANCE:
            raise StructureError(
                f"covariance() forms a {self.layout.p} × {self.layout.p} matrix; it is refused above {_MAX_COVARIANCE} "
                "parameters. Use marginal_variance(), sample(), or outputs(x).cov."
            )
        eye = torch.eye(self.layout.p, dtype=torch.float64, device=self.linearised.network.device)
        return self.precision.solve(eye).to(self.dtype)

    @plain_tensors()
    def influence(self, train: Any, test: Any = None, *, progress: bool | None = None) -> Influence:
        """Which of these data hold predictions up: what leaving each of them out would change, in closed form.

        `test`: inputs of one batch, or (inputs, targets), which adds the change of their log likelihood. Without it,
        each datum's effect on its own prediction: mislabelled ones stand out in `log_lik`.
        """
        return influence(self, train, test, progress)

    # --- the Gaussian over outputs, and predictions ----------------------------------------------

    def outputs(self, x: Any) -> Outputs:
        """Mean, variance and covariance of the network's outputs, without observation noise."""
        given = self.given(x)  # copied, as variances are computed later, when the user may have changed x
        return Outputs(self.at(given), given.mapped(lambda v: v.clone() if isinstance(v, Tensor) else v, given.n))

    @plain_tensors()
    def joint_outputs(self, x: Any) -> JointOutputs:
        """The joint Gaussian across inputs: mean (B·K,), cov (B·K, B·K)."""
        given = self.given(x)
        mean, cov = predictive.pushforward_joint(self.at(given).weights, given)
        return JointOutputs(mean.to(self.dtype), cov.to(self.dtype))

    @plain_tensors()
    def functions(self, n: int, generator: torch.Generator | None = None) -> FunctionDraws:
        """n draws of the linearised function. Without a generator, the same functions at every call."""
        if isinstance(self.precision, SeparatePrecision):
            return FunctionDraws(self, copy_deviations(self.precision, n, generator=seeded(generator)))
        return FunctionDraws(self, self.deviations(n, seeded(generator)))

    @plain_tensors()
    def predict(
        self,
        x: Any,
        *,
        predictive: str | None = None,
        link: Any = None,
        n_samples: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """The predictive distribution at x.

        `predictive`: linearised ("glm"), sampled weights in the network ("bnn"), or the network at the posterior's
        mean ("mean", without epistemic uncertainty). Default: "glm" after `lw.fit`; as in the papers, "mean" for
        Variational Laplace, and "bnn" with 10 draws for mean-field variational inference. `n_samples`: 1000 otherwise.

        `x`: a batch of inputs, or a DataLoader, dataset or other iterable of batches. Targets in batches are ignored.
        The prediction is of all rows, in the order of the dataset, and does not depend on the batches, draws included.

        For data with more than 64 outputs (classes, pixels or tokens), the default averages 32 draws of the linearised
        function; any explicit `link` uses the exact covariance of every likelihood term instead.
        """
        if self.untuned and self.first_predict():
            warn(_untuned(self))
        return predicted(
            self, x, predictive=predictive, link=link, n_samples=n_samples, generator=generator, progress=progress
        )

    # --- other posteriors on the same curvature ------------------------------------------------------

    @plain_tensors()
    def with_prior(self, prior: Any) -> Posterior:
        """The same curvature under another prior: a precision, or lw.prior(model, ...)."""
        self.check_unrefined("with_prior")
        prior = priors.as_prior(prior, self.layout).on(self.linearised.network.device)
        return replace(self, prior=prior, untuned=False)

    @plain_tensors()
    def with_likelihood(self, likelihood: Likelihood, *, likelihood_scale: Any = None) -> Posterior:
        """The same curvature at another noise level or likelihood scale."""
        self.check_unrefined("with_likelihood")
        if not isinstance(likelihood, Likelihood):
            raise InputTypeError(
                f"with_likelihood: expected a likelihood object such as {type(self.likelihood).__name__}(...), "
                f"got {type(likelihood).__name__}."
            )
        if type(likelihood) is not type(self.likelihood):
            raise StructureError(
                f"with_likelihood: the curvature was computed for {type(self.likelihood).__name__}; "
                f"{type(likelihood).__name__} needs a new fit."
            )
        if not isinstance(likelihood, Gaussian) and likelihood != self.likelihood:
            raise StructureError(f"with_likelihood: other options of {type(likelihood).__name__} need a new fit.")
        if isinstance(likelihood, Gaussian):
            likelihood = self._checked_noise(likelihood)
        scale = (
            self.likelihood_scale if likelihood_scale is None else positive_scale("likelihood_scale", likelihood_scale)
        )
        return replace(
            self, likelihood=likelihood, likelihood_scale=scale, readout=replace(self.readout, noise_std=None)
        )

    @distributed.collective_call("posterior.updated")
    @plain_tensors()
    def updated(self, more_data: Any, *, progress: bool | None = None) -> Posterior:
        """The posterior after more data: adds their curvature and statistics at the same weights.

        An estimated noise level is kept; `lw.tune` updates it.
        """
        self.check_unrefined("updated")
        self.structure.check_more_data()
        batches = self.batches(more_data, "more_data")
        # More data may have longer sequences than those of the fit.
        longer = self.covering(batches)
        return longer.with_estimate(self.estimate.joined([longer._estimated(batches, progress)]))

    @distributed.collective_call("posterior.downdated")
    @plain_tensors()
    def downdated(self, data: Any, *, progress: bool | None = None) -> Posterior:
        """The posterior without some of its data: subtracts their curvature and statistics at the same weights.

        A posterior does not know which data it has seen. Other data are refused only if the remaining curvature would
        not be positive semi-definite. An estimated noise level is kept.
        """
        self.check_unrefined("downdated")
        if not self.structure.additive or isinstance(self.fisher, Sampled):
            drawn = 'fisher="mc" (or "auto" on large data, which samples too)'
            what = drawn if self.structure.additive else f"{type(self.structure).__name__} curvature"
            raise StructureError(f"downdated: with {what} data cannot be taken out exactly. Fit again without them.")
        if self.estimate.in_expectation:
            raise StructureError(
                "downdated: tuning averaged this curvature over the posterior of all the data, so that those of some "
                "cannot be taken out exactly. Fit again without them, or downdate before tuning."
            )
        batches = self.batches(data)
        less = self.covering(batches)._estimated(batches, progress)
        left = self.estimate.without(less)
        if isinstance(self.likelihood, Gaussian):
            sse, _ = left.statistics.likelihood.chunk(2)
            # Slightly negative sums are rounding.
            if bool((sse < -1e-9 * self.estimate.statistics.likelihood.chunk(2)[0]).any()):
                raise NumericalError(
                    "downdated: the squared errors left over would be negative, so these data were not all among those "
                    "of the fit."
                )
        return self.with_estimate(left)

    def _estimated(self, batches: Batches, progress: bool | None) -> Estimate:
        """The estimate of other data, with the same structure at the same weights."""
        with random_state_kept():
            return estimate(
                self.linearised,
                self.likelihood,
                passes_over(batches, self.likelihood, self.sites, self.structure, progress),
                sites=self.sites,
                structure=self.structure,
                fisher=self.fisher,
                chunk_floats=self.chunk_floats,
            )

    def with_estimate(self, estimate: Estimate) -> Posterior:
        """The same posterior with the sums of other data."""
        # The mode for other data is unknown until the next lw.tune, unless the quadratic is exact.
        follows = self.expansion is not None and self.expansion.follows
        at = Expansion(self.linearised.theta, estimate.statistics, follows=True) if follows else None
        return replace(self, estimate=estimate, expansion=at, source=None, draws=None)

    def check_unrefined(self, what: str) -> None:
        """Raise if the posterior was refined or trained: its mean and curvature are valid for one prior, likelihood
        and data."""
        if self.trained is not None:
            raise StructureError(
                f"{what}: this posterior was trained, by {self.trained.by}; mean and variances belong to the prior, "
                "the likelihood and the data of that training. Train with others, or fit the trained network: "
                "lw.fit(model, data, likelihood)."
            )
        if self.refinement is not None:
            raise StructureError(
                f"{what}: this posterior was refined under its own prior, likelihood and data; under others its mean "
                "and curvature would be wrong. Change the posterior of lw.fit or lw.tune, and refine last."
            )

    def _checked_noise(self, likelihood: Gaussian) -> Gaussian:
        if likelihood.noise_std is None:
            return likelihood.estimate(self.estimate.statistics.likelihood)
        if len(likelihood.resolved()) != len(self.estimate.parts):
            raise StructureError(
                f"with_likelihood: {len(likelihood.resolved())} noise levels were given, but the curvature was summed "
                f"for {len(self.estimate.parts)}. Fit with Gaussian(per_output=True) to keep outputs apart."
            )
        return likelihood

    # --- diagnosis ---------------------------------------------------------------------------------

    @plain_tensors()
    def diagnose(self) -> Diagnosis:
        """Check for possible problems; each finding comes with advice."""
        return Diagnosis(tuple(findings(self)))

    # --- files, copies, and how it is shown ----------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file, like `lw.save(posterior, path)`."""
        writing.write(self, path)

    def __copy__(self) -> Posterior:
        return self  # immutable

    def __deepcopy__(self, memo: Any) -> Posterior:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputTypeError(
            "A Posterior is not pickled (by pickle, torch.save, or on its way to another process): it is bound to a "
            "model, and may hold its training data. Write it with lw.save(posterior, path) and read it with "
            "lw.load(path, model)."
        )

    def __repr__(self) -> str:
        return summary(self)

    def __dir__(self) -> list[str]:
        """Public methods and fields only."""
        return sorted(name for name in super().__dir__() if name.startswith("__") or name in _PUBLIC)


_PUBLIC = {
    "covariance",
    "diagnose",
    "downdated",
    "effective_dimension",
    "evidence",
    "functions",
    "influence",
    "history",
    "joint_outputs",
    "layout",
    "left_open",
    "likelihood",
    "likelihood_scale",
    "linear_mode",
    "log_evidence",
    "log_lik",
    "marginal_variance",
    "mean",
    "n_data",
    "outputs",
    "predict",
    "prior",
    "refinement",
    "sample",
    "save",
    "structure",
    "trained",
    "updated",
    "why",
    "with_likelihood",
    "with_prior",
}


def _untuned(posterior: Posterior) -> str:
    likelihood = posterior.likelihood
    what = f"Its prior precision {float(posterior.prior.precisions.detach()[0]):.3g}"
    if isinstance(likelihood, Gaussian) and likelihood.estimated:
        what += " and its noise, that of the network's training residuals, are placeholders"
    else:
        what += " is a placeholder"
    return (
        f"This posterior has not been tuned. {what}, and the size of the error bars depends on it. Tune it: "
        "posterior = lw.tune(posterior, train_loader). To keep it without this warning: "
        "posterior.with_prior(posterior.prior)."
    )
