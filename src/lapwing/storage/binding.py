"""Bind a posterior to its network: names, shapes, dtypes and hashes of its tensors, and the types of its modules."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import StorageError, StructureError
from lapwing.network.module import Network
from lapwing.storage.container import raw

Described = dict[str, Any]  # a JSON object


def described(network: Network) -> Described:
    """The facts that identify a network, as JSON."""
    return {
        "tensors": {name: _tensor(name, tensor) for name, tensor in network.tensors.items()},
        "buffers": sorted(network.buffers),
        "shared": {name: first for name, first in network.aliases.items() if name != first},
        "modules": {path: type(module).__name__ for path, module in network.model.named_modules()},
    }


def check_same(saved: Any, network: Network) -> None:
    """Raise with the first difference between the network of the file and this one."""
    difference = _difference(saved, described(network))
    if difference is not None:
        raise StorageError(
            f"the posterior is of another model: {difference}. It belongs to the network as it was when the posterior "
            "was fitted; load those weights into the model first (model.load_state_dict), or fit again."
        )


def _tensor(name: str, tensor: Tensor) -> Described:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise StructureError(f"The model's tensor '{name}' is sparse, quantised or on no device, and has no hash.")
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    digest = hashlib.sha256(raw(plain.detach().contiguous().cpu())).hexdigest()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest}


def _difference(saved: Any, here: Described) -> str | None:
    """The first difference between two descriptions of networks, as a clause of an error message."""
    if not isinstance(saved, dict) or saved.keys() != here.keys():
        return "the file does not describe its model"
    old, new = saved["tensors"], here["tensors"]
    if not isinstance(old, dict) or not all(isinstance(facts, dict) for facts in old.values()):
        return "the file does not describe its model"
    for name in [*old, *new]:
        if name not in new or name not in old:
            where = "the file has" if name in old else "the model has"
            return f"{where} a tensor '{name}', and the {'model' if name in old else 'file'} does not"
    # Shapes and dtypes first: they explain why hashes differ.
    for fact, words in (("shape", "shape"), ("dtype", "dtype"), ("sha256", "values")):
        for name in old:
            if old[name].get(fact) != new[name][fact]:
                return f"tensor '{name}' has {_other(words, old[name].get(fact), new[name][fact])}"
    for fact, words in (("buffers", "buffers"), ("shared", "shared tensors"), ("modules", "modules")):
        if saved[fact] != here[fact]:
            return _first_of(words, saved[fact], here[fact])
    return None


def _other(words: str, old: Any, new: Any) -> str:
    return "other values" if words == "values" else f"{words} {new} in the model and {old} in the file"


def _first_of(words: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        name = next(key for key in [*old, *new] if old.get(key) != new.get(key))
        return f"among its {words}, '{name}' is {new.get(name)} in the model and {old.get(name)} in the file"
    return f"its {words} are others"


def same_networks(a: Network, b: Network) -> str | None:
    """The first difference between two networks, without hashing where they are the same object."""
    return None if a is b else _difference(described(a), described(b))


def module_at(model: nn.Module, path: str) -> nn.Module:
    modules = dict(model.named_modules())
    if path not in modules:
        raise StorageError(f"the model has no module '{path:.80}'.")
    return modules[path]
