"""The process that keeps one throw-away machine, and leaves nothing of it when it ends.

It runs in a mount namespace of its own, so what it mounts is never seen by the host and goes
when it goes.  Its stdin is a pipe from the maker (see machine.py): "boot" there boots again a
machine that is off; the end of the pipe, which comes also when the maker is killed, ends the
machine and removes its cgroup.  Its stdout tells what happens, one JSON object a line.  Only a
SIGKILL of this very process leaves something behind: a machine that runs on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "/"  # the base that is the host's own root
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REBOOT_STATUS = 133  # nspawn's exit status after `systemctl reboot`, because of --keep-unit
TOOLS = {"systemd-nspawn": "systemd-container", "nsenter": "util-linux", "runuser": "util-linux"}
CAP_SYS_ADMIN = 1 << 21
# Mounts below these are nspawn's to make, or none of a machine's business.
NOT_SHOWN = ("/proc", "/sys", "/dev", "/run", "/tmp", "/boot", "/efi", "/mnt", "/media", "/home", "/root",
             "/var/tmp", "/var/lib/docker", "/var/lib/containers")  # fmt: skip
JOURNALD = "[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nReadKMsg=no\nAudit=no\nSystemKeepFree=1M\n"


@dataclass(frozen=True)
class Spec:
    """What the supervisor has to know."""

    name: str
    base: str
    layers: list[str]  # the topmost last
    upper: str | None
    size: str
    binds: list[str]
    network: bool
    sync: bool


def supervise(spec: Spec) -> None:
    """Keep the machine until the maker closes our stdin; then nothing of it is left."""
    run = Path(tempfile.mkdtemp(prefix=f"{spec.name}-", dir="/run"))
    cgroup = _make_cgroup(spec.name)
    try:
        # All we make is below this one mount, so that its end is the end of everything.
        _call("mount", "-t", "tmpfs", "-o", f"mode=755,size={spec.size}", spec.name, str(run))
        os.makedirs("/run/systemd/nspawn", exist_ok=True)
        _call("mount", "-t", "tmpfs", spec.name, "/run/systemd/nspawn")  # its locks are not for the host
        _build_root(spec, run)
        _tell(cgroup=str(cgroup))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(run / "notify"))
            while _boot(spec, run, cgroup, notify):
                pass
    finally:
        _remove_cgroup(cgroup)
        if cgroup.parent.name == spec.name:
            cgroup.parent.rmdir()
        for top in _cgroup1():
            _remove_folders(top / spec.name)
        _call("umount", "-l", str(run))
        run.rmdir()


def _tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def _call(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _boot(spec: Spec, run: Path, cgroup: Path, notify: socket.socket) -> bool:
    """Boot, stay until the machine is down, and return whether it is to boot again."""
    _remove_cgroup(cgroup)  # the last boot's hands down controllers: no process may be put there
    cgroup.mkdir()
    proc = subprocess.Popen(
        ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup), *_nspawn(spec, run)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={
            "PATH": PATH,
            "NOTIFY_SOCKET": str(run / "notify"),
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        },
    )
    leader: int | None = None
    ended = os.pidfd_open(proc.pid)
    with selectors.DefaultSelector() as selector, os.fdopen(ended):
        for fd in (ended, 0, notify):
            selector.register(fd, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _mask in selector.select()]
            if notify in ready:
                leader = _pass_on(notify.recv(65536).decode()) or leader
            if 0 in ready:  # nobody writes while the machine is up: the maker has hung up
                _end(proc, leader, cgroup)
                return False
            if ended in ready:
                break
    again = proc.wait() == REBOOT_STATUS
    _tell(off=not again)
    return again or sys.stdin.readline() == "boot\n"


def _pass_on(message: str) -> int | None:
    """Tell the maker what nspawn told us; return the leader, if it was named."""
    leader = None
    for line in message.splitlines():
        key, _, value = line.partition("=")
        if key == "X_NSPAWN_LEADER_PID":
            leader = int(value)
            _tell(leader=leader)
        elif line == "READY=1":
            _tell(ready=True)
    return leader


def _end(proc: subprocess.Popen[bytes], leader: int | None, cgroup: Path) -> None:
    """End the machine at once; nspawn ends by itself, when it has reaped the machine's PID 1."""
    (cgroup / "cgroup.freeze").write_text("0")
    if leader is None:
        proc.terminate()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the cgroup's end is its end, too
        proc.wait(timeout=5)


def _nspawn(spec: Spec, run: Path) -> list[str]:
    argv = ["setpriv", "--pdeathsig=KILL", "--", "systemd-nspawn", "--quiet", "--boot"]
    argv += [f"--directory={run}/root", f"--machine={spec.name}", "--settings=no", "--register=no"]
    argv += ["--keep-unit", "--console=pipe", "--notify-ready=yes", "--link-journal=no"]
    argv += ["--resolv-conf=off", "--timezone=off", "--oom-score-adj=0"]
    # Its own list is from before Landlock; a virtual machine has no such filter.
    argv.append("--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self")
    argv += [] if spec.network else ["--private-network"]
    argv += [] if spec.sync else ["--suppress-sync=yes"]
    for bind in spec.binds:
        argv.append(f"--bind-ro={bind[:-3]}" if bind.endswith(":ro") else f"--bind={bind}")
    # What follows is the kernel command line, as far as systemd inside can tell.
    argv += ["--", "systemd.unit=multi-user.target", "systemd.firstboot=no"]
    return [*argv, "systemd.condition-needs-update=no", "systemd.log_color=no"]


