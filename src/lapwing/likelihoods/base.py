"""The likelihood interface, and how a model's outputs are split into likelihood terms.

The outputs of a datum are arranged as *sites*: T independent likelihood terms with C outputs each.
A (B, C) classifier has T = 1; a (B, T, C) sequence model has T terms per datum; a (B, C, H, W)
segmentation model with `class_axis=1` has T = H·W. All methods take outputs `f` (..., C) and encoded
targets `y`, and work elementwise over the leading axes.
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
    """Splits the outputs of one datum, of shape `datum_shape`, into T terms of C outputs."""

    datum_shape: tuple[int, ...]
    class_axis: int = -1  # axis of the model's output, batch axis included: 1 for (B, C, H, W)

    @property
    def axis(self) -> int:
        """Index of the class axis in `datum_shape`; 0 for a (B,) output, which has none."""
        return self.class_axis - 1 if self.class_axis > 0 else self.class_axis % max(len(self.datum_shape), 1)

    @property
    def c(self) -> int:
        return self.datum_shape[self.axis] if self.datum_shape else 1

    @property
    def t(self) -> int:
        return prod(self.datum_shape) // self.c

    @property
    def site_shape(self) -> tuple[int, ...]:
        """`datum_shape` without the class axis: the shape of a datum's labels, one per term."""
        return self.datum_shape[: self.axis] + self.datum_shape[self.axis + 1 :]

    def with_positions(self, n: int) -> tuple[int, ...]:
        """The datum shape with n terms along its single axis of sites."""
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
    """p(y | f) of one likelihood term; immutable."""

    class_axis: int = -1
    averages_functions: bool = False  # whether many outputs of a datum are predicted by draws of functions: classes
    canonical: bool = True  # whether Λ is exactly −∇²_f log p; False for a Fisher expectation or a projection

    # --- targets -------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Validate the user's targets for a batch of n data and arrange them by site."""

    # --- density -------------------------------------------------------------------------------

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f) with all normalising constants: (..., C) → (...)."""

    @abstractmethod
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """r = ∇_f log p(y | f): (..., C)."""

    @abstractmethod
    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        """Λ = −∇²_f log p(y | f), or the Fisher information instead (see `canonical`): (..., C, C)."""

    @abstractmethod
    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        """A root S of Λ, S Sᵀ = Λ: (..., C, K). Must not invert Λ, which is singular for a softmax."""

    def hessian_mv(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Λ v: (..., C)."""
        # The general case, O(C²) per term; likelihoods with structure override it.
        return torch.einsum("...cd,...d->...c", self.hessian(f, y), v)

    @abstractmethod
    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        """Draw encoded targets from p(y | f)."""

    # --- dispersion: parameters that tuning changes without another pass over the data -----------
    #
    # The curvature is stored as parts H_g at unit dispersion; H = Σ_g c_g H_g. For a Gaussian with noise σ_g,
    # c_g = 1/σ_g². All other likelihoods have a single part with c = 1.

    def part_scales(self) -> Tensor:
        """The scales c_g: (G,)."""
        return torch.ones(1, dtype=torch.float64)

    def part_roots(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Roots S_g at unit dispersion, Λ = Σ_g c_g S_g S_gᵀ; each (..., C, K_g)."""
        return [self.hessian_root(f, y)]

    def part_hessian_mvs(self, f: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
        """S_g S_gᵀ v for each part; v may have more leading axes than f."""
        return [self.hessian_mv(f, y, v)]

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        """S_g S_gᵀ of every term in structured form, for the output layer: the columns of S_g are not formed."""
        return [Columns(S) for S in self.part_roots(f, y)]

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """Residuals of targets drawn from the model, with E[r rᵀ] = S_g S_gᵀ (Monte Carlo Fisher); each (..., C).

        Differentiable in f; the drawn targets are constants.
        """
        return [self.residual(f, self.sample(f.detach(), generator=generator))]

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        """S_g z with Rademacher z = ±1, so that E[S_g z zᵀ S_gᵀ] = S_g S_gᵀ; each (..., C)."""
        roots = self.part_roots(f, y)
        return [(S @ random_signs(S[..., 0, :], generator)[..., None])[..., 0] for S in roots]

    def part_residuals(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Residuals r_g of the observed targets at unit dispersion, ∇_f log p = Σ_g c_g r_g; each (..., C)."""
        return [self.residual(f, y)]

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        """Sufficient statistics for `log_lik` at any dispersion, additive over data: (D,), float64."""
        return self.log_prob(f, y).double().sum().reshape(1)  # without dispersion the sum itself suffices

    def log_lik(self, statistics: Tensor) -> Tensor:
        """Σ log p(y | f) over the data from their `statistics`; differentiable in the dispersion."""
        return statistics[0]


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Rademacher variables, ±1 with probability ½, with the shape, dtype and device of `like`."""
    # Draw as int8 and convert, so that the signs do not depend on the dtype of `like`.
    bits = torch.randint(0, 2, like.shape, generator=generator, device=generator.device, dtype=torch.int8)
    return (2 * bits - 1).to(dtype=like.dtype, device=like.device)
