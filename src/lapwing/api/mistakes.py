"""Detect likely mistakes on the first batch. Each is only a warning, since the fit is well defined."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import warn
from lapwing.likelihoods import Bernoulli, Categorical, Likelihood, Sites
from lapwing.network.linearised import Linearised

_ROWS = (8, 256)  # rows tested first, and rows tested if those look like probabilities
_MOST_OUTPUTS = 1 << 22  # outputs computed at a time
_FEW_TOKENS = 3  # fewer labels than this may equal the tokens by chance
_SQUASHING = (nn.Softmax, nn.Softmax2d, nn.Sigmoid, nn.Hardsigmoid)


def warn_of_mistakes(linearised: Linearised, family: Likelihood, x: ModelInput, y: Tensor) -> None:
    """Warn about likely mistakes that the first batch (x, encoded y) shows."""
    if isinstance(family, Bernoulli | Categorical):
        shape = linearised.datum_shape_at(x)  # of this batch, where batches differ in length
        at_x = replace(linearised, datum_shape=shape, ragged=None)
        _warn_of_probabilities(at_x, family, Sites(shape, family.class_axis), x)
    if isinstance(family, Categorical):
        _warn_of_unshifted(family, x, y)


def _warn_of_probabilities(linearised: Linearised, family: Likelihood, sites: Sites, x: ModelInput) -> None:
    """Warn if outputs that should be logits look like probabilities."""
    look = _sum_to_one if isinstance(family, Categorical) else _between_zero_and_one
    for n in _ROWS:  # for nearly every model a few rows suffice to say no
        rows = x.rows(slice(0, min(n, x.n, max(1, _MOST_OUTPUTS // linearised.k))))
        with torch.no_grad():
            if not look(sites.split(linearised.outputs(rows))):
                return
    what, inverse = (
        ("every row is non-negative and sums to one", "softmax")
        if isinstance(family, Categorical)
        else ("all are between 0 and 1", "sigmoid")
    )
    warn(
        f"The model's outputs look like probabilities: {what}. Lapwing expects logits and applies the {inverse} "
        "itself; a second one makes predictions and error bars wrong. "
        f"Remove the last {inverse}{_squashing(linearised)}."
    )


def _sum_to_one(f: Float[Tensor, "n t c"]) -> bool:
    # In half precision, sums of probabilities deviate from 1 by more than 1e-4.
    tolerance = max(1e-4, 4 * torch.finfo(f.dtype).eps)
    return bool((f >= 0).all()) and bool(((f.double().sum(-1) - 1).abs() <= tolerance).all())


def _between_zero_and_one(f: Float[Tensor, "n t c"]) -> bool:
    # Constant outputs, such as those of a zero-initialised head, say nothing about a sigmoid.
    varied = len(f) >= _ROWS[0] and bool((f != f.reshape(-1)[0]).any())
    return varied and bool(((f >= 0) & (f <= 1)).all())


def _squashing(linearised: Linearised) -> str:
    """The last module of the network for the message, if it computes the probabilities."""
    *_, (path, last) = linearised.network.model.named_modules()
    return f", module '{path}' ({type(last).__name__})" if path and isinstance(last, _SQUASHING) else ""


def _warn_of_unshifted(family: Categorical, x: ModelInput, y: Tensor) -> None:
    """Warn if labels equal the input tokens wherever they count; those of a masked model differ at masked tokens."""
    tokens = x.kwargs.get("input_ids", x.args[0] if len(x.args) == 1 else None)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim < 2 or tokens.shape[1] < 2:
        return
    labels = y.reshape(-1)
    if tokens.numel() != labels.numel():
        return
    counted = labels != family.ignore_index
    few = int(counted.sum()) < _FEW_TOKENS
    if few or not torch.equal(labels[counted], tokens.reshape(-1).to(labels)[counted]):
        return
    warn(
        "The labels are the input tokens themselves. The outputs at a position are scored against the label of that "
        "position: Lapwing does not shift labels, as causal language models of Hugging Face do inside. If this model "
        "predicts the next token, shift them: "
        f"labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], {family.ignore_index})], dim=1)."
    )
