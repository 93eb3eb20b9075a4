"""What `lw.tune` takes after a fit: passes over the training data, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature import Exact, Fisher, Structure
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linear_model import DEFAULT_PASSES, default_passes, is_stored, most_work
from lapwing.planning.budget import in_words
from lapwing.planning.choice import Needs
from lapwing.planning.costs import pass_macs

MOST_STORED = 1 << 26  # entries of a Jacobian of all the data that is kept while tuning: 512 MiB


@dataclass(frozen=True)
class Tuning:
    """Gradient epochs of a tuning with default arguments, and its bytes above the posterior's.

    `with_validation`: where held-out data choose the scale, only relative precisions come from the training data.
    """

    how: str
    gradient_epochs: float
    with_validation: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"Tuning takes about {self.gradient_epochs:.2g} gradient epochs, or {self.with_validation:.2g} with "
            f"held-out data, and {in_words(self.bytes)}: {self.how}."
        )


def tuning_of(structure: Structure, fisher: Fisher, likelihood: Likelihood, needs: Needs, free: int) -> Tuning:
    """`free` numbers are left of the budget once the posterior is in memory."""
    p, k, n = needs.p, needs.survey.linearised.k, needs.n_data or 0
    rows = n * k
    vectors = 8 * 8 * p  # of a search: the mode, its gradient, directions and what they lead to
    if structure.exact and isinstance(likelihood, Gaussian) and isinstance(fisher, Exact):
        side = min(rows, p) if rows else p
        return Tuning("the mode is a closed form of the curvature, which is factorised anew", 0.0, 0.0, 40 * side**2)
    if n and is_stored(rows, p, min(MOST_STORED, free), most_work(n)):
        side = min(rows, p)
        kept = 8 * (2 * rows * p + 4 * side**2) + vectors
        return Tuning(f"the Jacobian of all data is kept, and a {side:,} × {side:,} matrix factorised", k, k, kept)
    passes = default_passes(pass_macs(needs.survey, n)) if n else DEFAULT_PASSES
    return Tuning("the mode is looked for by products with the Jacobian", round(passes), 0.0, vectors)
