"""Run as root inside a machine: spoil each file that a step may write in turn, and see what agentctl makes of it.

Prints one line of JSON for each command that took too long, took too much memory, showed a traceback or a secret, gave
a terminal orders, or said nothing or too much; the last line counts the commands.
"""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STATE, KEPT = Path("/var/lib/agent"), Path("/var/tmp/state-before")
RUNTIME = Path("/run/agent")
COMMANDS = [
    "status",
    "status --json",
    "list",
    "log a",
    "log --output a",
    "budget",
    "budget --add spend=1",
    "settle a --redo",
    "export -",
    "export /root/run.json",
    "export /root/run.db",
    "verify-copy /var/lib/agent",
    "restore /var/lib/agent/checkpoint.json",
    "restore /var/lib/agent/ledger.db",
    "alert agent",
    "check",
    "plan",
    "run",
    "pause",
    "resume",
]
BINARY = ("export -", "log --output a")
SECONDS = 5.0
PATIENCE = 35.0  # of an order, which the worker may have to wait for its ledger with
ORDERS = ("budget --add spend=1", "settle a --redo", "pause", "resume")
MEMORY = 200 << 20  # bytes
FILE = 4 << 30
LINES = 4  # of a command that has failed
SECRET = "of-root-alone"
# As the agent's user: lets a file and a link to root's change places, as fast as it can.
FLIP = """
import ctypes, sys
libc, one, other = ctypes.CDLL(None), sys.argv[1].encode(), sys.argv[1].encode() + b".other"
print("up", flush=True)
while True: libc.renameat2(-100, one, -100, other, 2)
"""
# As the agent's user: has the state folder as a worker does, and answers nothing, or never ends.
HOLD = """
import fcntl, os, socket, sys, threading
def serve(one):
    try:
        if sys.argv[2] == "lies":
            one.recv(1000)
            one.sendall(b'{"run": "r", "told": "\\x1b[2J", "steps": [], "worker": {"state": "x"}}\\n'); one.close()
        while True: one.sendall(b'{"told": "' + b"x" * 65536)
    except OSError: pass
fd = os.open("/var/lib/agent/lock", os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX); os.ftruncate(fd, 0); os.pwrite(fd, b"at work \\n/run/agent\\n", 0)
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); s.bind(sys.argv[1]); s.listen()
print("up", flush=True)
kept = []
while True:
    kept.append(s.accept()[0])
    if sys.argv[2] != "deaf": threading.Thread(target=serve, args=(kept[-1],), daemon=True).start()
"""


def as_agent(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program of the steps'; it is at work when this returns."""
    argv = ["setpriv", "--reuid=agent", "--regid=agent", "--clear-groups", "python3", "-c", program, *arguments]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    return started


def flip(path: Path) -> subprocess.Popen[bytes]:
    if not os.path.lexists(path):
        path.write_text("[]")
    other = path.with_name(f"{path.name}.other")
    remove(other)
    other.symlink_to("/root/secret")
    return as_agent(FLIP, str(path))


def deaf(path: Path) -> subprocess.Popen[bytes]:
    return as_agent(HOLD, str(path), "deaf")


def flood(path: Path) -> subprocess.Popen[bytes]:
    return as_agent(HOLD, str(path), "flood")


def lies(path: Path) -> subprocess.Popen[bytes]:
    return as_agent(HOLD, str(path), "lies")


def link(path: Path) -> None:
    path.symlink_to("/root/secret")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, FILE)


def noise(path: Path) -> None:
    path.write_bytes(random.Random(str(path)).randbytes(70_000))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def braces(path: Path) -> None:
    path.write_text("[" * 200_000)


Kind = Callable[[Path], "subprocess.Popen[bytes] | None"]
KINDS: list[Kind] = [link, fifo, device, folder, sparse, noise, loop, braces, flip]
OF_SOCKETS: list[Kind] = [*KINDS, deaf, flood, lies]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def spoil(kind: Kind, name: str) -> subprocess.Popen[bytes] | None:
    """Put everything back as it was, but for one file; return who goes on with it, if anybody does."""
    for folder in (STATE, RUNTIME):
        remove(folder)
    subprocess.run(["cp", "-a", str(KEPT), str(STATE)], check=True)
    owner = STATE.stat()
    RUNTIME.mkdir(mode=0o750)
    os.chown(RUNTIME, owner.st_uid, owner.st_gid)
    path = STATE / name  # a whole path stays what it is
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind is not flip:
        remove(path)
    who = kind(path)
    if os.path.lexists(path) and kind is not flip:
        os.lchown(path, owner.st_uid, owner.st_gid)
    return who


def verdict(command: str, seconds: float) -> dict[str, object] | None:
    """Run one command; return what is wrong with how it went, or None."""
    with open("/var/tmp/said", "wb") as said:
        started = subprocess.Popen(
            ["timeout", "--signal=KILL", str(seconds), "agentctl", *command.split()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if command in BINARY else said,
            stderr=said,
            start_new_session=True,
        )
        _pid, ended, usage = os.wait4(started.pid, 0)
    status = os.waitstatus_to_exitcode(ended)
    text = Path("/var/tmp/said").read_text(errors="replace")
    wrong = []
    if status in (-signal.SIGKILL, 124, 137):
        wrong.append(f"not ended in {seconds:g} s")
    if usage.ru_maxrss << 10 > MEMORY:
        wrong.append(f"{usage.ru_maxrss >> 10} MiB")
    if "Traceback" in text:
        wrong.append("a traceback")
    if status and not text.strip():
        wrong.append(f"status {status} and no word")
    if status and text.count("\n") > LINES:
        wrong.append(f"{text.count(chr(10))} lines")
    if SECRET in text:
        wrong.append("a secret")
    if any(ord(char) < 32 and char not in "\t\n" for char in text):
        wrong.append("orders to a terminal")
    return {"command": command, "wrong": wrong, "status": status, "said": text[-400:]} if wrong else None


def main(share: int, names: list[str]) -> None:
    """Try one in `share` of all commands on all kinds of each file, another one each time."""
    tried = [
        (name, kind, command)
        for name in names
        for kind in (OF_SOCKETS if name.endswith("/control") else KINDS)
        for command in COMMANDS
    ][::share]
    for name, kind, command in tried:
        for _ in range(2):  # a machine that has other work may need longer, once
            who = spoil(kind, name)
            found = verdict(command, PATIENCE if kind is deaf and command in ORDERS else SECONDS)
            if who is not None:
                who.kill()
                who.wait()
            if found is None:
                break
        else:
            print(json.dumps({"file": name, "kind": kind.__name__, **(found or {})}), flush=True)
        path = STATE / name
        if path.is_relative_to("/etc"):
            remove(path)
            remove(path.with_name(f"{path.name}.other"))
    print(json.dumps({"commands": len(tried)}))


main(int(sys.argv[1]), sys.argv[2:])
