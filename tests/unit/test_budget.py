"""The budget: what is allowed, what is used, and when it is spent."""

from pathlib import Path
from typing import Any

import pytest

from worker import budget, cli, folder, grant, report
from worker.budget import Budget, State
from worker.errors import AgentError, StateError
from worker.ledger import LedgerAway
from worker.ledger.sqlite import SqliteLedger
from worker.meter import Meter

LIMITS = Budget(restarts=2, hours=1, spend=20)


@pytest.mark.parametrize(
    ("used", "spent"),
    [
        (Budget(0, 0, 0), ""),
        (Budget(2, 0.999, 19.99), ""),
        (Budget(3, 0, 0), "restarts: 3 of 2 used"),
        (Budget(0, 1, 0), "hours: 1 of 1 used"),
        (Budget(0, 0, 20), "spend: 20 of 20 used"),
        (Budget(0, 0, sum([0.1] * 200)), "spend: 20 of 20 used"),
        (Budget(0, 0, 25.125), "spend: 25.125 of 20 used"),
        (Budget(0, 0, 20 - 1e-12), "spend: 20 of 20 used"),
    ],
)
def test_so_many_restarts_are_allowed_and_nothing_is_left_of_time_and_spend_at_the_limit(
    used: Budget, spent: str
) -> None:
    """
    One restart more than allowed is too many; twenty is all of twenty, whatever fractions add up to.
    """
    assert State(LIMITS, used).spent() == spent


def test_without_a_limit_nothing_is_ever_spent() -> None:
    assert State(Budget(), Budget(1e6, 1e6, 1e6)).spent() == ""


def test_a_limit_of_nothing_allows_no_restart_and_no_spending() -> None:
    assert State(Budget(restarts=0), Budget(0, 0, 0)).spent() == ""
    assert State(Budget(restarts=0), Budget(1, 0, 0)).spent()
    assert State(Budget(spend=0), Budget(0, 0, 0)).spent()


def test_what_is_left_is_never_less_than_nothing() -> None:
    assert State(LIMITS, Budget(3, 0.25, 30)).left() == {"restarts": 0, "hours": 0.75, "spend": 0}
    assert State(Budget(), Budget(3, 0.25, 30)).left() == {}


@pytest.fixture
def ledger(tmp_path: Path) -> SqliteLedger:
    return SqliteLedger.create(f"{tmp_path}/ledger.db")


def test_a_grant_adds_to_what_the_configuration_allows(ledger: SqliteLedger) -> None:
    """
    Twice five is ten; where there is no limit there is none to raise.
    """
    for id in ("first", "second"):
        grant.grant(ledger, grant.parse(["spend=5", "restarts=1"]), "ann", id)
    state = budget.read(ledger, Budget(spend=20))
    assert state.limits == Budget(None, None, 30)


def test_a_grant_counts_once_however_often_it_is_said(ledger: SqliteLedger) -> None:
    """
    Its id tells it from others of the same amount; another amount under it is a mistake.
    """
    for _ in range(3):
        assert grant.grant(ledger, grant.parse(["spend=5"]), "ann", "mine") == "budget: 5 more spend, as ann says"
    with pytest.raises(AgentError, match="was another one: 5 more spend"):
        grant.grant(ledger, grant.parse(["spend=6"]), "ann", "mine")
    assert budget.read(ledger, Budget(spend=20)).limits.spend == 25


def test_of_a_grant_that_may_have_been_heard_it_is_said_how_to_say_it_again(
    ledger: SqliteLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A server that does not answer is asked again a few times; that it is away afterwards, too, is no mistake of the
    grant's.
    """
    answers = ["lost", "lost", "lost", "lost", "lost", "there"]
    add = ledger.add

    def adding(*amounts: Any, **more: Any) -> None:
        add(*amounts, **more)
        if answers.pop(0) == "lost":
            raise LedgerAway("no answer")

    opened: list[Any] = [ledger, ledger, ledger, ledger]
    monkeypatch.setattr(grant, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(ledger, "add", adding)
    monkeypatch.setattr(ledger, "close", lambda: None)
    monkeypatch.setattr(report, "open_ledger", lambda *_where, **_how: opened.pop(0) if opened else away())

    def away() -> SqliteLedger:
        raise StateError("the ledger's server cannot be reached")

    with pytest.raises(StateError, match="it may have been done; say it again with --id mine"):
        grant.from_outside(str(tmp_path), None, ["spend=5"], "mine", "ann")
    said = grant.from_outside(str(tmp_path), None, ["spend=5"], "mine", "ann")
    assert said == "budget: 5 more spend, as ann says"
    assert budget.read(ledger, Budget(spend=20)).limits.spend == 25
    assert answers == []


def test_ends_that_are_counted_and_not_forgotten_are_not_counted_again(ledger: SqliteLedger) -> None:
    """
    A worker that dies between the two has died once itself; systemd has written that down, too.
    """
    ends = [folder.Ends(["SIGKILL"] * number, 1.0, "", ("i1", "i2", "i3")[:number]) for number in range(4)]

    def used_after(found: folder.Ends) -> float | None:
        Meter(LIMITS, ledger, {}, lambda action: action()).open([], found, cut_off=True)
        return budget.read(ledger, LIMITS).used.restarts

    assert [used_after(found) for found in (ends[1], ends[1], ends[2], ends[2])] == [1, 1, 2, 2]
    assert used_after(folder.Ends(["SIGKILL"], 1.0, "", ("i3",))) == 3, "the others are forgotten"
    assert used_after(folder.Ends(["SIGKILL"], 1.0, "", ("",))) == 4, "nobody can tell which one it is"


@pytest.mark.parametrize("words", [["spend"], ["spend="], ["spend=-1"], ["spend=1e3"], ["money=5"], ["spend=inf"]])
def test_what_is_no_amount_is_refused_with_what_to_write(words: list[str]) -> None:
    with pytest.raises(ValueError, match="as in spend=5"):
        grant.parse(words)


def test_the_name_of_a_grant_without_one_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["budget", "--id", "mine"]) == 1
    assert "say what: agentctl budget --add" in capsys.readouterr().err
