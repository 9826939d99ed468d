"""The state folder: where the files of a run are, who may work in it, what is done with what cannot be read.

STATE/ledger.db            what was tried and done (and its -wal, -shm, or -journal)
STATE/checkpoint.json      the run in one portable file
STATE/out/STEP             results, whole
STATE/steps/STEP/          a step's own folder, kept between its attempts
STATE/home/STEP/           its HOME where the worker is a unit's, kept until it is done
STATE/log/STEP.NUMBER      the log of an attempt that wrote a lot of it
STATE/work/                where steps work unless the task says otherwise
STATE/runs/NAME/           the same of another run that was here before
STATE/copy/                the last snapshot of the run for copies, and what became of those
STATE/lock                 held by the one worker; a kernel lock, so a dead worker holds nothing
STATE/ended                how systemd saw the last workers end
STATE/last-words           why the last worker ended, if it was not well
STATE/alerted              what somebody has been told of that, in the foreground (else see told.py)
STATE/alert.json           whom to tell, as of the last worker that could read its list
STATE/pinged               there while a begin has been made known, and its end has not
STATE/paused               that a person has paused the agent
STATE/keep-awake           the path of the file that keeps the machine awake, while it is there
RUNTIME/                   sockets, and what is known of the attempts that run; gone at the latest with the machine
"""

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import struct
import time
from typing import NamedTuple

from worker import files
from worker.errors import CONFIG, OUT_OF_BUDGET, STATE_HELD, STATE_UNUSABLE, STEP_FAILED, StateError, StateHeld

# struct flock of fcntl(2) on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_FLOCK = "hhqqi4x"
_PAGE = 4096
_SOCKET_PATH_MAX = 107  # unix(7): sun_path is 108 bytes with the closing zero


class Places(NamedTuple):
    """The paths of one run."""

    run: str
    root: str
    runtime: str
    secrets: str | None = None  # the worker's own credentials (systemd.exec(5), CREDENTIALS_DIRECTORY)

    @property
    def ledger(self) -> str:
        return f"{self.root}/ledger.db"

    @property
    def checkpoint(self) -> str:
        return f"{self.root}/checkpoint.json"

    @property
    def out(self) -> str:
        return f"{self.root}/out"

    @property
    def work(self) -> str:
        return f"{self.root}/work"

    @property
    def control(self) -> str:
        return f"{self.runtime}/control"

    def output(self, step: str) -> str:
        return f"{self.root}/out/{_entry(step)}"

    def part(self, slot: int) -> str:
        """Where the output of the step in a slot grows until it is whole."""
        return f"{self.root}/out/.part-{slot}"

    def state(self, step: str) -> str:
        return f"{self.states}/{_entry(step)}"

    def spare(self, slot: int) -> str:
        """An empty folder for the next step of a slot."""
        return f"{self.states}/.spare-{slot}"

    @property
    def states(self) -> str:
        """Where the steps have their own folders."""
        return f"{self.root}/steps"

    @property
    def homes(self) -> str:
        """Where steps have their homes."""
        return f"{self.root}/home"

    def home(self, step: str) -> str:
        return f"{self.homes}/{_entry(step)}"

    def log(self, step: str, number: int) -> str:
        return f"{self.root}/log/{_entry(step)}.{number}"

    def log_part(self, slot: int) -> str:
        """Where the log of the step in a slot grows."""
        return f"{self.root}/log/.part-{slot}"

    def notify(self, slot: int, secret: str = "") -> str:
        """Where the notify socket of a slot is: in a folder whose name no other step knows.

        Without a secret it is where workers of earlier versions had it.
        """
        return f"{self.runtime}/notify.{slot}" + (f".{secret}/s" if secret else "")

    def given(self, slot: int) -> str:
        """A folder with what the step in a slot is to read."""
        return f"{self.runtime}/given.{slot}"

    def note(self, slot: int) -> str:
        return f"{self.given(slot)}/note"

    def spec(self, slot: int) -> str:
        """Where a program of ours finds what it is to do."""
        return f"{self.given(slot)}/spec"

    def report(self, slot: int, program: int) -> str:
        """Where a program in a slot leaves how it has ended."""
        return f"{self.runtime}/report.{slot}.{program}"

    def memo(self, slot: int) -> str:
        """What a worker to come should know of the attempt in a slot."""
        return f"{self.runtime}/memo.{slot}"

    @property
    def seen(self) -> str:
        """A file that says when the worker last looked around (monotonic clock)."""
        return f"{self.runtime}/seen"


