"""Gaussian likelihood for regression, with known noise or noise that is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log, pi

import torch
from torch import Tensor

from lapwing.errors import InputError, InputTypeError, NumericalError, ShapeError
from lapwing.likelihoods.base import Likelihood, Sites, random_signs
from lapwing.likelihoods.output_curvature import Independent, OutputCurvature
from lapwing.likelihoods.targets import as_tensor, check_class_axis, in_shape, require_finite


@dataclass(frozen=True, eq=False)  # fields are tensors, whose == is elementwise
class Gaussian(Likelihood):
    """log p(y | f) = Σ_c −(y_c − f_c)²/(2 s_c²) − ½ log(2π s_c²),  r = (y − f)/s²,  Λ = diag 1/s².

    `noise_std` is s: one number, one per output, or None to estimate it. A given value is stored as a float64 tensor
    of shape (1,) or (C,) and stays differentiable. With `per_output` one s per output is estimated.
    The curvature has the parts H_g = Σ J_gᵀ J_g over the outputs with noise s_g, and scales c_g = 1/s_g². So one pass
    over the data serves every noise level, and methods for parts and statistics work before the noise is known.
    """

    noise_std: Tensor | Sequence[float] | float | None = None
    per_output: bool = False
    class_axis: int = -1
    estimated: bool = field(default=False, kw_only=True)  # whether tuning may change it; kept by `with_noise_std`

    def __post_init__(self) -> None:
        check_class_axis(self.class_axis)
        object.__setattr__(self, "estimated", self.estimated or self.noise_std is None)
        if self.noise_std is not None:
            noise_std = _checked_noise(self.noise_std)
            object.__setattr__(self, "noise_std", noise_std)
            object.__setattr__(self, "per_output", self.per_output or len(noise_std) > 1)

    def with_noise_std(self, noise_std: Tensor | Sequence[float] | float) -> Gaussian:
        """A copy with this noise; `estimated` does not change."""
        return replace(self, noise_std=noise_std)

    def resolved(self) -> Tensor:
        """`noise_std` as a tensor (1,) or (C,); raises an InputError if it has not been estimated yet."""
        if not isinstance(self.noise_std, Tensor):
            raise InputError(
                "Gaussian needs a noise_std here, but it is None: still to be estimated from the data. "
                "Give Gaussian(noise_std=...), or call estimate(statistics) with the statistics of the data first."
            )
        return self.noise_std

    # --- targets -------------------------------------------------------------------------------

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Finite targets with the shape of the outputs → (n, T, C)."""
        self._check_count(sites.c)
        targets = as_tensor(y, likelihood="Gaussian")
        targets = in_shape(targets, (n, *sites.datum_shape), likelihood="Gaussian", meaning="one target per output")
        require_finite(targets, likelihood="Gaussian")
        # Keep float64 targets: squared errors are summed in float64 even if the network is float32.
        return sites.split(targets if targets.is_floating_point() else targets.double())

    def _check_count(self, c: int) -> None:
        if self.noise_std is None:
            return
        expected, came = (c if self.per_output else 1), len(self.resolved())
        if came != expected:
            raise ShapeError(
                f"Gaussian needs one noise_std, or one per output ({c} of them), but {came} came"
                f"{' with per_output=True' if self.per_output else ''}. Give {c} values, or one without per_output."
            )

    # --- density -------------------------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        s = self._noise_like(f)
        return (-0.5 * ((y.to(f.dtype) - f) / s).square() - s.log() - 0.5 * log(2 * pi)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return (y.to(f.dtype) - f) / self._noise_like(f).square()

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(self._noise_like(f).square().reciprocal().expand(f.shape))

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(self._noise_like(f).reciprocal().expand(f.shape))

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        return f + self._noise_like(f) * _standard_normal(f, generator)

    def _noise_like(self, f: Tensor) -> Tensor:
        return self.resolved().to(dtype=f.dtype, device=f.device)

    # --- dispersion ----------------------------------------------------------------------------

    def part_scales(self) -> Tensor:
        return self.resolved().square().reciprocal()

    def part_roots(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Shared noise: S = I (..., C, C). Noise per output: S_g = e_g, one column each."""
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])
        return [eye[..., g : g + 1] for g in range(f.shape[-1])] if self.per_output else [eye]

    def part_hessian_mvs(self, f: Tensor, y: Tensor, v: Tensor) -> Sequence[Tensor]:
        return self._by_part(v)

    def part_curvatures(self, f: Tensor, y: Tensor) -> Sequence[OutputCurvature]:
        return [Independent(d) for d in self._by_part(torch.ones_like(f))]

    def part_sampled(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        return self._by_part(_standard_normal(f, generator))

    def part_sketched(self, f: Tensor, y: Tensor, *, generator: torch.Generator) -> Sequence[Tensor]:
        return self._by_part(random_signs(f, generator))

    def part_residuals(self, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        return self._by_part(y.to(f.dtype) - f)

    def _by_part(self, v: Tensor) -> Sequence[Tensor]:
        """[v] for shared noise, [v_1 e_1, …, v_C e_C] for noise per output."""
        return list(torch.diag_embed(v).unbind(-1)) if self.per_output else [v]

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        """(sse_1 … sse_G, n_1 … n_G): sums of squared errors and numbers of targets per noise group, float64."""
        squares = (y.double() - f.double()).square().reshape(-1, f.shape[-1])
        sse = squares.sum(0) if self.per_output else squares.sum().reshape(1)
        return torch.cat([sse, torch.full_like(sse, squares.numel() / len(sse))])

    def log_lik(self, statistics: Tensor) -> Tensor:
        """Σ_g −sse_g/(2 s_g²) − (n_g/2) log(2π s_g²)."""
        s = self.resolved().to(statistics.device)
        sse, n = statistics.chunk(2)
        if len(sse) != len(s):
            raise ShapeError(
                f"Gaussian has {len(s)} noise value(s), but the statistics were gathered for {len(sse)}. "
                "Whether noise is shared or per output is decided when fitting: fit again with the other choice."
            )
        return (-0.5 * sse / s.square() - n * s.log() - 0.5 * n * log(2 * pi)).sum()

    def estimate(self, statistics: Tensor) -> Gaussian:
        """A copy with the maximum-likelihood noise, s_g² = sse_g/n_g."""
        sse, n = statistics.chunk(2)
        noise_std = (sse / n).sqrt()
        if not bool((torch.isfinite(noise_std) & (noise_std > 0)).all()):
            raise NumericalError(
                f"Gaussian cannot estimate its noise: squared errors {sse.tolist()} over {n.tolist()} targets have no "
                "positive, finite mean. A squared error of zero means that the network passes through every training "
                "target. Give Gaussian(noise_std=...) from knowledge of the measurements or from held-out residuals."
            )
        return self.with_noise_std(noise_std)


def _standard_normal(f: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(f.shape, generator=generator, dtype=f.dtype, device=generator.device).to(f.device)


def _checked_noise(noise_std: Tensor | Sequence[float] | float) -> Tensor:
    try:
        values = torch.as_tensor(noise_std, dtype=torch.float64)  # differentiable, if noise_std requires grad
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"Gaussian needs noise_std to be one number, one per output or None, but {type(noise_std).__name__} "
            f"{noise_std!r} came."
        ) from None
    if values.ndim > 1 or values.numel() == 0:
        raise ShapeError(
            f"Gaussian needs noise_std to be one number or one per output, but shape {tuple(values.shape)} came."
        )
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise InputError(
            f"Gaussian needs a positive, finite noise_std (a standard deviation), but {values.tolist()} came. "
            "Use noise_std=None to have it estimated."
        )
    return values.reshape(-1)
