"""The constructor, `fit`, `optimize_prior_precision`, call and `log_marginal_likelihood` of laplace-torch.

Each is a call of Lapwing's own; the posterior is at `la.posterior`. What that library has and this one has not is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lapwing import curvature, priors
from lapwing.api.fit import fit
from lapwing.api.tune import tune
from lapwing.errors import InputError, StructureError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.posterior import Posterior

_STRUCTURES: Mapping[str, Any] = {
    "full": curvature.Full(),
    "kron": curvature.Kron(bias="separate", large=None),
    "diag": curvature.Diag(),
    "gp": curvature.GP(),
    "lowrank": curvature.LowRank(),
}
# "layerwise" is one precision for each tensor there.
_GROUPS = {"scalar": priors.isotropic, "layerwise": priors.tensorwise, "diag": priors.elementwise}

# What theirs has besides, and what to ask instead.
_ABSENT: Mapping[str, str] = {
    "state_dict": "lw.save(la.posterior, path) writes a file without pickle",
    "load_state_dict": "lw.load(path, model) gives the posterior",
    "functional_variance": "la.posterior.outputs(x).cov",
    "functional_covariance": "la.posterior.joint_outputs(x).cov",
    "posterior_precision": "la.posterior.precision has solve, logdet and mv",
    "posterior_scale": "la.posterior.sample(n) and la.posterior_covariance",
    "log_det_ratio": "la.posterior.log_evidence() is the sum of its terms",
    "scatter": "la.posterior.log_evidence() is the sum of its terms",
    "gridsearch": "la.optimize_prior_precision(method='gridsearch', val_loader=...)",
    "H": "la.posterior.curvature has mv and to_dense",
}


class AbsentError(StructureError, AttributeError):
    """An attribute of laplace-torch's that this one does not have; `hasattr` is false."""


