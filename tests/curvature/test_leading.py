"""Large factors of narrow layers, of which leading directions are kept: in float64, against matrices by definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature.shards import decompose_together
from lapwing.linalg.sketch import test_matrix as cosines
from lapwing.operators import Eigen, KroneckerCurvature, LeadingEigen
from oracle import assert_close, jacobian_batch
from oracle import theta as parameters

N, NOISE, PRIOR = 12, 0.4, 0.7
G = torch.Generator().manual_seed(4)
X, T = torch.randn(N, 40, generator=G).double(), torch.randn(5, 40, generator=G).double()
Y = torch.stack([X[:, :3].sum(1).sin(), X[:, 3] - X[:, 4] ** 2], 1)
ENOUGH = {"large": 20, "rank": 30, "energy": 1.0}  # N rows of inputs need no more directions
FEW = {"large": 20, "rank": 8, "energy": 1.0}


class Adapted(nn.Module):
    """40 → 2 → 50 → 2: adapters are narrow like this; without biases or with them, at one position or at several."""

    def __init__(self, *, bias: bool = False, positions: int = 1) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(40 // positions, 2, bias=bias), nn.Linear(2, 50, bias=bias)
        self.head, self.positions = nn.Linear(50, 2).requires_grad_(False), positions

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.down(x.reshape(len(x), self.positions, -1)))).mean(1))


def network(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Adapted(**options).double()


def fitted(structure: Any, rows: slice = slice(None), model: nn.Module | None = None, **options: Any) -> lw.Posterior:
    options = {"prior": PRIOR, **options}
    return lw.fit(model or network(), (X[rows], Y[rows]), lw.Gaussian(NOISE), structure=structure, **options)


def compare(a: lw.Posterior, b: lw.Posterior, rtol: float = 1e-8) -> None:
    """All that does not depend on the root of the covariance."""
    ours = {name: verb(a) for name, verb in VERBS.items()}
    for name, verb in VERBS.items():
        assert_close(ours[name], verb(b), rtol)


VERBS: dict[str, Callable[[lw.Posterior], Tensor]] = {
    "var": lambda p: p.outputs(T).var,
    "cov": lambda p: p.outputs(T).cov,
    "joint": lambda p: p.joint_outputs(T).cov,
    "marginal variance": lambda p: p.marginal_variance(),
    "covariance": lambda p: p.covariance(),
    "evidence": lambda p: p.log_evidence(),
    "effective dimension": lambda p: p.effective_dimension(),
    "another prior": lambda p: p.with_prior(3.0).log_evidence(),
}


def blocks(posterior: lw.Posterior) -> list[KroneckerCurvature]:
    found = [H for H in posterior.curvature.blocks if isinstance(H, KroneckerCurvature)]  # type: ignore[attr-defined]
    assert len(found) == len(posterior.curvature.blocks)  # type: ignore[attr-defined]
    return found


def kinds(posterior: lw.Posterior) -> list[tuple[type, type]]:
    return [(type(H.factors.eigen_A), type(H.factors.eigen_B)) for H in blocks(posterior)]


@pytest.mark.parametrize("model", [{}, {"bias": True}, {"positions": 2}, {"bias": True, "positions": 2}], ids=str)
@pytest.mark.parametrize("variant", [{}, {"sharing": "reduce"}, {"bias": "separate"}, {"damping": "split"}], ids=str)
def test_with_all_directions_it_is_the_kronecker_product(model: dict[str, Any], variant: dict[str, Any]) -> None:
    # At several positions there are more output gradients: up to 48, of width 50.
    enough = ENOUGH if "positions" not in model else {**ENOUGH, "rank": 49}
    found = fitted(lw.Kron(**enough, **variant), model=network(**model))
    assert any(LeadingEigen in kind for kind in kinds(found))
    compare(found, fitted(lw.Kron(**variant, large=None), model=network(**model)))


def near(M: Tensor, rank: int) -> Tensor:
    """The stated approximation of a matrix: Nyström, and what it leaves as a multiple of the rest of the identity."""
    Omega = cosines(len(M), rank, torch.float64, torch.device("cpu"))
    MO = M @ Omega
    low = MO @ torch.linalg.pinv(Omega.T @ MO, rtol=1e-13, hermitian=True) @ MO.T
    s, U = torch.linalg.eigh(low)
    top = U[:, s > 1e-12 * s.max()][:, -rank:]
    rest = (M.trace() - low.trace()) / (len(M) - top.shape[1])
    return low + (rest if rest > 1e-10 * M.trace() else 0.0) * (torch.eye(len(M)).double() - top @ top.T)


def test_with_few_directions_it_is_the_stated_approximation() -> None:
    model = network()
    hidden = X @ model.down.weight.T
    _, J = jacobian_batch(model, X)
    p_down = model.down.weight.numel()
    inputs = X.T @ X / N
    # Output gradients of the layers, from rows of J: J = g ⊗ a with one position.
    down, up = J[..., :p_down].reshape(N, 2, 2, 40), J[..., p_down:].reshape(N, 2, 50, 2)
    g_down = torch.einsum("ncoi,ni->nco", down, X) / X.square().sum(1)[:, None, None]
    g_up = torch.einsum("ncoi,ni->nco", up, hidden) / hidden.square().sum(1)[:, None, None]
    B_down, B_up = (torch.einsum("nco,ncp->op", g, g) / NOISE**2 for g in (g_down, g_up))
    H = torch.block_diag(torch.kron(B_down, near(inputs, 8)), torch.kron(near(B_up, 8), hidden.T @ hidden / N))
    P = H + PRIOR * torch.eye(len(H)).double()
    found = fitted(lw.Kron(**FEW))
    assert kinds(found) == [(LeadingEigen, Eigen), (Eigen, LeadingEigen)]
    assert_close(found.curvature.to_dense(), H, 1e-8)
    assert_close(found.covariance(), torch.linalg.inv(P), 1e-8)
    _, J = jacobian_batch(model, T)
    assert_close(found.outputs(T).cov, torch.einsum("ncp,pq,ndq->ncd", J, torch.linalg.inv(P), J), 1e-8)
    theta = parameters(model)
    log_lik = torch.distributions.Normal(model(X), NOISE).log_prob(Y).sum()
    log_det = torch.logdet(P) - len(P) * torch.tensor(PRIOR, dtype=torch.float64).log()
    evidence = log_lik - 0.5 * (log_det + PRIOR * theta @ theta)
    assert_close(found.log_evidence(), evidence.detach(), 1e-9)
    assert_close(H.trace(), fitted(lw.Kron(large=None)).curvature.trace(), 1e-9)


def test_draws_have_the_covariance() -> None:
    found = fitted(lw.Kron(**FEW))
    R = found.precision.half_solve(torch.eye(len(found.mean), dtype=torch.float64)).T
    assert_close(R @ R.T, found.covariance(), 1e-9)
    generator = torch.Generator().manual_seed(0)
    assert found.sample(3, generator=generator).shape == (3, len(found.mean))


@pytest.mark.parametrize("how", ["evidence", "fixed_point", "validation"])
@pytest.mark.parametrize("groups", [None, "layer"])
def test_it_is_tuned_as_the_whole_product(how: str, groups: str | None) -> None:
    held_out = {"validation": (T, torch.zeros(5, 2).double())} if how == "validation" else {}
    data = None if how == "validation" else (X, Y)
    tuned = [
        lw.tune(fitted(structure), data, by=how, groups=groups, **held_out)
        for structure in (lw.Kron(**ENOUGH), lw.Kron(large=None))
    ]
    assert_close(tuned[0].prior.precisions, tuned[1].prior.precisions, 1e-6)
    assert_close(tuned[0].log_evidence(), tuned[1].log_evidence(), 1e-7)


@pytest.mark.parametrize("how", ["evidence", "fixed_point"])
def test_noise_per_output_mixes_sketches(how: str) -> None:
    """One part of the curvature per output, whose sketches are added with scales that the evidence differentiates."""
    structures = lw.Kron(**ENOUGH), lw.Kron(large=None)
    posteriors = [lw.fit(network(), (X, Y), lw.Gaussian(per_output=True), structure=s, prior=PRIOR) for s in structures]
    compare(*posteriors)
    tuned = [lw.tune(posterior, (X, Y), by=how) for posterior in posteriors]
    assert_close(tuned[0].likelihood.noise_std, tuned[1].likelihood.noise_std, 1e-6)
    assert_close(tuned[0].log_evidence(), tuned[1].log_evidence(), 1e-7)


def test_the_evidence_of_few_directions_has_the_gradient_of_its_differences() -> None:
    found = fitted(lw.Kron(**FEW))
    delta = torch.tensor([PRIOR], dtype=torch.float64, requires_grad=True)

    def at(value: Tensor) -> Tensor:
        return found.with_prior(replace(found.prior, precisions=value)).log_evidence()

    (gradient,) = torch.autograd.grad(at(delta), delta)
    h = 1e-5
    assert_close(gradient.sum(), (at(delta.detach() + h) - at(delta.detach() - h)) / (2 * h), 1e-6)


def test_a_new_prior_reuses_the_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted(lw.Kron(**FEW))
    before = found.outputs(T).var
    monkeypatch.setattr("lapwing.linalg.sketch._nystrom", None)
    other = found.with_prior(5.0)
    assert (other.outputs(T).var < before).all() and other.log_evidence() != found.log_evidence()


def test_more_data_and_other_halves() -> None:
    """Exact while the directions suffice, before a decomposition and after it."""
    structure = lw.Kron(**ENOUGH)
    whole, halves = fitted(lw.Kron(large=None)), [slice(0, 5), slice(5, N)]
    compare(lw.merge([fitted(structure, rows) for rows in halves]), whole)
    first = fitted(structure, halves[0])
    compare(first.updated((X[halves[1]], Y[halves[1]])), whole)
    first.log_evidence()  # now the sketch is released
    assert all(factor.known for H in blocks(first) for factor in (H.factors.eigen_A, H.factors.eigen_B))
    compare(first.updated((X[halves[1]], Y[halves[1]])), whole)
    with pytest.raises(lw.StructureError, match=r"only leading directions are kept.*large=None"):
        fitted(structure).downdated((X[halves[1]], Y[halves[1]]))


def test_sums_of_several_processes() -> None:
    """Sketches are summed like matrices; the decomposition of one process is sent to the others."""
    parts = [fitted(lw.Kron(**FEW), rows) for rows in (slice(0, 5), slice(5, N))]
    whole = fitted(lw.Kron(**FEW))
    for H, *both in zip(blocks(whole), *map(blocks, parts)):
        sums = [a + b for a, b in zip(both[0].addends(), both[1].addends(), strict=True)]
        found = both[0].with_sums(iter(sums))
        assert_close(found.to_dense(), H.to_dense(), 1e-9)
        pairs = (found.factors.eigen_A, H.factors.eigen_A), (found.factors.eigen_B, H.factors.eigen_B)
        for factor, known in pairs:
            assert known.packed().shape == known.packed_shape
            factor.know_packed(known.packed())
            for mine, theirs in zip(factor.pair, known.pair, strict=True):
                assert_close(mine, theirs)
    decompose_together(blocks(whole))


@pytest.mark.parametrize("structure", [lw.Kron(**FEW), lw.Kron(**ENOUGH, bias="separate")], ids=["few", "separate"])
def test_there_and_back_in_a_file(structure: lw.Kron, tmp_path: Path) -> None:
    found = fitted(structure, model=network(bias=True))
    path = tmp_path / "net.lapwing"
    lw.save(found, path)
    again = lw.load(path, network(bias=True))
    assert again.structure == structure and kinds(again) == kinds(found)
    compare(again, found, 1e-12)
    more = torch.randn(4, 40, generator=G).double(), torch.randn(4, 2, generator=G).double()
    compare(again.updated(more), found.updated(more), 1e-10)


class Breaking(TensorDataset):
    limit = 9

    def __getitem__(self, i: int) -> Any:
        self.limit -= 1
        if self.limit < 0:
            raise KeyboardInterrupt
        return super().__getitem__(i)


def test_an_interrupted_fit_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.network.linearised._MOST_JOINED", 3)
    data, structure = Breaking(X, Y), lw.Kron(**FEW)
    loader = DataLoader(data, batch_size=3)
    options = {"structure": structure, "prior": PRIOR, "checkpoint": tmp_path, "every": 0}
    with pytest.raises(KeyboardInterrupt):
        lw.fit(network(), loader, lw.Gaussian(NOISE), **options)
    assert (tmp_path / "progress.lapwing").exists()
    data.limit = 10**9
    resumed = lw.fit(network(), loader, lw.Gaussian(NOISE), **options)
    whole = lw.fit(network(), loader, lw.Gaussian(NOISE), structure=structure, prior=PRIOR)
    assert torch.equal(resumed.curvature.to_dense(), whole.curvature.to_dense())
    compare(resumed, whole, 0.0)


def test_what_is_kept_is_said() -> None:
    found = fitted(lw.Kron(**FEW))
    text = str(found.diagnose())
    assert "low-rank factors" in text and "of the trace" in text
    plan = lw.plan(network(), (X, Y), lw.Gaussian(NOISE))
    row = next(row for row in plan.rows if row.structure == "kron")
    assert row.how == "2 Kronecker blocks"
    assert "low-rank" not in str(fitted("kron").diagnose())


def test_adapters_of_a_wide_network_need_no_option() -> None:
    """Width 4,096 and rank 2: a whole input factor would take 64 MiB in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 2, bias=False), nn.Tanh(), nn.Linear(2, 3))
    data = torch.randn(20, 4096, generator=G), torch.randint(3, (20,), generator=G)
    plan = lw.plan(model, data, "classification", memory="400MiB")
    row = next(row for row in plan.rows if row.structure == "kron")
    assert plan.chosen.structure == "kron" and "1 low-rank factor" in row.how
    assert row.stored_bytes == 4 * 4096 * 1024 + 8 * (2**2 + 3**2 + 3**2)
    posterior = lw.fit(model, data, "classification", memory="400MiB")
    assert posterior.structure == lw.Kron() and kinds(posterior)[0] == (LeadingEigen, Eigen)
    factor = blocks(posterior)[0].factors.eigen_A
    assert isinstance(factor, LeadingEigen)
    directions, share = factor.kept
    s = torch.linalg.svdvals(data[0].double()).square()  # 20 rows have 20 eigenvalues
    enough = int((s.cumsum(0) < 0.999 * s.sum()).sum()) + 1
    assert directions == enough and share.min() >= 0.999
    assert_close(factor.pair[0][0, :directions], s[:directions] / len(data[0]), 1e-5)
    assert torch.isfinite(posterior.outputs(data[0]).var).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"large": 0}, "large is a positive whole number"),
        ({"rank": 2.5}, "rank is a positive whole number"),
        ({"energy": 1.5}, "energy is a share of the trace"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(lw.InputError, match=words):
        lw.Kron(**options)
    with pytest.raises(lw.InputError, match="whole factors"):
        lw.Ekfac(large=100)
