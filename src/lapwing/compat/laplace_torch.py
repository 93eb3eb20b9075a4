"""laplace-torch's `Laplace`, its arguments and defaults, on top of Lapwing; pip needs nothing more."""

from lapwing.integrations.laplace_torch import Laplace

__all__ = ["Laplace"]
