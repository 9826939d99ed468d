"""`make bench-postgres`: no-op steps per second on a PostgreSQL server of its own, beside Procrastinate and Absurd.

The same server, fsync on, for all; each measurement has a fresh database.  Ours and theirs take turns, and what
counts is the median of their ratios: the machine may be noisy.  Every worker is a process with one step at a time,
and finds the plan, or the queue, filled.  It first comes to a gate; the clock starts when all are there and the gate
is opened, and stops with the last end that the system's own table names.  A step of ours is a process (/bin/true);
theirs are function calls.

Their packages are fetched into a virtual environment that is gone afterwards; one that cannot be is passed over.
"""

import fcntl
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.postgres import Server, why_not
from tests.support import PATIENCE, Worker

WORKERS = (1, 4, 8)
STEPS = {1: 300, 4: 600, 8: 800}
ROUNDS = 3
SLEEP = 0.02
SLEEPS = {1: 60, 8: 480}
SLEEP_ROUNDS = 3

PROCRASTINATE = ("procrastinate==3.10.0",)
ABSURD = ("absurd-sdk==0.5.1", "absurdctl==0.5.1")
DRIVER = "psycopg[binary]"

# What a peer's worker does first: say that it is there, and wait until all are.
GATE = """
import fcntl, os, sys
def wait():
    folder = os.environ["GATE"]
    open(f"{folder}/{os.getpid()}", "w").close()
    with open(f"{folder}/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
"""
PROCRASTINATE_JOBS = """
import procrastinate
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DSN"]))
@app.task(name="gate")
def gate():
    wait()
@app.task(name="nothing")
async def nothing():
    pass
if __name__ == "__main__":
    with app.open():
        gate.batch_defer(*[{}] * int(sys.argv[1]))
        nothing.batch_defer(*[{}] * int(sys.argv[2]))
"""
ABSURD_JOBS = """
import absurd_sdk
app = absurd_sdk.Absurd(os.environ["DSN"])
@app.register_task(name="gate")
def gate(params, ctx):
    wait()
@app.register_task(name="nothing")
def nothing(params, ctx):
    for n in range(params):
        ctx.step(f"step-{n}", lambda: None)
@app.register_task(name="stop")
def stop(params, ctx):
    app.stop_worker()
app.start_worker()
"""
ABSURD_QUEUE = "SELECT absurd.spawn_task('default', %s, %s::text::jsonb) FROM generate_series(1, %s)"
# The last end, in seconds since 1970, and how many there are.
OUR_END = "SELECT max(ended), count(*) FROM agent.attempts WHERE step LIKE 's@%%' AND outcome = 'done'"
PROCRASTINATE_END = """
SELECT extract(epoch FROM max(at)), count(*)
FROM procrastinate_events e JOIN procrastinate_jobs j ON j.id = e.job_id
WHERE type = 'succeeded' AND task_name = 'nothing'
"""
ABSURD_END = """
SELECT extract(epoch FROM max(completed_at)), count(*)
FROM absurd.r_default r JOIN absurd.t_default t USING (task_id)
WHERE r.state = 'completed' AND task_name = 'nothing'
"""


Process = subprocess.Popen[bytes]


class Peer(NamedTuple):
    """Another system; `measure` returns how many seconds so many of its workers take for so many steps."""

    name: str
    measure: Callable[[int, int], float]


