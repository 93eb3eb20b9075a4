"""lw.save and lw.load: everything comes back to the last bit, on the same network only."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from faults import died_at, files_up_to
from lapwing.linear_model import Expansion, Search
from lapwing.operators import LowRankCurvature
from lapwing.predictive.link_rules import as_link
from stored import KINDS, LABELS, STRUCTURES, N, T, X, answers, assert_close, assert_same_bits, fitted, kept, network
from untouched import stir, untouched

FIXTURES = Path(__file__).parents[1] / "support" / "fixtures"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.lapwing"


def again(posterior: lw.Posterior, path: Path) -> lw.Posterior:
    lw.save(posterior, path)
    return lw.load(path, posterior.linearised.network.model)


# --- what comes back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["classes", "per output"])
def test_every_structure_comes_back_to_the_bit(structure: str, kind: str, path: Path) -> None:
    posterior = fitted(kind, STRUCTURES[structure])
    assert_same_bits(posterior, again(posterior, path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_likelihood_comes_back(kind: str, path: Path) -> None:
    posterior = fitted(kind, "diag", likelihood_scale=0.7)
    loaded = again(posterior, path)
    assert_same_bits(posterior, loaded)
    assert type(loaded.likelihood) is type(posterior.likelihood) and loaded.likelihood_scale == 0.7


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
def test_the_last_layer_alone_comes_back(structure: str, path: Path) -> None:
    posterior = fitted("classes", structure, params="last_layer")
    loaded = again(posterior, path)
    assert_same_bits(posterior, loaded)
    assert_same_bits(posterior.updated((X, LABELS)), loaded.updated((X, LABELS))) if structure != "ekfac" else None


def test_priors_come_back_with_groups_mean_and_reasons(path: Path) -> None:
    model = network(3)
    mean = {name: 0.1 * p.detach() for name, p in model.named_parameters()}
    for prior in (
        lw.prior(model, 2.0, "layer", mean),
        lw.prior(model, 0.5, "normalised", data=(X, LABELS)),
        lw.prior(model, 0.5, "element", -0.3),
    ):
        posterior = lw.fit(model, (X, LABELS), "classification", structure="diag", prior=prior)
        loaded = again(posterior, path)
        assert_same_bits(posterior, loaded)
        assert (loaded.prior.group_names, loaded.prior.reasons) == (prior.group_names, prior.reasons)


def test_what_tuning_found_comes_back(path: Path) -> None:
    posterior = lw.tune(kept("regression", "full"), predictive_mean="linear_mode")
    assert posterior.expansion is not None and posterior.readout.shift is not None
    loaded = again(posterior, path)
    assert_same_bits(posterior, loaded)
    assert loaded.history == posterior.history and len(loaded.history) > 1
    assert torch.equal(loaded.linear_mode(), posterior.linear_mode())
    assert torch.equal(loaded.with_prior(0.1).linear_mode(), posterior.with_prior(0.1).linear_mode())


def test_a_mode_that_is_held_comes_back_without_the_outputs_of_the_data(path: Path) -> None:
    posterior = kept("classes", "kron")
    theta, f = posterior.linearised.theta + 0.1, posterior.outputs(X).mean[:, None]
    at = Expansion(theta, posterior.estimate.statistics, False, Search(1e-3, 4, 30, converged=True), (f,))
    posterior = replace(posterior, expansion=at)
    loaded = again(posterior, path)
    assert_same_bits(posterior, loaded)
    assert loaded.expansion is not None and loaded.expansion.search == at.search and loaded.expansion.outputs is None
    assert all(row.numpy().tobytes() not in path.read_bytes() for row in f)


@pytest.mark.parametrize("link", ["probit", "pairwise", "bridge", "bridge_norm", "mc"])
def test_temperature_and_link_come_back(link: str, path: Path) -> None:
    posterior = kept("classes", "kron")
    rule = as_link(link)
    posterior = replace(posterior, readout=replace(posterior.readout, temperature=1.7, link=rule))
    loaded = again(posterior, path)
    assert_same_bits(posterior, loaded)
    assert loaded.readout.link == rule and loaded.readout.temperature == 1.7


@pytest.mark.parametrize("fisher", ["mc", "empirical"])
def test_the_kind_of_curvature_comes_back_with_its_random_state(fisher: str, path: Path) -> None:
    posterior = fitted("classes", "kron", fisher=fisher)
    lw.save(posterior, path)
    first, second = (lw.load(path, network(3)).updated((X[:7], LABELS[:7])) for _ in range(2))
    assert_same_bits(first, second)
    assert_same_bits(first, posterior.updated((X[:7], LABELS[:7])))


def test_a_convolution_an_embedding_and_attention_come_back(path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.table(x)
            return self.head(self.mix(h, h, h)[0].mean(1))

    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double().eval()
    for model, x in ((images, torch.randn(9, 1, 4, 4).double()), (Tokens().double().eval(), torch.arange(45) % 7)):
        x = x.reshape(9, 5) if x.ndim == 1 else x
        for structure in ("kron", "diag", "full"):
            posterior = lw.fit(model, (x, torch.arange(9) % 2), "classification", structure=structure)
            loaded = again(posterior, path)
            ours, theirs = (q.predict(x[:3]).probs for q in (posterior, loaded))
            assert torch.allclose(ours, theirs, rtol=1e-10) and (structure == "full" or torch.equal(ours, theirs))


def test_subnetworks_and_refined_posteriors_come_back(path: Path) -> None:
    small = fitted("classes", "full", params=lw.Subnetwork(score="magnitude", k=7))
    assert_same_bits(small, again(small, path))
    refined = lw.refine(kept("classes", "full"))
    loaded = again(refined, path)
    assert loaded.refinement == refined.refinement
    assert torch.equal(loaded.predict(T).probs, refined.predict(T).probs)


@pytest.mark.parametrize("gp", [lw.GP(), lw.GP(n_points=10), lw.GP(n_points=10, method="inducing")], ids=str)
def test_functions_of_points_come_back_without_the_points(gp: lw.GP, path: Path) -> None:
    posterior = fitted("regression", gp)
    loaded = again(posterior, path)
    assert torch.allclose(loaded.outputs(T).cov, posterior.outputs(T).cov, rtol=1e-10)
    assert torch.allclose(loaded.log_evidence(), posterior.log_evidence(), rtol=1e-10)
    assert all(row.numpy().tobytes() not in path.read_bytes() for row in X)


@pytest.mark.parametrize(
    ("kind", "gp"),
    [("classes", lw.GP(coupling="diag")), ("classes", lw.GP(n_points=10, coupling="diag", sod_scale="none"))]
    + [(kind, lw.GP(coupling="independent")) for kind in ("regression", "per output")],
    ids=str,
)
def test_separate_functions_come_back_where_nothing_connects_them(kind: str, gp: lw.GP, path: Path) -> None:
    posterior = fitted(kind, gp)
    loaded = again(posterior, path)
    assert torch.allclose(loaded.outputs(T).cov, posterior.outputs(T).cov, rtol=1e-9, atol=1e-12)
    assert torch.allclose(loaded.log_evidence(), posterior.log_evidence(), rtol=1e-10)
    for part in posterior.estimate.parts[0].outputs:
        for row in part.root.rows.dense().reshape(-1, posterior.layout.p):
            assert not row.any() or row.contiguous().numpy().tobytes() not in path.read_bytes()


def test_what_is_made_of_its_data_is_refused(path: Path) -> None:
    with pytest.raises(lw.StructureError, match="saved"):
        lw.save(fitted("classes", lw.GP(coupling="independent")), path)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["classes", "per output"])
def test_matrix_free_is_written_as_the_matrix_it_stands_for(kind: str, path: Path, monkeypatch: Any) -> None:
    posterior = fitted(kind, lw.MatrixFree(solver=lw.CG(rtol=1e-10)))
    loaded, full = again(posterior, path), fitted(kind, "full")
    assert torch.allclose(loaded.outputs(T).cov, full.outputs(T).cov, rtol=1e-9, atol=1e-12)
    assert torch.allclose(loaded.outputs(T).cov, posterior.outputs(T).cov, rtol=1e-6, atol=1e-9)
    assert torch.allclose(loaded.log_evidence(), full.log_evidence(), rtol=1e-10)
    assert_same_bits(loaded, again(loaded, path))
    monkeypatch.setattr("lapwing.storage.posterior_file._MOST_MULTIPLIED_OUT", 5)
    with pytest.raises(lw.StructureError, match="products with its training data"):
        lw.save(posterior, path)


def test_float32_comes_back(path: Path) -> None:
    model = network(3).float()
    posterior = lw.fit(model, (X.float(), LABELS), "classification", structure="kron")
    loaded = again(posterior, path)
    assert torch.equal(loaded.predict(T).probs, posterior.predict(T).probs) and loaded.dtype == torch.float32


# --- what is not in the file ------------------------------------------------------------------------------------


def test_rows_of_data_are_turned_before_they_are_written(path: Path) -> None:
    """Full curvature with N·C < P is kept as rows: their span is written, they are not; results to rounding."""
    posterior = fitted("regression", "full", slice(0, 8))
    assert isinstance(posterior.estimate.parts[0], LowRankCurvature)
    loaded = again(posterior, path)
    assert_close(posterior, loaded, 1e-10, but=set())
    rows = posterior.estimate.parts[0].root.rows.dense().reshape(-1, posterior.layout.p)
    for row in [*rows, *X[:8], *KINDS["regression"].targets[:8]]:
        assert row.contiguous().numpy().tobytes() not in path.read_bytes()
    second = path.with_name("again.lapwing")
    assert_same_bits(loaded, again(loaded, second))
    assert path.read_bytes() == second.read_bytes()
    data = X[8:], KINDS["regression"].targets[8:]
    assert_close(loaded.updated(data), posterior.updated(data))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_input_and_no_target_is_in_the_file(structure: str, path: Path) -> None:
    posterior = kept("regression", STRUCTURES[structure])
    lw.save(posterior, path)
    content, f = path.read_bytes(), posterior.outputs(X).mean
    for row in [*X, *KINDS["regression"].targets, *f]:
        assert row.contiguous().numpy().tobytes() not in content


def test_the_size_does_not_grow_with_the_data(path: Path) -> None:
    sizes = []
    for times in (1, 50):
        lw.save(
            lw.fit(network(3), (X.repeat(times, 1), LABELS.repeat(times)), "classification", structure="kron"), path
        )
        sizes.append(path.stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 64  # numbers in the header have other digits


def test_tuning_after_loading_asks_for_the_data(path: Path) -> None:
    posterior = kept("classes", "diag")
    loaded = again(posterior, path)
    with pytest.raises(lw.InputError, match="needs the training data"):
        lw.tune(loaded, groups="one")
    with pytest.raises(lw.InputError, match="needs the training data"):
        lw.refine(loaded)
    with_data, classic = lw.tune(posterior, mode="network"), lw.tune(loaded, mode="network")
    assert_same_bits(with_data, classic)


@pytest.mark.slow
def test_a_loaded_posterior_is_tuned_from_where_it_was(path: Path) -> None:
    posterior = lw.tune(fitted("classes", "kron"))
    loaded = again(posterior, path)
    assert_close(lw.tune(loaded, (X, LABELS)), lw.tune(posterior), 1e-5)  # another start of the same search


def test_nothing_is_pickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refused)
    again(fitted("classes", "kron", fisher="mc"), path)


def test_model_and_random_states_are_untouched(path: Path) -> None:
    posterior = kept()
    model = posterior.linearised.network.model.train()
    stir()
    with untouched(model):
        lw.save(posterior, path)
        loaded = lw.load(path, model)
        loaded.predict(T)


# --- the file ----------------------------------------------------------------------------------------------------


def test_the_file_is_a_safetensors_file(path: Path) -> None:
    """Read as its specification says, with nothing of ours."""
    posterior = kept("classes", "diag")
    lw.save(posterior, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0 and header["__metadata__"]["schema"] == "1"
    entry = header["estimate.parts.0.entries"]
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    values = torch.frombuffer(bytearray(content[start:end]), dtype=torch.float64).reshape(entry["shape"])
    assert entry["dtype"] == "F64" and torch.equal(values, posterior.estimate.parts[0].entries)


def test_a_link_stays_a_link_and_permissions_are_the_usual(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.lapwing"
    path.write_bytes(b"old")
    link.symlink_to(path)
    lw.save(kept("classes", "diag"), link)
    assert link.is_symlink() and lw.load(path, network(3)).n_data == N
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode and len(list(tmp_path.iterdir())) == 3


def test_schema_1_is_read_for_ever() -> None:
    """Files of every released version are kept, with what they said when they were written."""
    said = json.loads((FIXTURES / "schema-1.json").read_text())
    for name, expected in said.items():
        loaded = lw.load(FIXTURES / f"{name}.lapwing", fixture_model())
        assert float(loaded.log_evidence()) == pytest.approx(expected["log_evidence"], rel=1e-9)
        var = loaded.outputs(torch.ones(1, 2).double()).var
        assert var.flatten().tolist() == pytest.approx(expected["var"], rel=1e-9)


def fixture_model() -> nn.Module:
    """Weights that no random generator of another version of torch could change."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).reshape(p.shape) * (k + 1) / 4)
    return model


