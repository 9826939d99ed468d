"""The ledger in PostgreSQL: claims among several workers, their leases, and what they hear of each other.

A real server; lives of workers are connections of this process, or processes where it matters.
"""

import contextlib
import multiprocessing
import select
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, cast

import pytest

from tests.postgres import Server
from tests.unit.test_ledger import claim, closed, ending
from worker import clock
from worker.budget import Budget
from worker.errors import StateError
from worker.ledger import Claim, Heard, Recorded, Row
from worker.ledger.effects import GRANTED, HELD, TAKEN_OVER, UNKNOWN
from worker.meter import Meter

pytest.importorskip("psycopg")
from tests.members import LEASE, PATIENCE, SHORT, Join, again, expire, join, outcomes, run, until
from worker.ledger.postgres import Member, PostgresLedger, link
from worker.ledger.postgres.usage import Usage

__all__ = ["join", "run"]  # fixtures

# -- claims among workers


def test_a_step_is_one_workers_at_a_time(join: Join) -> None:
    """
    A claim that another worker holds, or that has had another attempt, is passed over; the next one will do.
    """
    one, two = join("one"), join("two")
    assert one.record([], [claim("a"), claim("b")], 1).claims == [claim("a")]
    assert two.record([], [claim("a"), claim("b")], 1).claims == [claim("b")]
    one.record([ending("a", "failed")], [], 0)
    assert two.record([], [claim("a")], 1).claims == []
    assert two.record([], [claim("a", 2)], 1).claims == [claim("a", 2)]
    assert {row.step: row.worker for row in one.rows() if not row.outcome} == {"a": "two", "b": "two"}


def test_what_others_have_taken_is_named(join: Join) -> None:
    """
    Of the steps that were to be claimed: what others are at, or have done; not what another attempt may be made at.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a"), claim("b")])
    one.record([ending("a")], [], 0)
    found = two.record([], [claim("a"), claim("b"), claim("c")], 1)
    assert found._replace(taken=tuple(sorted(found.taken))) == Recorded([claim("c")], [], ("a", "b"))
    one.record([ending("b", "failed")], [], 0)
    assert two.record([], [claim("b"), claim("c")], 1) == Recorded([], [], ()), "its own claim, or one to look at anew"
    assert one.record([], [claim("b", 2)], 1) == Recorded([claim("b", 2)], [], ())


def test_done_means_done(join: Join, server: Server, run: str) -> None:
    """
    Promise 1: a step that is done is claimed by nobody, and the database itself refuses a second "done".
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a")], 1)
    one.record([ending("a")], [], 0)
    assert two.record([], [claim("a", 2)], 1).claims == []
    server.execute("UPDATE agent.steps SET state = 'open' WHERE run = %s", (run,))  # whatever else goes wrong
    two.record([], [claim("a", 2)], 1)
    with pytest.raises(ValueError, match="refuses"):
        two.record([ending("a", number=2)], [claim("b")], 1)
    assert outcomes(two) == [("a", 1, "done"), ("a", 2, None)]


