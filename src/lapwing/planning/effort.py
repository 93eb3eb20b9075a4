"""Estimate how long a fit takes from shapes alone: multiplications, gradient epochs and seconds.

Nothing is timed, so the choice of `auto` is reproducible: it depends on the model and the data only.
"""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature import ModelSummary, Structure, Workload

FLOPS = 1e10  # per second: one core, float64
FACTORISATIONS = 6  # of a dense matrix, in a typical tuning
EIGEN_SECONDS = 6e-10  # of a symmetric eigendecomposition: times side³


@dataclass(frozen=True, eq=False)
class Effort:
    """Estimated cost of structures on one model and n data."""

    summary: ModelSummary
    n: int

    @property
    def forward_macs(self) -> int:
        """Multiplications of a forward pass per datum; weights that are not inferred count once, a lower bound."""
        sizes = sum(t.numel() for t in self.summary.linearised.network.tensors.values())
        return sum(block.macs for block in self.summary.blocks) + max(0, sizes - self.summary.layout.p)

    @property
    def epoch_seconds(self) -> float:
        """One gradient epoch: a forward and a backward pass, or three forward passes."""
        return self.seconds(3 * self.forward_macs)

    def seconds(self, macs: float) -> float:
        return 2 * self.n * macs / FLOPS

    def epochs(self, structure: Structure, columns: int) -> float:
        """Gradient epochs of a fit with this many columns of S per datum."""
        return self.macs(structure, columns) / (3 * self.forward_macs)

    def macs(self, structure: Structure, columns: int) -> float:
        """Multiplications of a fit per datum."""
        work = Workload(self.summary, n_data=self.n, columns=columns, forward_macs=self.forward_macs)
        return structure.fit_macs(work)

    def factorisation_seconds(self, columns: int) -> float:
        """Factorisations in tuning, of the full matrix or of the kernel between rows, whichever is smaller."""
        return FACTORISATIONS * min(self.summary.layout.p, self.n * columns) ** 3 / FLOPS
