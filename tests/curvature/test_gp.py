"""The Gaussian process view: equal to the Gaussian over weights where theory says so, and to its own dense algebra."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
import oracle
from lapwing.curvature.points import AtRandom, choose_points
from lapwing.data import as_input
from lapwing.network.jacobian import DenseBlock, FactorBlock, Given
from lapwing.operators import Arrangement
from makers import low_rank as low_rank_maker
from makers import randn
from oracle import assert_close
from untouched import untouched

DELTA = 0.7
KINDS = ["gaussian", "categorical", "bernoulli", "poisson", "hetero"]
OBJECTS: dict[str, Any] = {
    "gaussian": lw.Gaussian(noise_std=0.4),
    "categorical": lw.Categorical(),
    "bernoulli": lw.Bernoulli(),
    "poisson": lw.Poisson(),
    "hetero": lw.HeteroscedasticGaussian(),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Problem:
    """A small network, data of a kind, test inputs, and everything dense."""

    def __init__(self, kind: str, n: int = 9, c: int = 3, hidden: int = 4) -> None:
        torch.manual_seed(3)
        c = 2 if kind == "hetero" else c
        self.kind, self.n, self.c = kind, n, c
        self.model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, c)).double()
        self.X, self.Xt = randn(n, 2, g=seeded(1)), randn(5, 2, g=seeded(2))
        self.f, self.J = oracle.jacobian(self.model, self.X)
        _, self.Jt = oracle.jacobian(self.model, self.Xt)
        self.Y = self.targets()
        self.index = oracle.site_index((c,))
        self.options = {"noise_std": 0.4} if kind == "gaussian" else {}
        y = oracle.target_sites(kind, self.Y, self.index)
        self.Lambda = oracle.hessians(kind, self.f[:, None], y, **self.options)[:, 0]
        self.r = oracle.residuals(kind, self.f[:, None], y, **self.options)[:, 0]
        self.log_lik = oracle.log_lik(kind, self.f[:, None], y, **self.options)
        self.theta = oracle.theta(self.model)

    def targets(self) -> Tensor:
        g = seeded(4)
        if self.kind == "categorical":
            return torch.randint(self.c, (self.n,), generator=g)
        if self.kind == "hetero":
            return randn(self.n, g=g)
        if self.kind == "gaussian":
            return randn(self.n, self.c, g=g)
        return torch.randint(2, (self.n, self.c), generator=g).double()

    def fit(self, structure: Any = "gp", **options: Any) -> lw.Posterior:
        options.setdefault("prior", DELTA)
        return lw.fit(self.model, (self.X, self.Y), OBJECTS[self.kind], structure=structure, progress=False, **options)


def copies(J: Tensor) -> Tensor:
    """Every output with weights of its own: (N, C, C·P)."""
    n, c, p = J.shape
    apart = J.new_zeros(n, c, c, p)
    for k in range(c):
        apart[:, k, k] = J[:, k]
    return apart.reshape(n, c, c * p)


# --- all data, all covariances: the same Gaussian ---------------------------------------------------------------


@pytest.mark.parametrize("hidden", [2, 8], ids=["NC > P", "NC < P"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gp_is_the_glm(kind: str, hidden: int) -> None:
    p = Problem(kind, hidden=hidden)
    gp = p.fit()
    H = oracle.ggn(p.J, p.Lambda)
    Sigma = oracle.posterior(H, DELTA)
    assert_close(gp.outputs(p.Xt).cov, oracle.functional_cov(p.Jt, Sigma))
    assert_close(gp.joint_outputs(p.Xt).cov, oracle.joint_cov(p.Jt, Sigma))
    assert_close(gp.outputs(p.Xt).mean, oracle.outputs(p.model, p.Xt))
    assert_close(gp.log_evidence(), oracle.log_evidence(p.log_lik, H, DELTA, p.theta), rtol=1e-9)
    assert_close(gp.predict(p.Xt).log_prob(p.Y[:5]), p.fit("full").predict(p.Xt).log_prob(p.Y[:5]))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_and_function_space_agree(kind: str) -> None:
    """V and log det from kernels alone, with S of a Λ that may be singular: no inverse of Λ or K."""
    p = Problem(kind)
    J, Jt = p.J.flatten(0, 1), p.Jt.flatten(0, 1)
    values, U = torch.linalg.eigh(p.Lambda)
    S = torch.block_diag(*(U * values.clamp(min=0).sqrt()[:, None]))
    assert_close(S @ S.T, torch.block_diag(*p.Lambda))
    K, Kt = J @ J.T / DELTA, Jt @ J.T / DELTA
    B = torch.eye(len(K)) + S.T @ K @ S
    gp = p.fit()
    assert_close(gp.joint_outputs(p.Xt).cov, Jt @ Jt.T / DELTA - Kt @ S @ torch.linalg.solve(B, S.T @ Kt.T))
    evidence = p.log_lik - 0.5 * torch.logdet(B) - 0.5 * DELTA * p.theta @ p.theta
    assert_close(gp.log_evidence(), evidence, rtol=1e-9)


def test_evidence_of_a_linear_model_is_the_density_of_its_targets() -> None:
    """log N(y; m, K + σ²I), at the mode."""
    X, Y = randn(6, 2, g=seeded()), randn(6, 3, g=seeded(1))
    model = nn.Linear(2, 3).double()
    _, J = oracle.jacobian(model, X)
    mean, Sigma, log_p = oracle.conjugate_regression(J, Y, torch.zeros(6, 3).double(), 0.3, DELTA)
    nn.utils.vector_to_parameters(mean, model.parameters())
    gp = lw.fit(model, (X, Y), lw.Gaussian(noise_std=0.3), structure="gp", prior=DELTA)
    assert_close(gp.log_evidence(), log_p, rtol=1e-9)
    assert_close(gp.covariance(), Sigma)


@pytest.mark.parametrize("coupling", ["full", "independent"])
def test_convolutions_are_written_out_in_tiles(coupling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.network.jacobian.kernels._WRITTEN_FLOATS", 100)
    monkeypatch.setattr("lapwing.network.jacobian.kernels._ROWS", 4)
    monkeypatch.setattr("lapwing.network.jacobian.kernels._COLUMNS", 5)
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    model = nn.Sequential(*layers).double()
    X, Xt, Y = randn(5, 1, 5, 5, g=seeded()), randn(4, 1, 5, 5, g=seeded(1)), torch.tensor([0, 1, 2, 1, 0])
    (f, J), (_, Jt) = oracle.jacobian(model, X), oracle.jacobian(model, Xt)
    Lambda = oracle.hessians("categorical", f[:, None], Y[:, None])[:, 0]
    if coupling == "independent":
        J, Jt = copies(J), copies(Jt)
    prior = lw.prior(model, precision=[0.5, 2.0, 1.0], groups="layer")
    d = prior.P0.diagonal.repeat(J.shape[-1] // prior.layout.p)
    gp = lw.fit(model, (X, Y), "classification", structure=lw.GP(coupling=coupling), prior=prior)
    assert_close(gp.outputs(Xt).cov, oracle.functional_cov(Jt, oracle.posterior(oracle.ggn(J, Lambda), d)))


@pytest.mark.parametrize("coupling", ["full", "independent"])
@pytest.mark.parametrize("lengths", [(9,), (2, 9), (9, 2)], ids=str)
def test_kernels_at_many_positions_are_kept_as_entries(coupling: str, lengths: tuple[int, ...]) -> None:
    """Where sequences are short the factors are smaller; rows of both kinds stand in one posterior."""
    torch.manual_seed(0)
    layers = (nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(6, 3))
    model = nn.Sequential(*layers).double()
    data = [(randn(2, 1, length, g=seeded(length)), torch.tensor([0, 2])) for length in lengths]
    each = [oracle.jacobian(model, x) for x, _ in data]
    f, J = (torch.cat(parts) for parts in zip(*each, strict=True))
    _, Jt = oracle.jacobian(model, Xt := randn(4, 1, 6, g=seeded(1)))
    Lambda = oracle.hessians("categorical", f[:, None], torch.cat([y for _, y in data])[:, None])[:, 0]
    if coupling == "independent":
        J, Jt = copies(J), copies(Jt)
    gp = lw.fit(model, data, "classification", structure=lw.GP(coupling=coupling), prior=DELTA)
    cov = oracle.posterior(oracle.ggn(J, Lambda), DELTA * torch.ones(J.shape[-1]).double())
    assert_close(gp.outputs(Xt).cov, oracle.functional_cov(Jt, cov))


def test_entries_are_kept_where_they_are_fewer_than_the_factors() -> None:
    few, many = (_convolved(length) for length in (2, 9))
    assert few.kept() is few
    assert isinstance(many.kept(), DenseBlock)
    assert_close(torch.cat(many.kept().parts(), -1), torch.cat(many.parts(), -1))
    assert_close(few.concatenated([many.kept()]).parts()[0], torch.cat([torch.cat(b.parts(), -1) for b in (few, many)]))


def _convolved(r: int) -> FactorBlock:
    """Two data, three outputs, r positions of a kernel with 2 output channels, 3 inputs and a bias."""
    arrangement = Arrangement(1, 2, slice(0, 6), slice(6, 8), (1, 2, 3), (0, 1, 2))
    return FactorBlock(arrangement, randn(2, 3, r, 1, 2, g=seeded(r)), Given(randn(2, r, 1, 4, g=seeded(r + 1))))


# --- outputs without covariance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", ["independent", "diag"])
@pytest.mark.parametrize("kind", KINDS)
def test_separate_outputs_are_copies_of_the_weights(kind: str, coupling: str) -> None:
    p = Problem(kind)
    if kind == "hetero" and coupling == "independent":
        with pytest.raises(lw.StructureError, match="HeteroscedasticGaussian couples"):
            p.fit(lw.GP(coupling=coupling))
        return
    Lambda = p.Lambda if coupling == "independent" else torch.diag_embed(p.Lambda.diagonal(dim1=1, dim2=2))
    check_copies(p.fit(lw.GP(coupling=coupling)), p, Lambda)


def check_copies(gp: lw.Posterior, p: Problem, Lambda: Tensor) -> None:
    H, Jt = oracle.ggn(copies(p.J), Lambda), copies(p.Jt)
    Sigma = oracle.posterior(H, DELTA)
    assert_close(gp.outputs(p.Xt).cov, oracle.functional_cov(Jt, Sigma))
    assert_close(gp.outputs(p.Xt).var, oracle.functional_cov(Jt, Sigma).diagonal(dim1=1, dim2=2))
    assert_close(gp.joint_outputs(p.Xt).cov, oracle.joint_cov(Jt, Sigma))
    assert_close(gp.evidence().log_det_ratio, torch.logdet(torch.eye(len(H)) + H / DELTA))
    assert_close(gp.effective_dimension().sum(), torch.trace(Sigma @ H))
    spectrum, true = gp.curvature.spectrum().sort().values, torch.linalg.eigvalsh(H)
    assert_close(spectrum, true[-len(spectrum) :])
    assert float(true[: -len(spectrum)].abs().sum()) < 1e-10


def test_a_softmax_with_class_weights_and_ignored_labels() -> None:
    p = Problem("categorical")
    weight = [0.5, 2.0, 1.0]
    p.Y[[1, 4]] = -100
    p.Lambda = torch.tensor(weight).double()[p.Y.clamp(min=0)][:, None, None] * p.Lambda
    p.Lambda[[1, 4]] = 0
    likelihood = lw.Categorical(weight=weight)
    gp = lw.fit(p.model, (p.X, p.Y), likelihood, structure=lw.GP(coupling="independent"), prior=DELTA)
    check_copies(gp, p, p.Lambda)


def test_dropping_the_term_that_ties_the_classes_would_be_seen() -> None:
    p = Problem("categorical")
    gp = p.fit(lw.GP(coupling="independent"))
    ratio, P = gp.evidence().log_det_ratio, gp.precision
    dropped = sum(2 * output.factor.diagonal().log().sum() for output in P.outputs)
    assert abs(float(dropped - ratio)) > 1.0


@pytest.mark.parametrize("coupling", ["full", "independent"])
def test_sites_along_another_axis(coupling: str) -> None:
    """(B, C, T) outputs, classes first: every class has one kernel over data and sites."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Unflatten(1, (3, 2))).double()
    X, Xt, Y = randn(4, 2, g=seeded()), randn(3, 2, g=seeded(1)), torch.randint(3, (4, 2), generator=seeded(2))
    structure = lw.GP(coupling=coupling)
    gp = lw.fit(model, (X, Y), lw.Categorical(class_axis=1), structure=structure, prior=DELTA)
    index = oracle.site_index((3, 2), 1)
    f, J = oracle.jacobian(model, X)
    Lambda = oracle.spread(oracle.hessians("categorical", f[:, index], Y), index)
    _, Jt = oracle.jacobian(model, Xt)
    if coupling == "independent":
        J, Jt = (by_class(rows, index) for rows in (J, Jt))
    H = oracle.ggn(J, Lambda)
    cov = oracle.functional_cov(Jt, oracle.posterior(H, DELTA))
    assert_close(gp.outputs(Xt).cov, cov)
    assert_close(gp.evidence().log_det_ratio, torch.logdet(torch.eye(len(H)) + H / DELTA))
    probs = gp.predict(Xt, link="mc", n_samples=20).probs
    assert probs.shape == (3, 3, 2)


