"""A real browser without a window, driven over its own protocol on a pipe (no port, no library)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The program, or None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one tab. `console` and `failures` collect what a developer would see in red."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ctn-web-", ignore_cleanup_errors=True)
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        command = [
            program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "--no-first-run",
            "--no-default-browser-check", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
        ]  # fmt: skip

        # The browser reads 3 and writes 4. Ours are moved out of the way first, in case they have just these numbers.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_browser, to_us)]
        log = os.open(Path(self._folder.name) / "log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        actions = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in ((log, 1), (log, 2), (high[0], 3), (high[1], 4))]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions, setsid=True)
        for fd in (to_browser, to_us, log, *high):
            os.close(fd)
        self._out, self._in = from_us, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            frame = self._frame(deadline)
            assert frame is not None, f"the browser did not answer {method}"
            if frame.get("id") == number:
                assert "error" not in frame, f"{method}: {frame['error']}"
                result: dict[str, Any] = frame["result"]
                return result
            self.events.append(frame)

    def _frame(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(self._in, 1 << 20)
            assert part, f"the browser ended: {(Path(self._folder.name) / 'log').read_bytes()[-2000:]!r}"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        frame: dict[str, Any] = json.loads(raw)
        return frame

    # ---- the tab --------------------------------------------------------------------------------

    def go(self, url: str) -> None:
        """Open an address and wait until its document is there."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script: str, within_s: float = PATIENCE_S) -> Any:
        """The first true value of an expression; while a page changes it may fail in between."""
        return until(lambda: self._try(script), script, within_s)

    def _try(self, script: str) -> Any:
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return None if "exceptionDetails" in done else done["result"].get("value")

    def scripts(self, on: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def window(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def colours(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def cookie(self, url: str, name: str, value: str) -> None:
        assert self.call("Network.setCookie", url=url, name=name, value=value, httpOnly=True, sameSite="Lax")["success"]

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What the console holds that should not be there: errors, warnings, refusals of the content policy."""
        self.run("1")  # what was said before has arrived with this answer
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def asked(self) -> list[str]:
        """Every address that the tab fetched."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def close(self) -> None:
        for fd in (self._out, self._in):
            os.close(fd)
        os.kill(self._pid, signal.SIGTERM)  # it ends its own children
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)
        self._folder.cleanup()


def until(what: Callable[[], Any], why: str, within_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {why}"
        time.sleep(0.05)
    return value
