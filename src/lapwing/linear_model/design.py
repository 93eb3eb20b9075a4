"""The training data as the linear model sees them: outputs f, features J and targets y, some data at a time.

Small problems keep J; large ones come back to the network at every pass, so that nothing of size N·K·P exists. Every
pass gives the same pieces in the same order.
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

DEFAULT_PASSES = 6.0  # over the training data, that a search by products with J may take by default
_MOST_DEFAULT_PASSES = 35.0  # where all of them together take a second or two
_QUICK_MACS = 1e11  # multiplications of such a second or two
_WORK_PER_DATUM = 1e6


class Piece(ABC):
    """Some data: f (n, K) in float64, encoded targets, and products with their rows of J."""

    f: Float[Tensor, "n k"]
    y: Tensor

    @abstractmethod
    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        """J v for each of the vectors, float64."""

    @abstractmethod
    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        """total ← total + Jᵀ u."""


class Design(ABC):
    """All of the data."""

    precise: bool  # float64 throughout and cheap to visit: the mode may be found to the last digits
    size: int  # data times parameters, which is about what a pass costs

    @abstractmethod
    def __iter__(self) -> Iterator[Piece]: ...

    def direct(self, sites: Sites, P0: GroupedDiagonal) -> DirectSolver | None:
        """A solver by factorisation, where data or parameters are few."""
        return None

    def along(self, v: Float[Tensor, " p"]) -> Iterator[tuple[Piece, Float[Tensor, "n k"]]]:
        """The same pieces, each with its J v."""
        for piece in self:
            yield piece, piece.mv(v[None])[0]


@dataclass(frozen=True, eq=False)
class StoredPiece(Piece):
    f: Float[Tensor, "n k"]
    y: Tensor
    J: Float[Tensor, "n k p"]
    rows: Rows  # the same, as the layers' factors

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        rows = self.J.reshape(-1, self.J.shape[-1])
        return (rows @ v.T).T.reshape(len(v), *self.f.shape)

    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        total.add_(u.reshape(-1) @ self.J.reshape(-1, self.J.shape[-1]))


@dataclass(frozen=True, eq=False)
class TracedPiece(Piece):
    f: Float[Tensor, "n k"]
    y: Tensor
    trace: Trace
    jvp: Jvp

    def mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m n k"]:
        found = self.jvp(self.trace, v)
        self.trace.put_back()
        return found

    def add_vjp_(self, total: Float[Tensor, " p"], u: Float[Tensor, "n k"]) -> None:
        self.trace.add_vjp_(total, u)


@dataclass(frozen=True, eq=False)
class StoredDesign(Design):
    pieces: tuple[StoredPiece, ...]
    size: int
    precise = True
    _solvers: dict[tuple[Sites, int], DirectSolver | None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def direct(self, sites: Sites, P0: GroupedDiagonal) -> DirectSolver | None:
        key = sites, P0.n_groups
        if key not in self._solvers and not distributed.is_distributed():  # ranks hold some of the rows each
            k, n = self.pieces[0].f.shape[1], sum(len(piece.f) for piece in self.pieces)
            order = sites.split(torch.arange(n * k, device=P0.index.device).reshape(n, k)).flatten()
            J, rows = [piece.J for piece in self.pieces], [piece.rows for piece in self.pieces]
            self._solvers[key] = DirectSolver.of(J, rows, order, P0.n_groups)
        return self._solvers.get(key)


@dataclass(frozen=True, eq=False)
class StreamedDesign(Design):
    linearised: Linearised
    source: Source
    jvp: Jvp
    pushes: bool  # whether one forward pass gives both J v and the graph that Jᵀ u goes back through
    size: int
    precise = False

    def __iter__(self) -> Iterator[Piece]:
        for x, y in self._batches():
            with located(x.origin):
                for trace, of_these in opened(x, y, self.linearised.unrecorded):
                    yield TracedPiece(trace.outputs.double(), of_these, trace, self.jvp)

    def along(self, v: Float[Tensor, " p"]) -> Iterator[tuple[Piece, Float[Tensor, "n k"]]]:
        if not self.pushes:
            yield from super().along(v)
            return
        for x, y in self._batches():
            with located(x.origin):
                for (trace, q), of_these in opened(x, y, partial(pushed, self.linearised, v=v)):
                    yield TracedPiece(trace.outputs.double(), of_these, trace, self.jvp), q

    def _batches(self) -> Iterator[tuple[ModelInput, Tensor]]:
        return Joiner(self.linearised.worth_a_pass).through(self.source())


def default_passes(macs: float) -> float:
    """Passes of so many multiplications each that a search by products with J may take by default."""
    return max(DEFAULT_PASSES, min(_MOST_DEFAULT_PASSES, _QUICK_MACS / macs))


def most_work(n: int) -> float:
    """Multiplications that one factorisation may take by default, of n data.

    A search for the mode takes a dozen of them with held-out data and up to sixty without: about what sixty epochs of
    training in mini-batches take.
    """
    return _WORK_PER_DATUM * n


def is_stored(n_rows: int, p: int, most_floats: int, most_work: float) -> bool:
    """Whether J is worth keeping: it fits, and Newton's systems are quick to factorise (or all digits are wanted)."""
    work = n_rows**3 // 3 if n_rows < p else n_rows * p**2
    quick = min(n_rows, p) <= MOST_SIDE and work <= most_work
    return n_rows * p <= most_floats and (most_work == inf or quick)


def design(linearised: Linearised, source: Source, *, n: int, most_floats: int, most_work: float = inf) -> Design:
    """Keep J where that pays, else visit the network anew in every pass."""
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
