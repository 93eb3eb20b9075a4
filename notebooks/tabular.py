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
# # Tables: how sure is a regression?
#
# A network for a table gives a number. This notebook asks how far off that number may be. We begin with data that we
# make ourselves, so that every error bar can be compared with the truth, and end with measurements of patients.
#
# ## A table whose truth is known
#
# Friedman's function has five inputs that matter and five that do not. We add noise with a standard deviation of 1 and
# show the network 300 rows, with inputs that are standardised, as networks like them.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.model_selection import KFold
from torch import nn

import lapwing as lw
from lapwing.sklearn import LapwingRegressor

torch.set_num_threads(1)
torch.manual_seed(0)


def friedman(n, seed):
    """Standardised inputs, what the function says there, and a noisy target."""
    X, f = (torch.tensor(v, dtype=torch.float32) for v in make_friedman1(n, noise=0.0, random_state=seed))
    noise = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return (X - 0.5) * 12**0.5, f[:, None], (f + noise)[:, None]


X, _, Y = friedman(300, seed=0)
X_test, f_test, Y_test = friedman(2000, seed=1)
shift, scale = Y.mean(), Y.std()

net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 1))
optimiser = torch.optim.Adam(net.parameters(), 5e-3, weight_decay=1e-3)
for _ in range(300):
    optimiser.zero_grad()
    (net(X) - (Y - shift) / scale).square().mean().backward()
    optimiser.step()

residual = (net(X) * scale + shift - Y).square().mean().sqrt()
error = (net(X_test) * scale + shift - Y_test).square().mean().sqrt()
print(f"root mean square error: {residual.item():.2f} on training rows, {error.item():.2f} on test rows")

# %% [markdown]
# The residuals of the training rows are far smaller than the errors on new rows: taken as an error bar, they would
# promise too much. `lw.fit` and `lw.tune` need the same rows and no others. `fit` collects the curvature in one pass;
# `tune` finds the noise level and the prior precision by the marginal likelihood.

# %%
posterior = lw.tune(lw.fit(net, (X, (Y - shift) / scale), "regression"))
p = posterior.predict(X_test)
mean, std = p.mean * scale + shift, p.std * scale
noise, doubt = p.aleatoric.sqrt() * scale, p.epistemic.sqrt() * scale

plain = torch.distributions.Normal(net(X_test).detach() * scale + shift, residual.detach())
ours = torch.distributions.Normal(mean, std)
print(f"estimated noise {noise.mean():.2f} (the truth: 1.00)")
print(f"{'':20s}{'test NLL':>10s}{'in the 90 % interval':>24s}")
for name, d in (("training residuals", plain), ("posterior", ours)):
    inside = ((Y_test - d.mean).abs() < 1.645 * d.stddev).float().mean()
    print(f"{name:20s}{-d.log_prob(Y_test).mean().item():10.2f}{100 * inside.item():22.1f} %")

# %% [markdown]
# The error bar has two parts. `aleatoric` is the noise: new rows of the same kind would not reduce it. `epistemic` is
# the network's own doubt, and it differs from row to row. It should be large where the network is wrong about the
# *function*; here we can look, because we know the function.

# %%
wrong = (mean - f_test).abs()[:, 0]
print(f"error about the function, root mean square: {wrong.square().mean().sqrt():.2f}")
print(f"what the posterior expected of it:          {doubt.square().mean().sqrt():.2f}")

