"""One case: a fault at one system call of the worker, then workers without any until the list is done."""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import stat
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.campaign import work
from tests.support import PATIENCE, ROOT, Worker, end_all

KILL, TWICE = "KILL", "TWICE"
# Of the calls of a worker that goes on after a death, the second one comes at one of the first so many.
_SECOND = 60
SQLITE, POSTGRES = "sqlite", "postgres"
# What a worker writes with.  A ledger on a server has a thread of its own, so there children are followed as well, and
# a step's own process may be the one that is hit.
CALLS = {
    SQLITE: "write,pwrite64,fsync,fdatasync,ftruncate,rename,unlink,mkdir,sendmsg,openat",
    POSTGRES: "write,fsync,fdatasync,rename,unlink,mkdir,sendmsg,sendto,openat",
}
ERRORS = ("EIO", "ENOSPC", "EMFILE")
# Failing calls after which a worker may be started again by hand; more starts than that are a loop.
_STARTS = 5
_LOOK = 0.05  # how often to see whether it has ended
_WRITES = re.compile(r"O_CREAT|O_WRONLY|O_RDWR")
# A connection that takes nothing more is read to its end by libpq, which a call that fails alone does not bring.
_NEVER = ("sendto",)
_TO_ITSELF = re.compile(r"\d+<(pipe|anon_inode):")
_CALL = re.compile(r"^(?P<who>\d* *)(?P<name>\w+)\((?P<rest>.*)")


class Case(NamedTuple):
    """`fault` is KILL, TWICE (the next worker is killed, too) or an errno's name; `nth`: at which call, from 1."""

    ledger: str
    call: str
    nth: int
    fault: str

    def __str__(self) -> str:
        return f"{self.ledger}/{self.call}/{self.nth}/{self.fault}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case as `str` shows it.  Raises ValueError."""
        ledger, call, nth, fault = text.split("/")
        return cls(ledger, call, int(nth), fault)


class Outcome(NamedTuple):
    """`hit`: the fault has met the worker.  `starts` of workers until the list was done; `faults` in lines."""

    hit: bool
    starts: int
    faults: list[str]
    said: list[str]


