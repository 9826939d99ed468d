"""The ledger in PostgreSQL and its server: getting in, and what is said when there is no way in."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.postgres import PASSWORD, USER, Pool, Server
from tests.unit.test_ledger import STEPS, claim, ending
from worker.errors import StateError
from worker.ledger import LedgerAway, LedgerBusy, Recorded, Saved, remote

pytest.importorskip("psycopg")
import psycopg

from worker.ledger.postgres import Member, PostgresLedger, errors, schema

T = TypeVar("T")
LEASE = 60.0


def join(dsn: str, worker: str = "one", run: str = "run", lease: float = LEASE) -> PostgresLedger:
    member = Member(worker, os.urandom(4).hex(), "host", os.getpid(), "1")
    return PostgresLedger.join(dsn, run, member, lease, 5.0)


def at_once(actions: list[Callable[[], T]]) -> list[T | Exception]:
    """Return what each of these gives or raises when they begin at the same moment."""
    barrier = threading.Barrier(len(actions))

    def act(action: Callable[[], T]) -> T | Exception:
        barrier.wait()
        try:
            return action()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(act, actions))


@pytest.fixture
def dsn(server: Server) -> str:
    """The address of a database in which no worker has ever been."""
    return server.empty_database()


@pytest.fixture
def role(server: Server) -> Iterator[str]:
    """The name of a user who may do nothing."""
    name = f"user_{os.urandom(4).hex()}"
    server.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    yield name


def database(dsn: str) -> str:
    return dsn.rpartition("/")[2]


# -- the tables


def test_eight_workers_join_an_empty_database_at_the_same_moment(dsn: str, server: Server) -> None:
    """
    One of them makes the tables, and all of them take part.
    """
    found = at_once([lambda n=n: join(dsn, f"worker-{n}") for n in range(8)])  # type: ignore[misc]
    assert not [ledger for ledger in found if isinstance(ledger, Exception)]
    assert server.execute("SELECT version FROM agent.format", database=database(dsn)) == [(schema.VERSION,)]
    for ledger in found:
        assert isinstance(ledger, PostgresLedger)
        ledger.enlist(STEPS)
        ledger.close()
    assert server.execute("SELECT count(*) FROM agent.steps", database=database(dsn)) == [(3,)]


def test_an_older_format_is_brought_up_to_date_once(dsn: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    By whichever of eight workers comes first, with what is in it; until then status commands say what to do.
    """
    before = join(dsn)
    before.enlist(STEPS)
    before.record([], [claim("a")], 1)
    before.close()
    newer = schema.VERSION + 1
    monkeypatch.setattr(schema, "VERSION", newer)
    monkeypatch.setattr(
        schema, "MIGRATIONS", {newer - 1: "ALTER TABLE agent.runs ADD COLUMN note text NOT NULL DEFAULT ''"}
    )
    with pytest.raises(StateError, match="older version"):
        PostgresLedger.look(dsn, "run", 5.0)

    found = at_once([lambda n=n: join(dsn, f"worker-{n}") for n in range(8)])  # type: ignore[misc]

    assert not [ledger for ledger in found if isinstance(ledger, Exception)]
    assert server.execute("SELECT version FROM agent.format", database=database(dsn)) == [(newer,)]
    for ledger in found:
        assert isinstance(ledger, PostgresLedger)
        assert [row.step for row in ledger.rows()] == ["a"]
        ledger.close()


def test_the_tables_of_the_second_format_become_those_of_the_third(dsn: str, server: Server) -> None:
    """
    With what is in them; they are then what a new database gets.
    """
    before = join(dsn)
    before.enlist(STEPS)
    before.record([], [claim("a"), claim("b")], 2)
    before.record([ending("a")], [])
    before.close()
    known = "table_name, column_name, data_type, is_nullable"
    columns = f"SELECT {known} FROM information_schema.columns WHERE table_schema = 'agent'"
    new = sorted(server.execute(columns, database=database(dsn)))
    for statement in (
        "ALTER TABLE agent.steps DROP COLUMN item, DROP COLUMN progress",
        "ALTER TABLE agent.attempts DROP COLUMN item, DROP COLUMN digest",
        "DROP TABLE agent.saved, agent.items",
        "UPDATE agent.format SET version = 2",
    ):
        server.execute(statement, database=database(dsn))
    with pytest.raises(StateError, match="older version"):
        PostgresLedger.look(dsn, "run", 5.0)

    after = join(dsn)

    assert sorted(server.execute(columns, database=database(dsn))) == new
    assert [(row.step, row.outcome, row.item, row.digest) for row in after.rows()] == [
        ("a", "done", None, ""),
        ("b", None, None, ""),
    ]
    after.save_files("b", [Saved("b", "state", b"x", 1, 1.0)])
    assert [saved.content for saved in after.saved()] == [b"x"]
    after.close()


