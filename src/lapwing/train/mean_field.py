"""Mean-field variational inference: the expected log likelihood by draws of weights, or of what they add up to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lapwing._types import Tensor
from lapwing.data import ModelInput
from lapwing.likelihoods import Likelihood
from lapwing.runtime.arguments import choose
from lapwing.train.first_look import FirstLook
from lapwing.train.kernels import installed
from lapwing.train.local import LocalLayers
from lapwing.train.objective import Objective


class MeanField(Objective):
    """−ELBO of a batch per datum: −(1/S) E_q[Σ log p(y | x, w)] + (β/N) KL(q ‖ prior), the KL in closed form.

    `estimator`: "reparam", w = μ + σ ε with one ε for all data of the batch (Graves; Blundell and others); "local", the
    pre-activations of linear and convolutional layers drawn for every datum, from the Gaussian that the weights give
    them (Kingma, Salimans and Welling): the gradient varies less. Exact for a linear layer that is called once on
    (B, features); at the positions of a convolution the draws are independent, as is usual. All other weights are drawn
    as in "reparam". `draws` are averaged, one forward pass each.
    """

    by = "mean_field"
    predictive, n_predicted = "bnn", 10
    twice = False
    bound_draws = 10

    def __init__(
        self,
        model: Any,
        likelihood: str | Likelihood,
        n_data: int,
        *,
        beta: float = 1.0,
        prior: Any = "fan_in",
        estimator: str = "reparam",
        draws: int = 1,
        params: Any = "all",
        generator: torch.Generator | None = None,
        inputs: Any = None,
        targets: Any = None,
        example: Any = None,
    ) -> None:
        local = choose("estimator", estimator, {"reparam": False, "local": True})
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
        self.local = local
        self._layers: LocalLayers | None = None

    def check_look(self, look: FirstLook) -> None:
        self._layers = LocalLayers.of(self.model, self.layout, look.calls) if self.local else LocalLayers({})

    def averaged(self, x: ModelInput, y: Any, *, draws: int, create_graph: bool) -> tuple[Tensor, Tensor]:
        total = self.log_std.new_zeros(())
        for _ in range(draws):
            with self._drawn():
                total = total + self.observed(x, y).log_lik()
        return total / draws, self.log_std.new_zeros(())

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """The model with one draw of its weights inside; layers that draw their outputs keep the means."""
        assert self._layers is not None
        std = self.log_std.exp()
        stds, drawn = {}, {}
        for name, mean, part in zip(self.layout.names, self.means(), self._split(std), strict=True):
            stds[name] = part.reshape(mean.shape).to(mean.dtype)
            if name not in self._layers.names:
                drawn[name] = torch.addcmul(mean, stds[name], self._normal(mean))
        with installed(self.model, drawn), self._layers.drawing(self.model, stds, self._normal):
            yield

    def _split(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split([t.numel() for t in self.means()]))

    def _normal(self, like: Tensor) -> Tensor:
        device = self.generator.device
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype, device=device).to(like.device)
