"""Effects in PostgreSQL: each call is one statement, or a look and one statement that holds only if nothing moved.

A claim holds for its lease, by the server's clock, and longer for nobody.  Its token alone lets it be committed, by
whichever life of a worker still has it: a step that outlives its worker commits through the next one, while a
life that was replaced can change nothing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from worker import clock
from worker.ledger.effects import (
    CLAIMED,
    CONFLICT,
    GRANTED,
    HELD,
    TAKEN_OVER,
    UNKNOWN,
    Answer,
    Effect,
)
from worker.ledger.postgres import answers
from worker.ledger.postgres.link import LONG, Connection, Link
from worker.ledger.postgres.rows import IDLE, ME

_COLUMNS = ", ".join(Effect._fields)
# Results may be large: so many at a time.
_BATCH = 50
# Somebody changes the effect between our look and our claim: look again, so many times.
_TRIES = 5


def _may_be_settled(effect: Effect) -> bool:
    return effect.state == UNKNOWN or (effect.state == CLAIMED and not effect.worker)


class PostgresEffects:
    """The effects of a run on a server; see worker.ledger.effects.Effects."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # The claims that we know to be ours.  One under our life that is not here was granted unheard.
        self._tokens: set[int] = set()
        # Claims of others that we have seen run out: token and end, and when their holders are gone (monotonic clock).
        self._silent: dict[str, tuple[tuple[int, int], float]] = {}

    def claim(self, key: str, parameters: str, step: str, lease: float, take_over: bool, claimant: str = "") -> Answer:
        asked: dict[str, Any] = {"key": key, "parameters": parameters, "step": step, "lease": lease}
        asked["claimant"] = claimant
        with self._link.call() as connection:
            for _ in range(_TRIES):
                asked |= self._link.me
                found = connection.execute(_FIND, asked, binary=True).fetchone()
                if found is None:
                    answer = self._take(connection, _CLAIM, GRANTED, asked)
                else:
                    answer = self._next(connection, found, asked, take_over)
                if answer is not None:
                    return answer
            now = connection.execute("SELECT extract(epoch FROM now())::double precision", binary=True).fetchone()
        # It changes hands all the time, or another life of ours is the one that may claim.
        at = 0.0 if now is None else float(now[0])
        return Answer(HELD, Effect(key, parameters, CLAIMED, step, 0, self._link.member.id, at))

    def renew(self, key: str, token: int, lease: float) -> bool:
        done = self._change(_RENEW, key, token, {"lease": lease})
        if done:
            self._tokens.add(token)
        return done

    def commit(self, key: str, token: int, result: bytes | None, size: int, claimant: str = "") -> bool:
        asked = {"result": result, "size": size, "claimant": claimant}
        done = self._change(_COMMIT, key, token, asked, _IS_COMMITTED)
        self._tokens.discard(token)
        return done

    def release(self, key: str, token: int, claimant: str = "") -> bool:
        done = self._change(_RELEASE, key, token, {"claimant": claimant}, _IS_GONE if token in self._tokens else "")
        self._tokens.discard(token)
        return done

    def abandon(self, key: str, token: int) -> bool:
        return self._change(_ABANDON, key, token, {})

    def settle(self, key: str, result: bytes | None) -> Effect | None:
        asked = self._link.me | {"key": key, "result": result, "size": len(result or b"")}
        with self._link.call() as connection:
            with connection.transaction():
                found = connection.execute(f"{_FIND} FOR UPDATE", asked, binary=True).fetchone()
                if found is None or not _may_be_settled(_effect(found)):
                    return None
                connection.execute(_FORGET if result is None else _SETTLE, asked)
            self._link.wake(connection)
        return _effect(found)

    def all(self) -> Iterator[Effect]:
        last: str | None = None
        while True:
            with self._link.call() as connection:
                asked = self._link.me | {"last": last, "batch": _BATCH}
                found = connection.execute(_ALL, asked, binary=True).fetchall()
            yield from map(Effect._make, found)
            if len(found) < _BATCH:
                return
            last = found[-1][0]

    def restore(self, effects: Iterable[Effect]) -> int:
        entries = [{"run": self._link.run, **effect._asdict()} for effect in effects]
        if not entries:
            return 0
        with self._link.call(LONG) as connection, connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(_RESTORE, entries)
            return cursor.rowcount

    def _next(
        self, connection: Connection, found: tuple[Any, ...], asked: dict[str, Any], take_over: bool
    ) -> Answer | None:
        """Return what follows for an effect that is there, or None if it has moved meanwhile."""
        effect, (life, valid, until, lease) = _effect(found), found[len(Effect._fields) :]
        seen = asked | {"token": effect.token, "until": until}
        ours = effect.worker == self._link.member.id
        # An effect that was let go of, or came in a checkpoint, has no holder who could still say a word.
        gone = not effect.worker or (ours and life != self._link.life)
        gone = gone or (effect.state == CLAIMED and not valid and self._stays_silent(effect, until, lease))
        if effect.parameters != asked["parameters"]:
            if effect.state == CLAIMED and gone:
                self._take(connection, _GIVE_UP, UNKNOWN, seen)  # so that a person sees it
            return Answer(CONFLICT, effect)
        verdict = TAKEN_OVER if effect.taken else GRANTED
        mine = effect.claimant == asked["claimant"]
        if effect.state in (CLAIMED, UNKNOWN) and mine and effect.claimant:
            return self._take(connection, _AGAIN, verdict, seen)  # its asker never heard of the claim
        if effect.state == UNKNOWN and take_over:
            return self._take(connection, _TAKE_OVER, TAKEN_OVER, seen)
        if effect.state != CLAIMED:
            return Answer(effect.state, effect)
        unheard = ours and life == self._link.life and effect.token not in self._tokens
        if unheard and mine and effect.step == asked["step"]:
            return self._take(connection, _HEAR, verdict, seen)
        if not gone:
            return Answer(HELD, effect)
        if take_over:
            return self._take(connection, _TAKE_OVER, TAKEN_OVER, seen)
        return self._take(connection, _GIVE_UP, UNKNOWN, seen)

    def _stays_silent(self, effect: Effect, until: int, lease: float) -> bool:
        """Return whether a claim that has run out was the same half a lease ago, so that its holder is gone.

        See worker.ledger.Ledger.orphans: a clock that jumps takes no claim from the living.
        """
        if not self._link.may_take_over():
            return False
        now, claim = clock.monotonic(), (effect.token, until)
        known, gone_at = self._silent.get(effect.key, (claim, now + lease / 2))
        if known != claim:
            gone_at = now + lease / 2
        self._silent[effect.key] = claim, gone_at
        return now >= gone_at

    def _take(self, connection: Connection, query: str, verdict: str, asked: dict[str, Any]) -> Answer | None:
        found = connection.execute(query, asked, binary=True).fetchone()
        if found is None:
            return None
        effect = _effect(found)
        if verdict != UNKNOWN:
            self._tokens.add(effect.token)
        return Answer(verdict, effect)

    def _change(self, query: str, key: str, token: int, values: dict[str, Any], otherwise: str = "") -> bool:
        """Return whether the statement changed the claim, or, if it did not, whether `otherwise` finds that it had.

        It returns whether there is somebody to wake.
        """
        with self._link.call() as connection:
            asked = self._link.me | {"key": key, "token": token} | values
            changed = connection.execute(query, asked).fetchone()
            if changed is not None and changed[0]:
                self._link.wake(connection)
            return changed is not None or bool(otherwise and connection.execute(otherwise, asked).fetchone())


