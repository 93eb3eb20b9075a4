"""Every page of the built site in Chromium, as wide as a phone and as a desktop, light and dark.

No request leaves the site, nothing is wider than the window, images have texts, headings leave out no level, and text
has the contrast of WCAG AA (`audit.js`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chromium import Chromium

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AUDIT = (Path(__file__).parent / "audit.js").read_text("utf-8")
LOAD_IMAGES = """Promise.all([...document.images].map((image) => {
  image.loading = 'eager';
  return image.decode().catch(() => 0);
}))"""
LOADING = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed|object)\b[^>]*\b(?:src|data)=[\"']?(?:https?:)?//"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev))[^>]*href=[\"']?(?:https?:)?//"
)
PHONE, DESKTOP = 390, 1280


def address(page: Path) -> str:
    name = str(page.relative_to(DOCS).with_suffix(""))
    return re.sub(r"(^|/)index$", r"\1", name).rstrip("/") + "/" if name != "index" else ""


PAGES = sorted(address(page) for page in DOCS.rglob("*.md"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


def test_every_page_is_built(built: Path) -> None:
    assert [page for page in PAGES if not (built / page / "index.html").exists()] == []


def test_the_built_pages_load_nothing_from_elsewhere(built: Path) -> None:
    """Scripts, styles, fonts, images and frames; links that a reader may follow are another matter."""
    assert LOADING.search('<script src="https://a/x.js">') and LOADING.search('<link rel=x href="//a/b.css">')
    found = {str(page.relative_to(built)): LOADING.findall(page.read_text("utf-8")) for page in built.rglob("*.html")}
    assert {page: tags for page, tags in found.items() if tags} == {}
    styles = "".join(style.read_text("utf-8") for style in built.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.strip("/") or "index")
def test_a_page_can_be_read_by_everyone(browser: Chromium, site: str, path: str) -> None:
    with browser.open(site + path, width=PHONE, touch=True) as page:
        page.evaluate(LOAD_IMAGES)
        wrong = []
        for width in (PHONE, DESKTOP):
            page.prepare(width, 900, dark=False, touch=width == PHONE)
            page.wait_for(f"innerWidth === {width}")
            for scheme in ("default", "slate"):
                page.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
                page.evaluate("document.getAnimations().map((a) => a.finish()).length")
                wrong += [f"{width} px, {scheme}, {line}" for line in page.evaluate(AUDIT)]
        assert wrong == []
        assert [url for url in page.requests if not url.startswith((site, "blob:"))] == []
        assert page.complaints == []


@pytest.mark.parametrize(("dark", "scheme"), [(False, "default"), (True, "slate")])
def test_a_new_reader_gets_the_theme_of_the_device(site: str, dark: bool, scheme: str) -> None:
    with Chromium() as fresh, fresh.open(site, dark=dark) as page:
        page.wait_for(f"document.body.getAttribute('data-md-color-scheme') === '{scheme}'")


def test_the_audit_sees_what_is_wrong(browser: Chromium, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><title>x</title><body><h1>a</h1><h3>b</h3><img src='none.png'>"
        "<p id=p style='color: #999'>pale</p><a href='#p'></a>"
        "<article id=p><div style='width: 3000px'>wide</div></article>",
        encoding="utf-8",
    )
    with browser.open(bad.as_uri(), width=PHONE) as page:
        seen = {line.partition(":")[0] for line in page.evaluate(AUDIT)}
    assert seen == {"language", "viewport", "id used twice", "heading level left out", "image without text",
                    "image not found", "without a name", "wider than the window", "contrast"}  # fmt: skip
