"""What all ranks must agree on before their sums mean anything: the same weights, of the same network."""

from __future__ import annotations

import sys
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor, nn

from lapwing.errors import InputTypeError, RankError
from lapwing.network.linearised import Linearised
from lapwing.runtime import distributed


def refuse_sharded(model: nn.Module) -> None:
    """Weights of which this process holds a part only are nothing that it could differentiate by itself."""
    tensors, fsdp = sys.modules.get("torch.distributed.tensor"), sys.modules.get("torch.distributed.fsdp")
    wrapper = () if fsdp is None else fsdp.FullyShardedDataParallel
    parts = () if tensors is None else tensors.DTensor
    name = next((n for n, p in model.named_parameters() if isinstance(p, parts)), None)
    if name is not None or any(isinstance(module, wrapper) for module in model.modules()):
        raise InputTypeError(
            f"The model's weights are sharded over ranks (FSDP{'' if name is None else f': {name!r} is a DTensor'}); "
            "Lapwing needs a whole copy on each rank. Gather them, "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), and load them into a model that is not sharded."
        )


def agreed(linearised: Linearised, wrapped: bool) -> Linearised:
    """The same linearised network on all ranks, or an error that names the first tensor that differs.

    DistributedDataParallel lets the buffers of ranks drift apart and takes those of rank 0; so do we.
    """
    if not distributed.is_distributed():
        return linearised
    network = linearised.network
    if wrapped:
        buffers = distributed.broadcast({name: network.tensors[name] for name in sorted(network.buffers)}, 0)
        network = replace(network, tensors={**network.tensors, **buffers})
    _check_same({name: _digest(t) for name, t in network.tensors.items()})
    layout = linearised.layout
    chosen = None if layout.selection is None else _digest(layout.selection)
    distributed.require_equal("The set of inferred parameters", (tuple(layout.names), chosen))
    return replace(linearised, network=network)


def _check_same(digests: dict[str, str]) -> None:
    everyone = distributed.gathered(digests)
    for r, other in enumerate(everyone):
        differs = [name for name in everyone[0] if other.get(name) != everyone[0][name]] + [*(other.keys() - digests)]
        if differs:
            raise RankError(
                f"The models differ: {differs[0]!r} on rank {r} is not what it is on rank 0. Broadcast the weights and "
                "buffers of one rank first, or train with DistributedDataParallel."
            )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return sha256(repr((tensor.dtype, tuple(tensor.shape))).encode() + content).hexdigest()[:16]
