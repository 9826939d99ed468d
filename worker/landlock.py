"""Landlock (landlock(7)): what a program, and all that it starts, may open, for as long as it lives.

A ruleset allows, and cannot take away: what no rule covers is refused.  The kernel restricts the calling thread and
what that starts, so a program is spawned by a thread that lives for that long, and the worker itself stays free.
Files that were open before stay usable; stat(2), chmod(2), connect(2) and the like are not covered by any version.
"""

import _thread
import ctypes
import errno
import functools
import os
import stat
import struct
import time
from collections.abc import Callable
from typing import TypeVar

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the numbers of the system calls, the same on every architecture
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1
_SCOPE_SIGNAL = 2
_PR_SET_NO_NEW_PRIVS = 38
# Accesses to files: those of the first version, and what later ones have added.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FIRST = (1 << 13) - 1
READ = _EXECUTE | _READ_FILE | _READ_DIR
REWRITE = READ | _WRITE_FILE | _TRUNCATE  # what is there may be changed, and nothing be made or removed
ALL = _FIRST | _REFER | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_WITH_REFER, _WITH_TRUNCATE, WITH_SIGNALS = 2, 3, 6

T = TypeVar("T")


@functools.cache
def version() -> int:
    """Return the version of the kernel's Landlock (its ABI); 0 if there is none, or it may not be used."""
    try:
        return _call(_CREATE, None, 0, _VERSION)
    except OSError:
        return 0


def gaps(abi: int) -> list[str]:
    """Return what a confined step can do with files and processes that are not its own, under this version."""
    found = ["empty files with truncate(2)"] if abi < _WITH_TRUNCATE else []
    return [*found, "send signals"] if abi < WITH_SIGNALS else found


class Ruleset:
    """What may be done with files; everything else with them is refused once a thread has entered it.

    From version 6 on, signals to processes outside are refused, too.  Raises OSError.
    """

    def __init__(self) -> None:
        abi = version()
        self._handled = _FIRST | (_REFER if abi >= _WITH_REFER else 0) | (_TRUNCATE if abi >= _WITH_TRUNCATE else 0)
        # Abstract sockets are left alone: X11 and other servers outside are reached by them.
        scoped = _SCOPE_SIGNAL if abi >= WITH_SIGNALS else 0
        attributes = struct.pack("=QQQ", self._handled, 0, scoped)
        size = len(attributes) if scoped else 8  # older kernels know the first member alone
        self.fd = _call(_CREATE, ctypes.create_string_buffer(attributes, len(attributes)), size, 0)

    def allow(self, fd: int, accesses: int) -> None:
        """Allow `accesses` to what `fd` (O_PATH will do) is, and below it."""
        allowed = accesses & self._handled
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= _OF_FILES
        rule = struct.pack("=Qi", allowed, fd)
        _call(_ADD, self.fd, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)

    def close(self) -> None:
        os.close(self.fd)


def within(ruleset: int, action: Callable[[], T]) -> T:
    """Return `action()`, called by a thread that has entered the ruleset with this descriptor and has ended since.

    What it has started could send signals to that thread, and so end this process: hold that up until this returns.
    Raises what the action raises, and OSError.
    """
    ended = _thread.allocate_lock()
    ended.acquire()
    results: list[T] = []
    threads: list[int] = []
    faults: list[BaseException] = []

    def work() -> None:
        threads.append(_thread.get_native_id())
        try:
            _enter(ruleset)
            results.append(action())
        except BaseException as exc:
            faults.append(exc)
        finally:
            ended.release()

    try:
        _thread.start_new_thread(work, ())
    except RuntimeError as exc:  # its word for want of memory or processes
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from exc
    ended.acquire()
    while os.path.exists(f"/proc/self/task/{threads[0]}"):  # it still has to take its leave of the interpreter
        time.sleep(0)
    if faults:
        raise faults[0]
    return results[0]


def _enter(ruleset: int) -> None:
    try:
        _call(_RESTRICT, ruleset, 0)
    except PermissionError:  # unless root does it, nothing in it may gain privileges (sudo)
        _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT, ruleset, 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _call(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
