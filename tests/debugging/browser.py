"""
Chromium without a window, driven through two pipes: what the tests of pages look at them with.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waits import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = next(
    (
        path
        for path in map(
            Path,
            [
                os.environ.get("AXE_CORE", ""),
                "node_modules/axe-core/axe.min.js",
                "/usr/lib/node_modules/axe-core/axe.min.js",
            ],
        )
        if path.is_file()
    ),
    None,
)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SECONDS = 60
# The browser reads descriptor 3 and writes descriptor 4.
PLACED = "import os, sys; [os.dup2(int(fd), at) for fd, at in zip(sys.argv[1:3], (3, 4))]; os.execv(sys.argv[3], sys.argv[3:])"
CODES = {"Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip


def _pipe() -> tuple[int, int]:
    pair = os.pipe()
    read, write = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in pair]
    for fd in pair:
        os.close(fd)
    return read, write


class Browser:
    """
    A browser with one page, and everything that the page complained of.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        # Out of the way of 3 and 4, which the browser takes for its own.
        (read, self._write), (self._read, write) = _pipe(), _pipe()

        self._process = subprocess.Popen(
            [sys.executable, "-c", PLACED, str(read), str(write), CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(read, write), start_new_session=True, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._wait_for_next_time, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """
        Say something to the browser, and return what it answers.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data[:65536]) :]
        while True:
            answer = self._next(SECONDS)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._wait_for_next_time:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._wait_for_next_time += data
        line, _, self._wait_for_next_time = self._wait_for_next_time.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._heard(message.get("method", ""), message.get("params", {}))
        return message

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog {params['message']}")
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.requests.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """
        Return what an expression, or what a promise of it, comes to in the page.
        """
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """
        Return what an expression comes to, once that is something.
        """
        try:
            return until(lambda: self.run(script))
        except TimeoutError:
            msg = f"never so: {script}; {self.complaints}"
            raise AssertionError(msg) from None

    def open(self, address: str | Path) -> None:
        """
        Open a page of a run, and wait until it shows something.
        """
        url = address.as_uri() if isinstance(address, Path) else address
        self.call("Page.navigate", url="about:blank")
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'yes'")
        self.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press(self, *keys: str) -> None:
        for key in keys:
            more: dict[str, Any] = (
                {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": CODES[key], "code": key}
            )
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    made = Browser(folder)
    try:
        yield made
    finally:
        made.close()


def faults(chromium: Browser) -> list[Any]:
    """
    Return what axe-core has to say about the page as it is now.
    """
    assert AXE is not None
    if not chromium.run("typeof axe === 'object'"):
        chromium.run(AXE.read_text(encoding="utf-8"))
    # Colours fade over; axe is to see where they end. What goes on for ever is not waited for.
    chromium.run(
        "Promise.allSettled(document.getAnimations().filter(a => a.effect.getTiming().iterations !== Infinity).map(a => a.finished))"
    )
    found = chromium.run(f"axe.run(document, {{runOnly: {json.dumps(RULES)}}}).then(r => r.violations)")
    return [(v["id"], [(n["html"][:160], n.get("failureSummary", "")[:300]) for n in v["nodes"][:3]]) for v in found]
