"""SIGKILL of the worker, again and again: no committed step twice, every file whole."""

import json
import os
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import tracing
from tests.conftest import MakeWorker

SEED = int(os.environ.get("AGENT_TEST_SEED", "20260131"))
# How often, over half as many steps again: each costs half a second or more.
KILLS = int(os.environ.get("AGENT_KILLS", "100"))
STEPS = KILLS * 3 // 2


def test_killed_at_random_again_and_again(worker: MakeWorker) -> None:
    """
    Every step is committed once, none is started again after its commit, outputs are whole, and a
    reader that opens checkpoint.json as fast as it can never sees a broken one.
    """
    w = worker(f"""
run: kills
defaults: {{retry: {{attempts: {KILLS}, delay: 0}}}}
tasks:
  - id: s
    foreach: {{range: 1-{STEPS}}}
    cwd: .
    run: echo "$AGENT_ITEM" >> starts; sleep 0.0$((AGENT_ITEM % 5)); seq 100
""")
    chance = random.Random(SEED)
    broken: list[str] = []
    reads = Counter[str]()
    over = threading.Event()
    reader = threading.Thread(target=_read_on, args=(w.state / "checkpoint.json", over, broken, reads))
    reader.start()
    kills = 0
    try:
        while kills < KILLS:
            w.start()
            w.until("run kills: .*(starting|going on|nothing to do)")
            time.sleep(chance.uniform(0, 0.06))  # where in a step the kill falls is what chance decides
            if w.process.poll() is None:
                kills += w.kill() == -9
            if len(w.done()) == STEPS:
                break
        assert w.run() == 0
    finally:
        over.set()
        reader.join()

    assert kills >= KILLS / 2, "too few kills to show anything"
    assert not broken
    assert reads["whole"] > 5 * KILLS
    assert sorted(w.done()) == sorted(f"s@{n}" for n in range(1, STEPS + 1))
    whole = b"".join(b"%d\n" % n for n in range(1, 101))
    assert all(w.output(f"s@{n}") == whole for n in range(1, STEPS + 1))
    _assert_no_start_after_commit(w.lines)
    starts = Counter((w.config.parent / "starts").read_text().split())
    tries = Counter(row.step for row in w.rows())
    assert all(starts[str(n)] <= tries[f"s@{n}"] for n in range(1, STEPS + 1))


def _read_on(path: Path, over: threading.Event, broken: list[str], reads: Counter[str]) -> None:
    while not over.is_set():
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        try:
            json.loads(data)
            reads["whole"] += 1
        except ValueError as exc:
            broken.append(f"{exc}: {data[:80]!r}")


def _assert_no_start_after_commit(lines: list[str]) -> None:
    done: set[str] = set()
    for line in lines:
        if found := re.match(r"(s@\d+): (started|done)", line):
            step, what = found.groups()
            assert step not in done, f"{step} was {what} after it was done"
            if what == "done":
                done.add(step)


@pytest.mark.parametrize("size", [10, 200_000])
def test_the_order_of_writes(worker: MakeWorker, tmp_path: Path, size: int) -> None:
    """
    Case F1, in the kernel's own words: a large output is fsynced, renamed and its folder fsynced before
    the commit; checkpoint.json is written, fsynced, renamed and its folder fsynced, after it.
    """
    tracing.require()
    w = worker(f"tasks:\n  - {{id: a, run: 'head -c {size} /dev/zero'}}\n")
    trace = tmp_path / "trace"
    calls = "trace=openat,fsync,fdatasync,rename,renameat,renameat2"
    w.start("strace", "-y", "-o", str(trace), "-e", calls)
    assert w.wait() == 0
    events = [_event(line, str(w.state)) for line in trace.read_text().splitlines()]
    seen = [event for event in events if event and " steps/" not in event]
    start = len(seen) - 1 - seen[::-1].index("rename checkpoint.json")
    checkpoint = ["fsync .checkpoint.json.new", "rename checkpoint.json", "fsync ."]
    assert seen[start - 1 : start + 2] == checkpoint
    first = seen.index("rename checkpoint.json")
    before = seen[:first]
    commit = len(before) - 1 - before[::-1].index("fsync ledger.db-wal")
    output = ["fsync out/.part-0", "rename out/a", "fsync out"]
    if size > 100_000:
        assert before[commit - 3 : commit] == output
    else:
        assert before[commit - 1] == "rename out/a", "a committed step has its file, synced or not"


