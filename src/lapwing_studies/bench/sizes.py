"""Sizes of the demo."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    n_curve: int
    n_curves: int
    n_digits: int
    n_moons: int
    n_hidden: int
    n_steps: int
    n_grid: int
    n_map: int
    n_samples: int
    n_precisions: int


DEMO = Size(
    n_curve=80,
    n_curves=8,
    n_digits=1797,
    n_moons=150,
    n_hidden=32,
    n_steps=1500,
    n_grid=241,
    n_map=64,
    n_samples=200,
    n_precisions=7,
)
TOY = Size(
    n_curve=20,
    n_curves=2,
    n_digits=160,
    n_moons=30,
    n_hidden=4,
    n_steps=30,
    n_grid=25,
    n_map=8,
    n_samples=8,
    n_precisions=3,
)
