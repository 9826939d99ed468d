"""Attempts in PostgreSQL: which columns make a Row, the statement that records, and which claims are in our hands."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from worker.ledger import Claim, Ending, Row

# A Row from `attempts`, and one from `steps`, where an attempt stands while it is open.
CLOSED = ", ".join(Row._fields)
OPEN = """
token, step, number, definition, started, boot, NULL::text, false, false, ''::text, NULL::integer,
NULL::double precision, 0::double precision, 0::double precision, progress, spend,
''::text, 0::bigint, 0::bigint, false, key, coalesce(nullif(former, ''), worker), item, ''::text
"""
# Our row of `workers`, locked until the commit: nothing is granted to a connection that was given up, or to a life
# that was replaced.
ME = """
SELECT FROM agent.workers
WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s AND workers.number = %(connection)s FOR SHARE
"""
# So put that the key is used to find a step, and not the index of all the running ones.  For the same reason the
# names of steps are asked for as an array as well: a server expects many of them where they come out of a function.
RUNNING = "s.state NOT IN ('open', 'done')"
# Of a row of `workers`: it was seen less than a lease ago, and not in a future that the server's clock had once.
ALIVE = """
seen > now() - lease * interval '1 second' AND seen < now() + lease * interval '1 second'
"""
# Whether another worker has nothing to do, and had better be waked.
IDLE = f"""
EXISTS (
    SELECT FROM agent.workers
    WHERE run = %(run)s AND worker <> %(worker)s AND idle AND {ALIVE})
"""
_ENDING = {
    "outcome": "text",
    "counted": "boolean",
    "final": "boolean",
    "cause": "text",
    "status": "integer",
    "ended": "double precision",
    "took": "double precision",
    "delay": "double precision",
    "progress": "double precision",
    "spend": "double precision",
    "detail": "text",
    "output_size": "bigint",
    "log_size": "bigint",
    "unsure": "boolean",
    "digest": "text",
}
# In one statement, so that a step costs one journey and one flush: endings of which the newest claim is ours, which
# become attempts; then claims of steps that are open and as far as the caller believes, or that have been given to
# us without our hearing of it.  A step that is in both needs two of these.  Of the other steps that were wanted it
# names those that have got further than the caller believes: "taken".
RECORD = f"""
WITH ended AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%(endings)s::json) AS e (
        place integer, inline boolean, step text, token bigint,
        {", ".join(f"{name} {kind}" for name, kind in _ENDING.items())})
), closed AS (
    UPDATE agent.steps s SET state = CASE ended.outcome WHEN 'done' THEN 'done' ELSE 'open' END
    FROM ended
    WHERE s.run = %(run)s AND s.step = ANY (ARRAY (SELECT step FROM ended)) AND s.step = ended.step
        AND {RUNNING} AND s.token = ended.token AND s.life = %(life)s
    RETURNING
        ended.*, s.number, s.definition, s.started, s.boot, s.key, s.item,
        coalesce(nullif(s.former, ''), s.worker) AS maker
), written AS (
    INSERT INTO agent.attempts
        (run, life, seq, step, number, definition, started, boot, key, item, worker, change, output, log,
        {", ".join(_ENDING)})
    SELECT
        %(run)s, %(life)s, token, step, number, definition, started, boot, key, item, maker, nextval('agent.tokens'),
        CASE WHEN inline THEN coalesce((%(outputs)s::bytea[])[place], '') END, (%(logs)s::bytea[])[place],
        {", ".join(_ENDING)}
    FROM closed RETURNING step, number, outcome
), kept AS (
    DELETE FROM agent.saved
    WHERE run = %(run)s AND step = ANY (ARRAY (SELECT step FROM written WHERE outcome = 'done'))
), me AS (
    {ME}
), wanted AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%(claims)s::json) AS w (
        place integer, step text, number integer, definition text, started double precision, boot text, key text,
        item text)
), picked AS (
    SELECT wanted.*
    FROM wanted
    JOIN agent.steps s ON s.run = %(run)s AND s.step = ANY (ARRAY (SELECT step FROM wanted)) AND s.step = wanted.step
    CROSS JOIN me
    WHERE (s.state = 'open' AND s.number = wanted.number - 1)
        OR (s.state = 'running' AND s.number = wanted.number AND s.life = %(life)s AND s.former = ''
            AND s.token <> ALL (%(held)s::bigint[]))
    ORDER BY s.state DESC, wanted.place
    LIMIT %(most)s
    FOR UPDATE OF s SKIP LOCKED
), claimed AS (
    UPDATE agent.steps s SET
        state = 'running', number = picked.number, token = nextval('agent.tokens'), worker = %(worker)s,
        life = %(life)s, former = '', lease_until = now() + %(lease)s * interval '1 second',
        definition = picked.definition, started = picked.started, boot = picked.boot, key = picked.key,
        item = picked.item, progress = 0, spend = 0
    FROM picked WHERE s.step = picked.step AND s.run = %(run)s
    RETURNING s.step, s.number, s.token)
