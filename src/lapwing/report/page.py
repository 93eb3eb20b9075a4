"""Records → one self-contained HTML file: no network, no other files, readable in twenty years."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from lapwing.report import tables
from lapwing.report.figures import all_figures
from lapwing.report.palette import DARK, LIGHT

if TYPE_CHECKING:
    from lapwing.bench.records import DemoRecord


def write_page(record: DemoRecord, path: Path) -> Path:
    """Write the demo's page to `path`, making its folder, and return where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(record), encoding="utf-8")
    return path


def render(record: DemoRecord) -> str:
    """The demo's page as HTML.

    The content-security policy forbids every request; the one script is allowed by its hash, so nothing injected into
    a record could run either. Pictures inside the SVGs are `data:` URIs.
    """
    script, sheet = _asset("page.js"), _asset("page.css")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2")).render(
        record=record,
        figures=all_figures(record),
        tables={t.name: t for t in (tables.digits(record["digits"]), tables.regression(record["regression"]))},
        sheet=_themes() + sheet,
        script=script,
        policy=_policy(script),
        frames=_frames(record),
        headlines=headlines(record),
    )


@dataclass(frozen=True)
class Headline:
    value: str
    says: str


def headlines(record: DemoRecord) -> list[Headline]:
    """Three results in words. They only ever state what the record holds: a bad run reads as a bad run."""
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


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _themes() -> str:
    light = "".join(f"--{name}: {colour}; " for name, colour in LIGHT.items())
    dark = "".join(f"--{name}: {colour}; " for name, colour in DARK.items())
    return (
        f":root {{ color-scheme: light dark; {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark}}} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark}}}\n"
        ":root[data-theme=light] { color-scheme: light; }\n"
    )


def _frames(record: DemoRecord) -> str:
    """What the slider under the regression says for each prior precision."""
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


def _asset(name: str) -> str:
    return (files("lapwing.report") / "assets" / name).read_text(encoding="utf-8")
