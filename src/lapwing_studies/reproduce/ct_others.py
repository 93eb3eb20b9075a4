"""Other measurements than the study's: a blurred photograph, some of its frequencies, larger slices from few angles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing_studies.reproduce.ct_methods import linearised
from lapwing_studies.reproduce.phantoms import walnut_like
from lapwing_studies.reproduce.study import Record

NOISE = 0.05  # of the mean absolute measurement
EFFORT = lw.imaging.Effort(n_samples=64, rtol=1e-2, rank=60)


@dataclass(frozen=True)
class OtherJob:
    kind: str
    size: int
    channels: int
    steps: int

    @property
    def name(self) -> str:
        return f"ct-other-{self.kind}-{self.size}-{self.channels}ch-{self.steps}"

    @property
    def made_with(self) -> str:
        return f"{self.name} | noise {NOISE} | {EFFORT}"

    def run(self) -> Record:
        truth, A = KINDS[self.kind](self.size)
        clean = A(truth)
        sigma = float(NOISE * clean.abs().mean())
        y = clean + sigma * torch.randn(clean.shape, dtype=clean.dtype, generator=torch.Generator().manual_seed(1))
        start = time.process_time()
        network = lw.imaging.UNet(self.channels, 3 if self.size < 48 else 4 if self.size < 96 else 5)
        r = lw.imaging.reconstruct(A, y, network=network, noise_std=sigma, steps=self.steps, lr=2e-3, progress=False)
        reconstructed = time.process_time()
        post = lw.imaging.posterior(r, mode="network", memory="4GB", effort=EFFORT, progress=False)
        row = linearised(post, truth).row(self.kind, truth)
        done = time.process_time()
        return Record(
            name=self.kind,
            pixels=truth.numel(),
            measurements=y.numel(),
            way=post.way.name,
            accuracy=post.way.accuracy(),
            first=float(lw.imaging.psnr(r.input[0, 0].double(), truth)),
            psnr=row["psnr"],
            score=row["pixels"],
            patches=row["patches"],
            coverage=row["coverage"] or 0.0,
            correlation=row["correlation"] or 0.0,
            seconds={"reconstruction": reconstructed - start, "posterior": done - reconstructed},
            images={"truth": _lists(truth), "mean": _lists(post.mean), "std": _lists(post.std)},
        )


def _photograph(size: int) -> Tensor:
    """A grey crop of a photograph that scikit-learn ships, averaged down to size × size, in [0, 1]."""
    from sklearn.datasets import load_sample_image

    grey = torch.tensor(load_sample_image("flower.jpg"), dtype=torch.float64).mean(2) / 255
    crop = grey[60:380, 180:500]
    return torch.nn.functional.adaptive_avg_pool2d(crop[None], size)[0]


def _blurred(size: int) -> tuple[Tensor, lw.imaging.Operator]:
    return _photograph(size), lw.imaging.blur(size, 1.5, edges="reflect")


def _frequencies(size: int) -> tuple[Tensor, lw.imaging.Operator]:
    """The lowest eighth of the columns, and every third beyond."""
    frequency = torch.fft.fftfreq(size, 1 / size).abs()
    return _photograph(size), lw.imaging.fourier(size, (frequency < size / 16) | (frequency % 3 == 0))


def _slice(angles: int) -> Callable[[int], tuple[Tensor, lw.imaging.Operator]]:
    return lambda size: (walnut_like(size), lw.imaging.radon(size, angles))


KINDS: dict[str, Callable[[int], tuple[Tensor, lw.imaging.Operator]]] = {
    "blur": _blurred,
    "mri": _frequencies,
    "walnut": _slice(20),
    "walnut, 40 angles": _slice(40),
}
JOBS: dict[str, tuple[OtherJob, ...]] = {
    "toy": (OtherJob("blur", 12, 3, 20),),
    "quick": (OtherJob("blur", 24, 8, 600), OtherJob("mri", 24, 8, 600)),
    "full": (
        OtherJob("blur", 64, 32, 1_500),
        OtherJob("mri", 64, 32, 1_500),
        OtherJob("walnut", 64, 32, 1_500),
        OtherJob("walnut, 40 angles", 128, 32, 1_000),
    ),
}
JOBS["faithful"] = JOBS["full"]


def _lists(image: Tensor) -> Any:
    return [[round(v, 5) for v in row] for row in image.detach().double().tolist()]
