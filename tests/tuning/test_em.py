"""Sampling-based EM: its samples, its fixed points against MacKay's exact ones, and predictions from its samples."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial, partialmethod
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.curvature import GaussNewton
from lapwing.data import as_batches
from lapwing.data.targets import encoded_batches
from lapwing.posterior.sampling import WeightDraws
from lapwing.tuning.em import EMStep
from lapwing.tuning.em.loop import _Em
from lapwing.tuning.em.scaling import Scaling
from lapwing.tuning.em.solvers import Start, System
from lapwing.tuning.em.targets import target_share
from oracle import assert_close
from untouched import untouched


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def regression(n: int = 200) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    g = seeded(0)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return trained(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), x, y, nn.functional.mse_loss), (x, y)


@cache
def classification(n: int = 60) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    g = seeded(1)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    y = (x @ torch.randn(2, 3, generator=g, dtype=torch.float64)).add(torch.randn(n, 3, generator=g)).argmax(1)
    return trained(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), x, y, nn.functional.cross_entropy), (
        x,
        y,
    )


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    model.double()
    optimiser = torch.optim.Adam(model.parameters(), 0.03, weight_decay=1e-3)
    for _ in range(150):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model


def curvature(model: nn.Module, x: Tensor, y: Tensor, posterior: lw.Posterior) -> Tensor:
    """The GGN by brute force, at the posterior's noise."""
    f, J = oracle.jacobian_batch(model, x)
    kind = "gaussian" if isinstance(posterior.likelihood, lw.Gaussian) else "categorical"
    options = {"noise_std": posterior.likelihood.resolved()} if kind == "gaussian" else {}
    return oracle.ggn(J, oracle.hessians(kind, f, y, **options))


# --- the samples solve their equations -------------------------------------------------------------------------


SOLVERS = {
    "direct": (None, 1e-9),
    "cg": (lw.CG(rtol=1e-9), 1e-6),
    "sgd": (lw.SGD(epochs=40), 5e-2),
    "dense": (lw.Cholesky(), 1e-9),
}
PROBLEMS = {
    "primal": (lambda: regression(50), "regression", "full", {}),
    "dual": (lambda: regression(12), "regression", "diag", {"groups": "one", "noise": False}),
    "kron": (classification, "classification", "kron", {"groups": "layer"}),
    "matrixfree": (classification, "classification", "matrixfree", {"groups": "tensor"}),
}


@pytest.mark.parametrize(
    ("solver", "problem"),
    [
        ("direct", "primal"),
        ("direct", "dual"),
        ("cg", "primal"),
        ("cg", "matrixfree"),
        ("sgd", "kron"),
        ("dense", "primal"),
        ("dense", "dual"),
        ("dense", "matrixfree"),
    ],
)
def test_samples_solve_their_equations(solver: str, problem: str):
    make, likelihood, structure, options = PROBLEMS[problem]
    model, data = make()
    posterior = lw.fit(model, data, likelihood, structure=structure)
    settings = lw.EM(n_samples=3, max_steps=1, solver=SOLVERS[solver][0])
    with pytest.warns(UserWarning, match="still moved"):
        tuned = lw.tune(posterior, in_batches(data), by=settings, **options)
    P = curvature(model, *data, tuned) + torch.diag(tuned.prior.P0.diagonal)
    b = tuned.draws.pull(tuned.prior.P0.diagonal, tuned.part_scales)
    assert_close(tuned.draws.zeta, torch.linalg.solve(P, b.T).T, rtol=SOLVERS[solver][1])


def in_batches(data: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(30), data[1].split(30), strict=True))


