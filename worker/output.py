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
    """One stream of one attempt.

    `path` is where the bytes go once there are too many of them; the folder is made when needed.
    """

    __slots__ = ("_fd", "_memory", "_pending", "_tail", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._memory = bytearray()
        self._tail = b""
        self._pending = b""
        self._fd: int | None = None

    @property
    def inline(self) -> bool:
        """Whether the whole stream is in memory."""
        return self._fd is None and not self._pending

    def write(self, data: bytes) -> None:
        """Take `data`.  Raises OSError if the disk is full: the data is kept, call `retry` later."""
        self.size += len(data)
        if self.inline and len(self._memory) + len(data) <= INLINE_MAX:
            self._memory += data
            return
        self._tail = (self._tail + data)[-_TAIL_MAX:] if len(data) < _TAIL_MAX else data[-_TAIL_MAX:]
        self._pending += data
        self.retry()

    def retry(self) -> None:
        """Write what a full disk held up; raises OSError while it is still full."""
        if self.inline:
            return
        if self._fd is None:
            self._open()
        assert self._fd is not None
        while self._pending:
            self._pending = self._pending[os.write(self._fd, self._pending) :]

    def contents(self) -> bytes:
        """Return the whole stream if it is `inline`, else its last bytes."""
        return bytes(self._memory) if self.inline else self._tail

    def publish(self, path: str) -> None:
        """Give the stream's file the name `path`; durable after.  Only for a stream that is not inline."""
        self.retry()
        self.close()
        files.adopt(self.path, path)

    def close(self) -> None:
        """Close the file, if there is one, and leave it where it is."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._memory.clear()

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        self._fd = fd
        self._pending = bytes(self._memory) + self._pending
        self._tail = self._pending[-_TAIL_MAX:]
        self._memory.clear()
