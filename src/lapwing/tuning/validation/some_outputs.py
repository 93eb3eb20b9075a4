"""Select some of the outputs of held-out data, if a datum has too many to compare scales on all of them.

A row of J needs one backward pass, so a thousand classes or pixels need a thousand. A few hundred likelihood terms are
enough to choose a scale and a temperature; of the classes of a term, those that matter are the most probable ones and
the label. Other classes keep the network's logits, and are assumed to vary like the selected ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.likelihoods import Categorical, Likelihood, Sites
from lapwing.network.jacobian import Jacobian
from lapwing.network.linearised import Trace
from lapwing.runtime.arguments import seeded

MOST_CLASSES = 8  # classes of a likelihood term whose covariance is computed
MOST_SITES = 16  # likelihood terms per datum; more from the same image or sequence add little


@dataclass(frozen=True, eq=False)
class SelectedOutputs:
    """The selected entries of the flat outputs of some data, and their targets."""

    index: Int[Tensor, "n t c"]  # indices into the K outputs of each datum
    rest: Int[Tensor, "n t r"]  # the other classes of the same terms
    y: Tensor  # encoded, as indices into the selected outputs

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sites(self) -> Sites:
        return Sites(tuple(self.index.shape[1:]))

    def rows(self, trace: Trace) -> Jacobian:
        """The rows of J at the selected outputs."""
        flat = self.index.flatten(1)
        one_hot = trace.f.new_zeros(len(self), trace.f.shape[1], flat.shape[1])
        return trace.rows(one_hot.scatter_(1, flat[:, None], 1.0))

    def of(self, f: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n t c"], Float[Tensor, "n t r"]]:
        """The selected outputs, and the rest."""
        return tuple(f.gather(1, at.flatten(1)).reshape(at.shape) for at in (self.index, self.rest))  # type: ignore

    def data(self, part: slice) -> SelectedOutputs:
        return SelectedOutputs(self.index[part], self.rest[part], self.y[part])


def plain(likelihood: Likelihood) -> Likelihood:
    """Without class weights, which are for training."""
    return replace(likelihood, weight=None) if isinstance(likelihood, Categorical) else likelihood


def reduced(likelihood: Likelihood) -> Likelihood:
    """The likelihood of the selected outputs, with classes on the last axis."""
    return replace(likelihood, class_axis=-1, weight=None) if isinstance(likelihood, Categorical) else likelihood


def chosen(likelihood: Likelihood, f: Float[Tensor, "n k"], y: Any, sites: Sites, n_terms: int) -> SelectedOutputs:
    """Random terms of every datum, labelled ones first; of the classes, the most probable ones and the label."""
    n, k = f.shape
    places = sites.split(torch.arange(k, device=f.device)[None])[0]  # (T, C) → K
    encoded = likelihood.encode(y, sites, n).to(f.device)
    if not isinstance(likelihood, Categorical):  # every output is a term of its own
        at = _random(n, k, f.device).topk(min(k, n_terms * MOST_CLASSES), dim=1).indices[:, None]
        index = places.flatten()[at]
        return SelectedOutputs(index, index[..., :0], encoded.flatten(1).gather(1, at[:, 0])[:, None])
    labelled = encoded != likelihood.ignore_index
    term = (_random(n, sites.t, f.device) + labelled).topk(min(sites.t, n_terms), dim=1).indices  # (n, t)
    label, counted = encoded.gather(1, term), labelled.gather(1, term)
    logits = sites.split(f)[torch.arange(n, device=f.device)[:, None], term]  # (n, t, C)
    first = logits.scatter(-1, torch.where(counted, label, logits.argmax(-1))[..., None], torch.inf)
    order = first.argsort(dim=-1, descending=True)  # the label comes first
    taken, rest = order[..., :MOST_CLASSES], order[..., MOST_CLASSES:]
    index, others = (torch.take_along_dim(places[term], part, -1) for part in (taken, rest))
    return SelectedOutputs(index, others, torch.where(counted, 0, likelihood.ignore_index))


def _random(n: int, k: int, device: torch.device) -> Float[Tensor, "n k"]:
    return torch.rand(n, k, generator=seeded(None), dtype=torch.float64).to(device)
