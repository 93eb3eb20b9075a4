"""Unfinished passes that can be written down and taken up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from lapwing._types import State, Tensor
from lapwing.data import ModelInput

Pair = tuple[ModelInput, Tensor]


class Keeper(ABC):
    """Where the state of a pass over the data is kept between batches."""

    @abstractmethod
    def resumed(self) -> State | None:
        """What an earlier run has left, if any."""

    @abstractmethod
    def see(self, number: int, pair: Pair) -> None:
        """Every batch of a pass goes by here, also those that an earlier run has added."""

    @abstractmethod
    def offer(self, state: Callable[[], State]) -> None:
        """Between two batches: the time to write the state down, if it is."""


class NotKept(Keeper):
    """An interrupted pass starts anew."""

    def resumed(self) -> State | None:
        return None

    def see(self, number: int, pair: Pair) -> None:
        pass

    def offer(self, state: Callable[[], State]) -> None:
        pass


NOT_KEPT = NotKept()


def kept(data: Iterable[Pair], done: int, keeper: Keeper, state: Callable[[int], State]) -> Iterator[Pair]:
    """The batches that are not yet done; whoever asks for the next one has added the last."""
    for number, pair in enumerate(data):
        keeper.see(number, pair)
        if number >= done:
            yield pair
            keeper.offer(lambda k=number + 1: state(k))  # type: ignore[misc]
