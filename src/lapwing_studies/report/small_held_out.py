"""The record of tuning with few held-out rows → tables, a figure and a page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, MAP, MUTED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.small_held_out import CLASSES, SIZES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.small_held_out import HeldOutRecord, HeldOutRow

_AXIS = 0.25  # limits of the axis in nats; values beyond are drawn at the edge


@dataclass(frozen=True)
class Runs:
    """All runs of one kind with one number of held-out rows."""

    rows: tuple[tuple[str, HeldOutRow], ...]

    @property
    def losses(self) -> list[float]:
        """Test NLL minus that of the plain network; negative values are gains."""
        return [row["tuned"] - row["network"] for _, row in self.rows]

    @property
    def against_temperature(self) -> float:
        return fmean(row["tuned"] - row["temperature"] for _, row in self.rows)

    @property
    def by_set(self) -> dict[str, float]:
        names = dict.fromkeys(name for name, _ in self.rows)
        return {n: fmean(r["tuned"] - r["network"] for name, r in self.rows if name == n) for n in names}

    @property
    def n_moved(self) -> int:
        return sum(row["moved"] for _, row in self.rows)


def runs(record: HeldOutRecord, n: int, kind: str | None = None) -> Runs:
    kept = [run for run in record["runs"] if kind in (None, run["kind"])]
    return Runs(tuple((run["data"], row) for run in kept for row in run["rows"] if row["n"] == n))


def page(record: HeldOutRecord, command: str) -> StudyPage:
    sizes = [runs(record, n) for n in SIZES if runs(record, n).rows]
    worst_run, worst_set = max(max(r.losses) for r in sizes), max(max(r.by_set.values()) for r in sizes)
    better = sum(r.against_temperature < 0 for r in sizes)
    return StudyPage(
        title="Tuning with few held-out rows",
        lead=(
            f"Networks on {len(set(run['data'] for run in record['runs']))} UCI tables, tuned by "
            "lw.tune(posterior, data, validation=...) with 30, 100 and 300 held-out rows, against the network as it "
            "was trained and the network with a temperature (for numbers: a noise) from the same rows.",
            "The best of many candidates on few rows is best by luck. A choice that knows this changes little where "
            "the rows say little.",
        ),
        headlines=(
            Headline(f"{worst_set:+.3f}", "nats: the worst mean over seeds of any table and size, against the network"),
            Headline(f"{worst_run:+.3f}", f"nats: the worst of {sum(len(r.rows) for r in sizes)} single runs"),
            Headline(f"{better} of {len(sizes)}", "sizes better than temperature scaling on average"),
        ),
        figures=(figure(record),),
        tables=(summary(record), table(record)),
        notes=(
            "Test NLL per row; numbers to predict are in standard deviations of the training targets. The noise of "
            "the plain network is estimated from its training residuals, as people do who hold nothing out.",
        ),
        settings=tuple(_settings(record)),
        command=command,
    )


def summary(record: HeldOutRecord) -> Table:
    rows = []
    for kind in ("classification", "regression"):
        for n in SIZES:
            at = runs(record, n, kind)
            if not at.rows:
                continue
            worst_set = max(at.by_set, key=lambda name, at=at: at.by_set[name])  # type: ignore[misc]
            rows.append((
                Cell(kind, kind), Cell(f"{n}", n), Cell(f"{len(at.rows)}", len(at.rows)),
                _signed(fmean(at.losses)), _signed(at.against_temperature),
                Cell(f"{at.by_set[worst_set]:+.3f} {worst_set}", at.by_set[worst_set]),
                _signed(max(at.losses)), Cell(f"{at.n_moved}", at.n_moved),
            ))  # fmt: skip
    columns = (
        "kind", "held-out rows", "runs", "against the network", "against temperature", "worst table", "worst run",
        "mean moved",
    )  # fmt: skip
    return Table(
        "summary",
        "Differences of test NLL",
        "Means over tables and seeds; below zero tuning gains.",
        columns,
        tuple(rows),
        "Worst table: the largest mean over seeds. Mean moved: runs in which the held-out rows moved the mean.",
    )


def table(record: HeldOutRecord) -> Table:
    rows = []
    for name in dict.fromkeys(run["data"] for run in record["runs"]):
        kind = "classification" if name in CLASSES else "regression"
        found = [runs(record, n, kind).by_set.get(name) for n in SIZES]
        rows.append((Cell(name, name), *(Cell("–", 0.0) if v is None else _signed(v) for v in found)))
    return Table(
        "tables",
        "Test NLL against the network, by table",
        f"Means over {record['n_seeds']} seeds.",
        ("table", *(f"{n} rows" for n in SIZES)),
        tuple(rows),
        "No figure where so many rows would be more than 45 % of the table.",
    )


def _signed(value: float) -> Cell:
    return Cell(f"{value:+.3f}", value)


def figure(record: HeldOutRecord) -> Figure:
    return Figure(
        "losses",
        "Every run",
        f"Test NLL less the network's. Right of zero tuning lost; runs beyond ±{_AXIS:g} lie at the edge.",
        tuple(
            panel(f"rows-{n}", f"{n} held-out rows.", partial(_losses, record=record, n=n), shape=(4.2, 5.6))
            for n in SIZES
        ),
        keys=(Key("gained or kept", "dot glm"), Key("lost", "dot map")),
    )


def _losses(ax: Axes, record: HeldOutRecord, n: int) -> None:
    names = list(dict.fromkeys(run["data"] for run in record["runs"]))
    ax.axvline(0, color=MUTED, linewidth=1.2)
    for row, name in enumerate(names):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
        found = [r["tuned"] - r["network"] for other, r in runs(record, n).rows if other == name]
        ax.scatter(
            [min(max(v, -_AXIS), _AXIS) for v in found], [row] * len(found), s=18, alpha=0.7,
            color=[GLM if v <= 0 else MAP for v in found],
        )  # fmt: skip
    ax.set(xlim=(-_AXIS * 1.05, _AXIS * 1.05), xlabel=f"NLL against the network, {n} rows")
    ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def picture(record: HeldOutRecord, path: Path) -> Path:
    return write_picture([partial(_losses, record=record, n=n) for n in SIZES], path, shape=(13.0, 5.4))


def _settings(record: HeldOutRecord) -> list[Setting]:
    kinds = dict.fromkeys(run["network"] for run in record["runs"])
    return [
        Setting(name="networks", value="MLP 30-30, by seed in turn: " + "; ".join(kinds)),
        Setting(name="seeds", value=str(record["n_seeds"])),
    ]
