"""Figures of the demo: a heading, one sentence on what to see, and SVG panels that the page arranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure as Canvas

from lapwing_studies.report import draw
from lapwing_studies.report.palette import STYLE, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.bench.records import (
        DemoRecord,
        DigitsRecord,
        EvidenceCurve,
        MoonsRecord,
        RegressionRecord,
    )


@dataclass(frozen=True)
class Key:
    """An entry of a legend. `look` is a CSS class (a colour swatch); `layers` are the gids that it switches."""

    label: str
    look: str
    layers: str = ""


@dataclass(frozen=True)
class Scale:
    """A colour bar: CSS gradient stops and the words at its ends."""

    low: str
    high: str
    stops: str


@dataclass(frozen=True)
class Panel:
    """One set of axes: words for those who cannot see it, how it is painted, and its shape in inches."""

    name: str
    title: str
    paint: Callable[[Axes], None]
    shape: tuple[float, float] = (4.2, 3.3)


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    see: str
    panels: tuple[str, ...]
    note: str = ""
    keys: tuple[Key, ...] = ()
    scales: tuple[Scale, ...] = ()
    wide: str = ""
    drawn: tuple[Panel, ...] = ()  # what the panels were made of

    @staticmethod
    def of(
        name: str, title: str, see: str, drawn: Iterable[Panel], *, note: str = "", keys: Iterable[Key] = ()
    ) -> Figure:
        drawn = tuple(drawn)
        wide = "wide" if len(drawn) == 1 and drawn[0].shape[0] >= 9 else ""
        panels = tuple(panel(p.name, p.title, p.paint, shape=p.shape) for p in drawn)
        return Figure(name, title, see, panels, note, tuple(keys), (), wide, drawn)


def panel(name: str, title: str, paint: Callable[[Axes], None], *, shape: tuple[float, float] = (4.2, 3.3)) -> str:
    """One set of axes as an SVG element; `shape` in inches, 72 points each."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=shape, layout="constrained")
        paint(canvas.subplots())
        return to_svg(canvas, name=name, title=title)


def all_figures(record: DemoRecord) -> dict[str, Figure]:
    """Every figure of the demo's page, by name."""
    digits = record["digits"]
    figures = [regression(record["regression"]), moons(record["moons"])]
    figures += [reliability(digits), entropies(digits), evidence(digits)]
    return {figure.name: figure for figure in figures}


def regression(record: RegressionRecord) -> Figure:
    frames = range(len(record["bands"]))
    svg = panel(
        "regression",
        "A regression network with its 95% band. The band is narrow on the data and widens in the gap between them.",
        lambda ax: draw.regression(ax, record, bands=frames),
        shape=(9.0, 4.1),
    )
    return Figure(
        "regression",
        "One curve, and how far to trust it",
        "Look at the middle: nobody measured anything there, and the band opens by itself, while the network's own "
        "line crosses the gap as if it knew.",
        (svg,),
        keys=(
            Key("data", "dot", "data"),
            Key("truth, unknown to the network", "dash muted", "truth"),
            Key("trained network (MAP)", "line map", "mean"),
            Key("95% of what the function may be (epistemic)", "fill glm strong", "epistemic"),
            Key("95% of where new data fall (plus noise)", "fill glm", "total"),
            Key("functions drawn from the posterior", "line glm thin", "draw"),
        ),
        wide="wide",
    )


def reliability(record: DigitsRecord) -> Figure:
    panels = [
        panel(
            f"reliability-{k}",
            f"Reliability of {c['method']}: expected calibration error {c['ece']:.3f}.",
            lambda ax, c=c: draw.reliability(ax, c),  # type: ignore[misc]
            shape=(3.6, 3.3),
        )
        for k, c in enumerate(record["curves"])
    ]
    return Figure(
        "reliability",
        "When it says 80%, is it right 80% of the time?",
        "Bars that end on the dashed diagonal mean honest confidence; above it the prediction is too timid, below it "
        "too sure.",
        tuple(panels),
        "The number in a bar counts its points, and a pale bar has too few to say much. Prior tuned by the evidence.",
    )


