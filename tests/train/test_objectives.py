"""Objectives of lw.train against brute force: closed forms, enumerated labels, differences, fixed points."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import lapwing as lw
import oracle
from lapwing.train.divergence import Divergence

DOUBLE = torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def net(c: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, c)).double()


def classes(n: int = 12, c: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, generator=g, dtype=DOUBLE), torch.randint(0, c, (n,), generator=g)


def spread_stds(objective: Any, seed: int = 5) -> None:
    """Log standard deviations that differ from weight to weight."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        objective.log_std.add_(torch.randn(len(objective.log_std), generator=g).to(objective.log_std))


def kl(objective: Any, model: nn.Module) -> Tensor:
    q = Normal(oracle.theta(model), objective.log_std.detach().exp())
    return kl_divergence(q, Normal(torch.zeros_like(q.mean), objective.prior_std)).sum()


def diagonal(model: nn.Module, x: Any, kind: str, y: Tensor, c: int, **options: Any) -> Tensor:
    """diag Σ J_nᵀ Λ_n J_n, from the oracle's own rows."""
    f, J = oracle.jacobian(model, x)
    index = oracle.site_index((c,))
    Lambda = oracle.spread(oracle.hessians(kind, f[:, index], oracle.target_sites(kind, y, index), **options), index)
    return torch.einsum("ncp,ncd,ndp->p", J, Lambda, J)


# --- the linear-Gaussian model, where everything is known -------------------------------------------------------


def linear() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(15, 4, dtype=DOUBLE)
    return nn.Linear(4, 1).double(), x, x @ torch.randn(4, 1, dtype=DOUBLE) + 0.3 * torch.randn(15, 1, dtype=DOUBLE)


def test_exact_fisher_of_a_linear_model_is_the_analytic_elbo():
    model, x, y = linear()
    objective = lw.train.VariationalLaplace(model, lw.Gaussian(0.3), 15, fisher="exact")
    spread_stds(objective)
    J = torch.cat([x, torch.ones(15, 1, dtype=DOUBLE)], 1)
    mean, var = oracle.theta(model), (2 * objective.log_std).exp().detach()
    f = J @ mean
    expected = Normal(f, torch.tensor(0.3, dtype=DOUBLE)).log_prob(y[:, 0]).sum() - 0.5 * (J**2 @ var).sum() / 0.3**2
    assert_close(-15 * objective(x, y).detach(), expected - kl(objective, model), **EXACT)
    assert_close(objective.elbo((x, y)), expected - kl(objective, model), **EXACT)


@pytest.mark.parametrize("kind", ["exact", "pathwise", "sampled"])
def test_optimum_of_a_linear_model_is_the_exact_mean_field_posterior(kind: str):
    model, x, y = linear()
    s2 = torch.tensor([0.25] * 4 + [1.0], dtype=DOUBLE)
    J = torch.cat([x, torch.ones(15, 1, dtype=DOUBLE)], 1)
    A = J.T @ J / 0.3**2 + torch.diag(1 / s2)
    with torch.no_grad():
        mean = torch.linalg.solve(A, J.T @ y[:, 0] / 0.3**2)
        model.weight.copy_(mean[None, :4])
        model.bias.copy_(mean[4:])
    objective = lw.train.VariationalLaplace(model, lw.Gaussian(0.3), 15, fisher=kind)
    with torch.no_grad():
        objective.log_std.copy_(-0.5 * A.diagonal().log())
    objective(x, y).backward()
    assert model.weight.grad.abs().max() < 1e-10 and model.bias.grad.abs().max() < 1e-10
    if kind == "exact":
        assert objective.log_std.grad.abs().max() < 1e-10


def test_mean_field_of_a_linear_model_is_the_analytic_elbo_on_average():
    model, x, y = linear()
    objective = lw.train.MeanField(model, lw.Gaussian(0.3), 15, estimator="local", draws=4000)
    J = torch.cat([x, torch.ones(15, 1, dtype=DOUBLE)], 1)
    expected = Normal(J @ oracle.theta(model), torch.tensor(0.3, dtype=DOUBLE)).log_prob(y[:, 0]).sum()
    expected = expected - 0.5 * (J**2 @ (2 * objective.log_std).exp().detach()).sum() / 0.3**2
    assert_close(-15 * objective(x, y).detach(), expected - kl(objective, model), rtol=2e-3, atol=0)


# --- labels drawn from the model ----------------------------------------------------------------------------------


class Given(lw.Categorical):
    """Draws the labels it was told."""

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        return self.told.reshape(f.shape[:-1])


class GivenBits(lw.Bernoulli):
    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        return self.told.reshape(f.shape).to(f)


