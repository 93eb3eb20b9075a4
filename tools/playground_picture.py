"""Take docs/assets/playground.png: both tasks of the playground, as the page draws them (needs chromium).

python tools/playground_picture.py
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chromium import Chromium, Page  # noqa: E402

PAGE = ROOT / "docs" / "playground" / "page.html"
PICTURE = ROOT / "docs" / "assets" / "playground.png"
GAP = 16


def plot(page: Page) -> Image.Image:
    page.wait_for("document.documentElement.dataset.state === 'settled'")
    page.evaluate("document.activeElement.blur()")
    x, y, width, height = page.evaluate(
        "(() => { const b = document.getElementById('plot').getBoundingClientRect();"
        " return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()"
    )
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    data = page.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def take() -> None:
    with Chromium() as browser:
        parts = []
        for situation in ("gap", "boundaries"):
            with browser.open(f"{PAGE.as_uri()}#{situation}", width=860) as page:
                parts.append(plot(page))
    width = sum(part.width for part in parts) + GAP
    picture = Image.new("RGB", (width, max(part.height for part in parts)), "white")
    picture.paste(parts[0], (0, 0))
    picture.paste(parts[1], (parts[0].width + GAP, 0))
    picture.resize((width * 3 // 4, picture.height * 3 // 4)).save(PICTURE, optimize=True)
    print(f"{PICTURE}, {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    take()
