"""Programs of providers/nspawn.yaml: a container's folder, its disk, its users.  Run as root, outside of any sandbox.

STORE/NAME/upper, work   what the container has written, and overlayfs' own folder
STORE/NAME/base, root    where BASE, with its owners moved, and the container's disk are mounted
STORE/NAME/users         the first of the container's users here, of 65,536; "host": its users are this machine's

A container of an earlier version has neither `base` nor `users`; it goes on with this machine's users.
"""

import contextlib
import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable

from worker.supervise import idmap

_CLOSED = 0o700
_COUNT = 65536
# The users that systemd has for containers (systemd-nspawn(1), --private-users=pick).
_FIRST, _LAST = 0x80000, 0x6FFF0000
_HOST, _OWN = "host", "own"
_USERS = ("auto", _OWN, _HOST)
# Options of systemd-nspawn that decide about owners by themselves.
_OWN_USERS = ("--private-users", "-U")
_BINDS = ("--bind=", "--bind-ro=", "--overlay=", "--overlay-ro=")
_MAPPED = ("idmap", "rootidmap", "owneridmap", "noidmap")
# What a container of this machine's own files (BASE: /) does not see of them.  It begins with empty folders, and has
# no file, of these names.
_EMPTY = ("root", "home", "etc/agent", "var/log/journal")
_ABSENT = (
    "etc/shadow", "etc/shadow-", "etc/gshadow", "etc/gshadow-", "etc/ssl/private", "etc/credstore",
    "etc/credstore.encrypted", "etc/wireguard", "etc/NetworkManager/system-connections", "etc/krb5.keytab",
    "var/lib/agent", "var/lib/agent-supervise", "var/lib/agent-supervisor", "var/lib/machines", "var/lib/private",
    "var/lib/docker", "var/lib/containers", "var/lib/systemd/credential.secret", "var/spool/cron",
)  # fmt: skip
_HOST_KEYS = "etc/ssh"
_OF_DISK = "lost+found"  # where STORE is a file system of its own
_OPAQUE = "trusted.overlay.opaque"


class Refused(Exception):
    """Nothing was done, for this reason."""


def main(argv: list[str]) -> None:
    command, *words = argv
    known: dict[str, Callable[..., None]] = {"close": close, "make": make, "mount": mount, "disable": disable}
    try:
        known[command](*words)
    except Refused as exc:
        sys.exit(str(exc))
    except OSError as exc:
        sys.exit(f"{exc.filename or command}: {exc.strerror}")


