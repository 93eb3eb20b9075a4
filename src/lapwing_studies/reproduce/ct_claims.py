"""What the CT study should show, beside what it did: orderings of the paper, and goals of the library's own."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.study import Record

MLL, TV, LEARNED, DROPOUT = "linearised, MLL", "linearised, MLL + TV-PredCP", "DIP (MLL σ²)", "DIP-MCDO"
FEW = 10  # angles up to which total variation as a prior should help


def claims(record: Record) -> list[Claim]:
    return [
        _above(record, "linearised posteriors have a higher log density of the true image than dropout", MLL, DROPOUT),
        _above(record, "linearised posteriors are above constant noise from the evidence", MLL, LEARNED),
        _few_angles(record),
        _goal(record, "correlation of standard deviation and error", "> 0.4", "correlation", lambda v: v > 0.4),
        _goal(record, "95 % intervals cover", "0.85 to 0.99", "coverage", lambda v: 0.85 <= v <= 0.99),
        Claim(
            "values of the tables, and the walnut's patches", "the tables", "published numbers are not at hand", None
        ),
    ]


def _above(record: Record, says: str, better: str, worse: str) -> Claim:
    """At every number of angles and noise level, in the mean over images."""
    a, b = (_means(record, method, "full") for method in (better, worse))
    found = f"{_listed(a)} nats per pixel against {_listed(b)} ({record['tier']['n_images']} images a setting)"
    return Claim(says, "higher", found, all(x > y for x, y in zip(a, b, strict=True)))


def _few_angles(record: Record) -> Claim:
    says = f"TV-PredCP is not below the evidence alone at up to {FEW} angles"
    a, b = (_means(record, method, "full", FEW) for method in (TV, MLL))
    holds = all(x >= y - 0.005 for x, y in zip(a, b, strict=True)) if a else None
    return Claim(says, "not below", f"{_listed(a)} against {_listed(b)}", holds)


def _goal(record: Record, says: str, wanted: str, key: str, holds: Callable[[float], bool]) -> Claim:
    values = _means(record, MLL, key)
    return Claim(says, wanted, _listed(values), all(map(holds, values)))


def _means(record: Record, method: str, key: str, most_angles: int = 180) -> list[float]:
    """Means over images, one for each setting."""
    settings = grouped(record["runs"], "angles", "level")
    return [
        fmean(values_of(settings[setting], method, key)) for setting in sorted(settings) if setting[0] <= most_angles
    ]


def values_of(runs: list[Record], method: str, key: str) -> list[Any]:
    return [row[key] for run in runs for row in where(run["rows"], method=method)]


def _listed(values: list[float]) -> str:
    return " and ".join(f"{v:.2f}".replace("-", "−") for v in values)
