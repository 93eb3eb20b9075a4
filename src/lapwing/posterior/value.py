"""Posterior: the frozen value a user holds. It composes; the mathematics is in the modules it calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch

from lapwing import predictive, priors
from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import GP, Ekfac, Estimate, Fisher, FitStatistics, Sampled, Structure, estimate
from lapwing.data import Batches, Columns, ModelInput, as_batches, as_input, as_inputs
from lapwing.data.targets import longest_labels, observed, ragged
from lapwing.errors import InputError, InputTypeError, NumericalError, StructureError, located, warn
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Sites
from lapwing.linear_model import Expansion, Refinement, in_data_order, in_fixed_order
from lapwing.network.linearised import Linearised
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, Precision, SeparatePrecision
from lapwing.posterior import evidence, writing
from lapwing.posterior.described import in_short
from lapwing.posterior.diagnosis import NOISE_BOUNDS, PRECISION_BOUNDS, Diagnosis
from lapwing.posterior.findings import findings
from lapwing.posterior.sampling import WeightDraws, copy_deviations, weight_deviations
from lapwing.posterior.views import FunctionDraws, JointOutputs, Outputs
from lapwing.predictive import MANY_OUTPUTS, Frame, Prediction, WeightGaussian
from lapwing.predictive.link_rules import DEFAULT, Link, as_link
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import choose, counted, positive_scale, seeded
from lapwing.runtime.progress import shown
from lapwing.runtime.sandbox import plain_tensors, random_state_kept

_MAX_COVARIANCE = 5_000
_MOST_KEPT = 1 << 24  # numbers of such draws that are kept between calls
_FLOATS_OF_DRAWS = 1 << 20  # of outputs at once: several passes over them stay in the cache
_FUNCTION_PAIRS = 16  # of functions f ± J (θ − θ*) that predictions of many outputs average


_OfPiece = Callable[["Posterior", ModelInput], Prediction]  # by the posterior for outputs of the piece's shape


def passes_over(
    data: Batches, likelihood: Likelihood, sites: Sites, structure: Structure, progress: bool | None
) -> Callable[[], Iterable[tuple[ModelInput, Tensor]]]:
    """(x, encoded y) as an estimator asks for them; the same in every pass for a structure that makes many."""
    if structure.by_products:
        return partial(observed, in_fixed_order(data), likelihood, sites, progress=False)
    return partial(observed, data, likelihood, sites, progress=progress)


def _by_functions(deviations: Float[Tensor, "s p"], frame: Frame) -> _OfPiece:
    return lambda at_x, x: at_x._by_draws(predictive.antithetic_draws(at_x.weights, x, deviations), frame)


@dataclass(frozen=True, eq=False)
class Readout:
    """How predictions are read off the posterior: where its mean lies, how warm the classes are, and by which link."""

    shift: Float[Tensor, " p"] | None = None  # μ − θ*; None: the mean is the trained network
    temperature: float = 1.0  # classes are softmax(f / T), or σ(f / T)
    link: Link = DEFAULT
    noise_std: Float[Tensor, " g"] | None = None  # around this mean, where it is not the likelihood's
    newton: bool = False  # without a shift: the mean is one Newton step from the network, under the prior as it is


class _Once:
    """Says yes once, to one thread."""

    def __init__(self) -> None:
        self._left = threading.Lock()

    def __call__(self) -> bool:
        return self._left.acquire(blocking=False)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """N(θ*, P⁻¹) with P = H + P₀ over the weights of a linearised network."""

    linearised: Linearised
    likelihood: Likelihood
    estimate: Estimate
    prior: GaussianPrior
    structure: Structure
    fisher: Fisher
    likelihood_scale: Scalar
    chunk_floats: int
    history: tuple[Any, ...] = ()
    why: str = "asked for"  # of the structure
    expansion: Expansion | None = None  # None: the evidence is taken at the trained weights themselves
    readout: Readout = Readout()
    source: Batches | None = None  # where the data came from, for those who tune without naming them again
    refinement: Refinement | None = None  # how lw.refine went; None: it was not called
    left_open: tuple[str, ...] = ()  # what tuning did not solve within its budget, in words
    draws: WeightDraws | None = None  # what lw.tune(by="em") found hyperparameters with, and goes on from
    columns: Columns | None = None  # what mapping batches hold, where `lw.fit` was told
    untuned: bool = False  # the prior, and a noise that is estimated, are the defaults of lw.fit: nobody chose them
    first_predict: _Once = field(default_factory=_Once)  # a posterior that is untuned says so then

    # --- the Gaussian over weights -------------------------------------------------------------

    @property
    def layout(self) -> ParamLayout:
        return self.linearised.layout

    @property
    def dtype(self) -> torch.dtype:
        """Results come in the model's dtype, float32 at least."""
        dtype = self.linearised.network.dtype or torch.float32
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    @property
    def mean(self) -> Float[Tensor, " p"]:
        """The trained weights θ*, or the linear model's mode where tuning chose it, or where `lw.refine` moved it."""
        return self._centre.to(self.dtype)

    @property
    def _centre(self) -> Float[Tensor, " p"]:
        return self.linearised.theta if self.shift is None else self.linearised.theta + self.shift

    @cached_property
    def shift(self) -> Float[Tensor, " p"] | None:
        """μ − θ* of the predictions' mean; None: they are the network's own."""
        if self.readout.shift is not None or not self.readout.newton:
            return self.readout.shift
        theta, H, P = self.linearised.theta, self.curvature, self.precision
        return (evidence.mode_of_quadratic(self.data_gradient(), H, P, self.prior, theta) - theta).detach()

    @property
    def n_data(self) -> int:
        """How many data were seen."""
        return self.estimate.statistics.n

    @cached_property
    def sites(self) -> Sites:
        return Sites(self.linearised.datum_shape, self.likelihood.class_axis)

    @cached_property
    def curvature(self) -> Curvature:
        """H = κ Σ_g c_g H_g at the present noise."""
        return self.curvature_at(self.part_scales)

    @property
    def part_scales(self) -> Float[Tensor, " g"]:
        return (self.likelihood_scale * self.fisher.scales(self.likelihood)).to(self.linearised.network.device)

    def curvature_at(self, scales: Float[Tensor, " g"]) -> Curvature:
        """Σ_g c_g H_g for other scales c: no pass over the data."""
        first, *rest = self.estimate.parts
        return first.mixed(rest, scales) if rest else first.scaled(scales[0])

    @cached_property
    def precision(self) -> Precision:
        return self.curvature.plus(self.prior.P0)

    @plain_tensors()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Draws of the weights. Without a generator, the same draws at every call."""
        deviations = self._deviations(n, seeded(generator))
        return (self._centre + deviations).to(self.dtype)

    @plain_tensors()
    def marginal_variance(self) -> Float[Tensor, " p"]:
        return self.precision.inv_diagonal().to(self.dtype)

    @plain_tensors()
    def covariance(self) -> Float[Tensor, "p p"]:
        """P⁻¹, for small P."""
        if self.layout.p > _MAX_COVARIANCE:
            raise StructureError(
                f"covariance() forms a {self.layout.p} × {self.layout.p} matrix; it is refused above {_MAX_COVARIANCE} "
                "parameters. Use marginal_variance(), sample(), or outputs(x).cov."
            )
        eye = torch.eye(self.layout.p, dtype=torch.float64, device=self.linearised.network.device)
        return self.precision.solve(eye).to(self.dtype)

    # --- the Gaussian over outputs, and predictions ----------------------------------------------

    def batches(self, data: Any, where: str = "data") -> Batches:
        """Data as for `lw.fit`, whose mappings hold the columns that were named there."""
        return as_batches(data, where, self.columns)

    def given(self, x: Any) -> ModelInput:
        """The model's arguments; those that carried no batch in the fit carry none here."""
        named = self.columns is not None and isinstance(x, Mapping)
        given = as_input(self.columns.x_of(x, "x") if self.columns is not None and named else x)
        attached = torch.is_grad_enabled() and given.requires_grad
        return replace(given, shared=given.shared | self.linearised.shared, attached=attached)

    def at(self, x: ModelInput) -> Posterior:
        """The same posterior, for inputs whose outputs have as many positions as those of x."""
        if not self.lengths_may_differ:
            return self
        return self.for_shape(self.linearised.datum_shape_at(x))

    def covering(self, *data: Batches | None) -> Posterior:
        """The same posterior, with outputs as long as the longest labels in any of these data."""
        if not self.lengths_may_differ:
            return self
        sites = self.sites
        longest = max([sites.t, *(n for each in data if each is not None for n in [longest_labels(each, sites)])])
        return self.for_shape(sites.with_positions(longest))

    @property
    def lengths_may_differ(self) -> bool:
        """Whether some data may have more positions, each with a label, than others."""
        return ragged(self.likelihood, self.sites)

    def for_shape(self, datum_shape: tuple[int, ...]) -> Posterior:
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
        for name in ("curvature", "precision", "shift"):
            other.__dict__[name] = getattr(self, name)
        return other

    def outputs(self, x: Any) -> Outputs:
        """Mean and (co)variance of the network's outputs, without observation noise."""
        given = self.given(x)  # copied: the variances are computed later, and must be those of today's x
        return Outputs(self.at(given), given.mapped(lambda v: v.clone() if isinstance(v, Tensor) else v, given.n))

    @plain_tensors()
    def joint_outputs(self, x: Any) -> JointOutputs:
        """The Gaussian across all inputs: mean (B·K,), cov (B·K, B·K)."""
        given = self.given(x)
        mean, cov = predictive.pushforward_joint(self.at(given).weights, given)
        return JointOutputs(mean.to(self.dtype), cov.to(self.dtype))

    @plain_tensors()
    def functions(self, n: int, generator: torch.Generator | None = None) -> FunctionDraws:
        """n draws of the linearised function. Without a generator, the same draws at every call."""
        if isinstance(self.precision, SeparatePrecision):
            return FunctionDraws(self, copy_deviations(self.precision, n, generator=seeded(generator)))
        return FunctionDraws(self, self._deviations(n, seeded(generator)))

    @plain_tensors()
    def predict(
        self,
        x: Any,
        *,
        predictive: str = "glm",
        link: Any = None,
        n_samples: int = 1000,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """The predictive distribution at x: linearised ("glm") or by sampled weights through the network ("bnn").

        `x`: the inputs of one batch, or a DataLoader, data set or other iterable of batches, with or without targets,
        which are left out; the prediction is then of all rows, in the order of the data set, and the same as that of
        all inputs in one tensor, draws included.

        Where a datum has more than 64 outputs (many classes, pixels or tokens), 32 draws of the linearised function are
        averaged by default; any `link` by name takes the exact covariance of every likelihood term instead.
        """
        if self.untuned and self.first_predict():
            warn(_untuned(self))
        return self.predicted(
            x, predictive=predictive, link=link, n_samples=n_samples, generator=generator, progress=progress
        )

    def predicted(
        self,
        x: Any,
        *,
        predictive: str = "glm",
        link: Any = None,
        n_samples: int = 1000,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """`predict` for callers inside the library, who know whether the posterior is tuned."""
        n_samples = counted("n_samples", n_samples)
        rule = self.readout.link if link is None else as_link(link)
        frame = Frame(self.sites, self.dtype, rule, n_samples, seeded(generator))
        ways = {"glm": self._by_glm if generator is not None else self._by_usual_glm, "bnn": self._by_bnn}
        of_piece = choose("predictive", predictive, ways)(frame)
        few = predictive == "glm" and self.averages_functions and frame.link == DEFAULT
        n_draws = min(n_samples, self.n_functions) if few else n_samples
        many = as_inputs(x, self.columns)
        if many is None:
            one = replace(self.given(x), origin="")
            return self._by_pieces([one], of_piece, frame, n_draws).checked()
        with random_state_kept():
            batches = in_data_order(many)
            seen = shown(batches, total=len(batches), what="predict", progress=progress)
            return self._by_pieces(map(self.given, seen), of_piece, frame, n_draws).checked()

    def _by_pieces(self, batches: Iterable[ModelInput], of_piece: _OfPiece, frame: Frame, n_draws: int) -> Prediction:
        """Some inputs at a time, every one with the same random numbers: draws of all take no memory together."""
        state, parts, sizes = frame.generator.get_state(), [], []
        for x in batches:
            with located(x.origin) if x.origin else nullcontext():
                at_x = self.at(x)
                step = max(1, min(self.chunk_floats // 4, _FLOATS_OF_DRAWS) // (n_draws * at_x.linearised.k))
                for piece in [x] if step >= x.n else [x.rows(slice(i, i + step)) for i in range(0, x.n, step)]:
                    frame.generator.set_state(state)
                    parts.append(of_piece(at_x, piece))
                    sizes.append(piece.n)
        if not parts:
            raise InputError("predict: the data gave no batch: the loader or data set is empty.")
        return predictive.concatenated(parts, sizes)

    def _by_glm(self, frame: Frame) -> _OfPiece:
        if self.averages_functions and frame.link == DEFAULT:
            deviations = self._deviations(min(_FUNCTION_PAIRS, -(-frame.n_samples // 2)), frame.generator)
            return _by_functions(deviations, replace(frame, n_samples=2 * len(deviations)))
        return lambda at_x, x: at_x._by_gaussian(replace(frame, sites=at_x.sites), x)

    def _by_usual_glm(self, frame: Frame) -> _OfPiece:
        """The same without a user's generator: draws of the weights are then the same at every call, and kept."""
        kept = self.averages_functions and frame.link == DEFAULT and frame.n_samples >= 2 * _FUNCTION_PAIRS
        if not kept or _FUNCTION_PAIRS * self.layout.p > _MOST_KEPT:
            return self._by_glm(frame)
        return _by_functions(self._usual_deviations, replace(frame, n_samples=2 * _FUNCTION_PAIRS))

    @cached_property
    def _usual_deviations(self) -> Float[Tensor, "s p"]:
        return self._deviations(_FUNCTION_PAIRS, seeded(None))

    def _by_gaussian(self, frame: Frame, x: ModelInput) -> Prediction:
        gaussian = predictive.pushforward_sites(self.weights, x, self.sites)
        return predictive.from_gaussian(self._observed, gaussian.tempered(self._temperature), frame)

    def _by_bnn(self, frame: Frame) -> _OfPiece:
        if self.refinement is not None:
            raise StructureError(
                'predictive="bnn" is not defined for a refined posterior: its mean is one of the linear model, and the '
                'network itself was never trained to have such weights. Use predictive="glm", or the posterior before '
                "lw.refine."
            )
        deviations = self._deviations(frame.n_samples, frame.generator)
        if self.shift is not None:
            deviations = deviations + self.shift
        return lambda at_x, x: at_x._by_draws(predictive.network_draws(at_x.linearised, x, deviations), frame)

    def _by_draws(self, f: Float[Tensor, "s n k"], frame: Frame) -> Prediction:
        by_site = torch.stack([self.sites.split(draw) for draw in f / self._temperature])
        return predictive.from_draws(self._observed, by_site, replace(frame, sites=self.sites))

    @property
    def averages_functions(self) -> bool:
        """Whether predictions average draws of the linearised function, because a datum has many outputs.

        The exact covariance takes a row of J for each of them; a draw takes one product with J for all. Nothing is
        pulled back through the network for an output layer alone, whose rows are therefore cheap.
        """
        many = self.linearised.k > MANY_OUTPUTS and not self.linearised.only_last
        return many and not self.weights.by_rows and isinstance(self.likelihood, Bernoulli | Categorical)

    @property
    def n_functions(self) -> int:
        """How many draws such predictions average."""
        return 2 * _FUNCTION_PAIRS

    @property
    def _observed(self) -> Likelihood:
        """The likelihood of new data around the mean of the predictions."""
        noise_std = self.readout.noise_std
        if noise_std is None or not isinstance(self.likelihood, Gaussian):
            return self.likelihood
        return self.likelihood.with_noise_std(noise_std)

    @property
    def _temperature(self) -> float:
        return self.readout.temperature if isinstance(self.likelihood, Bernoulli | Categorical) else 1.0

    # --- evidence --------------------------------------------------------------------------------

    @plain_tensors()
    def log_lik(self) -> Scalar:
        """κ Σ log p(y | f(x; θ*))."""
        return self.likelihood_scale * self.likelihood.log_lik(self.estimate.statistics.likelihood)

    def log_evidence(self) -> Scalar:
        """log p(D) by Laplace; differentiable in the prior precisions, the noise and the likelihood scale.

        At the trained weights after `fit`; at the linear model's own mode after `tune(mode="linear")`.
        """
        return self.evidence().total

    @plain_tensors()
    def evidence(self) -> evidence.Evidence:
        """The evidence with its three terms apart."""
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
        gradient = self._gradient(statistics)
        return evidence.linear_evidence(log_lik, gradient, self.curvature, self.precision, self.prior, theta)

    @plain_tensors()
    def linear_mode(self) -> Float[Tensor, " p"]:
        """θ_*, the mode of the linear model's own posterior, float64.

        With a Gaussian likelihood and full curvature it follows every change of prior and noise; otherwise it is where
        `lw.tune(posterior, data)` last found it.
        """
        at = self.expansion
        if at is None:
            raise StructureError(
                "The linear model's mode has not been looked for yet; it is found by "
                'lw.tune(posterior, data, mode="linear").'
            )
        if not at.follows:
            return at.theta
        gradient = self._gradient(at.statistics)
        return evidence.mode_of_quadratic(gradient, self.curvature, self.precision, self.prior, at.theta)

    def data_gradient(self) -> Float[Tensor, " p"]:
        """κ ∇ log p(D | θ) at the trained weights."""
        return self._gradient(self.estimate.statistics)

    def _gradient(self, statistics: FitStatistics) -> Float[Tensor, " p"]:
        """κ ∇_θ log p(D | θ) of the linear model where the statistics were taken."""
        scales = (self.likelihood_scale * self.likelihood.part_scales()).to(statistics.gradients)
        return (scales @ statistics.gradients).double()

    @plain_tensors()
    def effective_dimension(self) -> Float[Tensor, " g"]:
        """γ per prior group: how many parameters the data determine."""
        return evidence.effective_dimension(self.curvature, self.prior)

    def squared_errors(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """Of a Gaussian: Σ (y − h)² and the number of targets by noise level, at the point of the evidence.

        Where the mode follows, at θ₀ + d, they are SSE₀ − 2 gᵀd + dᵀ H₁ d with g and H₁ at unit noise.
        """
        statistics = self.estimate.statistics if self.expansion is None else self.expansion.statistics
        sse, count = statistics.likelihood.chunk(2)
        if self.expansion is None or not self.expansion.follows:
            return sse, count
        d = self.linear_mode() - self.expansion.theta
        bent = torch.stack([d @ part.mv(d) for part in self.estimate.parts])
        return sse - 2 * statistics.gradients @ d + bent, count

    def precision_bounds(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """Lowest and highest precision of each prior group: 1e-10 and 1e12 times the mean curvature in it.

        Relative, so that rescaling a normalised layer moves them along; a group without curvature takes 1 for it.
        """
        P0 = self.prior.P0
        H = self.curvature
        sums = H.trace()[None] if P0.isotropic else P0.group_sums(H.diagonal())
        mean = sums.detach() / P0.sizes
        mean = torch.where(mean > 0, mean, torch.ones_like(mean))
        return PRECISION_BOUNDS[0] * mean, PRECISION_BOUNDS[1] * mean

    def noise_bounds(self) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """Of a Gaussian: a thousandth and a thousand times the root mean squared residual of the network.

        More parameters than targets can explain every target; without a bound the evidence would follow them to zero.
        """
        sse, count = self.estimate.statistics.likelihood.chunk(2)
        rms = (sse / count).sqrt()
        rms = torch.where(rms > 0, rms, torch.ones_like(rms))
        return NOISE_BOUNDS[0] * rms, NOISE_BOUNDS[1] * rms

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

    @distributed.together("posterior.updated")
    @plain_tensors()
    def updated(self, more_data: Any, *, progress: bool | None = None) -> Posterior:
        """The posterior after more data: their curvature and statistics are added at the same weights.

        An estimated noise level keeps its value; `lw.tune` moves it.
        """
        self.check_unrefined("updated")
        if isinstance(self.structure, Ekfac):
            raise StructureError(
                "updated: two EKFAC curvatures have eigenbases of their own and do not add up exactly. "
                'Fit once on all the data, or use structure="kron".'
            )
        if isinstance(self.structure, GP) and self.structure.n_points is not None:
            raise StructureError(
                f"updated: the {self.structure.n_points} points of this GP were chosen among the data of the fit, and "
                "more data would ask for others. Fit on all the data together, or use lw.GP() without n_points."
            )
        batches = self.batches(more_data, "more_data")
        longer = self.covering(batches)
        return longer.with_estimate(self.estimate.joined([longer._estimated(batches, progress)]))

    @distributed.together("posterior.downdated")
    @plain_tensors()
    def downdated(self, data: Any, *, progress: bool | None = None) -> Posterior:
        """The posterior without some of its data: their curvature and statistics are taken out at the same weights.

        Which data a posterior has seen is not known to it: what was not among them is refused only where the curvature
        left over would not be positive semi-definite. An estimated noise level keeps its value.
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
            if bool((sse < -1e-9 * self.estimate.statistics.likelihood.chunk(2)[0]).any()):
                raise NumericalError(
                    "downdated: the squared errors left over would be negative, so these data were not all among those "
                    "of the fit."
                )
        return self.with_estimate(left)

    def _estimated(self, batches: Batches, progress: bool | None) -> Estimate:
        """The curvature and statistics of other data, in the same structure at the same weights."""
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
        """The same choices on the sums of other data."""
        # The mode of other data is not known before the next tune, unless the quadratic is exact.
        follows = self.expansion is not None and self.expansion.follows
        at = Expansion(self.linearised.theta, estimate.statistics, follows=True) if follows else None
        return replace(self, estimate=estimate, expansion=at, source=None, draws=None)

    def check_unrefined(self, what: str) -> None:
        """A refined mean and curvature belong to one prior, one likelihood and the data they were found with."""
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
        """What may be wrong, each with a word of advice."""
        return Diagnosis(tuple(findings(self)))

    # --- files, copies, and how it is shown ----------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one file: the same as `lw.save(posterior, path)`."""
        writing.write(self, path)

    def __copy__(self) -> Posterior:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: Any) -> Posterior:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputTypeError(
            "A Posterior is not pickled (by pickle, torch.save, or on its way to another process): it is bound to a "
            "model, and may hold its training data. Write it with lw.save(posterior, path) and read it with "
            "lw.load(path, model)."
        )

    def __repr__(self) -> str:
        return in_short(self)

    def __dir__(self) -> list[str]:
        """What users call; everything else is the library's own."""
        return sorted(name for name in super().__dir__() if name.startswith("__") or name in _PUBLIC)

    # --- shapes ------------------------------------------------------------------------------------

    def _deviations(self, n: int, generator: torch.Generator) -> Float[Tensor, "n p"]:
        return weight_deviations(self.precision, n, generator=generator, device=self.linearised.network.device)

    @cached_property
    def weights(self) -> WeightGaussian:
        row = self.structure.predicted_floats(self.linearised.sizes)
        rows_at_once = min(max(1, self.chunk_floats // row), self.structure.most_rows)
        return WeightGaussian(self.linearised, self.precision, rows_at_once, self.shift)

    def shaped(self, f: Float[Tensor, "n k"]) -> Tensor:
        return f.reshape(len(f), *self.linearised.datum_shape).to(self.dtype)


_PUBLIC = {
    "covariance",
    "diagnose",
    "downdated",
    "effective_dimension",
    "evidence",
    "functions",
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
        f"Nobody has tuned this posterior. {what}, and the size of the error bars depends on it. Tune it: "
        "posterior = lw.tune(posterior, train_loader). To keep it without this warning: "
        "posterior.with_prior(posterior.prior)."
    )
