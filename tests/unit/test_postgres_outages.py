"""The ledger in PostgreSQL when the server, or the way to it, fails: nothing is lost, and nothing is done twice."""

import os
import select
import signal
import time
from collections.abc import Callable

import pytest

from tests.postgres import Server
from tests.proxy import Proxy
from tests.unit.test_ledger import claim, ending
from worker import clock, grant
from worker.budget import Budget
from worker.ledger import LedgerAway, Recorded
from worker.ledger.effects import COMMITTED, GRANTED, HELD, TAKEN_OVER, Effects
from worker.meter import Meter

pytest.importorskip("psycopg")
from tests.members import LEASE, PATIENCE, SHORT, Join, again, expire, join, outcomes, proxy, run, until
from worker.ledger.postgres import link

__all__ = ["join", "proxy", "run"]  # fixtures


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_commit_whose_answer_was_lost(join: Join, proxy: Proxy, outcome: str) -> None:
    """
    Case S9: it has happened.  The same call finds it recorded, and gives us the claim that we did not hear of.
    """
    one, two = join("one", port=proxy.port), join("two")
    one.record([], [claim("a")], 1)
    proxy.lose()
    with pytest.raises(LedgerAway):
        one.record([ending("a", outcome)], [claim("b"), claim("c")], 1)
    assert proxy.lost.is_set()
    assert outcomes(two) == [("a", 1, outcome), ("b", 1, None)]

    recorded = again(lambda: one.record([ending("a", outcome)], [claim("b"), claim("c")], 1))

    assert recorded == Recorded([claim("b")], [])
    assert one.renew(["b"]) == []
    assert one.record([ending("b")], [], 0).lost == []
    assert outcomes(two) == [("a", 1, outcome), ("b", 1, "done")]


def test_an_ending_and_a_new_attempt_whose_answer_was_lost(join: Join, proxy: Proxy) -> None:
    """
    The same when the step that has ended is begun again in the same transaction: BEGIN, both parts, COMMIT.
    """
    one, two = join("one", port=proxy.port), join("two")
    one.record([], [claim("a")], 1)
    proxy.lose(4)
    with pytest.raises(LedgerAway):
        one.record([ending("a", "failed")], [claim("a", 2)], 1)
    assert outcomes(two) == [("a", 1, "failed"), ("a", 2, None)]
    assert again(lambda: one.record([ending("a", "failed")], [claim("a", 2)], 1)) == Recorded([claim("a", 2)], [])
    assert one.record([ending("a", number=2)], [], 0).lost == []


def test_a_grant_whose_answer_was_lost_counts_once(join: Join, proxy: Proxy) -> None:
    """
    Wherever in the look, BEGIN, mark, amounts, facts, COMMIT the line is cut; the time at work likewise.
    """
    one, two = join("one", port=proxy.port), join("two")
    meter = Meter(Budget(), one, {}, again)
    for answer in range(1, 7):
        proxy.lose(answer)
        again(lambda: grant.grant(one, Budget(spend=5), "ann", f"grant {answer}"))  # noqa: B023
        assert proxy.lost.is_set()
        assert float(two.fact("granted_spend") or 0) == 5 * answer
    meter._since -= 3600
    proxy.lose(5)
    meter.conclude("done")
    assert proxy.lost.is_set()
    assert float(two.fact("used_hours") or 0) == pytest.approx(1.0, abs=0.1)


def test_a_backend_that_is_ended_costs_nothing(join: Join, server: Server) -> None:
    """
    An administrator ends our connection between two calls: the next one says so, the one after that works.
    """
    one = join("one")
    one.record([], [claim("a")], 1)
    backend = one._link._connection.info.backend_pid  # type: ignore[union-attr]
    server.execute("SELECT pg_terminate_backend(%s)", (backend,))
    while not one.notified():  # a worker that waits for news learns of it at once
        assert select.select([one.fileno()], [], [], PATIENCE)[0]
    assert one.fileno() == -1
    assert again(lambda: one.record([ending("a")], [claim("b")], 1)) == Recorded([claim("b")], [])


def test_orphans_whose_answer_was_lost(join: Join, proxy: Proxy, server: Server, run: str) -> None:
    """
    They are ours without our knowing: the next call tells, and whose they were.
    """
    join("one", SHORT).record([], [claim("a")], 1)
    two = join("two", port=proxy.port)
    expire(server, run)
    assert two.orphans() == []
    until(lambda: clock.monotonic() >= two.overdue_at)
    proxy.lose()
    with pytest.raises(LedgerAway):
        two.orphans()
    assert [(row.step, row.worker) for row in again(two.orphans)] == [("a", "one")]
    assert two.record([ending("a", "interrupted")], [], 0).lost == []


