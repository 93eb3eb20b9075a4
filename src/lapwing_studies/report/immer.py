"""The record of Table 1 of Immer et al. (2021) → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, number, published, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.immer_claims import Choose, chosen_by_split, chosen_together, names, scores
from lapwing_studies.reproduce.means import standard_error
from lapwing_studies.reproduce.published import IMMER_2021
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("MAP", "MFVI", "BNN", "GLM", "GLM diag", "GLM mode", "GLM refine", "GLM refine d", "GP")
LOOKS = {
    "MAP": ("o", MAP),
    "BNN": ("s", SAMPLED),
    "GLM": ("o", GLM),
    "GLM diag": ("v", GLM),
    "GLM refine": ("D", INK),
}


def page(record: Record) -> StudyPage:
    gradients = [run["largest_gradient"] for run in record["runs"] if run["largest_gradient"] is not None]
    drawn = Panel("nll", "Test NLL of every method on every set.", partial(_paint, record=record), (9.0, 4.8))
    return StudyPage(
        title="Linearised, sampled and refined: Table 1 of Immer et al. (2021)",
        lead=(
            "Two layers of 50 tanh units on UCI classification sets. A network is trained under each of several prior "
            "precisions; every method takes the one with the best validation NLL.",
        ),
        figures=(
            Figure.of(
                "nll",
                "Every method on every set",
                "Left is better. Open marks are published numbers, filled ones ours; a bar is two standard errors each "
                "way. Circles are MAP and GLM, triangles GLM diag, squares the BNN, diamonds GLM refine.",
                (drawn,),
                keys=(
                    Key("MAP", "dot map"),
                    Key("BNN, sampled weights", "dot sampled"),
                    Key("GLM (triangle: diagonal)", "dot glm"),
                    Key("GLM refine", "dot"),
                ),
            ),
        ),
        tables=(
            nll_table(record, chosen_by_split, "nll", "Test NLL"),
            published_table(record),
            nll_table(record, chosen_together, "together", "Test NLL, one precision for all splits"),
        ),
        notes=(
            "GLM mode is the posterior refined to the linear model's own mode (Newton's method). GLM refine and GLM "
            "refine d are Gaussian variational posteriors, full and diagonal: the full one after 15 steps from the "
            "mode (5 on the large sets), the diagonal one with the published settings, which stop early; on the large "
            "sets at one precision. Blank: not fitted.",
            "What differs from the paper: 1,000 steps of Adam at a rate falling from 0.01 in place of 10,000 at 0.001, "
            "six precisions on digits and satellite in place of ten, and one logit by quadrature in place of samples. "
            "Mean field starts from the trained network.",
        ),
        settings={
            "splits": f"the published ones, {record['n_seeds']} of ten",
            "precisions": "ten from 0.01 to 100; the upper six on digits and satellite; retrained under each",
            "training": "full-batch Adam, 1,000 steps, rate 0.01 falling to zero (published: 10,000 at 0.001)",
            "largest gradient entry at the trained weights": f"{max(gradients):.2g}",
            "predictions": "1,000 samples; one logit by quadrature",
            "time": f"{sum(r['seconds'] for r in record['runs']) / 60:.0f} minutes for all methods, training included",
        },
    )


def nll_table(record: Record, choose: Choose, key: str, title: str) -> Table:
    """A column for every method that was fitted on some dataset, blank where it was not."""
    methods = [method for method in METHODS if any(scores(record, name, method) for name in names(record))]
    rows = []
    for name in names(record):
        found = [[score["nll"] for score in choose(record, name, method)] for method in methods]
        rows.append((name, number(len(found[0]), "{}"), *map(mean, found)))
    see = "Mean ± standard error over the splits; lower is better."
    return table(key, title, see, ("set", "splits", *methods), rows)


def published_table(record: Record) -> Table:
    methods = [method for method in METHODS if method in IMMER_2021["glass"]]
    rows = [(name, *(published(*IMMER_2021[name][method]) for method in methods)) for name in names(record)]
    see = "Immer, Korzepa and Bauer (2021), mean ± standard error over ten splits."
    return table("published", "The published table", see, ("set", *methods), rows)


def _paint(ax: Axes, record: Record) -> None:
    sets = names(record)
    for row, name in enumerate(sets):
        for method, (marker, colour) in LOOKS.items():
            if found := [score["nll"] for score in chosen_by_split(record, name, method)]:
                middle, half = fmean(found), 2 * standard_error(found)
                ends = [max(middle - half, 1e-2), middle + half]
                ax.plot(ends, [row - 0.12] * 2, color=colour, linewidth=1.3, alpha=0.6)
                ax.plot(middle, row - 0.12, marker, color=colour, markersize=6)
            theirs = IMMER_2021[name][method][0]
            ax.plot(theirs, row + 0.18, marker, color=colour, markerfacecolor="none", markersize=6)
    axes.rows(ax, sets)
    axes.log_x(ax)
    ax.set_xlabel("test NLL (nats)")
