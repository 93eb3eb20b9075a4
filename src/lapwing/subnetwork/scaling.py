"""Scale the prior of a subnetwork, so that fewer random weights do not mean less prior variance of the outputs.

The prior variance of an output is Σ_d J_d² / δ_d over the random weights. Restricting the sum to a subset S reduces
it; precisions s δ with s < 1 restore it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from lapwing._types import Int, Tensor
from lapwing.errors import InputError
from lapwing.subnetwork.candidates import Candidates


class PriorScaling(ABC):
    """How the prior precisions of the selected weights follow from those of the network."""

    @abstractmethod
    def factor(self, candidates: Candidates, indices: Int[Tensor, " k"]) -> float:
        """s, by which the prior precisions are multiplied."""


class Unscaled(PriorScaling):
    """s = 1: choose the precision by evidence or on held-out data."""

    def factor(self, candidates: Candidates, indices: Int[Tensor, " k"]) -> float:
        return 1.0


class CountScaling(PriorScaling):
    """s = |S| / P."""

    def factor(self, candidates: Candidates, indices: Int[Tensor, " k"]) -> float:
        return len(indices) / candidates.layout.p if len(indices) else 1.0


class JacobianScaling(PriorScaling):
    """s = Σ_{d ∈ S} ‖J_d‖²/δ_d / Σ_d ‖J_d‖²/δ_d: keeps the mean prior variance of the outputs on the data."""

    def factor(self, candidates: Candidates, indices: Int[Tensor, " k"]) -> float:
        # An empty subnetwork has no output variance to restore.
        if not len(indices):
            return 1.0
        shares = candidates.squared_jacobian / candidates.prior.P0.diagonal.detach()
        kept = float(shares[indices].sum())
        if kept <= 0:
            raise InputError(
                f'prior_scaling="jacobian": the {len(indices)} selected weights have no effect on the outputs, so no '
                'prior can restore their variance. Choose other weights, or prior_scaling="none".'
            )
        return kept / float(shares.sum())
