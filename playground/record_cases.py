"""Record what Lapwing answers on small networks, for the playground's own numeric core to be compared with.

    python playground/record_cases.py            # today's answers for the recorded inputs
    python playground/record_cases.py --retrain  # new inputs too: data and trained weights

Data and weights are kept apart from the answers, so recording again after a change of Lapwing shows only what that
change did. `tests/playground/test_recorded_cases.py` says when the file is stale.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

CASES = Path(__file__).parent / "tests" / "cases.json"
LINKS = ("probit", "pairwise", "bridge", "bridge_norm")
CURVE = [10.0**k for k in range(-3, 4)]
N_DRAWS = 4
N_STEPS, RATE = 10, 0.02  # of the optimiser
STRUCTURES: dict[str, dict[str, str]] = {
    "full": {"structure": "full"},
    "diag": {"structure": "diag"},
    "last_layer": {"structure": "full", "params": "last_layer"},
}


@dataclass(frozen=True)
class Inputs:
    """One network, its data and where to look at it: all that the answers depend on."""

    name: str
    widths: list[int]
    theta: list[float]
    x: list[list[float]]
    y: list[float]
    at: list[list[float]]
    eps: list[list[float]]  # standard normal points for Monte Carlo over classes
    structure: str
    precision: float
    noise_std: float  # of a regression
    decay: float = 0.01  # weight decay in training

    @property
    def classes(self) -> bool:
        return self.widths[-1] > 1


# --- answers ----------------------------------------------------------------------------------------------------


def answers(inputs: Inputs) -> dict[str, Any]:
    """What Lapwing says, in float64."""
    model, data, at = network(inputs), targets(inputs), float64(inputs.at)
    posterior = fitted(inputs, model, data)
    joint = posterior.joint_outputs(at[:3])
    found = {
        "outputs": posterior.outputs(at).mean,
        "covariances": posterior.outputs(at).cov,
        "joint_covariance": joint.cov,
        "marginal_variance": posterior.marginal_variance(),
        "log_evidence": posterior.log_evidence(),
        "effective_dimension": posterior.effective_dimension().sum(),
        "curve": torch.stack([posterior.with_prior(delta).log_evidence() for delta in CURVE]),
        **training(inputs, model, data),
        **best(inputs, posterior, data),
        **sampled(inputs, posterior, at),
    }
    found |= class_probabilities(inputs, posterior, at) if inputs.classes else band(posterior, at)
    return {key: value.tolist() for key, value in found.items()}


def fitted(inputs: Inputs, model: nn.Module, data: tuple[Tensor, Tensor]) -> lw.Posterior:
    likelihood = "classification" if inputs.classes else lw.Gaussian(noise_std=inputs.noise_std)
    return lw.fit(model, data, likelihood, prior=inputs.precision, **STRUCTURES[inputs.structure])


def training(inputs: Inputs, model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The penalised loss at unit noise, its gradient, and where torch's Adam goes with a rate that falls to zero."""
    value = penalised_loss(model, data, inputs)
    gradient = torch.autograd.grad(value, list(model.parameters()))
    moved = network(inputs)
    optimiser = torch.optim.Adam(moved.parameters(), lr=RATE, betas=(0.9, 0.99))
    for step in range(1, N_STEPS + 1):
        optimiser.param_groups[0]["lr"] = 0.5 * RATE * (1 + cos(pi * step / N_STEPS))
        optimiser.zero_grad()
        penalised_loss(moved, data, inputs).backward()
        optimiser.step()
    after = nn.utils.parameters_to_vector(moved.parameters()).detach()
    return {"loss": value.detach(), "gradient": torch.cat([g.flatten() for g in gradient]), "after_training": after}


