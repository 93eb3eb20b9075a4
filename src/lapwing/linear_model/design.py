"""The design of the linear model: outputs f, Jacobian J and targets y of the training data, in pieces.

Small problems store J. Large ones run the network again in every pass, so that nothing of size N·K·P is in memory.
Every pass gives the same pieces in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.data.joining import Joiner, opened
from lapwing.errors import located
from lapwing.likelihoods import Sites
from lapwing.linear_model.direct import MOST_SIDE, DirectSolver
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products import FORWARD, Jvp, Source, can_push, choose_jvp, pushed
from lapwing.operators import GroupedDiagonal, Rows
from lapwing.runtime import distributed

DEFAULT_PASSES = 6.0  # default budget of a mode search by products with J, in passes over the training data
_MOST_DEFAULT_PASSES = 35.0  # of a network whose passes are cheap
_QUICK_MACS = 1e11  # multiplications of all these passes: a second or two
_WORK_PER_DATUM = 1e6


class Piece(ABC):
    """Some data: outputs f (n, k) in float64, encoded targets, and products with their rows of J (n, k, p)."""

    f: Float[Tensor, "n k"]
    y: Tensor

    @abstractmethod
    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        """J v for each of the m vectors, in float64."""

    @abstractmethod
    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        """total ← total + Jᵀ u."""


class Design(ABC):
    """The training data as pieces; iterating over it is one pass."""

    precise: bool  # float64 throughout and cheap to evaluate, so the mode can be computed to rounding
    size: int  # number of data × parameters; the cost of a pass is roughly proportional to it

    @abstractmethod
    def __iter__(self) -> Iterator[Piece]: ...

    def direct(self, sites: Sites, P0: GroupedDiagonal) -> DirectSolver | None:
        """A solver of Newton's systems by factorisation, if there are few data or few parameters; else None."""
        return None

    def with_jvp(self, v: Float[Tensor, " p"]) -> Iterator[tuple[Piece, Float[Tensor, "n k"]]]:
        """The same pieces, each with its J v. Streamed designs get both from one forward pass where they can."""
        for piece in self:
            yield piece, piece.mv(v[None])[0]


@dataclass(frozen=True, eq=False)
class StoredPiece(Piece):
    """A piece whose J (n, k, p) is in memory."""

    f: Float[Tensor, "n k"]
    y: Tensor
    J: Float[Tensor, "n k p"]
    rows: Rows  # the same rows, as factors of the layers

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        rows = self.J.reshape(-1, self.J.shape[-1])
        return (rows @ v.T).T.reshape(len(v), *self.f.shape)

    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        total.add_(u.reshape(-1) @ self.J.reshape(-1, self.J.shape[-1]))


@dataclass(frozen=True, eq=False)
class TracedPiece(Piece):
    """A piece whose products are computed by the network: valid until the next piece is requested."""

    f: Float[Tensor, "n k"]
    y: Tensor
    trace: Trace
    jvp: Jvp

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        found = self.jvp(self.trace, v)
        self.trace.put_back()  # J v may install other tensors, but checkpointed layers rerun in the backward pass
        return found

    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        self.trace.add_vjp_(total, u)


@dataclass(frozen=True, eq=False)
class StoredDesign(Design):
    """Stores J of all data."""

    pieces: tuple[StoredPiece, ...]
    size: int
    precise = True
    _solvers: dict[tuple[Sites, int], DirectSolver | None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def direct(self, sites: Sites, P0: GroupedDiagonal) -> DirectSolver | None:
        key = sites, P0.n_groups
        if key not in self._solvers and not distributed.is_distributed():  # no rank has all rows
            k, n = self.pieces[0].f.shape[1], sum(len(piece.f) for piece in self.pieces)
            # The likelihood's roots come site by site, the network's outputs in its own order.
            order = sites.split(torch.arange(n * k, device=P0.index.device).reshape(n, k)).flatten()
            J, rows = [piece.J for piece in self.pieces], [piece.rows for piece in self.pieces]
            self._solvers[key] = DirectSolver.of(J, rows, order, P0.n_groups)
        return self._solvers.get(key)


@dataclass(frozen=True, eq=False)
class StreamedDesign(Design):
    """Runs the network over the data in every pass."""

    linearised: Linearised
    source: Source
    jvp: Jvp
    pushes: bool  # whether one forward pass gives both J v and the graph for Jᵀ u
    size: int
    precise = False

    def __iter__(self) -> Iterator[Piece]:
        for x, y in self._batches():
            with located(x.origin):
                for trace, of_these in opened(x, y, self.linearised.unrecorded):
                    yield TracedPiece(trace.outputs.double(), of_these, trace, self.jvp)

    def with_jvp(self, v: Float[Tensor, " p"]) -> Iterator[tuple[Piece, Float[Tensor, "n k"]]]:
        if not self.pushes:
            yield from super().with_jvp(v)
            return
        for x, y in self._batches():
            with located(x.origin):
                for (trace, q), of_these in opened(x, y, partial(pushed, self.linearised, v=v)):
                    yield TracedPiece(trace.outputs.double(), of_these, trace, self.jvp), q

    def _batches(self) -> Iterator[tuple[ModelInput, Tensor]]:
        return Joiner(self.linearised.joined_batch_size).through(self.source())


def default_passes(macs: float) -> float:
    """Passes of so many multiplications each that a search by products with J may take by default."""
    return max(DEFAULT_PASSES, min(_MOST_DEFAULT_PASSES, _QUICK_MACS / macs))


def most_work(n: int) -> float:
    """Multiplications that one factorisation may take by default, for n data.

    A mode search takes about 12 factorisations with held-out data and up to 60 without. The limit makes that about as
    expensive as 60 epochs of training in mini-batches.
    """
    return _WORK_PER_DATUM * n


def is_stored(n_rows: int, p: int, most_floats: int, most_work: float) -> bool:
    """Whether to store J: it fits, and Newton's systems are cheap to factorise (or the exact mode is required)."""
    work = n_rows**3 // 3 if n_rows < p else n_rows * p**2
    quick = min(n_rows, p) <= MOST_SIDE and work <= most_work
    return n_rows * p <= most_floats and (most_work == inf or quick)


def design(linearised: Linearised, source: Source, *, n: int, most_floats: int, most_work: float = inf) -> Design:
    """A stored design if `is_stored` says so, else a streamed one."""
    size = n * linearised.layout.p
    if is_stored(n * linearised.k, linearised.layout.p, most_floats, most_work):
        return StoredDesign(tuple(_stored(linearised, source)), size)
    first = distributed.first_item(source)[0]
    jvp = choose_jvp(linearised, first)
    pushes = jvp in FORWARD and can_push(linearised, first)
    return StreamedDesign(linearised, source, jvp, pushes, size)


def _stored(linearised: Linearised, source: Source) -> Iterator[StoredPiece]:
    with closing(_batches(source)) as batches:
        for number, (x, y) in enumerate(batches):
            with located(f"batch {number}"), linearised.trace(x) as trace:
                rows = trace.jacobian()
                yield StoredPiece(trace.outputs.double(), y, rows.dense(), rows)


def _batches(source: Source) -> Generator[tuple[ModelInput, Tensor], None, None]:
    yield from source()
