"""Whole files: a reader finds the old bytes or the new ones, never a mix.

Temp file in the same folder, write, fsync, rename, fsync of the folder.  One writer at a time:
the caller holds the state folder's lock.  After a crash at most a hidden `.NAME.new` is left
behind; the next write of that name removes it.  A temp file is always made anew: a link that
somebody has put in its place is removed, never followed.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable
from typing import Any

from worker import points
from worker.errors import StateError

_EMPTY = ".empty"
_BYTES = "bytes:"  # no whole path begins like this


def as_text(path: str) -> str:
    """Return the whole `path` as UTF-8 text, which a database takes; `from_text` makes it a path again."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return _BYTES + os.fsencode(path).hex()
    return path


def from_text(text: str) -> str:
    """Return the path of which `as_text` has made this."""
    return os.fsdecode(bytes.fromhex(text.removeprefix(_BYTES))) if text.startswith(_BYTES) else text


def replace(path: str, chunks: Iterable[bytes], mode: int = 0o640) -> None:
    """Replace the file at `path` by the bytes of `chunks`, atomically and durably.

    When this returns, the new bytes survive SIGKILL and power loss.  If it raises OSError (a full
    disk, say), the old file is untouched and no temp file is left.  A symbolic link stays a link:
    the file it points to is replaced.  Raises StateError where a rename cannot work because the
    file itself is a mount point.
    """
    target = os.path.realpath(path)
    temp = _temp_name(target)
    try:
        _write(temp, chunks, mode)
        _rename(temp, target)
    except BaseException:
        _unlink(temp)
        raise
    points.at("file-renamed")
    sync_folder(os.path.dirname(target))  # without this a power cut can undo the rename


def prepare(path: str, chunks: Iterable[bytes], mode: int = 0o640) -> None:
    """Write what is to take the place of the file at `path` to `prepared(path)`, durably.

    For a process that does not hold the folder's lock: whoever does looks at it, and calls `place`.  If another one
    is still at it, that one's file has no name any more.  Raises OSError with no file left.
    """
    temp = prepared(path)
    _unlink(temp)
    try:
        _write(temp, chunks, mode)
    except BaseException:
        _unlink(temp)
        raise


def prepared(path: str) -> str:
    """Return where that lies."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.next")


def place(path: str) -> None:
    """Let what was prepared take the place of the file at `path`, as in `replace`."""
    target = os.path.realpath(path)
    _rename(prepared(path), target)
    points.at("file-renamed")
    sync_folder(os.path.dirname(target))


def publish(path: str, data: bytes, mode: int = 0o640) -> None:
    """Replace the file at `path` so that no reader sees a part of it, without waiting for the disk.

    For files that can be made again from the ledger: after a power cut the file may be missing,
    old or cut short.  Raises OSError, leaving the old file and no temp file.
    """
    if not data and publish_empty(path):
        return
    temp = _temp_name(path)
    try:
        fd = make(temp, mode)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
        os.rename(temp, path)
    except BaseException:
        _unlink(temp)
        raise


def publish_empty(path: str) -> bool:
    """Let `path` be one more name of the folder's empty file; return False if it is taken, or names cannot be shared.

    Most steps print nothing, and some file systems need a millisecond for a new file, but not for a new name.
    """
    empty = os.path.join(os.path.dirname(path), _EMPTY)
    for _ in range(2):
        try:
            os.link(empty, path)
            if not os.stat(path).st_size:
                return True
            os.unlink(path)  # somebody has written to it, whatever its mode
        except FileNotFoundError:
            pass
        except OSError as exc:
            if exc.errno != errno.EMLINK:
                return False
        if not _renew_empty(empty):
            break
    return False


def adopt(source: str, path: str) -> None:
    """Give the finished file `source`, in the same file system, the name `path`; both are durable after.

    Raises OSError with `source` still there when it could not be made durable.
    """
    fd = open_plain(source)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    points.at("output-synced")
    os.rename(source, path)
    points.at("output-renamed")
    sync_folder(os.path.dirname(path))


def move(source: str, target: str) -> None:
    """Rename a file or folder.  The same call finishes what a crash has cut off.

    A folder of an image, below an overlay, cannot be renamed: what is in it is moved, and then it is removed.
    """
    try:
        os.rename(source, target)
    except OSError as exc:
        if exc.errno != errno.EXDEV or os.path.islink(source) or not os.path.isdir(source):
            raise
        os.makedirs(target, mode=os.stat(source).st_mode & 0o777, exist_ok=True)
        for name in os.listdir(source):
            move(f"{source}/{name}", f"{target}/{name}")
        sync_folder(target)
        os.rmdir(source)


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write every byte of `data` to `fd`, or raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: str) -> None:
    """Make the names in `folder` durable (fsync(2): a file's own fsync does not cover its name)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_NAME_MAX = 255  # bytes; of a file in a folder, as most file systems have it


def is_plain_name(text: str) -> bool:
    """Return whether `text`, which may come from anywhere, names a file in a folder: no path, and no hidden file."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= _NAME_MAX and not text.startswith(".") and "/" not in text and "\0" not in text


def read(path: str, most: int = sys.maxsize) -> bytes:
    """Return the bytes of the plain file at `path`.  Raises OSError, also for one of more than `most` bytes."""
    with open(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", path)
        return file.read()


_SMALL = 1 << 20  # bytes; what the worker keeps in a file of JSON is far below


def read_json(path: str) -> Any:
    """Return what a small file of JSON holds.  Raises OSError or ValueError."""
    import json

    try:
        return json.loads(read(path, _SMALL))
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def _renew_empty(path: str) -> bool:
    """Make another empty file; the names of the one before stay what they are."""
    _unlink(path)
    try:
        # Whoever writes to one of its names writes to all of them.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o440))
    except OSError:
        return False
    return True


def make(path: str, mode: int, access: int = os.O_WRONLY) -> int:
    """Return a descriptor of a new file at `path`, in place of whatever had that name.  Raises OSError."""
    flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


def clear_the_way(path: str) -> None:
    """Let nothing but a plain file, or a link, be at `path`: a FIFO that a step has put there would be waited for.

    Raises OSError.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode):
        os.unlink(path)


def open_plain(path: str) -> int:
    """Return a descriptor to read the plain file at `path`; never waits for anybody.

    Raises OSError, also for what is no plain file: a FIFO, a device, a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no plain file", path)
    return fd


def _write(path: str, chunks: Iterable[bytes], mode: int) -> None:
    fd = make(path, mode)
    try:
        for chunk in chunks:
            write_all(fd, chunk)
        points.at("file-written")
        os.fsync(fd)
    finally:
        os.close(fd)
    points.at("file-synced")


def _temp_name(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.new")


def _rename(temp: str, target: str) -> None:
    try:
        os.rename(temp, target)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        raise StateError(
            f"{target}: cannot be replaced, it is a mount point by itself; "
            f"mount the folder {os.path.dirname(target)} instead of the single file"
        ) from exc


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # never made, or the file system is read-only: nothing to tidy
        os.unlink(path)


def shown_size(size: int) -> str:
    """Return a number of bytes as a list may have it: 16G, 1500K, 1000."""
    power = 0
    while power < 4 and size and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{size}{' KMGT'[power]}".rstrip()
