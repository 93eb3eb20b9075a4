"""Information of Gaussian targets: determinants of their covariances."""

from __future__ import annotations

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.errors import InputError


def information(cov: Float[Tensor, "n k k"], noise: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """½ log det(I + V/σ²)."""
    noisy = cov + torch.diag_embed(noise.to(cov).expand(cov.shape[:-1]))
    return 0.5 * (torch.logdet(noisy) - noise.to(cov).expand(cov.shape[:-1]).log().sum(-1))


def greedy(joint: Float[Tensor, "nk nk"], noise: Float[Tensor, " k"], n: int) -> Int[Tensor, " b"]:
    """The inputs that add most to ½ log det(I + K/σ²), one after the other.

    What an input adds is the information of its covariance given the chosen ones; each choice is one update of K.
    """
    k = len(noise)
    n_inputs = len(joint) // k
    if n > n_inputs:
        raise InputError(f"batch_bald: {n} inputs were asked for, and there are {n_inputs}.")
    K = joint.clone()
    chosen: list[int] = []
    at = torch.arange(len(K), device=K.device).reshape(-1, k)
    for _ in range(n):
        blocks = torch.stack([K[rows[:, None], rows] for rows in at])
        gain = information(blocks, noise)
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        # K ← K − K_b (K_bb + σ²)⁻¹ K_bᵀ
        column = K[:, at[best]]
        noisy = blocks[best] + torch.diag(noise.to(K).expand(k))
        K = K - column @ torch.linalg.solve(noisy, column.T)
    return torch.tensor(chosen)


def shared_information(joint: Float[Tensor, "a a"], n: int, noise: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """Mean over the targets, behind the n inputs, of I = ½ log (det V det V* / det [V C; Cᵀ V*]), with noise."""
    k = len(noise)
    K = joint + torch.diag(noise.to(joint).expand(len(joint) // k, k).flatten())
    blocks = K.reshape(len(K) // k, k, len(K) // k, k).transpose(1, 2)
    own = torch.stack([blocks[i, i] for i in range(len(blocks))])
    V, V_target, C = own[:n], own[n:], blocks[:n, n:]
    # det [V C; Cᵀ V*] = det V* det(V − C V*⁻¹ Cᵀ)
    left = V[:, None] - C @ torch.linalg.solve(V_target, C.mT)
    return 0.5 * (torch.logdet(V)[:, None] - torch.logdet(left)).mean(1)
