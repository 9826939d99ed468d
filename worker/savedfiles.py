"""What a step keeps in its own folder, and whether it has saved something there since a look before.

Other bytes under a name are something saved.  A file that has only grown where it was is a log, and the same bytes
once more are nothing new.
"""

import hashlib
import os
import stat

# So much of a file is looked at; of a larger one its size and time decide.
_LOOK = 64 * 1024
# So many files are looked at; a step that keeps more is not asked which of them it has saved.
_MOST = 256
_FEW = 16

Seen = dict[str, list[int | str]]  # by name: inode, size, time (ns), digest of the beginning


def look(folder: str) -> Seen:
    """Return what is in the folder; nothing if it cannot be read."""
    seen: Seen = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(seen) >= _MOST:
                    break
                status = entry.stat(follow_symlinks=False)
                digest = _digest(entry.path, status.st_size) if stat.S_ISREG(status.st_mode) else ""
                seen[entry.name] = [status.st_ino, status.st_size, status.st_mtime_ns, digest]
    except OSError:
        return {}
    return seen


def changed(folder: str, before: Seen) -> bool:
    """Return whether something was saved in the folder since `look` returned `before`."""
    try:
        with os.scandir(folder) as entries:
            return any(_differs(entry, before.get(entry.name)) for entry in entries)
    except OSError:
        return False


def memo(seen: Seen | None) -> Seen | None:
    """Return what `resume` needs, if that is little enough to be written again and again."""
    return seen if seen is not None and len(seen) <= _FEW else None


def resume(memo: object) -> Seen | None:
    """Return what a look at an earlier time has seen, None if nobody knows; that of an older worker was a text."""
    if isinstance(memo, dict):
        return memo
    return {} if memo == "" else None


def _differs(entry: "os.DirEntry[str]", known: list[int | str] | None) -> bool:
    if known is None:
        return True
    inode, size, time, digest = known
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or not digest:
        return bool(status.st_mtime_ns != time)
    assert isinstance(size, int)
    if status.st_size < size or _digest(entry.path, size) != digest:
        return True
    if status.st_size > size:
        return bool(status.st_ino != inode)
    return size > _LOOK and status.st_mtime_ns != time


def _digest(path: str, size: int) -> str:
    """Return a digest of the beginning of a file that has, or had, this size; none can be read: of nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "?"
    try:
        return hashlib.blake2b(os.pread(fd, min(size, _LOOK), 0), digest_size=8).hexdigest()
    except OSError:
        return "?"
    finally:
        os.close(fd)
