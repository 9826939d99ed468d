"""Whose the schema `agent` is: what another role put there could run code with our role's rights.

The owner of a table decides about its triggers, rules, defaults and indexes, and these run as the role that uses
the table.  So each object that we use must belong to our own role, to one that our role is a member of, or to a
superuser.  Membership that a superuser has of every role does not count: there is more to win from it.
"""

from typing import Any

from worker.errors import StateError
from worker.ledger.postgres.link import Connection

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "c": "a type"}
_OURS = "format", "tokens", "runs", "workers", "facts", "steps", "attempts", "effects", "saved", "items"
# No function is named without its schema, so that the same is looked for whatever search_path says.
_FIND = f"""
WITH me AS (
    SELECT oid, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user
), trusted AS (
    SELECT r.oid FROM pg_catalog.pg_roles r CROSS JOIN me
    WHERE r.oid = me.oid OR r.rolsuper OR (NOT me.rolsuper AND pg_catalog.pg_has_role(r.oid, 'MEMBER'))
), schema AS (
    SELECT oid, nspowner FROM pg_catalog.pg_namespace WHERE nspname = 'agent'
), relation AS (
    SELECT c.oid, c.relname, c.relkind, c.relowner
    FROM pg_catalog.pg_class c JOIN schema ON c.relnamespace = schema.oid
    WHERE c.relname IN ('{"', '".join(_OURS)}')
)
SELECT 0, 'the schema agent', 'owner', pg_catalog.pg_get_userbyid(nspowner)
FROM schema WHERE nspowner NOT IN (SELECT oid FROM trusted)
UNION ALL
SELECT 1, 'agent.' || relname, 'owner', pg_catalog.pg_get_userbyid(relowner)
FROM relation WHERE relowner NOT IN (SELECT oid FROM trusted)
UNION ALL
SELECT 2, 'agent.' || relname, 'kind', relkind::text FROM relation WHERE relkind NOT IN ('r', 'p', 'S')
UNION ALL
SELECT 3, 'agent.' || relname, 'rule', w.rulename
FROM relation JOIN pg_catalog.pg_rewrite w ON w.ev_class = relation.oid WHERE relkind IN ('r', 'p')
UNION ALL
SELECT 4, 'agent.' || relname, 'trigger', t.tgname
FROM relation JOIN pg_catalog.pg_trigger t ON t.tgrelid = relation.oid JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
WHERE NOT t.tgisinternal AND (t.tgqual IS NOT NULL OR p.proowner NOT IN (SELECT oid FROM trusted)
    OR p.pronamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'pg_catalog'))
ORDER BY 1, 2 LIMIT 1
"""


def check(connection: Connection, place: str) -> None:
    """Return if no other role decides what runs when we use the schema `agent`, or if there is no such schema.

    Raises StateError.  To be asked before anything in the schema is used, and again after tables have been made.
    """
    found = connection.execute(_FIND, prepare=False).fetchone()
    if found is not None:
        raise _refusal(connection, place, found)


def _refusal(connection: Connection, place: str, found: tuple[Any, ...]) -> StateError:
    _, what, problem, value = found
    if problem == "owner":
        role = _quoted(connection.info.user)
        return StateError(
            f"{place}: {what} belongs to the role '{value}', whose code would run with the rights of this worker",
            f"if that role is to be trusted, let an administrator run: GRANT {_quoted(value)} TO {role}; "
            f"if not, remove the schema: DROP SCHEMA agent CASCADE; CREATE SCHEMA agent AUTHORIZATION {role}",
        )
    if problem == "kind":
        kind = _KINDS.get(value, "something else")
        return StateError(f"{place}: {what} is {kind} and no table", "find out who made it, and remove it")
    return StateError(
        f"{place}: {what} has a {problem} '{value}', which would run with the rights of this worker",
        f"remove it: DROP {problem.upper()} {_quoted(value)} ON {what}",
    )


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))
