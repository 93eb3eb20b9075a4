"""What belongs to the whole process, or to the thread: random states, warnings, modes of computing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WITH_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "privateuseone")
_DEVICES = tuple(d for d in _WITH_AUTOCAST if torch.amp.is_autocast_available(d))


def autocast_devices() -> list[str]:
    """The kinds of device for which autocast is on, in this thread."""
    return [device for device in _DEVICES if torch.is_autocast_enabled(device)]


@contextmanager
def autocast_off() -> Iterator[None]:
    """For every kind of device, in this thread. Not by `torch.autocast`, which warns of devices that are not there."""
    on = autocast_devices()
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


@contextmanager
def plain_computing() -> Iterator[None]:
    """Gradients on, inference mode and autocast off; all three belong to the thread."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast_off())
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside `torch.inference_mode`, make tensors that autograd can use later on; inside autocast, no others than ever.

    Elsewhere nothing changes.
    """
    with ExitStack() as stack:
        stack.enter_context(autocast_off())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


class _Shared:
    """A change of the process's state: the first thread that needs it makes it, the last one takes it back."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self.change, self.guard, self.users, self.stack = change, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.guard:
            if not self.users:
                self.stack.enter_context(self.change())
            self.users += 1
        try:
            yield
        finally:
            with self.guard:
                self.users -= 1
                if not self.users:
                    self.stack.close()


@contextmanager
def _vmap_warning_off() -> Iterator[None]:
    # Not by warnings.catch_warnings, which another thread may leave in another order.
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


quiet_fallback = _Shared(_vmap_warning_off)  # torch.func warns when it falls back to a loop of its own

forward_mode_alone = threading.RLock()  # torch has one stack of forward-mode levels for all threads

# --- random states ------------------------------------------------------------------------------------------

States = tuple[Tensor, list[Tensor], Any, Any]


def random_states() -> States:
    """Those of torch, of its accelerators, of NumPy and of Python."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def same_states(a: States, b: States) -> bool:
    tensors = zip([a[0], *a[1]], [b[0], *b[1]], strict=True)
    numpy = all(np.array_equal(x, y) for x, y in zip(a[2], b[2], strict=True))
    return all(torch.equal(x, y) for x, y in tensors) and numpy and a[3] == b[3]


@contextmanager
def _states_kept() -> Iterator[None]:
    before = random_states()
    try:
        yield
    finally:
        if not same_states(before, random_states()):
            torch.set_rng_state(before[0])
            if before[1]:
                torch.cuda.set_rng_state_all(before[1])
            np.random.set_state(before[2])
            random.setstate(before[3])


_all_kept = _Shared(_states_kept)
_here = threading.local()  # .kept: whether this thread is inside random_state_kept
_one_at_a_time = threading.RLock()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the global random states back as they were.

    They belong to the process. Where several threads are inside, the first notes the states and the last gives them
    back; numbers that yet another thread draws meanwhile are given back as well.
    """
    if getattr(_here, "kept", False):
        with _states_kept():
            yield
        return
    with _all_kept():
        _here.kept = True
        try:
            yield
        finally:
            _here.kept = False


@contextmanager
def draws_undone(*, draws: bool) -> Iterator[None]:
    """Around a run of a model. One that draws random numbers in eval mode runs in one thread at a time.

    Of any other, a change of torch's state is undone if no other thread can have made it.
    """
    if draws:
        with _one_at_a_time, _states_kept():
            yield
        return
    before = torch.get_rng_state()
    try:
        yield
    finally:
        if not torch.equal(before, torch.get_rng_state()) and threading.active_count() == 1:
            torch.set_rng_state(before)
