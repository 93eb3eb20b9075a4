"""Several processes under torch.distributed, each with its shard of the data: the only caller of collectives."""

from lapwing.runtime.distributed.call import alone, many, of_this_rank, rank, together, world
from lapwing.runtime.distributed.collectives import (
    broadcast,
    first_of,
    gathered,
    same_everywhere,
    shared_work,
    sums,
    total,
)

__all__ = [
    "alone",
    "broadcast",
    "first_of",
    "gathered",
    "many",
    "of_this_rank",
    "rank",
    "same_everywhere",
    "shared_work",
    "sums",
    "together",
    "total",
    "world",
]
