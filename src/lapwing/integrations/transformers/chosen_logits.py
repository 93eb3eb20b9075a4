"""A causal language model as a classifier over a few of its tokens: not 32,000 outputs, but those of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.errors import InputError

POSITION = "answer_position"


class ChosenLogits(nn.Module):
    """The logits of some tokens where the answer is predicted: (B, T) tokens → (B, len(ids)).

    That is at `answer_position` (B,), or at the last token that `attention_mask` does not hide. The model's head is
    given the states there alone, (B, 1, d), so that logits (B, T, vocabulary) are never formed; of a model that does
    not name its head (`get_output_embeddings`), they are picked out of all.
    """

    ids: Tensor

    def __init__(self, model: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        ids = token_numbers(ids)
        _check_vocabulary(model, ids)
        self.model = model
        self.register_buffer("ids", torch.as_tensor(list(ids)), persistent=False)

    def forward(self, answer_position: Tensor | None = None, **inputs: Any) -> Tensor:
        place = _Place(answer_position, inputs)
        with _given(_head(self.model), place.picked) as narrowed:
            logits = self.model(**inputs).logits
        if logits.ndim != 3:
            raise InputError(
                f"logits=: expected a causal language model, with logits (B, T, vocabulary); those of "
                f"{type(self.model).__name__} are {tuple(logits.shape)}. Leave logits= out for a classification head."
            )
        return (logits if narrowed else place.picked(logits))[:, 0, self.ids]


def token_numbers(ids: Sequence[int]) -> tuple[int, ...]:
    """Raise unless these are two or more different numbers of tokens."""
    whole = all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids)
    if not whole or len(set(ids)) != len(ids) or len(ids) < 2:
        raise InputError(
            f"logits: expected the numbers of two or more different tokens, got {list(ids)}. Of words, take "
            "tokenizer.convert_tokens_to_ids(...)."
        )
    return tuple(int(i) for i in ids)


def _check_vocabulary(model: nn.Module, ids: tuple[int, ...]) -> None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and not all(0 <= i < size for i in ids):
        raise InputError(f"logits={list(ids)}: the vocabulary has {size} tokens, numbered from 0.")


class _Place:
    """Where the answer is predicted in every row of tokens."""

    def __init__(self, at: Tensor | None, inputs: Mapping[str, Any]) -> None:
        mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids", inputs.get("inputs_embeds"))
        if at is None and mask is not None:
            at = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        self.at, self.length = at, None if tokens is None else tokens.shape[1]

    def picked(self, states: Float[Tensor, "b t d"]) -> Float[Tensor, "b 1 d"]:
        if self.at is None:
            return states[:, -1:]
        before = 0 if self.length is None else states.shape[1] - self.length  # virtual tokens of prompt tuning
        return states[torch.arange(len(states), device=states.device), self.at.to(states.device) + before][:, None]


def _head(model: nn.Module) -> nn.Module | None:
    named = getattr(model, "get_output_embeddings", None)
    found = None if named is None else named()
    return found if isinstance(found, nn.Module) else None


@contextmanager
def _given(head: nn.Module | None, narrowed: Callable[[Tensor], Tensor]) -> Iterator[list[bool]]:
    """Let the head compute from `narrowed` states; the list is not empty once it has."""
    done: list[bool] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or args[0].ndim != 3:
            return None
        done.append(True)
        return narrowed(args[0]), *args[1:]

    if head is None:
        yield done
        return
    hook = head.register_forward_pre_hook(before, prepend=True)
    try:
        yield done
    finally:
        hook.remove()


@dataclass(frozen=True)
class Answers:
    """Batches whose labels are tokens, as labels among the chosen ones; re-iterable.

    Labels (B,) are numbers of the choice as they stand. Of labels (B, T) the last that is not ignored is the answer,
    and the position before it is where it is predicted.
    """

    loader: Any
    ids: tuple[int, ...]
    labels: str = "labels"
    ignore_index: int = -100

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            batch = dict(batch)
            tokens = batch.pop(self.labels)
            if tokens.ndim == 1:
                yield {**batch, "labels": tokens}
                continue
            there = tokens != self.ignore_index
            last = (there.long() * torch.arange(tokens.shape[1], device=tokens.device)).argmax(1)
            if not bool(there.any(1).all()):
                raise InputError(
                    f"logits={list(self.ids)}: row {int((~there.any(1)).nonzero()[0, 0])} of a batch has no answer: "
                    f"all of its labels are {self.ignore_index}. Leave such rows out."
                )
            answer = tokens.gather(1, last[:, None])[:, 0]
            yield {**batch, POSITION: (last - 1).clamp(min=0), "labels": self._number(answer)}

    def __len__(self) -> int:
        return len(self.loader)

    def _number(self, answer: Tensor) -> Tensor:
        same = answer[:, None] == torch.as_tensor(self.ids, device=answer.device)
        if not bool(same.any(1).all()):
            other = int(answer[~same.any(1)][0])
            raise InputError(
                f"logits={list(self.ids)}: a datum's last label is token {other}, which is none of them. Give the "
                "tokens of all answers, or labels (B,) that number them."
            )
        return same.long().argmax(1)
