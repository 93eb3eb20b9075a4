"""Several processes, each with a shard of the data, against one process with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranked
from lapwing_studies.bench import ranks as bench


def assert_well(said: list[str]) -> None:
    assert said == [""] * len(said), "\n".join(f"rank {r}: {words}" for r, words in enumerate(said))


def test_two_ranks_give_what_one_process_gives(tmp_path: Path):
    assert_well(ranked.run(ranked.several, 2, tmp_path, ranked.QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", ranked.MODELS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_structure_of_every_model(tmp_path: Path, name: str, world: int):
    args = ([name], [*ranked.STRUCTURES])
    tunings = [(ranked.tuning_equals_one_process, (*args, groups)) for groups in ("one", "layer", None)]
    ways = [(*args, {}), *(([name], ["full"], {"by": by}) for by in ("vi", "vi_diag"))]
    refinements = [(ranked.refinement_equals_one_process, way) for way in ways]
    checks = [(ranked.fits_equal_one_process, args), *tunings, *refinements]
    assert_well(ranked.run(ranked.several, world, tmp_path, checks, timeout=900))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_gp_of_every_model(tmp_path: Path, world: int):
    some = [0, 9, *[23] * (world - 1)]  # with four ranks, two have no data
    # Functions down to 1e-12 of the largest eigenvalue are kept; the last of them have few digits left.
    checks = [
        (ranked.gps_equal_one_process, ([*ranked.MODELS], [*ranked.GPS], None)),
        (ranked.gps_equal_one_process, ([*ranked.MODELS], [*ranked.SPARSE], None, 1e-10)),
        (ranked.gps_equal_one_process, (["classes"], [*ranked.GPS, *ranked.SPARSE], some)),
    ]
    assert_well(ranked.run(ranked.several, world, tmp_path, checks, timeout=900))


@pytest.mark.slow
def test_four_ranks_give_what_one_process_gives(tmp_path: Path):
    assert_well(ranked.run(ranked.several, 4, tmp_path, ranked.QUICK, timeout=900))


@pytest.mark.slow
def test_training_on_two_ranks_is_that_of_one_process(tmp_path: Path):
    assert_well(ranked.run(ranked.training_equals_one_process, 2, tmp_path))


@pytest.mark.slow
def test_sharded_weights_are_refused(tmp_path: Path):
    assert_well(ranked.run(ranked.sharded_weights_are_refused, 2, tmp_path))


@pytest.mark.slow
def test_ranks_with_and_without_data(tmp_path: Path):
    assert_well(ranked.run(ranked.two_of_three_ranks_have_data, 3, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("structure", bench.STRUCTURES)
def test_volume_is_that_of_the_model(structure: str):
    _, received = bench.measured(structure, 2)
    assert received == pytest.approx(bench.model(structure, 2), rel=0.02)


def check_named(said: list[str], dead: int) -> None:
    """Every survivor names the dead rank, within a minute of its own start."""
    assert said[dead] == "it said nothing"
    for words in said[:dead] + said[dead + 1 :]:
        assert "RankError" in words and f"rank {dead} " in words, words
        assert int(words.split()[-2]) < 60, words


def test_a_dead_rank_is_named(tmp_path: Path):
    check_named(ranked.run(ranked.dies_while_fitting, 2, tmp_path, 1, 1, 3.0), 1)


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on(tmp_path: Path):
    assert_well(ranked.run(ranked.suspended_while_fitting, 2, tmp_path, 7.0, 9.0))


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_a_dead_rank_is_named_every_time(tmp_path: Path, attempt: int):
    world, dead = 2 + 2 * (attempt % 2), attempt % 2
    if attempt % 4 < 2:
        said = ranked.run(ranked.dies_while_fitting, world, tmp_path, dead, attempt % 3 % 2, 20.0)
    else:
        said = ranked.run(ranked.dies_before_fitting, world, tmp_path, dead)
    check_named(said, dead)
