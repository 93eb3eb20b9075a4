"""Finite-sample guarantees from ranks: held-out scores and a new score are exchangeable.

If s_1, …, s_n and s are exchangeable, the rank of s among the n + 1 is at most k with probability ≥ k / (n + 1), with
equality if there are no ties. Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World" (2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from lapwing._types import Float, Tensor

ALONE = 3  # factor on the p-value of the last score when it is compared with that of the others
_MOST_AT_ONCE = 1 << 22  # numbers in an array: 32 MiB


def rank(n: int, level: float) -> int:
    """k = ⌈(n + 1) level⌉ for the decimal level: 100 × 0.55 is 55, not the 55.000000000000007 of floating point."""
    return math.ceil((n + 1) * Fraction(repr(float(level))))


def quantile(scores: Float[Tensor, "n ..."], level: float) -> Tensor:
    """The k-th smallest score of each column, k = ⌈(n + 1) level⌉; infinite if n < k, so that coverage holds
    trivially."""
    k = rank(len(scores), level)
    if k > len(scores):
        return scores.new_full(scores.shape[1:], math.inf)
    return scores.sort(dim=0).values[k - 1]


def p_values(held: Float[Tensor, " n"], scores: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """(1 + #{i : s_i ≥ s}) / (n + 1)."""
    return _n_at_least(held, scores, 1).double() / (len(held) + 1)


def combined_p_values(
    held: Float[Tensor, "n k"], new: Float[Tensor, "b k"], weights: Sequence[float], two_sided: Sequence[bool]
) -> Float[Tensor, " b"]:
    """Combine several scores of each new datum into one p-value; the last score also counts on its own.

    Let p_k be the p-value of a datum by score k among all n + 1 data, itself included; for a two-sided score, twice
    the smaller of the p-values by s and by −s. All scores but the last are summed as t = Σ_k w_k log p_k. With p_t the
    p-value of t among the n + 1, data are ranked by min(p_t, 3 p_last), ties by p_t + p_last. The new datum enters the
    p-values of the others, so every step is symmetric in the n + 1 data, and the final rank is exchangeable as well.
    Cost: n log n for each new datum.
    """
    step = max(1, _MOST_AT_ONCE // len(held))
    pieces = [_final_ranks(held, piece, weights, two_sided) for piece in new.split(step)]
    return torch.cat(pieces) / (len(held) + 1)


def _final_ranks(
    held: Float[Tensor, "n k"], new: Float[Tensor, "b k"], weights: Sequence[float], two_sided: Sequence[bool]
) -> Float[Tensor, " b"]:
    """Rank of each new datum by min(p_t, 3 p_last) among the n + 1 data, times n + 1."""
    of_held, of_new = held.new_zeros(len(new), len(held)), held.new_zeros(len(new))
    # zip ends with `weights`, before the last score, which is treated separately below.
    for s, t, w, both in zip(held.T, new.T, weights, two_sided, strict=False):
        ranks = [_ranks(s, t)] + ([_ranks(-s, -t)] if both else [])
        for total, r in zip((of_held, of_new), zip(*ranks, strict=True), strict=True):
            p = (torch.stack(r).amin(0) * len(r)).clamp(max=len(held) + 1)
            total += w * p.to(total).log()  # log p up to the constant log (n + 1)
    both_ways = zip(_ranks_below(of_held, of_new), _ranks(held[:, -1], new[:, -1]), strict=True)
    T_held, T_new = (_min_with_ties(r_t, r_last, len(held)) for r_t, r_last in both_ways)
    return 1 + (T_held <= T_new[:, None]).sum(-1).double()


def _min_with_ties(r_t: Tensor, r_last: Tensor, n: int) -> Tensor:
    """min(r_t, 3 r_last) with ties ordered by r_t + r_last, which is at most 2 (n + 1), as one number."""
    return torch.minimum(r_t, ALONE * r_last) * (2 * n + 3) + r_t + r_last


def _ranks_below(t: Float[Tensor, "b n"], t_new: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """How many of the n + 1 data have a sum at most as large; the sums of held-out data depend on the new datum."""
    ordered = t.sort(-1).values
    below = torch.searchsorted(ordered, t, right=True) + (t_new[:, None] <= t)
    return below, 1 + torch.searchsorted(ordered, t_new[:, None], right=True)[:, 0]


def _ranks(s: Float[Tensor, " n"], t: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """How many of the n + 1 data score as high or higher: for each held-out datum (b, n), and for the new one (b,)."""
    return _n_at_least(s, s, 0) + (t[:, None] >= s), _n_at_least(s, t, 1)


def _n_at_least(held: Float[Tensor, " n"], scores: Float[Tensor, " b"], itself: int) -> Tensor:
    # Strictly below, so that ties count.
    below = torch.searchsorted(held.sort().values, scores.contiguous(), right=False)
    return itself + len(held) - below
