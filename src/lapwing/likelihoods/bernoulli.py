"""Bernoulli likelihood with one logit per output: binary and multi-label classification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import InputError
from lapwing.likelihoods.base import Likelihood, Sites, random_signs
from lapwing.likelihoods.output_curvature import Independent, OutputCurvature
from lapwing.likelihoods.targets import as_tensor, check_class_axis, first_index, in_shape


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """log p(y | f) = Σ_c log σ(±f_c),  r = y − p,  Λ = diag p(1 − p),  p = σ(f); the C outputs are independent."""

    class_axis: int = -1
    averages_functions = True

    def __post_init__(self) -> None:
        check_class_axis(self.class_axis)

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Targets 0 or 1 with the shape of the outputs → (n, T, C)."""
        labels = as_tensor(y, likelihood="Bernoulli")
        expected = (n, *sites.datum_shape)
        one_label_each = tuple(labels.shape) == (n, *sites.site_shape)
        advice = f"use Categorical() for one label among {sites.c} classes" if one_label_each else ""
        labels = in_shape(labels, expected, likelihood="Bernoulli", meaning="one 0/1 target per logit", advice=advice)
        wrong = (labels != 0) & (labels != 1)
        if bool(wrong.any()):
            index = first_index(wrong)
            raise InputError(
                f"Bernoulli needs targets that are 0 or 1, but target {index} is {labels[index].item()}. "
                "Map labels such as -1/1 to 0/1; soft labels are not supported; use Categorical() for class numbers."
            )
        return sites.split(labels.float())

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid(_sign(y, f) * f).sum(-1)  # log σ(f) would be −∞ for large negative f

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        # y − σ(f) = ±σ(∓f): no cancellation when σ(f) is close to the label.
        sign = _sign(y, f)
        return sign * torch.sigmoid(-sign * f)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        # σ(−f) instead of 1 − σ(f), which is 0 in float32 for f > 17.
        return torch.diag_embed(torch.sigmoid(f) * torch.sigmoid(-f))

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        return [Independent(torch.sigmoid(f) * torch.sigmoid(-f))]

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(torch.sigmoid(f).sqrt() * torch.sigmoid(-f).sqrt())

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        # √(p (1 − p)) by logarithms: it has a derivative where p has underflown to 0.
        return [((logsigmoid(f) + logsigmoid(-f)) / 2).exp() * random_signs(f, generator)]

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        # torch requires the tensor and the generator to be on the same device.
        return torch.bernoulli(torch.sigmoid(f).to(generator.device), generator=generator).to(f.device)


def _sign(y: Tensor, f: Tensor) -> Tensor:
    """+1 for label 1, −1 for label 0."""
    return 2 * y.to(f.dtype) - 1
