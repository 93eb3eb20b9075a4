"""A small record of the demo's shape, made of formulas: the report is tested without running any network."""

from __future__ import annotations

import math
import random

from lapwing_studies.bench.records import (
    Answers,
    Band,
    Bins,
    DemoRecord,
    DigitsRecord,
    DigitsRow,
    EvidenceCurve,
    Example,
    MethodCurves,
    MoonsRecord,
    RegressionRecord,
    RegressionRow,
    UncertaintyMap,
)

METHODS = ("MAP", "sampled network", "GLM")
TUNINGS = (
    ("MAP", "–", None),
    ("sampled network", "evidence", 0.5),
    ("GLM", "evidence", 0.5),
    ("sampled network", "validation", 50.0),
    ("GLM", "validation", 5.0),
)


def synthetic_record() -> DemoRecord:
    draw = random.Random(0)
    return DemoRecord(
        workload="demo",
        seed=0,
        seconds=1.5,
        settings=[{"name": "structure", "value": "full <GGN> & prior"}],
        regression=_regression(draw),
        digits=_digits(draw),
        moons=_moons(draw),
    )


def _regression(draw: random.Random) -> RegressionRecord:
    x = [-6 + 12 * k / 80 for k in range(81)]
    mean = [math.sin(v) for v in x]
    train_x = [v for v in x if 1 < abs(v) < 4]
    bands = [_band(x, 10.0 ** (k - 2)) for k in range(5)]
    return RegressionRecord(
        parameters=50,
        n_curves=2,
        gap=[-1.0, 1.0],
        noise_std=0.2,
        true_noise_std=0.2,
        train_x=train_x,
        train_y=[math.sin(v) + draw.gauss(0, 0.2) for v in train_x],
        x=x,
        truth=mean,
        mean=mean,
        draws=[[m + draw.gauss(0, 0.3) for m in mean] for _ in range(3)],
        bands=bands,
        tuned=2,
        rows=[
            RegressionRow(method=m, where=w, rmse=0.2 + k, nll=0.1 * k, coverage=0.9, width=1.0)
            for k, m in enumerate(METHODS)
            for w in ("on the data", "in the gap")
        ],
    )


def _band(x: list[float], precision: float) -> Band:
    epistemic = [(0.05 + 0.3 * math.exp(-v * v)) / precision**0.25 for v in x]
    total = [math.hypot(e, 0.2) for e in epistemic]
    return Band(precision=precision, log_evidence=-(math.log(precision) ** 2), epistemic_std=epistemic, total_std=total)


def _digits(draw: random.Random) -> DigitsRecord:
    edges = [k / 10 for k in range(11)]
    bins = Bins(
        lower=edges[:-1],
        upper=edges[1:],
        count=[0, 0, *range(1, 9)],
        confidence=[None, None, *(e - 0.05 for e in edges[3:])],
        accuracy=[None, None, *edges[2:-1]],
    )
    inside = [abs(draw.gauss(0, 0.4)) for _ in range(50)]
    outside = [1 + e for e in inside]
    curves = [
        MethodCurves(method=m, ece=0.05, ood_auc_photos=0.9, bins=bins, entropy_digits=inside, entropy_photos=outside)
        for m in METHODS
    ]
    rows = [
        DigitsRow(
            method=m, tuning=t, precision=p, accuracy=0.9, nll=0.3 + k, ece=0.05, brier=0.2, ood_auc_photos=0.9,
            ood_auc_turned=0.4,
        )
        for k, (m, t, p) in enumerate(TUNINGS)
    ]  # fmt: skip
    return DigitsRecord(
        parameters=2410,
        n_train=100,
        n_validation=50,
        n_test=50,
        map_on_photos=Answers(label=8, share=0.3, confidence=0.6),
        map_on_turned=Answers(label=4, share=0.5, confidence=0.7),
        rows=rows,
        curves=curves,
        evidence=EvidenceCurve(
            precision=[0.01, 0.1, 1.0, 10.0, 100.0],
            log_evidence=[-900.0, -700.0, -600.0, -650.0, -900.0],
            held_out_glm=[0.9, 0.5, 0.3, 0.25, 0.3],
            precision_sampled=[0.01, 1.0, 100.0],
            held_out_sampled=[2.2, 1.8, 0.5],
            held_out_map=0.3,
            by_evidence=1.0,
            by_validation=10.0,
            notices=["the optimum lies on the edge"],
            trained_with=1.0,
        ),
        examples=[
            Example(pixels=[[((i + j) % 5) / 4 for j in range(8)] for i in range(8)], label=label, map_label=3,
                    map_confidence=0.99, glm_label=5, glm_confidence=0.4)
            for label in (3, None)
        ],
    )  # fmt: skip


def _moons(draw: random.Random) -> MoonsRecord:
    grid = [[1 / (1 + math.exp(-(i - j) / 3)) for j in range(20)] for i in range(20)]
    spread = [[math.hypot(i - 10, j - 10) / 30 for j in range(20)] for i in range(20)]
    kinds = [(m, "probability", grid) for m in METHODS]
    kinds += [("GLM", "aleatoric", spread), ("GLM", "epistemic", spread), ("sampled network", "epistemic", spread)]
    return MoonsRecord(
        parameters=100,
        precision=0.1,
        candidates=[1.0, 0.1],
        extent=[-3.0, 3.0, -2.0, 2.0],
        points=[[draw.gauss(0, 1), draw.gauss(0, 0.7)] for _ in range(30)],
        labels=[k % 2 for k in range(30)],
        maps=[UncertaintyMap(method=m, kind=k, values=v) for m, k, v in kinds],
    )