def entropies(record: DigitsRecord) -> Figure:
    photos = record["map_on_photos"]
    panels = [
        panel(
            f"entropy-{k}",
            f"Entropies of {c['method']} on digits and on photographs: OOD-AUC {c['ood_auc_photos']:.3f}.",
            lambda ax, c=c: draw.entropies(ax, c),  # type: ignore[misc]
            shape=(3.6, 3.0),
        )
        for k, c in enumerate(record["curves"])
    ]
    return Figure(
        "entropy",
        "Does it notice inputs unlike its training data?",
        "The less the grey patches of photographs overlap the coloured test digits, the better the entropy works as an "
        "alarm.",
        tuple(panels),
        f"No patch shows a digit, yet the plain network is {photos['confidence']:.0%} sure of its answers on average. "
        "OOD-AUC 1 is a perfect alarm, 0.5 is a coin. Prior tuned by the evidence.",
        (Key("patches of photographs", "fill outside strong"),),
    )


def moons(record: MoonsRecord) -> Figure:
    upper = {"probability": 1.0}
    for kind in ("epistemic", "aleatoric"):
        upper[kind] = max(max(map(max, m["values"])) for m in record["maps"] if m["kind"] == kind)
    panels = [
        panel(
            f"moons-{k}",
            f"Map of the two-moons plane, {draw.map_title(m)}.",
            lambda ax, m=m: draw.uncertainty_map(ax, record, m, upper=upper[m["kind"]]),  # type: ignore[misc]
            shape=(3.6, 3.1),
        )
        for k, m in enumerate(record["maps"])
    ]
    return Figure(
        "moons",
        "Two moons: where a classifier is entitled to an opinion",
        "Compare how sure each map stays far from every point, and whether the boundary line follows the moons.",
        tuple(panels),
        "Aleatoric uncertainty belongs where the classes overlap, epistemic where data are missing.",
        scales=(
            Scale("class 0", "class 1", _stops(draw.COLOUR_MAPS["probability"])),
            Scale(
                "0 nats",
                f"epistemic {upper['epistemic']:.2f} / aleatoric {upper['aleatoric']:.2f} nats",
                _stops(draw.COLOUR_MAPS["epistemic"]),
            ),
        ),
    )


def evidence(record: DigitsRecord) -> Figure:
    curve = record["evidence"]
    panels = (
        panel(
            "evidence-0", "Log evidence against prior precision.", lambda ax: draw.evidence(ax, curve), shape=(5.0, 3.3)
        ),
        panel(
            "evidence-1", "Held-out NLL against prior precision.", lambda ax: draw.held_out(ax, curve), shape=(5.0, 3.3)
        ),
    )
    return Figure(
        "evidence",
        "Choosing the prior without a validation set",
        "The evidence, left, needs the training data alone; held-out digits, right, do not have to agree with it.",
        panels,
        _verdict(curve),
        (Key("trained network (MAP)", "dash map"), Key("sampled network", "line sampled"), Key("GLM", "line glm")),
    )


def _verdict(curve: EvidenceCurve) -> str:
    """A sentence that compares the two choices, depending on the numbers."""
    if curve["by_validation"] >= 0.99 * curve["precision"][-1]:
        return (
            "Held-out NLL pushes the precision to the end of the grid, where the GLM is the MAP network again: on "
            "these easy digits the error bars cost NLL, and what they buy is the alarm above."
        )
    ratio = curve["by_validation"] / curve["by_evidence"]
    return f"Held-out NLL picks {ratio:.2g} times the precision that the evidence picks."


def _stops(name: str) -> str:
    """A colour map as the stops of a CSS gradient."""
    colours = matplotlib.colormaps[name]
    stops = [tuple(round(255 * v) for v in colours(k / 8)[:3]) for k in range(9)]
    return ", ".join(f"rgb({r} {g} {b})" for r, g, b in stops)
