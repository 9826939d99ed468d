"""Workers of a run on the tests' PostgreSQL server: ledgers that have joined it, and what goes with them."""

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.postgres import Server
from tests.proxy import Proxy
from tests.unit.test_ledger import STEPS
from worker.ledger import Ledger, LedgerAway

pytest.importorskip("psycopg")
from worker.ledger.postgres import Member, PostgresLedger

T = TypeVar("T")
LEASE = 60.0
SHORT = 0.3  # a lease that a test waits for
PATIENCE = 30.0

Join = Callable[..., PostgresLedger]


@pytest.fixture
def run() -> str:
    """A run of the test's own, on the server that they share."""
    return f"run-{os.urandom(4).hex()}"


@pytest.fixture
def join(server: Server, run: str) -> Iterator[Join]:
    """Join the run as a worker, in a new life, with the plan a, b, c."""
    made: list[PostgresLedger] = []

    def join(worker: str = "one", lease: float = LEASE, port: int = 0, calm: float = 0.0) -> PostgresLedger:
        dsn = server.dsn().replace(f":{server.port}/", f":{port or server.port}/")
        member = Member(worker, os.urandom(4).hex(), f"host-of-{worker}", os.getpid(), "1")
        made.append(PostgresLedger.join(dsn, run, member, lease, 5.0, calm))
        made[-1].enlist(STEPS)
        return made[-1]

    yield join
    for ledger in made:
        ledger.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


def until(action: Callable[[], T]) -> T:
    """Return the first answer that is not empty."""
    gives_up = time.monotonic() + PATIENCE
    while not (found := action()):
        assert time.monotonic() < gives_up, "it never came"
    return found


def again(action: Callable[[], T]) -> T:
    """Make a call until the server is there, as a worker does."""
    gives_up = time.monotonic() + PATIENCE
    while True:
        try:
            return action()
        except LedgerAway:
            assert time.monotonic() < gives_up, "the server never came back"


def expire(server: Server, run: str) -> None:
    """Let a long time pass for the claims of the run."""
    server.execute("UPDATE agent.steps SET lease_until = now() - interval '1 second' WHERE run = %s", (run,))


def outcomes(ledger: Ledger) -> list[tuple[str, int, str | None]]:
    return sorted((row.step, row.number, row.outcome) for row in ledger.rows())
