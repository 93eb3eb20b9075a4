"""A folder of `--data` with made-up archives of every kind, so that every study runs without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lapwing_studies.reproduce import conformal, uci
from lapwing_studies.reproduce.folder import COLOUR

N_ROWS, N_TRAIN, N_TEST, N_TEXTS = 300, 5000, 2000, 6000


def made_up_data(path: Path) -> Path:
    random = np.random.RandomState(0)
    _tables(path, random)
    for name in ("mnist", "fashion_mnist"):
        x_train, y_train = _images(random, N_TRAIN, (28, 28))
        x_test, y_test = _images(random, N_TEST, (28, 28))
        np.savez(path / f"{name}.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    for file in COLOUR.values():
        x, y = _images(random, N_TRAIN if "train" in file else N_TEST, (3, 32, 32))
        np.savez(path / f"{file}.npz", x_residual=x, y=y)
    image = np.zeros((3, 28, 28), dtype=np.uint8)
    image[:, 6:22, 10:16] = 220
    np.savez(path / "ct_images.npz", kmnist_test=image)
    words = [b" ".join(random.choice([b"good", b"bad", b"film", b"news", b"a"], size=5)) for _ in range(N_TEXTS)]
    labels = (np.arange(N_TEXTS) % 2).astype(np.uint8)
    parts = ("train", "dev", "test")
    np.savez(path / "sst2.npz", **{f"text_{p}": np.array(words) for p in parts}, **{f"y_{p}": labels for p in parts})
    np.savez(path / "ag_news_test.npz", title=np.array(words), description=np.array(words), y=labels)
    return path


def _images(random: np.random.RandomState, n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The row of bright pixels tells the class."""
    x, y = random.randint(0, 60, (n, *shape)).astype(np.uint8), (np.arange(n) % 10).astype(np.uint8)
    x[np.arange(n), ..., 2 * y + 4, :] = 255
    return x, y


def _tables(path: Path, random: np.random.RandomState) -> None:
    classes, numbers = {}, {}
    for name in (*uci.NAMES, "banana"):
        two = name in ("australian", "breast_cancer", "ionosphere", "banana")
        y = np.arange(N_ROWS) % (2 if two else 3)
        x = random.randn(N_ROWS, 2 if name == "banana" else 4) + y[:, None]
        classes |= {f"{name}_x": x.astype(np.float32), f"{name}_y": y.astype(np.uint8)}
        rows = np.stack([random.permutation(N_ROWS) for _ in range(10)]).astype(np.int32)
        cuts = {"train": slice(0, 210), "valid": slice(210, 255), "test": slice(255, None)}
        classes |= {f"{name}_{part}_idx": rows[:, cut] for part, cut in cuts.items()}
    for name in conformal.NAMES:
        x = random.randn(N_ROWS, 3).astype(np.float32)
        numbers |= {f"{name}_x": x, f"{name}_y": (np.sin(x[:, 0]) + 0.1 * random.randn(N_ROWS)).astype(np.float32)}
        for kind in ("std", "gap"):
            rows = np.stack([random.permutation(N_ROWS) for _ in range(3)]).astype(np.int32)
            numbers |= {f"{name}_{kind}_train_idx": rows[:, :240], f"{name}_{kind}_test_idx": rows[:, 240:]}
    np.savez(path / "uci_classification.npz", **classes)
    np.savez(path / "uci_regression.npz", **numbers)
