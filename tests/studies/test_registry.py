"""The list of studies, their tiers, and the commands that run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lapwing.cli.app import app
from lapwing.cli.reproduce import Options
from lapwing.errors import InputError
from lapwing_studies.reproduce import claims, registry
from lapwing_studies.reproduce.claims import Claim


@pytest.mark.parametrize("entry", registry.STUDIES, ids=lambda entry: entry.name)
def test_every_study_has_what_the_command_calls(entry: registry.Entry) -> None:
    assert callable(entry.study.run)
    assert callable(entry.report.page) and callable(entry.claims)
    assert {"quick", "standard"} <= set(entry.tiers) <= set(registry.TIERS)
    assert all(cost.seeds >= 1 and cost.takes for cost in entry.tiers.values())


@pytest.mark.parametrize("entry", registry.STUDIES, ids=lambda entry: entry.name)
def test_a_study_is_short(entry: registry.Entry) -> None:
    """What would make it longer belongs into the shared modules."""
    for module in (entry.study, entry.report):
        assert len(Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()) <= 200


def test_names_are_distinct() -> None:
    assert len(set(registry.names())) == len(registry.STUDIES)
    assert "all" not in registry.names()


def test_the_list_names_every_study_and_tier() -> None:
    shown = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert [name for name in registry.names() if name not in shown.output] == []
    rows = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).stdout)
    assert [row["study"] for row in rows] == registry.names()
    assert rows[0]["tiers"]["standard"]["seeds"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["unheard-of"], "No study is called"),
        ([], "Name a study"),
        (["step", "--tier", "huge"], "--tier must be one of"),
        (["step", "--tier", "faithful"], "no --tier faithful"),
        (["ct", "--tier", "standard", "--quick"], "give one of the two"),
    ],
)
def test_what_cannot_be_run_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path)])
    assert found.exit_code == 1 and said in " ".join(found.stderr.split())


def test_quick_is_a_tier() -> None:
    asked = Options("immer2021-uci", None, Path(), True, None, False)
    assert asked.level == "quick" and asked.n_seeds == 1
    assert asked.command == "lapwing reproduce immer2021-uci --tier quick"
    assert Options("immer2021-uci", None, Path(), False, None, False).n_seeds == 10


def test_all_passes_over_what_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "STUDIES", tuple(map(registry.entry, ("step", "conformal"))))
    arguments = ["reproduce", "all", "--tier", "quick", "--out", str(tmp_path), "--json"]
    step, conformal = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert Path(step["page"]).is_file() and step["problem"] == ""
    assert conformal["page"] == "" and "--data" in conformal["problem"]


def test_a_verdict_follows_the_measurement() -> None:
    assert Claim("a", "b", "c", True).verdict == claims.HOLDS
    assert Claim("a", "b", "c", False).verdict == claims.FAILS
    assert Claim("a", "b", "c", None).verdict == claims.OPEN
    assert claims.at_least("a", 2, [True, True, False]).holds is True
    assert claims.at_least("a", 2, [True, False, False]).holds is False
    assert claims.at_least("a", 2, [True]).holds is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="battery"):
        registry.entry("nothing")
