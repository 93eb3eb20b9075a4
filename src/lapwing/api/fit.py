"""lw.fit, lw.plan and lw.prior: check arguments, convert words to objects, and call the library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lapwing import curvature, priors
from lapwing.api import words
from lapwing.api.mistakes import warn_of_mistakes
from lapwing.curvature import Estimate, Fisher, ModelSummary, Structure
from lapwing.data import Batches, Columns, ModelInput, as_batches
from lapwing.data.targets import dropped_by_loader, encode_batch, encoded_batches, longest_labels, ragged
from lapwing.errors import InputError, InputTypeError, located, warn
from lapwing.likelihoods import Gaussian, Likelihood, Sites
from lapwing.network.agreement import agreed, refuse_sharded
from lapwing.network.linearised import Linearised
from lapwing.network.module import check_module, unwrapped
from lapwing.network.parameters import ParamLayout, tied
from lapwing.network.rule_check import LayoutChoice, last_layer, linearise
from lapwing.planning import (
    Choice,
    CostQuery,
    Kind,
    Needs,
    Plan,
    TrialRun,
    choose,
    forward_macs,
    make_plan,
    parse_memory,
    refuse_factors_of_a_selection,
    resolved,
)
from lapwing.posterior import Posterior, Readout, passes_over
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import positive_scale, seeded
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.storage import Checkpoint, binding, in_order
from lapwing.subnetwork import Candidates, Selector


class _Unset(float):
    """A default value that can be distinguished from the same number given by the user."""


_DEFAULT_PRECISION = _Unset(1.0)


@distributed.collective_call("lw.fit")
@plain_tensors()
def fit(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: Any = "auto",
    params: Any = "all",
    prior: Any = _DEFAULT_PRECISION,
    fisher: Any = "auto",
    likelihood_scale: Any = 1.0,
    memory: str | float | None = None,
    inputs: Any = None,
    targets: Any = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 60,
) -> Posterior:
    """Linearise a trained network and fit a Gaussian posterior over its weights, in one pass over the data.

    The model, its buffers, hooks, modes and gradients, and all global random states are unchanged afterwards. Under
    torch.distributed, `data` are those of this rank, and every rank gets the posterior of all ranks' data.

    `inputs` and `targets` name the columns of mapping batches, if those are not the model's keywords and `labels`: one
    name, a list (positional arguments, in order) or a mapping {column: keyword}. The posterior remembers them.

    `checkpoint` is a directory where progress is stored every `every` seconds. After an interruption the same call
    resumes, with bit-identical results. A shuffling DataLoader is then read in the order of its dataset.
    """
    check_module("fit", model)
    wrapped, model = model, unwrapped(model)  # DistributedDataParallel and torch.compile wrap a model
    refuse_sharded(model)
    chosen, kind = words.structure(structure), words.fisher(fisher, distributed.rank_generator(seeded(generator)))
    words.check_repeatable(chosen, kind)
    scale, selector = positive_scale("likelihood_scale", likelihood_scale), words.selector(params, generator)
    # The smallest budget of all ranks: they must choose the same structure.
    budget = min(distributed.gathered(parse_memory(memory)))
    if selector is None:
        layout_choice = words.layout_choice(params)
    else:
        refuse_factors_of_a_selection(chosen)
    with random_state_kept():
        batches = _named(data, Columns.of(inputs, targets))
        # A resumed run must see the same batches in the same order.
        batches = batches if checkpoint is None else in_order(batches)
        order = _Request(model, likelihood, batches, prior, kind, scale, budget, progress, isinstance(prior, _Unset))
        if selector is not None:
            layout, prior = selector.selected(order.candidates(selector))
            order, layout_choice = replace(order, prior=prior), _fixed(layout)
        view = order.prepared(layout_choice)
        view = replace(view, linearised=agreed(view.linearised, wrapped is not model))
        warn_of_mistakes(view.linearised, view.family, view.x, view.y)
        view, taken = view.with_fisher_for(view.choice_for(chosen))
        estimate = view.estimate(taken, seeded(generator), _CheckpointOptions(checkpoint, every))
    _warn_of_dropped(batches, estimate.statistics.n)
    return view.posterior(taken, estimate)


@dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of lw.fit, as objects as far as that is possible before the data are seen."""

    model: nn.Module
    likelihood: Any
    batches: Batches
    prior: Any
    fisher: Kind
    scale: torch.Tensor
    budget: int
    progress: bool | None
    default_prior: bool  # not chosen by the user

    def prepared(self, layout_choice: LayoutChoice) -> _Prepared:
        """Trace the first batch. Raises for everything that is unsupported, before the pass over the data."""
        linearised, family, (x, y) = _prepare(
            self.model, layout_choice, self.likelihood, self.batches.first_on_any_rank()
        )
        linearised = _extended_to_longest_labels(linearised, family, self.batches)
        prior = priors.as_prior(self.prior, linearised.layout).on(linearised.network.device)
        return _Prepared(self, linearised, family, prior, x, y)

    def candidates(self, selector: Selector) -> Candidates:
        """The weights a subnetwork is selected from. Raises before any pass if the selection is impossible."""
        view = self.prepared(selector.eligible)
        selector.check(view.linearised.layout)
        room = choose(curvature.Diag(), replace(view.needs, n_data=None))
        data = partial(encoded_batches, self.batches, view.family, view.sites, progress=self.progress, what="score")
        fisher, _ = resolved(self.fisher, room.structure, view.needs)
        return Candidates(
            view.linearised, view.family, view.sites, data, view.prior, fisher, self.scale, room.chunk_floats
        )


