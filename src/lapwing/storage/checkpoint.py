"""Checkpoints of unfinished work: written between batches or steps, resumed when the same call is made again.

A checkpoint belongs to one model, one set of arguments and one sequence of batches, and is refused for any other. It
stores the sums so far, which may include rows of data, and is deleted when the work is done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.curvature import Fisher, PassCheckpoint, Structure
from lapwing.data import Batches, ModelInput
from lapwing.errors import InputError, InputTypeError, StorageError, StructureError, located, warn
from lapwing.likelihoods import CustomLikelihood, Likelihood
from lapwing.linear_model import unshuffled
from lapwing.network.linearised import Linearised
from lapwing.network.module import Network
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.storage import container
from lapwing.storage.atomic import replace_file
from lapwing.storage.binding import described
from lapwing.storage.codec import Decoder, Encoder
from lapwing.storage.progress_table import progress_table
from lapwing.storage.strict_json import strictly_parsed

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; annotations are not evaluated

_FIT, _TUNING = "progress.lapwing", "tuning.lapwing"
_TRAINING, _RECONSTRUCTION = "training.lapwing", "reconstruction.lapwing"
Binding = dict[str, str]


def in_order(data: Batches) -> Batches:
    """The data in an order that is the same in every run; a shuffling DataLoader is read without shuffling."""
    fixed = unshuffled(data)
    if fixed is None:
        raise InputError(
            f"checkpoint: {type(data.source).__name__} gives its batches in an order of its own, so another run could "
            "not tell which of them it has seen. Use a DataLoader over an indexed data set, arrays, or a list of "
            "batches."
        )
    return fixed


def binding(
    linearised: Linearised, likelihood: Likelihood, structure: Structure, fisher: Fisher, chunk_floats: int, n: int
) -> Binding:
    """Hashes of everything that determines the sums, by name; they must be equal when work is resumed."""
    if not structure.resumable:
        raise StructureError(
            f"checkpoint: the unfinished sums of {structure.described} cannot be written down. Fit without checkpoint, "
            'or use "full", "block", "kron", "ekfac" or "diag".'
        )
    encoder = Encoder(progress_table())
    own = isinstance(likelihood, CustomLikelihood)
    facts = {
        "the model": described(linearised.network),
        "the parameters": encoder.encode(linearised.layout, "layout"),
        "the likelihood": type(likelihood).__name__ if own else encoder.encode(likelihood, "likelihood"),
        "the structure": encoder.encode(structure, "structure"),
        "the kind of curvature, or its random seed": encoder.encode(fisher, "fisher"),
        "the memory": chunk_floats,
        "the number of batches": n,
    }
    return _hashed(facts, encoder)


def tuning_binding(
    posterior: Posterior, data: Iterable[tuple[ModelInput, Tensor]], arguments: dict[str, Any]
) -> Binding:
    """Hashes of the posterior with its curvature, prior and noise, of the arguments of lw.tune, and of the data.

    The linear model's outputs are stored in the order of the data, so that order must be the same. Each rank hashes
    its own shard.
    """
    encoder = Encoder(progress_table())
    own = isinstance(posterior.likelihood, CustomLikelihood)
    facts = {
        "the model": described(posterior.linearised.network),
        "the likelihood": "own" if own else encoder.encode(posterior.likelihood, "likelihood"),
        "the prior": encoder.encode(posterior.prior, "prior"),
        "the curvature": encoder.encode(posterior.estimate, "estimate"),
        "the number of ranks": distributed.world_size(),
        "the data, or their order,": reduce(_digest, data, ""),
        **{f"the argument {name}": value for name, value in arguments.items()},
    }
    return _hashed(facts, encoder)


def training_binding(model: nn.Module, arguments: dict[str, Any]) -> Binding:
    """Hashes of the model's tensor names and shapes (training changes the values), and of the arguments of the
    training.

    Functions are identified by name only.
    """
    tensors = {name: [str(t.dtype), list(t.shape)] for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    facts = {"the model": tensors, "the number of ranks": distributed.world_size()}
    return _hashed(
        {**facts, **{f"the argument {name}": value for name, value in arguments.items()}}, Encoder(progress_table())
    )


def reconstruction_binding(network: nn.Module, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Binding:
    """Hashes of the network before training, of the tensors it is trained on, and of the options."""
    encoder = Encoder(progress_table())
    facts = {
        "the network": described(Network.lent(network)),
        **{name: encoder.encode(tensor, name) for name, tensor in tensors.items()},
        **{f"the argument {name}": value for name, value in options.items()},
    }
    return _hashed(facts, encoder)


def _hashed(facts: dict[str, Any], encoder: Encoder) -> Binding:
    tensors = {name: hashlib.sha256(container.raw(tensor)).hexdigest() for name, tensor in encoder.tensors.items()}
    words = {name: json.dumps([fact, _named_in(fact, tensors)]) for name, fact in facts.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in words.items()}


def _named_in(node: Any, tensors: dict[str, str]) -> list[str]:
    """The hashes of the tensors that a node refers to."""
    if isinstance(node, dict):
        own = [tensors[node["tensor"]]] if isinstance(node.get("tensor"), str) and node["tensor"] in tensors else []
        return [*own, *(digest for item in node.values() for digest in _named_in(item, tensors))]
    return [digest for item in node for digest in _named_in(item, tensors)] if isinstance(node, list) else []


@dataclass(eq=False)
class Checkpoint(PassCheckpoint):
    """A single file in a directory, rewritten every so many seconds."""

    path: Path
    every: float
    bound_to: Binding
    device: torch.device
    _written: float = field(default_factory=monotonic, init=False)
    _seen: str = field(default="", init=False)  # hash of all batches of the pass so far
    # Number of batches and their hash when the earlier run stopped.
    _expected: tuple[int, str] = field(default=(0, ""), init=False)

    @classmethod
    def of_fit(cls, directory: Any, every: Any, bound_to: Binding, device: torch.device) -> Self:
        return cls(_directory(directory) / _FIT, _seconds(every), bound_to, device)

    @classmethod
    def of_tuning(cls, directory: Any, every: Any, bound_to: Binding, device: torch.device) -> Self:
        return cls(_directory(directory) / _TUNING, _seconds(every), bound_to, device)

    @classmethod
    def of_training(cls, directory: Any, every: Any, bound_to: Binding, device: torch.device) -> Self:
        return cls(_directory(directory) / _TRAINING, _seconds(every), bound_to, device)

    @classmethod
    def of_reconstruction(cls, directory: Any, every: Any, bound_to: Binding, device: torch.device) -> Self:
        return cls(_directory(directory) / _RECONSTRUCTION, _seconds(every), bound_to, device)

    def resumed(self) -> dict[str, Any] | None:
        state = self.read(self.path)
        if state is not None:
            self._expected = state.get("done", 0), state["seen"]
        return state

    def observe(self, number: int, pair: tuple[ModelInput, Tensor]) -> None:
        self._seen = _digest(self._seen if number else "", pair)
        done, digest = self._expected
        # All batches of the earlier run have been seen again: now their hashes must agree.
        if number + 1 == done and self._seen != digest:
            raise StorageError(
                f"{self.path}: the first {done} batches are not those that the unfinished fit has seen. Give the same "
                "data in the same order (random augmentation cannot be resumed), or remove the directory to start anew."
            )

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        if self.due():
            self.write(self.path, state())

    def due(self) -> bool:
        return monotonic() - self._written >= self.every

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Explain after Ctrl-C how to resume; delete the file when the work is done."""
        try:
            yield
        except KeyboardInterrupt:
            where = f"Progress is kept in {self.path}" if self.path.exists() else "Nothing was written yet"
            raise KeyboardInterrupt(f"Interrupted. {where}; the same call goes on from there.") from None
        self.path.unlink(missing_ok=True)

    def write(self, path: Path, state: dict[str, Any]) -> bool:
        """Write the state; returns whether that succeeded."""
        encoder = Encoder(progress_table())
        node = encoder.encode({**state, "seen": self._seen}, "state")
        content = container.Content(json.dumps({"bound_to": self.bound_to, "state": node}), encoder.tensors)
        try:
            replace_file(path, lambda file: container.write(file, content))
        except StorageError as error:  # a full disk must not stop the fit itself
            warn(f"checkpoint: {error}")
            return False
        finally:
            self._written = monotonic()
        return True

    def read(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        with located(str(path)):
            return self._read(path)

    def _read(self, path: Path) -> dict[str, Any]:
        with open(path, "rb") as file:
            content = container.read(file, os.fstat(file.fileno()).st_size)
        document = strictly_parsed(content.document, "the document")
        if not isinstance(document, dict) or document.keys() != {"bound_to", "state"}:
            raise StorageError("it is not a checkpoint.")
        self._check(document["bound_to"])
        decoder = Decoder(progress_table(), content.tensors)
        state = decoder.decode(document["state"], self.device)
        decoder.check_all_used()
        return state

    def _check(self, bound_to: Any) -> None:
        for name, digest in self.bound_to.items():
            if not isinstance(bound_to, dict) or bound_to.get(name) != digest:
                raise StorageError(
                    f"the unfinished work there is another: {name} differed. Go on with the same arguments, or remove "
                    "the directory (or name another) to start anew."
                )


def _digest(before: str, pair: tuple[ModelInput, Tensor]) -> str:
    """Hash of all tensors of a batch, chained to the hash of the batches before."""
    # A running hash over batches, so that data of any size are compared in constant memory.
    total = hashlib.sha256(before.encode())
    x, y = pair
    for name, value in [*x.leaves(), ("y", y)]:
        if isinstance(value, Tensor):
            plain = value.detach().contiguous().cpu()
            total.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            total.update(container.raw(torch.view_as_real(plain) if plain.is_complex() else plain))
    return total.hexdigest()


def _directory(directory: Any) -> Path:
    """The directory of this rank; each rank stores its own progress."""
    if not isinstance(directory, str | os.PathLike):
        raise InputTypeError(f"checkpoint: expected the path of a directory, got {type(directory).__name__}.")
    path = Path(directory, f"rank{distributed.rank()}") if distributed.is_distributed() else Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"checkpoint: {path} cannot be a directory ({error.strerror or error}).") from error
    return path


def _seconds(every: Any) -> float:
    if isinstance(every, bool) or not isinstance(every, int | float):
        raise InputTypeError(f"every: expected a number of seconds, got {type(every).__name__}.")
    if not (isfinite(every) and every >= 0):
        raise InputError(f"every: expected zero or more seconds, got {every}.")
    return float(every)
