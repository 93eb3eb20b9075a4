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
# # Active learning: which images to label next
#
# Labels cost money. Given hundreds of images and the money for a hundred labels, which hundred? A posterior answers:
# those whose labels it expects to learn most from. This notebook compares that with choosing at random.
#
# ## Digits, ten labels at a time
#
# Pools are seldom balanced. Ours holds all zeros to fours that there are, but only one in six of the fives to nines. The
# 600 test images have every digit equally often. We begin with 20 labels; the network is trained anew in every round, so
# that no round depends on the luck of an earlier one.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
test, rest = order[:600], order[600:]
common, rare = rest[labels[rest] < 5], rest[labels[rest] >= 5]
pool = torch.cat([common, rare[: len(rare) // 6]])
print(f"{len(pool)} images without labels, {len(pool) - len(common)} of them of the five rare digits")


def trained(rows, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-3)
    for _ in range(120):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimiser.step()
    return net


def accuracy(net):
    return (net(images[test]).argmax(1) == labels[test]).float().mean().item()


# %% [markdown]
# ## Four ways to choose
#
# - *random*: ten of the pool.
# - *entropy*: the ten whose label the network itself is least sure of. No posterior is needed.
# - *BALD*: the ten whose labels would say most about the weights, each on its own.
# - *BatchBALD*: the ten whose labels would say most *together*: not ten images of the same odd seven.
#
# The posterior is of all weights, with Kronecker factors, and `lw.tune` chooses its prior precision. That matters: with
# few labels an untuned prior says far too little or far too much about what the network does not know.

# %%
N_BATCH, N_ROUNDS, SEEDS = 10, 11, 4


def posterior(net, rows):
    data = (images[rows], labels[rows])
    return lw.tune(lw.fit(net, data, "classification", structure="kron", progress=False), data, progress=False)


def at_random(net, rows, left, generator):
    return torch.randperm(len(left), generator=generator)[:N_BATCH]


def by_entropy(net, rows, left, generator):
    return torch.distributions.Categorical(logits=net(images[left]).detach()).entropy().topk(N_BATCH).indices


def by_bald(net, rows, left, generator):
    return lw.acquisition.bald(posterior(net, rows), images[left]).topk(N_BATCH).indices


def by_batch_bald(net, rows, left, generator):
    some = torch.randperm(len(left), generator=generator)[:200]  # of the pool, which is what this one takes time for
    chosen = lw.acquisition.batch_bald(posterior(net, rows), images[left[some]], N_BATCH, n_samples=50)
    return some[chosen]


def curve(choose, seed):
    """Test accuracy after each round, and the rows that were labelled."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = pool[torch.randperm(len(pool), generator=generator)]
    rows, left, found = shuffled[:20], shuffled[20:], []
    for _ in range(N_ROUNDS):
        net = trained(rows, seed)
        found.append(accuracy(net))
        chosen = choose(net, rows, left, generator)
        keep = torch.ones(len(left), dtype=torch.bool)
        keep[chosen] = False
        rows, left = torch.cat([rows, left[chosen]]), left[keep]
    return found, rows


WAYS = {"random": at_random, "entropy": by_entropy, "BALD": by_bald, "BatchBALD": by_batch_bald}
curves = {name: torch.tensor([curve(way, seed)[0] for seed in range(SEEDS)]) for name, way in WAYS.items()}
counts = [20 + N_BATCH * i for i in range(N_ROUNDS)]
print("test accuracy by labels" + "".join(f"{n:7d}" for n in counts[::2]))
for name, found in curves.items():
    print(f"{name:23s}" + "".join(f"{100 * v:7.1f}" for v in found.mean(0)[::2].tolist()))

# %% alt="Test accuracy against the number of labels for four ways to choose, with standard errors over four seeds."
fig, axis = plt.subplots(figsize=(7, 4))
for (name, found), colour in zip(curves.items(), ("#90a4ae", "#ffb300", "#00796b", "#5e35b1")):
    mean, error = 100 * found.mean(0), 100 * found.std(0) / SEEDS**0.5
    axis.fill_between(counts, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
    axis.plot(counts, mean, "o-", ms=4, color=colour, label=name)
axis.set(xlabel="labels", ylabel="test accuracy, %")
axis.legend(frameon=False)
fig.tight_layout()

# %% [markdown]
# All three ways find the rare digits. The network's entropy does as well as the posterior here, because these images have
# no wrong or ambiguous labels; it would go on asking about images that nobody can read, which BALD leaves alone: their
# label is in doubt, but not for want of data. BatchBALD saw a random part of the pool in each round.
#
# What is that worth in labels?

# %%
goal = curves["random"].mean(0)[-1]
print(f"random choice has {100 * goal:.1f} % with {counts[-1]} labels; the same accuracy takes")
for name in list(WAYS)[1:]:
    reached = (curves[name].mean(0) >= goal).nonzero()
    print(f"{name:12s}{counts[int(reached[0])] if len(reached) else 'more':>5} labels")

# %% [markdown]
# ## What was chosen
#
# The first ten of each way, from the same network. Random choice brings easy images; the others bring odd ones.

# %% alt="Rows of ten digit images, the first choices of each way."
generator = torch.Generator().manual_seed(0)
rows, left = pool[:20], pool[20:]
net = trained(rows, seed=0)
fig, axes = plt.subplots(len(WAYS), N_BATCH, figsize=(9, 4))
for line, (name, way) in zip(axes, WAYS.items()):
    for axis, i in zip(line, way(net, rows, left, generator)):
        axis.imshow(images[left[i]].reshape(8, 8), cmap="gray_r")
        axis.set(xticks=[], yticks=[])
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
fig.tight_layout()

# %% [markdown]
# `lw.acquisition.epig` asks a further question, what a label tells of the answers that you need:
# [active learning](../active-learning.md).
