"""Check that all ranks have the same network with the same weights, before sums over ranks are formed."""

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
    """Raise for FSDP and DTensor models: a rank that holds only a shard of the weights cannot differentiate alone."""
    # Look the modules up in sys.modules: a model can use them only if they are imported, and importing takes long.
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
    """The linearised network if it is the same on all ranks, else a RankError naming the first tensor that differs.

    Buffers of a DistributedDataParallel model (BatchNorm statistics) may differ between ranks; as in DDP itself, those
    of rank 0 are used.
    """
    if not distributed.is_distributed():
        return linearised
    network = linearised.network
    if wrapped:
        buffers = distributed.broadcast({name: network.tensors[name] for name in sorted(network.buffers)}, 0)
        network = replace(network, tensors={**network.tensors, **buffers})
    # Compare hashes, so that ranks exchange a few bytes per tensor.
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
