# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A page in headless Chromium, through its debugging pipe: keys, scripts, requests, console, screenshots.

Needs no package: the protocol is JSON messages that end with a NUL byte, read from descriptor 3 and written to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_TIMEOUT_S = 60.0


class Browser:
    """One open page. `requests` are the URLs that it asked for, `complaints` its console messages and errors."""

    def __init__(self, receive: int, send: int) -> None:
        self._receive, self._send = receive, send
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key as a person does, for the element that has the focus."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        options = {"captureBeyondViewport": True} if whole_page else {}
        if whole_page:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, event: str) -> None:
        while self._next_message().get("method") != event:
            pass

    def _next_message(self) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._receive, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium with an empty profile. It ends with the block."""
    assert CHROMIUM is not None
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        # Descriptors 3 and 4 of the child: ours are moved away first, so that neither covers the other.
        theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (from_us, to_us)]
        process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: [os.dup2(descriptor, place) for place, descriptor in zip((3, 4), theirs, strict=True)],
            pass_fds=(3, 4),
        )
        for descriptor in (from_us, to_us, *theirs):
            os.close(descriptor)
        try:
            yield Browser(from_it, to_it)
        finally:
            os.close(to_it)  # Chromium exits when its pipe closes
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_it)