@pytest.mark.parametrize(("likelihood", "c", "kind"), [(Given, 3, "categorical"), (GivenBits, 1, "bernoulli")])
def test_penalty_over_all_labels_is_the_ggn_diagonal(likelihood: type, c: int, kind: str):
    model, (x, y) = net(c), classes(3, max(c, 2))
    family = likelihood()
    labels = y if c > 1 else y[:, None].to(DOUBLE)
    objective = lw.train.VariationalLaplace(model, family, 3)
    spread_stds(objective)
    f = model(x).detach()
    p = f.softmax(-1) if c > 1 else torch.cat([torch.sigmoid(-f), torch.sigmoid(f)], -1)
    total = 0.0
    for told in product(range(p.shape[1]), repeat=3):
        object.__setattr__(family, "told", torch.tensor(told))
        objective(x, labels)
        total += torch.stack([p[n, k] for n, k in enumerate(told)]).prod() * objective.parts.penalty * 3
    F = diagonal(model, x, kind, labels, c)
    truth = 0.5 * ((2 * objective.log_std).exp().detach() * F).sum()
    assert_close(total, truth, rtol=1e-12, atol=0)
    object.__setattr__(family, "told", y)  # the observed labels: the empirical Fisher, whose mean does not vanish
    objective(x, labels)
    assert abs(float(objective.parts.penalty * 3 / truth) - 1) > 0.01


FAMILIES = {
    "categorical": (lw.Categorical(weight=[1.0, 2.0, 0.5]), 3, {"weight": torch.tensor([1.0, 2.0, 0.5], dtype=DOUBLE)}),
    "gaussian": (lw.Gaussian([0.5, 1.5]), 2, {"noise_std": torch.tensor([0.5, 1.5], dtype=DOUBLE)}),
    "bernoulli": (lw.Bernoulli(), 2, {}),
    "poisson": (lw.Poisson(), 2, {}),
    "hetero": (lw.HeteroscedasticGaussian(), 2, {}),
}


def targets(kind: str, n: int) -> Tensor:
    g = torch.Generator().manual_seed(2)
    if kind == "categorical":
        return torch.randint(0, 3, (n,), generator=g)
    if kind == "hetero":
        return torch.randn(n, generator=g, dtype=DOUBLE)
    y = torch.randn(n, 2, generator=g, dtype=DOUBLE)
    return y if kind == "gaussian" else (y > 0).to(DOUBLE) if kind == "bernoulli" else (2 * y).abs().floor()


@pytest.mark.parametrize("kind", FAMILIES)
def test_exact_penalty_is_the_oracles(kind: str):
    family, c, options = FAMILIES[kind]
    model, x, y = net(c), classes(5)[0], targets(kind, 5)
    objective = lw.train.VariationalLaplace(model, family, 50, fisher="exact", beta=0.3)
    spread_stds(objective)
    loss = objective(x, y).detach()
    f, index = model(x).detach(), oracle.site_index((c,))
    log_lik = oracle.log_lik(kind, f[:, index], oracle.target_sites(kind, y, index), **options)
    F = diagonal(model, x, kind, y, c, **options)
    penalty = 0.5 * ((2 * objective.log_std).exp().detach() * F).sum()
    assert_close(objective.parts["log_lik"], log_lik / 5, **EXACT)
    assert_close(objective.parts["penalty"], penalty / 5, **EXACT)
    assert_close(objective.parts["kl"], kl(objective, model) / 50, **EXACT)
    assert_close(loss, (penalty - log_lik) / 5 + 0.3 * kl(objective, model) / 50, **EXACT)


