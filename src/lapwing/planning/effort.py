"""How long a fit takes, from shapes alone: multiplications, gradient epochs and seconds.

Nothing is timed: the same model and data give the same figure, so `auto` takes the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature import Structure, Survey, Workload

FLOPS = 1e10  # floating-point operations per second, one core, float64
FACTORISATIONS = 6  # of a dense matrix, in an ordinary tuning
EIGEN_SECONDS = 6e-10  # of a symmetric eigendecomposition, per cube of its side


@dataclass(frozen=True, eq=False)
class Effort:
    """The work of structures on one model and n data."""

    survey: Survey
    n: int

    @property
    def forward_macs(self) -> int:
        """Multiplications of a forward pass per datum; at least one for each weight that is not inferred."""
        sizes = sum(t.numel() for t in self.survey.linearised.network.tensors.values())
        return sum(tile.macs for tile in self.survey.tiles) + max(0, sizes - self.survey.layout.p)

    @property
    def epoch_seconds(self) -> float:
        """One gradient epoch: forward and backward."""
        return self.seconds(3 * self.forward_macs)

    def seconds(self, macs: float) -> float:
        return 2 * self.n * macs / FLOPS

    def epochs(self, structure: Structure, columns: int) -> float:
        """Gradient epochs of a fit with so many columns of SᵀJ per datum."""
        return self.macs(structure, columns) / (3 * self.forward_macs)

    def macs(self, structure: Structure, columns: int) -> float:
        """Per datum: forward, gradient, columns, and adding them up."""
        work = Workload(self.survey, n_data=self.n, columns=columns, forward_macs=self.forward_macs)
        return structure.fit_macs(work)

    def factorisation_seconds(self, columns: int) -> float:
        """Of the full matrix, or of the rows' kernel where they are fewer: as often as tuning needs it."""
        return FACTORISATIONS * min(self.survey.layout.p, self.n * columns) ** 3 / FLOPS

    @property
    def eigen_seconds(self) -> float:
        return EIGEN_SECONDS * self.survey.cubes