def test_what_was_never_claimed_is_lost(join: Join) -> None:
    """
    An ending without a claim of ours changes nothing and is named; one that is recorded already is not lost.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a")], 1)
    assert two.record([ending("a")], [claim("b")], 1) == Recorded([claim("b")], ["a"])
    assert one.record([ending("a"), ending("c")], [], 0).lost == ["c"]
    assert one.record([ending("a")], [], 0).lost == []
    assert outcomes(one) == [("a", 1, "done"), ("b", 1, None)]


def work(dsn: str, run: str, worker: int, steps: list[str]) -> list[str]:
    """Claim steps, a handful at a time, until there is none left; return ours.  In a process of its own."""
    ledger = PostgresLedger.join(dsn, run, Member(f"worker-{worker}", "life", "host", worker, "1"), LEASE, 10.0)
    ledger.enlist([(step, "x") for step in steps])
    mine: list[str] = []
    hand: list[Claim] = []
    left = [claim(step) for step in steps]
    while left or hand:
        recorded = ledger.record([ending(c.step) for c in hand], left[:40], 10)
        assert not recorded.lost
        mine += [c.step for c in hand]
        hand = recorded.claims
        # What stands before the last one that we were given is another worker's.
        left = left[left.index(hand[-1]) + 1 if len(hand) == 10 else 40 :]
    ledger.close()
    return mine


def test_eight_processes_share_eight_thousand_steps(server: Server, run: str) -> None:
    """
    Case S2: every step is done once, by one of them, and no call fails.
    """
    steps = [f"step-{number}" for number in range(8000)]
    with ProcessPoolExecutor(8, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(work, server.dsn(), run, worker, steps) for worker in range(8)]
        shares = [job.result() for job in jobs]

    assert sorted(step for share in shares for step in share) == sorted(steps)
    query = "SELECT outcome, count(*), count(DISTINCT step) FROM agent.attempts WHERE run = %s GROUP BY outcome"
    assert server.execute(query, (run,)) == [("done", 8000, 8000)]


# -- leases


def test_a_claim_whose_lease_has_run_out_is_taken_over(join: Join) -> None:
    """
    Case S8: its holder commits nothing any more, and learns of it; a claim that is renewed is left alone.
    """
    one, two = join("one", SHORT), join("two")
    one.record([], [claim("a"), claim("b")], 2)
    (old,) = [row for row in one.rows() if row.step == "a"]

    def look() -> list[Row]:
        assert one.renew(["b"]) == []
        return two.orphans()

    found = until(look)

    assert [(row.step, row.number, row.outcome, row.worker) for row in found] == [("a", 1, None, "one")]
    assert found[0].seq > old.seq
    assert two.orphans() == []
    assert one.renew(["a", "b"]) == ["a"]
    assert one.record([ending("a", output=b"late")], [], 0).lost == ["a"]
    assert two.record([ending("a", "interrupted")], [], 0).lost == []
    assert one.record([ending("a", output=b"late")], [], 0).lost == ["a"]
    (row,) = [row for row in two.rows() if row.step == "a"]
    assert (row.outcome, row.worker, row.seq) == ("interrupted", "one", found[0].seq)


def test_after_an_outage_nobody_is_taken_for_dead_before_he_could_say_a_word(join: Join, server: Server) -> None:
    """
    While the server was away no claim could be renewed: whoever is back first leaves the others' steps, and the
    effects in them, to them for one lease.
    """
    one, two = join("one", SHORT, calm=SHORT), join("two", SHORT, calm=SHORT)
    one.record([], [claim("a"), claim("b")], 2)
    held = one.effects.claim("mail", "p", "a", SHORT, True).effect
    server.restart()
    server.execute("SELECT pg_sleep(%s)", (2 * SHORT,))
    assert again(two.orphans) == []
    assert two.effects.claim("mail", "p", "a", SHORT, True).verdict == HELD
    assert again(lambda: one.renew(["a"])) == []
    assert one.effects.renew("mail", held.token, SHORT)

    def look() -> list[Row]:
        assert one.renew(["a"]) == []
        return two.orphans()

    assert [row.step for row in until(look)] == ["b"]
    until(lambda: two.effects.claim("mail", "p", "a", SHORT, True).verdict == TAKEN_OVER)


def test_a_lease_that_ran_out_unnoticed_holds(
    join: Join, server: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A machine that was frozen goes on with its step if nobody has taken it.
    """
    one = join("one")
    one.record([], [claim("a"), claim("b")], 2)
    expire(server, run)
    assert one.orphans() == [], "what we hold is no orphan"
    assert one.renew(["a"]) == []
    two = join("two")
    assert two.orphans() == []
    monkeypatch.setattr(clock, "monotonic", lambda: time.monotonic() + LEASE / 2)
    assert [row.step for row in two.orphans()] == ["b"]


def test_a_clock_that_jumps_takes_no_claim_from_the_living(join: Join, server: Server, run: str) -> None:
    """
    By the clock of a server that has taken another one's place all leases have run out.  A holder that lives renews
    its claims before half a lease is over; one that does not has lost them then, and not before.
    """
    one, two, dead = join("one", SHORT), join("two"), join("dead", SHORT)
    one.record([], [claim("a")], 1)
    dead.record([], [claim("b")], 1)
    for _ in range(3):
        expire(server, run)
        assert two.orphans() == []
        assert clock.monotonic() < two.overdue_at <= clock.monotonic() + SHORT / 2
        assert one.renew(["a"]) == []
        assert dead.renew(["b"]) == []
    expire(server, run)
    assert two.orphans() == []
    until(lambda: clock.monotonic() >= two.overdue_at)
    assert one.renew(["a"]) == []
    assert [(row.step, row.worker) for row in two.orphans()] == [("b", "dead")]
    expire(server, run)
    assert two.orphans() == []
    until(lambda: clock.monotonic() >= two.overdue_at)
    assert one.renew(["a"]) == []
    expire(server, run)
    assert two.orphans() == [], "between the two jumps it was renewed"
    assert one.record([ending("a")], [], 0).lost == []


