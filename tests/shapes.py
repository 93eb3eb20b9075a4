"""The run-time check of shape annotations, `Float[Tensor, "n c p"]`, used by the whole test run.

Only annotations that state a shape are checked. The rest is the type checker's business, and a check of them here
would answer a user's mistake (a function where a module is needed) before Lapwing's own error could.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

# The checker picks items of containers at random; not from the global state, which tests watch for being untouched.
with patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype on those arguments and results of `function` whose annotation states a shape."""
    stated = {name: hint for name, hint in function.__annotations__.items() if _states_a_shape(hint)}
    if not stated:
        return function
    function.__annotations__ = stated
    return beartype(function)


def _states_a_shape(hint: object) -> bool:
    # Annotations arrive as strings in a module that has `from __future__ import annotations`, as objects elsewhere.
    text = hint if isinstance(hint, str) else repr(hint)
    return "[Tensor," in text or "[torch.Tensor," in text or "jaxtyping" in text
