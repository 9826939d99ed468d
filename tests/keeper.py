"""A worker reduced to what keeps effects: events, the control socket, the broker and a ledger, in a process of its own.

`python -m tests.keeper FOLDER [NAME=VALUE ...]` is that process.  It says on standard output when it is ready, and
then what became of each effect, as `OUTCOME STEP KEY`.
"""

import contextlib
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.support import PATIENCE, ROOT
from worker import clock, control, wire
from worker.broker import Broker
from worker.errors import AgentError
from worker.events import Events, Signals
from worker.ledger.effects import CLAIMED, Effect
from worker.ledger.sqlite import SqliteLedger
from worker.ledger.sqlite.effects import SqliteEffects

T = TypeVar("T")


class Keeper:
    """The process, and what a step finds around it; `start` may be called again after its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cwd = folder  # of its clients
        (folder / "state").mkdir()
        SqliteLedger.create(str(folder / "ledger.db")).close()
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONPYCACHEPREFIX": str(folder.parent / "compiled"),  # once for all tests of a session
            "AGENT_RUN": "run",
            "AGENT_STEP": "a",
            "NOTIFY_SOCKET": str(folder / "notify"),
            "STATE_DIRECTORY": str(folder / "state"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[bytes]] = []
        self._uses = 0

    @property
    def counter(self) -> Path:
        """A file with a line for each time that an effect happened."""
        return self.cwd / "effects"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def socket(self) -> str:
        return str(self._folder / "control")

    def start(self, **settings: object) -> "Keeper":
        """Start it; return when it is ready."""
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-S", "-m", "tests.keeper", str(self._folder), *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self.environ)
        self.until("ready")
        return self

    def use(self, cwd: Path) -> "Keeper":
        """Return it running, without effects or clients of an earlier test; those of this one work in `cwd`."""
        self._end(self._clients)
        self._clients, self.cwd = [], cwd
        self.counter.touch()
        if self._process is None or self._process.poll() is not None:
            self.start()
        self._uses += 1
        raw = Raw(self)  # whatever it said before this has been said for the earlier test
        token = raw.claim(f"use-{self._uses}")["token"]
        raw.say(once="commit", key=f"use-{self._uses}", token=token, step="a", outcome="executed", size=0, kept=True)
        self.until(f"executed a use-{self._uses}")
        raw.close()
        with contextlib.closing(sqlite3.connect(self._folder / "ledger.db")) as database, database:
            database.execute("DELETE FROM effects")
        return self

    def until(self, line: str) -> None:
        """Return when it has said `line`."""
        assert self._process is not None and self._process.stdout is not None
        read_until(self._process, self._process.stdout.fileno(), line)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end."""
        assert self._process is not None and self._process.stdout is not None
        self._process.send_signal(number)
        self._process.wait(PATIENCE)
        self._process.stdout.close()

    def wait(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        """End it, and what was started here, if they live."""
        self._end([*self._clients, *([self._process] if self._process else [])])

    @staticmethod
    def _end(processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    # -- its clients

    def spawn(self, *arguments: str, step: str = "a") -> subprocess.Popen[bytes]:
        """Start this Python with `arguments`, as something in `step`."""
        pipe = subprocess.PIPE
        environ = {**self.environ, "AGENT_STEP": step}
        command = [sys.executable, "-S", *arguments]
        process = subprocess.Popen(command, env=environ, cwd=self.cwd, stdin=pipe, stdout=pipe, stderr=pipe)
        self._clients.append(process)
        return process

    def begin(self, *words: str, step: str = "a") -> subprocess.Popen[bytes]:
        """Start an `agentctl once`."""
        return self.spawn("-m", "worker", "once", *words, step=step)

    def once(self, *words: str, step: str = "a") -> subprocess.CompletedProcess[bytes]:
        """Run an `agentctl once` to its end."""
        return end(self.begin(*words, step=step))

    def script(self, code: str, step: str = "a") -> subprocess.CompletedProcess[bytes]:
        """Run a program that may call step.once() to its end; `happen` counts one effect."""
        return end(self.spawn("-c", f"{_SCRIPT}\n{code}", step=step))

    def happened(self) -> int:
        """Return how often an effect happened."""
        return self.counter.read_text().count("\n")

    @contextlib.contextmanager
    def effects(self) -> Iterator[SqliteEffects]:
        """The effects in the ledger, as another process sees them."""
        ledger = SqliteLedger.open(str(self._folder / "ledger.db"))
        try:
            yield ledger.effects
        finally:
            ledger.close()

    def effect(self, key: str) -> Effect:
        with self.effects() as effects:
            return next(effect for effect in effects.all() if effect.key == key)

    def answers(self) -> bool:
        """Return whether it says how it stands."""
        return control.ask(self.socket) is not None


_SCRIPT = """
from worker import step

def happen(result=None):
    with open('effects', 'a') as file:
        file.write("x\\n")
    return result
"""


class Raw:
    """A client that says what it likes on the control socket."""

    def __init__(self, keeper: Keeper) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(keeper.socket)

    def say(self, **fields: object) -> "Raw":
        self.socket.sendall(wire.encode(fields))
        return self

    def claim(self, key: str, **fields: object) -> dict[str, str]:
        """Claim `key` for step a; return the answer."""
        request = {"once": "claim", "key": key, "parameters": "p", "step": "a", "lease": 60}
        return self.say(**{**request, **fields}).hear()

    def hear(self) -> dict[str, str]:
        """Return the next answer, empty at the end of the connection."""
        line = b""
        while not line.endswith(b"\n") and (data := self.socket.recv(1)):
            line += data
        return wire.decode(line.rstrip(b"\n")) if line else {}

    def close(self) -> None:
        self.socket.close()


class Gate:
    """Something that commands wait for with `COMMAND`, each for a word of its own."""

    COMMAND = "read word < gate"

    def __init__(self, keeper: Keeper) -> None:
        path = keeper.cwd / "gate"
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # so that neither side waits for the other

    def open(self) -> None:
        """Let one command go on, now or when it comes."""
        os.write(self._fd, b"go\n")

    def close(self) -> None:
        os.close(self._fd)


def end(process: subprocess.Popen[bytes]) -> subprocess.CompletedProcess[bytes]:
    """Wait for the end of a client."""
    out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def read_until(process: subprocess.Popen[bytes], fd: int, words: str) -> str:
    """Read lines from `fd`, one byte at a time so that nothing is read too much, until one has `words` in it."""
    gives_up, line = time.monotonic() + PATIENCE, b""
    said: list[str] = []
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, gives_up - time.monotonic()))
        data = os.read(fd, 1) if ready else b""
        if not data:
            raise AssertionError(f"no line with '{words}' from {process.args!r}:\n" + "\n".join(said))
        line += data
        if data == b"\n":
            said.append(line.decode())
            if words in said[-1]:
                return said[-1]
            line = b""


