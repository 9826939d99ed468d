"""Throw-away machines: a real systemd as PID 1, booted in a fraction of a second.

    with Machine() as m:
        m.run("systemctl start agent")
        m.wait_journal("-u", "agent", "AGENT_EVENT=start")
        m.reboot()

A machine is systemd-nspawn on an overlay: below is the host's own `/` (or the base tree of
another release), on top a tmpfs of limited size (or a folder, which outlives the machine).
The host's files are only read; its enabled services, homes and journal are not seen inside.

Each machine has a supervisor (supervisor.py), which removes it when its maker dies, however it
dies.  Nothing here polls: nspawn, the kernel and the journal each say when something happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tests.system import supervisor
from tests.system.supervisor import HOST, PATH, Spec, freeze, network_variables

PROJECT = Path(__file__).resolve().parents[2]
INSIDE = {
    "PATH": PATH,
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}
JSON = ("--quiet", "--all", "--output=json")  # without --all, long values become null

Entry = dict[str, str]
Entries = Generator[Entry, None, None]


class MachineError(Exception):
    """A machine did not do what it was asked; the text says which command, and what it printed."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    rc: int
    out: str
    err: str


class Machine:
    """One machine, from `with` to the end of the block; `stop()` may be called at any time.

    `layers` are the `upper` folders of earlier machines that were powered off, lowest first.
    `binds` are "HOST:INSIDE" or "HOST:INSIDE:ro"; the project itself is at /src, read-only.
    `network` shares the host's network, with its resolver, proxies and pip and apt settings.
    With `sync=False` every fsync inside does nothing: faster on a disk, and a lie.
    """

    def __init__(
        self,
        base: str | Path = HOST,
        *,
        layers: Sequence[Path] = (),
        upper: Path | None = None,
        size: str = "2g",
        binds: Sequence[str] = (),
        network: bool = False,
        sync: bool = True,
    ) -> None:
        self.name = f"agent-test-{uuid.uuid4().hex[:8]}"
        self._spec = Spec(
            name=self.name,
            base=str(Path(base).resolve()),
            layers=[str(layer.resolve()) for layer in layers],
            upper=str(upper.resolve()) if upper else None,
            size=size,
            binds=[f"{PROJECT}:/src:ro", *binds],
            network=network,
            sync=sync,
        )
        self.boots = 0
        self._cgroup: Path | None = None
        self._leader: int | None = None
        self._ready = False
        self._off = self._gone = True  # off: until somebody calls boot(); gone: for ever
        self._change = threading.Condition()
        self._console = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the machine
        self._supervisor: subprocess.Popen[bytes] | None = None

    # -- from power-on to the end

    def __enter__(self) -> Machine:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self, timeout: float = 60) -> None:
        """Boot; once this returns, every enabled unit has been started or has failed to."""
        argv = ["unshare", "--mount", "--propagation=slave", "--"]
        argv += [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(asdict(self._spec))]
        if Path("/run/systemd/system").is_dir():
            scope = ["systemd-run", "--quiet", "--scope", "--collect", f"--unit={self.name}"]
            argv = [*scope, "--property=Delegate=yes", "--", *argv]
        self._off = self._gone = False
        self._supervisor = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._console,
            start_new_session=True,  # ^C in the terminal is for us; we then end it in order
        )
        threading.Thread(target=self._listen, args=(self._supervisor.stdout,), daemon=True).start()
        try:
            self._wait(lambda: self._ready, "boot", timeout)
        except BaseException:
            with contextlib.suppress(MachineError):  # the first error is the one to see
                self.stop()
            raise

    def stop(self) -> None:
        """Remove the machine at once, as if it had never been; only an `upper` folder stays."""
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self._supervisor.returncode:
            raise MachineError(f"the supervisor of {self.name} did not end in order{self._tail()}")

    def boot(self, timeout: float = 60) -> None:
        """Boot again after `poweroff()`, on the same disk."""
        assert self._supervisor and self._supervisor.stdin
        self._off = False
        self._supervisor.stdin.write(b"boot\n")
        self._supervisor.stdin.flush()
        self._wait(lambda: self._ready, "boot", timeout)

    def poweroff(self, timeout: float = 60) -> None:
        """Shut down in order; every service has been stopped, and the machine is off."""
        self.run("systemctl --no-block poweroff", check=False)  # systemctl may go down with the machine
        self._wait(lambda: self._leader is None, "power off", timeout)

    def reboot(self, timeout: float = 60) -> None:
        """Shut down in order and boot again."""
        boots = self.boots
        self.run("systemctl --no-block reboot", check=False)
        self.wait_boot(boots + 1, timeout)

    def wait_boot(self, number: int, timeout: float = 60) -> None:
        """Wait until boot `number` (the first one is 1) is complete, whoever asked for it."""
        self._wait(lambda: self.boots >= number and self._ready, f"complete boot {number}", timeout)

    def crash(self, timeout: float = 60) -> None:
        """Kill PID 1 and with it every process at the same instant, then boot again.

        The files are as they were written, synced or not: this is no power cut.
        """
        os.kill(self.leader, signal.SIGKILL)
        self._wait(lambda: self._leader is None, "crash", timeout)
        self.boot(timeout)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the block no process of the machine runs; the clocks run on.

        What `run()` started is not frozen: it is in the machine's namespaces, not in its cgroup.
        """
        freeze(self.cgroup, "1")
        try:
            yield
        finally:
            freeze(self.cgroup, "0")

    # -- commands and files

    def run(
        self,
        cmd: str | Sequence[str],
        *,
        check: bool = True,
        user: str | None = None,
        input: str | None = None,
        timeout: float = 60,
    ) -> Result:
        """Run a command (a string: by sh) as root or as `user`, and return how it ended.

        It has all capabilities and no limits.  Where these matter, use systemd-run inside.
        """
        shown = cmd if isinstance(cmd, str) else shlex.join(cmd)
        if user is not None:
            argv = ["runuser", "-s", "/bin/sh", user, "-c", shown]
        else:
            argv = ["sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self._popen(argv, stdin=stdin, stderr=subprocess.PIPE) as proc:
            try:
                out, err = proc.communicate(None if input is None else input.encode(), timeout)
            except subprocess.TimeoutExpired:
                raise MachineError(f"'{shown}' did not end within {timeout:g} s{self._tail()}") from None
            finally:
                _kill(proc)
        result = Result(proc.returncode, _text(out), _text(err))
        if check and result.rc:
            raise MachineError(f"'{shown}' exited with status {result.rc}\n{result.out}{result.err}")
        return result

    def call(self, cmd: str, *, user: str, timeout: float) -> int:
        """Run a command of sh as `user`, in a login's environment and with our output; return its exit status."""
        argv = ["runuser", "-l", "-s", "/bin/sh", "-w", ",".join(network_variables()), user, "-c", cmd]
        with self._popen(argv, stdin=subprocess.DEVNULL, stdout=None, stderr=None) as proc:
            try:
                return proc.wait(timeout)
            except subprocess.TimeoutExpired:
                raise MachineError(f"'{cmd}' did not end within {timeout:g} s{self._tail()}") from None
            finally:
                _kill(proc)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file, owned by root, in one step; missing folders are made."""
        script = 'mkdir -p "${1%/*}" && cat >"$1.new" && chmod "$2" "$1.new" && mv -fT "$1.new" "$1"'
        self.run(["sh", "-c", script, "sh", path, f"{mode:o}"], input=text)

    def read(self, path: str) -> str:
        return self.run(["cat", path]).out

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return properties of a unit (without names: all of them)."""
        names = [f"--property={','.join(properties)}"] if properties else []
        lines = self.run(["systemctl", "show", unit, *names]).out.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    # -- the journal

    def journal(self, *args: str, after: str | None = None) -> list[Entry]:
        """Return the entries that `journalctl ARGS` prints, of every boot, the oldest first.

        All values are text.  Bytes that are not UTF-8 become `\\xNN`; several values of one
        field are joined by newlines.
        """
        out = self.run(["journalctl", *JSON, *_place(after), *args]).out
        return [entry for entry in map(_entry, out.splitlines()) if entry["__CURSOR"] != after]

    def cursor(self) -> str:
        """Return the place where the journal ends now, for `after=`."""
        return self.journal("--lines=1")[-1]["__CURSOR"]

    def follow(self, *args: str, after: str | None = None, timeout: float = 30) -> Entries:
        """Yield the entries of `journalctl ARGS` behind `after`, old ones at once, new ones as they come.

        Raises MachineError `timeout` seconds from now, or when the machine goes down.
        """
        argv = ["journalctl", *JSON, "--follow", "--no-tail", *_place(after), *args]
        seen = 0
        with self._popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proc:
            timer = threading.Timer(timeout, _kill, [proc])
            timer.start()
            try:
                assert proc.stdout is not None
                for line in proc.stdout:
                    if not line.endswith(b"\n"):  # cut off by the end of journalctl
                        break
                    if (entry := _entry(line))["__CURSOR"] != after:
                        seen += 1
                        yield entry
            finally:
                timer.cancel()
                timer.join()
                _kill(proc)
        end = f"after {timeout:g} s" if proc.returncode == -signal.SIGKILL else "with journalctl"
        raise MachineError(f"'{shlex.join(argv)}' ended {end}; it gave {seen} entries{self._tail()}")

    def wait_journal(
        self,
        *args: str,
        when: Callable[[Entry], bool] = lambda entry: True,
        after: str | None = None,
        timeout: float = 30,
    ) -> Entry:
        """Return the first entry of `journalctl ARGS` behind `after` that `when` accepts.

        Without `after` an entry written before the call counts too.
        """
        with contextlib.closing(self.follow(*args, after=after, timeout=timeout)) as entries:
            return next(entry for entry in entries if when(entry))

    # -- what is known from outside

    @property
    def leader(self) -> int:
        """The host's number for the machine's PID 1."""
        leader = self._leader
        if leader is None:
            raise MachineError(f"the machine {self.name} is off{self._tail()}")
        return leader

    @property
    def cgroup(self) -> Path:
        """The host's folder for the machine's cgroup."""
        if self._cgroup is None:
            raise MachineError(f"the machine {self.name} was never started")
        return self._cgroup

    def console(self) -> str:
        """Return what the machine printed while it booted and shut down."""
        size = os.fstat(self._console.fileno()).st_size
        return _text(os.pread(self._console.fileno(), size, 0))

    # -- helpers

    def _listen(self, events: IO[bytes]) -> None:
        """Take the supervisor's word for what has happened, until it ends."""
        with events:
            for line in events:
                event = json.loads(line)
                with self._change:
                    if "cgroup" in event:
                        self._cgroup = Path(event["cgroup"])
                    elif "leader" in event:
                        self._leader = event["leader"]
                        self.boots += 1
                    elif "ready" in event:
                        self._ready = True
                    else:
                        self._leader, self._ready, self._off = None, False, event["off"]
                    self._change.notify_all()
        with self._change:
            self._leader, self._ready, self._off, self._gone = None, False, True, True
            self._change.notify_all()

    def _wait(self, done: Callable[[], bool], what: str, timeout: float) -> None:
        with self._change:
            self._change.wait_for(lambda: done() or self._off or self._gone, timeout)
            if not done():
                why = "it is off" if self._off or self._gone else f"{timeout:g} s have passed"
                raise MachineError(f"the machine {self.name} did not {what}: {why}{self._tail()}")

    def _popen(
        self, argv: Sequence[str], stdin: int, stderr: int | None, stdout: int | None = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "--root", "--wd"]
        env = INSIDE | (network_variables() if self._spec.network else {})
        return subprocess.Popen(
            [*enter, "--", *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,  # so that one kill reaches nsenter and what it started
        )

    def _tail(self) -> str:
        lines = self.console().splitlines()[-25:]
        return "\n".join(["\nthe console ends with:", *lines]) if lines else ""


def _kill(proc: subprocess.Popen[bytes]) -> None:
    """End a command in the machine, and all that it started.

    nsenter must outlive its child: an orphan of it goes to the host's PID 1, and one that this
    does not reap holds up the machine's shutdown.
    """
    if proc.poll() is not None:
        return
    children = Path(f"/proc/{proc.pid}/task/{proc.pid}/children").read_text().split()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    if children:
        proc.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(proc.pid, signal.SIGKILL)
    proc.wait()


def _text(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


def _place(after: str | None) -> list[str]:
    # Not --after-cursor: with a filter, systemd 252's skips the first new entry.  We drop the one it names.
    return [f"--cursor={after}"] if after else []


def _entry(line: str | bytes) -> Entry:
    return {key: _field(value) for key, value in json.loads(line).items()}


def _field(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if all(isinstance(item, int) for item in value):
        return _text(bytes(value))  # journalctl's way to write what is not plain UTF-8
    return "\n".join(_field(item) for item in value)
