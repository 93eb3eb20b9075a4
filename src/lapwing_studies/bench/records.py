"""The record of the demo as plain JSON values, so that the report can be rendered separately.

Lists instead of tensors; None where a number does not exist. `lapwing_studies.report` reads only these.
"""

from __future__ import annotations

from typing import TypedDict


class Setting(TypedDict):
    """One line of the settings, shown under the report's title."""

    name: str
    value: str


class RegressionRow(TypedDict):
    method: str
    where: str
    rmse: float
    nll: float
    coverage: float
    width: float


class Band(TypedDict):
    """The predictive band for one prior precision, on the grid of its `RegressionRecord`."""

    precision: float
    log_evidence: float
    epistemic_std: list[float]
    total_std: list[float]


class RegressionRecord(TypedDict):
    parameters: int
    n_curves: int
    gap: list[float]
    noise_std: float
    true_noise_std: float
    train_x: list[float]
    train_y: list[float]
    x: list[float]
    truth: list[float]
    mean: list[float]
    draws: list[list[float]]
    bands: list[Band]
    tuned: int
    rows: list[RegressionRow]


class DigitsRow(TypedDict):
    method: str
    tuning: str
    precision: float | None
    accuracy: float
    nll: float
    ece: float
    brier: float
    ood_auc_photos: float
    ood_auc_turned: float


class Bins(TypedDict):
    lower: list[float]
    upper: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]


class MethodCurves(TypedDict):
    """One predictive method for the figures: its calibration, and its entropies on digits and photographs."""

    method: str
    ece: float
    ood_auc_photos: float
    bins: Bins
    entropy_digits: list[float]
    entropy_photos: list[float]


class Example(TypedDict):
    """An image and the predictions of MAP and GLM for it; a photograph has no label."""

    pixels: list[list[float]]
    label: int | None
    map_label: int
    map_confidence: float
    glm_label: int
    glm_confidence: float


class EvidenceCurve(TypedDict):
    """Evidence and NLL by precision. The sampled network has a coarser grid: each draw costs a forward pass."""

    precision: list[float]
    log_evidence: list[float]
    held_out_glm: list[float]
    precision_sampled: list[float]
    held_out_sampled: list[float]
    held_out_map: float
    by_evidence: float
    by_validation: float
    notices: list[str]
    trained_with: float


class Answers(TypedDict):
    """Predictions for a set of images: the most frequent label, its share, and the mean confidence."""

    label: int
    share: float
    confidence: float


class DigitsRecord(TypedDict):
    parameters: int
    n_train: int
    n_validation: int
    n_test: int
    map_on_photos: Answers
    map_on_turned: Answers
    rows: list[DigitsRow]
    curves: list[MethodCurves]
    evidence: EvidenceCurve
    examples: list[Example]


class UncertaintyMap(TypedDict):
    """`kind` is "probability" (0 to 1), "epistemic" or "aleatoric" (nats); values run over rows of y, then x."""

    method: str
    kind: str
    values: list[list[float]]


class MoonsRecord(TypedDict):
    parameters: int
    precision: float
    candidates: list[float]
    extent: list[float]
    points: list[list[float]]
    labels: list[int]
    maps: list[UncertaintyMap]


class DemoRecord(TypedDict):
    workload: str
    seed: int
    seconds: float
    settings: list[Setting]
    regression: RegressionRecord
    digits: DigitsRecord
    moons: MoonsRecord
