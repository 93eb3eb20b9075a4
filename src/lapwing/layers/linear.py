"""nn.Linear: s_t = W a_t + b at any number of positions t."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lapwing.jacobian import LinearBlock


def applies(module: nn.Module) -> bool:
    """A rule holds only for the forward it was written for: not for subclasses that override it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not is_parametrized(module)


def positions(tensor: Tensor, n: int) -> Tensor:
    """(n, ..., d) or (n · T, ..., d) → (n, R, d): everything between batch and features counts as a position."""
    return tensor.reshape(n, -1, tensor.shape[-1])


def block(weight: slice | None, bias: slice | None, a: Tensor, g: Tensor) -> LinearBlock:
    """a (n, R, I) and g (n, c, R, O), concatenated over all calls of the module."""
    return LinearBlock(weight, bias, a.double(), g.double())
