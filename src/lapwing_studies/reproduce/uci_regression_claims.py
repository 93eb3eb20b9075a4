"""What Foong et al. (2019) claim of standard and gap splits, counted in a record."""

from __future__ import annotations

from statistics import fmean

from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.uci_regression import GAPS, LINEAR, MEAN_FIELD, SAMPLED, SMALL
from lapwing_studies.reproduce.uci_regression_methods import MAP

TUNINGS = ("evidence", "validation")


def values(record: Record, name: str, kind: str, method: str, by: str, key: str = "ll") -> list[float]:
    """One score by split."""
    runs = where(record["runs"], name=name, kind=kind)
    return [float(score[key]) for run in runs for score in where(run["scores"], method=method, by=by)]


def sets(record: Record, kind: str) -> list[str]:
    return list(grouped(where(record["runs"], kind=kind), "name"))


def claims(record: Record) -> list[Claim]:
    found = [claim for by in TUNINGS for claim in _standard(record, by)]
    return found + [claim for name in GAPS if name in sets(record, "gap") for claim in _gap(record, name)]


def _standard(record: Record, by: str) -> list[Claim]:
    names = [name for name in sets(record, "std") if name in SMALL]

    def mean(name: str, method: str) -> float:
        return fmean(values(record, name, "std", method, by))

    not_below = [mean(name, LINEAR) >= mean(name, MAP) for name in names]
    above = [mean(name, LINEAR) > mean(name, SAMPLED) for name in names]
    return [
        at_least(f"standard splits, by {by}: linearised not below MAP in log likelihood", 4, not_below),
        at_least(f"standard splits, by {by}: linearised above sampled weights", 5, above),
    ]


def _gap(record: Record, name: str) -> list[Claim]:
    linear = values(record, name, "gap", LINEAR, "evidence")
    other = values(record, name, "gap", MEAN_FIELD, "ELBO")
    mean, worst = (fmean(linear), fmean(other)), (min(linear), min(other))
    return [
        Claim(f"{name}-gap: mean log likelihood of linearised above mean field", "above",
              f"{mean[0]:.2f} against {mean[1]:.2f} ({len(linear)} split{'s' * (len(linear) > 1)})", mean[0] > mean[1]),
        Claim(f"{name}-gap: worst split better by more than 1 nat", "> 1",
              f"{worst[0]:.2f} against {worst[1]:.2f}", worst[0] - worst[1] > 1),
    ]  # fmt: skip
