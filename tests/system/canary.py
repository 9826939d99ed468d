"""Run as root inside a machine: spoil each file of the state folder in turn, and see what agentctl makes of it.

Prints one line of JSON for each command that took too long, took too much memory, showed a traceback or said nothing;
the last line counts the commands.
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
]
BINARY = ("export -", "log --output a")
SECONDS = 5.0
MEMORY = 200 << 20  # bytes
FILE = 4 << 30


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


KINDS: list[Callable[[Path], None]] = [link, fifo, device, folder, sparse, noise, loop, braces]


def spoil(kind: Callable[[Path], None], name: str) -> None:
    """Put the state folder back as it was, but for one file."""
    shutil.rmtree(STATE, ignore_errors=True)
    subprocess.run(["cp", "-a", str(KEPT), str(STATE)], check=True)
    path = STATE / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind(path)
    owner = STATE.stat()
    os.lchown(path, owner.st_uid, owner.st_gid)


def verdict(command: str) -> dict[str, object] | None:
    """Run one command; return what is wrong with how it went, or None."""
    with open("/var/tmp/said", "wb") as said:
        started = subprocess.Popen(
            ["timeout", "--signal=KILL", str(SECONDS), "agentctl", *command.split()],
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
        wrong.append(f"not ended in {SECONDS:g} s")
    if usage.ru_maxrss << 10 > MEMORY:
        wrong.append(f"{usage.ru_maxrss >> 10} MiB")
    if "Traceback" in text:
        wrong.append("a traceback")
    if status and not text.strip():
        wrong.append(f"status {status} and no word")
    return {"command": command, "wrong": wrong, "status": status, "said": text[-400:]} if wrong else None


def main(share: int, names: list[str]) -> None:
    """Try one in `share` of all commands on all kinds of each file, another one each time."""
    tried = [(name, kind, command) for name in names for kind in KINDS for command in COMMANDS][::share]
    for name, kind, command in tried:
        spoil(kind, name)
        found = verdict(command)
        if found is not None:
            print(json.dumps({"file": name, "kind": kind.__name__} | found), flush=True)
    print(json.dumps({"commands": len(tried)}))


main(int(sys.argv[1]), sys.argv[2:])
