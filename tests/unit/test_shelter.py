"""What lets a step outlive the worker, as far as it needs no systemd; the rest is in tests/system/test_restore.py."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker import shelter
from worker.cgroup import Group, Memory, Tree
from worker.family import Cohort
from worker.folder import Places
from worker.output import Spool
from worker.process import SpawnError
from worker.shelter import Report, Shelter
from worker.signs import NotifySocket
from worker.slots import Slots
from worker.systemd import Notifier

ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "slot-0").mkdir()  # stands for a cgroup
    return Places("test", str(tmp_path), str(tmp_path))


def make(places: Places) -> Shelter:
    reads = []
    for _ in range(2):
        read, write = os.pipe()
        os.set_blocking(read, False)
        reads.append((read, write))
    (out, out_write), (err, err_write) = reads
    made = Shelter(Group(f"{places.runtime}/slot-0"), Notifier({}, print), places, 0, out, err)
    os.close(out_write)
    os.close(err_write)
    return made


@pytest.fixture
def home(places: Places) -> Iterator[Shelter]:
    made = make(places)
    yield made
    made.close()


def run(home: Shelter, *argv: str) -> tuple[Report | None, int]:
    """Run a program; return what it has left behind, and what its parent saw of it."""
    home.announce(dict)
    pid = home.spawn(argv, ENV, "/")
    _pid, status = os.waitpid(pid, 0)
    report = home.report()
    assert report is None or report.pid == pid
    return report, os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(
    "script, status",
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ("exit 137", 137),
        ("exit 143", 143),
        *((f"kill -{name} $$", -getattr(signal, f"SIG{name}")) for name in ("KILL", "TERM", "SEGV")),
        ("exit 130", 130),
        ("exit 141", 141),
    ],
)
def test_the_exit_status_is_the_programs_own(home: Shelter, script: str, status: int) -> None:
    """
    A shell says 137 of a program that SIGKILL has ended, and of one that exits with 137.
    """
    report, _ = run(home, "/bin/sh", "-c", script)
    assert report is not None and report.status == status


def test_its_streams_and_arguments_are_its_own(home: Shelter, tmp_path: Path) -> None:
    """
    Nothing is spliced into a shell's text, and what the shell says is not among what the program prints.
    """
    run(home, "/bin/sh", "-c", 'printf "%s|" "$@"; echo err >&2; kill -9 $$', "x", "a b", "$(id)", "")
    out, err = Spool(str(tmp_path / "o")), Spool(str(tmp_path / "e"))
    assert out.take(home.pipes.stdout) == b"a b|$(id)||"
    assert err.take(home.pipes.stderr) == b"err\n"
    assert out.take(home.pipes.stdout) == b""


def test_what_one_program_makes_of_its_pipes_is_nothing_to_the_next(home: Shelter) -> None:
    """
    A program that sets O_NONBLOCK, as asyncio does, leaves it on for all who share the open file.
    """
    script = "import fcntl, os; flags = fcntl.fcntl(1, fcntl.F_GETFL); fcntl.fcntl(1, fcntl.F_SETFL, flags | {})"
    report, _ = run(home, sys.executable, "-c", script.format(os.O_NONBLOCK))
    assert report is not None and report.status == 0
    check = f"import fcntl, sys; sys.exit(bool(fcntl.fcntl(1, fcntl.F_GETFL) & {os.O_NONBLOCK}))"
    report, _ = run(home, sys.executable, "-c", check)
    assert report is not None and report.status == 0


def test_a_process_that_got_away_writes_to_nobody(home: Shelter, tmp_path: Path) -> None:
    """
    It keeps the pipe of the step that it came from; the next step in the slot has another.
    """
    kept = os.open(f"/proc/self/fd/{home.pipes.stdout}", os.O_WRONLY)
    run(home, "/bin/echo", "mine")
    spool = Spool(str(tmp_path / "o"))
    assert spool.take(home.pipes.stdout) == b"mine\n"
    home.forget()
    with pytest.raises(BrokenPipeError):
        os.write(kept, b"late\n")
    os.close(kept)
    run(home, "/bin/echo", "next")
    spool.restart()
    assert spool.take(home.pipes.stdout) == b"next\n"


def test_a_leader_waits_for_its_program_through_signals(home: Shelter) -> None:
    """
    The whole step is asked to end; what the program makes of that is what counts.
    """
    home.announce(dict)
    pid = home.spawn(["/bin/sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.01; done"], ENV, "/")
    os.set_blocking(home.pipes.stdout, True)
    assert os.read(home.pipes.stdout, 10) == b"up\n"
    os.set_blocking(home.pipes.stdout, False)
    os.killpg(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    assert home.report() == Report(pid, 9)


def test_a_leader_that_is_killed_leaves_no_exit_status(home: Shelter) -> None:
    """
    Then its parent's word counts, or nobody's.
    """
    report, seen = run(home, "/bin/sh", "-c", "kill -9 $PPID; sleep 0.1")
    assert report is not None and report.status is None
    assert seen == -signal.SIGKILL


def test_a_program_that_cannot_be_started_is_named(home: Shelter, tmp_path: Path) -> None:
    """
    As in the foreground, before anything runs.
    """
    (tmp_path / "plain").write_text("x")
    for name, why in (
        (str(tmp_path / "plain"), "Permission denied"),
        ("/no/such", "No such file"),
        ("x-y", "not found"),
    ):
        with pytest.raises(SpawnError, match=why):
            home.spawn([name], ENV, "/")
    assert home.report() is None


def test_a_report_is_of_one_program_only(home: Shelter) -> None:
    """
    A worker that dies between two programs does not take the end of the first for that of the second.
    """
    run(home, "/bin/true")
    home.announce(lambda: {"step": "a"})
    assert home.report() is None


def test_the_memo_is_what_was_saved_last(places: Places, home: Shelter) -> None:
    """
    Longer or shorter than the one before, and than a page; none after the attempt.
    """
    for text in ("x" * 100, "y", "z" * 5000, "", "w" * 200):
        home.save({"step": "a", "text": text})
        ((slot, memo),) = shelter.memos(places)
        assert memo is not None
        assert (slot, memo["step"], memo["text"]) == (0, "a", text)
    home.forget()
    assert list(shelter.memos(places)) == []


def test_a_memo_of_another_version_is_nobodys(places: Places, home: Shelter) -> None:
    """
    Its step is ended and done again, rather than misunderstood.
    """
    home.save({"step": "a"})
    path = Path(places.memo(0))
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert list(shelter.memos(places)) == [(0, None)]


def test_memory_is_told_of_the_step_or_else_of_the_unit(tmp_path: Path) -> None:
    """
    Case R10: memory.events counts what the kernel has killed, memory.peak is the most that was in use.
    """
    group = Group(str(tmp_path / "slot-0"))
    (tmp_path / "slot-0").mkdir()
    assert group.memory() is None
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n")
    assert group.memory() == Memory(2, None)
    (tmp_path / "slot-0/memory.events").write_text("low 0\noom_kill 1\noom_group_kill 0\n")
    (tmp_path / "slot-0/memory.peak").write_text("536870912\n")
    assert group.memory() == Memory(1, 536870912)
    family = Cohort(group, b"", lambda _pid: ())
    assert family.memory_fault(0, -signal.SIGKILL) == "killed for memory; at most 512 MiB were in use"
    assert family.memory_fault(0, 137).startswith("exited with status 137, and a process was killed for memory")
    assert family.memory_fault(0, 9) == ""
    assert family.memory_fault(1, -signal.SIGKILL) == "", "that was another step's"


def test_a_slot_that_could_not_be_taken_over_keeps_its_memo(places: Places) -> None:
    """
    The next step there is known to the next worker as well: what is removed is only what nobody has open.
    """
    Path(places.runtime, "cgroup.procs").write_text(f"{os.getpid()}\n")
    slots = Slots(places, Notifier({}, print), Tree(places.runtime), {}, same_place=True)
    ours = slots.take()
    Path(places.report(7, 1)).write_text("pid 1\n")
    slots.end_others((), lambda _until: None)
    assert ours.shelter is not None
    ours.shelter.save({"step": "a"})
    ((slot, memo),) = shelter.memos(places)
    assert (slot, memo and memo["step"]) == (ours.number, "a")
    assert not os.path.exists(places.report(7, 1))
    slots.give(ours)
    slots.close()


def test_a_latecomer_of_a_dead_worker_is_killed_and_a_bystander_lives(places: Places) -> None:
    """
    Case N4: of what the unit's own cgroup holds, only what bears the mark of a step or of a command of ours is ours.
    """
    marks = (f"STATE_DIRECTORY={places.state('a')}", f"AGENT_ERRAND_OF={places.root}", "STATE_DIRECTORY=/var/lib/agent")
    found = [subprocess.Popen(["sleep", "600"], env=dict([mark.split("=", 1)])) for mark in marks]
    try:
        Path(places.runtime, "cgroup.procs").write_text(
            "".join(f"{pid}\n" for pid in [os.getpid(), *(p.pid for p in found)])
        )
        slots = Slots(places, Notifier({}, print), Tree(places.runtime), {}, same_place=True)
        assert [process.wait(60) for process in found[:2]] == [-signal.SIGKILL] * 2
        assert found[2].poll() is None
        slots.close()
    finally:
        for process in found:
            process.kill()
            process.wait()


def test_the_socket_of_a_step_that_an_older_worker_began_stays_where_it_is(places: Places) -> None:
    """
    Its memo has no path: the socket is heard there, and its path is no leftover.
    """
    Path(places.runtime, "cgroup.procs").write_text(f"{os.getpid()}\n")
    old = NotifySocket(places.notify(0))
    ends = [os.pipe()[0], os.pipe()[0], os.dup(old.fileno())]
    slots = Slots(
        places, Notifier({}, print), Tree(places.runtime), dict(zip(shelter.names(0), ends, strict=True)), True
    )
    slot = slots.take_over(0, None)
    slots.end_others((0,), lambda _until: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as step:
        step.sendto(b"STATUS=here", f"{places.runtime}/notify.0")
    assert [sign.status for sign, _who in slot.socket.receive()] == ["here"]
    slots.give(slot)
    slots.close()
    old.close(unlink=False)
