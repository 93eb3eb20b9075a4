"""The dense truth, by brute force in float64: full Jacobians, explicit sums, `inv`, `slogdet`.

Imports torch and nothing of the library it judges. Letters as in the papers: B data, K outputs of one
datum (flattened in the model's own order) = T sites × C outputs, P parameters. `d` is the diagonal of the
prior precision, a (P,) tensor or one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal, Poisson

# --- model: outputs and Jacobians ---------------------------------------------------------------------------


def slice_x(x: Any, i: int) -> Any:
    """Datum i of a batch as a batch of one; x is a tensor, a tuple of them or a mapping of them."""
    if isinstance(x, dict):
        return {k: slice_x(v, i) for k, v in x.items()}
    return tuple(slice_x(v, i) for v in x) if isinstance(x, tuple) else x[i : i + 1]


def batch_size(x: Any) -> int:
    while not isinstance(x, Tensor):
        x = next(iter(x.values())) if isinstance(x, dict) else x[0]
    return len(x)


def outputs(model: nn.Module, x: Any) -> Tensor:
    """f (B, K); tuples are positional arguments, mappings keyword arguments; `.logits` is taken if there is one."""
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    return getattr(out, "logits", out).reshape(batch_size(x), -1)


def parameters(model: nn.Module, names: Any = None) -> dict[str, Tensor]:
    """What is inferred: `named_parameters` order, `requires_grad` only, tied tensors once."""
    return {k: p for k, p in model.named_parameters() if p.requires_grad and (names is None or k in names)}


def theta(model: nn.Module, names: Any = None) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in parameters(model, names).values()])


def jacobian(model: nn.Module, x: Any, names: Any = None) -> tuple[Tensor, Tensor]:
    """f (B, K) and J (B, K, P): every datum through the network alone, every output backwards alone."""
    pairs = [jacobian_batch(model, slice_x(x, i), names) for i in range(batch_size(x))]
    return torch.cat([f for f, _ in pairs]), torch.cat([J for _, J in pairs])


def jacobian_batch(model: nn.Module, x: Any, names: Any = None) -> tuple[Tensor, Tensor]:
    """The same with one forward for the whole batch; differs from `jacobian` if rows see each other."""
    modes = [(m, m.training) for m in model.modules()]
    ps = list(parameters(model, names).values())
    model.eval()
    try:
        with torch.enable_grad():
            f = outputs(model, x)
            rows = [torch.stack([_gradient(f_k, ps) for f_k in f_n]) for f_n in f]
    finally:
        for m, training in modes:
            m.training = training
    return f.detach(), torch.stack(rows)


def _gradient(f_k: Tensor, ps: list[Tensor]) -> Tensor:
    grads = torch.autograd.grad(f_k, ps, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(ps, grads, strict=True)]
    return torch.cat([g.reshape(-1) for g in filled])


# --- sites: which of a datum's K outputs belong to which likelihood term ------------------------------------


def site_index(datum_shape: tuple[int, ...], class_axis: int = -1) -> Tensor:
    """(T, C): entry (t, c) is the flat position of output c of term t. `class_axis` counts the batch axis."""
    k = torch.arange(torch.Size(datum_shape).numel()).reshape(1, *(datum_shape or (1,)))
    return k.movedim(class_axis, -1)[0].reshape(-1, k.shape[class_axis])


def target_sites(kind: str, y: Tensor, index: Tensor) -> Tensor:
    """Targets as people give them → (B, T) where a term has one label, (B, T, C) where each output has one."""
    y = y.reshape(len(y), -1)
    return y if kind in ("categorical", "hetero") else y[:, index]


def spread(Lambda_sites: Tensor, index: Tensor) -> Tensor:
    """(B, T, C, C) → (B, K, K): one block per term, zero between terms."""
    Lambda = Lambda_sites.new_zeros(len(Lambda_sites), index.numel(), index.numel())
    for t, ks in enumerate(index):
        Lambda[:, ks[:, None], ks[None, :]] = Lambda_sites[:, t]
    return Lambda


# --- likelihood: f (B, T, C), y (B, T) or (B, T, C) ---------------------------------------------------------


def log_prob(
    kind: str,
    f: Tensor,
    y: Tensor,
    *,
    noise_std: Any = 1.0,
    weight: Any = None,
    ignore_index: int = -100,
    precision_link: Any = torch.exp,
) -> Tensor:
    """log p(y | f) of every term, constants included: (B, T)."""
    if kind == "gaussian":
        return Normal(f, torch.as_tensor(noise_std, dtype=f.dtype)).log_prob(y).sum(-1)
    if kind == "bernoulli":
        return Bernoulli(logits=f).log_prob(y).sum(-1)
    if kind == "poisson":
        return Poisson(f.exp()).log_prob(y).sum(-1)
    if kind == "hetero":
        return Normal(*hetero_moments(f, precision_link)).log_prob(y)
    kept = y != ignore_index
    label = torch.where(kept, y, 0)
    w = torch.ones(f.shape[-1], dtype=f.dtype) if weight is None else weight
    return Categorical(logits=f).log_prob(label) * w[label] * kept


def hetero_moments(f: Tensor, precision_link: Any) -> tuple[Tensor, Tensor]:
    """f = (η₁, f₂), 1/σ² = h(f₂) and η₁ = μ/σ²: → μ, σ."""
    precision = precision_link(f[..., 1])
    return f[..., 0] / precision, precision.rsqrt()


def log_lik(kind: str, f: Tensor, y: Tensor, **options: Any) -> Tensor:
    return log_prob(kind, f, y, **options).sum()


def residuals(kind: str, f: Tensor, y: Tensor, **options: Any) -> Tensor:
    """r = ∇_f log p(y | f): (B, T, C). Terms do not share outputs, so the gradient of the sum holds them all."""
    f = f.detach().requires_grad_()
    return torch.autograd.grad(log_lik(kind, f, y, **options), f)[0]


def exact_hessians(kind: str, f: Tensor, y: Tensor, **options: Any) -> Tensor:
    """−∇²_f log p(y | f): (B, T, C, C), by differentiating twice."""
    f = f.detach().requires_grad_()
    r = torch.autograd.grad(log_lik(kind, f, y, **options), f, create_graph=True)[0]
    rows = [torch.autograd.grad(r_c.sum(), f, retain_graph=True, allow_unused=True)[0] for r_c in r.unbind(-1)]
    return -torch.stack([torch.zeros_like(f) if row is None else row for row in rows], -2)


def hessians(kind: str, f: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Λ: (B, T, C, C). The exact Hessian, except for `hetero`, where it depends on y and Λ is the Fisher.

    E[r rᵀ] is quartic in y, so the three-point Gauss–Hermite rule (degree 5) integrates it exactly.
    """
    if kind != "hetero":
        return exact_hessians(kind, f, y, **options)
    mu, sigma = hetero_moments(f, options.get("precision_link", torch.exp))
    draws = [(1 / 6, -sqrt(3.0)), (2 / 3, 0.0), (1 / 6, sqrt(3.0))]
    rs = [(w, residuals(kind, f, mu + sigma * z, **options)) for w, z in draws]
    return sum((w * r[..., :, None] * r[..., None, :] for w, r in rs), torch.zeros(()))


