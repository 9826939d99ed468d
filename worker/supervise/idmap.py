"""Mounts whose owners are moved: mount(8) has them from util-linux 2.39 on, the kernel for overlayfs from 5.19 on.

What user 0 owns below an idmapped mount is owned by `first` as it is seen there (mount_setattr(2)).
"""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
# The same on each architecture (but for alpha).
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_IDMAP = 1, 0x00100000
_CLONE_NEWUSER, _CLONE_NEWNS = 0x10000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


class _Attributes(ctypes.Structure):
    """Struct mount_attr."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def check(base: str, first: int, count: int) -> None:
    """Return if a disk can be made of BASE with its owners moved.  Raises OSError.

    Tried in a mount namespace of a child's own, which leaves nothing.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _call("unshare", _CLONE_NEWNS)
            _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
            at = "/run"
            _mount("tmpfs", at, "tmpfs", 0, "mode=700")
            for part in ("base", "upper", "work", "root"):
                os.mkdir(f"{at}/{part}")
            bind(base, f"{at}/base", first, count)
            overlay(f"{at}/base", at, f"{at}/root")
            os._exit(0)
        except OSError as exc:
            os._exit(min(exc.errno or 1, 255))
        finally:
            os._exit(1)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number:
        raise OSError(number, os.strerror(number) if number > 0 else "no answer", base)


def bind(base: str, target: str, first: int, count: int) -> None:
    """Mount BASE, read-only, with its owners moved at TARGET.  Raises OSError."""
    users = _user_namespace(first, count)
    try:
        tree = _syscall(_OPEN_TREE, _AT_FDCWD, base, ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC))
        try:
            wanted = _Attributes(_MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, users)
            _syscall(
                _MOUNT_SETATTR, tree, "", ctypes.c_uint(_AT_EMPTY_PATH), ctypes.byref(wanted), ctypes.sizeof(wanted)
            )
            _syscall(_MOVE_MOUNT, tree, "", _AT_FDCWD, target, ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH))
        finally:
            os.close(tree)
    finally:
        os.close(users)


def overlay(lower: str, folder: str, target: str) -> None:
    """Mount an overlay of FOLDER/upper above `lower` at TARGET.  Raises OSError."""
    layers = {"lowerdir": lower, "upperdir": f"{folder}/upper", "workdir": f"{folder}/work"}
    _mount("overlay", target, "overlay", 0, ",".join(f"{name}={_escaped(path)}" for name, path in layers.items()))


def _escaped(path: str) -> str:
    return "".join(f"\\{char}" if char in "\\:," else char for char in path)


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [word.encode() for word in (source, target, kind)]
    if _LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _syscall(number: int, *arguments: object) -> int:
    words = [word.encode() if isinstance(word, str) else word for word in arguments]
    result: int = _LIBC.syscall(ctypes.c_long(number), *words)
    if result < 0:
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
    return result


def _user_namespace(first: int, count: int) -> int:
    """Return a descriptor of a user namespace in which user 0 is `first`."""
    heard, say = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        if _LIBC.unshare(_CLONE_NEWUSER) == 0:
            os.write(say, b"x")
            os.read(wait, 1)
        os._exit(0)
    os.close(say)
    os.close(wait)
    try:
        if not os.read(heard, 1):
            raise OSError(1, "no user namespace can be made")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {first} {count}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(go)
        os.close(heard)
        os.waitpid(pid, 0)
