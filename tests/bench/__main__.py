"""`make bench`: what a step costs, how that grows, how fast the worker starts, what it needs while idle.

Every figure is a ratio to something measured in the same minute on the same disk; absolute times are
there to be doubted.  AGENT_BENCH_FULL=1 adds the list of 100,000 steps, which takes minutes.
"""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count, islice
from pathlib import Path

from tests.bench import peers
from tests.support import ROOT, Worker
from worker import checkpoint, process
from worker.companions import Companion
from worker.config import Copy
from worker.copies import Copies
from worker.errands import Errands
from worker.events import Events, Signals
from worker.folder import Places
from worker.journal import Journal
from worker.keeper import Keeper
from worker.ledger import DONE, Claim, Ending, Holdings, Row
from worker.ledger.sqlite import SqliteLedger

SLICE = 200  # steps of the yardstick between two slices of the worker's


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="agent-bench-", dir=os.environ.get("AGENT_BENCH_DIR", "/var/tmp")))
    try:
        bench_ledger(folder)
        bench_beside(folder)
        bench_steps(folder)
        bench_naive(folder)
        bench_parallel(folder)
        bench_output(folder)
        bench_programs(folder)
        bench_start(folder)
        bench_idle(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bench_ledger(folder: Path) -> None:
    """Claim and commit of a step, beside one durable transaction of SQLite, in slices that take turns."""
    place = folder / "ledger"
    place.mkdir()
    yardstick = peers.transaction(place)
    for redo in ("always", "never"):
        ledger = SqliteLedger.create(str(place / f"{redo}.db"))
        claims = (Claim(f"s@{n}", 1, "0123456789abcdef", 1.0, "boot", "", redo == "always") for n in count())
        claim = next(claims)
        ledger.record([], [claim])
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(30):
            with peers.stopwatch(ours):
                for _ in range(SLICE):
                    ended = Ending(
                        claim.step, 1, DONE, False, False, "", 0, 2.0, 1.0, output=b"a result\n", output_size=9
                    )
                    claim = next(claims)
                    ledger.record([ended], [claim])
            with peers.stopwatch(theirs):
                for _ in range(SLICE):
                    yardstick()
        ledger.close()
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f" ledger: claim and commit {ratio:.2f} x one durable transaction (redo: {redo})", flush=True)


def bench_beside(folder: Path) -> None:
    """What is made beside a run of 100,000 steps: the time of the loop, and the child's beside cp and fsync."""
    place = folder / "beside"
    (place / "copy").mkdir(parents=True)
    rows = [
        (Row(n, f"s@{n}", 1, "0123456789abcdef", 1.0, "boot", DONE, *_ENDED), b"a result\n") for n in range(1, 100_001)
    ]
    ledger = SqliteLedger.create(str(place / "ledger.db"), Holdings(rows, {"run": "list"}))
    loop: list[float] = []
    events = Events()

    def wait(until: float) -> None:
        ready = events.poll(max(0.0, until - time.monotonic()))
        with peers.stopwatch(loop):
            events.handle(ready)

    errands = Errands(events, wait, str(place), leftovers=False)
    signals = Signals(events, [signal.SIGCHLD], lambda _: errands.on_exits(process.reap()))
    wanted, places = Copy(0.0, ("true",), 600.0), Places("list", str(place), str(place))
    journal = Journal("list", lambda *_: None)
    copies = Copies(lambda: wanted, places, False, "/", lambda: dict(os.environ), errands, journal, lambda: False)
    keeper = Keeper(places.checkpoint, "list", ledger, errands, journal)
    _beside("copy", copies, errands, loop, place)
    _beside("checkpoint", keeper, errands, loop, place)
    signals.close()
    assert (found := copies.describe()) is not None and found["revision"] == 200_000, found
    assert checkpoint.header(places.checkpoint).revision == 200_000
    ledger.close()


