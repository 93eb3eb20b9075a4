"""Concatenate the predictions of several batches.

Large inputs are predicted in pieces, so that the draws for all of them are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import distributions as td

from lapwing._types import Tensor
from lapwing.errors import InputError, ShapeError, StructureError
from lapwing.predictive.prediction import (
    ClassPrediction,
    DensityPrediction,
    Prediction,
    RegressionPrediction,
)


def concatenated(parts: Sequence[Any], sizes: Sequence[int]) -> Prediction:
    """The predictions one after the other; `sizes` are the numbers of data in each."""
    first, *others = parts
    if not others:
        return first
    shapes = {_datum_shape(part) for part in parts}
    # Sequences of different lengths can be padded; other shapes cannot be joined.
    if len(shapes) > 1:
        if isinstance(first, ClassPrediction) and all(len(shape) == 2 for shape in shapes):
            return _padded_to_longest(parts, sizes)
        raise ShapeError(
            f"predict: batches gave outputs of different shapes, such as {min(shapes)} and {max(shapes)} for a datum, "
            "which do not go into one prediction. Predict batch by batch."
        )
    log_density = _by_part([part.log_density for part in parts], sizes)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    if isinstance(first, ClassPrediction):
        return ClassPrediction(
            joined("log_probs"),
            joined("expected_entropy"),
            joined("expected_noise"),
            _by_part([part.arranged for part in parts], sizes),
            log_density,
            first.binary,
            ignore_index=first.ignore_index,
        )
    if isinstance(first, DensityPrediction):
        return DensityPrediction(None if first.mean is None else joined("mean"), log_density)
    return RegressionPrediction(
        joined("mean"),
        joined("epistemic"),
        joined("aleatoric"),
        _joint([part.distribution for part in parts]),
        lambda level: torch.cat([part.quantile(level) for part in parts]),
        log_density,
    )


def _datum_shape(part: Any) -> tuple[int, ...]:
    values = part.log_probs if isinstance(part, ClassPrediction) else part.mean
    return () if values is None else tuple(values.shape[1:])


def _padded_to_longest(parts: Sequence[ClassPrediction], sizes: Sequence[int]) -> ClassPrediction:
    """(n, T, K) padded to the largest number of positions T; padded positions have probability zero."""
    longest = max(parts, key=lambda part: part.log_probs.shape[1])
    t, ignored = longest.log_probs.shape[1], longest.ignore_index

    def joined(values: Sequence[Tensor], fill: float) -> Tensor:
        return torch.cat([_padded(value, t, fill) for value in values])

    def density(part: ClassPrediction, y: Any) -> Tensor:
        labels, own = torch.as_tensor(y), part.log_probs.shape[1]
        if labels.ndim != 2 or labels.shape[1] != t:
            raise ShapeError(f"log_prob: expected labels (N, {t}), one for each position, got {tuple(labels.shape)}.")
        if bool((labels[:, own:] != ignored).any()):
            raise InputError(
                f"log_prob: some data have {own} positions, and labels beyond them. Label those ignore_index={ignored}."
            )
        return _padded(part.log_density(labels[:, :own]), t, 0.0)

    # `present` marks the real positions, for `label` and for the error of `distribution`.
    there = [torch.ones(part.log_probs.shape[:2], dtype=torch.bool, device=part.log_probs.device) for part in parts]
    return ClassPrediction(
        joined([part.log_probs for part in parts], -torch.inf),
        joined([part.expected_entropy for part in parts], 0.0),
        joined([part.expected_noise for part in parts], 0.0),
        longest.arranged,
        _by_part([partial(density, part) for part in parts], sizes),
        longest.binary,
        joined(there, False),
        ignored,
    )


def _padded(v: Tensor, t: int, fill: float) -> Tensor:
    """Pad (n, T', …) to (n, T, …)."""
    return torch.cat([v, v.new_full((len(v), t - v.shape[1], *v.shape[2:]), fill)], 1)


def _by_part(functions: Sequence[Callable[[Any], Tensor]], sizes: Sequence[int]) -> Callable[[Any], Tensor]:
    """A function that applies each of `functions` to its own rows of tensors, arrays, lists, or tuples of them."""

    def rows(y: Any, part: slice) -> Any:
        return tuple(each[part] for each in y) if isinstance(y, tuple) else y[part]

    def split(y: Any) -> Tensor:
        lengths = {len(each) for each in (y if isinstance(y, tuple) else (y,))}
        if lengths != {sum(sizes)}:  # let the first function raise its own error
            return functions[0](y)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return torch.cat([function(rows(y, part)) for function, part in zip(functions, slices, strict=True)])

    return split


def _joint(parts: Sequence[Any]) -> Any:
    """The distributions of independent data as one distribution with a longer batch."""
    first, plain = parts[0], cast(Any, {"validate_args": False})

    def of(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    if isinstance(first, td.MultivariateNormal):
        return td.MultivariateNormal(of("loc"), scale_tril=of("scale_tril"), **plain)
    if isinstance(first, td.Categorical):
        return td.Categorical(logits=of("logits"), **plain)
    if isinstance(first, td.Independent):
        inner = _joint([part.base_dist for part in parts])
        return td.Independent(inner, first.reinterpreted_batch_ndims, **plain)
    if isinstance(first, td.MixtureSameFamily):
        mixing = _joint([part.mixture_distribution for part in parts])
        inner = _joint([part.component_distribution for part in parts])
        return td.MixtureSameFamily(mixing, inner, **plain)
    # Every other distribution says what its parameters are; those that it was made with are its own attributes.
    given = [name for name in getattr(type(first), "arg_constraints", {}) if name in vars(first)]
    if not given:
        raise StructureError(f"Distributions of type {type(first).__name__} cannot be put one after the other.")
    return type(first)(**{name: of(name) for name in given}, **plain)
