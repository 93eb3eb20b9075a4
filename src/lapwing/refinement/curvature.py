"""Re-estimate the curvature of a posterior at other outputs than the network's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from lapwing import curvature
from lapwing._types import Float, Tensor
from lapwing.curvature import Fisher
from lapwing.data import ModelInput
from lapwing.likelihoods import Likelihood, OutputCurvature
from lapwing.network.linearised import Trace
from lapwing.network.products import Source, choose_jvp
from lapwing.posterior import Posterior
from lapwing.runtime import distributed


def reestimated_at(posterior: Posterior, source: Source, shift: Float[Tensor, " p"]) -> Posterior:
    """The same posterior and structure, with the curvature at the outputs f + J (θ − θ̃) of the linear model."""
    jvp = choose_jvp(posterior.linearised, distributed.first_item(source)[0])

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
    return replace(posterior, estimate=replace(posterior.estimate, parts=fresh.parts, in_expectation=False))


class PrecomputedRoots(Fisher):
    """Roots S that are already computed, returned batch by batch in the order of the data."""

    separate_sites = True

    def __init__(self, roots: Float[Tensor, "n t c k"]) -> None:
        self.roots, self.at = roots, 0

    def parts(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Float[Tensor, "n t c m"]]:
        self.at += len(f)
        return [self.roots[self.at - len(f) : self.at].to(f)]

    def curvatures(self, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[OutputCurvature] | None:
        return None

    def scales(self, likelihood: Likelihood) -> Float[Tensor, " g"]:
        return likelihood.part_scales()

    def along(self, source: Source) -> Source:
        """The source, with the position reset to the first root at the start of every pass."""

        def passes() -> Iterable[tuple[ModelInput, Tensor]]:
            self.at = 0
            yield from source()

        return passes
