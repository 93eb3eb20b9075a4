"""The studies: what each shows, after which source, what it needs and takes, and the modules it is made of.

A study is two modules of one name. `lapwing_studies.reproduce.<module>` has `run(study) -> record` and
`claims(record)`; `lapwing_studies.report.<module>` has `page(record)`. The rest is shared: `study.py` on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from lapwing.errors import InputError

if TYPE_CHECKING:
    from lapwing_studies.reproduce.claims import Claim
    from lapwing_studies.reproduce.study import Record

TIERS = ("quick", "standard", "faithful")
ANTORAN_2022 = "Antorán et al. (2022)"
ANTORAN_2023 = "Antorán et al. (2023)"
DAXBERGER = "Daxberger et al. (2021)"
FOONG = "Foong et al. (2019)"
IMMER = "Immer, Korzepa and Bauer (2021)"
LINEARISED_DIP = "Antorán, Barbano et al. (2022)"
MARGLIK = "Immer, Bauer, Fortuin, Rätsch and Khan (2021)"
UNLU = "Unlu and Aitchison"
TUTORIAL = "Hernández-Lobato, tutorial"
OWN = "a goal of Lapwing"


@dataclass(frozen=True)
class Cost:
    """Seeds (or splits) of a tier, and roughly the time on one core."""

    seeds: int
    takes: str


@dataclass(frozen=True)
class Entry:
    name: str
    shows: str
    paper: str
    needs: str
    module: str
    tiers: Mapping[str, Cost]
    claims_in: str = ""  # the module of the claims, where it is another

    @property
    def study(self) -> ModuleType:
        return import_module(f"lapwing_studies.reproduce.{self.module}")

    @property
    def report(self) -> ModuleType:
        return import_module(f"lapwing_studies.report.{self.module}")

    def claims(self, record: Record) -> list[Claim]:
        """What the source claims, beside what the record holds."""
        found: list[Claim] = import_module(f"lapwing_studies.reproduce.{self.claims_in or self.module}").claims(record)
        return found

    def cost(self, tier: str) -> Cost:
        if tier not in TIERS:
            raise InputError(f"--tier must be one of {', '.join(TIERS)}; got {tier!r}.")
        if tier not in self.tiers:
            raise InputError(f"{self.name} has no --tier {tier}; it has {' and '.join(self.tiers)}.")
        return self.tiers[tier]


def _tiers(quick: Cost, standard: Cost, faithful: Cost | None = None) -> Mapping[str, Cost]:
    some = {"quick": quick, "standard": standard}
    return some if faithful is None else {**some, "faithful": faithful}


SKLEARN, FOLDER = "scikit-learn's data", "--data"
EITHER = "--data, or scikit-learn's data"
MINUTES, HALF_HOUR, HOURS, DAYS = "minutes", "half an hour", "hours", "days"

STUDIES = (
    Entry("battery", "default arguments on 18 tasks", OWN, EITHER, "battery",
          _tiers(Cost(1, "a minute"), Cost(3, HOURS)), claims_in="summary"),
    Entry("alarm", "out-of-distribution alarms on 8 pairs", OWN, FOLDER, "alarm",
          _tiers(Cost(1, "2 min"), Cost(3, HOURS))),
    Entry("conformal", "length and coverage of conformal intervals", OWN, FOLDER, "conformal",
          _tiers(Cost(1, "5 s"), Cost(3, "a minute"))),
    Entry("small-held-out", "tuning with 30, 100 and 300 held-out rows", OWN, FOLDER, "small_held_out",
          _tiers(Cost(1, "30 s"), Cost(10, "10 min"))),
    Entry("quality", "held-out tuning against temperature scaling and ensembles", OWN, EITHER, "quality",
          _tiers(Cost(1, "3 min"), Cost(5, HOURS))),
    Entry("immer2021-uci", "linearised, sampled and refined predictions on 8 UCI sets", IMMER, FOLDER, "immer",
          _tiers(Cost(1, "7 min"), Cost(10, "4 hours")), claims_in="immer_claims"),
    Entry("immer2021-images", "images, and images from elsewhere: sampled, linearised, Gaussian process", IMMER, FOLDER,
          "immer_images", _tiers(Cost(1, "a minute"), Cost(3, "45 min"), Cost(5, DAYS))),
    Entry("banana", "uncertainty of a classifier in the plane", IMMER, f"{FOLDER}, or made-up points", "banana",
          _tiers(Cost(1, "30 s"), Cost(1, "30 s"))),
    Entry("step", "why sampled weights underfit", IMMER, "nothing", "step",
          _tiers(Cost(1, "5 s"), Cost(1, "5 s"))),
    Entry("uci-regression", "regression on standard and gap splits of UCI sets", FOONG, FOLDER, "uci_regression",
          _tiers(Cost(1, "a minute"), Cost(20, "an hour"), Cost(20, HOURS)), claims_in="uci_regression_claims"),
    Entry("tutorial", "the pictures of the tutorial, computed", TUTORIAL, "nothing", "tutorial",
          _tiers(Cost(1, "20 s"), Cost(1, "20 s"))),
    Entry("antoran2022", "the evidence at the linear mode and at the trained weights", ANTORAN_2022, EITHER, "antoran",
          _tiers(Cost(1, "a minute"), Cost(3, HALF_HOUR))),
    Entry("batchnorm-1d", "the evidence of a batch-normed network", ANTORAN_2022, "nothing", "batchnorm",
          _tiers(Cost(1, "2 s"), Cost(3, "6 s"))),
    Entry("subnetwork-1d", "which weights carry the uncertainty", DAXBERGER, "nothing", "subnetwork",
          _tiers(Cost(1, "5 s"), Cost(3, "15 s"))),
    Entry("subnetwork", "subnetworks on rotated and corrupted images, against five other methods", DAXBERGER, EITHER,
          "subnetwork_shift", _tiers(Cost(1, MINUTES), Cost(3, "an hour"), Cost(5, DAYS))),
    Entry("sampled-laplace", "the full GGN by sampling-based EM", ANTORAN_2023, EITHER, "sampled",
          _tiers(Cost(1, "a minute"), Cost(3, "an hour")), claims_in="sampled_claims"),
    Entry("ct", "error bars of reconstructed images", LINEARISED_DIP, FOLDER, "ct",
          _tiers(Cost(1, MINUTES), Cost(1, HOURS), Cost(1, DAYS)), claims_in="ct_claims"),
    Entry("variational-laplace", "training by Variational Laplace, mean field and MAP over temperatures", UNLU, EITHER,
          "variational", _tiers(Cost(1, "6 min"), Cost(3, HOURS), Cost(3, DAYS)), claims_in="variational_claims"),
    Entry("marglik", "training with the evidence against a grid of priors", MARGLIK, EITHER, "marglik",
          _tiers(Cost(1, "3 min"), Cost(1, HOURS), Cost(1, DAYS))),
    Entry("fisher", "exact or sampled curvature", OWN, EITHER, "fisher",
          _tiers(Cost(1, "2 min"), Cost(1, HALF_HOUR))),
    Entry("preconditioners", "iterations of conjugate gradients by preconditioner", OWN, SKLEARN, "preconditioners",
          _tiers(Cost(1, "15 s"), Cost(1, "40 s"))),
    Entry("product-cost", "time and memory of a product with the GGN", OWN, "nothing", "product_cost",
          _tiers(Cost(1, "20 s"), Cost(1, "2 min"))),
)  # fmt: skip


def names() -> list[str]:
    return [entry.name for entry in STUDIES]


def entry(name: str) -> Entry:
    for found in STUDIES:
        if found.name == name:
            return found
    raise InputError(f"No study is called {name!r}. There are {', '.join(names())}, and all.")
