"""Record of how a posterior was trained by lw.train."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.errors import StructureError
from lapwing.linear_model import Elbo

N_DRAWS = 1000  # default number of draws in a prediction


@dataclass(frozen=True)
class Trained:
    """How a posterior was trained. Its Gaussian is that of the training objective, not a Laplace approximation."""

    by: str  # "variational_laplace" or "mean_field"
    beta: float  # factor on the KL divergence
    predictive: str  # the default of `predict`, as in the method's paper
    n_draws: int  # number of draws in such a prediction
    reverted: float  # fraction of variances that equal the prior's, log σ within 0.1 of log s
    unmoved: float  # fraction of variances at their initial values
    bound: Elbo | None = None  # E_q[Σ log p(y | w)] and KL(q ‖ prior) over the training data, if given

    @property
    def elbo(self) -> float:
        """The lower bound on log p(D), with β = 1 whatever β was in training."""
        if self.bound is None:
            raise StructureError(
                "The bound on log p(D) takes a pass over the training data: objective.posterior(data), or "
                "objective.elbo(data)."
            )
        return self.bound.total
