"""What "untouched" means: everything about a model and the process that a call could have changed, compared by bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Facts = dict[str, Any]


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """The models, the global random states and torch's switches are the same after the block, whatever it raised."""
    before = [process_facts(), *(model_facts(model) for model in models)]
    try:
        yield
    finally:
        after = [process_facts(), *(model_facts(model) for model in models)]
        for old, new in zip(before, after, strict=True):
            changed = changes(old, new)
            assert not changed, f"changed: {changed}"


def changes(old: Facts, new: Facts) -> list[str]:
    """The names of the facts that differ."""
    return [name for name in {**old, **new} if name not in old or name not in new or not _same(old[name], new[name])]


def process_facts() -> Facts:
    state = np.random.get_state(legacy=True)
    return {
        "torch random state": torch.get_rng_state().clone(),
        "numpy random state": (state[0], state[1].tobytes(), *state[2:]),
        "python random state": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "anomaly detection": torch.is_anomaly_enabled(),
    }


def model_facts(model: nn.Module) -> Facts:
    facts: Facts = {}
    for path, module in model.named_modules():
        facts[f"{path}: attributes"] = [(key, id(value)) for key, value in vars(module).items()]
        for key, value in vars(module).items():
            facts[f"{path}.{key}"] = _content(value)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        facts |= {f"{name}: {what}": fact for what, fact in _tensor_facts(tensor).items()}
    return facts


def _content(value: Any) -> Any:
    """A container's items by identity and order (hooks, children, recurrent weights); a plain value as it is."""
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return [id(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _tensor_facts(tensor: Tensor) -> Facts:
    grad = None if is_lazy(tensor) else tensor.grad
    hooks = getattr(tensor, "_backward_hooks", None)
    return {
        "identity": id(tensor),
        "bits": None if is_lazy(tensor) else tensor.detach().clone(),
        "writes": None if is_lazy(tensor) else tensor._version,
        "requires_grad": tensor.requires_grad,
        "grad": None if grad is None else grad.clone(),
        "grad identity": id(grad),
        "hooks": None if hooks is None else list(hooks.items()),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return type(a) is type(b) and a == b


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals itself, and −0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def stir(seed: int = 0) -> None:
    """Random states that are nobody's default."""
    torch.manual_seed(seed + 1)
    np.random.seed(seed + 2)
    random.seed(seed + 3)
