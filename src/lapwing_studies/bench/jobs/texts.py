"""AG News and a small transformer encoder: common words, learnt positions, two blocks, mean pooling."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor, nn

from lapwing_studies.bench.jobs.rows import Cut, Rows
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.image_networks import AttentionBlock

VOCABULARY, LENGTH, WIDTH = 1_000, 32, 64
PADDING, UNKNOWN = 0, 1


def ag_news(folder: DataFolder) -> Cut:
    """5,000 training rows, 500 held out, 2,000 tested, all from the published test part; vocabulary of the training
    rows."""
    title, description, y = folder.arrays("ag_news_test", ["title", "description", "y"])
    texts = [_words(f"{a.decode()} {b.decode()}") for a, b in zip(title.tolist(), description.tolist(), strict=True)]
    rows = Rows(torch.arange(len(texts)), torch.as_tensor(y).long())
    cut = Cut.of(rows, (5_000, 500, 2_000))
    known = Counter(word for i in _numbers(cut.train) for word in texts[i]).most_common(VOCABULARY - 2)
    code = {word: k for k, (word, _) in enumerate(known, start=2)}

    def encoded(part: Rows) -> Rows:
        return Rows(torch.stack([_codes(texts[i], code) for i in _numbers(part)]), part.y)

    return Cut(encoded(cut.train), encoded(cut.held_out), encoded(cut.test))


class Encoder(nn.Module):
    def __init__(self, n_classes: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(AttentionBlock(WIDTH, 4) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(WIDTH, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.words(tokens) + self.positions))
        there = (tokens != PADDING).to(h).unsqueeze(-1)
        return self.head(self.dropout((h * there).sum(-2) / there.sum(-2).clamp(min=1)))


def encoder(dropout: float) -> nn.Module:
    """About 167,000 parameters."""
    return Encoder(4, dropout)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())[:LENGTH]


def _codes(words: list[str], code: dict[str, int]) -> Tensor:
    codes = [code.get(word, UNKNOWN) for word in words]
    return torch.tensor(codes + [PADDING] * (LENGTH - len(codes)))


def _numbers(rows: Rows) -> list[int]:
    assert isinstance(rows.x, Tensor)
    return rows.x.tolist()
