"""Sampled weights through the network itself, not its linearisation."""

from __future__ import annotations

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.network.linearised import Linearised


def network_draws(linearised: Linearised, x: ModelInput, deviations: Float[Tensor, "s p"]) -> Float[Tensor, "s n k"]:
    """f(x; θ* + d_s), one forward pass per draw.

    Known to underfit with Gauss–Newton posteriors (Immer, Korzepa and Bauer, 2021): the Gaussian is right for the
    linearised model, and the network away from θ* is another function.
    """
    return linearised.outputs_at(x, linearised.theta + deviations).double()
