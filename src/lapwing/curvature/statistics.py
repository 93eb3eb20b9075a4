"""Fit statistics: value and gradient of the log likelihood, summed over the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.layer_products import LayerProducts
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.jacobian import FactorBlock
from lapwing.network.linearised import MOST_DOUBLE, Linearised, Trace
from lapwing.network.parameters import ParamLayout
from lapwing.runtime import distributed


@dataclass(frozen=True, eq=False)
class FitStatistics:
    """What the evidence needs of the data besides the curvature. All are sums over data, at unit dispersion."""

    n: int
    likelihood: Float[Tensor, " d"]  # sufficient statistics, read by Likelihood.log_lik
    gradients: Float[Tensor, "g p"]  # Σ_n J_nᵀ r_n, one row per dispersion part; float32 above MOST_DOUBLE parameters

    @classmethod
    def over_ranks(cls, own: FitStatistics | None) -> FitStatistics:
        """The statistics summed over all ranks; None for a rank without data."""
        if own is not None and not distributed.is_distributed():
            return own
        n = None if own is None else own.likelihood.new_tensor(float(own.n))
        # n travels as a float64 with the other sums; it is exact up to 2⁵³.
        sums = distributed.sums(None if own is None or n is None else [n, own.likelihood, own.gradients])
        return cls(int(sums[0]), *sums[1:])

    def joined(self, others: Sequence[FitStatistics]) -> FitStatistics:
        total = self
        for more in others:
            likelihood, gradients = total.likelihood + more.likelihood, total.gradients + more.gradients
            total = FitStatistics(total.n + more.n, likelihood, gradients)
        return total

    def without(self, less: FitStatistics) -> FitStatistics:
        if less.n >= self.n:
            raise InputError(f"{less.n} data were to be taken out of {self.n}; nothing would be left.")
        return FitStatistics(self.n - less.n, self.likelihood - less.likelihood, self.gradients - less.gradients)


class RunningStatistics:
    """Running sums that become `FitStatistics`."""

    def __init__(self, linearised: Linearised, likelihood: Likelihood, sites: Sites) -> None:
        self.linearised, self.of, self.sites = linearised, likelihood, sites
        self.n = 0
        self.likelihood: Tensor | float = 0.0
        self.gradients: list[_GradientAccumulator] = []  # one per dispersion part

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        """Add sufficient statistics and Jᵀ r of a piece, with r = ∇_f log p per dispersion part."""
        residuals = [self.sites.join(r).reshape(len(f), -1) for r in self.of.part_residuals(f, y)]
        if not self.gradients:
            self.gradients = self._empty(len(residuals))
        for total, r in zip(self.gradients, residuals, strict=True):
            total.add(*trace.vjp(r))
        self.likelihood = self.likelihood + self.of.statistics(f.double(), y)
        self.n += len(f)

    @property
    def n_parts(self) -> int:
        return len(self.gradients)

    def state(self) -> State:
        return {"n": self.n, "likelihood": self.likelihood, "gradients": [total.state() for total in self.gradients]}

    def restore(self, state: State) -> None:
        self.n, self.likelihood = state["n"], state["likelihood"]
        self.gradients = self._empty(len(state["gradients"]))
        for total, kept in zip(self.gradients, state["gradients"], strict=True):
            total.layers.restore(kept)

    def _empty(self, n: int) -> list[_GradientAccumulator]:
        return [_GradientAccumulator(self.linearised.layout, self.linearised.network.device) for _ in range(n)]

    def result(self) -> FitStatistics:
        """The statistics of the data of all ranks."""
        if not isinstance(self.likelihood, Tensor):  # no data on this rank, but on others
            return FitStatistics.over_ranks(None)
        gradients = [total.result() for total in self.gradients]
        together = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
        return FitStatistics.over_ranks(FitStatistics(self.n, self.likelihood, together))


class _GradientAccumulator:
    """Running Σ_n J_nᵀ r_n (p,). Dense layers collect g and a of many data before they multiply; other tensors add as
    they come. In float64, or float32 above MOST_DOUBLE parameters, to halve the memory.
    """

    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.layout, self.whole = layout, layout.whole
        dtype = torch.float64 if layout.p <= MOST_DOUBLE else torch.float32
        self.total = torch.zeros(self.whole.p, dtype=dtype, device=device)
        self.layers = LayerProducts(self.total)

    def add(self, blocks: Sequence[FactorBlock], gradients: Mapping[str, Tensor]) -> None:
        """Add Σ g aᵀ of dense layers and gradients of other tensors."""
        for name, g in gradients.items():
            self.total[self.whole[name]].add_(g.reshape(-1))
        for block in blocks:
            a, ones = block.inputs.columns()
            self.layers.add(block.arrangement, block.g[:, 0].flatten(0, 1), a.flatten(0, 1), ones=ones)

    def state(self) -> State:
        return self.layers.state()

    def result(self) -> Float[Tensor, " p"]:
        # A subnetwork's layers are summed whole, and its entries picked at the end.
        self.layers.finish()
        selection = self.layout.selection
        return self.total if selection is None else self.total[selection.to(self.total.device)]
