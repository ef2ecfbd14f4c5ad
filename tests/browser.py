"""A headless Chromium for tests, spoken to over its debugging pipe (Chrome DevTools Protocol: JSON messages that end in a zero byte)."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless --remote-debugging-pipe --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --force-color-profile=srgb about:blank"
)
PATIENCE = 120  # seconds for an answer


# the browser reads its commands from 3 and writes its answers to 4
_START = [sys.executable, "-c", "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execvp(a[3], a[3:])"]


def find_browser():
    """The browser's command: $QAT_BROWSER, or the first of NAMES on PATH. Without one a test skips; with QAT_REQUIRE_BROWSER=1 it fails."""
    found = os.environ.get("QAT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("QAT_REQUIRE_BROWSER") == "1":
        pytest.fail("QAT_REQUIRE_BROWSER=1, but no Chromium on PATH or in QAT_BROWSER: apt-get install chromium")
    if found is None:
        pytest.skip("no Chromium on PATH or in QAT_BROWSER")
    return found


def _high(descriptor):
    """The descriptor under a number from 10 on, out of the way of 3 and 4, which the browser reads and writes."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return moved


class Browser:
    """One page. `requests` are the addresses that were asked for since the last `open`."""

    def __init__(self, profile: Path):
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [find_browser(), *sandbox, f"--user-data-dir={profile}", *FLAGS.split()]
        reads, self.out = map(_high, os.pipe())
        self.input, writes = map(_high, os.pipe())
        self.process = subprocess.Popen(
            [*_START, str(reads), str(writes), *command], pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self.waiting, self.number, self.session, self.events, self.requests = b"", 0, None, [], []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self):
        for descriptor in (self.out, self.input):
            os.close(descriptor)
        try:
            self.process.wait(10)  # it ends with its pipe
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self, deadline):
        while b"\0" not in self.waiting:
            ready, _, _ = select.select([self.input], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.input, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"no answer from the browser (exit status {self.process.poll()})")
            self.waiting += chunk
        message, _, self.waiting = self.waiting.partition(b"\0")
        found = json.loads(message)
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        if "method" in found:
            self.events.append(found["method"])
        return found

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        deadline = time.monotonic() + PATIENCE
        while (answer := self._receive(deadline)).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, media: str = "screen"):
        """Load a file and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700)
        self.call("Emulation.setEmulatedMedia", media=media)
        self.requests.clear()
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self.events:
            self._receive(deadline)

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def picture(self, x, y, width, height):
        """PNG of a part of the page, in pixels from its top left."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"])

    def pdf(self):
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)["data"])
