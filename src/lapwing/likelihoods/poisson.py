"""Poisson likelihood for counts: the outputs are log rates, with an optional exposure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.likelihoods.base import Likelihood, Sites, random_signs
from lapwing.likelihoods.output_curvature import Independent, OutputCurvature
from lapwing.likelihoods.targets import (
    as_tensor,
    check_class_axis,
    first_index,
    in_shape,
    require_finite,
)


@dataclass(frozen=True)
class Poisson(Likelihood):
    """log p(y | f) = Σ_c y_c g_c − e^{g_c} − log y_c!,  g = f + log exposure,  r = y − e^g,  Λ = diag e^g.

    f is the log rate per unit of exposure. Targets are counts with the constant `exposure`, or a pair
    (counts, exposures) of equal shapes. Encoded targets (..., C, 2) hold counts and log exposures.
    """

    exposure: float = 1.0
    class_axis: int = -1

    def __post_init__(self) -> None:
        check_class_axis(self.class_axis)
        if not (isfinite(self.exposure) and self.exposure > 0):
            raise InputError(
                f"Poisson needs a positive, finite exposure, but {self.exposure} came. "
                "Give one exposure for all data here, or a pair (counts, exposures) as targets."
            )

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Counts, or (counts, exposures), with the shape of the outputs → (n, T, C, 2)."""
        if _is_pair(y):
            counts = self._counts(y[0], sites, n)  # type: ignore[index]
            log_exposure = self._exposures(y[1], sites, n).log()  # type: ignore[index]
        else:
            counts = self._counts(y, sites, n)
            log_exposure = torch.full_like(counts, log(self.exposure))
        return torch.stack([sites.split(counts), sites.split(log_exposure)], -1)

    def _counts(self, y: object, sites: Sites, n: int) -> Tensor:
        counts = as_tensor(y, likelihood="Poisson")
        meaning = "one count per output"
        counts = in_shape(counts, (n, *sites.datum_shape), likelihood="Poisson", meaning=meaning).double()
        require_finite(counts, likelihood="Poisson")
        wrong = (counts < 0) | (counts != counts.floor())
        if bool(wrong.any()):
            index = first_index(wrong)
            raise InputError(
                f"Poisson needs counts 0, 1, 2, …, but target {index} is {counts[index].item()}. "
                "For rates, pass the pair (counts, exposures); for real values use Gaussian()."
            )
        return counts

    def _exposures(self, y: object, sites: Sites, n: int) -> Tensor:
        exposures = as_tensor(y, likelihood="Poisson")
        meaning = "one exposure per count"
        exposures = in_shape(exposures, (n, *sites.datum_shape), likelihood="Poisson", meaning=meaning).double()
        require_finite(exposures, likelihood="Poisson")
        if not bool((exposures > 0).all()):
            index = first_index(exposures <= 0)
            raise InputError(
                f"Poisson needs positive exposures, but exposure {index} is {exposures[index].item()}. "
                "Leave out data that were not observed at all."
            )
        return exposures

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        counts, g = _counts_and_log_rate(f, y)
        return (counts * g - g.exp() - torch.lgamma(counts + 1)).sum(-1)  # log y! = lgamma(y + 1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        counts, g = _counts_and_log_rate(f, y)
        return counts - g.exp()

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(_counts_and_log_rate(f, y)[1].exp())

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        return [Independent(_counts_and_log_rate(f, y)[1].exp())]

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        # √(e^g) as e^{g/2}: it neither overflows nor underflows where e^g does.
        return torch.diag_embed((_counts_and_log_rate(f, y)[1] / 2).exp())

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        return [(_counts_and_log_rate(f, y)[1] / 2).exp() * random_signs(f, generator)]

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        """Encoded counts at the constant exposure: (..., C, 2)."""
        return _draw(f, torch.full_like(f, log(self.exposure)), generator)

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        # Draw with the exposure of the datum, not the constant one: otherwise E[r rᵀ] ≠ Λ.
        return [self.residual(f, _draw(f.detach(), y[..., 1].to(f.dtype), generator))]


def _is_pair(y: object) -> bool:
    """Whether y is (counts, exposures): a tuple of two, or the list of two that torch collates from such tuples."""
    if isinstance(y, tuple):
        return len(y) == 2
    return isinstance(y, list) and len(y) == 2 and all(isinstance(part, Tensor) and part.ndim > 0 for part in y)


def _counts_and_log_rate(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.to(f.dtype)
    return y[..., 0], f + y[..., 1]


def _draw(f: Tensor, log_exposure: Tensor, generator: torch.Generator) -> Tensor:
    rate = (f + log_exposure).exp().to(generator.device)
    return torch.stack([torch.poisson(rate, generator=generator).to(f.device), log_exposure], -1)
