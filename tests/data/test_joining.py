"""Small batches put together: the same data, in the same order, and nothing of other kinds mixed in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.data import ModelInput, as_batches
from lapwing.data.joining import Joiner, joined_size
from makers import randn
from oracle import assert_close

Pair = tuple[ModelInput, Tensor]


def pairs(*sizes: int, width: int = 2) -> list[Pair]:
    batches = [(randn(n, width, g=torch.Generator().manual_seed(n)), torch.arange(n)) for n in sizes]
    return [(x, y) for x, y in as_batches(batches)]


def joined(given: list[Pair], at_most: int) -> Iterator[Pair]:
    return Joiner(at_most).through(given)


def sizes(found: list[Pair]) -> list[int]:
    return [x.n for x, _ in found]


@pytest.mark.parametrize(
    ("given", "at_most", "expected"),
    [
        ((4, 4, 4, 4, 4), 8, [8, 8, 4]),
        ((4, 4, 4, 4, 4), 7, [4, 4, 4, 4, 4]),
        ((3, 3, 3, 1), 10, [10]),
        ((2, 9, 2, 2), 8, [2, 9, 4]),
        ((1,), 8, [1]),
    ],
)
def test_all_data_come_in_order(given: tuple[int, ...], at_most: int, expected: list[int]) -> None:
    before, after = pairs(*given), list(joined(pairs(*given), at_most))
    assert sizes(after) == expected
    assert_close(torch.cat([x.args[0] for x, _ in after]), torch.cat([x.args[0] for x, _ in before]), 0)
    assert torch.equal(torch.cat([y for _, y in after]), torch.cat([y for _, y in before]))


def test_messages_name_the_batches() -> None:
    assert [x.origin for x, _ in joined(pairs(4, 4, 4), 8)] == ["batch 0 to batch 1", "batch 2"]


def test_other_kinds_are_kept_apart() -> None:
    wide = pairs(2, width=3)
    single = [(x.mapped(lambda v: v.float(), x.n), y) for x, y in pairs(2)]
    flagged = [(ModelInput(x.args, {"flag": flag}, x.n), y) for flag in (True, False) for x, y in pairs(2)]
    mixed = [*pairs(2, 2), *wide, *single, *flagged, *pairs(2)]
    assert sizes(list(joined(mixed, 100))) == [4, 2, 2, 2, 2, 2]


def test_arguments_without_a_batch_are_handed_on() -> None:
    table = torch.eye(3)
    given = [(ModelInput((x.args[0], table), {"mode": "a"}, x.n), y) for x, y in pairs(2, 2)]
    ((x, _),) = joined(given, 10)
    assert x.n == 4 and x.args[1] is table and x.kwargs == {"mode": "a"}


def test_a_table_as_long_as_one_batch_is_not_taken_for_rows_of_the_next() -> None:
    table = torch.eye(3)
    given = [(ModelInput((x.args[0], table), {}, x.n), y) for x, y in pairs(3, 4, 4)]
    assert sizes(list(joined(given, 20))) == [3, 8]


def test_a_table_as_long_as_all_batches_together_is_not_taken_for_rows() -> None:
    table = torch.eye(4)
    given = [(ModelInput((x.args[0], table), {}, x.n), y) for x, y in pairs(2, 2)]
    ((x, _),) = joined(given, 20)
    assert x.n == 4 and not x.batched(x.args[1])


def test_what_waits_is_taken_up_again() -> None:
    given, kept = pairs(2, 3, 4), []

    def interrupted(joiner: Joiner) -> Iterator[Pair]:
        yield from given[:2]
        kept.append(joiner.state())  # as a checkpoint does, before the next batch is read

    joiner, again = Joiner(10), Joiner(10)
    list(joiner.through(interrupted(joiner)))
    again.restore(kept[0])
    ((x, y),) = again.through(given[2:])
    assert (x.n, x.origin) == (9, "batch 0 to batch 2")
    assert_close(x.args[0], torch.cat([pair[0].args[0] for pair in given]), 0)
    assert torch.equal(y, torch.cat([pair[1] for pair in given]))


class Refilling:
    """Six data in three batches, all written to the same memory."""

    X, Y = randn(6, 3, g=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1, 0])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.empty(2, 3, dtype=torch.float64), torch.empty(2, dtype=torch.long)
        for start in (0, 2, 4):
            x.copy_(self.X[start : start + 2])
            y.copy_(self.Y[start : start + 2])
            yield x, y


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_a_loader_may_fill_one_batch_over_and_over(structure: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    filled, whole = Refilling(), (Refilling.X, Refilling.Y)
    fits = [lw.fit(model, data, "classification", structure=structure, progress=False) for data in (filled, whole)]
    assert_close(fits[0].log_evidence(), fits[1].log_evidence(), 1e-12)
    tuned = [lw.tune(fits[1], data) for data in (filled, whole)]
    assert_close(tuned[0].log_evidence(), tuned[1].log_evidence(), 1e-8)
    refined = [lw.refine(fits[1], data) for data in (filled, whole)]
    assert_close(refined[0].mean, refined[1].mean, 1e-8)


class Looked(nn.Module):
    """A table of rows, which all data share, comes with the data; and a bare parameter, whose rows are vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale) @ table.T @ table)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("cuts", [(4, 8), (4, 4, 4), (5, 7)])