def by_class(J: Tensor, index: Tensor) -> Tensor:
    n, k, p = J.shape
    apart = J.new_zeros(n, k, index.shape[1], p)
    for c, places in enumerate(index.T):
        apart[:, places, c] = J[:, places]
    return apart.reshape(n, k, -1)


@pytest.mark.parametrize("coupling", ["independent", "diag"])
def test_one_noise_per_output(coupling: str) -> None:
    p = Problem("gaussian")
    likelihood = lw.Gaussian(noise_std=[0.2, 0.5, 1.1])
    gp = lw.fit(p.model, (p.X, p.Y), likelihood, structure=lw.GP(coupling=coupling), prior=DELTA)
    Lambda = torch.tensor([0.2, 0.5, 1.1], dtype=torch.float64).pow(-2).diag().expand(p.n, -1, -1)
    check_copies(gp, p, Lambda)


@pytest.mark.parametrize("coupling", ["independent", "diag"])
def test_function_draws_have_the_posterior_covariance(coupling: str) -> None:
    """Deterministic: the images of the unit vectors are a root of the covariance of the copies."""
    p = Problem("categorical")
    P = p.fit(lw.GP(coupling=coupling)).precision
    n_weights, n_tied = p.c * P.p, P.n_tied
    unit = torch.eye(n_weights + n_tied).double()
    R = P.copies(unit[:, :n_weights].reshape(-1, p.c, P.p), unit[:, n_weights:]).flatten(1)
    Lambda = p.Lambda if coupling == "independent" else torch.diag_embed(p.Lambda.diagonal(dim1=1, dim2=2))
    assert_close(R.T @ R, oracle.posterior(oracle.ggn(copies(p.J), Lambda), DELTA))


