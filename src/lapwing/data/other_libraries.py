"""Recognise objects of other libraries passed as model or data, to give a helpful error.

Types are compared by module and class name, so that none of those packages is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lapwing.errors import InputTypeError

_LIGHTNING = ("lightning", "pytorch_lightning")
_QUANTISED_MODULES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.quantizable")
_QUANTISED_TYPES = ("bitsandbytes", "torchao")

# (packages, class name, description, what to do instead); the first match is used.
_AS_MODEL = [
    (("transformers",), "Trainer", "a Hugging Face Trainer", "Pass its model, trainer.model, and data of your own"),
    (_LIGHTNING, "Trainer", "a Lightning Trainer", "Pass the LightningModule, which is a torch.nn.Module"),
    (("skorch",), "NeuralNet", "a skorch net", "Pass the module that it trained: net.module_"),
    (("sklearn",), "BaseEstimator", "a scikit-learn estimator", "Lapwing needs a network of PyTorch"),
    (("keras", "tensorflow"), "Model", "a Keras model", "Lapwing needs a network of PyTorch"),
]
_AS_DATA = [
    (("transformers",), "Trainer", "a Hugging Face Trainer", "Pass its loader: trainer.get_train_dataloader()"),
    (_LIGHTNING, "LightningDataModule", "a LightningDataModule", "Pass its loader: datamodule.train_dataloader()"),
    (_LIGHTNING, "Trainer", "a Lightning Trainer", "Pass the loader: trainer.train_dataloader"),
    (("datasets",), "DatasetDict", "a DatasetDict", 'Pass a loader of one split: DataLoader(splits["train"], ...)'),
    (("pandas",), "DataFrame", "a DataFrame", "Pass inputs and targets: (df[features], df[target])"),
]


def model_hint(given: Any) -> tuple[str, str]:
    """(description of what was passed, what to do) when a module was expected."""
    known = _known(given, _AS_MODEL)
    if known is not None:
        return known
    name = type(given).__name__
    if isinstance(given, type):
        return f"the class {given.__name__}", "Make an instance first"
    if isinstance(given, str | os.PathLike):
        return (
            f"{name}, a path perhaps",
            "Build the network and load its weights: model.load_state_dict(torch.load(path))",
        )
    if isinstance(given, Mapping) and given and all(isinstance(v, torch.Tensor) for v in given.values()):
        return f"{name}, a state_dict perhaps", "Load it into the network and pass that: model.load_state_dict(...)"
    if isinstance(given, list | tuple) and given and all(isinstance(v, nn.Module) for v in given):
        return f"{name} of {len(given)} modules", "Pass one of them: each has a posterior of its own"
    if callable(given):
        return name, "Wrap the function in a module that holds the parameters it uses"
    return name, ""


def refuse_data(given: Any, where: str) -> None:
    """Raise an InputTypeError for a trainer, a data module, a path or a model passed as data."""
    known = _known(given, _AS_DATA)
    if isinstance(given, str | os.PathLike):
        known = (
            f"{type(given).__name__}, a path perhaps",
            "Load the data first, and pass arrays, a Dataset or a DataLoader",
        )
    elif isinstance(given, nn.Module):
        known = f"the module {type(given).__name__}", "The model comes first, the data second"
    if known is not None:
        what, cure = known
        raise InputTypeError(
            f"{where}: expected a DataLoader, a Dataset, a pair (X, Y) or an iterable of (x, y) batches, got {what}. "
            f"{cure}."
        )


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has PEFT adapters."""
    named = any("lora_" in name for name, _ in model.named_parameters())
    return named or any(_is_of(module, ("peft",)) for module in model.modules())


def quantised(model: nn.Module) -> Iterator[str]:
    """Modules with integer (quantised) weights, each as `'path' (type)`."""
    for path, module in model.named_modules():
        if has_packed_weights(module) or _is_of(module, _QUANTISED_TYPES) or _holds_integers(module):
            yield f"'{path}' ({type(module).__module__.partition('.modules')[0]}.{type(module).__name__})"


def has_packed_weights(module: nn.Module) -> bool:
    """Whether the module uses torch's quantised kernels, which have no derivative."""
    return _is_of(module, _QUANTISED_MODULES)


def _holds_integers(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return any(not (p.is_floating_point() or p.is_complex()) or _is_of(p, _QUANTISED_TYPES) for p in own)


def _known(given: Any, rows: list[tuple[tuple[str, ...], str, str, str]]) -> tuple[str, str] | None:
    for packages, name, what, cure in rows:
        # All base classes, so that subclasses (Seq2SeqTrainer) are recognised too.
        if any(c.__name__ == name and _inside(c.__module__, packages) for c in type(given).__mro__):
            return what, cure
    return None


def _is_of(value: Any, packages: tuple[str, ...]) -> bool:
    return any(_inside(c.__module__, packages) for c in type(value).__mro__)


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
