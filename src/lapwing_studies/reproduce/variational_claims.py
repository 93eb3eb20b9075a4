"""What Unlu and Aitchison claim of Variational Laplace, in a record."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from lapwing_studies.reproduce.claims import Claim, below, listed
from lapwing_studies.reproduce.means import mean_of, where
from lapwing_studies.reproduce.study import Record

# Way of predicting → method, and how its predictions are made.
WAYS = {"MAP": ("MAP", "mean"), "VI mean": ("VI", "mean"), "VI 10 draws": ("VI", "draws"), "VL": ("VL", "mean")}


def claims(record: Record) -> list[Claim]:
    """Of the first data set, each at the β of its best held-out NLL; means over seeds."""
    data = record["data"][0]
    vl, plain = scores_of(record, data, "VL"), scores_of(record, data, "MAP")
    nll, mean, map_nll = (mean_of(scores_of(record, data, way), "nll") for way in ("VL", "VI mean", "MAP"))
    ece = [mean_of(found, "ece") for found in (vl, plain)]
    accuracy = [mean_of(found, "accuracy") for found in (vl, plain)]
    elbos = [
        runs_of(record, data, "VI", beta=1.0, multiplier=m)[0]["elbo"] or 0.0 for m in sorted(record["multipliers"])
    ]
    seconds = {m: fmean(run["seconds"] for run in runs_of(record, data, m)) for m in ("MAP", "VL")}
    return [
        below("Variational Laplace has a lower NLL than MAP", nll, map_nll, wanted="lower"),
        below("Variational Laplace has a lower ECE than MAP", *ece, wanted="lower"),
        Claim("its accuracy is at most half a point below MAP's", "≥ −0.5 points",
              f"{accuracy[0]:.1%} against {accuracy[1]:.1%}", accuracy[0] >= accuracy[1] - 0.005),
        Claim("mean-field inference, predicting with its mean, is between them in NLL", "between", f"{mean:.3f}",
              nll <= mean <= map_nll),
        Claim("a larger learning rate of the variances raises the ELBO of mean-field inference", "rises",
              listed(elbos, "{:,.0f}"), all(a < b for a, b in pairwise(elbos))),
        Claim("the same on CIFAR-10, CIFAR-100 and SVHN, and the values of table 1", "the table",
              "not run: networks and data of the paper", None),
        Claim("an epoch takes less than three times that of MAP", "2.75",
              f"{seconds['VL'] / seconds['MAP']:.2f}", seconds["VL"] < 3 * seconds["MAP"]),
    ]  # fmt: skip


def runs_of(
    record: Record, data: str, method: str, *, beta: float | None = None, multiplier: float = 10.0
) -> list[Record]:
    found = where(record["runs"], data=data, method=method, multiplier=multiplier)
    return [run for run in found if beta in (None, run["beta"])]


def beta_of(record: Record, data: str, way: str) -> float:
    """The β with the best held-out NLL, the mean over seeds."""
    method, kind = WAYS[way]

    def held_out(beta: float) -> float:
        return fmean(run["held_out"][kind]["nll"] for run in runs_of(record, data, method, beta=beta))

    return min(record["betas"], key=held_out)


def scores_of(record: Record, data: str, way: str) -> list[Record]:
    """Test scores at that β, by seed."""
    method, kind = WAYS[way]
    return [run["scores"][kind] for run in runs_of(record, data, method, beta=beta_of(record, data, way))]
