"""The record of the Variational Laplace study → tables, figures and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import best_of_columns, mean, number, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.means import mean_of
from lapwing_studies.reproduce.published import VARIATIONAL_LAPLACE, VARIATIONAL_SECONDS
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.variational_claims import WAYS, beta_of, runs_of, scores_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {"MAP": (MAP, "-"), "VI mean": (SAMPLED, "--"), "VI 10 draws": (SAMPLED, "-"), "VL": (GLM, "-")}
SCORES = {"nll": "{:.3f}", "accuracy": "{:.1%}", "ece": "{:.3f}"}


def page(record: Record) -> StudyPage:
    shape = (4.6, 3.6)
    return StudyPage(
        title="Variational Laplace against MAP and mean field",
        lead=(
            "The same network, prior, tempering and epochs; one training for each method, temperature β and seed. "
            "The β that is reported has the best NLL on held-out data.",
        ),
        figures=(
            Figure.of(
                "variational",
                "Over the temperature, and where the variances went",
                "Left and middle: test NLL and ECE by β. Right: log σ/s of the weights, at β = 1.",
                (
                    Panel("nll", "Test NLL by β.", partial(_over_beta, record=record, key="nll"), shape),
                    Panel("ece", "Test ECE by β.", partial(_over_beta, record=record, key="ece"), shape),
                    Panel("variances", "Quantiles of log σ/s.", partial(_variances, record=record), shape),
                ),
                keys=(
                    Key("MAP", "line map"),
                    Key("VI, 10 draws (dashed: at the means)", "line sampled"),
                    Key("Variational Laplace", "line glm"),
                ),
            ),
        ),
        tables=(*(scores(record, data) for data in record["data"]), by_multiplier(record), costs(record)),
        notes=(
            "What differs from the paper: a small CNN and part of the data outside the faithful tier, fewer epochs, "
            "and scores at the β that held-out data choose, where the paper takes the best over β for each score.",
        ),
        settings={"training data": f"{record['n_train']:,}", "epochs": str(record["epochs"]), "ECE": "10 bins"},
    )


def scores(record: Record, data: str) -> Table:
    rows = []
    for way in WAYS:
        found, theirs = scores_of(record, data, way), VARIATIONAL_LAPLACE.get(data, {}).get(way, (None, None, None))
        rows.append([
            way, number(beta_of(record, data, way), "{:g}"),
            *(mean([s[key] for s in found], shown) for key, shown in SCORES.items()),
            *(number(v, shown) for v, shown in zip(theirs, ("{:.2f}", "{:.1f}%", "{:.3f}"), strict=True)),
        ])  # fmt: skip
    return table(
        f"scores-{data}", f"{data}: test scores at the β of the best held-out NLL",
        "Mean ± standard error over seeds; the best of the measured in bold.",
        ("method", "β", "NLL", "accuracy", "ECE", "published NLL", "published accuracy", "published ECE"),
        best_of_columns(rows, {2: 1, 3: -1, 4: 1}),
        "Published: PreactResNet-18 on all training data, each score the best over β by itself.",
    )  # fmt: skip


def by_multiplier(record: Record) -> Table:
    rows = []
    for multiplier in record["multipliers"]:
        row = [number(multiplier, "{:g}")]
        for method in ("VI", "VL"):
            run = runs_of(record, record["data"][0], method, beta=1.0, multiplier=multiplier)[0]
            accuracy = run["scores"]["mean"]["accuracy"]
            row += [number(run["elbo"], "{:,.0f}"), number(accuracy, "{:.1%}"), number(run["unmoved"], "{:.0%}")]
        rows.append(row)
    columns = ("multiplier", "VI ELBO", "VI accuracy", "VI not moved", "VL ELBO", "VL accuracy", "VL not moved")
    return table(
        "multipliers", "Learning rate of the variances, β = 1", "Accuracy at the means.", columns, rows,
        "Not moved: variances within e^0.1 of where they started.",
    )  # fmt: skip


def costs(record: Record) -> Table:
    seconds = {m: mean_of(runs_of(record, record["data"][0], m), "seconds") for m in VARIATIONAL_SECONDS}
    rows = [
        (m, number(seconds[m], "{:.2f}"), number(seconds[m] / seconds["MAP"], "{:.2f}"), number(theirs, "{:.1f}"),
         number(theirs / VARIATIONAL_SECONDS["MAP"], "{:.2f}"))
        for m, theirs in VARIATIONAL_SECONDS.items()
    ]  # fmt: skip
    columns = ("method", "seconds", "relative", "published seconds", "published relative")
    return table("costs", "An epoch", "Wall clock; published on a GPU, CIFAR-10.", columns, rows)


def _over_beta(ax: Axes, record: Record, key: str) -> None:
    for way, (colour, style) in LOOKS.items():
        method, kind = WAYS[way]
        values = [
            fmean(run["scores"][kind][key] for run in runs_of(record, record["data"][0], method, beta=beta))
            for beta in record["betas"]
        ]
        ax.plot(record["betas"], values, color=colour, linestyle=style, marker="o", markersize=4)
    ax.set(xscale="log", xlabel="β", ylabel={"nll": "test NLL", "ece": "test ECE"}[key])
    ax.set_title({"nll": "negative log likelihood", "ece": "calibration error"}[key])


def _variances(ax: Axes, record: Record) -> None:
    for method, colour in (("VI", SAMPLED), ("VL", GLM)):
        run = runs_of(record, record["data"][0], method, beta=1.0)[0]
        for values in run["log_ratio"].values():
            ax.plot([i / (len(values) - 1) for i in range(len(values))], values, color=colour, linewidth=1.3)
    ax.axhline(0, color=INK, linewidth=1)
    ax.axhline(-3, color=MUTED, linewidth=1, linestyle=":")
    ax.text(0.02, -2.9, "start", color=MUTED, fontsize=9)
    ax.text(0.02, 0.1, "prior", color=INK, fontsize=9)
    ax.set(xlabel="fraction of a tensor's weights", ylabel="log σ/s")
    ax.set_title("learned variances, β = 1")
