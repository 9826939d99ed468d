"""The start of a process: what it lives by is set, whatever it was started with.

Descriptors 0 to 2 are open, so no file of ours becomes one of them.  Names, arguments and the environment are bytes,
which Python sees as UTF-8 whatever the locale.  What is printed is escaped where the locale has no letter for it.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    import signal
    from typing import Any, TextIO
else:
    import _signal as signal  # the module above it imports enum and re: too much for `agentctl beat`

# What Python sets LC_CTYPE to in its own environment where the locale is C (PEP 538).
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
# Python itself ignores the first two; `nohup` ignores SIGHUP on purpose.
_KEPT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP)


def prepare() -> None:
    """Set what every command needs.  May start the program anew in this process (execve(2))."""
    _open_standard()
    _restore_locale()
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # nobody would hear how a child of ours ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prepare_streams()


def prepare_daemon() -> None:
    """Set what a daemon needs, too: it hears its signals, and may use what it makes itself."""
    for number in signal.valid_signals():
        if number not in _KEPT and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    mask = os.umask(0o077)
    os.umask(mask & 0o077)


class OutputFailed(OSError):
    """Standard output cannot be written, and its reader has not just gone."""


def finish(status: int) -> int:
    """Write what is left to be printed; return the exit status, which is 1 if that was the purpose and cannot be done.

    After that nothing of the interpreter's own end can fail, and change the status.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_output()  # the reader has seen enough
    except OutputFailed as exc:
        return output_failed(exc, status)
    return status


def output_failed(exc: OutputFailed, status: int = 0) -> int:
    """Say that standard output cannot be written; return the exit status for that, if nothing else was wrong."""
    give_up_output()
    print(f"agentctl: standard output cannot be written: {exc.strerror}", file=sys.stderr)
    return status or 1


def give_up_output() -> None:
    """Let what is printed on standard output from now on, and what is in its buffer, be gone."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, 1)
    os.close(null)


def let_output_fail() -> None:
    """Let no print on standard output fail: what this command does counts, and not that it says so."""
    if isinstance(getattr(sys.stdout.buffer, "raw", None), _Raw):  # and not what a test has put in its place
        sys.stdout.flush()
        sys.stdout = _stream(1, sys.stdout, may_fail=True)


def json_ascii() -> bool:
    """Return whether JSON has to be printed in ASCII, since what is printed is not UTF-8."""
    return not sys.stdout.encoding.lower().startswith("utf")


def _open_standard() -> None:
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number


def _restore_locale() -> None:
    """Take back the LC_CTYPE that Python has set: it is our own, and no child of ours was meant to have it."""
    if os.environ.get("LC_CTYPE") not in _COERCED:
        return
    try:
        with open("/proc/self/environ", "rb") as file:
            given = [entry for entry in file.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
    except OSError:
        return
    if given:
        os.environ["LC_CTYPE"] = os.fsdecode(given[0].partition(b"=")[2])
    else:
        del os.environ["LC_CTYPE"]


def _prepare_streams() -> None:
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8")
    if sys.stdout is None or sys.stdout is sys.__stdout__:  # and not what a test has put in its place
        sys.stdout = _stream(1, sys.stdout, may_fail=False)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr, may_fail=True)


class _Raw(io.RawIOBase):
    """A descriptor that is open for as long as we live; `may_fail`: what cannot be written is dropped."""

    def __init__(self, fd: int, may_fail: bool) -> None:
        super().__init__()
        self._fd = fd
        self._may_fail = may_fail

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as exc:
            if not self._may_fail:
                raise exc if isinstance(exc, BrokenPipeError) else OutputFailed(exc.errno, exc.strerror) from exc
        return len(data)


def _stream(fd: int, before: TextIO | None, may_fail: bool) -> TextIO:
    """Return what prints to a descriptor as `before` did, and escapes what cannot be encoded."""
    encoding = (_locale_encoding() if "utf8" in sys._xoptions else "") or (before.encoding if before else "utf-8")
    through = may_fail or os.isatty(fd)
    buffer = io.BufferedWriter(_Raw(fd, may_fail))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=through)


def _locale_encoding() -> str:
    """Return the locale's own encoding, where we have told Python that all is UTF-8."""
    import _locale  # the module above it is a large one

    return _locale.getencoding()
