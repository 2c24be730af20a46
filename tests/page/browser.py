"""A headless Chromium, driven over a pipe with the DevTools protocol: no driver, no extra package.

`chromium()` finds one; `Browser` opens pages in it, runs JavaScript there and collects the console's complaints.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars")
# Chromium reads commands on file descriptor 3 and answers on 4: put the pipes there, then become Chromium.
_BECOME = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def chromium() -> str | None:
    """The program named by $QUELL_CHROMIUM, or the first Chromium on the path."""
    return os.environ.get("QUELL_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One browser with one tab; a context manager, because a browser must not outlive its test."""

    def __init__(self, program: str, profile: Path, width: int = 1100, height: int = 900) -> None:
        self._command = [program, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            self._command.append("--no-sandbox")
        self._command += [f"--window-size={width},{height}", "about:blank"]
        self._asked, self._buffer, self._session = 0, b"", ""
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        commands_out, commands_in, answers_out, answers_in = map(_out_of_the_way, (*os.pipe(), *os.pipe()))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BECOME, str(commands_out), str(answers_in), *self._command],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._in, self._out = commands_in, answers_out
        tabs = self.ask("Target.getTargets")["targetInfos"]
        tab = next(tab["targetId"] for tab in tabs if tab["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)  # as if its window were in front
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        self._asked += 1
        command = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._in, json.dumps(command).encode() + b"\0")
        while (answer := self._next()).get("id") != self._asked:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    @contextmanager
    def inside_the_frame(self) -> Iterator[None]:
        """The one frame of the page, which is a page of its own to a browser that keeps sandboxed ones apart."""
        frames = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "iframe"]
        outside, frame = self._session, frames[0]["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=frame, flatten=True)["sessionId"]
        try:
            for domain in ("Runtime", "Log"):
                self.ask(f"{domain}.enable")
            yield
        finally:
            self._session = outside

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Until the expression is true; the limit only ends a test that would hang."""
        limit = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"{condition} stayed false; the page says: {self.run('document.body.innerText')[:500]}"
                )
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def look(self, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """The size of the window and the colours that the reader prefers; a narrow window is a phone's."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def tap(self, x: float, y: float) -> None:
        self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def type(self, field: str, text: str) -> None:
        """Put a text into the field with this id, as typing does."""
        box = f"document.getElementById({json.dumps(field)})"
        self.run(f"{box}.value = {json.dumps(text)}; {box}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def screenshot(self, path: Path, width: int, height: int) -> None:
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._out], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            if not (chunk := os.read(self._out, 1 << 20)):
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Remember uncaught exceptions, console errors and warnings, and refusals by the security policy."""
        details = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(details["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(details["args"]))
        elif event.get("method") == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(details["entry"]))


_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}


def _out_of_the_way(end: int) -> int:
    """The same end of a pipe under a number that is neither 3 nor 4."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved
