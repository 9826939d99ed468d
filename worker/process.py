"""A step's process: spawned in a session of its own, and ended with everything it started.

The worker is single-threaded and a "child subreaper" (prctl(2)): a process that a step left behind
becomes a child of the worker, so none is lost from sight and none stays a zombie.
"""

import contextlib
import errno
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER, _PR_SET_DUMPABLE = 36, 4
_DESCRIBED, _STACK_LINES = 16, 8
# How the environment of each command of the worker's own begins (see errands.py).
ERRAND = b"AGENT_ERRAND"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
# A step starts with the defaults, as a service does, whatever Python or our own parent has ignored.
_RESET_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from {0} import {1}; {1}.main(sys.argv[2:])"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_ENV_END = 48  # the place of env_end behind the name, in /proc/PID/stat (proc(5))
_BEGAN = 19  # that of starttime
_DIGITS = 9  # of a process's number
_GATE = 'read -r go <&3; exec 3<&-; exec "$@"'
_EXECVE = 0.1  # seconds

# Time for killed processes to vanish before they are looked for again.
LOOK_AGAIN = 0.02


class SpawnError(Exception):
    """The program could not be started; the message says why."""


class Pipes(NamedTuple):
    """Our ends of the pipes of a step; `kept`: they stay open for the next one, so they never come to an end."""

    stdout: int
    stderr: int
    kept: bool = False


class Child(NamedTuple):
    """A process that was just spawned."""

    pid: int
    pipes: Pipes


HIDDEN = "process"  # the name of one that /proc does not show


class Found(NamedTuple):
    """A living process, as /proc shows it."""

    pid: int
    parent: int
    session: int
    name: str
    ticks: int  # CPU time used, in clock ticks
    began: int = 0  # when it was started, in clock ticks since the boot

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


class Inherited(NamedTuple):
    """The processes that descended from this one before it started any itself, and their sessions.

    None of them is a step's, nor is what they start.  A shell that starts processes and then calls exec leaves them.
    """

    began: Mapping[int, int]  # by pid, which another process may have later
    sessions: Collection[int]

    def holds(self, process: Found) -> bool:
        """Return whether `process` is one of them, or in a session of theirs."""
        return self.began.get(process.pid) == process.began or process.session in self.sessions


NOTHING_INHERITED = Inherited({}, ())


def inherited() -> Inherited:
    """Return what descends from this process.  Call it before the first spawn."""
    worker, own = os.getpid(), os.getsid(0)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # nearly always
        return NOTHING_INHERITED
    table = {process.pid: process for process in processes()}
    found = [process for process in table.values() if worker in _ancestors(process, table)]
    return Inherited({process.pid: process.began for process in found}, {own, *(process.session for process in found)})


def _ancestors(process: Found, table: Mapping[int, Found]) -> Iterator[int]:
    """Yield the pids of its parent, of that one's, and so on."""
    link: Found | None = process
    while link is not None:
        yield link.parent
        link = table.get(link.parent)


def ours(module: str) -> tuple[str, ...]:
    """Return the words that call main() of a module of ours with the words that come after them.

    Isolated (-I): the environment, which may be a command's, decides nothing about our own program.
    """
    package, _, name = f"worker.{module}".rpartition(".")
    return (sys.executable, "-I", "-c", _BOOT.format(package, name), _ROOT)


