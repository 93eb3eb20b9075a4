"""lw.tune: check arguments, convert words to objects, and call the tuning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lapwing import priors, refinement, tuning
from lapwing.api import words
from lapwing.curvature import NO_CHECKPOINT, Exact, ModelSummary, PassCheckpoint
from lapwing.data import Batches
from lapwing.data.targets import encoded_batches
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Gaussian
from lapwing.linear_model import design, in_fixed_order, is_stored
from lapwing.network.products import Source
from lapwing.planning import MOST_STORED, pass_macs
from lapwing.posterior import Posterior, evidence
from lapwing.posterior.diagnosis import TRUST_MARGIN
from lapwing.posterior.findings import training_gap
from lapwing.priors import normalised
from lapwing.runtime import distributed
from lapwing.runtime.arguments import seeded
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.storage import Checkpoint, InStep, tuning_binding
from lapwing.tuning import em

# Outputs × data above which a sketched curvature is not averaged, which would cost an exact pass.
_MOST_AVERAGED = 20_000
_FEW = 16  # inputs for the test of normalised groups
_NO_MODE = (
    "The evidence was taken at the trained weights: the search for the linear model's own mode takes passes over the "
    'training data that the budget does not have. lw.tune(..., budget=20), or budget="exact", pays for it.'
)


@distributed.collective_call("lw.tune")
@plain_tensors()
def tune(
    posterior: Posterior,
    data: Any = None,
    *,
    by: str | em.EM = "evidence",
    groups: str | None = None,
    noise: bool = True,
    mode: str = "linear",
    validation: Any = None,
    curvature_at: str | None = None,
    predictive_mean: str = "network",
    mean: str | None = None,
    budget: str | float | None = None,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 60,
    generator: torch.Generator | None = None,
) -> Posterior:
    """Choose prior precisions, and the noise of a Gaussian likelihood if it is to be estimated; returns a new
    posterior.

    `by`: "evidence" (gradients of the marginal likelihood), "fixed_point" (MacKay), "em" (posterior samples under the
    full GGN, for large models; or `lw.EM(...)`, which uses `generator`) or "validation" (held-out NLL alone).
    `groups`: one precision for each ("one", "layer", "tensor", "normalised"); None keeps the groups of the prior,
    except that a network with normalisation layers and a single precision gets one precision per normalised group.
    `mode`: evaluate the evidence at the linear model's mode ("linear"), which takes passes over the training data
    (default: those of `fit`), or at the trained weights ("network", classic). `predictive_mean="linear_mode"` centres
    predictions at that mode.

    `curvature_at`: the curvature at the outputs of the "network"; re-estimated at those of the "linear_mode"; or
    averaged over the "posterior" predictive distribution of the outputs. None averages it for classifiers if the
    training data are predicted much worse than by the network alone and there are no held-out data; otherwise it keeps
    the network's.

    `validation`, held-out data: the evidence decides the relative precisions. Held-out NLL decides their common scale,
    the noise or temperature, the mean and the link.

    `budget`: passes over the training data (a number), a time such as "30s", "fast" (no passes: the evidence at the
    trained weights), "balanced" (default: at most about the cost of the fit) or "exact" (to rounding). If it is used
    up, the best posterior so far is returned, and `diagnose()` reports what has not converged. `mean="network"` keeps
    predictions centred at the network's outputs even if held-out data favour another mean; "linear_mode" centres them
    at the mode.

    `checkpoint` is a directory where the search for the mode stores its progress every `every` seconds. After an
    interruption the same call resumes, with bit-identical results.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"tune: expected a Posterior from lw.fit, got {type(posterior).__name__}.")
    posterior.check_unrefined("tune")
    choice = _Choice(
        words.choose("mode", mode, {"network": False, "linear": True}),
        _CURVATURES["network"] if curvature_at is None and validation is not None else _curvature(curvature_at),
        words.choose("predictive_mean", predictive_mean, {"network": False, "linear_mode": True}),
    )
    by_evidence = {"evidence": tuning.maximise_evidence, "fixed_point": tuning.iterate_fixed_point}
    options: dict[str, Any] = {**by_evidence, "em": em.EM(), "validation": None}
    spend = replace(tuning.Budget.parse(budget), shape_only=validation is not None)
    kept_mean = words.choose("mean", mean or "any", {"any": None, "network": False, "linear_mode": True})
    if predictive_mean == "linear_mode" or kept_mean:
        choice = replace(choice, mean_at_mode=True)
    method = by if isinstance(by, em.EM) else words.choose("by", by, options)
    if method is not None:
        choice.check(posterior)
    held_out = None if validation is None else posterior.batches(validation, "validation")
    posterior = posterior.covering(None if data is None else posterior.batches(data), held_out)
    if method is None and held_out is None:
        raise InputError('tune(by="validation") needs held-out data: validation=(X, Y) or a loader.')
    if posterior.untuned:
        posterior = replace(posterior, untuned=False)
    with random_state_kept():
        posterior = _grouped(posterior, groups, data, by_evidence=method is not None)
    if isinstance(method, em.EM):
        choice.check_em(posterior, method, checkpoint)
        posterior = choice.sampled(posterior, method, data, noise, _sampling_generator(generator), progress)
    elif method is not None:
        asked = {"by": by, "noise": noise, "mode": mode, "curvature_at": curvature_at}
        storing = _CheckpointOptions(asked, checkpoint, every)
        posterior = choice.tuned(posterior, method, data, noise, progress, storing, spend)
    if held_out is None:
        return posterior
    with random_state_kept():
        keep_mean = kept_mean is False
        return tuning.search_validation(posterior, held_out, noise=noise, keep_mean=keep_mean, progress=progress)


