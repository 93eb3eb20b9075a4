"""Bad inputs: a typed error that says what came, where, and what to do, and nothing has changed afterwards."""

# ruff: noqa: E501 (a table reads by rows)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

import lapwing as lw
from lapwing.api import words
from untouched import stir, untouched

N = 6
Made = Callable[[], nn.Module]


# --- models -------------------------------------------------------------------------------------------------


def network(n_outputs: int) -> nn.Module:
    """A network as training leaves it: in train mode, with running averages, gradients and a hook of the user's."""
    torch.manual_seed(n_outputs)
    model = nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, n_outputs)
    ).train()
    model[0].weight.grad = torch.ones(4, 2)
    model[2].register_forward_hook(lambda *_: None)
    return model


def one() -> nn.Module:
    return network(1)


def two() -> nn.Module:
    return network(2)


def three() -> nn.Module:
    return network(3)


class Computing(nn.Module):
    """A linear layer whose output goes through a function of the test's."""

    def __init__(self, function: Callable[[Tensor], Any], n_outputs: int = 3) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, n_outputs), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def computing(function: Callable[[Tensor], Any], n_outputs: int = 3) -> Made:
    return lambda: Computing(function, n_outputs)


def frozen() -> nn.Module:
    return three().requires_grad_(False)


def body_frozen() -> nn.Module:
    model = three()
    model[0].requires_grad_(False)
    return model


def with_nan_weight() -> nn.Module:
    model = three()
    with torch.no_grad():
        model[4].weight[1, 2] = float("nan")
    return model


def big() -> nn.Module:
    return nn.Linear(2, 2000)


def neighbourly() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))


class NoLayerCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)


class Routed(nn.Module):
    """Data of a small first input go one way, the others another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        small, out = x[:, 0] < 0.2, x.new_zeros(len(x), 3)
        for layer, some in ((self.left, small), (self.right, ~small)):
            out = out.index_put((some.nonzero()[:, 0],), layer(x[some])) if some.any() else out
        return out


class Unfinished(nn.Module):
    """As a LightningModule that calls its network in the training step only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)


class Tokens(nn.Module):
    """(B, T) → (B, T, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


def tokens() -> nn.Module:
    return Tokens()


def images(n_classes: int = 3) -> nn.Module:
    return nn.Conv2d(1, n_classes, 3, padding=1)


def of_lengths(model: nn.Module) -> Any:
    """A prediction of data with five positions and of data with three."""
    posterior = lw.fit(model, (TOKENS, TOKENS), "classification")
    return posterior.predict([(TOKENS, TOKENS), (TOKENS[:, :3], TOKENS[:, :3])])


def double(x: Tensor) -> Tensor:
    return 2 * x


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3)), {nn.Linear})


def quantised_in_the_middle() -> nn.Module:
    body = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 4)), {nn.Linear})
    return nn.Sequential(nn.Linear(2, 2), body, nn.Linear(4, 3))


class Integers(nn.Module):
    """As bitsandbytes keeps weights: integers that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x).T


def adapted() -> nn.Module:
    """As PEFT loads adapters: nothing is trainable."""
    model = nn.Module()
    model.lora_A, model.base = nn.Linear(2, 2), nn.Linear(2, 3)
    return model.requires_grad_(False)


def of(package: str, name: str, **members: Any) -> Any:
    """An object of another package's class, known by its name."""
    return type(name, (), {"__module__": package, **members})()


OTHER, BODY_FROZEN = nn.Bilinear(2, 2, 3), body_frozen()
WIDER = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Tanh(), nn.Linear(5, 3))


# --- data ---------------------------------------------------------------------------------------------------


def inputs(n: int = N) -> Tensor:
    return torch.linspace(-1, 1, 2 * n).reshape(n, 2)


def real(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape)


X, LABELS = inputs(), torch.arange(N) % 3
ZERO_ONE = torch.arange(N) % 2
COUNTS = torch.arange(N)
TWO_BATCHES = [(X, LABELS), (X, LABELS)]
TOKENS = torch.arange(20).reshape(4, 5) % 3
TABLE_OF_WORDS = pd.DataFrame({"age": range(N), "name": list("abcdef"), "hole": [1.0, 2.0, None, 4.0, 5.0, 6.0]})


