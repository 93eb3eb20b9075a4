"""From the arguments of a loop to the loss of a batch and the data; whatever can be refused is refused here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lapwing.data import Columns
from lapwing.network.module import check_module, unwrapped
from lapwing.runtime import distributed
from lapwing.runtime.arguments import counted, seeded
from lapwing.train.batch_loss import BatchLoss
from lapwing.train.settings import Settings
from lapwing.train.stream import Stream

_LOOP = tuple(Settings.__dataclass_fields__)


def prepared(what: str, make: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, Stream, torch.Generator]:
    """The loss of a batch, the data, and what random numbers are drawn with."""
    model = given["model"]
    check_module(what, model)
    draws = distributed.rank_generator(seeded(given["generator"]))
    stream = Stream.of(given["data"], Columns.of(given["inputs"], given["targets"]), given["batch_size"])
    n_data = given["n_data"]
    n_data = sum(distributed.gathered(stream.n_data())) if n_data is None else counted("n_data", n_data, "datum")
    x, y = stream.batches.first_on_any_rank()
    loss: BatchLoss = make(
        unwrapped(model),
        given["likelihood"],
        n_data,
        beta=given["beta"],
        prior=given["prior"],
        params=given["params"],
        generator=draws,
        inputs=given["inputs"],
        targets=given["targets"],
        example=x,
    )
    loss.look_at(x)
    loss.check_targets(x, y)
    return loss, stream, draws


def bound_to(word: str, loss: BatchLoss, facts: dict[str, Any]) -> dict[str, Any]:
    """What an unfinished run must have in common with the one that goes on with it."""
    assert loss.look is not None
    return {"method": word, "beta": loss.beta, "likelihood": type(loss.look.family).__name__, **facts}


def picked(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _LOOP}