@dataclass(frozen=True)
class _CheckpointOptions:
    """Where to store progress (None: nowhere), and how often."""

    asked: dict[str, Any]
    directory: str | os.PathLike[str] | None
    every: float

    @contextmanager
    def checkpoint(self, posterior: Posterior, source: Source) -> Iterator[PassCheckpoint]:
        if self.directory is None:
            yield NO_CHECKPOINT
            return
        bound_to = tuning_binding(posterior, source(), self.asked)
        kind = InStep if distributed.is_distributed() else Checkpoint
        checkpoint = kind.of_tuning(self.directory, self.every, bound_to, posterior.linearised.network.device)
        with checkpoint.going_on():
            yield checkpoint


@dataclass(frozen=True)
class _Curvature:
    """Where to evaluate the curvature: at the linear mode, or averaged over the posterior.

    None: decide by the data.
    """

    at_mode: bool = False
    averaged: bool | None = None


_CURVATURES = {
    "network": _Curvature(averaged=False),
    "linear_mode": _Curvature(at_mode=True, averaged=False),
    "posterior": _Curvature(averaged=True),
}


def _curvature(word: str | None) -> _Curvature:
    return _Curvature() if word is None else words.choose("curvature_at", word, _CURVATURES)


@dataclass(frozen=True)
class _Choice:
    """At which point evidence, curvature and predictive mean are evaluated."""

    linear_mode: bool
    curvature: _Curvature
    mean_at_mode: bool

    def check(self, posterior: Posterior) -> None:
        """Raise for combinations of arguments that exclude each other."""
        structure = posterior.structure
        if self.curvature.at_mode and structure.n_points is not None:
            raise InputError(
                f'tune(curvature_at="linear_mode") would choose other points than the {structure.n_points} of this GP. '
                'Use curvature_at="network", or lw.GP() without n_points.'
            )
        if self.linear_mode and not structure.all_data:
            raise InputError(
                "The evidence of this GP is that of its points alone; the linear model's mode would be that of all "
                'data. Use mode="network", or sod_scale="likelihood".'
            )
        if not self.linear_mode and (self.curvature.at_mode or self.curvature.averaged or self.mean_at_mode):
            raise InputError(
                'tune(mode="network") never looks for the linear model\'s mode and visits no data, so neither '
                'curvature_at nor predictive_mean can be other than "network". Use mode="linear".'
            )
        if self.curvature.averaged and not refinement.can_average(posterior, _most_stored(posterior)):
            raise StructureError(
                'tune(curvature_at="posterior") averages the curvature of classes, where it is a sum over data '
                '(structure="full", "block", "kron", "ekfac" or "diag", fisher="exact") and a matrix per likelihood '
                f"term fits into memory; this is {type(posterior.likelihood).__name__} with "
                f'{type(structure).__name__} curvature. Use curvature_at="network".'
            )

    def tuned(
        self,
        posterior: Posterior,
        ascend: tuning.Ascent,
        data: Any,
        noise: bool,
        progress: bool | None,
        options: _CheckpointOptions,
        budget: tuning.Budget,
    ) -> Posterior:
        """Tune by the evidence, at the trained weights or at the linear model's mode."""
        if not self.linear_mode or self._skips_the_mode(posterior, budget):
            tuned = tuning.with_tolerance(ascend, posterior, budget)(replace(posterior, expansion=None), noise=noise)
            tuned = tuning.with_resolved_prior(tuned)
            return tuned if not self.linear_mode else replace(tuned, left_open=(*tuned.left_open, _NO_MODE))
        batches = posterior.source if data is None else posterior.batches(data)
        make = reestimated = None
        source: Source = tuple
        if batches is not None:
            fixed = in_fixed_order(batches)
            source = partial(
                encoded_batches, fixed, posterior.likelihood, posterior.sites, progress=progress, what="linear mode"
            )
            most = _most_stored(posterior)
            n = posterior.n_data
            work = budget.most_work(n)
            make = partial(design, posterior.linearised, source, n=n, most_floats=most, most_work=work)
            budget = _with_default_passes(budget, posterior, source)
            reestimated = partial(_reestimated, source=source) if self.curvature.at_mode else None
        with random_state_kept(), options.checkpoint(posterior, source) as checkpoint:
            # Averaged over the old posterior, which tuning replaces.
            if posterior.estimate.in_expectation and batches is not None:
                posterior = refinement.reestimated_at(posterior, source, torch.zeros_like(posterior.linearised.theta))
            tuned = tuning.tune_at_linear_mode(
                posterior, ascend, make, noise=noise, reestimated=reestimated, checkpoint=checkpoint, budget=budget
            )
            if batches is not None and self._averages(tuned, fixed):
                ascend = tuning.with_tolerance(ascend, tuned, budget)
                tuned = ascend(refinement.averaged(tuned, source), noise=noise)
        tuned = tuning.with_resolved_prior(tuned)
        if not self.mean_at_mode:
            return replace(tuned, readout=replace(tuned.readout, noise_std=_noise_around_network(tuned, noise)))
        return _around_mode(tuned)

    def _skips_the_mode(self, posterior: Posterior, budget: tuning.Budget) -> bool:
        """Whether the mode search would need more passes over the training data than the budget allows."""
        if tuning.quadratic_is_exact(posterior) or self.mean_at_mode or self.curvature.at_mode:
            return False
        n, most = posterior.n_data, _most_stored(posterior)
        stored = is_stored(n * posterior.linearised.k, posterior.layout.p, most, budget.most_work(n))
        return not (stored or budget.affords_products())

    def _averages(self, tuned: Posterior, batches: Batches) -> bool:
        """Whether to average the curvature over the posterior predictive distribution of the outputs."""
        if self.curvature.averaged is not None:
            return self.curvature.averaged
        if tuned.averages_functions or not refinement.can_average(tuned, _most_stored(tuned)):
            return False
        if refinement.sketched(tuned) and tuned.n_data * tuned.linearised.k > _MOST_AVERAGED:
            return False
        return training_gap(tuned, batches) > TRUST_MARGIN

    def check_em(self, posterior: Posterior, settings: em.EM, checkpoint: Any) -> None:
        if self.curvature.at_mode or self.curvature.averaged:
            raise InputError(
                'tune(by="em") samples with the curvature at the network\'s own outputs: curvature_at="network".'
            )
        if checkpoint is not None:
            raise InputError(
                'tune(by="em") keeps how far it is with the posterior: take lw.EM(max_steps=...) steps, lw.save it, '
                "and call lw.tune again, which goes on from there."
            )
        if not isinstance(posterior.fisher, Exact):
            raise StructureError(
                'tune(by="em") samples with the exact GGN, but the posterior was fitted with '
                f'{type(posterior.fisher).__name__} curvature. Fit with fisher="exact".'
            )
        if settings.g_prior and not posterior.structure.takes_any_prior:
            raise StructureError(
                "EM(g_prior=True) gives every weight a precision of its own, which a Kronecker product cannot take. "
                'Use structure="matrixfree", "lowrank", "diag" or "full".'
            )
        if isinstance(settings.solver, em.SGD | em.Cholesky) and distributed.is_distributed():
            name = type(settings.solver).__name__
            raise StructureError(f"EM(solver=lw.{name}(...)) takes one process; ranks together can use lw.CG(...).")

    def sampled(
        self,
        posterior: Posterior,
        settings: em.EM,
        data: Any,
        noise: bool,
        generator: torch.Generator,
        progress: bool | None,
    ) -> Posterior:
        """Tune by sampling-based EM."""
        batches = posterior.source if data is None else posterior.batches(data)
        if batches is None:
            raise InputError('tune(by="em") samples with the training data: lw.tune(posterior, data, by="em").')
        with random_state_kept(), torch.no_grad():
            # A step takes long, and sampling starts before the first; progress bars on the passes over the data show
            # that it runs.
            look = partial(
                encoded_batches, in_fixed_order(batches), posterior.likelihood, posterior.sites, progress=progress
            )
            tuned = em.tune_by_em(
                posterior,
                partial(look, what="em, a pass over the data"),
                settings,
                linear_mode=self.linear_mode,
                noise=noise,
                most_floats=_most_stored(posterior),
                generator=generator,
                progress=progress,
            )
            return _around_mode(tuned) if self.mean_at_mode else tuned