@pytest.mark.parametrize("solver", [lw.SGD(), lw.Cholesky()], ids=["sgd", "dense"])
def test_what_sees_one_process_is_refused_in_several(solver: Any, monkeypatch: pytest.MonkeyPatch):
    model, data = regression()
    posterior = lw.fit(model, data, "regression", structure="diag")
    front = import_module("lapwing.api.tune")
    monkeypatch.setattr(front.distributed, "is_distributed", lambda: True)
    with pytest.raises(lw.StructureError, match=f"{type(solver).__name__}.* one process"):
        front._Choice(True, front._curvature("network"), False).check_em(posterior, lw.EM(solver=solver), None)


def test_both_objectives_have_the_same_minimum():
    model, data = classification()
    posterior = lw.fit(model, data, "classification", structure="full")
    settings = lw.EM(n_samples=3, solver=lw.SGD(epochs=40))
    em = _Em.of(posterior, source_of(posterior, in_batches(data)), settings, False, False, 0)
    draws = em._drawn(seeded(0))
    system = System(posterior.prior.P0, posterior.part_scales, posterior.precision)
    exact = posterior.precision.solve(draws.pull(posterior.prior.P0.diagonal, posterior.part_scales))
    for data_targets in (False, True):
        found = em.solver.solve(Start(draws), system, data_targets=data_targets)
        assert_close(found.draws.zeta, exact, rtol=5e-2)
        assert found.residual < 5e-2
        b = draws.pull(posterior.prior.P0.diagonal, posterior.part_scales)
        r = b - posterior.precision.mv(found.draws.zeta)
        squared = (r * posterior.precision.solve(r)).sum(-1) / (b * posterior.precision.solve(b)).sum(-1)
        assert found.residual == pytest.approx(float(squared.max()) ** 0.5, rel=1e-6)


def by_products(n_samples: int = 8) -> tuple[_Em, lw.Posterior, Tensor]:
    """EM without a matrix, for precisions of very different sizes, and the H it works with."""
    model, data = classification()
    posterior = lw.fit(model, data, "classification", structure="diag", prior=lw.prior(model, groups="layer"))
    posterior = posterior.with_prior(posterior.prior.with_precisions(torch.tensor([30.0, 0.03], dtype=torch.float64)))
    few = 1000  # numbers: rows of all data are more, seven directions are not
    em = _Em.of(posterior, source_of(posterior, in_batches(data)), lw.EM(n_samples), False, False, few)
    return em, posterior, curvature(model, *data, posterior)


def test_unasked_samples_are_solved_as_closely_as_gamma_is_known():
    em, posterior, H = by_products()
    P = H + torch.diag(posterior.prior.P0.diagonal)
    state = em.initial_state(seeded(0))
    draws = state.solved.draws
    miss = draws.zeta - torch.linalg.solve(P, draws.pull(draws.precisions, draws.scales).T).T
    energy = torch.einsum("kp,pq,kq->k", miss, P, miss)
    gamma = float(torch.trace(torch.linalg.solve(P, H)))
    assert 1e-12 < float(energy.max()) < 0.25 * (2 * gamma / len(miss)) ** 0.5
    closely = replace(em, solver=replace(em.solver, cg=lw.CG(1e-9))).initial_state(seeded(0))
    assert state.solved.n_products < closely.solved.n_products


def test_known_products_save_a_pass(monkeypatch: pytest.MonkeyPatch):
    em, posterior, _ = by_products()
    before = em.initial_state(seeded(0)).solved
    moved = posterior.with_prior(posterior.prior.with_precisions(2 * posterior.prior.precisions))
    system = System(moved.prior.P0, moved.part_scales, em.solver.preconditioner(moved))
    found, passes = [], []
    for products in (None, before.products):
        counted: list[int] = []
        monkeypatch.setattr(GaussNewton, "mv", partialmethod(_counted, counted))
        found.append(em.solver.solve(Start(before.draws, products), system, data_targets=False))
        passes.append(len(counted))
    assert passes[0] == passes[1] + 1
    assert_close(found[0].draws.zeta, found[1].draws.zeta, rtol=1e-9)


