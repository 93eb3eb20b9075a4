"""EM for precisions and noise: the E-step samples the posterior, the M-step applies MacKay's updates.

    γ = 1/K Σ_k ζ_kᵀ H ζ_k,   δ_g ← γ_g / ‖θ_* − m₀‖²_g,   σ² ← κ SSE(θ_*) / (κ n − γ)

The expectation of γ over samples is MacKay's, so fixed points equal those of the exact updates up to the error of K
samples, about √(2 / (γ K)) relative. Antorán et al. (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from sys import maxsize

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import GaussNewton, Nystrom
from lapwing.errors import warn
from lapwing.linalg import CG
from lapwing.linear_model import Design, Expansion, StoppingRule, design
from lapwing.network.products import DataJacobian, Source
from lapwing.posterior import Posterior
from lapwing.posterior.sampling import WeightDraws
from lapwing.runtime.progress import bar
from lapwing.tuning import find_mode, quadratic_is_exact
from lapwing.tuning.em.scaling import Scaling
from lapwing.tuning.em.settings import EM, SGD, Cholesky
from lapwing.tuning.em.solvers import ConjugateGradients, Direct, Solved, Solver, Start, System, detached
from lapwing.tuning.em.step import EMStep
from lapwing.tuning.em.stochastic import StochasticGradients
from lapwing.tuning.em.targets import target_share
from lapwing.tuning.evidence.anderson import Anderson
from lapwing.tuning.step import noise_is_free, noise_of, with_noise

MOST_DENSE = 6_000  # largest side of a matrix that is factorised
_LONGEST_STEP = 2.3  # largest change of a log precision in a step, a factor of ten
_MEMORY, _NEAR = 4, 0.2  # depth of the Anderson acceleration, and the step in a log below which it is used
_PRUNED = 1e-2  # effective dimension below which a group is excluded from the convergence test
_TIGHT, _LOOSE = StoppingRule(1e-9, 40, 200), StoppingRule(1e-3, 3, 15)


def tune_by_em(
    posterior: Posterior,
    source: Source,
    settings: EM,
    *,
    linear_mode: bool,
    noise: bool,
    most_floats: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Posterior:
    """Tune prior precisions, and Gaussian noise if it is to be estimated, by EM.

    The samples stay with the posterior.
    """
    em = _Em.of(posterior, source, settings, linear_mode, noise, most_floats)
    state = em.initial_state(generator)
    steps, shown = [state.step], bar(range(settings.max_steps), total=settings.max_steps, what="em", progress=progress)
    for _ in shown:
        state = em.e_step(em.m_step(state))
        steps.append(state.step)
        shown.set_postfix_str(f"log change {state.change:.2g}, residual {state.solved.residual:.1g}")
        if state.change < settings.rtol:
            break
    shown.close()
    if state.change >= settings.rtol:
        warn(
            f"EM still moved a log precision or log noise by {state.change:.2g} after {settings.max_steps} steps "
            f'(rtol = {settings.rtol:g}); lw.tune(tuned, data, by="em") goes on from here.',
        )
    tuned = state.posterior
    if linear_mode and quadratic_is_exact(tuned):
        tuned = replace(tuned, expansion=Expansion(tuned.linearised.theta, tuned.estimate.statistics, follows=True))
    readout = replace(tuned.readout, noise_std=em.noise_around_network(state) if linear_mode else None)
    return replace(tuned, draws=state.solved.draws, history=(*posterior.history, *steps), readout=readout)


@dataclass(frozen=True, eq=False)
class _State:
    """Prior and noise, with the mode and the samples that belong to them."""

    posterior: Posterior
    scaling: Scaling
    solved: Solved
    change: float = 0.0  # largest change of a log precision or log noise in the last M-step
    mixing: Anderson = field(default_factory=lambda: Anderson(_MEMORY))
    step: EMStep | None = None


@dataclass(frozen=True, eq=False)
class _Em:
    """What is constant during EM."""

    start: Posterior
    scaling: Scaling
    solver: Solver
    H: GaussNewton
    data: Design | None  # None: evidence at the trained weights
    noise: bool
    low: Float[Tensor, " g"]
    high: Float[Tensor, " g"]
    settings: EM

    @classmethod
    def of(
        cls, posterior: Posterior, source: Source, settings: EM, linear_mode: bool, noise: bool, most_floats: int
    ) -> _Em:
        diagonal = posterior.curvature.diagonal().detach()
        scaling = Scaling(posterior.prior.with_precisions(posterior.prior.precisions.detach()))
        if settings.g_prior:
            scaling = Scaling.g_prior(scaling.groups, diagonal)
        start = scaling.applied(replace(posterior, expansion=None))
        written = isinstance(settings.solver, Cholesky)
        stored = partial(design, posterior.linearised, source, n=posterior.n_data)
        data = stored(most_floats=maxsize if written else most_floats) if linear_mode or written else None
        H = _products(posterior, source)
        n_parts = len(posterior.part_scales)
        direct = Direct.written(H, data, n_parts) if written and data is not None else None
        solver = direct or _solver(start, H, settings, most_floats)
        free = noise and noise_is_free(posterior)
        data = data if linear_mode else None
        return cls(start, scaling, solver, H, data, free, *scaling.bounds(diagonal), settings)

    def initial_state(self, generator: torch.Generator) -> _State:
        draws = self.start.draws
        if draws is None or len(draws.zeta) != self.settings.n_samples:
            draws = self._drawn(generator)
        return self.e_step(_State(self.start, self.scaling, Solved(draws, draws.data, 0.0, 0)))

    def e_step(self, state: _State) -> _State:
        """E-step: mode and samples for the current prior and noise."""
        posterior = state.posterior
        system = System(
            detached(posterior.prior.P0),
            posterior.part_scales.detach(),
            preconditioner := self.solver.preconditioner(posterior),
        )
        if self.data is not None:
            stopping = _TIGHT if self.solver.precise else _LOOSE
            posterior = replace(posterior, expansion=find_mode(posterior, self.data, stopping, preconditioner))
        share = target_share(self.H, state.solved.draws, system.scales)
        start = Start(state.solved.draws, None if state.step is None else state.solved.products)
        solved = self.solver.solve(start, system, data_targets=share < 0.5)
        found = replace(state, posterior=posterior, solved=solved)
        return replace(found, step=self._record(found, share))

    def m_step(self, state: _State) -> _State:
        """M-step.

        With the random numbers fixed it is a smooth map, so Anderson acceleration applies near the fixed point.
        """
        alphas, gamma = state.scaling.alphas, self._gamma(state).mean(0)
        scatter = state.scaling.scatter(self._theta(state.posterior))
        wanted = (gamma / scatter).nan_to_num(nan=torch.inf).clamp(min=self.low, max=self.high)
        # A mean of few samples can be negative if γ is almost zero; it then carries no information about δ.
        wanted = torch.where(gamma > 0, wanted, alphas).log()
        step = (wanted - alphas.log()).clamp(-_LONGEST_STEP, _LONGEST_STEP)
        noise = noise_of(state.posterior).log()
        noise_step = self._noise(state).log() - noise if self.noise else torch.zeros_like(noise)
        here, moved = torch.cat([alphas.log(), noise]), torch.cat([step, noise_step])
        near = float(moved.abs().max()) < _NEAR
        there = state.mixing.next(here, here + moved) if near else here + moved
        scaling = state.scaling.moved(there[: len(alphas)].exp().clamp(min=self.low, max=self.high))
        posterior = scaling.applied(state.posterior)
        if self.noise:
            low, high = posterior.noise_bounds()
            posterior = with_noise(posterior, there[len(alphas) :].exp().clamp(min=low, max=high))
        waited = (gamma > _PRUNED) & (scaling.alphas > 1.0001 * self.low) & (scaling.alphas < self.high / 1.0001)
        change = torch.cat([step[waited], noise_step]).abs().max() if len(noise) or bool(waited.any()) else 0.0
        return replace(state, posterior=posterior, scaling=scaling, change=float(change))

    def noise_around_network(self, state: _State) -> Float[Tensor, " g"] | None:
        """√(SSE of the network / (n − γ)) if larger than the noise, as predictions are centred at the network's
        outputs."""
        if not self.noise:
            return None
        sse, count = state.posterior.estimate.statistics.likelihood.chunk(2)
        left = torch.maximum(count - self._gamma_of_parts(state), 0.2 * count)
        return torch.maximum((sse / left).sqrt(), noise_of(state.posterior))

    def _drawn(self, generator: torch.Generator) -> WeightDraws:
        """Random numbers z₀ and t of the samples, and the initial ζ = θ₀ = P₀^-½ z₀."""
        P0, scales = detached(self.start.prior.P0), self.start.part_scales.detach()
        shape = (self.settings.n_samples, self.start.layout.p)
        z0 = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(P0.index.device)
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        one_hot = torch.eye(len(scales), dtype=torch.float64, device=z0.device)
        t = [self.H.draws(len(z0), e, torch.Generator().manual_seed(seed + g)) for g, e in enumerate(one_hot)]
        return WeightDraws(z0, torch.stack(t), seed, z0 / P0.diagonal.sqrt(), P0.diagonal, scales)

    def _gamma(self, state: _State) -> Float[Tensor, "k g"]:
        """An unbiased estimate of γ from each sample, for each group.

        For a single group, ζᵀH ζ: its variance is 2 tr Q² with Q = I − P₀^½ P⁻¹ P₀^½. Its parts [ζ ∘ H ζ]_g for
        several groups have a much larger variance, because contributions shared by groups appear with opposite signs;
        so has P_g − δ_g ‖ζ_g‖² where γ ≪ P. For several groups, [z₀ ∘ (z₀ − P₀^½ ζ)]_g also has mean tr Q_gg, with a
        variance of at most 2 tr Q_gg: it vanishes where the data carry no information, since ζ = P₀^-½ z₀ there.
        """
        draws = state.solved.draws
        if len(state.scaling.alphas) == 1:
            Hz = torch.einsum("g,gkp->kp", draws.scales, state.solved.products)
            return state.scaling.sums(draws.zeta * Hz)
        return state.scaling.sums(draws.prior * (draws.prior - draws.precisions.sqrt() * draws.zeta))

    def _gamma_of_parts(self, state: _State) -> Float[Tensor, " g"]:
        """tr(P⁻¹ c_g H_g) for each noise level, estimated from the samples."""
        draws = state.solved.draws
        return draws.scales * torch.einsum("kp,gkp->g", draws.zeta, state.solved.products) / len(draws.zeta)

    def _noise(self, state: _State) -> Float[Tensor, " g"]:
        """MacKay's update σ² ← κ SSE / (κ n − γ) for each noise level."""
        posterior = state.posterior
        kappa = posterior.likelihood_scale.detach()
        statistics = posterior.estimate.statistics if posterior.expansion is None else posterior.expansion.statistics
        sse, count = statistics.likelihood.chunk(2)
        left = kappa * count - self._gamma_of_parts(state)
        # More effective parameters than targets: the noise is still far too small for MacKay's update, so double it.
        wanted = torch.where(left > 0, (kappa * sse / left.clamp(min=1e-300)).sqrt(), 2 * noise_of(posterior))
        low, high = posterior.noise_bounds()
        return wanted.clamp(min=low, max=high)

    def _theta(self, posterior: Posterior) -> Float[Tensor, " p"]:
        return posterior.linearised.theta if posterior.expansion is None else posterior.expansion.theta

    def _record(self, state: _State, share: float) -> EMStep:
        each = self._gamma(state)
        at = state.posterior.expansion
        dead = f"{state.scaling.n_dead} parameters without curvature" if state.scaling.n_dead else ""
        return EMStep(
            tuple(state.scaling.alphas.tolist()),
            tuple(noise_of(state.posterior).tolist()),
            tuple(each.mean(0).tolist()),
            tuple((each.std(0) / len(each) ** 0.5).tolist()),
            state.change,
            state.solved.residual,
            at.search.relative_gradient if at is not None and at.search is not None else 0.0,
            state.solved.n_products,
            share,
            dead,
        )


def _solver(posterior: Posterior, H: GaussNewton, settings: EM, most_floats: int) -> Solver:
    """The requested solver; by default direct if a matrix fits into memory, else conjugate gradients."""
    rows, p = posterior.n_data * posterior.linearised.k, posterior.layout.p
    if settings.solver is None and rows * p <= most_floats and min(rows, p) <= MOST_DENSE:
        return Direct.of(posterior, H.jacobian.source)
    n_parts = len(posterior.part_scales)
    if isinstance(settings.solver, SGD):
        return StochasticGradients(H, n_parts, (), settings.solver, posterior.n_data)
    if isinstance(settings.solver, CG):
        return ConjugateGradients(H, n_parts, (), settings.solver)
    rank = Nystrom().affordable(p, n_parts, most_floats)
    sketch = Nystrom(rank).whitened(H, n_parts, posterior.prior.P0) if rank else ()
    return ConjugateGradients(H, n_parts, tuple(sketch), None)


def _products(posterior: Posterior, source: Source) -> GaussNewton:
    jacobian = DataJacobian.of(posterior.linearised, source)
    return GaussNewton(jacobian, posterior.likelihood, posterior.sites, posterior.fisher, lambda trace: trace.outputs)
