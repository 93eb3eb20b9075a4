"""Kinds of Fisher: each turns the likelihood at f into columns S with S Sᵀ ≈ Λ, so that H = Σ_n J_nᵀ S_n S_nᵀ J_n.

Columns come in parts, one per dispersion parameter of the likelihood, at unit dispersion: H = Σ_g c_g H_g with
c_g = `scales(likelihood)`. A new noise level then needs no new pass over the data.
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
    """How the Hessian Λ of the negative log likelihood in the outputs (n, t, c, c) is estimated."""

    @abstractmethod
    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        """Columns S (n, t, c, m) of each part. Unless `separate_sites`, column j of all sites makes one row of SᵀJ."""

    @abstractmethod
    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        """S Sᵀ (n, t, c, c) of every likelihood term for each part; None when a row of SᵀJ mixes several terms."""

    def mvs(self, likelihood: Likelihood, f: Tensor, y: Tensor, v: Float[Tensor, "m n t c"]) -> Sequence[Tensor]:
        """S Sᵀ v of every likelihood term, for each part; only where the columns are `repeatable`."""
        raise NotImplementedError(f"{type(self).__name__} has no products.")

    @abstractmethod
    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]: ...

    described: str  # for `diagnose()`
    separate_sites: bool  # whether every site of a structured output has rows of its own
    repeatable: bool = False  # whether every pass over the data gives the same columns

    def state(self) -> State:
        """State that changes in use: that of the random generator."""
        return {}

    def restore(self, state: State) -> None:
        """Continue from a saved state."""
        return


@dataclass(frozen=True)
class Exact(Fisher):
    """The generalised Gauss–Newton matrix: S Sᵀ = Λ exactly, with one column per output."""

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
    """A random vector r for every likelihood term, with E[r] = 0 and E[r rᵀ] = Λ."""

    @abstractmethod
    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        """r at unit dispersion for each part: (n, t, c)."""


@dataclass(frozen=True)
class Labels(Drawing):
    """Labels y drawn from the model, r = ∇_f log p(y | f): the Monte Carlo Fisher."""

    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        return likelihood.part_sampled(f, y, generator=generator)


@dataclass(frozen=True)
class Signs(Drawing):
    """Random signs z, r = S z. All classes enter every draw, so r rᵀ has much less variance than with drawn labels.

    A class of small probability p has r_c² ≈ p in every draw. With drawn labels r_c² ≈ 1 in a share p of the draws,
    and almost zero otherwise: the mean is the same, the variance is not.
    """

    def drawn(self, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Sequence[Tensor]:
        return likelihood.part_sketched(f, y, generator=generator)


@dataclass(frozen=True, eq=False)
class Sampled(Fisher):
    """Random output gradients r, an unbiased estimate E[r rᵀ] = Λ with `n_draws` columns instead of one per output.

    The r of different sites are independent with mean zero, so their cross terms vanish in expectation, and one row of
    SᵀJ can hold all sites.
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
        # 1/√n in the columns is the mean over n draws in S Sᵀ.
        return [torch.stack(part, dim=-1) / self.n_draws**0.5 for part in zip(*draws, strict=True)]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        # With several sites a row is the sum over sites: the curvature of one term cannot be recovered from it.
        return [Columns(part) for part in self.parts(likelihood, f, y)] if f.shape[1] == 1 else None

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()

    def state(self) -> State:
        return {"generator": self.generator}

    def restore(self, state: State) -> None:
        # Set the state instead of replacing the generator: the caller may hold it as well.
        self.generator.set_state(state["generator"].get_state())


@dataclass(frozen=True)
class Empirical(Fisher):
    """Observed labels: Σ r rᵀ. It approximates the Hessian only if the model is calibrated; never a default."""

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
