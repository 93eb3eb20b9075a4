"""Data of the tasks: scikit-learn, UCI archives, and the images of `--data`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lapwing_studies.demo.images import photo_patches
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Parts, Scaling, Split, shuffled, stratified, wide_box

Source = Callable[[DataFolder, int, Effort], Parts]

TABLE_OUTSIDE = "uniform in a box twice as wide as the training inputs"
# Shares of training and validation rows; the rest is tested.
SHARES = (0.7, 0.15)


def classes_of_sklearn(load: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """A classification table of scikit-learn, split 70 / 15 / 15, stratified."""
    pixels, labels = _sklearn(load)
    x, y = torch.as_tensor(pixels, dtype=torch.float32), torch.as_tensor(labels).long()
    return _table(x, y, stratified(y, SHARES, seed=seed), seed, effort)


def numbers_of_sklearn(load: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """A regression table of scikit-learn, split 70 / 15 / 15; inputs and target standardised."""
    rows, targets = _sklearn(load)
    x, y = torch.as_tensor(rows, dtype=torch.float32), torch.as_tensor(targets, dtype=torch.float32)[:, None]
    order, first, second = shuffled(len(y), seed=seed), int(SHARES[0] * len(y)), int(sum(SHARES) * len(y))
    return _numbers(x, y, (order[:first], order[first:second], order[second:]), seed, effort)


def uci_classes(name: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """A UCI classification table, in the stored split number `seed` (70 / 15 / 15, stratified)."""
    keys = [f"{name}_{what}" for what in ("x", "y", "train_idx", "valid_idx", "test_idx")]
    x, y, *rows = map(torch.from_numpy, folder.arrays("uci_classification", keys))
    train, validation, test = (r[seed % len(r)].long() for r in rows)
    return _table(x, y.long(), (train, validation, test), seed, effort)


def uci_numbers(name: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """A UCI regression table, in the stored split `seed` (90 / 10); a sixth of its training rows is held out."""
    keys = [f"{name}_{what}" for what in ("x", "y", "std_train_idx", "std_test_idx")]
    x, y, *rows = map(torch.from_numpy, folder.arrays("uci_regression", keys))
    train, test = (r[seed % len(r)].long() for r in rows)
    train = train[shuffled(len(train), seed=seed)]
    n_held_out = min(len(train) // 6, effort.n_train // 4)
    return _numbers(x, y[:, None], (train[n_held_out:], train[:n_held_out], test), seed, effort)


def digits(folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """scikit-learn's digits as images of 8 × 8; out-of-distribution: patches of its two photographs."""
    pixels, labels = _sklearn("load_digits")
    x = (torch.as_tensor(pixels, dtype=torch.float32) / 16).reshape(-1, 1, 8, 8)
    y = torch.as_tensor(labels).long()
    train, validation, test = _capped(_splits(x, y, stratified(y, SHARES, seed=seed)), effort)
    patches = photo_patches(len(test), seed=seed).reshape(-1, 1, 8, 8)
    return Parts(train, validation, test, patches, "patches of photographs")


