"""Exported programs answer as the posterior does, for other batches, and what cannot be exported is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from oracle import assert_close


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, outputs))


def conv(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, stride=2),
        nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2, outputs),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.out(h + self.b(h))


slow = pytest.mark.slow  # torch.export takes seconds for each
FAST = {("mlp", "kron", "classification"), ("conv", "diag", "regression")}
NETWORKS = {"mlp": (mlp, (3,)), "conv": (conv, (1, 9, 9)), "residual": (Residual, (3,))}


def posterior(network: str, task: str, dtype: torch.dtype = torch.float64, **options) -> tuple[lw.Posterior, Tensor]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    outputs = {"regression": 2, "classification": 3, "binary": 1}[task]
    model = make(outputs).to(dtype)
    model.train()(draw(16, *shape, seed=5).to(dtype))  # statistics of BatchNorm
    X = draw(12, *shape).to(dtype)
    Y = {
        "regression": draw(12, 2, seed=1).to(dtype),
        "classification": torch.arange(12) % 3,
        "binary": (torch.arange(12) % 2)[:, None].to(dtype),
    }[task]
    likelihood = lw.Gaussian(noise_std=[0.3, 0.5]) if task == "regression" else task
    return lw.fit(model, (X, Y), likelihood, **options), draw(5, *shape, seed=2).to(dtype)


def answers(own: lw.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    binary = isinstance(own.likelihood, lw.Bernoulli)
    p = own.predict(x, link="mc" if binary else None)
    return (p.mean, p.variance) if isinstance(own.likelihood, lw.Gaussian) else (p.probs, p.epistemic)


@pytest.mark.parametrize("task", ["regression", "classification", "binary"])
@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("mlp", {"structure": "full"}),
        ("mlp", {"structure": "kron"}),
        ("mlp", {"structure": "diag"}),
        ("mlp", {"structure": "ekfac"}),
        ("conv", {"structure": "full"}),
        ("conv", {"structure": "kron"}),
        ("conv", {"structure": "diag"}),
        ("conv", {"structure": "block"}),
        ("residual", {"structure": "full", "params": "last_layer"}),
        ("residual", {"structure": "kron", "params": "last_layer"}),
        ("mlp", {"structure": "kron", "params": ["0.weight", "3.bias"]}),
    ],
)
@slow
def test_programs_of_torch_export(network: str, options: dict, task: str, tmp_path: Path):
    check_program(network, options, task, tmp_path)


@pytest.mark.parametrize(("network", "structure", "task"), sorted(FAST))
def test_two_of_them_always(network: str, structure: str, task: str, tmp_path: Path):
    check_program(network, {"structure": structure}, task, tmp_path)


def check_program(network: str, options: dict, task: str, tmp_path: Path) -> None:
    own, x = posterior(network, task, **options)
    path = lw.export(own, tmp_path / "net.pt2", x)
    program = torch.export.load(path).module()
    for n in (5, 1):
        for rtol, ours, true in zip((1e-6, 1e-2 if task == "binary" else 1e-6), program(x[:n]), answers(own, x[:n])):
            assert_close(ours, true, rtol)


@slow
def test_a_mean_that_tuning_moved(tmp_path: Path):
    own, x = posterior("mlp", "regression", structure="full")
    moved = lw.tune(own, (draw(12, 3), draw(12, 2, seed=1)), mean="linear_mode")
    program = torch.export.load(lw.export(moved, tmp_path / "net.pt2", x)).module()
    for ours, true in zip(program(x), answers(moved, x), strict=True):
        assert_close(ours, true, 1e-6)


@slow
def test_single_precision(tmp_path: Path):
    own, x = posterior("conv", "classification", torch.float32, structure="kron")
    program = torch.export.load(lw.export(own, tmp_path / "net.pt2", x)).module()
    for ours, true in zip(program(x), answers(own, x), strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, true, 1e-3)


def test_what_is_not_written_out_is_refused(tmp_path: Path):
    own, x = posterior("residual", "regression", structure="full")
    with pytest.raises(lw.StructureError, match='params="last_layer"'):
        lw.export(own, tmp_path / "net.pt2", x)
    fine, x = posterior("mlp", "regression", structure="full")
    with pytest.raises(lw.InputError, match=r"\.pt2 or \.onnx"):
        lw.export(fine, tmp_path / "net.txt", x)
    with pytest.raises(lw.InputError, match="does not exist"):
        lw.export(fine, tmp_path / "nowhere" / "net.pt2", x)
    with pytest.raises(lw.InputTypeError, match="one tensor"):
        lw.export(fine, tmp_path / "net.pt2", [1.0, 2.0])
    with pytest.raises(lw.InputTypeError, match="expected a Posterior"):
        lw.export(nn.Linear(1, 1), tmp_path / "net.pt2", x)
    counts = lw.fit(mlp(1).double(), (draw(6, 3), torch.ones(6, 1).double()), "count")
    with pytest.raises(lw.StructureError, match="Poisson"):
        lw.export(counts, tmp_path / "net.pt2", x)
    assert not list(tmp_path.iterdir())
