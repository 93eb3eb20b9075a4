"""Hyperparameters by the evidence or by held-out data: prior precisions and noise, never the curvature again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log, pi
from typing import Any

import torch

from lapwing import evidence, predictive
from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import Exact, Sampled
from lapwing.data import Batches, ModelInput
from lapwing.diagnosis import PRECISION_BOUNDS
from lapwing.errors import located
from lapwing.jacobian import Jacobian
from lapwing.likelihoods import Gaussian
from lapwing.observations import encode_batch
from lapwing.posterior import Posterior
from lapwing.predictive import Frame, site_gaussian
from lapwing.predictive.link_rules import Default
from lapwing.progress import shown
from lapwing.sampling import seeded

_LOW, _HIGH = (log(bound) for bound in PRECISION_BOUNDS)
GRID = torch.logspace(-4, 4, 33, dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """One point of a tuning path."""

    score: float  # log evidence, or minus the held-out NLL per datum
    precisions: tuple[float, ...]
    noise_std: tuple[float, ...]
    note: str = ""


# --- gradient ----------------------------------------------------------------------------------------


def maximise_evidence(posterior: Posterior, *, noise: bool) -> Posterior:
    """Maximise log Z over log precisions and, when it is to be estimated, log noise.

    One precision and one noise level: Newton on the spectrum of H, an eigenvalue problem solved once. More of
    either: L-BFGS with the evidence's own gradient. The curvature at unit noise never changes.
    """
    tune_noise = noise and _noise_is_free(posterior)
    spectral = posterior.prior.P0.isotropic and len(posterior.estimate.parts) == 1 and posterior.curvature.adds_prior
    if spectral and isinstance(posterior.fisher, Exact | Sampled):
        return _maximise_on_spectrum(posterior, tune_noise)
    return _maximise_by_lbfgs(posterior, tune_noise)


def _maximise_on_spectrum(posterior: Posterior, tune_noise: bool) -> Posterior:
    """Newton in (u, w) = (log δ, log c), H = c H₁:  L = ℓ(c) − ½ Σ log(1 + c λ/δ) − ½ δ ‖θ − m₀‖².

    With q = c λ/(c λ + δ) and t = Σ q (1 − q) the Hessian is −½ [[t + δs, −t], [−t, t + c·SSE]]: negative definite, so
    L is concave in the logs and Newton with halving finds its only maximum.
    """
    target = _SpectralEvidence.of(posterior)
    u, w = posterior.prior.precisions.detach().log()[0], posterior.part_scales.detach().log()[0]
    path = [target.value(u, w)]
    steps = [_step(path[-1], posterior)]
    for _ in range(100):
        gradient, hessian = target.derivatives(u, w)
        if not tune_noise:
            gradient, hessian = gradient[:1], hessian[:1, :1]
        move = torch.linalg.solve(hessian, -gradient).clamp(-5, 5)
        if bool((gradient.abs() <= 1e-10 * target.size).all()):
            break
        next_u, next_w, value = _halved(target, u, w, move, path[-1])
        stuck = bool(next_u == u) and bool(next_w == w)
        u, w = next_u, next_w
        path.append(value)
        steps.append(_step(value, _at(posterior, u.exp()[None], w.exp()[None])))
        if stuck:
            break
    tuned = _at(posterior, u.exp()[None], w.exp()[None] if tune_noise else None)
    return replace(tuned, history=(*posterior.history, *steps))


def _halved(
    target: _SpectralEvidence, u: Tensor, w: Tensor, move: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest of the steps move, move/2, … that does not lower the evidence; the bounds hold."""
    for _ in range(40):
        next_u = (u + move[0]).clamp(_LOW, _HIGH)
        next_w = w + move[1] if len(move) > 1 else w
        next_value = target.value(next_u, next_w)
        if bool(next_value >= value):
            return next_u, next_w, next_value
        move = move / 2
    return u, w, value


