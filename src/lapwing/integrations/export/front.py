"""lw.export: one program that computes predictions with error bars, checked before it is written."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import InputError, InputTypeError, NumericalError, StructureError
from lapwing.integrations.export.network import OutputGaussian
from lapwing.integrations.export.predictive import predictive
from lapwing.integrations.extras import needed
from lapwing.posterior import Posterior

_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-8}


def export(posterior: Posterior, path: str | os.PathLike[str], example: Tensor) -> Path:
    """Write the predictions of a posterior as one program: `.pt2` (torch.export) or `.onnx`, by the ending.

    Targets: (mean, variance), noise included. Classes: (probabilities, epistemic), averaged over the same 1,000
    quasi-random draws as `posterior.predict`; of one logit as by `link="mc"`. The batch is dynamic. For the last layer
    of any body, and for full, block, Kronecker and diagonal posteriors of feed-forward and convolutional networks,
    residual ones included. Before the file is there, its answers at `example` are compared with the posterior's own.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"export: expected a Posterior from lw.fit, got {type(posterior).__name__}.")
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise InputError(f"export: the ending of the file says what it is, .pt2 or .onnx; got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"export: the folder {path.parent} of {path.name} does not exist.")
    x = _placed(posterior, example)
    if path.suffix == ".onnx":
        needed("onnxscript", extra="export")
    dtype = posterior.dtype
    with posterior.linearised.network.borrowed() as network:
        network(posterior.given(x), {})  # its tensors are in the modules then
        model = _as_module(deepcopy(network.model).eval())
    program = predictive(OutputGaussian(posterior, model, x, dtype), posterior, dtype).eval()
    _check(posterior, program, x)
    batch = {0: torch.export.Dim("batch", min=1)}
    with torch.no_grad():
        try:
            exported = torch.export.export(program, (x,), dynamic_shapes=(batch,))
        except Exception as error:  # whatever of the user's forward torch.export does not know
            raise StructureError(
                "export: torch.export cannot follow this network with a batch of any size, so nothing was written. "
                f"It says: {str(error).strip().splitlines()[0]}"
            ) from error
        if path.suffix == ".pt2":
            torch.export.save(exported, path)
        else:
            _to_onnx(exported, program.names, path)
    return path


def _to_onnx(exported: Any, names: tuple[str, ...], path: Path) -> None:
    program = torch.onnx.export(exported, input_names=["x"], output_names=list(names), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path), external_data=False)


def _placed(posterior: Posterior, example: Any) -> Tensor:
    if not isinstance(example, Tensor):
        raise InputTypeError(f"export: expected a batch of inputs as one tensor, got {type(example).__name__}.")
    (x,) = posterior.linearised.network.placed(posterior.given(example.detach())).args
    assert isinstance(x, Tensor)
    return torch.cat([x, x]) if len(x) < 2 else x  # one row alone would make the batch a constant


def _as_module(model: nn.Module) -> nn.Module:
    """Parameters where the network holds plain tensors in their place."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = made.setdefault(id(value), nn.Parameter(value.detach(), requires_grad=False))
    return model


def _check(posterior: Posterior, program: Any, x: Tensor) -> None:
    with torch.no_grad():
        found = program(x)
    binary = getattr(program, "binary", False)
    p: Any = posterior.predict(x, link="mc" if binary else None)
    true = (p.mean, p.variance) if hasattr(program, "noise") else (p.probs, p.epistemic)
    for name, ours, theirs in zip(program.names, found, true, strict=True):
        worst = float((ours - theirs).abs().max())
        close = _CLOSE.get(posterior.dtype, 1e-2)
        if binary and name == "epistemic":  # by quadrature there
            close = 1e-2
        if not worst <= close * max(1e-3, float(theirs.abs().max())):
            raise NumericalError(
                f"export: the written-out {name} differs from the posterior's by {worst:.3g} at the example; nothing "
                "was written. If the model is in single precision, try model.double()."
            )
