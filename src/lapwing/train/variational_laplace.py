"""Variational Laplace: the expected log likelihood by a second-order expansion at the means (Unlu and Aitchison)."""

from __future__ import annotations

from typing import Any

import torch

from lapwing._types import Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood
from lapwing.runtime.arguments import choose
from lapwing.train.activations import refuse_piecewise
from lapwing.train.first_look import FirstLook
from lapwing.train.fisher import FISHERS
from lapwing.train.objective import Objective


class VariationalLaplace(Objective):
    """−ELBO of a batch per datum, with E_q[log p(y | w)] ≈ log p(y | μ) − ½ Σ_l σ_l² F_ll.

    Of S data out of N = `n_data`, divided by S:

        −(1/S) Σ log p(y | x, μ) + (1/2S) Σ_l σ_l² F_ll + (β/2N) Σ_l [(σ_l² + μ_l²)/s_l² − 1 + log(s_l²/σ_l²)]

    (30) of the paper, with the prior's s² where it prints σ². F is the Fisher information of the batch. `fisher`:
    "sampled", (Σ_n ∇ log p(ỹ_n | x_n, μ))² for labels ỹ that the model draws, `draws` of them (the paper); "pathwise",
    the same expectation, differentiated through the spread of the outputs as well; "exact", one backward pass for each
    output of each datum. Unbiased under any division of the data into batches. "hessian" is the paper's section 4.1: it
    has no end, and can be evaluated under `torch.no_grad()` only.

    The optimum has σ² = β/(β/s² + F). A step costs a forward pass and two backward passes, of which the second is
    through the first.
    """

    by = "variational_laplace"
    predictive, n_predicted = "mean", 1000
    twice = True

    def __init__(
        self,
        model: Any,
        likelihood: str | Likelihood,
        n_data: int,
        *,
        beta: float = 1.0,
        prior: Any = "fan_in",
        fisher: str = "sampled",
        draws: int = 1,
        params: Any = "all",
        generator: torch.Generator | None = None,
        allow_piecewise: bool = False,
        inputs: Any = None,
        targets: Any = None,
        example: Any = None,
    ) -> None:
        self_fisher = choose("fisher", fisher, FISHERS)
        super().__init__(
            model,
            likelihood,
            n_data,
            beta=beta,
            prior=prior,
            draws=draws,
            params=params,
            generator=generator,
            inputs=inputs,
            targets=targets,
            example=example,
        )
        self.fisher, self.allow_piecewise = self_fisher, allow_piecewise
        if not allow_piecewise:
            refuse_piecewise(self.model)

    def check_look(self, look: FirstLook) -> None:
        if not self.allow_piecewise:
            look.piecewise.refuse()

    def averaged(self, x: ModelInput, y: Any, *, draws: int, create_graph: bool) -> tuple[Tensor, Tensor]:
        """One forward pass serves the log likelihood and the penalty: running statistics move once."""
        if create_graph and not self.fisher.trains:
            raise InputError(
                'fisher="hessian" cannot be trained with: where a second derivative of the log likelihood is positive '
                "the objective falls for ever as that variance grows. Evaluate it under torch.no_grad(), or train with "
                'fisher="sampled".'
            )
        outputs = self.observed(x, y)
        tensors = self.means()
        variances = self.variance.split([t.numel() for t in tensors])
        weighted = self.fisher.weighted(
            outputs, tensors, variances, draws=draws, generator=self.generator, create_graph=create_graph
        )
        return outputs.log_lik(), 0.5 * weighted
