"""The facts of a run in PostgreSQL, and what its open attempts have said."""

from collections.abc import Mapping

from worker.ledger import Heard
from worker.ledger.postgres.link import Link
from worker.ledger.postgres.rows import RUNNING, Held, text

# Facts of one machine; all others are the run's.
_OWN = ("boot", "config", "version", "outcomes", "worked_until", "counted_end")


class Facts:
    """See the methods of these names of worker.ledger.Ledger."""

    def __init__(self, link: Link, held: Held) -> None:
        self._link = link
        self._held = held

    def fact(self, name: str) -> str | None:
        with self._link.call() as connection:
            asked = self._link.me | {"owner": owner(self._link, name), "name": name}
            found = connection.execute(_FACT, asked, binary=True).fetchone()
        return None if found is None else str(found[0])

    def note(self, facts: Mapping[str, str]) -> None:
        with self._link.call() as connection:
            connection.execute(_NOTE, self._link.me | self._named(facts))

    def add(self, amounts: Mapping[str, float], facts: Mapping[str, str], mark: tuple[str, str] | None) -> None:
        with self._link.call() as connection, connection.transaction():
            # Who comes second while the first is under way waits here, and finds it done.
            if mark is not None and not connection.execute(_MARK, self._link.me | self._named(dict([mark]))).rowcount:
                return
            connection.execute(_ADD, self._link.me | self._named({name: repr(more) for name, more in amounts.items()}))
            connection.execute(_NOTE, self._link.me | self._named(facts))

    def heard(self, said: Mapping[tuple[str, int], Heard]) -> None:
        asked = {
            "steps": [step for step, _number in said],
            "tokens": [self._held.token(step, number) for step, number in said],
            "progress": [words.progress for words in said.values()],
            "spend": [words.spend for words in said.values()],
        }
        with self._link.call() as connection:
            connection.execute(_HEARD, self._link.me | asked)

    def _named(self, facts: Mapping[str, str]) -> dict[str, list[str]]:
        names = list(facts)
        owners = [owner(self._link, name) for name in names]
        return {"owners": owners, "names": names, "values": list(map(text, facts.values()))}


def owner(link: Link, fact: str) -> str:
    """Return whose the fact of that name is: this worker's, or, as an empty text, the run's."""
    return link.member.id if fact in _OWN else ""


_FACT = "SELECT value FROM agent.facts WHERE run = %(run)s AND worker = %(owner)s AND name = %(name)s"
_NOTE = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET value = excluded.value
"""
_MARK = f"{_NOTE} WHERE facts.value <> excluded.value"
_ADD = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET
    value = (agent.facts.value::double precision + excluded.value::double precision)::text
"""
_HEARD = f"""
UPDATE agent.steps s SET progress = said.progress, spend = said.spend
FROM unnest(
    %(steps)s::text[], %(tokens)s::bigint[], %(progress)s::double precision[], %(spend)s::double precision[]
) AS said (step, token, progress, spend)
WHERE s.run = %(run)s AND s.step = ANY (%(steps)s::text[]) AND s.step = said.step
    AND {RUNNING} AND s.token = said.token AND s.life = %(life)s
"""
