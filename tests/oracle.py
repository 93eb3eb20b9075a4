"""The dense truth, by brute force in float64: full Jacobians, explicit sums, `inv`, `slogdet`.

Imports torch and nothing of the library it judges. Letters as in the papers: B data, K outputs of one
datum (flattened in the model's own order) = T sites × C outputs, P parameters. `d` is the diagonal of the
prior precision, a (P,) tensor or one number.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
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
