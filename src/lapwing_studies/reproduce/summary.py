"""Summary of the battery: means over seeds, and claims about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from lapwing_studies.reproduce.battery import METHODS
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.study import Record

MAP, TEMPERATURE, EVIDENCE, BOTH = METHODS


@dataclass(frozen=True)
class Line:
    """One task, averaged over its seeds."""

    task: str
    runs: tuple[Record, ...]

    def mean(self, method: str, key: str) -> float:
        return fmean(self.values(method, key))

    def values(self, method: str, key: str) -> list[float]:
        return [float(s[key]) for run in self.runs for s in run["scores"] if s["method"] == method]

    def gain(self, over: str, method: str) -> float:
        """Nats per point that `method` gains over the method `over`."""
        return self.mean(over, "nll") - self.mean(method, "nll")

    @property
    def evidence_is_worse(self) -> bool:
        return self.gain(MAP, EVIDENCE) < 0

    @property
    def distrusted(self) -> bool:
        """Whether `diagnose()` had a concern about the evidence at every seed where it did worse than MAP."""
        nll = {m: self.values(m, "nll") for m in (MAP, EVIDENCE)}
        worse = [run for run, a, b in zip(self.runs, nll[MAP], nll[EVIDENCE], strict=True) if b > a]
        return all(any("evidence" in words for words in run["concerns"]) for run in worse)


def lines(record: Record) -> list[Line]:
    return [Line(name, tuple(runs)) for name, runs in grouped(record["runs"], "task").items()]


def claims(record: Record) -> list[Claim]:
    """The claims about default arguments.

    Counts out of twelve tasks are scaled to the number of tasks that were run.
    """
    tasks = lines(record)
    return [*_with_validation(tasks), *_alarm(tasks), *_evidence_alone(tasks)]


def _with_validation(tasks: list[Line]) -> list[Claim]:
    worst = min(tasks, key=lambda t: t.gain(MAP, BOTH))
    margin = -worst.gain(MAP, BOTH)
    average = fmean(t.gain(TEMPERATURE, BOTH) for t in tasks)
    return [
        Claim("with validation: worst NLL against MAP", "≤ +0.02", f"{margin:+.3f} ({worst.task})", margin <= 0.02),
        _count("with validation: better NLL than MAP", tasks, 11, lambda t: t.gain(MAP, BOTH) > 0),
        _count("with validation: better NLL than temperature", tasks, 8, lambda t: t.gain(TEMPERATURE, BOTH) > 0),
        Claim("with validation: mean gain on temperature", "≥ 0.02", f"{average:.3f}", average >= 0.02),
    ]


def _alarm(tasks: list[Line]) -> list[Claim]:
    auc = {method: fmean(t.mean(method, "ood_auc") for t in tasks) for method in METHODS}
    return [
        Claim(
            f"with validation: mean OOD-AUC against {other}",
            f"> {auc[other]:.3f}",
            f"{auc[BOTH]:.3f}",
            auc[BOTH] > auc[other],
        )
        for other in (MAP, TEMPERATURE)
    ]


def _evidence_alone(tasks: list[Line]) -> list[Claim]:
    worse = [t for t in tasks if t.evidence_is_worse]
    silent = [t.task for t in worse if not t.distrusted]
    found = f"{len(worse) - len(silent)} of {len(worse)}" + (f" (silent: {', '.join(silent)})" if silent else "")
    return [
        _count("evidence alone: better NLL than MAP", tasks, 8, lambda t: not t.evidence_is_worse),
        Claim("evidence alone: where worse, diagnose() says so", "all", found, not silent),
    ]


def _count(says: str, tasks: list[Line], of_twelve: int, holds: Callable[[Line], bool]) -> Claim:
    n, wanted = sum(map(holds, tasks)), math.ceil(of_twelve * len(tasks) / 12)
    return Claim(says, f"≥ {wanted} of {len(tasks)}", f"{n} of {len(tasks)}", n >= wanted)
