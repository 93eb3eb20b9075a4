"""Mistakes that the first batch shows are warned of, and what is right is not."""

# ruff: noqa: E501 (a table reads by rows)
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

X = torch.linspace(-2, 2, 48).reshape(24, 2)
LABELS = torch.arange(24) % 3


def said(model: nn.Module, data: Any, likelihood: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lw.fit(model, data, likelihood, **options)
    return [str(w.message) for w in caught if issubclass(w.category, lw.LapwingWarning)]


# --- probabilities for logits -------------------------------------------------------------------------------


class Ending(nn.Module):
    """A network whose output goes through a function."""

    def __init__(self, n_outputs: int, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.end = nn.Linear(2, n_outputs), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(x))


class Sites(nn.Module):
    """Class probabilities on axis 1, at four places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(-1, 3, 4).softmax(1)


def softmax(f: Tensor) -> Tensor:
    return f.softmax(-1)


def half() -> nn.Module:
    return Ending(3, softmax).to(torch.bfloat16)


def small_at_first() -> nn.Module:
    """0.5 + 0.3 (x₀ + 2): above 1 from the middle on."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, 0.0]]))
        model.bias.fill_(1.1)
    return model


ONE, MANY = (X, LABELS % 2), (X, torch.eye(3)[LABELS])
PROBABILITIES = [
    ("softmax in forward", Ending(3, softmax), (X, LABELS), "classification", ("look like probabilities", "logits", "sums to one", "Remove the last softmax.")),
    ("a last module", nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1)), (X, LABELS), "classification", ("Remove the last softmax", "module '1' (Softmax)")),
    ("as an object", Ending(3, softmax), (X, LABELS), lw.Categorical(), ("sums to one",)),
    ("in half precision", half(), (X, LABELS), "classification", ("sums to one",)),
    ("on axis 1", Sites(), (X, LABELS[:, None].repeat(1, 4)), lw.Categorical(class_axis=1), ("sums to one",)),
    ("sigmoid of one logit", Ending(1, torch.sigmoid), ONE, "binary", ("between 0 and 1", "Remove the last sigmoid.")),
    ("sigmoid as a module", nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), ONE, "classification", ("module '1' (Sigmoid)",)),
    ("sigmoid of labels", Ending(3, torch.sigmoid), MANY, "multilabel", ("between 0 and 1", "sigmoid")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "likelihood", "words"), [row[1:] for row in PROBABILITIES], ids=[row[0] for row in PROBABILITIES]
)
def test_probabilities_for_logits_are_noticed(
    model: nn.Module, data: Any, likelihood: Any, words: tuple[str, ...]
) -> None:
    (message,) = said(model, data, likelihood)
    assert [word for word in words if word not in message] == [], message


LOGITS = [
    ("logits", nn.Linear(2, 3), (X, LABELS), "classification"),
    ("log-softmax", Ending(3, lambda f: f.log_softmax(-1)), (X, LABELS), "classification"),
    ("positive outputs", Ending(3, torch.exp), (X, LABELS), "classification"),
    ("one logit", nn.Linear(2, 1), ONE, "binary"),
    ("rates between 0 and 1", Ending(1, torch.sigmoid), (X, LABELS), "count"),
    ("numbers between 0 and 1", Ending(1, torch.sigmoid), (X, X[:, :1]), "regression"),
    ("few rows between 0 and 1", Ending(1, torch.sigmoid), (X[:5], LABELS[:5] % 2), "binary"),
    ("an output that stands still", Ending(1, lambda f: 0 * f + 0.5), ONE, "binary"),
    ("logits that happen to start small", small_at_first(), ONE, "binary"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "data", "likelihood"), [row[1:] for row in LOGITS], ids=[row[0] for row in LOGITS])
def test_logits_pass_without_a_word(model: nn.Module, data: Any, likelihood: Any) -> None:
    assert said(model, data, likelihood) == []


# --- labels that were not shifted ---------------------------------------------------------------------------


class Language(nn.Module):
    """Logits (B, T, V) from `input_ids`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embedding(input_ids).cumsum(1))


IDS = torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.where(torch.arange(6) < torch.tensor([[6], [4], [3], [2]]), IDS, -100)
PROMPTED = torch.where(torch.arange(6) < 4, -100, IDS)
SHIFTED = torch.cat([IDS[:, 1:], torch.full_like(IDS[:, :1], -100)], dim=1)
MASKED = torch.where(torch.arange(24).reshape(4, 6) % 7 == 0, IDS, -100)
AT_MASK = torch.where(MASKED != -100, 8, IDS)


@pytest.mark.parametrize("labels", [IDS, PADDED, PROMPTED], ids=["all", "padded", "prompt ignored"])
def test_labels_equal_to_the_tokens_are_noticed(labels: Tensor) -> None:
    (message,) = said(Language(), [{"input_ids": IDS, "labels": labels}], "classification")
    for words in ("input tokens themselves", "does not shift", "labels[:, 1:]", "-100"):
        assert words in message


def test_they_are_noticed_in_batches_of_different_lengths() -> None:
    batches = [{"input_ids": ids, "labels": ids} for ids in (IDS[:, :4], IDS)]
    (message,) = said(Language(), batches, "classification")
    assert "input tokens themselves" in message


def test_probabilities_are_noticed_in_batches_of_different_lengths() -> None:
    model = Language()
    model.head = nn.Sequential(model.head, nn.Softmax(-1))
    batches = [{"input_ids": ids, "labels": (ids + 1) % 9} for ids in (IDS[:, :4], IDS)]
    (message,) = said(model, batches, "classification")
    assert "sums to one" in message


def test_the_line_that_the_message_shows_shifts_the_labels() -> None:
    labels = IDS
    (message,) = said(Language(), [{"input_ids": IDS, "labels": labels}], "classification")
    names = {"torch": torch, "labels": labels}
    exec(message[message.index("labels = ") :].rstrip("."), names)
    assert torch.equal(names["labels"], SHIFTED)


@pytest.mark.parametrize(
    ("ids", "labels"),
    [(IDS, SHIFTED), (AT_MASK, MASKED), (IDS, (IDS + 1) % 9)],
    ids=["shifted", "masked model", "tags"],
)
def test_other_labels_pass_without_a_word(ids: Tensor, labels: Tensor) -> None:
    assert said(Language(), [{"input_ids": ids, "labels": labels}], "classification") == []
