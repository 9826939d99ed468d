"""Text files of the user's: UTF-8 whatever the locale, plain, of bounded size, opened once, for reading only."""

import errno
import os
import stat
import time

from worker.errors import ConfigError, Mark, Problem

MEGABYTE = 2**20
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_TRIES, _PAUSE = 10, 0.2  # seconds between two; far below any WatchdogSec=
_NULL = os.makedev(1, 3)  # /dev/null, which is how people name an empty file
_STATE = "STATE_DIRECTORY"
_OWN = (_STATE, "RUNTIME_DIRECTORY", "CREDENTIALS_DIRECTORY")  # as systemd names them to the worker
_SHARED = ("work", "out", "steps")  # in the state folder
_KINDS = {
    stat.S_IFIFO: "it is a pipe",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
    stat.S_IFDIR: os.strerror(errno.EISDIR),
}


def read(path: str, most: int, named_at: Mark | None = None) -> str:
    """Return the text of a plain file of up to `most` bytes, without a byte order mark, with bare newlines for CRLF.

    Raises ConfigError: at `named_at` when the file cannot be read, at the very byte when it is not text.
    """
    try:
        data = _bytes(path, most)
    except OSError as exc:
        subject = f"{path!r} " if named_at else ""
        what = f"{subject}cannot be read: {exc.strerror}"
        raise ConfigError([Problem(named_at or Mark(path), what, _advice(exc, path, named_at))]) from None
    return _decode(path, data)


def _bytes(path: str, most: int) -> bytes:
    """Return what is in the file; a disk that fails is asked again for two seconds.  Raises OSError."""
    for _ in range(_TRIES - 1):
        try:
            return _at_once(path, most)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
        time.sleep(_PAUSE)
    return _at_once(path, most)


def _at_once(path: str, most: int) -> bytes:
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) and status.st_rdev != _NULL:
            raise OSError(errno.EINVAL, _KINDS.get(stat.S_IFMT(status.st_mode), "it is no plain file"), path)
        # What is in /proc has a length of 0, and a file may grow.
        data = b"" if status.st_size > most else file.read(most + 1)
        if status.st_size > most or len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than {most // MEGABYTE} MB", path)
        return data


def _open(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would be waited for without end
    if _leads_inside(path, fd):
        os.close(fd)
        raise OSError(errno.EACCES, "it is a link to one of the agent's own files", path)
    return fd


def _leads_inside(path: str, fd: int) -> bool:
    """Return whether a path that is not in the worker's own folders, in the unit, leads there.

    The file may be where a step can put a link in its place, and what is in it may become known to steps.
    """
    real = os.readlink(f"/proc/self/fd/{fd}")
    if real == path:
        return False
    for name in _OWN:
        for folder in filter(None, os.environ.get(name, "").split(":")):
            shared = name == _STATE and real.startswith(tuple(f"{folder}/{part}/" for part in _SHARED))
            if real.startswith(f"{folder}/") and not os.path.normpath(path).startswith(f"{folder}/") and not shared:
                return True
    return False


def beside_target(path: str, named_at: Mark | None) -> str:
    """Return the path that was meant if the list which names `path` is a link, and it is beside the list itself."""
    if named_at is None or not os.path.islink(named_at.file):
        return ""
    below = os.path.relpath(path, os.path.dirname(named_at.file))
    meant = os.path.normpath(os.path.join(os.path.dirname(os.path.realpath(named_at.file)), below))
    return meant if meant != path else ""


def link_hint(meant: str) -> str:
    """Return what to do about a path that is beside the list, where the list is called by a link."""
    return f"the list is a link, and its paths count from the folder of the link: write {meant}"


def _advice(exc: OSError, path: str, named_at: Mark | None) -> str:
    if isinstance(exc, FileNotFoundError):
        meant = beside_target(path, named_at)
        return link_hint(meant) if meant and os.path.exists(meant) else "check the name, or create it"
    if isinstance(exc, PermissionError):
        return f"make it readable for uid {os.geteuid()}, or use sudo"
    if isinstance(exc, IsADirectoryError) or exc.strerror == _KINDS[stat.S_IFDIR]:
        return "name a file in it"
    if exc.errno == errno.EFBIG:
        return "use a smaller one, or several"
    return "name a plain file" if exc.errno == errno.EINVAL else ""


def _decode(path: str, data: bytes) -> str:
    if data.startswith(_UTF16):
        raise _not_text(path, data, 0, "starts a UTF-16 text")
    nul = data.find(0)
    if nul >= 0:
        raise _not_text(path, data, nul, "is NUL, so this is not a UTF-8 text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _not_text(path, data, exc.start, "is not UTF-8") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _not_text(path: str, data: bytes, offset: int, why: str) -> ConfigError:
    before = data[:offset].decode("utf-8", "replace").removeprefix("\ufeff")
    where = Mark(path, before.count("\n") + 1, len(before) - before.rfind("\n"))
    return ConfigError([Problem(where, f"byte {offset} (0x{data[offset]:02x}) {why}", "save the file as UTF-8")])
