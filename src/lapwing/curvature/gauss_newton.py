"""The generalised Gauss–Newton matrix of all data as an operator: products H v in one pass, H never formed.

H(c) v = Σ_n J_nᵀ (Σ_g c_g Λ_ng) J_n v
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.factors import Fisher
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.linearised import Trace
from lapwing.network.products import DataJacobian, DataPiece
from lapwing.runtime import distributed


@dataclass(frozen=True, eq=False)
class GaussNewton:
    """Σ_g c_g H_g with the parts at unit dispersion. `outputs` maps a trace to the f where Λ is evaluated."""

    jacobian: DataJacobian
    likelihood: Likelihood
    sites: Sites
    fisher: Fisher
    outputs: Callable[[Trace], Tensor]

    @property
    def p(self) -> int:
        return self.jacobian.p

    def mv(self, v: Float[Tensor, "m p"], scales: Float[Tensor, " g"]) -> Float[Tensor, "m p"]:
        """Σ_g c_g H_g v for m vectors v (m, p): one pass over the data."""
        return self.jacobian.sandwich(v, lambda piece, q: self.weighted(piece, q, scales))

    def draws(self, n: int, scales: Float[Tensor, " g"], generator: torch.Generator) -> Float[Tensor, "n p"]:
        """Σ_n J_nᵀ Σ_g √c_g S_ng u with u ~ N(0, I): n draws from N(0, Σ_g c_g H_g) in one pass."""
        device = self.jacobian.linearised.network.device
        total, generator = (
            torch.zeros(n, self.p, dtype=torch.float64, device=device),
            distributed.rank_generator(generator),
        )
        # closing: an exception must free the trace of the current piece at once.
        with closing(self.jacobian.pieces()) as pieces:
            for piece in pieces:
                piece.add_vjp_(total, self.drawn(piece, n, scales, generator))
        return distributed.total(total)

    def drawn(
        self, piece: DataPiece, n: int, scales: Float[Tensor, " g"], generator: torch.Generator
    ) -> Float[Tensor, "d n k"]:
        """Σ_g √c_g S_g u for the data of a piece, u ~ N(0, I)."""
        f = self.sites.split(self.outputs(piece.trace)).double()
        roots = self.fisher.parts(self.likelihood, f, piece.y)
        drawn = [_times_normal(c.sqrt() * S, n, generator) for c, S in zip(scales, roots, strict=True)]
        return self.sites.join(torch.stack(drawn).sum(0).flatten(0, 1)).reshape(n, len(f), -1)

    def rows_of(self, f: Float[Tensor, "n k"], y: Tensor, J: Float[Tensor, "n k p"]) -> list[Float[Tensor, "r p"]]:
        """Rows SᵀJ of some data for each part g: H_g is the sum of their outer products."""
        roots = self.fisher.parts(self.likelihood, self.sites.split(f), y)
        return [(cotangents(S, self.sites, self.fisher).mT.to(J) @ J).flatten(0, 1) for S in roots]

    def weighted(self, piece: DataPiece, q: Float[Tensor, "m n k"], scales: Float[Tensor, " g"]) -> Tensor:
        """Σ_g c_g Λ_g q for the data of a piece; q in the order of the network's outputs."""
        f = self.sites.split(self.outputs(piece.trace)).double()
        by_site = self.sites.split(q.flatten(0, 1)).reshape(*q.shape[:2], *f.shape[1:])
        parts = self.fisher.mvs(self.likelihood, f, piece.y, by_site)
        total = sum((c * part for c, part in zip(scales, parts, strict=True)), torch.zeros_like(by_site))
        return self.sites.join(total.flatten(0, 1)).reshape(q.shape)


def cotangents(part: Float[Tensor, "n t c m"], sites: Sites, fisher: Fisher) -> Float[Tensor, "n k j"]:
    """Columns of S (n, t, c, m) as cotangents of the flat outputs (n, k, j).

    With `separate_sites` every pair of site and column has a cotangent of its own (j = t·m), zero at other sites; else
    column j of all sites is one cotangent (j = m).
    """
    n, t, c, m = part.shape
    if t > 1 and fisher.separate_sites:
        spread = torch.einsum("ntcm,ts->ntcsm", part, torch.eye(t, dtype=part.dtype, device=part.device))
        part = spread.reshape(n, t, c, t * m)
    columns = [sites.join(column).reshape(n, -1) for column in part.unbind(-1)]
    return torch.stack(columns, dim=-1)


def _times_normal(S: Float[Tensor, "n t c m"], n_draws: int, generator: torch.Generator) -> Float[Tensor, "d n t c"]:
    shape = (n_draws, *S.shape[:2], S.shape[3])
    u = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(S.device)
    return torch.einsum("ntcm,dntm->dntc", S.double(), u)