def test_a_newer_format_is_not_touched(dsn: str, server: Server) -> None:
    """
    Neither by a worker nor by a status command.
    """
    join(dsn).close()
    server.execute("UPDATE agent.format SET version = 99", database=database(dsn))
    for call in (join, lambda dsn: PostgresLedger.look(dsn, "run", 5.0)):
        with pytest.raises(StateError, match="newer version of the agent \\(format 99"):
            call(dsn)


def test_looking_makes_nothing(dsn: str, server: Server) -> None:
    """
    No tables, no run, no worker; where there are some it shows them, and changes none.
    """
    with pytest.raises(FileNotFoundError):
        PostgresLedger.look(dsn, "run", 5.0)
    assert server.execute("SELECT nspname FROM pg_namespace WHERE nspname = 'agent'", database=database(dsn)) == []
    one = join(dsn)
    one.enlist(STEPS)
    one.record([], [claim("a")], 1)
    one.note({"config": "/etc/agent/config.yaml", "state": "running"})
    with pytest.raises(FileNotFoundError):
        PostgresLedger.look(dsn, "another", 5.0)

    seen = PostgresLedger.look(dsn, "run", 5.0, "one")
    assert [(row.step, row.worker) for row in seen.rows()] == [("a", "one")]
    assert (seen.fact("config"), seen.fact("state")) == ("/etc/agent/config.yaml", "running")
    assert list(seen.effects.all()) == []
    with pytest.raises(LedgerAway):
        seen.note({"state": "done"})
    seen.close()
    assert server.execute("SELECT worker FROM agent.workers", database=database(dsn)) == [("one",)]
    one.close()


# -- the plan


def test_a_run_has_one_plan(dsn: str) -> None:
    """
    Another list is refused while others are at work, with their names; it is taken once they have left.
    """
    one, two, three = (join(dsn, name) for name in ("one", "two", "three"))
    one.enlist(STEPS)
    two.enlist(STEPS)
    with pytest.raises(StateError, match=r"run 'run' .* by 2 other workers with another task list \(one, two\)"):
        three.enlist([*STEPS, ("d", "x")])
    one.close()
    with pytest.raises(StateError, match=r"1 other worker with another task list \(two\)"):
        three.enlist([("a", "changed"), *STEPS[1:]])
    two.close()
    three.enlist([*STEPS, ("d", "x")])
    assert three.record([], [claim("d")], 1).claims == [claim("d")]
    with pytest.raises(StateError, match="another task list"):
        join(dsn, "one").enlist(STEPS)
    three.close()


def test_a_worker_that_is_gone_stands_in_nobodys_way(dsn: str, server: Server) -> None:
    """
    Nor does one that has joined and has not said what its list is.
    """
    one, two, _idle = join(dsn, "one"), join(dsn, "two"), join(dsn, "idle")
    one.enlist(STEPS)
    gone = "UPDATE agent.workers SET seen = now() - interval '1 hour' WHERE worker = 'one'"
    server.execute(gone, database=database(dsn))
    two.enlist(STEPS[:2])


def test_of_two_lists_at_the_same_moment_one_wins(dsn: str) -> None:
    """
    Whatever the list was before: the other worker is told.
    """
    before = join(dsn, "before")
    before.enlist(STEPS)
    before.close()
    for lists in ([("d", "x")], [("e", "x")]), (STEPS, [("f", "x")]):
        workers = [join(dsn, f"worker-{n}") for n in range(2)]
        found = at_once([lambda w=w, steps=steps: w.enlist(steps) for w, steps in zip(workers, lists, strict=True)])  # type: ignore[misc]
        assert sorted(type(one).__name__ for one in found) == ["NoneType", "StateError"]
        for worker in workers:
            worker.close()


