"""Leave-one-out effects of training data on predictions of the linear model, without fitting again.

With K_tn = J_t P⁻¹ J_nᵀ, A_n = K_nn and Λ_n = S_n S_nᵀ, the posterior without datum n has P' = P − J_nᵀ Λ_n J_n, so

    mean shift  = −K_tn (I − Λ_n A_n)⁻¹ r_n,      variance shift = K_tn S (I − Sᵀ A_n S)⁻¹ Sᵀ K_tnᵀ

with r_n the gradient of log p(y_n | f) at the posterior's mean. Exact for a Gaussian likelihood at the linear model's
mode and full curvature; one Newton step for others. Under another structure they are what that structure's P says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.data.fixed_order import in_data_order
from lapwing.data.targets import encode_batch, encoded_batches
from lapwing.errors import NumericalError, StructureError
from lapwing.likelihoods import Sites
from lapwing.network.jacobian import Jacobian
from lapwing.operators import SeparatePrecision
from lapwing.posterior.fitted import Fitted

_LEAST_LEFT = 1e-10  # of 1 − Sᵀ A S, below which a datum alone determines a direction


@dataclass(frozen=True, eq=False)
class Influence:
    """Effects of leaving out each of N training data on T predictions of K outputs.

    Of data on themselves there is no T axis. `log_lik` is there where targets are known. `effect` is always defined;
    the shifts ask that the precision without a datum is positive definite, which that of `full`, `gp` and `lowrank` is,
    and say so where under an approximation it is not.
    """

    effect: Float[Tensor, "*t k n"]  # −J_t P⁻¹ J_nᵀ r_n: to first order in the datum's weight
    left_over: Float[Tensor, " n"]  # the least eigenvalue of I − Sᵀ A S
    shifts: tuple[Tensor, Tensor, Tensor | None]

    @property
    def mean_shift(self) -> Float[Tensor, "*t k n"]:
        """Of the prediction, when the datum is left out."""
        return self._checked()[0]

    @property
    def variance_shift(self) -> Float[Tensor, "*t k n"]:
        """Of its variance; never negative."""
        return self._checked()[1]

    @property
    def log_lik(self) -> Float[Tensor, "*t n"] | None:
        """Change of log p(y_t | f) at the shifted mean: negative where the datum helped."""
        return self._checked()[2]

    def _checked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if bool((self.left_over <= _LEAST_LEFT).any()):
            row = int(self.left_over.argmin())
            raise NumericalError(
                f"influence: without training datum {row} the precision would not be positive definite (least "
                f"eigenvalue {float(self.left_over[row]):.3g} of 1). It was not among the data of the fit, or the "
                'structure holds less curvature than this datum has: use structure="full" or "gp", or `effect`.'
            )
        return self.shifts


def influence(posterior: Fitted, train: Any, test: Any, progress: bool | None) -> Influence:
    if isinstance(posterior.precision, SeparatePrecision):
        raise StructureError("influence: outputs that share no weights have no covariance of one set of weights.")
    at = None if test is None else _Tested.of(posterior, test)
    parts = [_of_piece(posterior, piece, at) for piece in _pieces(posterior, train, progress)]
    effect, left_over, mean, variance, log_lik = (
        None if values[0] is None else torch.cat([v for v in values if v is not None], -1)
        for values in zip(*parts, strict=True)
    )
    assert effect is not None and left_over is not None and mean is not None and variance is not None
    return Influence(effect, left_over, (mean, variance, log_lik))


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some training data: where the mean is, and rows of J."""

    f: Float[Tensor, "n k"]
    y: Tensor
    J: Jacobian


@dataclass(frozen=True, eq=False)
class _Tested:
    """Predictions that are asked about: P⁻¹ J_tᵀ is found once for all data."""

    f: Float[Tensor, "t k"]
    y: Tensor | None
    solved: Float[Tensor, "tk p"]

    @classmethod
    def of(cls, posterior: Fitted, test: Any) -> _Tested:
        x, y = test if isinstance(test, tuple) and len(test) == 2 else (test, None)
        given = posterior.given(x)
        encoded = None if y is None else encode_batch(given, y, posterior.likelihood, posterior.sites)[1]
        found = list(posterior.weights.jacobians(given))
        f = torch.cat([f for f, _ in found]).detach()
        rows = torch.cat([J.dense().flatten(0, 1) for _, J in found]).detach()
        return cls(f, encoded, posterior.precision.solve(rows))

    def covariances(self, J: Jacobian) -> Float[Tensor, "t k n c"]:
        """K_tn."""
        return J.mv(self.solved).double().unflatten(0, self.f.shape)


