"""Jacobian-vector products J v: by forward-mode AD if the model supports it, else by double reverse mode.

Some kernels have no forward-mode derivative (fused attention, old weight_norm), others no second derivative. Which
implementation works is determined once per network, by comparison with the rows of J on two data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import LapwingError, ModelError
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.module import with_images_in
from lapwing.runtime.sandbox import forward_mode_lock, quiet_fallback

Jvp = Callable[[Trace, Tensor], Tensor]  # (trace, (m, P)) → (m, n, K)
VECTORS_AT_ONCE = 8  # vectors whose tangents are in memory at a time
_MOST_ROWS = 64  # outputs per datum up to which the rows of J are the reference


def choose_jvp(linearised: Linearised, x: ModelInput) -> Jvp:
    """The first implementation of J v that runs and agrees with the rows of J on up to two data; cached per network.

    With many outputs per datum, all rows would be too many: ⟨u, J v⟩ = ⟨Jᵀu, v⟩ is checked for two vectors u instead.
    """
    if not linearised.chosen_jvp:
        linearised.chosen_jvp.append(_found_jvp(linearised, x.rows(slice(0, min(2, x.n)))))
    return linearised.chosen_jvp[0]


def _found_jvp(linearised: Linearised, few: ModelInput) -> Jvp:
    v = _two(linearised.layout.p, linearised)
    with linearised.trace(few) as trace:
        if linearised.k <= _MOST_ROWS:
            looked_at, truth = (lambda Jv: Jv), jvp_by_rows(trace, v)
        else:
            u = _two(trace.f.numel(), linearised)
            pulled = torch.zeros_like(v)
            for total, each in zip(pulled, u, strict=True):
                trace.add_vjp_(total, each.reshape(trace.f.shape))
            looked_at, truth = (lambda Jv: Jv.flatten(1) @ u.T), v @ pulled.T
        for candidate in (together, forward_mode, double_reverse):
            if _agrees(candidate, trace, v, looked_at, truth):
                return candidate
    return jvp_by_rows


def _two(n: int, linearised: Linearised) -> Float[Tensor, "2 n"]:
    angles = torch.arange(n, dtype=torch.float64, device=linearised.network.device)
    return torch.stack([angles.cos(), angles.sin()])


@contextmanager
def pushed(linearised: Linearised, x: ModelInput, v: Float[Tensor, " p"]) -> Iterator[tuple[Trace, Tensor]]:
    """A trace without factors, and J v (n, K), from a single forward pass that carries both graph and tangents."""
    network, placed = linearised.network, linearised.network.placed(x)
    with linearised.borrowed() as own:
        leaves = {name: network.tensors[name].detach().requires_grad_() for name in linearised.layout.names}
        tangents = linearised.tangents(v)
        with forward_mode_lock, network.plain_attention(), dual_level():
            both = {name: make_dual(leaf, tangents[name]) for name, leaf in leaves.items()}
            f, q = unpack_dual(own.flat(_run(own, placed, both), x.n))
        # Outside of dual_level tensors have no tangents any more, so a backward pass is an ordinary one.
        trace = Trace(replace(own, ruled=(), last=None), placed, leaves, {}, f, None)
        trace.put_back()
        yield trace, torch.zeros_like(f, dtype=torch.float64) if q is None else q.detach().double()


def _run(linearised: Linearised, x: ModelInput, tensors: dict[str, Tensor]) -> Tensor:
    """Run with images in the trace's memory format, or as given if the model raises for that format."""
    try:
        return linearised.network(with_images_in(x, linearised.layout_of_images), tensors)
    except ModelError:
        if linearised.layout_of_images == torch.preserve_format:
            raise
        return linearised.network(x, tensors)


def can_push(linearised: Linearised, x: ModelInput) -> bool:
    """Whether `pushed` runs, and agrees with separate passes for J v and Jᵀ u, on up to two data."""
    few = x.rows(slice(0, min(2, x.n)))
    v = torch.arange(linearised.layout.p, dtype=torch.float64, device=linearised.network.device).cos()
    with linearised.unrecorded(few) as trace:
        truth, u = forward_mode(trace, v[None])[0], torch.ones_like(trace.f)
        back = torch.zeros_like(v)
        trace.put_back()
        trace.add_vjp_(back, u)
    try:
        with pushed(linearised, few, v) as (trace, q):
            found = torch.zeros_like(v)
            trace.add_vjp_(found, u)
    except (RuntimeError, NotImplementedError, LapwingError):
        return False
    return _close(q, truth, trace) and _close(found, back, trace)