def test_a_sketch_looks_where_the_prior_is_weak():
    """P₀^-½ (H − N) P₀^-½ is a Schur complement of what whitened directions see, and small as far as they go."""
    em, posterior, H = by_products()
    half = posterior.prior.P0.diagonal.rsqrt()
    W = half[:, None] * H * half
    left = {"plain": 0.0, "whitened": 0.0}
    for seed in range(8):
        sketch = lw.Nystrom(4, seed=seed)
        (plain,), (whitened,) = sketch.from_products(em.H, 1, []), sketch.whitened(em.H, 1, posterior.prior.P0)
        omega = torch.linalg.qr(torch.randn(len(H), 4, generator=seeded(seed), dtype=torch.float64)).Q
        seen = W @ omega @ torch.linalg.solve(omega.T @ W @ omega, omega.T @ W)
        assert_close(half[:, None] * whitened.to_dense() * half, seen, rtol=1e-8)
        left["plain"] += float((W - half[:, None] * plain.to_dense() * half).trace())
        left["whitened"] += float((W - seen).trace())
    assert left["whitened"] < 0.7 * left["plain"]


def test_draws_from_the_curvature_grow_with_the_root_of_its_scale():
    model, data = regression()
    posterior = lw.fit(model, data, "regression", structure="full")
    em = _Em.of(posterior, source_of(posterior, in_batches(data)), lw.EM(n_samples=3, solver=lw.CG()), False, False, 0)
    once, fourfold = (em.solver.H.draws(3, c * posterior.part_scales, seeded(0)) for c in (1.0, 4.0))
    assert_close(fourfold, 2 * once)


GAUSS_NEWTON_MV = GaussNewton.mv


def _counted(H: GaussNewton, calls: list[int], v: Tensor, scales: Tensor) -> Tensor:
    calls.append(1)
    return GAUSS_NEWTON_MV(H, v, scales)


def source_of(posterior: lw.Posterior, data: Any) -> Any:
    return partial(encoded_batches, as_batches(data), posterior.likelihood, posterior.sites, progress=False)


def test_distances_are_from_the_priors_mean():
    model, data = regression()
    prior = lw.prior(model, precision=2.0, groups="layer", mean=0.3)
    posterior = lw.fit(model, data, "regression", prior=prior, structure="full")
    theta, index = oracle.theta(model), posterior.prior.index
    w = torch.linspace(0.5, 2.0, len(theta), dtype=torch.float64)
    for weights, each in ((None, torch.ones_like(w)), (w, w)):
        expected = [(each * (theta - 0.3) ** 2)[index == g].sum() for g in range(int(index.max()) + 1)]
        assert_close(Scaling(posterior.prior, weights).scatter(theta), torch.stack(expected))


# --- fixed points ------------------------------------------------------------------------------------------------


def log_ratios(tuned: lw.Posterior, exact: lw.Posterior) -> Tensor:
    return (tuned.prior.precisions / exact.prior.precisions).log()


@pytest.mark.parametrize("groups", ["one", "layer"])
def test_the_fixed_point_is_mackays(groups: str):
    model, data = regression()
    posterior = lw.fit(model, data, "regression", structure="full")
    exact = lw.tune(posterior, data, by="fixed_point", groups=groups)
    with untouched(model):
        tuned = lw.tune(posterior, data, by=lw.EM(n_samples=128), groups=groups, generator=seeded(0))
    last = tuned.history[-1]
    assert isinstance(last, EMStep) and last.change < 3e-3
    assert float(log_ratios(tuned, exact).abs().max()) < 0.25
    assert_close(tuned.likelihood.resolved(), exact.likelihood.resolved(), rtol=0.02)
    miss = (torch.tensor(last.effective_dimension) - exact.effective_dimension()).abs()
    assert bool((miss < 5 * torch.tensor(last.standard_error)).all())


