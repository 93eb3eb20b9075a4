"""The findings of `diagnose()`: measurements of a posterior, whether they are a concern, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lapwing._types import Float, Tensor
from lapwing.curvature import Kron, Structure
from lapwing.linear_model import Refinement
from lapwing.posterior.trained import Trained

NOISE_BOUNDS = (1e-3, 1e3)  # bounds on the noise, relative to the network's root mean squared residual
TRUST_MARGIN = 0.03  # nats per datum by which training data may be predicted worse than by the network
PRECISION_BOUNDS = (1e-10, 1e12)  # bounds on a prior precision, relative to the mean curvature in its group


_CLOSE = "The weights are close to a mode."


@dataclass(frozen=True)
class Finding:
    """A measurement, whether it is a concern, and advice."""

    name: str
    value: str
    concern: bool
    advice: str

    def __str__(self) -> str:
        return f"{'!' if self.concern else ' '} {self.name}: {self.value}. {self.advice}".rstrip()

    @staticmethod
    def of_untuned() -> Finding:
        advice = "The size of the error bars depends on it: lw.tune(posterior, train_loader)."
        return Finding("hyperparameters", "the defaults of lw.fit, not tuned", True, advice)

    @staticmethod
    def of_gradient(total: float, data: float, prior: float, remedy: str) -> Finding:
        """The posterior is centred at θ*, which should be a mode: ∇ log p(D, θ) = 0.

        Without a `remedy` it has been applied already, and a large gradient is no concern.
        """
        # Relative to the two terms, which cancel at a mode; 1e-300 avoids 0/0.
        far = total > 0.1 * (data + prior + 1e-300)
        concern = far and bool(remedy)
        advice = f"The weights are not at a mode of this prior and likelihood. {remedy}" if far else _CLOSE
        return Finding(
            "gradient norm at the weights", f"{total:.3g} (data {data:.3g}, prior {prior:.3g})", concern, advice
        )

    @staticmethod
    def of_weight_decay(implied: float, precision: float) -> Finding:
        """At a minimum of loss + ½ λ ‖θ‖² the gradient of the data is λ θ, so λ = θᵀ∇log p(D|θ) / ‖θ‖²."""
        if implied <= 0:
            words, concern = "none: the loss still falls as the weights grow or shrink as a whole", False
            advice = "The weights were trained without weight decay, or not to a minimum."
        else:
            ratio = precision / implied
            words = f"{implied:.3g} (weight decay times N), prior precision {precision:.3g}"
            concern = not 0.1 <= ratio <= 10
            advice = "The weights were trained under another prior than this one." if concern else ""
        return Finding("weight decay implied by the weights", words, concern, advice)

    @staticmethod
    def of_linear_mode(
        distance: float, norm: float, relative_gradient: float | None, converged: bool, validated: bool
    ) -> Finding:
        how = "in closed form" if relative_gradient is None else f"relative gradient {relative_gradient:.1g}"
        far = distance > 0.3 * norm and not validated
        advice = "The trained weights are far from it: the linear model's mean may be the better, or much the worse. "
        advice = advice + "Let held-out data choose: validation=..." if far else ""
        if not converged:
            advice = "It was not found to full accuracy within the passes allowed. " + advice
        return Finding("linear mode", f"{distance:.3g} from the weights, whose norm is {norm:.3g} ({how})", far, advice)

    @staticmethod
    def of_moved_mean(distance: float, norm: float, by_held_out: bool) -> Finding:
        """Predictions are f + J (μ − θ*), no longer centred at the network's outputs."""
        value = f"moved by {distance:.3g} from the weights, whose norm is {norm:.3g}"
        value += ", as held-out data asked for" if by_held_out else ", as asked for"
        advice = "Predictions are no longer around the network's own outputs"
        advice += ', where tune(..., mean="network") keeps them.' if by_held_out else "."
        return Finding("mean of the predictions", value, False, advice)

    @staticmethod
    def of_refinement(report: Refinement) -> Finding:
        bound = "" if report.elbo is None else f", ELBO {report.elbo:.6g}"
        value = (
            f'by="{report.by}" in {report.n_steps} steps and {report.n_passes} passes, gradient '
            f"{report.gradient_before:.3g} before and {report.gradient:.3g} after{bound}"
        )
        advice = "" if report.converged else "It stopped before convergence: the mean is not at the optimum."
        return Finding("refinement", value, not report.converged, advice)

    @staticmethod
    def of_training(trained: Trained) -> Iterator[Finding]:
        """How far the variances have moved from their start and to the prior's, and the bound on log p(D)."""
        yield Finding("training", f"by {trained.by}, KL times {trained.beta:.3g}", False, "")
        concern = trained.unmoved > 0.5
        advice = (
            "Training ended before the variances had moved: more epochs, a larger learning rate, or a larger "
            "multiplier of theirs."
            if concern
            else ""
        )
        yield Finding("variances where they started", f"{trained.unmoved:.1%}", concern, advice)
        concern = trained.reverted > 0.9
        advice = (
            "The data say next to nothing about the weights: a smaller network or β, or more data." if concern else ""
        )
        yield Finding("variances at the prior's", f"{trained.reverted:.1%}", concern, advice)
        if trained.bound is not None:
            value = f"ELBO {trained.elbo:.6g}: expected log likelihood {trained.bound.expected_log_lik:.6g}"
            tempered = "" if trained.beta == 1 else "Training maximised another bound, with the KL tempered by β."
            yield Finding("bound on log p(D)", f"{value}, KL {trained.bound.kl:.6g}", False, tempered)

    @staticmethod
    def of_average(in_expectation: bool, validated: bool) -> Iterator[Finding]:
        if in_expectation and validated:
            advice = "Held-out data chose the scale."
            yield Finding("curvature", "averaged over the posterior of the outputs", False, advice)
        elif in_expectation:
            advice = (
                "At the network's own outputs it nearly vanishes, and the evidence with it is unreliable. The "
                "average is better, but training data cannot tell whether the network is as sure as it should be; "
                "held-out data can: lw.tune(posterior, validation=...)."
            )
            yield Finding("curvature", "averaged over the posterior of the outputs", True, advice)

    @staticmethod
    def of_effective_dimension(layers: dict[str, tuple[float, int]]) -> Finding:
        gamma, p = sum(g for g, _ in layers.values()), sum(n for _, n in layers.values())
        listed = ", ".join(f"{name} {g:.3g} of {n}" for name, (g, n) in list(layers.items())[:12])
        listed += ", …" if len(layers) > 12 else ""
        concern = gamma > 0.9 * p
        advice = "The data determine nearly every parameter: the network may be too small." if concern else ""
        return Finding("effective dimension", f"{gamma:.4g} of {p} ({listed})", concern, advice)

    @staticmethod
    def of_found_groups(names: tuple[str, ...], reasons: tuple[str, ...]) -> Iterator[Finding]:
        if len(reasons) > 1:
            listed = "; ".join(f"{n} ({reason})" if reason else n for n, reason in zip(names, reasons, strict=True))
            advice = 'Found by looking at the network; groups="one" shares one precision.'
            yield Finding("prior groups", listed, False, advice)

    @staticmethod
    def of_training_check(predictive: float, network: float, n: int, validated: bool) -> Finding:
        """Data of the fit should not be predicted much worse than by the network."""
        worse = predictive - network > TRUST_MARGIN
        value = f"NLL of {n} training data {predictive:.3g}, the network's {network:.3g}"
        if worse and validated:
            advice = "Held-out data chose the scale: on it the network is less confident than on its training data."
            return Finding("predictions of training data", value, False, advice)
        concern = worse
        advice = (
            "The evidence is unreliable here: with its prior even training data are predicted much worse "
            "than by the network alone. Confident classifiers and noise far below the network's own residuals do this. "
            "Choose the scale on held-out data: lw.tune(posterior, validation=...)."
            if concern
            else "The error bars agree with the training data."
        )
        return Finding("predictions of training data", value, concern, advice)

    @staticmethod
    def of_condition(number: float) -> Finding:
        # float64 has 16 digits, of which solves lose log₁₀ of the condition number.
        concern = number > 1e13
        advice = "Raise the prior precision: digits are being lost." if concern else ""
        return Finding("condition number of the precision, at most", f"{number:.3g}", concern, advice)

    @staticmethod
    def of_groups(
        names: tuple[str, ...], precisions: Float[Tensor, " g"], low: Float[Tensor, " g"], high: Float[Tensor, " g"]
    ) -> Iterator[Finding]:
        advice = (
            "Check the group, or use fewer groups."
            if len(names) > 1
            else "Give a precision of your own: posterior.with_prior(...)."
        )
        for name, value, least, most in zip(names, precisions.tolist(), low.tolist(), high.tolist(), strict=True):
            if value <= least * 1.01 or value >= most / 1.01:
                side = "upper bound: the data switch it off" if value > least * 2 else "lower bound: no prior is left"
                yield Finding(f"prior group '{name}'", f"{value:.3g}, at the {side}", True, advice)

    @staticmethod
    def of_unused(names: list[str]) -> Iterator[Finding]:
        if names:
            listed = ", ".join(names[:5]) + ("…" if len(names) > 5 else "")
            yield Finding("tensors without effect on the outputs", listed, False, "Their posterior is their prior.")

    @staticmethod
    def of_selection(words: str, without_curvature: int, k: int) -> Iterator[Finding]:
        """Selected weights without effect on the data waste memory."""
        if words:
            value = f"{words}; of those taken, {without_curvature:,} have no curvature"
            concern = without_curvature > 0.1 * k
            advice = "Fewer weights, or another score, would give the same result." if concern else ""
            yield Finding("subnetwork", value, concern, advice)

    @staticmethod
    def of_structure(structure: str, why: str) -> Finding:
        return Finding("structure", f"{structure} ({why})", False, "")

    @staticmethod
    def of_fisher(kind: str) -> Finding:
        return Finding("kind of curvature", kind, False, "")

    @staticmethod
    def of_functions(n_outputs: int, n_draws: int) -> Finding:
        """Averages of S antithetic draws: the relative standard error of a variance is √(4/S)."""
        value = f"averages of {n_draws} draws of the linearised function, as a datum has {n_outputs:,} outputs"
        advice = (
            f"A variance has a relative standard error of about {(4 / n_draws) ** 0.5:.0%}. "
            'link="mc" takes the exact covariance of every likelihood term, at a row of J for each output.'
        )
        return Finding("predictions", value, False, advice)

    @staticmethod
    def of_tensors_without_rule(treated: list[tuple[str, str]]) -> Iterator[Finding]:
        if treated:
            kinds = dict.fromkeys(how for _, how in treated)
            listed = "; ".join(f"{how}: {', '.join(n for n, h in treated if h == how)}" for how in kinds)
            yield Finding(
                "tensors without a Kronecker rule", listed, False, "Nothing is approximated in their own block."
            )

    @staticmethod
    def of_leading(kept: list[tuple[int, int, float]], structure: Structure) -> Iterator[Finding]:
        """Sides, directions and shares of the trace of factors of which only leading directions are kept."""
        if not kept or not isinstance(structure, Kron):
            return
        sides, directions, shares = zip(*kept, strict=True)
        counts = " to ".join(f"{n:,}" for n in dict.fromkeys((min(directions), max(directions))))
        value = (
            f"{len(kept)} of width {min(sides):,} or more, kept as {counts} directions, which hold at least "
            f"{min(shares):.1%} of the trace, and a multiple of the identity for the rest"
        )
        advice = f"Kron(rank=...) above {structure.rank:,} keeps more directions, Kron(large=None) whole factors."
        reached = min(shares) >= structure.energy
        yield Finding("low-rank factors", value, False, "" if reached else advice)

    @staticmethod
    def of_rows(ruled: tuple[str, ...], rest: tuple[str, ...], vectorised: bool) -> Finding:
        how = "vectorised" if vectorised else "one datum at a time (torch.func cannot batch this model)"
        value = f"{len(ruled)} layers by captured factors"
        value += f", {len(rest)} tensors by reverse mode, {how}" if rest else ""
        return Finding("Jacobian rows", value, bool(rest) and not vectorised, "All are exact; only the speed differs.")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """All findings; concerns are printed first."""

    findings: tuple[Finding, ...]

    @property
    def concerns(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.concern)

    def __repr__(self) -> str:
        return "\n".join(str(f) for f in sorted(self.findings, key=lambda f: not f.concern))
