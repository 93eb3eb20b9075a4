"""What Antorán et al. (2023) claim of samples under the full GGN, and of EM, in a record."""

from __future__ import annotations

from statistics import fmean

from lapwing_studies.reproduce.claims import Claim, below, listed
from lapwing_studies.reproduce.sampled import RTOL, SAMPLES, STRUCTURES
from lapwing_studies.reproduce.study import Record

FEW = 10  # steps


def methods(record: Record) -> list[str]:
    return [row["score"]["method"] for row in record["runs"][0]["rows"]]


def values(record: Record, method: str, key: str) -> list[float]:
    """One score by seed."""
    rows = [row for run in record["runs"] for row in run["rows"] if row["score"]["method"] == method]
    return [float({**row["score"], **row}[key]) for row in rows]


def settled(path: Record) -> int:
    """The step from which on the effective dimension stays within 5% of its last value."""
    gamma = path["effective_dimension"]
    far = [k for k, value in enumerate(gamma) if abs(value - gamma[-1]) > 0.05 * gamma[-1]]
    return far[-1] + 1 if far else 0


def claims(record: Record) -> list[Claim]:
    def at(method: str, key: str) -> float:
        return fmean(values(record, method, key))

    paths, ece = [run["path"] for run in record["runs"]], [at(m, "ece") for m in (SAMPLES, *STRUCTURES)]
    steps, last = [len(path["change"]) - 1 for path in paths], [path["change"][-1] for path in paths]
    stops = [n <= FEW and change < RTOL for n, change in zip(steps, last, strict=True)]
    settle = [settled(path) for path in paths]
    return [
        below("samples under the full GGN have a better joint NLL than Kronecker factors",
              at(SAMPLES, "joint_nll"), at("Kronecker", "joint_nll"), wanted="better", shown="{:.2f}"),
        Claim("better calibrated (ECE) than last layer, diagonal and Kronecker factors", "better",
              f"{ece[0]:.3f} against {listed(ece[1:])}", ece[0] < min(ece[1:])),
        below("better NLL than the last layer", at(SAMPLES, "nll"), at("last layer", "nll"), wanted="better"),
        Claim(f"EM converges in a few steps: every precision moves by less than {RTOL:.0%}", f"≤ {FEW} steps",
              f"after {listed(steps, '{}')} steps the largest change of a log precision is {listed(last, '{:.2g}')}",
              all(stops)),
        Claim("ResNet-50 on ImageNet", "the same ordering", "not run: too large", None),
        Claim("the effective dimension settles in a few steps, to 5%", f"≤ {FEW} steps",
              f"{listed(settle, '{}')} of {listed(steps, '{}')} steps",
              max(settle) <= FEW if min(n - k for n, k in zip(steps, settle, strict=True)) > 1 else None),
    ]  # fmt: skip