def prepare(root: str, runtime: str | None) -> str:
    """Make the folders of the state folder `root`; return the runtime folder, which exists then.

    Raises StateError that names the path which cannot be made or written, OSError for a disk that is full or failing.
    """
    try:
        make(root)
        probe = f"{root}/.writable"
        os.close(files.make(probe, 0o640))
        os.unlink(probe)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise StateError(
                f"{exc.filename or root}: the state folder cannot be written: {exc.strerror}",
                "it must be a folder that this user may write to",
            ) from exc
        if not os.path.isdir(f"{root}/work"):
            raise  # there is nowhere to begin; else it is waited out later, beside what can be done already
    if runtime is None:
        runtime = f"{root}/run"
        if len(os.fsencode(f"{runtime}/notify.00000.{16 * '0'}/s")) > _SOCKET_PATH_MAX:
            runtime = _short_runtime(root)
    try:
        os.makedirs(runtime, mode=0o700, exist_ok=True)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise StateError(f"{runtime}: the runtime folder cannot be made: {exc.strerror}") from exc
    return runtime


def _short_runtime(root: str) -> str:
    """Return a runtime folder for a state folder that lies too deep for a socket's path: each time the same one.

    Raises StateError.
    """
    import hashlib
    import tempfile

    digest = hashlib.blake2b(f"{os.geteuid()} {root}".encode(errors="surrogateescape"), digest_size=8).hexdigest()
    path = f"/tmp/agent-{digest}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return path
    return tempfile.mkdtemp(prefix="agent-", dir="/tmp")  # somebody else was there first


def make(root: str) -> None:
    """Make those of the folders that are not there.  Raises OSError."""
    os.makedirs(root, mode=0o750, exist_ok=True)
    for name in ("out", "steps", "log", "work"):
        os.makedirs(f"{root}/{name}", mode=0o750, exist_ok=True)


def _entry(step: str) -> str:
    """Return the step's id, which may be another machine's word, if it names a file in a folder and no path.

    Raises StateError.
    """
    if not files.is_plain_name(step):
        what = f"a step has the id {step!a}, which the agent gives to none"
        raise StateError(what, "nothing was written; take a copy of the run that the agent has made")
    return step


class Lock(NamedTuple):
    """The hold on a state folder; whether the worker before ended in order, and its runtime folder."""

    fd: int
    in_order: bool
    runtime: str


