"""The record of the alarm study → tables, figures and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best, mean, number, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MAP, MUTED, OUTSIDE, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.alarm import FIRST_SEED, LEVEL, METHODS
from lapwing_studies.reproduce.means import grouped, mean_of
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(METHODS, (MAP, OUTSIDE, SAMPLED, GLM), strict=True))
LOOKS = dict(zip(METHODS, ("dot map", "dot outside", "dot sampled", "dot glm"), strict=True))
HEIGHT = 0.2  # of a bar
N_EXAMPLES = 3


def page(record: Record) -> StudyPage:
    pairs = grouped(record["runs"], "inside", "outside")
    false = fmean(mean_of(runs, "false_alarms") for runs in pairs.values())
    bars = _bars_panel(pairs)
    examples = [Panel(f"example-{k}", f"{_title(e)}.", partial(_image, example=e), (3.0, 3.0))
                for k, e in enumerate(_examples(record))]  # fmt: skip
    shown = "None is of a kind the network was trained for, and of these the network is surest."
    return StudyPage(
        title="An alarm for inputs the network was not trained for",
        lead=(
            f"{len(pairs)} pairs of data sets: a small network learns one of them, and is shown both. lw.fit, lw.tune "
            "with held-out data and lw.alarm ran with default arguments.",
            f"The score of the alarm was chosen on seeds 0 and 1 of these pairs; these are seeds from {FIRST_SEED} on.",
        ),
        figures=(
            Figure.of(
                "auroc",
                "Does it notice inputs from elsewhere?",
                "The further a bar reaches, the better inside and outside are told apart; 0.5 is a coin.",
                (bars,),
                keys=tuple(Key(m, LOOKS[m]) for m in METHODS),
            ),
            *([Figure.of("examples", "Images that raise the alarm", shown, examples)] if examples else []),
        ),
        tables=(auroc_table(record), level_table(record)),
        notes=(
            f"{false:.1%} of test data raise a false alarm at {LEVEL:g}, the mean over pairs.",
            "AUROC is the chance that an input from outside has the higher score, ties counted half. A table's outside "
            "are its test rows with every column moved by one standard deviation, up or down. SVHN is re-cropped. "
            "Entropy below 0.5 means that the network is surer of what it does not know.",
        ),
        settings={_name(*key): _setting(runs[0]) for key, runs in pairs.items()},
        cover=((bars,), tuple(examples)) if examples else (),
    )


def _name(inside: str, outside: str) -> str:
    return f"{inside} / {outside}"


def auroc_table(record: Record) -> Table:
    rows = [
        (_name(*key), runs[0]["network"], number(mean_of(runs, "accuracy"), "{:.1%}"),
         *best([mean([run["auroc"][m] for run in runs]) for m in METHODS], -1))
        for key, runs in grouped(record["runs"], "inside", "outside").items()
    ]  # fmt: skip
    return table(
        "auroc", "AUROC by pair", f"{over_seeds(record)} Bold is the best of its row.",
        ("inside / outside", "network", "accuracy", *METHODS), rows,
        "Entropy is that of the network's own probabilities, temperature that of the temperature-scaled ones, "
        "p.epistemic the mutual information of the tuned posterior.",
    )  # fmt: skip


def level_table(record: Record) -> Table:
    rows = [
        (_name(*key), number(runs[0]["n_held_out"], "{:,}"),
         *(mean([run[k] for run in runs], "{:.1%}") for k in ("false_alarms", "raised")),
         number(max(run["scale"] for run in runs), "{:.3g}"))
        for key, runs in grouped(record["runs"], "inside", "outside").items()
    ]  # fmt: skip
    return table(
        "level", f"Alarms at {LEVEL:g}",
        "How many test data raise an alarm, which are all false, and how many from outside do.",
        ("inside / outside", "held-out rows", "false alarms", "raised outside", "largest scale"), rows,
        "The guarantee is on the mean over held-out and test data. The scale is what held-out NLL multiplied the "
        "evidence's precisions by; the alarm undoes it.",
    )  # fmt: skip


def _bars_panel(pairs: dict[tuple[str, str], list[Record]]) -> Panel:
    return Panel("auroc", "AUROC by pair and method.", partial(_bars, pairs=pairs), (9.0, 1.0 + 0.62 * len(pairs)))


def _bars(ax: Axes, pairs: dict[tuple[str, str], list[Record]]) -> None:
    for k, method in enumerate(METHODS):
        at = [row + HEIGHT * (k - 1.5) for row in range(len(pairs))]
        found = [fmean(run["auroc"][method] for run in runs) for runs in pairs.values()]
        ax.barh(at, found, 0.9 * HEIGHT, color=COLOURS[method])
    ax.axvline(0.5, color=MUTED, linewidth=1.2)
    ax.set(xlim=(0, 1), xlabel="AUROC")
    axes.rows(ax, [_name(*key) for key in pairs])


def _examples(record: Record) -> list[Record]:
    """The examples of the first run with images."""
    return next((run["examples"][:N_EXAMPLES] for run in record["runs"] if run["examples"]), [])


def _title(example: Record) -> str:
    return f"class {example['label']} at {example['confidence']:.0%}, p = {example['p_value']:.3f}"


def _image(ax: Axes, example: Record) -> None:
    ax.imshow(example["pixels"], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.set_title(_title(example), fontsize=9, fontweight="normal")


def _setting(run: Record) -> str:
    rows = f"{run['n_train']:,} / {run['n_held_out']:,} / {run['n_test']:,} rows"
    took = ", ".join(f"{key} {run['seconds'][key]:.0f} s" for key in ("train", "fit", "tune", "alarm"))
    return f"{run['network']}, {run['parameters']:,} parameters, {run['structure']}; {rows}; {took}"
