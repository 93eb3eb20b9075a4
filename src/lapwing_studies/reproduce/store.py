"""Store trained weights and records, one file per (network, seed)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Store:
    """A folder. Each file records how it was made, and is recomputed if that has changed."""

    folder: Path

    def record(self, name: str, made_with: str) -> Any | None:
        path = self._path("records", name, "json")
        if not path.is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept["record"] if kept["made_with"] == made_with else None

    def keep_record(self, name: str, made_with: str, record: Any) -> None:
        text = json.dumps({"made_with": made_with, "record": record}, allow_nan=False, indent=1)
        path = self._write("records", name, "json")
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)  # atomic: an interruption leaves no partial record

    def load_weights(self, name: str, made_with: str, model: nn.Module) -> bool:
        """Load stored weights and buffers into the model; False if there are none made in this way."""
        path = self._path("weights", name, "npz")
        if not path.is_file():
            return False
        with np.load(path, allow_pickle=False) as archive:
            if str(archive["made_with"]) != digest(made_with):
                return False
            state = {key: torch.from_numpy(archive[f"state/{key}"]) for key in model.state_dict()}
        model.load_state_dict(state)
        return True

    def keep_weights(self, name: str, made_with: str, model: nn.Module) -> None:
        arrays: dict[str, Any] = {f"state/{key}": value.numpy() for key, value in model.state_dict().items()}
        np.savez(self._write("weights", name, "npz"), made_with=np.array(digest(made_with)), **arrays)

    def _path(self, kind: str, name: str, suffix: str) -> Path:
        return self.folder / kind / f"{name}.{suffix}"

    def _write(self, kind: str, name: str, suffix: str) -> Path:
        path = self._path(kind, name, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]