def close(store: str) -> None:
    """Let nobody but root into STORE, nor into a container's folder: it holds set-user-id files of strangers.

    Raises Refused where STORE holds anything else: then it is not ours to close.
    """
    for name in os.listdir(store):
        if _is_container(f"{store}/{name}"):
            os.chmod(f"{store}/{name}", _CLOSED)
    found = os.stat(store)
    if found.st_uid != os.geteuid():
        raise Refused(f"STORE: '{store}' is another user's; close it: chown root:root {store} && chmod 0700 {store}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        others = (name for name in sorted(os.listdir(store)) if name != _OF_DISK)
        strange = next((name for name in others if not _is_container(f"{store}/{name}")), None)
        if strange is not None:
            what = f"STORE: others may enter '{store}', which holds more than containers ('{strange}')"
            raise Refused(f"{what}; close it: chmod 0700 {store}, or name a folder of its own")
        os.chmod(store, _CLOSED)


def _is_container(folder: str) -> bool:
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and all(os.path.isdir(f"{folder}/{part}") for part in ("upper", "work", "root"))


def make(store: str, name: str, base: str, users: str, options: str) -> None:
    """Make a container's folder, whole or not at all; one that is there stays as it is."""
    if users not in _USERS:
        raise Refused(f"USERS: '{users}' is none of {', '.join(_USERS)}")
    os.makedirs(os.path.dirname(store) or "/", exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(store, _CLOSED)
    held = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_EX)  # until this process ends: one that a dead supervisor began may be at work
    new = f"{store}/.{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    close(store)
    if os.path.isdir(f"{store}/{name}"):
        return
    os.mkdir(new, _CLOSED)
    for part in ("upper", "work", "base", "root"):
        os.mkdir(f"{new}/{part}", 0o755)
        os.chmod(f"{new}/{part}", 0o755)  # the folder is its /: everybody there must see it
    first = _first_user(store, base, users, options, name)
    upper = f"{new}/upper"
    _cover(base, upper, "var/lib/agent")
    if os.path.realpath(base) == "/":
        _hide(base, upper, store)
    _put(base, upper, "etc/hostname", f"{name}\n", 0o644)
    _put(base, upper, "etc/machine-id", f"{os.urandom(16).hex()}\n", 0o444)
    _put(base, new, "users", f"{first}\n", 0o600)
    if first != _HOST:
        _move_owners(upper, int(first))
    os.sync()
    os.rename(new, f"{store}/{name}")


def _first_user(store: str, base: str, users: str, options: str, name: str) -> str:
    """Return what `users` is to say; a word on standard error where the container has no users of its own."""
    if users == _HOST or any(word.startswith(_OWN_USERS) for word in options.split()):
        return _HOST
    fault = _unmapped(options)
    first = _free(store, name)
    if not fault:
        try:
            idmap.check(base, first, _COUNT)
        except OSError as exc:
            fault = f"BASE: the owners of '{base}' cannot be moved ({exc.strerror})"
    if not fault:
        return str(first)
    if users == _OWN:
        raise Refused(f"{fault}; write USERS: host to go on with this machine's users")
    print(f"warning: {fault}: the container's users are this machine's, and it is no boundary", file=sys.stderr)
    return _HOST


def _unmapped(options: str) -> str:
    """Return why OPTIONS wants this machine's users: a folder whose owners would be nobody there; or ""."""
    for word in options.split():
        if word.startswith(_BINDS) and not set(word.split(":")[-1].split(",")) & set(_MAPPED):
            what = f"OPTIONS: '{word}' does not say whose its files are"
            return f"{what} (--bind=/srv/data:/srv/data:idmap does)" if word.startswith("--bind") else what
    return ""


def _free(store: str, name: str) -> int:
    """Return the first of 65,536 users that neither this machine nor another container has."""
    taken = set()
    for other in os.listdir(store):
        with contextlib.suppress(OSError, ValueError), open(f"{store}/{other}/users") as file:
            taken.add(int(file.read(20)))
    ranges = _subordinate()
    places = (_LAST - _FIRST) // _COUNT + 1
    begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    for step in range(places):
        first = _FIRST + (begin + step) % places * _COUNT
        if first not in taken and not _is_user(first) and not any(a < first + _COUNT and first < b for a, b in ranges):
            return first
    raise Refused("no users are left for a container")


def _subordinate() -> list[tuple[int, int]]:
    """Return the ranges that /etc/subuid and /etc/subgid give away."""
    ranges = []
    for path in ("/etc/subuid", "/etc/subgid"):
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                words = line.strip().split(":")
                if len(words) == 3 and words[1].isdecimal() and words[2].isdecimal():
                    ranges.append((int(words[1]), int(words[1]) + int(words[2])))
    return ranges


def _is_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _folder(base: str, upper: str, inside: str) -> str:
    """Return the folder `inside` of upper, made, and its parents, as BASE has them."""
    made = upper
    at = base
    for part in [part for part in inside.split("/") if part]:
        made, at = f"{made}/{part}", f"{at}/{part}"
        if not os.path.isdir(made):
            os.mkdir(made)
            mode, owner, group = 0o755, 0, 0
            with contextlib.suppress(OSError):
                found = os.stat(at)
                mode, owner, group = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
            os.chown(made, owner, group)
            os.chmod(made, mode)
    return made


def _put(base: str, upper: str, inside: str, text: str, mode: int) -> None:
    path = f"{_folder(base, upper, os.path.dirname(inside))}/{os.path.basename(inside)}"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


def _cover(base: str, upper: str, inside: str) -> None:
    """Let there be nothing of this name: 0:0 is how an overlay says so."""
    path = f"{_folder(base, upper, os.path.dirname(inside))}/{os.path.basename(inside)}"
    if not os.path.lexists(path):
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def _hide(base: str, upper: str, store: str) -> None:
    """Hide what is secret on this machine; whose links lead elsewhere, what they lead to."""
    keys = [f"{_HOST_KEYS}/{name}" for name in _names(f"{base}/{_HOST_KEYS}") if name.endswith("_key")]
    for inside in (*_ABSENT, *keys, store.strip("/")):
        if os.path.lexists(f"{base}/{inside}"):
            for path in {inside, os.path.realpath(f"{base}/{inside}").strip("/")} - {""}:
                _cover(base, upper, path)
    for inside in _EMPTY:
        for path in {inside, os.path.realpath(f"{base}/{inside}").strip("/")} - {""}:
            if os.path.isdir(f"{base}/{path}") and not os.path.islink(f"{base}/{path}"):
                os.setxattr(_folder(base, upper, path), _OPAQUE, b"y")
    # Each user is there, and none has a password: without its line nobody becomes one (runuser, pam_unix).
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{upper}/etc/shadow")
    with open(f"{base}/etc/passwd") as file:
        names = [line.split(":")[0] for line in file if ":" in line]
    _put(base, upper, "etc/shadow", "".join(f"{name}:*:19000:0:99999:7:::\n" for name in names), 0o600)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _move_owners(upper: str, first: int) -> None:
    for folder, folders, names in os.walk(upper):
        for path in (folder if folder == upper else "", *(f"{folder}/{name}" for name in (*folders, *names))):
            if path:
                found = os.lstat(path)
                mode = stat.S_IMODE(found.st_mode)
                os.lchown(path, first + found.st_uid, first + found.st_gid)
                if not stat.S_ISLNK(found.st_mode):
                    os.chmod(path, mode)  # chown takes set-user-id and set-group-id


def mount(folder: str, base: str) -> None:
    """Mount a container's disk at FOLDER/root, in this mount namespace; print what systemd-nspawn is told of users."""
    try:
        with open(f"{folder}/users") as file:
            first = file.read(20).strip()
    except FileNotFoundError:
        first = _HOST
    os.chmod(folder, _CLOSED)
    if first == _HOST:
        idmap.overlay(base, folder, f"{folder}/root")
        return
    if not first.isdecimal():
        raise Refused(f"{folder}/users: does not say which users it has")
    idmap.bind(base, f"{folder}/base", int(first), _COUNT)
    idmap.overlay(f"{folder}/base", folder, f"{folder}/root")
    print(f"--private-users={int(first)}:{_COUNT} --private-users-ownership=off")


def disable(folder: str) -> None:
    """Let the agent of a container that is down not start with it: no link that it has made is followed."""
    path = ("upper", "etc", "systemd", "system", "multi-user.target.wants")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(folder, flags)
    try:
        for part in path:
            below = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = below
        os.unlink("agent.service", dir_fd=at)
    except OSError:
        return  # there is no such file, or none that a boot would find
    finally:
        os.close(at)
