"""Global random states as tensors, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and accelerators), NumPy and Python. Call it inside `random_state_kept`."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # NumPy accepts 32 bits only
    random.seed(seed)


def states_as_tensors() -> dict[str, Any]:
    """The global random states of torch, CUDA, NumPy and Python as tensors and numbers."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_of_python = random.getstate()
    assert name == "MT19937"
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss_of_python],
    }


def set_states(states: dict[str, Any]) -> None:
    """Set the states that `states_as_tensors` returned."""
    torch.set_rng_state(_on_host(states["torch"]))
    if states["cuda"]:
        torch.cuda.set_rng_state_all([_on_host(state) for state in states["cuda"]])
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", _on_host(keys).numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, gauss_of_python = states["python"]
    random.setstate((version, tuple(_on_host(numbers).tolist()), gauss_of_python))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()
