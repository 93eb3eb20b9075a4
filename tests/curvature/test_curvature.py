"""Kinds of curvature, subsets of parameters, priors and the exact Hessian, against the oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lapwing as lw
import oracle
from cases import CASES, by_name
from lapwing.operators import DenseCurvature, LowRankCurvature
from oracle import assert_close
from truth import NOISE, Truth

SMALL = ["mlp-tanh", "mlp-relu"]
SEVERAL = [
    c for c in CASES if c.name in SMALL or c.kind in ("bernoulli", "poisson", "hetero") or len(c.datum_shape) > 1
]


def sampled_fisher(truth: Truth, n_draws: int, scale: float = 1.0):
    """Mean and standard error of MC-Fisher curvatures over many independent draws."""
    generator = torch.Generator().manual_seed(3)
    total, squares = 0.0, 0.0
    for _ in range(n_draws):
        H = scale * truth.fit(structure="full", fisher="mc", generator=generator).curvature.to_dense()
        total, squares = total + H, squares + H**2
    mean = total / n_draws
    return mean, ((squares / n_draws - mean**2) / n_draws).clamp(min=0).sqrt()


def within_five_errors(mean, error, truth) -> bool:
    return bool(((mean - truth).abs() <= 5 * error + 1e-12).all())


@pytest.mark.statistical
@pytest.mark.parametrize("case", SEVERAL[:8], ids=lambda c: c.name)
def test_sampled_fisher_is_unbiased(case) -> None:
    truth = Truth.of(case)
    mean, error = sampled_fisher(truth, 400)
    assert within_five_errors(mean, error, truth.H)
    planted = 1.5  # a mis-scaled estimator must be caught by the same check
    assert not within_five_errors(planted * mean, planted * error, truth.H)


def test_sampled_fisher_averages_its_draws() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    fisher = lw.Sampled(torch.Generator().manual_seed(0), n_draws=3000)
    mean = truth.fit(structure="diag", fisher=fisher).curvature.diagonal()
    assert_close(mean, truth.H.diagonal(), rtol=0.1)


@pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.name)
def test_empirical_fisher(case) -> None:
    """Σ over terms of r rᵀ, no products between terms."""
    truth = Truth.of(case)
    f, J = truth.jacobian
    r = oracle.residuals(case.kind, f[:, case.index], truth.targets, **truth.options)
    per_term = torch.einsum("ntcp,ntc->ntp", J[:, case.index], r)
    H = torch.einsum("ntp,ntq->pq", per_term, per_term)
    assert_close(truth.fit(structure="full", fisher="empirical").curvature.to_dense(), H)
    assert_close(truth.fit(structure="diag", fisher="empirical").curvature.diagonal(), H.diagonal())


def test_empirical_fisher_scales_with_the_fourth_power_of_the_noise() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    posterior = truth.fit(structure="full", fisher="empirical")
    other = posterior.with_likelihood(lw.Gaussian(noise_std=2 * NOISE))
    assert_close(other.curvature.to_dense(), posterior.curvature.to_dense() / 16)


NO_LAYER_CALLED = {"parameter-list", "never-called"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NO_LAYER_CALLED], ids=lambda c: c.name)
def test_last_layer_equals_the_oracle_on_its_parameters(case) -> None:
    truth = Truth.of(case)
    posterior = truth.fit(structure="full", params="last_layer")
    names = list(posterior.layout)
    _, J = oracle.jacobian(truth.model, truth.x, names)
    H = oracle.ggn(J, truth.Lambda)
    d = torch.full((posterior.layout.p,), truth.precision, dtype=torch.float64)
    assert_close(posterior.curvature.to_dense(), H)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(J, oracle.posterior(H, d)))


@pytest.mark.parametrize("name", sorted(NO_LAYER_CALLED))
def test_last_layer_of_a_model_that_calls_no_layer_is_refused(name: str) -> None:
    with pytest.raises(lw.InputError, match="last_layer"):
        Truth.of(by_name(name)).fit(params="last_layer")


def test_a_class_token_is_not_the_last_layer() -> None:
    class WithToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(3))
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x + self.token)

    data = (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    assert list(lw.fit(WithToken(), data, "classification", params="last_layer").layout) == ["head.weight", "head.bias"]


def test_last_layer_is_the_module_called_last_and_needs_no_backward_pass(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(6, 3).double(), torch.tensor([0, 1, 0, 1, 1, 0])
    posterior = lw.fit(model, (x, y), "classification", params="last_layer", structure="full")
    assert list(posterior.layout) == ["2.weight", "2.bias"]

    import lapwing.network.layers.capture as capture

    def forbidden(*args, **kwargs):
        raise AssertionError("autodiff through the body")

    with posterior.linearised.trace(lw.data.as_input(x)) as trace:
        monkeypatch.setattr(capture.torch.autograd, "grad", forbidden)
        J = trace.jacobian().dense()
    a = torch.cat([model[:2](x), torch.ones(6, 1)], 1).detach()
    expected = torch.zeros(6, 2, 12, dtype=torch.float64)
    for c in range(2):
        expected[:, c, 5 * c : 5 * c + 5] = a[:, :5]
        expected[:, c, 10 + c] = 1
    assert_close(J, expected)


def test_named_subsets_in_model_order() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    every = [n for n, _ in truth.model.named_parameters()]
    chosen = truth.fit(params=[every[-1], "*weight"], structure="full")
    names = [n for n in every if n.endswith("weight") or n == every[-1]]
    assert list(chosen.layout) == names
    _, J = oracle.jacobian(truth.model, truth.x, names)
    assert_close(chosen.curvature.to_dense(), oracle.ggn(J, truth.Lambda))


def test_rows_become_a_matrix_when_there_are_more_of_them_than_parameters() -> None:
    case = by_name("mlp-tanh")
    few, many = Truth.of(case, n=2), Truth.of(case, n=60)
    assert isinstance(few.fit(structure="full").curvature, LowRankCurvature)
    posterior = many.fit(structure="full")
    assert isinstance(posterior.curvature, DenseCurvature)
    assert_close(posterior.curvature.to_dense(), many.H)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_tiny_memory_gives_the_same_curvature(structure: str) -> None:
    truth = Truth.of(by_name("mlp-tanh"), n=9)
    budget = {"full": 2**19, "block": 2**19, "diag": 2**16}[structure]
    small = truth.fit(structure=structure, memory=budget)
    assert_close(small.curvature.to_dense(), truth.fit(structure=structure).curvature.to_dense(), rtol=1e-12)


GROUPS = ["one", "layer", "tensor", "element"]


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("n", [2, 40])
def test_grouped_priors_with_a_mean(groups: str, structure: str, n: int) -> None:
    truth = Truth.of(by_name("mlp-tanh"), n=n)
    g = torch.Generator().manual_seed(4)
    template = lw.prior(truth.model, groups=groups)
    values = torch.rand(len(template.group_names), generator=g, dtype=torch.float64) + 0.3
    mean = torch.randn(template.layout.p, generator=g, dtype=torch.float64)
    prior = lw.prior(truth.model, precision=values, groups=groups, mean=mean)
    posterior = truth.fit(structure=structure, prior=prior)
    H, d, theta = posterior.curvature.to_dense(), values[prior.index], oracle.theta(truth.model)
    expected = oracle.log_evidence(truth.log_lik, H, d, theta, mean)
    assert_close(posterior.log_evidence(), expected)
    assert_close(posterior.covariance(), oracle.posterior(H, d))
    assert_close(posterior.effective_dimension(), oracle.effective_dimension(H, d, prior.index), rtol=1e-8)
    again = truth.fit(structure=structure).with_prior(prior)
    assert_close(again.log_evidence(), expected)


def test_groups_are_what_they_say() -> None:
    model = by_name("mlp-tanh").make_model()
    tensors = [n for n, _ in model.named_parameters()]
    assert lw.prior(model, groups="tensor").group_names == tuple(tensors)
    layers = list(dict.fromkeys(n.rpartition(".")[0] for n in tensors))
    assert lw.prior(model, groups="layer").group_names == tuple(layers)
    by_name_prior = lw.prior(model, groups="layer", precision={name: 1.0 + i for i, name in enumerate(layers)})
    assert by_name_prior.precisions.tolist() == [1.0 + i for i in range(len(layers))]


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.name)
def test_updated_equals_a_fit_on_all_data(case, structure: str) -> None:
    truth = Truth.of(case, n=5)
    first = [(oracle.slice_x(truth.x, i), truth.y[i : i + 1]) for i in range(2)]
    rest = [(oracle.slice_x(truth.x, i), truth.y[i : i + 1]) for i in range(2, 5)]
    posterior = lw.fit(truth.model, first, truth.likelihood(), structure=structure, prior=truth.precision)
    both = posterior.updated(rest)
    whole = truth.fit(structure=structure)
    assert both.n_data == 5
    assert_close(both.curvature.to_dense(), whole.curvature.to_dense())
    assert_close(both.log_evidence(), whole.log_evidence())


@pytest.mark.parametrize("n", [2, 30])
def test_noise_per_output(n: int) -> None:
    truth = Truth.of(by_name("mlp-tanh"), n=n)
    c = truth.case.datum_shape[0]
    noise = [0.3 + 0.4 * i for i in range(c)]
    f, J = truth.jacobian
    Lambda = torch.diag(1 / torch.tensor(noise, dtype=torch.float64) ** 2).expand(n, c, c)
    H = oracle.ggn(J, Lambda)
    posterior = lw.fit(truth.model, [(truth.x, truth.y)], lw.Gaussian(noise_std=noise), structure="full", prior=1.3)
    assert_close(posterior.curvature.to_dense(), H)
    theta = oracle.theta(truth.model)
    log_lik = oracle.log_lik(
        "gaussian", f[:, truth.case.index], truth.targets, noise_std=torch.tensor(noise, dtype=torch.float64)
    )
    expected = oracle.log_evidence(log_lik, H, torch.full_like(theta, 1.3), theta, torch.zeros_like(theta))
    assert_close(posterior.log_evidence(), expected)


@pytest.mark.parametrize("kappa", [0.25, 3.0])
def test_likelihood_scale_tempers_the_likelihood_and_never_the_prior(kappa: float) -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    posterior = truth.fit(structure="full", likelihood_scale=kappa)
    d = torch.full((posterior.layout.p,), truth.precision, dtype=torch.float64)
    theta = oracle.theta(truth.model)
    assert_close(posterior.covariance(), oracle.posterior(kappa * truth.H, d))
    expected = oracle.log_evidence(kappa * truth.log_lik, kappa * truth.H, d, theta, torch.zeros_like(theta))
    assert_close(posterior.log_evidence(), expected)


def test_auto_is_full_for_small_networks_and_kronecker_for_larger_ones() -> None:
    x, y = torch.randn(4, 30), torch.tensor([0, 1, 0, 1])
    small = nn.Sequential(nn.Linear(30, 4), nn.Tanh(), nn.Linear(4, 2))
    wide = nn.Sequential(nn.Linear(30, 400), nn.Tanh(), nn.Linear(400, 2))
    found = [type(lw.fit(m, (x, y), "classification").structure) for m in (small, wide)]
    assert found == [lw.Full, lw.Kron]


def test_a_parametrised_tensor_behind_its_modules_children_is_a_block_of_its_own() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.randn(2))
            self.c = nn.Linear(3, 2)
            self.w = nn.Parameter(torch.randn(2, 2))
            nn.utils.parametrizations.weight_norm(self, "w")

        def forward(self, x):
            return self.c(x) @ self.w + self.b

    model = nn.Sequential(Inner()).double()
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    posterior = lw.fit(model, (x, y), "classification", structure="block", prior=lw.prior(model, groups="layer"))
    slices = list(posterior.layout.module_slices.values())
    assert [s.start for s in slices[1:]] == [s.stop for s in slices[:-1]] and slices[-1].stop == posterior.layout.p
    assert posterior.marginal_variance().shape == (posterior.layout.p,)
    assert len(posterior.prior.index) == posterior.layout.p


# --- the exact Hessian -------------------------------------------------------------------------------


HESSIAN_CASES = [by_name(n) for n in SMALL] + [c for c in SEVERAL if c.kind in ("poisson", "hetero", "bernoulli")][:3]


@pytest.mark.parametrize("case", HESSIAN_CASES, ids=lambda c: c.name)
def test_exact_hessian_equals_finite_differences_of_the_gradient(case) -> None:
    truth = Truth.of(case)
    posterior = truth.fit(structure="full")
    found = lw.exact_hessian(posterior, [(truth.x, truth.y)]).matrix
    model = copy.deepcopy(truth.model)
    ps = list(oracle.parameters(model).values())

    def gradient() -> torch.Tensor:
        f = oracle.outputs(model, truth.x)[:, case.index]
        nll = -oracle.log_prob(case.kind, f, truth.targets, **truth.options).sum()
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(nll, ps)])

    rows, h = [], 1e-5
    for p in ps:
        for i in range(p.numel()):
            with torch.no_grad():
                p.view(-1)[i] += h
            up = gradient()
            with torch.no_grad():
                p.view(-1)[i] -= 2 * h
            rows.append((up - gradient()) / (2 * h))
            with torch.no_grad():
                p.view(-1)[i] += h
    assert_close(found, torch.stack(rows), rtol=1e-6)


def test_exact_hessian_of_a_linear_gaussian_model_is_the_ggn_and_makes_the_same_posterior() -> None:
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    posterior = lw.fit(model, (x, y), lw.Gaussian(0.5), structure="full")
    exact = lw.exact_hessian(posterior, (x, y))
    assert exact.distance < 1e-12
    assert_close(exact.to_posterior().covariance(), posterior.covariance())
    assert_close(exact.to_posterior().log_evidence(), posterior.log_evidence())


def test_an_indefinite_hessian_refuses_to_be_a_posterior() -> None:
    truth = Truth.of(by_name("mlp-tanh"))
    exact = lw.exact_hessian(truth.fit(structure="full", prior=1e-3), [(truth.x, truth.y)])
    assert exact.n_negative > 0
    with pytest.raises(lw.NumericalError, match="negative eigenvalues"):
        exact.to_posterior()
