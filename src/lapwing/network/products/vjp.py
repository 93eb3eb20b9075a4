"""Vector-Jacobian products Jᵀ u for several u: by batched reverse mode if the model supports it, else one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products.jvp import VECTORS_AT_ONCE
from lapwing.runtime.sandbox import quiet_fallback

Vjp = Callable[[Trace, Tensor, Tensor], None]  # total (m, P) ← total + Jᵀ u for each u (m, n, K)


def choose_vjp(linearised: Linearised, x: ModelInput) -> Vjp:
    """`batched` if it runs and agrees with single backward passes on up to two data, else `one_by_one`."""
    if any(linearised.network.tensors[name].ndim > 2 for name in linearised.layout.names):
        return one_by_one  # on a CPU, batching does not speed up the backward pass of convolutions
    few = x.rows(slice(0, min(2, x.n)))
    device = linearised.network.device
    totals = torch.zeros(2, 2, linearised.layout.p, dtype=torch.float64, device=device)
    # Deterministic test vectors without symmetries: no random numbers are consumed.
    angles = torch.arange(few.n * linearised.k, dtype=torch.float64, device=device).reshape(few.n, -1)
    u = torch.stack([angles.cos(), angles.sin()])
    with linearised.unrecorded(few) as trace:
        one_by_one(trace, totals[0], u)
        try:
            batched(trace, totals[1], u)
        except (RuntimeError, NotImplementedError):  # an operation without a batching rule for its backward
            return one_by_one
        eps = torch.finfo(trace.f.dtype).eps
    agree = (totals[1] - totals[0]).norm() <= 1e3 * eps * totals[0].norm()
    return batched if bool(agree) else one_by_one


def one_by_one(trace: Trace, total: Float[Tensor, "m p"], u: Float[Tensor, "m n k"]) -> None:
    """One backward pass per vector."""
    for row, each in zip(total, u, strict=True):
        trace.add_vjp_(row, each)


def batched(trace: Trace, total: Float[Tensor, "m p"], u: Float[Tensor, "m n k"]) -> None:
    """Backward passes of several vectors at once (`is_grads_batched`, which is vmap over the backward pass)."""
    if len(u) == 1:
        return one_by_one(trace, total, u)
    if not trace.f.requires_grad:  # for these data f does not depend on the inferred parameters: J = 0
        return
    whole, selection = trace.linearised.whole, trace.linearised.layout.selection
    for start in range(0, len(u), VECTORS_AT_ONCE):
        some = slice(start, start + VECTORS_AT_ONCE)
        with quiet_fallback():
            gradients = torch.autograd.grad(
                trace.f,
                list(trace.leaves.values()),
                u[some].to(trace.f.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        everything = total[some] if selection is None else total.new_zeros(len(u[some]), whole.p)
        for name, g in zip(trace.leaves, gradients, strict=True):
            if g is not None:
                everything[:, whole[name]] += g.reshape(len(g), -1)
        if selection is not None:
            total[some] += everything[:, selection.to(total.device)]
