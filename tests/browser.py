"""A headless Chromium, driven over a pipe with the DevTools protocol: how a page looks, and what is wrong with it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_S = 60.0


class Browser:
    """One page; leaving the `with` ends the browser."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._ids = 0
        self._unread = b""
        self._session = {}
        self.events: list[dict[str, Any]] = []
        (read_here, write_there) = os.pipe()
        (read_there, write_here) = os.pipe()
        self._read = read_here
        self._write = write_here
        ours = (self._read, self._write)

        def as_3_and_4() -> None:
            low = os.dup(read_there)
            high = os.dup(write_there)  # before one of them is overwritten
            os.dup2(low, 3)
            os.dup2(high, 4)

        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"],
            preexec_fn=as_3_and_4,  # noqa: PLW1509  no thread is running
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (read_there, write_there):
            os.close(number)
        assert ours == (self._read, self._write)
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": params} | self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._ids:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(
        self, page: Path, *, width: int = 1200, dark: bool = False, media: str = "screen"
    ) -> None:
        """Open a file, as on a screen so wide, or as it would be printed."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Write a picture of the whole page, or of its upper part."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": height or size["height"],
            "scale": 1,
        }
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return what the browser has logged about the page, such as a violation of its policy."""
        self.evaluate("1")  # so that all events before it have arrived
        logged = [
            event
            for event in self.events
            if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]
        return [json.dumps(event["params"]) for event in logged]

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        sent = (
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        )
        return [event["params"]["request"]["url"] for event in sent]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            assert time.monotonic() < deadline, "the browser does not answer"
            assert self._process.poll() is None, "the browser has ended"
            if select.select([self._read], [], [], 1.0)[0]:
                self._unread += os.read(self._read, 2**20)
        line, self._unread = self._unread.split(b"\0", 1)
        return json.loads(line)