# %% alt="Left: error about the function against the epistemic standard deviation; the root mean square in ten groups follows the diagonal. Right: share of targets inside intervals against the stated share, close to the diagonal for the posterior and far below it for training residuals."
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
order = doubt[:, 0].argsort()
left.scatter(doubt, wrong, s=4, alpha=0.3, color="#00796b")
groups = order.chunk(10)
left.plot(
    [doubt[g].mean() for g in groups], [wrong[g].square().mean().sqrt() for g in groups], "o-", color="#263238",
    label="root mean square, ten groups",
)  # fmt: skip
left.axline((0, 0), slope=1, color="grey", lw=1, ls="--")
left.set(xlabel="epistemic standard deviation", ylabel="error about the function", xlim=(0, None), ylim=(0, None))
left.legend(frameon=False)
levels = torch.linspace(0.05, 0.99, 30)
for name, d, colour in (("training residuals", plain, "#b0bec5"), ("posterior", ours, "#00796b")):
    z = ((Y_test - d.mean) / d.stddev).abs()
    half = torch.distributions.Normal(0.0, 1.0).icdf((1 + levels) / 2)
    right.plot(levels, [(z < h).float().mean() for h in half], lw=2.5, label=name, color=colour)
right.axline((0, 0), slope=1, color="grey", lw=1, ls="--")
right.set(xlabel="stated probability of the interval", ylabel="share of test targets inside")
right.legend(frameon=False)
fig.tight_layout()

# %% [markdown]
# ## Rows unlike any before
#
# All inputs so far lay in a box (grey below). We move one input that matters out of that box, and one that does not.
# The network goes on giving numbers, and its residuals say nothing about them. The posterior's band widens.

# %% alt="Predictions along two inputs with a band of two standard deviations. Both bands are narrow inside the box of the training rows and widen outside."
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
t = torch.linspace(-6, 6, 200)
for axis, column, title in zip(axes, (3, 8), ("input 4, which matters", "input 9, which does not")):
    line = torch.zeros(200, 10)
    line[:, column] = t
    q = posterior.predict(line)
    m, s = (q.mean * scale + shift)[:, 0], (q.epistemic.sqrt() * scale)[:, 0]
    given = line / 12**0.5 + 0.5
    truth = 10 * torch.sin(torch.pi * given[:, 0] * given[:, 1]) + 10 * given[:, 3] + 5 * given[:, 4]
    axis.fill_between(t, m - 2 * s, m + 2 * s, color="#80cbc4", alpha=0.6, lw=0, label="two standard deviations")
    axis.plot(t, m, color="#00796b", label="prediction")
    axis.plot(t, truth, color="#263238", ls="--", lw=1, label="truth")
    axis.axvspan(-(3**0.5), 3**0.5, color="#eceff1", zorder=0)
    axis.set(xlabel=title)
axes[0].set(ylabel="function")
axes[0].legend(frameon=False)
fig.tight_layout()

# %% [markdown]
# ## Patients
#
# The diabetes table has ten measurements of 442 patients and the progression of their disease a year later. Nobody
# knows the noise here, so we count: `LapwingRegressor` does the standardising, training, fitting and tuning in one
# call, and every patient is predicted once by an estimator that has not seen them.

# %%
data, target = load_diabetes(return_X_y=True)
inside, width, std_of = 0, 0.0, torch.zeros(len(target), dtype=torch.float64)
score = 0.0
for train, test in KFold(5, shuffle=True, random_state=0).split(data):
    model = LapwingRegressor(random_state=0).fit(data[train], target[train])
    m, s = (torch.as_tensor(v) for v in model.predict(data[test], return_std=True))
    low, high = model.predict_interval(data[test], 0.9)
    inside += int(((low <= target[test]) & (target[test] <= high)).sum())
    width += float((high - low).sum())
    score -= float(torch.distributions.Normal(m, s).log_prob(torch.as_tensor(target[test])).sum())
    std_of[test] = s
n = len(target)
print(f"in the 90 % interval: {100 * inside / n:.1f} % of {n} patients; mean width {width / n:.0f}")
print(
    f"NLL {score / n:.2f}; standard deviations from {std_of.min():.0f} to {std_of.max():.0f}, of the targets {target.std():.0f}"
)

# %% [markdown]
# More on the estimators: [scikit-learn](../sklearn.md); on noise and doubt: [predictions](../predictions.md).
