"""Predictions by sampled weights in the network itself, not its linearisation."""

from __future__ import annotations

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.network.linearised import Linearised


def network_draws(linearised: Linearised, x: ModelInput, deviations: Float[Tensor, "s p"]) -> Float[Tensor, "s n k"]:
    """f(x; θ* + d_s) (s, n, k), one forward pass per draw.

    With Gauss–Newton posteriors this is known to underfit (Immer, Korzepa and Bauer, 2021): the Gaussian is the
    posterior of the linearised model, and the network differs from it away from θ*.
    """
    return linearised.outputs_at(x, linearised.theta + deviations).double()
