"""The front door: words in, a posterior out. It wires; the mathematics is elsewhere."""

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
from lapwing.curvature import Estimate, Fisher, Structure, Survey
from lapwing.data import Batches, Columns, ModelInput, as_batches
from lapwing.data.targets import dropped_by_loader, encode_batch, longest_labels, observed, ragged
from lapwing.errors import InputError, InputTypeError, located, warn
from lapwing.likelihoods import Gaussian, Likelihood, Sites
from lapwing.network.agreement import agreed, refuse_sharded
from lapwing.network.linearised import Linearised
from lapwing.network.module import check_module, unwrapped
from lapwing.network.parameters import ParamLayout, tied
from lapwing.network.rule_check import LayoutChoice, last_layer, linearise
from lapwing.planning import (
    Choice,
    Kind,
    Needs,
    Plan,
    Question,
    Rehearsal,
    choose,
    forward_macs,
    make_plan,
    parse_memory,
    refuse_factors_of_a_selection,
    settled,
)
from lapwing.posterior import Posterior, Readout, passes_over
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import positive_scale, seeded
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.storage import Checkpoint, binding, in_order
from lapwing.subnetwork import Candidates, Selector


class _Placeholder(float):
    """A number that stands where nobody chose one; one that is given is a plain float."""


_NOBODYS_CHOICE = _Placeholder(1.0)


