"""Borrow the user's model without writing to it.

`borrowed(model)` gives a private copy of the tree of modules that shares the user's tensors: in eval mode, its fused
inference paths off (they skip submodules and fill padding differently), with gradients on. Hooks, installed tensors
and whatever a forward pass writes into its modules stay in the copy, so other threads may use the model meanwhile.
What a forward pass does outside its modules (a file it writes, a list a hook keeps elsewhere) cannot be undone.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")  # that autocast knows


_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_FUSED_FORWARDS = frozenset(kind.forward for kind in _FUSED)


@contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """A copy to evaluate, hook and install tensors in; it is valid inside.

    Compiled TorchScript cannot be copied: a model with such a part is itself lent, to one thread at a time, and put
    back afterwards.
    """
    modules = list(model.modules())
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
    lent: AbstractContextManager[nn.Module] = _in_place(model) if scripted else _copied(model, modules)
    with random_state_kept(), lent as own, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        fused = False
        for module in own.modules():
            module.training = False
            fused = fused or not _kept_plain(module, copied=not scripted)
        if fused:
            stack.enter_context(_fast_path())
        yield own


def _kept_plain(module: nn.Module, *, copied: bool) -> bool:
    """Turn the fused path of a copy off by its settings; False if it takes torch's switch, which all threads see."""
    if not isinstance(module, _FUSED):
        return True
    if not copied or type(module).forward not in _FUSED_FORWARDS:
        return False
    if isinstance(module, nn.MultiheadAttention):
        module.training, module.dropout = True, 0.0  # the slow path without dropout is that of eval mode
    elif isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # only the fused path asks
    else:
        module.use_nested_tensor = False
    return True


@contextmanager
def _copied(model: nn.Module, modules: list[nn.Module]) -> Iterator[nn.Module]:
    copies = {id(module): object.__new__(type(module)) for module in modules}
    follow = _Follow(copies)
    for module in modules:
        own = {key: follow(value) for key, value in module.__dict__.copy().items()}
        object.__setattr__(copies[id(module)], "__dict__", own)
    try:
        yield copies[id(model)]
    finally:
        # A hook or a kept activation may refer to the copy that holds it: without this, graphs would wait for the
        # garbage collector. Blocks formed later on read the settings of their layer, so these stay.
        for module in modules:
            object.__setattr__(copies[id(module)], "__dict__", module.__dict__.copy())


_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device, Tensor, nn.Parameter})


_CONTAINERS = frozenset({dict, list, set, OrderedDict})


class _Follow:
    """Containers anew, and what refers to a module of the tree as the same that refers to its copy.

    Followed are lists, tuples, sets and dictionaries, bound methods, partial functions and closures.
    """

    def __init__(self, copies: Mapping[int, nn.Module]) -> None:
        self.copies = copies
        self.seen: dict[int, Any] = {}  # one copy of a container that several modules hold

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        if isinstance(value, dict | list | set):
            return self.container(value)
        if kind is tuple:
            parts = tuple(self(part) for part in value)
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if kind is MethodType:
            owner = self(value.__self__) if isinstance(value.__self__, nn.Module) else value.__self__
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is partial:
            return self.partial(value)
        if kind is FunctionType and value.__closure__:
            return self.closure(value)
        return value

    def container(self, value: Any) -> Any:
        if id(value) in self.seen:
            return self.seen[id(value)]
        own = self.seen[id(value)] = value.copy() if type(value) in _CONTAINERS else copy(value)
        if not value:
            return own
        if isinstance(own, dict):
            for key, item in list(own.items()):
                if type(item) not in _PLAIN and (new := self(item)) is not item:
                    own[key] = new
        elif isinstance(own, list):
            own[:] = [self(item) for item in own]
        elif any(id(item) in self.copies for item in own):
            members = [self(item) for item in own]
            own.clear()
            own.update(members)
        return own

    def partial(self, value: partial[Any]) -> Any:
        func, args = self(value.func), self(value.args)
        keywords = {key: self(item) for key, item in value.keywords.items()}
        if func is value.func and args is value.args and all(keywords[k] is v for k, v in value.keywords.items()):
            return value
        own = partial(func, *args, **keywords)
        own.__dict__.update(value.__dict__)
        return own

    def closure(self, value: FunctionType) -> Any:
        """Cells that hold no module of the tree are shared: a counter there goes on counting."""
        if id(value) in self.seen:
            return self.seen[id(value)]
        self.seen[id(value)] = value  # should it refer to itself
        cells = tuple(self.cell(cell) for cell in value.__closure__ or ())
        if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        own.__kwdefaults__ = value.__kwdefaults__
        own.__dict__.update(value.__dict__)
        self.seen[id(value)] = own
        return own

    def cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # empty yet
            return cell
        if isinstance(content, dict | list | set):  # the user's own, unless a module of the tree holds it as well
            return CellType(self.seen[id(content)]) if id(content) in self.seen else cell
        own = self(content)
        return cell if own is content else CellType(own)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside `torch.inference_mode`, make tensors that autograd can use later on; elsewhere change nothing."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


