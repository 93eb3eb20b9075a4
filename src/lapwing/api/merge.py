"""lw.merge: join posteriors that were fitted on disjoint data. H = Σ_k H_k + P₀; the prior counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from lapwing.errors import InputError, InputTypeError, StructureError
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.posterior import Posterior
from lapwing.runtime.sandbox import plain_tensors
from lapwing.storage.binding import same_networks


@plain_tensors()
def merge(posteriors: Sequence[Posterior]) -> Posterior:
    """The posterior of all the data: that of one fit on their union, up to rounding.

    Curvatures and statistics add, and the prior counts once. All posteriors must have the same network, parameters,
    prior, likelihood, structure and kind of Fisher. Their data must be disjoint, which is not checked: a datum in two
    of them counts twice. Estimated noise is re-estimated from all the data.
    """
    first, *others = _checked(posteriors)
    if not others:
        return first
    joined = first.with_estimate(first.estimate.joined([other.estimate for other in others]))
    likelihood = _likelihood(first, others, joined.estimate.statistics.likelihood)
    chunk_floats = min(p.chunk_floats for p in (first, *others))
    # A tuning history is kept only if all posteriors share it.
    same_path = all(other.history == first.history for other in others)
    untuned = all(p.untuned for p in (first, *others))
    history = first.history if same_path else ()
    return replace(joined, likelihood=likelihood, chunk_floats=chunk_floats, history=history, untuned=untuned)


def _checked(posteriors: Any) -> list[Posterior]:
    """The posteriors as a list; raises if they cannot be merged."""
    if isinstance(posteriors, Posterior) or not isinstance(posteriors, list | tuple):
        raise InputTypeError(f"merge: expected a list of posteriors, got {type(posteriors).__name__}.")
    if not posteriors:
        raise InputError("merge: expected at least one posterior, got an empty list.")
    for k, each in enumerate(posteriors):
        if not isinstance(each, Posterior):
            raise InputTypeError(f"merge: number {k} of the list is a {type(each).__name__}, not a Posterior.")
        each.check_unrefined("merge")
    first, *others = posteriors
    for k, other in enumerate(others, 1):
        difference = _difference(first, other)
        if difference is not None:
            raise StructureError(
                f"merge: posteriors 0 and {k} do not go together: {difference}. Fit all parts of the data with "
                "the same arguments, merge, and tune afterwards."
            )
    if others and not first.structure.additive:
        raise StructureError(
            f"merge: {type(first.structure).__name__} curvatures of different data do not add up exactly "
            '(their eigenvectors are others). Fit once on all the data, or use structure="kron" or "full".'
        )
    return list(posteriors)


def _difference(a: Posterior, b: Posterior) -> str | None:
    """The first difference between two posteriors other than their data; None if there is none."""
    same = {
        "other parameters are inferred": a.layout == b.layout,
        f"the structure is {a.structure} and {b.structure}": a.structure == b.structure,
        "the kind of curvature is another": type(a.fisher) is type(b.fisher),
        f"the likelihood is {type(a.likelihood).__name__} and {type(b.likelihood).__name__}, or has other options": (
            _same_likelihood(a.likelihood, b.likelihood)
        ),
        "the likelihood scale is another": bool(a.likelihood_scale == b.likelihood_scale),
        "the outputs have another shape": a.linearised.datum_shape == b.linearised.datum_shape,
        "the prior is another": _same_prior(a, b),
        "predictions are read off in another way (mean, temperature or link, chosen by tuning)": _same_readout(a, b),
        "layers are differentiated by other rules": list(a.linearised.ruled) == list(b.linearised.ruled),
    }
    words = next((words for words, agrees in same.items() if not agrees), None)
    if words is None:
        words = same_networks(a.linearised.network, b.linearised.network)
        return None if words is None else f"they are of different networks ({words})"
    return words


def _same_likelihood(a: Likelihood, b: Likelihood) -> bool:
    if isinstance(a, Gaussian) and isinstance(b, Gaussian):
        options = [(g.per_output, g.class_axis, g.estimated) for g in (a, b)]
        return options[0] == options[1] and (a.estimated or torch.equal(a.resolved(), b.resolved()))
    return type(a) is type(b) and a == b


def _same_prior(a: Posterior, b: Posterior) -> bool:
    return a.prior.group_names == b.prior.group_names and all(
        torch.equal(getattr(a.prior, name), getattr(b.prior, name)) for name in ("precisions", "index", "mean")
    )


def _same_readout(a: Posterior, b: Posterior) -> bool:
    values = ([getattr(p.readout, f.name) for f in fields(p.readout)] for p in (a, b))
    return all(_equal(x, y) for x, y in zip(*values, strict=True))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.equal(x, y)
    return type(x) is type(y) and x == y


def _likelihood(first: Posterior, others: Sequence[Posterior], statistics: torch.Tensor) -> Likelihood:
    """The likelihood of all the data. Raises if they were tuned to different noise levels."""
    likelihood = first.likelihood
    if not isinstance(likelihood, Gaussian) or not likelihood.estimated:
        return likelihood
    tuned = any(posterior.history for posterior in (first, *others))
    if not tuned:
        return likelihood.estimate(statistics)
    for k, other in enumerate(others, 1):
        assert isinstance(other.likelihood, Gaussian)
        if not torch.equal(likelihood.resolved(), other.likelihood.resolved()):
            raise StructureError(
                f"merge: posteriors 0 and {k} were tuned to different noise levels. Merge first, tune afterwards."
            )
    return likelihood
