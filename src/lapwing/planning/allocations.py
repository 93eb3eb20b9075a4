"""Count the bytes of live tensors while some code runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationCounter(TorchDispatchMode):
    """Counts storages from their allocation until they are freed. Tensors that existed before are not counted.

    Temporary buffers inside a single operation are not seen; they are small, or freed before the next peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode: torch need not import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}  # not new: views and in-place results
        out = func(*args, **kwargs)
        for storage in _storages(out):
            if storage._cdata not in given and storage._cdata not in self._sizes:
                self._enter(storage)
        self.peak = max(self.peak, self.now)
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        # A tensor's storage may outlive the tensor (views), so the finaliser is on the storage.
        weakref.finalize(storage, self._leave, storage._cdata)

    def _leave(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value.untyped_storage()