def become_subreaper() -> None:
    """Adopt orphans of our descendants from now on (PR_SET_CHILD_SUBREAPER, prctl(2)).

    And be closed to them: no other process of this user reads our memory, environment or descriptors, or traces us
    (PR_SET_DUMPABLE).  What they start has that anew (execve(2)).
    """
    import ctypes  # 1 MB and some milliseconds: not before the worker is ready

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def keep_descriptors() -> None:
    """Let no descriptor that this process was started with, beyond the standard three, reach a step.

    Python's own are closed on exec anyway (PEP 446); inherited ones are not.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listdir itself used
            if int(entry) > 2:
                os.set_inheritable(int(entry), False)


def allow_descriptors(count: int) -> None:
    """Let this process have so many open, as far as its hard limit goes; steps have the same limit."""
    import resource  # 0.3 ms

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str, ruleset: int | None = None) -> Child:
    """Start `argv` in `cwd` with exactly `env`, in a new session, standard input from /dev/null.

    The child has our pipes as standard output and error and no other descriptor of ours.  It is confined by `ruleset`,
    a descriptor (see landlock.py).
    Raises SpawnError when the program or the folder is not there or may not be used, OSError for want of descriptors.
    """
    program = find_program(argv[0], env.get("PATH", DEFAULT_PATH), cwd)
    reads, writes = [], []
    try:
        for _ in range(2):
            read, write = os.pipe2(os.O_CLOEXEC)
            reads.append(read)
            writes.append(write)
        if ruleset is None:
            pid = launch(program, argv, env, cwd, writes[0], writes[1])
        else:
            pid = _launch_behind_gate(program, argv, env, cwd, (writes[0], writes[1]), ruleset)
    except (SpawnError, OSError):
        for fd in reads:
            os.close(fd)
        raise
    finally:
        for fd in writes:
            os.close(fd)
    out_read, err_read = reads
    os.set_blocking(out_read, False)
    os.set_blocking(err_read, False)
    return Child(pid, Pipes(out_read, err_read))


def _launch_behind_gate(
    program: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, writes: tuple[int, int], ruleset: int
) -> int:
    """Start a confined program as `launch` does; it begins when no thread of ours is in its ruleset any more.

    It could end this process by a signal to that one.  Raises SpawnError and OSError.
    """
    import fcntl

    if not os.access(program, os.X_OK):
        reason = "Permission denied" if os.path.exists(program) else "No such file or directory"
        raise SpawnError(cannot_start(program, cwd, reason))
    gate, gatekeeper = os.pipe2(os.O_CLOEXEC)
    held = [gate, gatekeeper]
    try:
        held.append(fcntl.fcntl(gate, fcntl.F_DUPFD_CLOEXEC, 10))
        words = ["sh", "-c", _GATE, "sh", program, *argv[1:]]
        return launch("/bin/sh", words, env, cwd, *writes, others=held[2:], ruleset=ruleset)
    finally:
        for fd in held:
            os.close(fd)


def launch(
    program: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    others: Sequence[int] = (),
    ruleset: int | None = None,
) -> int:
    """Start `program` as `spawn` does, with these descriptors; return its pid.  Raises SpawnError.

    `others`, all above 9, become the child's 3, 4 and so on.
    """
    from_null = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    given = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((stdout, stderr, *others), 1)]
    start = functools.partial(
        os.posix_spawn,
        program,
        list(argv),
        dict(env),
        file_actions=[from_null if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0), *given],
        setsid=True,
        setsigmask=(),
        setsigdef=_RESET_SIGNALS,
    )
    here = _open_here()
    try:
        os.chdir(cwd)  # posix_spawn(3) has no portable way for this, and no two threads spawn at a time
        if ruleset is None:
            return start()
        from worker import landlock  # ctypes: not before the worker is ready

        return landlock.within(ruleset, start)
    except (OSError, ValueError) as exc:
        reason = (exc.strerror or "") if isinstance(exc, OSError) else str(exc)
        raise SpawnError(cannot_start(program, cwd, reason)) from exc
    finally:
        os.fchdir(here)
        os.close(here)


def _open_here() -> int:
    try:
        return os.open(".", os.O_PATH | os.O_CLOEXEC)
    except OSError:  # started from a folder that is closed to this user, as by `su`
        return os.open("/", os.O_PATH | os.O_CLOEXEC)


def find_program(name: str, path: str, cwd: str) -> str:
    """Return the absolute path of the program `name`, looked up as execvp(3) does, or raise SpawnError."""
    if "/" in name:
        return os.path.join(cwd, name)
    for folder in path.split(":"):
        candidate = os.path.join(cwd, folder, name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise SpawnError(f"program '{name}' not found in PATH '{path}'")


def cannot_start(program: str, cwd: str, reason: str) -> str:
    """Return why `program` could not be started in `cwd`; `reason` is the system's word for it."""
    if not os.path.isdir(cwd):
        return f"cannot work in '{cwd}': no such folder"
    if not os.access(cwd, os.X_OK):
        return f"cannot work in '{cwd}': permission denied"
    return f"cannot start '{program}': {reason}"


