"""Rank models by their evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from lapwing.errors import InputError, InputTypeError, warn
from lapwing.posterior import Posterior, Run
from lapwing.runtime.sandbox import plain_tensors


@dataclass(frozen=True)
class Rank:
    """A model in a comparison."""

    name: str
    log_evidence: float
    behind: float  # difference to the best, in nats
    probability: float  # posterior probability of the model, under equal prior probabilities
    n_parameters: int
    effective_dimension: float
    structure: str
    evidence_at: str  # "linear mode", "trained weights", or "lower bound"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Models by decreasing evidence; print it for a table."""

    ranks: tuple[Rank, ...]
    caveats: tuple[str, ...]  # why the numbers may not be comparable

    @property
    def best(self) -> Rank:
        return self.ranks[0]

    def __repr__(self) -> str:
        head = ("model", "log evidence", "behind", "probability", "parameters", "effective", "structure", "evidence at")
        body = [
            (
                r.name,
                f"{r.log_evidence:.2f}",
                f"{r.behind:.2f}",
                f"{r.probability:.3f}",
                f"{r.n_parameters:,}",
                f"{r.effective_dimension:.1f}",
                r.structure,
                r.evidence_at,
            )
            for r in self.ranks
        ]
        widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]
        return "\n".join([*lines, *(f"! {caveat}" for caveat in self.caveats)])


@plain_tensors()
def compare(posteriors: Sequence[Posterior] | Mapping[str, Posterior]) -> Comparison:
    """Rank models of the same data by log p(D): a list, or a mapping from names, of posteriors or runs of lw.train.

    The evidence is comparable across architectures, sizes and priors. It is not comparable across structures, which
    approximate the determinant differently, nor between the trained weights and the linear mode; a warning says so.
    For posteriors from lw.train the ELBO is used, a lower bound on log p(D); a Laplace evidence is not a bound. If
    there are both, bounds are ranked separately, after the others.
    """
    named = _named(posteriors)
    caveats = tuple(_caveats(list(named.values())))
    for caveat in caveats:
        warn(caveat)
    fitted = {name: p for name, p in named.items() if p.trained is None}
    trained = {name: p for name, p in named.items() if p.trained is not None}
    return Comparison((*_ranked(fitted), *_ranked(trained)), caveats)


def _ranked(named: Mapping[str, Posterior]) -> list[Rank]:
    """Ranks of comparable numbers, best first."""
    scores = {name: _score(p) for name, p in named.items()}
    top = max(scores.values(), default=0.0)
    # Relative to the best model, as evidences themselves underflow.
    total = sum(exp(score - top) for score in scores.values())
    ranks = [
        Rank(
            name,
            scores[name],
            top - scores[name],
            exp(scores[name] - top) / total,
            p.layout.p,
            float(p.effective_dimension().detach().sum()),
            p.structure.described,
            _point(p),
        )
        for name, p in named.items()
    ]
    return sorted(ranks, key=lambda rank: rank.behind)


def _named(posteriors: Any) -> dict[str, Posterior]:
    if isinstance(posteriors, Posterior) or not isinstance(posteriors, Sequence | Mapping):
        came = type(posteriors).__name__
        raise InputTypeError(f"compare: expected a list of posteriors or a mapping from names to them, got {came}.")
    given = dict(posteriors) if isinstance(posteriors, Mapping) else {str(i): p for i, p in enumerate(posteriors)}
    named = {name: value.posterior if isinstance(value, Run) else value for name, value in given.items()}
    if not named:
        raise InputError("compare: expected at least one posterior, got none.")
    for name, value in named.items():
        if not isinstance(value, Posterior):
            raise InputTypeError(f"compare: entry '{name}' is a {type(value).__name__}, not a Posterior from lw.fit.")
    counts = {name: p.n_data for name, p in named.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{name}' {n}" for name, n in counts.items())
        raise InputError(f"compare: evidences are of the same data only, but the numbers of data differ: {listed}.")
    kinds = {type(p.likelihood).__name__ for p in named.values()}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        raise InputError(f"compare: evidences are of the same data only, but the likelihoods are {listed}.")
    return {str(name): p for name, p in named.items()}


def _score(posterior: Posterior) -> float:
    return float(posterior.log_evidence().detach()) if posterior.trained is None else posterior.trained.elbo


def _point(posterior: Posterior) -> str:
    if posterior.trained is not None:
        return "lower bound"
    return "trained weights" if posterior.expansion is None else "linear mode"


def _caveats(posteriors: list[Posterior]) -> list[str]:
    """Reasons why the numbers may not be comparable."""
    caveats = []
    structures = sorted({p.structure.described for p in posteriors if p.trained is None})
    if len(structures) > 1:
        caveats.append(
            f"The posteriors have different structures ({', '.join(structures)}): their log determinants are "
            "approximated differently, and differences of the evidence may be differences of the approximation."
        )
    tempered = [p.trained.beta for p in posteriors if p.trained is not None and p.trained.beta != 1]
    if tempered:
        caveats.append(
            f"The bound of a posterior that was trained with β = {tempered[0]:.3g} is at β = 1, which is not what was "
            "maximised: another with the same network would have a higher one."
        )
    if 0 < sum(p.trained is not None for p in posteriors) < len(posteriors):
        caveats.append(
            "Some numbers are lower bounds on log p(D) (ELBO), others Laplace approximations of it, which may lie on "
            "either side: they are ranked apart."
        )
    points = sorted({_point(p) for p in posteriors if p.trained is None})
    if len(points) > 1:
        caveats.append(
            f"The evidence is taken at different points ({' and '.join(points)}): tune all models with the same mode."
        )
    if len({p.estimate.in_expectation for p in posteriors}) > 1:
        caveats.append(
            "The curvature of some models was averaged over their posterior, that of others is the network's: tune all "
            "with the same curvature_at."
        )
    return caveats
