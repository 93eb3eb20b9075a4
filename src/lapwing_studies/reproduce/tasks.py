"""The tasks of the battery: real data and common networks, trained to the end or stopped early.

The list was fixed before the first result was seen. Within each kind of data it alternates between networks with and
without normalisation, and between the two ways of stopping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.architectures import cnn, groups_of_four, mlp, plain
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.training import Loss, Recipe

Kind = Literal["classes", "two classes", "numbers"]


@dataclass(frozen=True)
class Task:
    """Data, a network, and its training. `files`: the archives of `--data` it needs."""

    name: str
    kind: Kind
    source: sources.Source
    network: Callable[[Parts], nn.Module]
    words: str
    recipe: Recipe
    files: tuple[str, ...] = ()

    @property
    def likelihood(self) -> str:
        return "regression" if self.kind == "numbers" else "classification"

    @property
    def loss(self) -> Loss:
        losses: dict[Kind, Loss] = {"classes": _classes, "two classes": _binary, "numbers": _numbers}
        return losses[self.kind]

    def trained_with(self, effort: Effort) -> Recipe:
        return self.recipe.at_most(effort.n_epochs)


def listed(folder: DataFolder) -> list[Task]:
    """The tasks whose data are available."""
    return [task for task in TASKS if all(map(folder.holds, task.files))]


def _classes(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y)


def _binary(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(f[:, 0], y.to(f))


def _numbers(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(f, y)


# --- parts of the tasks ------------------------------------------------------------------------------------

END = Recipe(n_epochs=200, learning_rate=3e-3)
EARLY = Recipe(n_epochs=200, learning_rate=3e-3, patience=10)
IMAGES_END = Recipe(n_epochs=30, learning_rate=2e-3)
IMAGES_EARLY = Recipe(n_epochs=60, learning_rate=2e-3, patience=5)


@dataclass(frozen=True)
class Norm:
    """A normalisation layer, or none, as a function of the number of features, and its description."""

    layer: Callable[[int], nn.Module]
    words: str


NONE, LAYER, GROUP = Norm(plain, ""), Norm(nn.LayerNorm, " LayerNorm"), Norm(groups_of_four, " GroupNorm")
BATCH, BATCH_2D = Norm(nn.BatchNorm1d, " BatchNorm"), Norm(nn.BatchNorm2d, " BatchNorm")


@dataclass(frozen=True)
class Data:
    source: sources.Source
    files: tuple[str, ...] = ()


def _sklearn(load: str) -> Data:
    return Data(partial(sources.classes_of_sklearn, load))


def _uci(name: str) -> Data:
    return Data(partial(sources.uci_classes, name), ("uci_classification",))


def _uci_numbers(name: str) -> Data:
    return Data(partial(sources.uci_numbers, name), ("uci_regression",))


def _grey(name: str, other: str) -> Data:
    return Data(partial(sources.grey_images, name, other), ("mnist", "fashion_mnist"))


DIABETES = Data(partial(sources.numbers_of_sklearn, "load_diabetes"))
CIFAR = Data(sources.colour_images, ("cifar10_train_a", "cifar10_test", "svhn_test_crops_10k"))


def _mlp(
    name: str, kind: Kind, data: Data, activation: Callable[[], nn.Module], norm: Norm, recipe: Recipe,
    hidden: tuple[int, ...] = (30, 30),
) -> Task:  # fmt: skip
    def network(parts: Parts) -> nn.Module:
        n_outputs = parts.n_classes if kind == "classes" else 1
        return mlp([parts.train.x.shape[1], *hidden, n_outputs], activation, norm.layer)

    words = f"MLP {'-'.join(map(str, hidden))} {activation.__name__}{norm.words}"
    return Task(name, kind, data.source, network, words, recipe, data.files)


def _cnn(name: str, data: Data, hidden: tuple[int, ...], norm: Norm, recipe: Recipe) -> Task:
    def network(parts: Parts) -> nn.Module:
        _, n_channels, side, _ = parts.train.x.shape
        return cnn(side, (n_channels, *hidden), parts.n_classes, norm.layer)

    words = f"CNN {'-'.join(map(str, hidden))} ReLU{norm.words}"
    return Task(name, "classes", data.source, network, words, recipe, data.files)


TASKS = (
    _mlp("wine", "classes", _sklearn("load_wine"), nn.Tanh, NONE, END),
    _mlp("breast-cancer", "two classes", _sklearn("load_breast_cancer"), nn.ReLU, LAYER, EARLY),
    _mlp("digits-mlp", "classes", _sklearn("load_digits"), nn.Tanh, NONE, END, hidden=(32,)),
    _cnn("digits-cnn", Data(sources.digits), (8, 16), BATCH_2D, IMAGES_EARLY),
    _mlp("diabetes", "numbers", DIABETES, nn.ReLU, NONE, EARLY),
    _mlp("diabetes-bn", "numbers", DIABETES, nn.ReLU, BATCH, END),
    _mlp("australian", "two classes", _uci("australian"), nn.Tanh, NONE, END),
    _mlp("ionosphere", "two classes", _uci("ionosphere"), nn.ReLU, BATCH, EARLY),
    _mlp("glass", "classes", _uci("glass"), nn.Tanh, NONE, EARLY),
    _mlp("vehicle", "classes", _uci("vehicle"), nn.ReLU, LAYER, END),
    _mlp("waveform", "classes", _uci("waveform"), nn.ReLU, NONE, EARLY),
    _mlp("concrete", "numbers", _uci_numbers("concrete"), nn.ReLU, NONE, END),
    _mlp("energy", "numbers", _uci_numbers("energy"), nn.ReLU, LAYER, EARLY),
    _mlp("yacht", "numbers", _uci_numbers("yacht"), nn.Tanh, NONE, END),
    _mlp("kin8nm", "numbers", _uci_numbers("kin8nm"), nn.ReLU, BATCH, EARLY),
    _cnn("fashion-mnist", _grey("fashion_mnist", "mnist"), (16, 32), NONE, IMAGES_EARLY),
    _cnn("mnist", _grey("mnist", "fashion_mnist"), (16, 32), BATCH_2D, IMAGES_END),
    _cnn("cifar-10", CIFAR, (16, 32, 32), GROUP, IMAGES_EARLY),
)