def test_a_table_is_the_same_for_all_data_however_many_come(
    cuts: tuple[int, ...], structure: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, table = Looked().double(), torch.randn(8, 3, dtype=torch.float64)
    X, Y = torch.randn(12, 3, dtype=torch.float64), torch.tensor([0, 1] * 6)
    pieces = zip(X.split(cuts), Y.split(cuts), strict=True)
    cut = [((x, table), y) for x, y in pieces]
    one_by_one = [((x[None], table), y[None]) for x, y in zip(X, Y, strict=True)]
    fits = [lw.fit(model, data, "classification", structure=structure, progress=False) for data in (cut, one_by_one)]
    assert_close(fits[0].log_evidence(), fits[1].log_evidence(), 1e-10)
    if structure == "full":
        f, J = oracle.jacobian_batch(model, (X, table))
        Lambda = oracle.hessians("categorical", f[:, None], Y[:, None])[:, 0]
        assert_close(fits[0].curvature.to_dense(), oracle.ggn(J, Lambda), 1e-10)
    path = tmp_path / "posterior.lw"
    lw.save(fits[0], path)
    for posterior in (fits[0], lw.load(path, model)):
        alone = torch.cat([posterior.outputs((x[None], table)).cov for x in X[:8]])
        assert_close(posterior.outputs((X[:8], table)).cov, alone, 1e-10)


class Packed(nn.Module):
    """Takes sequences that are sorted by length, as torch packs them unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][0])


@pytest.mark.parametrize("structure", ["kron", "diag", "lowrank"])
def test_batches_that_a_model_does_not_take_together_go_one_by_one(structure: str) -> None:
    torch.manual_seed(0)
    model = Packed().double()
    X, Y, lengths = (
        torch.randn(7, 5, 2, dtype=torch.float64),
        torch.tensor([0, 1, 1, 0, 1, 0, 0]),
        [5, 4, 5, 3, 2, 4, 4],
    )
    cut = [((X[s], torch.tensor(lengths[s])), Y[s]) for s in (slice(0, 2), slice(2, 5), slice(5, 7))]
    order = torch.tensor(lengths).sort(descending=True).indices
    whole = [((X[order], torch.tensor(lengths)[order]), Y[order])]
    fits = [lw.fit(model, data, "classification", structure=structure, progress=False) for data in (cut, whole)]
    assert_close(fits[0].log_evidence(), fits[1].log_evidence(), 1e-10)
    tuned = [lw.tune(fits[0], data, mode="linear", progress=False) for data in (cut, whole)]
    assert_close(tuned[0].log_evidence(), tuned[1].log_evidence(), 1e-6)


def test_how_many_are_together() -> None:
    assert [joined_size(n, 100) for n in (10, 40, 60, 200)] == [100, 80, 60, 200]


def test_a_network_with_large_layers_is_not_given_more_at_a_time() -> None:
    small, large = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 300_000), nn.Tanh(), nn.Linear(300_000, 2))
    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.inner(x)

    data = [(torch.randn(8, 2), torch.zeros(8, dtype=torch.long)) for _ in range(4)]
    largest = []
    for inner in (small, large):
        seen.clear()
        lw.fit(Watched(inner), data, "classification", structure="diag", params="last_layer", progress=False)
        largest.append(max(seen))
    assert largest == [32, 8]


def test_a_first_fit_does_not_load_symbolic_algebra() -> None:
    """torch would, to check the shape of a cotangent: 80 MB, and a third of a second."""
    code = """
import sys, torch, lapwing as lw
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
data = torch.randn(8, 2), torch.randint(2, (8,))
for structure in ("kron", "diag"):
    lw.fit(model, data, "classification", structure=structure, progress=False).predict(data[0])
sys.exit("sympy" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tuning_again_over_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear mode is found anew from where it was, however the data are cut this time."""
    monkeypatch.setattr("lapwing.network.linearised._MOST_JOINED", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 3)).double()
    X, Y = torch.randn(600, 40, dtype=torch.float64), torch.randint(3, (600,))

    def cut(n: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(X.split(n), Y.split(n), strict=True))

    first = lw.tune(lw.fit(model, cut(60), "classification", structure="kron"), cut(60), mode="linear")
    assert first.expansion is not None and len(first.expansion.outputs or ()) > 1
    again = [lw.tune(first, cut(n), mode="linear").log_evidence() for n in (60, 70, 600)]
    for other in again[1:]:
        assert_close(other, again[0], 1e-8)
