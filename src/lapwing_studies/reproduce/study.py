"""What studies have in common: data, a store, sizes, and a list of jobs, each of which is run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from warnings import WarningMessage

from torch import nn
from tqdm.auto import tqdm

from lapwing_studies.bench.networks import one_thread
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.training import Loss, Recipe, train

Record = dict[str, Any]  # plain JSON: what a study keeps of a job, and the sum of its jobs


@dataclass(frozen=True)
class Study:
    """`again` recomputes every record; trained weights are reused."""

    folder: DataFolder
    store: Store
    effort: Effort
    n_seeds: int
    again: bool = False

    @property
    def seeds(self) -> range:
        return range(self.n_seeds)

    def record(self, name: str, jobs: Sequence[Job], **facts: Any) -> Record:
        """The record of the whole study: what all runs have in common, and the record of each job."""
        return Record(study=name, effort=self.effort.name, n_seeds=self.n_seeds, **facts, runs=done(self, jobs))

    def once(self, name: str, made_with: str, work: Callable[[], Any]) -> Any:
        """A stored record, or what `work` gives, stored at once."""
        kept = None if self.again else self.store.record(name, made_with)
        if kept is None:
            kept = work()
            self.store.keep_record(name, made_with, kept)
        return kept

    def network(
        self,
        job: Seeded,
        make: Callable[[], nn.Module],
        parts: Parts,
        recipe: Recipe,
        loss: Loss = nn.functional.cross_entropy,
        *,
        name: str = "",
        made_with: str = "",
        seed: int | None = None,
    ) -> nn.Module:
        """The trained network of a job, in evaluation mode; from the store if it is there.

        `name`, `made_with` and `seed` are those of the weights, where they are not those of the job's record.
        """
        name, made_with, seed = name or job.name, made_with or job.made_with, job.seed if seed is None else seed
        model = seeded(make, seed=seed)
        if not self.store.load_weights(name, made_with, model):
            train(model, parts, loss, recipe, seed=seed)
            self.store.keep_weights(name, made_with, model)
        return model.eval()


class Job(Protocol):
    """One (network, seed): the name of its files, a description of how it is made, and the work."""

    @property
    def name(self) -> str: ...
    @property
    def made_with(self) -> str: ...
    def run(self) -> Any: ...


class Seeded(Job, Protocol):
    @property
    def seed(self) -> int: ...


def done(study: Study, jobs: Sequence[Job]) -> list[Any]:
    """The records of all jobs, in order; stored ones are reused, and the time left is that of the others."""
    kept = [None if study.again else study.store.record(job.name, job.made_with) for job in jobs]
    n_kept = sum(record is not None for record in kept)
    shown = "{desc:<34} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    with one_thread(), tqdm(total=len(jobs), initial=n_kept, smoothing=0, bar_format=shown) as bar:
        for k, job in enumerate(jobs):
            if kept[k] is None:
                bar.set_description_str(job.name)
                kept[k] = study.once(job.name, job.made_with, job.run)
                bar.update(1)
        bar.set_description_str("done")
    return kept


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def told(caught: Sequence[WarningMessage]) -> list[str]:
    """The distinct warnings, without those of packages for their developers."""
    return sorted({str(w.message) for w in caught if w.category is UserWarning})