def _sampling_generator(generator: torch.Generator | None) -> torch.Generator:
    """The user's generator, or one with a seed that users are unlikely to generate data with: draws must not equal
    them."""
    return torch.Generator().manual_seed(7_243_605_911_427) if generator is None else seeded(generator)


def _with_default_passes(budget: tuning.Budget, posterior: Posterior, source: Source) -> tuning.Budget:
    """More passes by default where they take little."""
    x, _ = distributed.first_item(source)
    return budget.by_default(pass_macs(ModelSummary(posterior.linearised, x), posterior.n_data))


def _most_stored(posterior: Posterior) -> int:
    """Entries allowed for the Jacobian of all data; `chunk_floats` is a third of what the fit's budget had left."""
    return min(MOST_STORED, 3 * posterior.chunk_floats)


def _around_mode(tuned: Posterior) -> Posterior:
    """Centre predictions at the linear model's mode."""
    shift = (tuned.linear_mode() - tuned.linearised.theta).detach()
    return replace(tuned, readout=replace(tuned.readout, shift=shift, noise_std=None))


def _noise_around_network(posterior: Posterior, noise: bool) -> torch.Tensor | None:
    """√(SSE of the network / (n − γ)) if larger than the noise around the linear mode, else that noise.

    The evidence estimates the noise around h(x; θ_*). Predictions are centred at the network's own outputs, which may
    have larger residuals.
    """
    likelihood = posterior.likelihood
    if not noise or not isinstance(likelihood, Gaussian) or not likelihood.estimated:
        return None
    sse, count = posterior.estimate.statistics.likelihood.chunk(2)
    gamma = evidence.effective_dimension_of_parts(
        posterior.curvature_at, posterior.part_scales.detach(), posterior.prior
    )
    # γ may approach n, and the estimate then diverges: at least a fifth of the data count as degrees of freedom.
    left = torch.maximum(count - gamma, 0.2 * count)
    return torch.maximum((sse / left).sqrt(), likelihood.resolved().detach())


