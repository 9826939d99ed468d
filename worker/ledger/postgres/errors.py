"""What a PostgreSQL server says when something goes wrong, and what that means for a worker.

Wait and call again (LedgerAway): it is away, starting, full, failing over, or took too long.  Of no use to wait
(StateError): it does not let us in.  No message here holds a password.
"""

import re
from collections.abc import Mapping

import psycopg
from psycopg import conninfo

from worker.errors import StateError
from worker.ledger import LedgerAway, LedgerBusy, LedgerCorrupt

_FORM = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE; in a password write %40 for @, %2F for /, %3A for :, %25 for %"

# What a server, or our own library, says of a connection that no patience mends.  It gives no code for these; a
# server that says them in another language is taken to be away, and its words are shown all the same.
_REFUSED = re.compile(
    r"authentication failed|no password supplied|authentication method|pg_hba\.conf|"
    r'(role|database) ".*" (does not exist|is not permitted)|permission denied for database|'
    r"SSL was required|support SSL|certificate|channel binding|invalid \w+ value|bad value for"
)
# SQLSTATE classes: connection, resources (a full disk, too many connections), operator's intervention, system error,
# internal error; rollback, as for a deadlock or a conflict of serializable transactions.
_AWAY = ("08", "53", "57", "58", "XX")
_ROLLED_BACK = "40"
# A prepared statement that does not exist, or exists already: it was another connection's, so there is a pool.
_POOLED = ("26000", "42P05")
_READ_ONLY = "25006"
# Lock not available; ended for being idle in a transaction; in a transaction that has failed.
_AWAY_CODES = ("55P03", "25P03", "25P02")
_DAMAGED = ("XX001", "XX002")
_FORBIDDEN = "42501"
_GONE = ("42P01", "3F000", "42703", "3D000")  # no such table, schema, column, database
# No such function or operator, types that do not go together, no unique index, no value where one is due, a text that
# is no value of its type: what our statements are about is not as we have made it.
_CHANGED = ("42883", "42804", "42846", "42809", "42P10", "42P18", "42725", "23502", "22P02", "2200G")


def parse(dsn: str) -> dict[str, str]:
    """Return the parameters of an address, a URI or NAME=VALUE pairs.  Raises StateError, quoting none of it."""
    try:
        found = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.ProgrammingError:  # its text may hold what was meant to be the password
        raise StateError("ledger: this is not the address of a PostgreSQL server", f"write {_FORM}") from None
    if not _is_sound(found):
        raise StateError("ledger: the address of the PostgreSQL server falls apart", f"write {_FORM}")
    return found


def describe(dsn: str) -> str:
    """Return an address for messages: who, where and which database, and nothing secret."""
    try:
        return show(parse(dsn))
    except StateError:
        return "the PostgreSQL server"


