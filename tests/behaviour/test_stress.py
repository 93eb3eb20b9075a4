"""Numbers at the edge: singular curvature, huge condition numbers, extreme logits, priors and data weights."""

from __future__ import annotations

import itertools

import mpmath
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.operators import DensePrecision, GroupedDiagonal
from lapwing.predictive.counts import log_mean_poisson

PRECISIONS = (1e-8, 1.0, 1e8)
SCALES = (1.0, 1e8)
STRUCTURES = ("full", "block", "kron", "ekfac", "diag")


def network(n_outputs: int, last: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, n_outputs)).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(last)
        model[2].bias.mul_(last)
    return model


def inputs(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Two of the three features are the same: curvature without full rank."""
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 1] = x[:, 0]
    return x.to(dtype)


def rows(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = list(model.parameters())
    f = model(x)
    J = [torch.autograd.grad(v, parameters, retain_graph=True) for v in f.flatten()]
    return f.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in J]).reshape(*f.shape, -1)


def exact(model: nn.Module, x: torch.Tensor, at: torch.Tensor, delta: float, kappa: float) -> tuple[float, float]:
    """Variance of the first logit and log det P, in 50 digits, from the float64 Jacobian and logits."""
    with mpmath.workdps(50):
        f, J = rows(model, x)
        p = J.shape[-1]
        P = mpmath.mpf(delta) * mpmath.eye(p)
        for logits, J_n in zip(f.tolist(), J, strict=True):
            e = [mpmath.e ** (mpmath.mpf(v) - max(logits)) for v in logits]
            q = [v / sum(e) for v in e]
            L = mpmath.matrix([[(q[i] if i == j else 0) - q[i] * q[j] for j in range(len(q))] for i in range(len(q))])
            Jm = mpmath.matrix(J_n.tolist())
            P += mpmath.mpf(kappa) * Jm.T * L * Jm
        j = mpmath.matrix(rows(model, at)[1][0, 0].tolist())
        return float((j.T * mpmath.lu_solve(P, j))[0]), float(mpmath.log(mpmath.det(P)))


@pytest.mark.parametrize("last", [1.0, 3e4], ids=["moderate", "extreme logits"])
@pytest.mark.parametrize("n", [3, 12], ids=["dual", "primal"])
def test_full_is_right_or_says_that_it_cannot_be(n: int, last: float) -> None:
    model, x = network(2, last), inputs(n)
    y, at, refused = torch.arange(n) % 2, inputs(20)[19:], 0
    posterior = lw.fit(model, (x, y), "classification", structure="full")
    for delta, kappa in itertools.product(PRECISIONS, SCALES):
        one = posterior.with_prior(delta).with_likelihood(lw.Categorical(), likelihood_scale=kappa)
        variance, logdet = exact(model, x, at, delta, kappa)
        try:
            got = float(one.outputs(at).var[0, 0]), float(one.precision.logdet())
        except lw.NumericalError as error:
            assert "condition number" in str(error) and "smallest eigenvalue" in str(error)
            refused += 1
            continue
        assert got[0] == pytest.approx(variance, rel=0.05)
        assert got[1] == pytest.approx(logdet, rel=1e-2, abs=0.05)
    assert refused <= 2  # of six


@pytest.mark.parametrize("strong", [1e8, 1e16, 1e22])
def test_a_group_that_is_switched_off_takes_no_digits_from_the_others(strong: float) -> None:
    """The evidence drives precisions of groups without use up to 1e12 times their curvature."""
    posterior = lw.fit(network(2, 1.0), (inputs(40), torch.arange(40) % 2), "classification", structure="full")
    index = torch.arange(posterior.layout.p) // 16  # the first layer, the second
    P0 = GroupedDiagonal(torch.tensor([0.5, strong], dtype=torch.float64), index)
    precision = posterior.curvature.plus(P0)
    half = P0.diagonal.rsqrt()
    H = posterior.curvature.to_dense()
    scaled = half[:, None] * H * half + torch.eye(len(half), dtype=H.dtype)  # well-conditioned
    assert isinstance(precision, DensePrecision)
    covariance = precision.solve((1 / half).diag()) / half
    torch.testing.assert_close(covariance, torch.linalg.inv(scaled), rtol=1e-10, atol=1e-12)
    assert float(precision.logdet()) == pytest.approx(float(torch.logdet(scaled) + P0.logdet()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("word", "c"), [("classification", 3), ("binary", 1), ("regression", 2), ("count", 1)])
def test_everything_is_finite_or_refused(word: str, c: int, structure: str, dtype: torch.dtype) -> None:
    x = inputs(12, dtype)
    y = {"classification": torch.arange(12) % 3, "regression": x[:, :2] * 3}.get(word, torch.arange(12) % 2)
    for last in (1.0, 3e4) if word != "count" else (1.0,):
        posterior = lw.fit(network(c, last, dtype), (x, y), word, structure=structure)
        for delta, kappa in itertools.product(PRECISIONS, SCALES):
            one = posterior.with_prior(delta).with_likelihood(posterior.likelihood, likelihood_scale=kappa)
            try:
                check_finite(one, x[:3] * 3, y[:3])
            except lw.NumericalError as error:
                assert delta < 1, error


def check_finite(posterior: lw.Posterior, x: torch.Tensor, y: torch.Tensor) -> None:
    outputs = posterior.outputs(x)
    variances = {"var": outputs.var, "marginal": posterior.marginal_variance()}
    others = {"cov": outputs.cov, "evidence": posterior.log_evidence(), "draws": posterior.sample(2)}
    prediction = posterior.predict(x)
    variances |= {"epistemic": prediction.epistemic, "aleatoric": prediction.aleatoric}
    others |= {"log_prob": prediction.log_prob(y), "dimension": posterior.effective_dimension()}
    for name, value in (variances | others).items():
        assert torch.isfinite(value).all(), name
        assert name not in variances or (value >= 0).all(), name


@pytest.mark.parametrize("v", [1e-6, 1e-2, 1.0, 30.0, 1e4, 1e8])
@pytest.mark.parametrize("m", [-5.0, 3.0, 12.0])
@pytest.mark.parametrize("y", [0, 1, 1000])
def test_counts_at_any_variance(y: int, m: float, v: float) -> None:
    """Against a trapezoidal sum of four million points."""
    value = log_mean_poisson(*(torch.tensor([t], dtype=torch.float64) for t in (float(y), m, v)))
    low = m - 12 * v**0.5 - min(v * torch.tensor(m).exp().item(), max(m, 0.0) + 12)
    high = min(m + 12 * v**0.5 + v * y, max(m, 0.0, torch.tensor(y + 1.0).log().item()) + 8)
    f = torch.linspace(low, high, 4_000_001, dtype=torch.float64)
    log_terms = y * f - f.exp() - torch.lgamma(torch.tensor(y + 1.0, dtype=torch.float64)) - (f - m) ** 2 / (2 * v)
    truth = torch.logsumexp(log_terms, 0) + (f[1] - f[0]).log() - 0.5 * torch.log(torch.tensor(2 * torch.pi * v))
    assert float(value) == pytest.approx(float(truth), rel=1e-6, abs=1e-6)
