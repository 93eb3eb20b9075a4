"""Marginal variances by diagonal SWAG: the variance of the weights over further SGD at a constant learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, NumericalError, StructureError
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import all_finite
from lapwing.runtime import distributed
from lapwing.subnetwork.candidates import Candidates
from lapwing.subnetwork.scores import Score


@dataclass(frozen=True)
class Swag(Score):
    """Variance of the weights over one snapshot per epoch of SGD from θ*; defaults as in Daxberger et al. (2021).

    A copy is trained, in eval mode: running averages and weights of the user's model do not change. The loss is the
    mean over the batches as the loader gives them. A Gaussian likelihood whose noise is to be estimated uses unit
    noise here.
    """

    learning_rate: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 3e-4
    n_snapshots: int = 256

    words = "the largest marginal variance (diagonal SWAG)"

    def __post_init__(self) -> None:
        if not isfinite(self.learning_rate) or self.learning_rate <= 0:
            raise InputError(f"Swag: learning_rate must be positive and finite, got {self.learning_rate}.")
        if self.n_snapshots < 2:
            raise InputError(f"Swag: a variance needs two snapshots at least, got n_snapshots={self.n_snapshots}.")

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        if distributed.is_distributed():
            raise StructureError(
                f"SWAG trains on the data of one process, and these are spread over {distributed.world_size()} ranks. "
                'Use score="variance", which trains nothing.'
            )
        network, layout = candidates.linearised.network, candidates.layout
        weights = {name: network.tensors[name].detach().clone().requires_grad_() for name in layout.names}
        optimiser = torch.optim.SGD(
            weights.values(), self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        likelihood, moments = _with_noise(candidates.likelihood), RunningVariance()
        for epoch in range(self.n_snapshots):
            _train_epoch(candidates, likelihood, weights, optimiser)
            snapshot = layout.ravel({name: w.detach().double() for name, w in weights.items()})
            if not all_finite(snapshot):
                raise NumericalError(
                    f"SWAG diverged in epoch {epoch} at learning rate {self.learning_rate:g}. Use a smaller one: "
                    'score=lw.Swag(learning_rate=...), or score="variance", which trains nothing.'
                )
            moments.add(snapshot)
        return moments.variance


class RunningVariance:
    """Welford's recursion in float64. E[w²] − E[w]² would cancel, since |w| is much larger than its spread."""

    def __init__(self) -> None:
        self.n, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, w: Float[Tensor, " p"]) -> None:
        self.n += 1
        before = w - self.mean
        self.mean = self.mean + before / self.n
        self.squares = self.squares + before * (w - self.mean)

    @property
    def variance(self) -> Float[Tensor, " p"]:
        return (self.squares / self.n).clamp(min=1e-30)


def _train_epoch(
    candidates: Candidates, likelihood: Likelihood, weights: dict[str, Tensor], optimiser: torch.optim.Optimizer
) -> None:
    linearised, sites = candidates.linearised, candidates.sites
    for x, y in candidates.data():
        # Trained weights are passed as arguments; those of the user's model are not modified.
        with linearised.network.borrowed() as network:
            f = sites.split(linearised.flat(network(linearised.network.placed(x), weights), x.n))
            # The mean loss, for which learning rates and weight decay are usually given.
            loss = -likelihood.log_prob(f, y).mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for w, g in zip(weights.values(), gradients, strict=True):
            # SGD with weight decay does not accept sparse gradients (embeddings).
            w.grad = g.to_dense() if g is not None and g.is_sparse else g
        optimiser.step()


def _with_noise(likelihood: Likelihood) -> Likelihood:
    if isinstance(likelihood, Gaussian) and likelihood.noise_std is None:
        return likelihood.with_noise_std(1.0)
    return likelihood
