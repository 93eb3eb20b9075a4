"""What every likelihood can do, and how a model's outputs split into likelihood terms.

A datum's outputs are arranged as *sites*: T independent likelihood terms, each with C outputs.
A (B, C) classifier has T = 1; a (B, T, C) sequence model has T terms per datum; a (B, C, H, W)
segmentation model with `class_axis=1` has T = H·W. All verbs below work on site-shaped tensors
`f` (..., C) and encoded targets `y`, elementwise over the leading axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lapwing.likelihoods.output_curvature import Columns, OutputCurvature


@dataclass(frozen=True)
class Sites:
    """How one datum's outputs, of shape `datum_shape`, split into T terms of C outputs."""

    datum_shape: tuple[int, ...]
    class_axis: int = -1  # counted on the model's output, batch axis included: 1 for (B, C, H, W)

    @property
    def axis(self) -> int:
        """Position of the class axis inside `datum_shape` (0 when there is none: a (B,) output)."""
        return self.class_axis - 1 if self.class_axis > 0 else self.class_axis % max(len(self.datum_shape), 1)

    @property
    def c(self) -> int:
        return self.datum_shape[self.axis] if self.datum_shape else 1

    @property
    def t(self) -> int:
        return prod(self.datum_shape) // self.c

    @property
    def site_shape(self) -> tuple[int, ...]:
        """The datum's shape without its class axis: what one label per term looks like."""
        return self.datum_shape[: self.axis] + self.datum_shape[self.axis + 1 :]

    def with_positions(self, n: int) -> tuple[int, ...]:
        """The shape of a datum that has so many terms along its one axis of sites."""
        return (n, self.c) if self.axis == 1 else (self.c, n)

    def split(self, f: Tensor) -> Tensor:
        """(B, *datum_shape) or (B, K) → (B, T, C)."""
        f = f.reshape(f.shape[0], *self.datum_shape)
        if not self.datum_shape:
            return f[:, None, None]
        return f.movedim(self.axis + 1, -1).reshape(f.shape[0], self.t, self.c)

    def join(self, f: Tensor) -> Tensor:
        """(B, T, C) → (B, *datum_shape)."""
        if not self.datum_shape:
            return f.reshape(f.shape[0])
        return f.reshape(f.shape[0], *self.site_shape, self.c).movedim(-1, self.axis + 1)


class Likelihood(ABC):
    """p(y | f) for one likelihood term; a small value in output space."""

    class_axis: int = -1
    canonical: bool = True  # Λ is exactly −∇²_f log p; False where it is an expectation or a projection

    # --- targets -------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Check the user's targets for a batch of n data and arrange them by site; raises in words."""

    # --- density -------------------------------------------------------------------------------

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), every constant included: (..., C) → (...)."""

    @abstractmethod
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """r = ∇_f log p(y | f): (..., C)."""

    @abstractmethod
    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        """Λ = −∇²_f log p(y | f), or its Fisher expectation where the two differ: (..., C, C)."""

    @abstractmethod
    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S with S Sᵀ = Λ: (..., C, K). Never inverts Λ, which is singular for a softmax."""

    def hessian_mv(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Λ v: (..., C)."""
        return torch.einsum("...cd,...d->...c", self.hessian(f, y), v)

    @abstractmethod
    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        """Encoded targets drawn from p(y | f)."""

    # --- dispersion: what the evidence may change without another pass over the data -------------
    #
    # The curvature is kept as unit-dispersion parts H_g and put together as H = Σ_g c_g H_g.
    # Only a Gaussian has more to say than "one part, scale one".

    def part_scales(self) -> Tensor:
        """c_g: (G,)."""
        return torch.ones(1, dtype=torch.float64)

    def part_roots(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Unit-dispersion roots S_g with Λ = Σ_g c_g S_g S_gᵀ, each (..., C, K_g)."""
        return [self.hessian_root(f, y)]

    def part_hessian_mvs(self, f: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
        """S_g S_gᵀ v at unit dispersion; v may have more leading axes than f."""
        return [self.hessian_mv(f, y, v)]

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        """S_g S_gᵀ of every term, for sums that need no columns."""
        return [Columns(S) for S in self.part_roots(f, y)]

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """Unit-dispersion residuals of targets drawn from the model: E[r rᵀ] = S_g S_gᵀ; each (..., C).

        Differentiable in f with the drawn targets held fixed.
        """
        return [self.residual(f, self.sample(f.detach(), generator=generator))]

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """S_g z with independent signs z = ±1, so E[S z zᵀ Sᵀ] = S_g S_gᵀ; each (..., C)."""
        roots = self.part_roots(f, y)
        return [(S @ random_signs(S[..., 0, :], generator)[..., None])[..., 0] for S in roots]

    def part_residuals(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Unit-dispersion residuals r_g of the observed targets with ∇ log p = Σ_g c_g r_g; each (..., C)."""
        return [self.residual(f, y)]

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        """Additive numbers from which `log_lik` is recovered at any dispersion: (D,), float64."""
        return self.log_prob(f, y).double().sum().reshape(1)

    def log_lik(self, statistics: Tensor) -> Tensor:
        """Σ log p(y | f) over the data the statistics came from; differentiable in the dispersion."""
        return statistics[0]


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent ±1 with equal chances, of the shape and type of `like`."""
    bits = torch.randint(0, 2, like.shape, generator=generator, device=generator.device, dtype=torch.int8)
    return (2 * bits - 1).to(dtype=like.dtype, device=like.device)
