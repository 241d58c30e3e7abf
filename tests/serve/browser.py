"""A headless Chromium for tests, spoken to by its own protocol over a pair of pipes."""

import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

from tests.serve.server import LIMIT


def chromium() -> str | None:
    """The program: that of the environment variable CHROMIUM, or one on the path."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page, until `close`.

    Attributes:
        complaints: errors of the console, of the policy, and of scripts.
    """

    def __init__(self, program: str, folder: pathlib.Path) -> None:
        (theirs, self._to), (self._from, back) = os.pipe(), os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        options += f" --remote-debugging-pipe --user-data-dir={folder}"
        # The protocol is at the descriptors 3 and 4.
        script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        command = ["bash", "-c", script, str(theirs), str(back), program, *options.split(), "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=[theirs, back], **quiet)  # pyright: ignore
        os.close(theirs)
        os.close(back)
        self._data, self._number, self._session = b"", 0, {}
        self.complaints = list[str]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            found = self._next(end)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(found["params"]))

    def open(self, url: str) -> None:
        """Goes to a page, and waits until its script has run."""
        self.ask("Page.navigate", url=url)
        self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a script."""
        made = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of a script, once it is true."""
        end = time.monotonic() + LIMIT
        while not (found := self.run(script)):
            assert time.monotonic() < end, (script, self.complaints)
            time.sleep(0.02)
        return found

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait(LIMIT)
        os.close(self._to)
        os.close(self._from)

    def _next(self, end: float) -> Any:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._data += data
        one, _, self._data = self._data.partition(b"\0")
        return json.loads(one)