def main(folder: str, settings: dict[str, str]) -> None:
    """Keep effects until SIGTERM.  `die_after=NAME`: kill ourselves when the ledger has done that.

    `inherit=yes`: the steps that hold claims have outlived the keeper before.
    """
    events = Events()
    ledger = SqliteLedger.open(f"{folder}/ledger.db")
    stopped: list[int] = []
    dies_after = settings.get("die_after")

    def persist(action: Callable[[], T]) -> T:
        events.handle(events.poll(0))  # as while waiting for a disk, or for another machine
        return action()

    if dies_after:
        real = getattr(ledger.effects, dies_after)

        def die(*words: object) -> None:
            real(*words)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(ledger.effects, dies_after, die)

    def told(request: dict[str, str], result: bytes | None) -> str:
        name, said = request["settle"], (result or b"") if request["kept"] == "yes" else None
        if persist(lambda: ledger.effects.settle(name, said)) is None:
            raise AgentError(f"'{name}' is not unknown")
        return f"{name}: settled by {request['who']}"

    control._CONNECTIONS_MAX = int(settings.get("connections", control._CONNECTIONS_MAX))
    snapshot = {"padding": "x" * int(settings.get("padding", 0))}
    broker = Broker(
        ledger.effects,
        persist,
        lambda step: step != "dead",
        lambda step, key, outcome: print(outcome, step, key, flush=True),
        told,
    )
    if settings.get("inherit"):
        broker.inherit([effect for effect in ledger.effects.all() if effect.state == CLAIMED])
    signals = Signals(events, [signal.SIGTERM], stopped.append)
    server = control.Server(f"{folder}/control", events, lambda: snapshot, broker)
    print("ready", flush=True)
    while not stopped:
        broker.work(clock.monotonic())
        wait = broker.due_at() - clock.monotonic()
        events.handle(events.poll(max(0.0, wait) if wait < 3600 else None))
    server.close()
    signals.close()
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:]))
