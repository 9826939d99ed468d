"""The folders of a git checkout: what a program in one of them has to write (gitrepository-layout(5)).

Their files may be a step's, so what they say is believed only where the repository says the same of the checkout.
"""

import contextlib
import os

from worker import distant

_MAX = 64 * 1024


def of(folder: str) -> tuple[str, ...]:
    """Return the top of the checkout around `folder`, and its repository where that lies elsewhere; else nothing."""
    while True:
        mark = f"{folder.rstrip('/')}/.git"
        if os.path.lexists(mark):
            break
        if folder in ("/", ""):
            return ()
        folder = os.path.dirname(folder)
    if os.path.islink(mark):
        return ()
    if os.path.isdir(mark):
        return (folder,)
    repository = _repository(folder, mark)
    return (folder,) if repository is None else (folder, repository)


def _repository(top: str, mark: str) -> str | None:
    """Return where a worktree's, or a submodule's, repository is; None unless that names this checkout as its own."""
    word, _, path = _read(mark).partition(": ")
    if word != "gitdir" or not path:
        return None
    path = os.path.join(top, path)
    if not distant.answers(path):
        return None
    found = os.path.realpath(path)
    common, kind = os.path.split(os.path.dirname(found))
    if kind == "worktrees":
        back = _read(f"{found}/gitdir")
        same = os.path.realpath(os.path.join(found, back)) == os.path.realpath(mark)
        return common if back and same else None
    for line in _read(f"{found}/config").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "worktree" and os.path.realpath(os.path.join(found, value.strip())) == os.path.realpath(top):
            return found
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="utf-8") as file:
            return file.read(_MAX).strip()
    return ""
