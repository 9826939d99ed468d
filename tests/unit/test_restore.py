"""Exporting a run and restoring it elsewhere: nothing is lost, nothing newer overwritten, nothing stale comes back."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.plans import sealed
from tests.support import ROOT, Worker
from worker import checkpoint, cli, ledger, mounts, restore, swap
from worker.errors import StateError
from worker.ledger import Claim, Holdings
from worker.ledger.sqlite import SqliteLedger

RUN = "run: demo\ntasks:\n  - {id: s, foreach: {range: 1-4}, run: 'echo $AGENT_ITEM; cat ../go'}\n"


@pytest.fixture
def stopped(worker: MakeWorker) -> Worker:
    """A run of which two of four steps are done; the third is being tried, and its worker was killed."""
    w = worker(RUN.replace("cat ../go", "test $AGENT_ITEM != 3 || sleep 600"), "old")
    w.start()
    w.until("^s@3: 3$")
    w.kill()
    assert w.done() == ["s@1", "s@2"]
    return w


def agentctl(*arguments: str | Path, data: bytes | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "worker", *map(str, arguments)]
    done = subprocess.run(command, env=environ, input=data, capture_output=True, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def export(w: Worker, name: str) -> Path:
    file = w.state.parent / name
    done = agentctl("export", file, "--state", w.state)
    assert (done.returncode, done.stderr) == (0, "")
    known = checkpoint.header(str(file)).revision if name.endswith(".json") else _revision(file)
    assert done.stdout.endswith(f": revision {known} is in {file}\n")
    return file


def _revision(file: Path) -> int:
    with contextlib.closing(SqliteLedger.open(str(file), read_only=True)) as store:
        return store.revision()


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below `root` with its bytes, but for what a reader of the ledger may leave."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in ("ledger.db-shm", "lock"))
    files = (path for path in files if path.name != "ledger.db-wal" or path.stat().st_size)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["checkpoint.json", "ledger.db"])
def test_a_run_goes_on_elsewhere_with_the_step_that_was_cut_off(stopped: Worker, worker: MakeWorker, name: str) -> None:
    """
    Done steps stay done, with their results; the one in progress is begun again, which is not counted although this
    is the same boot; the others follow.
    """
    new = worker(RUN.replace("cat ../go", "true"), "new")
    done = agentctl("restore", export(stopped, name), "--state", new.state)
    assert done.returncode == 0, done.stderr
    assert "2 steps done" in done.stdout and f"agentctl run LIST --state {new.state}" in done.stdout
    assert new.run() == 0
    assert [(row.step, row.number, row.outcome) for row in new.rows()] == [
        ("s@1", 1, "done"),
        ("s@2", 1, "done"),
        ("s@3", 1, "interrupted"),
        ("s@3", 2, "done"),
        ("s@4", 1, "done"),
    ]
    (cut_off,) = (row for row in new.rows() if row.outcome == ledger.INTERRUPTED)
    assert (cut_off.counted, cut_off.cause) == (False, "it was at work when the copy was made")
    assert [new.output(f"s@{n}") for n in range(1, 5)] == [b"1\n", b"2\n", b"3\n", b"4\n"]
    assert sorted(os.listdir(new.state)) == sorted(os.listdir(stopped.state)), "nothing of the restore is left"


@pytest.mark.parametrize("name", ["checkpoint.json", "ledger.db"])
def test_putting_the_file_there_by_hand_is_enough(stopped: Worker, worker: MakeWorker, name: str) -> None:
    """
    A fresh machine with nothing but the program, the list and that one file; also a ledger beside the -wal of
    another one, which SQLite would play into it.
    """
    new = worker(RUN.replace("cat ../go", "true"), "new")
    new.state.mkdir()
    shutil.copy(export(stopped, name), new.state / name)
    if name == "ledger.db":
        other = worker("run: other\ntasks:\n  - {id: a, run: 'echo up; sleep 600'}\n", "other")
        other.start()
        other.until("a: up")
        other.kill()
        log = (other.state / "ledger.db-wal").read_bytes()
        assert log, "the kill left nothing to play in"
        (new.state / "ledger.db-wal").write_bytes(log)
        assert "2/4 done" in agentctl("status", "--state", new.state).stdout
    assert new.run() == 0
    assert len(new.matching(r"s@[12]: started")) == 0
    assert new.done() == ["s@1", "s@2", "s@3", "s@4"]
    assert [row.counted for row in new.rows() if row.outcome == ledger.INTERRUPTED] == [False]


def test_standard_output_of_one_is_standard_input_of_the_other(stopped: Worker, tmp_path: Path) -> None:
    """
    A checkpoint through a pipe, without a file between.  Until a worker has read the list there, nothing is made up.
    """
    exported = agentctl("export", "--state", stopped.state)
    assert json.loads(exported.stdout)["run"] == "demo"
    done = agentctl("restore", "-", "--state", tmp_path / "new", data=exported.stdout.encode())
    assert "2 steps done" in done.stdout
    shown = agentctl("status", "--state", tmp_path / "new").stdout.splitlines()
    assert shown[:2] == ["run demo: stopped, 2 done", "worker: not running"]
    listed = agentctl("list", "--state", tmp_path / "new")
    assert "no worker has read it since the restore" in listed.stderr
    assert len(listed.stdout.splitlines()) == 3


def test_whoever_reads_an_export_slowly_holds_up_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With a rollback journal nobody can write while somebody reads; what has been read is passed on after that.
    """
    monkeypatch.setattr(mounts, "kind", lambda _path: "nfs4")
    with contextlib.closing(SqliteLedger.create(str(tmp_path / "ledger.db"), Holdings(facts={"run": "demo"}))) as store:
        store.record([], [Claim(f"s@{n}", 1, "abc", 1000.0, "boot") for n in range(3000)])  # more than a pipe holds
        command = [sys.executable, "-m", "worker", "export", "--state", str(tmp_path)]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as reading:
            assert reading.stdout is not None and reading.stdout.read(1) == b"{"
            store.note({"state": "running"})
            assert len(checkpoint.parse(b"{" + reading.stdout.read()).attempts) == 3000


