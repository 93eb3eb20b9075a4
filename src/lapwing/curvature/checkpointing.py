"""Checkpoints of an unfinished pass over the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from lapwing._types import State, Tensor
from lapwing.data import ModelInput

Pair = tuple[ModelInput, Tensor]


class PassCheckpoint(ABC):
    """Where the state of a pass over the data is stored between batches."""

    @abstractmethod
    def resumed(self) -> State | None:
        """The state that an earlier run stored, if any."""

    @abstractmethod
    def observe(self, number: int, pair: Pair) -> None:
        """See every batch of a pass, also those an earlier run has processed: to verify that the data are the same."""

    @abstractmethod
    def offer(self, state: Callable[[], State]) -> None:
        """Called between two batches; stores the state when the time since the last write is long enough."""


class NoCheckpoint(PassCheckpoint):
    """No checkpoint: an interrupted pass starts from the first batch."""

    def resumed(self) -> State | None:
        return None

    def observe(self, number: int, pair: Pair) -> None:
        pass

    def offer(self, state: Callable[[], State]) -> None:
        pass


NO_CHECKPOINT = NoCheckpoint()


def checkpointed(
    data: Iterable[Pair], done: int, checkpoint: PassCheckpoint, state: Callable[[int], State]
) -> Iterator[Pair]:
    """The batches from number `done` on. A batch counts as processed once the next one is requested."""
    for number, pair in enumerate(data):
        checkpoint.observe(number, pair)
        if number >= done:
            yield pair
            checkpoint.offer(lambda k=number + 1: state(k))  # type: ignore[misc]
