"""What Immer, Korzepa and Bauer (2021) claim of table 1 and figure 5, counted in a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from lapwing_studies.reproduce.claims import Claim, at_least, every
from lapwing_studies.reproduce.means import grouped, standard_error, where
from lapwing_studies.reproduce.published import IMMER_2021
from lapwing_studies.reproduce.study import Record

Choose = Callable[[Record, str, str], list[Record]]
COMPARED = ("MAP", "BNN", "GLM", "GLM diag")  # whose values should be the published ones
REFINED_SETS = ("vehicle", "waveform", "digits", "satellite")  # where refinement improves on the GLM, as published


def names(record: Record) -> list[str]:
    return list(grouped(record["runs"], "name"))


def scores(record: Record, name: str, method: str) -> dict[int, list[Record]]:
    """Scores by split, one for each precision."""
    found: dict[int, list[Record]] = {}
    for run in where(record["runs"], name=name):
        if some := where(run["scores"], method=method):
            found.setdefault(run["seed"], []).extend(some)
    return found


def _validation(score: Record) -> float:
    return float(score["validation"])


def chosen_by_split(record: Record, name: str, method: str) -> list[Record]:
    """The precision with the best validation NLL, chosen separately for every split."""
    return [min(some, key=_validation) for some in scores(record, name, method).values()]


def chosen_together(record: Record, name: str, method: str) -> list[Record]:
    """The precision with the best mean validation NLL, shared by all splits."""
    by_split = scores(record, name, method)
    by_precision = grouped((score for some in by_split.values() for score in some), "precision")
    whole = [some for some in by_precision.values() if len(some) == len(by_split)]
    return min(whole, key=lambda some: fmean(map(_validation, some)), default=[])


def pairs(record: Record, better: str, worse: str) -> dict[str, bool]:
    """Whether a method has the smaller mean NLL, by set, over the splits on which both were fitted."""
    found = {}
    for name in names(record):
        by_split = [scores(record, name, method) for method in (better, worse)]
        if common := set(by_split[0]) & set(by_split[1]):
            a, b = (fmean(min(some[seed], key=_validation)["nll"] for seed in common) for some in by_split)
            found[name] = a <= b
    return found


def at_every_precision(record: Record, better: str, worse: str) -> list[bool]:
    """Whether it has at one precision, by set, split and precision."""
    found = []
    for name in names(record):
        ours, theirs = scores(record, name, better), scores(record, name, worse)
        for seed in set(ours) & set(theirs):
            nll = {score["precision"]: score["nll"] for score in theirs[seed]}
            found += [s["nll"] < nll[s["precision"]] for s in ours[seed] if s["precision"] in nll]
    return found


def near(record: Record, methods: tuple[str, ...]) -> list[bool]:
    """Whether mean NLLs agree with the published ones: within 2 √(se² + se²), or 7%."""
    found = []
    for name in names(record):
        for method in methods:
            if values := [score["nll"] for score in chosen_by_split(record, name, method)]:
                published, error = IMMER_2021[name][method]
                spread = 2 * math.hypot(standard_error(values), error)
                found.append(abs(fmean(values) - published) <= max(spread, 0.07 * published))
    return found


def claims(record: Record) -> list[Claim]:
    sampled, diagonal = pairs(record, "GLM", "BNN"), pairs(record, "GLM", "GLM diag")
    refined, improved = pairs(record, "GLM refine", "GLM"), list(pairs(record, "GLM refine", "MAP").values())
    table = "the table, within two standard errors or 7%"
    return [
        every("GLM has a better NLL than the same Gaussian sampled through the network", list(sampled.values())),
        _share("the same at every prior precision", at_every_precision(record, "GLM", "BNN")),
        every("GLM is better than GLM diag", list(diagonal.values())),
        every(f"full refinement is better than GLM on {', '.join(REFINED_SETS)}",
              [refined[name] for name in REFINED_SETS if name in refined]),
        at_least("full refinement is at least as good as MAP", math.ceil(0.6 * len(improved)), improved),
        _share("full refinement improves on MAP at every precision", at_every_precision(record, "GLM refine", "MAP")),
        every("values of MAP, BNN, GLM and GLM diag", near(record, COMPARED), wanted=table),
        every("values of MFVI", near(record, ("MFVI",)), wanted=table),
        every("values of GLM refine and GLM refine d", near(record, ("GLM refine", "GLM refine d")), wanted=table),
    ]  # fmt: skip


def _share(says: str, wins: list[bool]) -> Claim:
    return Claim(says, "every one", f"{sum(wins)} of {len(wins)} cases", all(wins) if wins else None)
