"""Run as a script in a process of its own: peak memory of plan, fit, tune, predict and save of a large encoder.

`python large.py minilm 4` prints JSON, in bytes above what the process held with the model and the data.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import lapwing as lw
from peaks import _settled, _status, _warm_up

# vocabulary, width, hidden units of a block, blocks, heads
SIZES = {"minilm": (30_522, 384, 1_536, 6, 12), "gpt2": (50_257, 768, 3_072, 12, 12)}
LENGTH = 32


class Encoder(nn.Module):
    """An embedding, transformer blocks, the mean over tokens and a linear head."""

    def __init__(self, vocabulary: int, width: int, hidden: int, n_blocks: int, n_heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        blocks = (nn.TransformerEncoderLayer(width, n_heads, hidden, 0.0, batch_first=True) for _ in range(n_blocks))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places.weight).mean(1))


def main(name: str, gigabytes: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _warm_up("kron")
    model = Encoder(*SIZES[name]).eval()
    tokens, labels = torch.randint(SIZES[name][0], (32, LENGTH)), torch.randint(4, (32,))
    train, held_out, test = ((tokens[i : i + 16], labels[i : i + 16]) for i in (0, 16, 8))
    before, memory = _settled(), f"{gigabytes}GB"
    lw.plan(model, train, "classification", memory=memory)
    peaks = {"plan": _status("VmHWM") - before}
    _settled()
    posterior = lw.fit(model, train, "classification", structure="kron", memory=memory)
    peaks["fit"] = _status("VmHWM") - before
    posterior = lw.tune(posterior, validation=held_out)
    peaks["tune"] = _status("VmHWM") - before
    assert posterior.predict(test[0]).probs.isfinite().all()
    peaks["predict"] = _status("VmHWM") - before
    with tempfile.TemporaryDirectory() as folder:
        lw.save(posterior, Path(folder) / "net.lapwing")
    peaks["save"] = _status("VmHWM") - before
    n_parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": n_parameters, "peaks": peaks, "budget": int(float(gigabytes) * 2**30)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
