"""The run-time check of shape annotations, `Float[Tensor, "n c p"]`, used by the whole test run.

Only annotations that state a shape are checked. The rest is the type checker's business, and a check of them here
would answer a user's mistake (a function where a module is needed) before Lapwing's own error could.

A check takes longer than most of the functions it looks at, so each function's first calls are checked, and then one
call in many.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from itertools import count
from typing import Any
from unittest.mock import patch

# The checker picks items of containers at random; not from the global state, which tests watch for being untouched.
with patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import beartype

from jaxtyping import jaxtyped

_FIRST, _THEN = 100, 25  # calls of a function that are all checked; of later ones, one in so many


def sparing(thing: Any = None, *, typechecker: Any) -> Any:
    """In place of `jaxtyping.jaxtyped`: leaves alone what states no shape, and checks not every call of what does."""
    if thing is None:
        return lambda decorated: sparing(decorated, typechecker=typechecker)
    if inspect.isclass(thing):
        if is_dataclass(thing) and inspect.isfunction(thing.__init__):
            thing.__init__ = sparing(thing.__init__, typechecker=typechecker)
        return thing
    if not inspect.isfunction(thing) or not any(map(_states_a_shape, thing.__annotations__.values())):
        return thing
    checked, calls = jaxtyped(thing, typechecker=typechecker), count()

    @wraps(thing)
    def sometimes(*args: Any, **kwargs: Any) -> Any:
        n = next(calls)
        return (checked if n < _FIRST or n % _THEN == 0 else thing)(*args, **kwargs)

    return sometimes


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
