"""Copies: made beside the steps, whole, never older than the one before; what fails is told and tried again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.plans import ENDED
from tests.support import ROOT, Worker, ends, hear
from worker import checkpoint, config, copies
from worker.errors import ConfigError
from worker.ledger import Claim, Holdings
from worker.ledger.sqlite import SqliteLedger


def status(w: Worker) -> dict[str, object]:
    command = [sys.executable, "-m", "worker", "status", "--json", "--state", str(w.state)]
    done = subprocess.run(command, env=w.environ, capture_output=True, check=True)
    return dict(json.loads(done.stdout)["copy"])


def verify(w: Worker, *paths: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "worker", "verify-copy", *map(str, paths), "--state", str(w.state)]
    done = subprocess.run(command, env=w.environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


TASKS = "run: demo\ncopy: {every: 1s, command: %s}\ntasks:\n  - {id: s, foreach: {range: 1-3}, run: '%s'}\n"


@pytest.mark.parametrize(
    "command",
    [
        "[cp, -r, '{checkpoint}', '{ledger}', '{out}', taken/]",
        '\'cp -r "$AGENT_CHECKPOINT" "$AGENT_LEDGER" "$AGENT_OUT" taken/; echo "$AGENT_RUN" >taken/run\'',
    ],
    ids=["list", "text"],
)
def test_the_last_copy_has_the_whole_run(worker: MakeWorker, command: str) -> None:
    """
    The command runs beside the list, finds a checkpoint and a ledger of one moment, and is run once more at the end;
    either of the two is enough to go on from.
    """
    w = worker(TASKS % (command, "until test -e ../../taken/ledger.db; do sleep 0.05; done; echo $AGENT_ITEM"))
    taken = w.config.parent / "taken"
    taken.mkdir()
    assert w.run() == 0
    rc, said = verify(w, taken)
    assert (rc, "both are of one moment" in said) == (0, True)
    head = checkpoint.header(str(taken / "checkpoint.json"))
    assert (head.run, head.facts["state"]) == ("demo", "done")
    assert (taken / "out" / "s@1").read_text() == "1\n"
    found = status(w)
    assert (found["revision"], found["failures"], found["error"]) == (head.revision, 0, None)
    assert copies.read(str(w.state), "demo") is not None
    assert copies.read(str(w.state), "another") is None
    assert w.matching("the copy|the last copy") == []


def test_a_slow_copy_delays_no_step(worker: MakeWorker) -> None:
    """
    The first copy ends only when the last step has; if a step waited for it, neither would ever end.
    """
    command = "'test -e took || until test -e state/out/s@3; do sleep 0.05; done; touch took'"
    w = worker(TASKS % (command, "true"))
    assert w.run() == 0
    assert (w.config.parent / "took").exists()


def test_a_copy_that_fails_is_told_once_and_tried_again(worker: MakeWorker) -> None:
    """
    The run goes on, `status` counts; when it works again that is told, too.  The next worker knows what the last did.
    """
    w = worker(
        TASKS
        % (
            "'echo no route >&2; n=$(cat n); echo $((n+1)) >n; test $n -ge 3'",
            "test $AGENT_ITEM != 3 || until test $(cat ../../n) -ge 4; do sleep 0.05; done",
        )
    )
    (w.config.parent / "n").write_text("1")
    w.start()
    w.until("the copy failed: exited with status 1: no route; trying again in 1s, the run goes on")
    w.until("copied again, after 2 that failed")
    assert w.wait() == 0
    assert len(w.matching("the copy failed")) == 1

    w.config.write_text(TASKS.replace("range: 1-3", "range: 1-4") % ("/nowhere/copy", "true"))
    assert w.run() == 0
    found = status(w)
    assert found["failures"] and "/nowhere/copy: cannot be run" not in str(found["error"])
    assert "not found" in str(found["error"])
    assert len(w.matching("the copy failed")) == 2


def test_a_copy_that_never_ends_is_ended(worker: MakeWorker) -> None:
    """
    At its own time limit; the run's end does not wait longer than that.  It has begun before the run ends.
    """
    begun = "until test -e ../../begun; do sleep 0.05; done"
    w = worker(TASKS.replace("every: 1s", "every: 1s, timeout: 3s") % ("'touch begun; sleep 600'", begun))
    assert w.run() == 0
    assert w.matching("the copy failed: took longer than 3s")
    assert w.matching("waiting for the last copy, at most")


def test_a_stop_does_not_wait_for_a_copy(worker: MakeWorker) -> None:
    """
    It is ended with the worker, and so is what it has started.
    """
    w = worker(TASKS % ("'echo $$ >pid; sleep 600'", "sleep 600"))
    os.mkfifo(w.config.parent / "pid")
    w.start()
    pid = int(hear(w.config.parent / "pid", w.process))
    assert w.kill(signal.SIGTERM) == 75
    assert w.matching("the last copy was not finished")
    assert ends(pid)


def test_f12_a_slow_copy_of_a_dead_worker_comes_to_nothing(worker: MakeWorker) -> None:
    """
    Case F12: it held an older state in its hand; the next worker ends it before it makes a newer one.
    """
    command = (
        "'cp $AGENT_CHECKPOINT mine.$$; test -e first || { touch first; echo >at; read x <go; }; mv mine.$$ theirs'"
    )
    w = worker(TASKS % (command, "test $AGENT_ITEM != 2 || test -e ../../first || sleep 600"))
    for name in ("at", "go"):
        os.mkfifo(w.config.parent / name)
    w.start()
    hear(w.config.parent / "at", w.process)
    w.kill()
    assert w.run() == 0
    with pytest.raises(OSError, match="No such device"):
        os.open(w.config.parent / "go", os.O_WRONLY | os.O_NONBLOCK)  # nobody waits there any more
    assert checkpoint.header(str(w.config.parent / "theirs")).facts["state"] == "done"


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A ledger with one attempt that is open."""
    path = str(tmp_path / "ledger.db")
    with contextlib.closing(SqliteLedger.create(path, Holdings(facts={"run": "demo"}))) as store:
        store.record([], [Claim("a", 1, "abc", 1000.0, "boot")])
    return path