# --- Kronecker factors by definition ------------------------------------------------------------------------

MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
                 nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """What a layer s = W a + b did for B data: inputs a (R, q, i) and ∂f/∂s (K, R, q, o) of each, over all its calls.

    `position` (q, o, i) says which entry of the flat parameter vector W[q, o, i] is; a bias is the last input.
    """

    a: list[Tensor]
    D: list[Tensor]
    position: Tensor
    has_bias: bool

    def rows(self) -> Tensor:
        """Σ_t g_t a_tᵀ: the Jacobian's columns (B, K, q, o, i)."""
        return torch.stack([torch.einsum("krqo,rqi->kqoi", D, a) for a, D in zip(self.a, self.D, strict=True)])


def layers(model: nn.Module, x: Any, names: Any = None) -> dict[str, Layer]:
    """Every matrix layer that computes nothing but s = W a + b, shares no tensor and sees a batch axis.

    Attention to itself projects by two such layers that are no modules of their own, or are never called as such.
    """
    starts, start = {}, 0
    for name, p in parameters(model, names).items():
        starts[name], start = start, start + p.numel()
    J = jacobian(model, x, names)[1]
    found = {}
    for path, m in model.named_modules():
        if type(m) is nn.MultiheadAttention and m.in_proj_weight is not None:
            found[path] = _layer(model, _Map.of_projection(path, m), x, starts)
            found[f"{path}.out_proj"] = _layer(model, _Map.of_output(path, m), x, starts)
        elif _plain(model, m) and path not in found:
            found[path] = _layer(model, _Map.of_module(path, m), x, starts)
    return {
        path: layer
        for path, layer in found.items()
        if layer is not None and torch.allclose(layer.rows(), J[..., layer.position], rtol=1e-9, atol=1e-12)
    }