def test_what_was_tried_outlives_a_change_of_the_list(dsn: str, server: Server) -> None:
    """
    A done step stays done, and attempts go on counting, when a step leaves the list and comes back.
    """
    one = join(dsn)
    one.enlist(STEPS)
    one.record([], [claim("a"), claim("b")], 2)
    one.record([ending("a"), ending("b", "failed")], [], 0)
    one.enlist([("d", "x")])
    assert server.execute("SELECT step FROM agent.steps ORDER BY 1", database=database(dsn)) == [("a",), ("b",), ("d",)]
    one.enlist(STEPS)
    asked = [claim("a"), claim("a", 2), claim("b"), claim("b", 2), claim("c")]
    assert one.record([], asked).claims == [claim("b", 2), claim("c")]


def test_machines_that_find_other_items_share_a_run(dsn: str, server: Server) -> None:
    """
    N6: the list is the same, the world is not. Who comes takes the steps that are there, adding and dropping none.
    """
    same = [("load@*", "x")]
    one, two = join(dsn), join(dsn, "two")
    assert one.enlist([("load@a", "x"), ("load@b", "x")], same, ["load@a", "load@b"]) is None
    one.record([], [claim("load@a")])
    one.record([ending("load@a")], [])
    theirs = {"load@a": True, "load@b": False}
    assert two.enlist([("load@c", "x")], same, ["load@c"]) == theirs
    assert two.enlist([("load@c", "x"), ("late@d", "x")], same, ["load@c"]) == theirs | {"late@d": False}
    assert [claim.step for claim in two.record([], [claim("load@b"), claim("load@c"), claim("late@d")]).claims] == [
        "load@b",
        "late@d",
    ]
    with pytest.raises(StateError):
        two.enlist([("load@a", "y")], [("load@*", "y")])


def test_a_hundred_thousand_steps(dsn: str) -> None:
    """
    They are enlisted at once, and claiming one costs what it costs among three.
    """
    steps = [(f"step-{number}", "x" * 64) for number in range(100_000)]
    one, two = join(dsn), join(dsn, "two")
    one.enlist(steps)
    two.enlist(steps)
    recorded = two.record([], [claim(step) for step, _ in steps[-40:]], 1)
    assert [claim.step for claim in recorded.claims] == ["step-99960"]
    one.close()
    two.enlist(steps[50_000:])


# -- no way in


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(StateError) as caught:
        action()
    said = str(caught.value)
    assert "\n" not in said
    assert "correct" not in said, "that is the password"
    assert "correct" not in repr(caught.value.__cause__)
    return said


def test_wrong_password(server: Server) -> None:
    """
    One line says who was refused where, and what to do; it holds no password.
    """
    said = refusal(lambda: join(server.dsn(password="in correct")))
    assert said.startswith(f"postgresql://{USER}@127.0.0.1:{server.port}/postgres: password authentication failed")
    assert "mend 'ledger:'" in said


def test_nobody_and_nowhere(server: Server, role: str) -> None:
    """
    No such user, no such database, no encryption, no right to make tables.
    """
    assert "authentication failed for user" in refusal(lambda: join(server.dsn(user="nobody")))
    assert '"nowhere" does not exist' in refusal(lambda: join(server.dsn("nowhere")))
    assert "SSL" in refusal(lambda: join(server.dsn() + "?sslmode=require"))
    assert "AUTHORIZATION" in refusal(lambda: join(server.dsn(database(server.empty_database()), role)))


def test_a_schema_that_an_administrator_has_made_will_do(dsn: str, server: Server, role: str) -> None:
    """
    No right to make one is needed then.
    """
    server.execute(f"CREATE SCHEMA agent AUTHORIZATION {role}", database=database(dsn))
    one = join(server.dsn(database(dsn), role))
    one.enlist(STEPS)
    assert one.record([], [claim("a")], 1).claims == [claim("a")]
    one.close()


def test_a_role_without_rights_in_the_schema_that_is_there(dsn: str, server: Server, role: str) -> None:
    """
    B9: it is told what its owner has to grant, and with that it may take part.
    """
    join(dsn).close()
    said = refusal(lambda: join(server.dsn(database(dsn), role)))
    command = said.partition("let its owner run, in this database: ")[2].rstrip(")")
    assert "CREATE SCHEMA" not in said
    server.execute(command, database=database(dsn))
    join(server.dsn(database(dsn), role)).close()