# --- of another model --------------------------------------------------------------------------------------------


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = network(3)
    with torch.no_grad():
        change(model)
    return model


def _swap_activation(model: nn.Module) -> None:
    model[2] = nn.ReLU()


def _tie(model: nn.Module) -> None:
    model[1].bias = model[0].bias


OTHER_MODELS = {
    "a weight": (lambda m: m[3].weight[1, 2].add_(1e-12), "'3.weight' has other values"),
    "the sign of a zero": (lambda m: m[1].bias[0].neg_(), "'1.bias' has other values"),
    "a buffer": (lambda m: m[1].running_mean.add_(1.0), "'1.running_mean' has other values"),
    "its dtype": (lambda m: m.float(), "'0.weight' has dtype float32 in the model and float64 in the file"),
    "its width": (lambda m: m.__setitem__(3, nn.Linear(4, 2).double()), "'3.weight' has shape"),
    "its names": (lambda m: m.append(nn.Linear(3, 3).double()), "the model has a tensor '4.weight'"),
    "a missing layer": (lambda m: m.pop(3), "the file has a tensor '3.weight'"),
    "its activation": (_swap_activation, "'2' is ReLU in the model and Tanh in the file"),
}


@pytest.mark.parametrize("change", OTHER_MODELS)
def test_another_model_is_refused_with_the_first_difference(change: str, path: Path) -> None:
    lw.save(kept("classes", "diag"), path)
    alter, words = OTHER_MODELS[change]
    with pytest.raises(lw.StorageError) as raised:
        lw.load(path, changed(alter))
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_a_model_trained_on_is_refused_and_the_old_weights_are_not(path: Path) -> None:
    posterior = fitted("classes", "diag")
    model = posterior.linearised.network.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.add_(0.1)
    lw.save(posterior, path)  # the posterior is of the weights at the time of the fit
    with pytest.raises(lw.StorageError, match=r"0\.weight"):
        lw.load(path, model)
    model.load_state_dict(before)
    assert_same_bits(posterior, lw.load(path, model))