@dataclass(frozen=True)
class _CheckpointOptions:
    """Where to store progress (None: nowhere), and how often."""

    directory: str | os.PathLike[str] | None
    every: float


@dataclass(frozen=True, eq=False)
class _Prepared:
    """The arguments of lw.fit together with the linearised network and the first batch."""

    order: _Request
    linearised: Linearised
    family: Likelihood
    prior: GaussianPrior
    x: ModelInput
    y: torch.Tensor

    @property
    def sites(self) -> Sites:
        return Sites(self.linearised.datum_shape, self.family.class_axis)

    @property
    def fisher(self) -> Fisher:
        assert isinstance(self.order.fisher, Fisher)  # resolved by `with_fisher_for`
        return self.order.fisher

    @property
    def needs(self) -> Needs:
        # An estimate: the last batch may be smaller, and some loaders have no length.
        n_data = sum(distributed.gathered(len(self.order.batches))) * self.x.n or None
        n_parts = _n_parts(self.linearised, self.family)
        return Needs(ModelSummary(self.linearised, self.x), n_parts, self.order.budget, self.prior.P0, n_data)

    def choice_for(self, structure: Structure | None) -> Choice:
        return choose(structure, self.needs)

    def with_fisher_for(self, taken: Choice) -> tuple[_Prepared, Choice]:
        """Resolve fisher="auto" for the structure, and add the reason to that of the structure."""
        fisher, why = resolved(self.order.fisher, taken.structure, self.needs)
        explained = replace(taken, why=f"{taken.why}; {why}") if why else taken
        return replace(self, order=replace(self.order, fisher=fisher)), explained

    def estimate(self, taken: Choice, generator: torch.Generator, options: _CheckpointOptions) -> Estimate:
        """The pass over the data, with a checkpoint if requested."""
        order, batches, fisher = self.order, self.order.batches, self.fisher
        estimated = partial(
            curvature.estimate,
            self.linearised,
            self.family,
            passes_over(batches, self.family, self.sites, taken.structure, order.progress),
            sites=self.sites,
            structure=taken.structure,
            fisher=fisher,
            chunk_floats=taken.chunk_floats,
            generator=generator,
            P0=self.prior.P0,
        )
        if options.directory is None:
            return estimated()
        bound_to = binding(self.linearised, self.family, taken.structure, fisher, taken.chunk_floats, len(batches))
        checkpoint = Checkpoint.of_fit(options.directory, options.every, bound_to, self.linearised.network.device)
        with checkpoint.going_on():
            return estimated(checkpoint=checkpoint)

    def posterior(self, taken: Choice, estimate: Estimate) -> Posterior:
        """The posterior, with the noise estimated if it was not given."""
        family, structure = self.family, taken.structure
        # Estimating the noise needs the residuals of all data, so it comes after the pass.
        if isinstance(family, Gaussian) and family.noise_std is None:
            family = family.estimate(estimate.statistics.likelihood)
        return Posterior(
            self.linearised,
            family,
            estimate,
            self.prior.with_precisions(estimate.prior_scale * self.prior.precisions),
            structure,
            self.fisher,
            self.order.scale,
            taken.chunk_floats,
            why=taken.why,
            readout=Readout(newton=structure.moves_mean),
            source=self.order.batches,
            columns=self.order.batches.columns,
            untuned=self._untuned(structure),
        )

    def _untuned(self, structure: Structure) -> bool:
        """Whether prior and noise are still defaults, about which `diagnose()` warns."""
        chosen_noise = isinstance(self.family, Gaussian) and not self.family.estimated
        chosen = chosen_noise or structure.states_prior or not self.linearised.layout.p
        return self.order.default_prior and not chosen


