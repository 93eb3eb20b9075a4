"""The posterior of an image too large for matrices: products with the linearised network, and samples by Matheron.

    θ₀ ~ N(0, S_θ),   α = K⁻¹ (e − A J θ₀),   x = J (θ₀ + S_θ Jᵀ Aᵀ α)

K = A J S_θ Jᵀ Aᵀ + σ² I is applied by one forward- and one reverse-mode pass, and solved by conjugate gradients with a
low-rank preconditioner; where A J fits into memory, K is written out and factorised instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import InputError, NumericalError, StructureError, warn
from lapwing.imaging.jacobian import ImageJacobian
from lapwing.imaging.operator import Operator
from lapwing.imaging.prior import ImagePrior
from lapwing.imaging.ways import Way
from lapwing.linalg import Solution, conjugate_gradients, lanczos_quadrature, leading_eigenpairs, signs
from lapwing.runtime.arguments import counted, positive
from lapwing.runtime.progress import shown

_AT_ONCE = 16  # samples whose weights are in memory together
_PROBES, _LANCZOS_STEPS = 8, 60
_MOST_PATCH = 400  # pixels whose covariance is estimated from samples


@dataclass(frozen=True)
class Effort:
    """What samples may cost: their number, the tolerance of the solver and the rank of its preconditioner."""

    n_samples: int = 64
    rtol: float = 1e-3
    max_iterations: int = 200
    rank: int = 100

    def __post_init__(self) -> None:
        for name in ("n_samples", "max_iterations", "rank"):
            counted(f"Effort: {name}", getattr(self, name), "sample, iteration or direction")
        if not positive("Effort: rtol", self.rtol) < 1:
            raise InputError(f"Effort: rtol must lie between 0 and 1, got {self.rtol}.")


@dataclass(frozen=True, eq=False)
class SampledWay(Way):
    """Samples, and what can be read off them; `rows` is A J where it is kept."""

    A: Operator
    J: ImageJacobian
    prior: ImagePrior
    eta: Float[Tensor, " q"]
    noise_var: float
    effort: Effort = Effort()
    rows: Float[Tensor, "m p"] | None = None
    progress: bool | None = None
    _solved: list[Solution] = field(default_factory=list, repr=False)
    name = "matrixfree"

    def K(self, u: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """K u for each row."""
        pulled = self.prior.applied(self.eta, self.J.pull(self.A.linear.transposed(u)))
        return self.A.linear(self.J.push(pulled)) + self.noise_var * u

    @cached_property
    def root(self) -> Float[Tensor, "m m"] | None:
        """The Cholesky factor of K, where A J is at hand."""
        if self.rows is None:
            return None
        K = self.prior.covariance(self.eta, self.rows)
        K.diagonal().add_(self.noise_var)
        return torch.linalg.cholesky(K)

    @cached_property
    def _leading(self) -> tuple[Float[Tensor, " r"], Float[Tensor, "r m"]]:
        """The largest eigenvalues of K − σ² I, roughly: a preconditioner need not be exact."""
        m = self.A.linear.m
        rank = min(self.effort.rank, m // 2)
        start = torch.randn(min(rank + 10, m), m, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        pairs = leading_eigenpairs(lambda u: self.K(u) - self.noise_var * u, start, rank, rtol=0.1, max_rounds=2)
        return pairs.values.clamp(min=0), pairs.vectors

    def _precondition(self, r: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """(U diag(s) Uᵀ + c I)⁻¹ r, with c = σ² plus what is below the smallest eigenvalue that was found."""
        s, U = self._leading
        c = self.noise_var + 0.5 * float(s[-1])
        return (r - ((r @ U.T) * (s / (s + c))) @ U) / c

    def solve(self, b: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """K⁻¹ b for each row."""
        if self.root is not None:
            return torch.cholesky_solve(b.T, self.root).T
        found = conjugate_gradients(
            self.K, b, precondition=self._precondition, rtol=self.effort.rtol, max_iterations=self.effort.max_iterations
        )
        if found.indefinite:
            raise NumericalError(
                "imaging: conjugate gradients met a direction without positive curvature: products in the network's "
                "precision are too coarse for this noise. Use a network in float64 (network.double())."
            )
        if not found.converged and not any(not s.converged for s in self._solved):
            warn(
                f"imaging: conjugate gradients stopped after {found.iterations} iterations at a relative residual of "
                f"{float(found.residuals.max()):.1g} (wanted {self.effort.rtol:g}); samples are a little too wide. "
                "Allow more iterations or a preconditioner of higher rank: effort=lw.imaging.Effort(...)."
            )
        self._solved.append(found)
        return found.x

    def sample(self, n: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
        sizes = [min(_AT_ONCE, n - start) for start in range(0, n, _AT_ONCE)]
        pieces = shown(sizes, total=len(sizes), what="sampling", progress=self.progress)
        return torch.cat([self._some(size, generator) for size in pieces])

    def _some(self, n: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
        w = torch.randn(n, self.J.p, dtype=torch.float64, generator=generator)
        u = torch.randn(n, self.A.linear.m, dtype=torch.float64, generator=generator)
        theta = self.prior.root(self.eta, w)
        alpha = self.solve(sqrt(self.noise_var) * u - self.A.linear(self.J.push(theta)))
        pulled = self.prior.applied(self.eta, self.J.pull(self.A.linear.transposed(alpha)))
        return self.J.push(theta + pulled)

    @cached_property
    def _draws(self) -> Float[Tensor, "n d"]:
        return self.sample(self.effort.n_samples, torch.Generator().manual_seed(0))

    def variance(self) -> Float[Tensor, " d"]:
        return self._draws.square().mean(0)

    def covariance(self) -> Float[Tensor, "d d"]:
        d = self.A.linear.d
        raise StructureError(
            f"covariance: of {d} pixels it would be {d} × {d}, and this posterior is one of samples, because its "
            "Jacobian does not fit into the memory allowed. Use post.sample(n), post.std and log_prob(image, patch=4), "
            "or allow more: lw.imaging.posterior(r, memory=...)."
        )

    def covariances(self, pixels: Tensor) -> Float[Tensor, "b k k"]:
        k = pixels.shape[1]
        if k > min(_MOST_PATCH, len(self._draws)):
            raise StructureError(
                f"log_prob: the covariance of {k} pixels cannot be read off {len(self._draws)} samples. Use smaller "
                "patches, patch=1 or 4, or more samples: lw.imaging.posterior(r, effort=lw.imaging.Effort(...))."
            )
        x = self._draws[:, pixels]
        return torch.einsum("nbi,nbj->bij", x, x) / len(x)

    def log_det_and_quad(self, target: Float[Tensor, " m"]) -> tuple[Scalar, Scalar]:
        if self.root is not None:
            solved = torch.linalg.solve_triangular(self.root, target[:, None], upper=False)
            return 2 * self.root.diagonal().log().sum(), solved.square().sum()
        m = len(target)
        probes = signs(_PROBES, m, torch.Generator().manual_seed(0))
        found = lanczos_quadrature(lambda u: self.K(u) / self.noise_var, probes, torch.log, max_steps=_LANCZOS_STEPS)
        quad = (target * self.solve(target[None])[0]).sum()
        return torch.tensor(found.value + m * torch.tensor(self.noise_var).log().item(), dtype=torch.float64), quad

    def accuracy(self) -> str:
        n = self.effort.n_samples
        how = f"{n} samples: a standard deviation has a standard error of {1 / sqrt(2 * n):.0%} of itself"
        if self.rows is not None:
            return f"{how}; K factorised"
        if not self._solved:
            return f"{how}; conjugate gradients to a relative residual of {self.effort.rtol:g}"
        worst = max(float(s.residuals.max()) for s in self._solved)
        steps = max(s.iterations for s in self._solved)
        return f"{how}; conjugate gradients to a relative residual of {worst:.1g} in {steps} iterations at most"
