"""Headless Chromium for tests, driven over its debugging pipe: no ports, no packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run scripts/install-chromium.sh")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)
TIMEOUT = 60.0  # seconds per call
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Tab": 9, "End": 35, "Enter": 13, "Escape": 27}
ERROR_EVENTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One page; every event since it was opened is in ``events``."""

    def __init__(self, profile: Path) -> None:
        (inbox, self.outbox), (self.inbox, outbox) = os.pipe(), os.pipe()
        command = f'exec "$0" {FLAGS} --user-data-dir="$1" about:blank 3<&{inbox} 4>&{outbox}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), str(profile)],
            pass_fds=(inbox, outbox),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inbox)
        os.close(outbox)
        self.count, self.session, self.events, self.buffer = 0, "", list[dict[str, Any]](), b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outbox, json.dumps(message).encode() + b"\0")
        watchdog = threading.Timer(TIMEOUT, self.process.kill)
        watchdog.start()
        try:
            while (answer := self._next()).get("id") != self.count:
                self.events.append(answer)
        finally:
            watchdog.cancel()
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            piece = os.read(self.inbox, 1 << 20)
            assert piece, "chromium has exited"
            self.buffer += piece
        data, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message

    def open(self, address: Path | str) -> None:
        self.js("window.before = true")  # unset on the next page
        self.events.clear()
        url = address.as_uri() if isinstance(address, Path) else address
        self.call("Page.navigate", url=url)
        self.wait("!window.before && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until a JavaScript condition holds."""
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, f"waited {seconds} s for {condition}"
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, **more: Any) -> None:
        """A key by its name, or a letter."""
        letter = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = KEYS[key] if key in KEYS else ord(key.upper())
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **letter, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def phone(self) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)

    def dark(self) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def plain(self) -> None:
        """Back to a light desktop."""
        self.call("Emulation.setEmulatedMedia", features=[])
        self.call("Emulation.clearDeviceMetricsOverride")

    def errors(self) -> list[dict[str, Any]]:
        """Errors and console output since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in ERROR_EVENTS]

    def requests(self) -> list[str]:
        """Every URL requested since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(timeout=20)
        os.close(self.inbox)
        os.close(self.outbox)
