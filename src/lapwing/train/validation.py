"""What is measured on held-out data after an epoch: of the network at the means, in eval mode."""

from __future__ import annotations

import torch

from lapwing.data import Batches
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.runtime.sandbox import borrowed, random_state_kept
from lapwing.train.batch_loss import BatchLoss
from lapwing.train.fisher import Outputs


def measured(loss: BatchLoss, data: Batches) -> dict[str, float]:
    """NLL per likelihood term that has a label; the accuracy of classes; the root mean squared error of a Gaussian."""
    nll, right, squares, n = 0.0, 0.0, 0.0, 0
    outputs: Outputs | None = None
    with random_state_kept(), borrowed(loss.model), torch.no_grad():
        for x, y in data:
            outputs = loss.observed(x, y)
            family, f, labels = outputs.family, outputs.f, outputs.y
            nll -= float(outputs.log_lik().double())
            n += f.shape[0] * f.shape[1]
            if isinstance(family, Categorical):
                counted = labels != family.ignore_index
                n -= int((~counted).sum())
                right += float((counted & (f.argmax(-1) == labels)).sum())
            elif isinstance(family, Bernoulli):
                right += float(((f > 0) == (labels > 0.5)).double().mean(-1).sum())
            elif isinstance(family, Gaussian):
                squares += float((f.double() - labels.double()).square().mean(-1).sum())
    assert outputs is not None  # data without a batch were refused
    found = {"nll": nll / max(n, 1)}
    if isinstance(outputs.family, Categorical | Bernoulli):
        found["accuracy"] = right / max(n, 1)
    if isinstance(outputs.family, Gaussian):
        found["rmse"] = (squares / max(n, 1)) ** 0.5
    return found
