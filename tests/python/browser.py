"""A headless Chromium over the DevTools protocol: nothing but a browser is needed.

The protocol: https://chromedevtools.github.io/devtools-protocol; commands and events are JSON, each ended by a zero byte, on the file
descriptors 3 and 4 of the browser (--remote-debugging-pipe).
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
_TIMEOUT = 60.0


class Browser:
    """One page in a browser that has no network. `messages` is what its console showed: errors, warnings, exceptions."""

    def __init__(self, folder: Path) -> None:
        (theirs_in, self._commands), (self._events, theirs_out) = os.pipe(), os.pipe()
        flags = ["--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder}"]
        if os.getuid() == 0:
            flags.append("--no-sandbox")  # it refuses to run as root otherwise
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]  # not 3 or 4 themselves
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(theirs[0], 3), os.dup2(theirs[1], 4)),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (theirs_in, theirs_out, *theirs):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, None
        self._happened: list[str] = []
        self.messages: list[str] = []
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its helpers too: they would go on writing into the folder
        self._process.wait()
        os.close(self._commands)
        os.close(self._events)

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Send a command and wait for its answer."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps({"id": self._number, "method": method, "params": parameters, **session}).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            if not select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._events, 1 << 16)
            if not read:
                raise RuntimeError("the browser has gone")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self._happened.append(method)
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.messages.append(json.dumps(parameters))

    def open(self, page: Path) -> None:
        """Load a file, to its end."""
        self._happened.clear()
        self("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in self._happened:
            self._note(self._next())

    def screen(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Change the size and the color scheme."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited; the page's security policy does not bind it."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def becomes(self, condition: str) -> bool:
        """Whether a JavaScript expression becomes true within seconds, while the page goes on."""
        deadline = time.monotonic() + 10
        while not (found := bool(self.run(f"Boolean({condition})"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def box(self, element: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element on the screen."""
        left, top, width, height = self.run(f"(b => [b.left, b.top, b.width, b.height])({element}.getBoundingClientRect())")
        return left, top, width, height

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release there."""
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
