"""A step function with two weights: the exact posterior predictive compared with MAP, BNN and GLM.

f(x) = 5 tanh(w x + b), Bernoulli, w and b ~ N(0, 1). After figure 3 of Immer, Korzepa and Bauer (2021), with other
points and prior.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.study import Record, Study

X = (-2.0, -1.5, -1.0, 1.0, 1.5, 2.0)
Y = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
SHOWN = (0.5, 1.0, 2.0, 4.0)
# Grid of the exact posterior: prior standard deviations on either side, and points per weight.
REACH, N_GRID = 8.0, 801
N_SAMPLES = 4000


def run(study: Study) -> Record:
    return study.record("step", [StepJob()])


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in (0.5, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * torch.tanh(self.w * x + self.b)


def data() -> tuple[Tensor, Tensor]:
    return torch.tensor(X, dtype=torch.float64)[:, None], torch.tensor(Y, dtype=torch.float64)[:, None]


def trained() -> Step:
    """The mode of the posterior under w, b ~ N(0, 1)."""
    model, (x, y) = Step(), data()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        loss = loss + 0.5 * (model.w.square() + model.b.square())
        loss.backward()
        return loss

    optimiser.step(closure)
    model.zero_grad(set_to_none=True)
    return model


@dataclass(frozen=True)
class Exact:
    """The posterior on a grid of (w, b), normalised."""

    w: Tensor
    b: Tensor
    probability: Tensor
    log_evidence: float

    @classmethod
    def of(cls, n: int = N_GRID) -> Exact:
        axis = torch.linspace(-REACH, REACH, n, dtype=torch.float64)
        w, b = torch.meshgrid(axis, axis, indexing="ij")
        log_joint = -0.5 * (w.square() + b.square()) - torch.log(torch.tensor(2 * torch.pi))
        for x, y in zip(X, Y, strict=True):
            log_joint = log_joint + nn.functional.logsigmoid((2 * y - 1) * 5 * torch.tanh(w * x + b))
        total = torch.logsumexp(log_joint.flatten(), 0)
        cell = float(axis[1] - axis[0]) ** 2
        return cls(w, b, (log_joint - total).exp(), float(total + torch.log(torch.tensor(cell))))

    def predict(self, x: Tensor) -> Tensor:
        """∫ σ(f(x; w, b)) p(w, b | D)."""
        found = [(self.probability * torch.sigmoid(5 * torch.tanh(self.w * v + self.b))).sum() for v in x.flatten()]
        return torch.stack(found)

    @property
    def negative(self) -> float:
        return float(self.probability[self.w < 0].sum())


@dataclass(frozen=True)
class StepJob:
    name: str = "step"

    @property
    def made_with(self) -> str:
        return f"{X} | {Y} | prior 1 | {N_GRID} | {N_SAMPLES} samples"

    def run(self) -> Record:
        """p(y = 1 | x) by every method; `negative`: the posterior probability of w < 0, exact and by Laplace."""
        model, exact = trained(), Exact.of()
        posterior = lw.fit(model, data(), "binary", structure="full", prior=1.0, progress=False)
        grid = torch.linspace(-4, 4, 161, dtype=torch.float64)[:, None]
        shown = torch.tensor(SHOWN, dtype=torch.float64)[:, None]
        w = exact.w[:, 0]
        mean, variance = posterior.mean[0], posterior.marginal_variance()[0]
        laplace = torch.distributions.Normal(mean, variance.sqrt())
        marginal = exact.probability.sum(1) / (w[1] - w[0])
        near = (w >= -1.5) & (w <= 3.5)
        return Record(
            x=_list(grid),
            curves=predictions(model, posterior, exact, grid),
            at=list(SHOWN),
            values=predictions(model, posterior, exact, shown),
            negative={"exact": exact.negative, "Laplace": float(laplace.cdf(torch.zeros_like(mean)))},
            log_evidence={"exact": exact.log_evidence, "Laplace": float(posterior.log_evidence())},
            w=_list(w[near]),
            weight_density={"exact": _list(marginal[near]), "Laplace": _list(laplace.log_prob(w[near]).exp())},
        )


def predictions(model: nn.Module, posterior: lw.Posterior, exact: Exact, x: Tensor) -> dict[str, list[float]]:
    sampled: Any = posterior.predict(x, predictive="bnn", n_samples=N_SAMPLES)
    linearised: Any = posterior.predict(x, link="quadrature")
    with torch.no_grad():
        network = torch.sigmoid(model(x))
    return {
        "exact": _list(exact.predict(x)),
        "MAP": _list(network),
        "BNN": _list(sampled.probs),
        "GLM": _list(linearised.probs),
    }


def _list(values: Tensor) -> list[float]:
    return [round(v, 6) for v in values.detach().double().flatten().tolist()]


def claims(record: Record) -> list[Claim]:
    run = record["runs"][0]
    last, at = {method: values[-1] for method, values in run["values"].items()}, f"(at x = {SHOWN[-1]:g})"
    exact, negative, evidence = f"exact {last['exact']:.3f}", run["negative"], run["log_evidence"]
    return [
        Claim(f"sampled weights saturate below the exact predictive {at}", "below", f"{last['BNN']:.3f}; {exact}",
              last["BNN"] < last["exact"] - 0.05),
        Claim("GLM does not", "as exact", f"{last['GLM']:.3f}; {exact}", abs(last["GLM"] - last["exact"]) < 0.01),
        Claim("the Gaussian gives mass to slopes of the wrong sign", "some",
              f"{negative['Laplace']:.0%}; exact {negative['exact']:.2%}",
              negative["Laplace"] > 0.05 > negative["exact"]),
        Claim("log evidence, exact and by Laplace", "-1.5802 and -1.4187",
              f"{evidence['exact']:.4f} and {evidence['Laplace']:.4f}",
              abs(evidence["exact"] + 1.5802) < 1e-3 and abs(evidence["Laplace"] + 1.4187) < 1e-3),
    ]  # fmt: skip
