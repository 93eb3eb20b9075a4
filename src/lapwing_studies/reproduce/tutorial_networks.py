"""The tutorial's pictures of networks: the evidence framework, why to linearise, normalised groups, the right mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.study import Record

HIDDEN = 6


def network_panel(rounds: int = 30, restarts: int = 2) -> Record:
    """The evidence framework on 41 points of a noisy sine; its band linearised, and by sampled weights."""
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None]
    y = torch.sin(2 * torch.pi * x) + 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=41))[:, None]
    posterior = max(
        (by_evidence(x, y, rounds, seed) for seed in range(restarts)), key=lambda p: float(p.log_evidence())
    )
    shown = torch.linspace(-2, 2, 161, dtype=torch.float64)[:, None]
    glm: Any = posterior.predict(shown)
    generator = torch.Generator().manual_seed(0)
    bnn: Any = posterior.predict(shown, predictive="bnn", n_samples=2000, generator=generator)
    curves = {"truth": listed(torch.sin(2 * torch.pi * shown)), "network": listed(glm.mean)}
    for name, p in (("linearised", glm), ("sampled", bnn)):
        curves |= {f"{name} −": listed(p.mean - 2 * p.std), f"{name} +": listed(p.mean + 2 * p.std)}
    likelihood: Any = posterior.likelihood
    at_data: Any = posterior.predict(x, predictive="bnn", n_samples=2000, generator=generator)
    values = {
        "gamma": float(posterior.effective_dimension().sum()),
        "alpha": float(posterior.prior.precisions[0]),
        "sigma": float(likelihood.noise_std[0]),
        "log Z": float(posterior.log_evidence()),
        "RMSE": float((posterior.predict(x).mean - torch.sin(2 * torch.pi * x)).square().mean().sqrt()),
        "NLL linearised": -float(posterior.predict(x).log_prob(y).mean()),
        "NLL sampled": -float(at_data.log_prob(y).mean()),
    }
    return Record(name="network", x_label="x", x=listed(shown), curves=curves, values=values)


def by_evidence(x: Tensor, y: Tensor, rounds: int, seed: int, hidden: int = HIDDEN) -> lw.Posterior:
    """MacKay's loop: weights at the mode for α and β, then α ← γ/‖θ‖² and β ← (N − γ)/SSE, and again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
        first = model[0]
        assert isinstance(first, nn.Linear)
        nn.init.normal_(first.weight, std=3.0)
    alpha, beta = 0.1, 100.0
    for _ in range(rounds):

        def loss(alpha: float = alpha, beta: float = beta) -> Tensor:
            return 0.5 * beta * (model(x) - y).square().sum() + 0.5 * alpha * _norm(model)

        minimise(model, loss)
        posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=beta**-0.5), structure="full", prior=alpha,
                           progress=False)  # fmt: skip
        gamma = float(posterior.effective_dimension().sum())
        with torch.no_grad():
            alpha, beta = gamma / float(_norm(model)), (len(x) - gamma) / float((model(x) - y).square().sum())
    return posterior


def scale_panel() -> Record:
    """Loss plus penalty along k (W, b), in front of a LayerNorm (the loss does not change) and without one."""
    x, y = _waves()
    scales = torch.linspace(0.2, 3, 113, dtype=torch.float64)
    curves: dict[str, list[float]] = {}
    values: dict[str, Any] = {}
    for name, norm in (("with LayerNorm", True), ("without", False)):
        model = _small(norm, x, y)
        scaled = model[2]
        assert isinstance(scaled, nn.Linear)
        weight, bias = (p.detach().clone() for p in scaled.parameters())
        found, data = [], []
        with torch.no_grad():
            for k in scales:
                scaled.weight.copy_(k * weight)
                scaled.bias.copy_(k * bias)
                data.append(50 * (model(x) - y).square().sum())
                found.append(data[-1] + 0.5 * _norm(model))
        curves[name], best = listed(torch.stack(found)), int(torch.stack(found).argmin())
        values |= {f"lowest at, {name}": float(scales[best])}
        values |= {f"spread of the loss, {name}": float(torch.stack(data).max() - torch.stack(data).min())}
    return Record(name="scale", x_label="scale of the group", x=listed(scales), curves=curves, values=values)


def mode_panel() -> Record:
    """log evidence against the prior precision: at the trained weights, and at the mode of the linear model.

    The second is exact for the linear model: log N(y; f − J θ*, J Jᵀ/δ + s² I).
    """
    x, y = _waves()
    model = _small(True, x, y)
    noise = float((model(x) - y).detach().square().mean().sqrt())
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=noise), structure="full", prior=1.0, progress=False)
    theta, n = posterior.mean, len(x)
    parameters = list(model.parameters())
    rows = (torch.autograd.grad(f, parameters, retain_graph=True) for f in model(x)[:, 0])
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    residual = (y - model(x)).detach()[:, 0] + J @ theta
    deltas = torch.logspace(-3, 3, 121, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64)
    normals = (torch.distributions.MultivariateNormal(torch.zeros_like(residual), J @ J.T / d + noise**2 * eye)
               for d in deltas)  # fmt: skip
    linear = torch.stack([normal.log_prob(residual) for normal in normals])
    trained = torch.stack([posterior.with_prior(float(d)).log_evidence().detach() for d in deltas])
    best = {"linear mode": float(deltas[linear.argmax()]), "trained weights": float(deltas[trained.argmax()])}
    curves = {"linear mode": listed(linear), "trained weights": listed(trained)}
    return Record(name="mode", x_label="log10 prior precision", x=listed(deltas.log10()), curves=curves, values=best)


def _waves() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None]
    return x, torch.sin(2 * torch.pi * x) + 0.1 * torch.from_numpy(np.random.default_rng(1).normal(size=41))[:, None]


def _small(norm: bool, x: Tensor, y: Tensor) -> nn.Sequential:
    """1-10-10-1, stopped early, as people train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = nn.LayerNorm(10) if norm else nn.Identity()
        model = nn.Sequential(
            nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), middle, nn.Tanh(), nn.Linear(10, 1)
        ).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    model.zero_grad(set_to_none=True)
    return model


def _norm(model: nn.Module) -> Any:
    return sum(p.square().sum() for p in model.parameters())


def minimise(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=400, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimiser.step(closure)
    model.zero_grad(set_to_none=True)


def listed(values: Tensor) -> list[float]:
    return [round(v, 6) for v in values.detach().double().flatten().tolist()]
