"""The Gaussian over outputs as BoTorch wants it: joint over q points, batched, conditioned on observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor, nn

from lapwing.errors import InputTypeError, ShapeError, StructureError
from lapwing.integrations.botorch.draws import FunctionDraw
from lapwing.likelihoods import Gaussian
from lapwing.posterior import Posterior
from lapwing.posterior.views import FunctionDraws

_TOGETHER = 128  # outputs whose joint covariance is computed at once


@dataclass(frozen=True)
class Observed:
    """Inputs (…, n, d), as the network takes them, and targets (…, n, m) that the posterior did not see."""

    X: Tensor
    Y: Tensor

    def joined(self, X: Tensor, Y: Tensor) -> Observed:
        batch = torch.broadcast_shapes(self.X.shape[:-2], self.Y.shape[:-2], X.shape[:-2], Y.shape[:-2])
        both = zip((self.X, self.Y), (X, Y), strict=True)
        return Observed(*(torch.cat([v.expand(*batch, *v.shape[-2:]) for v in pair], -2) for pair in both))


class LapwingModel(Model):
    """A BoTorch model whose posterior is that of a network.

    `posterior(X)` is joint over q points and all outputs, and differentiable in X. `input_transform` and
    `outcome_transform` are BoTorch's, for a network that was trained on transformed data. `condition_on_observations`
    is the exact update of the linear model, for a Gaussian likelihood.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        input_transform: nn.Module | None = None,
        outcome_transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(posterior, Posterior):
            raise InputTypeError(f"LapwingModel: expected a Posterior from lw.fit, got {type(posterior).__name__}.")
        self._posterior = posterior
        self._observed: Observed | None = None
        self._outputs: tuple[int, ...] | None = None
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()

    # --- what BoTorch asks ---------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        return self._posterior.linearised.k if self._outputs is None else len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        observed = self._observed
        return (
            torch.Size() if observed is None else torch.broadcast_shapes(observed.X.shape[:-2], observed.Y.shape[:-2])
        )

    def posterior(
        self,
        X: Tensor,
        output_indices: Sequence[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The Gaussian over the outputs at X (…, q, d), jointly over q."""
        rows = self.transform_inputs(X)
        mean, cov = self._conditioned(rows)
        mean, cov = mean.to(X.dtype), cov.to(X.dtype)
        if isinstance(observation_noise, Tensor) or observation_noise:
            cov = cov + torch.diag_embed(self._noise(observation_noise, mean))
        found = GPyTorchPosterior(_normal(mean, cov))
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            found = transform.untransform_posterior(found, X=X)
        chosen = output_indices if output_indices is not None else self._outputs
        if chosen is not None:
            found = _of_outputs(found, list(chosen))
        return found if posterior_transform is None else posterior_transform(found)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> LapwingModel:
        """The model after targets Y (…, n, m) at X (…, n, d), which is transformed already, as BoTorch gives it.

        Exact for the linearised model: nothing is trained, and no network is run more than once.
        """
        if not isinstance(self._posterior.likelihood, Gaussian):
            raise StructureError(
                "condition_on_observations: the exact update needs a Gaussian likelihood, and this posterior has "
                f"{type(self._posterior.likelihood).__name__}. Use posterior.updated(data), and tune again."
            )
        k = self._posterior.linearised.k
        if Y.dim() < 2 or Y.shape[-2:] != (X.shape[-2], k):
            raise ShapeError(
                f"condition_on_observations: {X.shape[-2]} inputs of a model with {k} outputs need targets of shape "
                f"(..., {X.shape[-2]}, {k}), got {tuple(Y.shape)}."
            )
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            Y = transform(Y)[0]
        observed = Observed(X, Y) if self._observed is None else self._observed.joined(X, Y)
        return self._like(observed=observed)

    def fantasize(
        self, X: Tensor, sampler: Any, observation_noise: Tensor | None = None, **kwargs: Any
    ) -> LapwingModel:
        """The model after targets that `sampler` draws at X from what it predicts there, noise included."""
        noise: bool | Tensor = True if observation_noise is None else observation_noise
        return self.condition_on_observations(
            self.transform_inputs(X), sampler(self.posterior(X, observation_noise=noise))
        )

    def subset_output(self, idcs: list[int]) -> LapwingModel:
        own = self._outputs or range(self._posterior.linearised.k)
        return self._like(outputs=tuple(own[i] for i in idcs))

    # --- functions -----------------------------------------------------------------------------------

    def function_draws(self, n: int, generator: torch.Generator | None = None) -> nn.ModuleList:
        """n draws of the linearised function, each a deterministic model: maximise one for Thompson sampling."""
        if self._observed is not None:
            raise StructureError("function_draws: draw from the model before it was conditioned on observations.")
        draws = self._posterior.functions(n, generator)
        transforms = getattr(self, "input_transform", None), getattr(self, "outcome_transform", None)
        each = (FunctionDraws(draws.posterior, draws.deviations[i : i + 1]) for i in range(n))
        return nn.ModuleList(FunctionDraw(one, *transforms) for one in each)

    # --- the Gaussian ----------------------------------------------------------------------------------

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (…, q, m) and covariance (…, q m, q m) of the network's outputs."""
        *batch, q, d = X.shape
        k = self._posterior.linearised.k
        if q == 1:
            found = self._posterior.outputs(X.reshape(-1, d))
            return found.mean.reshape(*batch, 1, k), found.cov.reshape(*batch, k, k)
        means, covs = [], []
        for some in X.reshape(-1, q, d).split(max(1, _TOGETHER // (q * k))):
            n = len(some)
            mean, cov = self._posterior.joint_outputs(some.reshape(-1, d))
            blocks = cov.reshape(n, q * k, n, q * k)
            means.append(mean.reshape(n, q, k))
            covs.append(blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        return torch.cat(means).reshape(*batch, q, k), torch.cat(covs).reshape(*batch, q * k, q * k)

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """m + K₁₂ (K₂₂ + σ²)⁻¹ (y − m₂), and K₁₁ − K₁₂ (K₂₂ + σ²)⁻¹ K₂₁."""
        observed = self._observed
        if observed is None:
            return self._joint(X)
        batch = torch.broadcast_shapes(X.shape[:-2], observed.X.shape[:-2])
        X, seen = (v.expand(*batch, *v.shape[-2:]) for v in (X, observed.X))
        mean, K = self._joint(torch.cat([X, seen], -2))
        q, m = X.shape[-2], mean.shape[-1]
        (m1, m2), size = mean.split([q, seen.shape[-2]], -2), q * m
        K11, K12, K22 = K[..., :size, :size], K[..., :size, size:], K[..., size:, size:]
        L = torch.linalg.cholesky(K22 + torch.diag_embed(self._noise(True, m2)))
        W = torch.linalg.solve_triangular(L, K12.mT, upper=False)
        residual = torch.linalg.solve_triangular(L, (observed.Y.to(m2) - m2).flatten(-2)[..., None], upper=False)
        shift = (W.mT @ residual)[..., 0].unflatten(-1, (q, m))
        cov = K11 - W.mT @ W
        return m1 + shift, cov.expand(*shift.shape[:-2], *cov.shape[-2:])

    def _noise(self, given: bool | Tensor, mean: Tensor) -> Tensor:
        """Noise variances (…, q m)."""
        if isinstance(given, Tensor):
            return given.to(mean).expand_as(mean).flatten(-2)
        likelihood = self._posterior.observed_likelihood
        if not isinstance(likelihood, Gaussian):
            raise StructureError(
                f"observation_noise: {type(likelihood).__name__} has no noise that is added to its outputs."
            )
        return likelihood.resolved().detach().square().to(mean).expand_as(mean).flatten(-2)

    def _like(self, *, observed: Observed | None = None, outputs: tuple[int, ...] | None = None) -> LapwingModel:
        other = type(self)(
            self._posterior,
            input_transform=getattr(self, "input_transform", None),
            outcome_transform=getattr(self, "outcome_transform", None),
        )
        other._observed = self._observed if observed is None else observed
        other._outputs = self._outputs if outputs is None else outputs
        return other


def _normal(mean: Tensor, cov: Tensor) -> Any:
    """Data by data, the outputs of a datum side by side: what gpytorch calls interleaved."""
    if mean.shape[-1] == 1:
        return MultivariateNormal(mean[..., 0], cov)
    return MultitaskMultivariateNormal(mean, cov, interleaved=True)


def _of_outputs(found: Any, chosen: list[int]) -> Any:
    mean, covariance = found.mean, found.distribution.covariance_matrix
    q, m = mean.shape[-2:]
    at = (torch.arange(q)[:, None] * m + torch.as_tensor(chosen)).flatten().to(mean.device)
    return GPyTorchPosterior(_normal(mean[..., chosen], covariance[..., at[:, None], at]))
