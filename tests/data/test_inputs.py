"""What people hand over as data: named columns, loaders to predict, tables, rows, sequences of any length."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lapwing as lw
from oracle import assert_close

N, C = 23, 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp(n_inputs: int = 2, n_outputs: int = C) -> nn.Module:
    return nn.Sequential(nn.Linear(n_inputs, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, C).double(), nn.Linear(4, C).double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) + torch.tanh(self.right(b))


def same(a: lw.Posterior, b: lw.Posterior) -> None:
    assert_close(a.marginal_variance(), b.marginal_variance())


# --- named columns ------------------------------------------------------------------------------------------


def columns(n: int = N) -> dict[str, Tensor]:
    return {"image": real(n, 2), "extra": real(n, 4), "label": torch.randint(C, (n,)), "idx": torch.arange(n)}


def batches_of(data: dict[str, Any], step: int = 7) -> list[dict[str, Any]]:
    return [{key: value[i : i + step] for key, value in data.items()} for i in range(0, N, step)]


NAMES = [
    (mlp, "image", ("image",), {}),
    (mlp, {"image": "input"}, ("image",), {}),
    (TwoInputs, ["image", "extra"], ("image", "extra"), {}),
    (TwoInputs, {"extra": "b", "image": "a"}, ("image", "extra"), {}),
]


@pytest.mark.parametrize(("make", "inputs", "given", "_"), NAMES, ids=["one", "keyword", "list", "keywords"])
def test_named_columns_are_the_same_data(make: Callable[[], nn.Module], inputs: Any, given: tuple[str, ...], _: Any):
    model, data = make(), columns()
    x = tuple(data[name] for name in given)
    plain = lw.fit(model, (x, data["label"]), "classification", structure="full")
    named = lw.fit(model, batches_of(data), "classification", structure="full", inputs=inputs, targets="label")
    same(named, plain)
    assert_close(named.predict(data).probs, plain.predict(x).probs)
    assert_close(named.predict(batches_of(data)).probs, plain.predict(x).probs)


def test_the_posterior_remembers_the_names(tmp_path: Path):
    model, data = mlp(), columns()
    batches, pair = batches_of(data), (data["image"], data["label"])
    names = {"inputs": "image", "targets": "label"}
    named = lw.fit(model, batches, "classification", structure="full", **names)
    plain = lw.fit(model, pair, "classification", structure="full")
    lw.save(named, tmp_path / "net.lapwing")
    loaded = lw.load(tmp_path / "net.lapwing", model)
    assert loaded.columns == named.columns
    for posterior in (named, loaded):
        same(lw.tune(posterior, batches, validation=batches), lw.tune(plain, pair, validation=pair))
        same(lw.refine(posterior, batches), lw.refine(plain, pair))
        same(posterior.updated(batches), plain.updated(pair))
        assert_close(lw.conformal(posterior, batches).scores, lw.conformal(plain, pair).scores)
        assert_close(lw.alarm(posterior, batches).features, lw.alarm(plain, pair).features)
        assert_close(lw.alarm(posterior, {"image": pair[0]}).features, lw.alarm(plain, pair[0]).features)
        assert posterior.diagnose()
    assert str(lw.plan(model, batches, "classification", **names)) == str(
        lw.plan(model, [pair_of(batch) for batch in batches], "classification")
    )


def pair_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["image"], batch["label"]


def test_a_file_without_names_still_loads(tmp_path: Path):
    model, data = mlp(), columns()
    plain = lw.fit(model, pair_of(data), "classification", structure="full")
    lw.save(plain, tmp_path / "net.lapwing")
    assert lw.load(tmp_path / "net.lapwing", model).columns is None


# --- predicting a loader ------------------------------------------------------------------------------------


class Dropping(Dataset):
    """Rows without targets, as mappings."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.x[i]}