@pytest.mark.statistical
@pytest.mark.parametrize("fisher", ["sampled", "pathwise"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_drawn_penalty_is_unbiased_under_any_partition(kind: str, fisher: str):
    """With (S/2) in place of 1/(2 S) for a batch of S, or of the whole, the mean would be off by more than half."""
    family, c, _ = FAMILIES[kind]
    model, x, y = net(c), classes(7)[0], targets(kind, 7)
    exact = lw.train.VariationalLaplace(model, family, 7, fisher="exact")
    drawn = lw.train.VariationalLaplace(model, family, 7, fisher=fisher)
    spread_stds(exact)
    drawn.load_state_dict(exact.state_dict())
    exact(x, y)
    truth = 7 * float(exact.parts.penalty)
    sums = []
    for _ in range(1500):
        total = 0.0
        for some in (slice(0, 3), slice(3, 6), slice(6, 7)):
            drawn(x[some], y[some])
            total += float(drawn.parts.penalty) * len(x[some])
        sums.append(total)
    found = torch.tensor(sums, dtype=DOUBLE)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - truth) < 4 * error
    assert 8 * error < truth / 2  # so the planted mistakes would show


def test_batches_add_up():
    model, (x, y) = net(), classes(11)
    objective = lw.train.VariationalLaplace(model, "classification", 11, fisher="exact", beta=0.7)
    spread_stds(objective)
    whole = objective(x, y).detach()
    parts = [len(x[i : i + 4]) * objective(x[i : i + 4], y[i : i + 4]).detach() for i in range(0, 11, 4)]
    assert_close(sum(parts) / 11, whole, **EXACT)
    assert_close(-11 * whole, objective.elbo((x, y)), **EXACT)
    bound = objective.posterior((x, y)).trained.bound
    assert_close(objective.elbo((x, y), beta=1.0), torch.tensor(bound.total, dtype=DOUBLE), **EXACT)


# --- gradients ----------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation=nn.functional.gelu, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.head(self.inner(x + q).mean(1))


class Recurs(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


GRADIENTS = {
    "mlp": (net, (6, 2)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ).double(),
        (4, 1, 6, 6),
    ),
    "norms in training": (
        lambda: nn.Sequential(
            nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.LayerNorm(4), nn.Linear(4, 3)
        ).double(),
        (6, 2),
    ),
    "attention": (lambda: Attends().double(), (3, 4, 4)),
    "LSTM": (lambda: Recurs(nn.LSTM).double(), (3, 4, 3)),
    "GRU": (lambda: Recurs(nn.GRU).double(), (3, 4, 3)),
    "tied and frozen": (lambda: Tied().double(), (5, 4)),
}
OBJECTIVES = {
    "sampled": lambda m, n: lw.train.VariationalLaplace(m, "classification", n, draws=2),
    "pathwise": lambda m, n: lw.train.VariationalLaplace(m, "classification", n, fisher="pathwise"),
    "exact": lambda m, n: lw.train.VariationalLaplace(m, "classification", n, fisher="exact"),
    "reparam": lambda m, n: lw.train.MeanField(m, "classification", n),
    "local": lambda m, n: lw.train.MeanField(m, "classification", n, estimator="local"),
}


@pytest.mark.parametrize("estimator", OBJECTIVES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_central_differences(name: str, estimator: str):
    make, shape = GRADIENTS[name]
    torch.manual_seed(4)
    model, x, y = make(), torch.randn(shape, dtype=DOUBLE), torch.arange(shape[0]) % 3
    objective = OBJECTIVES[estimator](model, 20)
    spread_stds(objective)
    start = objective.generator.get_state()

    def loss() -> Tensor:
        objective.generator.set_state(start)
        return objective(x, y)

    loss().backward()
    leaves = [p for p in objective.parameters() if p.requires_grad]
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = [torch.randn(p.shape, generator=g, dtype=DOUBLE) for p in leaves]
        slope = sum((p.grad * d).sum() for p, d in zip(leaves, direction, strict=True) if p.grad is not None)
        values = []
        for step in (1e-4, -1e-4, 2e-4, -2e-4):
            with torch.no_grad():
                for p, d in zip(leaves, direction, strict=True):
                    p.add_(d, alpha=step)
                values.append(loss())
                for p, d in zip(leaves, direction, strict=True):
                    p.sub_(d, alpha=step)
        difference = 8 * (values[0] - values[1]) - (values[2] - values[3])  # of fourth order
        assert_close(difference / 12e-4, slope, rtol=1e-6, atol=1e-7)


def test_noise_is_learned_with_its_own_gradient():
    model, x, y = linear()
    for kind in ("exact", "pathwise", "sampled"):
        objective = lw.train.VariationalLaplace(model, lw.Gaussian(0.5, estimated=True), 15, fisher=kind)
        start = objective.generator.get_state()
        objective(x, y).backward()
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                objective.log_noise.add_(step)
                objective.generator.set_state(start)
                values.append(objective(x, y))
                objective.log_noise.sub_(step)
        assert_close(((values[0] - values[1]) / 2e-5)[None], objective.log_noise.grad, rtol=1e-6, atol=1e-8)


# --- fixed points and limits ------------------------------------------------------------------------------------------


def test_variances_at_frozen_means_are_beta_over_prior_plus_fisher():
    model, (x, y) = net(), classes(8)
    objective = lw.train.VariationalLaplace(model, "classification", 8, fisher="exact", beta=0.1)
    optimizer = torch.optim.LBFGS(
        [objective.log_std], max_iter=200, tolerance_grad=1e-13, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 1e3 * objective(x, y)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    F = diagonal(model, x, "categorical", y, 3)
    assert_close((2 * objective.log_std).exp().detach(), 0.1 / (0.1 / objective.prior_std**2 + F), rtol=1e-5, atol=0)
    assert_close(
        objective.posterior((x, y)).curvature.diagonal() * 0.1, F, rtol=1e-3, atol=1e-5
    )  # κ H = 1/σ² − 1/s², κ = 1/β


def test_divergence_is_that_of_torch():
    model, g = net(), torch.Generator().manual_seed(0)
    means = list(model.parameters())
    p = sum(mean.numel() for mean in means)
    log_std, m0 = torch.randn(p, generator=g, dtype=DOUBLE), torch.randn(p, generator=g, dtype=DOUBLE)
    s = torch.rand(4, generator=g, dtype=DOUBLE) + 0.1
    prior = lw.prior(model, s**-2, groups="tensor", mean=m0)
    divergence, std = Divergence(prior, m0), prior.P0.diagonal.rsqrt()

    def ours(log_std: Tensor, *means: Tensor) -> Tensor:
        return divergence(means, log_std, (2 * log_std).exp())

    flat = oracle.theta(model)
    truth = kl_divergence(Normal(flat, log_std.exp()), Normal(m0, std)).sum()
    assert_close(ours(log_std, *means).detach(), truth, rtol=1e-12, atol=0)
    log_std.requires_grad_()
    assert torch.autograd.gradcheck(ours, (log_std, *means))
    at_prior = [m.reshape(mean.shape) for m, mean in zip(m0.split([t.numel() for t in means]), means, strict=True)]
    assert float(ours(std.log(), *at_prior)) == pytest.approx(0, abs=1e-13)


def test_without_variances_it_is_map_with_weight_decay():
    model, (x, y) = net(), classes(8)
    objective = lw.train.VariationalLaplace(model, "classification", 30, beta=0.5)
    with torch.no_grad():
        objective.log_std.fill_(-20)
    objective(x, y).backward()
    nll = nn.functional.cross_entropy(model(x), y)
    plain = torch.autograd.grad(nll, list(model.parameters()))
    decay = 0.5 / (30 * objective.prior_std**2)
    expected = torch.cat([g.flatten() for g in plain]) + decay * oracle.theta(model)
    assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), expected, rtol=1e-9, atol=1e-12)


def test_the_hessian_lets_a_variance_grow_without_bound():
    model, (x, y) = net(), classes(8)
    objective = lw.train.VariationalLaplace(model, "classification", 8, fisher="hessian", prior=1e3)
    with torch.no_grad():
        objective.log_std.fill_(0.0)
        objective(x, y)
        f = model(x)
    names = [n for n, _ in model.named_parameters()]

    def log_lik(theta: Tensor) -> Tensor:
        shapes = [p.shape for p in model.parameters()]
        parts = [t.reshape(s) for t, s in zip(theta.split([s.numel() for s in shapes]), shapes, strict=True)]
        out = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))
        return -nn.functional.cross_entropy(out, y, reduction="sum")

    H = torch.autograd.functional.hessian(log_lik, oracle.theta(model)).diagonal()
    assert_close(objective.parts.penalty * 8, -0.5 * H.sum(), **EXACT)
    assert f.isfinite().all()
    assert bool((H > 1e-4).any())
    with torch.no_grad():
        objective.log_std[int(H.argmax())] = 10.0
        low = objective(x, y)
        objective.log_std[int(H.argmax())] = 20.0
        assert objective(x, y) < 10 * low < 0
    with pytest.raises(lw.InputError, match="cannot be trained"):
        objective(x, y)


@pytest.mark.statistical
def test_local_and_shared_draws_agree_and_local_ones_vary_less():
    model, x, y = linear()
    values, spreads = {}, {}
    for estimator in ("reparam", "local"):
        objective = lw.train.MeanField(model, lw.Gaussian(0.3), 15, estimator=estimator)
        with torch.no_grad():
            objective.log_std.fill_(-1.0)
        log_liks, gradients = [], []
        for _ in range(2000):
            objective.zero_grad()
            objective(x, y).backward()
            log_liks.append(objective.parts.log_lik)
            gradients.append(model.weight.grad.flatten().clone())
        values[estimator], spreads[estimator] = torch.stack(log_liks), torch.stack(gradients).var(0).sum()
    difference = values["local"].mean() - values["reparam"].mean()
    error = sum(v.var() / len(v) for v in values.values()) ** 0.5
    assert abs(difference) < 4 * error
    assert spreads["local"] < 0.5 * spreads["reparam"]