@distributed.collective_call("lw.fit")
@plain_tensors()
def fit(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    structure: Any = "auto",
    params: Any = "all",
    prior: Any = _NOBODYS_CHOICE,
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
    """Linearise a trained network and fit a Gaussian posterior over its weights: one pass over the data.

    The model, its buffers, hooks, modes and gradients, and all global random states are untouched afterwards. Under
    torch.distributed the data are those of this rank, and the posterior is that of all ranks' data, on every rank.

    `inputs` and `targets` name the columns of mapping batches, where those are not the model's keywords and `labels`:
    one name, a list (positional arguments, in order) or a mapping {column: keyword}. The posterior remembers them.

    `checkpoint` names a directory where progress is written every so many seconds; after an interruption the same call
    goes on from there, to the same bits. A loader that shuffles is then read in its data set's order.
    """
    check_module("fit", model)
    wrapped, model = model, unwrapped(model)
    refuse_sharded(model)
    chosen, kind = words.structure(structure), words.fisher(fisher, distributed.rank_generator(seeded(generator)))
    words.check_repeatable(chosen, kind)
    scale, selector = positive_scale("likelihood_scale", likelihood_scale), words.selector(params, generator)
    budget = min(distributed.gathered(parse_memory(memory)))
    if selector is None:
        layout_choice = words.layout_choice(params)
    else:
        refuse_factors_of_a_selection(chosen)
    with random_state_kept():
        batches = _named(data, Columns.of(inputs, targets))
        batches = batches if checkpoint is None else in_order(batches)
        order = _Order(
            model, likelihood, batches, prior, kind, scale, budget, progress, isinstance(prior, _Placeholder)
        )
        if selector is not None:
            layout, prior = selector.selected(order.candidates(selector))
            order, layout_choice = replace(order, prior=prior), _fixed(layout)
        view = order.looked_at(layout_choice)
        view = replace(view, linearised=agreed(view.linearised, wrapped is not model))
        warn_of_mistakes(view.linearised, view.family, view.x, view.y)
        view, taken = view.with_fisher_for(view.room_for(chosen))
        estimate = view.estimate(taken, seeded(generator), _Keeping(checkpoint, every))
    _warn_of_dropped(batches, estimate.statistics.n)
    return view.posterior(taken, estimate)


@dataclass(frozen=True, eq=False)
class _Order:
    """What was asked for, in objects where it can be said before the data are seen."""

    model: nn.Module
    likelihood: Any
    batches: Batches
    prior: Any
    fisher: Kind
    scale: torch.Tensor
    budget: int
    progress: bool | None
    default_prior: bool  # nobody chose it

    def looked_at(self, layout_choice: LayoutChoice) -> _View:
        """Everything that can be refused is refused here, before the pass."""
        linearised, family, (x, y) = _prepare(self.model, layout_choice, self.likelihood, self.batches.first_of_all())
        linearised = _as_long_as_the_longest(linearised, family, self.batches)
        prior = priors.as_prior(self.prior, linearised.layout).on(linearised.network.device)
        return _View(self, linearised, family, prior, x, y)

    def candidates(self, selector: Selector) -> Candidates:
        """The weights a subnetwork is chosen from; what cannot be chosen is refused before any pass."""
        view = self.looked_at(selector.eligible)
        selector.check(view.linearised.layout)
        room = choose(curvature.Diag(), replace(view.needs, n_data=None))
        data = partial(observed, self.batches, view.family, view.sites, progress=self.progress, what="score")
        fisher, _ = settled(self.fisher, room.structure, view.needs)
        return Candidates(
            view.linearised, view.family, view.sites, data, view.prior, fisher, self.scale, room.chunk_floats
        )


@dataclass(frozen=True)
class _Keeping:
    """Where progress is written down, if anywhere, and how often."""

    directory: str | os.PathLike[str] | None
    every: float


@dataclass(frozen=True, eq=False)
class _View:
    """The order after a look at the first batch."""

    order: _Order
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
        assert isinstance(self.order.fisher, Fisher)  # settled with the structure
        return self.order.fisher

    @property
    def needs(self) -> Needs:
        n_data = sum(distributed.gathered(len(self.order.batches))) * self.x.n or None
        n_parts = _n_parts(self.linearised, self.family)
        return Needs(Survey(self.linearised, self.x), n_parts, self.order.budget, self.prior.P0, n_data)

    def room_for(self, structure: Structure | None) -> Choice:
        return choose(structure, self.needs)

    def with_fisher_for(self, taken: Choice) -> tuple[_View, Choice]:
        """The kind of curvature settled, and its reason told with that of the structure."""
        fisher, why = settled(self.order.fisher, taken.structure, self.needs)
        told = replace(taken, why=f"{taken.why}; {why}") if why else taken
        return replace(self, order=replace(self.order, fisher=fisher)), told

    def estimate(self, taken: Choice, generator: torch.Generator, keeping: _Keeping) -> Estimate:
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
        if keeping.directory is None:
            return estimated()
        bound_to = binding(self.linearised, self.family, taken.structure, fisher, taken.chunk_floats, len(batches))
        keeper = Checkpoint.of_fit(keeping.directory, keeping.every, bound_to, self.linearised.network.device)
        with keeper.going_on():
            return estimated(keeper=keeper)

    def posterior(self, taken: Choice, estimate: Estimate) -> Posterior:
        family, structure = self.family, taken.structure
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
        """Whether the prior, and the noise if there is one, are what `fit` takes where nobody says otherwise."""
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
    """What each structure would cost on this model and data, and what `auto` would take; print it.

    Only the first batch is looked at. Peaks are for batches of its size, and for predicting `n_inputs` at a time (as
    many as in the batch, unless given).
    """
    check_module("plan", model)
    model = unwrapped(model)
    kind, selector, budget = words.fisher(fisher, seeded(None)), words.selector(params), parse_memory(memory)
    layout_choice = words.layout_choice(params) if selector is None else _planned(selector)
    with random_state_kept():
        batches = _named(data, Columns.of(inputs, targets))
        last = _last_layer(model, batches)
        whole = _rehearsal(model, layout_choice, likelihood, batches)
        asked = [("all" if params == "all" else "as asked", whole)]
        if last is not None and last != whole.survey.layout:
            asked.append(("last layer", _rehearsal(model, _fixed(last), likelihood, batches)))
        macs = forward_macs(
            whole.survey if params == "all" else Survey(linearise(model, words.layout_choice("all"), whole.x), whole.x)
        )
        questions = [
            Question(
                params=words,
                needs=Needs(rehearsal.survey, rehearsal.n_parts, budget, n_data=len(batches) * rehearsal.x.n or None),
                rehearsal=rehearsal,
                kind=kind,
                n_inputs=n_inputs or rehearsal.x.n,
                forward_macs=macs,
                through_body=rehearsal.survey.layout != last or tied(model, last),
            )
            for words, rehearsal in asked
        ]
        return make_plan(questions)


@plain_tensors()
def prior(
    model: nn.Module, precision: Any = 1.0, groups: str = "one", mean: Any = 0.0, *, data: Any = None
) -> GaussianPrior:
    """N(mean, 1/precision) over the model's trainable weights, with one precision per group.

    `groups`: "one" for all, "layer" (a module's weight and bias together), "tensor", "element", or "normalised": one
    for each set of tensors whose common scale a normalisation layer takes out again, found by looking. For that the
    model is run: on the first inputs in `data` (a loader, (X, Y), or inputs alone), else on made-up ones.
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
    """Look at the first batch: everything that can be refused is refused here, before the pass."""
    x, y = batch
    linearised = linearise(model, layout_choice, x)
    family = words.likelihood(likelihood, linearised.datum_shape)
    check_class_axis_of(family, linearised.datum_shape)
    sites = Sites(linearised.datum_shape, family.class_axis)
    with located("batch 0"):
        if ragged(family, sites):
            family.encode(y, sites, x.n)  # as they came: one label for every position of the outputs
        first = encode_batch(x, y, family, sites)
    return linearised, family, first


def _as_long_as_the_longest(linearised: Linearised, family: Likelihood, batches: Batches) -> Linearised:
    """Outputs with a place for every label, where some data have more of them than those of the first batch."""
    sites = Sites(linearised.datum_shape, family.class_axis)
    if not ragged(family, sites):
        return linearised
    shape = sites.with_positions(longest_labels(batches, sites))
    return replace(linearised, datum_shape=shape, ragged=1 - sites.axis)


def _fixed(layout: ParamLayout) -> LayoutChoice:
    return lambda model, x: layout


def _planned(selector: Selector) -> LayoutChoice:
    """As many weights as the fit would choose, without its passes over the data."""

    def choose_without_data(model: nn.Module, x: ModelInput) -> ParamLayout:
        layout = selector.eligible(model, x)
        selector.check(layout)
        tensors = dict(model.named_parameters())
        return selector.without_data(layout, layout.ravel({n: tensors[n].detach().double() for n in layout.names}))

    return choose_without_data


def _rehearsal(model: nn.Module, layout_choice: Any, likelihood: Any, batches: Batches) -> Rehearsal:
    linearised, family, (x, y) = _prepare(model, layout_choice, likelihood, batches.first())
    sites = Sites(linearised.datum_shape, family.class_axis)
    n_data = len(batches) * x.n or None
    return Rehearsal(Survey(linearised, x), family, sites, x, y, _n_parts(linearised, family), n_data)


def _last_layer(model: nn.Module, batches: Batches) -> ParamLayout | None:
    """None when the last layer is frozen, or there is no telling."""
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