def test_steps_that_finish_together_share_a_flush(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Eight at a time, two hundred steps: counted in the kernel, far fewer flushes of the ledger than steps.
    """
    tracing.require()
    w = worker("concurrency: 8\ntasks:\n  - {id: s, foreach: {range: 1-200}, run: 'true'}\n")
    trace = tmp_path / "trace"
    w.start("strace", "-y", "-o", str(trace), "-e", "trace=fsync,fdatasync")
    assert w.wait() == 0
    flushes = trace.read_text().count("ledger.db-wal>")
    assert len(w.done()) == 200
    assert flushes <= 150


def _event(line: str, root: str) -> str | None:
    """Return "fsync NAME" or "rename NEW-NAME" for a line of strace -y, names below the state folder."""
    if found := re.match(r"(?:fsync|fdatasync)\(\d+<([^>]*)>", line):
        path = found[1]
        return f"fsync {os.path.relpath(path, root)}" if path.startswith(root) else None
    if found := re.match(r'rename(?:at2?)?\(.*"([^"]*)"(?:, [A-Z_0-9]+)?\)', line):
        path = found[1]
        return f"rename {os.path.relpath(path, root)}" if path.startswith(root) else None
    return None


POINTS = ["ledger-written", "ledger-committed"]
POINTS += ["file-written", "file-synced", "file-renamed", "output-synced", "output-renamed"]


@pytest.mark.parametrize("point", POINTS)
def test_sigkill_at_every_point_of_a_commit(worker: MakeWorker, point: str, tmp_path: Path) -> None:
    """
    Whatever the worker was doing when it died, the next one finishes the list with every step done once.
    """
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from worker import points\n"
        "left = int(os.environ['KILL_AFTER'])\n"
        "def at(point):\n"
        "    global left\n"
        f"    if point == {point!r}:\n"
        "        left -= 1\n"
        "        if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "points.at = at\n"
    )
    w = worker("""
defaults: {retry: {attempts: 50, delay: 0}}
tasks:
  - {id: s, foreach: {range: 1-4}, run: 'echo "$AGENT_ITEM" >> ran; echo result'}
  - {id: big, run: head -c 100000 /dev/zero}
""")
    w.environ["PYTHONPATH"] += f":{hook}"
    kills = 0
    for after in range(1, 12):
        w.environ["KILL_AFTER"] = str(after)
        status = w.run()
        kills += status == -9
        assert status in (0, -9), w.lines[-5:]
    w.environ["KILL_AFTER"] = "-1"
    assert w.run() == 0
    assert kills >= 1, "the point was never reached"
    assert sorted(w.done()) == ["big", "s@1", "s@2", "s@3", "s@4"]
    assert all(w.output(f"s@{n}") == b"result\n" for n in range(1, 5))
    assert w.output("big") == bytes(100_000)
    assert json.loads((w.state / "checkpoint.json").read_bytes())["facts"]["state"] == "done"


def test_the_yaml_is_never_opened_for_writing(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case F9: nor anything else outside of the state folder.
    """
    tracing.require()
    w = worker("tasks:\n  - {id: a, run: echo hi}\n")
    trace = tmp_path / "trace"
    w.start("strace", "-o", str(trace), "-e", "trace=open,openat,creat,rename,unlink,mkdir,truncate")
    assert w.wait() == 0
    written = re.findall(r'openat\([^"]*"([^"]+)", [^)]*(?:O_WRONLY|O_RDWR)', trace.read_text())
    assert written
    assert not [path for path in written if not path.startswith((str(w.state), "/dev/", "/proc/self/fd/"))]