def _pieces(posterior: Fitted, train: Any, progress: bool | None) -> Iterator[_Piece]:
    data = in_data_order(posterior.batches(train, "train"))  # column n is datum n
    for x, y in encoded_batches(data, posterior.likelihood, posterior.sites, progress=progress, what="influence"):
        start = 0
        for f, J in posterior.weights.jacobians(x):
            yield _Piece(f.detach(), y[start : start + len(f)], J)
            start += len(f)


def _of_piece(posterior: Fitted, piece: _Piece, at: _Tested | None) -> tuple[Tensor | None, ...]:
    likelihood, sites, scale = posterior.likelihood, posterior.sites, posterior.likelihood_scale.detach()
    h = sites.split(piece.f)
    r = scale * sites.join(likelihood.residual(h, piece.y)).flatten(1).double()
    S = scale.sqrt() * _root(likelihood.hessian_root(h, piece.y).double(), sites)
    A = posterior.precision.inv_quad(piece.J)
    left = torch.eye(S.shape[-1]).to(S) - S.mT @ A @ S
    least = torch.linalg.eigvalsh(left)[..., 0]
    # What is not positive definite is refused where it is asked for; it may be singular.
    proper = torch.where((least > _LEAST_LEFT)[:, None, None], left, torch.eye(left.shape[-1]).to(left))
    # (I − Λ A)⁻¹ r = r + S (I − Sᵀ A S)⁻¹ Sᵀ A r
    solved = r + (S @ torch.linalg.solve(proper, S.mT @ A @ r[..., None]))[..., 0]
    if at is None:
        K, f, y = A, piece.f, piece.y
        effect, mean = (-torch.einsum("nkc,nc->kn", K, v) for v in (r, solved))
        half = torch.einsum("nkc,ncs->nks", K, S)
        variance = torch.einsum("nks,nks->kn", half, torch.linalg.solve(proper, half.mT).mT)
        shifted = f.mT[None] + mean[None]
        return effect, least, mean, variance, _log_lik(posterior, shifted, f, y)[0]
    K = at.covariances(piece.J)
    effect, mean = (-torch.einsum("tknc,nc->tkn", K, v) for v in (r, solved))
    half = torch.einsum("tknc,ncs->tkns", K, S)
    variance = (half * torch.einsum("nsr,tknr->tkns", torch.linalg.inv(proper), half)).sum(-1)
    if at.y is None:
        return effect, least, mean, variance, None
    n = mean.shape[-1]
    shifted = at.f[..., None] + mean
    f = at.f[:, None].expand(-1, n, -1).flatten(0, 1)
    y = at.y.repeat_interleave(n, 0)
    changes = _log_lik(posterior, shifted.movedim(-1, 1).flatten(0, 1).mT[None], f, y)[0]
    return effect, least, mean, variance, changes.unflatten(0, (len(at.f), n))


def _log_lik(posterior: Fitted, shifted: Tensor, f: Tensor, y: Tensor) -> Float[Tensor, "1 n"]:
    """log p(y | shifted f) − log p(y | f) of each datum; shifted (1, k, n)."""
    sites = posterior.sites
    now, before = (posterior.likelihood.log_prob(sites.split(v), y).flatten(1).sum(1) for v in (shifted[0].mT, f))
    return (now - before)[None]


def _root(S: Float[Tensor, "n t c s"], sites: Sites) -> Float[Tensor, "n k r"]:
    """Block diagonal over a datum's terms, rows in the order of its outputs."""
    n, t, c, s = S.shape
    whole = S.new_zeros(n, t, c, t, s)
    whole[:, range(t), :, range(t)] = S.movedim(1, 0)
    flat = whole.reshape(n, t * c, t * s)
    order = sites.split(torch.arange(t * c)[None])[0].flatten()  # entry (t, c) → position among the outputs
    return torch.empty_like(flat).index_copy_(1, order.to(flat.device), flat)
