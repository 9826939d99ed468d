"""What a run keeps in PostgreSQL beside its attempts: the files that steps have saved, and items that were added."""

from collections.abc import Iterable, Iterator, Sequence

from worker.ledger import Saved
from worker.ledger.postgres import answers
from worker.ledger.postgres.link import Connection, Link


class Kept:
    """See the methods of these names of worker.ledger.Ledger."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def save_files(self, step: str, files: Sequence[Saved]) -> None:
        with self._link.call() as connection, connection.transaction():
            connection.execute("DELETE FROM agent.saved WHERE run = %(run)s AND step = %(step)s", self._asked(step))
            _save(connection, self._link, files)

    def saved(self, step: str | None) -> Iterator[Saved]:
        with self._link.call() as connection:
            found = connection.execute(_SAVED, self._asked(step), binary=True).fetchall()
        yield from answers.saved(found)

    def restore_saved(self, files: Iterable[Saved]) -> int:
        with self._link.call() as connection, connection.transaction():
            connection.execute(_LOCK, self._link.me)
            there = {step for (step,) in connection.execute(_SETTLED, self._link.me).fetchall()}
            added = [saved for saved in files if saved.step not in there]
            _save(connection, self._link, added)
        return len(added)

    def add_items(self, task: str, items: Sequence[str]) -> None:
        asked = self._link.me | {"task": task}
        with self._link.call() as connection, connection.transaction():
            connection.execute(_LOCK, self._link.me)
            known = [item for (item,) in connection.execute(_ITEMS_OF, asked).fetchall()]
            there = set(known)
            added = list(dict.fromkeys(item for item in items if item not in there))
            connection.execute(_ADD_ITEMS, asked | {"items": added, "count": len(known)})

    def items(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        with self._link.call() as connection:
            for task, item in connection.execute(_ITEMS, self._link.me).fetchall():
                found.setdefault(task, []).append(item)
        return found

    def _asked(self, step: str | None) -> dict[str, object]:
        return self._link.me | {"step": step}


def _save(connection: Connection, link: Link, files: Sequence[Saved]) -> None:
    for saved in files:
        connection.execute(_SAVE, link.me | saved._asdict())


# Whoever adds while another one does waits here, and sees what that one has added.
_LOCK = "SELECT FROM agent.runs WHERE run = %(run)s FOR UPDATE"
_SAVE = """
INSERT INTO agent.saved (run, step, name, content, size, at, change)
VALUES (%(run)s, %(step)s, %(name)s, %(content)s, %(size)s, %(at)s, nextval('agent.tokens'))
ON CONFLICT (run, step, name) DO UPDATE SET
    content = excluded.content, size = excluded.size, at = excluded.at, change = excluded.change
"""
_SAVED = """
SELECT step, name, content, size, at FROM agent.saved
WHERE run = %(run)s AND (%(step)s::text IS NULL OR step = %(step)s) ORDER BY step, name
"""
_SETTLED = """
SELECT step FROM agent.saved WHERE run = %(run)s
UNION SELECT step FROM agent.steps WHERE run = %(run)s AND state = 'done'
"""
_ITEMS_OF = "SELECT item FROM agent.items WHERE run = %(run)s AND task = %(task)s ORDER BY position"
_ITEMS = "SELECT task, item FROM agent.items WHERE run = %(run)s ORDER BY task, position"
_ADD_ITEMS = """
INSERT INTO agent.items (run, task, position, item, change)
SELECT %(run)s, %(task)s, %(count)s + place - 1, item, nextval('agent.tokens')
FROM unnest(%(items)s::text[]) WITH ORDINALITY AS added (item, place)
"""
