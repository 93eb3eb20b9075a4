"""What a fit keeps of the likelihood besides the curvature: its value and its gradient, summed over the data."""

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
    """What the evidence needs to know of the data besides the curvature; all sums over data, at unit dispersion."""

    n: int
    likelihood: Float[Tensor, " d"]  # → Likelihood.log_lik
    gradients: Float[Tensor, "g p"]  # Σ_n J_nᵀ r_n, one row per dispersion part; float32 if very long

    @classmethod
    def over_ranks(cls, own: FitStatistics | None) -> FitStatistics:
        """The sum of all ranks' statistics; None is that of a rank without data."""
        if own is not None and not distributed.is_distributed():
            return own
        n = None if own is None else own.likelihood.new_tensor(float(own.n))
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
    """FitStatistics while they are being added up."""

    def __init__(self, linearised: Linearised, likelihood: Likelihood, sites: Sites) -> None:
        self.linearised, self.of, self.sites = linearised, likelihood, sites
        self.n = 0
        self.likelihood: Tensor | float = 0.0
        self.gradients: list[_GradientSum] = []  # one per dispersion part

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
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

    def _empty(self, n: int) -> list[_GradientSum]:
        return [_GradientSum(self.linearised.layout, self.linearised.network.device) for _ in range(n)]

    def result(self) -> FitStatistics:
        """Of the data of all ranks."""
        if not isinstance(self.likelihood, Tensor):  # no data here, but elsewhere
            return FitStatistics.over_ranks(None)
        gradients = [total.result() for total in self.gradients]
        together = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
        return FitStatistics.over_ranks(FitStatistics(self.n, self.likelihood, together))


class _GradientSum:
    """A running Σ_n J_nᵀ r_n: Σ g aᵀ of dense layers over many data at a time, other tensors as they come.

    In float64, unless there are more than MOST_DOUBLE parameters.
    """

    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.layout, self.whole = layout, layout.whole
        dtype = torch.float64 if layout.p <= MOST_DOUBLE else torch.float32
        self.total = torch.zeros(self.whole.p, dtype=dtype, device=device)
        self.layers = LayerProducts(self.total)

    def add(self, blocks: Sequence[FactorBlock], gradients: Mapping[str, Tensor]) -> None:
        for name, g in gradients.items():
            self.total[self.whole[name]].add_(g.reshape(-1))
        for block in blocks:
            a, ones = block.inputs.columns()
            self.layers.add(block.arrangement, block.g[:, 0].flatten(0, 1), a.flatten(0, 1), ones=ones)

    def state(self) -> State:
        return self.layers.state()

    def result(self) -> Float[Tensor, " p"]:
        self.layers.finish()
        selection = self.layout.selection
        return self.total if selection is None else self.total[selection.to(self.total.device)]
