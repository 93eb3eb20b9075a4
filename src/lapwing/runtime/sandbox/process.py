"""State of the process and of the thread: random states, warnings, autograd and autocast modes."""

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
    """Device types for which autocast is enabled in this thread."""
    return [device for device in _DEVICES if torch.is_autocast_enabled(device)]


@contextmanager
def autocast_off() -> Iterator[None]:
    """Disable autocast for all device types in this thread.

    `torch.autocast(device, enabled=False)` would warn about devices that this build of torch does not have.
    """
    on = autocast_devices()
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


@contextmanager
def grad_mode() -> Iterator[None]:
    """Enable gradients, disable inference mode and autocast; all three are thread-local."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast_off())
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Create ordinary tensors even if the caller is inside `torch.inference_mode` or autocast.

    Autograd refuses inference tensors, and autocast would store results in half precision. Otherwise a no-op.
    """
    with ExitStack() as stack:
        stack.enter_context(autocast_off())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # leaving inference mode turns gradients on again
        yield


class _ReferenceCounted:
    """A change of process-wide state that the first thread to enter makes and the last thread to leave reverts."""

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
    # warnings.catch_warnings is not thread-safe: interleaved exits would restore the wrong filters.
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


quiet_fallback = _ReferenceCounted(_vmap_warning_off)  # vmap warns about operators without a batching rule

forward_mode_lock = threading.RLock()  # forward-mode AD has one stack of dual levels for all threads

# --- random states ------------------------------------------------------------------------------------------

States = tuple[Tensor, list[Tensor], Any, Any]


def random_states() -> States:
    """Global random states of torch (CPU, CUDA), NumPy and Python."""
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
        if not same_states(before, random_states()):  # most models draw nothing: write no global state
            torch.set_rng_state(before[0])
            if before[1]:
                torch.cuda.set_rng_state_all(before[1])
            np.random.set_state(before[2])
            random.setstate(before[3])


_all_kept = _ReferenceCounted(_states_kept)
_local = threading.local()  # .kept: whether this thread is inside random_state_kept
_drawing_lock = threading.RLock()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random states on exit.

    They belong to the process, not to the thread: with several threads inside, the first saves the states and the last
    restores them. Draws that an unrelated thread makes in the meantime are undone too.
    """
    if getattr(_local, "kept", False):  # nested in the same thread: this context has a state of its own to restore
        with _states_kept():
            yield
        return
    with _all_kept():
        _local.kept = True
        try:
            yield
        finally:
            _local.kept = False


@contextmanager
def rng_restored(*, draws: bool) -> Iterator[None]:
    """Restore the random state after one run of a model.

    A model that draws random numbers in eval mode is run by one thread at a time. For other models a change of torch's
    state is reverted only if there is a single thread: otherwise another thread may have made it on purpose.
    """
    if draws:
        with _drawing_lock, _states_kept():
            yield
        return
    before = torch.get_rng_state()
    try:
        yield
    finally:
        if not torch.equal(before, torch.get_rng_state()) and threading.active_count() == 1:
            torch.set_rng_state(before)
