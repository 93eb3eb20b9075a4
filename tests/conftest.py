"""What every test needs: one thread, checked shapes, a seed."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

import shapes

# Before the first import of lapwing: the shapes in its signatures are checked while the tests run.
jaxtyping.jaxtyped = shapes.sparing
jaxtyping.install_import_hook("lapwing", "shapes.check")

# Several workers share few cores; a second thread each would only slow the others down.
torch.set_num_threads(1)


@pytest.fixture
def seed() -> int:
    """The seed of a test that draws numbers; torch's global state starts from it too."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
