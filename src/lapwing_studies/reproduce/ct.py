"""KMNIST from a few projections: the linearised deep image prior against its plain noise model and MC dropout.

Protocol of Antorán, Barbano, Leuschner, Hernández-Lobato and Jin (2022); published numbers are not at hand, so
orderings are compared and nothing else.
"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing_studies.reproduce.ct_methods import deterministic, dropout, dropout_draws, linearised, with_dropout
from lapwing_studies.reproduce.ct_others import JOBS
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.study import Record, Study, done

DETECTORS, SEED = 41, 10
# angles, noise level → weight of the total variation, iterations at the published learning rate
PUBLISHED = {
    (5, 0.05): (1e-5, 14_000), (10, 0.05): (3e-5, 29_000), (20, 0.05): (1e-4, 41_000), (30, 0.05): (1e-4, 50_000),
    (5, 0.1): (3e-5, 7_400), (10, 0.1): (1e-4, 13_000), (20, 0.1): (3e-4, 17_000), (30, 0.1): (3e-4, 22_000),
}  # fmt: skip


@dataclass(frozen=True)
class Tier:
    """`steps`: iterations, the published number where None."""

    settings: tuple[tuple[int, float], ...]
    n_images: int
    channels: int
    steps: int | None
    lr: float
    passes: int  # with dropout


TIERS = {
    "toy": Tier(((5, 0.1),), 1, 3, 20, 3e-3, 16),
    "quick": Tier(((10, 0.05), (20, 0.1)), 2, 16, 1_000, 1e-3, 512),
    "full": Tier(tuple(PUBLISHED), 10, 32, 2_000, 1e-3, 2_048),
    "faithful": Tier(tuple(PUBLISHED), 50, 32, None, 1e-4, 16_384),
}


def run(study: Study) -> Record:
    tier = TIERS[study.effort.name]
    jobs = [CtJob(study.folder, tier, i, *setting) for setting in tier.settings for i in range(tier.n_images)]
    described = json.loads(json.dumps(asdict(tier)))
    others = done(study, JOBS[study.effort.name])  # blur, frequencies and larger slices
    return study.record("ct", jobs, tier=described, others=others)


@dataclass(frozen=True)
class Scan:
    """One image, its projections and their noise."""

    A: lw.imaging.Operator
    truth: Tensor
    y: Tensor
    sigma: float

    @classmethod
    def of(cls, truth: Tensor, angles: int, level: float, seed: int) -> Scan:
        """White noise of `level` times the mean absolute projection."""
        A = lw.imaging.radon(truth.shape[0], angles, DETECTORS)
        clean = A(truth)
        sigma = float(level * clean.abs().mean())
        noise = torch.randn(clean.shape, dtype=clean.dtype, generator=torch.Generator().manual_seed(seed))
        return cls(A, truth, clean + sigma * noise, sigma)


@dataclass(frozen=True)
class CtJob:
    folder: DataFolder
    tier: Tier
    image: int
    angles: int
    level: float

    @property
    def name(self) -> str:
        return f"ct-{self.tier.channels}ch-{self.tier.steps}-{self.angles}-{self.level:g}-{self.image}"

    @property
    def made_with(self) -> str:
        return f"KMNIST test {self.image} | {self.angles} angles | {self.level} | {self.tier}"

    def run(self) -> Record:
        scan = Scan.of(kmnist(self.folder, self.image), self.angles, self.level, 1 + self.image)
        gamma, iterations = PUBLISHED[self.angles, self.level]
        options: dict[str, Any] = {"steps": self.tier.steps or iterations, "lr": self.tier.lr, "progress": False}
        network = lw.imaging.UNet(self.tier.channels, 3, 4, seed=SEED)
        clock = _Clock()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", lw.LapwingWarning)
            r = lw.imaging.reconstruct(scan.A, scan.y, tv=gamma, network=network, **options)
            clock.lap("reconstruction")
            posteriors = _posteriors(r, clock)
            rows = _rows(scan, r, posteriors)
            mc = lw.imaging.reconstruct(scan.A, scan.y, tv=0.0, network=with_dropout(network), **options)
            draws = dropout_draws(mc, self.tier.passes, seed=SEED)
            clock.lap("MC dropout")
            rows.insert(
                2, dropout(draws, posteriors["MLL"].correction, scan.truth, seed=SEED).row("DIP-MCDO", scan.truth)
            )
        return Record(
            image=self.image,
            angles=self.angles,
            level=self.level,
            rows=rows,
            fbp_psnr=float(lw.imaging.psnr(scan.A.fbp(scan.y), scan.truth)),
            seconds=clock.laps,
            notices=sorted({str(w.message) for w in caught if issubclass(w.category, lw.LapwingWarning)}),
            images=_images(scan, posteriors["MLL"].corrected()),
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "MLL": {"mode": "network"},
    "MLL + TV-PredCP": {"mode": "network", "tv_prior": True},
    "g-prior": {"prior": "g"},
    "MLL, linear mode": {},
}


def _posteriors(r: lw.imaging.Reconstruction, clock: _Clock) -> dict[str, lw.imaging.ImagingPosterior]:
    found = {}
    for name, options in OPTIONS.items():
        found[name] = lw.imaging.posterior(r, progress=False, **options)
        clock.lap(name)
    return found


def _rows(scan: Scan, r: lw.imaging.Reconstruction, posteriors: dict[str, lw.imaging.ImagingPosterior]) -> list[Record]:
    mll = posteriors["MLL"]
    unit = mll.correction / mll.noise_std**2
    plain = deterministic(mll.mean, unit, scan.truth, 1.0)
    learned = deterministic(mll.mean, mll.correction, scan.truth, mll.noise_std)
    rows = [plain.row("DIP (σ² = 1)", scan.truth), learned.row("DIP (MLL σ²)", scan.truth)]
    return rows + [
        linearised(post, scan.truth).row(f"linearised, {name}", scan.truth) for name, post in posteriors.items()
    ]


def _images(scan: Scan, post: lw.imaging.ImagingPosterior) -> Record:
    samples = post.sample(3, generator=torch.Generator().manual_seed(0))
    return Record(
        truth=_lists(scan.truth),
        data=_lists(scan.y),
        fbp=_lists(scan.A.fbp(scan.y)),
        mean=_lists(post.mean),
        std=_lists(post.std),
        samples=[_lists(s) for s in samples],
    )


def kmnist(folder: DataFolder, index: int) -> Tensor:
    """A test image of KMNIST, scaled to [0, 1]."""
    (images,) = folder.arrays("ct_images", ["kmnist_test"])
    return torch.from_numpy(images[index].astype("float64") / 255)


def _lists(image: Tensor) -> list[list[float]]:
    return [[round(v, 5) for v in row] for row in image.detach().double().tolist()]


class _Clock:
    """CPU seconds since the last lap."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name], self.last = round(now - self.last, 2), now