def together(trace: Trace, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
    """Forward-mode AD with vmap over several vectors: the primal network is evaluated once for all of them."""
    if len(v) == 1:
        return forward_mode(trace, v)
    f, primals = _function(trace)
    tangents = trace.linearised.tangents(v)
    with forward_mode_lock, trace.linearised.network.plain_attention(), quiet_fallback():
        push = torch.vmap(lambda tangent: torch.func.jvp(f, (primals,), (tangent,))[1], chunk_size=VECTORS_AT_ONCE)
        return push(tangents).double()


def forward_mode(trace: Trace, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
    """Forward-mode AD, one pass per vector. Fused attention has no forward-mode derivative, so its formula is used."""
    f, primals = _function(trace)
    with forward_mode_lock, trace.linearised.network.plain_attention():
        tangents = [torch.func.jvp(f, (primals,), (trace.linearised.tangents(row),))[1] for row in v]
    return torch.stack(tangents).double()


FORWARD: tuple[Jvp, ...] = (together, forward_mode)


def double_reverse(trace: Trace, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
    """J v = ∇_u ⟨Jᵀu, v⟩ by double reverse mode: Jᵀu is linear in u, and its derivative gives J v."""
    linearised = trace.linearised
    with linearised.network.plain_attention():
        leaves = {n: linearised.network.tensors[n].detach().requires_grad_() for n in linearised.layout.names}
        f = linearised.flat(linearised.network(trace.x, leaves), trace.x.n)
        u = torch.zeros_like(f, requires_grad=True)  # its value does not matter: Jᵀu is linear in u
        pulled = torch.autograd.grad(f, list(leaves.values()), u, create_graph=True, allow_unused=True)
        pushed = []
        for row in v:
            tangents = linearised.tangents(row)
            pairs = [(g, tangents[n]) for n, g in zip(leaves, pulled, strict=True) if g is not None]
            inner = sum(((g * t).sum() for g, t in pairs), f.new_zeros(()))
            pushed.append(torch.autograd.grad(inner, u, retain_graph=True)[0])
    return torch.stack(pushed).double()


def attached(trace: Trace, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
    """J v by double reverse mode on the graph of an attached trace, differentiable in the network's inputs."""
    linearised, leaves = trace.linearised, list(trace.leaves.values())
    u = torch.zeros_like(trace.f, requires_grad=True)
    pulled = torch.autograd.grad(trace.f, leaves, u, create_graph=True, allow_unused=True)
    pushed = []
    for row in v:
        tangents = linearised.tangents(row)
        pairs = [(g, tangents[n]) for n, g in zip(trace.leaves, pulled, strict=True) if g is not None]
        inner = sum(((g * t).sum() for g, t in pairs), (u * 0).sum())
        pushed.append(torch.autograd.grad(inner, u, create_graph=True)[0])
    return torch.stack(pushed).double()


def jvp_by_rows(trace: Trace, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
    """Form all rows of J, then multiply: works for every model, at K backward passes."""
    return trace.jacobian().mv(v).double()


def _function(trace: Trace) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]]:
    """f as a function of the named tensors at the inputs of a trace, and the tensors at θ*."""
    linearised = trace.linearised

    def f(tensors: dict[str, Tensor]) -> Tensor:
        return linearised.flat(linearised.network(trace.x, tensors), trace.x.n)

    return f, {name: linearised.network.tensors[name].detach() for name in linearised.layout.names}


def _agrees(candidate: Jvp, trace: Trace, v: Tensor, looked_at: Callable[[Tensor], Tensor], truth: Tensor) -> bool:
    try:
        result = looked_at(candidate(trace, v))
    except (RuntimeError, NotImplementedError):  # no derivative of this kind for some operation of the model
        return False
    return _close(result, truth, trace)


def _close(result: Tensor, truth: Tensor, trace: Trace) -> bool:
    eps = torch.finfo(trace.f.dtype).eps
    return bool(((result - truth).norm() <= 1e3 * eps * truth.norm() + 1e-30).item())
