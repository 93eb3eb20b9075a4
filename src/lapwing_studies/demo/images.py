"""Images of 8 × 8 pixels from scikit-learn: digits, and out-of-distribution inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 8
WINDOW = 32


@dataclass(frozen=True)
class Split:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Digits:
    """Digits in three parts, and two sets of out-of-distribution inputs as large as the test set."""

    train: Split
    validation: Split
    test: Split
    photos: Tensor
    turned: Tensor


def load(n: int, *, seed: int) -> Digits:
    """scikit-learn's digits, shuffled and cut into 70% training, 10% validation, 20% test."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:n]
    x = (torch.as_tensor(pixels, dtype=torch.float32) / 16)[order]
    y = torch.as_tensor(labels)[order]
    train, validation, test = (Split(x[part], y[part]) for part in _parts(len(order)))
    return Digits(train, validation, test, photo_patches(len(test.y), seed=seed), quarter_turn(test.x))


def _parts(n: int) -> tuple[slice, slice, slice]:
    first, second = int(0.7 * n), int(0.8 * n)
    return slice(0, first), slice(first, second), slice(second, n)


def quarter_turn(x: Tensor) -> Tensor:
    """The images rotated by 90°."""
    return x.reshape(-1, SIDE, SIDE).rot90(1, (1, 2)).reshape(len(x), -1)


def photo_patches(n: int, *, seed: int) -> Tensor:
    """n random windows of scikit-learn's two photographs, grey, averaged to 8 × 8, each rescaled to [0, 1]."""
    from sklearn.datasets import load_sample_images

    generator = torch.Generator().manual_seed(seed)
    photos = [torch.tensor(photo).float().mean(-1) / 255 for photo in load_sample_images().images]
    return torch.stack([_patch(photos[k % len(photos)], generator) for k in range(n)])


def _patch(photo: Tensor, generator: torch.Generator) -> Tensor:
    top, left = (int(torch.randint(side - WINDOW + 1, (), generator=generator)) for side in photo.shape)
    window = photo[top : top + WINDOW, left : left + WINDOW]
    pooled = window.reshape(SIDE, WINDOW // SIDE, SIDE, WINDOW // SIDE).mean((1, 3))
    # A window of plain sky has no contrast; below one grey level it is not rescaled.
    contrast = (pooled.max() - pooled.min()).clamp_min(1 / 255)
    return ((pooled - pooled.min()) / contrast).flatten()