def test_the_noise_of_a_tempered_likelihood_is_mackays():
    model, data = regression()
    posterior = lw.fit(model, data, "regression", structure="full", likelihood_scale=0.3)
    exact = lw.tune(posterior, data, by="fixed_point")
    tuned = lw.tune(posterior, data, by=lw.EM(n_samples=64), generator=seeded(0))
    assert_close(tuned.likelihood.resolved(), exact.likelihood.resolved(), rtol=0.02)


def test_bounds_of_precisions_are_those_of_the_posterior():
    model, data = regression()
    prior = lw.prior(model, [0.4, 2.0], groups="layer")
    posterior = lw.fit(model, data, "regression", structure="full", prior=prior)
    for found, expected in zip(
        Scaling(posterior.prior).bounds(posterior.curvature.diagonal()), posterior.precision_bounds(), strict=True
    ):
        assert_close(found, expected)


def test_classes_at_the_trained_weights():
    """mode="network": no mode is looked for, and the exact γ gives the same precision."""
    model, data = classification()
    posterior = lw.fit(model, data, "classification", structure="full")
    exact = lw.tune(posterior, data, by="fixed_point", mode="network", groups="one")
    tuned = lw.tune(posterior, data, by=lw.EM(n_samples=128), mode="network", groups="one", generator=seeded(0))
    assert float(log_ratios(tuned, exact).abs().max()) < 0.1
    assert tuned.expansion is None


@pytest.mark.statistical
@pytest.mark.parametrize("problem", ["regression", "classification"])
def test_fixed_points_scatter_around_mackays(problem: str):
    assert off_by(problem) < 4.5


