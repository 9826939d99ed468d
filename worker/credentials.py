"""The credentials of a step: copies in memory of those that its task names, for as long as its attempt lasts.

They are below the unit's runtime folder, which is a tmpfs; in the foreground below $XDG_RUNTIME_DIR or /dev/shm.  No
secret is written to a disk: where there is no such folder, links stand for the copies.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Mapping, Sequence

from worker import deeptree
from worker.folder import Places

_IN_UNIT = "/run/"  # where systemd makes runtime folders
_FOLDER = "credentials."
_CHUNK = 1 << 20


class Vault:
    """Where the copies are."""

    def __init__(self, places: Places, environ: Mapping[str, str]) -> None:
        self._source = places.secrets or ""
        memory: str | None = places.runtime
        if self._source and not places.runtime.startswith(_IN_UNIT):
            memory = _memory(places.root, environ)
        self._linked = memory is None
        self._base = memory or places.runtime
        self._shared = self._base == places.runtime

    def folder(self, slot: int) -> str:
        """Return the folder in which the step in a slot, and no other, finds its own."""
        return f"{self._base}/given.{slot}"

    def lay_out(self, slot: int, names: Sequence[str]) -> str | None:
        """Return a new folder that holds just these, None for none.  Raises OSError."""
        if not names:
            return None
        self.clear(slot)  # whatever a step, or a worker that died, has left there
        folder = f"{self.folder(slot)}/{_FOLDER}{os.urandom(16).hex()}"
        os.makedirs(folder, mode=0o700)
        for name in names:
            source = os.path.join(self._source, name)
            if not os.path.exists(source):
                raise FileNotFoundError(errno.ENOENT, "the unit has no such credential", name)
            if self._linked:
                os.symlink(source, f"{folder}/{name}")
            else:
                _copy(source, f"{folder}/{name}")
        os.chmod(folder, 0o500)
        return folder

    def clear(self, slot: int) -> None:
        """Remove what the last attempt in a slot was given."""
        folder = self.folder(slot)
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(_FOLDER):
                    deeptree.remove(f"{folder}/{name}")

    def clear_others(self, slots: Collection[int]) -> None:
        """Remove what a worker that died has left for the steps in all other slots.  Raises OSError."""
        for name in os.listdir(self._base):
            kind, _, number = name.partition(".")
            if not number.isdecimal() or int(number) in slots:
                continue
            if kind == "given":
                self.clear(int(number))
            elif kind == "credentials":  # links of an earlier version's
                deeptree.remove(f"{self._base}/{name}")

    def close(self, slot: int) -> None:
        """Remove the folder of a slot."""
        self.clear(slot)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder(slot))
            if not self._shared:
                os.rmdir(self._base)  # by the last one


def _memory(root: str, environ: Mapping[str, str]) -> str | None:
    """Return a folder in memory that is this user's alone, each time the same; None if there is none."""
    import hashlib  # in the foreground alone

    digest = hashlib.blake2b(f"{os.geteuid()} {root}".encode(errors="surrogateescape"), digest_size=8).hexdigest()
    for base in (environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if not base.startswith("/"):
            continue
        path = f"{base}/agent-{digest}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return path
    return None


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
        with open(fd, "wb") as copy:
            while data := file.read(_CHUNK):
                copy.write(data)