@plain_tensors()
def plan(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    params: Any = "all",
    fisher: Any = "auto",
    memory: str | float | None = None,
    inputs: Any = None,
    targets: Any = None,
    n_inputs: int | None = None,
) -> Plan:
    """Estimate what each structure would cost on this model and data, and what `auto` would take; print the result.

    Reads the first batch only. Peak memory is for batches of its size, and for predicting `n_inputs` at a time
    (default: the batch size).
    """
    check_module("plan", model)
    model = unwrapped(model)
    kind, selector, budget = words.fisher(fisher, seeded(None)), words.selector(params), parse_memory(memory)
    layout_choice = words.layout_choice(params) if selector is None else _planned(selector)
    with random_state_kept():
        batches = _named(data, Columns.of(inputs, targets))
        last = _last_layer(model, batches)
        whole = _trial_run(model, layout_choice, likelihood, batches)
        asked = [("all" if params == "all" else "as asked", whole)]
        if last is not None and last != whole.summary.layout:
            asked.append(("last layer", _trial_run(model, _fixed(last), likelihood, batches)))
        macs = forward_macs(
            whole.summary
            if params == "all"
            else ModelSummary(linearise(model, words.layout_choice("all"), whole.x), whole.x)
        )
        questions = [
            CostQuery(
                params=words,
                needs=Needs(trial_run.summary, trial_run.n_parts, budget, n_data=len(batches) * trial_run.x.n or None),
                trial_run=trial_run,
                kind=kind,
                n_inputs=n_inputs or trial_run.x.n,
                forward_macs=macs,
                through_body=trial_run.summary.layout != last or tied(model, last),
            )
            for words, trial_run in asked
        ]
        return make_plan(questions)


@plain_tensors()
def prior(
    model: nn.Module, precision: Any = 1.0, groups: str = "one", mean: Any = 0.0, *, data: Any = None
) -> GaussianPrior:
    """N(mean, 1/precision) over the model's trainable weights, with one precision per group.

    `groups`: "one" for all, "layer" (a module's weight and bias together), "tensor", "element", or "normalised": one
    for each set of tensors whose common scale a later normalisation layer removes. Those are found by running the
    model on the first inputs in `data` (a loader, (X, Y), or inputs alone), or else on random inputs.
    """
    check_module("prior", model)
    with random_state_kept():
        return words.grouped_prior(unwrapped(model), precision, groups, mean, data)


