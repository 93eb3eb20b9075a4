"""The pictures of the CT study: images side by side, calibration, and uncertainty by the number of angles."""

from __future__ import annotations

from functools import partial
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.ticker import NullFormatter

from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED
from lapwing_studies.reproduce.ct_claims import MLL, values_of
from lapwing_studies.reproduce.means import where
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SMALL = (2.6, 2.6)
_TITLES = ("ground truth", "measurements", "FBP", "reconstruction", "absolute error", "standard deviation")


def images(run: Record) -> Figure:
    """The images of one reconstruction side by side."""
    drawn = (
        Panel(f"image-{k}", f"{title} of one KMNIST image", partial(_image, values=values, title=title, limits=limits),
              SMALL)
        for k, (title, values, limits) in enumerate(_shown(run))
    )  # fmt: skip
    see = f"Image {run['image']}, {run['angles']} angles, {run['level']:.0%} noise. "
    see += "Errors and standard deviations share a scale."
    return Figure.of("images", "One reconstruction, and how far to trust it", see, drawn)


def calibration(runs: list[Record]) -> Figure:
    see = "Left: errors against standard deviations, pixel by pixel. Right: errors divided by them, with the Gaussian."
    drawn = (
        Panel("scatter", "Absolute error against standard deviation.", partial(_scatter, runs=runs)),
        Panel("histogram", "Standardised errors and the standard normal density.", partial(_histogram, runs=runs)),
        Panel("angles", "Mean standard deviation by number of angles.", partial(_angles, runs=runs)),
    )
    return Figure.of("calibration", "Calibration, and uncertainty by the number of angles", see, drawn)


def others(found: list[Record]) -> Figure:
    """Truth, reconstruction and standard deviation of each."""
    drawn = []
    for r in found:
        for key, title in (("truth", "truth"), ("mean", "reconstruction"), ("std", "standard deviation")):
            values = np.asarray(r["images"][key])
            limits = (0.0, float(values.max())) if key == "std" else (0.0, 1.0)
            paint = partial(_image, values=values, title=title, limits=limits)
            drawn.append(Panel(f"{r['name'][:4]}-{key}", f"{r['name']}: {title}", paint, SMALL))
    names = ", ".join(r["name"] for r in found)
    return Figure.of("others", "Other measurements", f"One row of three each: {names}.", drawn)


def _shown(run: Record) -> list[tuple[str, np.ndarray, tuple[float, float] | None]]:
    images = {key: np.asarray(value) for key, value in run["images"].items()}
    error = np.abs(images["truth"] - images["mean"])
    top = float(max(error.max(), images["std"].max()))
    values = (images["truth"], images["data"], images["fbp"], images["mean"], error, images["std"])
    limits: tuple[tuple[float, float] | None, ...] = ((0, 1), None, (0, 1), (0, 1), (0, top), (0, top))
    shown = list(zip(_TITLES, values, limits, strict=True))
    return shown + [(f"sample {k + 1}", sample, (0, 1)) for k, sample in enumerate(images["samples"][:2])]


def _image(ax: Axes, values: np.ndarray, title: str, limits: tuple[float, float] | None) -> None:
    low, high = limits or (float(values.min()), float(values.max()))
    colours = "viridis" if title in ("absolute error", "standard deviation") else "gray"
    aspect: Literal["auto", "equal"] = "auto" if title == "measurements" else "equal"
    ax.imshow(values, vmin=low, vmax=high, cmap=colours, interpolation="nearest", aspect=aspect)
    ax.set(xticks=[], yticks=[])
    ax.set_box_aspect(values.shape[0] / values.shape[1] if aspect == "equal" else 1)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=10)


def _pairs(runs: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    truth, mean, std = (np.concatenate([np.ravel(r["images"][k]) for r in runs]) for k in ("truth", "mean", "std"))
    return truth - mean, std


def _scatter(ax: Axes, runs: list[Record]) -> None:
    error, std = _pairs(runs)
    ax.loglog(std, np.abs(error).clip(1e-6), ".", color=GLM, markersize=2, alpha=0.35, rasterized=True)
    ends = [float(std.min()), float(std.max())]
    ax.plot(ends, ends, color=INK, linewidth=1.2)
    ax.plot(ends, [2 * e for e in ends], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlabel="standard deviation", ylabel="absolute error", ylim=(1e-5, 2))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_title("error and its bar (lines: 1 and 2)")


def _histogram(ax: Axes, runs: list[Record]) -> None:
    error, std = _pairs(runs)
    z = (error / std).clip(-5, 5)
    ax.hist(z, bins=np.linspace(-5, 5, 61).tolist(), density=True, color=GLM, alpha=0.6)
    at = np.linspace(-5, 5, 201)
    ax.plot(at, np.exp(-0.5 * at**2) / sqrt(2 * np.pi), color=INK, linewidth=1.5)
    ax.set(xlabel="error / standard deviation", ylabel="density", xlim=(-5, 5))
    ax.set_title("standardised errors, N(0, 1)")


def _angles(ax: Axes, runs: list[Record]) -> None:
    for level, look in zip(sorted({r["level"] for r in runs}), ("o-", "s--"), strict=False):
        own = where(runs, level=level)
        angles = sorted({r["angles"] for r in own})
        std = [fmean(values_of(where(own, angles=a), MLL, "std")) for a in angles]
        error = [fmean(float(np.abs(_pairs([r])[0]).mean()) for r in where(own, angles=a)) for a in angles]
        ax.plot(angles, std, look, color=GLM, label=f"standard deviation, {level:.0%} noise")
        ax.plot(angles, error, look, color=MAP, label=f"absolute error, {level:.0%} noise")
    ax.set(xlabel="angles", ylabel="mean over pixels", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8)
    ax.set_title("by number of angles")
