"""An image cut into patches, and Gaussian densities of all of them at once.

Patches are s × s and do not overlap; the last of a row and of a column are larger, so that all pixels are covered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import InputError, NumericalError, warn
from lapwing.runtime.arguments import counted

_JITTER = (0.0, 1e-6, 1e-5, 1e-4)  # of the mean variance
_BATCH_FLOATS = 1 << 24
Covariances = Callable[[Tensor], Tensor]  # pixels (b, k) → their covariances (b, k, k)


@dataclass(frozen=True, eq=False)
class Patches:
    """Pixels of every patch, as places in the flat image, filled up with −1 to one length."""

    pixels: Tensor  # (patches, k), int64

    @classmethod
    def of(cls, shape: tuple[int, ...], side: int) -> Patches:
        side = counted("patch", side, "pixel")
        h, w = shape
        if side > min(shape):
            raise InputError(f"patch: at most the image's smaller side, {min(shape)}; got {side}.")
        at = torch.arange(h * w).reshape(h, w)
        found = [at[rows, columns].reshape(-1) for rows in _cuts(h, side) for columns in _cuts(w, side)]
        longest = max(map(len, found))
        padded = [torch.nn.functional.pad(pixels, (0, longest - len(pixels)), value=-1) for pixels in found]
        return cls(torch.stack(padded))

    def log_prob(self, deviation: Float[Tensor, " d"], covariances: Covariances, *, halved: bool) -> Scalar:
        """Σ log N(deviation; 0, Σ) over patches. `halved`: off-diagonal covariances count half (½ Σ + ½ diag Σ)."""
        total = torch.zeros((), dtype=torch.float64)
        k = self.pixels.shape[1]
        for pixels in self.pixels.split(max(1, _BATCH_FLOATS // (k * k))):
            inside = pixels >= 0
            at = pixels.clamp(min=0)
            cov = covariances(at)
            if halved:
                cov = 0.5 * cov + 0.5 * torch.diag_embed(cov.diagonal(dim1=1, dim2=2))
            both = inside[:, :, None] & inside[:, None, :]
            # Ones on the diagonal of what is filled up: neither determinant nor quadratic form changes.
            cov = torch.where(both, cov, torch.eye(k, dtype=cov.dtype))
            total = total + gaussian_log_prob(torch.where(inside, deviation[at], 0.0), cov)
        return total - 0.5 * int((self.pixels >= 0).sum()) * log(2 * pi)


def gaussian_log_prob(deviation: Float[Tensor, "b k"], cov: Float[Tensor, "b k k"]) -> Scalar:
    """Σ_b −½ log det Σ_b − ½ d_bᵀ Σ_b⁻¹ d_b, without the constant.

    Where a covariance is not positive definite in double precision, a multiple of the identity is added, and said.
    """
    size = cov.diagonal(dim1=1, dim2=2).mean()
    for share in _JITTER:
        L, info = torch.linalg.cholesky_ex(cov + share * size * torch.eye(cov.shape[-1], dtype=cov.dtype))
        if not bool(info.any()):
            if share:
                warn(
                    f"log_prob: the covariance is not positive definite in double precision; {share * float(size):.2g} "
                    f"({share:g} of the mean variance) was added to its diagonal. The image-noise correction is the "
                    "modelled way: posterior.corrected()."
                )
            solved = torch.linalg.solve_triangular(L, deviation[..., None], upper=False)
            return -L.diagonal(dim1=1, dim2=2).log().sum() - 0.5 * solved.square().sum()
    raise NumericalError(
        "log_prob: the covariance of the image is far from positive definite: some pixels have no variance at all. Use "
        "posterior.corrected(), or smaller patches: log_prob(image, patch=1)."
    )


def _cuts(n: int, side: int) -> list[slice]:
    starts = [k * side for k in range(n // side)]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]
