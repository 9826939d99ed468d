"""What a step cannot do without, and how a naive worker does it: the yardsticks of the benchmarks."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def transaction(folder: Path) -> Callable[[], None]:
    """One durable transaction: one INSERT (WAL, FULL)."""
    db = sqlite3.connect(folder / "limit.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE done (id INTEGER PRIMARY KEY, step TEXT)")

    def insert() -> None:
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO done (step) VALUES ('a step with a name of some length')")
        db.execute("COMMIT")

    return insert


def limit(folder: Path) -> Callable[[], None]:
    """One process and one durable transaction: posix_spawn of `sh -c true`, one INSERT."""
    insert = transaction(folder)

    def step() -> None:
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "true"], {})
        os.waitpid(pid, 0)
        insert()

    return step


def naive(folder: Path, total: int) -> Iterator[None]:
    """A worker that keeps its list in one JSON file, rewritten and fsynced before and after each step."""
    path = folder / "state.json"
    state = [{"id": f"s@{n}", "state": "waiting", "attempts": 0} for n in range(total)]

    def save() -> None:
        temp = path.with_suffix(".new")
        with open(temp, "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)

    for entry in state:
        entry["state"] = "running"
        save()
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "true"], {})
        os.waitpid(pid, 0)
        entry["state"] = "done"
        save()
        yield


@contextmanager
def stopwatch(times: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times.append(time.perf_counter() - began)
