"""Fill templates to self-contained HTML files: style and script inline, all requests forbidden."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

from lapwing_studies.report.palette import DARK, LIGHT


@dataclass(frozen=True)
class Headline:
    """A result: a number, and a sentence about it."""

    value: str
    says: str


def filled(template: str, script: str, **values: Any) -> str:
    """The template with its values.

    The content-security policy forbids every request. The one script is allowed by its hash, so a script injected
    through a record could not run. Pictures inside the SVGs are `data:` URIs.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.FunctionLoader(asset)
    )
    sheet = _themes() + asset("page.css")
    return environment.get_template(template).render(sheet=sheet, script=script, policy=_policy(script), **values)


def asset(name: str) -> str:
    return (files("lapwing_studies.report") / "assets" / name).read_text(encoding="utf-8")


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