def best(inputs: Inputs, posterior: lw.Posterior, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The prior precision and noise of the highest evidence at the trained weights."""
    likelihood = "classification" if inputs.classes else lw.Gaussian()
    free = lw.fit(network(inputs), data, likelihood, prior=1.0, **STRUCTURES[inputs.structure])
    tuned = lw.tune(free, data, mode="network", budget="exact")
    found = {"best_precision": tuned.prior.precisions[0], "best_log_evidence": tuned.log_evidence()}
    return found if inputs.classes else found | {"best_noise_std": tuned.likelihood.resolved().squeeze()}


def sampled(inputs: Inputs, posterior: lw.Posterior, at: Tensor) -> dict[str, Tensor]:
    """The same draws of the weights, through the linearised function and through the network."""
    functions = posterior.functions(N_DRAWS, generator=seeded())
    prediction = posterior.predict(at, predictive="bnn", n_samples=N_DRAWS, generator=seeded())
    found = {"draws": posterior.sample(N_DRAWS, seeded()), "functions": functions(at)}
    if inputs.classes:
        return found | {"sampled_probs": prediction.probs}
    return found | {"sampled_mean": prediction.mean, "sampled_epistemic": prediction.epistemic}


def class_probabilities(inputs: Inputs, posterior: lw.Posterior, at: Tensor) -> dict[str, Tensor]:
    mean, cov, _ = posterior.outputs(at)
    draws = mean + torch.einsum("nij,sj->sni", torch.linalg.cholesky(cov), float64(inputs.eps))
    many = posterior.predict(at, link="mc", n_samples=4096, generator=seeded())
    return {
        **{link: posterior.predict(at, link=link).probs for link in LINKS},
        "mc": draws.softmax(-1).mean(0),
        "mc_many": many.probs,
    }


def band(posterior: lw.Posterior, at: Tensor) -> dict[str, Tensor]:
    prediction = posterior.predict(at)
    return {"mean": prediction.mean, "epistemic": prediction.epistemic, "variance": prediction.variance}


# --- inputs -----------------------------------------------------------------------------------------------------


def new_inputs() -> list[Inputs]:
    """Networks as the playground has them, smaller and deeper ones, and one datum; every structure on each."""
    made = []
    for name, widths, n in (
        ("regression", [1, 10, 10, 1], 16),
        ("regression-shallow", [1, 5, 1], 7),
        ("regression-one-datum", [1, 4, 1], 1),
        ("classes", [2, 10, 10, 3], 18),
        ("classes-deep", [2, 4, 3, 4, 3], 9),
        ("classes-two", [2, 5, 2], 8),
    ):
        seed = torch.Generator().manual_seed(len(made))
        x, y = example(widths, n, seed)
        at = 3 * (2 * torch.rand(5, widths[0], generator=seed, dtype=torch.float64) - 1)
        eps = torch.randn(6, widths[-1], generator=seed, dtype=torch.float64)
        theta = trained(widths, x, y, seed)
        for k, structure in enumerate(STRUCTURES):
            values = [t.tolist() for t in (theta, x, y, at, eps)]
            made.append(Inputs(f"{name}-{structure}", widths, *values, structure, (1.0, 0.03, 20.0)[k], 0.1 * (k + 2)))
    return made


def example(widths: list[int], n: int, seed: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, widths[0], generator=seed, dtype=torch.float64)
    if widths[-1] == 1:
        return x, torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(n, generator=seed, dtype=torch.float64)
    noisy = x[:, 0] * x[:, 1] + 0.3 * torch.randn(n, generator=seed, dtype=torch.float64)
    return x, torch.bucketize(noisy, torch.linspace(-1, 1, widths[-1] + 1)[1:-1].double())


def trained(widths: list[int], x: Tensor, y: Tensor, seed: torch.Generator, steps: int = 400) -> Tensor:
    model = perceptron(widths)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=seed, dtype=p.dtype) / p.shape[-1] ** 0.5)
    inputs = Inputs("", widths, [], [], [], [], [], "full", 1.0, 1.0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        penalised_loss(model, (x, y), inputs).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def penalised_loss(model: nn.Module, data: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    x, y = data
    f = model(x)
    if inputs.classes:
        fit = nn.functional.cross_entropy(f, y, reduction="sum")
    else:
        fit = -torch.distributions.Normal(f[:, 0], 1.0).log_prob(y.reshape(-1)).sum()
    return fit + 0.5 * inputs.decay * sum(p.square().sum() for p in model.parameters())


def network(inputs: Inputs) -> nn.Module:
    model = perceptron(inputs.widths)
    nn.utils.vector_to_parameters(float64(inputs.theta), model.parameters())
    return model


def perceptron(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def targets(inputs: Inputs) -> tuple[Tensor, Tensor]:
    y = torch.tensor(inputs.y) if inputs.classes else float64(inputs.y)[:, None]
    return float64(inputs.x), y


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# --- the file ---------------------------------------------------------------------------------------------------


def recorded() -> list[tuple[Inputs, dict[str, Any]]]:
    entries = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    return [(Inputs(**entry["inputs"]), entry["answers"]) for entry in entries]


def write(inputs: list[Inputs]) -> None:
    cases = [{"inputs": asdict(each), "answers": answers(each)} for each in inputs]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    CASES.write_text(f'{{"curve":{json.dumps(CURVE)},"cases":[\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(cases)} cases in {CASES}, {CASES.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--retrain", action="store_true", help="new data and weights, not only new answers")
    write(new_inputs() if arguments.parse_args().retrain else [inputs for inputs, _ in recorded()])