@pytest.mark.slow
def test_a_compiled_model_is_the_model(path: Path) -> None:
    posterior = kept("classes", "diag")
    lw.save(posterior, path)
    assert_same_bits(posterior, lw.load(path, torch.compile(network(3))))


# --- likelihoods and structures of one's own ------------------------------------------------------------------------


def _own(**options: Any) -> lw.CustomLikelihood:
    return lw.CustomLikelihood(lambda f, y: -(f[0] - y[0]).square(), mean=lambda f: f, **options)


def test_a_custom_likelihood_is_given_again(path: Path) -> None:
    posterior = lw.fit(network(1), (X, REAL1), _own(), structure="diag")
    lw.save(posterior, path)
    loaded = lw.load(path, network(1), likelihood=_own())
    assert torch.equal(loaded.outputs(T).var, posterior.outputs(T).var)
    assert torch.equal(loaded.log_evidence(), posterior.log_evidence())
    for given, said in ((None, "whose functions are not in the file"), (_own(psd="clip"), "it was fitted with")):
        with pytest.raises(lw.StorageError, match=said):
            lw.load(path, network(1), likelihood=given)
    lw.save(kept("classes", "diag"), path)
    with pytest.raises(lw.StorageError, match="its own likelihood"):
        lw.load(path, network(3), likelihood=_own())


