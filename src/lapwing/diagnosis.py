"""What may be wrong with a posterior, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lapwing._types import Float, Tensor

NOISE_BOUNDS = (1e-3, 1e3)  # of a noise, relative to the root mean squared residual of the network
PRECISION_BOUNDS = (1e-10, 1e12)  # of a prior precision, relative to the mean curvature in its group


@dataclass(frozen=True)
class Finding:
    """One measurement, whether it is a concern, and what to do."""

    name: str
    value: str
    concern: bool
    advice: str

    def __str__(self) -> str:
        return f"{'!' if self.concern else ' '} {self.name}: {self.value}. {self.advice}".rstrip()

    @staticmethod
    def of_gradient(total: float, data: float, prior: float) -> Finding:
        """The posterior is centred on θ*, which should be a mode: ∇ log p(D, θ) = 0."""
        concern = total > 0.1 * (data + prior + 1e-300)
        advice = (
            "The weights are not at a mode of this prior and likelihood: the evidence at them is only indicative. "
            "Train longer, with weight decay equal to the prior precision over N."
            if concern
            else "The weights are close to a mode."
        )
        return Finding(
            "gradient norm at the weights", f"{total:.3g} (data {data:.3g}, prior {prior:.3g})", concern, advice
        )

    @staticmethod
    def of_condition(number: float) -> Finding:
        concern = number > 1e13
        advice = "Raise the prior precision: digits are being lost." if concern else ""
        return Finding("condition number of the precision, at most", f"{number:.3g}", concern, advice)

    @staticmethod
    def of_groups(
        names: tuple[str, ...], precisions: Float[Tensor, " g"], low: Float[Tensor, " g"], high: Float[Tensor, " g"]
    ) -> Iterator[Finding]:
        for name, value, least, most in zip(names, precisions.tolist(), low.tolist(), high.tolist(), strict=True):
            if value <= least * 1.01 or value >= most / 1.01:
                side = "upper bound: the data switch it off" if value > least * 2 else "lower bound: no prior is left"
                advice = "Check the group, or use fewer groups."
                yield Finding(f"prior group '{name}'", f"{value:.3g}, at the {side}", True, advice)

    @staticmethod
    def of_unused(names: list[str]) -> Iterator[Finding]:
        if names:
            listed = ", ".join(names[:5]) + ("…" if len(names) > 5 else "")
            yield Finding("tensors without effect on the outputs", listed, False, "Their posterior is their prior.")

    @staticmethod
    def of_structure(structure: str, why: str) -> Finding:
        return Finding("structure", f"{structure} ({why})", False, "")

    @staticmethod
    def of_loose(treated: list[tuple[str, str]]) -> Iterator[Finding]:
        if treated:
            kinds = dict.fromkeys(how for _, how in treated)
            listed = "; ".join(f"{how}: {', '.join(n for n, h in treated if h == how)}" for how in kinds)
            yield Finding(
                "tensors without a Kronecker rule", listed, False, "Nothing is approximated in their own block."
            )

    @staticmethod
    def of_rows(ruled: tuple[str, ...], rest: tuple[str, ...], vectorised: bool) -> Finding:
        how = "vectorised" if vectorised else "one datum at a time (torch.func cannot batch this model)"
        value = f"{len(ruled)} layers by captured factors"
        value += f", {len(rest)} tensors by reverse mode, {how}" if rest else ""
        return Finding("Jacobian rows", value, bool(rest) and not vectorised, "All are exact; only the speed differs.")


@dataclass(frozen=True)
class Diagnosis:
    """All findings; concerns first when printed."""

    findings: tuple[Finding, ...]

    @property
    def concerns(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.concern)

    def __str__(self) -> str:
        return "\n".join(str(f) for f in sorted(self.findings, key=lambda f: not f.concern))