@pytest.mark.parametrize("jump", ["3 hours", "-3 hours"], ids=["back", "ahead"])
def test_a_clock_that_was_put_right_keeps_no_claim_for_the_dead(
    join: Join, server: Server, run: str, jump: str
) -> None:
    """
    B7: the server's clock goes back, so that a claim of a dead worker ends hours from now, or ahead.  It is taken over
    as soon as any other, step and effect alike; what a living one holds is not.
    """
    dead, one, two = join("dead", SHORT), join("one", SHORT), join("two", SHORT)
    dead.record([], [claim("a")], 1)
    one.record([], [claim("b")], 1)
    dead.effects.claim("k", "p", "a", SHORT, True)
    token = one.effects.claim("l", "p", "b", SHORT, True).effect.token
    for table in ("steps", "effects"):
        server.execute(f"UPDATE agent.{table} SET lease_until = lease_until + %s WHERE run = %s", (jump, run))
    server.execute("UPDATE agent.workers SET seen = seen + %s WHERE run = %s", (jump, run))
    assert two.orphans() == []
    assert [two.effects.claim(key, "p", "c", SHORT, True).verdict for key in "kl"] == [HELD, HELD]

    def look() -> list[Row]:
        assert one.renew(["b"]) == []
        assert one.effects.renew("l", token, SHORT)
        assert two.effects.claim("l", "p", "c", SHORT, True).verdict == HELD
        return two.orphans()

    assert [row.step for row in until(look)] == ["a"]
    until(lambda: two.effects.claim("k", "p", "c", SHORT, True).verdict == TAKEN_OVER)
    assert one.effects.commit("l", token, b"", 0)


def test_a_worker_of_a_future_that_is_none_stands_in_nobodys_way(join: Join, server: Server, run: str) -> None:
    """
    B7: one that was last seen hours from now is gone, and another list may have the run.
    """
    join("dead")
    server.execute("UPDATE agent.workers SET seen = seen + interval '3 hours' WHERE run = %s", (run,))
    server.execute("UPDATE agent.workers SET plan = 'another' WHERE run = %s", (run,))
    server.execute("UPDATE agent.runs SET plan = 'another' WHERE run = %s", (run,))
    join("one").enlist([("x", "d")])


