"""Jacobian-vector and vector-Jacobian products of a linearised network; J is not stored."""

from lapwing.network.products.data_jacobian import DataJacobian, DataPiece, Source
from lapwing.network.products.jvp import FORWARD, VECTORS_AT_ONCE, Jvp, attached, can_push, choose_jvp, pushed
from lapwing.network.products.vjp import Vjp, choose_vjp

__all__ = [
    "FORWARD",
    "VECTORS_AT_ONCE",
    "DataJacobian",
    "DataPiece",
    "Jvp",
    "Source",
    "Vjp",
    "attached",
    "can_push",
    "choose_jvp",
    "choose_vjp",
    "pushed",
]