@pytest.mark.parametrize("name", ["x.json", "x.db"])
def test_an_export_replaces_nothing_but_a_file(stopped: Worker, tmp_path: Path, name: str) -> None:
    """
    /dev/null, say, which would be a plain file from then on.
    """
    special = tmp_path / name
    os.mkfifo(special)
    done = agentctl("export", special, "--state", stopped.state)
    assert (done.returncode, f"{special}: is no plain file" in done.stderr) == (1, True)
    assert special.is_fifo()


def test_an_export_of_a_living_run_is_of_one_moment(worker: MakeWorker) -> None:
    """
    A worker is at work all the time: each export is whole, of its own revision, and never older than the one before.
    """
    w = worker("run: demo\ntasks:\n  - {id: s, foreach: {range: 1-100000}, run: 'true'}\n")
    w.start()
    w.until("s@9: done")
    revisions = []
    for n in range(6):
        file = export(w, f"{n}.db" if n % 2 else f"{n}.json")
        if n % 2:
            with contextlib.closing(SqliteLedger.open(str(file), read_only=True)) as store:
                rows, revision = list(store.rows()), store.revision()
        else:
            head, attempts, *_ = checkpoint.load(str(file))
            rows, revision = [row for row, _ in attempts], head.revision
        assert revision == len(rows) + sum(row.outcome is not None for row in rows)
        revisions.append(revision)
    assert revisions == sorted(revisions)