def test_what_a_worker_that_left_has_held_is_not_waited_for_twice(join: Join, server: Server, run: str) -> None:
    """
    It has said itself that it is gone, so that its lease is enough.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a")], 1)
    one.close()
    assert two.orphans() == []
    expire(server, run)
    assert [(row.step, row.worker) for row in two.orphans()] == [("a", "one")]


def test_the_next_life_of_a_worker_takes_over_at_once(join: Join) -> None:
    """
    It need not wait for its own lease, and a zombie of the former life commits nothing and claims nothing.
    """
    zombie = join("one")
    zombie.record([], [claim("a"), claim("b")], 2)
    token = zombie.effects.claim("k", "p", "a", LEASE, True).effect.token
    zombie.note({"boot": "this", "state": "running"})

    one = join("one")

    assert [(row.step, row.worker) for row in one.rows()] == [("a", "one"), ("b", "one")]
    assert one.orphans() == []
    assert not zombie.replaced
    assert sorted(zombie.renew(["a", "b"])) == ["a", "b"]
    assert zombie.replaced
    assert zombie.record([ending("a")], [claim("c")], 1) == Recorded([], ["a"])
    assert zombie.orphans() == []
    assert not zombie.effects.commit("k", token, b"late", 4)
    assert zombie.effects.claim("new", "p", "a", LEASE, True).verdict == HELD
    assert one.record([ending("a", "interrupted"), ending("b", "interrupted")], [], 0).lost == []
    assert one.effects.claim("k", "p", "a", LEASE, True).verdict == TAKEN_OVER
    assert (one.fact("boot"), join("two").fact("boot"), join("three").fact("state")) == ("this", None, "running")


def test_a_step_that_outlives_its_worker_commits_its_effect(join: Join) -> None:
    """
    The next life of the worker passes the commit on: the claim is still this worker's.
    """
    token = join("one").effects.claim("k", "p", "a", LEASE, True).effect.token
    one = join("one")
    assert one.effects.renew("k", token, LEASE)
    assert one.effects.claim("k", "p", "b", LEASE, True).verdict == HELD
    assert one.effects.commit("k", token, b"r", 1)


@pytest.mark.parametrize("before", [GRANTED, TAKEN_OVER, UNKNOWN])
def test_a_claim_is_granted_again_by_the_next_life_to_who_has_not_heard_of_it(join: Join, before: str) -> None:
    """
    C13: with a token that works, and the same verdict; another worker is told that it is held, and nobody without the
    secret ends it.
    """
    if before == TAKEN_OVER:
        zero = join("zero").effects
        zero.abandon("k", zero.claim("k", "p", "a", LEASE, True).effect.token)
    old = join("one").effects.claim("k", "p", "a", LEASE, before == TAKEN_OVER, "secret").effect.token
    one, two = join("one"), join("two")
    if before == UNKNOWN:
        assert one.effects.claim("k", "p", "b", LEASE, False, "other").verdict == UNKNOWN
    answer = one.effects.claim("k", "p", "a", LEASE, before == TAKEN_OVER, "secret")
    assert answer.verdict == (TAKEN_OVER if before == TAKEN_OVER else GRANTED)
    assert answer.effect.token > old
    assert two.effects.claim("k", "p", "a", LEASE, True, "another").verdict == HELD
    assert not one.effects.commit("k", old, b"late", 4, "secret")
    assert not one.effects.commit("k", answer.effect.token, b"forged", 6, "other")
    assert not one.effects.release("k", answer.effect.token)
    assert one.effects.commit("k", answer.effect.token, b"r", 1, "secret")


def test_what_an_orphans_heir_leaves_is_still_its_makers(join: Join) -> None:
    """
    One dies; two takes its step over and dies before closing it; the next life of two is told whose it was.
    """
    join("one", SHORT).record([], [claim("a")], 1)
    until(join("two").orphans)
    two = join("two")
    (row,) = two.rows()
    assert (row.worker, row.outcome) == ("one", None)
    assert [row.worker for row in two.orphans()] == ["one"]
    assert two.record([ending("a", "interrupted")], [], 0).lost == []


def test_an_effect_of_a_worker_that_is_gone(join: Join) -> None:
    """
    Held while its lease lasts; then taken over, or unknown where that would be guessing.
    """
    one, two = join("one"), join("two")
    tokens = {key: one.effects.claim(key, "p", "a", SHORT, True).effect.token for key in ("k", "l")}
    assert two.effects.claim("k", "p", "b", LEASE, True).verdict == HELD
    until(lambda: two.effects.claim("k", "p", "b", LEASE, True).verdict == TAKEN_OVER)
    assert until(lambda: two.effects.claim("l", "p", "b", LEASE, False).verdict == UNKNOWN)
    assert not one.effects.renew("k", tokens["k"], LEASE)
    assert not one.effects.commit("k", tokens["k"], b"late", 4)
    assert one.effects.commit("l", tokens["l"], b"r", 1), "it was alive, and knows"


@pytest.mark.parametrize("hours", [-1, 6])
def test_our_clock_decides_nothing(join: Join, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """
    Case D7: workers whose clocks are hours off hold and lose their claims like any other.
    """
    one, two, late = join("one"), join("two"), join("late", SHORT)
    wall = time.time
    monkeypatch.setattr(clock, "wall", lambda: wall() + hours * 3600)
    monkeypatch.setattr(time, "time", clock.wall)
    one.record([], [claim("a")._replace(started=clock.wall())], 1)
    late.record([], [claim("b")], 1)
    one.effects.claim("k", "p", "a", LEASE, True)
    late.effects.claim("l", "p", "b", SHORT, True)

    assert {row.step for row in until(two.orphans)} == {"b"}
    assert until(lambda: two.effects.claim("l", "p", "b", LEASE, True).verdict == TAKEN_OVER)
    assert two.effects.claim("k", "p", "b", LEASE, True).verdict == HELD
    assert one.renew(["a"]) == []


# -- news


def test_news_of_the_others(join: Join) -> None:
    """
    What others begin and end, each once; nothing of our own.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a")], 1)
    two.record([], [claim("b")], 1)
    assert [(row.step, row.outcome, row.worker) for row in two.news(False)] == [("a", None, "one")]
    assert two.news(False) == []
    one.record([ending("a", "failed")], [claim("a", 2)], 1)
    assert [(row.step, row.number, row.outcome) for row in two.news(False)] == [("a", 1, "failed"), ("a", 2, None)]
    assert two.news(False) == []


