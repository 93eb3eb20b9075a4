"""How long a fit takes, from shapes alone: multiplications, gradient epochs and seconds.

Nothing is timed: the same model and data give the same figure, so `auto` takes the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lapwing.curvature import Ekfac, Full, Kron, Structure
from lapwing.planning.survey import Survey, Tile

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
        return sum(layer_macs(tile) for tile in self.survey.tiles) + max(0, sizes - self.survey.layout.p)

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
        F, tiles = self.forward_macs, self.survey.tiles
        passes = (3 + columns) * F
        if isinstance(structure, Full):
            return passes + columns * sum(layer_macs(tile) for tile in tiles) + self._gram_macs(columns)
        if isinstance(structure, Kron):
            factors = sum(_factor_macs(tile, columns) for tile in tiles)
            return 2 * (passes + factors) - 2 * F if isinstance(structure, Ekfac) else passes + factors
        return passes + sum(layer_macs(tile) * (columns if tile.r > 1 else 1) for tile in tiles)

    def _gram_macs(self, columns: int) -> float:
        p, rows = self.survey.layout.p, self.n * columns
        if rows >= p:
            return columns * p**2 / 2
        return columns * rows * min(p, self.survey.linearised.sizes.factored)

    def factorisation_seconds(self, columns: int) -> float:
        """Of the full matrix, or of the rows' kernel where they are fewer: as often as tuning needs it."""
        return FACTORISATIONS * min(self.survey.layout.p, self.n * columns) ** 3 / FLOPS

    @property
    def eigen_seconds(self) -> float:
        return EIGEN_SECONDS * self.survey.cubes


def layer_macs(tile: Tile) -> int:
    """Multiplications of one layer's forward pass, per datum."""
    if tile.maps is None:
        return tile.p
    q, o, i = tile.maps
    return tile.r * q * o * i


def _factor_macs(tile: Tile, columns: int) -> int:
    """r q i² for A, once; r q o² for B, per column."""
    q, o, i = tile.maps or (0, 0, 0)
    return tile.r * q * (i**2 + columns * o**2)
