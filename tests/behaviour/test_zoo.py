"""Every architecture of the zoo against the dense oracle, in float64."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
import oracle
from cases import CASES, Case, by_name
from oracle import assert_close
from truth import Truth

RTOL = 1e-10


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def truth(request: pytest.FixtureRequest) -> Truth:
    return Truth.of(request.param)


def block_mask(truth: Truth, layout) -> torch.Tensor:
    """1 inside the diagonal block of each module."""
    owner = torch.zeros(layout.p, dtype=torch.long)
    for i, s in enumerate(layout.module_slices.values()):
        owner[s] = i
    return (owner[:, None] == owner).double()


def projections(truth: Truth, layout) -> dict[str, torch.Tensor]:
    return {
        "full": truth.H,
        "block": truth.H * block_mask(truth, layout),
        "diag": truth.H.diagonal().diag(),
    }


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_posterior_equals_the_oracle(truth: Truth, structure: str) -> None:
    posterior = truth.fit(structure=structure)
    H = projections(truth, posterior.layout)[structure]
    f, J = truth.jacobian
    d = torch.full((posterior.layout.p,), truth.precision, dtype=torch.float64)
    Sigma = oracle.posterior(H, d)
    theta = oracle.theta(truth.model)

    assert_close(posterior.mean, theta, rtol=1e-15)
    assert_close(posterior.curvature.to_dense(), H, rtol=RTOL)
    assert_close(posterior.curvature.diagonal(), H.diagonal(), rtol=RTOL)
    assert_close(posterior.covariance(), Sigma, rtol=RTOL)
    assert_close(posterior.marginal_variance(), Sigma.diagonal(), rtol=RTOL)
    evidence = oracle.log_evidence(truth.log_lik, H, d, theta, torch.zeros_like(theta))
    assert_close(posterior.log_evidence(), evidence, rtol=RTOL)
    gamma = oracle.effective_dimension(H, d, torch.zeros(posterior.layout.p, dtype=torch.long))
    assert_close(posterior.effective_dimension(), gamma, rtol=1e-8)

    out = posterior.outputs(truth.x)
    cov = oracle.functional_cov(J, Sigma)
    assert_close(out.mean.reshape(f.shape), f, rtol=RTOL)
    assert_close(out.cov, cov, rtol=RTOL)
    assert_close(out.var.reshape(f.shape), cov.diagonal(dim1=-2, dim2=-1), rtol=RTOL)
    joint = posterior.joint_outputs(truth.x)
    assert_close(joint.mean, f.flatten(), rtol=RTOL)
    assert_close(joint.cov, oracle.joint_cov(J, Sigma), rtol=RTOL)


def test_layout_follows_named_parameters(truth: Truth) -> None:
    posterior = truth.fit(structure="diag")
    names = [name for name, p in truth.model.named_parameters() if p.requires_grad]
    assert list(posterior.layout) == names
    for name, p in truth.model.named_parameters():
        if p.requires_grad:
            assert torch.equal(posterior.mean[posterior.layout[name]], p.detach().flatten())


def test_function_draws_are_linear_in_the_weights(truth: Truth) -> None:
    posterior = truth.fit(structure="full")
    f, J = truth.jacobian
    draws = posterior.functions(3, torch.Generator().manual_seed(7))
    thetas = posterior.sample(3, torch.Generator().manual_seed(7))
    expected = f + torch.einsum("nkp,sp->snk", J, thetas - posterior.mean)
    assert_close(draws(truth.x).reshape(expected.shape), expected, rtol=1e-9)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_batches_do_not_matter(truth: Truth, structure: str) -> None:
    whole = truth.fit(structure=structure)
    n = truth.case.n
    single = [(oracle.slice_x(truth.x, i), truth.y[i : i + 1]) for i in reversed(range(n))]
    pieces = lw.fit(truth.model, single, truth.likelihood(), structure=structure, prior=truth.precision)
    assert pieces.n_data == whole.n_data == n
    assert_close(pieces.curvature.to_dense(), whole.curvature.to_dense(), rtol=RTOL)
    assert_close(pieces.log_evidence(), whole.log_evidence(), rtol=RTOL)


def test_gradient_statistic_is_the_gradient_of_the_log_likelihood(truth: Truth) -> None:
    posterior = truth.fit(structure="diag")
    f, J = truth.jacobian
    index = truth.case.index
    sites = oracle.residuals(truth.case.kind, f[:, index], truth.targets, **truth.options)
    r = torch.zeros_like(f)
    r[:, index.flatten()] = sites.flatten(1)
    expected = torch.einsum("nkp,nk->p", J, r)
    assert_close(posterior.part_scales @ posterior.estimate.statistics.gradients, expected, rtol=RTOL)


def test_most_linear_layers_are_factored_and_traps_are_not() -> None:
    """The rules must be used where they hold, or the library is slow; and nowhere else, or it is wrong."""
    assert Truth.of(by_name("mlp-tanh")).fit(structure="diag").linearised.rest.names == ()
    traps = [c for c in CASES if "outside" in c.note or "overrid" in c.note or "tied" in c.name]
    assert traps
    for case in traps:
        assert Truth.of(case).fit(structure="diag").linearised.rest.names


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "categorical"][:6], ids=lambda c: c.name)
def test_float32_agrees_to_single_precision(case: Case) -> None:
    truth = Truth.of(case)
    reference = truth.fit(structure="full").outputs(truth.x).cov
    model = truth.model.float()
    x = truth.x
    posterior = lw.fit(model, [(x, truth.y)], truth.likelihood(), structure="full", prior=truth.precision)
    out = posterior.outputs(x)
    assert out.cov.dtype == torch.float32
    assert_close(out.cov.double(), reference, rtol=2e-4)
