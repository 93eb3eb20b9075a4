"""The record of the table of Antorán et al. (2022), scaled down → tables, a figure and a page."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, OUTSIDE, SAMPLED
from lapwing_studies.report.palette import MAP as MAP_COLOUR
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.published import ANTORAN_2022

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.antoran import AntoranRecord, Row

PLAIN = ("none (MAP)", "–")
WAYS = tuple((evidence, prior) for evidence in ("linear mode", "trained weights") for prior in ("single", "multiple"))
COLOURS = {"linear mode": GLM, "trained weights": SAMPLED, "none (MAP)": MAP_COLOUR}


def page(record: AntoranRecord, command: str) -> StudyPage:
    first = record["runs"][0]
    n_better, n = better(record)
    return StudyPage(
        title="The evidence at the right mode",
        lead=(
            "Antorán et al. (2022) showed that the evidence of a linearised network must be evaluated at the linear "
            "model's own mode, not at the trained weights, and with a precision of its own for each normalised group.",
            f"Here on {first['data']}, {first['n_train']:,} training images and networks of about 46,000 parameters: a "
            "small copy, whose ordering can be compared with the published one, not its numbers.",
        ),
        headlines=(
            Headline(f"{n_better} of {n}", "columns (network × prior) where the linear mode has the better NLL"),
            *(
                Headline(_arrow(record, prior), f"mean NLL, {prior} precision: trained weights → linear mode")
                for prior in ("single", "multiple")
            ),
        ),
        figures=(figure(record),),
        tables=(nll_table(record), published_table(record), *(other_table(record, *words) for words in _OTHERS)),
        notes=(
            "What differs from the paper: fewer training images, smaller images, a Kronecker posterior over all "
            "parameters (norm scales and shifts included) instead of the exact one over weights, our own sizes and "
            "training of the networks, early stopping, the network's own output as predictive mean, and Lapwing's "
            "default link.",
            "“Multiple” means one precision per normalised group for networks with normalisation, one per layer for "
            "the others.",
        ),
        settings=_settings(record),
        command=command,
    )


_OTHERS = (
    ("ece", "Calibration", "Expected calibration error, ten bins; lower is better."),
    ("error", "Error", "Share of wrong labels."),
    ("precision", "Prior precision", "Geometric mean over weights, mean over seeds."),
)


def networks(record: AntoranRecord) -> list[str]:
    return list(dict.fromkeys(run["network"] for run in record["runs"]))


def values(record: AntoranRecord, network: str, way: tuple[str, str], key: str) -> list[float]:
    """One number per seed."""
    runs = [run for run in record["runs"] if run["network"] == network]
    return [_number(row, key) for run in runs for row in run["rows"] if (row["evidence"], row["prior"]) == way]


def _number(row: Row, key: str) -> float:
    value = row[key]  # type: ignore[literal-required]
    return math.nan if value is None else float(value)


def better(record: AntoranRecord) -> tuple[int, int]:
    """In how many columns, out of how many, evidence at the linear mode has the smaller mean NLL."""
    pairs = [(network, prior) for network in networks(record) for prior in ("single", "multiple")]
    wins = [
        fmean(values(record, network, ("linear mode", prior), "nll"))
        < fmean(values(record, network, ("trained weights", prior), "nll"))
        for network, prior in pairs
    ]
    return sum(wins), len(wins)


def _arrow(record: AntoranRecord, prior: str) -> str:
    means = [
        fmean(fmean(values(record, network, (evidence, prior), "nll")) for network in networks(record))
        for evidence in ("trained weights", "linear mode")
    ]
    return f"{means[0]:.3f} → {means[1]:.3f}"


def nll_table(record: AntoranRecord) -> Table:
    return Table(
        "nll",
        "Test NLL",
        f"Means over {record['n_seeds']} seeds ± standard error; lower is better.",
        ("evidence at", "precisions", *networks(record)),
        tuple(_line(record, way, "nll") for way in (PLAIN, *WAYS)),
    )


def other_table(record: AntoranRecord, key: str, title: str, see: str) -> Table:
    ways = WAYS if key == "precision" else (PLAIN, *WAYS)
    return Table(
        key, title, see, ("evidence at", "precisions", *networks(record)), tuple(_line(record, w, key) for w in ways)
    )


def published_table(record: AntoranRecord) -> Table:
    rows = tuple(
        (Cell(p["evidence"], p["evidence"]), Cell(p["prior"], p["prior"]),
         *(Cell(p["nll"][n], float(p["nll"][n].split()[0])) for n in networks(record)))
        for p in ANTORAN_2022
    )  # fmt: skip
    return Table(
        "published",
        "The published table",
        "Antorán et al. (2022), NLL; their U-Net is left out. Other data sizes and another structure: compare orders.",
        ("evidence at", "precisions", *networks(record)),
        rows,
    )


def _line(record: AntoranRecord, way: tuple[str, str], key: str) -> tuple[Cell, ...]:
    return (*(Cell(w, w) for w in way), *(_cell(values(record, n, way, key), key) for n in networks(record)))


def _cell(found: list[float], key: str) -> Cell:
    mean = fmean(found)
    error = f" ± {stdev(found) / math.sqrt(len(found)):.3f}" if key == "nll" and len(found) > 1 else ""
    return Cell((f"{mean:.3g}" if key == "precision" else f"{mean:.3f}") + error, mean)


def figure(record: AntoranRecord) -> Figure:
    return Figure(
        "modes",
        "Evidence at the linear mode and at the trained weights",
        "Filled marks are single precisions, open ones multiple. Left is better; the scale is logarithmic.",
        (panel("modes", "Test NLL of every network.", lambda ax: _paint(ax, record), shape=(9.0, 3.6)),),
        keys=(
            Key("trained network (MAP)", "dot map"),
            Key("evidence at the linear mode", "dot glm"),
            Key("evidence at the trained weights", "dot sampled"),
        ),
        wide="wide",
    )


def _paint(ax: Axes, record: AntoranRecord) -> None:
    names = networks(record)
    for row, network in enumerate(names):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
        for way in (PLAIN, *WAYS):
            found, place = values(record, network, way, "nll"), row + {"single": -0.1, "multiple": 0.1}.get(way[1], 0.0)
            colour = COLOURS[way[0]]
            ax.plot([min(found), max(found)], [place, place], color=colour, linewidth=1.4, alpha=0.6)
            face = "none" if way[1] == "multiple" else colour
            ax.plot(fmean(found), place, "o", color=colour, markerfacecolor=face, markersize=7)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", which="both", color=OUTSIDE, alpha=0.25)
    ax.set_xlabel("test NLL (nats); a bar spans the seeds")
    ax.xaxis.set_major_formatter("{x:g}")


def picture(record: AntoranRecord, path: Path) -> Path:
    return write_picture([partial(_paint, record=record)], path, shape=(9.0, 3.8))


def _settings(record: AntoranRecord) -> tuple[Setting, ...]:
    first = record["runs"][0]
    sizes = {run["network"]: run["parameters"] for run in record["runs"]}
    rows = f"{first['n_train']:,} / {first['n_validation']:,} / {first['n_test']:,}"
    return (
        Setting(name="data", value=first["data"]),
        Setting(name="training / validation / test images", value=rows),
        *(Setting(name=name, value=f"{n:,} parameters") for name, n in sizes.items()),
        Setting(name="training", value="Adam, weight decay 1e-4, stopped early"),
        Setting(name="posterior", value="Kronecker factors over all parameters"),
        Setting(name="seeds", value=str(record["n_seeds"])),
    )
