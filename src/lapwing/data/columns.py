"""Column names of mapping batches: which entries are inputs of the model, and which are targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lapwing.errors import InputError, InputTypeError

LABELS = "labels"  # default name of the targets, as in Hugging Face datasets
_SOUND_LIKE_TARGETS = {"label", "target", "targets", "y", "class", "classes"}


@dataclass(frozen=True)
class Columns:
    """Which columns of a mapping are the model's inputs and which are targets.

    Without `inputs`, all columns except the targets are keyword arguments of the model. With `inputs`, these columns
    are positional arguments in order or, if `keywords` is given, keyword arguments with those names.
    """

    inputs: tuple[str, ...] | None = None
    keywords: tuple[str, ...] | None = None
    targets: tuple[str, ...] = (LABELS,)

    @classmethod
    def of(cls, inputs: Any, targets: Any) -> Columns | None:
        """From the arguments of `lw.fit(..., inputs=, targets=)`; None if neither is given."""
        if inputs is None and targets is None:
            return None
        named = _names("targets", LABELS if targets is None else targets)
        if inputs is None:
            return cls(targets=named)
        if isinstance(inputs, Mapping):
            keywords = _names("inputs", list(inputs.values()))
            return cls(_names("inputs", list(inputs)), keywords, named)
        return cls(_names("inputs", inputs), None, named)

    def split(self, batch: Mapping[Any, Any], where: str) -> tuple[Any, Any]:
        """(x, y) of a mapping batch; x is a tuple of positional arguments or a mapping of keyword arguments."""
        self._check(batch, self.targets, "targets", where)
        y = tuple(batch[name] for name in self.targets)
        return self.x_of(batch, where), y if len(y) > 1 else y[0]

    def x_of(self, batch: Mapping[Any, Any], where: str) -> Any:
        """The inputs of a mapping batch, which may have no targets."""
        if self.inputs is None:
            return {key: value for key, value in batch.items() if key not in self.targets}
        self._check(batch, self.inputs, "inputs", where)
        values = tuple(batch[name] for name in self.inputs)
        return values if self.keywords is None else dict(zip(self.keywords, values, strict=True))

    def _check(self, batch: Mapping[Any, Any], names: tuple[str, ...], what: str, where: str) -> None:
        missing = [name for name in names if name not in batch]
        if not missing:
            return
        has = ", ".join(map(repr, batch)) or "none"
        if what == "targets" and self.targets == (LABELS,):
            raise InputError(
                f"{where}: a mapping must hold its targets under 'labels'; its keys are {has}. "
                f"Name the columns: {_example(list(batch))}."
            )
        raise InputError(
            f"{where}: there is no column {', '.join(map(repr, missing))}, which {what}= names; its keys are {has}. "
            f"Name {what} that are among them."
        )


def _example(keys: list[Any]) -> str:
    """How the columns might be named, where one of the keys sounds like targets."""
    targets = [key for key in keys if str(key).lower() in _SOUND_LIKE_TARGETS]
    inputs = [key for key in keys if key not in targets]
    if len(targets) != 1 or len(inputs) != 1:
        return 'inputs="image", targets="label"'
    return f'inputs="{inputs[0]}", targets="{targets[0]}"'


def _names(argument: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        kinds = "a column name or a list of them" + ", or a mapping {column: keyword}" * (argument == "inputs")
        raise InputTypeError(
            f"{argument}: expected {kinds}, got {given!r}. For example inputs=['left', 'right'], targets='label'."
        )
    if len(set(names)) != len(names):
        raise InputError(f"{argument}: every name may come once, got {', '.join(map(repr, names))}.")
    return tuple(names)