def loaders(x: Tensor, y: Tensor) -> dict[str, Any]:
    pairs = TensorDataset(x, y)
    cut = [(x[i : i + 7], y[i : i + 7]) for i in range(0, len(x), 7)]
    return {
        "pairs": DataLoader(pairs, batch_size=7),
        "shuffled": DataLoader(pairs, batch_size=7, shuffle=True),
        "inputs alone": DataLoader(TensorDataset(x), batch_size=7),
        "data set": pairs,
        "data set of mappings": Dropping(x),
        "list of pairs": cut,
        "list of mappings": [{"input": a, "labels": b} for a, b in cut],
        "generator": (a for a, _ in cut),
        "rows": list(zip(x, y.tolist(), strict=True)),
    }


@pytest.mark.parametrize("name", loaders(real(2, 2), torch.zeros(2, dtype=torch.long)))
def test_a_loader_is_predicted_as_one_tensor(name: str):
    x, y = real(N, 2), torch.randint(C, (N,))
    posterior = lw.fit(mlp(), (x, y), "classification")
    found, whole = posterior.predict(loaders(x, y)[name]), posterior.predict(x)
    for quantity in ("probs", "entropy", "epistemic", "label"):
        torch.testing.assert_close(getattr(found, quantity), getattr(whole, quantity), **EXACT)
    torch.testing.assert_close(found.log_prob(y), whole.log_prob(y), **EXACT)


WAYS = [{}, {"link": "mc"}, {"predictive": "bnn"}, {"link": "probit"}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_draws_are_those_of_one_tensor(options: dict[str, str]):
    x, y = real(N, 2), torch.randint(C, (N,))
    posterior = lw.fit(mlp(), (x, y), "classification")
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    found = posterior.predict(loader, generator=generators[0], n_samples=50, **options)
    whole = posterior.predict(x, generator=generators[1], n_samples=50, **options)
    torch.testing.assert_close(found.probs, whole.probs, **EXACT)


LIKELIHOODS = [
    ("regression", real),
    ("count", lambda *s: torch.randint(5, s)),
    ("multilabel", lambda *s: torch.randint(2, s)),
]


@pytest.mark.parametrize(("likelihood", "targets"), LIKELIHOODS, ids=[name for name, _ in LIKELIHOODS])
@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_other_likelihoods_too(likelihood: str, targets: Callable[..., Tensor], predictive: str):
    x, y = real(N, 2), targets(N, C)
    posterior = lw.fit(mlp(), (x, y), likelihood)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    found, whole = (posterior.predict(data, predictive=predictive, n_samples=40) for data in (loader, x))
    torch.testing.assert_close(found.log_prob(y), whole.log_prob(y), **EXACT)
    torch.testing.assert_close(found.epistemic, whole.epistemic, **EXACT)


def test_many_outputs_average_the_same_functions():
    x, y = real(N, 2), torch.randint(70, (N,))
    posterior = lw.fit(mlp(2, 70), (x, y), "classification")
    found = posterior.predict(DataLoader(TensorDataset(x, y), batch_size=7))
    torch.testing.assert_close(found.probs, posterior.predict(x).probs, **EXACT)


def test_predicting_a_loader_leaves_the_random_state_alone():
    x, y = real(N, 2), torch.randint(C, (N,))
    posterior = lw.fit(mlp(), (x, y), "classification")
    before = torch.get_rng_state()
    posterior.predict(DataLoader(TensorDataset(x, y), shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


LONG = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
import lapwing as lw

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
posterior = lw.fit(model, (torch.randn(50, 4), torch.arange(50) % 3), "classification", prior=1.0)
loader = DataLoader(torch.randn(60_000, 4), batch_size=1000)
posterior.predict(torch.randn(3_000, 4))
before = resident()
p = posterior.predict(loader)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_loader_takes_no_more_memory_than_its_predictions():
    """60,000 rows with a thousand draws each: 1.4 GB go by, between results that are kept, of less than 10 MB."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lw.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", LONG], env=env, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 500


def test_conformal_predicts_loaders():
    x, y = real(N, 2), torch.randint(C, (N,))
    conformal = lw.conformal(lw.fit(mlp(), (x, y), "classification"), (x, y))
    assert torch.equal(conformal.predict([(x[:9], y[:9]), (x[9:], y[9:])]).labels, conformal.predict(x).labels)


# --- tables -------------------------------------------------------------------------------------------------


def table() -> pd.DataFrame:
    frame = pd.DataFrame(real(N, 2).numpy(), columns=["age", "dose"])
    return frame.assign(age=(10 * frame["age"]).astype("int32"), smoker=frame["dose"] > 0)


def test_tables_are_tensors():
    frame = table()
    x = torch.tensor(frame.to_numpy(dtype=np.float64))
    labels = pd.Series(torch.randint(C, (N,)).numpy(), name="kind")
    y = torch.tensor(labels.to_numpy())
    model = mlp(3)
    plain = lw.fit(model, (x, y), "classification", structure="full")
    for data in [
        (frame, labels),
        (frame.astype("Float64"), labels.astype("Int64")),
        [(frame, labels)],
        [frame, labels],
    ]:
        same(lw.fit(model, data, "classification", structure="full"), plain)
    assert_close(plain.predict(frame).probs, plain.predict(x).probs)
    assert_close(plain.predict([frame[:9], frame[9:]][1]).probs, plain.predict(x[9:]).probs)


@pytest.mark.filterwarnings("error")
def test_predictions_score_columns_of_tables():
    frame, y = table(), real(N, 1)
    column = pd.DataFrame({"strength": y[:, 0].numpy()})["strength"]
    posterior = lw.fit(mlp(3, 1), (frame, column), lw.Gaussian(noise_std=0.5), structure="full")
    p = posterior.predict(frame)
    assert_close(p.log_prob(column), p.log_prob(y))


def test_targets_in_tables():
    frame, y = table(), real(N, 2)
    model = mlp(3, 2).float()
    x = torch.tensor(frame.to_numpy(dtype=np.float64))
    found = lw.fit(model, (frame, pd.DataFrame(y.numpy(), columns=["a", "b"])), "regression", structure="full")
    assert_close(found.marginal_variance(), lw.fit(model, (x, y), "regression", structure="full").marginal_variance())


# --- rows ---------------------------------------------------------------------------------------------------


class Table:
    """What `datasets.Dataset` does: rows are mappings of lists and numbers, by index and in turn."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {key: column[i] for key, column in self.values.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))


class Streamed(Table):
    """What `datasets.IterableDataset` does."""

    __module__ = "datasets.iterable_dataset"
    __getitem__ = None  # type: ignore[assignment]
    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.values, row, strict=True)) for row in zip(*self.values.values(), strict=True))