def _plain(model: nn.Module, module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    holders = [m for m in model.modules() for p in m.parameters(recurse=False) if any(p is mine for mine in own)]
    forwards = [kind.forward for kind in MATRIX_LAYERS if isinstance(module, kind)]
    return type(module).forward in forwards and "weight" in module._parameters and len(holders) == len(own)


@dataclass(frozen=True)
class _Map:
    """A layer, the names of its tensors, and how to see its calls."""

    module: nn.Module
    weight: str
    bias: str
    calls: Callable[[nn.Module, Any], list[tuple[Tensor, Tensor]]]

    @classmethod
    def of_module(cls, path: str, m: nn.Module) -> _Map:
        weight, bias = (f"{path}.{key}".lstrip(".") for key in ("weight", "bias"))
        return cls(m, weight, bias, partial(_module_calls, m))

    @classmethod
    def of_projection(cls, path: str, m: nn.MultiheadAttention) -> _Map:
        same = nn.Linear(m.embed_dim, 3 * m.embed_dim, bias=False, dtype=m.in_proj_weight.dtype)
        names = (f"{path}.in_proj_{key}".lstrip(".") for key in ("weight", "bias"))
        return cls(same, *names, partial(_linear_calls, m.in_proj_weight))

    @classmethod
    def of_output(cls, path: str, m: nn.MultiheadAttention) -> _Map:
        names = (f"{path}.out_proj.{key}".lstrip(".") for key in ("weight", "bias"))
        return cls(m.out_proj, *names, partial(_linear_calls, m.out_proj.weight))


def _layer(model: nn.Module, map_: _Map, x: Any, starts: dict[str, int]) -> Layer | None:
    module, weight, bias = map_.module, map_.weight, map_.bias
    columns = [starts[weight] + weight_index(module)] if weight in starts else []
    q, o = weight_index(module).shape[:2]
    columns += [starts[bias] + torch.arange(q * o).reshape(q, o, 1)] if bias in starts else []
    if not columns:
        return None
    inputs, gradients = [], []
    for n in range(batch_size(x)):
        calls = map_.calls(model, slice_x(x, n))
        if not calls or any(s.ndim < weight_axes(module) for s, _ in calls):
            return None
        a = torch.cat([patches(module, s) for s, _ in calls])
        a = a if weight in starts else a[..., :0]
        inputs.append(torch.cat([a, a.new_ones(*a.shape[:2], 1)], -1) if bias in starts else a)
        by_call = [torch.stack([_by_position(module, g_k).unflatten(-1, (q, o)) for g_k in g]) for _, g in calls]
        gradients.append(torch.cat(by_call, 1))
    return Layer(inputs, gradients, torch.cat(columns, -1), bias in starts)


def weight_axes(module: nn.Module) -> int:
    """Axes of an input that has a batch axis."""
    return module.weight.ndim  # (out, in) against (B, in); (out, in, …k) against (B, in, …)


def weight_index(module: nn.Module) -> Tensor:
    """(q, o, i) → position in the flat weight. Transposed convolutions keep (q · in, o, …k)."""
    w, q = module.weight, getattr(module, "groups", 1)
    order = torch.arange(w.numel())
    if getattr(module, "transposed", False):
        return order.reshape(q, w.shape[0] // q, w.shape[1], -1).transpose(1, 2).flatten(2)
    return order.reshape(q, w.shape[0] // q, -1)


def patches(module: nn.Module, s: Tensor) -> Tensor:
    """a (R, q, i) for an input s, from the layer itself: it is linear, so ∂(W a_t)_o/∂W_o = a_t."""
    index = weight_index(module)
    q, o = index.shape[:2]
    weight = module.weight.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = _by_position(module, torch.func.functional_call(module, {"weight": weight}, (s,)))
        first = [[torch.autograd.grad(row[g * o], weight, retain_graph=True)[0] for g in range(q)] for row in out]
    return torch.stack([torch.stack([w.flatten()[index[g, 0]] for g, w in enumerate(row)]) for row in first])


def _by_position(module: nn.Module, s: Tensor) -> Tensor:
    """A layer's output, (…, channels) or (B, channels, …), as (R, channels)."""
    return (s if isinstance(module, nn.Linear) else s.movedim(1, -1)).flatten(0, -2)


class _Noted:
    """Inputs and outputs of the calls of one layer. A zero added to s takes the gradient: s may be overwritten."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.open = True  # checkpointed blocks run once more during the backward pass

    def note(self, a: Tensor, s: Tensor) -> Tensor:
        zero = torch.zeros_like(s).requires_grad_()
        if self.open:
            self.inputs.append(a.detach().clone())
            self.zeros.append(zero)
        return s + zero

    def pulled_back(self, model: nn.Module, x: Any) -> list[tuple[Tensor, Tensor]]:
        """Input and ∂f/∂s (K, …) of every call for one datum."""
        with torch.random.fork_rng(devices=[]):
            f = outputs(model, x)[0]
        self.open = False
        rows = [torch.autograd.grad(f_k, self.zeros, retain_graph=True, allow_unused=True) for f_k in f if self.zeros]
        gradients = [
            torch.stack([torch.zeros_like(zero) if row[j] is None else row[j] for row in rows])
            for j, zero in enumerate(self.zeros)
        ]
        return list(zip(self.inputs, gradients, strict=True))


def _module_calls(module: nn.Module, model: nn.Module, x: Any) -> list[tuple[Tensor, Tensor]]:
    """The calls of a module, by hooks; its input is kept before the module may overwrite it."""
    noted, before = _Noted(), []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: before.append((args or [kwargs["input"]])[0].detach().clone()), with_kwargs=True
        ),
        module.register_forward_hook(lambda _, args, s: noted.note(before.pop(), s)),
    ]
    try:
        return noted.pulled_back(model, x)
    finally:
        for hook in hooks:
            hook.remove()


def _linear_calls(weight: Tensor, model: nn.Module, x: Any) -> list[tuple[Tensor, Tensor]]:
    """The products with a weight, by listening to `F.linear`."""
    noted, linear = _Noted(), F.linear

    def listening(a: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
        s = linear(a, W, b)
        return noted.note(a, s) if W is weight else s

    with patch.object(F, "linear", listening):
        return noted.pulled_back(model, x)


def kronecker_factors(layer: Layer, Lambda: Tensor, sharing: str = "expand") -> tuple[Tensor, Tensor]:
    """A (q, i, i) = mean over data and positions of a aᵀ, B (q, o, o) = Σ gᵀ Λ g; `reduce`: ā = mean, ĝ = sum."""
    a, D = layer.a, layer.D
    if sharing == "reduce":
        a, D = [v.mean(0, keepdim=True) for v in a], [g.sum(1, keepdim=True) for g in D]
    A = sum(torch.einsum("rqi,rqj->qij", v, v) for v in a) / sum(len(v) for v in a)
    B = sum(torch.einsum("krqo,kl,lrqp->qop", g, L, g) for g, L in zip(D, Lambda, strict=True))
    return A, B


def kron_block(A: Tensor, B: Tensor, position: Tensor, p: int) -> Tensor:
    """B ⊗ A, one block per group, at its place in a (p, p) matrix of zeros."""
    H = A.new_zeros(p, p)
    for A_q, B_q, place in zip(A, B, position, strict=True):
        H[place.flatten()[:, None], place.flatten()] = torch.kron(B_q, A_q)
    return H


def kronecker(
    H: Tensor,
    sizes: list[int],
    layers: Iterable[Layer],
    Lambda: Tensor,
    *,
    sharing: str = "expand",
    bias: str = "joint",
) -> Tensor:
    """The whole structure: B ⊗ A for the layers; elsewhere each tensor's own block of the GGN H, above 1,024 entries
    its diagonal. `sizes` are the tensors' numbers of entries, in order."""
    K = torch.block_diag(*(_loose(block) for block in _diagonal_blocks(H, sizes)))
    for layer in layers:
        A, B = kronecker_factors(layer, Lambda, sharing)
        place = layer.position
        K[place.flatten()] = 0
        K[:, place.flatten()] = 0
        if bias == "separate" and layer.has_bias:
            K += kron_block(A[:, -1:, -1:], B, place[..., -1:], len(H))
            A, place = A[:, :-1, :-1], place[..., :-1]
        K += kron_block(A, B, place, len(H))
    return K


def _diagonal_blocks(H: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [H[end - size : end, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _loose(block: Tensor) -> Tensor:
    return block if len(block) <= 1024 else block.diagonal().diag()


def eigen_corrected(H: Tensor, A: Tensor, B: Tensor, position: Tensor) -> Tensor:
    """EKFAC in the eigenbases of A and B: U diag(Uᵀ H U) Uᵀ, for the entries in `position`."""
    K = torch.zeros_like(H)
    for A_q, B_q, place in zip(A, B, position, strict=True):
        at = place.flatten()
        U = torch.kron(torch.linalg.eigh(B_q)[1], torch.linalg.eigh(A_q)[1])
        K[at[:, None], at] = U @ (U.T @ H[at[:, None], at] @ U).diagonal().diag() @ U.T
    return K


# --- posterior, evidence, predictive ------------------------------------------------------------------------


def ggn(J: Tensor, Lambda: Tensor) -> Tensor:
    """H = Σₙ Jₙᵀ Λₙ Jₙ, one datum after the other; J (B, K, P), Λ (B, K, K)."""
    H = J.new_zeros(J.shape[-1], J.shape[-1])
    for J_n, Lambda_n in zip(J, Lambda, strict=True):
        H += J_n.T @ Lambda_n @ J_n
    return H


def posterior(H: Tensor, d: Any) -> Tensor:
    """Σ = (H + diag d)⁻¹."""
    return torch.linalg.inv(H + torch.diag(diagonal(d, H)))


def diagonal(d: Any, H: Tensor) -> Tensor:
    return torch.as_tensor(d, dtype=H.dtype).expand(len(H))


def log_evidence(log_lik: Any, H: Tensor, d: Any, theta: Tensor, mean: Any = 0.0) -> Tensor:
    """log p(D | θ) − ½ (log det(H + P₀) − log det P₀) − ½ (θ − μ₀)ᵀ P₀ (θ − μ₀)."""
    P0 = torch.diag(diagonal(d, H))
    gap = theta - mean
    log_det_ratio = torch.linalg.slogdet(H + P0).logabsdet - torch.linalg.slogdet(P0).logabsdet
    return log_lik - 0.5 * log_det_ratio - 0.5 * gap @ P0 @ gap


def effective_dimension(H: Tensor, d: Any, groups: Tensor) -> Tensor:
    """γ_g = Σ_{i in g} (Σ H)ᵢᵢ; `groups` (P,) numbers the group of every parameter."""
    share = torch.diagonal(posterior(H, d) @ H)
    return torch.stack([share[groups == g].sum() for g in range(int(groups.max()) + 1)])


def functional_cov(J: Tensor, Sigma: Tensor) -> Tensor:
    """J Σ Jᵀ of every datum: (B, K, K)."""
    return torch.stack([J_n @ Sigma @ J_n.T for J_n in J])


def joint_cov(J: Tensor, Sigma: Tensor) -> Tensor:
    """J Σ Jᵀ across data too: (B·K, B·K), the outputs of a datum side by side."""
    J = J.flatten(0, 1)
    return J @ Sigma @ J.T


def conjugate_regression(
    J: Tensor, y: Tensor, offset: Tensor, noise_std: Any, d: Any, mean: Any = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Bayesian linear regression y = offset + J θ + ε, θ ~ N(mean, diag d⁻¹): posterior mean and covariance, log p(y).

    Conditions the joint Gaussian of θ and y, in function space, so it shares no formula with `log_evidence`.
    """
    s2 = torch.as_tensor(noise_std, dtype=J.dtype).expand(y.shape).reshape(-1) ** 2
    J, y, offset = J.reshape(-1, J.shape[-1]), y.reshape(-1), offset.reshape(-1)
    prior_cov = torch.diag(1 / torch.as_tensor(d, dtype=J.dtype).expand(J.shape[-1]))
    prior_mean = torch.as_tensor(mean, dtype=J.dtype).expand(J.shape[-1])
    y_cov = J @ prior_cov @ J.T + torch.diag(s2)
    gain = prior_cov @ J.T @ torch.linalg.inv(y_cov)
    y_mean = offset + J @ prior_mean
    log_p = MultivariateNormal(y_mean, y_cov).log_prob(y)
    return prior_mean + gain @ (y - y_mean), prior_cov - gain @ J @ prior_cov, log_p


def average_hessians(f: Tensor, V: Tensor, n_nodes: int = 81) -> Tensor:
    """E[diag p − p pᵀ], p = softmax h, h ~ N(f, V), for each datum: a sum over a grid of the standard normal."""
    nodes = torch.linspace(-8, 8, n_nodes, dtype=f.dtype)
    z = torch.cartesian_prod(*[nodes] * f.shape[1])
    weights = torch.softmax(-0.5 * z.square().sum(1), 0)
    averages = []
    for f_n, V_n in zip(f, V, strict=True):
        values, U = torch.linalg.eigh(V_n)
        p = torch.softmax(f_n + (z * values.clamp(min=0).sqrt()) @ U.T, 1)
        averages.append((weights @ p).diag() - p.T @ (weights[:, None] * p))
    return torch.stack(averages)


# --- comparison ---------------------------------------------------------------------------------------------


def assert_close(a: Any, b: Any, rtol: float = 1e-10) -> None:
    """max |a − b| ≤ rtol · max |b| (absolute when b is zero throughout); on failure shows the worst entry."""
    a, b = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (a, b))
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}"
    if a.numel() == 0:
        return
    error = torch.where(a == b, torch.zeros_like(a), (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = torch.where(b.isfinite(), b.abs(), 0.0).max().item() or 1.0
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), a.shape))
    worst, x, y = error[at].item(), a[at].item(), b[at].item()
    ratio = f"{x / y:.12g}" if y else "x/0"
    assert worst <= rtol * scale, (
        f"worst entry {at}: {x!r} against {y!r}, ratio {ratio}; "
        f"error {worst:.3e} = {worst / scale:.3e} of max |b| = {scale:.3e}, allowed {rtol:.1e}"
    )