def test_a_server_that_is_set_to_be_read_only_is_called_so(server: Server, role: str) -> None:
    """
    B9: it is no standby, and what changes it is one setting.
    """
    server.execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    said = refusal(lambda: join(server.dsn(user=role)))
    assert "default_transaction_read_only" in said
    assert "standby" not in said


def test_whatever_isolation_the_database_is_set_to_no_call_fails_for_it(dsn: str, server: Server) -> None:
    """
    B9: eight workers on a database that is serializable by default.
    """
    name = database(dsn)
    server.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    try:
        steps = [(f"s{number}", "x") for number in range(64)]

        def work(number: int) -> int:
            one = join(dsn, f"w{number}")
            one.enlist(steps)
            for step, _definition in steps:
                for won in one.record([], [claim(step)], 1).claims:
                    assert one.record([ending(won.step)], [], 0).lost == []
            one.close()
            return number

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == list(range(8))
    finally:
        server.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")


def test_what_was_undone_for_another_call_is_made_again_in_silence() -> None:
    """
    B9: a deadlock, or a conflict, is no outage.
    """
    left = [1, 2, 3]

    def conflict() -> str:
        if left:
            left.pop()
            raise LedgerBusy("deadlock detected")
        return "done"

    assert remote._repeated(conflict) == "done"
    undone = psycopg.errors.DeadlockDetected("deadlock detected")
    assert isinstance(errors.on_calling(undone, "somewhere", False), LedgerBusy)


@pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="needs pgbouncer: apt-get install pgbouncer")
@pytest.mark.parametrize(("mode", "size"), [("transaction", 20), ("transaction", 1), ("session", 20), ("session", 1)])
def test_a_pool_that_lends_a_connection_for_a_transaction_is_refused(
    dsn: str, server: Server, mode: str, size: int
) -> None:
    """
    B8: in one line, before anything of ours is set on a connection that somebody else gets next.  A pool that gives
    each client a connection of its own will do.
    """
    pool = Pool(server, mode, size)
    try:
        address = pool.dsn(database(dsn))
        if mode == "session":
            one = join(address)
            one.enlist(STEPS)
            assert one.record([], [claim("a")], 1).claims
            one.close()
        else:
            assert "pool_mode=session" in refusal(lambda: join(address))
            assert "pool_mode=session" in refusal(lambda: PostgresLedger.look(address, "run", 5.0))
            with psycopg.connect(address, autocommit=True, prepare_threshold=None) as next_one:
                for name, usual in (("enable_seqscan", "on"), ("statement_timeout", "0"), ("jit", "on")):
                    assert next_one.execute(f"SHOW {name}").fetchone() == (usual,)
                assert next_one.execute("SHOW default_transaction_read_only").fetchone() == ("off",)
    finally:
        pool.close()


def test_a_database_that_cannot_hold_every_text(server: Server) -> None:
    """
    A step may say anything; that it cannot be written down is better known before.
    """
    name = f"latin_{os.urandom(4).hex()}"
    server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    assert "UTF8" in refusal(lambda: join(server.dsn(name)))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "UTF8"])
