"""The same call gives the same bits: twice in a row, in many threads, after hundreds of others."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.bench.memory import resident_mib

STRUCTURES = ["full", "block", "kron", "ekfac", "diag", "lowrank", "gp"]


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    return model.eval(), torch.randn(40, 3), torch.randint(3, (40,))


def tuned(structure: str, fisher: str = "exact") -> lw.Posterior:
    model, X, Y = problem()
    posterior = lw.fit(model, (X, Y), "classification", structure=structure, fisher=fisher)
    return lw.tune(posterior, mode="network")


def answers(posterior: lw.Posterior, x: Tensor) -> list[Tensor]:
    outputs = posterior.outputs(x)
    return [posterior.predict(x).probs, outputs.var, outputs.cov, posterior.functions(2)(x), posterior.log_evidence()]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_fits_have_the_same_bits(structure: str):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    assert_same_bits(answers(tuned(structure), x), answers(tuned(structure), x))


@pytest.mark.slow
def test_two_matrix_free_fits_have_the_same_bits():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    assert_same_bits(answers(tuned("matrixfree"), x), answers(tuned("matrixfree"), x))


def test_sampled_curvature_has_the_same_bits():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    assert_same_bits(answers(tuned("kron", "mc"), x), answers(tuned("kron", "mc"), x))


def in_threads(structure: str, n_predictions: int) -> None:
    """Eight threads ask one posterior that has not been asked before, also under other priors."""
    posterior = tuned(structure)
    model, *_ = problem()
    layered = lw.prior(model, precision=2.0, groups="layer")
    inputs = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(1))

    def asked(thread: int) -> list[list[Tensor]]:
        mine = posterior.with_prior(layered) if thread % 2 else posterior
        return [answers(mine, inputs[(thread + i) % 8]) for i in range(n_predictions)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(asked, range(8)))
    fresh = tuned(structure)
    expected = [[answers(p, x) for x in inputs] for p in (fresh, fresh.with_prior(layered))]
    for thread, each in enumerate(found):
        for i, values in enumerate(each):
            assert_same_bits(values, expected[thread % 2][(thread + i) % 8])


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_threads_share_a_posterior(structure: str):
    in_threads(structure, 2)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_threads_share_a_posterior_for_long(structure: str):
    in_threads(structure, 500)


def grown(n_cycles: int) -> float:
    """How much of the process's memory was added by so many fits and predictions, after a few to warm up."""
    model, X, Y = problem()

    def cycle() -> None:
        posterior = lw.fit(model, (X, Y), "classification", structure="kron")
        posterior.predict(X[:5]).probs.sum()

    for _ in range(15):
        cycle()
    gc.collect()
    before = resident_mib()
    for _ in range(n_cycles):
        cycle()
    gc.collect()
    after = resident_mib()
    if before is None or after is None:
        pytest.skip("the system does not say how much memory a process has")
    return (after - before) / before


def test_memory_does_not_grow():
    assert grown(60) < 0.01


@pytest.mark.slow
def test_memory_does_not_grow_for_long():
    assert grown(500) < 0.01
