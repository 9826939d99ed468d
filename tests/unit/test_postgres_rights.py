"""The ledger in PostgreSQL where other roles of the database are not to be trusted."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.postgres import PASSWORD, Pool, Server
from tests.unit.test_ledger import STEPS, claim, ending

pytest.importorskip("psycopg")
from tests.unit.test_postgres_server import join, refusal
from worker.ledger.postgres import PostgresLedger, owners, schema

# What mallory's code does when it runs: it says as whom, and takes what only that role may read.
LOOT = """
    INSERT INTO public.loot SELECT current_user::text, secret FROM public.secrets;
"""


class Roles:
    """Two roles of one database: the worker's, which alone may read `secrets`, and mallory's, who may make things."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.dsn = server.empty_database()
        tag = os.urandom(4).hex()
        self.worker, self.mallory = f"worker_{tag}", f"mallory_{tag}"
        for role in (self.worker, self.mallory):
            self.admin(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
        self.admin(f"GRANT CREATE ON DATABASE scratch TO {self.worker}, {self.mallory}")
        self.admin(f"GRANT CREATE ON SCHEMA public TO {self.mallory}")  # as before PostgreSQL 15
        self.admin(f"CREATE TABLE public.secrets AS SELECT 'of {self.worker}' AS secret")
        self.admin(f"ALTER TABLE public.secrets OWNER TO {self.worker}")
        self.admin("CREATE TABLE public.loot (role text, secret text)")
        self.admin(f"GRANT ALL ON public.loot TO {self.worker}, {self.mallory}")

    def admin(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.execute(statement, database="scratch")

    def as_mallory(self, statements: str) -> None:
        self.admin(f"SET ROLE {self.mallory}; {statements}")

    def function(self, name: str, returns: str, result: str, language: str = "plpgsql") -> None:
        body = f"BEGIN {LOOT} RETURN {result}; END"
        self.as_mallory(f"CREATE FUNCTION {name} RETURNS {returns} LANGUAGE {language} AS $$ {body} $$")

    def address(self) -> str:
        return self.server.dsn("scratch", self.worker)

    def loot(self) -> list[tuple[object, ...]]:
        return self.admin("SELECT * FROM public.loot")

    def remove(self) -> None:
        self.admin("DROP SCHEMA IF EXISTS agent CASCADE")
        for role in (self.worker, self.mallory):
            self.admin(f"DROP OWNED BY {role} CASCADE")
            self.admin(f"DROP ROLE {role}")
        self.admin("DROP TABLE IF EXISTS public.loot")


@pytest.fixture
def roles(server: Server) -> Iterator[Roles]:
    made = Roles(server)
    yield made
    made.remove()


def work(dsn: str) -> None:
    """Do something of everything that a worker does with its ledger."""
    run = f"run-{os.urandom(4).hex()}"
    one = join(dsn, run=run)
    one.enlist(STEPS)
    assert one.record([], [claim("a")], 1).claims == [claim("a")]
    one.renew(["a"])
    one.heard({})
    one.note({"config": "here"})
    one.record([ending("a")], [], 0)
    one.news(idle=True)
    one.orphans()
    list(one.rows())
    list(one.saved())
    one.items()
    one.revision()
    one.close()
    PostgresLedger.look(dsn, run, 5.0).close()


@pytest.mark.parametrize(
    "function",
    [
        ("public.nextval(text)", "bigint", "pg_catalog.nextval($1::regclass)"),
        ("public.now(text)", "timestamptz", "pg_catalog.now()"),
        ("public.to_timestamp(integer)", "timestamptz", "pg_catalog.to_timestamp($1::double precision)"),
        ("public.set_config(text, text, boolean)", "text", "pg_catalog.set_config($1, $2, $3)"),
    ],
    ids=lambda function: function[0],
)
def test_no_function_of_another_role_stands_in_for_postgresqls_own(
    roles: Roles, function: tuple[str, str, str]
) -> None:
    """
    S19: who may make functions in `public` makes one that fits a call of ours better than PostgreSQL's.
    """
    name, returns, result = function
    roles.function(name, returns, result)
    work(roles.address())
    assert roles.loot() == []


@pytest.mark.parametrize("operator", ["=", "<", "<>", "+"])
def test_no_operator_of_another_role_stands_in_for_postgresqls_own(roles: Roles, operator: str) -> None:
    """
    S19: likewise with operators, for a pair of types for which PostgreSQL has none that fits exactly.
    """
    types = ("text", "varchar"), ("bigint", "numeric"), ("integer", "smallint"), ("double precision", "numeric")
    for number, (left, right) in enumerate(types):
        result = "boolean" if operator != "+" else "bigint"
        value = "true" if operator != "+" else "1"
        roles.function(f"public.f{number}({left}, {right})", result, value)
        roles.as_mallory(
            f"CREATE OPERATOR public.{operator} (FUNCTION = public.f{number}, LEFTARG = {left}, RIGHTARG = {right})"
        )
    work(roles.address())
    assert roles.loot() == []


def test_a_session_that_a_pool_lends_looks_nowhere_else_either(roles: Roles) -> None:
    """
    S19: a pool in session mode refuses startup options and keeps what was set before; each connection of ours sets it.
    """
    roles.function("public.nextval(text)", "bigint", "pg_catalog.nextval($1::regclass)")
    pool = Pool(roles.server, "session")
    try:
        roles.admin("CREATE SCHEMA agent")
        work(pool.dsn("scratch"))
    finally:
        pool.close()
    assert roles.loot() == []


def test_a_schema_of_another_role_is_not_used(roles: Roles) -> None:
    """
    S19: mallory was first, and put a trigger on the tables; nothing of it runs, and it is said what to do.
    """
    roles.as_mallory("CREATE SCHEMA agent")
    roles.as_mallory(schema.SCHEMA)
    roles.as_mallory(f"INSERT INTO agent.format VALUES (1, {schema.VERSION})")
    roles.function("agent.steal()", "trigger", "NEW")
    roles.as_mallory("CREATE TRIGGER steal BEFORE INSERT ON agent.runs FOR EACH ROW EXECUTE FUNCTION agent.steal()")
    roles.as_mallory("GRANT ALL ON SCHEMA agent TO PUBLIC")
    roles.as_mallory("GRANT ALL ON ALL TABLES IN SCHEMA agent TO PUBLIC")
    roles.as_mallory("GRANT ALL ON ALL SEQUENCES IN SCHEMA agent TO PUBLIC")

    said = refusal(lambda: join(roles.address()))
    assert f"the schema agent belongs to the role '{roles.mallory}'" in said
    assert said == refusal(lambda: PostgresLedger.look(roles.address(), "run", 5.0)), "looking is no safer"
    assert roles.loot() == []

    found = re.search(r"let an administrator run: (GRANT .*?);", said)
    assert found is not None, said
    roles.admin("DROP TRIGGER steal ON agent.runs")
    roles.admin(found[1])
    work(roles.address())


def test_a_superuser_is_no_member_of_everybody(roles: Roles) -> None:
    """
    S19: a worker that is a superuser has the most to lose, though PostgreSQL calls it a member of each role.
    """
    roles.as_mallory("CREATE SCHEMA agent")
    assert f"belongs to the role '{roles.mallory}'" in refusal(lambda: join(roles.dsn))


def test_a_view_in_place_of_the_first_table_is_not_looked_at(roles: Roles) -> None:
    """
    S19: what a view calls runs as the role that looks, so that finding the format would be too late.
    """
    roles.admin(f"CREATE SCHEMA agent AUTHORIZATION {roles.worker}")
    roles.admin(f"GRANT CREATE, USAGE ON SCHEMA agent TO {roles.mallory}")
    roles.function("public.version(integer)", "integer", "$1")
    roles.as_mallory(
        f"CREATE VIEW agent.format AS SELECT 1 AS one, public.version({schema.VERSION}) AS version; "
        "GRANT ALL ON agent.format TO PUBLIC"
    )
    assert f"agent.format belongs to the role '{roles.mallory}'" in refusal(lambda: join(roles.address()))
    roles.admin(f"ALTER VIEW agent.format OWNER TO {roles.worker}")
    assert "agent.format is a view and no table" in refusal(lambda: join(roles.address()))
    assert roles.loot() == []


def test_a_trigger_that_another_role_may_make_is_not_set_off(roles: Roles) -> None:
    """
    S19: GRANT ALL on a table of ours includes the right to put triggers on it; the hint removes it.
    """
    work(roles.address())
    roles.admin(f"GRANT ALL ON ALL TABLES IN SCHEMA agent TO {roles.mallory}")
    roles.admin(f"GRANT ALL ON SCHEMA agent TO {roles.mallory}")
    roles.function("public.steal()", "trigger", "NEW")
    roles.as_mallory("CREATE TRIGGER steal BEFORE UPDATE ON agent.steps FOR EACH ROW EXECUTE FUNCTION public.steal()")
    said = refusal(lambda: join(roles.address()))
    assert "agent.steps has a trigger 'steal'" in said
    roles.admin(said.partition("remove it: ")[2].rstrip(")"))
    # The function is PostgreSQL's own, the condition is not.
    roles.function("public.when_(text)", "boolean", "true")
    roles.as_mallory(
        "CREATE TRIGGER other BEFORE UPDATE ON agent.steps FOR EACH ROW WHEN (public.when_(NEW.step)) "
        "EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()"
    )
    assert "agent.steps has a trigger 'other'" in refusal(lambda: join(roles.address()))
    assert roles.loot() == []


def test_a_trigger_of_the_tables_owner_is_his_business(roles: Roles) -> None:
    """
    S19: an audit by the same role, or by a superuser, stays possible.
    """
    work(roles.address())
    body = "BEGIN RETURN NEW; END"
    roles.admin(f"CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
    roles.admin("CREATE TRIGGER audit BEFORE INSERT ON agent.runs FOR EACH ROW EXECUTE FUNCTION public.audit()")
    work(roles.address())


def test_a_rule_is_not_used(roles: Roles) -> None:
    """
    S19: a rule makes something else of a statement, as nothing.
    """
    work(roles.address())
    roles.admin("CREATE RULE lost AS ON INSERT TO agent.attempts DO INSTEAD NOTHING")
    said = refusal(lambda: join(roles.address()))
    assert "agent.attempts has a rule 'lost'" in said
    roles.admin(said.partition("remove it: ")[2].rstrip(")"))
    work(roles.address())


def test_rows_that_a_policy_hides_are_not_taken_for_rows_that_are_not_there(roles: Roles) -> None:
    """
    S19: "done" that we may not see would be done again.
    """
    work(roles.address())
    roles.admin("ALTER TABLE agent.attempts ENABLE ROW LEVEL SECURITY")
    roles.admin("ALTER TABLE agent.attempts FORCE ROW LEVEL SECURITY")
    (run,) = roles.admin("SELECT run FROM agent.runs")[0]
    ledger = PostgresLedger.look(roles.address(), str(run), 5.0)
    with pytest.raises(Exception, match="row-level security"):
        list(ledger.rows())
    ledger.close()


def test_other_things_in_the_schema_are_not_our_business(roles: Roles) -> None:
    """
    S19: only what we use is looked at.
    """
    work(roles.address())
    roles.admin(f"GRANT ALL ON SCHEMA agent TO {roles.mallory}")
    roles.as_mallory("CREATE VIEW agent.dashboard AS SELECT 1 AS one")
    work(roles.address())


def test_every_table_of_ours_is_looked_at(roles: Roles) -> None:
    """
    S19: also one that a later format adds.
    """
    work(roles.address())
    query = "SELECT relname FROM pg_class WHERE relnamespace = 'agent'::regnamespace AND relkind IN ('r', 'S')"
    assert {name for (name,) in roles.admin(query)} == set(owners._OURS)
