"""The CT study's record → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from lapwing_studies.report.cells import best_of_columns, mean, number, table
from lapwing_studies.report.ct_figures import calibration, images, others
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.ct_claims import DROPOUT, MLL, values_of
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.study import Record


def page(record: Record) -> StudyPage:
    runs, tier = record["runs"], record["tier"]
    shown, errors = images(runs[0]), calibration(runs)
    return StudyPage(
        title="Error bars for computed tomography",
        lead=(
            "KMNIST images from a few noisy projections. A deep image prior reconstructs each from its own data; "
            "the network is linearised, and the evidence chooses prior and noise.",
            "Scores are log densities of the true image in nats per pixel, larger is better.",
        ),
        figures=(shown, errors, others(record["others"])),
        tables=(
            *(density(runs, level) for level in sorted(grouped(runs, "level"))),
            quality(runs),
            spread(runs),
            elsewhere(record["others"]),
        ),
        notes=(
            "What differs from the paper: fewer images and iterations outside the faithful tier, a ray transform of "
            "our own, and no walnut. The published numbers are not at hand: orderings can be compared, values cannot.",
            "The density of whole images of DIP-MCDO is a kernel estimate of bandwidth 0.05 and is dominated by that "
            "bandwidth; of pixels and patches all rows are Gaussian.",
            "All densities but that estimate contain the image-noise variance c of the learned noise.",
        ),
        settings={
            "images per setting": str(tier["n_images"]),
            "channels": str(tier["channels"]),
            "iterations": str(tier["steps"] or "as published"),
            "learning rate": f"{tier['lr']:g}",
            **{f"CPU seconds, {lap}": f"{fmean(r['seconds'][lap] for r in runs):.1f}" for lap in LAPS},
        },
        cover=(shown.drawn[:6], errors.drawn),
    )


LAPS = ("reconstruction", "MLL")


def _methods(runs: list[Record]) -> list[str]:
    return [row["method"] for row in runs[0]["rows"]]


def density(runs: list[Record], level: float) -> Table:
    """Rows are methods, columns angles; means over images, and their standard error."""
    own = where(runs, level=level)
    columns = [(a, key) for a in sorted(grouped(own, "angles")) for key in ("full", "patches")]
    rows = [
        [m, *(mean(values_of(where(own, angles=a), m, key), "{:.2f}") for a, key in columns)] for m in _methods(own)
    ]
    heads = (f"{a} angles, {'image' if key == 'full' else '4 × 4'}" for a, key in columns)
    return table(
        f"density-{level:g}", f"Log density per pixel, {level:.0%} noise", "Mean over images ± standard error.",
        ("method", *heads), best_of_columns(rows, dict.fromkeys(range(1, len(columns) + 1), -1.0)),
    )  # fmt: skip


def quality(runs: list[Record]) -> Table:
    """PSNR and SSIM of what each method takes for the image."""
    settings = dict(sorted(grouped(runs, "level", "angles").items()))
    rows = [
        (name, *(mean([read(r) for r in some], "{:.2f}") for some in settings.values())) for name, read in QUALITIES
    ]
    heads = ("image", *(f"{a} angles, {level:.0%}" for level, a in settings))
    return table("quality", "PSNR (dB) and SSIM", "Error bars do not change the mean.", heads, rows)


def spread(runs: list[Record]) -> Table:
    """Coverage and correlation by method, over all settings."""
    looks = {"coverage": "{:.1%}", "correlation": "{:.2f}", "std": "{:.4f}", "noise_std": "{:.3f}"}
    rows = []
    for method in _methods(runs):
        found = {key: [v for v in values_of(runs, method, key) if v is not None] for key in looks}
        rows.append((method, *(number(fmean(v) if v else None, looks[key]) for key, v in found.items())))
    heads = ("method", "95% interval covers", "correlation with |error|", "mean std", "noise std")
    return table("spread", "Are the error bars where the errors are?", "Means over all settings.", heads, rows)


def elsewhere(found: list[Record]) -> Table:
    """Blur, frequencies and larger slices, one row each."""
    looks = {"first": "{:.1f}", "psnr": "{:.1f}", "patches": "{:.2f}", "coverage": "{:.1%}", "correlation": "{:.2f}"}
    rows = [
        (r["name"], number(r["pixels"], "{:,}"), number(r["measurements"], "{:,}"), r["way"],
         *(number(r[key], shown) for key, shown in looks.items()), number(sum(r["seconds"].values()), "{:.0f}"))
        for r in found
    ]  # fmt: skip
    heads = ("measurement", "pixels", "data", "way", "PSNR before", "PSNR", "4 × 4", "covers", "correlation", "CPU s")
    return table("others", "Other measurements, linearised with MLL", "5 % noise; one image each.", heads, rows)


def _of(method: str, key: str) -> Callable[[Record], float]:
    return lambda run: values_of([run], method, key)[0]


QUALITIES: tuple[tuple[str, Callable[[Record], float]], ...] = (
    ("FBP, PSNR", lambda run: float(run["fbp_psnr"])),
    *((f"{name}, {key.upper()}", _of(method, key)) for key in ("psnr", "ssim")
      for name, method in (("DIP", MLL), ("DIP-MCDO", DROPOUT))),
)  # fmt: skip
