"""Kinds of curvature: each turns the likelihood at f into columns S, so that H = Σ_n J_nᵀ S_n S_nᵀ J_n.

Columns come in parts, one per dispersion of the likelihood, at unit dispersion: H = Σ_g c_g H_g with
c_g = `scales(likelihood)`, so a new noise level needs no new pass over the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, State, Tensor
from lapwing.errors import InputError, StructureError
from lapwing.likelihoods import Columns, Likelihood, OutputCurvature


class Fisher(ABC):
    """How the curvature of the likelihood in output space is obtained."""

    @abstractmethod
    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        """Columns for each part; with `separate_sites` false, column j of all sites belongs to one row of SᵀJ."""

    @abstractmethod
    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        """S Sᵀ of every likelihood term for each part; None when a row of SᵀJ mixes several terms."""

    def mvs(self, likelihood: Likelihood, f: Tensor, y: Tensor, v: Float[Tensor, "m n t c"]) -> Sequence[Tensor]:
        """S Sᵀ v of every likelihood term, for each part; where every pass gives the same matrix."""
        raise NotImplementedError(f"{type(self).__name__} has no products.")

    @abstractmethod
    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]: ...

    described: str  # in words, for the diagnosis
    separate_sites: bool
    repeatable: bool = False  # whether every pass over the data gives the same columns

    def state(self) -> State:
        """What changes while it is used."""
        return {}

    def restore(self, state: State) -> None:
        """Go on from there."""
        return


@dataclass(frozen=True)
class Exact(Fisher):
    """The generalised Gauss–Newton matrix: S Sᵀ = Λ exactly, one column per output."""

    described = "the exact generalised Gauss–Newton matrix"
    separate_sites = True
    repeatable = True

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        return likelihood.part_roots(f, y)

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return likelihood.part_curvatures(f, y)

    def mvs(self, likelihood: Likelihood, f: Tensor, y: Tensor, v: Float[Tensor, "m n t c"]) -> Sequence[Tensor]:
        return likelihood.part_hessian_mvs(f, y, v)

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()


class Drawing(ABC):
    """A random vector r for every likelihood term, with mean zero and E[r rᵀ] = Λ."""

    @abstractmethod
    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        """r at unit dispersion for each part: (n, t, c)."""


@dataclass(frozen=True)
class Labels(Drawing):
    """r = ∇_f log p(y | f) with y drawn from the model."""

    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        return likelihood.part_sampled(f, y, generator=generator)


@dataclass(frozen=True)
class Signs(Drawing):
    """r = S z with random signs z: all classes enter every draw, so r rᵀ varies much less than that of one label.

    A class of small probability p has r_c² ≈ p always; with drawn labels it is about 1 in a share p of the draws.
    """

    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        return likelihood.part_sketched(f, y, generator=generator)


@dataclass(frozen=True, eq=False)
class Sampled(Fisher):
    """Random output gradients, labels drawn from the model unless told otherwise: the mean of r rᵀ is an unbiased Λ.

    Those of different sites are independent with mean zero, so one row holds them all.
    """

    generator: torch.Generator
    n_draws: int = 1
    drawing: Drawing = Labels()
    described = "the generalised Gauss–Newton matrix up to sampling noise, without bias"
    separate_sites = False

    def __post_init__(self) -> None:
        if self.n_draws < 1:
            raise InputError(f"n_draws: expected at least one draw, got {self.n_draws}.")

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        draws = [self.drawing.drawn(likelihood, f, y, self.generator) for _ in range(self.n_draws)]
        return [torch.stack(part, dim=-1) / self.n_draws**0.5 for part in zip(*draws, strict=True)]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return [Columns(part) for part in self.parts(likelihood, f, y)] if f.shape[1] == 1 else None

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()

    def state(self) -> State:
        return {"generator": self.generator}

    def restore(self, state: State) -> None:
        self.generator.set_state(state["generator"].get_state())


@dataclass(frozen=True)
class Empirical(Fisher):
    """Observed labels: Σ r rᵀ. Not a Hessian approximation away from a calibrated model; never a default."""

    described = "observed labels, no approximation of the Hessian"
    separate_sites = True
    repeatable = True

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        parts = likelihood.part_residuals(f, y)
        if len(parts) > 1:
            raise StructureError(
                'fisher="empirical" with one noise level per output: residuals of different outputs multiply, so the '
                'curvature does not split by output. Use fisher="exact" or "mc", or one shared noise level.'
            )
        return [part[..., None] for part in parts]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return [Columns(part) for part in self.parts(likelihood, f, y)]

    def mvs(self, likelihood: Likelihood, f: Tensor, y: Tensor, v: Float[Tensor, "m n t c"]) -> Sequence[Tensor]:
        (r,) = (part[..., 0] for part in self.parts(likelihood, f, y))
        return [r * (r * v).sum(-1, keepdim=True)]

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        # The residual carries 1/σ², so its square carries 1/σ⁴.
        return likelihood.part_scales() ** 2
