"""The folder of datasets given by `--data`: numpy archives, read without pickle, and validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from lapwing.errors import InputError

COLOUR = {"cifar10_train": "cifar10_train_a", "cifar10_test": "cifar10_test", "svhn": "svhn_test_crops_10k"}


@dataclass(frozen=True)
class DataFolder:
    """Where datasets are; None leaves those included in scikit-learn."""

    path: Path | None

    def holds(self, file: str) -> bool:
        return self.path is not None and (self.path / f"{file}.npz").is_file()

    def arrays(self, file: str, keys: Sequence[str]) -> list[np.ndarray]:
        """The named arrays of one archive; raises if it is missing or has other contents."""
        return _read(self.check(file), tuple(keys))

    def check(self, file: str) -> Path:
        """The path of the archive; raises if it is missing."""
        if self.path is None:
            raise InputError(f"{file}.npz is needed. Name the folder that holds it: --data FOLDER.")
        path = self.path / f"{file}.npz"
        if not path.is_file():
            there = ", ".join(sorted(p.name for p in self.path.glob("*.npz"))) or "no .npz file"
            raise InputError(f"{path} does not exist. The folder of --data holds {there}.")
        return path

    def grey(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(x_train, y_train, x_test, y_test) of MNIST or Fashion-MNIST: uint8, 28 × 28."""
        x_train, y_train, x_test, y_test = self.arrays(name, ["x_train", "y_train", "x_test", "y_test"])
        for x, y in ((x_train, y_train), (x_test, y_test)):
            _check(name, x, (len(y), 28, 28), y)
        return x_train, y_train, x_test, y_test

    def colour(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) with x uint8 (n, 3, 32, 32). The archive stores residuals modulo 256: red and blue minus green, then
        each row minus the one above."""
        residual, y = self.arrays(COLOUR[name], ["x_residual", "y"])
        _check(name, residual, (len(y), 3, 32, 32), y)
        x = np.cumsum(residual, axis=2, dtype=np.uint8)
        x[:, 0] += x[:, 1]
        x[:, 2] += x[:, 1]
        return x, y


@lru_cache(maxsize=8)
def _read(path: Path, keys: tuple[str, ...]) -> list[np.ndarray]:
    """Cached, because decompression is slow, and several tasks and seeds use the same archive."""
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in keys if key not in archive.files]
        if missing:
            raise InputError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(archive.files)}.")
        return [archive[key] for key in keys]


def _check(name: str, x: np.ndarray, shape: tuple[int, ...], y: np.ndarray) -> None:
    if x.shape != shape or x.dtype != np.uint8:
        raise InputError(f"{name}: expected images of {shape} in uint8, found {x.shape} in {x.dtype}.")
    if not 0 <= int(y.min()) <= int(y.max()) <= 9:
        raise InputError(f"{name}: expected labels from 0 to 9, found {y.min()} to {y.max()}.")
