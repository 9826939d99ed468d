"""The steps of a run in PostgreSQL: the plan that all its workers share, and what a checkpoint brings back."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import psycopg

from worker import plural
from worker.errors import StateError
from worker.ledger import DONE, LedgerAway, Row
from worker.ledger.postgres.link import Connection, Link
from worker.ledger.postgres.rows import ALIVE, text
from worker.ledger.postgres.usage import RESTORED

# Of those who are in the way, so many are named.
_NAMED = 3


def enlist(
    connection: Connection,
    link: Link,
    steps: Sequence[tuple[str, str]],
    identity: Sequence[tuple[str, str]],
    found: Collection[str],
) -> dict[str, bool] | None:
    """Let `steps` be the plan of the run, unless others are at work on one of another identity; see Ledger.enlist.

    What has been tried stays as it is, whether it is in the list or not; what has not and is no longer in the
    list is gone, unless others are at work.
    """
    plan = _digest(identity)
    whole = list(identity) == list(steps)
    values = link.me | {"plan": plan}
    theirs: dict[str, bool] | None = None
    with connection.transaction():
        before = connection.execute("SELECT plan FROM agent.runs WHERE run = %(run)s FOR UPDATE", values).fetchone()
        if before is None:
            raise StateError(f"{link.place}: the run '{link.run}' is gone", "start again to make it anew")
        if before[0] != plan or not whole:
            others = connection.execute(_OTHERS, values).fetchall()
            if others and before[0] != plan:
                raise _taken(link.run, [worker for (worker,) in others])
            known = {step: (untried, done) for step, untried, done in connection.execute(_STEPS, values)}
            if connection.execute(_AT_WORK, values).fetchone() is None:
                _replace(connection, values, dict(steps), known)
            else:
                mine = set(found)
                added = [step for step, _definition in steps if step not in known and step not in mine]
                connection.execute(_ADD, values | {"steps": added})
                theirs = {step: done for step, (_untried, done) in known.items()} | dict.fromkeys(added, False)
            connection.execute("UPDATE agent.runs SET plan = %(plan)s WHERE run = %(run)s", values)
        connection.execute(_WORK_ON, values)
    return theirs


def _replace(
    connection: Connection, values: dict[str, object], listed: Mapping[str, str], known: Mapping[str, tuple[bool, bool]]
) -> None:
    """Let the run have the steps that are listed, and those that were tried."""
    # Compared here: how a server would go about it depends on what it takes the sizes for.
    gone = [step for step, (untried, _done) in known.items() if untried and step not in listed]
    connection.execute(_DROP, values | {"steps": gone})
    connection.execute(_ADD, values | {"steps": [step for step in listed if step not in known]})


def restore(connection: Connection, link: Link, entries: Sequence[tuple[Row, bytes | None]]) -> int:
    """Add attempts that are not known here; see Ledger.restore.

    An attempt that is known is replaced only if it is done by what we are told.  Then whoever is at it has lost
    its claim: the step is done.
    """
    try:
        with connection.transaction():
            connection.execute("SELECT FROM agent.runs WHERE run = %(run)s FOR UPDATE", link.me)
            fresh = _unknown(connection, link, entries)
            replaced = {
                "steps": [row.step for row, _output in fresh],
                "numbers": [row.number for row, _output in fresh],
            }
            connection.execute(_REPLACE, link.me | replaced)
            found = connection.execute("SELECT nextval('agent.tokens') FROM generate_series(1, %s)", (len(fresh),))
            tokens = [token for (token,) in found]
            closed = [(token, *entry) for token, entry in zip(tokens, fresh, strict=True) if entry[0].outcome]
            with connection.cursor().copy(_COPY) as copy:
                for token, row, output in closed:
                    copy.write_row((link.run, token, output, *_values(row._replace(seq=token))))
            connection.execute(_SETTLE, link.me | {"tokens": tokens})
            for row, _output in fresh:
                if row.outcome is None:
                    connection.execute(_REOPEN, link.me | row._asdict())
            if tokens:
                connection.execute(_RESTORED, link.me | {"name": RESTORED, "value": str(max(tokens))})
    except psycopg.errors.UniqueViolation as exc:
        raise LedgerAway(f"{link.place}: others have just recorded the same; looking again") from exc
    return len(fresh)


def _unknown(
    connection: Connection, link: Link, entries: Sequence[tuple[Row, bytes | None]]
) -> list[tuple[Row, bytes | None]]:
    """Return those entries that say more than the database knows, each attempt and each done step once."""
    known: set[tuple[str, int]] = set()
    done: set[str] = set()
    running: set[str] = set()
    for step, number, outcome in connection.execute(_KNOWN, link.me):
        known.add((step, number))
        if outcome is None:
            running.add(step)
        elif outcome == DONE:
            done.add(step)
    fresh = []
    for row, output in entries:
        if row.step in done or (row.outcome != DONE and (row.step in running or (row.step, row.number) in known)):
            continue
        known.add((row.step, row.number))
        if row.outcome == DONE:
            done.add(row.step)
        fresh.append((row, output))
    return fresh


def _values(row: Row) -> list[object]:
    """Return the values of a row as the server takes them, whatever a checkpoint took for truth and text."""
    values: list[object] = []
    for name, value in row._asdict().items():
        flag = name in ("counted", "final", "unsure")
        values.append(bool(value) if flag else text(value) if isinstance(value, str) else value)
    return values


def _digest(steps: Sequence[tuple[str, str]]) -> str:
    known = hashlib.sha256()
    for step, definition in steps:
        known.update(f"{step}\0{definition}\0".encode(errors="surrogatepass"))
    return known.hexdigest()


def _taken(run: str, workers: Sequence[str]) -> StateError:
    names = ", ".join(workers[:_NAMED]) + (", ..." if len(workers) > _NAMED else "")
    others = plural.of(len(workers), "other worker")
    what = f"run '{run}' is being worked on by {others} with another task list ({names})"
    return StateError(what, "stop them, or give this list another 'run:' name")


# A worker that has joined and not yet said what its plan is stands in nobody's way.
_OTHERS = f"""
SELECT worker FROM agent.workers
WHERE run = %(run)s AND worker <> %(worker)s AND plan <> '' AND plan <> %(plan)s
    AND {ALIVE}
