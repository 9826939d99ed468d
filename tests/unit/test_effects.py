"""Effects, in SQLite and in PostgreSQL: each happens once, and whoever has lost its claim commits nothing."""

import contextlib
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.unit.test_ledger import address, open_at
from worker.ledger import Ledger, StorageFull
from worker.ledger.effects import (
    CLAIMED,
    COMMITTED,
    CONFLICT,
    GRANTED,
    HELD,
    TAKEN_OVER,
    UNKNOWN,
    Effect,
    Effects,
)

__all__ = ["address"]  # a fixture
LEASE = 60.0

T = TypeVar("T")


@pytest.fixture
def store(address: str, tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_at(address, str(tmp_path))
    yield ledger
    ledger.close()


@pytest.fixture
def effects(store: Ledger) -> Effects:
    return store.effects


def test_an_effect_is_claimed_executed_and_committed_once(effects: Effects) -> None:
    """
    Promise 4: whoever comes later is given the result.
    """
    answer = effects.claim("invoice", "to ann", "pay", LEASE, False)
    assert (answer.verdict, answer.effect.state, answer.effect.step) == (GRANTED, CLAIMED, "pay")
    assert effects.claim("invoice", "to ann", "other", LEASE, True).verdict == HELD
    assert effects.renew("invoice", answer.effect.token, LEASE)
    assert effects.commit("invoice", answer.effect.token, b"\0no. 77", 7)

    later = effects.claim("invoice", "to ann", "other", LEASE, True)
    assert later.verdict == COMMITTED
    assert (later.effect.result, later.effect.size, later.effect.step) == (b"\0no. 77", 7, "pay")
    assert not effects.renew("invoice", answer.effect.token, LEASE)


def test_the_same_key_with_other_parameters_is_a_conflict(effects: Effects) -> None:
    """
    Case S10: neither skipped nor redone, whatever the effect's state is.
    """
    token = effects.claim("k", "one", "a", LEASE, False).effect.token
    for change in (lambda: None, lambda: effects.commit("k", token, None, 9_000_000)):
        change()
        answer = effects.claim("k", "two", "b", LEASE, True)
        assert (answer.verdict, answer.effect.parameters) == (CONFLICT, "one")
    assert effects.claim("k", "one", "a", LEASE, False).effect.result is None


def test_a_released_effect_has_not_happened(effects: Effects) -> None:
    """
    Its command failed and said so: the next one may try, with a token of its own.
    """
    first = effects.claim("k", "p", "a", LEASE, False).effect.token
    assert effects.release("k", first)
    assert not effects.release("k", first)
    again = effects.claim("k", "p", "a", LEASE, False)
    assert again.verdict == GRANTED
    assert again.effect.token != first
    assert not effects.commit("k", first, b"late", 4), "case S8: a claim that was lost commits nothing"
    assert effects.commit("k", again.effect.token, b"", 0)


def test_an_abandoned_effect_is_taken_over_or_unknown(effects: Effects) -> None:
    """
    Promise 4: where nobody can know whether it happened, it is not guessed.
    """
    for key, take_over, verdict in (("k", True, TAKEN_OVER), ("l", False, UNKNOWN)):
        token = effects.claim(key, "p", "a", LEASE, False).effect.token
        assert effects.abandon(key, token)
        assert effects.claim(key, "p", "b", LEASE, take_over).verdict == verdict
        assert not effects.release(key, token)
        assert not effects.abandon(key, token)
        assert not effects.renew(key, token, LEASE)
    assert effects.claim("l", "p", "b", LEASE, False).verdict == UNKNOWN


def test_who_has_the_newest_token_knows(effects: Effects) -> None:
    """
    A holder that was given up and comes back all the same: it commits, unless somebody has begun again meanwhile.
    """
    tokens = {key: effects.claim(key, "p", "a", LEASE, False).effect.token for key in ("k", "l")}
    for key, token in tokens.items():
        effects.abandon(key, token)
        assert effects.claim(key, "p", "b", LEASE, False).verdict == UNKNOWN
    assert effects.commit("k", tokens["k"], b"r", 1)
    assert effects.commit("k", tokens["k"], b"r", 1), "again is once"
    again = effects.claim("l", "p", "b", LEASE, True)
    assert again.verdict == TAKEN_OVER
    assert again.effect.state == CLAIMED
    assert not effects.commit("l", tokens["l"], b"late", 4), "case S8"
    assert effects.commit("l", again.effect.token, b"", 0)
    assert effects.claim("k", "p", "b", LEASE, False).effect.result == b"r"


def test_what_is_unknown_is_settled_by_a_person(effects: Effects) -> None:
    """
    It happened, with this result; or it did not, and may be done.
    """
    for key in ("k", "l"):
        token = effects.claim(key, "p", "a", LEASE, False).effect.token
        assert effects.settle(key, b"") is None, "its holder knows"
        effects.abandon(key, token)
        assert effects.claim(key, "p", "a", LEASE, False).verdict == UNKNOWN
    settled = effects.settle("k", b"no. 77")
    assert settled is not None
    assert (settled.state, settled.step) == (UNKNOWN, "a")
    assert effects.settle("l", None) is not None
    assert effects.settle("k", None) is None
    assert effects.settle("none", None) is None
    assert effects.claim("k", "p", "a", LEASE, False).effect.result == b"no. 77"
    token = effects.claim("l", "p", "a", LEASE, False).effect.token
    effects.abandon("l", token)
    assert effects.claim("l", "other", "a", LEASE, True).verdict == CONFLICT
    assert [effect.state for effect in effects.all() if effect.key == "l"] == [UNKNOWN], "so that a person sees it"
    assert effects.settle("l", None) is not None


def test_effects_travel_in_a_checkpoint(effects: Effects) -> None:
    """
    What is not known, or not known as committed, is added; nobody holds a claim among that.
    """
    held = effects.claim("held", "p", "a", LEASE, False).effect
    done = effects.claim("done", "p", "a", LEASE, False).effect
    effects.commit("done", done.token, b"result", 6)
    known = list(effects.all())
    assert [effect.key for effect in known] == ["done", "held"]

    assert effects.restore(known) == 0
    assert effects.restore([held._replace(state=COMMITTED, result=b"r", size=1), held._replace(key="cut off")]) == 2

    assert {effect.key: (effect.state, effect.worker) for effect in effects.all()} == {
        "cut off": (CLAIMED, ""),
        "done": (COMMITTED, ""),
        "held": (COMMITTED, ""),
    }
    assert not effects.commit("held", held.token, b"late", 4)
    assert effects.claim("cut off", "p", "a", LEASE, True).verdict == TAKEN_OVER


def test_many_effects_are_listed_by_key(effects: Effects) -> None:
    """
    All of them, each once, whatever their keys are made of.
    """
    keys = sorted(f"{mark}{number:02}" for number in range(60) for mark in ("a", "B", "é", "-"))
    effects.restore(Effect(key, "p", COMMITTED, "a", 0, "", 1000.0, b"r", 1) for key in reversed(keys))
    assert [effect.key for effect in effects.all()] == keys


def claim_all(address: str, run: str, worker: int, keys: list[str]) -> tuple[list[str], Counter[str]]:
    """Claim every key, in an order of our own, and commit what we are granted.  In a process of its own."""
    if address.startswith("postgresql:"):
        from worker.ledger.postgres import Member, PostgresLedger

        me = Member(f"worker-{worker}", "life", "host", worker, "1")
        ledger: Ledger = PostgresLedger.join(address, run, me, LEASE, 10.0)
    else:
        ledger = open_at(address, run)
    random.Random(worker).shuffle(keys)
    granted, verdicts = [], Counter[str]()
    with contextlib.closing(ledger):
        for key in keys:
            answer = in_turn(partial(ledger.effects.claim, key, "p", f"step-{worker}", LEASE, True))
            verdicts[answer.verdict] += 1
            if answer.verdict == GRANTED:
                assert in_turn(partial(ledger.effects.commit, key, answer.effect.token, key.encode(), len(key)))
                granted.append(key)
    return granted, verdicts


def in_turn(action: Callable[[], T]) -> T:
    """Ask again as a worker does whom the others have let wait for long, and only then."""
    while True:
        began = time.monotonic()
        try:
            return action()
        except StorageFull:
            assert time.monotonic() - began > 4, "the database was locked, and it has not waited"


@pytest.mark.programs
def test_eight_processes_make_a_thousand_claims_each(address: str, tmp_path: Path) -> None:
    """
    Case S2: every key is claimed once, and nobody is told that the database is locked who has not waited for it.
    """
    keys = [f"key-{number}" for number in range(1000)]
    with ProcessPoolExecutor(8, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(claim_all, address, str(tmp_path), worker, keys) for worker in range(8)]
        found = [job.result() for job in jobs]

    assert sorted(key for granted, _ in found for key in granted) == sorted(keys)
    verdicts = sum((verdicts for _, verdicts in found), Counter[str]())
    assert verdicts.total() == 8000
    assert set(verdicts) <= {GRANTED, HELD, COMMITTED}
    with contextlib.closing(open_at(address, str(tmp_path))) as ledger:
        assert {effect.state for effect in ledger.effects.all()} == {COMMITTED}
