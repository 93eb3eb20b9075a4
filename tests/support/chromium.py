"""Drive headless Chromium through its own debugging protocol, over a pair of pipes: no driver, no port, no package.

with Chromium() as browser, browser.open(url, width=400, dark=True) as page:
    page.drag((10, 10), (50, 80))
    page.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

PATIENCE = 60.0  # seconds for an answer, or for a condition on the page

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
    "--no-pings", "--metrics-recording-only", "--disable-domain-reliability",
    "--disable-features=OptimizationHints,MediaRouter,Translate,AutofillServerCommunication",
)  # fmt: skip

KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "PageUp": 33, "PageDown": 34, "Delete": 46}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "-": 189, ".": 190}
SHIFT = 8


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    raise FileNotFoundError("These tests need Chromium: install the package `chromium`, or leave out -m browser.")


class Chromium:
    """One browser; every page has a tab of its own."""

    def __enter__(self) -> Chromium:
        self._profile = TemporaryDirectory(ignore_cleanup_errors=True)
        browser_reads, self._to = os.pipe()
        self._from, browser_writes = os.pipe()
        # The protocol's pipes are descriptors 3 and 4; only bash can name descriptors of two digits.
        shell = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        options = [*QUIET, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", chromium(), *options],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        self._buffer, self._next, self._events = b"", 0, []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # which ends the browser
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    @contextmanager
    def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False
    ) -> Iterator[Page]:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.prepare(width, height, dark=dark, touch=touch)
        page.go(url)
        try:
            yield page
        finally:
            self.send("Target.closeTarget", targetId=target)

    def send(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while (answer := self._read(until)).get("id") != self._next:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def events(self, session: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("sessionId") == session]

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            piece = os.read(self._from, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError(f"Chromium gave no answer within {PATIENCE:.0f} s, or has ended.")
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Page:
    """A tab: what it shows, and a hand on its mouse, touch screen and keyboard."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session, self._url = browser, session, ""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def prepare(self, width: int, height: int, *, dark: bool, touch: bool) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.set_dark(dark)

    def set_dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self._url = url
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    # --- looking ------------------------------------------------------------------------------------

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait_for(self, condition: str, patience: float = PATIENCE) -> None:
        until = time.monotonic() + patience
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"Still not so after {patience:.0f} s: {condition}")
            time.sleep(0.02)

    def centre(self, selector: str, index: int = 0) -> tuple[float, float]:
        """The middle of an element in the window, scrolled to where it can be seen."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{index}];"
            " e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return found[0], found[1]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def named_nodes(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader is told about."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        seen = [node for node in nodes if not node["ignored"]]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in seen]

    @property
    def requests(self) -> list[str]:
        """What the page asked for, itself included."""
        events = self._browser.events(self._session)
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, and what the console says of errors and of requests that the page's policy refused."""
        events = self._browser.events(self._session)
        thrown = [str(e["params"]["exceptionDetails"]) for e in events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in events if e["method"] == "Log.entryAdded"]
        return thrown + [str(entry["text"]) for entry in logged if entry["level"] in ("error", "warning")]

    # --- doing --------------------------------------------------------------------------------------

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        for count in range(1, times + 1):
            self._mouse("mousePressed", x, y, count)
            self._mouse("mouseReleased", x, y, count)

    def drag(self, start: tuple[float, float], end: tuple[float, float], steps: int = 8) -> None:
        self._mouse("mousePressed", *start)
        for k in range(1, steps + 1):
            x, y = (a + (b - a) * k / steps for a, b in zip(start, end))
            self._mouse("mouseMoved", x, y)
        self._mouse("mouseReleased", *end)

    def touch_drag(self, start: tuple[float, float], end: tuple[float, float], steps: int = 8) -> None:
        self._touch("touchStart", start)
        for k in range(1, steps + 1):
            x, y = (a + (b - a) * k / steps for a, b in zip(start, end))
            self._touch("touchMove", (x, y))
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def tap(self, x: float, y: float) -> None:
        self.touch_drag((x, y), (x, y), steps=0)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"Space": " ", "Enter": "\r"}.get(key, key if len(key) == 1 else "")
        shared = {
            "key": " " if key == "Space" else key,
            "windowsVirtualKeyCode": code,
            "modifiers": SHIFT if shift else 0,
        }
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **shared)
        self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def _mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=count)

    def _touch(self, kind: str, at: tuple[float, float]) -> None:
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": at[0], "y": at[1]}])
