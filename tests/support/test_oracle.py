"""The oracle against itself, against finite differences, and against values computed elsewhere by quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from cases import CASES, Case, StepFunction, by_name
from oracle import assert_close

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
F64 = torch.float64

# --- the zoo ------------------------------------------------------------------------------------------------


def test_case_names_are_unique_and_many() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 36


@each_case
def test_case_is_small_deterministic_and_of_the_declared_shape(case: Case) -> None:
    a, b = case.make_model(), case.make_model()
    assert torch.equal(oracle.theta(a), oracle.theta(b))
    assert oracle.theta(a).dtype == F64 and len(oracle.theta(a)) <= 160
    x = case.make_x(3)
    out = a(**x) if isinstance(x, dict) else a(*x) if isinstance(x, tuple) else a(x)
    assert getattr(out, "logits", out).shape == (3, *case.datum_shape)
    y = case.make_y(3, out)
    assert len(y) == 3 and torch.equal(y, case.make_y(3, out))


@each_case
def test_jacobian_of_one_datum_at_a_time_equals_that_of_the_batch(case: Case) -> None:
    model, x = case.make_model(), case.make_x(case.n)
    (f, J), (f_batch, J_batch) = oracle.jacobian(model, x), oracle.jacobian_batch(model, x)
    assert J.shape == (case.n, case.index.numel(), len(oracle.theta(model)))
    assert_close(f, f_batch, 1e-12)
    assert_close(J, J_batch, 1e-12)


@each_case
def test_jacobian_agrees_with_a_finite_difference(case: Case) -> None:
    model, x = case.make_model(), case.make_x(case.n)
    J = oracle.jacobian(model, x)[1]
    direction = torch.randn(J.shape[-1], generator=torch.Generator().manual_seed(0), dtype=F64)
    direction *= (J != 0).any(0).any(0)  # idle parameters, and embedding rows that are declared untrained
    ahead, behind = (outputs_moved(model, x, h * direction) for h in (1e-5, -1e-5))
    assert_close(J @ direction, (ahead - behind) / 2e-5, 1e-7)


@each_case
def test_jacobian_columns_can_be_restricted_by_name_and_leave_the_mode_alone(case: Case) -> None:
    model, x = case.make_model(), case.make_x(1)
    first, *others = model.children() if len(list(model.children())) > 1 else [model]
    first.train()
    names = list(oracle.parameters(model))
    J = oracle.jacobian(model, x)[1]
    assert_close(torch.cat([oracle.jacobian(model, x, [name])[1] for name in names], -1), J, 1e-14)
    assert first.training and not any(m.training for m in others)


def outputs_moved(model: nn.Module, x: object, step: Tensor) -> Tensor:
    ps, at = list(oracle.parameters(model).values()), oracle.theta(model)
    nn.utils.vector_to_parameters(at + step, ps)
    with torch.no_grad():
        f = oracle.outputs(model, x)
    nn.utils.vector_to_parameters(at, ps)
    return f


# --- sites and likelihoods ----------------------------------------------------------------------------------


def test_site_index_follows_the_class_axis() -> None:
    assert oracle.site_index(()).tolist() == [[0]]
    assert oracle.site_index((3,)).tolist() == [[0, 1, 2]]
    assert oracle.site_index((2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert oracle.site_index((2, 1, 3), class_axis=1).tolist() == [[0, 3], [1, 4], [2, 5]]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gaussian": [{}, {"noise_std": 0.3}, {"noise_std": torch.tensor([0.3, 2.0, 0.7], dtype=F64)}],
    "categorical": [{}, {"weight": torch.tensor([0.5, 2.0, 1.0], dtype=F64)}, {"ignore_index": 1}],
    "bernoulli": [{}],
    "poisson": [{}],
    "hetero": [{}, {"precision_link": torch.nn.functional.softplus}],
}
each_likelihood = pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind, several in OPTIONS.items() for options in several]
)


def terms(kind: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    f = torch.randn(4, 2, 2 if kind == "hetero" else 3, generator=g, dtype=F64)
    ys = {
        "categorical": torch.tensor([[0, 1], [2, 1], [0, 0], [1, 2]]),
        "bernoulli": (f > 0.3).double(),
        "poisson": torch.poisson(f.exp(), generator=g),
        "hetero": f[..., 0] + 0.5,
    }
    return f, ys.get(kind, f + 0.7)


@each_likelihood
def test_residual_and_hessian_agree_with_finite_differences(kind: str, options: dict[str, Any]) -> None:
    f, y = terms(kind)
    h = 1e-5 * torch.eye(f.shape[-1], dtype=F64)

    def slope(function: Callable[..., Tensor]) -> Tensor:
        steps = [(function(kind, f + e, y, **options) - function(kind, f - e, y, **options)) / 2e-5 for e in h]
        return torch.stack(steps, -1)

    assert_close(oracle.residuals(kind, f, y, **options), slope(oracle.log_prob), 1e-8)
    assert_close(oracle.exact_hessians(kind, f, y, **options), -slope(oracle.residuals), 1e-8)


@each_likelihood
def test_hessian_is_symmetric_and_positive_semidefinite(kind: str, options: dict[str, Any]) -> None:
    f, y = terms(kind)
    Lambda = oracle.hessians(kind, f, y, **options)
    assert_close(Lambda, Lambda.mT, 1e-14)
    assert torch.linalg.eigvalsh(Lambda).min() > -1e-14


def test_hessians_have_their_textbook_forms() -> None:
    f, y = terms("categorical")
    p = f.softmax(-1)
    assert_close(oracle.hessians("categorical", f, y), torch.diag_embed(p) - p[..., :, None] * p[..., None, :], 1e-13)
    f, y = terms("bernoulli")
    assert_close(oracle.hessians("bernoulli", f, y), torch.diag_embed(f.sigmoid() * (-f).sigmoid()), 1e-13)
    f, y = terms("poisson")
    assert_close(oracle.hessians("poisson", f, y), torch.diag_embed(f.exp()), 1e-13)
    f, y = terms("gaussian")
    assert_close(oracle.hessians("gaussian", f, y, noise_std=0.5), 4 * torch.eye(3, dtype=F64).expand(4, 2, 3, 3))


def test_heteroscedastic_fisher_is_the_covariance_of_the_sufficient_statistics() -> None:
    """Λ_f = D Cov(y, y²) D with D = diag(1, dη₂/df₂), written in η₁ = μ/σ², η₂ = −1/(2σ²)."""
    f, y = terms("hetero")
    eta1, eta2 = f[..., 0], -0.5 * f[..., 1].exp()
    cross, last = eta1 / (2 * eta2**2), 1 / (2 * eta2**2) - eta1**2 / (2 * eta2**3)
    cov = torch.stack([torch.stack([-1 / (2 * eta2), cross], -1), torch.stack([cross, last], -1)], -2)
    D = torch.diag_embed(torch.stack([torch.ones_like(eta2), eta2], -1))  # dη₂/df₂ = η₂ for the exponential
    assert_close(oracle.hessians("hetero", f, y), D @ cov @ D, 1e-13)
    log_partition = -(eta1**2) / (4 * eta2) - 0.5 * (-2 * eta2).log() + 0.5 * math.log(2 * math.pi)
    assert_close(oracle.log_prob("hetero", f, y), eta1 * y + eta2 * y**2 - log_partition, 1e-13)


def test_ignored_labels_contribute_nothing() -> None:
    f, y = terms("categorical")
    ignored = y == 1
    assert not oracle.hessians("categorical", f, y, ignore_index=1)[ignored].any()
    assert not oracle.residuals("categorical", f, y, ignore_index=1)[ignored].any()
    kept = oracle.log_prob("categorical", f, y)[~ignored].sum()
    assert_close(oracle.log_lik("categorical", f, y, ignore_index=1), kept, 1e-14)


# --- posterior and evidence ---------------------------------------------------------------------------------


def dense(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f, J, Λ (B, K, K) and y by sites."""
    model, x = case.make_model(), case.make_x(case.n)
    f, J = oracle.jacobian_batch(model, x)
    y = oracle.target_sites(case.kind, case.make_y(case.n, f), case.index)
    return f, J, oracle.spread(oracle.hessians(case.kind, f[:, case.index], y), case.index), y