def _reestimated(posterior: Posterior, source: Any) -> Posterior:
    """The same posterior with the curvature at the outputs of the linear mode."""
    return refinement.reestimated_at(posterior, source, posterior.linear_mode() - posterior.linearised.theta)


def _grouped(posterior: Posterior, groups: str | None, data: Any, *, by_evidence: bool) -> Posterior:
    """Change the prior's groups as requested; by default one precision becomes one per normalised group.

    Tuning on held-out data alone scales all precisions, and keeps their ratios.
    """
    prior = posterior.prior
    if groups is None and not prior.P0.isotropic:
        untuned = bool(prior.reasons) and bool((prior.precisions == prior.precisions[0]).all())
        return _with_initial_precisions(posterior) if by_evidence and untuned else posterior
    if groups is not None and groups != "normalised":
        make = words.choose("groups", groups, {**words.GROUPS, "normalised": priors.isotropic})
        return posterior.with_prior(priors.regrouped(prior, make(prior.layout, 1.0, 0.0).on(prior.index.device)))
    if groups is None and normalised.cannot_normalise(posterior.linearised.network.model):
        return posterior
    batches = posterior.source if data is None else posterior.batches(data)
    x = None if batches is None else batches.first_on_any_rank()[0]
    few = None if x is None else x.rows(slice(0, min(_FEW, x.n)))
    return _with_initial_precisions(posterior.with_prior(normalised.normalised_prior(posterior.linearised, few, prior)))


def _with_initial_precisions(posterior: Posterior) -> Posterior:
    """Start several groups at δ_g = P_g / ‖θ̃ − m₀‖², which scales with the weights like the optimum does."""
    prior = posterior.prior
    if prior.P0.isotropic:
        return posterior
    scatter = prior.scatter(posterior.linearised.theta)
    start = torch.where(scatter > 0, prior.P0.sizes / scatter, prior.precisions.detach())
    return posterior.with_prior(prior.with_precisions(start))
