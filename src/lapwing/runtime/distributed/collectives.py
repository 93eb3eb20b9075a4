"""Collective operations: sum, gather, broadcast, division of work.

Sums are added in the order of ranks on every rank, so all ranks get bit-identical results; `dist.all_reduce` does not
promise that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.errors import InputError, RankError
from lapwing.runtime.distributed.call import Call, current, is_distributed
from lapwing.runtime.distributed.packing import packed, unpacked

T = TypeVar("T")
_SMALL = 1 << 14  # up to so many entries every rank sends all of them to every other: one round instead of two


def total(value: Tensor) -> Tensor:
    """All-reduce: the sum of `value` over ranks. Large tensors take a reduce-scatter and an all-gather: each rank sends
    twice the size of the tensor, whatever the number of ranks."""
    if not is_distributed():
        return value
    with current() as call:
        call.barrier(f"a sum of shape {tuple(value.shape)}, {value.dtype}")
        flat = _placed(value.detach()).reshape(-1)
        if not flat.numel():
            return value
        summed = _sum_small(call, flat) if flat.numel() <= _SMALL else _sum_by_shares(call, flat)
    return summed.reshape(value.shape).to(value.device)


def sums(values: Sequence[Tensor] | None) -> list[Tensor]:
    """All-reduce of several float64 tensors at once. A rank without data passes None, which counts as zeros."""
    if not is_distributed():
        assert values is not None  # empty data are refused earlier
        return list(values)
    # A rank without data does not know the shapes, but has to take part in the collective.
    all_shapes = gathered(None if values is None else [tuple(v.shape) for v in values])
    shapes = next((each for each in all_shapes if each is not None), None)
    if shapes is None:
        raise InputError("The data gave no batch on any rank: the loader or data set is empty.")
    own = [torch.zeros(shape, dtype=torch.float64) for shape in shapes] if values is None else values
    whole = total(torch.cat([_placed(v.detach()).double().reshape(-1) for v in own]) if own else torch.zeros(0))
    parts = whole.split([v.numel() for v in own])
    return [part.reshape(v.shape).to(v.device) for part, v in zip(parts, own, strict=True)]


def gathered(value: T) -> list[T]:
    """All-gather of one picklable object per rank, in the order of ranks."""
    if not is_distributed():
        return [value]
    with current() as call:
        call.barrier("an exchange of objects")
        own = _placed(packed(value))
        # Collectives need equal sizes on all ranks: exchange the lengths first, then pad.
        sizes = [int(n) for n in _all_gather(call, _placed(torch.tensor([len(own)])))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=own.device)
        padded[: len(own)] = own
        return [unpacked(flat[:n]) for flat, n in zip(_all_gather(call, padded), sizes, strict=True)]


def first_item(source: Callable[[], Iterable[T]]) -> T:
    """The first item on the lowest rank that has data, sent to all ranks."""
    item = next(iter(source()), None)
    if not is_distributed():
        if item is None:
            raise InputError("There are no data: the loader or data set is empty.")
        return item
    holders = [r for r, has in enumerate(gathered(item is not None)) if has]
    if not holders:
        raise InputError("The data gave no batch on any rank: the loader or data set is empty.")
    return cast(T, broadcast(item, holders[0]))


def broadcast(value: T, source: int) -> T:
    """Send the picklable object of rank `source` to all ranks."""
    if not is_distributed():
        return value
    with current() as call:
        call.barrier(f"an object from rank {source}")
        own = _placed(packed(value)) if call.rank == source else None
        size = _placed(torch.tensor([0 if own is None else len(own)]))
        call.wait_for(dist.broadcast(size, source, async_op=True))
        flat = torch.empty(int(size), dtype=torch.uint8, device=size.device) if own is None else own
        call.wait_for(dist.broadcast(flat, source, async_op=True))
        return value if call.rank == source else unpacked(flat)


def require_equal(what: str, value: Any) -> None:
    """Raise a RankError if a small object differs between ranks, such as the arguments of a call."""
    values = gathered(value)
    for r, other in enumerate(values):
        if other != values[0]:
            raise RankError(f"{what} on rank {r} differs from that on rank 0: {other} instead of {values[0]}.")


def split_work(costs: Sequence[float], work: Callable[[int], Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Compute the float64 tensors `work(i)` of the given shapes, each on one rank, and send them to all ranks."""
    with current() as call:
        owners = _assigned(costs, call.world_size)
        made = {i: _placed(work(i)) for i, owner in enumerate(owners) if owner == call.rank}
        call.barrier(f"{len(costs)} shared pieces of work")
        results = []
        for i, (owner, shape) in enumerate(zip(owners, shapes, strict=True)):
            piece = made[i].contiguous() if i in made else torch.empty(shape, dtype=torch.float64, device=_device())
            call.wait_for(dist.broadcast(piece, owner, async_op=True))
            results.append(piece)
    return results


def _assigned(costs: Sequence[float], n: int) -> list[int]:
    """The rank of each task: greedy scheduling, the longest task first, to the rank with the least load."""
    loads, owners = [0.0] * n, [0] * len(costs)
    # Ties are broken by the index, so that all ranks compute the same assignment.
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def _sum_small(call: Call, flat: Tensor) -> Tensor:
    return reduce(torch.add, _all_gather(call, flat))


def _sum_by_shares(call: Call, flat: Tensor) -> Tensor:
    """Rank r sums the r-th share of the entries (reduce-scatter); all shares are then gathered."""
    share = -(-flat.numel() // call.world_size)
    padded = torch.zeros(share * call.world_size, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    received = torch.empty_like(padded)
    call.wait_for(dist.all_to_all_single(received, padded, async_op=True))
    own = reduce(torch.add, received.chunk(call.world_size))
    return torch.cat(_all_gather(call, own))[: flat.numel()]


def _all_gather(call: Call, tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(call.world_size)]
    call.wait_for(dist.all_gather(parts, tensor.contiguous(), async_op=True))
    return parts


def _device() -> torch.device:
    """The device the backend works on: nccl accepts CUDA tensors only, gloo CPU tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _placed(tensor: Tensor) -> Tensor:
    return tensor.to(_device())
