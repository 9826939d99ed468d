"""The facts of a run in PostgreSQL, and what all its attempts have spent."""

from collections.abc import Mapping
from typing import Any

from worker.ledger.postgres.link import Link
from worker.ledger.postgres.rows import RUNNING, Held, text

# Facts of one machine; all others are the run's.
_OWN = ("boot", "config", "version", "outcomes", "worked_until")


class Facts:
    """See the methods of these names of worker.ledger.Ledger."""

    def __init__(self, link: Link, held: Held) -> None:
        self._link = link
        self._held = held

    def fact(self, name: str) -> str | None:
        found = self._one(_FACT, {"owner": self._owner(name), "name": name})
        return None if found is None else found[0]

    def note(self, facts: Mapping[str, str]) -> None:
        with self._link.call() as connection:
            connection.execute(_NOTE, self._link.me | self._named(facts))

    def add(self, amounts: Mapping[str, float], facts: Mapping[str, str]) -> None:
        with self._link.call() as connection, connection.transaction():
            connection.execute(_ADD, self._link.me | self._named({name: repr(more) for name, more in amounts.items()}))
            connection.execute(_NOTE, self._link.me | self._named(facts))

    def spent(self, amounts: Mapping[tuple[str, int], float]) -> None:
        tokens = [self._held.token(step, number) for step, number in amounts]
        asked = {"steps": [step for step, _number in amounts], "tokens": tokens, "amounts": list(amounts.values())}
        with self._link.call() as connection:
            connection.execute(_SPENT, self._link.me | asked)

    def spending(self) -> float:
        found = self._one(_SPENDING, {})
        return 0.0 if found is None else float(found[0])

    def _one(self, query: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
        with self._link.call() as connection:
            return connection.execute(query, self._link.me | values, binary=True).fetchone()

    def _named(self, facts: Mapping[str, str]) -> dict[str, list[str]]:
        names = list(facts)
        return {"owners": list(map(self._owner, names)), "names": names, "values": list(map(text, facts.values()))}

    def _owner(self, fact: str) -> str:
        return self._link.member.id if fact in _OWN else ""


_FACT = "SELECT value FROM agent.facts WHERE run = %(run)s AND worker = %(owner)s AND name = %(name)s"
_NOTE = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET value = excluded.value
"""
_ADD = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET
    value = (agent.facts.value::double precision + excluded.value::double precision)::text
"""
_SPENT = f"""
UPDATE agent.steps s SET spend = said.amount
FROM unnest(%(steps)s::text[], %(tokens)s::bigint[], %(amounts)s::double precision[]) AS said (step, token, amount)
WHERE s.run = %(run)s AND s.step = ANY (%(steps)s::text[]) AND s.step = said.step
    AND {RUNNING} AND s.token = said.token AND s.life = %(life)s
"""
_SPENDING = """
SELECT coalesce((SELECT sum(spend) FROM agent.attempts WHERE run = %(run)s), 0)
    + coalesce((SELECT sum(spend) FROM agent.steps WHERE run = %(run)s AND state = 'running'), 0)
"""
