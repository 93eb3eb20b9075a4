"""ONNX files, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import lapwing as lw
from test_export import answers, posterior

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("task", ["regression", "classification", "binary"])
@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("mlp", {"structure": "full"}),
        ("mlp", {"structure": "kron"}),
        ("conv", {"structure": "kron"}),
        ("conv", {"structure": "diag"}),
        ("net", {"structure": "kron"}),
        ("residual", {"structure": "full"}),
        ("residual", {"structure": "full", "params": "last_layer"}),
    ],
)
def test_onnxruntime_answers_as_the_posterior_does(network: str, options: dict, task: str, tmp_path: Path):
    own, x = posterior(network, task, torch.float32, **options)
    path = lw.export(own, tmp_path / "net.onnx", x)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for n in (5, 1, 3):
        found = session.run(None, {"x": x[:n].numpy()})
        for ours, true in zip(found, answers(own, x[:n]), strict=True):
            np.testing.assert_allclose(ours, true.numpy(), rtol=2e-3, atol=2e-4)