def test_functions_are_the_same_at_every_call() -> None:
    p = Problem("categorical")
    draws = p.fit(lw.GP(coupling="independent")).functions(4, seeded())
    both = draws(p.Xt)
    assert both.shape == (4, 5, 3)
    assert_close(draws(p.Xt[2:4]), both[:, 2:4])


# --- the mean ---------------------------------------------------------------------------------------------------


def test_one_newton_step_is_exact_for_a_gaussian() -> None:
    p = Problem("gaussian")
    gp = p.fit(lw.GP(mean="newton"))
    mean, Sigma, _ = oracle.conjugate_regression(p.J, p.Y, p.f - p.J @ p.theta, 0.4, DELTA)
    assert_close(gp.mean, mean)
    assert_close(gp.outputs(p.Xt).mean, oracle.outputs(p.model, p.Xt) + p.Jt @ (mean - p.theta))
    assert_close(gp.outputs(p.Xt).cov, oracle.functional_cov(p.Jt, Sigma))
    moved = gp.with_prior(3.0)  # it follows the prior
    again, _, _ = oracle.conjugate_regression(p.J, p.Y, p.f - p.J @ p.theta, 0.4, 3.0)
    assert_close(moved.mean, again)


def test_one_newton_step_in_function_space() -> None:
    """a = b − S B⁻¹ Sᵀ K b with b = Λ (f − m) + r, and mean* = m* + K* a."""
    p = Problem("categorical")
    J, Jt, Lambda = p.J.flatten(0, 1), p.Jt.flatten(0, 1), torch.block_diag(*p.Lambda)
    K = J @ J.T / DELTA
    b = Lambda @ (J @ p.theta) + p.r.flatten()
    a = b - torch.linalg.solve(torch.eye(len(K)) + Lambda @ K, Lambda @ K @ b)
    m = oracle.outputs(p.model, p.Xt).flatten() - Jt @ p.theta
    gp = p.fit(lw.GP(mean="newton"))
    assert_close(gp.outputs(p.Xt).mean.flatten(), m + Jt @ J.T / DELTA @ a, rtol=1e-9)


