"""The record of UCI regression on standard and gap splits → tables, a figure and a page."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.claims import table_of
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, INK
from lapwing_studies.report.palette import MAP as MAP_COLOUR
from lapwing_studies.report.palette import SAMPLED as SAMPLED_COLOUR
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.published import MC_DROPOUT
from lapwing_studies.reproduce.uci_regression import LINEAR, LINEARISED, MEAN_FIELD, SAMPLED, UciRegressionRecord
from lapwing_studies.reproduce.uci_regression_claims import claims, mean_and_error, sets, values
from lapwing_studies.reproduce.uci_regression_methods import MAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = (
    *((method, "evidence") for method in (MAP, *(f"linearised {s}" for s in LINEARISED), SAMPLED)),
    *((method, "validation") for method in (MAP, *(f"linearised {s}" for s in LINEARISED), SAMPLED)),
    (MEAN_FIELD, "ELBO"),
)
LOOKS = {
    (MAP, "evidence"): ("o", MAP_COLOUR),
    (SAMPLED, "evidence"): ("s", SAMPLED_COLOUR),
    (MEAN_FIELD, "ELBO"): ("D", INK),
    (LINEAR, "evidence"): ("o", GLM),
}
KINDS = {"std": "standard splits", "gap": "gap splits"}


def page(record: UciRegressionRecord, command: str) -> StudyPage:
    found = claims(record)
    return StudyPage(
        title="Between the data: regression on standard and gap splits",
        lead=(
            "Networks of one hidden layer of 50 ReLU on UCI sets. A standard split tests on a tenth of the rows, a gap "
            "split on the middle third along one feature, where the network has seen nothing.",
        ),
        headlines=tuple(Headline(claim.found, f"{claim.says}: {claim.verdict}") for claim in found[:1] + found[-2:]),
        figures=(figure(record),),
        tables=(
            table_of(found),
            *(score_table(record, kind, key) for kind in KINDS for key in ("ll", "rmse")),
            worst_table(record),
            published_table(record),
        ),
        notes=(
            "Tuned by evidence: one prior precision and the noise, on all training rows; MAP has the noise it was "
            "trained with. Tuned by validation: both are chosen on 15% of the training rows with a network that has "
            "not seen them, and used for the network of all rows; sampled weights have those of the linearised "
            "network. Mean field starts from the trained network and learns its noise by its bound.",
        ),
        settings=(
            Setting(name="splits", value=f"the published ones, at most {record['n_splits']} of each kind"),
            Setting(
                name="training", value=f"full-batch Adam, {record['steps']:,} steps, rate 0.01 falling to zero, N(0, 1)"
            ),
            Setting(name="samples", value="100 for sampled weights and mean field"),
            Setting(name="time", value=f"{sum(run['seconds'] for run in record['runs']) / 60:.0f} minutes"),
        ),
        command=command,
    )


def score_table(record: UciRegressionRecord, kind: str, key: str) -> Table:
    names = sets(record, kind)
    rows = []
    for method, by in METHODS:
        found = [mean_and_error(values(record, name, kind, method, by, key)) for name in names]
        rows.append((Cell(method, method), Cell(by, by), *(Cell(_shown(*pair), pair[0]) for pair in found)))
    what = {"ll": "Test log likelihood", "rmse": "RMSE"}[key]
    splits = ", ".join(f"{name} {len(values(record, name, kind, MAP, 'evidence'))}" for name in names)
    return Table(
        f"{kind}-{key}",
        f"{what}, {KINDS[kind]}",
        f"Mean ± standard error over splits ({splits}), in the units of the target.",
        ("method", "by", *names),
        tuple(rows),
    )


def worst_table(record: UciRegressionRecord) -> Table:
    names = sets(record, "gap")
    rows = tuple(
        (Cell(method, method), Cell(by, by), *(Cell(f"{(v := min(values(record, n, 'gap', method, by))):.2f}", v)
                                               for n in names))
        for method, by in METHODS
    )  # fmt: skip
    return Table(
        "worst", "Worst gap split, test log likelihood", "A catastrophe is a split.", ("method", "by", *names), rows
    )


def published_table(record: UciRegressionRecord) -> Table:
    rows = tuple(
        (Cell(name, name), *(Cell(f"{mean:g} ± {spread:g}", mean) for mean, spread in MC_DROPOUT[name]))
        for name in sets(record, "std")
    )
    return Table(
        "published",
        "An anchor: dropout on the same splits",
        "Gal and Ghahramani, as published: mean ± spread over standard splits. Foong et al. show plots.",
        ("set", "RMSE", "log likelihood", "log likelihood, ten times the epochs"),
        rows,
    )


def _shown(mean: float, error: float) -> str:
    digits = 3 if abs(mean) < 10 else 1
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def figure(record: UciRegressionRecord) -> Figure:
    panels = tuple(
        panel(kind, f"Log likelihood, {words}.", partial(_paint, record=record, kind=kind), shape=(4.6, 3.4))
        for kind, words in KINDS.items()
    )
    return Figure(
        "ll",
        "Test log likelihood by set",
        "Right is better. Large marks are means, small ones single splits.",
        panels,
        keys=(Key("MAP", "dot map"), Key("linearised, full", "dot glm"), Key("sampled weights", "dot sampled"),
              Key("mean field", "dot")),
    )  # fmt: skip


def _paint(ax: Axes, record: UciRegressionRecord, kind: str) -> None:
    names = sets(record, kind)
    for row, name in enumerate(names):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
        for k, (key, (marker, colour)) in enumerate(LOOKS.items()):
            found = values(record, name, kind, *key)
            at = row + 0.15 * (k - 1.5)
            ax.plot(found, [at] * len(found), marker, color=colour, markersize=3, alpha=0.45, linestyle="none")
            ax.plot(mean_and_error(found)[0], at, marker, color=colour, markersize=6.5)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xscale("symlog", linthresh=4)
    ax.set_xlabel("test log likelihood (nats)")
    ax.set_title(KINDS[kind])


def picture(record: UciRegressionRecord, path: Path) -> Path:
    return write_picture([partial(_paint, record=record, kind=kind) for kind in KINDS], path, shape=(11.0, 4.4))
