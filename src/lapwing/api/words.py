"""Convert strings to objects: the only place where a string option is interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lapwing import priors
from lapwing.curvature import STRUCTURES, Empirical, Exact, Fisher, Sampled, Structure
from lapwing.data import ModelInput, as_batches, as_input
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, Sites
from lapwing.network import parameters, rule_check
from lapwing.network.module import Network
from lapwing.network.parameters import ParamLayout
from lapwing.network.rule_check import LayoutChoice
from lapwing.planning import AutoFisher, Kind
from lapwing.priors import GaussianPrior, normalised
from lapwing.runtime import arguments
from lapwing.runtime.arguments import seeded
from lapwing.subnetwork import (
    CountScaling,
    Functional,
    JacobianScaling,
    Magnitude,
    MarginalVariance,
    PriorScaling,
    RandomScore,
    Score,
    Selector,
    Subnetwork,
    Swag,
    Unscaled,
)

T = TypeVar("T")

# Names used by papers and other libraries.
SYNONYMS: dict[str, dict[str, str]] = {
    "structure": {
        "kfac": "kron",
        "k_fac": "kron",
        "kronecker": "kron",
        "diagonal": "diag",
        "low_rank": "lowrank",
        "matrix_free": "matrixfree",
        "block_diagonal": "block",
        "dense": "full",
        "gaussian_process": "gp",
        "ek_fac": "ekfac",
    },
    "likelihood": {
        "classifier": "classification",
        "multiclass": "classification",
        "categorical": "classification",
        "bernoulli": "binary",
        "binary_classification": "binary",
        "multi_label": "multilabel",
        "gaussian": "regression",
        "regressor": "regression",
        "poisson": "count",
        "counts": "count",
    },
    "fisher": {"ggn": "exact", "sampled": "mc", "monte_carlo": "mc"},
    "params": {},  # variants of spelling only; other strings are patterns
}

WORDS: dict[str, set[str]] = {
    "likelihood": {"classification", "binary", "multilabel", "regression", "count"},
    "fisher": {"auto", "exact", "mc", "empirical"},
    "params": {"all", "last_layer"},
}

GroupBuilder = Callable[[ParamLayout, Any, Any], GaussianPrior]
GROUPS: dict[str, GroupBuilder] = {
    "one": priors.isotropic,
    "layer": priors.layerwise,
    "tensor": priors.tensorwise,
    "element": priors.elementwise,
}

SCALINGS: dict[str, PriorScaling] = {"none": Unscaled(), "count": CountScaling(), "jacobian": JacobianScaling()}


def canonical(argument: str, word: Any) -> Any:
    """The library's own word for a synonym; anything else unchanged."""
    if not isinstance(word, str) or argument not in SYNONYMS:
        return word
    # Tolerate case, hyphens and spaces.
    plain, synonyms = word.lower().replace("-", "_").replace(" ", "_"), SYNONYMS[argument]
    return synonyms.get(plain, plain if plain in known(argument) else word)


def known(argument: str) -> set[str]:
    """The library's own words for an argument."""
    return {"auto", *STRUCTURES} if argument == "structure" else WORDS[argument]


def choose(argument: str, word: Any, options: Mapping[str, T]) -> T:
    """The object for a word or a synonym; raises with a list of the words."""
    return arguments.choose(argument, canonical(argument, word), options)


def structure(word: Any) -> Structure | None:
    """None stands for automatic choice."""
    return word if isinstance(word, Structure) else choose("structure", word, {"auto": None, **STRUCTURES})


def check_repeatable(structure: Structure | None, fisher: Kind) -> None:
    """Structures computed by several passes need the same matrix in each, so no random Fisher."""
    drawn = isinstance(fisher, Fisher) and not fisher.repeatable
    if structure is not None and structure.by_products and drawn:
        raise StructureError(
            f'{type(structure).__name__} makes many passes over the data, but fisher="mc" draws other labels in each '
            'of them. Use fisher="exact": products with it cost no more.'
        )


def fisher(word: Any, generator: torch.Generator) -> Kind:
    if isinstance(word, Fisher):
        return word
    words: dict[str, Kind] = {
        "auto": AutoFisher(generator),
        "exact": Exact(),
        "mc": Sampled(generator),
        "empirical": Empirical(),
    }
    return choose("fisher", word, words)