def test_a_worker_at_work_is_not_disturbed(worker: MakeWorker) -> None:
    """
    Restoring is refused with its pid and 77, also with --force; so is restoring from the ledger that it writes.
    """
    w = worker("run: demo\ntasks:\n  - {id: a, run: sleep 600}\n")
    w.start()
    w.until("a: started")
    file = export(w, "copy.json")
    done = agentctl("restore", file, "--force", "--state", w.state)
    assert (done.returncode, f"process {w.pid}" in done.stderr) == (77, True)
    done = agentctl("restore", w.state / "ledger.db", "--state", w.state.parent / "new")
    assert (done.returncode, "agentctl export" in done.stderr) == (77, True)
    assert agentctl("export", w.state / "ledger.db", "--state", w.state).returncode != 0
    w.kill()


def test_what_is_newer_here_is_not_overwritten_unless_forced(stopped: Worker, tmp_path: Path) -> None:
    """
    A step that is done here and not in the file is named, and nothing is changed; with --force the state that was
    here is kept whole, and is not merged back by the next start.
    """
    old = export(stopped, "old.json")
    stopped.config.write_text(RUN.replace("cat ../go", "true"))
    assert stopped.run() == 0
    before = tree(stopped.state)

    done = agentctl("restore", old, "--state", stopped.state)
    assert (done.returncode, tree(stopped.state)) == (73, before)
    assert "2 steps that are done here are not in that file (s@3, s@4)" in done.stderr and "--force" in done.stderr

    done = agentctl("restore", old, "--force", "--state", stopped.state)
    assert done.returncode == 0, done.stderr
    kept = Path(done.stdout.splitlines()[1].removeprefix("what was here is in "))
    assert kept.parent == stopped.state
    assert tree(kept) == {name: data for name, data in before.items() if not name.startswith(("work/", "run/"))}
    stopped.lines.clear()
    assert stopped.run() == 0
    assert stopped.matching("started") == ["s@3: started, attempt 2", "s@4: started"]


def test_an_older_copy_gives_no_budget_back(stopped: Worker) -> None:
    """
    What was used, and granted, since it was made stays so; what the copy knows more of is taken from there.
    """
    file = export(stopped, "checkpoint.json")
    with contextlib.closing(SqliteLedger.open(f"{stopped.state}/ledger.db")) as store:
        store.add({"used_restarts": 3, "used_hours": 1.5, "granted_spend": 5})
    assert agentctl("restore", file, "--state", stopped.state).returncode == 0
    with contextlib.closing(SqliteLedger.open(f"{stopped.state}/ledger.db", read_only=True)) as store:
        assert [float(store.fact(name) or 0) for name in ("used_restarts", "granted_spend")] == [3, 5]
        assert float(store.fact("used_hours") or 0) > 1.5


def test_newer_failures_count_as_newer_too(worker: MakeWorker) -> None:
    """
    Otherwise a restore would give a step new attempts.  The file of now is taken without a word.
    """
    w = worker("run: demo\ntasks:\n  - {id: a, run: 'exit $(cat ../../status)', retry: {attempts: 1}}\n")
    (w.state.parent / "status").write_text("1\n")
    assert w.run() == 70
    old = export(w, "old.json")
    assert w.run() == 70
    new = export(w, "new.json")
    done = agentctl("restore", old, "--state", w.state)
    assert (done.returncode, "newer, 1 attempt is not in that file" in done.stderr) == (73, True)
    assert agentctl("restore", new, "--state", w.state).returncode == 0
    assert len(w.rows()) == 2


@pytest.mark.parametrize("shelved", [False, True], ids=["in its place", "on the shelf"])
def test_state_of_another_run_and_state_on_the_shelf_are_seen(
    stopped: Worker, worker: MakeWorker, tmp_path: Path, shelved: bool
) -> None:
    """
    Another run with work in it is not set aside unasked; nor is the same run's own that waits in runs/.
    """
    old = export(stopped, "old.json")
    stopped.config.write_text(RUN.replace("cat ../go", "true"))
    assert stopped.run() == 0
    stopped.config.write_text("run: other\ntasks:\n  - {id: a, run: 'true'}\n")
    assert stopped.run() == 0
    if shelved:  # the other one has nothing of its own
        for name in ("ledger.db", "checkpoint.json"):
            (stopped.state / name).unlink()
    done = agentctl("restore", old, "--state", stopped.state)
    assert done.returncode == 73
    assert ("not in that file (s@3, s@4)" if shelved else "the run 'other' is here, 1 step done") in done.stderr
    assert agentctl("restore", old, "--force", "--state", stopped.state).returncode == 0
    stopped.lines.clear()
    stopped.config.write_text(RUN.replace("cat ../go", "true"))
    assert stopped.run() == 0
    assert stopped.matching("started") == ["s@3: started, attempt 2", "s@4: started"]


