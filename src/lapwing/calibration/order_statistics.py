"""Finite-sample guarantees from ranks alone: n held-out scores and a new one are in random order.

If s_1, …, s_n and s are exchangeable, the rank of s among the n + 1 is at most k with probability ≥ k / (n + 1), and
exactly that where no two scores are equal. Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World" (2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from lapwing._types import Float, Tensor

ALONE = 3  # a rank by the last score counts as much as three times that rank by all the others
_MOST_AT_ONCE = 1 << 22  # numbers: 32 MiB


def rank(n: int, level: float) -> int:
    """k = ⌈(n + 1) level⌉, with the level as it was written: 100 × 0.55 is 55, not the 55.000000000000007 of floats."""
    return math.ceil((n + 1) * Fraction(repr(float(level))))


def quantile(scores: Float[Tensor, "n ..."], level: float) -> Tensor:
    """The k-th smallest score of each column, k = ⌈(n + 1) level⌉; infinite where n < k, so that it always covers."""
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
    """Each new datum's p-value from several scores, the last of which counts alone as well.

    Let p_k be the p-value of a datum by score k among all n + 1 data, itself included; with `two_sided` twice the
    smaller of those by s and by −s. All but the last are summed, t = Σ_k w_k log p_k. The p-value p_t of t, again among
    the n + 1, stands beside that of the last score: min(p_t, 3 p_last) is ranked, equal ones in the order of
    p_t + p_last. The new datum takes part in the p-values of the others, so that every step is symmetric in the n + 1
    data and its rank is as good as any other's.
    Cost: n log n for each new datum.
    """
    step = max(1, _MOST_AT_ONCE // len(held))
    pieces = [_ranked_again(held, piece, weights, two_sided) for piece in new.split(step)]
    return torch.cat(pieces) / (len(held) + 1)


def _ranked_again(
    held: Float[Tensor, "n k"], new: Float[Tensor, "b k"], weights: Sequence[float], two_sided: Sequence[bool]
) -> Float[Tensor, " b"]:
    of_held, of_new = held.new_zeros(len(new), len(held)), held.new_zeros(len(new))
    for s, t, w, both in zip(held.T, new.T, weights, two_sided, strict=False):
        ranks = [_ranks(s, t)] + ([_ranks(-s, -t)] if both else [])
        for total, r in zip((of_held, of_new), zip(*ranks, strict=True), strict=True):
            p = (torch.stack(r).amin(0) * len(r)).clamp(max=len(held) + 1)
            total += w * p.to(total).log()  # log p + log (n + 1), a constant
    both_ways = zip(_ranks_below(of_held, of_new), _ranks(held[:, -1], new[:, -1]), strict=True)
    T_held, T_new = (_either(r_t, r_last, len(held)) for r_t, r_last in both_ways)
    return 1 + (T_held <= T_new[:, None]).sum(-1).double()


def _either(r_t: Tensor, r_last: Tensor, n: int) -> Tensor:
    """min(r_t, 3 r_last), equal ones in the order of r_t + r_last, which is at most 2 (n + 1)."""
    return torch.minimum(r_t, ALONE * r_last) * (2 * n + 3) + r_t + r_last


def _ranks_below(t: Float[Tensor, "b n"], t_new: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """How many of the n + 1 data have at most as large a sum, where the held-out data's depend on the new datum."""
    ordered = t.sort(-1).values
    below = torch.searchsorted(ordered, t, right=True) + (t_new[:, None] <= t)
    return below, 1 + torch.searchsorted(ordered, t_new[:, None], right=True)[:, 0]


def _ranks(s: Float[Tensor, " n"], t: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """How many of the n + 1 data score as high or higher: than each held-out datum (b, n), than the new one (b,)."""
    return _n_at_least(s, s, 0) + (t[:, None] >= s), _n_at_least(s, t, 1)


def _n_at_least(held: Float[Tensor, " n"], scores: Float[Tensor, " b"], itself: int) -> Tensor:
    below = torch.searchsorted(held.sort().values, scores.contiguous(), right=False)  # strictly below: ties count
    return itself + len(held) - below
