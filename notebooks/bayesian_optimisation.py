# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bayesian optimisation with a network
#
# Every measurement of an expensive function is worth thinking about: where is the next one likely to be the best yet?
# That takes a model which says how sure it is. BoTorch usually takes a Gaussian process; here the model is a network and
# its posterior. We look for the highest point of Branin's function (turned upside down, so that it has three equal
# maxima) on the square, starting from eight measurements.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from torch import nn

import lapwing as lw
from lapwing.botorch import LapwingModel

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=RuntimeWarning)  # BoTorch's, of restarts that ended early
branin = Branin(negate=True)
low, high = torch.tensor([-5.0, 0.0]).double(), torch.tensor([10.0, 15.0]).double()
BOUNDS = torch.stack([torch.zeros(2), torch.ones(2)]).double()


def measured(x):
    return branin(low + (high - low) * x)[:, None]


# %% [markdown]
# ## The model of a round
#
# The network is trained anew on all measurements (tanh units: smooth, as most things one measures are), with inputs from
# −1 to 1 and standardised targets. `lw.tune` chooses prior and noise by the evidence, and `LapwingModel` makes of the
# posterior what BoTorch calls a model. A transform of BoTorch brings its answers back to the units of the measurements.


# %%
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

    def forward(self, x):
        return self.layers(2 * x - 1)


def model_of(X, Y, seed):
    torch.manual_seed(seed)
    standardise = Standardize(1)
    scaled = standardise(Y)[0]
    standardise.eval()
    net = Network().double()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 400)
    for _ in range(400):
        optimiser.zero_grad()
        (net(X) - scaled).square().mean().backward()
        optimiser.step()
        schedule.step()
    posterior = lw.fit(net, (X, scaled), "regression", structure="gp", progress=False)
    return LapwingModel(lw.tune(posterior, progress=False), outcome_transform=standardise)


def start(seed):
    X = torch.rand(8, 2, generator=torch.Generator().manual_seed(seed)).double()
    return X, measured(X)


X, Y = start(seed=0)
model = model_of(X, Y, seed=0)
print(f"the best of the first eight: {Y.max():.2f}; the highest there is: {branin.optimal_value:.2f}")

# %% [markdown]
# ## What it knows, and where it would measure next
#
# The mean, the standard deviation, and the expected improvement over the best value so far. The red cross is the next
# measurement.

# %% alt="Four maps over the square: the true function, the posterior's mean, its standard deviation, which is small at the measurements, and the expected improvement with the next point marked."
t = torch.linspace(0, 1, 60).double()
grid = torch.stack(torch.meshgrid(t, t, indexing="xy"), -1).reshape(-1, 1, 2)
with torch.no_grad():
    answer = model.posterior(grid)
    gain = LogExpectedImprovement(model, best_f=Y.max())(grid)
torch.manual_seed(0)
x, _ = optimize_acqf(LogExpectedImprovement(model, best_f=Y.max()), BOUNDS, q=1, num_restarts=4, raw_samples=64)
maps = {
    "the function": measured(grid[:, 0]),
    "mean": answer.mean,
    "standard deviation": answer.variance.sqrt(),
    "log expected improvement": gain.clamp_min(gain.max() - 8),
}
fig, axes = plt.subplots(1, 4, figsize=(13, 3.4), sharey=True)
for axis, (title, values) in zip(axes, maps.items()):
    axis.contourf(t, t, values.reshape(60, 60), 20, cmap="viridis")
    axis.plot(*X.T, "o", color="white", markeredgecolor="black", ms=6)
    axis.set(title=title, xticks=[0, 1], yticks=[0, 1])
axes[3].plot(*x[0], "x", color="red", ms=11, mew=3)
fig.tight_layout()

# %% [markdown]
# ## Rounds of it
#
# 22 more measurements, for three different starts: by expected improvement; by Thompson sampling, which maximises one
# function drawn from the posterior (`function_draws`, an `nn.Module`); and at random.

# %%
STEPS, SEEDS = 22, 3


def by_improvement(X, Y, seed):
    acquisition = LogExpectedImprovement(model_of(X, Y, seed), best_f=Y.max())
    return optimize_acqf(acquisition, BOUNDS, q=1, num_restarts=3, raw_samples=48, options={"maxiter": 30})[0]


def by_thompson(X, Y, seed):
    (draw,) = model_of(X, Y, seed).function_draws(1, torch.Generator().manual_seed(len(X)))
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(len(X))).double()
    x = x[draw(x).topk(3, dim=0).indices[:, 0]].detach().requires_grad_()
    ascent = torch.optim.Adam([x], 0.02, maximize=True)
    for _ in range(20):
        ascent.zero_grad()
        draw(x).sum().backward()
        ascent.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x[draw(x).argmax()][None].detach()


def at_random(X, Y, seed):
    return torch.rand(1, 2, generator=torch.Generator().manual_seed(1000 * seed + len(X))).double()


def run(choose, seed):
    X, Y = start(seed)
    for _ in range(STEPS):
        torch.manual_seed(seed)
        x = choose(X, Y, seed)
        X, Y = torch.cat([X, x]), torch.cat([Y, measured(x)])
    return X, Y[:, 0]


WAYS = {"expected improvement": by_improvement, "Thompson sampling": by_thompson, "random": at_random}
runs = {name: [run(way, seed) for seed in range(SEEDS)] for name, way in WAYS.items()}
print(f"{'short of the highest value':28s}{'after 10 more':>15s}{f'after {STEPS} more':>15s}")
for name, found in runs.items():
    short = torch.stack([branin.optimal_value - Y.cummax(0).values for _, Y in found]).mean(0)
    print(f"{name:28s}{short[17]:15.3f}{short[-1]:15.3f}")

# %% alt="Left: how far the best value found falls short of the highest, by number of measurements, for three ways. Right: the measurements of the first run by expected improvement, most of them near the three maxima."
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
for (name, found), colour in zip(runs.items(), ("#00796b", "#5e35b1", "#90a4ae")):
    short = torch.stack([branin.optimal_value - Y.cummax(0).values for _, Y in found])[:, 7:]
    for one in short:
        left.plot(range(8, 31), one, color=colour, lw=0.8, alpha=0.4)
    left.plot(range(8, 31), short.mean(0), color=colour, lw=2.5, label=name)
left.set(yscale="log", xlabel="measurements", ylabel="short of the highest value")
left.legend(frameon=False)
X, _ = runs["expected improvement"][0]
right.contourf(t, t, maps["the function"].reshape(60, 60), 20, cmap="viridis")
right.scatter(*X[:8].T, color="white", edgecolor="black", s=40, label="the first eight")
right.scatter(
    *X[8:].T, c=range(STEPS), cmap="Reds", edgecolor="black", s=40, vmin=-8, label="chosen, later ones darker"
)
right.set(xticks=[0, 1], yticks=[0, 1])
right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False, fontsize=9)
fig.tight_layout()

# %% [markdown]
# Six dimensions, and a comparison with BoTorch's Gaussian process: [BoTorch](../botorch.md).
