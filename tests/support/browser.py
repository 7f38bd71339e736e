"""Debian's Chromium without a window, driven by its DevTools protocol over two pipes: no driver, no socket."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
ANSWER_SECONDS = 60.0
POLL_SECONDS = 0.05
UNTIL_SECONDS = 120.0
"""Of a host that stalls; what is waited for takes a second."""


class Browser:
    """One page. `said`: what it wrote to its console and what it did not catch; `asked`: the addresses it asked for."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._last:
                assert "error" not in told, (method, told)
                return told["result"]
            self._note(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], ANSWER_SECONDS)
            assert ready, "the browser does not answer"
            more = os.read(self._reading, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Log.entryAdded":
                self.said.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.said.append(str([each.get("value") for each in params["args"]]))
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(params["exceptionDetails"])[:2000])

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited."""
        done = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits until an expression is true; fails with what the page says meanwhile."""
        ends = time.monotonic() + UNTIL_SECONDS
        while not self.run(f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < ends, (condition, self.said, self.run("document.body.innerText"))
            time.sleep(POLL_SECONDS)

    def until_text(self, text: str, of: str = "body") -> None:
        self.until(f"document.querySelector({json.dumps(of)}).innerText.includes({json.dumps(text)})")

    def fill(self, selector: str, value: str) -> None:
        """As a person types it."""
        self.until(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).select?.()")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        if value:
            self.command("Input.insertText", text=value)
        else:
            self.press("Delete")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Delete": 46}
        typed = {"Enter": "\r"}.get(key, text)
        number = code or codes[key]
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=number,
                text=typed if kind == "keyDown" else "",
            )  # fmt: skip

    def click(self, selector: str) -> None:
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{chosen} && !{chosen}.disabled")
        self.run(f"{chosen}.click()")

    def choose_files(self, selector: str, files: list[Path]) -> None:
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop_files(self, selector: str, files: list[Path]) -> None:
        """As they are dragged there from outside; folders, too."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"[{box}.x + 5, {box}.y + 5]")
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.command("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yields a browser with an empty profile; it is ended with the block."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()

    def place_pipes() -> None:
        # The browser reads commands from descriptor 3, and answers to 4.
        high = [os.dup(commands), os.dup(answers)]
        for source, wanted in zip(high, (3, 4), strict=True):
            os.dup2(source, wanted)

    process = subprocess.Popen(
        [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        preexec_fn=place_pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(from_browser, to_browser)
    finally:
        process.kill()
        process.wait(30)
        os.close(to_browser)
        os.close(from_browser)
