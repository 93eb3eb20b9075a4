"""The curvature of a posterior at outputs other than the network's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from lapwing import curvature, ranks
from lapwing._types import Float, Tensor
from lapwing.linearise import Trace
from lapwing.posterior import Posterior
from lapwing.products import Source, choose_jvp


def curved_at(posterior: Posterior, source: Source, shift: Float[Tensor, " p"]) -> Posterior:
    """The same posterior, its curvature in the same structure at the outputs f + J (θ − θ̃) of the linear model."""
    jvp = choose_jvp(posterior.linearised, ranks.first_of(source)[0])

    def shifted(trace: Trace) -> torch.Tensor:
        return trace.outputs + jvp(trace, shift[None])[0].to(trace.outputs)

    fresh = curvature.estimate(
        posterior.linearised,
        posterior.likelihood,
        source,
        sites=posterior.sites,
        structure=posterior.structure,
        fisher=posterior.fisher,
        chunk_floats=posterior.chunk_floats,
        outputs=shifted,
    )
    return replace(posterior, estimate=replace(posterior.estimate, parts=fresh.parts))