def spoilt(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class SameIterator:
    """Looks re-iterable, but hands out one generator twice."""

    def __init__(self) -> None:
        self.batches = (batch for batch in TWO_BATCHES)

    def __iter__(self) -> Any:
        return self.batches


# --- calls --------------------------------------------------------------------------------------------------


def fit(data: Any = (X, LABELS), likelihood: Any = "classification", **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: lw.fit(model, data, likelihood, **options)


def fit_gaussian(data: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return fit(data, lw.Gaussian(noise_std=0.5), **options)


def classifier(model: nn.Module) -> lw.Posterior:
    return lw.fit(model, (X, LABELS), "classification")


def binary(model: nn.Module) -> lw.Posterior:
    return lw.fit(model, (X, ZERO_ONE), "binary")


def regressor(model: nn.Module, **options: Any) -> lw.Posterior:
    return lw.fit(model, (X, real(N, model[-1].out_features)), lw.Gaussian(noise_std=0.5), **options)


def interpolating(model: nn.Module, likelihood: Any = "regression") -> lw.Posterior:
    with torch.no_grad():
        y = model.eval()(X)
    model.train()
    return lw.fit(model, (X, y), likelihood)


# --- the table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One bad input: the call, the class of its error, and words the message must hold."""

    name: str
    model: Made
    call: Callable[[nn.Module], Any]
    error: type[Exception]
    words: tuple[str, ...]


VALUE, TYPE, SHAPE, STRUCTURE = lw.InputError, lw.InputTypeError, lw.ShapeError, lw.StructureError
NUMBERS, MODEL, STORAGE = lw.NumericalError, lw.ModelError, lw.StorageError

MODELS = [
    Row("text as model", three, lambda _: lw.fit("net", (X, LABELS), "classification"), TYPE, ("model", "nn.Module", "str")),
    Row("function as model", three, lambda _: lw.fit(double, (X, LABELS), "classification"), TYPE, ("nn.Module", "function", "Wrap")),
    Row("class as model", three, lambda _: lw.fit(nn.Linear, (X, LABELS), "classification"), TYPE, ("class Linear", "instance")),
    Row("path as model", three, lambda _: lw.fit("net.pt", (X, LABELS), "classification"), TYPE, ("str", "path", "load_state_dict(torch.load(path))")),
    Row("state_dict as model", three, lambda m: lw.fit(m.state_dict(), (X, LABELS), "classification"), TYPE, ("state_dict", "model.load_state_dict")),
    Row("several models", three, lambda m: lw.fit([m, m], (X, LABELS), "classification"), TYPE, ("list of 2 modules", "one of them")),
    Row("Trainer as model", three, lambda _: lw.fit(of("transformers.trainer", "Trainer"), (X, LABELS), "classification"), TYPE, ("Hugging Face Trainer", "trainer.model")),
    Row("skorch net as model", three, lambda _: lw.fit(of("skorch.net", "NeuralNet"), (X, LABELS), "classification"), TYPE, ("skorch", "net.module_")),
    Row("subclass of a skorch net", three, lambda _: lw.plan(type("Mine", (type(of("skorch.net", "NeuralNet")),), {})(), (X, LABELS), "classification"), TYPE, ("plan", "net.module_")),
    Row("estimator as model", three, lambda _: lw.fit(of("sklearn.base", "BaseEstimator"), (X, LABELS), "classification"), TYPE, ("scikit-learn", "PyTorch")),
    Row("Lightning trainer as model", three, lambda _: lw.load("net", of("lightning.pytorch.trainer.trainer", "Trainer")), TYPE, ("load", "LightningModule")),
    Row("frozen adapters", adapted, fit(), VALUE, ("Nothing to infer", "is_trainable=True", "PeftModel")),
    Row("quantised", quantised, fit(), VALUE, ("quantised", "'0' (torch.ao.nn.quantized.dynamic.Linear)", "floating point")),
    Row("quantised after the layer asked for", quantised_in_the_middle, fit(params=["0.*"]), VALUE, ("quantised", "'1.0'", 'params=["head"]')),
    Row("weights in integers", Integers, fit(), VALUE, ("quantised", "Integers", "integers")),
    Row("all frozen", frozen, fit(), VALUE, ("Nothing to infer", "6 parameter tensors", "requires_grad")),
    Row("no parameters", nn.ReLU, fit(), VALUE, ("Nothing to infer", "0 parameter tensors")),
    Row("NaN weight", with_nan_weight, fit(), VALUE, ("'4.weight'", "NaN")),
    Row("complex weights", lambda: nn.Linear(2, 3, dtype=torch.complex64), fit(), VALUE, ("'weight'", "complex64", "real")),
    Row("lazy module", lazy, fit(), VALUE, ("'0.weight'", "not initialised", "forward pass")),
    Row("a module without forward", Unfinished, fit(), MODEL, ("NotImplementedError", "Define forward(self, x)", "that the module holds")),
    Row("tuple outputs", computing(lambda f: (f, f)), fit(), TYPE, ("returned tuple of 2", "(B, C)", ".logits", "Wrap")),
    Row("no outputs", computing(lambda f: None), fit(), TYPE, ("returned NoneType", "Wrap")),
    Row("mapping outputs", computing(lambda f: {"scores": f}), fit(), TYPE, ("returned dict with the keys 'scores'", ".logits", "'logits'")),
    Row("logits that are no tensor", computing(lambda f: {"logits": [f], "loss": f}), fit(), TYPE, ("'logits', 'loss'", "Wrap")),
    Row("integer outputs", computing(lambda f: f.argmax(-1)), fit(), VALUE, ("int64", "floating-point", "logits")),
    Row("complex outputs", computing(lambda f: f * 1j), fit(), VALUE, ("complex64", "floating-point")),
    Row("NaN outputs", computing(lambda f: f / 0 - f / 0), fit(), VALUE, ("outputs", "NaN", "first batch")),
    Row("scalar output", computing(lambda f: f.sum()), fit(), SHAPE, ("shape ()", "batch as first axis")),
    Row("batch on the second axis", computing(lambda f: f.T, 4), fit(), SHAPE, ("(4, 3)", "3 inputs", "batch as first axis")),
    Row("outputs without entries", computing(lambda f: f[:, :0]), fit(), SHAPE, ("no outputs", "(3, 0)")),
    Row("data that go past a layer", Routed, fit(), MODEL, ("'left'", "(4, 2)", "6 data", "shuffle", "params=")),
    Row("rows that see each other", neighbourly, fit(), VALUE, ("other rows", "track_running_stats=False")),
    Row("outputs of changing length", computing(lambda f: f.unsqueeze(1).expand(-1, 2 if len(f) == 2 else 1, -1)), fit([(X, LABELS[:, None]), (X[:2].double(), LABELS[:2, None])]), SHAPE, ("batch 1", "(2, 2, 3)", "2 positions", "labels have 1")),
    Row("outputs of changing width", computing(lambda f: f[:, :2] if len(f) == 2 else f), fit([(X, LABELS), (X[:2].double(), LABELS[:2])]), SHAPE, ("batch 1", "(2, 2)", "one shape")),
    Row("longer outputs than labels", tokens, fit([(TOKENS, TOKENS), (TOKENS[:, :3], TOKENS[:, :2])]), SHAPE, ("batch 1", "3 positions", "labels have 2", "ignore_index")),
    Row("labels longer than the outputs at once", tokens, fit([(TOKENS[:, :2], TOKENS)]), SHAPE, ("batch 0", "(4, 2)", "(4, 5)")),
    Row("classes on axis 1", images, fit([(real(4, 1, 6, 5), LABELS[:4, None, None].expand(4, 6, 5))]), SHAPE, ("(4, 6, 5)", "(B, 3, 6, 5)", "lw.Categorical(class_axis=1)")),
    Row("classes last after all", tokens, fit([(TOKENS, TOKENS)], lw.Categorical(class_axis=1)), SHAPE, ("(4, 5)", "lw.Categorical(class_axis=-1)")),
    Row("one logit per pixel", lambda: images(1), fit([(real(4, 1, 6, 5), LABELS[:4, None, None].expand(4, 6, 5) % 2)]), SHAPE, ("lw.Bernoulli()", "y.unsqueeze(1)")),
    Row("infinite outputs later", computing(torch.exp), fit([(X, LABELS), (1e4 * X, LABELS)]), NUMBERS, ("batch 1", "infinite", "inputs")),
]  # fmt: skip

DATA = [
    Row("wrong number of features", three, fit((real(N, 5), LABELS)), MODEL, ("forward", "float32 (3, 5)", "mat1 and mat2")),
    Row("wrong number of features later", three, fit([(X, LABELS), (real(N, 5), LABELS)]), MODEL, ("batch 1", "float32 (6, 5)")),
    Row("integer inputs to a linear layer", three, fit((X.long(), LABELS)), MODEL, ("forward", "int64 (3, 2)")),
    Row("unknown argument name", three, fit([({"z": X}, LABELS)]), MODEL, ("forward", "z")),
    Row("NaN in x", three, fit((spoilt(X, (2, 1), float("nan")), LABELS)), VALUE, ("(2, 1)", "NaN", "data: X")),
    Row("infinite x in a later batch", three, fit([(X, LABELS), (spoilt(X, (3, 0), float("inf")), LABELS)]), VALUE, ("batch 1", "(3, 0)", "infinite")),
    Row("NaN in a named input", three, fit([({"input": spoilt(X, (0, 0), float("nan"))}, LABELS)]), VALUE, ("batch 0", "'input'", "NaN")),
    Row("empty loader", three, fit(DataLoader(TensorDataset(X, LABELS), batch_size=9, drop_last=True)), VALUE, ("no batch", "empty", "drop_last")),
    Row("empty data set", three, fit(Subset(TensorDataset(X, LABELS), [])), VALUE, ("no batch", "empty")),
    Row("empty stream", three, fit(Stream()), VALUE, ("no batch", "empty")),
    Row("empty arrays", three, fit((X[:0], LABELS[:0])), VALUE, ("data: X", "empty")),
    Row("empty list", three, fit([]), VALUE, ("no batch",)),
    Row("generator", three, fit(batch for batch in TWO_BATCHES), TYPE, ("one-shot", "generator", "DataLoader")),
    Row("one iterator handed out twice", three, lambda m: lw.fit(m, SameIterator(), "classification"), TYPE, ("one-shot", "SameIterator")),
    Row("inputs without targets", three, fit(X), TYPE, ("Tensor", "go together", "(X, Y)")),
    Row("batches without targets", three, fit(DataLoader(X, batch_size=3)), TYPE, ("batch 0", "Tensor", "DataLoader(TensorDataset(X, Y)")),
    Row("batches of inputs in tuples", three, fit(DataLoader(TensorDataset(X), batch_size=3)), TYPE, ("batch 0", "list of 1", "TensorDataset(X, Y)")),
    Row("held-out inputs without targets", three, lambda m: lw.tune(classifier(m), validation=X), TYPE, ("validation", "go together")),
    Row("lists of numbers", three, fit((X.tolist(), LABELS.tolist())), TYPE, ("data", "lists", "torch.tensor(X)")),
    Row("labels in a list", three, fit((X.tolist(), LABELS)), TYPE, ("data", "lists", "torch.tensor(Y)")),
    Row("lists of numbers to predict", three, lambda m: classifier(m).predict(X.tolist()), TYPE, ("lists", "torch.tensor(x)")),
    Row("no data", three, fit(None), TYPE, ("DataLoader", "NoneType")),
    Row("path as data", three, fit("train.csv"), TYPE, ("data", "str", "path", "Load")),
    Row("model as data", three, lambda m: lw.fit(m, m, "classification"), TYPE, ("data", "module Sequential", "first")),
    Row("Trainer as data", three, fit(of("transformers.trainer", "Trainer")), TYPE, ("data", "trainer.get_train_dataloader()")),
    Row("LightningDataModule as data", three, lambda m: lw.tune(classifier(m), of("lightning.pytorch.core.datamodule", "LightningDataModule")), TYPE, ("data", "datamodule.train_dataloader()")),
    Row("data frame as data", three, fit(of("pandas.core.frame", "DataFrame")), TYPE, ("DataFrame", "(df[features], df[target])")),
    Row("dictionary of splits as data", three, fit(of("datasets.dataset_dict", "DatasetDict")), TYPE, ("DatasetDict", 'splits["train"]')),
    Row("three in a batch", three, fit([(X, X, LABELS)]), TYPE, ("batch 0", "tuple of 3", "((x1, x2), y)")),
    Row("three arrays", three, fit((X, X, LABELS)), TYPE, ("3", "((X1, X2), Y)")),
    Row("a batch that is a tensor", three, fit([X, X, X]), TYPE, ("batch 0", "pair (x, y)", "Tensor")),
    Row("mapping without labels", three, fit([{"input": X}]), VALUE, ("batch 0", "'labels'", "input")),
    Row("whole mapping without labels", three, fit({"input": X}), VALUE, ("'labels'", "input")),
    Row("X longer than Y", three, fit((X, LABELS[:4])), SHAPE, ("6", "4", "pair up")),
    Row("x longer than y in a batch", three, fit([(X, LABELS), (X, LABELS[:4])]), SHAPE, ("batch 1", "6 inputs", "4 targets")),
    Row("string array", three, fit((np.array([["a", "b"]] * N), LABELS)), TYPE, ("data: X", "<U1", "encode")),
    Row("object array", three, fit((X, np.array([None] * N))), TYPE, ("data: Y", "object", "encode")),
    Row("x without a batch axis", three, fit([(torch.tensor(1.0), torch.tensor(1))]), TYPE, ("batch 0", "x[None]")),
    Row("sparse x", three, fit([(X.to_sparse(), LABELS)]), TYPE, ("batch 0", "sparse_coo", "to_dense")),
    Row("nested x", three, fit([(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), LABELS[:2])]), TYPE, ("batch 0", "nested", "to_padded_tensor")),
    Row("x that is text", three, fit([("some text", LABELS)]), TYPE, ("batch 0", "str")),
]  # fmt: skip

NAMED = [
    Row("a column that is not there", three, fit([{"image": X, "label": LABELS}], inputs="picture", targets="label"), VALUE, ("batch 0", "'picture'", "'image', 'label'", "inputs")),
    Row("targets that are not there", three, fit([{"image": X, "label": LABELS}], inputs="image", targets="class"), VALUE, ("batch 0", "'class'", "'image', 'label'", "targets")),
    Row("names that sound like targets", three, fit([{"pixels": X, "label": LABELS}]), VALUE, ("batch 0", "'labels'", 'inputs="pixels", targets="label"')),
    Row("text in a column without a name", three, fit((X, TABLE_OF_WORDS["name"].rename(None))), TYPE, ("data: Y", "the Series", "cat.codes")),
    Row("inputs named, targets not", three, fit([{"image": X, "label": LABELS}], inputs="image"), VALUE, ("'labels'", "'image', 'label'", 'targets="label"')),
    Row("names for a pair", three, fit((X, LABELS), inputs="image"), TYPE, ("mapping batches", "(X, Y)")),
    Row("a number as a name", three, fit([{"image": X, "label": LABELS}], inputs=3), TYPE, ("inputs", "column name", "3")),
    Row("a name twice", three, fit([{"image": X, "label": LABELS}], inputs=["image", "image"]), VALUE, ("inputs", "once", "'image'")),
    Row("one keyword for two columns", three, fit([{"a": X, "b": X, "label": LABELS}], inputs={"a": "x", "b": "x"}), VALUE, ("once", "'x'")),
    Row("predict without its column", three, lambda m: lw.fit(m, [{"image": X, "label": LABELS}], "classification", inputs="image", targets="label").predict({"x": X}), VALUE, ("'image'", "'x'")),
    Row("validation without its column", three, lambda m: lw.tune(lw.fit(m, [{"image": X, "label": LABELS}], "classification", inputs="image", targets="label"), validation=[{"x": X, "label": LABELS}]), VALUE, ("batch 0", "'image'", "'x', 'label'")),
    Row("a column of text", three, fit([{"input": X, "text": ["a"] * N, "labels": LABELS}]), TYPE, ("batch 0", "'text'", "str", "inputs=")),
    Row("a column too many", three, fit([{"input": X, "idx": LABELS, "labels": LABELS}]), MODEL, ("'idx'", "inputs=")),
    Row("text in a table", three, fit((TABLE_OF_WORDS, LABELS)), TYPE, ("data: X", "'name'", "not numeric", "get_dummies")),
    Row("text in a column of labels", three, fit((X, TABLE_OF_WORDS["name"])), TYPE, ("data: Y", "'name'", "cat.codes")),
    Row("a hole in a table", three, fit((TABLE_OF_WORDS[["hole", "age"]], LABELS)), VALUE, ("data: X", "(2, 0)", "NaN")),
    Row("a table without targets", three, fit(TABLE_OF_WORDS), TYPE, ("(X, Y)", "DataFrame")),
    Row("rows of text", three, fit([{"input": "a", "labels": 1}] * N), TYPE, ("batch 0", "'input'", "str")),
    Row("rows of different lengths", three, fit([{"input": [1.0, 2.0], "labels": 1}, {"input": [1.0], "labels": 0}]), SHAPE, ("batch 0", "'input'", "(1,)", "(2,)", "Pad", "collate_fn")),
    Row("rows of different columns", three, fit([{"input": [1.0, 2.0], "labels": 1}, {"x": [1.0], "labels": 0}]), TYPE, ("same columns",)),
    Row("one number a datum", lambda: nn.Linear(1, 3), fit((X[:, 0], LABELS)), MODEL, ("(3,)", "X[:, None]", "X.unsqueeze(1)")),
    Row("one datum to predict", three, lambda m: classifier(m).predict(X[0]), MODEL, ("(2,)", "x[None]")),
    Row("one datum to predict, linearly", lambda: nn.Linear(2, 3), lambda m: classifier(m).predict(X[0]), SHAPE, ("(3,)", "x[None]")),
    Row("three in a batch to predict", three, lambda m: classifier(m).predict([(X, X, LABELS)]), TYPE, ("batch 0", "tuple of 3", "((x1, x2), y)")),
    Row("an alarm for nothing", three, lambda m: lw.alarm(classifier(m), X)(DataLoader(TensorDataset(X[:0]))), VALUE, ("alarm", "no batch", "empty")),
    Row("nothing to predict", three, lambda m: classifier(m).predict(DataLoader(TensorDataset(X[:0]))), VALUE, ("no batch", "empty")),
    Row("rows drawn at random to predict", three, lambda m: classifier(m).predict(DataLoader(TensorDataset(X), sampler=RandomSampler(X, replacement=True))), VALUE, ("at random", "shuffle")),
    Row("no distribution where nothing is", tokens, lambda m: of_lengths(m).distribution, STRUCTURE, ("positions", "log_prob")),
    Row("labels where nothing is", tokens, lambda m: of_lengths(m).log_prob(TOKENS.repeat(2, 1)), VALUE, ("3 positions", "ignore_index=-100")),
]  # fmt: skip

TARGETS = [
    Row("label out of range", three, fit((X, spoilt(LABELS, (4,), 3))), VALUE, ("batch 0", "[0, 3)", "label (4,) is 3")),
    Row("label out of range later", three, fit([(X, LABELS), (X, spoilt(LABELS, (5,), 7))]), VALUE, ("batch 1", "label (5,) is 7")),
    Row("negative label", three, fit((X, spoilt(LABELS, (1,), -1))), VALUE, ("label (1,) is -1", "ignore_index")),
    Row("float labels", three, fit((X, LABELS.float())), TYPE, ("integer labels", "float32", "y.long()")),
    Row("one-hot labels", three, fit((X, nn.functional.one_hot(LABELS, 3))), SHAPE, ("one-hot", "argmax")),
    Row("labels of another width", three, fit((X, torch.zeros(N, 2, dtype=torch.long))), SHAPE, ("(6,)", "(6, 2)", "never broadcast")),
    Row("text labels", three, fit([(X, ["a"] * N)]), TYPE, ("batch 0", "tuple", "numbers")),
    Row("no labels", three, fit([(X, None)]), TYPE, ("batch 0", "NoneType")),
    Row("complex targets", one, fit_gaussian((X, real(N, 1) * 1j)), TYPE, ("real targets", "complex64")),
    Row("Gaussian (N, 2) for (N, 1)", one, fit_gaussian((X, real(N, 2))), SHAPE, ("(6, 1)", "(6, 2)", "never broadcast")),
    Row("Gaussian (N,) for (N, 2)", two, fit_gaussian((X, real(N))), SHAPE, ("(6, 2)", "(6,)", "never broadcast")),
    Row("Gaussian (N, 1) for (N, 2)", two, fit_gaussian((X, real(N, 1))), SHAPE, ("(6, 2)", "(6, 1)")),
    Row("Gaussian (1, N) for (N, 1)", one, fit_gaussian([(X, real(1, N))]), SHAPE, ("batch 0", "6 inputs", "1 targets")),
    Row("NaN target", one, fit_gaussian((X, spoilt(real(N, 1), (3, 0), float("nan")))), VALUE, ("batch 0", "(3, 0)", "nan", "impute")),
    Row("infinite target later", one, fit_gaussian([(X, real(N)), (X, spoilt(real(N), (2,), float("inf")))]), VALUE, ("batch 1", "inf")),
    Row("Bernoulli (N, 2) for (N, 1)", one, fit((X, torch.zeros(N, 2)), "binary"), SHAPE, ("(6, 1)", "(6, 2)")),
    Row("Bernoulli (N,) for (N, 2)", two, fit((X, ZERO_ONE), "multilabel"), SHAPE, ("(6, 2)", "(6,)", "Categorical()")),
    Row("Bernoulli label of 2", one, fit((X, LABELS), "binary"), VALUE, ("0 or 1", "target (2, 0) is 2")),
    Row("Bernoulli NaN label", one, fit((X, spoilt(real(N, 1) * 0, (1, 0), float("nan"))), "binary"), VALUE, ("0 or 1", "nan")),
    Row("one logit with a label of 2", one, fit((X, LABELS), "classification"), VALUE, ("0 or 1", "2")),
    Row("Poisson (N, 2) for (N, 1)", one, fit((X, torch.zeros(N, 2)), "count"), SHAPE, ("(6, 1)", "(6, 2)")),
    Row("Poisson (N,) for (N, 2)", two, fit((X, COUNTS), "count"), SHAPE, ("(6, 2)", "(6,)")),
    Row("negative count", one, fit((X, spoilt(COUNTS, (4,), -2)), "count"), VALUE, ("counts 0, 1, 2", "(4, 0)", "-2")),
    Row("fractional count", one, fit((X, real(N).abs()), "count"), VALUE, ("counts 0, 1, 2", "exposures")),
    Row("exposures of another shape", one, fit([(X, (COUNTS, real(N, 2)))], "count"), SHAPE, ("exposure", "(6, 2)")),
    Row("zero exposure", one, fit([(X, (COUNTS, COUNTS))], "count"), VALUE, ("positive exposures", "0.0")),
    Row("heteroscedastic with 3 outputs", three, fit((X, real(N)), lw.HeteroscedasticGaussian()), SHAPE, ("2 outputs", "gives 3")),
    Row("heteroscedastic (N, 2) for pairs", two, fit((X, real(N, 2)), lw.HeteroscedasticGaussian()), SHAPE, ("(6,)", "(6, 2)")),
    Row("custom without an entry per term", three, fit([(X, real(1, N))], lw.CustomLikelihood(lambda f, y: -f.square().sum())), SHAPE, ("batch 0", "6 inputs")),
    Row("custom log_prob that is no scalar", three, fit((X, real(N)), lw.CustomLikelihood(lambda f, y: -f.square())), SHAPE, ("scalar", "(3,)")),
    Row("custom log_prob that is not concave", three, fit((X, real(N)), lw.CustomLikelihood(lambda f, y: f.square().sum())), NUMBERS, ("eigenvalue", "psd='clip'")),
    Row("Categorical with one logit", one, fit((X, ZERO_ONE), lw.Categorical()), SHAPE, ("2 logits", "Bernoulli()")),
    Row("class_axis out of range", three, fit(likelihood=lw.Categorical(class_axis=2)), VALUE, ("class_axis=2", "2 axes", "(B, 3)")),
    Row("class weights of another length", three, fit(likelihood=lw.Categorical(weight=[1.0, 2.0])), SHAPE, ("one weight per class", "3", "2 came")),
    Row("too many noise levels", one, fit((X, real(N)), lw.Gaussian(noise_std=[0.1, 0.2])), SHAPE, ("noise_std", "2 came")),
]  # fmt: skip

CONSTRUCTORS = [
    Row("noise of zero", one, lambda _: lw.Gaussian(noise_std=0.0), VALUE, ("positive", "0.0", "None")),
    Row("negative noise", one, lambda _: lw.Gaussian(noise_std=[0.1, -0.2]), VALUE, ("positive", "-0.2")),
    Row("NaN noise", one, lambda _: lw.Gaussian(noise_std=float("nan")), VALUE, ("finite", "nan")),
    Row("noise as a matrix", one, lambda _: lw.Gaussian(noise_std=torch.ones(2, 2)), SHAPE, ("one per output", "(2, 2)")),
    Row("noise as text", one, lambda _: lw.Gaussian(noise_std="small"), TYPE, ("noise_std", "str")),
    Row("negative class weight", three, lambda _: lw.Categorical(weight=[1.0, -1.0, 1.0]), VALUE, ("zero or more", "-1.0")),
    Row("class weights as a matrix", three, lambda _: lw.Categorical(weight=torch.ones(3, 3)), SHAPE, ("one per class", "(3, 3)")),
    Row("class_axis 0", three, lambda _: lw.Categorical(class_axis=0), VALUE, ("batch axis", "Use 1")),
    Row("exposure of zero", one, lambda _: lw.Poisson(exposure=0.0), VALUE, ("exposure", "0.0")),
    Row("unknown variance link", two, lambda _: lw.HeteroscedasticGaussian(link="exponential"), VALUE, ("'softplus'", "exponential")),
    Row("log_prob that is no function", two, lambda _: lw.CustomLikelihood("normal"), VALUE, ("function", "str")),
    Row("unknown psd", two, lambda _: lw.CustomLikelihood(lambda f, y: f.sum(), psd="ignore"), VALUE, ("'clip'", "ignore")),
    Row("fisher without a sampler", two, lambda _: lw.CustomLikelihood(lambda f, y: f.sum(), psd="fisher"), VALUE, ("sample=",)),
]  # fmt: skip

WORDS = [
    Row("unknown likelihood", three, fit(likelihood="classificaton"), VALUE, ("likelihood", 'Did you mean "classification"', '"count"')),
    Row("likelihood of another kind", three, fit(likelihood=3), TYPE, ("likelihood", "int", "classification")),
    Row("likelihood class", three, fit(likelihood=lw.Categorical), TYPE, ("likelihood", "Categorical()")),
    Row("binary for three logits", three, fit(likelihood="binary"), VALUE, ("one logit", "3", '"multilabel"')),
    Row("unknown structure", three, fit(structure="fulll"), VALUE, ("structure", 'Did you mean "full"')),
    Row("structure class", three, fit(structure=lw.Full), TYPE, ("structure", "Full()")),
    Row("structure of another kind", three, fit(structure=None), TYPE, ("structure", "NoneType", '"diag"')),
    Row("unknown fisher", three, fit(fisher="empiric"), VALUE, ("fisher", 'Did you mean "empirical"')),
    Row("unknown params", three, fit(params="last_layr"), VALUE, ("params", 'Did you mean "last_layer"')),
    Row("params that match nothing", three, fit(params=["head.*"]), VALUE, ("'head.*'", "0.weight")),
    Row("misspelt parameter", three, fit(params=["4.weigth"]), VALUE, ("'4.weigth'", "4.weight")),
    Row("params that match only frozen ones", body_frozen, fit(params=["0.*"]), VALUE, ("'0.*'", "frozen", "0.weight")),
    Row("params of another kind", three, fit(params=3), TYPE, ("params", "glob", "int")),
    Row("params as tensors", three, lambda m: fit(params=list(m.parameters()))(m), TYPE, ("params", "names", "Parameter")),
    Row("no params", three, fit(params=[]), VALUE, ("params", "empty list")),
    Row("subnetwork of no size", three, lambda _: lw.Subnetwork(), VALUE, ("k=1000", "indices")),
    Row("subnetwork of negative size", three, lambda _: lw.Subnetwork(k=-1), VALUE, ("negative", "-1")),
    Row("subnetwork of broken size", three, lambda _: lw.Subnetwork(k=2.5), TYPE, ("whole number", "float")),
    Row("subnetwork of more weights than there are", three, fit(params=lw.Subnetwork(k=36)), VALUE, ("k=36", "35 are eligible", 'params="all"')),
    Row("subnetwork by an unknown score", three, fit(params=lw.Subnetwork("varience", 3)), VALUE, ("score", 'Did you mean "variance"')),
    Row("subnetwork by a score of another kind", three, lambda _: lw.Subnetwork(1000), VALUE, ("k=1000",)),
    Row("subnetwork with an unknown scaling", three, fit(params=lw.Subnetwork(k=3, prior_scaling="sqrt")), VALUE, ("prior_scaling", '"jacobian"')),
    Row("subnetwork by indices and k", three, lambda _: lw.Subnetwork(indices=[1], k=1), VALUE, ("indices", "leave `k` out")),
    Row("indices outside", three, fit(params=lw.Subnetwork(indices=[0, 35])), VALUE, ("position 35", "35 trainable weights")),
    Row("negative indices", three, fit(params=lw.Subnetwork(indices=[-1])), VALUE, ("position -1", "count from 0")),
    Row("indices named twice", three, fit(params=lw.Subnetwork(indices=[1, 1])), VALUE, ("twice",)),
    Row("indices as fractions", three, fit(params=lw.Subnetwork(indices=[0.5])), TYPE, ("whole numbers", "float32")),
    Row("indices of several axes", three, fit(params=lw.Subnetwork(indices=[[1], [2]])), VALUE, ("flat", "(2, 1)")),
    Row("indices that are words", three, fit(params=lw.Subnetwork(indices=["a"])), TYPE, ("indices", "list")),
    Row("mask of another size", three, fit(params=lw.Subnetwork(indices=torch.ones(4, dtype=torch.bool))), VALUE, ("mask has 4", "35 trainable")),
    Row("Kronecker factors of a subnetwork", three, fit(params=lw.Subnetwork(k=3), structure="kron"), STRUCTURE, ("whole tensors", '"full"')),
    Row("eigenbases of a subnetwork", three, fit(params=lw.Subnetwork(k=3), structure="ekfac"), STRUCTURE, ('"ekfac"', "whole tensors")),
    Row("weights only of biases", three, fit(params=lw.Subnetwork(k=3, among=["*.bias"], weights_only=True)), VALUE, ("weights_only", "two axes")),
    Row("subnetwork without a last layer", NoLayerCalled, fit(params=lw.Subnetwork("last_layer")), VALUE, ("last_layer", "params=[")),
    Row("subnetwork too large for the budget", three, fit(params=lw.Subnetwork(k=35), memory="2KB"), VALUE, ("memory",)),
    Row("SWAG of one snapshot", three, lambda _: lw.Swag(n_snapshots=1), VALUE, ("two snapshots", "n_snapshots=1")),
    Row("SWAG that stands still", three, lambda _: lw.Swag(learning_rate=0.0), VALUE, ("learning_rate", "positive")),
    Row("prior of another subnetwork", three, lambda m: fit(params=lw.Subnetwork(k=9), prior=lw.fit(m, (X, LABELS), "classification", params=lw.Subnetwork(indices=[0])).prior)(m), VALUE, ("prior does not cover",)),
    Row("no last layer", NoLayerCalled, fit(params="last_layer"), VALUE, ("last_layer", "params=[")),
    Row("memory in unknown units", three, fit(memory="4 elephants"), VALUE, ("memory", "4GB", "elephants")),
    Row("memory that is no number", three, fit(memory="1.2.3GB"), VALUE, ("memory", "4GB", "1.2.3GB")),
    Row("negative memory", three, fit(memory=-5), VALUE, ("memory", "positive", "-5")),
    Row("NaN memory", three, fit(memory=float("nan")), VALUE, ("memory", "nan")),
    Row("infinite memory", three, fit(memory=float("inf")), VALUE, ("memory", "inf")),
    Row("memory of another kind", three, fit(memory=["4GB"]), TYPE, ("memory", "list", "4GB")),
    Row("low rank without rank", three, lambda m: lw.LowRank(rank=0), VALUE, ("LowRank", "rank", "at least 1", "0")),
    Row("low rank of a fraction", three, lambda m: lw.LowRank(rank=0.5), TYPE, ("LowRank", "rank", "whole number", "0.5")),
    Row("low rank without tolerance", three, lambda m: lw.LowRank(rtol=0.0), VALUE, ("LowRank", "rtol", "between 0 and 1")),
    Row("low rank of drawn labels", three, fit(structure="lowrank", fisher="mc"), STRUCTURE, ("LowRank", "many passes", 'fisher="exact"')),
    Row("low rank beyond memory", three, fit(structure="lowrank", memory="2KB"), VALUE, ("lowrank", "35 parameters", "budget")),
    Row("sketch without rank", three, lambda m: lw.Nystrom(rank=0), VALUE, ("Nystrom", "rank", "at least 1", "0")),
    Row("sketch of a fraction", three, lambda m: lw.Nystrom(rank=0.5), TYPE, ("Nystrom", "rank", "whole number", "0.5")),
    Row("matrix-free with words", three, lambda m: lw.MatrixFree(preconditioner="kron"), TYPE, ("MatrixFree", "preconditioner", "lw.Kron()", "'kron'")),
    Row("matrix-free on itself", three, lambda m: lw.MatrixFree(preconditioner=lw.MatrixFree()), TYPE, ("MatrixFree", "can be inverted", "lw.LowRank(50)")),
    Row("matrix-free of drawn labels", three, fit(structure="matrixfree", fisher="mc"), STRUCTURE, ("MatrixFree", "many passes", 'fisher="exact"')),
    Row("matrix-free of single weights", three, fit(structure=lw.MatrixFree(preconditioner=lw.Kron()), params=lw.Subnetwork(k=3)), STRUCTURE, ("matrixfree", "whole tensors", '"lowrank" or "matrixfree"')),
    Row("solver without tolerance", three, lambda m: lw.CG(rtol=0.0), VALUE, ("CG", "rtol", "between 0 and 1")),
    Row("one probe", three, lambda m: lw.Rademacher(1), VALUE, ("Rademacher", "at least 2")),
    Row("memory too small", three, fit(memory="2KB", structure="full"), VALUE, ("full", "35 parameters", "budget", "diag")),
    Row("memory too small for anything", three, fit(memory="100B"), VALUE, ("diag", "budget", "last_layer")),
    Row("scale of zero", three, fit(likelihood_scale=0.0), VALUE, ("likelihood_scale", "positive", "0.0")),
    Row("negative scale", three, fit(likelihood_scale=-1), VALUE, ("likelihood_scale", "-1")),
    Row("NaN scale", three, fit(likelihood_scale=float("nan")), VALUE, ("likelihood_scale", "nan")),
    Row("two scales", three, fit(likelihood_scale=torch.ones(2)), VALUE, ("likelihood_scale", "one positive")),
    Row("scale as text", three, fit(likelihood_scale="big"), TYPE, ("likelihood_scale", "str")),
    Row("seed as generator", three, fit(generator=0), TYPE, ("generator", "torch.Generator", "int")),
]  # fmt: skip

PRIORS = [
    Row("precision of zero", three, fit(prior=0.0), VALUE, ("positive", "'all'", "1/variance")),
    Row("negative precision", three, fit(prior=-1), VALUE, ("positive", "-1")),
    Row("NaN precision", three, fit(prior=float("nan")), VALUE, ("finite", "nan")),
    Row("infinite precision", three, fit(prior=float("inf")), VALUE, ("finite", "inf")),
    Row("precision as text", three, fit(prior="weak"), TYPE, ("prior", "lw.prior(model", "str")),
    Row("precision as truth value", three, fit(prior=True), TYPE, ("prior", "bool")),
    Row("precisions without groups", three, fit(prior=[1.0, 2.0]), TYPE, ("prior", "lw.prior(model", "list")),
    Row("prior of a function", three, lambda m: lw.prior(m.forward), TYPE, ("nn.Module", "method")),
    Row("unknown groups", three, lambda m: lw.prior(m, groups="layers"), VALUE, ("groups", 'Did you mean "layer"')),
    Row("groups of another kind", three, lambda m: lw.prior(m, groups=2), TYPE, ("groups", "int")),
    Row("wrong number of precisions", three, lambda m: lw.prior(m, [1.0, 2.0], groups="layer"), SHAPE, ("3 groups", "2 precisions", "0, 1, 4")),
    Row("precisions as a matrix", three, lambda m: lw.prior(m, torch.ones(3, 3), groups="layer"), SHAPE, ("one per group", "(3, 3)")),
    Row("one bad precision", three, lambda m: lw.prior(m, [1.0, -3.0, 2.0], groups="layer"), VALUE, ("'1'", "-3")),
    Row("unknown group name", three, lambda m: lw.prior(m, {"0": 1.0, "1": 1.0, "head": 1.0, "4": 1.0}, groups="layer"), VALUE, ("'head'", "0, 1, 4")),
    Row("missing group name", three, lambda m: lw.prior(m, {"0": 1.0, "1": 1.0}, groups="layer"), VALUE, ("'4'", "missing")),
    Row("precision of a group as text", three, lambda m: lw.prior(m, {"0": "a", "1": 1.0, "4": 1.0}, groups="layer"), TYPE, ("precision", "numbers")),
    Row("precision as text in lw.prior", three, lambda m: lw.prior(m, "weak"), TYPE, ("precision", "number", "'weak'")),
    Row("prior of another model", three, fit(prior=lw.prior(OTHER)), VALUE, ("'0.weight'", "same model")),
    Row("prior of a wider model", three, fit(prior=lw.prior(WIDER)), SHAPE, ("'0.weight'", "(5, 2)", "(4, 2)")),
    Row("prior of a frozen body", three, lambda m: classifier(m).with_prior(lw.prior(BODY_FROZEN)), VALUE, ("'0.weight'", "unfrozen")),
    Row("mean of another length", three, lambda m: lw.prior(m, mean=torch.zeros(3)), SHAPE, ("mean", "35 values", "(3,)")),
    Row("mean with a tensor of another shape", three, lambda m: lw.prior(m, mean={k: p[:1] for k, p in m.named_parameters()}), SHAPE, ("mean", "'0.weight'", "(1, 2)", "(4, 2)")),
    Row("mean without a tensor", three, lambda m: lw.prior(m, mean={"0.weight": torch.zeros(4, 2)}), VALUE, ("mean", "'0.bias'")),
    Row("NaN mean", three, lambda m: lw.prior(m, mean=float("nan")), VALUE, ("mean", "finite")),
    Row("NaN in a named mean", three, lambda m: lw.prior(m, mean={k: p * float("nan") for k, p in m.named_parameters()}), VALUE, ("mean", "finite")),
    Row("mean as text", three, lambda m: lw.prior(m, mean="zero"), TYPE, ("mean", "number", "'zero'")),
    Row("prior of a frozen model", frozen, lw.prior, VALUE, ("Nothing to infer",)),
]  # fmt: skip

GPS = [
    Row("gp coupled in no known way", three, lambda m: lw.GP(coupling="none"), VALUE, ("GP: coupling", '"independent"', "'none'")),
    Row("gp of no points", three, lambda m: lw.GP(0), VALUE, ("n_points", "at least 1", "0")),
    Row("gp of half a point", three, lambda m: lw.GP(2.5), TYPE, ("n_points", "whole number", "float")),
    Row("inducing points without a number", three, lambda m: lw.GP(method="inducing"), VALUE, ("inducing", "needs n_points")),
    Row("inducing points of separate outputs", three, lambda m: lw.GP(5, method="inducing", coupling="diag"), VALUE, ("inducing", 'coupling="diag"')),
    Row("rank of a subset", three, lambda m: lw.GP(5, rank=3), VALUE, ("rank", "nystrom")),
    Row("newton mean of separate outputs", three, lambda m: lw.GP(coupling="diag", mean="newton"), VALUE, ("newton", 'coupling="full"')),
    Row("separate outputs of sampled labels", three, fit(structure=lw.GP(coupling="diag"), fisher="mc"), STRUCTURE, ("Sampled", 'fisher="exact"')),
    Row("informative points of a Gaussian", one, fit_gaussian((X, real(N, 1)), structure=lw.GP(2, points="informative")), VALUE, ("informative", "same for all", "random")),
    Row("weights of separate outputs", three, lambda m: fit(structure=lw.GP(coupling="independent"))(m).marginal_variance(), STRUCTURE, ("every output has its own", 'coupling="full"')),
    Row("more data for chosen points", three, lambda m: fit(structure=lw.GP(2))(m).updated((X, LABELS)), STRUCTURE, ("2 points", "lw.GP()")),
    Row("refining chosen points", three, lambda m: lw.refine(fit(structure=lw.GP(2))(m)), STRUCTURE, ("2 points", "newton")),
    Row("linear mode of points alone", three, lambda m: lw.tune(fit(structure=lw.GP(2, sod_scale="none"))(m)), VALUE, ("points alone", 'mode="network"')),
]  # fmt: skip

POSTERIORS = [
    Row("predict without a batch axis", three, lambda m: classifier(m).predict(torch.tensor(1.0)), TYPE, ("batch", "x[None]")),
    Row("predict at nothing", three, lambda m: classifier(m).predict(X[:0]), VALUE, ("empty",)),
    Row("predict at None", three, lambda m: classifier(m).predict(None), TYPE, ("NoneType",)),
    Row("predict at NaN", three, lambda m: classifier(m).predict(spoilt(X, (1, 1), float("nan"))), VALUE, ("x:", "(1, 1)", "NaN")),
    Row("predict at text", three, lambda m: classifier(m).predict(np.array([["a", "b"]])), TYPE, ("x:", "<U1", "encode")),
    Row("predict with other features", three, lambda m: classifier(m).predict(real(N, 3)), MODEL, ("forward", "(6, 3)")),
    Row("predict one datum as a vector", three, lambda m: classifier(m).predict(X[0]), MODEL, ("forward", "(2,)")),
    Row("outputs overflow", computing(torch.exp), lambda m: classifier(m).predict(1e4 * X), NUMBERS, ("outputs", "infinite", "scale of the inputs")),
    Row("unknown predictive", three, lambda m: classifier(m).predict(X, predictive="bnnn"), VALUE, ("predictive", 'Did you mean "bnn"')),
    Row("unknown link", three, lambda m: classifier(m).predict(X, link="probitt"), VALUE, ("link", 'Did you mean "probit"')),
    Row("link of another kind", three, lambda m: classifier(m).predict(X, link=3), TYPE, ("link", "int")),
    Row("quadrature for classes", three, lambda m: classifier(m).predict(X, link="quadrature"), STRUCTURE, ("one logit", "3 classes", '"mc"')),
    Row("bridge for one logit", one, lambda m: binary(m).predict(X, link="bridge"), STRUCTURE, ("two or more", '"quadrature"')),
    Row("no samples", three, lambda m: classifier(m).predict(X, n_samples=0), VALUE, ("n_samples", "at least 1", "got 0")),
    Row("half a sample", three, lambda m: classifier(m).predict(X, n_samples=1.5), TYPE, ("n_samples", "whole number", "float")),
    Row("seed in predict", three, lambda m: classifier(m).predict(X, generator=1), TYPE, ("generator", "torch.Generator", "int")),
    Row("interval above one", one, lambda m: regressor(m).predict(X).interval(1.5), VALUE, ("interval", "between 0 and 1", "1.5")),
    Row("interval in per cent", one, lambda m: regressor(m).predict(X).interval(95), VALUE, ("between 0 and 1", "95")),
    Row("score of other targets", one, lambda m: regressor(m).predict(X).log_prob(real(N, 2)), SHAPE, ("(6, 1)", "(6, 2)")),
    Row("score of too few targets", three, lambda m: classifier(m).predict(X).log_prob(LABELS[:2]), SHAPE, ("(6,)", "(2,)")),
    Row("score of bad labels", three, lambda m: classifier(m).predict(X).log_prob(LABELS + 1), VALUE, ("[0, 3)",)),
    Row("outputs at NaN", three, lambda m: classifier(m).outputs(X * float("nan")), VALUE, ("x:", "NaN")),
    Row("outputs with other features", three, lambda m: classifier(m).outputs(real(N, 3)).var, MODEL, ("forward", "(6, 3)")),
    Row("joint outputs at nothing", three, lambda m: classifier(m).joint_outputs(X[:0]), VALUE, ("empty",)),
    Row("function draws at text", three, lambda m: classifier(m).functions(2)("text"), TYPE, ("str",)),
    Row("no functions", three, lambda m: classifier(m).functions(0), VALUE, ("at least 1", "0")),
    Row("no weight samples", three, lambda m: classifier(m).sample(0), VALUE, ("at least 1", "0")),
    Row("weight samples as text", three, lambda m: classifier(m).sample("many"), TYPE, ("whole number", "str")),
    Row("covariance too large", big, lambda m: lw.fit(m, (X, real(N, 2000)), lw.Gaussian(0.5), structure="diag").covariance(), STRUCTURE, ("6000 × 6000", "5000", "marginal_variance")),
    Row("another prior of zero", three, lambda m: classifier(m).with_prior(0.0), VALUE, ("positive", "0")),
    Row("another prior as text", three, lambda m: classifier(m).with_prior("strong"), TYPE, ("prior", "str")),
    Row("likelihood of another family", three, lambda m: classifier(m).with_likelihood(lw.Gaussian(0.5)), STRUCTURE, ("Categorical", "Gaussian", "new fit")),
    Row("likelihood as a word", one, lambda m: regressor(m).with_likelihood("regression"), TYPE, ("with_likelihood", "str", "Gaussian(")),
    Row("likelihood with other options", three, lambda m: classifier(m).with_likelihood(lw.Categorical(weight=[1.0, 2.0, 3.0])), STRUCTURE, ("options", "new fit")),
    Row("noise split after the fit", two, lambda m: regressor(m).with_likelihood(lw.Gaussian([0.1, 0.2])), STRUCTURE, ("2 noise levels", "per_output=True")),
    Row("another scale of zero", one, lambda m: regressor(m).with_likelihood(lw.Gaussian(0.5), likelihood_scale=0), VALUE, ("likelihood_scale", "0")),
    Row("update with other labels", three, lambda m: classifier(m).updated([(X, LABELS), (X, LABELS + 1)]), VALUE, ("batch 1", "[0, 3)")),
    Row("update with nothing", three, lambda m: classifier(m).updated([]), VALUE, ("no batch",)),
    Row("update with a generator", three, lambda m: classifier(m).updated(b for b in TWO_BATCHES), TYPE, ("one-shot", "more_data")),
    Row("checkpoint in a number", three, fit(checkpoint=3), TYPE, ("checkpoint", "directory", "int")),
    Row("checkpoint in a file", three, fit(checkpoint=__file__), STORAGE, ("checkpoint", "test_errors.py", "directory")),
    Row("checkpoint every word", three, fit(checkpoint="/tmp", every="minute"), TYPE, ("every", "seconds", "str")),
    Row("checkpoint before now", three, fit(checkpoint="/tmp", every=-1), VALUE, ("every", "-1")),
    Row("remove everything", three, lambda m: classifier(m).downdated((X, LABELS)), VALUE, ("nothing would be left", "6 data")),
    Row("remove what was not there", three, lambda m: classifier(m).downdated((9 * X[:5], LABELS[:5])), NUMBERS, ("positive semi-definite", "smallest eigenvalue", "Fit again")),
    Row("remove a generator", three, lambda m: classifier(m).downdated(b for b in TWO_BATCHES), TYPE, ("one-shot", "data")),
    Row("merge of one posterior", three, lambda m: lw.merge(classifier(m)), TYPE, ("list of posteriors", "Posterior")),
    Row("merge of nothing", three, lambda m: lw.merge([]), VALUE, ("at least one",)),
    Row("merge of models", three, lambda m: lw.merge([m, m]), TYPE, ("number 0", "Sequential")),
    Row("merge of other priors", three, lambda m: lw.merge([classifier(m), classifier(m).with_prior(2.0)]), STRUCTURE, ("0 and 1", "prior is another")),
    Row("save a model", three, lambda m: lw.save(m, "net.lapwing"), TYPE, ("save", "Posterior", "Sequential")),
    Row("save to a number", three, lambda m: lw.save(classifier(m), 3), TYPE, ("save", "path", "int")),
    Row("save into nowhere", three, lambda m: lw.save(classifier(m), "/no/such/directory/net.lapwing"), STORAGE, ("could not be written", "is unchanged")),
    Row("load into a function", three, lambda m: lw.load("net.lapwing", m.forward), TYPE, ("load", "torch.nn.Module")),
    Row("load nothing", three, lambda m: lw.load("/no/such/net.lapwing", m), STORAGE, ("cannot be read", "No such file")),
    Row("load what is no posterior", three, lambda m: lw.load(__file__, m), STORAGE, ("test_errors.py", "header")),
    Row("update with other features", three, lambda m: classifier(m).updated((real(N, 3), LABELS)), MODEL, ("batch 0", "(6, 3)")),
    Row("posterior changed by hand", three, lambda m: setattr(classifier(m), "prior", 1.0), AttributeError, ("prior",)),
]  # fmt: skip

TUNING = [
    Row("tune a model", three, lw.tune, TYPE, ("Posterior", "lw.fit", "Sequential")),
    Row("unknown way to tune", three, lambda m: lw.tune(classifier(m), by="evidance"), VALUE, ("by", 'Did you mean "evidence"')),
    Row("curvature at a mode that is not looked for", three, lambda m: lw.tune(classifier(m), mode="network", curvature_at="linear_mode"), VALUE, ("curvature_at", 'mode="linear"')),
    Row("mean at a mode that is not looked for", three, lambda m: lw.tune(classifier(m), mode="network", predictive_mean="linear_mode"), VALUE, ("predictive_mean", 'mode="linear"')),
    Row("an average that visits no data", three, lambda m: lw.tune(classifier(m), mode="network", curvature_at="posterior"), VALUE, ("curvature_at", 'mode="linear"')),
    Row("an average of what is constant", three, lambda m: lw.tune(regressor(m), curvature_at="posterior"), STRUCTURE, ("Gaussian", 'curvature_at="network"')),
    Row("unknown point of the curvature", three, lambda m: lw.tune(classifier(m), curvature_at="mode"), VALUE, ("curvature_at", '"linear_mode"')),
    Row("other data to tune on", three, lambda m: lw.tune(classifier(m), (X[:3], LABELS[:3]), groups="one"), VALUE, ("3 data", "validation=")),
    Row("samples of drawn labels", three, lambda m: lw.tune(fit(fisher="mc")(m), by="em"), STRUCTURE, ('by="em"', "Sampled", 'fisher="exact"')),
    Row("samples at another curvature", three, lambda m: lw.tune(classifier(m), by="em", curvature_at="linear_mode"), VALUE, ('by="em"', 'curvature_at="network"')),
    Row("samples without data", three, lambda m: lw.tune(classifier(m).updated((X, LABELS)), by="em"), VALUE, ('by="em"', "training data")),
    Row("samples of other data", three, lambda m: lw.tune(classifier(m), (X[:3], LABELS[:3]), by="em", groups="one"), VALUE, ("3 data", "validation=")),
    Row("one sample", three, lambda m: lw.EM(n_samples=1), VALUE, ("n_samples", "at least 2", "1")),
    Row("samples and a half", three, lambda m: lw.EM(n_samples=2.5), TYPE, ("n_samples", "whole number", "2.5")),
    Row("samples by a word", three, lambda m: lw.EM(solver="cg"), TYPE, ("solver", "lw.CG", "lw.SGD", "'cg'")),
    Row("g-prior on Kronecker blocks", three, lambda m: lw.tune(fit(structure="kron")(m), by=lw.EM(g_prior=True)), STRUCTURE, ("g_prior", "Kronecker", '"matrixfree"')),
    Row("stochastic steps of no length", three, lambda m: lw.SGD(lr=0.0), VALUE, ("SGD", "lr", "0.0")),
    Row("samples that were never drawn", three, lambda m: lw.from_samples(classifier(m)), STRUCTURE, ("no samples", 'by="em"')),
    Row("samples of a model", three, lw.from_samples, TYPE, ("from_samples", "Posterior", "Sequential")),
    Row("unknown mode", three, lambda m: lw.tune(classifier(m), mode="lineer"), VALUE, ("mode", 'Did you mean "linear"')),
    Row("validation without data", three, lambda m: lw.tune(classifier(m), by="validation"), VALUE, ("held-out", "validation=(X, Y)")),
    Row("validation with other labels", three, lambda m: lw.tune(classifier(m), by="validation", validation=[(X, LABELS), (X, LABELS + 1)]), VALUE, ("validation", "batch 1", "[0, 3)")),
    Row("validation with other features", three, lambda m: lw.tune(classifier(m), by="validation", validation=(real(N, 3), LABELS)), MODEL, ("validation", "batch 0", "(6, 3)")),
    Row("validation of another length", three, lambda m: lw.tune(classifier(m), by="validation", validation=(X, LABELS[:2])), SHAPE, ("validation", "6", "2")),
    Row("empty validation", three, lambda m: lw.tune(classifier(m), by="validation", validation=[]), VALUE, ("no batch",)),
    Row("unknown groups to tune", three, lambda m: lw.tune(classifier(m), groups="tensors"), VALUE, ("groups", 'Did you mean "tensor"')),
    Row("noise of an interpolating network", one, interpolating, NUMBERS, ("estimate", "every training target", "noise_std=")),
]  # fmt: skip

REFINEMENT = [
    Row("refine a model", three, lw.refine, TYPE, ("Posterior", "lw.fit", "Sequential")),
    Row("unknown way to refine", three, lambda m: lw.refine(classifier(m), by="laplase"), VALUE, ("by", 'Did you mean "laplace"')),
    Row("unknown preset", three, lambda m: lw.refine(classifier(m), preset="immer2020"), VALUE, ("preset", "immer2021")),
    Row("no steps", three, lambda m: lw.refine(classifier(m), by="vi", max_steps=0), VALUE, ("max_steps", "at least 1 step")),
    Row("half a step", three, lambda m: lw.refine(classifier(m), by="vi", max_steps=0.5), TYPE, ("max_steps", "whole number of steps")),
    Row("steps to a mode", three, lambda m: lw.refine(classifier(m), max_steps=5), VALUE, ("max_steps", 'by="vi_diag"')),
    Row("refine without data", three, lambda m: lw.refine(classifier(m).updated((X, LABELS))), VALUE, ("training data", "lw.refine(posterior, data)")),
    Row("refine with other data", three, lambda m: lw.refine(classifier(m), (X[:3], LABELS[:3])), VALUE, ("3 data", "fitted on 6")),
    Row("refine with other labels", three, lambda m: lw.refine(classifier(m), [(X, LABELS), (X, LABELS + 1)]), VALUE, ("batch 1", "[0, 3)")),
    Row("refine in no memory", three, lambda m: lw.refine(classifier(m), memory=0), VALUE, ("memory", "positive")),
    Row("seed in refine", three, lambda m: lw.refine(classifier(m), generator=1), TYPE, ("generator", "torch.Generator", "int")),
    Row("sampled networks of a refined posterior", three, lambda m: lw.refine(classifier(m)).predict(X, predictive="bnn"), STRUCTURE, ("not defined", "refined", '"glm"')),
    Row("another prior after refining", three, lambda m: lw.refine(classifier(m)).with_prior(2.0), STRUCTURE, ("with_prior", "refined", "refine last")),
    Row("another likelihood after refining", one, lambda m: lw.refine(regressor(m)).with_likelihood(lw.Gaussian(0.1)), STRUCTURE, ("with_likelihood", "refine last")),
    Row("more data after refining", three, lambda m: lw.refine(classifier(m)).updated((X, LABELS)), STRUCTURE, ("updated", "refine last")),
    Row("tuning after refining", three, lambda m: lw.tune(lw.refine(classifier(m))), STRUCTURE, ("tune", "refine last")),
    Row("variational with a curvature that is an expectation", two, lambda m: lw.refine(lw.fit(m, (X, real(N, 1)), lw.HeteroscedasticGaussian()), by="vi"), STRUCTURE, ("HeteroscedasticGaussian", "Λ", 'by="laplace"')),
    Row("variational in too little memory", three, lambda m: lw.refine(classifier(m), by="vi_diag", memory="1KB"), STRUCTURE, ("6 × 3 × 35", "0.977 KiB", 'by="laplace"', "memory=")),
    Row("variational twice", three, lambda m: lw.refine(lw.refine(classifier(m), by="vi_diag")), STRUCTURE, ("variational one already", "lw.fit")),
    Row("Laplace evidence of a variational posterior", three, lambda m: lw.refine(classifier(m), by="vi").log_evidence(), STRUCTURE, ("no mode", "refinement.elbo")),
    Row("exact Hessian of a refined posterior", three, lambda m: lw.exact_hessian(lw.refine(classifier(m)), (X, LABELS)), STRUCTURE, ("exact_hessian", "refine last")),
]  # fmt: skip

TABLE = MODELS + DATA + NAMED + TARGETS + CONSTRUCTORS + WORDS + PRIORS + GPS + POSTERIORS + TUNING + REFINEMENT


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input_is_refused_in_words_and_changes_nothing(row: Row) -> None:
    model = row.model()
    stir()
    with untouched(model), pytest.raises(row.error) as caught:
        row.call(model)
    message = str(caught.value)
    assert type(caught.value) is row.error or row.error is AttributeError
    assert [word for word in row.words if word not in message] == [], message


OTHER_NAMES = [
    ("structure", "kfac", "kron"), ("structure", "K-FAC", "kron"), ("structure", "kronecker", "kron"), ("structure", "diagonal", "diag"),
    ("structure", "low_rank", "lowrank"), ("structure", "low-rank", "lowrank"), ("structure", "matrix_free", "matrixfree"), ("structure", "block_diagonal", "block"),
    ("structure", "dense", "full"), ("structure", "Full", "full"), ("structure", "gaussian process", "gp"), ("fisher", "ggn", "exact"), ("fisher", "sampled", "mc"),
    ("likelihood", "multiclass", "classification"), ("likelihood", "classifier", "classification"), ("likelihood", "categorical", "classification"),
    ("likelihood", "multi-label", "multilabel"), ("likelihood", "poisson", "count"), ("likelihood", "gaussian", "regression"),
    ("params", "last-layer", "last_layer"), ("params", "ALL", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "other", "word"), OTHER_NAMES, ids=lambda word: word)
def test_other_names_of_the_same_thing_are_accepted(argument: str, other: str, word: str) -> None:
    assert words.canonical(argument, other) == word
    targets = {"regression": real(N, 3), "count": COUNTS[:, None].repeat(1, 3), "multilabel": torch.eye(3)[LABELS]}
    options: dict[str, Any] = {"likelihood": "classification"}
    data = (X, targets.get(word, LABELS))
    a, b = (
        lw.fit(three(), data, **{**options, argument: said, "generator": torch.Generator()}) for said in (other, word)
    )
    assert (type(a.structure), type(a.fisher), type(a.likelihood)) == (
        type(b.structure),
        type(b.fisher),
        type(b.likelihood),
    )
    assert a.layout == b.layout and torch.equal(a.predict(X).log_prob(data[1]), b.predict(X).log_prob(data[1]))


def test_a_binary_synonym_is_binary() -> None:
    assert isinstance(lw.fit(one(), (X, ZERO_ONE), "bernoulli").likelihood, lw.Bernoulli)


def test_layers_behind_a_quantised_one_can_be_inferred() -> None:
    model = quantised_in_the_middle()
    assert lw.fit(model, (X, LABELS), "classification", params="last_layer").layout.p == 15
    assert lw.fit(model.requires_grad_(True), (X, LABELS), "classification", params=["2.*"]).layout.p == 15


def test_a_lightning_module_is_a_module() -> None:
    kind = type("LightningModule", (Computing,), {"__module__": "lightning.pytorch.core.module"})
    assert classifier(kind(lambda f: f)).layout.p == 9


def test_the_table_is_long_enough_and_names_each_row_once() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE) >= 50


@pytest.mark.parametrize("error", sorted({row.error for row in TABLE} - {AttributeError}, key=str))
def test_every_error_is_ours_and_pythons(error: type[Exception]) -> None:
    assert issubclass(error, lw.LapwingError)
    assert issubclass(error, ValueError | TypeError | RuntimeError)


def test_an_error_in_the_models_own_code_is_chained() -> None:
    def broken(f: Tensor) -> Tensor:
        raise KeyError("missing thing")

    with pytest.raises(lw.ModelError, match=r"KeyError.*missing thing") as caught:
        lw.fit(Computing(broken), (X, LABELS), "classification")
    assert isinstance(caught.value.__cause__, KeyError)


def test_interrupts_pass_unchanged() -> None:
    def interrupted(f: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lw.fit(Computing(interrupted), (X, LABELS), "classification")


def test_an_unfitted_attribute_lists_what_there_is() -> None:
    prediction = regressor(one()).predict(X)
    with pytest.raises(AttributeError, match=r"no 'probs'.*interval.*mean"):
        _ = prediction.probs


def test_outputs_with_logits_are_read() -> None:
    model = Computing(lambda f: SimpleNamespace(logits=f, loss=None))
    assert classifier(model).predict(X).probs.shape == (N, 3)