def reap() -> dict[int, int]:
    """Collect every child that has ended, orphans too; return exit codes by pid (negative: signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def has_orphans(known: Collection[int]) -> bool:
    """Return whether the worker may have children other than these: leaders of running steps, or inherited.

    What an ended program left behind has become a child of ours, or hangs below one.
    """
    if not known:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return any(int(child) not in known for child in file.read().split())
    except OSError:
        return True  # a kernel without CONFIG_PROC_CHILDREN: look at every process


def family(
    leader: int, marker: bytes, others: Collection[int] = (), before: Inherited = NOTHING_INHERITED
) -> list[Found]:
    """Return the living processes that belong to the step whose first process is or was `leader`.

    They are: its session, all descendants of these, and orphans of ours whose environment holds
    `marker` (an entry such as b"STATE_DIRECTORY=...").  An orphan without any such entry belongs to it, too, if
    no other step runs (`others`: the leaders of those) and we had no children `before` the first step: then nothing
    but a step can have left it.  What was there before, and its sessions, are nobody's.
    """
    table = {process.pid: process for process in processes()}
    return [found for found in table.values() if _is_of(found, table.get, leader, marker, others, before)]


def belongs(
    pid: int, leader: int, marker: bytes, others: Collection[int], before: Inherited = NOTHING_INHERITED
) -> bool:
    """Return whether a process, which has not ended, is one of the step's, as in `family`."""
    found = _look(pid) if pid > 0 else None
    return found is not None and _is_of(found, _look, leader, marker, others, before)


def _is_of(
    process: Found,
    lookup: Callable[[int], Found | None],
    leader: int,
    marker: bytes,
    others: Collection[int],
    before: Inherited,
) -> bool:
    """Follow the parents of `process` up to the worker."""
    mine = foreign = False
    worker = os.getpid()
    link: Found | None = process
    while link is not None:
        mine = mine or leader in (link.pid, link.session)
        foreign = foreign or link.pid in others or link.session in others or before.holds(link)
        if link.parent == worker:
            return mine or (not foreign and _left_by(link.pid, marker, bool(others or before.began)))
        link = lookup(link.parent)
    return False  # not a descendant of ours: at most a process that was given a pid anew


def _left_by(orphan: int, marker: bytes, others: bool) -> bool:
    """Return whether this orphan of ours was left by the step with `marker`; `others`: another may have left it."""
    entries = environment_of(orphan)
    gives_up = time.monotonic() + _EXECVE
    while entries in ([], [b""]) and _in_execve(orphan) and time.monotonic() < gives_up:
        time.sleep(0.001)
        entries = environment_of(orphan)
    if marker in entries:
        return True
    return not others and not any(entry.startswith(ERRAND) for entry in entries)


def leftovers(markers: Iterable[bytes]) -> list[Found]:
    """Return what a dead worker left running: strays that are not in the session of this one.

    A step leads a session.  A person may have started this worker with a step's environment, and other programs.
    """
    session = os.getsid(0)
    return [found for found in strays(markers) if found.session != session]


def _in_execve(pid: int) -> bool:
    """Return whether a process is just getting its program, and has no environment yet."""
    found = _stat(pid)
    return found is not None and found[1][_ENV_END : _ENV_END + 1] == ["0"]


def strays(markers: Iterable[bytes]) -> list[Found]:
    """Return the living processes of this user, anywhere, whose environment holds one of `markers`.

    This process and those from which it descends are never among them.
    """
    wanted = set(markers)
    table = {process.pid: process for process in processes()}
    spared = {os.getpid(), *(_ancestors(me, table) if (me := table.get(os.getpid())) else ())}
    return [
        process
        for process in table.values()
        if process.pid not in spared and not wanted.isdisjoint(environment_of(process.pid))
    ]


def environment_of(pid: int) -> list[bytes]:
    """Return the environment with which the program of `pid` was started; empty for one that is gone or hidden."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    """Return the words with which a process was started; empty for one that is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def look_at(pids: Iterable[int]) -> list[Found]:
    """Return those of these processes that have not ended; of one that /proc hides no more than its pid is known."""
    return [_look(pid) or Found(pid, 0, 0, HIDDEN, 0) for pid in pids if lives(pid)]


