"""Posteriors and unfinished work on disk: written atomically, validated on load."""

from lapwing.storage.checkpoint import Checkpoint, binding, in_order, reconstruction_binding, tuning_binding
from lapwing.storage.in_step import InStep
from lapwing.storage.posterior_file import load, save

__all__ = ["Checkpoint", "InStep", "binding", "in_order", "load", "reconstruction_binding", "save", "tuning_binding"]
