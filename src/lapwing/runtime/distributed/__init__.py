"""Data-parallel processes under torch.distributed, each with its shard of the data. All collectives are called here."""

from lapwing.runtime.distributed.call import (
    alone,
    collective_call,
    is_distributed,
    rank,
    rank_generator,
    world_size,
)
from lapwing.runtime.distributed.collectives import (
    broadcast,
    first_item,
    gathered,
    require_equal,
    split_work,
    sums,
    total,
)

__all__ = [
    "alone",
    "broadcast",
    "collective_call",
    "first_item",
    "gathered",
    "is_distributed",
    "rank",
    "rank_generator",
    "require_equal",
    "split_work",
    "sums",
    "total",
    "world_size",
]
