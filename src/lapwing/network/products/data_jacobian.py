"""The Jacobian of all data as a linear operator: J v, Jᵀ u, J D Jᵀ u and Σ Jᵀ B J v for several vectors at once.

J is not stored: every product is a pass over the data, batch by batch. Passes run in the network's dtype, sums over
data in float64. One forward pass with its graph serves all vectors. With several ranks, a vector over data holds the
entries of this rank's shard, a vector over parameters the sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import located
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products.jvp import Jvp, choose_jvp
from lapwing.network.products.vjp import Vjp, choose_vjp
from lapwing.operators import GroupedDiagonal
from lapwing.runtime import distributed

Source = Callable[
    [], Iterable[tuple[ModelInput, Tensor]]
]  # starts a pass over (x, encoded y), always in the same order


@dataclass(frozen=True, eq=False)
class DataPiece:
    """A batch in a pass over the data: the trace there, and products with its rows of J."""

    trace: Trace
    y: Tensor
    jvp: Jvp
    vjp: Vjp

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        """J v, float64."""
        found = self.jvp(self.trace, v)
        self.trace.put_back()
        return found

    def add_vjp_(self, total: Float[Tensor, "m p"], u: Float[Tensor, "m n k"]) -> None:
        """total ← total + Jᵀ u."""
        self.vjp(self.trace, total, u)


@dataclass(frozen=True, eq=False)
class DataJacobian:
    """J (N·K, P) of a linearised network at all data."""

    linearised: Linearised
    source: Source
    jvp: Jvp
    vjp: Vjp

    @classmethod
    def of(cls, linearised: Linearised, source: Source) -> DataJacobian:
        """Choose the implementations of J v and Jᵀ u once, by trying them on the first data."""
        first = distributed.first_item(source)[0]
        return cls(linearised, source, choose_jvp(linearised, first), choose_vjp(linearised, first))

    @property
    def p(self) -> int:
        return self.linearised.layout.p

    def pieces(self) -> Generator[DataPiece, None, None]:
        """One forward pass over the data. A piece is valid until the next one is requested."""
        for number, (x, y) in enumerate(self.source()):
            with located(x.origin or f"batch {number}"), self.linearised.unrecorded(x) as trace:
                yield DataPiece(trace, y, self.jvp, self.vjp)

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        """J v for every datum."""
        # `closing`: an error in the loop must release the borrowed model now, not at garbage collection.
        with closing(self.pieces()) as pieces:
            return torch.cat([piece.mv(v) for piece in pieces], dim=1)

    def vjp_sum(self, u: Float[Tensor, "m n k"]) -> Float[Tensor, "m p"]:
        """Jᵀ u = Σ_n J_nᵀ u_n."""
        total, start = u.new_zeros(len(u), self.p, dtype=torch.float64), 0
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                stop = start + piece.trace.x.n
                piece.add_vjp_(total, u[:, start:stop])
                start = stop
        return distributed.total(total)

    def kernel_mv(self, u: Float[Tensor, "m n k"], D: GroupedDiagonal) -> Float[Tensor, "m n k"]:
        """(J D Jᵀ) u, in two passes over the data."""
        return self.mv(D.diagonal * self.vjp_sum(u))

    def sandwich(self, v: Float[Tensor, "m p"], middle: Callable[[DataPiece, Tensor], Tensor]) -> Float[Tensor, "m p"]:
        """Σ_n J_nᵀ B_n J_n v in one pass; `middle` computes B_n q for q = J_n v (m, n, K) of a piece."""
        total = torch.zeros_like(v, dtype=torch.float64)
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                piece.add_vjp_(total, middle(piece, piece.mv(v)))
        return distributed.total(total)
