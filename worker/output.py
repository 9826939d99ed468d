"""What a step wrote: its result (standard output) and its log (standard error), byte for byte.

A stream goes from its pipe straight into a file (splice(2)): whenever the worker is killed, each byte is in the pipe
or in the file, once.  One that has stayed small is committed with the step's row in one flush.  Nothing here decodes
text or looks for lines.
"""

import contextlib
import errno
import os

from worker import files
from worker.disk import FULL

INLINE_MAX = 64 * 1024
# What of a stream is kept for people when the stream itself lies in a file.
TAIL_MAX = 16 * 1024
CHUNK = 256 * 1024
_NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class Spool:
    """One stream of one attempt; `path` is its file, which the next attempt writes over."""

    __slots__ = ("_abandoned", "_fd", "_named", "_pending", "_splices", "_tail", "_written", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._written = 0  # of that, in the file; the rest is pending
        self._pending = b""
        self._tail = b""
        self._fd: int | None = None
        self._named: int | None = None  # the inode that was given another name
        self._splices = True
        self._abandoned = False

    @property
    def inline(self) -> bool:
        """Whether the stream is small enough to be committed with the step's row."""
        return self.size <= INLINE_MAX and not self._abandoned

    def prepare(self) -> None:
        """Let the file be there, and empty.  Raises OSError."""
        fd = self._open()
        if os.fstat(fd).st_size:  # some file systems have a lot to do for nothing
            os.ftruncate(fd, 0)

    def resume(self, path: str, inode: int | None) -> None:
        """Go on with what an earlier worker has put into the file.  Raises OSError if it is not there.

        If it is `inode`, and has been published as `path` already, that is taken back.
        """
        if inode is not None and not os.path.exists(self.path) and os.stat(path).st_ino == inode:
            os.rename(path, self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.size = self._written = os.fstat(self._fd).st_size

    def inode(self) -> int | None:
        """Return what `resume` knows the file by, None while there is none."""
        return self._named if self._fd is None else os.fstat(self._fd).st_ino

    def take(self, pipe: int, most: int = CHUNK) -> bytes | None:
        """Move a chunk of what `pipe` holds into the file and return it: None for nothing now, b"" at the pipe's end.

        A chunk has `most` bytes at most.

        Raises OSError, nothing taken, when the file cannot be written.
        """
        self.retry()
        if self._splices and not self._abandoned:
            fd = self._open()
            try:
                count = os.splice(pipe, fd, most, offset_dst=self._written, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return None
            except OSError as exc:
                if exc.errno not in _NO_SPLICE:
                    raise
                self._splices = False  # a file system that cannot
            else:
                self._written += count
                self.size += count
                return self.read(self._written - count, count)
        data = self.absorb(pipe, most)
        if data:
            with contextlib.suppress(OSError):  # it is kept, and the next call raises
                self.retry()
        return data

    def absorb(self, pipe: int, most: int = CHUNK) -> bytes | None:
        """Take a chunk into memory, for a pipe that is to be closed while the disk is full; returned as by `take`."""
        try:
            data = os.read(pipe, most)
        except BlockingIOError:
            return None
        self.size += len(data)
        if self._abandoned:
            self._tail = (self._tail + data)[-TAIL_MAX:]
        else:
            self._pending += data
        return data

    def abandon(self) -> None:
        """Keep no more than the end of the stream from now on: its file cannot be written."""
        self._tail = self.contents()[-TAIL_MAX:]
        self._abandoned = True
        self._pending = b""

    def retry(self) -> None:
        """Write what a full disk held up; raises OSError while it is still full."""
        while self._pending:
            count = os.pwrite(self._open(), self._pending, self._written)
            self._pending = self._pending[count:]
            self._written += count

    def in_place(self) -> bool:
        """Return whether the file still has its name."""
        if self._fd is None:
            return True
        try:
            return os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except OSError:
            return False

    def contents(self) -> bytes:
        """Return the whole stream if it is `inline`, else its last bytes."""
        if self._abandoned:
            return self._tail
        if self.size <= INLINE_MAX:
            return self.read(0, self._written) + self._pending
        return (self.read(max(0, self._written - TAIL_MAX), TAIL_MAX) + self._pending)[-TAIL_MAX:]

    def read(self, start: int, count: int) -> bytes:
        """Return what the file holds from `start`, at most `count` bytes."""
        return os.pread(self._fd, count, start) if self._fd is not None and count else b""

    def show(self) -> None:
        """Let the whole stream be in the file under its name.  Raises OSError."""
        self.retry()
        self._open()
        if not self.in_place():  # a step has removed it
            self._make_again()

    def publish(self, path: str) -> None:
        """Give the stream the name `path`, as a whole; may be called again if it raises OSError.

        A stream that is not inline is durable after.  An inline one is in the file, but not synced:
        it can be made again from the ledger's row.
        """
        if not self.size and files.publish_empty(path):
            return  # the next step writes into ours
        self.show()
        if self.inline:
            os.rename(self.path, path)
        else:
            files.adopt(self.path, path)
        self._named = self.inode()
        self.close()

    def keep(self, path: str) -> None:
        """Give the stream the name `path`, not made durable; may be called again if it raises OSError.

        An abandoned one has no file.
        """
        if self._abandoned:
            return
        self.show()
        os.rename(self.path, path)
        self._named = self.inode()
        self.close()

    def restart(self) -> None:
        """Forget what was written so far, and give its space back: the stream is written anew."""
        if self._fd is not None and self._written:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
        if not self.in_place():
            self.close()
        self.size = self._written = 0
        self._pending = self._tail = b""
        self._named = None
        self._abandoned = False

    def close(self) -> None:
        """Close the file, if it is open, and leave it where it is."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = self._make()
        return self._fd

    def _make(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        files.clear_the_way(self.path)
        try:
            return os.open(self.path, flags, 0o640)
        except FileNotFoundError:  # a step has removed the folder
            os.makedirs(os.path.dirname(self.path), mode=0o750, exist_ok=True)
            return os.open(self.path, flags, 0o640)

    def _make_again(self) -> None:
        data = self.read(0, self._written)
        fd = self._make()
        try:
            files.write_all(fd, data)
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd = fd


def missing(result: Spool, log: Spool) -> str:
    """Return what has become of a step's files, if they are too large for the ledger's row and cannot be had."""
    if not result.inline and not result.in_place():
        return f"its output was removed while it ran: {result.path}"
    if not log.inline and not log.in_place():
        try:
            log.show()
        except OSError as exc:
            if exc.errno not in FULL:
                log.abandon()
                return f"its output could not be kept: {exc.strerror}: {log.path}"
    return ""
