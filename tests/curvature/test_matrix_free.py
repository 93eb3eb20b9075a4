"""structure="matrixfree": the full GGN by products, against the dense oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
import test_operator_laws as laws
from cases import Case, by_name, over_architectures
from lapwing.linalg import CG, Estimated, Rademacher
from lapwing.operators import DiagonalCurvature, GroupedDiagonal
from makers import MATRIX_FREE, matrix_free_with, prior, randn
from oracle import assert_close
from truth import Truth

over_makers = pytest.mark.parametrize("make", MATRIX_FREE, ids=lambda m: m.__name__)
EXACT = lw.MatrixFree(solver=lw.CG(rtol=1e-11), probes=lw.UnitVectors())


# --- the laws of operators, where every unit vector is a probe --------------------------------------------------


@over_makers
@pytest.mark.parametrize("seed", [0, 1])
def test_laws(make, seed: int) -> None:
    laws.test_to_dense_and_mv(make, seed)
    laws.test_solve_and_inverse_diagonal(make, seed)
    laws.test_half_solve_is_a_root_of_the_inverse(make, seed)
    laws.test_logdet(make, seed)
    laws.test_quadratic_forms(make, 1, seed)
    laws.test_gradients_in_prior_and_scale(make, seed)


@over_makers
def test_scaled_and_mixed(make) -> None:
    (H, H_dense, P0), (other, other_dense, _) = make(0), make(10)
    scales = torch.tensor([0.5, 3.0], dtype=torch.float64)
    both = H.mixed([other], scales)
    truth = 0.5 * H_dense + 3 * other_dense
    assert_close(both.to_dense(), truth)
    assert_close(H.mixed([H], scales).to_dense(), 3.5 * H_dense)
    assert len(H.mixed([H], scales).sources) == 1
    assert_close(both.plus(P0).logdet(), torch.linalg.slogdet(truth + P0.diagonal.diag())[1])
    assert_close(both.norm(), torch.linalg.eigvalsh(truth)[-1], rtol=1e-3)
    with pytest.raises(lw.StructureError, match="eigenvalues"):
        H.spectrum()


def test_second_derivatives_are_refused_not_wrong() -> None:
    H, _, P0 = MATRIX_FREE[0](0)
    delta = P0.values.clone().requires_grad_()
    logdet = H.plus(GroupedDiagonal(delta, P0.index)).logdet()
    with pytest.raises(lw.StructureError, match="no second ones"):
        torch.autograd.grad(logdet, delta, create_graph=True)


# --- architectures ----------------------------------------------------------------------------------------------


@over_architectures
def test_it_is_the_full_posterior(case: Case) -> None:
    """Attention, recurrent and weight-normed networks included; each verb to the tolerance of the solver."""
    truth = Truth.of(case)
    _, J = truth.jacobian
    p = len(truth.H)
    posterior = truth.fit(structure=EXACT)
    d = torch.full((p,), truth.precision, dtype=torch.float64)
    Sigma = oracle.posterior(truth.H, d)
    v = randn(3, p, g=torch.Generator().manual_seed(0))
    assert_close(posterior.curvature.mv(v), v @ truth.H)
    assert_close(posterior.precision.solve(v), v @ Sigma, rtol=1e-8)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(J, Sigma), rtol=1e-8)
    assert_close(posterior.joint_outputs(truth.x).cov, oracle.joint_cov(J, Sigma), rtol=1e-8)
    assert_close(posterior.curvature.diagonal(), truth.H.diagonal())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mlp-relu", lw.Kron()),
        ("count", lw.Diag()),
        ("mlp-tanh", lw.LowRank(3)),
        ("heteroscedastic", lw.Block()),
        ("one-logit", lw.Ekfac()),
        ("mlp-relu", lw.Nystrom(5)),
        ("count", None),
    ],
)
def test_evidence_and_dimensions(name: str, near: Any) -> None:
    truth = Truth.of(by_name(name))
    structure = replace(EXACT, preconditioner=near)
    posterior = truth.fit(structure=structure, prior=lw.prior(truth.model, 0.6, groups="tensor"))
    d = torch.full((len(truth.H),), 0.6, dtype=torch.float64)
    assert_close(posterior.log_evidence(), oracle.log_evidence(truth.log_lik, truth.H, d, oracle.theta(truth.model)))
    gamma = oracle.effective_dimension(truth.H, d, posterior.prior.index)
    assert_close(posterior.effective_dimension(), gamma, rtol=1e-8)
    assert_close(posterior.marginal_variance(), oracle.posterior(truth.H, d).diagonal(), rtol=1e-8)
    assert posterior.evidence().std_error == 0.0


# --- at the tolerance and with the probes that are the default -----------------------------------------------------


def problem(kind: str, n: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    y = torch.randint(3, (n,)) if kind == "classification" else torch.randn(n, 3, dtype=torch.float64)
    return model, x, y


def test_the_stated_tolerance_holds() -> None:
    """Solves to 1e-6, variances to 1e-4 and better: the error of a quadratic form is that of the solve, squared."""
    model, x, y = problem("classification")
    free, full = (lw.fit(model, (x, y), "classification", structure=s, prior=0.1) for s in ("matrixfree", "full"))
    v = randn(4, full.layout.p, g=torch.Generator().manual_seed(1))
    assert_close(free.precision.solve(v), full.precision.solve(v), rtol=1e-5)
    tight = replace(free.curvature, solver=CG(rtol=1e-8)).plus(free.prior.P0)
    assert_close(tight.solve(v), full.precision.solve(v), rtol=1e-6)
    assert_close(free.outputs(x).var, full.outputs(x).var, rtol=1e-4)
    assert_close(free.predict(x).probs, full.predict(x).probs, rtol=1e-4)


def test_estimates_repeat_themselves_and_state_their_error() -> None:
    model, x, y = problem("classification")
    free, full = (lw.fit(model, (x, y), "classification", structure=s) for s in ("matrixfree", "full"))
    again = lw.fit(model, (x, y), "classification", structure="matrixfree")
    evidence = free.evidence()
    assert float(evidence.total) == float(again.log_evidence()) and evidence.std_error > 0
    assert abs(float(evidence.total - full.log_evidence())) < 4 * evidence.std_error
    gamma = float(full.effective_dimension().sum())
    assert float(free.effective_dimension().sum()) == pytest.approx(gamma, rel=0.2)
    variance, truth = free.marginal_variance(), full.marginal_variance()
    assert bool((variance > 0).all() and (variance <= 1).all())
    assert float((variance / truth).log().abs().median()) < 0.2


def test_single_precision() -> None:
    model, x, y = problem("classification")
    full = lw.fit(model, (x, y), "classification", structure="full")
    free = lw.fit(model.float(), (x, y), "classification", structure=lw.MatrixFree(solver=lw.CG(rtol=1e-4)))
    assert_close(free.outputs(x).cov, full.outputs(x).cov, rtol=1e-3)


def test_other_priors_noise_and_data() -> None:
    model, x, y = problem("regression")
    fitted = lw.fit(model, (x[:12], y[:12]), lw.Gaussian(noise_std=0.5), structure=EXACT)
    full = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.3), structure="full", prior=2.0)
    moved = fitted.updated((x[12:], y[12:])).with_prior(2.0).with_likelihood(lw.Gaussian(noise_std=0.3))
    assert_close(moved.log_evidence(), full.log_evidence(), rtol=1e-9)
    assert_close(moved.outputs(x).cov, full.outputs(x).cov, rtol=1e-8)


def test_merged_saved_and_what_is_refused(tmp_path: Path) -> None:
    model, x, y = problem("regression")
    parts = [lw.fit(model, (x[s], y[s]), lw.Gaussian(0.5), structure=EXACT) for s in (slice(8), slice(8, None))]
    full = lw.fit(model, (x, y), lw.Gaussian(0.5), structure="full")
    merged = lw.merge(parts)
    assert_close(merged.log_evidence(), full.log_evidence(), rtol=1e-9)
    lw.save(merged, tmp_path / "free.lapwing")
    assert_close(lw.load(tmp_path / "free.lapwing", model).outputs(x).cov, full.outputs(x).cov, rtol=1e-9)
    with pytest.raises(lw.StructureError, match="Fit again"):
        parts[0].downdated((x[:2], y[:2]))


def test_one_noise_per_output() -> None:
    model, x, y = problem("regression")
    noise = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    found = []
    for structure in (EXACT, "full"):
        posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=noise), structure=structure)
        evidence = posterior.log_evidence()
        found.append((evidence, *torch.autograd.grad(evidence, noise)))
    assert_close(found[0][0], found[1][0], rtol=1e-9)
    assert_close(found[0][1], found[1][1], rtol=1e-7)


def test_draws_of_weights_and_functions_agree_and_repeat() -> None:
    model, x, y = problem("classification")
    posterior = lw.fit(model, (x, y), "classification", structure=lw.MatrixFree(solver=lw.CG(rtol=1e-10)))
    f, J = oracle.jacobian(model, x)
    thetas = posterior.sample(3, torch.Generator().manual_seed(7))
    draws = posterior.functions(3, torch.Generator().manual_seed(7))(x)
    assert_close(draws, f + torch.einsum("nkp,sp->snk", J, thetas - posterior.mean), rtol=1e-9)
    assert torch.equal(posterior.sample(2), posterior.sample(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_tuning_finds_the_maximum_of_the_exact_evidence(kind: str) -> None:
    model, x, y = problem(kind)
    likelihood = "classification" if kind == "classification" else lw.Gaussian(noise_std=0.7)
    free, full = (lw.tune(lw.fit(model, (x, y), likelihood, structure=s), (x, y)) for s in (lw.MatrixFree(), "full"))
    moved = abs(float((free.prior.precisions / full.prior.precisions).log()))
    assert moved < 0.3, moved
    assert float(full.log_evidence() - full.with_prior(free.prior).log_evidence()) < 0.5
    assert "matrixfree" in str(free.diagnose())


@pytest.mark.parametrize("near", [lw.Nystrom(), lw.Diag(), None], ids=["nystrom", "diag", "none"])
def test_a_subnetwork(near: Any) -> None:
    model, x, y = problem("regression")
    some, likelihood = lw.Subnetwork(score="magnitude", k=9), lw.Gaussian(noise_std=0.5)
    free = lw.fit(model, (x, y), likelihood, params=some, structure=replace(EXACT, preconditioner=near))
    full = lw.fit(model, (x, y), likelihood, params=some, structure="full")
    assert_close(free.outputs(x).cov, full.outputs(x).cov, rtol=1e-8)
    assert_close(free.log_evidence(), full.log_evidence(), rtol=1e-9)


# --- statistics -------------------------------------------------------------------------------------------------


def trial(seed: int, correct: float = 1.0) -> tuple[Estimated, float]:
    """A log-determinant by 16 probes, whose values are off by a factor when a bug is planted; and the truth."""
    g = torch.Generator().manual_seed(seed)
    M, P0 = randn(30, 40, g=g), prior(40, 3, g)
    near = DiagonalCurvature((M**2).sum(0))
    H = matrix_free_with(near, M, probes=Rademacher(16, seed=seed), solver=CG(rtol=1e-6))
    found, exact = H.plus(P0).estimate.value, float(near.plus(P0).logdet())
    planted = replace(found, value=exact + correct * (found.value - exact))
    return planted, float(torch.logdet(M.T @ M + P0.diagonal.diag()))


def inside(correct: float = 1.0) -> int:
    found = [trial(seed, correct) for seed in range(200)]
    return sum(low <= truth <= high for e, truth in found for low, high in [e.interval(0.99)])


@pytest.mark.statistical
def test_the_log_determinant_lies_in_its_interval() -> None:
    assert inside() >= 194


@pytest.mark.statistical
def test_a_wrong_quadrature_would_be_noticed() -> None:
    assert inside(correct=0.9) < 194


def covariance_excess(posterior: lw.Posterior, truth: Tensor, n: int) -> float:
    """n ‖Σ̂ − Σ‖² in whitened coordinates over its expectation: 1 for the right covariance."""
    deviations = posterior.sample(n, torch.Generator().manual_seed(5)) - posterior.mean
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(truth), deviations.T, upper=False)
    p = len(truth)
    error = (white @ white.T / n - torch.eye(p, dtype=torch.float64)).square().sum()
    return float(error) * n / (p * (p + 1))


@pytest.mark.statistical
def test_draws_have_the_covariance() -> None:
    model, x, y = problem("classification", 20)
    posterior = lw.fit(model, (x, y), "classification", structure="matrixfree")
    truth = lw.fit(model, (x, y), "classification", structure="full").covariance()
    assert covariance_excess(posterior, truth, 2000) == pytest.approx(1, abs=0.15)
    assert covariance_excess(posterior, truth + 0.1 * truth.diagonal().diag(), 2000) > 1.5  # a planted bug
    assert covariance_excess(posterior, 0.9 * truth, 2000) > 1.5


# --- preconditioners ----------------------------------------------------------------------------------------------


def test_a_sketch_lies_below_the_curvature_and_is_all_of_it_at_full_rank() -> None:
    model, x, y = problem("classification")
    H = lw.fit(model, (x, y), "classification", structure="full").curvature.to_dense()
    for rank in (1, 5, 12):
        N = lw.fit(model, (x, y), "classification", structure=lw.Nystrom(rank)).curvature.to_dense()
        assert int(torch.linalg.matrix_rank(N)) == rank
        assert float(torch.linalg.eigvalsh(H - N)[0]) > -1e-10 * float(H.norm())
    whole = lw.fit(model, (x, y), "classification", structure=lw.Nystrom(len(H))).curvature
    assert_close(whole.to_dense(), H, rtol=1e-8)


def test_a_sketch_of_nothing_is_nothing() -> None:
    model, x, y = problem("regression")
    for p in model.parameters():
        p.data.zero_()
    nothing = lw.fit(model, (0 * x, y), lw.Gaussian(0.5), structure=lw.Nystrom(2), params=["0.weight"])
    assert float(nothing.curvature.to_dense().abs().max()) == 0


def near_in(memory: Any) -> Any:
    model, x, y = problem("classification")
    return lw.fit(model, (x, y), "classification", structure="matrixfree", memory=memory).structure.preconditioner


def test_the_preconditioner_is_cut_to_the_memory_down_to_none() -> None:
    """31 parameters: a quarter of them; then ¾ (memory − 8 vectors) in blocks of four; then the prior alone."""
    vector = 8 * 31
    assert near_in(None) == lw.Nystrom(8)
    assert near_in(8 * vector + 3 * 4 * vector * 4 // 3 + 8) == lw.Nystrom(3)
    assert near_in(8 * vector + 4 * vector) is None
    with pytest.raises(lw.InputError, match="more than the budget"):
        near_in(7 * vector)


def test_the_plan_says_which_preconditioner_the_fit_takes() -> None:
    model, x, y = problem("classification")
    for memory, how in ((None, "8 random directions"), (8 * 8 * 31 + 4 * 8 * 31, "the prior alone")):
        line = next(
            r for r in lw.plan(model, (x, y), "classification", memory=memory).rows if r.structure == "matrixfree"
        )
        assert line.how == f"products with all of it, preconditioned by {how}"


def test_leading_eigenpairs_precondition_a_trained_network() -> None:
    """Several times fewer iterations than without, with eigenpairs and with the rough ones of a sketch."""
    torch.manual_seed(0)
    x = torch.randn(60, 1, 6, 6, dtype=torch.float64)
    y = (x[:, 0, 1, 1] > x[:, 0, 4, 4]).long() + 2 * (x.sum((1, 2, 3)) > 0).long()
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    optimiser = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    counts = []
    for near in (None, lw.LowRank(40, rtol=0.1), lw.Nystrom(40)):
        structure = lw.MatrixFree(preconditioner=near)
        posterior = lw.fit(model, (x, y), "classification", structure=structure, prior=0.3)
        b = randn(2, posterior.layout.p, g=torch.Generator().manual_seed(0))
        counts.append(max(found.iterations for found in posterior.precision.solutions(b)))
    assert counts[0] >= 3 * counts[1] and counts[0] >= 2.5 * counts[2], counts
