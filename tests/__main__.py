"""`make test`: the tiers beside each other, each one's output as one block.

Each tier is one run of pytest; the runs wait for machines and workers most of the time, so a few go on at once.  What
will run, what cannot, and how long it takes is printed first, the list of all failures last.  The exit status is 0 if
every run has passed, 130 after Ctrl-C, else 1.  Every run has ended when this ends.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType

from tests import postgres
from tests.system import supervisor

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
# Seconds between two lines on how far it is.
EVERY = 60.0
AT_ONCE = 3
# Servers and networks take as long as the other machines: a run of their own.
NETWORKS = sorted(f"tests/system/{path.name}" for path in (ROOT / "tests/system").glob("test_shared*.py"))
# What somebody tries who means harm: a step, another step, a machine; on two releases of systemd.
_HOSTILE = ("canary", "confined", "neighbours", "rights", "sandbox", "supervise_hostile", "supervise_users")
ATTACKS = [f"tests/system/test_{name}.py" for name in _HOSTILE]


class Run:
    """One run of pytest, and what it has printed."""

    def __init__(self, name: str, minutes: float, *arguments: str) -> None:
        """`minutes`: how long it takes on two cores that have nothing else to do."""
        self.name, self.minutes = name, minutes
        self._command = [sys.executable, "-m", "pytest", "--no-header", *arguments]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()
        self.took, self.stopped = 0.0, False

    def run(self) -> None:
        """Run to the end, in a session of its own: Ctrl-C comes from `stop`, once."""
        if self.stopped:
            return
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # until it is collected its number is its own
        self._kill_session()
        self._process.wait()
        self.took = time.monotonic() - self._began

    def stop(self, number: signal.Signals) -> None:
        """Interrupt it, or kill it with what is left of its session."""
        self.stopped = True
        if self._process is not None and self._process.returncode is None:
            if number == signal.SIGKILL:
                self._kill_session()
            else:
                self._process.send_signal(number)

    def _kill_session(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def passed(self) -> bool:
        return self._process is not None and self._process.returncode == 0

    @property
    def text(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    @property
    def progress(self) -> str:
        percents = re.findall(r"\[ *(\d+%)\]", self.text)
        return f"{self.name} {percents[-1]}" if percents else self.name

    @property
    def result(self) -> str:
        """One line: pytest's last one, without its bars."""
        lines = self.text.strip().splitlines() or ["not run"]
        return f"{self.name}: {lines[-1].strip('= ')}"

    @property
    def failures(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def tiers(wanted: str) -> list[Run]:
    """Return the runs of a tier, those that take longest first.  Raises KeyError for a name that is no tier's."""
    quick = Run("quick", 0.7, "tests/unit", "-m", "not slow and not programs")
    programs = Run("programs", 7, "tests/unit", "-m", "not slow and programs")
    crash = Run("crash", 13, "tests/crash")
    machines = Run("machines", 12, "tests/system", *(f"--ignore={path}" for path in (*ATTACKS, *NETWORKS)))
    attacks = Run("attacks", 6, *ATTACKS)
    networks = Run("networks", 8, *NETWORKS)
    if supervisor.why_not():
        machines.minutes = attacks.minutes = networks.minutes = 0
    files = sorted(f"tests/unit/{path.name}" for path in (ROOT / "tests/unit").glob("test_*.py"))
    halves = [Run(f"quick {n + 1}/2", 0.5, *files[n::2], "-m", "not slow and not programs") for n in (0, 1)]
    return {
        "quick": halves,
        "unit": [programs, quick],
        "crash": [crash],
        "system": [machines, attacks, networks],
        "all": [crash, machines, attacks, networks, programs, quick],
    }[wanted]


def announce(runs: list[Run]) -> None:
    """Print what will run, what cannot, and how long it takes."""
    minutes = max(*(run.minutes for run in runs), sum(run.minutes for run in runs) / min(AT_ONCE, len(runs)))
    names = ", ".join(run.name for run in runs)
    print(f"tests: {names}; about {max(1, round(minutes))} min on two cores.  tests/README.md says what each proves.")
    outcome = "fail" if os.environ.get("AGENT_REQUIRE_SYSTEM") == "1" else "are skipped"
    for kind, reason in (("a machine", supervisor.why_not()), ("PostgreSQL", postgres.why_not())):
        if reason:
            print(f"tests with {kind} {outcome}: {reason}")


def work(runs: list[Run]) -> None:
    """Run them, some at once; the output of each is printed when it has ended, so that none are mixed."""
    began, at_once = time.monotonic(), min(AT_ONCE, len(runs))
    with ThreadPoolExecutor(at_once) as pool:
        going = {pool.submit(run.run): run for run in runs}
        while going:
            ended, _ = wait(going, EVERY, FIRST_COMPLETED)
            for future in ended:
                run = going.pop(future)
                print(f"\n-- {run.name}, {run.took:.0f} s\n{run.text.strip()}\n", flush=True)
            if not ended:
                under_way = ", ".join(run.progress for run in list(going.values())[:at_once])
                print(f"{(time.monotonic() - began) / 60:.0f} min: {under_way}", flush=True)


@contextlib.contextmanager
def stoppable(runs: list[Run]) -> Iterator[list[int]]:
    """Within the block a signal interrupts every run, a second one kills them; yield those that have come."""
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        print("\nending the tests (again: kill them)", file=sys.stderr)
        for run in runs:
            run.stop(signal.SIGKILL if len(came) > 1 else signal.SIGINT)

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def give_back(folder: Path) -> None:
    """Give root's files in a folder to the owner of the folder: `sudo make test` leaves none there."""
    owner = folder.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(f"{path}/{name}").st_uid == 0:
                    os.chown(f"{path}/{name}", owner.st_uid, owner.st_gid, follow_symlinks=False)


def main(arguments: list[str]) -> int:
    try:
        runs = tiers(*(arguments or ["all"]))
    except (KeyError, TypeError):
        print("usage: python -m tests [quick|unit|crash|system|all]", file=sys.stderr)
        return 2
    announce(runs)
    try:
        with stoppable(runs) as came:
            work(runs)
    finally:
        give_back(ROOT)
    print("-- in all")
    for run in runs:
        print(run.result)
        print(*run.failures, sep="\n", end="\n" if run.failures else "")
    if came:
        return INTERRUPTED
    return 0 if all(run.passed for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