def make(folder: Path, source: str, *command: str) -> subprocess.Popen[str]:
    code = "import sys; from worker import snapshot; snapshot.main(sys.argv[1:])"
    argv = [sys.executable, "-c", code, str(folder), "demo", source, *(command or ["true"])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def test_f12_an_older_state_never_takes_the_place_of_a_newer_one(tmp_path: Path, source: str) -> None:
    """
    Case F12: not a state that was put back, nor another copy while one is under way, whoever made that.
    """
    place = tmp_path / "copy"
    old = Path(source).read_bytes()
    with contextlib.closing(SqliteLedger.open(source)) as store:
        store.record([ENDED], [])
    assert make(place, source).communicate()[1] == ""
    Path(source).write_bytes(old)
    assert "is newer than the run (revision 2 and 1)" in make(place, source).communicate()[1]
    assert checkpoint.header(f"{place}/checkpoint.json").revision == 2

    with contextlib.closing(SqliteLedger.open(source)) as store:
        store.record([ENDED], [])
    slow = make(place, source, "sh", "-c", "echo up; read x")
    assert slow.stdout is not None and slow.stdout.readline() == "up\n"
    assert "another copy is still under way" in make(place, source).communicate()[1]
    slow.communicate("go\n")
    assert make(place, source).communicate()[1] == ""


def test_s3_a_copy_is_looked_through_before_it_has_its_name(tmp_path: Path, source: str) -> None:
    """
    Case S3: the copy of a ledger with a torn page or an index that lies is not handed over; the one before stays.
    """
    place = tmp_path / "copy"
    assert make(place, source).communicate()[1] == ""
    before = (place / "ledger.db").read_bytes()
    with contextlib.closing(SqliteLedger.open(source)) as store:
        store._db.execute("PRAGMA writable_schema = ON")
        store._db.execute("UPDATE sqlite_schema SET sql = replace(sql, '''done''', '''failed''') WHERE name = 'done'")
        store.record([ENDED], [])
    program = make(place, source, "touch", str(tmp_path / "handed-over"))
    assert "no snapshot was made" in program.communicate()[1]
    assert program.returncode == 1
    assert (place / "ledger.db").read_bytes() == before
    assert not (tmp_path / "handed-over").exists()


@pytest.mark.parametrize("point", ["output-synced", "output-renamed", "file-written", "file-synced", "file-renamed"])
def test_sigkill_leaves_whole_copies(tmp_path: Path, source: str, point: str) -> None:
    """
    Case S3: wherever the snapshot dies, both files are whole, and the next one is not hindered.
    """
    place = tmp_path / "copy"
    snapshot_of = [str(place), "demo", source]
    assert make(place, source).communicate()[1] == ""
    with contextlib.closing(SqliteLedger.open(source)) as store:
        store.record([ENDED], [])
    code = (
        "import os, signal, sys; from worker import points, snapshot\n"
        f"points.at = lambda p: os.kill(os.getpid(), signal.SIGKILL) if p == {point!r} else None\n"
        "snapshot.make(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *snapshot_of]
    died = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert died.returncode == -signal.SIGKILL, "the point was never reached"
    with contextlib.closing(SqliteLedger.open(f"{place}/ledger.db", read_only=True)) as store:
        store.verify()
        assert store.revision() in (1, 2)
    assert checkpoint.load(f"{place}/checkpoint.json").header.revision in (1, 2)
    assert make(place, source).communicate()[1] == ""
    assert checkpoint.header(f"{place}/checkpoint.json").revision == 2


def test_with_the_ledger_on_a_server_the_checkpoint_is_copied(tmp_path: Path, source: str) -> None:
    """
    A ledger in the copy from before that is gone: it would be an older state beside a newer one.
    """
    place = tmp_path / "copy"
    assert make(place, source).communicate()[1] == ""
    own = str(tmp_path / "checkpoint.json")
    with contextlib.closing(SqliteLedger.open(source)) as store:
        store.record([ENDED], [])
        checkpoint.write(own, "demo", store)
    assert make(place, own).communicate()[1] == ""
    assert (place / "checkpoint.json").read_bytes() == Path(own).read_bytes()
    assert not (place / "ledger.db").exists()


def test_verify_copy_tells_good_copies_from_bad_ones(worker: MakeWorker) -> None:
    """
    Exit 0 only for what could be restored; says how far each is behind the run that goes on here.
    """
    w = worker(TASKS % ("'mkdir -p taken; cp $AGENT_CHECKPOINT $AGENT_LEDGER taken'", "true"))
    assert w.run() == 0
    taken = w.config.parent / "taken"
    w.config.write_text(TASKS.replace("range: 1-3", "range: 1-5").replace("copy", "#") % ("", "true"))
    assert w.run() == 0
    rc, said = verify(w, taken / "ledger.db", taken / "checkpoint.json")
    assert rc == 0
    expected = r"sound; run demo, 3 steps done, revision 6, .* old; 2 steps that are done here are not in it"
    assert len(re.findall(expected, said)) == 2
    for name, damage in (("ledger.db", 9000), ("checkpoint.json", 300)):
        file = taken / name
        whole = file.read_bytes()
        file.write_bytes(whole[:damage])
        rc, said = verify(w, file)
        assert (rc, said.startswith(f"{file}: ")) == (73, True)
        assert verify(w, taken)[0] == 73
        file.write_bytes(whole)
    rc, said = verify(w, taken / "nothing.db")
    assert rc == 73 and said.startswith(f"{taken}/nothing.db: cannot be read: No such file or directory; see what is ")
    assert verify(w, taken)[0] == 0


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("copy: {every: 10ms, evry: 1}", ["1:15: every: 10ms is too often", "1:21: unknown key 'evry'"]),
        ("copy: rsync", ["1:7: copy: "]),
        ("copy: {command: []}", ["1:17: command: the list is empty"]),
        ("copy: {every: 1h}", ["1:7: 'command' is missing"]),
        (
            "copy: {command: [cp, '{ledger}', x]}\nledger: postgresql://a@b/c",
            ["1:7: copy: '{ledger}' stands for nothing"],
        ),
    ],
)
def test_mistakes_have_their_places(tmp_path: Path, text: str, problems: list[str]) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(f"{text}\ntasks:\n  - {{id: a, run: 'true'}}\n")
    with pytest.raises(ConfigError) as caught:
        config.load(str(file))
    for problem in problems:
        assert f"{file}:{problem}" in str(caught.value)


def test_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    for every, timeout in (("1min", 600.0), ("1h", 3600.0)):
        file.write_text(f"copy: {{every: {every}, command: x}}\ntasks:\n  - {{id: a, run: 'true'}}\n")
        found = config.load(str(file)).copy
        assert found is not None and found.timeout == timeout
    assert copies.read(str(tmp_path), "list") is None