def lock(root: str) -> Lock:
    """Take the state folder for this process, until the process ends.

    The lock is the kernel's (fcntl(2)) and ends with the process, however it ends.  Nothing else in
    this process may open the lock file: closing any descriptor of it would give the lock up.  Raises
    StateHeld with the pid of the holder, StateError if there can be no lock file.
    """
    path = f"{root}/lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
    except OSError as exc:
        raise StateError(f"{path}: cannot be opened: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StateError(f"{path}: is no plain file", f"remove it: rm {path}")
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        pid = _holder(fd)
        os.close(fd)
        if exc.errno not in (errno.EACCES, errno.EAGAIN):
            raise StateError(f"{path}: cannot be locked: {exc.strerror}") from exc
        raise StateHeld(
            f"{root}: held by another worker, process {pid or 'unknown'}",
            "stop that one first, or use another state folder",
        ) from exc
    said = os.pread(fd, _PAGE, 0)
    return Lock(fd, said.startswith(_IN_ORDER), _runtime(said))


def begin(held: Lock, runtime: str) -> None:
    """Note that this worker is at work, and that it can be asked in the folder `runtime`."""
    with contextlib.suppress(OSError):
        os.ftruncate(held.fd, len(_AT_WORK))
    _mark(held.fd, _AT_WORK + os.fsencode(runtime) + b"\n")


def runtime(root: str) -> str:
    """Return the runtime folder of the worker that holds, or held last, the state folder; empty if nobody knows."""
    try:
        fd = files.open_plain(f"{root}/lock")
        try:
            return _runtime(os.pread(fd, _PAGE, 0))
        finally:
            os.close(fd)
    except OSError:
        return ""


def _runtime(said: bytes) -> str:
    return os.fsdecode(said[len(_AT_WORK) :].rstrip(b"\n"))


class Ends(NamedTuple):
    """How systemd saw workers end since this was last asked.

    `faults`: those that were not well, and that nobody had asked to end; the last one last.  `at`: when the last one
    ended (wall clock), None if systemd has said nothing.  `stopped`: systemd's word for that end if it had been asked
    for, else empty.  `ids`: of each fault, what tells it from all others; empty where systemd did not say.
    """

    faults: list[str]
    at: float | None
    stopped: str = ""
    ids: tuple[str, ...] = ()

    def since(self, known: str) -> int:
        """Return how many faults there were after the one with the id `known`; all, if that is not among them."""
        return len(self.faults) - (self.ids.index(known) + 1 if known and known in self.ids else 0)


def ended(root: str) -> Ends:
    """Return how workers have ended that had this state folder.

    The unit has it written down: $SERVICE_RESULT, $EXIT_CODE, $EXIT_STATUS and $INVOCATION_ID of systemd.exec(5).
    """
    try:
        with open(files.open_plain(f"{root}/ended"), encoding="utf-8", errors="replace") as file:
            lines, at = [line.split() for line in file.read(_ENDED_MAX).splitlines()], os.fstat(file.fileno()).st_mtime
    except OSError:
        return Ends([], None)
    # A worker that is killed because it does not stop in time has been asked to end, whatever it was that it hung at.
    known = [line for line, after in itertools.pairwise([*lines, []]) if len(line) in (3, 4) and after != _STOP]
    ends = [line for line in known if line[0] != "success" and line[2] not in _ORDERLY]
    faults = [f"{end[0]}, {'exit status ' if end[1] == 'exited' else 'SIG'}{end[2]}" for end in ends]
    last = lines[-2] if lines[-1:] == [_STOP] and len(lines) > 1 else []
    return Ends(faults, at, last[0] if last else "", tuple("".join(end[3:]) for end in ends))


def forget_ended(root: str) -> None:
    """Forget how workers have ended; it is known elsewhere by now."""
    with contextlib.suppress(OSError):
        os.unlink(f"{root}/ended")


def leave(held: Lock) -> None:
    """Note that this worker ends in order.  Works on a full disk: the bytes have their place already."""
    _mark(held.fd, _IN_ORDER)


_ORDERLY = [str(status) for status in (OUT_OF_BUDGET, STEP_FAILED, STATE_UNUSABLE, STATE_HELD, CONFIG)]
_STOP = ["stop"]
_ENDED_MAX = 1 << 20  # characters; a line of some 60 is written at each end of a worker
_AT_WORK, _IN_ORDER = b"at work \n", b"in order\n"


def _mark(fd: int, word: bytes) -> None:
    with contextlib.suppress(OSError):  # a new file on a full disk: then the next worker does not know
        os.pwrite(fd, word, 0)


def holder(root: str) -> int | None:
    """Return the pid of the worker that holds the state folder, or None; takes no lock itself.

    0 stands for a process that cannot be seen from here (another pid namespace).  Raises StateError if the folder
    may not be looked into.
    """
    try:
        fd = files.open_plain(f"{root}/lock")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StateError(f"{root}/lock: cannot be read: {exc.strerror}", look_hint(exc)) from exc
    try:
        return _holder(fd)
    finally:
        os.close(fd)


def look_hint(exc: OSError) -> str:
    """Return what to do about a file of the state folder that cannot be read."""
    if not isinstance(exc, PermissionError):
        return "nothing was changed; mend that"
    if "AGENT_STEP" in os.environ:
        return "a confined step may not read the files of its run; 'confine: no' in its task allows that"
    return "use sudo"


def _holder(fd: int) -> int | None:
    request = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _whence, _start, _length, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else int(pid)


def set_aside(path: str, suffixes: tuple[str, ...] = ("",)) -> str:
    """Rename what cannot be read to `PATH.corrupt-TIME`, with its companions; return the new name."""
    new = f"{path}.corrupt-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    while os.path.exists(new):
        new += "+"
    for suffix in suffixes:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path + suffix, new + suffix)
    return new


def keep_copy(path: str, suffixes: tuple[str, ...]) -> str:
    """Copy a file with its companions to `PATH.damaged-TIME`, byte for byte; return the new name.  Raises OSError."""
    new = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    while os.path.exists(new):
        new += "+"
    for suffix in suffixes:
        if os.path.exists(path + suffix):
            import shutil  # for the rare moment

            shutil.copyfile(path + suffix, new + suffix)
    return new
