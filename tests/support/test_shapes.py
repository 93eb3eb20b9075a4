"""The shape check itself: it must catch a wrong shape, or every annotation is only decoration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from shapes import check


@jaxtyped(typechecker=check)
def product(A: Float[Tensor, "n p"], v: Float[Tensor, " p"], scale: float) -> Float[Tensor, " n"]:
    return A @ v * scale


@jaxtyped(typechecker=check)
def wrong_result(v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    return v[:-1]


@jaxtyped(typechecker=check)
@dataclass(frozen=True)
class Pair:
    A: Float[Tensor, "n p"]
    v: Float[Tensor, " p"]


def test_agreeing_shapes_pass():
    assert product(torch.ones(2, 3), torch.ones(3), 2.0).tolist() == [6.0, 6.0]
    assert Pair(torch.ones(2, 3), torch.ones(3)).v.shape == (3,)


def test_disagreeing_arguments_are_caught():
    with pytest.raises(TypeCheckError):
        product(torch.ones(2, 3), torch.ones(2), 2.0)


def test_disagreeing_result_is_caught():
    with pytest.raises(TypeCheckError):
        wrong_result(torch.ones(3))


def test_disagreeing_fields_are_caught():
    with pytest.raises(TypeCheckError):
        Pair(torch.ones(2, 3), torch.ones(2))


def test_what_is_not_a_shape_is_left_to_the_type_checker():
    assert product(torch.ones(1, 1), torch.ones(1), 2).tolist() == [2.0]  # an int where a float is written