def test_at_a_mode_the_newton_step_stays() -> None:
    p = Problem("categorical")
    prior = lw.prior(p.model, precision=DELTA, mean=p.theta - torch.einsum("ncp,nc->p", p.J, p.r) / DELTA)
    gp = p.fit(lw.GP(mean="newton"), prior=prior)
    assert_close(gp.outputs(p.Xt).mean, oracle.outputs(p.model, p.Xt), rtol=1e-9)


# --- fewer data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", ["full", "independent", "diag"])
@pytest.mark.parametrize("sod_scale", ["likelihood", "prior", "none"])
def test_a_subset_and_what_makes_up_for_it(sod_scale: str, coupling: str) -> None:
    p, m = Problem("categorical"), 4
    structure = lw.GP(m, points="informative", sod_scale=sod_scale, coupling=coupling)
    gp = p.fit(structure)
    taken = p.Lambda.diagonal(dim1=1, dim2=2).sum(1).argsort(descending=True)[:m]
    Lambda, delta = p.Lambda[taken], DELTA * (p.n / m if sod_scale == "prior" else 1.0)
    if coupling == "diag":
        Lambda = torch.diag_embed(Lambda.diagonal(dim1=1, dim2=2))
    J, Jt = (p.J[taken], p.Jt) if coupling == "full" else (copies(p.J[taken]), copies(p.Jt))
    H = oracle.ggn(J, Lambda) * (p.n / m if sod_scale == "likelihood" else 1.0)
    assert_close(gp.outputs(p.Xt).cov, oracle.functional_cov(Jt, oracle.posterior(H, delta)))
    seen = torch.arange(p.n) if sod_scale == "likelihood" else taken
    log_p = oracle.log_lik("categorical", p.f[seen][:, None], p.Y[seen][:, None])
    log_det = torch.logdet(torch.eye(len(H)) + H / delta)
    assert gp.n_data == len(seen)
    assert_close(gp.log_evidence(), log_p - 0.5 * log_det - 0.5 * delta * p.theta @ p.theta, rtol=1e-9)