def grey_images(name: str, other: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """MNIST or Fashion-MNIST, pixels in [0, 1]; out-of-distribution: test images of the other."""
    x_train, y_train, x_test, y_test = folder.grey(name)
    outside = folder.grey(other)[2]
    return _images((x_train[:, None], y_train), (x_test[:, None], y_test), outside[:, None], other, seed, effort)


def colour_images(folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """CIFAR-10, standardised by channel; out-of-distribution: re-cropped test images of SVHN. Training rows are
    sampled from its first 25,000 images."""
    parts = _images(
        folder.colour("cifar10_train"), folder.colour("cifar10_test"), folder.colour("svhn")[0],
        "SVHN (re-cropped)", seed, effort,
    )  # fmt: skip
    mean = torch.tensor([0.49139968, 0.48215841, 0.44653091])[:, None, None]
    std = torch.tensor([0.24703223, 0.24348513, 0.26158784])[:, None, None]
    return _rescaled(parts, lambda x: (x - mean) / std)


def images(name: str, folder: DataFolder, seed: int, n_train: int, n_test: int, *, small: bool = False) -> Parts:
    """Images by name: digits, cifar10, mnist or fashion_mnist; the last two also as 12 × 12."""
    effort = Effort("images", n_train, n_test, 1, 1)
    if name == "digits":
        return digits(folder, seed, effort)
    if name == "cifar10":
        return colour_images(folder, seed, effort)
    grey = small_grey_images if small else grey_images
    return grey(name, "fashion_mnist" if name == "mnist" else "mnist", folder, seed, effort)


def there(name: str, folder: DataFolder) -> bool:
    """Whether the folder has these images."""
    return all(map(folder.holds, ("cifar10_train_a", "cifar10_test") if name == "cifar10" else (name,)))


def small_grey_images(name: str, other: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """MNIST or Fashion-MNIST cropped by two pixels and averaged to half the side: 12 × 12."""
    return _rescaled(grey_images(name, other, folder, seed, effort), _cropped_and_halved)


def _cropped_and_halved(x: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(x[..., 2:-2, 2:-2], 2)


def _sklearn(load: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    return getattr(datasets, load)(return_X_y=True)


def _splits(x: Tensor, y: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> tuple[Split, Split, Split]:
    train, validation, test = (Split(x[r], y[r]) for r in rows)
    return train, validation, test


def _capped(parts: tuple[Split, Split, Split], effort: Effort) -> tuple[Split, Split, Split]:
    """At most so many rows of each part, for validation a quarter of those for training. Shuffled first, since the
    rows of `stratified` are sorted by class."""
    limits = (effort.n_train, effort.n_train // 4, effort.n_test)
    train, validation, test = (
        part.rows(shuffled(len(part), seed=0)[:limit]) for part, limit in zip(parts, limits, strict=True)
    )
    return train, validation, test


def _table(x: Tensor, y: Tensor, rows: tuple[Tensor, Tensor, Tensor], seed: int, effort: Effort) -> Parts:
    train, validation, test = _capped(_splits(x, y, rows), effort)
    scale = Scaling.of(train.x)
    train, validation, test = (Split(scale(part.x), part.y) for part in (train, validation, test))
    return Parts(train, validation, test, wide_box(train.x, len(test), seed=seed), TABLE_OUTSIDE)


def _numbers(x: Tensor, y: Tensor, rows: tuple[Tensor, Tensor, Tensor], seed: int, effort: Effort) -> Parts:
    parts = _table(x, y, rows, seed, effort)
    scale = Scaling.of(parts.train.y)
    train, validation, test = (Split(p.x, scale(p.y)) for p in (parts.train, parts.validation, parts.test))
    return Parts(train, validation, test, parts.outside, parts.outside_is)


def _images(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    outside: np.ndarray,
    outside_is: str,
    seed: int,
    effort: Effort,
) -> Parts:
    """A random training set and validation set from the training images, a random test set from the test images."""
    n_held_out = effort.n_train // 4
    chosen = shuffled(len(train[1]), seed=seed)[: effort.n_train + n_held_out]
    tested = shuffled(len(test[1]), seed=seed)[: effort.n_test]
    foreign = shuffled(len(outside), seed=seed)[: effort.n_test]
    learnt = _image_split(train, chosen)
    return Parts(
        learnt.rows(slice(n_held_out, None)),
        learnt.rows(slice(n_held_out)),
        _image_split(test, tested),
        torch.from_numpy(outside[foreign.numpy()]).float() / 255,
        outside_is,
    )


def _image_split(data: tuple[np.ndarray, np.ndarray], rows: Tensor) -> Split:
    x, y = data
    return Split(torch.from_numpy(x[rows.numpy()]).float() / 255, torch.from_numpy(y[rows.numpy()]).long())


def _rescaled(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    train, validation, test = (Split(change(p.x), p.y) for p in (parts.train, parts.validation, parts.test))
    return Parts(train, validation, test, change(parts.outside), parts.outside_is)
