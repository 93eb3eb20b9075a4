"""Solve for the samples by stochastic gradient descent, one batch of the data at a time."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.network.products import DataPiece
from lapwing.posterior.sampling import WeightDraws
from lapwing.tuning.em.settings import SGD
from lapwing.tuning.em.solvers import Solved, Start, Streamed, System

_BATCHES_TRIED, _POWER_STEPS = 4, 8  # batches and power iterations for the largest eigenvalue
_LAST_LR = 1 / 30  # final learning rate relative to the initial one


@dataclass(frozen=True, eq=False)
class StochasticGradients(Streamed):
    """Preconditioned Nesterov steps on unbiased minibatch gradients; the last half of the iterates is averaged."""

    sgd: SGD
    n: int  # number of data

    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        """Epochs over minibatches with a linearly decreasing step length."""
        draws = start.draws
        lr = self.sgd.lr or 0.5 / self._largest_eigenvalue(draws, system)
        descent = _Descent(draws.zeta.clone(), self.sgd)
        for epoch in range(self.sgd.epochs):
            generators = [torch.Generator().manual_seed(draws.seed + g) for g in range(self.n_parts)]
            seen = 0
            with closing(self.H.jacobian.pieces()) as pieces:
                for piece in pieces:
                    done = (epoch + seen / self.n) / self.sgd.epochs
                    gradient = self._gradient(
                        piece, descent.lookahead, draws, system, generators if data_targets else None
                    )
                    descent.step(
                        system.preconditioner.approximate_solve(gradient), lr * (1 - (1 - _LAST_LR) * done), done
                    )
                    seen += piece.trace.x.n
        return self._solved(draws, system, descent.average, 2 * self.sgd.epochs)

    def _gradient(
        self,
        piece: DataPiece,
        z: Float[Tensor, "k p"],
        draws: WeightDraws,
        system: System,
        generators: list[torch.Generator] | None,
    ) -> Float[Tensor, "k p"]:
        """Minibatch gradient with targets in the data (redrawn from `generators`), or in the prior."""
        u = self.H.weighted(piece, piece.mv(z), system.scales)
        pull = draws.pull(system.P0.diagonal, system.scales)
        if generators is not None:
            one_hot = torch.eye(self.n_parts, dtype=torch.float64, device=z.device)
            for c, e, generator in zip(system.scales, one_hot, generators, strict=True):
                u = u - c.sqrt() * self.H.drawn(piece, len(z), e, generator)
            pull = system.P0.diagonal.sqrt() * draws.prior
        total = torch.zeros_like(z)
        piece.add_vjp_(total, u)
        return self.n / piece.trace.x.n * total + system.P0.diagonal * z - pull

    def _largest_eigenvalue(self, draws: WeightDraws, system: System) -> float:
        """Largest eigenvalue of M⁻¹ (N/|batch| H_batch + P₀), by power iteration on the first few batches."""
        largest, still = 1.0, torch.zeros_like(draws.zeta[:1])
        with closing(self.H.jacobian.pieces()) as pieces:
            for piece, _ in zip(pieces, range(_BATCHES_TRIED), strict=False):
                v, value = draws.prior[:1], 1.0
                offset = self._gradient(piece, still, _first(draws), system, None)
                for _ in range(_POWER_STEPS):
                    v = v / v.norm()
                    v = system.preconditioner.approximate_solve(
                        self._gradient(piece, v, _first(draws), system, None) - offset
                    )
                    value = float(v.norm())
                largest = max(largest, value)
        return largest


def _first(draws: WeightDraws) -> WeightDraws:
    return WeightDraws(draws.prior[:1], draws.data[:, :1], draws.seed, draws.zeta[:1], draws.precisions, draws.scales)


class _Descent:
    """The iterate and velocity of Nesterov's method, and the running average of the last half."""

    def __init__(self, start: Float[Tensor, "k p"], sgd: SGD) -> None:
        self.z, self.velocity, self.momentum = start, torch.zeros_like(start), sgd.momentum
        self.average, self.n_averaged = start.clone(), 0

    @property
    def lookahead(self) -> Float[Tensor, "k p"]:
        return self.z + self.momentum * self.velocity

    def step(self, direction: Float[Tensor, "k p"], lr: float, done: float) -> None:
        """v ← μ v − lr · direction, z ← z + v; from half time on, average the iterates."""
        self.velocity = self.momentum * self.velocity - lr * direction
        self.z = self.z + self.velocity
        if done < 0.5:
            self.average = self.z.clone()
            return
        self.n_averaged += 1
        self.average = self.average + (self.z - self.average) / self.n_averaged
