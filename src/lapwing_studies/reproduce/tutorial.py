"""The pictures of the tutorial on the Laplace approximation, each computed: no figure of it is sketched.

After Hernández-Lobato's tutorial: a density on the line, Bayesian logistic regression, the evidence framework on a
network 1-6-1, why to linearise, normalised networks, and the evidence at the right mode. Float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.tutorial_networks import listed, minimise, mode_panel, network_panel, scale_panel

LOGISTIC_X = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0)
LOGISTIC_Y = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def run(study: Study) -> Record:
    toy = study.effort.name == "toy"
    network = Job("network", lambda: network_panel(2 if toy else 30, 1 if toy else 2), study.effort.name)
    jobs = [Job("density", density_panel), Job("logistic", logistic_panel), network, Job("scale", scale_panel),
            Job("mode", mode_panel)]  # fmt: skip
    return study.record("tutorial", jobs)


@dataclass(frozen=True)
class Job:
    name: str
    work: Callable[[], Record]
    made_with: str = "v1"

    def run(self) -> Record:
        return self.work()


def density_panel() -> Record:
    """f(w) = exp(−w²/2) σ(20 w + 4): skewed, so that the mode is far from the mean though the variance is close."""
    w = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    mode = torch.zeros(1, dtype=torch.float64)
    for _ in range(50):  # Newton: g = −w + 20 σ(−20w − 4), a = 1 + 400 σ σ'
        below = torch.sigmoid(-20 * mode - 4)
        a = 1 + 400 * below * (1 - below)
        mode = mode + (20 * below - mode) / a
    z = float(torch.trapezoid(_log_f(w).exp(), w))  # the exact Z
    density = _log_f(w).exp() / z
    mean = float(torch.trapezoid(w * density, w))
    var = float(torch.trapezoid((w - mean) ** 2 * density, w))
    shown = torch.linspace(-1.5, 3, 226, dtype=torch.float64)
    laplace = torch.distributions.Normal(mode, a.rsqrt())
    curves = {"exact": listed(_log_f(shown).exp() / z), "Laplace": listed(laplace.log_prob(shown).exp())}
    values = {"mode": float(mode), "a": float(a), "log Z": math.log(z), "mean": mean, "variance": var}
    values["log Z Laplace"] = float(_log_f(mode)) + 0.5 * math.log(2 * math.pi / float(a))
    return Record(name="density", x_label="w", x=listed(shown), curves=curves, values=values)


def _log_f(w: Tensor) -> Tensor:
    return -0.5 * w.square() + nn.functional.logsigmoid(20 * w + 4)


def logistic_panel(alpha: float = 1.0) -> Record:
    """p(y = 1 | x) of a logistic regression: exact by 160 × 160 Gauss–Hermite nodes over the prior N(0, I/α)."""
    x, y = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (LOGISTIC_X, LOGISTIC_Y))
    model = nn.Linear(1, 1).double()
    posterior = _at_mode(model, x, y, alpha)
    weights, probability, log_z = _over_the_prior(x, y, alpha)
    shown = torch.cat([torch.linspace(-8, 8, 161, dtype=torch.float64), torch.tensor([1.5, -6.0])])[:, None]
    by_link: Any = {link: posterior.predict(shown, link=link).probs for link in ("quadrature", "probit")}
    curves = {
        "exact": torch.sigmoid(weights[:, :1] @ shown.T + weights[:, 1:]).T @ probability,
        "Laplace": by_link["quadrature"],
        "probit": by_link["probit"],
        "MAP": torch.sigmoid(model(shown)),
    }
    values = {"log Z": log_z, "log Z Laplace": float(posterior.log_evidence())}
    values |= {"MAP w": listed(model.weight)[0], "MAP b": listed(model.bias)[0]}
    values |= {f"{name} at {at:g}": listed(c)[k] for name, c in curves.items() for k, at in ((-2, 1.5), (-1, -6.0))}
    found = {name: listed(curve)[:-2] for name, curve in curves.items()}
    return Record(name="logistic", x_label="x", x=listed(shown)[:-2], curves=found, values=values)


def _at_mode(model: nn.Module, x: Tensor, y: Tensor, alpha: float) -> lw.Posterior:
    def loss() -> Tensor:
        nll = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        return nll + 0.5 * alpha * sum(p.square().sum() for p in model.parameters())

    minimise(model, loss)
    return lw.fit(model, (x, y), "binary", structure="full", prior=alpha, progress=False)


def _over_the_prior(x: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor, float]:
    """Nodes (w, b), their posterior probabilities, and log p(D)."""
    nodes, node_weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(160))
    weights = torch.cartesian_prod(nodes, nodes) / math.sqrt(alpha)
    f = weights[:, :1] @ x.T + weights[:, 1:]
    log_prior = torch.cartesian_prod(node_weights, node_weights).clamp(min=1e-300).log().sum(1) - math.log(2 * math.pi)
    log_joint = log_prior + nn.functional.logsigmoid((2 * y.T - 1) * f).sum(1)
    total = torch.logsumexp(log_joint, 0)
    return weights, (log_joint - total).exp(), float(total)


def claims(record: Record) -> list[Claim]:
    """The sentences that go with the pictures; the numbers wanted are the worked values of the tutorial's examples."""
    at = {panel["name"]: panel["values"] for panel in record["runs"]}
    one, two, net, scale, mode = (at[name] for name in ("density", "logistic", "network", "scale", "mode"))
    gap = abs(two["log Z Laplace"] - two["log Z"])
    return [
        Claim("a skewed density: the mode is far from the mean, and Laplace's variance close", "0.0775 and 0.6728",
              f"{one['mode']:.4f} and {one['mean']:.4f}; 1/a {1 / one['a']:.3f}, variance {one['variance']:.3f}",
              one["mean"] - one["mode"] > 0.5 and abs(one["a"] * one["variance"] - 1) < 0.1),
        Claim("logistic regression: Laplace's evidence is close to the exact one", "−4.3186 and −4.2751",
              f"{two['log Z Laplace']:.4f} and {two['log Z']:.4f}", gap < 0.1),
        Claim("far from the data it is less certain than the network (p at x = −6, exact 0.061)", "above MAP",
              f"{two['Laplace at -6']:.3f} against {two['MAP at -6']:.3f}", two["Laplace at -6"] > two["MAP at -6"]),
        Claim("evidence framework, 1-6-1: effective number of weights, out of 19", "12.55 ± 0.05",
              f"{net['gamma']:.2f}", abs(net["gamma"] - 12.553) < 0.05),
        Claim("and its prior precision and noise", "0.1045 and 0.0753", f"{net['alpha']:.4f} and {net['sigma']:.4f}",
              abs(net["alpha"] / 0.1045 - 1) < 0.02 and abs(net["sigma"] / 0.0753 - 1) < 0.02),
        Claim("sampled weights underfit the training data where the linearised network does not (NLL)", "worse",
              f"{net['NLL sampled']:.2f} against {net['NLL linearised']:.2f}",
              net["NLL sampled"] > net["NLL linearised"]),
        Claim("a normalised group has no minimum: loss plus penalty falls towards scale zero", "lowest at the end",
              f"lowest at {scale['lowest at, with LayerNorm']:.1f}; "
              f"without a norm at {scale['lowest at, without']:.2f}",
              scale["lowest at, with LayerNorm"] < 0.25 and 0.5 < scale["lowest at, without"] < 2),
        Claim("the evidence at the trained weights picks a smaller precision than at the linear mode", "smaller",
              f"{mode['trained weights']:.2f} against {mode['linear mode']:.2f}",
              mode["trained weights"] < mode["linear mode"]),
    ]  # fmt: skip
