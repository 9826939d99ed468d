"""The ledger in PostgreSQL and servers that lie: each wait has one end, each answer a bound and a form."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.listener import Listener
from tests.postgres import Server
from tests.support import PATIENCE, ROOT
from tests.unit.test_ledger import STEPS, claim, ending
from worker.errors import AgentError
from worker.ledger import LedgerAway, LedgerBusy, LedgerCorrupt

pytest.importorskip("psycopg")
import psycopg

from tests.unit.test_postgres_server import join
from worker.ledger.postgres import PostgresLedger, link

# Waits for its servers, half a minute in all.
pytestmark = pytest.mark.programs

CLEAR = (AgentError, LedgerAway, LedgerBusy, LedgerCorrupt)


def use(dsn: str, run: str) -> None:
    """Make every call that reads what a server says; some take what they cannot use for an error of ours."""
    one = join(dsn, run=run)
    try:
        one.enlist(STEPS)
        one.record([], [claim("a"), claim("b")])
        one.record([ending("b")], [])
        one.effects.claim("k", "p", "a", 60.0, False)
        for call in (
            lambda: list(one.rows()),
            lambda: one.news(idle=True),
            one.orphans,
            one.revision,
            lambda: one.last_closed("b"),
            lambda: one.output(1),
            lambda: one.renew(["a"]),
            lambda: list(one.saved()),
            one.items,
            lambda: one.usage(["config"]),
            lambda: list(one.effects.all()),
            lambda: one.effects.claim("k", "p", "a", 60.0, False),
            lambda: one.fact("config"),
        ):
            with contextlib.suppress(*CLEAR):
                call()
    finally:
        one.close()


COLUMNS = {
    "attempts": (
        "seq",
        "step",
        "number",
        "started",
        "counted",
        "cause",
        "ended",
        "output_size",
        "output",
        "item",
        "change",
    ),
    "steps": ("step", "number", "token", "lease_until", "started", "progress"),
    "effects": ("key", "token", "at", "result", "lease", "size"),
    "workers": ("number", "lease", "seen"),
    "facts": ("value",),
    "format": ("version",),
    "runs": ("plan",),
}


@pytest.mark.parametrize(("table", "column"), [(table, column) for table, names in COLUMNS.items() for column in names])
def test_a_column_of_another_type_is_one_clear_error(server: Server, table: str, column: str) -> None:
    """
    S31: a table that has been changed under us, or a server that says other types than it has, is no fault of ours.
    """
    dsn = server.empty_database()
    run = f"run-{os.urandom(4).hex()}"
    use(dsn, run)
    kind = "jsonb" if column in ("step", "cause", "value", "plan", "key", "item") else "text"
    change = f"to_jsonb({column})" if kind == "jsonb" else f"{column}::text"
    with contextlib.suppress(psycopg.Error):  # an index that does not go with it is in the way
        server.execute(f"ALTER TABLE agent.{table} ALTER {column} DROP DEFAULT", database="scratch")
        server.execute(f"ALTER TABLE agent.{table} ALTER {column} TYPE {kind} USING {change}", database="scratch")
    for action in (
        lambda: use(dsn, run),
        lambda: list(PostgresLedger.look(dsn, run, 5.0).rows()),
        lambda: list(PostgresLedger.look(dsn, run, 5.0).effects.all()),
    ):
        with contextlib.suppress(*CLEAR):
            action()
    server.execute(f"ALTER TABLE agent.{table} DROP COLUMN IF EXISTS {column} CASCADE", database="scratch")
    with contextlib.suppress(*CLEAR):
        use(dsn, run)


class Liar(Listener):
    """A server that lets everybody in and then does what it is given; `met` counts its clients."""

    def __init__(self, talk: Callable[[socket.socket], None], let_in: bool = True) -> None:
        self._talk, self._let_in = talk, let_in
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        if self._let_in:
            while True:
                size, code = struct.unpack("!II", client.recv(8, socket.MSG_WAITALL))
                if code >> 16 == 3:
                    break
                client.sendall(b"N")  # neither TLS nor GSS
            client.recv(size - 8, socket.MSG_WAITALL)
            client.sendall(message(b"R", struct.pack("!I", 0)) + message(b"K", struct.pack("!II", 1, 2)) + READY)
            client.recv(65536)
        self._talk(client)

    @property
    def dsn(self) -> str:
        return f"postgresql://agent@127.0.0.1:{self.port}/agent?sslmode=disable"


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


READY = message(b"Z", b"I")
# One column of text, and one row of a hundred kilobytes.
COLUMN = message(b"T", struct.pack("!H", 1) + b"a\0" + struct.pack("!IHIHIH", 0, 0, 25, 0xFFFF, 0, 0))
ROW = message(b"D", struct.pack("!HI", 1, 100_000) + b"x" * 100_000)


def says_nothing(client: socket.socket) -> None:
    client.recv(1 << 20)
    threading.Event().wait(PATIENCE)


def drop_by_drop(client: socket.socket) -> None:
    for byte in COLUMN + ROW:
        client.sendall(bytes([byte]))
        time.sleep(0.05)


def notices_without_end(client: socket.socket) -> None:
    while True:
        client.sendall(message(b"N", b"SNOTICE\0C00000\0Mhello\0\0"))


def one_huge_message(client: socket.socket) -> None:
    client.sendall(COLUMN + b"D" + struct.pack("!I", 0x3FFFFFFF))
    while True:
        client.sendall(b"x" * 65536)


def rows_without_end(client: socket.socket) -> None:
    client.sendall(COLUMN)
    while True:
        client.sendall(ROW)


def no_postgres(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def another_answer(client: socket.socket) -> None:
    client.sendall(COLUMN + message(b"D", struct.pack("!HI", 1, 3) + b"abc") + message(b"C", b"SELECT 1\0") + READY)
    client.recv(65536)
    threading.Event().wait(PATIENCE)


def no_rows_at_all(client: socket.socket) -> None:
    while True:
        client.sendall(message(b"C", b"SELECT 0\0") + READY)
        if not client.recv(65536):
            return


@pytest.fixture
def liar() -> Iterator[Callable[..., Liar]]:
    made: list[Liar] = []

    def make(talk: Callable[[socket.socket], None], let_in: bool = True) -> Liar:
        made.append(Liar(talk, let_in))
        return made[-1]

    yield make
    for one in made:
        one.close()


LIES = [
    says_nothing,
    drop_by_drop,
    notices_without_end,
    one_huge_message,
    rows_without_end,
    no_postgres,
    another_answer,
    no_rows_at_all,
]


@pytest.mark.parametrize("let_in", [True, False], ids=["after the greeting", "before it"])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_no_server_keeps_us_for_ever(
    liar: Callable[..., Liar], lie: Callable[[socket.socket], None], let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A call ends within its time, here a second and the time for the connection, whatever comes in; with one clear line.
    """
    monkeypatch.setattr(link.Connection, "patience", 1.0)
    monkeypatch.setattr(link, "_PATIENCE", 1.0)
    began = time.monotonic()
    with pytest.raises(CLEAR) as caught:
        join(liar(lie, let_in).dsn)
    took = time.monotonic() - began
    assert took < 20.0, "without a deadline it is for ever; a machine may be busy"
    said = str(caught.value)
    assert "\n" not in said and said.isprintable(), said


BOUNDED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from worker.ledger import LedgerAway
from worker.ledger.postgres import Member, PostgresLedger, link
link._ANSWER_MAX = 16 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    PostgresLedger.join(sys.argv[2], "run", Member("one", "life", "host", 1, "1"), 60.0, 5.0)
except LedgerAway as exc:
    print(exc)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_no_answer_fills_the_memory(liar: Callable[..., Liar]) -> None:
    """
    All of an answer is held in memory: it has a bound beside its time, here of 16 MiB.  One message of it has libpq's.
    """
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(ROOT), liar(rows_without_end).dsn],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    said, grown = done.stdout.splitlines()
    assert "an answer of more than 16 MiB" in said, done.stdout + done.stderr
    assert int(grown) < 200, f"{grown} MiB"