@dataclass(frozen=True, eq=False)
class _SpectralEvidence:
    """log Z as a function of log δ and log c, given the eigenvalues of the unit curvature."""

    eigenvalues: Float[Tensor, " r"]
    scatter: Scalar  # ‖θ − m₀‖²
    half_sse: Scalar  # 0 for likelihoods without noise
    half_count: Scalar  # κ n / 2
    constant: Scalar
    size: float

    @classmethod
    def of(cls, posterior: Posterior) -> _SpectralEvidence:
        kappa = posterior.likelihood_scale.detach()
        zero = torch.zeros((), dtype=torch.float64)
        if isinstance(posterior.likelihood, Gaussian):
            # κ ℓ(c) = −c SSE/2 + (κ n/2) log(c / 2πκ), because c = κ/σ²
            sse, count = posterior.estimate.statistics.likelihood.chunk(2)
            half_sse, half_count = sse[0] / 2, kappa * count[0] / 2
            constant = -half_count * (2 * pi * kappa).log()
        else:
            half_sse, half_count, constant = zero, zero, posterior.log_lik().detach()
        scatter = posterior.prior.scatter(posterior.linearised.theta)[0]
        size = 1.0 + posterior.n_data
        return cls(posterior.estimate.parts[0].spectrum(), scatter, half_sse, half_count, constant, size)

    def value(self, u: Tensor, w: Tensor) -> Scalar:
        occam = (self.eigenvalues * (w - u).exp()).log1p().sum()
        fit = self.constant - self.half_sse * w.exp() + self.half_count * w
        return fit - 0.5 * (occam + u.exp() * self.scatter)

    def derivatives(self, u: Tensor, w: Tensor) -> tuple[Float[Tensor, 2], Float[Tensor, "2 2"]]:
        c_lambda = self.eigenvalues * w.exp()
        q = c_lambda / (c_lambda + u.exp())
        gamma, t = q.sum() / 2, (q * (1 - q)).sum() / 2
        pull, misfit = u.exp() * self.scatter / 2, self.half_sse * w.exp()
        gradient = torch.stack([gamma - pull, self.half_count - misfit - gamma])
        hessian = -torch.stack([t + pull, -t, -t, t + misfit]).reshape(2, 2)
        return gradient, hessian