def main() -> None:
    reason = why_not()
    if reason is not None:
        sys.exit(f"bench-postgres: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="agent-bench-", dir=os.environ.get("AGENT_BENCH_DIR", "/var/tmp")))
    server = Server()
    try:
        server.start()
        bench = Bench(folder, server)
        peers = bench.peers()
        print("steps a second; ours are a process each (/bin/true), theirs a call that does nothing", flush=True)
        for workers in WORKERS:
            bench_peers(bench, peers, workers)
        bench_sleep(bench)
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def bench_peers(bench: "Bench", peers: list[Peer], workers: int) -> None:
    """The rates of so many workers of ours and of each peer, in turns."""
    total = STEPS[workers]
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(ROUNDS):
        ours.append(total / bench.ours(workers, total, "/bin/true"))
        for peer in peers:
            theirs[peer.name].append(total / peer.measure(workers, total))
    print(f"{_workers(workers)}: ours {statistics.median(ours):.0f}", flush=True)
    for name, rates in theirs.items():
        ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
        print(f"    {name} {statistics.median(rates):.0f}; ours {ratio:.2f} x", flush=True)


def bench_sleep(bench: "Bench") -> None:
    """How the rate grows with the workers when a step sleeps."""
    ratios = []
    for _ in range(SLEEP_ROUNDS):
        rates = {n: total / bench.ours(n, total, "/bin/sleep", str(SLEEP)) for n, total in SLEEPS.items()}
        ratios.append(rates[8] / rates[1])
    print(
        f"steps that sleep {SLEEP * 1e3:.0f} ms: {rates[1]:.0f} a second with 1 worker, {rates[8]:.0f} with 8; "
        f"{statistics.median(ratios):.2f} x",
        flush=True,
    )


class Bench:
    """The server, the folder, and how each system is measured: seconds for so many steps by so many workers."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder = folder
        self._server = server
        self._programs = folder / "peers/bin"
        self._count = 0

    def peers(self) -> list[Peer]:
        """Fetch the peers; return those that can be."""
        subprocess.run([sys.executable, "-m", "venv", self._folder / "peers"], check=True)
        found = []
        if self._fetch("Procrastinate", PROCRASTINATE):
            found.append(Peer("Procrastinate", self.procrastinate))
        if self._fetch("Absurd", ABSURD):
            found.append(Peer("Absurd, a task for each step", self.absurd_tasks))
            found.append(Peer("Absurd, a task for each worker", self.absurd_steps))
        return found

    def ours(self, workers: int, total: int, *command: str) -> float:
        dsn, place = self._fresh()
        tasks = (
            f"run: bench\nledger: {dsn}\ntasks:\n"
            f"  - {{id: gate, foreach: {{range: 1-{workers}}}, "
            f"run: 'touch {place}/gate/$$; exec flock -s {place}/gate/.lock true'}}\n"
            f"  - {{id: s, foreach: {{range: 1-{total}}}, run: [{', '.join(command)}]}}\n"
        )
        # As installed: byte-compiled, once for all.
        environ = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{self._folder}/compiled"}

        def start(number: int) -> Process:
            (place / str(number)).mkdir()
            return Worker(place / str(number), tasks, environ).start(stderr=subprocess.DEVNULL).process

        opened = _race(place / "gate", workers, start)
        return self._ended(dsn, OUR_END, total) - opened

    def procrastinate(self, workers: int, total: int) -> float:
        dsn, place = self._fresh()
        (place / "jobs.py").write_text(GATE + PROCRASTINATE_JOBS)
        self._run(place, dsn, "procrastinate", "--app=jobs.app", "schema", "--apply")
        self._run(place, dsn, "python", "jobs.py", str(workers), str(total))
        once = ("procrastinate", "--app=jobs.app", "worker", "--one-shot", "--concurrency=1")
        opened = _race(place / "gate", workers, lambda _number: self._start(place, dsn, *once))
        return self._ended(dsn, PROCRASTINATE_END, total) - opened

    def absurd_tasks(self, workers: int, total: int) -> float:
        """Each step is a task of its own."""
        return self._absurd(workers, total, 0)

    def absurd_steps(self, workers: int, total: int) -> float:
        """Each worker has one task, with its share of the steps."""
        return self._absurd(workers, workers, total // workers)

    def _absurd(self, workers: int, tasks: int, steps: int) -> float:
        dsn, place = self._fresh()
        (place / "jobs.py").write_text(GATE + ABSURD_JOBS)
        self._run(place, dsn, "absurdctl", "init", "-d", dsn)
        self._run(place, dsn, "absurdctl", "create-queue", "-d", dsn, "default")
        for name, count in (("gate", workers), ("nothing", tasks), ("stop", workers)):
            self._server.execute(ABSURD_QUEUE, (name, str(steps), count), _database(dsn))
        opened = _race(place / "gate", workers, lambda _number: self._start(place, dsn, "python", "jobs.py"))
        return self._ended(dsn, ABSURD_END, tasks) - opened

    def _fetch(self, name: str, packages: tuple[str, ...]) -> bool:
        command = [f"{self._programs}/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, DRIVER, *packages], capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.splitlines() or ["pip does not say why"])[-1]
            print(f"{name}: left out, since it cannot be fetched ({why})", flush=True)
        return not done.returncode

    def _fresh(self) -> tuple[str, Path]:
        """Return the address of an empty database, and an empty folder."""
        self._count += 1
        name = f"bench{self._count}"
        self._server.execute(f"CREATE DATABASE {name}")
        place = self._folder / name
        place.mkdir()
        return self._server.dsn(name), place

    def _start(self, place: Path, dsn: str, program: str, *arguments: str) -> Process:
        environ = {"PATH": os.environ["PATH"], "DSN": dsn, "GATE": f"{place}/gate", "PYTHONPATH": str(place)}
        with open(place / "errors", "ab") as errors:
            command = [f"{self._programs}/{program}", *arguments]
            return subprocess.Popen(command, cwd=place, env=environ, stdout=subprocess.DEVNULL, stderr=errors)

    def _run(self, place: Path, dsn: str, *command: str) -> None:
        if self._start(place, dsn, *command).wait(PATIENCE):
            raise SystemExit(f"{' '.join(command)}:\n{(place / 'errors').read_text()}")

    def _ended(self, dsn: str, query: str, total: int) -> float:
        """Return when the last of `total` was done, and drop the database."""
        ((ended, count),) = self._server.execute(query, (), _database(dsn))
        assert count == total, f"{count} of {total} are done"
        self._server.execute(f"DROP DATABASE {_database(dsn)}")
        return float(ended)


def _race(gate: Path, workers: int, start: Callable[[int], Process]) -> float:
    """Start the workers, open the gate once all have come to it, wait for their end; return when it was opened."""
    gate.mkdir()
    processes: list[Process] = []
    gives_up = time.monotonic() + PATIENCE
    try:
        with open(gate / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            processes += map(start, range(workers))
            while len(os.listdir(gate)) <= workers:
                assert time.monotonic() < gives_up, f"{len(os.listdir(gate)) - 1} of {workers} workers have come"
                time.sleep(0.01)
            opened = time.time()
        for process in processes:
            process.wait(PATIENCE)
        return opened
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def _database(dsn: str) -> str:
    return dsn.rpartition("/")[2]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


if __name__ == "__main__":
    main()
