"""Claims of a source beside what was measured, and the verdict: one shape for every study and for the results page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

HOLDS, FAILS, OPEN = "holds", "does not hold", "not testable here"
VERDICTS = (HOLDS, FAILS, OPEN)


@dataclass(frozen=True)
class Claim:
    """`wanted` is the published value or the limit; `holds` is None where this run cannot decide."""

    says: str
    wanted: str
    found: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        return OPEN if self.holds is None else HOLDS if self.holds else FAILS


class ClaimRow(TypedDict):
    claim: str
    published: str
    measured: str
    verdict: str


class KeptClaims(TypedDict):
    """What docs/records keeps of a study: the claims, and how their figures were measured."""

    study: str
    paper: str
    tier: str
    seeds: int
    command: str
    claims: list[ClaimRow]


def kept(study: str, paper: str, tier: str, seeds: int, command: str, claims: Sequence[Claim]) -> KeptClaims:
    rows = [ClaimRow(claim=c.says, published=c.wanted, measured=c.found, verdict=c.verdict) for c in claims]
    return KeptClaims(study=study, paper=paper, tier=tier, seeds=seeds, command=command, claims=rows)


def at_least(says: str, wanted: int, wins: Sequence[Any]) -> Claim:
    """A count of cases, at least `wanted` of which must be true; undecided where there are fewer cases than that."""
    n, enough = sum(map(bool, wins)), len(wins) >= wanted
    return Claim(says, f"≥ {wanted} of {len(wins)}", f"{n} of {len(wins)}", n >= wanted if enough else None)


def below(says: str, ours: float, theirs: float, *, wanted: str = "smaller", shown: str = "{:.3f}") -> Claim:
    return Claim(says, wanted, f"{shown.format(ours)} against {shown.format(theirs)}", ours < theirs)


def above(says: str, ours: float, theirs: float, *, wanted: str = "above", shown: str = "{:.3f}") -> Claim:
    return Claim(says, wanted, f"{shown.format(ours)} against {shown.format(theirs)}", ours > theirs)


def listed(values: Iterable[float], shown: str = "{:.3f}") -> str:
    return ", ".join(map(shown.format, values))


def every(says: str, wins: Sequence[Any], *, wanted: str = "") -> Claim:
    """A count of cases, all of which must be true."""
    n = sum(map(bool, wins))
    return Claim(says, wanted or f"{len(wins)} of {len(wins)}", f"{n} of {len(wins)}", n == len(wins) if wins else None)
