"""In- and out-of-distribution pairs: a dataset that a small classifier learns, and another that it does not see.

Images, texts and tables; convolutions, a BatchNorm ResNet, transformers and multilayer perceptrons.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lapwing_studies.bench.jobs.texts import LENGTH, PADDING, UNKNOWN, VOCABULARY, Encoder
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.architectures import cnn, mlp, plain
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.parts import Parts, Split, shuffled
from lapwing_studies.reproduce.training import Recipe

MOST_TESTED = 500  # in-distribution test inputs, and as many out-of-distribution
SHIFT = 1.0  # standard deviations by which every column of a table is moved, up or down


@dataclass(frozen=True)
class Pair:
    """In- and out-of-distribution data, a network, and its training. `files`: the archives of `--data` it needs."""

    name: str
    inside: str
    outside: str
    source: sources.Source
    network: Callable[[Parts], nn.Module]
    words: str
    recipe: Recipe
    files: tuple[str, ...] = ()
    more: int = 2  # factor on the training rows of the effort, as photographs and texts are hard to learn
    pictures: bool = False

    def parts(self, folder: DataFolder, seed: int, effort: Effort) -> Parts:
        return self.source(folder, seed, self.learnt_with(effort))

    def learnt_with(self, effort: Effort) -> Effort:
        return replace(effort, n_train=self.more * effort.n_train, n_test=min(effort.n_test, MOST_TESTED))


def listed(folder: DataFolder) -> list[Pair]:
    """The pairs whose data are available."""
    return [pair for pair in PAIRS if all(map(folder.holds, pair.files))]


def pair(name: str) -> Pair:
    return next(pair for pair in PAIRS if pair.name == name)


# --- where the data come from ------------------------------------------------------------------------------


def turned_digits(folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """scikit-learn's digits as rows of 64 pixels; out-of-distribution: the test digits rotated by 90°."""
    parts = sources.digits(folder, seed, effort)
    turned = torch.rot90(parts.test.x, 1, (-2, -1)).flatten(1)
    train, held_out, test = (Split(p.x.flatten(1), p.y) for p in (parts.train, parts.validation, parts.test))
    return Parts(train, held_out, test, turned, "the same digits turned by 90°")


def shifted_rows(name: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """A UCI table; out-of-distribution: test rows with all columns shifted by a standard deviation, up or down."""
    parts = sources.uci_classes(name, folder, seed, effort)
    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(2, (parts.test.x.shape[1],), generator=generator) - 1
    return replace(parts, outside=parts.test.x + SHIFT * signs, outside_is="the same rows, every column shifted")


def texts(inside: str, outside: str, folder: DataFolder, seed: int, effort: Effort) -> Parts:
    """Sentences as indices of the most common words of the training part; out-of-distribution: the other collection."""
    words, y = _TEXTS[inside](folder)
    foreign, _ = _TEXTS[outside](folder)
    n_train, n_held_out, n_test = effort.n_train, effort.n_train // 4, effort.n_test
    order = shuffled(len(words), seed=seed).tolist()
    known = Counter(word for i in order[:n_train] for word in words[i]).most_common(VOCABULARY - 2)
    code = {word: k for k, (word, _) in enumerate(known, start=2)}

    def part(start: int, n: int) -> Split:
        rows = order[start : start + n]
        return Split(_encoded([words[i] for i in rows], code), y[rows])

    others = [foreign[i] for i in shuffled(len(foreign), seed=seed)[:n_test].tolist()]
    train, held_out = part(0, n_train), part(n_train, n_held_out)
    return Parts(train, held_out, part(n_train + n_held_out, n_test), _encoded(others, code), outside)


def _ag_news(folder: DataFolder) -> tuple[list[list[str]], Tensor]:
    title, description, y = folder.arrays("ag_news_test", ["title", "description", "y"])
    pairs = zip(title.tolist(), description.tolist(), strict=True)
    return [_words(f"{a.decode()} {b.decode()}") for a, b in pairs], torch.as_tensor(y).long()


def _sst2(folder: DataFolder) -> tuple[list[list[str]], Tensor]:
    names = ("train", "dev", "test")
    text = np.concatenate(folder.arrays("sst2", [f"text_{name}" for name in names]))
    y = np.concatenate(folder.arrays("sst2", [f"y_{name}" for name in names]))
    return [_words(sentence.decode()) for sentence in text.tolist()], torch.as_tensor(y).long()


_TEXTS = {"AG News": _ag_news, "SST-2": _sst2}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())[:LENGTH]


def _encoded(sentences: Sequence[list[str]], code: dict[str, int]) -> Tensor:
    rows = torch.full((len(sentences), LENGTH), PADDING)
    for row, words in zip(rows, sentences, strict=True):
        row[: len(words)] = torch.tensor([code.get(word, UNKNOWN) for word in words])
    return rows


# --- the networks -------------------------------------------------------------------------------------------


def _cnn(norm: Callable[[int], nn.Module], parts: Parts) -> nn.Module:
    return cnn(28, (1, 16, 32), parts.n_classes, norm)


def _resnet(parts: Parts) -> nn.Module:
    return staged_resnet(32, (16, 32, 64), n_channels=3)


def _mlp(norm: Callable[[int], nn.Module], parts: Parts) -> nn.Module:
    return mlp([parts.train.x.shape[1], 64, 64, parts.n_classes], nn.ReLU, norm)


def transformer(parts: Parts) -> nn.Module:
    return Encoder(parts.n_classes, 0.1)


_IMAGES = Recipe(n_epochs=12, learning_rate=2e-3)
_ROWS = Recipe(n_epochs=60, learning_rate=3e-3)
_WORDS = Recipe(n_epochs=6, learning_rate=1e-3)
_GREY = ("mnist", "fashion_mnist")
_COLOUR = ("cifar10_train_a", "cifar10_test", "svhn_test_crops_10k")


def _grey(name: str, other: str) -> sources.Source:
    return partial(sources.grey_images, name, other)


def _table(name: str, norm: Callable[[int], nn.Module], words: str) -> Pair:
    source = partial(shifted_rows, name)
    return Pair(
        f"{name}-shifted", name, "shifted rows", source, partial(_mlp, norm), words, _ROWS, ("uci_classification",)
    )


def _texts(name: str, inside: str, outside: str) -> Pair:
    source = partial(texts, inside, outside)
    return Pair(name, inside, outside, source, transformer, "transformer", _WORDS, ("ag_news_test", "sst2"), 4)


PAIRS = (
    Pair(
        "fashion-mnist", "Fashion-MNIST", "MNIST", _grey("fashion_mnist", "mnist"), partial(_cnn, nn.BatchNorm2d),
        "CNN, BatchNorm", _IMAGES, _GREY, pictures=True,
    ),
    Pair(
        "mnist-fashion", "MNIST", "Fashion-MNIST", _grey("mnist", "fashion_mnist"), partial(_cnn, plain),
        "CNN", _IMAGES, _GREY, pictures=True,
    ),
    Pair(
        "cifar-svhn", "CIFAR-10", "SVHN", sources.colour_images, _resnet, "ResNet, BatchNorm", _IMAGES, _COLOUR, 5
    ),
    Pair("digits-turned", "digits", "turned digits", turned_digits, partial(_mlp, plain), "MLP", _ROWS),
    _texts("ag-sst2", "AG News", "SST-2"),
    _texts("sst2-ag", "SST-2", "AG News"),
    _table("vehicle", plain, "MLP"),
    _table("satellite", nn.BatchNorm1d, "MLP, BatchNorm"),
)  # fmt: skip
