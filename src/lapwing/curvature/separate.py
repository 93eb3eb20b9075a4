"""Rows D^½J of data whose outputs are treated as if they shared no weights (a kernel per output)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.curvature.accumulator import Accumulator, AccumulatorFactory
from lapwing.curvature.factors import Exact, Fisher
from lapwing.errors import StructureError
from lapwing.likelihoods import Independent, Likelihood, Sites, Softmax
from lapwing.network.jacobian import Jacobian
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, LowRankCurvature, SeparateCurvature, stacked


def diagonal_roots(fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> list[Float[Tensor, "n t c c"]]:
    """D^½ with D = diag Λ: couplings between outputs in the likelihood are dropped as well."""
    _require_exact(fisher)
    return [torch.diag_embed(part.diagonals().sqrt()) for part in likelihood.part_curvatures(f, y)]


def softmax_roots(fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> list[Float[Tensor, "n t c c"]]:
    """D^½ where Λ = D − D 1 1ᵀD / w for a softmax, and D = Λ for likelihoods that do not couple outputs."""
    _require_exact(fisher)
    parts = likelihood.part_curvatures(f, y)
    if any(not isinstance(part, Softmax | Independent) for part in parts):
        raise StructureError(
            f'GP(coupling="independent") knows how a softmax couples the outputs; {type(likelihood).__name__} couples '
            'them in another way. Use coupling="full", or "diag" to drop that coupling too.'
        )
    diagonals = [part.w[..., None] * part.p if isinstance(part, Softmax) else part.diagonals() for part in parts]
    return [torch.diag_embed(d.sqrt()) for d in diagonals]


def _require_exact(fisher: Fisher) -> None:
    if not isinstance(fisher, Exact):
        raise StructureError(
            f"A GP without coupling between outputs is made of Λ itself; fisher is {type(fisher).__name__}, whose "
            'columns mix the outputs. Use fisher="exact", or coupling="full".'
        )


@dataclass(frozen=True, eq=False)
class Separate(AccumulatorFactory):
    """Accumulate rows per output, as if outputs shared no weights. `tied`: a softmax couples them in the likelihood."""

    columns: Callable[[Fisher, Likelihood, Tensor, Tensor], Sequence[Tensor]]
    sites: Sites
    tied: bool
    whole_data = True

    def roots(self, fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        return self.columns(fisher, likelihood, f, y)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return SeparateAccumulator(self.sites, self.tied)


class SeparateAccumulator(Accumulator):
    """Rows of all outputs, stored together because they share the layers' inputs."""

    def __init__(self, sites: Sites, tied: bool) -> None:
        self.sites, self.tied = sites, tied
        self.pieces: list[Jacobian] = []
        self.halves: list[Tensor] = []

    def observe(self, part: Float[Tensor, "n t c c"]) -> None:
        self.halves.append(part.diagonal(dim1=-2, dim2=-1).double().reshape(-1, self.sites.c).T)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        (rows,) = pieces  # whole_data: all columns come at once
        self.pieces.append(rows.kept())

    def result(self) -> Curvature:
        rows, c = stacked(self.pieces), self.sites.c
        columns = torch.arange(rows.c, device=rows.device).reshape(-1, c)  # by site, then by output
        outputs = tuple(LowRankCurvature.of(rows.outputs_at(at)) for at in columns.T)
        return SeparateCurvature(outputs, self._output_of(), torch.cat(self.halves, 1) if self.tied else None)

    def _output_of(self) -> Int[Tensor, " k"]:
        """The output (0 … c − 1) of every row of a network's Jacobian, in the network's own order."""
        k = self.sites.t * self.sites.c
        return torch.empty(k, dtype=torch.long).scatter_(
            0, self.sites.split(torch.arange(k)[None])[0].flatten(), torch.arange(k) % self.sites.c
        )