def _beside(name: str, companion: Companion, errands: Errands, loop: list[float], place: Path) -> None:
    """Time what a companion makes in an errand of that name; `loop` is where the loop's own time is counted."""
    ours: list[float] = []
    theirs: list[float] = []
    loop.clear()
    for _ in range(5):
        companion.changed()
        with peers.stopwatch(ours):
            with peers.stopwatch(loop):
                companion.keep(time.monotonic() + 3600.0)
            errands.wait(time.monotonic() + 600.0, name)
        with peers.stopwatch(theirs):
            subprocess.run(["sh", "-c", f"cp {place}/ledger.db {place}/plain && sync {place}/plain"], check=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(
        f"{name:>7}: 100,000 steps cost the loop {sum(loop) / 5 * 1e3:.1f} ms; in the background "
        f"{statistics.median(ours):.1f} s, {ratio:.1f} x cp and fsync of the ledger",
        flush=True,
    )


# What follows the outcome in a row of a step that was done.
_ENDED = (False, False, "", 0, 2.0, 1.0, 0.0, 0.0, 0.0, "", 9, 0)


def bench_steps(folder: Path) -> None:
    """Time per step, beside one spawn and one durable transaction, in slices that take turns."""
    totals = [1_000, 10_000] + ([100_000] if os.environ.get("AGENT_BENCH_FULL") else [])
    first = None
    for total in totals:
        ratio, ours, theirs = _interleaved(folder / f"steps-{total}", total)
        first = first or ratio
        print(
            f"{total:>7} steps: {ours * 1e3:.2f} ms a step, {ratio:.2f} x (spawn + durable commit, "
            f"{theirs * 1e3:.2f} ms); {ratio / first:.2f} x of the shortest list",
            flush=True,
        )


def _interleaved(folder: Path, total: int) -> tuple[float, float, float]:
    """Time the worker and the yardstick in slices that take turns, at the end of a list of `total` steps.

    A step stops the worker (SIGSTOP) at the end of each slice, so that nothing but the kernel watches it.
    """
    folder.mkdir()
    slices = min(10, total // SLICE - 1)
    lengths = [total - slices * SLICE, *[SLICE] * slices]
    worker = _worker(
        folder,
        "tasks:\n"
        + "".join(
            f"  - {{id: s{n}, foreach: {{range: 1-{length - 1}}}, run: 'true'}}\n"
            f"  - {{id: pause{n}, run: kill -STOP $PPID}}\n"
            for n, length in enumerate(lengths)
        ),
    )
    worker.start(stderr=subprocess.DEVNULL)
    yardstick = peers.limit(folder)
    ours: list[float] = []
    theirs: list[float] = []
    _wait_stopped(worker.pid)
    for _ in range(slices):
        with peers.stopwatch(ours):
            worker.process.send_signal(signal.SIGCONT)
            _wait_stopped(worker.pid)
        with peers.stopwatch(theirs):
            for _ in range(SLICE):
                yardstick()
    worker.process.send_signal(signal.SIGCONT)
    worker.process.wait()
    assert len(worker.done()) == total
    # The median of pairs: what disturbs the machine for a while disturbs both of a pair.
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return ratio, statistics.median(ours) / SLICE, statistics.median(theirs) / SLICE


def _wait_stopped(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def bench_naive(folder: Path) -> None:
    """The worker that rewrites one JSON file twice a step, at the end of its list."""
    for total in (1_000, 10_000):
        place = folder / f"naive-{total}"
        place.mkdir()
        times: list[float] = []
        limit: list[float] = []
        yardstick = peers.limit(place)
        for _ in range(20):
            steps = peers.naive(place, total)
            with peers.stopwatch(times):
                for _ in islice(steps, 5):
                    pass
            with peers.stopwatch(limit):
                for _ in range(5):
                    yardstick()
        ratio = statistics.median(a / b for a, b in zip(times, limit, strict=True))
        print(f"{total:>7} steps in a naive state file: {ratio:.2f} x (spawn + durable commit)", flush=True)


def bench_parallel(folder: Path) -> None:
    """The rate of eight steps at a time, beside one at a time, in turns."""
    ratios = []
    for round_ in range(5):
        seconds = {}
        for slots in (1, 8):
            place = folder / f"parallel-{round_}-{slots}"
            place.mkdir()
            list_ = f"concurrency: {slots}\ntasks:\n  - {{id: s, foreach: {{range: 1-500}}, run: 'true'}}\n"
            worker = _worker(place, list_)
            worker.start(stderr=subprocess.DEVNULL).process.wait()
            rows = worker.rows()
            seconds[slots] = max(row.ended or 0 for row in rows) - min(row.started for row in rows)
        ratios.append(seconds[1] / seconds[8])
    print(f"parallel: 8 steps at a time are {statistics.median(ratios):.2f} x as fast as one at a time", flush=True)


def bench_output(folder: Path) -> None:
    """A step that prints a million lines, beside `cat` to a file."""
    ratios = []
    for round_ in range(7):
        place = folder / f"output-{round_}"
        place.mkdir()
        worker = _worker(place, "tasks:\n  - {id: s, run: seq 1000000}\n")
        worker.run()
        cat: list[float] = []
        with peers.stopwatch(cat):
            subprocess.run(["sh", "-c", f"seq 1000000 | cat > {place}/cat"], check=True)
        ratios.append(worker.rows()[0].took / cat[0])
    print(f"  output: a million lines cost {statistics.median(ratios):.2f} x `seq | cat > file`", flush=True)


def bench_programs(folder: Path) -> None:
    """What a step may call, beside the interpreter's own start, in turns."""
    place = folder / "programs"
    place.mkdir()
    agentctl = "import sys; from worker.__main__ import main; sys.exit(main())"
    worker = _worker(
        place,
        f"""
tasks:
  - {{id: pass, foreach: {{range: 1-30}}, run: [{sys.executable}, -I, -c, pass]}}
  - {{id: beat, foreach: {{range: 1-30}}, env: {{PYTHONPATH: {ROOT}}}, run: [{sys.executable}, -c, "{agentctl}", beat]}}
  - {{id: call, foreach: {{range: 1-30}}, python: "jobs:nothing", cwd: .}}
""",
    )
    (place / "jobs.py").write_text("def nothing():\n    return None\n")
    assert worker.run() == 0
    took: dict[str, list[float]] = {}
    for row in worker.rows():
        took.setdefault(row.step.split("@")[0], []).append(row.took)
    start, beat, call = (statistics.median(took[name]) for name in ("pass", "beat", "call"))
    print(
        f"programs: `agentctl beat` {beat * 1e3:.0f} ms, {beat / start:.2f} x `python -I -c pass`; "
        f"a python step {call / start:.2f} x",
        flush=True,
    )


def bench_start(folder: Path) -> None:
    """From the command to READY=1, and the memory then."""
    python = _median_seconds([sys.executable, "-c", "pass"])
    for total in (40, 100_000):
        place = folder / f"start-{total}"
        place.mkdir()
        worker = _worker(place, f"tasks:\n  - {{id: s, foreach: {{range: 1-{total}}}, run: sleep 60}}\n")
        times: list[float] = []
        memory = 0
        for _ in range(5):
            with peers.stopwatch(times):
                worker.start().until("^run list: ")
            status = Path(f"/proc/{worker.pid}/status").read_text()
            memory = max(memory, int(re.findall(r"VmHWM:\s*(\d+)", status)[0]))
            worker.kill(signal.SIGTERM)
        seconds = statistics.median(times)
        print(
            f"{total:>7} steps: ready after {seconds * 1e3:.0f} ms, {seconds / python:.1f} x `python -c pass`"
            f" ({python * 1e3:.0f} ms); {memory / 1024:.0f} MB at the most",
            flush=True,
        )


def bench_idle(folder: Path) -> None:
    """CPU time of the worker while one silent step sleeps, with a watchdog and limits in force."""
    place = folder / "idle"
    place.mkdir()
    worker = _worker(place, "tasks:\n  - {id: s, run: sleep 60, stall_after: 15min, timeout: 1h}\n")
    worker.start().until("s: started")
    time.sleep(1)
    before, began = _cpu(worker.pid), time.monotonic()
    time.sleep(10)
    used, seconds = _cpu(worker.pid) - before, time.monotonic() - began
    worker.kill(signal.SIGTERM)
    print(f"   idle: {used / seconds * 100:.2f} % of a core while a step sleeps", flush=True)


def _cpu(pid: int) -> float:
    """Return the CPU time of a process in seconds, from its scheduler statistics (nanoseconds)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _median_seconds(command: list[str]) -> float:
    times: list[float] = []
    for _ in range(15):
        with peers.stopwatch(times):
            subprocess.run(command, check=True)
    return statistics.median(times)


def _worker(folder: Path, tasks: str) -> Worker:
    # As installed: byte-compiled, and the output of a burst of steps goes somewhere cheap.
    return Worker(folder, tasks, {"PYTHONDONTWRITEBYTECODE": ""})


if __name__ == "__main__":
    main()