def _make_cgroup(name: str) -> Path:
    """Return the path for the machine's cgroup, below one that hands down all controllers it has."""
    top = cgroup2()
    assert top is not None
    if Path("/run/systemd/system").is_dir():
        # systemd-run put us into a scope that is ours to divide; only its leaves may hold processes.
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        parent = Path(f"{top}{next(line[3:] for line in lines if line.startswith('0::'))}")
        (parent / "supervisor").mkdir()
        (parent / "supervisor/cgroup.procs").write_text("0")
    else:
        _hand_down(top)
        parent = top / name
        parent.mkdir()
    _hand_down(parent)
    return parent / "machine"


def _hand_down(cgroup: Path) -> None:
    for controller in (cgroup / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # one that a cgroup v1 hierarchy holds, for example
            (cgroup / "cgroup.subtree_control").write_text(f"+{controller}")


def _remove_cgroup(cgroup: Path) -> None:
    """Kill every process in the cgroup, frozen or not, and remove it."""
    if not cgroup.exists():
        return
    (cgroup / "cgroup.kill").write_text("1")
    _await_event(cgroup, "populated 0")
    _remove_folders(cgroup)


def _remove_folders(cgroup: Path) -> None:
    for folder, _folders, _files in os.walk(cgroup, topdown=False):
        os.rmdir(folder)


def network_variables() -> dict[str, str]:
    """Return what this process was told about proxies and pip's indexes."""
    return {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy") or k.startswith("PIP_")}


# -- the machine's root


def _build_root(spec: Spec, run: Path) -> None:
    """Mount the machine's file systems at RUN/root; nothing of the host's can be changed through them."""
    store = Path(spec.upper or run / "store")
    new = not (store / "root").exists()
    root = run / "root"
    root.mkdir()
    for at in ["/", *(_system_mounts() if spec.base == HOST else [])]:
        key = at.strip("/").replace("/", "-") or "root"
        upper, work = store / key / "upper", store / key / "work"
        for folder in (upper, work):
            folder.mkdir(parents=True, exist_ok=True)
        upper.chmod(0o755)
        if at == "/" and new and spec.base == HOST and not spec.layers:
            _hide_homes(upper)
        lower = _lower_layers(spec, run, key, os.path.join(spec.base, at.lstrip("/")))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        _call("mount", "-t", "overlay", "-o", options, spec.name, f"{root}{at}")
    if new:
        _make_it_new(root, spec.name)
        if spec.base == HOST and not spec.layers:
            _disable_services(root)
    if spec.network:
        _copy_network_settings(root, spec.base)


def _hide_homes(upper: Path) -> None:
    """Make the homes empty folders of this layer: instant, and they keep what the machine puts there."""
    for name, mode in (("home", 0o755), ("root", 0o700)):
        folder = upper / name
        folder.mkdir()
        folder.chmod(mode)
        os.setxattr(folder, "trusted.overlay.opaque", b"y")


def _lower_layers(spec: Spec, run: Path, key: str, lowest: str) -> str:
    """Return the value for overlayfs' lowerdir=, the topmost first."""
    layers = [Path(layer, key, "upper") for layer in reversed(spec.layers)]
    layers = [layer for layer in layers if layer.is_dir()]
    if not layers or spec.base != HOST:
        return ":".join([*map(str, layers), lowest])
    # A layer kept on the host's disk lies below `/`, and overlayfs refuses a layer inside another.
    aside = run / "aside" / key
    if any(at == "/" and kind == "overlay" for at, kind, _source in _mounts()):
        # Here `/` is an overlay itself, and two are the most that may be stacked: use copies.
        aside.mkdir(parents=True)
        copies = [str(aside / str(number)) for number in range(len(layers))]
        for layer, copy in zip(layers, copies, strict=True):
            _call("cp", "-a", str(layer), copy)
        return ":".join([*copies, lowest])
    for folder in (aside / "empty", aside / "host"):
        folder.mkdir(parents=True)
    _call("mount", "-t", "overlay", "-o", f"lowerdir={lowest}:{aside}/empty", spec.name, f"{aside}/host")
    return ":".join([*map(str, layers), f"{aside}/host"])


def _put(path: Path, text: str) -> None:
    """Write a file of the machine, never through a link: its target would be the host's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)


def _make_it_new(root: Path, name: str) -> None:
    """Give the machine a name, an identity and an empty journal."""
    _put(root / "etc/hostname", f"{name}\n")
    _put(root / "etc/machine-id", f"{uuid.uuid4().hex}\n")
    _put(root / "etc/fstab", "")
    _put(root / "etc/systemd/journald.conf.d/50-test.conf", JOURNALD)
    _mask(root / "etc/systemd/system/console-getty.service")  # there is nobody to log in
    shutil.rmtree(root / "var/log/journal", ignore_errors=True)
    (root / "var/log/journal").mkdir(parents=True)


def _mask(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/null")


def _disable_services(root: Path) -> None:
    """Make the machine start none of the services that somebody enabled on the host."""
    for links in ("wants", "requires"):
        for enabled in root.glob(f"etc/systemd/system/*.{links}"):
            shutil.rmtree(enabled)
    # Generators make units out of SysV scripts, cloud-init, netplan, file systems ...
    for folder in ("usr/lib", "usr/local/lib", "etc"):
        for generator in root.glob(f"{folder}/systemd/system-generators/*"):
            _mask(root / "etc/systemd/system-generators" / generator.name)


def _copy_network_settings(root: Path, base: str) -> None:
    """Give the machine the host's way out: resolver, certificates, proxies, apt's and pip's settings."""
    _copy(Path("/etc/resolv.conf"), root / "etc/resolv.conf")
    for own in (".pip/pip.conf", ".config/pip/pip.conf"):
        _copy(Path.home() / own, root / "etc/xdg/pip/pip.conf")
    if base == HOST:
        return
    _copy(Path("/etc/pip.conf"), root / "etc/pip.conf")
    # Emptied first: the tree's are links, and copying would write through them.
    shutil.rmtree(root / "etc/ssl/certs", ignore_errors=True)
    shutil.copytree("/etc/ssl/certs", root / "etc/ssl/certs", ignore_dangling_symlinks=True)
    apt = [Path("/etc/apt/apt.conf"), *Path("/etc/apt/apt.conf.d").glob("*")]
    for setting in apt:
        if setting.is_file() and "Acquire::" in setting.read_text():
            _copy(setting, Path(f"{root}{setting}"))
    if _codename(Path("/")) == _codename(root):
        for file in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
            _copy(file, Path(f"{root}{file}"))


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        _put(target, source.read_text())


def _codename(root: Path) -> str:
    lines = (root / "usr/lib/os-release").read_text().splitlines()
    return next((line for line in lines if line.startswith("VERSION_CODENAME=")), "")


# -- what the host can do, and what it has mounted


def why_not(base: str = HOST) -> str | None:
    """Return why no machine can boot here, as one sentence, or None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "throw-away machines need root on Linux: run the tests with sudo"
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            return f"throw-away machines need {tool}: install the package {package}"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if not int(status["CapEff"], 16) & CAP_SYS_ADMIN:
        return "throw-away machines need CAP_SYS_ADMIN, which this container was not given"
    if cgroup2() is None:
        return "throw-away machines need cgroup v2 to be mounted"
    if "overlay" not in Path("/proc/filesystems").read_text().split():
        modprobe = shutil.which("modprobe") or "false"
        if subprocess.run([modprobe, "-q", "overlay"], check=False).returncode:
            return "throw-away machines need overlayfs in the kernel"
    if not Path(base, "usr/lib/systemd/systemd").exists():
        return f"throw-away machines need systemd in {base}, to boot it"
    return None


def _mounts() -> list[tuple[str, str, str]]:
    """Return (mount point, file system type, source) of every mount, in the order they were made."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, source = right.split()[:2]
        found.append((left.split()[4], kind, source))
    return found


def cgroup2() -> Path | None:
    return next((Path(at) for at, kind, _source in _mounts() if kind == "cgroup2"), None)


def _cgroup1() -> list[Path]:
    """Return where nspawn repeats its cgroups, on a host that has cgroup v1 as well."""
    return [Path(at) for at, kind, _source in _mounts() if kind == "cgroup" and at.endswith("/systemd")]


def _system_mounts() -> list[str]:
    """Return where the host's system has disks of its own (/usr, /var, ...), parents first."""
    disks = {at for at, kind, source in _mounts() if source.startswith("/dev/") or kind == "zfs"}
    skip = tuple(f"{folder}/" for folder in NOT_SHOWN)
    return sorted(at for at in disks - {"/"} if os.path.isdir(at) and not f"{at}/".startswith(skip))


def freeze(cgroup: Path, state: str) -> None:
    (cgroup / "cgroup.freeze").write_text(state)
    _await_event(cgroup, f"frozen {state}")


def _await_event(cgroup: Path, line: str, timeout: float = 10) -> None:
    """Wait until the kernel writes `line` into the cgroup's events."""
    with open(cgroup / "cgroup.events") as f:
        poll = select.poll()
        poll.register(f, select.POLLPRI)
        while line not in f.read().splitlines():
            if not poll.poll(timeout * 1000):
                raise TimeoutError(f"{cgroup}: no '{line}' in cgroup.events after {timeout:g} s")
            f.seek(0)


if __name__ == "__main__":
    supervise(Spec(**json.loads(sys.argv[1])))
