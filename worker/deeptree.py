"""Emptying a folder that somebody else has filled: as deep, as wide and as closed as it may be.

Neither the language's recursion nor the longest path that the kernel takes is a limit, and no link is followed.
"""

import itertools
import math
import os
import time

_AT_A_TIME = 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty(path: str, until: float = math.inf, folders_only: bool = False) -> bool:
    """Remove what is in a folder, until a time (monotonic clock); return whether nothing of it is left.

    It ends at the first that cannot be removed.  `folders_only`: what else is there goes with its folder (cgroups).
    """
    try:
        at = os.open(path, _FOLDER)
    except OSError:
        return not os.path.lexists(path)
    names: list[str] = []  # how we came from `path` to `at`
    try:
        while time.monotonic() < until:
            below = _first_that_stays(at, until, folders_only)
            if below is None and not names:
                return True
            if below is None:
                name = names.pop()
                at = _into(at, "..")
                os.rmdir(name, dir_fd=at)
            else:
                at = _into(at, below)
                names.append(below)
    except OSError:
        pass
    finally:
        os.close(at)
    return False


def remove(path: str) -> None:
    """Remove a folder and all that is in it, or whatever is in its place, as far as that can be."""
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
        empty(path)
        os.rmdir(path)
    except OSError:
        pass


def _into(at: int, name: str) -> int:
    """Return a descriptor of that folder, in place of `at`."""
    try:
        there = os.open(name, _FOLDER, dir_fd=at)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=at)
        there = os.open(name, _FOLDER, dir_fd=at)
    os.close(at)
    return there


def _first_that_stays(at: int, until: float, folders_only: bool) -> str | None:
    """Remove what is in a folder; return the name of the first folder that is not empty, None if there is none.

    Raises OSError for what cannot be removed, and TimeoutError.
    """
    while True:
        with os.scandir(at) as entries:
            some = (entry for entry in entries if not folders_only or entry.is_dir(follow_symlinks=False))
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in itertools.islice(some, _AT_A_TIME)]
        for name, is_folder in found:
            if time.monotonic() >= until:
                raise TimeoutError
            if not is_folder:
                os.unlink(name, dir_fd=at)
                continue
            try:
                os.rmdir(name, dir_fd=at)
            except OSError:
                return name
        if not found:
            return None
