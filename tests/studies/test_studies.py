"""Every study: its quick tier from the command line, and its continuation after it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lapwing.cli.reproduce import Options, run_study
from lapwing_studies.reproduce import registry
from lapwing_studies.reproduce.claims import VERDICTS
from study_data import made_up_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of LAPWING_DATA, or one with made-up data of the same form."""
    named = os.environ.get("LAPWING_DATA")
    return Path(named) if named else made_up_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # quick is short: training and tuning warn that they were
@pytest.mark.parametrize("entry", registry.STUDIES, ids=lambda entry: entry.name)
def test_the_quick_tier_runs(entry: registry.Entry, data: Path, tmp_path: Path) -> None:
    record, page, path = run_study(Options(entry.name, data, tmp_path, True, None, False))
    assert record["study"] == entry.name and page.headlines and page.tables
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text and "http-equiv" in text and '<link rel="stylesheet"' not in text
    kept = json.loads((path.parent / "claims.json").read_text(encoding="utf-8"))
    assert kept["claims"] and all(row["verdict"] in VERDICTS for row in kept["claims"])
    assert (path.parent / "picture.png").stat().st_size > 5000


CODE = """
import time
from pathlib import Path
from dataclasses import dataclass
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce import study

@dataclass
class Job:
    name: str
    made_with: str = "v1"
    def run(self):
        with open("{log}", "a") as log:
            print(self.name, file=log)
        time.sleep(0.1 if self.name != "third" or Path("{go}").exists() else 600)
        return {{"name": self.name}}

made = study.Study(DataFolder(None), Store(Path("{out}")), TOY, 1)
print(made.record("some", [Job("first"), Job("second"), Job("third"), Job("fourth")])["runs"])
"""


def test_a_study_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """By SIGKILL in the middle of the third of four jobs: the first two are not run again."""
    log, go = tmp_path / "log", tmp_path / "go"
    words = [sys.executable, "-c", CODE.format(log=log, go=go, out=tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    while not log.exists() or "third" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    go.touch()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert log.read_text().split() == ["first", "second", "third", "third", "fourth"]
    assert done.stdout.split("'")[3::4] == ["first", "second", "third", "fourth"]
    assert "4/4" in done.stderr and "2/4" in done.stderr  # the bar begins with what was kept
