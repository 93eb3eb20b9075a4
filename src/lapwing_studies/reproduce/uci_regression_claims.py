"""What Foong et al. (2019) claim of standard and gap splits, counted in a record."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.uci_regression import (
    GAPS,
    LINEAR,
    MEAN_FIELD,
    SAMPLED,
    SMALL,
    UciRegressionRecord,
)
from lapwing_studies.reproduce.uci_regression_methods import MAP

TUNINGS = ("evidence", "validation")


def values(record: UciRegressionRecord, name: str, kind: str, method: str, by: str, key: str = "ll") -> list[float]:
    """One score by split."""
    return [
        float(score[key])  # type: ignore[literal-required]
        for run in record["runs"]
        if (run["name"], run["kind"]) == (name, kind)
        for score in run["scores"]
        if (score["method"], score["by"]) == (method, by)
    ]


def mean_and_error(found: list[float]) -> tuple[float, float]:
    """Mean and standard error over splits; a single split has no error."""
    return fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def sets(record: UciRegressionRecord, kind: str) -> list[str]:
    return list(dict.fromkeys(run["name"] for run in record["runs"] if run["kind"] == kind))


def claims(record: UciRegressionRecord) -> list[Claim]:
    found = [claim for by in TUNINGS for claim in _standard(record, by)]
    return found + [claim for name in GAPS if name in sets(record, "gap") for claim in _gap(record, name)]


def _standard(record: UciRegressionRecord, by: str) -> list[Claim]:
    names = [name for name in sets(record, "std") if name in SMALL]

    def mean(name: str, method: str) -> float:
        return fmean(values(record, name, "std", method, by))

    not_below = [mean(name, LINEAR) >= mean(name, MAP) for name in names]
    above = [mean(name, LINEAR) > mean(name, SAMPLED) for name in names]
    return [
        at_least(f"standard splits, by {by}: linearised not below MAP in log likelihood", 4, not_below),
        at_least(f"standard splits, by {by}: linearised above sampled weights", 5, above),
    ]


def _gap(record: UciRegressionRecord, name: str) -> list[Claim]:
    linear = values(record, name, "gap", LINEAR, "evidence")
    other = values(record, name, "gap", MEAN_FIELD, "ELBO")
    mean, worst = (fmean(linear), fmean(other)), (min(linear), min(other))
    return [
        Claim(f"{name}-gap: mean log likelihood of linearised above mean field", "above",
              f"{mean[0]:.2f} against {mean[1]:.2f} ({len(linear)} splits)", mean[0] > mean[1]),
        Claim(f"{name}-gap: worst split better by more than 1 nat", "> 1",
              f"{worst[0]:.2f} against {worst[1]:.2f}", worst[0] - worst[1] > 1),
    ]  # fmt: skip
