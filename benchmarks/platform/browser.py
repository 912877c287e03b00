"""A headless Chromium, driven over its DevTools protocol: how long a page takes to show a text.

`CHROMIUM` names the browser where it is not on the PATH as `chromium`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_STARTUP_S = 60
_POLL_S = 0.05


def chromium() -> str | None:
    """The browser's program, or None where there is none."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Page:
    """One tab of a browser.

    Args:
        socket: Its DevTools connection.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools command."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=_STARTUP_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]
        return result.get("value")

    def open(self, url: str, expected: str, timeout_s: float = 60.0) -> float:
        """Go to a page; seconds until it shows the expected text.

        Raises:
            TimeoutError: It never did.
        """
        self.call("Page.navigate", url="about:blank")
        while self.evaluate("location.href") != "about:blank":
            time.sleep(_POLL_S)  # else the next call may be dropped, and never answered
        started = time.perf_counter()
        self.call("Page.navigate", url=url)
        shown = f"document.body ? document.body.innerText.includes({json.dumps(expected)}) : false"
        while not self.evaluate(shown):
            if time.perf_counter() - started > timeout_s:
                raise TimeoutError(f"{url} did not show {expected!r} in {timeout_s} s")
            time.sleep(_POLL_S)
        return time.perf_counter() - started

    def picture(self, path: Path) -> None:
        """Write what the tab shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """A browser with a fresh profile and one tab; it ends with the block."""
    program = chromium()
    assert program is not None, "no Chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, "--headless", "--no-sandbox", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        command += ["--disable-background-networking", "--no-first-run", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_debugger(Path(profile)), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(20)


def _debugger(profile: Path) -> str:
    """Address of the first tab."""
    deadline = time.monotonic() + _STARTUP_S
    while time.monotonic() < deadline:
        try:
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            return tabs[0]["webSocketDebuggerUrl"]
        except (OSError, IndexError):
            time.sleep(0.2)
    raise TimeoutError("the browser did not start")
