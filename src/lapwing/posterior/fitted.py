"""The fields of a posterior, the Gaussian over weights they define, and its evidence."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import Estimate, Fisher, FitStatistics, Structure
from lapwing.data import Batches, Columns, ModelInput, as_batches, as_input
from lapwing.data.targets import longest_labels, ragged
from lapwing.errors import StructureError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Sites
from lapwing.linear_model import Expansion, Refinement
from lapwing.network.linearised import Linearised
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, Precision, SeparatePrecision
from lapwing.posterior import evidence
from lapwing.posterior.diagnosis import NOISE_BOUNDS, PRECISION_BOUNDS
from lapwing.posterior.sampling import WeightDraws, weight_deviations
from lapwing.posterior.trained import N_DRAWS, Trained
from lapwing.predictive import FUNCTION_PAIRS, WeightGaussian
from lapwing.predictive.link_rules import DEFAULT, Link
from lapwing.priors import GaussianPrior
from lapwing.runtime.arguments import seeded
from lapwing.runtime.sandbox import plain_tensors

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Readout:
    """How predictions are computed: their mean, the temperature of the logits (temperature scaling), and the link."""

    shift: Float[Tensor, " p"] | None = None  # μ − θ*; None: the mean is the trained network
    temperature: float = 1.0  # classes are softmax(f / T), or σ(f / T)
    link: Link = DEFAULT
    noise_std: Float[Tensor, " g"] | None = None  # noise around this mean, if not the likelihood's
    newton: bool = False  # if shift is None: the mean is one Newton step from the network, under the current prior


class _Once:
    """Returns True once, in one thread."""

    def __init__(self) -> None:
        self._left = threading.Lock()

    def __call__(self) -> bool:
        return self._left.acquire(blocking=False)


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """N(θ*, P⁻¹) with P = H + P₀ over the weights of a linearised network; `Posterior` adds the public methods."""

    linearised: Linearised
    likelihood: Likelihood
    estimate: Estimate
    prior: GaussianPrior
    structure: Structure
    fisher: Fisher
    likelihood_scale: Scalar
    chunk_floats: int
    history: tuple[Any, ...] = ()
    why: str = "asked for"  # why this structure was chosen
    expansion: Expansion | None = None  # None: the evidence is evaluated at the trained weights
    readout: Readout = Readout()
    source: Batches | None = None  # the training data, the default of lw.tune and lw.refine
    refinement: Refinement | None = None  # record of lw.refine; None: not refined
    left_open: tuple[str, ...] = ()  # what tuning did not complete within its budget
    draws: WeightDraws | None = None  # samples of lw.tune(by="em"), the initial values of the next call
    columns: Columns | None = None  # columns of mapping batches, if given to lw.fit
    untuned: bool = False  # prior and noise are the defaults of lw.fit
    trained: Trained | None = None  # record of training by lw.train; None: fitted by lw.fit
    first_predict: _Once = field(default_factory=_Once)  # an untuned posterior warns at its first prediction

    @property
    def layout(self) -> ParamLayout:
        return self.linearised.layout

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of results: that of the model, but at least float32."""
        dtype = self.linearised.network.dtype or torch.float32
        # Variances need more digits than half precision has.
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    @property
    def mean(self) -> Float[Tensor, " p"]:
        """The trained weights θ*, or the mean to which tuning or `lw.refine` moved."""
        return self.centre.to(self.dtype)

    @property
    def centre(self) -> Float[Tensor, " p"]:
        return self.linearised.theta if self.shift is None else self.linearised.theta + self.shift

    @cached_property
    def shift(self) -> Float[Tensor, " p"] | None:
        """μ − θ* for the mean of predictions; None: they are centred at the network's outputs."""
        if self.readout.shift is not None or not self.readout.newton:
            return self.readout.shift
        theta, H, P = self.linearised.theta, self.curvature, self.precision
        return (evidence.mode_of_quadratic(self.data_gradient(), H, P, self.prior, theta) - theta).detach()

    @property
    def n_data(self) -> int:
        """Number of data that were seen."""
        return self.estimate.statistics.n

    @cached_property
    def sites(self) -> Sites:
        return Sites(self.linearised.datum_shape, self.likelihood.class_axis)

    @cached_property
    def curvature(self) -> Curvature:
        """H = κ Σ_g c_g H_g at the current noise."""
        return self.curvature_at(self.part_scales)

    @property
    def part_scales(self) -> Float[Tensor, " g"]:
        return (self.likelihood_scale * self.fisher.scales(self.likelihood)).to(self.linearised.network.device)

    def curvature_at(self, scales: Float[Tensor, " g"]) -> Curvature:
        """Σ_g c_g H_g for other scales c; needs no pass over the data."""
        first, *rest = self.estimate.parts
        return first.mixed(rest, scales) if rest else first.scaled(scales[0])

    @cached_property
    def precision(self) -> Precision:
        return self.curvature.plus(self.prior.P0)

    @cached_property
    def weights(self) -> WeightGaussian:
        row = self.structure.predicted_floats(self.linearised.sizes)
        rows_at_once = min(max(1, self.chunk_floats // row), self.structure.most_rows)
        return WeightGaussian(self.linearised, self.precision, rows_at_once, self.shift)

    def deviations(self, n: int, generator: torch.Generator) -> Float[Tensor, "n p"]:
        return weight_deviations(self.precision, n, generator=generator, device=self.linearised.network.device)

    # --- inputs, and outputs of other lengths ------------------------------------------------------------

    def batches(self, data: Any, where: str = "data") -> Batches:
        """Data as for `lw.fit`; mappings have the columns named there."""
        return as_batches(data, where, self.columns)

    def given(self, x: Any) -> ModelInput:
        """The model's arguments; arguments that had no batch axis in the fit have none here."""
        named = self.columns is not None and isinstance(x, Mapping)
        given = as_input(self.columns.x_of(x, "x") if self.columns is not None and named else x)
        attached = torch.is_grad_enabled() and given.requires_grad
        return replace(given, shared=given.shared | self.linearised.shared, attached=attached)

    def at(self, x: ModelInput) -> Self:
        """The same posterior, for outputs with as many positions as those of x."""
        if not self.lengths_may_differ:
            return self
        return self.for_shape(self.linearised.datum_shape_at(x))

    def covering(self, *data: Batches | None) -> Self:
        """The same posterior, for outputs as long as the longest labels in any of these data."""
        if not self.lengths_may_differ:
            return self
        sites = self.sites
        longest = max([sites.t, *(n for each in data if each is not None for n in [longest_labels(each, sites)])])
        return self.for_shape(sites.with_positions(longest))

    @property
    def lengths_may_differ(self) -> bool:
        """Whether data may differ in the number of positions, each with a label."""
        return ragged(self.likelihood, self.sites)

    def for_shape(self, datum_shape: tuple[int, ...]) -> Self:
        """The same posterior for outputs with another number of positions."""
        own = self.linearised
        if datum_shape == own.datum_shape:
            return self
        if isinstance(self.precision, SeparatePrecision):
            raise StructureError(
                f"This GP has weights of its own for each of the outputs {own.datum_shape} of a datum, and these data "
                f'have outputs {datum_shape}. Pad them alike, or fit with structure="kron".'
            )
        at = None if self.expansion is None else replace(self.expansion, outputs=None)
        other = replace(self, linearised=replace(own, datum_shape=datum_shape), expansion=at)
        # Cached values do not depend on the number of positions: keep them, they may be expensive.
        for name in ("curvature", "precision", "shift"):
            other.__dict__[name] = getattr(self, name)
        return other

    def shaped(self, f: Float[Tensor, "n k"]) -> Tensor:
        return f.reshape(len(f), *self.linearised.datum_shape).to(self.dtype)

    # --- evidence ----------------------------------------------------------------------------------------

    @plain_tensors()
    def log_lik(self) -> Scalar:
        """κ Σ log p(y | f(x; θ*))."""
        self.check_fitted("log_lik", "the expected log likelihood is posterior.trained.bound.expected_log_lik")
        return self.likelihood_scale * self.likelihood.log_lik(self.estimate.statistics.likelihood)

    def log_evidence(self) -> Scalar:
        """log p(D) by the Laplace approximation; differentiable in the prior precisions, the noise and the likelihood
        scale.

        At the trained weights after `fit`; at the linear model's mode after `tune(mode="linear")`.
        """
        return self.evidence().total

    @plain_tensors()
    def evidence(self) -> evidence.Evidence:
        """The evidence with its three terms."""
        self.check_fitted("log_evidence", "its lower bound on log p(D) is posterior.trained.elbo")
        if self.refinement is not None and self.refinement.bound is not None:
            raise StructureError(
                "A variational posterior is at no mode, so there is no Laplace evidence at it: its lower bound on "
                "log p(D) is posterior.refinement.elbo."
            )
        if self.expansion is None:
            return evidence.log_evidence(self.log_lik(), self.precision, self.prior, self.linearised.theta)
        statistics, theta = self.expansion.statistics, self.expansion.theta
        log_lik = self.likelihood_scale * self.likelihood.log_lik(statistics.likelihood)
        if not self.expansion.follows:
            return evidence.log_evidence(log_lik, self.precision, self.prior, theta)
        gradient = self.gradient_at(statistics)
        return evidence.linear_evidence(log_lik, gradient, self.curvature, self.precision, self.prior, theta)

    @plain_tensors()
    def linear_mode(self) -> Float[Tensor, " p"]:
        """θ_*, the mode of the linear model's posterior, in float64.

        With a Gaussian likelihood and full curvature it follows every change of prior and noise. Otherwise it is the
        mode that `lw.tune(posterior, data)` found last.
        """
        at = self.expansion
        if at is None:
            raise StructureError(
                "The linear model's mode has not been looked for yet; it is found by "
                'lw.tune(posterior, data, mode="linear").'
            )
        if not at.follows:
            return at.theta
        gradient = self.gradient_at(at.statistics)
        return evidence.mode_of_quadratic(gradient, self.curvature, self.precision, self.prior, at.theta)

    def check_fitted(self, what: str, instead: str) -> None:
        """Raise for trained posteriors, which have no Laplace evidence."""
        if self.trained is not None:
            raise StructureError(f"{what}: this posterior was trained, by {self.trained.by}: {instead}.")

    def data_gradient(self) -> Float[Tensor, " p"]:
        """κ ∇ log p(D | θ) at the trained weights (p,)."""
        self.check_fitted("data_gradient", "training keeps no gradient over all data")
        return self.gradient_at(self.estimate.statistics)

    def gradient_at(self, statistics: FitStatistics) -> Float[Tensor, " p"]:
        """κ ∇_θ log p(D | θ) (p,) of the linear model, at the point where the statistics were computed."""
        scales = (self.likelihood_scale * self.likelihood.part_scales()).to(statistics.gradients)
        return (scales @ statistics.gradients).double()

    @plain_tensors()
    def effective_dimension(self) -> Float[Tensor, " g"]:
        """γ per prior group: the number of parameters that the data determine."""
        return evidence.effective_dimension(self.curvature, self.prior)

    def squared_errors(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """For a Gaussian: Σ (y − h)² and the number of targets per noise level, at the point of the evidence.

        If the mode follows the hyperparameters, at θ₀ + d: SSE₀ − 2 gᵀd + dᵀ H₁ d with g and H₁ at unit noise.
        """
        statistics = self.estimate.statistics if self.expansion is None else self.expansion.statistics
        sse, count = statistics.likelihood.chunk(2)
        if self.expansion is None or not self.expansion.follows:
            return sse, count
        d = self.linear_mode() - self.expansion.theta
        dHd = torch.stack([d @ part.mv(d) for part in self.estimate.parts])
        return sse - 2 * statistics.gradients @ d + dHd, count

    def precision_bounds(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """Bounds on the precision of each prior group: 1e-10 and 1e12 times the mean curvature in it.

        They are relative, so that they scale with a normalised layer. A group without curvature uses 1 instead.
        """
        P0 = self.prior.P0
        H = self.curvature
        sums = H.trace()[None] if P0.isotropic else P0.group_sums(H.diagonal())
        mean = sums.detach() / P0.sizes
        # A group without curvature has no scale of its own.
        mean = torch.where(mean > 0, mean, torch.ones_like(mean))
        return PRECISION_BOUNDS[0] * mean, PRECISION_BOUNDS[1] * mean

    def noise_bounds(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """For a Gaussian: a thousandth and a thousand times the root mean squared residual of the network.

        With more parameters than targets, the evidence could otherwise prefer a noise of zero.
        """
        sse, count = self.estimate.statistics.likelihood.chunk(2)
        rms = (sse / count).sqrt()
        rms = torch.where(rms > 0, rms, torch.ones_like(rms))
        return NOISE_BOUNDS[0] * rms, NOISE_BOUNDS[1] * rms

    # --- how predictions are made ------------------------------------------------------------------------

    @property
    def averages_functions(self) -> bool:
        """Whether predictions average draws of the linearised function, because a datum has many outputs.

        The exact covariance needs a row of J for each output; a draw needs one JVP for all of them.
        """
        return self.weights.many_outputs and self.likelihood.averages_functions

    @property
    def usual_predictive(self) -> tuple[str, int]:
        """The default of `predict`: the kind of predictive, and its number of draws."""
        return ("glm", N_DRAWS) if self.trained is None else (self.trained.predictive, self.trained.n_draws)

    @property
    def n_functions(self) -> int:
        """Number of function draws in such predictions."""
        return 2 * FUNCTION_PAIRS

    @cached_property
    def usual_deviations(self) -> Float[Tensor, "s p"]:
        return self.deviations(FUNCTION_PAIRS, seeded(None))

    @property
    def observed_likelihood(self) -> Likelihood:
        """The likelihood of new data around the mean of predictions."""
        noise_std = self.readout.noise_std
        if noise_std is None or not isinstance(self.likelihood, Gaussian):
            return self.likelihood
        return self.likelihood.with_noise_std(noise_std)

    @property
    def temperature(self) -> float:
        return self.readout.temperature if isinstance(self.likelihood, Bernoulli | Categorical) else 1.0