@pytest.mark.parametrize(
    "said", ["cannot start '/n\xf6where' \u2713 \U0001f600", "half \udcff \ud83d", "nothing \0 more"]
)
def test_what_a_step_a_machine_or_a_file_is_called_is_taken(server: Server, encoding: str, said: str) -> None:
    """
    A8: wherever such a text stands, it is written down as far as the server can, and no call fails for it.
    """
    name = f"any_{os.urandom(4).hex()}"
    server.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    member = Member("one", os.urandom(4).hex(), said, 1, "1")
    one = PostgresLedger.join(server.dsn(name) + "?client_encoding=LATIN1", "run", member, 60.0, 5.0)
    one.enlist([("a", "d"), ("b", said)])
    assert one.record([], [claim("a")._replace(key=said, item=said)], 1).claims
    failed = ending("a", "failed")._replace(cause=said, detail=said)
    assert one.record([failed], [claim("b")], 1).lost == []
    one.note({"state": said})
    token = one.effects.claim(said, "p", said, 60.0, False).effect.token
    assert one.effects.commit(said, token, said.encode(errors="replace"), 1)
    one.add_items("b", [said])
    one.save_files("b", [Saved("b", said, b"x", 1, 0.0)])
    kept = said.replace("\0", "\ufffd").encode(errors="replace").decode()
    closed = one.last_closed("a")
    assert closed is not None
    assert (closed.cause, closed.key, one.fact("state")) == (kept, kept, kept)
    assert [effect.key for effect in one.effects.all()] == [kept]
    other = PostgresLedger.join(server.dsn(name), "copy", member._replace(life="other"), 60.0, 5.0)
    rows = [closed, closed._replace(number=2, outcome=None, ended=None, definition=said, boot=said)]
    assert other.restore([(row, None) for row in rows]) == 2
    assert other.effects.restore([effect._replace(key=said, step=said) for effect in one.effects.all()]) == 1
    assert other.effects.settle(said + "?", b"") is None
    one.close()
    other.close()


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://ann:correct@horse@db/agent",
        "postgresql://ann:12/correct@db/agent",
        "postgresql://ann:correct%zz@db/agent",
        "postgresql://ann@db/agent?correct=horse",
        "host=db password=not correct",
        "host=db port=correct",
        "mysql://ann:correct@db/agent",
    ],
)
def test_an_address_that_is_none(address: str) -> None:
    """
    The message says how to write one, and quotes nothing that may have been meant for the password.
    """
    assert "postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in refusal(lambda: join(address))
    assert "correct" not in errors.describe(address)


def test_an_address_for_messages() -> None:
    """
    Who, where, which database.
    """
    for address, shown in (
        ("postgresql://ann:secret@db:5433/agent?sslmode=require", "postgresql://ann@db:5433/agent"),
        ("host=db1,db2 port=5433 dbname=agent password=secret", "postgresql://db1:5433,db2:5433/agent"),
        ("postgresql:///agent?host=/run/postgresql", "postgresql:///run/postgresql/agent"),
    ):
        assert errors.describe(address) == shown


def test_a_server_that_is_not_there_is_waited_for(server: Server, role: str) -> None:
    """
    No server, none of several, one that has no room: LedgerAway, which says where.
    """
    server.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
    for address, said in (
        ("postgresql://ann:correct@127.0.0.1:1/agent", "postgresql://ann@127.0.0.1:1/agent: .*refused"),
        ("postgresql://ann:correct@127.0.0.1:1,127.0.0.1:2/agent", "refused"),
        (server.dsn(user=role), "too many connections"),
    ):
        with pytest.raises(LedgerAway, match=said) as caught:
            join(address)
        assert "correct" not in str(caught.value)


def test_a_standby_is_refused_and_a_fail_over_is_waited_out(server: Server) -> None:
    """
    Who begins on a standby has named the wrong server.  Who was at work when his server became one waits.
    """
    one = join(server.dsn(), run="fail-over")
    one.enlist(STEPS)
    one.record([], [claim("a")], 1)
    standby = Server(copy_of=server).start()
    try:
        assert "read-only standby; name the primary" in refusal(lambda: join(standby.dsn(), run="fail-over"))
        seen = PostgresLedger.look(standby.dsn(), "fail-over", 5.0)
        assert [row.step for row in seen.rows()] == ["a"]
        seen.close()
        # The same worker, whose name for the server leads to the standby from one moment to the next.
        one._link._address = one._link._address.replace(str(server.port), str(standby.port))
        one._link.close()
        with pytest.raises(LedgerAway, match="read-only"):
            one.record([ending("a")], [claim("b")], 1)
        standby.execute("SELECT pg_promote()")
        assert one.record([ending("a")], [claim("b")], 1) == Recorded([claim("b")], [])
        one.close()
    finally:
        standby.remove()


def test_without_psycopg_there_is_one_clear_line() -> None:
    """
    Only a run that asks for PostgreSQL needs it.
    """
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from worker.errors import StateError\n"
        "import worker.daemon\n"
        "try: import worker.ledger.postgres\n"
        "except StateError as exc: print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install the package python3-psycopg" in done.stdout
    assert done.stdout.count("\n") == 1
