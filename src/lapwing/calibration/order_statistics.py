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
    """Each new datum's p-value from several scores: t = Σ_k w_k log p_k, ranked among the n + 1.

    p_k is the p-value of a datum by score k alone among all n + 1 data, itself included; with `two_sided` twice the
    smaller of those by s and by −s. The new datum takes part in the p_k of the others, so that t is a symmetric
    function of the n + 1 data, and its rank is as good as any other's. With one score these are its `p_values`.
    Cost: n numbers for each new datum.
    """
    step = max(1, _MOST_AT_ONCE // len(held))
    pieces = [_ranked_again(held, piece, weights, two_sided) for piece in new.split(step)]
    return torch.cat(pieces) / (len(held) + 1)


def _ranked_again(
    held: Float[Tensor, "n k"], new: Float[Tensor, "b k"], weights: Sequence[float], two_sided: Sequence[bool]
) -> Float[Tensor, " b"]:
    of_held, of_new = held.new_zeros(len(new), len(held)), held.new_zeros(len(new))
    for s, t, w, both in zip(held.T, new.T, weights, two_sided, strict=True):
        ranks = [_ranks(s, t)] + ([_ranks(-s, -t)] if both else [])
        for total, r in zip((of_held, of_new), zip(*ranks, strict=True), strict=True):
            p = (torch.stack(r).amin(0) * len(r)).clamp(max=len(held) + 1)
            total += w * p.to(total).log()  # log p + log (n + 1), a constant
    return 1 + (of_held <= of_new[:, None]).sum(-1).double()


def _ranks(s: Float[Tensor, " n"], t: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """How many of the n + 1 data have a score at least as large as each held-out datum's (b, n), and the new one's (b,).
    """
    return _n_at_least(s, s, 0) + (t[:, None] >= s), _n_at_least(s, t, 1)


def _n_at_least(held: Float[Tensor, " n"], scores: Float[Tensor, " b"], itself: int) -> Tensor:
    below = torch.searchsorted(held.sort().values, scores.contiguous(), right=False)  # strictly below: ties count
    return itself + len(held) - below