@pytest.mark.parametrize("method", ["subset", "nystrom", "inducing"])
def test_as_many_points_as_data_is_exact(method: str) -> None:
    p = Problem("categorical")
    exact, gp = p.fit(), p.fit(lw.GP(50, method=method))
    assert_close(gp.outputs(p.Xt).cov, exact.outputs(p.Xt).cov, rtol=1e-9)
    assert_close(gp.log_evidence(), exact.log_evidence(), rtol=1e-9)


def test_points_are_drawn_by_the_generator_and_from_shuffled_loaders() -> None:
    p = Problem("categorical", n=30)
    first, same, other = (p.fit(lw.GP(5), generator=seeded(s)).outputs(p.Xt).var for s in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    loader = DataLoader(TensorDataset(p.X, p.Y), batch_size=7, shuffle=True)
    gp = lw.fit(p.model, loader, "classification", structure=lw.GP(12, method="inducing"), prior=DELTA)
    assert gp.n_data == 30
    exact = lw.fit(p.model, loader, "classification", structure=lw.GP(30), prior=DELTA)
    assert_close(exact.outputs(p.Xt).cov, p.fit().outputs(p.Xt).cov)


def test_all_points_are_equally_likely() -> None:
    """600 draws of 2 among 6: each is taken 200 times, within 4 standard deviations of 11.5."""
    X, sweep = torch.arange(6)[:, None], SimpleNamespace(generator=seeded())
    batches = [(as_input(x), x) for x in (X[:4], X[4:])]
    counts = torch.zeros(6)
    for _ in range(600):
        points = choose_points(sweep, lambda: batches, 2, AtRandom())
        assert points.n == 2 and points.n_seen == 6
        counts[points.batches[0][1].flatten()] += 1
    assert float((counts - 200).abs().max()) < 46


# --- all data through few functions -----------------------------------------------------------------------------


def errors(p: Problem, structures: list[lw.GP], **options: Any) -> tuple[list[float], list[float], float]:
    exact = p.fit(**options)
    fits = [p.fit(s, **options) for s in structures]
    off = [float((gp.outputs(p.Xt).var - exact.outputs(p.Xt).var).abs().mean()) for gp in fits]
    return off, [float(gp.log_evidence()) for gp in fits], float(exact.log_evidence())


@pytest.mark.parametrize("grouped", [False, True])
def test_inducing_points_approach_the_exact_gp_from_below(grouped: bool) -> None:
    p = Problem("categorical", n=40, hidden=12)
    precisions = lw.prior(p.model, precision=[0.4, 2.0], groups="layer") if grouped else DELTA
    off, bounds, exact = errors(p, [lw.GP(m, method="inducing") for m in (2, 5, 10, 20, 40)], prior=precisions)
    assert off == sorted(off, reverse=True) and off[-1] < 1e-10
    assert bounds == sorted(bounds) and bounds[-2] < exact and abs(bounds[-1] - exact) < 1e-8


def test_leading_eigenfunctions_approach_the_exact_gp() -> None:
    p = Problem("categorical", n=40, hidden=12)
    structures = [lw.GP(40, method="nystrom", rank=r) for r in (3, 8, 16, 32, 120)]
    off, _, _ = errors(p, structures)
    assert off == sorted(off, reverse=True) and off[-1] < 1e-9


@pytest.mark.parametrize("kappa", [1.0, 2.5])
def test_the_bound_is_the_dense_one(kappa: float) -> None:
    """log det(I + Q) + tr(G − Q) with G the kernel seen by κΛ and Q its projection; predictions by I + Q."""
    p = Problem("bernoulli", n=8)
    gp = p.fit(lw.GP(3, method="inducing"), generator=seeded(5), likelihood_scale=kappa)
    keys = torch.rand(8, dtype=torch.float64, generator=seeded(5))
    Z = p.J[keys.argsort()[:3].sort().values].flatten(0, 1)
    Pi = Z.T @ torch.linalg.pinv(Z @ Z.T, rtol=1e-13) @ Z
    H = kappa * oracle.ggn(p.J, p.Lambda)
    kept = Pi @ H @ Pi
    log_det = torch.logdet(torch.eye(len(H)) + kept / DELTA) + torch.trace(H - kept) / DELTA
    assert_close(gp.evidence().log_det_ratio, log_det, rtol=1e-9)
    assert_close(gp.outputs(p.Xt).cov, oracle.functional_cov(p.Jt, oracle.posterior(kept, DELTA)), rtol=1e-9)
    assert_close(gp.covariance(), oracle.posterior(kept, DELTA), rtol=1e-9)


@pytest.mark.slow
def test_two_hundred_points_for_all_digits_beat_eight_hundred_alone() -> None:
    """NLL on 500 digits; run with -s for the numbers of the page on function space."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=seeded())
    X, Y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        decay = 0.5 * sum((p**2).sum() for p in model.parameters())
        (nn.functional.cross_entropy(model(X[:1297]), Y[:1297], reduction="sum") + decay).backward()
        optimiser.step()

    def nll(structure: lw.GP) -> float:
        gp = lw.fit(model, (X[:1297], Y[:1297]), "classification", structure=structure, generator=seeded())
        found = -float(gp.predict(X[1297:]).log_prob(Y[1297:]).mean())
        print(f"{structure.described}, sod_scale {structure.sod_scale}: {found:.4f}")
        return found

    exact, inducing = nll(lw.GP()), nll(lw.GP(200, method="inducing"))
    subsets = [nll(lw.GP(800, sod_scale=s)) for s in ("likelihood", "prior", "none")]
    assert inducing < min(subsets) and abs(inducing - exact) < 2e-3


# --- other verbs ------------------------------------------------------------------------------------------------

FORMS = [
    lw.GP(),
    lw.GP(coupling="independent"),
    lw.GP(coupling="diag"),
    lw.GP(5),
    lw.GP(5, coupling="independent"),
    lw.GP(5, method="nystrom", rank=8),
    lw.GP(5, method="inducing"),
]
over_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.described)


@over_forms
def test_evidence_differentiates_in_prior_and_noise(form: lw.GP) -> None:
    p = Problem("gaussian")
    gp = p.fit(form)

    def evidence(logs: Tensor) -> Tensor:
        prior = lw.prior(p.model, precision=logs[:2].exp(), groups="layer")
        return gp.with_prior(prior).with_likelihood(lw.Gaussian(noise_std=logs[2].exp())).log_evidence()

    at = torch.tensor([0.2, -0.5, -0.9], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(evidence(at), at)
    step = 1e-5 * torch.eye(3).double()
    differences = [(evidence(at.detach() + d) - evidence(at.detach() - d)) / 2e-5 for d in step]
    assert_close(gradient, torch.stack(differences), rtol=1e-6)


@over_forms
def test_both_ways_of_tuning_meet(form: lw.GP) -> None:
    p = Problem("categorical", n=12)
    gp = p.fit(form)
    by_gradient, by_updates = lw.tune(gp, mode="network"), lw.tune(gp, mode="network", by="fixed_point")
    assert_close(by_gradient.prior.precisions, by_updates.prior.precisions, rtol=1e-5)
    assert form.described in str(by_gradient.diagnose())


def test_tuning_at_the_linear_mode() -> None:
    p = Problem("categorical", n=8)
    for form in (FORMS[1], FORMS[-1]):
        gp = p.fit(form)
        tuned = lw.tune(gp)
        assert tuned.expansion is not None and float(tuned.log_evidence()) > float(gp.log_evidence())


@pytest.mark.slow
@over_forms
def test_held_out_data_choose(form: lw.GP) -> None:
    p = Problem("categorical", n=12)
    tuned = lw.tune(p.fit(form), mode="network", validation=(p.Xt, p.Y[:5]))
    assert tuned.predict(p.Xt).probs.shape == (5, 3)


def test_exact_tuning_follows_the_mode_as_full_does() -> None:
    p = Problem("gaussian")
    gp, full = (lw.fit(p.model, (p.X, p.Y), "regression", structure=s) for s in ("gp", "full"))
    tuned = [lw.tune(posterior) for posterior in (gp, full)]
    assert tuned[0].expansion.follows
    assert_close(tuned[0].prior.precisions, tuned[1].prior.precisions)
    assert_close(tuned[0].log_evidence(), tuned[1].log_evidence())


@pytest.mark.parametrize("form", FORMS[:3], ids=lambda form: form.described)
def test_more_data_can_be_added_to_all_data(form: lw.GP) -> None:
    p = Problem("categorical")
    some = lw.fit(p.model, (p.X[:5], p.Y[:5]), "classification", structure=form, prior=DELTA)
    both, whole = some.updated((p.X[5:], p.Y[5:])), p.fit(form)
    assert_close(both.outputs(p.Xt).cov, whole.outputs(p.Xt).cov)
    assert_close(both.log_evidence(), whole.log_evidence())


@over_forms
def test_the_model_is_untouched(form: lw.GP) -> None:
    p = Problem("categorical")
    with untouched(p.model):
        gp = p.fit(form)
        gp.predict(p.Xt)
        gp.functions(2)(p.Xt)
        lw.tune(gp, mode="network")


def test_evidences_of_different_forms_come_with_a_caveat() -> None:
    p = Problem("categorical")
    with pytest.warns(UserWarning, match="gp, gp \\(5 points, inducing\\)"):
        lw.compare({"exact": p.fit(), "inducing": p.fit(FORMS[-1])})


def test_rows_that_are_not_kept_written_out_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    H, _, P0 = low_rank_maker(0)
    v = randn(3, 12, g=seeded())
    kept = [H.mv(v), H.plus(P0).solve(v), H.plus(P0).half_solve(v)]
    monkeypatch.setattr("lapwing.operators.root_kernels._KEPT_FLOATS", 0)
    monkeypatch.setattr("lapwing.network.jacobian.rows._WRITTEN_FLOATS", 12)
    H, _, P0 = low_rank_maker(0)
    for mine, other in zip([H.mv(v), H.plus(P0).solve(v), H.plus(P0).half_solve(v)], kept, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3], *FORMS[5:]], ids=lambda form: form.described)
def test_a_gp_over_weights_survives_a_file(form: lw.GP, tmp_path: Path) -> None:
    p = Problem("categorical")
    gp = p.fit(form)
    lw.save(gp, tmp_path / "gp.lapwing")
    again = lw.load(tmp_path / "gp.lapwing", p.model)
    assert again.structure == form
    assert_close(again.outputs(p.Xt).cov, gp.outputs(p.Xt).cov)
    assert_close(again.with_prior(2.0).log_evidence(), gp.with_prior(2.0).log_evidence())


def test_outputs_that_a_softmax_connects_are_kept_as_rows_of_the_data_and_not_saved(tmp_path: Path) -> None:
    with pytest.raises(lw.StructureError, match="datum by datum"):
        lw.save(Problem("categorical").fit(lw.GP(coupling="independent")), tmp_path / "gp.lapwing")
