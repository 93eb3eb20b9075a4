"""lw.imaging.posterior: a reconstruction → its error bars, with the hyperparameters chosen by the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lapwing._types import Scalar
from lapwing.errors import InputError, InputTypeError, warn
from lapwing.imaging.blocks import blocks_of, one_block, weights
from lapwing.imaging.evidence import Evidence, Found, maximise
from lapwing.imaging.linear_image import LinearImage
from lapwing.imaging.planning import WAYS, sized
from lapwing.imaging.prior import KINDS, ImagePrior
from lapwing.imaging.reconstruction import Reconstruction
from lapwing.imaging.sampled import Effort
from lapwing.imaging.value import ImagingPosterior, Inserted
from lapwing.planning.budget import parse_memory
from lapwing.runtime.arguments import positive
from lapwing.runtime.sandbox import plain_tensors, random_state_kept

MODES = ("conjugate", "network", "refit_tv")
SCALES = ("consistent", "released")


@plain_tensors()
def posterior(
    r: Reconstruction,
    *,
    prior: str = "blocks",
    tv_prior: bool = False,
    mode: str = "conjugate",
    predcp_scale: str = "consistent",
    blocks: Any = None,
    noise_std: float | None = None,
    hyperparameters: Any = None,
    correction: bool = False,
    memory: str | float | None = None,
    way: str = "auto",
    effort: Effort = Effort(),  # noqa: B008
    progress: bool | None = None,
) -> ImagingPosterior:
    """The linearised network's posterior of the image, around the reconstruction.

    `prior`: "blocks" (a variance for each block of the network, and a length scale where its filters have several
    taps), "one" (one variance) or "g" (one variance of scaled columns). `tv_prior`: total variation as a prior over the
    length scales (TV-PredCP), of the weight that the reconstruction used. `mode`: at which weights the evidence is
    evaluated. `noise_std`, `hyperparameters`: given where they are known; the evidence chooses the others.
    `correction`: the image-noise correction of the paper. `way`: "dense" or "matrixfree" where the planner is not to
    choose; `effort`: what the samples of the latter may cost.
    """
    _check(r, prior, tv_prior, mode, predcp_scale, way, effort)
    sigma = None if noise_std is None else positive("noise_std", noise_std)
    with random_state_kept():
        model, inserted = _linear(r, prior, mode, blocks, memory, way, progress)
        eta = None if hyperparameters is None else model.prior.read(hyperparameters)
        found = None
        if eta is None or sigma is None:
            objective = model.evidence(inserted, model.variation(predcp_scale) if tv_prior else None)
            found = maximise(objective, noise_var=None if sigma is None else sigma**2, eta=eta)
            _tell(found)
            eta, sigma = found.eta, found.noise_var**0.5
        held = model.way(eta, sigma**2, effort)
    chosen_here = found if hyperparameters is None else None
    post = ImagingPosterior(
        r.operator, model.image, model.prior, eta, sigma, held, mode, inserted, chosen_here, 0.0, r.input, r.network
    )
    return post.corrected() if correction else post


@dataclass(frozen=True, eq=False, repr=False)
class ImageEvidence:
    """log p(y) of the linear model at any hyperparameters, at one Cholesky factorisation each."""

    objective: Evidence

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hyperparameters."""
        return self.objective.prior.names

    def __call__(self, hyperparameters: Mapping[str, float], noise_std: float) -> Scalar:
        """The log evidence, total variation left out."""
        eta = self.objective.prior.read(hyperparameters)
        log_noise = 2 * torch.tensor(positive("noise_std", noise_std), dtype=torch.float64).log()
        with torch.no_grad():
            return self.objective.log_evidence(eta, log_noise)


@plain_tensors()
def evidence(
    r: Reconstruction,
    *,
    prior: str = "blocks",
    mode: str = "conjugate",
    blocks: Any = None,
    memory: str | float | None = None,
    way: str = "auto",
    progress: bool | None = None,
) -> ImageEvidence:
    """The evidence as a function, `evidence(r)(hyperparameters, noise_std)`: for curves and choices of one's own."""
    _check(r, prior, False, mode, SCALES[0], way, Effort())
    with random_state_kept():
        model, inserted = _linear(r, prior, mode, blocks, memory, way, progress)
        return ImageEvidence(model.evidence(inserted, None))


def _linear(
    r: Reconstruction, prior: str, mode: str, blocks: Any, memory: Any, way: str, progress: bool | None
) -> tuple[LinearImage, Inserted]:
    """The linear model in the way that the planner takes, and what its evidence is evaluated with."""
    layout = weights(r.network)
    chosen = blocks_of(r.network, layout, blocks) if prior == "blocks" else one_block(layout)
    weights_prior = ImagePrior(prior, chosen, layout.p)
    itemsize = max(t.element_size() for t in r.network.parameters())
    A, n_grams = r.operator.linear, weights_prior.classes[-1].stop
    sizes = sized(A.d, A.m, layout.p, n_grams, itemsize, parse_memory(memory), way)
    model = LinearImage.of(r, weights_prior, sizes, progress)
    return model, model.inserted(mode)


def _tell(found: Found) -> None:
    if found.not_monotone:
        warn(
            f"imaging: the expected total variation of block {', '.join(found.not_monotone)} is not monotone in its "
            "length scale, which the change of variables of TV-PredCP needs: compare with tv_prior=False."
        )


def _check(r: Any, prior: Any, tv_prior: Any, mode: Any, predcp_scale: Any, way: Any, effort: Any) -> None:
    if not isinstance(r, Reconstruction):
        raise InputTypeError(f"posterior: expected what lw.imaging.reconstruct gave, got {type(r).__name__}.")
    words = (("prior", prior, KINDS), ("mode", mode, MODES), ("predcp_scale", predcp_scale, SCALES), ("way", way, WAYS))
    for argument, value, known in words:
        if value not in known:
            raise InputError(f"posterior: {argument} must be one of {', '.join(map(repr, known))}; got {value!r}.")
    if not isinstance(effort, Effort):
        raise InputTypeError(f"posterior: effort must be an lw.imaging.Effort, got {type(effort).__name__}.")
    if tv_prior and prior != "blocks":
        raise InputError(f'posterior: tv_prior=True is a prior over length scales: use prior="blocks", not {prior!r}.')
    if tv_prior and r.tv == 0:
        raise InputError(
            "posterior: tv_prior=True needs the weight that total variation had in the reconstruction, and it was 0. "
            "Reconstruct with tv > 0, or leave tv_prior out."
        )
