"""Posteriors and unfinished work on disk: one file each, replaced whole, trusted in nothing."""

from lapwing.storage.posterior_file import load, save

__all__ = ["load", "save"]
