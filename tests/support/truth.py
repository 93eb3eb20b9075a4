"""The dense posterior of a zoo case, from the oracle alone: what every structure is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import oracle
from cases import Case

NOISE = 0.7
BATCH_BEHIND = {"time-first-linear": {"fc"}}  # rules need the batch first: these layers are treated without one


@dataclass(frozen=True, eq=False)
class Truth:
    """Jacobians, GGN, covariance and evidence of a case, dense and in float64."""

    case: Case
    model: nn.Module
    x: Any
    y: Tensor
    precision: float = 1.3

    @classmethod
    def of(cls, case: Case, n: int | None = None) -> Truth:
        model = case.make_model()
        n = n or case.n
        x = case.make_x(n)
        with torch.random.fork_rng(devices=[]):
            f = oracle.outputs(model, x)
        return cls(case, model, x, case.make_y(n, f))

    @cached_property
    def jacobian(self) -> tuple[Tensor, Tensor]:
        return oracle.jacobian(self.model, self.x)

    @property
    def options(self) -> dict[str, float]:
        return {"noise_std": NOISE} if self.case.kind == "gaussian" else {}

    @cached_property
    def targets(self) -> Tensor:
        return oracle.target_sites(self.case.kind, self.y, self.case.index)

    @cached_property
    def Lambda(self) -> Tensor:
        f, _ = self.jacobian
        sites = oracle.hessians(self.case.kind, f[:, self.case.index], self.targets, **self.options)
        return oracle.spread(sites, self.case.index)

    @cached_property
    def H(self) -> Tensor:
        return oracle.ggn(self.jacobian[1], self.Lambda)

    @cached_property
    def layers(self) -> dict[str, oracle.Layer]:
        """The layers with a Kronecker rule, by path."""
        without = BATCH_BEHIND.get(self.case.name, set())
        return {path: layer for path, layer in oracle.layers(self.model, self.x).items() if path not in without}

    def kronecker(self, Lambda: Tensor | None = None, **options: str) -> Tensor:
        """Kronecker curvature by definition, for this Λ or another."""
        Lambda = self.Lambda if Lambda is None else Lambda
        H = oracle.ggn(self.jacobian[1], Lambda)
        sizes = [p.numel() for p in oracle.parameters(self.model).values()]
        return oracle.kronecker(H, sizes, self.layers.values(), Lambda, **options)

    @cached_property
    def log_lik(self) -> Tensor:
        f, _ = self.jacobian
        return oracle.log_lik(self.case.kind, f[:, self.case.index], self.targets, **self.options)

    def likelihood(self) -> Any:
        """The same likelihood as a Lapwing object."""
        import lapwing as lw

        axis = self.case.class_axis
        return {
            "gaussian": lambda: lw.Gaussian(noise_std=NOISE, class_axis=axis),
            "categorical": lambda: lw.Categorical(class_axis=axis),
            "bernoulli": lw.Bernoulli,
            "poisson": lw.Poisson,
            "hetero": lw.HeteroscedasticGaussian,
        }[self.case.kind]()

    def fit(self, **options: Any) -> Any:
        import lapwing as lw

        options.setdefault("prior", self.precision)
        return lw.fit(self.model, [(self.x, self.y)], self.likelihood(), progress=False, **options)