@pytest.mark.parametrize("name", ["checkpoint.json", "ledger.db"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) * 2 // 3], lambda data: data[:4000] + os.urandom(len(data))],
    ids=["empty", "truncated", "random"],
)
def test_a_damaged_file_changes_nothing(stopped: Worker, name: str, damage: Callable[[bytes], bytes]) -> None:
    """
    One line that names the file, and every byte of the state as it was, even with --force.
    """
    file = export(stopped, name)
    file.write_bytes(damage(file.read_bytes()))
    before = tree(stopped.state)
    done = agentctl("restore", file, "--force", "--state", stopped.state)
    assert (done.returncode, done.stdout) == (73, "")
    assert done.stderr.startswith(f"{file}: ") and done.stderr.count("\n") == 1
    assert tree(stopped.state) == before


def test_a_log_of_any_size_is_not_copied(stopped: Worker, tmp_path: Path) -> None:
    """
    A step can leave one of four gigabytes that takes no room, and the copy would fill the disk.
    """
    source = tmp_path / "copy.db"
    source.write_bytes((stopped.state / "ledger.db").read_bytes())
    log = tmp_path / "copy.db-wal"
    log.write_bytes(b"x")
    os.truncate(log, 4 << 30)
    head = bytearray(source.read_bytes())
    head[18:20] = b"\2\2"
    source.write_bytes(head)
    with pytest.raises(StateError, match="-wal: is larger than any log"):
        restore.restore(str(source), str(tmp_path / "new"), None, force=False)


def test_a_ledger_whose_index_lies_is_refused(stopped: Worker) -> None:
    """
    Case S3: a quick look would not have seen it.
    """
    file = export(stopped, "ledger.db")
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, \"'done'\", \"'failed'\") WHERE name = 'done'")
    db.close()
    done = agentctl("restore", file, "--state", stopped.state.parent / "new")
    assert (done.returncode, str(file) in done.stderr) == (73, True)
    assert not (stopped.state.parent / "new" / "ledger.db").exists()


def test_a_name_that_leads_elsewhere_is_not_a_run(stopped: Worker) -> None:
    """
    The run's name becomes part of paths: what comes from elsewhere is looked at first.
    """
    file = export(stopped, "checkpoint.json")
    file.write_text(sealed(file.read_text().replace('"run": "demo"', '"run": "../../demo"')))
    done = agentctl("restore", file, "--state", stopped.state.parent / "new")
    assert (done.returncode, "does not say of which run" in done.stderr) == (73, True)


