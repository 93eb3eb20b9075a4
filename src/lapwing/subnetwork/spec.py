"""The user's specification of a subnetwork."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any

from lapwing.errors import InputError, InputTypeError


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """`params` for lw.fit: infer the k weights with the highest score, or those at `indices`; others stay as trained.

    `score`: "variance" (largest marginal variance by diagonal Laplace), "swag" (the same by diagonal SWAG),
    "functional", "magnitude", "random", "last_layer", or a score object. `indices`: positions, or a mask, over all
    trainable weights in `model.named_parameters()` order. `among` restricts the selection to some tensors, as `params`
    does; `weights_only` excludes tensors with one axis (biases, norms). `prior_scaling`: "none", "count" or
    "jacobian".
    """

    score: Any = "variance"
    k: int | None = None
    _: KW_ONLY
    indices: Any = None
    among: Any = "all"
    weights_only: bool = False
    prior_scaling: Any = "none"

    def __post_init__(self) -> None:
        if self.indices is not None:
            self._check_alone()
        elif self.k is None and self.score != "last_layer":
            raise InputError("Subnetwork: say how many weights, k=1000, or which, indices=[...].")
        if self.k is None:
            return
        if isinstance(self.k, bool) or not isinstance(self.k, Integral):
            raise InputTypeError(f"Subnetwork: k must be a whole number of weights, got {type(self.k).__name__}.")
        if self.k < 0:
            raise InputError(f"Subnetwork: k must not be negative, got {self.k}.")

    def _check_alone(self) -> None:
        said = {
            "k": self.k is not None,
            "score": self.score != "variance",
            "among": self.among != "all",
            "weights_only": self.weights_only,
        }
        if any(said.values()):
            other = next(name for name, given in said.items() if given)
            raise InputError(f"Subnetwork: indices say which weights are inferred; leave `{other}` out.")