@pytest.mark.statistical
def test_a_wrong_target_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Data draws ten per cent too large: samples of no posterior."""
    right = WeightDraws.pull
    monkeypatch.setattr(WeightDraws, "pull", lambda draws, d, c: right(draws, d, 1.21 * c))
    assert off_by("regression") > 4.5


def off_by(problem: str, n_runs: int = 12) -> float:
    """How many standard errors the mean log precision over runs is away from the exact one."""
    model, data = regression() if problem == "regression" else classification()
    posterior = lw.fit(model, data, problem, structure="full")
    exact = lw.tune(posterior, data, by="fixed_point", groups="one")
    runs = [
        log_ratios(lw.tune(posterior, data, by=lw.EM(n_samples=256), groups="one", generator=seeded(s)), exact)
        for s in range(n_runs)
    ]
    each = torch.stack(runs)
    assert float(each.std(0).max()) < 0.15
    return float((each.mean(0).abs() / (each.std(0) / n_runs**0.5)).max())


@pytest.mark.statistical
@pytest.mark.parametrize(("scale", "caught"), [(1.0, False), (1.1, True)])
def test_samples_have_the_posterior_covariance(scale: float, caught: bool, monkeypatch: pytest.MonkeyPatch):
    """λ_max of the whitened sample covariance, and how its error falls with K; a scale of 1.1 is the planted bug."""
    right = WeightDraws.pull
    monkeypatch.setattr(WeightDraws, "pull", lambda draws, d, c: scale * right(draws, d, c))
    model, data = classification(20)
    posterior = lw.fit(model, data, "classification", structure="full")
    n = 20_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = lw.tune(posterior, data, by=lw.EM(n_samples=n, max_steps=1), groups="one", generator=seeded(3))
    P = curvature(model, *data, tuned) + torch.diag(tuned.prior.P0.diagonal)
    whitened = tuned.draws.zeta @ torch.linalg.cholesky(P)
    error = (whitened.T @ whitened / n - torch.eye(len(P), dtype=torch.float64)).norm()
    expected = ((len(P) ** 2 + len(P)) / n) ** 0.5  # E‖·‖²_F = (p² + p)/n for a Wishart matrix
    assert (float(error) > 1.5 * expected) == caught


@pytest.mark.slow
def test_a_hundred_thousand_features():
    """EM on a conjugate problem finds the optimum of the exact evidence, which the dual kernel gives."""
    n, p, g = 300, 100_000, seeded(7)
    x = torch.randn(n, p, generator=g, dtype=torch.float64) * (1 / torch.arange(1, p + 1, dtype=torch.float64).sqrt())
    w = torch.randn(p, generator=g, dtype=torch.float64) / 2
    y = (x @ w)[:, None] + 0.5 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    model = nn.Linear(p, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    likelihood = lw.Gaussian(0.5)
    tuned = lw.tune(lw.fit(model, (x, y), likelihood, structure="diag"), (x, y), by=lw.EM(n_samples=64), groups="one")
    s, U = torch.linalg.eigh(x @ x.T)
    projected = (U.T @ y[:, 0]) ** 2

    def log_evidence(log_precision: Tensor) -> Tensor:
        values = s / log_precision.exp() + 0.25
        return -0.5 * (values.log() + projected / values).sum()

    grid = torch.linspace(-6, 6, 24001, dtype=torch.float64)
    best = grid[torch.stack([log_evidence(u) for u in grid]).argmax()].exp()
    assert_close(tuned.prior.precisions[0], best, rtol=0.05)


# --- going on, keeping, scaling ------------------------------------------------------------------------------------


def test_an_interrupted_search_goes_on(tmp_path: Any):
    model, data = regression()
    posterior = lw.fit(model, data, "regression", structure="full")
    whole = lw.tune(posterior, data, by=lw.EM(rtol=1e-6), groups="one")
    with pytest.warns(UserWarning, match="goes on from here"):
        part = lw.tune(posterior, data, by=lw.EM(rtol=1e-6, max_steps=2), groups="one")
    lw.save(part, tmp_path / "part.lapwing")
    part = lw.load(tmp_path / "part.lapwing", model)
    rest = lw.tune(part, data, by=lw.EM(rtol=1e-6), generator=seeded(99))
    assert torch.equal(rest.draws.prior, part.draws.prior)
    assert_close(rest.prior.precisions, whole.prior.precisions, rtol=1e-5)
    assert len(rest.history) > len(part.history)


def test_found_groups_go_on_from_where_they_are():
    model, data = classification()
    posterior = lw.fit(model, data, "classification", structure="full")
    found = replace(lw.prior(model, groups="layer"), reasons=("a", "b"))
    fresh = posterior.with_prior(found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tuned = lw.tune(fresh, data, by=lw.EM(max_steps=1))
        more = lw.tune(tuned, data, by=lw.EM(max_steps=1))
    assert tuned.history[0].precisions != (1.0, 1.0)  # a common precision says nothing, and they start elsewhere
    assert more.history[len(tuned.history)].precisions == tuned.history[-1].precisions


def test_several_noise_levels():
    g = seeded(5)
    x = torch.randn(80, 3, generator=g, dtype=torch.float64)
    y = torch.cat([x.sum(1, keepdim=True).sin(), x[:, :1].cos()], 1)
    y = y + torch.tensor([0.1, 0.3]) * torch.randn(80, 2, generator=g, dtype=torch.float64)
    model = trained(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), x, y, nn.functional.mse_loss)
    posterior = lw.fit(model, (x, y), lw.Gaussian(per_output=True), structure="full")
    exact = lw.tune(posterior, (x, y), by="fixed_point", groups="one")
    tuned = lw.tune(posterior, (x, y), by=lw.EM(n_samples=128), groups="one")
    assert_close(tuned.likelihood.resolved(), exact.likelihood.resolved(), rtol=0.05)
    assert float(log_ratios(tuned, exact).abs().max()) < 0.2


def test_a_g_prior_knows_no_scale_of_the_weights():
    """Weights before a LayerNorm ten times as large: the same network, and the same error bars."""
    g = seeded(6)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(40, 1, generator=g, dtype=torch.float64)
    variances = []
    for k in (1.0, 10.0):
        layers = nn.Linear(3, 5, bias=False), nn.LayerNorm(5, eps=1e-30), nn.Tanh(), nn.Linear(5, 1)
        model = nn.Sequential(*layers).double()
        for i, p in enumerate(model.parameters()):
            p.data = torch.randn(p.shape, generator=seeded(i), dtype=torch.float64)
        model[0].weight.data *= k
        posterior = lw.fit(model, (x, y), lw.Gaussian(0.1), structure="full", params=["0.weight", "3.*"])
        settings = lw.EM(n_samples=8, g_prior=True, rtol=1e-4)
        tuned = lw.tune(posterior, (x, y), by=settings, groups="one", generator=seeded(0))
        variances.append(tuned.outputs(x).var)
        ratio = tuned.prior.precisions / tuned.curvature.diagonal()
        assert_close(ratio, torch.full_like(ratio, tuned.history[-1].precisions[0]))
    assert_close(*variances, rtol=1e-6)


# --- predictions from samples -----------------------------------------------------------------------------------


def test_predictions_from_samples():
    model, data = classification()
    tuned = lw.tune(lw.fit(model, data, "classification", structure="kron"), data, by="em", groups="layer")
    x = data[0][:5]
    f, J = oracle.jacobian_batch(model, x)
    zeta = tuned.draws.zeta
    q = torch.einsum("nkp,sp->snk", J, zeta)
    from_samples = lw.from_samples(tuned)
    assert_close(from_samples.outputs(x).cov, torch.einsum("snk,snl->nkl", q, q) / len(q), rtol=1e-8)
    assert_close(from_samples.outputs(x).var, q.square().mean(0), rtol=1e-8)
    flat = q.flatten(1)
    assert_close(from_samples.joint_outputs(x).cov, flat.T @ flat / len(q), rtol=1e-8)
    assert_close(from_samples.functions(len(zeta))(x), f + q, rtol=1e-8)
    assert_close(from_samples.marginal_variance(), zeta.square().mean(0), rtol=1e-12)
    assert_close(from_samples.predict(x).probs.sum(-1), torch.ones(5, dtype=torch.float64), rtol=1e-9)
    many = from_samples.sample(3 * len(zeta)) - from_samples.mean
    assert torch.linalg.matrix_rank(many) == min(len(zeta), zeta.shape[1])


def test_samples_of_another_prior_are_refused():
    model, data = classification()
    tuned = lw.tune(lw.fit(model, data, "classification", structure="kron"), data, by="em", groups="layer")
    for other in (tuned.with_prior(3.0), tuned.with_likelihood(tuned.likelihood, likelihood_scale=0.5)):
        with pytest.raises(lw.StructureError, match="changed since"):
            lw.from_samples(other)
    with pytest.raises(lw.StructureError, match="draws of the weights only"):
        lw.from_samples(tuned).log_evidence()
    with pytest.raises(lw.StructureError, match="Another prior"):
        lw.from_samples(tuned).with_prior(3.0).predict(data[0][:2])


def test_the_quieter_objective():
    """The rule's share against its closed form, with many samples."""
    model, (x, y) = classification(16)
    posterior = lw.fit(model, (x, y), "classification", structure="full")
    em = _Em.of(posterior, source_of(posterior, (x, y)), lw.EM(n_samples=16), False, False, 1 << 20)
    H = curvature(model, x, y, posterior)
    Sigma = torch.linalg.inv(H + torch.diag(posterior.prior.P0.diagonal))
    f, J = oracle.jacobian_batch(model, x)
    Lambda = oracle.hessians("categorical", f, y)
    S = oracle.functional_cov(J, Sigma)
    whole = torch.einsum("nkp,nkl,nlp->", J, Lambda, J)
    in_prior = torch.einsum("nkp,nkl,nlm,nmo,nop->", J, Lambda, S, Lambda, J)
    shares = [target_share(em.H, em.initial_state(seeded(s)).solved.draws, posterior.part_scales) for s in range(20)]
    assert abs(sum(shares) / 20 - float(1 - in_prior / whole)) < 0.05
