"""A Monte Carlo estimate with its standard error and confidence interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True)
class Estimated:
    """The mean of n independent, unbiased values and its standard error."""

    value: float
    std_error: float
    n: int

    @classmethod
    def of(cls, values: Float[Tensor, " n"], exact: float = 0.0) -> Estimated:
        """Mean and standard error of `values`. `exact`, a part known without error, is added to the mean."""
        n = len(values)
        spread = float(values.std()) if n > 1 else float("inf")
        return cls(exact + float(values.mean()), spread / sqrt(n), n)

    def interval(self, level: float = 0.99) -> tuple[float, float]:
        """Confidence interval of Student's t distribution, for values that are approximately normal."""
        half = student_quantile(0.5 + level / 2, self.n - 1) * self.std_error
        return self.value - half, self.value + half


def student_quantile(q: float, freedom: int) -> float:
    """The q-quantile of Student's t distribution: four correction terms to the normal quantile x.

    t_q ≈ x + Σ_k g_k(x) / ν^k with ν degrees of freedom (Abramowitz and Stegun, 26.7.5).
    """
    if freedom < 1:
        return float("inf")
    x = float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))
