"""The CT study's record → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.ct_figures import MLL, by_angles, calibration, others, picture, pictures
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from lapwing_studies.reproduce.ct import CtRecord, CtRun
    from lapwing_studies.reproduce.ct_others import OtherRun

__all__ = ["page", "picture"]
LEARNED, DROPOUT = "DIP (MLL σ²)", "DIP-MCDO"


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
        figures=(pictures(runs[0]), calibration(runs), by_angles(runs), others(record["others"])),
        tables=(
            *(table(runs, level) for level in _levels(runs)),
            quality(runs),
            spread(runs),
            elsewhere(record["others"]),
        ),
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


def elsewhere(found: Sequence[OtherRun]) -> Table:
    """Blur, frequencies and larger slices, one row each."""
    heads = ("measurement", "pixels", "data", "way", "PSNR before", "PSNR", "4 × 4", "covers", "correlation", "CPU s")
    rows = tuple(
        (
            Cell(r["name"], r["name"]),
            Cell(f"{r['pixels']:,}", r["pixels"]),
            Cell(f"{r['measurements']:,}", r["measurements"]),
            Cell(r["way"], r["way"]),
            Cell(f"{r['first']:.1f}", r["first"]),
            Cell(f"{r['psnr']:.1f}", r["psnr"]),
            Cell(f"{r['patches']:.2f}", r["patches"]),
            Cell(f"{r['coverage']:.1%}", r["coverage"]),
            Cell(f"{r['correlation']:.2f}", r["correlation"]),
            Cell(f"{sum(r['seconds'].values()):.0f}", sum(r["seconds"].values())),
        )
        for r in found
    )
    return Table("others", "Other measurements, linearised with MLL", "5 % noise; one image each.", heads, rows)


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
