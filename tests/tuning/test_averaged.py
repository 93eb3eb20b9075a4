"""Curvature averaged over the posterior of the outputs: its matrix, when `tune` uses it, and its effect."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.data import as_batches
from lapwing.data.targets import encoded_batches
from lapwing.posterior.findings import training_gap
from lapwing.refinement import averaged
from oracle import assert_close
from test_linear_mode import STRUCTURES, problem
from test_refine import At, structured

RULE = 1e-6  # of the quadrature, which takes as many nodes as the widest Gaussian of a batch asks for


def in_expectation(posterior: lw.Posterior) -> lw.Posterior:
    return averaged(
        posterior, lambda: encoded_batches(posterior.source, posterior.likelihood, posterior.sites, progress=False)
    )


def fitted(structure: object = "full", *, prior: float = 0.3, **options: object) -> tuple[lw.Posterior, Tensor]:
    model, x, y = problem("classification", n=12, c=2)
    return lw.fit(model, (x, y), "classification", prior=prior, structure=structure, **options), x


# --- the matrix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_has_its_share_of_the_averaged_curvature(structure: str):
    posterior, x = fitted(structure)
    f, J = oracle.jacobian(posterior.linearised.network.model, x)
    before = torch.linalg.inv(posterior.precision.to_dense())
    Lambda = oracle.average_hessians(f, oracle.functional_cov(J, before))
    expected = structured(structure, posterior, x, At(J, f, Lambda, torch.zeros(()), torch.zeros(())))
    assert_close(in_expectation(posterior).curvature.to_dense(), expected, rtol=RULE)


def test_one_logit_is_two_classes():
    """σ(f) with variance v is the softmax of (0, f) with that variance in the second logit."""
    model, x, y = problem("multilabel", n=12, c=1)
    posterior = lw.fit(model, (x, y), "binary", prior=0.3, structure="full")
    f, J = oracle.jacobian(model, x)
    var = oracle.functional_cov(J, torch.linalg.inv(posterior.precision.to_dense()))
    two = oracle.average_hessians(nn.functional.pad(f, (1, 0)), nn.functional.pad(var, (1, 0, 1, 0)))
    expected = oracle.ggn(J, two[:, 1:, 1:])
    assert_close(in_expectation(posterior).curvature.to_dense(), expected, rtol=1e-8)


def test_without_spread_it_is_the_curvature_at_the_network():
    posterior, _ = fitted(prior=1e14)
    assert_close(in_expectation(posterior).curvature.to_dense(), posterior.curvature.to_dense(), rtol=1e-8)


def test_batches_and_their_order_do_not_matter():
    (posterior, x), (_, _, y) = fitted("kron"), problem("classification", n=12, c=2)
    few = replace(posterior, source=as_batches([(x[i : i + 5], y[i : i + 5]) for i in (5, 0, 10)]))
    assert_close(in_expectation(few).curvature.to_dense(), in_expectation(posterior).curvature.to_dense(), rtol=RULE)


def test_a_sure_network_bends_more_in_expectation():
    posterior, _ = sure()
    assert float(in_expectation(posterior).curvature.trace()) > 2 * float(posterior.curvature.trace())


# --- when it is taken ---------------------------------------------------------------------------------------------


@cache
def sure() -> tuple[lw.Posterior, tuple[Tensor, Tensor]]:
    """A classifier of three classes that lie apart, trained without weight decay, and more data of the same kind."""
    torch.manual_seed(0)
    y = torch.arange(160) % 3
    x = 3.0 * nn.functional.one_hot(y, 6).double() + 0.6 * torch.randn(160, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:80]), y[:80]).backward()
        optimiser.step()
    return lw.fit(model, (x[:80], y[:80]), "classification", structure="full"), (x[80:], y[80:])


def nll(posterior: lw.Posterior, data: tuple[Tensor, Tensor]) -> float:
    return -float(posterior.predict(data[0]).log_prob(data[1]).mean())


@cache
def tuned(**options: str) -> lw.Posterior:
    return lw.tune(sure()[0], **options)


def test_what_decides_does_not_depend_on_how_the_data_are_cut():
    """The first 64 data, in batches of any size; the 65th does not count."""
    posterior, classic = sure()[0], tuned(curvature_at="network")
    x, y = posterior.source.first()[0].args[0], posterior.source.first()[1]
    whole = training_gap(classic, as_batches((x, y)))
    pieces = [(x[some], y[some]) for some in torch.arange(64).split([5, 40, 19])]
    assert whole > 0.03
    assert_close(torch.tensor(training_gap(classic, as_batches(pieces))), torch.tensor(whole), rtol=1e-6)
    assert abs(training_gap(classic, as_batches((x[1:], y[1:]))) - whole) > 1e-6


def test_tune_averages_where_the_evidence_unlearns_the_training_data():
    new = sure()[1]
    default, classic = tuned(), tuned(curvature_at="network")
    assert default.estimate.in_expectation and not classic.estimate.in_expectation
    assert nll(default, new) < nll(classic, new) - 0.02
    assert any(finding.name == "curvature" for finding in default.diagnose().concerns)
    assert not any(finding.name == "curvature" for finding in classic.diagnose().findings)
    assert_close(tuned(curvature_at="posterior").curvature.to_dense(), default.curvature.to_dense())


def test_precisions_are_at_the_maximum_of_the_evidence_with_that_curvature():
    posterior = tuned()
    logs = posterior.prior.precisions.detach().log().requires_grad_()
    value = posterior.with_prior(posterior.prior.with_precisions(logs.exp())).log_evidence()
    (slope,) = torch.autograd.grad(value, logs)
    assert float(slope.abs().max()) < 1e-5


def test_held_out_data_need_no_average():
    posterior, held_out = sure()
    assert not lw.tune(posterior, validation=held_out).estimate.in_expectation


def test_regression_and_unsure_classes_keep_the_curvature_of_the_network():
    model, x, y = problem("regression")
    assert not lw.tune(lw.fit(model, (x, y), "regression", structure="kron")).estimate.in_expectation
    model, x, y = problem("classification")
    assert not lw.tune(lw.fit(model, (x, y), "classification", structure="kron")).estimate.in_expectation


def test_tuning_again_begins_with_the_curvature_of_the_network():
    again = lw.tune(tuned(), curvature_at="network")
    assert not again.estimate.in_expectation
    assert_close(again.curvature.to_dense(), sure()[0].curvature.to_dense())
    assert_close(again.prior.precisions, tuned(curvature_at="network").prior.precisions, rtol=1e-4)


def test_a_file_keeps_it(tmp_path: object):
    lw.save(tuned(), f"{tmp_path}/net.lapwing")
    loaded = lw.load(f"{tmp_path}/net.lapwing", sure()[0].linearised.network.model)
    assert loaded.estimate.in_expectation
    assert nll(loaded, sure()[1]) == nll(tuned(), sure()[1])


# --- what cannot be done ------------------------------------------------------------------------------------------


def test_data_cannot_be_taken_out_again():
    _, (x, y) = sure()
    with pytest.raises(lw.LapwingError, match="averaged"):
        tuned().downdated((x[:3], y[:3]))


def test_evidences_of_different_curvatures_are_warned_of():
    with pytest.warns(UserWarning, match="averaged over their posterior"):
        lw.compare([tuned(), tuned(curvature_at="network")])