def _maximise_by_lbfgs(posterior: Posterior, tune_noise: bool) -> Posterior:
    log_precisions = posterior.prior.precisions.detach().log().clone().requires_grad_()
    log_noise = _noise(posterior).log().clone().requires_grad_() if tune_noise else None
    variables = [log_precisions] if log_noise is None else [log_precisions, log_noise]
    steps: list[Step] = []

    def current() -> Posterior:
        candidate = posterior.with_prior(posterior.prior.with_precisions(log_precisions.clamp(_LOW, _HIGH).exp()))
        return candidate if log_noise is None else _with_noise(candidate, log_noise.exp())

    optimiser = torch.optim.LBFGS(
        variables, max_iter=200, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        candidate = current()
        loss = -candidate.log_evidence()
        loss.backward()
        steps.append(_step(-loss.detach(), candidate))
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    final = current()
    tuned = posterior.with_prior(posterior.prior.with_precisions(final.prior.precisions.detach()))
    if log_noise is not None:
        tuned = _with_noise(tuned, log_noise.detach().exp())
    return replace(tuned, history=(*posterior.history, *steps))


# --- MacKay's fixed point ------------------------------------------------------------------------------


def iterate_fixed_point(posterior: Posterior, *, noise: bool, max_steps: int = 1000, rtol: float = 1e-9) -> Posterior:
    """MacKay's updates δ_g ← γ_g / ‖θ_g − m_g‖² and σ² ← κ SSE / (κ n − γ), until they stand still.

    Their fixed points are the stationary points of the evidence. MacKay (1992).
    """
    tune_noise = noise and _noise_is_free(posterior)
    current, steps = posterior, [_step(posterior.log_evidence().detach(), posterior)]
    scatter = posterior.prior.scatter(posterior.linearised.theta)
    for _ in range(max_steps):
        gamma = current.effective_dimension().detach()
        precisions = (gamma / scatter).nan_to_num(nan=exp(_HIGH)).clamp(*PRECISION_BOUNDS)
        updated = current.with_prior(current.prior.with_precisions(precisions))
        if tune_noise:
            updated = _with_noise(updated, _fixed_point_noise(current))
        change = _largest_change(current, updated)
        current = updated
        steps.append(_step(current.log_evidence().detach(), current))
        if change < rtol:
            break
    else:
        warnings.warn(
            f"The fixed-point updates still moved by {change:.2g} (relative) after {max_steps} steps; "
            'by="evidence" converges faster.',
            stacklevel=4,
        )
    return replace(current, history=(*posterior.history, *steps))


def _fixed_point_noise(posterior: Posterior) -> Float[Tensor, " g"]:
    sse, count = posterior.estimate.statistics.likelihood.chunk(2)
    kappa = posterior.likelihood_scale.detach()
    scales = posterior.part_scales.detach()
    gamma = evidence.effective_dimension_of_parts(posterior.curvature_at, scales, posterior.prior)
    left = kappa * count - gamma
    # More effective parameters than targets: the noise is far too small for the update to mean anything yet.
    return torch.where(left > 0, (kappa * sse / left.clamp(min=1e-300)).sqrt(), 2 * _noise(posterior))


def _largest_change(before: Posterior, after: Posterior) -> float:
    pairs = [(before.prior.precisions, after.prior.precisions), (_noise(before), _noise(after))]
    return max(float((b / a).log().abs().max()) if len(a) else 0.0 for a, b in pairs)


# --- held-out data ---------------------------------------------------------------------------------------


def search_validation(
    posterior: Posterior, held_out: Batches, *, noise: bool, progress: bool | None = None
) -> Posterior:
    """Scale all prior precisions by a common factor from a grid; the best held-out predictive NLL wins.

    The curvature and the Jacobians at the held-out inputs are computed once. With a free Gaussian noise σ the grid
    runs over τ = s σ²/κ instead of s: V = (σ²/κ) J (H₁ + τ P₀)⁻¹ Jᵀ, for which the best σ has a closed form.
    """
    pieces: list[Piece] = []
    for number, (x, y) in enumerate(held_out):
        with located(f"validation, batch {number}"):
            pieces += _jacobian_pieces(posterior, x, y)
    closed_noise = noise and _noise_is_free(posterior) and len(posterior.estimate.parts) == 1
    score = _score_with_best_noise if closed_noise else _score
    candidates, steps = [], []
    for factor in shown(GRID.tolist(), total=len(GRID), what="validation grid", progress=progress):
        candidate, nll = score(posterior, factor, pieces)
        candidates.append((nll, candidate))
        steps.append(_step(torch.tensor(-nll, dtype=torch.float64), candidate, note="validation"))
    best = min(range(len(candidates)), key=lambda i: candidates[i][0])
    if best in (0, len(GRID) - 1):
        steps[best] = replace(steps[best], note="validation: the optimum lies on the edge of the grid")
        warnings.warn(
            f"The best held-out NLL lies on the edge of the grid (precisions × {float(GRID[best]):g}); the true "
            "optimum is beyond it. Call tune again from this posterior.",
            stacklevel=4,
        )
    return replace(candidates[best][1], history=(*posterior.history, *steps))


Piece = tuple[Tensor, Jacobian, Any]


def _jacobian_pieces(posterior: Posterior, x: ModelInput, y: Any) -> Iterator[Piece]:
    x, _ = encode_batch(x, y, posterior.likelihood, posterior.sites)  # refuses bad targets before the grid starts
    start = 0
    for f, J in posterior.weights.jacobians(x):
        rows = slice(start, start + len(f))
        yield f, J, tuple(v[rows] for v in y) if isinstance(y, tuple) else y[rows]
        start += len(f)


def _score(posterior: Posterior, factor: float, pieces: list[Piece]) -> tuple[Posterior, float]:
    """Held-out NLL per likelihood term with all precisions multiplied by the factor."""
    candidate = posterior.with_prior(posterior.prior.with_precisions(posterior.prior.precisions.detach() * factor))
    log_probs = [
        predictive.from_gaussian(
            candidate.likelihood, site_gaussian(candidate.precision, f, J, candidate.sites), _frame(candidate)
        ).log_prob(y)
        for f, J, y in pieces
    ]
    return candidate, -float(torch.cat([lp.flatten() for lp in log_probs]).mean())


def _score_with_best_noise(posterior: Posterior, factor: float, pieces: list[Piece]) -> tuple[Posterior, float]:
    """The same for τ = factor · τ₀, at the σ that minimises the NLL: σ² = mean of rᵀ (I + Q/κ)⁻¹ r over outputs."""
    kappa, noise_var = posterior.likelihood_scale.detach(), float(_noise(posterior)[0]) ** 2
    one = torch.ones(1, dtype=torch.float64)
    precisions = posterior.prior.precisions.detach()
    tau = factor * noise_var / kappa * precisions  # prior precisions in units of the curvature at unit noise
    at_unit = posterior.curvature_at(one).plus(posterior.prior.with_precisions(tau).P0)
    quadratic, log_det, count = 0.0, 0.0, 0
    for f, J, y in pieces:
        gaussian = site_gaussian(at_unit, f, J, posterior.sites)
        r = posterior.likelihood.encode(y, posterior.sites, len(f)).to(f) - gaussian.mean
        eye = torch.eye(r.shape[-1], dtype=torch.float64, device=r.device)
        L = torch.linalg.cholesky(eye + gaussian.cov / kappa)
        quadratic += float((torch.linalg.solve_triangular(L, r[..., None], upper=False) ** 2).sum())
        log_det += float(2 * L.diagonal(dim1=-2, dim2=-1).log().sum())
        count += r.numel()
    sigma2 = quadratic / count
    terms = count // posterior.sites.c
    nll = 0.5 * (count * (1 + log(2 * pi * sigma2)) + log_det) / terms
    candidate = posterior.with_prior(posterior.prior.with_precisions(tau * kappa / sigma2))
    return _with_noise(candidate, torch.tensor([sigma2], dtype=torch.float64).sqrt()), nll


def _frame(posterior: Posterior) -> Frame:
    return Frame(posterior.sites, torch.float64, Default(), 1000, seeded(None))


# --- shared ------------------------------------------------------------------------------------------------


def _noise_is_free(posterior: Posterior) -> bool:
    return isinstance(posterior.likelihood, Gaussian) and posterior.likelihood.estimated


def _noise(posterior: Posterior) -> Float[Tensor, " g"]:
    likelihood = posterior.likelihood
    return likelihood.resolved().detach() if isinstance(likelihood, Gaussian) else torch.ones(0, dtype=torch.float64)


def _with_noise(posterior: Posterior, noise_std: Float[Tensor, " g"]) -> Posterior:
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Gaussian)
    return posterior.with_likelihood(likelihood.with_noise_std(noise_std))


def _at(posterior: Posterior, precisions: Tensor, scales: Tensor | None) -> Posterior:
    """The posterior at these precisions and, for a Gaussian, at the noise σ² = κ/c."""
    moved = posterior.with_prior(posterior.prior.with_precisions(precisions))
    if scales is None or not isinstance(posterior.likelihood, Gaussian):
        return moved
    return _with_noise(moved, (posterior.likelihood_scale.detach() / scales).sqrt())


def _step(score: Tensor, posterior: Posterior, note: str = "") -> Step:
    precisions = tuple(posterior.prior.precisions.detach().tolist())
    return Step(float(score), precisions, tuple(_noise(posterior).tolist()), note)