class _Shared:
    """A change of state of the process: the first of those who need it makes it, the last takes it back."""

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
def _fast_path_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give torch's, NumPy's and Python's global random states back as they were; one that did not change is not set.

    They belong to the process: numbers that another thread draws from them meanwhile are given back as well.
    """
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    legacy, python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if not torch.equal(cpu, torch.get_rng_state()):
            torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if not _same_state(legacy, np.random.get_state()):
            np.random.set_state(legacy)
        if random.getstate() != python:
            random.setstate(python)


def _same_state(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def _vmap_warning_off() -> Iterator[None]:
    with warnings.catch_warnings():  # torch.func says so when it falls back to a loop of its own
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


_fast_path = _Shared(_fast_path_off)
math_attention = _Shared(lambda: sdpa_kernel(SDPBackend.MATH))  # fused kernels lack some derivatives
quiet_fallback = _Shared(_vmap_warning_off)


def install(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Let a borrowed model compute with these tensors in place of its own parameters and buffers.

    They stay in place until the model is given back, so a checkpointed block that recomputes itself during the
    backward pass sees them too. `aliases` maps every name of a shared tensor to the one it is listed under. A buffer
    that has none was made by a forward pass, as a mask is on first use: it stays until then as well.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (module._parameters, module._buffers):
            for key, current in slots.items():
                if current is not None and prefix + key in aliases:
                    slots[key] = tensors[aliases[prefix + key]]
        if isinstance(module, nn.RNNBase):  # recurrent layers read their weights from a list of their own
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


@contextmanager
def _in_place(model: nn.Module) -> Iterator[nn.Module]:
    with _lock_of(model), _attributes_kept(model):
        yield model


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    # Shallow copies of every module's attributes, and of the containers among them (hooks, buffers, children, logs):
    # old-style weight_norm, caches and counters all write there during a forward pass.
    saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, list[Any]]]]] = []
    for module in model.modules():
        attributes = dict(module.__dict__)
        containers = [(v, _items(v)) for v in attributes.values() if isinstance(v, dict | list | set)]
        saved.append((module, attributes, containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            module.__dict__.update(attributes)  # before anything is taken out: no attribute is ever missing
            for key in module.__dict__.keys() - attributes.keys():
                del module.__dict__[key]
            for container, content in containers:
                if container or content:  # most are hooks, and there are none
                    _refill(container, content)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _refill(container: Any, content: list[Any]) -> None:
    """Put the content back if it has changed."""
    now = _items(container)
    pairs = zip(now, content, strict=False)
    if isinstance(container, dict):
        same = all(k is old_k and v is old_v for (k, v), (old_k, old_v) in pairs)
    else:
        same = all(a is b for a, b in pairs)
    if same and len(now) == len(content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _lock_of(model: nn.Module) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())
