"""`lapwing demo`: three small networks, their posteriors, and the quality of their error bars."""

from __future__ import annotations

import platform
import time
from importlib.util import find_spec

import torch
from tqdm.auto import tqdm

from lapwing.errors import MissingExtraError
from lapwing_studies.bench.networks import one_thread
from lapwing_studies.bench.records import (
    DemoRecord,
    DigitsRecord,
    MoonsRecord,
    RegressionRecord,
    Setting,
)
from lapwing_studies.bench.sizes import DEMO, Size
from lapwing_studies.demo.digits import run as run_digits
from lapwing_studies.demo.moons import NOISE
from lapwing_studies.demo.moons import run as run_moons
from lapwing_studies.demo.regression import run as run_regression

N_STAGES = 10


def run(*, seed: int = 0, size: Size = DEMO) -> DemoRecord:
    """Run the three tasks and return the record from which report and tables are made.

    Reproducible for a seed on one machine. Under a minute with the default size.
    """
    for module, package in [("sklearn", "scikit-learn"), ("PIL", "pillow")]:
        if find_spec(module) is None:
            raise MissingExtraError(package, "demo")
    start = time.perf_counter()
    with one_thread(), tqdm(total=N_STAGES, bar_format="{desc:<34} {bar} {n_fmt}/{total_fmt} [{elapsed}]") as bar:
        stage = _Stages(bar)
        regression = run_regression(size, seed=seed, stage=stage)
        moons = run_moons(size, seed=seed, stage=stage)
        digits = run_digits(size, seed=seed, stage=stage)
        stage.finish()
    seconds = time.perf_counter() - start
    return DemoRecord(
        workload="demo",
        seed=seed,
        seconds=seconds,
        settings=_settings(size, regression, moons, digits),
        regression=regression,
        digits=digits,
        moons=moons,
    )


class _Stages:
    """Shows the current stage on the bar, and counts the previous one as done."""

    def __init__(self, bar: tqdm) -> None:
        self._bar, self._begun = bar, 0

    def __call__(self, name: str) -> None:
        self._bar.update(min(self._begun, 1))
        self._begun += 1
        self._bar.set_description_str(name)

    def finish(self) -> None:
        self._bar.update(1)
        self._bar.set_description_str("done")


def _settings(size: Size, regression: RegressionRecord, moons: MoonsRecord, digits: DigitsRecord) -> list[Setting]:
    tried = ", ".join(f"{p:g}" for p in moons["candidates"])
    parameters = (regression["parameters"], moons["parameters"], digits["parameters"])
    names = ["regression 1-24-24-1", "two moons 2-25-25-25-1", f"digits 64-{size.n_hidden}-10"]
    networks = [Setting(name=f"{n}, tanh", value=f"{p:,} parameters") for n, p in zip(names, parameters, strict=True)]
    return [
        *networks,
        Setting(name="posterior", value="full GGN over all parameters, one prior precision"),
        Setting(name="digits data", value=_parts(digits)),
        Setting(name="two-moons data", value=f"{size.n_moons} points, noise {NOISE:g}"),
        Setting(name="two-moons prior", value=f"{moons['precision']:g}, of {tried}, by the evidence"),
        Setting(name="sampled network", value=f"{size.n_samples} weight draws"),
        Setting(name="training", value=f"full-batch Adam, {size.n_steps} steps, the prior as weight decay"),
        Setting(name="torch", value=f"{torch.__version__}, one thread"),
        Setting(name="Python", value=platform.python_version()),
    ]


def _parts(digits: DigitsRecord) -> str:
    parts = {"training": digits["n_train"], "validation": digits["n_validation"], "test": digits["n_test"]}
    return ", ".join(f"{n:,} {name}" for name, n in parts.items())
