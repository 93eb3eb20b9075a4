"""Draw figures on given axes: as SVG panels of the page, and as one PNG for the README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from lapwing_studies.report.palette import (
    GLM,
    INK,
    MAP,
    METHOD_COLOURS,
    MUTED,
    OUTSIDE,
    PAPER,
    SAMPLED,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.bench.records import (
        Band,
        EvidenceCurve,
        MethodCurves,
        MoonsRecord,
        RegressionRecord,
        UncertaintyMap,
    )

TWO_SIDED_95 = 1.959963984540054
_LABEL = {"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "boxstyle": "round,pad=0.12"}
COLOUR_MAPS = {"probability": "PuOr_r", "epistemic": "viridis", "aleatoric": "viridis"}


def regression(ax: Axes, record: RegressionRecord, *, bands: Sequence[int]) -> None:
    """Data, truth, mean, function draws and 95% bands; `bands` selects the prior precisions that are drawn.

    Every layer has a gid, so that the page can show and hide it.
    """
    for index in bands:
        _band(ax, record, record["bands"][index], suffix=str(index))
    x = record["x"]
    for k, draw in enumerate(record["draws"]):
        ax.plot(x, draw, color=GLM, linewidth=0.9, alpha=0.55, gid=f"draw-{k}", zorder=2.2)
    ax.plot(x, record["truth"], color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)), gid="truth", zorder=2.3)
    ax.plot(x, record["mean"], color=MAP, gid="mean", zorder=2.4)
    ax.plot(record["train_x"], record["train_y"], "o", color=INK, markersize=3.2, alpha=0.8, gid="data", zorder=2.5)
    ax.set(xlim=(min(x), max(x)), ylim=_limits(record), xlabel="x", ylabel="y")


def _band(ax: Axes, record: RegressionRecord, band: Band, *, suffix: str) -> None:
    mean = np.asarray(record["mean"])
    for layer, std, alpha in [("total", band["total_std"], 0.16), ("epistemic", band["epistemic_std"], 0.30)]:
        half = TWO_SIDED_95 * np.asarray(std)
        ax.fill_between(
            record["x"], mean - half, mean + half, color=GLM, alpha=alpha, linewidth=0, gid=f"{layer}-{suffix}"
        )


def _limits(record: RegressionRecord) -> tuple[float, float]:
    """Limits that fit the tuned band near the data; far away it may be cut off."""
    mean, std = np.asarray(record["mean"]), np.asarray(record["bands"][record["tuned"]]["total_std"])
    x = np.asarray(record["x"])
    near = (x > min(record["train_x"]) - 0.6) & (x < max(record["train_x"]) + 0.6)
    low, high = (mean - TWO_SIDED_95 * std)[near].min(), (mean + TWO_SIDED_95 * std)[near].max()
    return float(low - 0.12 * (high - low)), float(high + 0.12 * (high - low))


def reliability(ax: Axes, curves: MethodCurves) -> None:
    """Accuracy of each confidence bin as a bar, the diagonal of perfect calibration, and the share of points below."""
    bins, colour = curves["bins"], METHOD_COLOURS[curves["method"]]
    total = sum(bins["count"])
    for lower, upper, count, accuracy in zip(
        bins["lower"], bins["upper"], bins["count"], bins["accuracy"], strict=True
    ):
        if accuracy is None:
            continue
        # Opacity shows the number of points: a bin with three points is not significant.
        ax.bar(
            lower,
            accuracy,
            upper - lower,
            align="edge",
            color=colour,
            alpha=0.25 + 0.6 * min(1.0, 8 * count / total),
            edgecolor=PAPER,
            linewidth=1.0,
        )
        ax.text((lower + upper) / 2, 0.025, str(count), ha="center", va="bottom", fontsize=8, color=INK, bbox=_LABEL)
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    ax.set_title(f"ECE {curves['ece']:.3f}", loc="right", color=MUTED, fontsize=10, fontweight="normal")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.set_title(curves["method"], color=colour)


def entropies(ax: Axes, curves: MethodCurves, *, n_bins: int = 24) -> None:
    """Histograms of predictive entropy, as shares of points: digits in colour, photographs in grey."""
    inside, outside = np.asarray(curves["entropy_digits"]), np.asarray(curves["entropy_photos"])
    edges = np.linspace(0, np.log(10), n_bins + 1).tolist()
    colour = METHOD_COLOURS[curves["method"]]
    for values, fill in [(outside, OUTSIDE), (inside, colour)]:
        ax.hist(values, edges, weights=np.full(len(values), 1 / len(values)), color=fill, alpha=0.62)
    ax.set_title(f"OOD-AUC {curves['ood_auc_photos']:.3f}", loc="right", color=MUTED, fontsize=10, fontweight="normal")
    ax.set(xlim=(0, np.log(10)), ylim=(0, None), xlabel="entropy (nats)", ylabel="share of points")
    ax.set_title(curves["method"], color=colour)


def uncertainty_map(ax: Axes, record: MoonsRecord, values: UncertaintyMap, *, upper: float) -> None:
    """One map over the plane with the training points on top; `upper` is the end of the colour scale."""
    extent = (record["extent"][0], record["extent"][1], record["extent"][2], record["extent"][3])
    ax.imshow(
        values["values"], origin="lower", extent=extent, aspect="auto", vmin=0.0, vmax=upper,
        cmap=COLOUR_MAPS[values["kind"]], interpolation="bilinear",
    )  # fmt: skip
    if values["kind"] == "probability":
        ax.contour(values["values"], [0.5], origin="lower", extent=extent, colors=["#1a1a1a"], linewidths=1.2)
    points, labels = np.asarray(record["points"]), np.asarray(record["labels"])
    for label, face in [(0, "#1a1a1a"), (1, "#ffffff")]:
        chosen = points[labels == label]
        ax.plot(
            chosen[:, 0], chosen[:, 1], "o", markersize=3.2, color=face, markeredgecolor="#808080", markeredgewidth=0.5
        )
    ax.set(xticks=[], yticks=[], xlim=record["extent"][:2], ylim=record["extent"][2:])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(map_title(values), color=METHOD_COLOURS[values["method"]])


def map_title(values: UncertaintyMap) -> str:
    return f"{values['method']}: {values['kind']}"


def evidence(ax: Axes, curve: EvidenceCurve) -> None:
    """Log evidence against prior precision, with the optimum and the precision the network was trained with."""
    precision, log_evidence = np.asarray(curve["precision"]), np.asarray(curve["log_evidence"])
    ax.semilogx(precision, log_evidence, color=GLM)
    _mark(ax, curve["trained_with"], "trained with", MUTED, side="right")
    _mark(ax, curve["by_evidence"], "evidence optimum", GLM, side="left")
    # Far from the optimum the curve falls like −δ‖θ‖²/2 and would compress the interesting range.
    near = log_evidence[np.abs(np.log10(precision / curve["by_evidence"])) <= 1.2]
    room = max(1.0, 0.08 * float(np.ptp(near)))
    ax.set(ylim=(near.min() - room, near.max() + room))
    ax.set(xlim=(precision[0], precision[-1]), xlabel="prior precision", ylabel="log evidence")


def held_out(ax: Axes, curve: EvidenceCurve) -> None:
    """Held-out NLL of the GLM and the sampled network against prior precision; MAP, which has none, is dashed."""
    precision = np.asarray(curve["precision"])
    ax.loglog(curve["precision_sampled"], curve["held_out_sampled"], color=SAMPLED, marker="o", markersize=4)
    ax.loglog(precision, curve["held_out_glm"], color=GLM)
    ax.axhline(curve["held_out_map"], color=MAP, linestyle=(0, (4, 3)))
    _mark(ax, curve["by_evidence"], "evidence optimum", GLM, side="center")
    _mark(ax, curve["by_validation"], "held-out choice", INK, side="right")
    ax.set(xlim=(precision[0], precision[-1]), xlabel="prior precision", ylabel="held-out NLL (nats)")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _mark(ax: Axes, x: float, label: str, colour: str, *, side: Literal["left", "center", "right"]) -> None:
    """A dotted line at x with a label above the axes; `side` is the part of the label at the line."""
    ax.axvline(x, color=colour, linewidth=1.2, linestyle=(0, (1, 2)))
    ax.annotate(
        f" {label} ", (x, 1.02), xycoords=("data", "axes fraction"), va="bottom", ha=side, color=colour, fontsize=10
    )
