"""Estimate the cost of `lw.tune` after a fit: passes over the training data, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature import Exact, Fisher, Structure
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linear_model import DEFAULT_PASSES, default_passes, is_stored, most_work
from lapwing.planning.budget import in_words
from lapwing.planning.choice import Needs
from lapwing.planning.costs import pass_macs

MOST_STORED = 1 << 26  # entries of J over all data up to which tuning stores it: 512 MiB


@dataclass(frozen=True)
class Tuning:
    """Gradient epochs of `lw.tune` with default arguments, and its bytes in addition to the posterior's.

    `with_validation`: with held-out data, which then choose the scale; less is needed from the training data.
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
    """`free`: numbers left in the budget once the posterior is in memory."""
    p, k, n = needs.p, needs.summary.linearised.k, needs.n_data or 0
    rows = n * k
    vectors = 8 * 8 * p  # bytes of a mode search: the mode, its gradient, directions and their products
    if structure.exact and isinstance(likelihood, Gaussian) and isinstance(fisher, Exact):
        side = min(rows, p) if rows else p
        return Tuning(
            "the mode has a closed form, which takes a factorisation of the curvature", 0.0, 0.0, 40 * side**2
        )
    if n and is_stored(rows, p, min(MOST_STORED, free), most_work(n)):
        side = min(rows, p)
        kept = 8 * (2 * rows * p + 4 * side**2) + vectors
        return Tuning(f"the Jacobian of all data is stored, and a {side:,} × {side:,} matrix factorised", k, k, kept)
    passes = default_passes(pass_macs(needs.summary, n)) if n else DEFAULT_PASSES
    return Tuning("the mode is computed by products with the Jacobian", round(passes), 0.0, vectors)
