"""Links as objects: each turns a Gaussian over logits into log probabilities, for several classes and for one logit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from lapwing._types import Float, Tensor
from lapwing.errors import StructureError
from lapwing.predictive import links
from lapwing.runtime.arguments import choose


class Link(ABC):
    """E[softmax f] or E[σ(f)] under a Gaussian: exact, or an approximation."""

    @abstractmethod
    def categorical(self, m: Tensor, cov: Tensor, log_p: Tensor) -> Float[Tensor, "... t c"]:
        """Log probabilities (..., t, c).

        `log_p` are those of draws (s, ..., t, c), computed anyway for the uncertainties.
        """

    @abstractmethod
    def binary(self, m: Tensor, v: Tensor, *, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(log p(1), log p(0)) for each logit."""


@dataclass(frozen=True)
class Default(Link):
    """The most accurate: quadrature for one logit, quasi-Monte Carlo draws for classes. Both converge."""

    def categorical(self, m: Tensor, cov: Tensor, log_p: Tensor) -> Float[Tensor, "... t c"]:
        return log_mean(log_p)

    def binary(self, m: Tensor, v: Tensor, *, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return links.log_sigmoid_quadrature(m, v), links.log_sigmoid_quadrature(-m, v)


DEFAULT = Default()


@dataclass(frozen=True)
class MonteCarlo(Link):
    """Average over draws."""

    def categorical(self, m: Tensor, cov: Tensor, log_p: Tensor) -> Float[Tensor, "... t c"]:
        return log_mean(log_p)

    def binary(self, m: Tensor, v: Tensor, *, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = links.gaussian_draws(m[..., None], v[..., None, None], n_draws, generator=generator)[..., 0]
        return log_mean_sigmoid(draws), log_mean_sigmoid(-draws)


@dataclass(frozen=True)
class Quadrature(Link):
    """One-dimensional quadrature, for one logit only."""

    def categorical(self, m: Tensor, cov: Tensor, log_p: Tensor) -> Float[Tensor, "... t c"]:
        raise StructureError(
            f'link="quadrature" integrates over one logit, but the model has {m.shape[-1]} classes. '
            'Use "mc" or "pairwise".'
        )

    def binary(self, m: Tensor, v: Tensor, *, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return links.log_sigmoid_quadrature(m, v), links.log_sigmoid_quadrature(-m, v)


@dataclass(frozen=True)
class ClosedForm(Link):
    """A closed-form approximation for classes.

    For one logit, the probit formula, which the pairwise one reduces to.
    """

    name: str
    probs: Callable[[Tensor, Tensor], Tensor]
    has_binary_form: bool

    def categorical(self, m: Tensor, cov: Tensor, log_p: Tensor) -> Float[Tensor, "... t c"]:
        return self.probs(m, cov).log()

    def binary(self, m: Tensor, v: Tensor, *, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """log σ(± m / √(1 + π/8 v)), the binary probit approximation."""
        if not self.has_binary_form:
            raise StructureError(
                f'link="{self.name}" needs two or more logits per label; for one logit use "quadrature" or "probit".'
            )
        scaled = m / (1 + torch.pi / 8 * v).sqrt()
        return logsigmoid(scaled), logsigmoid(-scaled)


def _probit(m: Tensor, cov: Tensor) -> Tensor:
    return links.probit(m, cov.diagonal(dim1=-2, dim2=-1))


PROBIT = ClosedForm("probit", _probit, has_binary_form=True)
PAIRWISE = ClosedForm("pairwise", links.pairwise, has_binary_form=True)
BRIDGE = ClosedForm("bridge", links.bridge, has_binary_form=False)
BRIDGE_NORM = ClosedForm("bridge_norm", links.bridge_norm, has_binary_form=False)


LINKS: dict[str, Link] = {
    "probit": PROBIT,
    "pairwise": PAIRWISE,
    "bridge": BRIDGE,
    "bridge_norm": BRIDGE_NORM,
    "mc": MonteCarlo(),
    "quadrature": Quadrature(),
}


def as_link(link: Any) -> Link:
    """A link from its name; None is the default."""
    if link is None:
        return DEFAULT
    return link if isinstance(link, Link) else choose("link", link, LINKS)


def log_mean(log_p: Float[Tensor, s * n]) -> Float[Tensor, "*n"]:
    """log of the mean over draws, by logsumexp: the score of a confident wrong prediction stays finite."""
    return torch.logsumexp(log_p, 0) - log(len(log_p))


def log_mean_sigmoid(f: Float[Tensor, s * n]) -> Float[Tensor, "*n"]:
    """log of the mean of σ(f_s)."""
    return log_mean(logsigmoid(f))
