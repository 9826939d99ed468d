"""What a step wrote: its result (standard output) and its log (standard error), byte for byte.

A stream is held in memory while it is small, so that it can be committed with the step's row in
one flush; past INLINE_MAX it goes to a file and memory no longer grows.  Nothing here decodes text
or looks for lines.
"""

import contextlib
import os

from worker import files

INLINE_MAX = 64 * 1024
# What of a stream is kept for people when the stream itself lies in a file.
_TAIL_MAX = 16 * 1024


class Spool:
    """One stream of one attempt; `path` is the file for it, made when needed or by `prepare`."""

    __slots__ = ("_abandoned", "_fd", "_memory", "_pending", "_tail", "inline", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.inline = True  # the whole stream is in memory
        self._memory = bytearray()
        self._tail = b""
        self._pending = b""
        self._fd: int | None = None
        self._abandoned = False

    def prepare(self) -> None:
        """Make the file before it is needed: while the step runs nobody waits for it."""
        with contextlib.suppress(OSError):  # then it is made later, where a full disk is waited out
            self._open()

    def write(self, data: bytes) -> None:
        """Take `data`.  Raises OSError if the disk is full: the data is kept, call `retry` later."""
        self.size += len(data)
        if self.inline:
            self._memory += data
            if len(self._memory) <= INLINE_MAX:
                return
            self.inline = False
            data = bytes(self._memory)
            self._memory.clear()
        self._tail = (self._tail + data)[-_TAIL_MAX:] if len(data) < _TAIL_MAX else data[-_TAIL_MAX:]
        if not self._abandoned:
            self._pending += data
            self.retry()

    def abandon(self) -> None:
        """Keep no more than the end of the stream from now on: its file cannot be written."""
        self._abandoned = True
        self._pending = b""

    def in_place(self) -> bool:
        """Return whether a stream that is too large for memory is still in its file."""
        if self.inline or self._fd is None:
            return True
        try:
            return os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except OSError:
            return False

    def retry(self) -> None:
        """Write what a full disk held up; raises OSError while it is still full."""
        while self._pending:
            self._pending = self._pending[os.write(self._open(), self._pending) :]

    def contents(self) -> bytes:
        """Return the whole stream if it is `inline`, else its last bytes."""
        return bytes(self._memory) if self.inline else self._tail

    def show(self) -> None:
        """Let the whole stream be in the file, for whoever looks before it is published.  Raises OSError."""
        if self.inline:
            self._fill()
        else:
            self.retry()

    def publish(self, path: str) -> None:
        """Give the stream the name `path`, as a whole; may be called again if it raises OSError.

        A stream that is not inline is durable after.  An inline one is in the file, but not synced:
        it can be made again from the ledger's row.
        """
        if not self.inline:
            self.retry()
            self.close()
            files.adopt(self.path, path)
            return
        if not self.size and files.publish_empty(path):
            self.close()  # the next step writes over it
            return
        try:
            self._write_inline(path)
        except FileNotFoundError:  # a step has removed the folder; now it is made again
            self.close()
            self._write_inline(path)

    def _write_inline(self, path: str) -> None:
        self._fill()
        self.close()
        os.rename(self.path, path)

    def _fill(self) -> None:
        fd = self._open()
        os.ftruncate(fd, 0)  # what an earlier try may have written
        os.lseek(fd, 0, os.SEEK_SET)
        files.write_all(fd, self._memory)

    def close(self) -> None:
        """Close the file, if there is one, and leave it where it is."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def restart(self) -> None:
        """Forget what was written so far: another program writes the stream anew."""
        self.discard()
        self.size = 0
        self.inline = True
        self._memory.clear()
        self._tail = self._pending = b""

    def discard(self) -> None:
        """Close the file and give its space back; the next attempt writes over it."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
        self.close()

    def _open(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            try:
                self._fd = os.open(self.path, flags, 0o640)
            except FileNotFoundError:  # a step has removed the folder
                os.makedirs(os.path.dirname(self.path), mode=0o750, exist_ok=True)
                self._fd = os.open(self.path, flags, 0o640)
        return self._fd