def show(parameters: Mapping[str, str]) -> str:
    """Return `describe` of an address in parts."""
    hosts = parameters.get("host", parameters.get("hostaddr", "")).split(",")
    ports = parameters.get("port", "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    places = ",".join(host + (f":{port}" if port else "") for host, port in zip(hosts, ports, strict=False))
    user, database = parameters.get("user", ""), parameters.get("dbname", "")
    return f"postgresql://{user}{'@' if user else ''}{places}{'/' if database else ''}{database}"


def on_connecting(exc: psycopg.Error, place: str, first: bool) -> Exception:
    """Return what to raise for a connection that failed; only the `first` one is refused for good.

    Later on a worker may have hours of work in hand: who mends the server in the meantime loses none of it.
    """
    text = str(exc)
    refused = _REFUSED.search(text)
    if refused is None:
        return LedgerAway(f"{place}: {_words(text.splitlines()[0])}")
    line = text[text.rfind("\n", 0, refused.start()) + 1 :].splitlines()[0]
    if first and "cleartext password" in line:
        what = f"{place}: the server asks for the password in clear, before it has proved which server it is"
        return StateError(what, "add ?sslmode=verify-full to 'ledger:'; or let it ask for scram-sha-256 (pg_hba.conf)")
    if first:
        return StateError(f"{place}: {_words(line)}", "mend 'ledger:' in the task list, or the server, and start again")
    return LedgerAway(f"{place}: {_words(line)}")


def on_calling(exc: psycopg.Error, place: str, first: bool) -> Exception:
    """Return what to raise for a statement that failed; `first`: before we had taken part in the run."""
    code, words = exc.sqlstate, _words(str(exc).splitlines()[0] if str(exc) else type(exc).__name__)
    if code is None or code in _DAMAGED:
        lost = isinstance(exc, (psycopg.OperationalError, psycopg.InterfaceError))
        # Of our own library: a value that cannot be read, rows that are not there where some were due.
        if code or isinstance(exc, psycopg.DataError) or "produce records" in words:
            return LedgerCorrupt(f"{place}: {words}")
        lost = lost or type(exc) is psycopg.DatabaseError  # what came was not PostgreSQL's language
        return LedgerAway(f"{place}: {words}") if lost else exc
    if code == _READ_ONLY:
        return standby(place) if first else LedgerAway(f"{place}: it is read-only now, as in a fail-over")
    if code.startswith(_ROLLED_BACK):
        return LedgerBusy(f"{place}: {words}")
    if code in _POOLED:
        return pooled(place, first)
    if code in _AWAY_CODES or code.startswith(_AWAY):
        return LedgerAway(f"{place}: {words}")
    if code in (_FORBIDDEN, *_GONE, *_CHANGED) and not first:  # somebody is mending the database, or is about to
        return LedgerAway(f"{place}: {words}")
    if code == _FORBIDDEN:
        return StateError(f"{place}: {words}", _way_in(words, place))
    if code in _GONE:
        return StateError(f"{place}: {words}", "the agent's tables are not what they were; start again to make them")
    if code in _CHANGED:
        return StateError(
            f"{place}: {words}", "the agent's tables were changed; put them back, or let the schema be made anew"
        )
    if isinstance(exc, (psycopg.IntegrityError, psycopg.DataError)):
        return ValueError(f"the ledger refuses this: {words}")
    return exc


def standby(place: str, recovering: bool = True) -> StateError:
    """Return what to raise when the server takes no writes; `recovering`: it follows another one."""
    if not recovering:
        hint = "set default_transaction_read_only = off for this user, this database or the server"
        return StateError(f"{place} is set to be read-only (default_transaction_read_only)", hint)
    hint = "name the primary, or several hosts with target_session_attrs=read-write"
    return StateError(f"{place} is a read-only standby", hint)


def pooled(place: str, first: bool) -> Exception:
    """Return what to raise for a pool that gives our transactions to one connection of the server after another."""
    what = f"{place} is a connection pool in transaction mode, in which a worker's connection is not its own"
    if not first:
        return LedgerAway(what)
    return StateError(what, "name the server itself in 'ledger:', or a pool with pool_mode=session")


def _way_in(words: str, place: str) -> str:
    """Return what gives the user of `place` the right that is missing."""
    user = re.match(r"postgresql://([^@/]+)@", place)
    role = '"{}"'.format(user[1].replace('"', '""')) if user else "USER"
    if "must be owner" in words:
        return "start the agent once as the owner of the schema 'agent', which brings its tables up to date"
    if "for database" in words:
        return f"let an administrator run, in this database: CREATE SCHEMA agent AUTHORIZATION {role}"
    rights = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES", "USAGE, SELECT ON ALL SEQUENCES"
    all_of_it = "; ".join(f"GRANT {right} IN SCHEMA agent TO {role}" for right in rights)
    return f"let its owner run, in this database: GRANT USAGE ON SCHEMA agent TO {role}; {all_of_it}"


def _words(line: str) -> str:
    """Return the end of a line, which says what happened; what is before it says to whom, as `place` does."""
    return re.split(r"failed: (?:FATAL: +)?|connection is bad: ", line)[-1].strip()


def _is_sound(parameters: Mapping[str, str]) -> bool:
    """Return whether no part of a password has ended up in other parts, as an unescaped @ or / makes it."""
    names = "host", "hostaddr", "dbname"
    numbers = [port for port in parameters.get("port", "").split(",") if port]
    return all(map(str.isdecimal, numbers)) and not any("@" in parameters.get(name, "") for name in names)
