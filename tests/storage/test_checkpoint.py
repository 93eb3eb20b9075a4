"""Interrupted work goes on to the same bits."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lapwing as lw
from faults import died_at, files_up_to
from lapwing.tuning.evidence import joint
from stored import KINDS, LABELS, STRUCTURES, N, X, assert_same_bits, network

BATCHES = [(X[k : k + 9], LABELS[k : k + 9]) for k in range(0, N, 9)]


class Interrupted(Exception):
    pass


class Breaking(Dataset[Any]):
    """Data that cannot be read beyond a point, until they can."""

    def __init__(self, x: Tensor, y: Tensor, limit: int, error: type[BaseException] = Interrupted) -> None:
        self.x, self.y, self.limit, self.error = x, y, limit, error
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        if self.reads > self.limit:
            raise self.error
        return self.x[i], self.y[i]


def fit(data: Any, model: nn.Module | None = None, kind: str = "classes", **options: Any) -> lw.Posterior:
    what = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return lw.fit(model or network(what.n_outputs), data, what.likelihood(), **options)


def interrupted_and_resumed(directory: Path, at: int, kind: str = "classes", **options: Any) -> lw.Posterior:
    """Stop after some reads, and run the same call again."""
    data = Breaking(X, KINDS[kind].targets, at)
    loader = DataLoader(data, batch_size=9)
    with pytest.raises(Interrupted):
        fit(loader, kind=kind, checkpoint=directory, every=0, **options)
    assert (directory / "progress.lapwing").exists()
    data.limit = 10**9
    return fit(loader, kind=kind, checkpoint=directory, every=0, **options)


@pytest.fixture(params=[9, 18, 1024], ids=["alone", "two together", "all together"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many data go through the network together: batches of nine are added up, or wait, or both."""
    monkeypatch.setattr("lapwing.network.linearised._MOST_JOINED", request.param)
    return request.param


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["classes", pytest.param("per output", marks=pytest.mark.slow)])
def test_an_interrupted_fit_goes_on_to_the_same_bits(structure: str, kind: str, tmp_path: Path) -> None:
    options = {"structure": STRUCTURES[structure]}
    whole = fit(DataLoader(TensorDataset(X, KINDS[kind].targets), batch_size=9), kind=kind, **options)
    resumed = interrupted_and_resumed(tmp_path, 9 + 20, kind, **options)  # the first batch is looked at before the pass
    assert_same_bits(whole, resumed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reads", [9 + N + 10, 9 + N + 30])
def test_the_second_pass_goes_on_as_well(reads: int, tmp_path: Path) -> None:
    whole = fit(BATCHES, structure="ekfac")
    assert_same_bits(whole, interrupted_and_resumed(tmp_path, reads, structure="ekfac"))


@pytest.mark.parametrize("structure", ["full", "block"])
def test_rows_that_are_not_yet_multiplied_out_go_on(structure: str, tmp_path: Path) -> None:
    """Few data for many parameters: the sums are rows of data, factors and all."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 3)
    )
    model, x = model.double().eval(), X[:, None]
    data = Breaking(x[:24], LABELS[:24], 6 + 14)
    whole = lw.fit(
        model,
        DataLoader(data.__class__(x[:24], LABELS[:24], 10**9), batch_size=6),
        "classification",
        structure=structure,
    )
    with pytest.raises(Interrupted):
        lw.fit(
            model, DataLoader(data, batch_size=6), "classification", structure=structure, checkpoint=tmp_path, every=0
        )
    data.limit = 10**9
    resumed = lw.fit(model, DataLoader(data, batch_size=6), "classification", structure=structure, checkpoint=tmp_path)
    assert torch.equal(whole.log_evidence(), resumed.log_evidence())
    for a, b in ((p.outputs(x[:5]).cov, q.outputs(x[:5]).cov) for p, q in [(whole, resumed)]):
        assert torch.equal(a, b)
    assert torch.equal(whole.sample(2), resumed.sample(2))


@pytest.mark.parametrize(
    "options", [{"params": "last_layer"}, {"fisher": "mc"}, {"params": "last_layer", "structure": "diag"}]
)
def test_the_last_layer_and_drawn_labels_go_on(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"structure": "kron", **options}
    assert_same_bits(fit(BATCHES, **options), interrupted_and_resumed(tmp_path, 9 + 20, **options))


def test_an_undisturbed_fit_is_the_plain_one(tmp_path: Path) -> None:
    plain = fit(BATCHES, structure="kron")
    assert_same_bits(plain, fit(BATCHES, structure="kron", checkpoint=tmp_path / "a" / "b", every=0))
    assert_same_bits(plain, fit(BATCHES, structure="kron", checkpoint=str(tmp_path), every=3600))


def test_a_shuffling_loader_is_read_in_order(tmp_path: Path) -> None:
    data = TensorDataset(X, LABELS)
    shuffled = fit(DataLoader(data, batch_size=9, shuffle=True), structure="kron", checkpoint=tmp_path)
    assert_same_bits(shuffled, fit(DataLoader(data, batch_size=9), structure="kron"))


@pytest.mark.slow
def test_a_small_batch_of_few_rows_is_kept_as_it_is(tmp_path: Path) -> None:
    """Rows are gathered until they are worth a multiplication; a checkpoint between two of them changes nothing."""
    batches = [(X[k : k + 1], LABELS[k : k + 1]) for k in range(N)]
    whole = fit(batches, structure="kron")
    assert died_at(60, lambda: fit(batches, structure="kron", checkpoint=tmp_path, every=0))
    assert_same_bits(whole, fit(batches, structure="kron", checkpoint=tmp_path, every=3600))


# --- a process that dies, a disk that is full, a hand on Ctrl-C ---------------------------------------------------


def _killed(point: int, structure: str, directory: Path, whole: lw.Posterior) -> None:
    options = {"structure": structure, "checkpoint": directory, "every": 0}
    killed = died_at(point, lambda: fit(BATCHES, **options))
    assert_same_bits(whole, fit(BATCHES, **options))
    left = [name for name in os.listdir(directory) if not name.endswith(".tmp")]
    assert not left and (killed or point > 50)


@pytest.mark.parametrize(
    "points",
    [[0, 17, 40, 95], pytest.param(range(0, 150, 3), marks=pytest.mark.slow)],
    ids=["4", "50"],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapwing.network.linearised._MOST_JOINED", 18)  # some batches are added up, and one waits
    whole = {name: fit(BATCHES, structure=name) for name in ("kron", "ekfac", "full")}
    for point in points:
        structure = ("kron", "ekfac", "full")[point % 3] if point < 50 else "ekfac"
        _killed(point, structure, tmp_path / str(point), whole[structure])


def test_a_full_disk_is_told_and_the_fit_goes_on(tmp_path: Path) -> None:
    data = Breaking(X, LABELS, 9 + 20)
    with pytest.raises(Interrupted):
        fit(DataLoader(data, batch_size=9), structure="kron", checkpoint=tmp_path, every=0)
    before = (tmp_path / "progress.lapwing").read_bytes()
    data.reads, data.limit = 0, 9 + 30
    with files_up_to(100), pytest.warns(UserWarning, match="could not be written"), pytest.raises(Interrupted):
        lw.fit(
            network(3),
            DataLoader(data, batch_size=9),
            KINDS["classes"].likelihood(),
            structure="kron",
            checkpoint=tmp_path,
            every=0,
        )
    assert (tmp_path / "progress.lapwing").read_bytes() == before
    data.limit = 10**9
    assert_same_bits(
        fit(BATCHES, structure="kron"), fit(DataLoader(data, batch_size=9), structure="kron", checkpoint=tmp_path)
    )


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    data = Breaking(X, LABELS, 9 + 20, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="the same call goes on"):
        fit(DataLoader(data, batch_size=9), structure="kron", checkpoint=tmp_path, every=0)
    data.limit = 10**9
    resumed = fit(DataLoader(data, batch_size=9), structure="kron", checkpoint=tmp_path)
    assert_same_bits(fit(BATCHES, structure="kron"), resumed)


# --- of another fit -----------------------------------------------------------------------------------------------


def _other_weights() -> nn.Module:
    model = network(3)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    return model


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": _other_weights()}, "the model differed"),
    "structure": ({"structure": "diag"}, "the structure differed"),
    "options": ({"structure": lw.Kron(sharing="reduce")}, "the structure differed"),
    "parameters": ({"params": "last_layer"}, "the parameters differed"),
    "fisher": ({"fisher": "empirical"}, "the kind of curvature"),
    "number of batches": ({"data": BATCHES[:-1]}, "the number of batches differed"),
    "data": ({"data": [(x + 1, y) for x, y in BATCHES]}, "the first 2 batches are not those"),
    "order": ({"data": BATCHES[::-1]}, "the first 2 batches are not those"),
}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unfinished")
    with pytest.raises(Interrupted):
        fit(DataLoader(Breaking(X, LABELS, 9 + 20), batch_size=9), structure="kron", checkpoint=directory, every=0)
    return directory


@pytest.mark.parametrize("name", OTHERS)
def test_another_fit_is_refused(name: str, unfinished: Path) -> None:
    change, words = OTHERS[name]
    options = {"data": BATCHES, "structure": "kron", "checkpoint": unfinished, **change}
    before = (unfinished / "progress.lapwing").read_bytes()
    with pytest.raises(lw.StorageError, match=words):
        fit(options.pop("data"), **options)
    assert (unfinished / "progress.lapwing").read_bytes() == before


def test_another_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        data = DataLoader(Breaking(X, LABELS, 9 + 20), batch_size=9)
        fit(data, structure="kron", fisher="mc", checkpoint=tmp_path, every=0)
    other = torch.Generator().manual_seed(5)
    with pytest.raises(lw.StorageError, match="random seed"):
        fit(BATCHES, structure="kron", fisher="mc", generator=other, checkpoint=tmp_path)


def test_a_damaged_checkpoint_is_refused(unfinished: Path, tmp_path: Path) -> None:
    content = bytearray((unfinished / "progress.lapwing").read_bytes())
    content[-3] ^= 1
    (tmp_path / "progress.lapwing").write_bytes(content)
    with pytest.raises(lw.StorageError, match="SHA-256"):
        fit(BATCHES, structure="kron", checkpoint=tmp_path)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(x, y) for x, y in zip(X, LABELS, strict=True)])


def test_an_order_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lw.InputError, match="an order of its own"):
        fit(DataLoader(_Stream(), batch_size=9), checkpoint=tmp_path)
    assert not list(tmp_path.iterdir())


# --- tuning -------------------------------------------------------------------------------------------------------


def interrupted_tuning(posterior: lw.Posterior, directory: Path, after: int, **options: Any) -> None:
    """Stop when the linear model's mode is looked for once too often."""
    find, calls = joint.find_mode, iter(range(10**9))

    def breaking(*arguments: Any) -> Any:
        if next(calls) == after:
            raise Interrupted
        return find(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(joint, "find_mode", breaking)
        lw.tune(posterior, checkpoint=directory, every=0, **options)
    assert (directory / "tuning.lapwing").exists()


def _small() -> lw.Posterior:
    return fit(BATCHES, structure="kron", params="last_layer")


TUNINGS: list[Any] = [
    ({}, 3),
    pytest.param({"by": "fixed_point"}, 2, marks=pytest.mark.slow),
    pytest.param({"curvature_at": "linear_mode"}, 2, marks=pytest.mark.slow),
    pytest.param({"curvature_at": "linear_mode"}, 9, marks=pytest.mark.slow),  # in a later stage
]


@pytest.mark.parametrize(("options", "after"), TUNINGS, ids=str)
def test_an_interrupted_tuning_goes_on_to_the_same_bits(options: dict[str, Any], after: int, tmp_path: Path) -> None:
    posterior = _small()
    whole = lw.tune(posterior, groups="one", **options)
    interrupted_tuning(posterior, tmp_path, after, groups="one", **options)
    resumed = lw.tune(posterior, groups="one", checkpoint=tmp_path, **options)
    assert_same_bits(whole, resumed)
    assert whole.history == resumed.history and not list(tmp_path.iterdir())


def test_killed_tuning_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    posterior = _small()
    whole = lw.tune(posterior, groups="one")
    assert died_at(30, lambda: lw.tune(posterior, groups="one", checkpoint=tmp_path, every=0))
    for other, options, words in (
        (posterior.with_prior(2.0), {}, "the prior differed"),
        (posterior, {"by": "fixed_point"}, "the argument by differed"),
        (posterior.updated(BATCHES[:1]), {}, "the curvature differed"),
    ):
        with pytest.raises(lw.StorageError, match=words):
            lw.tune(other, BATCHES, groups="one", checkpoint=tmp_path, **options)
    with pytest.raises(lw.StorageError, match="the data, or their order, differed"):
        lw.tune(posterior, BATCHES[::-1], groups="one", checkpoint=tmp_path)
    assert_same_bits(whole, lw.tune(posterior, groups="one", checkpoint=tmp_path))
