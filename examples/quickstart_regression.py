"""Error bars for a small regression network: they widen in a gap of the data.

Run: python examples/quickstart_regression.py
"""

from __future__ import annotations

import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)

# Two clusters of data with nothing between -1 and 1.
X = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)])[:, None]
Y = torch.sin(2 * X) + 0.1 * torch.randn_like(X)

# Any trained network; Lapwing does not train it.
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(1500):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(X), Y).backward()
    optimiser.step()

posterior = lw.fit(model, (X, Y), "regression")  # one pass over the data
posterior = lw.tune(posterior)  # prior precision and noise by the evidence

grid = torch.linspace(-4, 4, 17)[:, None]
prediction = posterior.predict(grid)
low, high = prediction.interval(0.95)

print(f"noise {float(posterior.likelihood.noise_std):.3f} (true: 0.100)")
print("     x    mean    95% interval      epistemic std")
columns = (grid, prediction.mean, low, high, prediction.epistemic.sqrt())
for x, mean, lower, upper, std in torch.cat(columns, dim=1).tolist():
    print(f"{x:6.1f} {mean:7.2f}   [{lower:6.2f}, {upper:6.2f}]   {std:8.3f}")
