"""The budget of a hyperparameter search, and when it may stop early."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from math import inf

from lapwing.errors import InputError, InputTypeError
from lapwing.linear_model import DEFAULT_PASSES, default_passes, most_work

LEAST_PASSES = 2.7  # minimum for a mode search by products with J: one product and a gradient
_WORDS = 'a number of passes over the training data, a time such as "30s" or "2min", "fast", "balanced" or "exact"'
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """Passes over the training data, and seconds; `exact` solves to rounding regardless of cost.

    A pass is a forward and a backward pass over all training data, like an epoch of training.
    """

    passes: float = DEFAULT_PASSES
    seconds: float = inf
    exact: bool = False
    asked: bool = False  # given by the user
    shape_only: bool = False  # held-out data choose the scale, so only relative precisions are needed
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def parse(cls, budget: str | float | None) -> Budget:
        """A budget from the argument of lw.tune."""
        if budget is None:
            return cls()
        if isinstance(budget, bool) or not isinstance(budget, int | float | str):
            raise InputTypeError(f"budget: expected {_WORDS}, got {type(budget).__name__}.")
        if isinstance(budget, str):
            words = {"fast": cls(0.0), "balanced": cls(), "exact": cls(inf, exact=True)}
            if budget in words:
                return cls(words[budget].passes, exact=words[budget].exact, asked=budget != "balanced")
            match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h)\s*", budget)
            if not match:
                raise InputError(f"budget: expected {_WORDS}, got {budget!r}.")
            return cls._positive(budget, passes=inf, seconds=float(match[1]) * _UNITS[match[2]])
        return cls._positive(budget, passes=float(budget), seconds=inf)

    @classmethod
    def _positive(cls, budget: str | float, passes: float, seconds: float) -> Budget:
        if not (passes >= 0 and seconds > 0):
            raise InputError(f"budget: expected {_WORDS}, not negative, got {budget!r}.")
        return cls(passes, seconds, asked=True)

    def by_default(self, macs: float) -> Budget:
        """The same with the passes of a default budget where one takes so many multiplications."""
        return self if self.asked or self.exact or self.shape_only else replace(self, passes=default_passes(macs))

    def affords_products(self) -> bool:
        """Whether a mode search by products with J may start, which takes passes over the training data.

        If held-out data choose the scale, the evidence at the trained weights gives equally good relative precisions.
        """
        return self.passes >= LEAST_PASSES and not self.only_shape

    @property
    def only_shape(self) -> bool:
        """Whether only relative precisions are needed, because the budget is the default and held-out data set the
        scale."""
        return self.shape_only and not self.asked

    def most_work(self, n: int) -> float:
        """Multiplications allowed for one factorisation of the linear model's Hessian, for n data."""
        return most_work(n) * self.passes / DEFAULT_PASSES

    def over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() - self.started > self.seconds


DEFAULT = Budget()
EXACT = Budget(inf, exact=True)