def lives(pid: int) -> bool:
    """Return whether process `pid` has not ended.

    Not by /proc: with ProtectProc= that hides processes that this one could not trace.  Such are those that keep
    secrets (ssh-agent), and with PrivateUsers= all that an earlier process of this service has started.
    """
    try:
        watched = os.pidfd_open(pid) if pid > 0 else -1
    except OSError as exc:
        return exc.errno != errno.ESRCH and _look(pid) is not None
    if watched < 0:
        return False
    try:
        return not has_ended(watched)
    finally:
        os.close(watched)


def is_seen(pid: int) -> bool:
    """Return whether /proc shows us a process."""
    return _stat(pid) is not None


def has_ended(watched: int) -> bool:
    """Return whether the process of a pidfd has ended; a zombie has."""
    poll = select.poll()  # not select(2): descriptors may be above 1024
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(0))


def children(pid: int) -> list[int]:
    """Return the children of a process with one thread; empty if the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return []


def processes() -> list[Found]:
    """Return every process that has not ended (zombies are left out), from proc(5)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = _look(int(entry))
            if process is not None:
                found.append(process)
    return found


def _look(pid: int) -> Found | None:
    found = _stat(pid)
    if found is None or found[1][0] in "ZX":
        return None
    name, fields = found
    ticks = sum(int(fields[i]) for i in (11, 12, 13, 14))  # utime, stime, and those of waited-for children
    return Found(pid, int(fields[1]), int(fields[3]), name, ticks, _began(fields))


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """Return a process's name and what /proc/PID/stat says behind it, from its state on; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return _split(file.read().decode(errors="replace"))
    except OSError:
        return None


def _split(text: str) -> tuple[str, list[str]]:
    """Take "pid (name) state ppid pgrp session ..." apart: the name may itself hold spaces and parentheses."""
    head, _, rest = text.rpartition(")")
    return head.partition("(")[2], rest.split()


def began(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks since the boot; 0 if there is none of that number."""
    found = _stat(pid)
    return _began(found[1]) if found is not None else 0


def noted(stat: bytes) -> tuple[int, int]:
    """Return the number of a process, and when it was started, as /proc/PID/stat said; zeros for anything else."""
    text = stat.decode(errors="replace")
    number = text.partition(" ")[0]
    began = _began(_split(text)[1])
    return (int(number), began) if began and number.isdecimal() and len(number) <= _DIGITS else (0, 0)


def _began(fields: list[str]) -> int:
    found = fields[_BEGAN] if len(fields) > _BEGAN else ""
    return int(found) if found.isdecimal() and len(found) <= 2 * _DIGITS else 0


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process has ended, or cannot be looked at."""
    found = _look(pid)
    return 0 if found is None else found.parent


def send(processes: Iterable[Found], number: int) -> None:
    """Send a signal to each of `processes`; one that is gone, or not ours to signal, is passed over."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def send_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of these processes, as `send` does."""
    send((Found(pid, 0, 0, HIDDEN, 0) for pid in pids), number)


def terminate(processes: Iterable[Found]) -> None:
    """Ask `processes` to end, waking those that are stopped, as systemd does (systemd.kill(5))."""
    targets = list(processes)
    send(targets, signal.SIGTERM)
    send(targets, signal.SIGCONT)


def describe_all(processes: Iterable[Found]) -> str:
    """Return a line for each process: what it was doing just now, as far as the kernel tells."""
    lines = []
    for found in list(processes)[:_DESCRIBED]:
        lines.append(f"{found}: {describe(found.pid)}")
        with contextlib.suppress(OSError), open(f"/proc/{found.pid}/stack", encoding="ascii") as file:
            lines += [f"    {line.strip()}" for line in file.read().splitlines()[:_STACK_LINES]]
    return "\n".join(lines)


def describe(pid: int) -> str:
    """Return the state and kernel wait channel of `pid` as one line, as far as they can be read."""
    parts = []
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            if line.startswith(("State:", "VmRSS:", "Threads:")):
                parts.append(" ".join(line.split()))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        parts.append(f"wchan: {file.read() or '-'}")
    return ", ".join(parts)
