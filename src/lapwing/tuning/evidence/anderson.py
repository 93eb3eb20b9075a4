"""Anderson acceleration of a fixed-point iteration z ← T(z)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lapwing._types import Float, Tensor


@dataclass(eq=False)
class Anderson:
    """The next iterate: Σ w_i T(z_i), Σ w_i = 1, with the weights that minimise the norm of Σ w_i (T(z_i) − z_i).

    If T is affine, it converges in as many steps as there are variables. The memory is cleared when the residual
    grows.
    """

    depth: int
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)  # (T(z), T(z) − z)

    def next(self, z: Float[Tensor, " d"], image: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The accelerated iterate after z ↦ image = T(z)."""
        residual = image - z
        if self.past and float(residual.norm()) > 2 * float(self.past[-1][1].norm()):
            self.past.clear()
        self.past = [*self.past[-self.depth :], (image, residual)]
        if len(self.past) == 1 or not self.depth:
            return image
        images, residuals = (torch.stack(column) for column in zip(*self.past, strict=True))
        differences = (residuals[:-1] - residual).T
        weights = torch.linalg.lstsq(differences, -residual[:, None], driver="gelsd").solution[:, 0]
        mixed = image + weights @ (images[:-1] - image)
        # Limit extrapolation to a few times the plain step of each variable; large residuals are not extrapolated at
        # all.
        reach = 8 * residual.abs() + 0.1
        return torch.where(residual.abs() > 1, image, z + (mixed - z).clamp(-reach, reach))
