"""Every structure by its word. A new structure needs one line here."""

from __future__ import annotations

from lapwing.curvature.block import Block
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.ekfac import Ekfac
from lapwing.curvature.full import Full
from lapwing.curvature.gp import GP
from lapwing.curvature.kronecker import Kron
from lapwing.curvature.low_rank import LowRank
from lapwing.curvature.matrix_free import MatrixFree
from lapwing.curvature.structure import Structure

STRUCTURES: dict[str, Structure] = {
    "full": Full(),
    "block": Block(),
    "kron": Kron(),
    "ekfac": Ekfac(),
    "diag": Diag(),
    "lowrank": LowRank(),
    "gp": GP(),
    "matrixfree": MatrixFree(),
}
