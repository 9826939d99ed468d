"""The state guard: a worker notices that its state folder, or the ledger in it, is no longer where it was.

An open file follows its folder wherever that is moved, so a worker could go on for hours in files that no other
program finds, while a second worker does all of it again at the old path.  Before anything is claimed or recorded one
stat(2) compares the file at the ledger's path with the open one; once a second its write-ahead log is compared, too.
"""

import os
import shlex
import stat

from worker import clock, folder, mounts
from worker.errors import StateError, StateHeld

# So often is all of it looked at, whatever happens; seconds.
_EVERY = 1.0
_LOG = "-wal"


class StateGuard:
    """Knows by device and inode what this worker works in.

    `moved`: another folder, or none, is at the path, so nothing may be written or removed there.
    `fault`: the ledger's file has gone, although the folder is still ours: claim nothing more.
    """

    def __init__(self, root: str, ledger: str | None) -> None:
        """`ledger`: the path of the open ledger; None where it is on a server.  Raises OSError."""
        self.moved = False
        self.fault: StateError | None = None
        self._root = root
        self._ledger = ledger
        self._fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # A network file system may give an open file another number; there we ask only whether it is there.
        self._steady = mounts.shares_memory(mounts.kind(root))
        self._folder = self._id(os.fstat(self._fd))
        self._first = ledger or root  # its path leads through the folder
        self._file: tuple[int, int] | None = None
        self._file = self._look(self._first)
        self._log: tuple[int, int] | None = None
        self._due_at = clock.monotonic()

    def due_at(self) -> float:
        """Return when to look at all of it again (monotonic clock)."""
        return self._due_at

    @property
    def lost(self) -> bool:
        """Whether the folder or the ledger is no longer in its place."""
        return self.moved or self.fault is not None

    def check(self, now: float) -> bool:
        """Return whether the ledger is still in its place; set `fault` if not.

        Raises StateError if the folder is not in its place, StateHeld if another worker holds the one that is.
        """
        if self._look(self._first) != self._file:
            if self._look(self._root) != self._folder:
                self.moved = True
                raise self._gone()
            self.fault = self.fault or _lost(self._first)
        if now >= self._due_at:
            self._due_at = now + _EVERY
            if self._ledger is not None and self.fault is None:
                self._check_log()
        return self.fault is None

    def _check_log(self) -> None:
        """Compare the write-ahead log; it is there from the first change until the ledger is closed."""
        found = self._look(f"{self._ledger}{_LOG}")
        if self._log is not None and found != self._log:
            self.fault = _lost(f"{self._ledger}{_LOG}")
        self._log = found

    def _look(self, path: str) -> tuple[int, int] | None:
        try:
            return self._id(os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # nothing is known; what is written next says what is wrong
            return self._file if path == self._first else self._folder if path == self._root else self._log

    def _id(self, status: os.stat_result) -> tuple[int, int]:
        return (status.st_dev, status.st_ino) if self._steady else (0, stat.S_IFMT(status.st_mode))

    def _gone(self) -> StateError | StateHeld:
        """Return what is to be said of a folder that is not in its place."""
        here = os.readlink(f"/proc/self/fd/{self._fd}")
        if here.endswith(" (deleted)"):
            what, hint = "was removed", "what the run had done is gone with it; a start begins anew"
        elif here == self._root:
            what, hint = "is covered by another one", f"see findmnt --target {shlex.quote(self._root)}"
        else:
            what = f"was moved to {here}"
            hint = f"move it back, or go on there: agentctl run LIST --state {shlex.quote(here)}"
        what = f"{self._root}: {what} while the worker was at work; ended its steps, begun nothing more"
        try:
            pid = folder.holder(self._root)
        except StateError:
            pid = None
        if pid is not None:
            return StateHeld(f"{what}; another worker, process {pid or 'unknown'}, is at work at that path", hint)
        return StateError(what, hint)


def _lost(path: str) -> StateError:
    what = f"{path}: was removed or replaced while the worker was at work; begins nothing more"
    return StateError(what, "what was done is in checkpoint.json beside it, from which the next start goes on")