def test_news_are_not_told_twice_when_time_passes(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What is settled is not read again, and nothing between two calls is missed.
    """
    one, two = join("one"), join("two")
    now = clock.monotonic()
    told = []
    for number in range(1, 12):
        one.record([ending("a", "failed", number - 1)] if number > 1 else [], [claim("a", number)], 1)
        now += 1.0
        monkeypatch.setattr(clock, "monotonic", lambda: now)  # noqa: B023
        told += [(row.number, row.outcome) for row in two.news(False)]
        monkeypatch.undo()
    assert told == [(1, None)] + [(n + i, o) for n in range(1, 11) for i, o in ((0, "failed"), (1, None))]
    assert len(two._news._told) < 10


def test_news_that_is_committed_late(join: Join) -> None:
    """
    Numbers are not committed in the order in which they were drawn; what was drawn first is not passed over.
    """
    one, two, three = join("one"), join("two"), join("three")
    connection = one._link._connection
    assert connection is not None
    connection.execute("BEGIN")
    one.record([], [claim("a")], 1)
    three.record([], [claim("b")], 1)
    assert [row.step for row in two.news(False)] == ["b"]
    assert two.news(False) == []
    connection.execute("COMMIT")
    assert [row.step for row in two.news(False)] == ["a"]


def test_an_idle_worker_is_waked(join: Join) -> None:
    """
    By the end of another worker's step or effect, once until it looks; who is busy is left alone, and nobody wakes
    himself.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a"), claim("b")], 2)
    token = one.effects.claim("k", "p", "a", LEASE, True).effect.token
    two.news(False)
    one.record([ending("a")], [], 0)
    assert not two.notified()
    for end in (lambda: one.record([ending("b")], [claim("c")], 1), lambda: one.effects.commit("k", token, b"", 0)):
        two.news(True)
        one.news(True)
        end()
        assert select.select([two.fileno()], [], [], PATIENCE)[0]
        assert two.notified()
        assert not one.notified()
    one.record([ending("c", "failed")], [], 0)
    two.renew([])  # whatever was sent has arrived with the answer
    assert not two.notified()
    two.news(True)
    one.record([], [claim("c", 2)], 1)
    one.record([ending("c", number=2)], [], 0)
    two.renew([])
    assert two.notified()


def test_a_server_that_cannot_wake_us_will_do(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Other databases speak the same language but for LISTEN.
    """
    import psycopg

    execute = link.Connection.execute

    def without_listen(self: link.Connection, query: str, *values: Any, **options: Any) -> object:
        if "LISTEN" in query or "pg_notify" in query:
            raise psycopg.errors.FeatureNotSupported("LISTEN is not supported")
        return execute(self, query, *values, **options)

    monkeypatch.setattr(link.Connection, "execute", without_listen)
    one, two = join("one"), join("two")
    two.news(True)
    one.record([], [claim("a")], 1)
    one.record([ending("a")], [], 0)
    assert [row.outcome for row in two.news(True)] == ["done"]
    assert not two.notified()


# -- what comes from elsewhere


def test_a_checkpoint_that_knows_more_ends_the_work_of_others(join: Join) -> None:
    """
    A step that is done by one worker's checkpoint is done; whoever is at it has lost its claim.
    """
    one, two = join("one"), join("two")
    one.record([], [claim("a"), claim("b")], 2)
    a, b = one.rows()
    assert two.restore([(closed(a), b"r"), (b._replace(outcome="failed"), None)]) == 1
    assert one.renew(["a", "b"]) == ["a"]
    assert one.record([ending("a"), ending("b")], [], 0).lost == ["a"]
    assert outcomes(two) == [("a", 1, "done"), ("b", 1, "done")]


def test_an_open_attempt_of_a_checkpoint_is_an_orphan(join: Join) -> None:
    """
    Nobody knows its worker: whoever looks next closes it.
    """
    one = join("one")
    one.record([], [claim("a")], 1)
    (row,) = one.rows()
    one.record([ending("a", "failed")], [], 0)
    assert one.restore([(row._replace(number=2, worker="elsewhere"), None)]) == 1
    assert [(row.number, row.worker) for row in one.orphans()] == [(2, "elsewhere")]
    assert one.record([ending("a", "interrupted", 2)], [claim("a", 3)], 1).lost == []


# -- the budget


def test_machines_that_share_a_run_share_its_budget(join: Join) -> None:
    """
    Each adds to the same sums, and none can say what another one's step has spent.
    """
    one, two = join("one"), join("two")
    one.add({"used_hours": 0.5, "used_restarts": 1}, {"worked_until": "1"})
    two.add({"used_hours": 0.25}, {"worked_until": "2"})
    assert float(one.fact("used_hours") or 0) == 0.75
    assert (one.fact("worked_until"), two.fact("worked_until")) == ("1", "2")
    one.record([], [claim("a")], 1)
    two.record([], [claim("b")], 1)
    one.heard({("a", 1): Heard(0.0, 2.0), ("b", 1): Heard(0.0, 50.0)})
    two.heard({("b", 1): Heard(0.0, 1.0)})
    assert one.usage([])[1] == two.usage([])[1] == 3.0


def test_the_sum_is_what_the_rows_say_and_old_rows_are_not_summed_up_each_time(
    join: Join, server: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Whatever others record, and whatever a checkpoint replaces.  A row that nothing of ours changes is not read again,
    but for a rare look at all of them.
    """
    one, two = join("one"), join("two")
    now = clock.monotonic()

    def used(later: float) -> float:
        nonlocal now
        now += later
        monkeypatch.setattr(clock, "monotonic", lambda: now)
        said = one.usage([])[1]
        monkeypatch.undo()
        return said

    for number in range(1, 9):
        two.record([ending("a", "failed", number - 1)._replace(spend=1.0)] if number > 1 else [], [claim("a", number)])
        two.heard({("a", number): Heard(0.0, 0.5)})
        assert used(10.0) == number - 0.5
    first = next(one.rows())
    server.execute("UPDATE agent.attempts SET spend = 101 WHERE run = %s AND number = 1", (run,))
    assert used(1.0) == 7.5
    assert two.restore([(first._replace(outcome="done", spend=11.0), b"")]) == 1
    assert used(1.0) == 6 + 11
    assert used(50.0) == used(50.0) == 17
    server.execute("UPDATE agent.attempts SET spend = 21 WHERE run = %s AND number = 1", (run,))
    assert used(100.0) == 17
    assert used(300.0) == 27


def test_what_was_drawn_while_a_slow_server_was_asked_is_not_taken_for_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    now, floors = 0.0, []

    class Slow:
        """A link whose answer takes its time, and has the newest number of that moment."""

        def __init__(self) -> None:
            self.me: Mapping[str, object] = {}
            self.member = Member("one", "", "", 0, "")

        @contextlib.contextmanager
        def call(self) -> Iterator[Any]:
            yield self

        def execute(self, _query: str, asked: Mapping[str, object]) -> "Slow":
            floors.append(asked["floor"])
            return self

        def fetchall(self) -> list[tuple[object, ...]]:
            nonlocal now
            now += 14.0 if now < 14.0 else 0.5
            return [("newest", "", "", 0, int(now))]

    monkeypatch.setattr(clock, "monotonic", lambda: now)
    used = Usage(cast(Any, Slow()))
    while not floors or not floors[-1]:
        used.read([])
    assert now - 14.0 >= 15.0
    assert floors[-1] == 14


def test_hearing_what_others_have_used_is_one_question(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Once a second while there is nothing to do; none where nothing is limited, but for one a minute, for who asks us.
    """
    one, two = join("one"), join("two")
    asked = []
    execute = link.Connection.execute

    def counting(connection: link.Connection, query: Any, *values: Any, **options: Any) -> Any:
        asked.append(query)
        return execute(connection, query, *values, **options)

    limited, free = (Meter(limits, one, {}, lambda action: action()) for limits in (Budget(spend=5), Budget()))
    free.read()
    two.add({"used_hours": 2.0, "granted_spend": 3.0})
    monkeypatch.setattr(link.Connection, "execute", counting)
    limited.hear()
    assert len(asked) == 1
    assert limited.state().limits.spend == 8.0
    free.hear()
    assert len(asked) == 1
    free._read_at -= 60
    free.hear()
    assert len(asked) == 2
    assert (free.state().used.hours or 0) >= 2.0


def test_s4_a_row_of_the_servers_that_is_called_by_a_path_stops_the_worker(
    join: Join, server: Server, run: str
) -> None:
    """
    Any worker of the run may write rows; no other machine makes a file of such a name.
    """
    one = join("one")
    one.record([], [claim("a")], 1)
    one.record([ending("a")], [], 0)
    server.execute("UPDATE agent.attempts SET step = '../../../evil.sh' WHERE run = %s", (run,))
    with pytest.raises(StateError, match="which the agent gives to none"):
        list(one.rows())