def _named(data: Any, columns: Columns | None) -> Batches:
    batches = as_batches(data, columns=columns)
    if columns is not None and batches.in_memory and not isinstance(data[0], Mapping):
        raise InputTypeError(
            "inputs= and targets= name the columns of mapping batches, but the data are a pair (X, Y). Leave the names "
            "out, or pass batches that are mappings."
        )
    return batches


def _n_parts(linearised: Linearised, likelihood: Likelihood) -> int:
    return linearised.k if isinstance(likelihood, Gaussian) and likelihood.per_output else 1


def _prepare(
    model: nn.Module, layout_choice: Any, likelihood: Any, batch: tuple[ModelInput, Any]
) -> tuple[Linearised, Likelihood, tuple[ModelInput, torch.Tensor]]:
    """Linearise, and encode the first batch. Raises for everything that is unsupported, before the pass."""
    x, y = batch
    linearised = linearise(model, layout_choice, x)
    family = words.likelihood(likelihood, linearised.datum_shape)
    check_class_axis_of(family, linearised.datum_shape)
    sites = Sites(linearised.datum_shape, family.class_axis)
    with located("batch 0"):
        if ragged(family, sites):
            family.encode(y, sites, x.n)  # before padding: the labels must match the outputs
        first = encode_batch(x, y, family, sites)
    return linearised, family, first


def _extended_to_longest_labels(linearised: Linearised, family: Likelihood, batches: Batches) -> Linearised:
    """Extend the outputs to the longest sequence of labels, if data differ in length."""
    sites = Sites(linearised.datum_shape, family.class_axis)
    if not ragged(family, sites):
        return linearised
    shape = sites.with_positions(longest_labels(batches, sites))
    return replace(linearised, datum_shape=shape, ragged=1 - sites.axis)


def _fixed(layout: ParamLayout) -> LayoutChoice:
    return lambda model, x: layout


def _planned(selector: Selector) -> LayoutChoice:
    """A layout with as many weights as the fit would select, without passes over the data."""

    def choose_without_data(model: nn.Module, x: ModelInput) -> ParamLayout:
        layout = selector.eligible(model, x)
        selector.check(layout)
        tensors = dict(model.named_parameters())
        return selector.without_data(layout, layout.ravel({n: tensors[n].detach().double() for n in layout.names}))

    return choose_without_data


def _trial_run(model: nn.Module, layout_choice: Any, likelihood: Any, batches: Batches) -> TrialRun:
    linearised, family, (x, y) = _prepare(model, layout_choice, likelihood, batches.first())
    sites = Sites(linearised.datum_shape, family.class_axis)
    n_data = len(batches) * x.n or None
    return TrialRun(ModelSummary(linearised, x), family, sites, x, y, _n_parts(linearised, family), n_data)


def _last_layer(model: nn.Module, batches: Batches) -> ParamLayout | None:
    """The layout of the last layer; None if it is frozen or cannot be determined."""
    with suppress(InputError):
        return last_layer(model, batches.first()[0])
    return None


def check_class_axis_of(likelihood: Likelihood, datum_shape: tuple[int, ...]) -> None:
    n_axes = len(datum_shape) + 1
    if not -len(datum_shape) <= likelihood.class_axis < n_axes and not (
        not datum_shape and likelihood.class_axis == -1
    ):
        raise InputError(
            f"class_axis={likelihood.class_axis} is outside the model's output, which has {n_axes} axes: "
            f"(B, {', '.join(map(str, datum_shape))})."
        )


def _warn_of_dropped(batches: Batches, seen: int) -> None:
    dropped = (
        0 if distributed.is_distributed() else dropped_by_loader(batches, seen)
    )  # how many of them were ours is not known
    if dropped:
        warn(
            f"The loader has drop_last=True and left out {dropped} data; the posterior counts the {seen} it saw. "
            "Use drop_last=False for fitting.",
        )
