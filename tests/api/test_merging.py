"""Joining and parting: sums over data, whatever the way they were cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lapwing as lw
from stored import DRAWN, KINDS, LABELS, STRUCTURES, N, X, assert_close, assert_same_bits, fitted, kept, network

ADDITIVE = [name for name in STRUCTURES if name not in ("ekfac", "lowrank", "nystrom")]
HALVES = slice(0, 17), slice(17, N)


@pytest.mark.parametrize("structure", ADDITIVE)
@pytest.mark.parametrize("kind", ["classes", pytest.param("per output", marks=pytest.mark.slow)])
def test_merging_is_a_fit_on_all_the_data(structure: str, kind: str) -> None:
    parts = [fitted(kind, STRUCTURES[structure], rows) for rows in HALVES]
    whole = kept(kind, STRUCTURES[structure])
    assert_close(lw.merge(parts), whole)
    assert_close(lw.merge(parts[::-1]), whole)
    assert lw.merge(parts[:1]) is parts[0]


@pytest.mark.parametrize("kind", ["regression", "labels", "counts", "noise too"])
def test_every_likelihood_merges(kind: str) -> None:
    parts = [fitted(kind, "kron", rows) for rows in (*HALVES, HALVES[0])]
    data = [torch.cat([v[rows] for rows in (*HALVES, HALVES[0])]) for v in (X, KINDS[kind].targets)]
    what = KINDS[kind]
    whole = lw.fit(network(what.n_outputs), tuple(data), what.likelihood(), structure="kron")
    assert_close(lw.merge(parts), whole)


def test_rows_merge_to_rows_and_to_a_matrix() -> None:
    """Full curvature is kept as rows of few data, and of many as a matrix; both sides of the border, and across it."""
    few = [fitted("regression", "full", slice(k, k + 3)) for k in range(0, 9, 3)]
    assert_close(lw.merge(few), fitted("regression", "full", slice(0, 9)))
    many = fitted("regression", "full", slice(9, N))
    assert_close(lw.merge([*few, many]), kept("regression", "full"))
    assert_close(lw.merge([many, *few]), kept("regression", "full"))


def test_the_same_inputs_twice_count_twice() -> None:
    """Kronecker factors of equal inputs are told from parts of one fit: their count matters to the next data."""
    data = (torch.cat([X[HALVES[0]], X]), torch.cat([LABELS[HALVES[0]], LABELS]))
    whole = lw.fit(network(3), data, "classification", structure="kron")
    twice = lw.fit(network(3), (X[HALVES[0]], LABELS[HALVES[0]]), "classification", structure="kron")
    rest = lw.fit(network(3), (X[HALVES[1]], LABELS[HALVES[1]]), "classification", structure="kron")
    assert_close(lw.merge([twice, twice, rest]), whole)
    assert_close(twice.updated((X[HALVES[0]], LABELS[HALVES[0]])).updated((X[HALVES[1]], LABELS[HALVES[1]])), whole)


@pytest.mark.slow
def test_a_merged_posterior_is_tuned_like_one_fit() -> None:
    parts = [fitted("regression", "full", rows) for rows in HALVES]
    data = X, KINDS["regression"].targets
    assert_close(lw.tune(lw.merge(parts), data), lw.tune(kept("regression", "full"), data), 1e-6)
    tuned = lw.tune(parts[0])
    assert_close(
        lw.merge([tuned, tuned]).with_prior(1.0), tuned.updated(_rows("regression", HALVES[0])).with_prior(1.0)
    )


def _rows(kind: str, rows: slice) -> tuple[Any, Any]:
    return X[rows], KINDS[kind].targets[rows]


# --- taking out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ADDITIVE)
def test_taking_data_out_is_a_fit_without_them(structure: str) -> None:
    whole = kept("known noise", STRUCTURES[structure])
    left = whole.downdated(_rows("known noise", HALVES[0]))
    assert_close(left, fitted("known noise", STRUCTURES[structure], HALVES[1]), 1e-7)
    assert_close(left.updated(_rows("known noise", HALVES[0])), whole, 1e-8)


def test_taking_rows_out_of_rows() -> None:
    few = fitted("known noise", "full", slice(0, 9))
    assert_close(few.downdated(_rows("known noise", slice(0, 4))), fitted("known noise", "full", slice(4, 9)), 1e-7)


@pytest.mark.parametrize("structure", ["full", "block", "kron", "diag"])
def test_what_was_never_there_cannot_be_taken_out(structure: str) -> None:
    half = fitted("known noise", structure, HALVES[1])
    with pytest.raises(lw.NumericalError, match="not all among"):
        half.downdated((10 * X[:5], KINDS["known noise"].targets[:5]))


REFUSED_TO_LEAVE = {
    "everything": (lambda: kept("classes", "diag"), (X, LABELS), lw.InputError, "nothing would be left"),
    "ekfac": (lambda: kept("classes", "ekfac"), (X[:3], LABELS[:3]), lw.StructureError, "Ekfac curvature"),
    "drawn labels": (
        lambda: fitted("classes", "kron", fisher="mc"),
        (X[:3], LABELS[:3]),
        lw.StructureError,
        'fisher="mc"',
    ),
}


@pytest.mark.parametrize("name", REFUSED_TO_LEAVE)
def test_taking_out_is_refused_where_it_would_not_be_exact(name: str) -> None:
    make, data, error, words = REFUSED_TO_LEAVE[name]
    with pytest.raises(error, match=words):
        make().downdated(data)


# --- what does not go together ---------------------------------------------------------------------------------------


def _other_network() -> lw.Posterior:
    model = network(3)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-9
    return lw.fit(model, (X, LABELS), lw.Categorical(weight=(1.0, 2.0, 0.5)), structure="kron")


OTHERS = {
    "structure": (lambda: kept("classes", "diag"), "structure is"),
    "options": (lambda: kept("classes", lw.Kron(damping="split")), "structure is"),
    "parameters": (lambda: fitted("classes", "kron", params="last_layer"), "other parameters"),
    "fisher": (lambda: fitted("classes", "kron", fisher="empirical"), "kind of curvature"),
    "likelihood": (lambda: lw.fit(network(3), (X, LABELS), "classification", structure="kron"), "other options"),
    "scale": (lambda: fitted("classes", "kron", likelihood_scale=0.5), "likelihood scale"),
    "prior": (lambda: kept().with_prior(2.0), "prior is another"),
    "groups": (lambda: kept().with_prior(lw.prior(network(3), 1.0, "layer")), "prior is another"),
    "temperature": (
        lambda: replace(kept(), readout=replace(kept().readout, temperature=2.0)),
        "read off in another way",
    ),
    "network": (_other_network, "tensor '0.weight' has other values"),
    "outputs": (lambda: kept("regression", "kron"), "do not go together"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_go_together_is_refused(name: str) -> None:
    make, words = OTHERS[name]
    with pytest.raises(lw.StructureError, match="posteriors 0 and 1") as raised:
        lw.merge([kept(), make()])
    assert words in str(raised.value)


def test_ekfac_and_noise_tuned_apart_are_refused() -> None:
    with pytest.raises(lw.StructureError, match="do not add up"):
        lw.merge([kept("classes", "ekfac"), kept("classes", "ekfac")])
    with pytest.raises(lw.StructureError, match="do not add up"):
        lw.merge([kept("classes", STRUCTURES["lowrank"])] * 2)
    apart = [lw.tune(fitted("regression", "full", rows), mode="network") for rows in HALVES]
    prior = apart[0].prior
    with pytest.raises(lw.StructureError, match="Merge first"):
        lw.merge([apart[0], apart[1].with_prior(prior)])


# --- however the data are cut -----------------------------------------------------------------------------------------


cuts = st.lists(st.integers(1, N - 1), unique=True, max_size=5).map(lambda at: [0, *sorted(at), N])
CHECKS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


def _batches(ends: list[int], order: list[int]) -> list[tuple[Any, Any]]:
    rows = [slice(ends[k], ends[k + 1]) for k in range(len(ends) - 1)]
    return [(X[rows[k]], LABELS[rows[k]]) for k in sorted(range(len(rows)), key=lambda k: order[k])]


def _identities(ends: list[int], order: list[int], structure: str, memory: str, n_merged: int) -> None:
    """Batch split, batch order, chunk size and merge order change nothing beyond rounding."""
    likelihood, batches = lw.Categorical(weight=(1.0, 2.0, 0.5)), _batches(ends, order)
    given_ = {"structure": STRUCTURES[structure], "memory": memory}
    whole = kept("classes", STRUCTURES[structure])
    assert_close(lw.fit(network(3), batches, likelihood, **given_), whole)
    if structure in ADDITIVE:
        groups = [batches[k::n_merged] for k in range(min(n_merged, len(batches)))]
        assert_close(lw.merge([lw.fit(network(3), group, likelihood, **given_) for group in groups]), whole)


configurations = given(
    cuts,
    st.permutations(range(6)),
    st.sampled_from([name for name in STRUCTURES if name not in ("lowrank", "nystrom")]),
    st.sampled_from(["1MB", "1.05MB", "64MB"]),
    st.integers(1, 4),
)
test_cuts_orders_and_chunks_do_not_matter = settings(CHECKS, max_examples=4)(configurations(_identities))
test_many_cuts_orders_and_chunks_do_not_matter = pytest.mark.slow(
    settings(CHECKS, max_examples=500)(configurations(_identities))
)


# --- sequences of verbs -----------------------------------------------------------------------------------------


def _sequence(seed: int, path: Any) -> None:
    """Any order of with_prior, with_likelihood, updated, downdated, save and load is one fresh object."""
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    structure = STRUCTURES[ADDITIVE[pick(len(ADDITIVE))]]
    target, end, prior, noise, scale = KINDS["known noise"].targets, 8, 1.0, 0.3, 1.0
    posterior = lw.fit(network(2), (X[:end], target[:end]), lw.Gaussian(noise), structure=structure)
    for _ in range(6):
        step = pick(5)
        if step == 0:
            prior = (0.1, 1.0, 7.5)[pick(3)]
            posterior = posterior.with_prior(prior)
        elif step == 1:
            noise, scale = (0.2, 0.5)[pick(2)], (1.0, 0.5)[pick(2)]
            posterior = posterior.with_likelihood(lw.Gaussian(noise), likelihood_scale=scale)
        elif step == 2 and end < N:
            start, end = end, min(N, end + 1 + pick(9))
            posterior = posterior.updated((X[start:end], target[start:end]))
        elif step == 3:
            lw.save(posterior, path)
            posterior = lw.load(path, network(2))
        elif step == 4:
            before = posterior.n_data
            posterior = posterior.updated((X[:5], target[:5])).downdated((X[:5], target[:5]))
            assert posterior.n_data == before
    given_ = {"structure": structure, "prior": prior, "likelihood_scale": scale}
    fresh = lw.fit(network(2), (X[:end], target[:end]), lw.Gaussian(noise), **given_)
    assert_close(posterior, fresh, 1e-7, but={*DRAWN, "output var", "joint", "covariance", "another prior"})


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)], ids=["20", "200"])
def test_sequences_of_verbs_end_where_a_fresh_object_is(seeds: range, tmp_path: Any) -> None:
    for seed in seeds:
        _sequence(seed, tmp_path / "net.lapwing")


def test_saving_what_was_merged(tmp_path: Any) -> None:
    merged = lw.merge([fitted("classes", "kron", rows) for rows in HALVES])
    lw.save(merged, tmp_path / "net.lapwing")
    assert_same_bits(merged, lw.load(tmp_path / "net.lapwing", network(3)))
