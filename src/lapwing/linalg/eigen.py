"""Leading eigenpairs of a positive semi-definite matrix from products with it: a randomised block Krylov method.

A random block is multiplied by the matrix; the best approximations within all blocks so far are found by
Rayleigh–Ritz, and what they leave over, H x − θ x, is the next block. Pairs that have converged are not multiplied any
more. When the blocks take too much memory they are pressed into the best approximations (a thick restart).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.cg import Product

_DEPENDENT = 1e-10  # of a vector's length: what is left of it then lies in the others' span


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """θ in descending order with orthonormal x, and ‖H x − θ x‖ of each: an eigenvalue lies that close to θ."""

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
    """The `rank` largest eigenvalues, from a random start of a few vectors more.

    Stops when every residual is below rtol · θ, or below the rounding of the products, a fraction of θ₁. Fewer pairs
    come back when the matrix has a smaller rank (one at least): the other eigenvalues are zero. At most three times as
    many vectors as in `start` are kept at a time, with their products.
    """
    rank, b = min(rank, start.shape[1]), len(start)
    V = _orthonormal(start, start.new_zeros(0, start.shape[1]))
    W = mv(V)
    products, rounds = len(V), 1
    while True:
        theta, X, HX = _ritz(V, W, b)
        residual = HX[:rank] - theta[:rank, None] * X[:rank]
        errors, size = residual.norm(dim=1), float(theta[0].clamp(min=0))
        open_ = errors > (rtol * theta[:rank]).clamp(min=rounding * size)
        if not bool(open_.any()) or rounds == max_rounds:
            break
        if len(V) + int(open_.sum()) > 3 * b:
            V, W = X, HX
        new = _orthonormal(residual[open_], V)
        if not len(new):
            break
        V, W = torch.cat([V, new]), torch.cat([W, mv(new)])
        products, rounds = products + len(new), rounds + 1
    kept = theta[:rank] > rounding * size
    kept[0] = True
    return Eigenpairs(theta[:rank][kept], X[:rank][kept], errors[kept], products, not bool(open_.any()))


def _ritz(V: Float[Tensor, "k p"], W: Float[Tensor, "k p"], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n largest Ritz values in descending order, their vectors x, and H x; W = H V."""
    T = V @ W.T
    theta, Y = torch.linalg.eigh(0.5 * (T + T.T))
    Y = Y.flip(1)[:, :n]
    return theta.flip(0)[:n], Y.T @ V, Y.T @ W


def _orthonormal(new: Float[Tensor, "b p"], V: Float[Tensor, "k p"]) -> Float[Tensor, "_ p"]:
    """An orthonormal basis of what the new vectors have outside the span of V, itself orthonormal."""
    scale = new.norm(dim=1, keepdim=True)
    new = (new / scale.clamp(min=1e-300))[scale[:, 0] > 0]
    for _ in range(2):
        new = new - (new @ V.T) @ V
    Q, R = torch.linalg.qr(new.T)
    Q = Q.T[R.diagonal().abs() > _DEPENDENT]
    return Q - (Q @ V.T) @ V
