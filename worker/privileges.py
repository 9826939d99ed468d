"""Giving up root: what `agentctl` does in a folder of another user, it does with that user's rights and no others.

Steps are other people's programs, and the state folder is theirs to write.  So a command that root has called reads
what only root may read first, then gives root up for good, and only then looks at the folder: links, databases,
FIFOs and lies in it reach no further than their owner.
"""

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Iterator

from worker.errors import StateError


def owner(path: str) -> tuple[int, int] | None:
    """Return the user and group in whose hands the file or folder at `path` is; None where only root decides.

    That is the first user other than root who owns an entry on the way to it, links included: whoever owns a folder
    above may put anything else in the place of `path` between two looks.  What does not exist is its folder's.
    Raises OSError.
    """
    return _owner(os.path.abspath(path), links=0)


_LINKS_MAX = 40  # path_resolution(7)


def _owner(path: str, links: int) -> tuple[int, int] | None:
    place = "/"
    names = [name for name in path.split("/") if name]
    for index, name in enumerate(names):
        place = os.path.join(place, name)
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            return None
        if found.st_uid != 0:
            return found.st_uid, found.st_gid
        if stat.S_ISLNK(found.st_mode):
            if links == _LINKS_MAX:
                raise OSError(f"{path}: too many symbolic links")
            target = os.path.join(os.path.dirname(place), os.readlink(place))
            return _owner(os.path.join(target, *names[index + 1 :]), links + 1)
    return None


def give_up(path: str) -> None:
    """From now on, and for good, be the owner of `path` where that is somebody else than root, who we are.

    Groups beside the owner's own are given up as well.  Raises OSError.
    """
    if os.geteuid() != 0:
        return
    found = owner(path)
    if found is None:
        return
    user, group = found
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


@contextlib.contextmanager
def of_owner(path: str) -> Iterator[None]:
    """Within the block have the rights of the owner of `path`, where that is somebody else than root, who we are.

    For what root asks for by its name in a folder that another one may write: what a link there leads to is opened
    only if its owner may open it.  Raises OSError.
    """
    found = owner(path) if os.geteuid() == 0 else None
    if found is None:
        yield
        return
    before, mine = os.getgroups(), os.getegid()
    user, group = found
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(mine)
        os.setgroups(before)


def refuse_to_work(root: str, command: str) -> None:
    """Let root not work in a state folder of another user's, who decides what is in the way of what root writes.

    `command`: the words behind agentctl with which that user would.  Raises StateError with two ways out.
    """
    if os.geteuid() != 0:
        return
    try:
        user = os.stat(root).st_uid
    except OSError:
        return  # there is none yet, or it says itself what is wrong with it
    if user == 0:
        return
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"'#{user}'"
    what = f"{root}: belongs to {name}, and root does not work in a folder that another user may write"
    place = shlex.quote(root)
    hint = f"be that user: sudo -u {name} agentctl {command} --state {place}; or make it root's: chown -R root: {place}"
    raise StateError(what, hint)
