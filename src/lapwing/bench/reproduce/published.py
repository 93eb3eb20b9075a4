"""Published numbers, to print beside our own."""

from __future__ import annotations

from typing import TypedDict


class Published(TypedDict):
    evidence: str
    prior: str
    nll: dict[str, str]


# Antorán, Janz, Allingham, Daxberger, Barbano, Nalisnick, Hernández-Lobato (2022): NLL, mean ± standard error.
ANTORAN_2022 = (
    Published(
        evidence="linear mode",
        prior="single",
        nll={"T-former": ".162 ± .042", "CNN": ".025 ± .000", "ResNet": ".017 ± .000", "Pre-ResNet": ".017 ± .000",
             "Fixup": ".055 ± .006"},
    ),
    Published(
        evidence="linear mode",
        prior="multiple",
        nll={"T-former": ".162 ± .042", "CNN": ".025 ± .000", "ResNet": ".016 ± .001", "Pre-ResNet": ".016 ± .000",
             "Fixup": ".061 ± .005"},
    ),
    Published(
        evidence="trained weights",
        prior="single",
        nll={"T-former": ".310 ± .060", "CNN": ".253 ± .001", "ResNet": ".252 ± .006", "Pre-ResNet": ".220 ± .004",
             "Fixup": ".153 ± .021"},
    ),
    Published(
        evidence="trained weights",
        prior="multiple",
        nll={"T-former": ".162 ± .042", "CNN": ".205 ± .002", "ResNet": ".236 ± .005", "Pre-ResNet": ".239 ± .004",
             "Fixup": ".200 ± .018"},
    ),
)  # fmt: skip