def test_an_orphan_taken_over_unheard_is_granted_to_nobody_as_a_new_attempt(
    join: Join, proxy: Proxy, server: Server, run: str
) -> None:
    """
    C14: its former holder may have begun it, so it is judged as cut off before it is tried again.
    """
    join("one", SHORT).record([], [claim("a")], 1)
    two = join("two", port=proxy.port)
    expire(server, run)
    assert two.orphans() == []
    until(lambda: clock.monotonic() >= two.overdue_at)
    proxy.lose()
    with pytest.raises(LedgerAway):
        two.orphans()
    assert again(lambda: two.record([], [claim("a")], 1)).claims == []
    assert [row.step for row in two.orphans()] == ["a"]


@pytest.mark.parametrize("verdict", [GRANTED, TAKEN_OVER])
def test_a_claim_of_an_effect_whose_answer_was_lost(join: Join, proxy: Proxy, verdict: str) -> None:
    """
    The same step is granted it again, with a token that works; another step of ours is not.
    """
    one = join("one", port=proxy.port)
    if verdict == TAKEN_OVER:
        one.effects.abandon("k", one.effects.claim("k", "p", "a", LEASE, True).effect.token)
    one.renew([])
    proxy.lose(2)  # the first one says what is there
    with pytest.raises(LedgerAway):
        one.effects.claim("k", "p", "a", LEASE, True)
    assert again(lambda: one.effects.claim("k", "p", "b", LEASE, True)).verdict == HELD
    answer = one.effects.claim("k", "p", "a", LEASE, True)
    assert answer.verdict == verdict
    assert one.effects.claim("k", "p", "a", LEASE, True).verdict == HELD, "a second caller"
    assert one.effects.commit("k", answer.effect.token, b"r", 1)


def test_ends_of_effects_whose_answer_was_lost(join: Join, proxy: Proxy) -> None:
    """
    A commit, a release, letting go: each has happened, and the same call says so.
    """
    one: Effects = join("one", port=proxy.port).effects
    two = join("two").effects
    token = {key: one.claim(key, "p", "a", LEASE, True).effect.token for key in ("k", "l", "m")}
    ends: list[Callable[[], bool]] = [
        lambda: one.commit("k", token["k"], b"r", 1),
        lambda: one.release("l", token["l"]),
        lambda: one.abandon("m", token["m"]),
    ]
    for end in ends:
        proxy.lose()
        with pytest.raises(LedgerAway):
            end()
        assert again(end)
    assert [two.claim(key, "p", "b", LEASE, True).verdict for key in "klm"] == [COMMITTED, GRANTED, TAKEN_OVER]


def test_a_frozen_server_does_not_freeze_us(join: Join, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A call ends in a bounded time, and the next one works when the server does.
    """
    monkeypatch.setattr(link, "_PATIENCE", 0.5)
    one = join("one")
    one.record([], [claim("a")], 1)
    server.pause()
    try:
        began = time.monotonic()
        with pytest.raises(LedgerAway, match="no answer"):
            one.record([ending("a")], [claim("b"), claim("c")], 1)
        assert time.monotonic() - began < 5
    finally:
        server.resume()
    assert again(lambda: one.record([ending("a")], [claim("b"), claim("c")], 1)) == Recorded([claim("b")], [])
    assert outcomes(one) == [("a", 1, "done"), ("b", 1, None)]
    assert one.renew(["b"]) == []


def test_what_the_server_hears_late_claims_nothing(
    join: Join, server: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A process of the server reads what we sent long after we have given up on it and asked another one.
    """
    monkeypatch.setattr(link, "_PATIENCE", 0.5)
    one, two = join("one"), join("two", SHORT)
    one.record([], [claim("a")], 1)
    two.record([], [claim("c")], 1)
    for call in (lambda: one.record([ending("a")], [claim("b"), claim("c")], 1), one.orphans):
        expire(server, run)
        assert one.orphans() == []
        until(lambda: clock.monotonic() >= one.overdue_at)
        backend = one._link._connection.info.backend_pid  # type: ignore[union-attr]
        os.kill(backend, signal.SIGSTOP)
        try:
            with pytest.raises(LedgerAway, match="no answer"):
                call()
            assert one.record([ending("a")], [claim("b")], 1).lost == []
        finally:
            os.kill(backend, signal.SIGCONT)
        until(lambda: not server.execute("SELECT true FROM pg_stat_activity WHERE pid = %s", (backend,)))  # noqa: B023
        assert one.renew(["b"]) == []
        assert two.renew(["c"]) == []
    assert outcomes(two) == [("a", 1, "done"), ("b", 1, None), ("c", 1, None)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_server_is_restarted_in_the_middle(join: Join, server: Server, mode: str) -> None:
    """
    Whatever was committed is there; whoever waits goes on by itself.
    """
    one = join("one")
    one.record([], [claim("a")], 1)
    server.stop(mode)
    for call in (lambda: one.record([ending("a")], [claim("b")], 1), lambda: one.renew(["a"]), one.orphans):
        with pytest.raises(LedgerAway):
            call()
    server.start()
    assert again(lambda: one.record([ending("a")], [claim("b")], 1)) == Recorded([claim("b")], [])
    assert outcomes(one) == [("a", 1, "done"), ("b", 1, None)]
