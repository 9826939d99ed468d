"""The list that a case works through, and what is true of it when all is done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_ITEMS = {"a": "a", "b c": r"b\x20c", "ü": r"\xc3\xbc"}
RESULTS = {
    "small": b"small\n",
    "large": b"".join(b"%d\n" % n for n in range(1, 40001)),
    **{f"each@{name}": item.encode() + b"\n" for item, name in _ITEMS.items()},
    "needs": b"small\n",
    "checked": b"sent\n",
    "once": b"paid\n",
    "saved": b"2\n",
    "http": b"posted\n",
    "flaky": b"fine\n",
}
"""What lies in out/ for each step, byte for byte."""

EFFECTS = ("checked", "once", "http")
"""The files, in the folder of effects, that have one line each at the end."""

# A step says first that it was begun.  Attempts are many: a worker that is killed costs each of its steps one.
_LIST = """
run: {run}
{ledger}
defaults: {{retry: {{attempts: 50, delay: 0s}}}}
tasks:
  - {{id: small, run: 'echo small >> {effects}/begun; echo small'}}
  - {{id: large, run: 'echo large >> {effects}/begun; seq 1 40000'}}
  - id: each
    foreach: [a, b c, ü]
    run: |
      echo "$AGENT_STEP" >> {effects}/begun
      echo "$AGENT_ITEM"
  - {{id: needs, needs: [small], run: 'echo needs >> {effects}/begun; cat "$AGENT_OUT"/small'}}
  - id: checked
    redo: check
    check: 'test -s {effects}/checked && echo sent'
    run: 'echo checked >> {effects}/begun; echo x >> {effects}/checked; echo sent'
  - id: once
    run: |
      echo once >> {effects}/begun
      {agentctl} once pay --quiet --check 'test -s {effects}/once && echo paid' -- \\
        sh -c 'echo x >> {effects}/once; echo paid'
  - id: saved
    run: |
      echo saved >> {effects}/begun
      at=$({agentctl} load at)
      [ "$at" != 1 ] || {{ echo 2; exit 0; }}
      {agentctl} progress 1/2
      echo 1 | {agentctl} save at
      exit 75
  - {{id: http, http: {{method: POST, url: "{url}", json: {{text: paid}}}}}}
  - id: flaky
    run: |
      echo flaky >> {effects}/begun
      [ -e {effects}/failed ] || {{ touch {effects}/failed; exit 1; }}
      echo fine
"""


def tasks(run: str, ledger: str, folder: Path, url: str, agentctl: str) -> str:
    """Return the text of the list; its effects go into `folder`."""
    return _LIST.format(
        run=run, ledger=f"ledger: {ledger}\nlease: 5s" if ledger else "", effects=folder, url=url, agentctl=agentctl
    )


class Recipient:
    """A server that honours Idempotency-Key, as one that takes payments does: a key counts once."""

    def __init__(self) -> None:
        self.folder = Path()
        self._keys: set[str] = set()
        recipient = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recipient._take(self.headers.get("Idempotency-Key") or "")
                self.send_response(200)
                self.send_header("Content-Length", "7")
                self.end_headers()
                self.wfile.write(b"posted\n")

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # whoever asked was killed
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def begin(self, folder: Path) -> None:
        """Note what comes in the file `http` of this folder from now on."""
        self.folder, self._keys = folder, set()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, key: str) -> None:
        if key not in self._keys:
            self._keys.add(key)
            with open(self.folder / "http", "a") as file:
                file.write(f"{key}\n")


def faults(state: Path, effects: Path, done: list[str], begun_again: list[str]) -> Iterator[str]:
    """Yield what is wrong at the end, a line each; `done` are the steps that the ledger has as done, in its order."""
    for name in sorted(set(RESULTS) | set(done)):
        if done.count(name) != 1:
            yield f"{name}: done {done.count(name)} times"
    for name in begun_again:
        yield f"{name}: begun again after it was committed"
    for name in EFFECTS:
        times = len(lines(effects / name))
        if times != 1:
            yield f"{name}: its effect happened {times} times"
    for name, expected in RESULTS.items():
        path = state / "out" / name
        found = path.read_bytes() if path.exists() else None
        if found != expected:
            yield f"{name}: its result is {'missing' if found is None else f'{found[:40]!r} ({len(found)} bytes)'}"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
