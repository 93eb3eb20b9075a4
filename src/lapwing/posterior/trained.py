"""How a posterior was trained, where it was not fitted afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.errors import StructureError
from lapwing.linear_model import Elbo

N_DRAWS = 1000  # of weights or functions that a prediction averages, unless told otherwise


@dataclass(frozen=True)
class Trained:
    """How a posterior was trained: the Gaussian is that of the objective, not of a fit at the weights."""

    by: str  # "variational_laplace" or "mean_field"
    beta: float  # what the divergence was multiplied by
    predictive: str  # how its paper predicts: what `predict` does unless told otherwise
    n_draws: int  # of weights, in such a prediction
    reverted: float  # fraction of the variances at the prior's, log σ within 0.1 of log s
    unmoved: float  # fraction of the variances where they started
    bound: Elbo | None = None  # E_q[Σ log p(y | w)] and KL(q ‖ prior) over the training data, where they were given

    @property
    def elbo(self) -> float:
        """The lower bound on log p(D): not tempered, whatever β was."""
        if self.bound is None:
            raise StructureError(
                "The bound on log p(D) takes a pass over the training data: objective.posterior(data), or "
                "objective.elbo(data)."
            )
        return self.bound.total