def test_the_list_of_another_run_is_named(
    stopped: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Started with it, the run would be put on the shelf and another one begun.  Forced, it is restored all the same.
    """
    file = export(stopped, "old.json")
    monkeypatch.setattr(cli, "CONFIG_FOLDER", str(tmp_path))
    monkeypatch.setattr(cli, "STATE_FOLDER", str(tmp_path))
    (tmp_path / "agent@new").mkdir()
    (tmp_path / "new.yaml").write_text("run: release-7\ntasks:\n  - {id: a, run: 'true'}\n")
    assert cli.main(["restore", str(file), "--instance", "new"]) != 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/new.yaml: is the list of the run 'release-7', this is the run 'demo'" in said
    assert "write 'run: demo' into it" in said


def test_large_results_that_lie_here_are_kept(worker: MakeWorker) -> None:
    """
    A checkpoint has small results only; those of the very same attempts are still in the folder.
    """
    w = worker("run: demo\ntasks:\n  - {id: a, run: head -c 300000 /dev/zero}\n")
    assert w.run() == 0
    assert agentctl("restore", export(w, "now.json"), "--state", w.state).returncode == 0
    assert w.output("a") == bytes(300_000)
    assert w.run() == 0
    assert w.matching("the result is not here") == []


def test_processes_that_a_dead_worker_left_do_not_meet_the_restored_run(stopped: Worker) -> None:
    """
    Case S11: the step that still runs is ended before its next attempt can begin.
    """
    done = agentctl("restore", export(stopped, "now.json"), "--state", stopped.state)
    assert done.returncode == 0, done.stderr
    assert "sleep" in done.stdout and "which the last worker had left" in done.stdout


def test_the_log_of_the_ledger_before_is_not_played_into_the_new_one(stopped: Worker, worker: MakeWorker) -> None:
    """
    A worker that was killed leaves a -wal; it goes where its ledger goes.
    """
    other = worker("run: other\ntasks:\n  - {id: a, run: 'true'}\n", "other")
    assert other.run() == 0
    log = (stopped.state / "ledger.db-wal").read_bytes()
    assert log, "the kill left nothing to play in"
    done = agentctl("restore", export(other, "other.json"), "--force", "--state", stopped.state)
    assert done.returncode == 0, done.stderr
    assert "run other: " in agentctl("status", "--state", stopped.state).stdout
    assert [path.read_bytes() for path in stopped.state.glob("before-restore-*/ledger.db-wal")] == [log]


def test_the_revision_grows_on(stopped: Worker, tmp_path: Path) -> None:
    """
    Case F12: what is written after a restore is newer than every copy from before, also with effects that were
    claimed and committed and are one row now.
    """
    with contextlib.closing(SqliteLedger.open(str(stopped.state / "ledger.db"))) as store:
        for n in range(5):
            answer = store.effects.claim(f"e{n}", "", "s@1", 1.0, False)
            assert answer.effect is not None
            store.effects.commit(f"e{n}", answer.effect.token, b"", 0)
        revision = store.revision()
        store._db.execute("UPDATE attempts SET seq = seq * 10")  # as on a server, where others count along
        seqs = [row.seq for row in store.rows()]
    agentctl("restore", export(stopped, "now.json"), "--state", tmp_path / "new")
    with contextlib.closing(SqliteLedger.open(str(tmp_path / "new" / "ledger.db"), read_only=True)) as store:
        assert store.revision() >= revision
        assert [row.seq for row in store.rows()] == seqs, "'counted_from' would mean another one"
        assert {effect.key for effect in store.effects.all()} == {f"e{n}" for n in range(5)}


def test_a_name_card_of_a_shared_run_stays_behind(stopped: Worker, tmp_path: Path) -> None:
    """
    Where the ledger is on a server, that knows better; forced, this folder is no member of it any more.
    """
    file = export(stopped, "now.json")
    new = tmp_path / "new"
    new.mkdir()
    (new / "worker.json").write_text("{}")
    assert agentctl("restore", file, "--state", new).returncode == 73
    assert agentctl("restore", file, "--force", "--state", new).returncode == 0
    assert not (new / "worker.json").exists()
    assert [path.name for path in new.glob("before-restore-*/*")] == ["worker.json"]


def test_a_restore_that_was_cut_off_is_told(stopped: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    `agentctl status` does not say that no run was here; the next start goes on with it.
    """
    new = tmp_path / "new"
    agentctl("restore", export(stopped, "now.json"), "--state", new)
    root = str(new)
    staged = swap.prepare(root)
    for name in ("ledger.db", "checkpoint.json"):
        os.rename(f"{root}/{name}", f"{staged.root}/{name}")
    swap.decide(root, "demo")
    assert "a restore was cut off in the middle" in agentctl("status", "--state", new).stderr
    swap.finish(root)
    assert "stopped, 2 done" in agentctl("status", "--state", new).stdout
