"""Information of labels, from log probabilities under draws of the function: (s, n, c)."""

from __future__ import annotations

from math import log

import torch

from lapwing._types import Float, Int, Tensor

_MOST_COMBINATIONS = 4_096  # of labels that are counted out; beyond, so many are drawn


def greedy(log_p: Float[Tensor, "s n c"], n: int, generator: torch.Generator) -> Int[Tensor, " b"]:
    """The inputs that add most to I(y_1 … y_b; θ) = H(y_1 … y_b) − E Σ H(y_i | θ), one after the other."""
    p = log_p.exp()
    own = -(p * log_p).sum(-1).mean(0)  # E H(y | θ), adds up: labels are independent given θ
    joint, weight = p.new_ones(len(p), 1), p.new_ones(1)
    chosen: list[int] = []
    for _ in range(n):
        gain = _joint_entropies(joint, weight, p) - own
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        joint, weight = _extended(joint, weight, p[:, best], generator)
    return torch.tensor(chosen)


def _joint_entropies(
    joint: Float[Tensor, "s m"], weight: Float[Tensor, " m"], p: Float[Tensor, "s n c"]
) -> Float[Tensor, " n"]:
    """H(y_chosen, y_i) for each i: combinations m of the chosen labels, p(y_chosen | θ_s) in `joint`."""
    together = torch.einsum("sm,snc->nmc", joint, p) / len(p)
    return (weight[:, None] * -torch.xlogy(together, together)).flatten(1).sum(-1)


def _extended(
    joint: Float[Tensor, "s m"], weight: Float[Tensor, " m"], p: Float[Tensor, "s c"], generator: torch.Generator
) -> tuple[Float[Tensor, "s k"], Float[Tensor, " k"]]:
    """Combinations with one more label; of too many, some are drawn by their probability and weighted 1/(m p)."""
    every = (joint[:, :, None] * p[:, None]).flatten(1)
    weights = weight.repeat_interleave(p.shape[1])
    if every.shape[1] <= _MOST_COMBINATIONS:
        return every, weights
    mean = every.mean(0) * weights
    drawn = torch.multinomial(mean.to(generator.device), _MOST_COMBINATIONS, replacement=True, generator=generator)
    drawn = drawn.to(every.device)
    share = mean[drawn] / mean.sum()
    return every[:, drawn], weights[drawn] / (_MOST_COMBINATIONS * share)


def shared_information(log_p: Float[Tensor, "s n c"], target: Float[Tensor, "s m c"]) -> Float[Tensor, " n"]:
    """Mean over the targets of I(y; y*) = Σ p(y, y*) log p(y, y*) / (p(y) p(y*)), p(y, y*) = E p(y | θ) p(y* | θ)."""
    s = len(log_p)
    log_own, log_target = (torch.logsumexp(v, 0) - log(s) for v in (log_p, target))
    p, p_target = log_p.exp(), target.exp()
    found = []
    for some in range(0, log_p.shape[1], 64):
        rows = slice(some, some + 64)
        joint = torch.einsum("snc,smd->nmcd", p[:, rows], p_target) / s
        apart = log_own[rows, None, :, None] + log_target[None, :, None, :]
        found.append((torch.xlogy(joint, joint) - joint * apart).sum((-1, -2)).mean(1))
    return torch.cat(found)
