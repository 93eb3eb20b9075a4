"""The record of subnetworks under shift → curves, tables and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.claims import table_of
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, OUTSIDE, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.subnetwork_shift import RANDOM, SUBNETWORK, SubnetworkShiftRecord, claims, curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"ll": "log likelihood", "error": "error", "brier": "Brier score", "ece": "ECE"}
COLOURS = {"MAP": MAP, "diagonal": SAMPLED, "SWAG": MUTED, "dropout": OUTSIDE, "ensemble": INK}
LEVELS = {"rotated": "rotation (degrees)", "corrupted": "severity"}


def page(record: SubnetworkShiftRecord, command: str) -> StudyPage:
    found, kinds = claims(record), _kinds(record)
    return StudyPage(
        title="Few weights, large shifts",
        lead=("Images that drift away from the training data, and a full covariance over some of the weights.",),
        headlines=tuple(Headline(claim.found, f"{claim.says}: {claim.verdict}") for claim in found[:3]),
        figures=tuple(_figure(record, kind) for kind in kinds),
        tables=(table_of(found), *(_table(record, kind, key) for kind in kinds for key in SCORES)),
        notes=(
            "Subnetworks are the weights that vary most along further training (SWAG), as in the paper; the diagonal "
            "posterior has all weights. Prior precisions are chosen by validation NLL. Corruptions are our own, in "
            "place of CIFAR-10-C.",
        ),
        settings=(
            Setting(name="images", value=f"{record['n_train']:,} for training, {record['n_test']:,} for testing"),
            Setting(name="seeds", value=str(record["n_seeds"])),
            Setting(name="time", value=f"{sum(run['seconds'] for run in record['runs']) / 60:.0f} minutes"),
        ),
        command=command,
    )


def _kinds(record: SubnetworkShiftRecord) -> list[str]:
    return list(dict.fromkeys(run["kind"] for run in record["runs"]))


def _methods(record: SubnetworkShiftRecord) -> list[str]:
    return list(dict.fromkeys(row["method"] for run in record["runs"] for row in run["rows"]))


def _table(record: SubnetworkShiftRecord, kind: str, key: str) -> Table:
    shown = [level for level in curve(record, kind, "MAP", key) if kind == "corrupted" or level % 30 == 0]
    rows = []
    for method in _methods(record):
        values = curve(record, kind, method, key)
        rows.append((Cell(method, method), *(Cell(f"{values[level]:.3f}", values[level]) for level in shown)))
    columns = ("method", *(f"{level}°" if kind == "rotated" else str(level) for level in shown))
    see = f"By {LEVELS[kind]}; means over {record['n_seeds']} seeds." if record["n_seeds"] > 1 else "One seed."
    return Table(f"{kind}-{key}", f"{SCORES[key]}, {kind} images", see, columns, tuple(rows))


def _figure(record: SubnetworkShiftRecord, kind: str) -> Figure:
    panels = tuple(
        panel(f"{kind}-{key}", f"{words}, {kind} images.", partial(_paint, record=record, kind=kind, key=key))
        for key, words in SCORES.items()
    )
    return Figure(kind, f"{kind.capitalize()} images", "Teal: subnetworks, full lines; random ones dashed.", panels)


def _paint(ax: Axes, record: SubnetworkShiftRecord, kind: str, key: str) -> None:
    largest = record["sizes"][-1]
    for method in _methods(record):
        values, random = curve(record, kind, method, key), method.startswith(RANDOM)
        colour = COLOURS.get(method, GLM)
        if colour == GLM and not method.endswith(f" {largest}"):
            continue
        wide = method.startswith(SUBNETWORK)
        ax.plot(list(values), list(values.values()), color=colour, linestyle="--" if random else "-",
                linewidth=2.4 if wide else 1.5, label=method)  # fmt: skip
    ax.set(xlabel=LEVELS[kind])
    ax.set_title(SCORES[key])
    if key == "ll":
        ax.legend(fontsize=8, frameon=False)


def picture(record: SubnetworkShiftRecord, path: Path) -> Path:
    kind = _kinds(record)[0]
    return write_picture([partial(_paint, record=record, kind=kind, key=k) for k in SCORES], path, shape=(18.0, 3.8))
