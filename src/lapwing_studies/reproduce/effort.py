"""Sizes of a study."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Effort:
    """Limits on rows and training epochs, the number of seeds, and the name under which results are stored."""

    name: str
    n_train: int
    n_test: int
    n_epochs: int
    n_seeds: int


FULL = Effort("full", n_train=1000, n_test=1000, n_epochs=200, n_seeds=3)
QUICK = Effort("quick", n_train=400, n_test=200, n_epochs=30, n_seeds=1)
FAITHFUL = replace(FULL, name="faithful")  # studies that have this tier have sizes of their own
TOY = Effort("toy", n_train=60, n_test=30, n_epochs=2, n_seeds=1)


def of_tier(tier: str) -> Effort:
    """The standard tier is stored as "full", its name before there were three."""
    return {"quick": QUICK, "standard": FULL, "faithful": FAITHFUL}[tier]
