"""Giving up root: what `agentctl` does in a folder of another user, it does with that user's rights and no others.

Steps are other people's programs, and the state folder is theirs to write.  So a command that root has called reads
what only root may read first, then gives root up for good, and only then looks at the folder: links, databases,
FIFOs and lies in it reach no further than their owner.
"""

import os
import stat


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
