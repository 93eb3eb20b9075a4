"""The record of the sampled posterior → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, MUTED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.sampled import SampledRecord, SampledRow, SampledRun

SAMPLES = "full GGN, samples"
_COLUMNS = (("NLL", "nll", 1), ("ECE", "ece", 1), ("OOD-AUC", "ood_auc", -1), ("error", "error", 1))


def page(record: SampledRecord, command: str) -> StudyPage:
    run = record["runs"][0]
    joint = {method: _mean(record, method, "joint_nll") for method in _methods(run)}
    return StudyPage(
        title="The full GGN by samples",
        lead=(
            f"A batch-normed ResNet of {run['parameters']:,} parameters on {run['n_train']:,} images of {run['data']}. "
            f"No P × P matrix is formed: {run['n_samples']} samples of the posterior tune {run['groups']} prior "
            "precisions, and predict.",
        ),
        headlines=(
            Headline(f"{joint[SAMPLES]:.2f}", "joint NLL of ten labels of two inputs, samples of the full GGN"),
            Headline(f"{joint['Kronecker']:.2f}", "with Kronecker blocks"),
            Headline(f"{joint['network']:.2f}", "by the network alone"),
        ),
        figures=(figure(record),),
        tables=(table(record),),
        notes=(
            "Joint scores see whether errors at related labels come together: an average over functions, where "
            "marginal scores average each input alone.",
        ),
        settings=_settings(record),
        command=command,
    )


def _methods(run: SampledRun) -> list[str]:
    return [row["score"]["method"] for row in run["rows"]]


def _row(run: SampledRun, method: str) -> SampledRow:
    return next(row for row in run["rows"] if row["score"]["method"] == method)


def _mean(record: SampledRecord, method: str, key: str) -> float:
    rows = [_row(run, method) for run in record["runs"]]
    return fmean(float({**row["score"], **row}[key]) for row in rows)  # type: ignore[arg-type]


def table(record: SampledRecord) -> Table:
    methods = _methods(record["runs"][0])
    columns = (*_COLUMNS, ("joint NLL", "joint_nll", 1), ("seconds", "seconds", 0))
    values = {key: [_mean(record, method, key) for method in methods] for _, key, _ in columns}
    rows = []
    for k, method in enumerate(methods):
        cells = [Cell(method, method)]
        for _, key, sign in columns:
            best = sign and values[key][k] == min(values[key], key=lambda v: sign * v)
            shown = f"{values[key][k]:.0f}" if key == "seconds" else f"{values[key][k]:.3f}"
            cells.append(Cell(shown, values[key][k], "best" if best else ""))
        rows.append(tuple(cells))
    return Table(
        "sampled",
        "Scores by posterior",
        f"Means over {record['n_seeds']} seed(s); the best of a column in bold.",
        ("posterior", *(heading for heading, _, _ in columns)),
        tuple(rows),
        "Joint NLL: ten labels of two test inputs, in nats, by 64 draws of functions. Seconds to fit and tune.",
    )


def figure(record: SampledRecord) -> Figure:
    run = record["runs"][0]
    return Figure(
        "sampled",
        "Joint scores, and the steps of EM",
        "Left: joint NLL, lower is better. Right: the effective dimension that the samples report, step by step.",
        (
            panel("joint", "Joint NLL of every posterior.", partial(_joint, record=record), shape=(5.0, 3.4)),
            panel("path", "Effective dimension by step of EM.", partial(_path, run=run), shape=(5.0, 3.4)),
        ),
    )


def _joint(ax: Axes, record: SampledRecord) -> None:
    methods = _methods(record["runs"][0])[::-1]
    values = [_mean(record, method, "joint_nll") for method in methods]
    colours = [GLM if method == SAMPLES else MUTED for method in methods]
    ax.barh(methods, values, color=colours, height=0.6)
    for k, value in enumerate(values):
        ax.text(value, k, f" {value:.2f}", va="center")
    ax.set(xlabel="joint NLL, nats", xlim=(0, 1.15 * max(values)))


def _path(ax: Axes, run: SampledRun) -> None:
    gamma = run["path"]["effective_dimension"]
    ax.plot(range(len(gamma)), gamma, "o-", color=GLM)
    ax.set(xlabel="step of EM", ylabel="effective dimension γ", xticks=range(len(gamma)))
    ax.set_ylim(0, 1.1 * max(gamma))


def picture(record: SampledRecord, path: Path) -> Path:
    paints = [partial(_joint, record=record), partial(_path, run=record["runs"][0])]
    return write_picture(paints, path, shape=(11.0, 3.4))


def _settings(record: SampledRecord) -> tuple[Setting, ...]:
    run = record["runs"][0]
    path = run["path"]
    return (
        Setting(name="network", value=f"ResNet with BatchNorm, {run['parameters']:,} parameters"),
        Setting(name="data", value=f"{run['data']}: {run['n_train']} to train, {run['n_test']} to test"),
        Setting(name="outside", value=run["outside"]),
        Setting(name="samples", value=f"{run['n_samples']}, {len(path['change']) - 1} steps of EM"),
        Setting(name="products with all samples", value=f"{sum(path['products'])}"),
        Setting(name="last change of a log precision", value=f"{path['change'][-1]:.2g}"),
        Setting(name="residual of the samples", value=f"{path['residual'][-1]:.2g}"),
        Setting(name="effort", value=record["effort"]),
    )