def _effect(found: tuple[Any, ...]) -> Effect:
    return answers.effect(found[: len(Effect._fields)])


_NOW = "extract(epoch FROM clock_timestamp())::double precision"
_LEASE = "now() + %(lease)s * interval '1 second'"
_UNTIL = "(extract(epoch FROM lease_until) * 1000000)::bigint"
# One that ends later than a lease from now was made before the clock of the database was put back.
_VALID = "lease_until >= now() AND (lease = 0 OR lease_until <= now() + lease * interval '1 second')"
_ME = f"({ME})"
_LIVING = """
EXISTS (SELECT FROM agent.workers WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s)
"""
_IT = "run = %(run)s AND key = %(key)s AND token = %(token)s"
_CLAIMANTS = "claimant IN ('', %(claimant)s)"
_HELD = f"{_IT} AND state = 'claimed'"
_FIND = f"""
SELECT {_COLUMNS}, life, {_VALID}, {_UNTIL}, lease FROM agent.effects WHERE run = %(run)s AND key = %(key)s
"""
_CLAIM = f"""
INSERT INTO agent.effects
    (run, key, parameters, state, step, token, worker, life, lease_until, lease, at, size, change,
    claimant)
SELECT
    %(run)s, %(key)s, %(parameters)s, 'claimed', %(step)s, drawn.token, %(worker)s, %(life)s, {_LEASE}, %(lease)s,
    {_NOW}, 0, drawn.token, %(claimant)s
FROM (SELECT nextval('agent.tokens') AS token) drawn WHERE EXISTS {_ME}
ON CONFLICT (run, key) DO NOTHING RETURNING {_COLUMNS}
"""
_HEAR = f"UPDATE agent.effects SET lease_until = {_LEASE}, lease = %(lease)s WHERE {_HELD} RETURNING {_COLUMNS}"
_AGAIN = f"""
UPDATE agent.effects SET
    token = nextval('agent.tokens'), state = 'claimed', worker = %(worker)s, life = %(life)s, lease_until = {_LEASE},
    lease = %(lease)s, at = {_NOW}, change = nextval('agent.tokens')
WHERE {_IT} AND claimant = %(claimant)s AND state <> 'committed' AND EXISTS {_ME} RETURNING {_COLUMNS}
"""
# A holder that was gone when we looked may have renewed its claim since.
_GONE = f"state = 'claimed' AND {_UNTIL} = %(until)s"
_TAKE_OVER = f"""
UPDATE agent.effects SET
    token = nextval('agent.tokens'), state = 'claimed', step = %(step)s, worker = %(worker)s, life = %(life)s,
    taken = true, claimant = %(claimant)s, lease_until = {_LEASE}, lease = %(lease)s, at = {_NOW},
    change = nextval('agent.tokens')
WHERE {_IT} AND (state = 'unknown' OR ({_GONE})) AND EXISTS {_ME} RETURNING {_COLUMNS}
"""
_GIVE_UP = f"""
UPDATE agent.effects SET
    state = 'unknown', worker = '', life = '', at = {_NOW}, change = nextval('agent.tokens')
WHERE {_IT} AND {_GONE} AND EXISTS {_ME} RETURNING {_COLUMNS}
"""
_RENEW = f"""
UPDATE agent.effects SET worker = %(worker)s, life = %(life)s, lease_until = {_LEASE}, lease = %(lease)s
WHERE {_HELD} AND {_LIVING} RETURNING false
"""
_COMMIT = f"""
UPDATE agent.effects SET
    state = 'committed', worker = '', life = '', at = {_NOW}, result = %(result)s, size = %(size)s,
    change = nextval('agent.tokens')
WHERE {_IT} AND {_CLAIMANTS} AND state <> 'committed' AND {_LIVING} RETURNING {IDLE}
"""
_IS_COMMITTED = f"SELECT true FROM agent.effects WHERE {_IT} AND {_CLAIMANTS} AND state = 'committed'"
_RELEASE = f"DELETE FROM agent.effects WHERE {_HELD} AND {_CLAIMANTS} AND {_LIVING} RETURNING {IDLE}"
_IS_GONE = """
SELECT true WHERE NOT EXISTS (SELECT FROM agent.effects WHERE run = %(run)s AND key = %(key)s)
"""
_ABANDON = f"""
UPDATE agent.effects SET
    worker = '', life = '', lease_until = to_timestamp(0), at = {_NOW}, change = nextval('agent.tokens')
WHERE {_HELD} AND {_LIVING} RETURNING {IDLE}
"""
_FORGET = "DELETE FROM agent.effects WHERE run = %(run)s AND key = %(key)s"
_SETTLE = f"""
UPDATE agent.effects SET
    state = 'committed', at = {_NOW}, result = %(result)s, size = %(size)s, change = nextval('agent.tokens')
WHERE run = %(run)s AND key = %(key)s
"""
_ALL = f"""
SELECT {_COLUMNS} FROM agent.effects
WHERE run = %(run)s AND (%(last)s::text IS NULL OR key > %(last)s) ORDER BY key LIMIT %(batch)s
"""
_RESTORE = f"""
INSERT INTO agent.effects AS e (run, {_COLUMNS}, change)
VALUES (%(run)s, %(key)s, %(parameters)s, %(state)s, %(step)s, nextval('agent.tokens'), '', %(at)s, %(result)s,
    %(size)s, '', false, nextval('agent.tokens'))
ON CONFLICT (run, key) DO UPDATE SET
    parameters = excluded.parameters, state = excluded.state, step = excluded.step, token = excluded.token,
    worker = '', life = '', claimant = '', taken = false, lease_until = to_timestamp(0), at = excluded.at,
    result = excluded.result, size = excluded.size, change = excluded.change
WHERE e.state <> 'committed' AND excluded.state = 'committed'
"""