class Laplace:
    """`Laplace(model, likelihood, subset_of_weights="last_layer", hessian_structure="kron", ...)`."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        subset_of_weights: str = "last_layer",
        hessian_structure: str = "kron",
        *,
        sigma_noise: Any = 1.0,
        prior_precision: Any = 1.0,
        prior_mean: Any = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        last_layer_name: str | None = None,
        backend: Any = None,
        **options: Any,
    ) -> None:
        if options:
            _refuse(f"the arguments {', '.join(sorted(options))}")
        if likelihood not in ("classification", "regression"):
            _refuse(f"likelihood={likelihood!r}", "Lapwing's own likelihoods go to lw.fit")
        if subset_of_weights not in ("last_layer", "all"):
            _refuse(f"subset_of_weights={subset_of_weights!r}", "Use lw.fit(params=lw.Subnetwork(...))")
        if hessian_structure not in _STRUCTURES:
            raise InputError(f"hessian_structure: expected one of {', '.join(_STRUCTURES)}, got {hessian_structure!r}.")
        self.model, self.likelihood = model, likelihood
        named = subset_of_weights == "last_layer" and last_layer_name is not None
        self._params = [f"{last_layer_name}.*"] if named else subset_of_weights
        self._structure, self.enable_backprop = _STRUCTURES[hessian_structure], enable_backprop
        self._fisher, self.temperature = _fisher(backend), temperature
        self._sigma_noise, self._prior_precision, self._prior_mean = sigma_noise, prior_precision, prior_mean
        self._fitted: Posterior | None = None

    # --- fitting and tuning ----------------------------------------------------------------------------

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """The curvature of the data; with `override=False` theirs is added to it."""
        if not override and self._fitted is not None:
            self._fitted = self.posterior.updated(train_loader, progress=progress_bar)
            return
        found = fit(
            self.model,
            train_loader,
            self._noisy(self._sigma_noise),
            structure=self._structure,
            params=self._params,
            fisher=self._fisher,
            likelihood_scale=1 / self.temperature,
            progress=progress_bar,
        )
        self._fitted = found.with_prior(self._prior(self._prior_precision, found))

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: Any = 1.0,
        prior_structure: str = "scalar",
        val_loader: Any = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
    ) -> None:
        """By the evidence at the trained weights, to its maximum (`n_steps` and `lr` play no part), or on a grid."""
        if loss is not None:
            _refuse("loss=...", "The grid is judged by the negative log likelihood of val_loader")
        if prior_structure not in _GROUPS:
            raise InputError(f"prior_structure: expected one of {', '.join(_GROUPS)}, got {prior_structure!r}.")
        if method == "marglik":
            start = _GROUPS[prior_structure](self.posterior.layout, _first(init_prior_prec), self._prior_mean)
            self._fitted = tune(self.posterior.with_prior(start), mode="network", noise=False, progress=progress_bar)
            return
        if method != "gridsearch":
            raise InputError(f"method: expected 'marglik' or 'gridsearch', got {method!r}.")
        if val_loader is None:
            raise InputError("optimize_prior_precision(method='gridsearch') needs held-out data: val_loader=...")
        grid = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size, dtype=torch.float64).tolist()
        scores = [self._held_out(delta, val_loader, pred_type, link_approx, n_samples) for delta in grid]
        self.prior_precision = grid[min(range(grid_size), key=scores.__getitem__)]

    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: Any = None) -> Tensor:
        """At the trained weights; differentiable in both arguments."""
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
        return self.posterior.log_evidence()

    # --- asking ----------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Classes: probabilities (B, C). Regression: (mean, covariance) of the outputs, without noise."""
        if pred_type not in ("glm", "nn"):
            _refuse(f"pred_type={pred_type!r}")
        if self.likelihood == "classification":
            return self._probs(self.posterior, x, pred_type, link_approx, n_samples, generator).probs
        if pred_type == "nn":
            p = self.posterior.predict(x, predictive="bnn", n_samples=n_samples, generator=generator)
            return p.mean, p.epistemic
        if joint:
            return tuple(self.posterior.joint_outputs(x))
        found = self.posterior.outputs(x)
        return found.mean, found.var if diagonal_output else found.cov

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of the outputs, or of the classes' probabilities: (S, B, C)."""
        f = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return f.softmax(-1) if self.likelihood == "classification" else f

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if pred_type != "glm" or diagonal_output:
            _refuse("samples with pred_type='nn' or diagonal_output", "posterior.sample(n) gives weights")
        return self.posterior.functions(n_samples, generator)(x)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        return self.posterior.sample(n_samples, generator)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ABSENT:
            raise AbsentError(_message(name, _ABSENT[name]))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- values ----------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior:
        """Lapwing's own, with everything else that it knows."""
        if self._fitted is None:
            raise InputError("Laplace: call fit(train_loader) first.")
        return self._fitted

    @property
    def mean(self) -> Tensor:
        return self.posterior.mean

    @property
    def n_params(self) -> int:
        return self.posterior.layout.p

    @property
    def n_data(self) -> int:
        return self.posterior.n_data

    @property
    def log_likelihood(self) -> Tensor:
        return self.posterior.log_lik()

    @property
    def n_outputs(self) -> int:
        return self.posterior.linearised.k

    @property
    def posterior_covariance(self) -> Tensor:
        return self.posterior.covariance()

    @property
    def posterior_variance(self) -> Tensor:
        return self.posterior.marginal_variance()

    @property
    def prior_precision(self) -> Tensor:
        return torch.as_tensor(self._prior_precision) if self._fitted is None else self._fitted.prior.precisions

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._prior_precision = value
        if self._fitted is not None:
            self._fitted = self._fitted.with_prior(self._prior(value, self._fitted))

    @property
    def sigma_noise(self) -> Any:
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: Any) -> None:
        self._sigma_noise = value
        if self._fitted is not None:
            self._fitted = self._fitted.with_likelihood(self._noisy(value))

    # --- helpers ---------------------------------------------------------------------------------------

    def _noisy(self, sigma_noise: Any) -> Likelihood:
        return Categorical() if self.likelihood == "classification" else Gaussian(noise_std=sigma_noise)

    def _prior(self, precision: Any, posterior: Posterior) -> Any:
        values = torch.as_tensor(precision, dtype=torch.float64)
        n_tensors = len(posterior.layout.names)
        sizes = {posterior.layout.p: "diag", n_tensors: "layerwise", 1: "scalar"}
        if values.numel() not in sizes:
            raise InputError(
                f"prior_precision: expected one number, one per tensor ({n_tensors}) or one per "
                f"parameter ({posterior.layout.p}), got {values.numel()}."
            )
        return _GROUPS[sizes[values.numel()]](posterior.layout, _first(values), self._prior_mean)

    def _probs(self, posterior: Posterior, x: Any, pred_type: str, link: str, n: int, generator: Any) -> Any:
        if pred_type == "nn":
            return posterior.predict(x, predictive="bnn", n_samples=n, generator=generator)
        return posterior.predict(x, link=link, n_samples=n, generator=generator)

    def _held_out(self, delta: float, data: Any, pred_type: str, link: str, n: int) -> float:
        posterior = self.posterior.with_prior(self._prior(delta, self.posterior))
        total, count = 0.0, 0
        for x, y in posterior.batches(data, "val_loader"):
            if self.likelihood == "classification":
                p = self._probs(posterior, x, pred_type, link, n, None)
            else:
                p = posterior.predict(x, predictive="glm" if pred_type == "glm" else "bnn", n_samples=n)
            log_p = p.log_prob(y)
            total, count = total - float(log_p.double().sum()), count + log_p.numel()
        return total / count


def _first(value: Any) -> Any:
    values = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
    return values[0] if len(values) == 1 else values


def _fisher(backend: Any) -> str:
    """Their backends differ in which curvature they compute, and else in speed alone."""
    name = "GGN" if backend is None else getattr(backend, "__name__", str(backend))
    if "EF" in name:
        return "empirical"
    if "GGN" in name:
        return "exact"
    _refuse(f"backend={name}")


def _refuse(what: str, instead: str = "") -> NoReturn:
    raise StructureError(_message(what, instead))


def _message(what: str, instead: str) -> str:
    return (
        f"lapwing.compat.laplace_torch has no {what}. {instead + '. ' if instead else ''}See the page "
        '"Coming from laplace-torch" for what differs.'
    )
