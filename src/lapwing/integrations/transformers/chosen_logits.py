"""A causal language model as a classifier over a few of its tokens: not 32,000 outputs, but those of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import InputError

POSITION = "answer_position"


class ChosenLogits(nn.Module):
    """The logits of some tokens where the answer is predicted: (B, T) tokens → (B, len(ids)).

    That is at `answer_position` (B,), or at the last token that `attention_mask` does not hide.
    """

    def __init__(self, model: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        if len(set(ids)) != len(ids) or len(ids) < 2:
            raise InputError(f"logits: expected two or more different token numbers, got {list(ids)}.")
        self.model = model
        self.register_buffer("ids", torch.as_tensor(list(ids)), persistent=False)

    def forward(self, answer_position: Tensor | None = None, **inputs: Any) -> Tensor:
        logits = self.model(**inputs).logits
        at = _last(inputs, logits) if answer_position is None else answer_position.to(logits.device)
        return logits[torch.arange(len(logits), device=logits.device), at][:, self.ids]


def _last(inputs: Mapping[str, Any], logits: Tensor) -> Tensor:
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.full((len(logits),), logits.shape[1] - 1, device=logits.device)
    positions = torch.arange(mask.shape[1], device=mask.device)
    return (mask.long() * positions).argmax(1)


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
