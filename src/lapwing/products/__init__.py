"""Products with the Jacobian of a linearised network, which is never stored."""

from lapwing.products.data_jacobian import DataJacobian, DataPiece, Source
from lapwing.products.jvp import Jvp, choose_jvp
from lapwing.products.vjp import Vjp, choose_vjp

__all__ = ["DataJacobian", "DataPiece", "Jvp", "Source", "Vjp", "choose_jvp", "choose_vjp"]
