"""Predictions of several pieces of the data as one.

Large inputs are predicted some at a time, so that the draws of all of them are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import distributions as td

from lapwing._types import Tensor
from lapwing.errors import StructureError
from lapwing.predictive.prediction import ClassPrediction, DensityPrediction, Prediction, RegressionPrediction


def concatenated(parts: Sequence[Any], sizes: Sequence[int]) -> Prediction:
    """All data one after the other; `sizes` are the numbers of data of the parts."""
    first, *others = parts
    if not others:
        return first
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


def _by_part(functions: Sequence[Callable[[Any], Tensor]], sizes: Sequence[int]) -> Callable[[Any], Tensor]:
    """Each function on its own rows, for tensors, arrays, lists and tuples of them."""

    def rows(y: Any, part: slice) -> Any:
        return tuple(each[part] for each in y) if isinstance(y, tuple) else y[part]

    def split(y: Any) -> Tensor:
        lengths = {len(each) for each in (y if isinstance(y, tuple) else (y,))}
        if lengths != {sum(sizes)}:  # the first function says in its own words what is wrong
            return functions[0](y)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return torch.cat([function(rows(y, part)) for function, part in zip(functions, slices, strict=True)])

    return split


def _joint(parts: Sequence[Any]) -> Any:
    """The distributions of independent data as one with a longer batch."""
    first, plain = parts[0], cast(Any, {"validate_args": False})

    def of(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    if isinstance(first, td.Normal):
        return td.Normal(of("loc"), of("scale"), **plain)
    if isinstance(first, td.MultivariateNormal):
        return td.MultivariateNormal(of("loc"), scale_tril=of("scale_tril"), **plain)
    if isinstance(first, td.Poisson):
        return td.Poisson(of("rate"), **plain)
    if isinstance(first, td.Categorical):
        return td.Categorical(logits=of("logits"), **plain)
    if isinstance(first, td.Independent):
        inner = _joint([part.base_dist for part in parts])
        return td.Independent(inner, first.reinterpreted_batch_ndims, **plain)
    if isinstance(first, td.MixtureSameFamily):
        mixing = _joint([part.mixture_distribution for part in parts])
        inner = _joint([part.component_distribution for part in parts])
        return td.MixtureSameFamily(mixing, inner, **plain)
    raise StructureError(f"Distributions of type {type(first).__name__} cannot be put one after the other.")
