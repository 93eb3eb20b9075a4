"""Anderson's acceleration of a fixed-point iteration z ← T(z)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lapwing._types import Float, Tensor


@dataclass(eq=False)
class Anderson:
    """The next point from the last few: the combination Σ w_i T(z_i), Σ w_i = 1, whose residual T(z) − z is smallest.

    Exact in as many steps as there are variables when T is affine. A residual that grows starts the memory anew.
    """

    depth: int
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)  # (T(z), T(z) − z)

    def next(self, z: Float[Tensor, " d"], image: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
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
        # Far extrapolations are not to be trusted: each variable goes a few times its plain step at most.
        reach = 8 * residual.abs() + 0.1
        return torch.where(residual.abs() > 1, image, z + (mixed - z).clamp(-reach, reach))