def likelihood(word: Any, datum_shape: tuple[int, ...]) -> Likelihood:
    """The likelihood for outputs of this shape."""
    if isinstance(word, Likelihood):
        return word
    word = canonical("likelihood", word)
    words: dict[str, Likelihood] = {
        # One logit cannot be a softmax: it means a sigmoid.
        "classification": Bernoulli() if Sites(datum_shape).c == 1 else Categorical(),
        "binary": Bernoulli(),
        "multilabel": Bernoulli(),
        "regression": Gaussian(),
        "count": Poisson(),
    }
    chosen = choose("likelihood", word, words)
    if word == "binary" and Sites(datum_shape).c != 1:
        raise InputError(
            f'likelihood "binary" needs one logit per label, but the model gives {Sites(datum_shape).c}. '
            'Use "classification" for a softmax over classes, or "multilabel" for independent labels.'
        )
    return chosen


def layout_choice(word: Any) -> LayoutChoice:
    """How to select parameters: all trainable ones, the last layer, or names and glob patterns."""
    word = canonical("params", word)
    if isinstance(word, str):
        if word == "all":
            return _all
        if word == "last_layer":
            return rule_check.last_layer
        return partial(_matching, (word,))
    if isinstance(word, list | tuple) and all(isinstance(pattern, str) for pattern in word):
        return partial(_matching, tuple(word))
    came = type(word).__name__
    if isinstance(word, list | tuple):
        came += f" with a {next(type(item).__name__ for item in word if not isinstance(item, str))}"
    raise InputTypeError(
        'params: expected "all", "last_layer", a list of parameter names or glob patterns, or lw.Subnetwork(...), '
        f"got {came}."
    )


def selector(word: Any, generator: torch.Generator | None = None) -> Selector | None:
    """How to select single weights; None if whole tensors are requested."""
    if not isinstance(word, Subnetwork):
        return None
    scaling = word.prior_scaling
    if not isinstance(scaling, PriorScaling):
        scaling = choose("prior_scaling", scaling, SCALINGS)
    among = layout_choice("last_layer" if word.score == "last_layer" else word.among)
    eligible = partial(_weights_of, among) if word.weights_only else among
    return Selector(eligible, score(word.score, generator), word.k, scaling, word.indices)


def score(word: Any, generator: torch.Generator | None = None) -> Score:
    words: dict[str, Score] = {
        "variance": MarginalVariance(),
        "diag_laplace": MarginalVariance(),
        "last_layer": MarginalVariance(),
        "swag": Swag(),
        "functional": Functional(),
        "magnitude": Magnitude(),
        "random": RandomScore(seeded(generator)),
    }
    return word if isinstance(word, Score) else choose("score", word, words)


def grouped_prior(model: nn.Module, precision: Any, groups: str, mean: Any, data: Any = None) -> GaussianPrior:
    """A prior over all trainable parameters of a model; only "normalised" groups need data."""
    found: GroupBuilder = partial(_grouped_by_norms, model, data)
    return choose("groups", groups, {**GROUPS, "normalised": found})(parameters.trainable(model), precision, mean)


def _grouped_by_norms(model: nn.Module, data: Any, layout: ParamLayout, precision: Any, mean: Any) -> GaussianPrior:
    x = None if data is None else first_inputs(data)
    network = Network.of(model) if x is None else Network.tried(model, x)[0]
    return normalised.grouped_by_norms(network, layout, x, precision, mean)


def first_inputs(data: Any) -> ModelInput:
    """The inputs of the first batch, or the inputs themselves if there are no targets."""
    alone = isinstance(data, torch.Tensor | np.ndarray) or (isinstance(data, Mapping) and "labels" not in data)
    return as_input(data, "data") if alone else as_batches(data).first()[0]


def _all(model: nn.Module, x: ModelInput) -> ParamLayout:
    return parameters.differentiable(model, parameters.trainable(model))


def _weights_of(among: LayoutChoice, model: nn.Module, x: ModelInput) -> ParamLayout:
    return parameters.weights_of(among(model, x))


def _matching(patterns: tuple[str, ...], model: nn.Module, x: ModelInput) -> ParamLayout:
    return parameters.differentiable(model, parameters.matching(model, patterns))
