"""Sums and exchanges over ranks. Every rank adds in the order of ranks, so all of them hold the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.errors import InputError, RankError
from lapwing.runtime.distributed.call import Call, current, many
from lapwing.runtime.distributed.packing import packed, unpacked

T = TypeVar("T")
_FEW = 1 << 14  # entries that everyone sends to everyone: one round instead of two


def total(value: Tensor) -> Tensor:
    """Σ over ranks. Each adds up a share of the entries, so the traffic is twice the tensor for any number of them."""
    if not many():
        return value
    with current() as call:
        call.meet(f"a sum of shape {tuple(value.shape)}, {value.dtype}")
        flat = _placed(value.detach()).reshape(-1)
        if not flat.numel():
            return value
        summed = _sum_of_few(call, flat) if flat.numel() <= _FEW else _sum_by_shares(call, flat)
    return summed.reshape(value.shape).to(value.device)


def sums(values: Sequence[Tensor] | None) -> list[Tensor]:
    """Σ over ranks of several float64 tensors in one exchange; a rank without data has none, which counts as zeros."""
    if not many():
        assert values is not None  # data that are nobody's have been refused
        return list(values)
    said = gathered(None if values is None else [tuple(v.shape) for v in values])
    shapes = next((each for each in said if each is not None), None)
    if shapes is None:
        raise InputError("The data gave no batch on any rank: the loader or data set is empty.")
    own = [torch.zeros(shape, dtype=torch.float64) for shape in shapes] if values is None else values
    whole = total(torch.cat([_placed(v.detach()).double().reshape(-1) for v in own]) if own else torch.zeros(0))
    parts = whole.split([v.numel() for v in own])
    return [part.reshape(v.shape).to(v.device) for part, v in zip(parts, own, strict=True)]


def gathered(value: T) -> list[T]:
    """Everyone's object, in the order of ranks."""
    if not many():
        return [value]
    with current() as call:
        call.meet("an exchange of objects")
        own = _placed(packed(value))
        sizes = [int(n) for n in _all_gather(call, _placed(torch.tensor([len(own)])))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=own.device)
        padded[: len(own)] = own
        return [unpacked(flat[:n]) for flat, n in zip(_all_gather(call, padded), sizes, strict=True)]


def first_of(source: Callable[[], Iterable[T]]) -> T:
    """The first item of all data: that of the lowest rank that has any. Everyone sees it, with or without data."""
    item = next(iter(source()), None)
    if not many():
        if item is None:
            raise InputError("There are no data: the loader or data set is empty.")
        return item
    holders = [r for r, has in enumerate(gathered(item is not None)) if has]
    if not holders:
        raise InputError("The data gave no batch on any rank: the loader or data set is empty.")
    return cast(T, broadcast(item, holders[0]))


def broadcast(value: T, source: int) -> T:
    """The object of one rank, for everyone."""
    if not many():
        return value
    with current() as call:
        call.meet(f"an object from rank {source}")
        own = _placed(packed(value)) if call.rank == source else None
        size = _placed(torch.tensor([0 if own is None else len(own)]))
        call.wait_for(dist.broadcast(size, source, async_op=True))
        flat = torch.empty(int(size), dtype=torch.uint8, device=size.device) if own is None else own
        call.wait_for(dist.broadcast(flat, source, async_op=True))
        return value if call.rank == source else unpacked(flat)


def same_everywhere(what: str, value: Any) -> None:
    """Refuse to go on when ranks differ in something small that must be the same."""
    values = gathered(value)
    for r, other in enumerate(values):
        if other != values[0]:
            raise RankError(f"{what} on rank {r} differs from that on rank 0: {other} instead of {values[0]}.")


def shared_work(costs: Sequence[float], work: Callable[[int], Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Tensors of given shapes (float64), each made by one rank and sent to all; the dearest are dealt out first."""
    with current() as call:
        owners = _dealt(costs, call.world)
        made = {i: _placed(work(i)) for i, owner in enumerate(owners) if owner == call.rank}
        call.meet(f"{len(costs)} shared pieces of work")
        results = []
        for i, (owner, shape) in enumerate(zip(owners, shapes, strict=True)):
            piece = made[i].contiguous() if i in made else torch.empty(shape, dtype=torch.float64, device=_device())
            call.wait_for(dist.broadcast(piece, owner, async_op=True))
            results.append(piece)
    return results


def _dealt(costs: Sequence[float], n: int) -> list[int]:
    """Who does what: each piece, from the dearest on, goes to whoever has least to do."""
    loads, owners = [0.0] * n, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def _sum_of_few(call: Call, flat: Tensor) -> Tensor:
    return reduce(torch.add, _all_gather(call, flat))


def _sum_by_shares(call: Call, flat: Tensor) -> Tensor:
    share = -(-flat.numel() // call.world)
    padded = torch.zeros(share * call.world, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    received = torch.empty_like(padded)
    call.wait_for(dist.all_to_all_single(received, padded, async_op=True))
    own = reduce(torch.add, received.chunk(call.world))
    return torch.cat(_all_gather(call, own))[: flat.numel()]


def _all_gather(call: Call, tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(call.world)]
    call.wait_for(dist.all_gather(parts, tensor.contiguous(), async_op=True))
    return parts


def _device() -> torch.device:
    """Where the backend wants its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _placed(tensor: Tensor) -> Tensor:
    return tensor.to(_device())
