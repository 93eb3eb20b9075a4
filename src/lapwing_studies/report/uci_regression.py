"""The record of UCI regression on standard and gap splits → tables, figures and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, number, published, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, INK, SAMPLED
from lapwing_studies.report.palette import MAP as MAP_COLOUR
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.published import MC_DROPOUT
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.uci_regression import GAPS, LINEAR, LINEARISED, MEAN_FIELD
from lapwing_studies.reproduce.uci_regression import SAMPLED as SAMPLED_WEIGHTS
from lapwing_studies.reproduce.uci_regression_claims import TUNINGS, sets, values
from lapwing_studies.reproduce.uci_regression_methods import MAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = (
    *((m, by) for by in TUNINGS for m in (MAP, *(f"linearised {s}" for s in LINEARISED), SAMPLED_WEIGHTS)),
    (MEAN_FIELD, "ELBO"),
)
LOOKS = {
    (MAP, "evidence"): ("o", MAP_COLOUR),
    (SAMPLED_WEIGHTS, "evidence"): ("s", SAMPLED),
    (MEAN_FIELD, "ELBO"): ("D", INK),
    (LINEAR, "evidence"): ("o", GLM),
}
KEYS = (
    Key("MAP", "dot map"),
    Key("linearised, full", "dot glm"),
    Key("sampled weights", "dot sampled"),
    Key("mean field", "dot"),
)
KINDS = {"std": "standard splits", "gap": "gap splits"}
SCORES = {"ll": "Test log likelihood", "rmse": "RMSE"}


def page(record: Record) -> StudyPage:
    overall = [
        Panel(kind, f"Log likelihood, {words}.", partial(_by_set, record=record, kind=kind), (5.2, 4.2))
        for kind, words in KINDS.items()
    ]
    gaps = [
        Panel(f"{name}-gap", f"Every gap split of {name}.", partial(_by_split, record=record, name=name),
              (5.2, 3.6))
        for name in GAPS if name in sets(record, "gap")
    ]  # fmt: skip
    return StudyPage(
        title="Between the data: regression on standard and gap splits",
        lead=(
            "Networks of one hidden layer of 50 ReLU on UCI sets. A standard split tests on a tenth of the rows, a gap "
            "split on the middle third along one feature, where the network has seen nothing.",
        ),
        figures=(
            Figure.of(
                "ll",
                "Test log likelihood by set",
                "Right is better. Large marks are means, small ones single splits.",
                overall,
                keys=KEYS,
            ),
            *(
                [Figure.of("gaps", "Catastrophes are single splits", "Every gap split by itself: the feature whose "
                           "middle third is left out. The axis is logarithmic below −4.", gaps, keys=KEYS)]
                if gaps else []
            ),
        ),
        tables=(
            *(score_table(record, kind, key) for kind in KINDS for key in SCORES),
            worst_table(record),
            published_table(record),
        ),
        notes=(
            "Tuned by evidence: one prior precision and the noise, on all training rows; MAP has the noise it was "
            "trained with. Tuned by validation: both are chosen on 15% of the training rows with a network that has "
            "not seen them, and used for the network of all rows; sampled weights have those of the linearised "
            "network. Mean field starts from the trained network and learns its noise by its bound.",
            "What differs from the paper: full-batch training with a schedule of our own, noise by evidence or "
            "validation in place of a grid over training settings, at most five gap splits of naval, no protein. "
            "Foong et al. show plots and no numbers: orderings can be compared, and dropout is a published anchor.",
        ),
        settings={
            "splits": f"the published ones, at most {record['n_seeds']} of each kind",
            "training": f"full-batch Adam, {record['steps']:,} steps, rate 0.01 falling to zero, N(0, 1)",
            "samples": "100 for sampled weights and mean field",
            "time": f"{sum(run['seconds'] for run in record['runs']) / 60:.0f} minutes",
        },
        cover=(tuple(overall), tuple(gaps)) if gaps else (),
    )  # fmt: skip


def score_table(record: Record, kind: str, key: str) -> Table:
    names = sets(record, kind)
    rows = [(*way, *(_cell(values(record, name, kind, *way, key)) for name in names)) for way in METHODS]
    splits = ", ".join(f"{name} {len(values(record, name, kind, MAP, 'evidence'))}" for name in names)
    see = f"Mean ± standard error over splits ({splits}), in the units of the target."
    return table(f"{kind}-{key}", f"{SCORES[key]}, {KINDS[kind]}", see, ("method", "by", *names), rows)


def _cell(found: list[float]) -> Cell:
    return mean(found, "{:.3f}" if abs(fmean(found)) < 10 else "{:.1f}")


def worst_table(record: Record) -> Table:
    names = sets(record, "gap")
    rows = [(*way, *(number(min(values(record, n, "gap", *way)), "{:.2f}") for n in names)) for way in METHODS]
    title = "Worst gap split, test log likelihood"
    return table("worst", title, "A catastrophe is a split.", ("method", "by", *names), rows)


def published_table(record: Record) -> Table:
    rows = [(name, *(published(*pair) for pair in MC_DROPOUT[name])) for name in sets(record, "std")]
    return table(
        "published", "An anchor: dropout on the same splits",
        "Gal and Ghahramani, as published: mean ± spread over standard splits. Foong et al. show plots.",
        ("set", "RMSE", "log likelihood", "log likelihood, ten times the epochs"), rows,
    )  # fmt: skip


def _by_set(ax: Axes, record: Record, kind: str) -> None:
    names = sets(record, kind)
    _marks(ax, names, [[values(record, name, kind, *key) for name in names] for key in LOOKS])
    if kind == "gap":
        _below(ax)
    ax.set_title(KINDS[kind])


def _by_split(ax: Axes, record: Record, name: str) -> None:
    found = [values(record, name, "gap", *key) for key in LOOKS]
    features = [f"feature {k + 1}" for k in range(len(found[0]))]
    _marks(ax, features, [[[value] for value in some] for some in found])
    _below(ax)
    ax.set_title(f"{name}, gap splits")


def _marks(ax: Axes, names: list[str], found: list[list[list[float]]]) -> None:
    """For each method and row, its values as small marks and their mean as a large one."""
    for k, ((marker, colour), by_row) in enumerate(zip(LOOKS.values(), found, strict=True)):
        for row, some in enumerate(by_row):
            at = row + 0.15 * (k - 1.5)
            ax.plot(some, [at] * len(some), marker, color=colour, markersize=3, alpha=0.45, linestyle="none")
            ax.plot(fmean(some), at, marker, color=colour, markersize=6.5)
    axes.rows(ax, names)
    ax.set_xlabel("test log likelihood (nats)")


def _below(ax: Axes) -> None:
    ax.set_xscale("symlog", linthresh=4)
    ax.set_xticks([-1000, -100, -10, 0])
    ax.xaxis.set_major_formatter("{x:g}")
