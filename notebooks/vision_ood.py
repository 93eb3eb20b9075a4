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
# # Images, and images of something else
#
# A classifier has to answer, whatever it is shown. Trained on the digits 0 to 7 it will call an eight something too. This
# notebook trains a convolutional network, gives it error bars, and shows it things that it has never seen.
#
# ## A network for eight digits

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

import lapwing as lw
from lapwing import metrics

torch.set_num_threads(1)
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
known, unknown = labels < 8, labels >= 8
X, Y = pixels[known], labels[known]
order = torch.randperm(len(X))
train, test = order[:600], order[600:]

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8),
)  # fmt: skip
optimiser = torch.optim.Adam(net.parameters(), 2e-3)
for _ in range(150):
    for rows in train[torch.randperm(len(train))].split(50):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(X[rows]), Y[rows]).backward()
        optimiser.step()
net.eval()
accuracy = (net(X[test]).argmax(1) == Y[test]).float().mean()
print(f"test accuracy {100 * accuracy:.1f} % on {len(test)} images of the digits 0 to 7")

# %% [markdown]
# ## Error bars
#
# One pass over the training images for the curvature, with a Kronecker-factored block for each layer. The prior precision
# is chosen by the marginal likelihood of the training images. Held-out images would choose it by how well *such* images
# are predicted, which says nothing of strangers; where strangers matter, the evidence is the better judge.

# %%
posterior = lw.fit(net, (X[train], Y[train]), "classification", structure="kron", progress=False)
posterior = lw.tune(posterior, (X[train], Y[train]), progress=False)

# %% [markdown]
# ## Three kinds of strangers
#
# - *eights and nines*: digits, but none that the network has seen;
# - *upside down*: the test images turned by 180 degrees (without 0 and 1, which stay what they are);
# - *photographs*: patches of 8 × 8 pixels from two photographs.

# %%
turned = X[test][Y[test] > 1].flip(2, 3)
photographs = torch.cat([torch.tensor(image).float().mean(2).unfold(0, 8, 40).unfold(1, 8, 40).reshape(-1, 1, 8, 8)
                         for image in load_sample_images().images]) / 255  # fmt: skip
shown = {"test images": X[test], "eights and nines": pixels[unknown], "upside down": turned, "photographs": photographs}


def plain_entropy(x):
    return torch.distributions.Categorical(logits=net(x).detach()).entropy()


scores = {name: (plain_entropy(x), posterior.predict(x).epistemic) for name, x in shown.items()}
print(f"{'AUROC against test images':28s}{'network: entropy':>20s}{'posterior: epistemic':>24s}")
for name in list(shown)[1:]:
    plain, ours = (float(metrics.auroc(scores["test images"][i], scores[name][i])) for i in (0, 1))
    print(f"{name:28s}{plain:20.3f}{ours:24.3f}")

# %% alt="Histograms of the doubt about test images and three kinds of strangers, by the network's entropy and by the posterior's epistemic uncertainty."
fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
colours = ("#263238", "#00796b", "#ffb300", "#5e35b1")
for axis, which, title in zip(axes, (0, 1), ("the network's entropy", "the posterior's epistemic part")):
    edges = torch.linspace(-6, 0.35, 26)
    for (name, found), colour in zip(scores.items(), colours):
        values = found[which].clamp_min(1e-6).log10()
        axis.hist(values, bins=edges.numpy(), density=True, histtype="step", lw=2, color=colour, label=name)
    axis.set(xlabel=f"{title}, nats", xticks=range(-6, 1), xticklabels=[f"$10^{{{k}}}$" for k in range(-6, 1)])
    axis.set(yticks=[])
axes[0].legend(frameon=False, loc="upper left")
fig.tight_layout()

# %% [markdown]
# The network's softmax is certain of many strangers: their logits are large, and nothing tells it that they rest on
# weights that no training image has tested. The epistemic part does.
#
# ## The images themselves
#
# Eight strangers of each kind, as they come. Above each: the network's answer and its probability, and the probability
# of that answer averaged over the posterior. What still looks like a known digit (a five upside down) stays one: no
# error bar can know that it was turned.

# %% alt="Eight strangers of each kind, with the network's answer, its probability and that of the posterior, which is mostly smaller."
generator = torch.Generator().manual_seed(0)
fig, axes = plt.subplots(3, 8, figsize=(10, 5))
for line, (name, x) in zip(axes, list(shown.items())[1:]):
    some = x[torch.randperm(len(x), generator=generator)[:8]]
    p_net, p_ours = net(some).softmax(1).detach(), posterior.predict(some).probs
    for axis, image, a, b in zip(line, some, p_net, p_ours):
        axis.imshow(image[0], cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"“{int(a.argmax())}” {a.max():.2f}\nnow {b[a.argmax()]:.2f}", fontsize=9)
    line[0].set_ylabel(name)
fig.tight_layout()

# %% [markdown]
# ## What it costs on ordinary images
#
# The digits that the network does know are predicted better too: its few errors are no longer made with certainty.

# %%
p = posterior.predict(X[test])
plain = net(X[test]).softmax(1).detach()
print(f"{'':12s}{'accuracy':>10s}{'NLL':>8s}{'ECE':>8s}")
for name, probs in (("network", plain), ("posterior", p.probs)):
    hit = (probs.argmax(1) == Y[test]).float().mean()
    nll = -probs.gather(1, Y[test, None]).clamp_min(1e-12).log().mean()
    print(f"{name:12s}{100 * hit:9.1f} %{nll:8.3f}{metrics.ece(probs, Y[test]):8.3f}")

# %% [markdown]
# An alarm with a guaranteed rate of false alarms is made from such scores by
# [intervals and alarms with a guarantee](../guarantees.md).
