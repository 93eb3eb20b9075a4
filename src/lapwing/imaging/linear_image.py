"""The linear model of one reconstruction: what the evidence, TV-PredCP and the posterior are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import NumericalError
from lapwing.imaging.evidence import Evidence
from lapwing.imaging.jacobian import ImageJacobian
from lapwing.imaging.operator import Operator
from lapwing.imaging.planning import ImagingPlan
from lapwing.imaging.predcp import BlockVariation, VariationPrior, rates
from lapwing.imaging.prior import ImagePrior
from lapwing.imaging.reconstruction import Reconstruction
from lapwing.imaging.refit import refitted
from lapwing.imaging.sampled import Effort, SampledWay
from lapwing.imaging.total_variation import edges
from lapwing.imaging.value import Inserted
from lapwing.imaging.ways import DenseWay, Way

_MOST_EDGES = 1024  # differences that TV-PredCP looks at, where the Jacobian is not stored
_LEAST_SCALE = 1e-6  # of a column of A J, in the g-prior


@dataclass(frozen=True, eq=False)
class LinearImage:
    """x̂ + J (θ − θ̂), and J itself (dense) or the rows of A J that the evidence is evaluated with."""

    r: Reconstruction
    J: ImageJacobian
    prior: ImagePrior
    plan: ImagingPlan
    image: Float[Tensor, "h w"]
    offset: Float[Tensor, " d"]  # x̂ − J θ̂
    measured: Tensor  # which measurements the evidence is evaluated with
    rows: Float[Tensor, "d p"] | None  # J
    measured_rows: Float[Tensor, "m p"] | None  # A J, those measurements
    progress: bool | None

    @classmethod
    def of(cls, r: Reconstruction, prior: ImagePrior, plan: ImagingPlan, progress: bool | None) -> LinearImage:
        J = ImageJacobian.of(r.network, r.input)
        A = r.operator
        flat = J.image()
        if not bool(torch.isfinite(flat).all()):
            raise NumericalError("imaging: the network's image holds NaN or infinite values.")
        offset = flat - J.push(J.theta[None])[0]
        m = A.linear.m
        measured = torch.linspace(0, m - 1, plan.n_evidence).round().long()
        rows = measured_rows = None
        if plan.way == "dense":
            rows = J.all_rows(torch.eye(J.n_pixels, dtype=torch.float64), progress=progress)
        else:
            measured_rows = J.all_rows(rows_of(A, measured), progress=progress)
        self = cls(r, J, prior, plan, flat.reshape(A.image_shape), offset, measured, rows, measured_rows, progress)
        return self._scaled() if prior.kind == "g" else self

    @property
    def A(self) -> Operator:
        return self.r.operator

    def through(self, columns: Float[Tensor, "d s"]) -> Float[Tensor, "m s"]:
        """Columns of J → those of A J, of the measurements of the evidence."""
        found = self.A.linear(columns.T).T
        return found if len(self.measured) == len(found) else found[self.measured]

    def inserted(self, mode: str) -> Inserted:
        """y_o, and for the other modes the residual and the weights that the evidence is evaluated with."""
        y = self.r.data.double().cpu()
        target = (y - self.A(self.offset.reshape(self.A.image_shape))).reshape(-1)
        if mode == "conjugate":
            return Inserted(target)
        theta, image = self.J.theta, self.image
        if mode == "refit_tv":
            theta = refitted(self.A, y, image, theta, self.J.push, self.J.pull, self.r.tv, progress=self.progress)
            image = image + self.J.push((theta - self.J.theta)[None])[0].reshape(image.shape)
        return Inserted(target, (y - self.A(image)).reshape(-1), self.prior.scatters(theta))

    def evidence(self, inserted: Inserted, variation: VariationPrior | None) -> Evidence:
        if self.rows is not None:
            grams = self.prior.grams(self.rows, self.through)
        else:
            assert self.measured_rows is not None
            grams = self.prior.grams(self.measured_rows)
        point: Any = None
        if inserted.residual is not None:
            point = inserted.residual[self.measured], inserted.scatters
        return Evidence(self.prior, grams, inserted.target[self.measured], point, variation)

    def variation(self, scale: str) -> VariationPrior:
        """TV-PredCP of every block that has a length scale."""
        first, second = edges(*self.A.image_shape)
        weight = 1.0
        if self.rows is None and len(first) > _MOST_EDGES:
            kept = torch.linspace(0, len(first) - 1, _MOST_EDGES).round().long()
            weight = len(first) / len(kept)
            first, second = first[kept], second[kept]
        flat = self.image.reshape(-1)
        squares = self._differences(first, second)
        blocks = tuple(
            BlockVariation(b.name, k, grid, squares[place], flat[first] - flat[second], weight)
            for k, (b, grid, place) in enumerate(
                zip(self.prior.blocks, self.prior.grids, self.prior.classes, strict=True)
            )
            if b.has_length
        )
        residual = self.r.data.double().cpu() - self.A(self.image)
        noise_var = max(float(residual.square().mean()), 1e-300)
        return VariationPrior(blocks, *rates(scale, self.r.tv, self.A.linear.m, noise_var))

    def way(self, eta: Float[Tensor, " q"], noise_var: float, effort: Effort) -> Way:
        if self.rows is not None:
            return DenseWay(self.A, self.prior.covariance(eta, self.rows), noise_var)
        rows = self.measured_rows if self.plan.keeps_rows else None
        return SampledWay(self.A, self.J, self.prior, eta, noise_var, effort, rows, self.progress)

    def _differences(self, first: Tensor, second: Tensor) -> Float[Tensor, "k e"]:
        """The variance of x_i − x_j under every G_k."""
        if self.rows is not None:
            pieces = zip(first.split(256), second.split(256), strict=True)
            return torch.cat([self.prior.squares(self.rows[i] - self.rows[j]) for i, j in pieces], dim=1)
        U = torch.zeros(len(first), self.J.n_pixels, dtype=torch.float64)
        at = torch.arange(len(first))
        U[at, first], U[at, second] = 1.0, -1.0
        return torch.cat([self.prior.squares(rows) for _, rows in self.J.rows(U, progress=self.progress)], dim=1)

    def _scaled(self) -> LinearImage:
        """The g-prior: columns of J divided by the root mean square of those of A J."""
        if self.rows is not None:
            columns = (self.through(some).double() for some in self.rows.split(4096, dim=1))
            size = torch.cat([c.square().mean(0) for c in columns]).sqrt()
        else:
            assert self.measured_rows is not None
            size = self.measured_rows.double().square().mean(0).sqrt()
        return replace(self, prior=replace(self.prior, scale=1 / size.clamp(min=_LEAST_SCALE)))


def rows_of(A: Operator, which: Tensor) -> Float[Tensor, "r d"]:
    """Some rows of A, as images."""
    units = torch.zeros(len(which), A.linear.m, dtype=torch.float64)
    units[torch.arange(len(which)), which] = 1.0
    return A.linear.transposed(units)