# The heteroscedastic Λ is the Fisher, not the Hessian; it has its own test above.
@pytest.mark.parametrize("case", [c for c in CASES if c.kind != "hetero"], ids=lambda case: case.name)
def test_ggn_is_the_hessian_of_the_linearised_model(case: Case) -> None:
    f, J, Lambda, y = dense(case)

    def nll(v: Tensor) -> Tensor:
        return -oracle.log_lik(case.kind, (f + J @ v)[:, case.index], y)

    assert_close(oracle.ggn(J, Lambda), torch.autograd.functional.hessian(nll, J.new_zeros(J.shape[-1])), 1e-12)


def regression() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A 3-4-3 tanh network on 7 points: f, J, y, offset, θ, uneven prior precisions."""
    case = by_name("mlp-tanh")
    model, x = case.make_model(), case.make_x(7)
    f, J = oracle.jacobian(model, x)
    at = oracle.theta(model)
    return f, J, case.make_y(7, f), f - J @ at, at, 0.7 + 0.05 * torch.arange(len(at), dtype=F64)


@pytest.mark.parametrize("noise_std", [0.3**0.5, (0.3, 0.9, 2.0)])
@pytest.mark.parametrize("mean", [0.0, 0.4])
def test_one_newton_step_and_evidence_equal_conjugate_regression(noise_std: object, mean: float) -> None:
    f, J, y, offset, at, d = regression()
    s = torch.as_tensor(noise_std, dtype=F64)
    H = oracle.ggn(J, oracle.hessians("gaussian", f[:, None], y[:, None], noise_std=s)[:, 0])
    Sigma = oracle.posterior(H, d)
    blr_mean, blr_cov, log_p = oracle.conjugate_regression(J, y, offset, s, d, mean)
    g = torch.einsum("nkp,nk->p", J, (y - f) / s**2) - d * (at - mean)
    mode = at + Sigma @ g
    assert_close(mode, blr_mean)
    assert_close(Sigma, blr_cov)
    log_lik = oracle.log_lik("gaussian", (offset + J @ mode)[:, None], y[:, None], noise_std=s)
    assert_close(oracle.log_evidence(log_lik, H, d, mode, mean), log_p)


def test_functional_covariance_is_the_function_space_posterior() -> None:
    """J* Σ J*ᵀ = K** − K*N (K + s² I)⁻¹ KN*, jointly and datum by datum."""
    _, J, *_, d = regression()
    J_test = oracle.jacobian(by_name("mlp-tanh").make_model(), by_name("mlp-tanh").make_x(4, seed=5))[1]
    Sigma = oracle.posterior(oracle.ggn(J, torch.eye(3, dtype=F64).expand(7, 3, 3) / 0.3), d)
    A, B = J_test.flatten(0, 1), J.flatten(0, 1)
    K = A @ torch.diag(1 / d) @ A.T
    cross = A @ torch.diag(1 / d) @ B.T
    gram = B @ torch.diag(1 / d) @ B.T + 0.3 * torch.eye(21, dtype=F64)
    joint = oracle.joint_cov(J_test, Sigma)
    assert_close(joint, K - cross @ torch.linalg.inv(gram) @ cross.T)
    blocks = torch.stack([joint[3 * n : 3 * n + 3, 3 * n : 3 * n + 3] for n in range(4)])
    assert_close(oracle.functional_cov(J_test, Sigma), blocks, 1e-13)


def test_effective_dimension_counts_eigenvalues_and_splits_over_groups() -> None:
    _, J, *_ = regression()
    H = oracle.ggn(J, torch.eye(3, dtype=F64).expand(7, 3, 3))
    eigenvalues = torch.linalg.eigvalsh(H)
    groups = torch.arange(len(H)) % 3
    gamma = oracle.effective_dimension(H, 0.7, groups)
    assert gamma.shape == (3,)
    assert_close(gamma.sum(), (eigenvalues / (eigenvalues + 0.7)).sum())
    Sigma = oracle.posterior(H, 0.7)
    assert_close(gamma[1], (1 - 0.7 * torch.diagonal(Sigma))[groups == 1].sum())


# --- values computed elsewhere ------------------------------------------------------------------------------


def mode_of(model: nn.Module, x: Tensor, y: Tensor, d: float) -> tuple[Tensor, Tensor, Tensor]:
    """Newton with the GGN to the mode of a Bernoulli model: θ*, posterior precision, log evidence."""
    for _ in range(60):
        f, J = oracle.jacobian_batch(model, x)
        sites, labels = f[:, None], y[:, None, None]
        Lambda = oracle.hessians("bernoulli", sites, labels)[:, 0]
        H, at = oracle.ggn(J, Lambda), oracle.theta(model)
        g = torch.einsum("nkp,nk->p", J, oracle.residuals("bernoulli", sites, labels)[:, 0]) - d * at
        nn.utils.vector_to_parameters(at + 0.5 * oracle.posterior(H, d) @ g, model.parameters())
    assert g.abs().max() < 1e-10
    evidence = oracle.log_evidence(oracle.log_lik("bernoulli", sites, labels), H, d, at)
    return at, H + d * torch.eye(len(at), dtype=F64), evidence


@pytest.mark.parametrize(
    ("alpha", "mode", "precision", "evidence"),
    [
        (1.0, (0.84153639, 0.03323085), (3.19830965, 0.18092847, 2.23033330), -4.31864485),
        (0.1, (1.28108262, 0.02006048), (1.26646942, 0.05059777, 1.04535878), -5.31145615),
    ],
)
def test_logistic_regression(
    alpha: float, mode: tuple[float, ...], precision: tuple[float, ...], evidence: float
) -> None:
    x = torch.tensor([-2, -1, -0.5, 0.5, 1, 2, 3], dtype=F64)[:, None]
    y = torch.tensor([0, 0, 1, 0, 1, 1, 1], dtype=F64)
    at, A, log_z = mode_of(nn.Linear(1, 1).double(), x, y, alpha)
    assert_close(at, mode, 1e-7)
    assert_close(torch.stack([A[0, 0], A[0, 1], A[1, 1]]), precision, 1e-8)
    assert_close(log_z, evidence, 1e-8)


@pytest.mark.parametrize(
    ("v", "w", "precision", "evidence"),
    [(1.0, 0.633059, (3.019755, 2.564434), -1.418702), (4.0, 0.871582, (0.729885, 0.659727), -1.219249)],
)
def test_step_function(v: float, w: float, precision: tuple[float, float], evidence: float) -> None:
    x = torch.tensor([-2, -1.5, -1, 1, 1.5, 2], dtype=F64)
    at, A, log_z = mode_of(StepFunction().double(), x, (x > 0).double(), 1 / v)
    assert_close(at, (w, 0.0), 1e-5)
    assert_close(A, torch.diag(torch.tensor(precision, dtype=F64)), 1e-5)
    assert_close(log_z, evidence, 1e-5)


# --- the comparison itself ----------------------------------------------------------------------------------


def test_assert_close_shows_the_worst_entry() -> None:
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
    a = b.clone()
    a[1, 0] = 6.0
    with pytest.raises(AssertionError, match=r"worst entry \(1, 0\): 6\.0 against 3\.0, ratio 2;"):
        assert_close(a, b)
    assert_close(b + 1e-11, b)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_assert_close_refuses_what_is_not_finite_or_of_another_shape(bad: float) -> None:
    b = torch.ones(3, dtype=F64)
    with pytest.raises(AssertionError):
        assert_close(b * bad, b)
    with pytest.raises(AssertionError):
        assert_close(b, b * bad)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close(b[:, None], b)


# --- Kronecker factors --------------------------------------------------------------------------------------------


def test_patches_of_a_convolution_are_those_of_unfold() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1), groups=2).double()
    x = torch.randn(1, 4, 5, 6, dtype=F64)
    columns = nn.functional.unfold(x, (2, 3), dilation=(2, 1), padding=1, stride=(1, 2))[0].T  # (R, channels · taps)
    assert_close(oracle.patches(conv, x), columns.unflatten(-1, (2, -1)), 1e-14)


def test_kronecker_layers_reproduce_the_output() -> None:
    """W a + b at the patches is what the layer computes, for a transposed convolution with groups too."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2).double()
    x = torch.randn(1, 4, 3, dtype=F64)
    W = layer.weight.flatten()[oracle.weight_index(layer)]
    s = torch.einsum("rqi,qoi->rqo", oracle.patches(layer, x), W).flatten(1) + layer.bias
    assert_close(s.T[None], layer(x), 1e-14)


def test_kron_block_is_row_major() -> None:
    A, B = torch.randn(1, 3, 3, dtype=F64), torch.randn(1, 2, 2, dtype=F64)
    V = torch.randn(2, 3, dtype=F64)
    H = oracle.kron_block(A, B, torch.arange(6).reshape(1, 2, 3), 6)
    assert_close((H @ V.flatten()).reshape(2, 3), B[0] @ V @ A[0].T, 1e-14)


def test_the_oracle_finds_the_layers_and_leaves_traps_alone() -> None:
    def found(name: str) -> list[str]:
        case = by_name(name)
        return list(oracle.layers(case.make_model(), case.make_x(2)))

    assert found("attention-batch-first") == ["attn", "attn.out_proj", "head"]
    assert found("tied-weights") == ["mix"]
    for trap in ("weight-used-outside", "never-called", "closure", "branching"):
        assert found(trap) == []
