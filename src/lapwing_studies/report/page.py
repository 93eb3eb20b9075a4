"""Render records as one self-contained HTML file, which needs no network and no other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.report import tables
from lapwing_studies.report.figures import all_figures
from lapwing_studies.report.template import Headline, asset, filled

if TYPE_CHECKING:
    from lapwing_studies.bench.records import DemoRecord


def write_page(record: DemoRecord, path: Path) -> Path:
    """Write the demo's page to `path`, creating its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(record), encoding="utf-8")
    return path


def render(record: DemoRecord) -> str:
    """The demo's page as HTML."""
    return filled(
        "page.html.j2",
        asset("common.js") + asset("page.js"),
        record=record,
        figures=all_figures(record),
        tables={t.name: t for t in (tables.digits(record["digits"]), tables.regression(record["regression"]))},
        frames=_frames(record),
        headlines=headlines(record),
    )


def headlines(record: DemoRecord) -> list[Headline]:
    """Three results as sentences, which depend on the record: bad results are reported as such."""
    gap = {row["method"]: row for row in record["regression"]["rows"] if row["where"] == "in the gap"}
    rows = {r["method"]: r for r in record["digits"]["rows"] if r["tuning"] in ("–", "evidence")}
    return [
        Headline(
            f"{gap['MAP']['coverage']:.1%} → {gap['GLM']['coverage']:.1%}",
            "of new points in the gap fall inside the 95% interval: MAP with constant noise → GLM, "
            f"whose interval is {gap['GLM']['width'] / gap['MAP']['width']:.1f} times as wide",
        ),
        Headline(
            f"{rows['MAP']['ood_auc_photos']:.3f} → {rows['GLM']['ood_auc_photos']:.3f}",
            "chance that a patch of a photograph looks less certain than a test digit: MAP → GLM",
        ),
        Headline(
            f"{rows['MAP']['nll']:.3f} · {rows['sampled network']['nll']:.2f} · {rows['GLM']['nll']:.3f}",
            "NLL on test digits, lower is better: MAP · sampled network · GLM, prior tuned by the evidence",
        ),
    ]


def _frames(record: DemoRecord) -> str:
    """The text for each prior precision of the regression slider."""
    regression = record["regression"]
    middle = sum(regression["gap"]) / 2
    nearest = min(range(len(regression["x"])), key=lambda k: abs(regression["x"][k] - middle))
    return json.dumps(
        [
            {
                "precision": f"{band['precision']:.3g}",
                "evidence": f"{band['log_evidence']:.1f}",
                "gap": f"{band['epistemic_std'][nearest]:.2f}",
            }
            for band in regression["bands"]
        ]
    )
