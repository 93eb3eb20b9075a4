"""The record of the Variational Laplace study → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.published import VARIATIONAL_LAPLACE, VARIATIONAL_SECONDS
from lapwing_studies.reproduce.variational import chosen, runs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.variational import VariationalRecord

WAYS = {
    "MAP": ("MAP", "mean", MAP, "-"),
    "VI mean": ("VI", "mean", SAMPLED, "--"),
    "VI 10 draws": ("VI", "draws", SAMPLED, "-"),
    "VL": ("VL", "mean", GLM, "-"),
}


def page(record: VariationalRecord, command: str) -> StudyPage:
    best = {way: chosen(record, record["data"][0], way) for way in WAYS}
    return StudyPage(
        title="Variational Laplace against MAP and mean field",
        lead=(
            "The same network, prior, tempering and epochs; one training for each method, temperature β and seed. "
            "The β that is reported has the best NLL on held-out data.",
        ),
        headlines=tuple(
            Headline(f"{scores['nll']:.3f}", f"test NLL of {way}, at β = {beta:g}")
            for way, (beta, scores) in best.items()
        ),
        figures=(figure(record),),
        tables=(*(table(record, data) for data in record["data"]), by_multiplier(record), costs(record)),
        notes=tuple(orderings(record)),
        settings=(
            Setting(name="training data", value=f"{record['n_train']:,}"),
            Setting(name="epochs", value=str(record["epochs"])),
            Setting(name="seeds", value=str(record["n_seeds"])),
            Setting(name="ECE", value="10 bins"),
        ),
        command=command,
    )


def table(record: VariationalRecord, data: str) -> Table:
    published = VARIATIONAL_LAPLACE.get(data, {})
    found = {way: chosen(record, data, way) for way in WAYS}
    rows = []
    for way, (beta, scores) in found.items():
        theirs = published.get(way)
        rows.append((
            Cell(way, way), Cell(f"{beta:g}", beta),
            _best(scores["nll"], [s["nll"] for _, s in found.values()], "{:.3f}", low=True),
            _best(scores["accuracy"], [s["accuracy"] for _, s in found.values()], "{:.1%}", low=False),
            _best(scores["ece"], [s["ece"] for _, s in found.values()], "{:.3f}", low=True),
            *(Cell("–" if theirs is None else text.format(v), 0.0 if theirs is None else v)
              for text, v in zip(("{:.2f}", "{:.1f}%", "{:.3f}"), theirs or (0.0, 0.0, 0.0), strict=True)),
        ))  # fmt: skip
    columns = ("method", "β", "NLL", "accuracy", "ECE", "published NLL", "published accuracy", "published ECE")
    return Table(
        f"scores-{data}", f"{data}: test scores at the β of the best held-out NLL",
        "The best of the measured in bold.", columns, tuple(rows),
        "Published: PreactResNet-18 on all training data, each score the best over β by itself.",
    )  # fmt: skip


def _best(value: float, all_: list[float], text: str, *, low: bool) -> Cell:
    return Cell(text.format(value), value, "best" if value == (min(all_) if low else max(all_)) else "")


def by_multiplier(record: VariationalRecord) -> Table:
    rows = []
    for multiplier in record["multipliers"]:
        cells = [Cell(f"{multiplier:g}", multiplier)]
        for method in ("VI", "VL"):
            run = runs_of(record, record["data"][0], method, beta=1.0, multiplier=multiplier)[0]
            cells += [
                Cell(f"{run['elbo'] or 0:,.0f}", run["elbo"] or 0.0),
                Cell(f"{run['scores']['mean']['accuracy']:.1%}", run["scores"]["mean"]["accuracy"]),
                Cell(f"{run['unmoved'] or 0:.0%}", run["unmoved"] or 0.0),
            ]
        rows.append(tuple(cells))
    columns = ("multiplier", "VI ELBO", "VI accuracy", "VI not moved", "VL ELBO", "VL accuracy", "VL not moved")
    return Table(
        "multipliers", "Learning rate of the variances, β = 1", "Accuracy at the means.", columns, tuple(rows),
        "Not moved: variances within e^0.1 of where they started.",
    )  # fmt: skip


def costs(record: VariationalRecord) -> Table:
    seconds = {m: fmean(r["seconds"] for r in runs_of(record, record["data"][0], m)) for m in ("MAP", "VI", "VL")}
    rows = tuple(
        (
            Cell(m, m), Cell(f"{s:.2f}", s), Cell(f"{s / seconds['MAP']:.2f}", s / seconds["MAP"]),
            Cell(f"{VARIATIONAL_SECONDS[m]:.1f}", VARIATIONAL_SECONDS[m]),
            Cell(f"{VARIATIONAL_SECONDS[m] / VARIATIONAL_SECONDS['MAP']:.2f}", VARIATIONAL_SECONDS[m]),
        )
        for m, s in seconds.items()
    )  # fmt: skip
    columns = ("method", "seconds", "relative", "published seconds", "published relative")
    return Table("costs", "An epoch", "Wall clock; published on a GPU, CIFAR-10.", columns, rows)


def orderings(record: VariationalRecord) -> list[str]:
    """What the paper claims, and whether it shows here."""
    data = record["data"][0]
    beta = {way: chosen(record, data, way)[0] for way in ("MAP", "VL")}
    pairs = zip(
        sorted(runs_of(record, data, "VL", beta=beta["VL"]), key=lambda r: r["seed"]),
        sorted(runs_of(record, data, "MAP", beta=beta["MAP"]), key=lambda r: r["seed"]),
        strict=True,
    )
    scores = [(vl["scores"]["mean"], map_["scores"]["mean"]) for vl, map_ in pairs]
    n = len(scores)
    lower = {key: sum(a[key] < b[key] for a, b in scores) for key in ("nll", "ece")}
    worst = min(a["accuracy"] - b["accuracy"] for a, b in scores)
    elbos = [
        runs_of(record, data, "VI", beta=1.0, multiplier=m)[0]["elbo"] or 0.0 for m in sorted(record["multipliers"])
    ]
    rises = all(a < b for a, b in pairwise(elbos))
    return [
        f"VL has a lower NLL than MAP on {lower['nll']} of {n} seeds, and a lower ECE on {lower['ece']} of {n}; its "
        f"accuracy is at worst {100 * worst:+.1f} points from MAP's.",
        f"Raising the multiplier {'raises' if rises else 'does not always raise'} the ELBO of mean-field inference.",
    ]


def figure(record: VariationalRecord) -> Figure:
    return Figure(
        "variational",
        "Over the temperature, and where the variances went",
        "Left and middle: test NLL and ECE by β. Right: log σ/s of the weights, at β = 1.",
        tuple(
            panel(name, title, paint, shape=(4.4, 3.4))
            for name, title, paint in (
                ("nll", "Test NLL by β.", partial(_over_beta, record=record, key="nll")),
                ("ece", "Test ECE by β.", partial(_over_beta, record=record, key="ece")),
                ("variances", "Quantiles of log σ/s.", partial(_variances, record=record)),
            )
        ),
        keys=(
            Key("MAP", "line map"),
            Key("VI, 10 draws (dashed: at the means)", "line sampled"),
            Key("Variational Laplace", "line glm"),
        ),
    )


def _over_beta(ax: Axes, record: VariationalRecord, key: str) -> None:
    for way, (method, kind, colour, style) in WAYS.items():
        values = [
            fmean(r["scores"][kind][key] for r in runs_of(record, record["data"][0], method, beta=beta))  # type: ignore
            for beta in record["betas"]
        ]
        ax.plot(record["betas"], values, color=colour, linestyle=style, marker="o", markersize=4, label=way)
    ax.set(xscale="log", xlabel="β", ylabel={"nll": "test NLL", "ece": "test ECE"}[key])
    ax.set_title({"nll": "negative log likelihood", "ece": "calibration error"}[key])
    if key == "nll":
        ax.legend(frameon=False, fontsize=8)


def _variances(ax: Axes, record: VariationalRecord) -> None:
    for method, colour in (("VI", SAMPLED), ("VL", GLM)):
        run = runs_of(record, record["data"][0], method, beta=1.0)[0]
        for values in run["log_ratio"].values():
            ax.plot([i / (len(values) - 1) for i in range(len(values))], values, color=colour, linewidth=1.3)
    ax.axhline(0, color=INK, linewidth=1)
    ax.axhline(-3, color=MUTED, linewidth=1, linestyle=":")
    ax.text(0.02, -2.9, "start", color=MUTED, fontsize=8)
    ax.text(0.02, 0.1, "prior", color=INK, fontsize=8)
    ax.set(xlabel="fraction of a tensor's weights", ylabel="log σ/s")
    ax.set_title("learned variances, β = 1")


def picture(record: VariationalRecord, path: Path) -> Path:
    axes: list[Callable[[Axes], None]] = [
        partial(_over_beta, record=record, key="nll"),
        partial(_over_beta, record=record, key="ece"),
        partial(_variances, record=record),
    ]
    return write_picture(axes, path, shape=(12.0, 3.7))
