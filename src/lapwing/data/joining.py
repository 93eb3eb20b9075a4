"""Join small batches into larger ones: the overhead of a pass (Python, hooks, kernel launches) is per batch.

Without joining, batches of 8 take 2.5 times as long for a Kronecker fit of an MLP with 1.3 million weights, and 1.4
times for a CNN with three convolutions.
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
    """Size of a joined batch made of batches of n data."""
    return max(1, at_most // n) * n


def opened(
    x: ModelInput, y: Tensor, enter: Callable[[ModelInput], AbstractContextManager[T]]
) -> Generator[tuple[T, Tensor], None, None]:
    """Enter a context with a batch; yield its value with the targets. It is closed when the next item is requested.

    Some models need a certain order within a batch, such as sequences sorted by length for `pack_padded_sequence`;
    joined batches may violate it. If the model raises for a joined batch, the original batches are used one by one.
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
    """Joins consecutive batches up to `at_most` data, in order. Larger batches are passed through unchanged.

    Only batches with the same arguments, shapes and dtypes are joined. Pending batches are copied, as some loaders
    reuse the memory of a batch; they are part of the checkpoint.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self.waiting: _Group | None = None  # pending batches

    def through(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield joined batches. The previous batch may be overwritten once the next is requested."""
        for x, y in pairs:
            if self.waiting is not None and self.waiting.takes(x, y):
                self.waiting.add(x, y)
                continue
            yield from self._rest()
            # A batch larger than half the limit cannot be joined with another one like it: do not copy it.
            if 2 * x.n <= self.at_most and _joinable(x):
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
    """Preallocated buffers for `at_most` data, filled batch by batch."""

    def __init__(self, x: ModelInput, y: Tensor, at_most: int) -> None:
        self.first, self.last, self.n, self.at_most = x, x.origin, 0, at_most
        self.sizes: tuple[int, ...] = ()
        self.buffers = [_empty(v, at_most) if x.batched(v) else v for v in _values(x)]
        self.y = _empty(y, at_most)
        self.add(x, y)

    def takes(self, x: ModelInput, y: Tensor) -> bool:
        """Whether the batch has the same form and fits into the buffers."""
        first = self.first
        if self.n + x.n > self.at_most or x.positions != first.positions:
            return False
        if len(x.args) != len(first.args) or [*x.kwargs] != [*first.kwargs]:
            return False
        return _fits(y, self.y) and all(
            x.batched(new) == first.batched(old) and (_fits(new, buffer) if x.batched(new) else _same(new, old))
            for new, buffer, old in zip(_values(x), self.buffers, _values(first), strict=True)
        )

    def add(self, x: ModelInput, y: Tensor) -> None:
        rows = slice(self.n, self.n + x.n)
        for new, buffer in zip(_values(x), self.buffers, strict=True):
            if x.batched(new):
                buffer[rows] = new.detach()
        self.y[rows] = y
        self.n, self.last = self.n + x.n, x.origin
        self.sizes += (x.n,)

    def pair(self) -> Pair:
        """The joined batch, as views of the buffers."""
        buffers = iter(self.buffers)

        def filled(old: Any) -> Any:
            buffer = next(buffers)
            return buffer[: self.n] if self.first.batched(old) else old

        x = self.first.mapped(filled, self.n)
        single = len(self.sizes) == 1
        origin, sizes = (x.origin, ()) if single else (f"{x.origin} to {self.last}", self.sizes)
        return replace(x, origin=origin, sizes=sizes), self.y[: self.n]


def _values(x: ModelInput) -> list[Any]:
    return [*x.args, *x.kwargs.values()]


def _joinable(x: ModelInput) -> bool:
    """Whether all arguments can be copied, compared and stored in a checkpoint."""
    values = _values(x)
    return all(v.layout is torch.strided and not v.is_nested if isinstance(v, Tensor) else _scalar(v) for v in values)


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def _empty(like: Tensor, n: int) -> Tensor:
    return torch.empty((n, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _fits(new: Tensor, buffer: Tensor) -> bool:
    return new.shape[1:] == buffer.shape[1:] and new.dtype == buffer.dtype and new.device == buffer.device


def _same(new: Any, old: Any) -> bool:
    """Whether an unbatched argument is the same in both batches."""
    # Types are compared too: 1 == True == 1.0, but a model may treat them differently.
    return new is old or (_scalar(new) and type(new) is type(old) and new == old)
