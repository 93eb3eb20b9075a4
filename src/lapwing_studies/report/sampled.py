"""The record of the sampled posterior → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best_of_columns, mean, over_seeds, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, MUTED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.sampled import SAMPLES
from lapwing_studies.reproduce.sampled_claims import methods, values
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {"NLL": "nll", "ECE": "ece", "OOD-AUC": "ood_auc", "error": "error", "joint NLL": "joint_nll"}


def page(record: Record) -> StudyPage:
    run = record["runs"][0]
    steps = ", ".join(str(len(r["path"]["change"]) - 1) for r in record["runs"])
    return StudyPage(
        title="The full GGN by samples",
        lead=(
            f"A batch-normed ResNet of {run['parameters']:,} parameters on {run['n_train']:,} images of {run['data']}. "
            f"No P × P matrix is formed: {run['n_samples']} samples of the posterior tune {run['groups']} prior "
            "precisions, and predict.",
        ),
        figures=(figure(record),),
        tables=(scores(record),),
        notes=(
            "Joint scores see whether errors at related labels come together: an average over functions, where "
            "marginal scores average each input alone.",
            "The paper's networks are up to ResNet-50 and its data all of CIFAR-100 and ImageNet; here are a small "
            "network and a part of Fashion-MNIST, so that orderings can be compared, not values.",
        ),
        settings={
            "network": f"ResNet with BatchNorm, {run['parameters']:,} parameters",
            "data": f"{run['data']}: {run['n_train']} to train, {run['n_test']} to test; outside: {run['outside']}",
            "samples": f"{run['n_samples']}; steps of EM by seed: {steps}",
            "products with all samples": ", ".join(str(sum(r["path"]["products"])) for r in record["runs"]),
            "last change of a log precision": ", ".join(f"{r['path']['change'][-1]:.2g}" for r in record["runs"]),
            "residual of the samples": ", ".join(f"{r['path']['residual'][-1]:.2g}" for r in record["runs"]),
        },
    )


def scores(record: Record) -> Table:
    rows = [
        [method, *(mean(values(record, method, key)) for key in COLUMNS.values()),
         mean(values(record, method, "seconds"), "{:.0f}")]
        for method in methods(record)
    ]  # fmt: skip
    return table(
        "sampled", "Scores by posterior", f"{over_seeds(record)} The best of a column in bold.",
        ("posterior", *COLUMNS, "seconds"), best_of_columns(rows, {1: 1, 2: 1, 3: -1, 4: 1, 5: 1}),
        "Joint NLL: ten labels of two test inputs, in nats, by 64 draws of functions. Seconds to fit and tune.",
    )  # fmt: skip


def figure(record: Record) -> Figure:
    return Figure.of(
        "sampled",
        "Joint scores, and the steps of EM",
        "Left: joint NLL, lower is better. Right: the effective dimension that the samples report, step by step, a "
        "line for each seed.",
        (
            Panel("joint", "Joint NLL of every posterior.", partial(_joint, record=record), (5.0, 3.4)),
            Panel("path", "Effective dimension by step of EM.", partial(_path, record=record), (5.0, 3.4)),
        ),
    )


def _joint(ax: Axes, record: Record) -> None:
    names = methods(record)
    found = [fmean(values(record, method, "joint_nll")) for method in names]
    axes.bars(ax, names, found, [GLM if m == SAMPLES else MUTED for m in names], [f"{v:.2f}" for v in found])
    ax.set_xlabel("joint NLL, nats")


def _path(ax: Axes, record: Record) -> None:
    paths = [run["path"]["effective_dimension"] for run in record["runs"]]
    for gamma in paths:
        ax.plot(range(len(gamma)), gamma, "o-", color=GLM, markersize=4)
    ax.set(xlabel="step of EM", ylabel="effective dimension γ", ylim=(0, 1.1 * max(map(max, paths))))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
