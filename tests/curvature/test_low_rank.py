"""structure="lowrank": the leading eigenpairs of the GGN, against the dense oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from cases import by_name, over_architectures
from lapwing.operators import DenseRows, GroupedDiagonal, LowRankCurvature
from oracle import assert_close
from truth import Truth


@over_architectures
def test_at_full_rank_it_is_the_full_matrix(case) -> None:
    truth = Truth.of(case)
    p = len(truth.H)
    posterior = truth.fit(structure=lw.LowRank(rank=p))
    d = torch.full((p,), truth.precision, dtype=torch.float64)
    f, J = truth.jacobian
    Sigma = oracle.posterior(truth.H, d)
    assert_close(posterior.curvature.to_dense(), truth.H, rtol=1e-9)
    assert_close(posterior.marginal_variance(), Sigma.diagonal(), rtol=1e-9)
    assert_close(posterior.log_evidence(), oracle.log_evidence(truth.log_lik, truth.H, d, oracle.theta(truth.model)))
    out = posterior.outputs(truth.x)
    assert_close(out.cov, oracle.functional_cov(J, Sigma), rtol=1e-8)
    assert_close(out.var.reshape(f.shape), out.cov.diagonal(dim1=-2, dim2=-1))
    assert_close(posterior.joint_outputs(truth.x).cov, oracle.joint_cov(J, Sigma), rtol=1e-8)


def truncated(H: torch.Tensor, rank: int) -> torch.Tensor:
    values, Q = torch.linalg.eigh(H)
    return (Q[:, -rank:] * values[-rank:]) @ Q[:, -rank:].T


@pytest.mark.parametrize("name", ["mlp-tanh", "mlp-relu", "conv2d-no-bias"])
@pytest.mark.parametrize("rank", [1, 4])
def test_it_keeps_the_leading_eigenpairs_and_drops_the_rest(name: str, rank: int) -> None:
    truth = Truth.of(by_name(name))
    prior = lw.prior(truth.model, 0.6, groups="tensor")
    posterior = truth.fit(structure=lw.LowRank(rank=rank), prior=prior)
    H = truncated(truth.H, rank)
    d = torch.full((len(H),), 0.6, dtype=torch.float64)
    assert_close(posterior.curvature.to_dense(), H, rtol=2e-6)
    assert_close(posterior.covariance(), oracle.posterior(H, d), rtol=2e-6)
    groups = posterior.prior.index
    assert_close(posterior.effective_dimension(), oracle.effective_dimension(H, d, groups), rtol=1e-5)


def regression(n: int = 30) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    return model, x, torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1) + 0.1 * torch.randn(n, 2, dtype=torch.float64)


def test_noise_rescales_the_eigenvalues_without_the_data() -> None:
    model, x, y = regression()
    low = lw.LowRank(rank=7)
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), structure=low)
    again = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.2), structure=low)
    moved = posterior.with_likelihood(lw.Gaussian(noise_std=0.2))
    assert_close(moved.curvature.to_dense(), again.curvature.to_dense(), rtol=1e-7)
    assert_close(moved.log_evidence(), again.log_evidence(), rtol=1e-8)


def test_one_noise_per_output_keeps_the_pairs_of_each_part() -> None:
    model, x, y = regression()
    noise = torch.tensor([0.2, 0.7], dtype=torch.float64)
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=noise), structure=lw.LowRank(rank=5))
    _, J = oracle.jacobian(model, x)
    parts = [truncated(J[:, k].T @ J[:, k], 5) / float(s) ** 2 for k, s in enumerate(noise)]
    assert_close(posterior.curvature.to_dense(), sum(parts), rtol=1e-6)


def test_more_data_are_stacked_below() -> None:
    model, x, y = regression(40)
    posterior = lw.fit(model, (x[:20], y[:20]), lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=50))
    both = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), structure="full")
    updated = posterior.updated((x[20:], y[20:]))
    assert_close(updated.curvature.to_dense(), both.curvature.to_dense(), rtol=1e-9)
    assert_close(updated.log_evidence(), both.log_evidence(), rtol=1e-9)


@pytest.mark.parametrize("by", ["evidence", "fixed_point"])
def test_tuning_by_the_evidence_of_what_is_kept(by: str) -> None:
    model, x, y = regression()
    fitted = lw.fit(model, (x, y), "regression", structure=lw.LowRank(rank=12), prior=lw.prior(model, groups="layer"))
    tuned = lw.tune(fitted, (x, y), by=by)
    theta = tuned.linear_mode()
    gamma = tuned.effective_dimension()
    assert_close(tuned.prior.precisions * tuned.prior.scatter(theta), gamma, rtol=1e-4)


def test_single_precision_reaches_what_its_rounding_allows() -> None:
    model, x, y = regression()
    exact = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=6)).curvature.spectrum()
    single = lw.fit(model.float(), (x, y), lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=6))
    assert_close(single.curvature.spectrum().sort().values, exact.sort().values, rtol=1e-5)


def test_a_shuffling_loader_is_read_in_one_order() -> None:
    model, x, y = regression()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7, shuffle=True)
    posterior = lw.fit(model, data, lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=6))
    again = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=6))
    assert_close(posterior.curvature.to_dense(), again.curvature.to_dense(), rtol=1e-6)


def test_too_few_passes_are_said() -> None:
    model, x, y = regression()
    with pytest.warns(UserWarning, match=r"after 2 passes .* max_passes"):
        lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), structure=lw.LowRank(rank=10, oversample=0, max_passes=2))


def test_a_subnetwork_of_single_weights() -> None:
    model, x, y = regression()
    some = lw.Subnetwork(score="magnitude", k=9)
    low, full = (
        lw.fit(model, (x, y), lw.Gaussian(noise_std=0.5), params=some, structure=s) for s in (lw.LowRank(9), "full")
    )
    assert_close(low.curvature.to_dense(), full.curvature.to_dense(), rtol=1e-9)
    assert_close(low.outputs(x).cov, full.outputs(x).cov, rtol=1e-8)


def test_data_may_go_past_all_that_is_inferred() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            return x.index_put((rows,), x[rows] * self.scale) if len(rows) else x

    x, y = torch.tensor([[1.0, 2.0], [-1.0, 1.0]], dtype=torch.float64), torch.tensor([0, 1])
    data = [(x, y), (-x.abs(), y)]
    fits = [lw.fit(Branching().double(), data, "classification", structure=word) for word in ("lowrank", "full")]
    assert_close(fits[0].covariance(), fits[1].covariance(), 1e-8)


def test_a_condition_beyond_rounding_is_resolved_from_the_rows() -> None:
    """Noise far below the residuals: B = I + N D⁻¹ Nᵀ, once formed, would have lost its ones. Against the SVD of N."""
    g = torch.Generator().manual_seed(0)
    r, p, d = 6, 10, 0.5
    U = torch.linalg.qr(torch.randn(r, r, generator=g, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(p, r, generator=g, dtype=torch.float64))[0]
    s = torch.logspace(-2, 9, r, dtype=torch.float64)
    precisions = torch.full((2,), d, dtype=torch.float64, requires_grad=True)
    P0 = GroupedDiagonal(precisions, torch.arange(p) % 2)
    P = LowRankCurvature.of(DenseRows(U * s @ V.mT)).plus(P0)
    v = torch.randn(3, p, generator=g, dtype=torch.float64)
    inside = v @ V
    solved = (inside / (s**2 + d)) @ V.mT + (v - inside @ V.mT) / d
    assert_close(P.solve(v), solved, rtol=1e-6)
    assert_close(P.logdet(), (s**2 / d).log1p().sum() + p * math.log(d), rtol=1e-8)
    assert_close(torch.autograd.grad(P.logdet(), precisions)[0].sum(), (1 / (s**2 + d)).sum() + (p - r) / d, rtol=1e-6)
    R = P.half_solve(torch.eye(p, dtype=torch.float64)).mT
    assert_close(R @ R.mT @ v.mT, solved.mT, rtol=1e-6)
