"""Expected information of labels: BALD, BatchBALD and EPIG, for classes by draws and for Gaussian targets exactly."""

from __future__ import annotations

from typing import Any

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.acquisition import classes, targets
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.posterior import Posterior
from lapwing.runtime.arguments import counted, seeded
from lapwing.runtime.sandbox import plain_tensors


@plain_tensors()
def bald(
    posterior: Posterior, x: Any, *, n_samples: int = 1000, generator: torch.Generator | None = None
) -> Float[Tensor, " n"]:
    """I(y; θ) of each input, in nats: how much its label would tell of the weights. Houlsby et al. (2011).

    Gaussian: ½ log det(I + V/σ²), exactly. Classes: the epistemic part of `predict`.
    """
    if _is_gaussian(posterior, "bald"):
        return targets.information(posterior.outputs(x).cov.detach().double(), _noise(posterior))
    p = posterior.predict(x, n_samples=n_samples, generator=generator)
    return p.epistemic.detach().reshape(len(p.epistemic), -1).sum(-1)


@plain_tensors()
def batch_bald(
    posterior: Posterior, x: Any, n: int, *, n_samples: int = 200, generator: torch.Generator | None = None
) -> Int[Tensor, " b"]:
    """n inputs whose labels together tell most of the weights, chosen one after the other: their rows.

    Gaussian: exactly, by the joint covariance. Classes: by `n_samples` functions, whose joint labels are counted out
    while there are few combinations, and drawn beyond. Kirsch et al. (2019).
    """
    n = counted("n", n, "input")
    if _is_gaussian(posterior, "batch_bald"):
        joint = posterior.joint_outputs(x).cov.detach().double()
        return targets.greedy(joint, _noise(posterior), n)
    log_p = _draws(posterior, x, n_samples, generator)
    if n > log_p.shape[1]:
        raise InputError(f"batch_bald: {n} inputs were asked for, and there are {log_p.shape[1]}.")
    return classes.greedy(log_p, n, seeded(generator))


@plain_tensors()
def epig(
    posterior: Posterior, x: Any, target: Any, *, n_samples: int = 500, generator: torch.Generator | None = None
) -> Float[Tensor, " n"]:
    """E I(y; y*) of each input over the target inputs: how much its label would tell of the labels asked about.

    Smith et al. (2023). Gaussian: exactly, by the joint covariance. Classes: by `n_samples` functions.
    """
    if _is_gaussian(posterior, "epig"):
        n = posterior.given(x).n
        together = torch.cat([torch.as_tensor(x), torch.as_tensor(target)])
        return targets.shared_information(posterior.joint_outputs(together).cov.detach().double(), n, _noise(posterior))
    functions = seeded(generator)
    state = functions.get_state()
    log_p = _draws(posterior, x, n_samples, functions)
    functions.set_state(state)  # the same functions at both
    return classes.shared_information(log_p, _draws(posterior, target, n_samples, functions))


def _is_gaussian(posterior: Posterior, what: str) -> bool:
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"{what}: expected a Posterior from lw.fit, got {type(posterior).__name__}.")
    if isinstance(posterior.likelihood, Gaussian):
        return True
    if isinstance(posterior.likelihood, Categorical) and posterior.sites.t == 1:
        return False
    if isinstance(posterior.likelihood, Bernoulli) and posterior.sites.t * posterior.sites.c == 1:
        return False
    if what == "bald" and isinstance(posterior.likelihood, Categorical | Bernoulli):
        return False
    raise StructureError(
        f"{what}: known for Gaussian targets and for one label per input; this posterior has "
        f"{type(posterior.likelihood).__name__} with outputs {posterior.linearised.datum_shape} of a datum."
    )


def _noise(posterior: Posterior) -> Float[Tensor, " k"]:
    """σ² of each output of a datum."""
    likelihood = posterior.observed_likelihood
    assert isinstance(likelihood, Gaussian)
    by_site = likelihood.resolved().detach().square().expand(posterior.sites.t, posterior.sites.c)
    return posterior.sites.join(by_site[None]).flatten()


def _draws(posterior: Posterior, x: Any, n: int, generator: torch.Generator | None) -> Float[Tensor, "s n c"]:
    """log p(y | f_s) of n functions."""
    f = posterior.functions(n, generator)(x).detach().double() / posterior.temperature
    f = f.reshape(*f.shape[:2], -1)
    if isinstance(posterior.likelihood, Bernoulli):
        f = torch.cat([torch.zeros_like(f), f], -1)  # log softmax of (0, f) is that of one logit
    return torch.log_softmax(f, -1)
