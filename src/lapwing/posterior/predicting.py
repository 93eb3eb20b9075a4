"""Predictions: linearised, by draws of functions for many outputs, by sampled networks, or at the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from lapwing import predictive
from lapwing._types import Float, Tensor
from lapwing.data import ModelInput, as_inputs
from lapwing.errors import InputError, StructureError, located
from lapwing.linear_model import in_data_order
from lapwing.posterior.fitted import Fitted
from lapwing.posterior.trained import N_DRAWS
from lapwing.predictive import FUNCTION_PAIRS, Frame, Prediction
from lapwing.predictive.link_rules import DEFAULT, as_link
from lapwing.runtime.arguments import choose, counted, seeded
from lapwing.runtime.free_memory import give_back
from lapwing.runtime.progress import shown
from lapwing.runtime.sandbox import random_state_kept

_MOST_KEPT = 1 << 24  # numbers in function draws that are cached between calls
_FLOATS_OF_DRAWS = 1 << 20  # numbers in draws of outputs at a time, which then stay in the cache
_FLOATS_PASSED = 1 << 24  # numbers in draws after which freed memory is returned to the system

_OfPiece = Callable[[Fitted, ModelInput], Prediction]  # called with the posterior for outputs of the piece's shape


def predicted(
    posterior: Fitted,
    x: Any,
    *,
    predictive: str | None = None,
    link: Any = None,
    n_samples: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Prediction:
    """`predict` without the warning for untuned posteriors, for use inside the library."""
    usual, n_usual = posterior.usual_predictive
    n_usual = n_usual if predictive is None else N_DRAWS
    predictive, n_samples = predictive or usual, n_usual if n_samples is None else counted("n_samples", n_samples)
    rule = posterior.readout.link if link is None else as_link(link)
    frame = Frame(posterior.sites, posterior.dtype, rule, n_samples, seeded(generator))
    ways = {"glm": _by_glm if generator is not None else _by_usual_glm, "bnn": _by_bnn, "mean": _at_mean}
    of_piece = choose("predictive", predictive, ways)(posterior, frame)
    few = predictive == "glm" and posterior.averages_functions and frame.link == DEFAULT
    n_draws = 1 if predictive == "mean" else min(n_samples, posterior.n_functions) if few else n_samples
    many = as_inputs(x, posterior.columns)
    if many is None:
        one = replace(posterior.given(x), origin="")
        return _by_pieces(posterior, [one], of_piece, frame, n_draws).checked()
    with random_state_kept():
        batches = in_data_order(many)
        seen = shown(batches, total=len(batches), what="predict", progress=progress)
        return _by_pieces(posterior, map(posterior.given, seen), of_piece, frame, n_draws).checked()


def _by_pieces(
    posterior: Fitted, batches: Iterable[ModelInput], of_piece: _OfPiece, frame: Frame, n_draws: int
) -> Prediction:
    """Predict piece by piece, with the same random numbers in each: batching does not matter, and saves memory."""
    state, parts, sizes, passed = frame.generator.get_state(), [], [], 0
    for x in batches:
        with located(x.origin) if x.origin else nullcontext():
            at_x = posterior.at(x)
            floats = n_draws * at_x.linearised.k
            step = max(1, min(posterior.chunk_floats // 4, _FLOATS_OF_DRAWS) // floats)
            for piece in [x] if step >= x.n else [x.rows(slice(i, i + step)) for i in range(0, x.n, step)]:
                # Every piece gets the same random numbers, so that results do not depend on batching.
                frame.generator.set_state(state)
                parts.append(of_piece(at_x, piece))
                sizes.append(piece.n)
                passed += piece.n * floats
                # The allocator keeps freed blocks; over many pieces they fragment, and memory grows.
                if passed > _FLOATS_PASSED:
                    give_back()
                    passed = 0
    if not parts:
        raise InputError("predict: the data gave no batch: the loader or data set is empty.")
    return predictive.concatenated(parts, sizes)


def _by_glm(posterior: Fitted, frame: Frame) -> _OfPiece:
    if posterior.averages_functions and frame.link == DEFAULT:
        deviations = posterior.deviations(min(FUNCTION_PAIRS, -(-frame.n_samples // 2)), frame.generator)
        return _by_functions(deviations, replace(frame, n_samples=2 * len(deviations)))
    return lambda at_x, x: _by_gaussian(at_x, replace(frame, sites=at_x.sites), x)


def _by_usual_glm(posterior: Fitted, frame: Frame) -> _OfPiece:
    """The same without a user's generator: the draws of the weights are then fixed, and cached."""
    kept = posterior.averages_functions and frame.link == DEFAULT and frame.n_samples >= 2 * FUNCTION_PAIRS
    if not kept or FUNCTION_PAIRS * posterior.layout.p > _MOST_KEPT:
        return _by_glm(posterior, frame)
    return _by_functions(posterior.usual_deviations, replace(frame, n_samples=2 * FUNCTION_PAIRS))


def _by_gaussian(posterior: Fitted, frame: Frame, x: ModelInput) -> Prediction:
    gaussian = predictive.pushforward_sites(posterior.weights, x, posterior.sites)
    return predictive.from_gaussian(posterior.observed_likelihood, gaussian.tempered(posterior.temperature), frame)


def _by_bnn(posterior: Fitted, frame: Frame) -> _OfPiece:
    """f(x; θ_s) for sampled weights θ_s ~ N(μ, P⁻¹) in the network itself."""
    if posterior.refinement is not None:
        raise StructureError(
            'predictive="bnn" is not defined for a refined posterior: its mean is one of the linear model, and the '
            'network itself was never trained to have such weights. Use predictive="glm", or the posterior before '
            "lw.refine."
        )
    deviations = posterior.deviations(frame.n_samples, frame.generator)
    if posterior.shift is not None:
        deviations = deviations + posterior.shift
    return lambda at_x, x: _by_draws(at_x, predictive.network_draws(at_x.linearised, x, deviations), frame)


def _at_mean(posterior: Fitted, frame: Frame) -> _OfPiece:
    """f(x; μ). For a refined posterior, whose mean belongs to the linear model, f(x; θ*) + J (μ − θ*)."""
    if posterior.refinement is not None:
        return lambda at_x, x: _by_draws(at_x, predictive.mean_outputs(at_x.weights, x)[None], frame)
    shift = torch.zeros_like(posterior.linearised.theta) if posterior.shift is None else posterior.shift
    return lambda at_x, x: _by_draws(at_x, predictive.network_draws(at_x.linearised, x, shift[None]), frame)


def _by_draws(posterior: Fitted, f: Float[Tensor, "s n k"], frame: Frame) -> Prediction:
    by_site = torch.stack([posterior.sites.split(draw) for draw in f / posterior.temperature])
    return predictive.from_draws(posterior.observed_likelihood, by_site, replace(frame, sites=posterior.sites))


def _by_functions(deviations: Float[Tensor, "s p"], frame: Frame) -> _OfPiece:
    return lambda at_x, x: _by_draws(at_x, predictive.antithetic_draws(at_x.weights, x, deviations), frame)
