"""Leading eigenpairs of a positive semi-definite matrix from products H v: a randomised block Krylov method.

The space starts from a random block. Each round computes Ritz pairs (θ, x) by the Rayleigh–Ritz procedure and extends
the space by the residuals H x − θ x of pairs that have not converged. When the space exceeds its memory limit, it is
replaced by the current Ritz vectors (thick restart).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.cg import Product

_DEPENDENT = 1e-10  # relative length after projection below which a vector is linearly dependent on the others


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Ritz values θ in descending order with orthonormal vectors x, and residuals ‖H x − θ x‖.

    H has an eigenvalue within the residual of θ.
    """

    values: Float[Tensor, " r"]
    vectors: Float[Tensor, "r p"]
    residuals: Float[Tensor, " r"]
    products: int  # products of the matrix with one vector
    converged: bool


def leading_eigenpairs(
    mv: Product,
    start: Float[Tensor, "b p"],
    rank: int,
    *,
    rtol: float = 1e-5,
    rounding: float = 1e-14,
    max_rounds: int = 50,
) -> Eigenpairs:
    """The `rank` largest eigenvalues with eigenvectors; `start` (b, p) is random, with b a little larger than `rank`.

    Stops when every residual is below rtol · θ or below the rounding error of the products, `rounding` · θ₁. If the
    matrix has a smaller rank, only the nonzero pairs are returned, at least one. Memory: at most 3 b vectors and their
    products.
    """
    rank, b = min(rank, start.shape[1]), len(start)
    V = _orthonormal(start, start.new_zeros(0, start.shape[1]))
    W = mv(V)
    products, rounds = len(V), 1
    while True:
        theta, X, HX = _ritz(V, W, b)
        residual = HX[:rank] - theta[:rank, None] * X[:rank]
        errors, size = residual.norm(dim=1), float(theta[0].clamp(min=0))
        unconverged = errors > (rtol * theta[:rank]).clamp(min=rounding * size)
        if not bool(unconverged.any()) or rounds == max_rounds:
            break
        if len(V) + int(unconverged.sum()) > 3 * b:
            V, W = X, HX
        new = _orthonormal(residual[unconverged], V)
        if not len(new):
            break
        V, W = torch.cat([V, new]), torch.cat([W, mv(new)])
        products, rounds = products + len(new), rounds + 1
    kept = theta[:rank] > rounding * size
    kept[0] = True  # callers rely on at least one pair, also for H = 0
    return Eigenpairs(theta[:rank][kept], X[:rank][kept], errors[kept], products, not bool(unconverged.any()))


def _ritz(V: Float[Tensor, "k p"], W: Float[Tensor, "k p"], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n largest Ritz values θ of H on the span of V, descending, their vectors x, and H x, given W = H V."""
    T = V @ W.T
    theta, Y = torch.linalg.eigh(0.5 * (T + T.T))  # symmetric up to rounding; eigh reads one triangle only
    Y = Y.flip(1)[:, :n]
    return theta.flip(0)[:n], Y.T @ V, Y.T @ W


def _orthonormal(new: Float[Tensor, "b p"], V: Float[Tensor, "k p"]) -> Float[Tensor, "_ p"]:
    """An orthonormal basis of the new vectors after projection onto the complement of V, whose rows are orthonormal."""
    scale = new.norm(dim=1, keepdim=True)
    new = (new / scale.clamp(min=1e-300))[scale[:, 0] > 0]
    for _ in range(2):  # a second Gram–Schmidt pass removes what rounding left in the span of V
        new = new - (new @ V.T) @ V
    Q, R = torch.linalg.qr(new.T)
    Q = Q.T[R.diagonal().abs() > _DEPENDENT]
    return Q - (Q @ V.T) @ V
