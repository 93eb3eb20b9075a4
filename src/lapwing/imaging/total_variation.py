"""Total variation of images, how much of it to ask for, and the noise that decides it."""

from __future__ import annotations

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.imaging.operator import Operator

_MOST, _HALF = 0.45, 1.2  # of `automatic`: they fit the published table, see there
_MOST_ROWS = 600  # measurements that the noise is estimated from
_FEWEST_ROWS, _ROW_FLOATS = 50, 1 << 25  # of large images fewer
_LENGTHS = (0.7, 1.5, 3.0, 6.0)  # pixels
_RATIOS = torch.logspace(-8, 1, 91, dtype=torch.float64)  # of the noise's variance to the signal's


def total_variation(image: Float[Tensor, "... h w"]) -> Tensor:
    """Σ |horizontal differences| + Σ |vertical differences|: anisotropic, a sum over pixels."""
    across = (image[..., :, 1:] - image[..., :, :-1]).abs().sum((-2, -1))
    down = (image[..., 1:, :] - image[..., :-1, :]).abs().sum((-2, -1))
    return across + down


def edges(h: int, w: int) -> tuple[Tensor, Tensor]:
    """The two pixels, as places in the flat image, of every difference that total variation sums."""
    at = torch.arange(h * w).reshape(h, w)
    first = torch.cat([at[:, :-1].reshape(-1), at[:-1, :].reshape(-1)])
    second = torch.cat([at[:, 1:].reshape(-1), at[1:, :].reshape(-1)])
    return first, second


class NoiseModel:
    """y ~ N(0, a² A S Aᵀ + σ² I) with S a smooth image prior: the noise of the data by the evidence of that model.

    S = exp(−|Δrow|/ℓ) exp(−|Δcolumn|/ℓ); a², σ² and ℓ maximise the evidence, over a grid. Of many measurements a part
    is used, evenly spaced.
    """

    def __init__(self, A: Operator, y: Tensor) -> None:
        flat = y.reshape(-1).double()
        most = min(_MOST_ROWS, max(_FEWEST_ROWS, _ROW_FLOATS // A.linear.d))
        step = -(-len(flat) // most)
        self.rows = torch.arange(0, len(flat), step)
        self.y = flat[self.rows]
        self.A = self._matrix(A, len(flat))
        self.shape = A.image_shape
        best = max((self._fitted(length) for length in _LENGTHS), key=lambda found: found[0])
        self.log_evidence, self.noise_var, self.signal_var, self.length = best

    @property
    def noise_std(self) -> float:
        return self.noise_var**0.5

    def mean(self) -> Float[Tensor, "h w"]:
        """The posterior mean of the image."""
        AS = self._smoothed(self.length)
        K = AS @ self.A.T
        K.diagonal().add_(self.noise_var / self.signal_var)
        return (torch.linalg.solve(K, self.y) @ AS).reshape(self.shape)

    def _matrix(self, A: Operator, m: int) -> Float[Tensor, "r d"]:
        units = torch.zeros(len(self.rows), m, dtype=torch.float64)
        units[torch.arange(len(self.rows)), self.rows] = 1.0
        return A.linear.transposed(units)

    def _smoothed(self, length: float) -> Float[Tensor, "r d"]:
        """A S."""
        images = self.A.reshape(-1, *self.shape)
        kernels = [torch.exp(-(torch.arange(n)[:, None] - torch.arange(n)).abs().double() / length) for n in self.shape]
        return (kernels[0] @ images @ kernels[1]).reshape(len(self.A), -1)

    def _fitted(self, length: float) -> tuple[float, float, float, float]:
        """(log evidence, σ², a², ℓ) at the best ratio σ²/a²: the scale is then known in closed form."""
        K = self._smoothed(length) @ self.A.T
        values, U = torch.linalg.eigh(0.5 * (K + K.T))
        projected = (U.T @ self.y).square()
        size = float(values[-1].clamp(min=1e-300))
        shifted = values.clamp(min=0)[None] / size + _RATIOS[:, None]  # (ratios, r)
        scale = (projected / shifted).mean(1).clamp(min=1e-300)
        evidence = -0.5 * len(self.y) * scale.log() - 0.5 * shifted.log().sum(1)
        k = int(evidence.argmax())
        return float(evidence[k]), float(scale[k] * _RATIOS[k]), float(scale[k]) / size, length


def automatic(A: Operator, y: Tensor, noise_std: float | None) -> tuple[float, float]:
    """(γ, σ): the weight of the total variation beside the mean squared residual, from the level of the noise.

    A Laplace prior of rate λ on differences has λ TV beside ‖A f − y‖²/(2 σ²), so γ = 2 σ² λ / m for m measurements.
    For an image that were known, the likeliest rate of its d pixels is d / TV(f); of m measurements we take a share of
    that,  λ = 0.45 s/(s + 1.2) d / TV(f) with s = (m/d)³,  which is within a factor of about two of every weight that
    Antorán et al. (2022) chose on training images. TV(f) is that of a smooth estimate of the image.
    """
    model = NoiseModel(A, y)
    sigma = model.noise_std if noise_std is None else noise_std
    m, d = A.linear.m, A.linear.d
    variation = float(total_variation(model.mean()).clamp(min=1e-12))
    share = (m / d) ** 3
    rate = _MOST * share / (share + _HALF) * d / variation
    return 2 * sigma**2 * rate / m, sigma


def psnr(image: Float[Tensor, "h w"], truth: Float[Tensor, "h w"]) -> Scalar:
    """10 log10(range² / mean squared error), the range that of the truth."""
    spread = truth.max() - truth.min()
    return 10 * torch.log10(spread**2 / (image.to(truth) - truth).square().mean())
