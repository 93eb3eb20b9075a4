"""Draw the pictures of the tutorials: python tools/tutorial_pictures.py [NAME …], into docs/assets/tutorial-NAME.png.

The first five are the panels of `lapwing reproduce tutorial`, one by one. The others run the code of their own page, so
that picture and page cannot disagree; `lora` needs the extra `hf`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lapwing as lw
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, PAPER, SAMPLED, STYLE
from lapwing_studies.report.tutorial import paint
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.tutorial import density_panel, logistic_panel
from lapwing_studies.reproduce.tutorial_networks import mode_panel, network_panel, scale_panel

DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> dict[str, Any]:
    """Run the Python examples of a tutorial, quietly; the names that they define."""
    namespace: dict[str, Any] = {}
    text = (DOCS / "tutorials" / f"{name}.md").read_text("utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(compile(block, f"{name}.md", "exec"), namespace)
    return namespace


# --- panels of the study ------------------------------------------------------------------------------------------


def one_weight() -> Figure:
    return _of_study(density_panel())


def logistic() -> Figure:
    return _of_study(logistic_panel())


def evidence() -> Figure:
    panel = network_panel()
    panel["curves"] = {name: curve for name, curve in panel["curves"].items() if not name.startswith("sampled")}
    return _of_study(panel, title="Two standard deviations of a new observation", ylim=(-2.5, 2.5), points=True)


def linearise() -> Figure:
    panel = network_panel()
    low, high = (panel["curves"][f"sampled {sign}"] for sign in "−+")
    panel["curves"]["sampled"] = [(a + b) / 2 for a, b in zip(low, high)]
    return _of_study(panel, ylim=(-16, 16))


def scale() -> Figure:
    return _of_study(scale_panel())


def mode() -> Figure:
    return _of_study(mode_panel())


def _of_study(
    panel: Record, *, title: str | None = None, ylim: tuple[float, float] | None = None, points: bool = False
) -> Figure:
    canvas, (ax,) = _axes(1, (7.0, 3.8))
    paint(ax, panel)
    if points:
        ax.plot(*_sine(), ".", color=INK, markersize=4, label="data")
    ax.set_title(title) if title else None
    ax.set_ylim(*ylim) if ylim else None
    ax.legend(fontsize=9, framealpha=0.9, edgecolor=PAPER)
    return canvas


def _sine() -> tuple[Any, Any]:
    import numpy as np

    x = np.linspace(-1, 1, 41)
    return x, np.sin(2 * np.pi * x) + 0.1 * np.random.default_rng(0).normal(size=41)


# --- pictures of the pages' own code ------------------------------------------------------------------------------


def structures() -> Figure:
    on_page = page("structures")
    fitted, x, y, full = (on_page[name] for name in ("fitted", "x", "y", "full"))
    shown = {
        "full": full,
        "block": fitted("block"),
        "Kronecker factors": fitted("kron"),
        "diagonal": fitted("diag"),
        "last layer": fitted("full", params="last_layer"),
        "60 weights": fitted("full", params=lw.Subnetwork(k=60)),
    }
    grid = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None]
    canvas, axes = _axes(6, (12.0, 6.0), rows=2)
    for ax, (name, posterior) in zip(axes, shown.items()):
        mean, var = (v.flatten().detach() for v in (posterior.outputs(grid).mean, posterior.outputs(grid).var))
        half = 2 * var.sqrt()
        ax.fill_between(grid[:, 0], mean - half, mean + half, color=GLM, alpha=0.25, linewidth=0)
        ax.plot(grid[:, 0], mean, color=MAP)
        ax.plot(x[:, 0], y[:, 0], ".", color=INK, markersize=3)
        ax.set(title=name, ylim=(-3.5, 3.5), xlim=(-3, 3))
    return canvas


def memory() -> Figure:
    """Bytes that a fit stores, by `lw.plan`, of two hidden layers of growing width and ten classes."""
    stored: dict[str, list[tuple[int, int]]] = {}
    for width in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        layers = [torch.nn.Linear(64, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
        data = torch.randn(20_000, 64), torch.arange(20_000) % 10
        n_weights = sum(p.numel() for p in model.parameters())
        for row in lw.plan(model, data, "classification", memory="4GB").rows:
            if row.p == n_weights and row.structure in _KEPT:
                stored.setdefault(row.structure, []).append((row.p, row.stored_bytes))
    canvas, (ax,) = _axes(1, (7.0, 3.8))
    for name, points in stored.items():
        colour, label = _KEPT[name]
        ax.loglog(*zip(*points), "o-", color=colour, markersize=4, label=label)
    ax.axhline(4 * 2**30, color=MUTED, linestyle=":")
    ax.text(700, 5.5 * 2**30, "4 GiB", color=MUTED)
    ax.set_yticks([2.0**k for k in (10, 20, 30, 40, 50)], ["1 KiB", "1 MiB", "1 GiB", "1 TiB", "1 PiB"])
    ax.set(xlabel="weights", title="What a posterior stores", ylim=(2**11, 2**48))
    ax.legend(frameon=False)
    return canvas


_KEPT = {
    "full": (INK, "full"),
    "kron": (GLM, "Kronecker factors"),
    "diag": (MAP, "diagonal"),
    "matrixfree": (SAMPLED, "matrix-free, 64 directions"),
}


def training() -> Figure:
    run = page("training")["run"]
    steps = [record for record in run.history if record.log_evidence is not None]
    epochs = [record.epoch for record in steps]
    canvas, (left, right) = _axes(2, (10.0, 3.6))
    left.plot(epochs, [record.log_evidence for record in steps], "o-", color=GLM, markersize=4)
    left.set(title="Log evidence", xlabel="epoch")
    for k, colour in enumerate((GLM, SAMPLED, MAP)):
        path = [record.precisions[k] for record in steps]
        right.semilogy(epochs, path, "o-", color=colour, markersize=4, label=f"layer {k + 1}")
    right.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    right.minorticks_off()
    right.set(title="Prior precision of each layer", xlabel="epoch", ylim=(0.1, 2.2))
    right.legend(frameon=False)
    return canvas


def images() -> Figure:
    on_page = page("images")
    truth, post = on_page["truth"], on_page["post"]
    draw = post.sample(1, generator=torch.Generator().manual_seed(1))[0]
    grey, heat = {"cmap": "gray", "vmin": 0, "vmax": 1}, {"cmap": "magma", "vmin": 0, "vmax": 0.2}
    shown = {
        "truth": (truth, grey),
        "reconstruction": (post.mean, grey),
        "error": ((post.mean - truth).abs(), heat),
        "standard deviation": (post.std, heat),
        "a draw": (draw, grey),
    }
    canvas, axes = _axes(5, (12.0, 2.8))
    for ax, (name, (image, look)) in zip(axes, shown.items()):
        ax.imshow(image.detach(), interpolation="nearest", **look)
        ax.set_title(name)
        ax.set_axis_off()
    return canvas


def lora() -> Figure:
    on_page = page("lora")
    canvas, (ax,) = _axes(1, (7.0, 3.4))
    bins: Any = torch.linspace(0, 0.5, 26).numpy()
    for name, colour, label in (("p", GLM, "familiar rows"), ("odd", SAMPLED, "foreign rows")):
        ax.hist(on_page[name].epistemic.numpy(), bins, color=colour, alpha=0.6, label=label)
    ax.set(title="Epistemic uncertainty", xlabel="nats", ylabel="rows of 200")
    ax.legend(frameon=False)
    return canvas


def _axes(n: int, shape: tuple[float, float], rows: int = 1) -> tuple[Figure, list[Axes]]:
    canvas = Figure(figsize=shape, layout="constrained")
    return canvas, list(canvas.subplots(rows, n // rows, squeeze=False).flat)


PICTURES: dict[str, Callable[[], Figure]] = {
    "one-weight": one_weight, "logistic": logistic, "evidence": evidence, "linearise": linearise, "scale": scale,
    "mode": mode, "structures": structures, "memory": memory, "training": training, "images": images, "lora": lora,
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER}):
            path = DOCS / "assets" / f"tutorial-{name}.png"
            PICTURES[name]().savefig(path, dpi=100, metadata={"Software": None})
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
