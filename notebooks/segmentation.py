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
# # Segmentation: doubt for every pixel
#
# A segmentation network gives every pixel a class. With a posterior every pixel has a doubt too, in two parts:
# *aleatoric* doubt lies on borders and on small shapes, which noise makes hard to tell apart; *epistemic* doubt covers
# what the training images did not have.
#
# ## Images
#
# Generated: discs and squares on a noisy background, of brightness that changes from image to image.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw
from lapwing import metrics

torch.set_num_threads(1)
SIZE, NAMES = 24, ("background", "disc", "square")
rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")


def uniform(low, high, g):
    return float(low + (high - low) * torch.rand((), generator=g))


def scene(g, shapes=("disc", "square")):
    """An image (1, 24, 24), and the class of every pixel; a ring is no class, and is marked −1."""
    image, mask = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE, dtype=torch.long)
    for shape in shapes:
        y, x, r = uniform(6, SIZE - 6, g), uniform(6, SIZE - 6, g), uniform(3, 5, g)
        away = ((rows - y) ** 2 + (columns - x) ** 2) ** 0.5
        square = torch.maximum((rows - y).abs(), (columns - x).abs()) <= r
        inside = {"disc": away <= r, "square": square, "ring": (away <= r + 2) & (away >= r)}[shape]
        image[inside], mask[inside] = uniform(0.6, 1.0, g), {"disc": 1, "square": 2, "ring": -1}[shape]
    return image[None] + 0.15 * torch.randn(1, SIZE, SIZE, generator=g), mask


def scenes(n, seed, **options):
    g = torch.Generator().manual_seed(seed)
    images, masks = zip(*(scene(g, **options) for _ in range(n)))
    return torch.stack(images), torch.stack(masks)


X, Y = scenes(120, seed=0)
X_test, Y_test = scenes(60, seed=1)
X_odd, Y_odd = scenes(60, seed=2, shapes=("disc", "ring"))

# %% [markdown]
# ## Network and posterior
#
# A small encoder and decoder. Its output has the shape (batch, classes, height, width), so the classes are on axis 1. A
# datum here is an image with 576 labels: `fit` draws labels from the network instead of going through 1,728 outputs one
# by one (`fisher="auto"` decides that), and keeps Kronecker factors.


# %%
class Segmenter(nn.Module):
    def __init__(self, width=16):
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())

        self.fine, self.coarse = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined, self.last = block(2 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x):
        fine = self.fine(x)
        coarse = self.up(self.coarse(nn.functional.max_pool2d(fine, 2)))
        return self.last(self.joined(torch.cat([fine, coarse], 1)))


torch.manual_seed(0)
net = Segmenter()
optimiser = torch.optim.Adam(net.parameters(), 3e-3)
for _ in range(40):
    for batch in torch.randperm(len(X)).split(20):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(X[batch]), Y[batch]).backward()
        optimiser.step()
net.eval()

posterior = lw.fit(net, (X, Y), lw.Categorical(class_axis=1), structure="kron", progress=False)
posterior = lw.tune(posterior, (X, Y), progress=False)
p = posterior.predict(X_test)
print("probabilities", tuple(p.probs.shape), "epistemic", tuple(p.epistemic.shape))

# %% [markdown]
# On ordinary images there is little to gain: with 69,120 labelled pixels the weights that matter are well determined, and
# an average over the others is a little less sharp.

# %%
plain = net(X_test).detach().log_softmax(1)
print(f"{'':12s}{'accuracy':>10s}{'NLL per pixel':>16s}")
for name, log_probs in (("network", plain), ("posterior", p.probs.clamp_min(1e-12).log())):
    hit = (log_probs.argmax(1) == Y_test).float().mean()
    nll = nn.functional.nll_loss(log_probs, Y_test)
    print(f"{name:12s}{100 * hit:9.1f} %{nll:16.4f}")

# %% [markdown]
# ## Where the doubt is
#
# Two test images as in training, and two with a ring, which the network has never seen and has no class for.

# %% alt="Rows of images, predicted classes, aleatoric and epistemic doubt. Aleatoric doubt covers borders and discs; epistemic doubt lies on the rings, and where a disc and a square touch."
odd = posterior.predict(X_odd)
pictures = [(X_test, p, 0), (X_test, p, 1), (X_odd, odd, 0), (X_odd, odd, 1)]
fig, axes = plt.subplots(4, 4, figsize=(8.5, 8.5))
brightest = float(torch.cat([p.epistemic, odd.epistemic]).quantile(0.999))
for line, (x, q, i) in zip(axes, pictures):
    line[0].imshow(x[i, 0], cmap="gray", vmin=-0.3, vmax=1.2)
    line[1].imshow(q.probs[i].argmax(0), cmap="viridis", vmin=0, vmax=2)
    line[2].imshow(q.aleatoric[i], cmap="magma", vmin=0, vmax=0.7)
    line[3].imshow(q.epistemic[i], cmap="magma", vmin=0, vmax=brightest)
for axis, title in zip(axes[0], ("image", "predicted class", "aleatoric", "epistemic")):
    axis.set_title(title)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
fig.tight_layout()

# %% [markdown]
# ## Do the doubts find what is wrong?
#
# Three questions, each answered by an AUROC: does a pixel's doubt find wrong pixels on ordinary images? Does it tell the
# pixels of rings from the other pixels of the same images? And does an image's mean doubt tell images with a ring?


# %%
def entropy(x):
    return torch.distributions.Categorical(logits=net(x).detach().movedim(1, -1)).entropy()


wrong = p.probs.argmax(1) != Y_test
ring = Y_odd == -1
print(f"{'AUROC':28s}{'network: entropy':>20s}{'posterior: epistemic':>24s}")
h, h_odd, e, e_odd = entropy(X_test), entropy(X_odd), p.epistemic, odd.epistemic
questions = {
    "wrong pixels": ((h[~wrong], h[wrong]), (e[~wrong], e[wrong])),
    "pixels of rings": ((h_odd[~ring], h_odd[ring]), (e_odd[~ring], e_odd[ring])),
    "images with a ring": [(v.mean((1, 2)), w.mean((1, 2))) for v, w in ((h, h_odd), (e, e_odd))],
}
for question, pairs in questions.items():
    plain, ours = (float(metrics.auroc(*pair)) for pair in pairs)
    print(f"{question:28s}{plain:20.3f}{ours:24.3f}")

# %% [markdown]
# Single pixels are found by both. For the whole image the epistemic part is the better alarm: entropy also counts the
# borders, which every image has.
#
# Shapes of structured outputs: [predictions](../predictions.md#shapes).