ORDER BY worker
"""
_AT_WORK = """
SELECT FROM agent.workers
WHERE run = %(run)s AND worker <> %(worker)s AND plan <> '' AND seen + lease * interval '1 second' > now() LIMIT 1
"""
_STEPS = "SELECT step, state = 'open' AND number = 0, state = 'done' FROM agent.steps WHERE run = %(run)s"
_DROP = """
DELETE FROM agent.steps
WHERE run = %(run)s AND step = ANY (%(steps)s::text[]) AND state = 'open' AND number = 0
"""
_ADD = """
INSERT INTO agent.steps (run, step) SELECT %(run)s, * FROM unnest(%(steps)s::text[])
ON CONFLICT (run, step) DO NOTHING
"""
_WORK_ON = """
UPDATE agent.workers SET plan = %(plan)s, seen = now()
WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s
"""
_KNOWN = """
SELECT step, number, outcome FROM agent.attempts WHERE run = %(run)s
UNION ALL SELECT step, number, NULL FROM agent.steps WHERE run = %(run)s AND state = 'running'
"""
_REPLACE = """
DELETE FROM agent.attempts a USING unnest(%(steps)s::text[], %(numbers)s::integer[]) AS fresh (step, number)
WHERE a.run = %(run)s AND a.step = fresh.step AND a.number = fresh.number
"""
_COPY = f"COPY agent.attempts (run, change, output, {', '.join(Row._fields)}) FROM STDIN"
_SETTLE = """
INSERT INTO agent.steps AS s (run, step, state, number, token)
SELECT run, step, CASE WHEN bool_or(outcome = 'done') THEN 'done' ELSE 'open' END, max(number), max(seq)
FROM agent.attempts WHERE run = %(run)s AND seq = ANY (%(tokens)s::bigint[]) GROUP BY run, step
ON CONFLICT (run, step) DO UPDATE SET
    state = excluded.state, number = greatest(s.number, excluded.number), token = excluded.token
WHERE s.state <> 'done' AND (s.state = 'open' OR excluded.state = 'done')
"""
# An attempt that was open: its holder is not known to be anywhere, so it is taken over by whoever looks next.
_REOPEN = """
INSERT INTO agent.steps AS s (run, step, state, number, token, worker, definition, started, boot, key,
    item, progress, spend)
VALUES (%(run)s, %(step)s, 'running', %(number)s, nextval('agent.tokens'), %(worker)s, %(definition)s, %(started)s,
    %(boot)s, %(key)s, %(item)s, %(progress)s, %(spend)s)
ON CONFLICT (run, step) DO UPDATE SET
    state = 'running', number = excluded.number, token = excluded.token, worker = excluded.worker, life = '',
    former = '', lease_until = to_timestamp(0), definition = excluded.definition, started = excluded.started,
    boot = excluded.boot, key = excluded.key, item = excluded.item, progress = excluded.progress,
    spend = excluded.spend
WHERE s.state = 'open' AND s.number < excluded.number
"""
_RESTORED = """
INSERT INTO agent.facts (run, worker, name, value) VALUES (%(run)s, '', %(name)s, %(value)s)
ON CONFLICT (run, worker, name) DO UPDATE SET value = excluded.value
"""
