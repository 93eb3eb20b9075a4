"""The mutation check itself, on a few lines: what it finds, what it leaves alone, what it plants."""

from __future__ import annotations

import ast
import importlib.util
import time
from pathlib import Path

import pytest

from mutants.forked import forked
from mutants.planting import plant
from mutants.sites import draw, sites

SOURCE = '''
class Precision:
    noise_var: Float[Tensor, ""]
    n: int

    def log_prob(self, r: Tensor, scale: Tensor) -> Tensor:
        """−½ r² / σ²: not − but + is a mistake."""
        return -0.5 * scale * r.square().sum() / self.noise_var

    def solve(self, A: Tensor, b: Tensor) -> Tensor:
        return (A.mT @ b).sqrt() / self.n + 1 / b.log()

    def pieces(self, x: Tensor, n: int) -> Tensor:
        step = max(1, n * len(x) - 1)
        if x.norm() > 2 * n:
            raise ValueError(f"{2 * x} is too long" + " by far")
        rounding = 2 * torch.finfo(x.dtype).eps
        return x[2 * step :].reshape(n - 1, 2 * n)

    def rows(self, n: int) -> int:
        return 2 * self.noise_var
'''


def found(function: str) -> set[tuple[str, str]]:
    whole = frozenset({"n"})
    return {
        (site.kind, site.after) for site in sites("x.py", SOURCE, whole) if site.function == f"Precision.{function}"
    }


def test_every_kind_of_mistake_is_found():
    assert found("log_prob") >= {
        ("factor", "(scale)"),
        ("scale", "(-0.5)"),
        ("power", "(r)"),
        ("sum for mean", "(r.square().mean())"),
        ("times for over", "(-0.5 * scale * r.square().sum() * self.noise_var)"),
        ("variance", "(-0.5 * scale * r.square().sum() / self.noise_var ** 2)"),
    }
    assert found("solve") >= {
        ("transpose", "(A)"),
        ("sides", "(b @ A.mT)"),
        ("root", "(A.mT @ b)"),
        ("1/N", "((A.mT @ b).sqrt())"),
        ("reciprocal", "(b.log())"),
        ("log", "(2 * b.log())"),
        ("sign", "((A.mT @ b).sqrt() / self.n - 1 / b.log())"),
    }


@pytest.mark.parametrize("function", ["pieces", "rows"])
def test_sizes_indices_messages_conditions_and_tolerances_are_left_alone(function: str):
    assert not found(function)


def test_a_mutant_differs_from_the_source_in_its_place_alone():
    for site in sites("x.py", SOURCE, frozenset()):
        planted = site.planted(SOURCE)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(SOURCE))
        start, stop = site.span
        raw, mutant = SOURCE.encode(), planted.encode()
        assert mutant[:start] == raw[:start] and mutant.endswith(raw[stop:])


def test_a_source_that_has_changed_is_refused():
    site = sites("x.py", SOURCE, frozenset())[0]
    with pytest.raises(AssertionError, match="not what the sites were found in"):
        site.planted("#" + SOURCE)


def test_the_draw_is_seeded_spread_over_kinds_and_files_and_unique():
    every = [s for file in ("x.py", "y.py") for s in sites(file, SOURCE, frozenset())]
    drawn = draw(every, 12, seed=1)
    assert drawn == draw(list(reversed(every)), 12, seed=1) != draw(every, 12, seed=2)
    assert len({site.key for site in drawn}) == 12 and len({site.kind for site in drawn}) >= 10
    assert {site.file for site in drawn} == {"x.py", "y.py"}
    assert len(draw(every, 10**6, seed=1)) == len(every)


def test_a_place_keeps_its_key_when_others_move():
    moved = sites("x.py", "import torch\n" + SOURCE, frozenset())
    assert [site.key for site in moved] == [site.key for site in sites("x.py", SOURCE, frozenset())]


def test_a_planted_function_computes_something_else_in_a_child_alone(tmp_path: Path):
    (tmp_path / "planted_here.py").write_text("def half(x: float) -> float:\n    return 0.5 * x\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted_here", tmp_path / "planted_here.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = module.half  # under another name as well
    source = Path(module.__file__).read_text(encoding="utf-8")
    (site,) = (site for site in sites("planted_here.py", source, frozenset()) if site.kind == "factor")

    def work(say):
        plant(site, tmp_path)
        say([module.half(4.0), held(4.0)])

    assert forked(work) == ([[4.0, 4.0]], True)
    assert held(4.0) == 2.0


def test_a_child_that_does_not_end_is_stopped_and_one_that_fails_says_why():
    assert forked(lambda say: (say("started"), time.sleep(60)), limit=0.2) == (["started"], False)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        forked(lambda say: say(1 / 0))
