"""The weights a subnetwork is selected from, and statistics of each on the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import Diag, Estimate, Fisher, estimate
from lapwing.data import ModelInput
from lapwing.likelihoods import Gaussian, Likelihood, OutputCurvature, Sites
from lapwing.network.linearised import Linearised
from lapwing.network.parameters import ParamLayout
from lapwing.priors import GaussianPrior


@dataclass(frozen=True, eq=False)
class Candidates:
    """A linearised network over all eligible weights, with the data, likelihood and prior of the fit that follows."""

    linearised: Linearised
    likelihood: Likelihood
    sites: Sites
    data: Callable[[], Iterable[tuple[ModelInput, Tensor]]]
    prior: GaussianPrior
    fisher: Fisher
    likelihood_scale: Scalar
    chunk_floats: int

    @property
    def layout(self) -> ParamLayout:
        return self.linearised.layout

    @cached_property
    def curvature(self) -> Float[Tensor, " p"]:
        """diag H (p,): one pass over the data."""
        found, likelihood = self._diagonal(self.fisher), self.likelihood
        # The fit that follows will estimate the noise; selection needs it now, and has the residuals.
        if isinstance(likelihood, Gaussian) and likelihood.noise_std is None:
            likelihood = likelihood.estimate(found.statistics.likelihood)
        scales = self.likelihood_scale * self.fisher.scales(likelihood)
        return scales @ torch.stack([part.diagonal() for part in found.parts])

    @cached_property
    def variance(self) -> Float[Tensor, " p"]:
        """Marginal variances (p,) of the diagonal Laplace posterior, 1 / (H_dd + δ_d)."""
        return 1 / (self.curvature + self.prior.P0.diagonal.detach())

    @cached_property
    def squared_jacobian(self) -> Float[Tensor, " p"]:
        """Σ_n Σ_c J_ncd² (p,): one pass over the data."""
        return torch.stack([part.diagonal() for part in self._diagonal(_EveryOutput()).parts]).sum(0)

    def _diagonal(self, fisher: Fisher) -> Estimate:
        return estimate(
            self.linearised,
            self.likelihood,
            self.data,
            sites=self.sites,
            structure=Diag(),
            fisher=fisher,
            chunk_floats=self.chunk_floats,
        )


@dataclass(frozen=True)
class _EveryOutput(Fisher):
    """S = I, so that the sum over parts of diag H is Σ J²: each of g parts gets rows J / √g."""

    separate_sites = True

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        n_parts, c = len(likelihood.part_residuals(f, y)), f.shape[-1]
        eye = torch.eye(c, dtype=f.dtype, device=f.device).expand(*f.shape[:2], c, c)
        return [eye / n_parts**0.5] * n_parts

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return None

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return torch.ones_like(likelihood.part_scales())