SELECT 'closed', step, number, 0 FROM written
UNION ALL SELECT 'claimed', step, number, token FROM claimed
UNION ALL SELECT 'taken', s.step, s.number, 0
    FROM wanted
    JOIN agent.steps s ON s.run = %(run)s AND s.step = ANY (ARRAY (SELECT step FROM wanted)) AND s.step = wanted.step
    WHERE s.state = 'done' OR (s.state = 'running' AND s.life <> %(life)s AND s.number >= wanted.number)
UNION ALL SELECT 'idle', '', 0, 0 WHERE {IDLE}
"""


class Held:
    """The claims that we know to be ours, by step, and when we asked for them, or last renewed them."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[int, int]] = {}
        self._confirmed: dict[str, float] = {}

    def add(self, claims: Iterable[tuple[str, int, int]], asked_at: float) -> None:
        """Take in claims (step, number of the attempt, token) that were asked for at this time (monotonic clock)."""
        for step, number, token in claims:
            self._claims[step] = (number, token)
            self._confirmed[step] = asked_at

    def confirm(self, steps: Iterable[str], asked_at: float) -> None:
        """Note that these claims were renewed, as was asked for at this time."""
        self._confirmed.update((step, asked_at) for step in steps if step in self._claims)

    def confirmed_at(self, step: str) -> float:
        return self._confirmed.get(step, -math.inf)

    def forget(self, step: str, number: int) -> None:
        if self.number(step) == number:
            self._claims.pop(step, None)
            self._confirmed.pop(step, None)

    def number(self, step: str) -> int:
        return self._claims.get(step, (0, 0))[0]

    def token(self, step: str, number: int) -> int:
        """Return the token of that attempt, 0 if it is not in our hands."""
        held, token = self._claims.get(step, (0, 0))
        return token if held == number else 0

    def tokens(self) -> list[int]:
        return [token for _number, token in self._claims.values()]


def in_order(endings: Sequence[Ending], claims: Sequence[Claim]) -> list[tuple[Sequence[Ending], Sequence[Claim]]]:
    """Return what to send at a time, in one transaction: an ending and a claim of the same step need two statements."""
    ended = {ending.step for ending in endings}
    if any(claim.step in ended for claim in claims):
        return [(endings, []), ([], claims)]
    return [(endings, claims)]


def recording(endings: Sequence[Ending], claims: Sequence[Claim], held: Held) -> dict[str, Any]:
    """Return what RECORD asks of endings and claims."""
    ended = [
        {name: _plain(getattr(ending, name)) for name in _ENDING}
        | {"inline": ending.output is not None}
        | {"place": place, "step": ending.step, "token": held.token(ending.step, ending.number)}
        for place, ending in enumerate(endings, 1)
    ]
    wanted = [
        {"place": place} | {name: _plain(value) for name, value in claim._asdict().items()}
        for place, claim in enumerate(claims)
    ]
    return {
        "endings": json.dumps(ended, ensure_ascii=False),
        "outputs": _some([ending.output for ending in endings]),
        "logs": _some([ending.log for ending in endings]),
        "claims": json.dumps(wanted, ensure_ascii=False),
        # As a text, which costs the driver less than a list.
        "held": "{" + ",".join(map(str, held.tokens())) + "}",
    }


def _some(contents: list[bytes | None]) -> list[bytes | None] | None:
    """Return None for contents that are all empty, as most are."""
    return contents if any(contents) else None


def _plain(value: object) -> object:
    """Return a value for JSON, which knows no infinity; the server takes the word for it.

    JSON is sent without escapes: a database in SQL_ASCII takes any text but has no meaning for a number beyond 127.
    """
    if isinstance(value, str):
        return text(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def text(value: str) -> str:
    """Return a text that the server can store: one without NUL and halves of characters."""
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