class Place:
    """Where the cases of a campaign are worked through, one after the other."""

    def __init__(self, folder: Path, recipient: work.Recipient, server: str) -> None:
        """`server` is the address of a PostgreSQL server, empty where there is none."""
        self._folder = folder
        self._recipient = recipient
        self._server = server
        self._numbers = itertools.count(1)

    def calls(self, ledger: str) -> dict[tuple[str, bool], list[int]]:
        """Return which calls of a run without faults write something: their numbers, by name and whether they may fail.

        What a process writes to itself, through a pipe or an eventfd, does not.
        """
        worker, trace, _effects = self._begin(ledger)
        status = _start(worker, ledger, trace, f"trace=execve,{CALLS[ledger]}")
        if status != 0:
            raise AssertionError(f"exit status {status} without any fault:\n" + "\n".join(worker.lines))
        gives_up = time.monotonic() + PATIENCE
        while not trace.read_text(errors="replace").endswith("+++\n") and time.monotonic() < gives_up:
            time.sleep(_LOOK)
        calls = [call for line in trace.read_text(errors="replace").splitlines() if (call := _CALL.match(line))]
        # Children become other programs; the worker is what was started first, and its threads.
        first = calls[0]["who"]
        others = {call["who"] for call in calls if call["name"] == "execve"} - {first}
        found: dict[tuple[str, bool], set[int]] = {}
        seen: Counter[tuple[str, str]] = Counter()
        for call in calls:
            who, name = call["who"], call["name"]
            seen[who, name] += 1
            written = name != "openat" or _WRITES.search(call["rest"])
            if written and name != "execve" and who not in others:
                may_fail = name not in _NEVER and not _TO_ITSELF.match(call["rest"])
                found.setdefault((name, may_fail), set()).add(seen[who, name])
        # strace counts for each thread by itself: a fault at the Nth call meets each one's.
        return {
            (name, may_fail): sorted(numbers - found.get((name, False), set()) if may_fail else numbers)
            for (name, may_fail), numbers in found.items()
        }

    def run(self, case: Case) -> Outcome:
        """Work through one case."""
        worker, trace, effects = self._begin(case.ledger)
        how = f"signal={KILL}" if case.fault in (KILL, TWICE) else f"error={case.fault}"
        status = _start(worker, case.ledger, trace, f"inject={case.call}:{how}:when={case.nth}")
        injected = [line for line in trace.read_text(errors="replace").splitlines() if "(INJECTED)" in line]
        calls = [call for line in injected if (call := _CALL.match(line))]
        if any(_TO_ITSELF.match(call["rest"]) for call in calls):  # runs differ; this call never fails
            worker.close()
            return Outcome(False, 1, [], worker.lines)
        hit = status == -signal.SIGKILL or bool(injected)
        seen = [(_done(worker), len(work.lines(effects / "begun")))]
        starts = 1
        if case.fault == TWICE and status == -signal.SIGKILL:
            second = 1 + case.nth * 7 % _SECOND
            status = _start(worker, case.ledger, trace, f"inject={case.call}:signal={KILL}:when={second}")
            seen.append((_done(worker), len(work.lines(effects / "begun"))))
            starts += 1
        while status not in (0, None) and starts < _STARTS:
            status = _ended(worker.start(start_new_session=True))
            starts += 1
        begun = work.lines(effects / "begun")
        again = [name for committed, before in seen for name in begun[before:] if name in committed]
        faults = [] if status == 0 else [f"exit status {status} at the last of {starts} starts"]
        if status is None:
            faults = ["it hangs"]
        faults += work.faults(worker.state, effects, _done(worker), again)
        faults += [line for line in worker.lines if "Traceback" in line]
        worker.close()
        if faults:
            end_all(worker.state.parent)
        return Outcome(hit, starts, faults, worker.lines)

    def _begin(self, ledger: str) -> tuple[Worker, Path, Path]:
        number = next(self._numbers)
        folder = self._folder / str(number)
        effects = folder / "effects"
        effects.mkdir(parents=True)
        agentctl = folder / "agentctl"
        agentctl.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m worker "$@"\n')
        agentctl.chmod(agentctl.stat().st_mode | stat.S_IXUSR)
        self._recipient.begin(effects)
        address = self._server if ledger == POSTGRES else ""
        run = f"campaign-{os.getpid()}-{number}"
        text = work.tasks(run, address, effects, self._recipient.url, str(agentctl))
        return Worker(folder, text), folder / "trace", effects


def _start(worker: Worker, ledger: str, trace: Path, what: str) -> int | None:
    """Run a worker to its end.  With -D strace is not its parent: it lives as long as the steps of a killed worker."""
    follow = ["-f"] if ledger == POSTGRES else []
    prefix = ["strace", "-D", "-q", "-y", *follow, "-o", str(trace), "-e", what]
    return _ended(worker.start(*prefix, start_new_session=True))


def _ended(worker: Worker) -> int | None:
    """Return the exit status of a worker that leads a session; None, ending it, if it says nothing for long."""
    stream, said, heard_at = worker.process.stderr, b"", time.monotonic()
    assert stream is not None
    while (status := worker.process.poll()) is None and time.monotonic() < heard_at + PATIENCE:
        if select.select([stream], [], [], _LOOK)[0]:
            said += os.read(stream.fileno(), 65536)
            heard_at = time.monotonic()
    if status is None:
        os.killpg(worker.pid, signal.SIGKILL)
        for tracer in _tracers(worker.pid):  # strace itself may hang
            os.kill(tracer, signal.SIGKILL)
        worker.process.wait()
    while select.select([stream], [], [], 0)[0] and (data := os.read(stream.fileno(), 65536)):
        said += data
    worker.lines += said.decode(errors="replace").splitlines()
    return status


def _tracers(pid: int) -> set[int]:
    found = (re.search(r"TracerPid:\t(\d+)", path.read_text()) for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return {int(tracer[1]) for tracer in found if tracer is not None} - {0}


def _done(worker: Worker) -> list[str]:
    """Return the steps that the ledger has as done, none where it was not made yet."""
    try:
        return worker.done()
    except Exception:  # whatever an early death has left; the next worker says whether it is of use
        return []