class Indexed:
    """A data set of nobody's making: rows by number, no iteration."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        if i >= len(self.rows):
            raise IndexError(i)
        return self.rows[i]


class Listed(Dataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def row_data(x: Tensor, y: Tensor) -> dict[str, tuple[Any, dict[str, Any]]]:
    names = {"inputs": "x", "targets": "y"}
    lists, labels = x.tolist(), y.tolist()
    pairs = list(zip(x, y, strict=True))
    mappings = [{"x": row, "y": label, "text": "word"} for row, label in zip(lists, labels, strict=True)]
    return {
        "datasets.Dataset": (Table(x=lists, y=labels, text=["word"] * len(x)), names),
        "datasets.IterableDataset": (Streamed(x=lists, y=labels, text=["word"] * len(x)), names),
        "list of pairs": (pairs, {}),
        "list of pairs of ints": (list(zip(x, labels, strict=True)), {}),
        "list of mappings": (mappings, names),
        "indexed rows": (Indexed(pairs), {}),
        "indexed mappings": (Indexed(mappings), names),
        "torch data set of lists": (Listed(mappings), names),
        "torch data set of pairs": (Listed([[row.numpy(), label] for row, label in zip(x, labels, strict=True)]), {}),
    }


@pytest.mark.parametrize("name", row_data(real(2, 2), torch.zeros(2, dtype=torch.long)))
def test_rows_are_put_into_batches(name: str):
    x, y = real(300, 2), torch.randint(C, (300,))
    model = mlp()
    data, names = row_data(x, y)[name]
    plain = lw.fit(model, (x, y), "classification", structure="full")
    found = lw.fit(model, data, "classification", structure="full", **names)
    assert found.n_data == 300
    same(found, plain)
    assert_close(found.predict(data).probs, plain.predict(x).probs)
    same(lw.tune(found), lw.tune(plain))


class Pretty(nn.Module):
    """What a model of transformers returns."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(2, C).double(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x))


