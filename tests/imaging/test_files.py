"""lw.save and lw.load of an image's posterior: equal bits, bound to the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lapwing as lw

N = 8
OPERATORS: dict[str, Callable[[], lw.imaging.Operator]] = {
    "radon": lambda: lw.imaging.radon(N, 4),
    "dense": lambda: lw.imaging.Operator(torch.eye(N * N)[::2], N),
    "blur": lambda: lw.imaging.blur(N, 1.0),
    "fourier": lambda: lw.imaging.fourier(N, torch.arange(N) < 3),
    "functions": lambda: lw.imaging.Operator(image_shape=N, forward=lambda x: 2 * x, adjoint=lambda y: 2 * y),
}


def posterior(A: lw.imaging.Operator, **options: Any) -> lw.imaging.ImagingPosterior:
    y = A(torch.eye(N)) + 0.1
    network = lw.imaging.UNet((3, 4), skips=1)
    r = lw.imaging.reconstruct(A, y, network=network, steps=20, tv=1e-3, progress=False)
    return lw.imaging.posterior(r, progress=False, **options)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_bits(tmp_path: Path, name: str) -> None:
    post = posterior(OPERATORS[name](), prior="blocks" if name == "radon" else "one", correction=name == "blur")
    lw.save(post, tmp_path / "image.lapwing")
    again = lw.load(tmp_path / "image.lapwing", post.network)
    assert isinstance(again, lw.imaging.ImagingPosterior)
    assert torch.equal(again.mean, post.mean) and torch.equal(again.std, post.std)
    assert torch.equal(again.sample(3), post.sample(3)) and torch.equal(again.covariance(), post.covariance())
    assert again.hyperparameters == post.hyperparameters and again.noise_std == post.noise_std
    assert torch.equal(again.log_evidence(), post.log_evidence())
    assert torch.equal(again.operator(torch.eye(N)), post.operator(torch.eye(N)))
    assert again.operator.has_fbp == post.operator.has_fbp
    assert str(again.diagnose()) == str(post.diagnose())


def test_matrix_free(tmp_path: Path) -> None:
    post = posterior(lw.imaging.radon(N, 4), way="matrixfree")
    assert post.way.name == "matrixfree"
    lw.save(post, tmp_path / "image.lapwing")
    again = lw.load(tmp_path / "image.lapwing", post.network)
    assert torch.equal(again.std, post.std) and torch.equal(again.sample(3), post.sample(3))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    post = posterior(lw.imaging.radon(N, 4), prior="one")
    lw.save(post, tmp_path / "image.lapwing")
    with pytest.raises(lw.StorageError, match="another model"):
        lw.load(tmp_path / "image.lapwing", lw.imaging.UNet((3, 4), skips=1))


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    post, path = posterior(lw.imaging.radon(N, 4), prior="one"), tmp_path / "image.lapwing"
    lw.save(post, path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(lw.StorageError):
        lw.load(path, post.network)
