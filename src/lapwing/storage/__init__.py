"""Posteriors and unfinished work on disk: written atomically, validated on load."""

from lapwing.storage.checkpoint import (
    Checkpoint,
    binding,
    in_order,
    reconstruction_binding,
    training_binding,
    tuning_binding,
)
from lapwing.storage.in_step import InStep
from lapwing.storage.posterior_file import load, save
from lapwing.storage.state_tree import as_nodes, from_nodes

__all__ = [
    "Checkpoint",
    "InStep",
    "as_nodes",
    "binding",
    "from_nodes",
    "in_order",
    "load",
    "reconstruction_binding",
    "save",
    "training_binding",
    "tuning_binding",
]
