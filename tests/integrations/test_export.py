"""Exported programs answer as the posterior does, for other batches, and what cannot be exported is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
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


class Net(nn.Module):
    """As people write them: functions in `forward`, an activation used twice and in place, branches, numbers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.branches = nn.ModuleList([nn.Conv2d(3, 2, 3, padding=1), nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh())])
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.SiLU(inplace=True)
        self.out = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = (1 - x / 0.5) * 0.3
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = torch.cat([branch(x) for branch in self.branches], dim=1)
        x = self.act(x)
        same = x
        x = self.norm(self.again(x))
        x += same
        x = self.act(x)
        x = F.avg_pool2d(x, 2)
        x = F.dropout(x, 0.1, training=self.training)
        return self.out(x.view(x.size(0), -1))


class Averaged(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.out = nn.Conv2d(1, 5, 3), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.a(x).relu().mean(dim=(-2, -1)))


def shared_activation(outputs: int) -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(3, 6), act, nn.Linear(6, 5), act, nn.Linear(5, outputs))


slow = pytest.mark.slow  # torch.export takes seconds for each
FAST = {("net", "kron", "classification"), ("conv", "diag", "regression")}
NETWORKS = {
    "mlp": (mlp, (3,)), "conv": (conv, (1, 9, 9)), "residual": (Residual, (3,)), "net": (Net, (1, 9, 9)),
    "averaged": (Averaged, (1, 6, 6)), "shared": (shared_activation, (3,)), "linear": (lambda k: nn.Linear(3, k), (3,)),
}  # fmt: skip


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
        ("residual", {"structure": "full"}),
        ("net", {"structure": "full"}),
        ("net", {"structure": "kron"}),
        ("net", {"structure": "diag", "params": ["branches.*", "norm.*"]}),
        ("averaged", {"structure": "kron"}),
        ("shared", {"structure": "kron"}),
        ("linear", {"structure": "full"}),
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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).tanh())


class Branching(Twice):
    """One layer, whose body torch.export cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 1e9 else self.a(-x)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.sum() > 1e9 else self.b(self.a(x).tanh())


class Product(Fork):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * x)


def test_what_is_not_written_out_is_refused(tmp_path: Path):
    refusals = ((Twice, "called twice"), (Branching, "cannot follow"), (Fork, "cannot follow"), (Product, "no step"))
    for body, why in refusals:
        torch.manual_seed(0)
        own = lw.fit(body().double(), (draw(6, 3), draw(6, 3)), "regression", structure="full")
        with pytest.raises(lw.StructureError, match=why):
            lw.export(own, tmp_path / "net.pt2", draw(6, 3))
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
