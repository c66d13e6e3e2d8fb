"""Drive a real headless Chromium over its DevTools protocol; needs no driver program."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1600,1000",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)

#: How long the browser may take to start, and what is waited for to come, on a busy machine.
START_S, ANSWER_S = 180, 300

#: Keys and their codes.
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


def find_chromium() -> str | None:
    """Return the browser's program: WARMGRAPH_CHROMIUM if set, else the first one on PATH."""
    named = os.environ.get("WARMGRAPH_CHROMIUM")
    if named:
        return named
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Chromium:
    """One browser with one page; what the page logs as an error is kept in `errors`."""

    def __init__(self, program: str, profile: Path) -> None:
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors: list[str] = []
        self._number = 0
        try:
            port = self._wait_for_port(profile / "DevToolsActivePort")
            self._socket = websocket.create_connection(
                self._wait_for_page(port)["webSocketDebuggerUrl"],
                timeout=ANSWER_S,
                suppress_origin=True,
            )
        except BaseException:
            self._end_process()
            raise
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._end_process()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, url: str) -> None:
        """Go to an address; returns before it has loaded."""
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Run the body of an async function in the page and return its JSON value."""
        result = self.send(
            "Runtime.evaluate",
            expression=f"(async () => {{ {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            raise RuntimeError(f"the page raised {text}\nin {script}")
        return result["result"].get("value")

    def wait_for(self, condition: str, *, seconds: float = ANSWER_S) -> Any:
        """Wait until a JavaScript expression is true and return its value."""
        end = time.monotonic() + seconds
        value = None
        while time.monotonic() < end:
            try:
                value = self.run(f"return {condition}")
            except RuntimeError:  # the page is being replaced
                value = None
            if value:
                return value
            time.sleep(0.1)
        raise TimeoutError(f"not within {seconds:g} s: {condition}")

    def type_text(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key by its name, such as Enter, Tab or Escape."""
        code = KEYS[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def screenshot(self) -> bytes:
        """Return what the page shows now as a PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if "method" not in message:  # the answer to what is sent below
            return
        if message["method"] == "Page.javascriptDialogOpening":  # leave a page that was changed
            self._number += 1
            accept = {"id": self._number, "method": "Page.handleJavaScriptDialog"}
            self._socket.send(json.dumps({**accept, "params": {"accept": True}}))
        elif message["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            values = [
                str(entry.get("value", entry.get("description", "")))
                for entry in parameters["args"]
            ]
            self.errors.append(" ".join(values))
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.errors.append(f"{entry['text']} ({entry.get('url', '')})")

    def _wait_for_page(self, port: int) -> dict[str, Any]:
        """What its debugging port says of the page, which may come after the port."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                entries: list[dict[str, Any]] = json.load(answer)
            for entry in entries:
                if entry["type"] == "page":
                    return entry
            time.sleep(0.1)
        raise TimeoutError(f"the browser opened no page within {START_S} s")

    def _wait_for_port(self, file: Path) -> int:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the browser ended at once with {self._process.returncode}")
            lines = file.read_text().split() if file.exists() else []
            if lines:
                return int(lines[0])
            time.sleep(0.1)
        raise TimeoutError(f"the browser opened no debugging port within {START_S} s")

    def _end_process(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
