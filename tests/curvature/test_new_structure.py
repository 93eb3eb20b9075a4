"""Adding a structure takes its operator, its structure and a line in the registry, as CONTRIBUTING says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import test_operator_laws as laws
from lapwing import curvature
from makers import Made, prior, randn
from oracle import assert_close
from toy_structure.operator import LevelCurvature
from toy_structure.structure import Level


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(curvature.STRUCTURES, "level", Level())


def level(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    H = LevelCurvature(torch.rand(3, generator=g, dtype=torch.float64), torch.arange(3).repeat_interleave(4))
    return H, H.levels.repeat_interleave(4).diag(), prior(12, 3, g)


OF_KRONECKER = laws.test_an_uneven_prior_inside_a_block_is_refused
LAWS = [
    law
    for name, law in vars(laws).items()
    if name.startswith("test_") and "make" in inspect.signature(law).parameters and law is not OF_KRONECKER
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_operator_laws_hold(law: Callable[..., None]) -> None:
    more = {"n_positions": 3} if "n_positions" in inspect.signature(law).parameters else {}
    law(level, seed=0, **more)


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    g = torch.Generator().manual_seed(1)
    return model, (randn(40, 3, g=g), torch.randint(2, (40,), generator=g))


def levels_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Each tensor's mean of the diagonal of Σ JᵀΛJ, Λ = diag(p) − p pᵀ."""
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(dict(model.named_parameters()))
    p = model(x).softmax(-1).detach()
    Lambda = p.diag_embed() - p[:, :, None] * p[:, None]
    diagonals = (torch.einsum("ncp,ncd,ndp->p", J.flatten(2), Lambda, J.flatten(2)) for J in jacobians.values())
    return torch.stack([each.mean() for each in diagonals])


def test_a_fit_keeps_what_the_structure_says() -> None:
    model, data = problem()
    posterior = lw.fit(model, data, "classification", structure="level")
    assert_close(posterior.curvature.levels, levels_by_hand(model, data[0]))
    tuned = lw.tune(posterior, data, groups="tensor")
    assert tuned.log_evidence() > posterior.log_evidence()
    assert torch.isfinite(tuned.predict(data[0]).probs).all()


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    model, data = problem()
    posterior = lw.fit(model, data, "classification", structure=Level())
    lw.save(posterior, tmp_path / "level.lapwing")
    read = lw.load(tmp_path / "level.lapwing", model)
    assert read.structure == Level()
    assert torch.equal(read.predict(data[0]).probs, posterior.predict(data[0]).probs)


def test_it_has_a_row_in_the_plan() -> None:
    model, data = problem()
    (row,) = [row for row in lw.plan(model, data, "classification").rows if row.structure == "level"]
    assert row.stored_bytes == 8 * (4 + 32) and row.fits
    assert "level" in str(lw.plan(model, data, "classification"))


def test_more_data_add_up() -> None:
    model, (x, y) = problem()
    first = lw.fit(model, (x[:15], y[:15]), "classification", structure="level")
    both = first.updated((x[15:], y[15:]))
    assert_close(both.curvature.levels, levels_by_hand(model, x))


def test_a_word_that_is_not_registered_is_refused() -> None:
    model, data = problem()
    with pytest.raises(lw.InputError, match='Did you mean "level"'):
        lw.fit(model, data, "classification", structure="levels")