REAL1 = KINDS["regression"].targets[:, :1]


class _OwnDiag(lw.Diag):
    pass


def test_a_structure_that_is_not_in_the_table_is_refused(path: Path) -> None:
    posterior = fitted("classes", _OwnDiag())
    with pytest.raises(lw.StructureError, match="_OwnDiag, which cannot be saved"):
        lw.save(posterior, path)
    assert not path.exists()


# --- a disk that is full, a process that dies ------------------------------------------------------------------


@pytest.mark.parametrize("offset", [round(i / 20, 2) for i in range(20)])
def test_a_full_disk_leaves_the_old_file(offset: float, path: Path) -> None:
    old, new = kept("classes", "diag"), kept("classes", "full")
    lw.save(new, path)
    size = path.stat().st_size
    lw.save(old, path)
    before = path.read_bytes()
    with files_up_to(int(offset * size)), pytest.raises(lw.StorageError, match="could not be written"):
        lw.save(new, path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("point", [0, 3, pytest.param(range(1, 30), marks=pytest.mark.slow)])
def test_a_killed_save_leaves_the_old_file_or_the_new(point: int | range, path: Path) -> None:
    old, new = kept("classes", "diag"), kept("classes", "kron")
    for k in point if isinstance(point, range) else [point]:
        lw.save(old, path)
        before = path.read_bytes()
        killed = died_at(k, lambda: lw.save(new, path))
        if killed:
            assert path.read_bytes() == before or answers(lw.load(path, network(3))).keys()
        assert_same_bits(new if path.read_bytes() != before else old, lw.load(path, network(3)))
        lw.save(new, path)
        assert_same_bits(new, lw.load(path, network(3)))
