"""lw.refine: check arguments, convert words to objects, and call the refinement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lapwing import refinement
from lapwing.api import words
from lapwing.data.targets import encoded_batches
from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.linear_model import in_fixed_order
from lapwing.planning import parse_memory
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import counted, seeded
from lapwing.runtime.sandbox import plain_tensors, random_state_kept

_MOST_STORED = 1 << 28  # entries of the Jacobian of all data: 2 GiB


@distributed.collective_call("lw.refine")
@plain_tensors()
def refine(
    posterior: Posterior,
    data: Any = None,
    *,
    by: str = "laplace",
    preset: str | None = None,
    max_steps: int | None = None,
    memory: str | float | None = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Posterior:
    """Refine a posterior of the linear model h(x) = f(x) + J(x)(θ − θ̃); returns a new posterior.

    Training rarely ends at a mode of the linear model. `by="laplace"` moves the mean to its mode by Newton's method,
    and re-estimates the curvature at the outputs there, in the posterior's own structure. `by="vi"` and `by="vi_diag"`
    fit the Gaussian, with full or diagonal precision, that maximises the evidence lower bound ELBO = E_q[Σ log p(y |
    h)] − KL(q ‖ prior), which is `posterior.refinement.elbo`.

    Predictions are then centred at f + J (μ − θ̃). `posterior.refinement` records the path, convergence and cost.
    `data`: the training data (default: those of `fit`). `memory`: for the Jacobian of all data (default: 2 GiB); if it
    does not fit, "laplace" runs the network again in every step, and the others raise. `preset="immer2021"`: the
    settings of Immer, Korzepa and Bauer (2021), which stop before convergence. `max_steps`: limit for "vi" and
    "vi_diag"; the first dozen steps gain most. `generator`: for draws of weights, and for expectations over too many
    outputs for quadrature.

    Refine last: a refined posterior is valid for one prior and one likelihood. A temperature, link or mean that was
    chosen on held-out data is dropped.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"refine: expected a Posterior from lw.fit or lw.tune, got {type(posterior).__name__}.")
    if posterior.trained is not None:
        posterior.check_unrefined("refine")
    settings = _CONVERGED if preset is None else words.choose("preset", preset, {"immer2021": _IMMER2021})
    ways = {"laplace": settings.laplace, "vi": settings.vi, "vi_diag": settings.vi_diag}
    way = _limited(words.choose("by", by, ways), max_steps)
    most = _MOST_STORED if memory is None else max(1, parse_memory(memory) // 8)
    draws = seeded(generator)
    _check(posterior)
    batches = posterior.source if data is None else posterior.batches(data)
    if batches is None:
        raise InputError(
            "refine needs the training data: lw.refine(posterior, data). The posterior remembers those of lw.fit, but "
            "not after more_data were added or it was loaded from a file."
        )
    posterior = posterior.covering(batches)
    with random_state_kept(), torch.no_grad():
        fixed = in_fixed_order(batches)
        source = partial(
            encoded_batches, fixed, posterior.likelihood, posterior.sites, progress=progress, what="refine"
        )
        passes = refinement.CountedPasses(source)
        if isinstance(way, refinement.Variational):
            return refinement.refine_variational(posterior, passes, most, way, generator=draws)
        return refinement.refine_laplace(posterior, passes, most, way)


@dataclass(frozen=True)
class _Settings:
    """The three methods with the hyperparameters of a preset."""

    laplace: refinement.Adam | None  # None: Newton
    vi: refinement.Variational
    vi_diag: refinement.Variational


_CONVERGED = _Settings(
    None,
    refinement.Variational("vi", refinement.FullCovariance(), refinement.Ascent()),
    refinement.Variational("vi_diag", refinement.DiagonalCovariance(), refinement.Ascent()),
)
_IMMER2021 = _Settings(
    refinement.Adam(lr=1e-3, n_steps=1000),
    refinement.Variational("vi", refinement.FullCovariance(), refinement.SampledSteps(rho=1e-2, n_steps=250)),
    refinement.Variational("vi_diag", refinement.DiagonalCovariance(), refinement.SampledSteps(rho=1e-3, n_steps=250)),
)


def _limited(
    way: refinement.Adam | refinement.Variational | None, max_steps: int | None
) -> refinement.Adam | refinement.Variational | None:
    if max_steps is None:
        return way
    if not isinstance(way, refinement.Variational):
        raise InputError(
            f'refine(max_steps={max_steps!r}) goes with by="vi" and by="vi_diag"; by="laplace" ends at the mode, and '
            "takes the few steps it needs."
        )
    return way.at_most(counted("max_steps", max_steps, "step"))


def _check(posterior: Posterior) -> None:
    if posterior.structure.n_points is not None:
        raise StructureError(
            f"refine: the {posterior.structure.n_points} points of this GP stand for the data at the network's "
            'outputs; elsewhere others would. Fit lw.GP(..., mean="newton"), or refine lw.GP() on all data.'
        )
    if posterior.refinement is not None and posterior.refinement.bound is not None:
        raise StructureError(
            "refine: this posterior is a variational one already, and its structure is no longer that of the fit. "
            "Refine the posterior of lw.fit or lw.tune."
        )