WRAPPED = [lambda f: {"logits": f}, lambda f: {"loss": None, "logits": f, "hidden": (f,)}, lambda f: (f,)]


@pytest.mark.parametrize("wrap", WRAPPED, ids=["mapping", "mapping with more", "tuple of one"])
def test_logits_are_found_in_what_a_model_returns(wrap: Callable[[Tensor], Any]):
    x, y = real(N, 2), torch.randint(C, (N,))
    torch.manual_seed(3)
    model = Pretty(wrap)
    torch.manual_seed(3)
    plain = Pretty(lambda f: f)
    same(lw.fit(model, (x, y), "classification"), lw.fit(plain, (x, y), "classification"))


def test_the_advice_for_segmentation_works():
    model = nn.Conv2d(1, 3, 3, padding=1).double()
    batches = [(real(2, 1, 4, 5), torch.randint(3, (2, 4, 5))) for _ in range(3)]
    with pytest.raises(lw.ShapeError, match=r"lw.Categorical\(class_axis=1\)"):
        lw.fit(model, batches, "classification")
    posterior = lw.fit(model, batches, lw.Categorical(class_axis=1))
    assert posterior.predict(batches).probs.shape == (6, 3, 4, 5)


# --- sequences of any length --------------------------------------------------------------------------------


class Tagger(nn.Module):
    """One layer of attention that does not look at padding."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.embedding, self.query, self.head = nn.Embedding(12, 4), nn.Linear(4, 4), nn.Linear(4, C)
        self.pooled = pooled
        self.double()

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        score = torch.tanh(self.query(x)) @ x.transpose(1, 2)
        x = torch.tanh(x + score.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ x)
        if self.pooled:
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.head(x)}


LENGTHS = [3, 5, 2, 7, 4, 6, 7, 3, 2, 5, 4, 4]


def texts(lengths: list[int] = LENGTHS) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(1, 12, (n,)), torch.randint(C, (n,))) for n in lengths]


def padded(some: list[tuple[Tensor, Tensor]], length: int = 0) -> dict[str, Tensor]:
    """As a collator of transformers pads: to the longest, with labels of -100."""
    length = length or max(len(ids) for ids, _ in some)
    ids = torch.stack([nn.functional.pad(ids, (0, length - len(ids))) for ids, _ in some])
    labels = torch.stack([nn.functional.pad(y, (0, length - len(y)), value=-100) for _, y in some])
    return {"ids": ids, "mask": ids > 0, "labels": labels}


def dynamic(rows: list[tuple[Tensor, Tensor]], size: int = 3) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=size, collate_fn=padded)  # type: ignore[arg-type]


def fixed(rows: list[tuple[Tensor, Tensor]], length: int = 7) -> list[dict[str, Tensor]]:
    return [padded(rows[i : i + 3], length) for i in range(0, len(rows), 3)]


EXACT_STRUCTURES = ["full", "block", "diag", "lowrank", "gp"]


@pytest.mark.parametrize("params", ["all", "last_layer"])
@pytest.mark.parametrize("structure", EXACT_STRUCTURES)
def test_padding_to_the_longest_of_a_batch_changes_nothing(structure: str, params: str):
    rows = texts()
    model = Tagger()
    both = (dynamic(rows), fixed(rows))
    fits = [lw.fit(model, data, "classification", structure=structure, params=params) for data in both]
    searched = params == "last_layer" or structure == "diag"
    tuned = [lw.tune(p, validation=data) for p, data in zip(fits, both, strict=True)] if searched else fits
    for a, b in (fits, tuned):
        assert_close(a.log_evidence().detach(), b.log_evidence().detach(), rtol=1e-8)
        found, whole = a.predict(dynamic(rows)), b.predict(fixed(rows))
        assert_close(found.probs[found.present], whole.probs[found.present], rtol=1e-8)
        labels = padded(rows)["labels"]
        assert_close(found.log_prob(labels), whole.log_prob(labels), rtol=1e-8)


def test_products_with_the_data_take_any_length():
    rows = texts()[:6]
    model = Tagger()
    a, b = (lw.fit(model, data, "classification", structure="matrixfree") for data in (dynamic(rows), fixed(rows)))
    assert_close(a.marginal_variance(), b.marginal_variance(), rtol=1e-8)
    assert_close(a.log_evidence().detach(), b.log_evidence().detach(), rtol=1e-8)
    assert lw.tune(a, budget="fast").predict(dynamic(rows)).probs.shape == (6, 7, C)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_factors_count_the_positions_that_came(structure: str):
    """Their input factor is a mean over positions, padding included; it adds up over batches as it always does."""
    short, long = texts([2, 3, 2]), texts([7, 6, 5])
    model = Tagger()
    together = lw.fit(model, dynamic(short + long), "classification", structure=structure)
    if structure == "kron":
        apart = [lw.fit(model, dynamic(rows), "classification", structure=structure) for rows in (short, long)]
        longest = [p.covering(together.source) for p in apart]
        assert_close(together.marginal_variance(), lw.merge(longest).marginal_variance())
    tuned = lw.tune(together, validation=dynamic(texts([9, 8, 4])))
    assert tuned.predict(dynamic(texts([9, 2, 3, 4]))).probs.shape == (4, 9, C)


def test_predictions_of_several_lengths_say_which_positions_there_are():
    rows = texts()
    posterior = lw.fit(Tagger(), dynamic(rows), "classification")
    p = posterior.predict(dynamic(rows))
    there = torch.tensor([[max(LENGTHS[i - i % 3 : i - i % 3 + 3]) > t for t in range(7)] for i in range(len(rows))])
    assert torch.equal(p.present, there)
    assert p.probs.shape == (12, 7, C) and bool((p.probs[~there] == 0).all())
    assert bool((p.label[~there] == -100).all()) and bool((p.label[there] >= 0).all())
    for doubt in (p.entropy, p.epistemic, p.aleatoric, p.class_variance.total.sum(-1)):
        assert bool((doubt[~there] == 0).all()) and bool((doubt[there] > 0).all())
    one = posterior.predict({k: v for k, v in padded(rows[:3]).items() if k != "labels"})
    assert one.present is None
    assert_close(one.probs, p.probs[:3, : one.probs.shape[1]])


def test_lengths_the_fit_has_not_seen(tmp_path: Path):
    rows, longer = texts([4, 4, 4]), texts([9, 2, 6])
    model = Tagger()
    posterior = lw.fit(model, dynamic(rows), "classification", structure="full")
    lw.save(posterior, tmp_path / "net.lapwing")
    whole = lw.fit(model, dynamic(rows + longer), "classification", structure="full")
    for some in (posterior, lw.load(tmp_path / "net.lapwing", model)):
        assert_close(some.updated(dynamic(longer)).marginal_variance(), whole.marginal_variance())
        x = {k: v for k, v in padded(longer).items() if k != "labels"}
        assert some.outputs(x).mean.shape == some.outputs(x).var.shape == (3, 9, C)
        assert some.functions(2)(x).shape == (2, 3, 9, C)
        refined = lw.refine(some, dynamic(rows))
        assert refined.predict(dynamic(longer)).probs.shape == (3, 9, C)
        assert lw.alarm(some, dynamic(longer)).features.shape[0] == 3


def test_one_label_for_texts_of_any_length():
    rows = [(ids, y[0]) for ids, y in texts()]

    def collate(some: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in some], batch_first=True)
        return {"ids": ids, "mask": ids > 0, "labels": torch.stack([y for _, y in some])}

    loader = DataLoader(rows, batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
    whole = [collate(rows)]
    model = Tagger(pooled=True)
    fits = [(lw.fit(model, data, "classification", structure="full"), data) for data in (loader, whole)]
    a, b = (lw.tune(posterior, validation=data) for posterior, data in fits)
    assert_close(a.predict(loader).probs, b.predict(whole).probs, rtol=1e-6)
