"""Small batches joined to larger ones: the fixed cost of a batch does not depend on its size.

Batches of 8 without this take 2.5 times as long for a Kronecker fit of an MLP with 1.3 million weights, and 1.4 times
for a CNN with three convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lapwing._types import State, Tensor
from lapwing.data import ModelInput
from lapwing.errors import ModelError

Pair = tuple[ModelInput, Tensor]
T = TypeVar("T")


def joined_size(n: int, at_most: int) -> int:
    """How many data are together when batches of n are joined."""
    return max(1, at_most // n) * n


def opened(
    x: ModelInput, y: Tensor, enter: Callable[[ModelInput], AbstractContextManager[T]]
) -> Generator[tuple[T, Tensor], None, None]:
    """What is entered with a batch, and its targets, open until the next is asked for.

    A model may want its data in an order, as sequences to be packed are sorted by length, which batches that were put
    together do not have. If it refuses them, they go through one by one.
    """
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(enter(x))
        except ModelError:
            if not x.sizes:
                raise
        else:
            yield entered, y
            return
    start = 0
    for n in x.sizes:
        rows = slice(start, start + n)
        yield from opened(x.rows(rows), y[rows], enter)
        start += n


class Joiner:
    """Hands data on in the order they came, in fewer batches of at most so many; larger ones as they are.

    Only batches of one kind are put together: the same arguments, shapes and dtypes. What waits for more is copied, as
    a loader may fill one batch over and over, and can be written down.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self.waiting: _Group | None = None

    def through(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Whoever asks for the next batch has worked on the last."""
        for x, y in pairs:
            if self.waiting is not None and self.waiting.takes(x, y):
                self.waiting.add(x, y)
                continue
            yield from self._rest()
            if 2 * x.n <= self.at_most and _plain(x):
                self.waiting = _Group(x, y, self.at_most)
            else:
                yield x, y
        yield from self._rest()

    def _rest(self) -> list[Pair]:
        waiting, self.waiting = self.waiting, None
        return [] if waiting is None else [waiting.pair()]

    def state(self) -> State:
        if self.waiting is None:
            return {}
        (x, y), span = self.waiting.pair(), [self.waiting.first.origin, self.waiting.last]
        arguments = {"args": list(x.args), "kwargs": dict(x.kwargs), "n": x.n, "shared": sorted(x.shared)}
        arguments["positions"] = x.positions
        return {**arguments, "y": y, "span": span, "sizes": list(self.waiting.sizes)}

    def restore(self, state: State) -> None:
        if state:
            arguments = (
                tuple(state["args"]),
                state["kwargs"],
                state["n"],
                state["span"][0],
                frozenset(state["shared"]),
            )
            x = replace(ModelInput(*arguments), positions=state.get("positions"))
            self.waiting = _Group(x, state["y"], self.at_most)
            self.waiting.last, self.waiting.sizes = state["span"][1], tuple(state["sizes"])


class _Group:
    """Room for some batches, and those that are in it."""

    def __init__(self, x: ModelInput, y: Tensor, at_most: int) -> None:
        self.first, self.last, self.n, self.at_most = x, x.origin, 0, at_most
        self.sizes: tuple[int, ...] = ()
        self.room = [_empty(v, at_most) if x.batched(v) else v for v in _values(x)]
        self.y = _empty(y, at_most)
        self.add(x, y)

    def takes(self, x: ModelInput, y: Tensor) -> bool:
        first = self.first
        if self.n + x.n > self.at_most or x.positions != first.positions:
            return False
        if len(x.args) != len(first.args) or [*x.kwargs] != [*first.kwargs]:
            return False
        return _fits(y, self.y) and all(
            x.batched(new) == first.batched(old) and (_fits(new, room) if x.batched(new) else _same(new, old))
            for new, room, old in zip(_values(x), self.room, _values(first), strict=True)
        )

    def add(self, x: ModelInput, y: Tensor) -> None:
        rows = slice(self.n, self.n + x.n)
        for new, room in zip(_values(x), self.room, strict=True):
            if x.batched(new):
                room[rows] = new.detach()
        self.y[rows] = y
        self.n, self.last = self.n + x.n, x.origin
        self.sizes += (x.n,)

    def pair(self) -> Pair:
        rooms = iter(self.room)

        def filled(old: Any) -> Any:
            room = next(rooms)
            return room[: self.n] if self.first.batched(old) else old

        x = self.first.mapped(filled, self.n)
        alone = len(self.sizes) == 1
        origin, sizes = (x.origin, ()) if alone else (f"{x.origin} to {self.last}", self.sizes)
        return replace(x, origin=origin, sizes=sizes), self.y[: self.n]


def _values(x: ModelInput) -> list[Any]:
    return [*x.args, *x.kwargs.values()]


def _plain(x: ModelInput) -> bool:
    """Whether all arguments can be copied, compared and written down."""
    return all(v.layout is torch.strided and not v.is_nested if isinstance(v, Tensor) else _word(v) for v in _values(x))


def _word(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def _empty(like: Tensor, n: int) -> Tensor:
    return torch.empty((n, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _fits(new: Tensor, room: Tensor) -> bool:
    return new.shape[1:] == room.shape[1:] and new.dtype == room.dtype and new.device == room.device


def _same(new: Any, old: Any) -> bool:
    """Whether an argument that carries no batch is the same for both."""
    return new is old or (_word(new) and type(new) is type(old) and new == old)
