"""The CT study's record → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, PAPER, STYLE
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.ct import CtRecord, CtRun

MLL, LEARNED, DROPOUT = "linearised, MLL", "DIP (MLL σ²)", "DIP-MCDO"
_TITLES = ("ground truth", "measurements", "FBP", "reconstruction", "absolute error", "standard deviation")


def page(record: CtRecord, command: str) -> StudyPage:
    runs = record["runs"]
    return StudyPage(
        title="Error bars for computed tomography",
        lead=(
            "KMNIST images from a few noisy projections. A deep image prior reconstructs each from its own data; "
            "the network is linearised, and the evidence chooses prior and noise.",
            "Scores are log densities of the true image in nats per pixel, larger is better.",
        ),
        headlines=_headlines(runs),
        figures=(pictures(runs[0]), calibration(runs), by_angles(runs)),
        tables=(*(table(runs, level) for level in _levels(runs)), quality(runs), spread(runs)),
        notes=(
            "The published numbers are not at hand: orderings can be compared, values cannot.",
            "The density of whole images of DIP-MCDO is a kernel estimate of bandwidth 0.05 and is dominated by that "
            "bandwidth; of pixels and patches all rows are Gaussian.",
            "All densities but that estimate contain the image-noise variance c of the learned noise.",
        ),
        settings=(
            Setting(name="tier", value=record["effort"]),
            Setting(name="images per setting", value=str(record["tier"]["n_images"])),
            Setting(name="channels", value=str(record["tier"]["channels"])),
            Setting(name="iterations", value=str(record["tier"]["steps"] or "as published")),
            Setting(name="learning rate", value=f"{record['tier']['lr']:g}"),
            Setting(
                name="CPU seconds per reconstruction",
                value=f"{_mean(r['seconds']['reconstruction'] for r in runs):.1f}",
            ),
            Setting(name="CPU seconds per posterior (MLL)", value=f"{_mean(r['seconds']['MLL'] for r in runs):.1f}"),
        ),
        command=command,
    )


def _headlines(runs: Sequence[CtRun]) -> tuple[Headline, ...]:
    def over(method: str, key: str) -> float:
        return _mean(_row(r, method)[key] for r in runs)

    return (
        Headline(
            f"{over(MLL, 'patches'):.2f} against {over(LEARNED, 'patches'):.2f}",
            "nats per pixel (4 × 4 patches): linearised, and the same image with constant noise",
        ),
        Headline(f"{over(MLL, 'coverage'):.1%}", "of true pixels inside the 95% interval"),
        Headline(f"{over(MLL, 'correlation'):.2f}", "correlation of standard deviation and absolute error"),
    )


# --- tables -----------------------------------------------------------------------------------------------


def table(runs: Sequence[CtRun], level: float) -> Table:
    """Rows are methods, columns angles; means over images, and their standard error."""
    own = [r for r in runs if r["level"] == level]
    angles = sorted({r["angles"] for r in own})
    columns = [(a, key) for a in angles for key in ("full", "patches")]
    cells = {c: {m: _cell(_values(own, m, *c)) for m in _methods(own)} for c in columns}
    best = {c: max(cells[c].values(), key=lambda cell: float(cell.sort)).text for c in columns}
    rows = tuple((Cell(m, m), *(_marked(cells[c][m], best[c]) for c in columns)) for m in _methods(own))
    heads = tuple(f"{a} angles, {'image' if key == 'full' else '4 × 4'}" for a, key in columns)
    title = f"Log density per pixel, {level:.0%} noise"
    return Table(f"density-{level:g}", title, "Mean over images ± standard error.", ("method", *heads), rows)


def quality(runs: Sequence[CtRun]) -> Table:
    """PSNR and SSIM of what each method takes for the image."""
    settings = sorted({(r["level"], r["angles"]) for r in runs})
    heads = ["image", *(f"{a} angles, {level:.0%}" for level, a in settings)]
    rows = []
    for name, read in _QUALITIES:
        values = [[read(r) for r in runs if (r["level"], r["angles"]) == s] for s in settings]
        rows.append((Cell(name, name), *(_cell(v, digits=2) for v in values)))
    return Table("quality", "PSNR (dB) and SSIM", "Error bars do not change the mean.", tuple(heads), tuple(rows))


def spread(runs: Sequence[CtRun]) -> Table:
    """Coverage and correlation by method, over all settings."""
    rows = []
    for m in _methods(runs):
        found = [_row(r, m) for r in runs]
        correlations = [f["correlation"] for f in found if f["correlation"] is not None]
        noise = [f["noise_std"] for f in found if f["noise_std"] is not None]
        rows.append(
            (
                Cell(m, m),
                Cell(f"{_mean(f['coverage'] for f in found):.1%}", _mean(f["coverage"] for f in found)),
                Cell(
                    f"{_mean(correlations):.2f}" if correlations else "–", _mean(correlations) if correlations else -1.0
                ),
                Cell(f"{_mean(f['std'] for f in found):.4f}", _mean(f["std"] for f in found)),
                _or_dash(noise, 3),
            )
        )
    heads = ("method", "95% interval covers", "correlation with |error|", "mean std", "noise std")
    return Table("spread", "Are the error bars where the errors are?", "Means over all settings.", heads, tuple(rows))


_QUALITIES: tuple[tuple[str, Callable[[Any], float]], ...] = (
    ("FBP, PSNR", lambda r: r["fbp_psnr"]),
    ("DIP, PSNR", lambda r: _row(r, MLL)["psnr"]),
    ("DIP-MCDO, PSNR", lambda r: _row(r, DROPOUT)["psnr"]),
    ("DIP, SSIM", lambda r: _row(r, MLL)["ssim"]),
    ("DIP-MCDO, SSIM", lambda r: _row(r, DROPOUT)["ssim"]),
)


def _cell(values: Sequence[float], digits: int = 2) -> Cell:
    mean, n = _mean(values), len(values)
    if n < 2:
        return Cell(f"{mean:.{digits}f}", mean)
    error = float(np.std(values, ddof=1)) / sqrt(n)
    return Cell(f"{mean:.{digits}f} ± {error:.{digits}f}", mean)


def _or_dash(values: Sequence[float], digits: int) -> Cell:
    return Cell(f"{_mean(values):.{digits}f}", _mean(values)) if values else Cell("–", -1.0)


def _seconds(runs: Sequence[CtRun], lap: str) -> str:
    return f"{_mean(r['seconds'][lap] for r in runs):.1f}"


def _marked(cell: Cell, best: str) -> Cell:
    return Cell(cell.text, cell.sort, "best" if cell.text == best else "")


def _values(runs: Sequence[CtRun], method: str, angles: int, key: str) -> list[float]:
    return [_row(r, method)[key] for r in runs if r["angles"] == angles]


def _row(run: CtRun, method: str) -> Any:
    return next(row for row in run["rows"] if row["method"] == method)


def _methods(runs: Sequence[CtRun]) -> list[str]:
    return [row["method"] for row in runs[0]["rows"]]


def _levels(runs: Sequence[CtRun]) -> list[float]:
    return sorted({r["level"] for r in runs})


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


# --- figures ----------------------------------------------------------------------------------------------


def pictures(run: CtRun) -> Figure:
    """The images of one reconstruction side by side."""
    shown = _shown(run)
    panels = tuple(
        panel(f"image-{k}", f"{title} of one KMNIST image", partial(_image, values=values, title=title, limits=limits),
              shape=(2.6, 2.5))
        for k, (title, values, limits) in enumerate(shown)
    )  # fmt: skip
    see = f"Image {run['image']}, {run['angles']} angles, {run['level']:.0%} noise. "
    see += "Errors and standard deviations share a scale."
    return Figure("images", "One reconstruction, and how far to trust it", see, panels, wide="many")


def calibration(runs: Sequence[CtRun]) -> Figure:
    return Figure(
        "calibration",
        "Calibration",
        "Left: errors against standard deviations, pixel by pixel. Right: errors divided by them, with the Gaussian.",
        (
            panel("scatter", "Absolute error against standard deviation.", partial(_scatter, runs=runs)),
            panel("histogram", "Standardised errors and the standard normal density.", partial(_histogram, runs=runs)),
        ),
    )


def by_angles(runs: Sequence[CtRun]) -> Figure:
    return Figure(
        "angles",
        "Uncertainty falls as angles are added",
        "Mean standard deviation and mean absolute error against the number of angles.",
        (panel("angles", "Mean standard deviation by number of angles.", partial(_angles, runs=runs)),),
    )


def _shown(run: CtRun) -> list[tuple[str, np.ndarray, tuple[float, float] | None]]:
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
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=11)


def _pairs(runs: Sequence[CtRun]) -> tuple[np.ndarray, np.ndarray]:
    truth, mean, std = (np.concatenate([np.ravel(r["images"][k]) for r in runs]) for k in ("truth", "mean", "std"))
    return truth - mean, std


def _scatter(ax: Axes, runs: Sequence[CtRun]) -> None:
    error, std = _pairs(runs)
    ax.loglog(std, np.abs(error).clip(1e-6), ".", color=GLM, markersize=2, alpha=0.35, rasterized=True)
    ends = [float(std.min()), float(std.max())]
    ax.plot(ends, ends, color=INK, linewidth=1.2)
    ax.plot(ends, [2 * e for e in ends], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlabel="standard deviation", ylabel="absolute error", ylim=(1e-5, 2))
    ax.set_title("error and its bar (lines: 1 and 2)")


def _histogram(ax: Axes, runs: Sequence[CtRun]) -> None:
    error, std = _pairs(runs)
    z = (error / std).clip(-5, 5)
    ax.hist(z, bins=np.linspace(-5, 5, 61).tolist(), density=True, color=GLM, alpha=0.6)
    at = np.linspace(-5, 5, 201)
    ax.plot(at, np.exp(-0.5 * at**2) / sqrt(2 * np.pi), color=INK, linewidth=1.5)
    ax.set(xlabel="error / standard deviation", ylabel="density", xlim=(-5, 5))
    ax.set_title("standardised errors, N(0, 1)")


def _angles(ax: Axes, runs: Sequence[CtRun]) -> None:
    for level, look in zip(_levels(runs), ("o-", "s--"), strict=False):
        own = [r for r in runs if r["level"] == level]
        angles = sorted({r["angles"] for r in own})
        std = [_mean(_values(own, MLL, a, "std")) for a in angles]
        error = [_mean(np.abs(_pairs([r])[0]).mean() for r in own if r["angles"] == a) for a in angles]
        ax.plot(angles, std, look, color=GLM, label=f"standard deviation, {level:.0%} noise")
        ax.plot(angles, error, look, color=MAP, label=f"absolute error, {level:.0%} noise")
    ax.set(xlabel="angles", ylabel="mean over pixels", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8)


def picture(record: CtRecord, path: Path) -> Path:
    """Two rows: the images of one reconstruction, then calibration."""
    runs = record["runs"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER}):
        canvas = Canvas(figsize=(11.5, 6.6), layout="constrained")
        grid = canvas.add_gridspec(2, 12, height_ratios=[1.0, 1.5])
        for k, (title, values, limits) in enumerate(_shown(runs[0])[:6]):
            _image(canvas.add_subplot(grid[0, 2 * k : 2 * k + 2]), values, title, limits)
        for k, paint in enumerate((_scatter, _histogram, _angles)):
            paint(canvas.add_subplot(grid[1, 4 * k : 4 * k + 4]), runs)
        canvas.savefig(path, dpi=100, metadata={"Software": None})
    return path
