"""A two-line summary of a posterior: what was inferred and how, the prior, and whether it was tuned."""

from __future__ import annotations

from lapwing._types import Float, Tensor
from lapwing.likelihoods import Gaussian
from lapwing.posterior.fitted import Fitted
from lapwing.priors import GaussianPrior


def summary(posterior: Fitted) -> str:
    name, layout = type(posterior.linearised.network.model).__name__, posterior.layout
    likelihood = type(posterior.likelihood).__name__
    return (
        f"Posterior of {name}: {layout.p:,} parameters, {type(posterior.structure).__name__} structure, "
        f"{likelihood} likelihood, {posterior.n_data:,} data\n"
        f"  {', '.join([_prior(posterior.prior), *_noise(posterior), _history(posterior)])}"
    )


def _prior(prior: GaussianPrior) -> str:
    groups = len(prior.group_names)
    return f"prior precision {_span(prior.precisions)}" + (f" in {groups} groups" if groups > 1 else "")


def _noise(posterior: Fitted) -> list[str]:
    if not isinstance(posterior.likelihood, Gaussian):
        return []
    return [f"noise std {_span(posterior.likelihood.resolved())}"]


def _span(values: Float[Tensor, " g"]) -> str:
    if not len(values):
        return "of nothing"
    low, high = float(values.detach().min()), float(values.detach().max())
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _history(posterior: Fitted) -> str:
    if posterior.trained is not None:
        return f"trained by {posterior.trained.by}"
    if posterior.refinement is not None:
        return f'refined by "{posterior.refinement.by}"'
    if posterior.history:
        return "tuned"
    return "not tuned: lw.tune(posterior, train_loader)" if posterior.untuned else "as given"
