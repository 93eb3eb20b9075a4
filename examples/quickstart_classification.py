"""Class probabilities on two moons. At the last two points, far from the data, the plain network is still certain.

Run: python examples/quickstart_classification.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

torch.manual_seed(0)


def two_moons(n: int) -> tuple[Tensor, Tensor]:
    """n points on two interleaved half circles, with noise."""
    label = torch.arange(n) % 2
    angle = torch.pi * torch.rand(n)
    upper = torch.stack([angle.cos(), angle.sin()], -1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], -1)
    return torch.where(label[:, None] == 0, upper, lower) + 0.2 * torch.randn(n, 2), label


train, held_out = two_moons(150), two_moons(150)
loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(100):
    for x, y in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

posterior = lw.fit(model, loader, "classification")
posterior = lw.tune(posterior, validation=held_out)  # a confident classifier: held-out data decide the scale

plain = nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
ours = -posterior.predict(held_out[0]).log_prob(held_out[1]).mean().item()
print(f"held-out NLL: plain network {plain:.3f}, with error bars {ours:.3f}")

points = torch.tensor([[0.0, 1.0], [1.0, -0.5], [0.5, 0.25], [2.0, 3.0], [6.5, 10.5]])
network, prediction = torch.softmax(model(points), -1).detach(), posterior.predict(points)
print("       x          plain p(1)        p(1)   epistemic   aleatoric")
columns = (network[:, 1], prediction.probs[:, 1], prediction.epistemic, prediction.aleatoric)
for (x1, x2), *values in zip(points.tolist(), *(column.tolist() for column in columns), strict=True):
    print(f"({x1:5.2f}, {x2:5.2f})" + "".join(f"{value:12.3f}" for value in values))
