"""The programs of an attempt: what an exit status of the step's own says of its effect."""

import pytest

from tests.plans import task
from worker import doubt
from worker.plan import Step
from worker.programs import Programs
from worker.task import Retry

RETRY = Retry(unsure=(28, 75), success=(3,))


def programs(kind: str, retry: Retry = RETRY) -> Programs:
    entry = task("a", retry=retry)
    if kind == "http":
        entry = entry._replace(run=None, http='{"url": "http://x"}')
    if kind == "python":
        entry = entry._replace(run=None, python="a:b")
    return Programs(Step("a", entry, None), "out", False)


@pytest.mark.parametrize(
    ("kind", "status", "by_itself", "effect", "plain"),
    [
        ("run", 1, True, "failed", 1),
        ("run", 1, False, "open", 1),
        ("run", 28, True, "open", 28),
        ("run", 75, True, "open", 75),  # the list says so
        ("run", 124, True, "open", 124),
        ("run", 137, True, "open", 137),
        ("run", 255, True, "failed", 255),
        ("run", -9, True, "open", -9),
        ("run", None, True, "open", None),
        ("run", 3, True, "open", 0),
        ("python", doubt.FAILED, True, "open", doubt.FAILED),
        ("python", 1, True, "failed", 1),
        ("http", doubt.FAILED, True, "open", 1),
        ("http", doubt.NOT_NOW, True, "open", 75),
        ("http", doubt.REFUSED, True, "refused", 1),
        ("http", doubt.NO_HOST, True, "refused", 75),
        ("http", 75, True, "refused", 75),
        ("http", 1, True, "open", 1),  # a bug of ours says nothing
        ("http", 130, True, "open", 130),
    ],
)
def test_what_an_exit_status_says_of_the_effect(
    kind: str, status: int | None, by_itself: bool, effect: str, plain: int | None
) -> None:
    """
    F2, N30: what is not known to have done nothing may have done it; the ledger has the statuses that it always had.
    """
    those = programs(kind)
    own = those.next()
    those.started(own)
    those.ended(own, status, by_itself, None)
    assert (those.effect, those.plain(own, status)) == (effect, plain)
    assert those.accepted == (3 if status == 3 else 0)
    assert those.hopeless == (status == doubt.NO_HOST)


def test_an_older_workers_memo_is_understood() -> None:
    """
    It had no word for an exit status that the list takes for done.
    """
    for memo in (["open", False, 0], ["open", False, 0, 3]):
        those = programs("run")
        assert those.resume(memo).own
        assert (those.effect, those.accepted) == ("open", [*memo, 0][3])
    assert programs("run").memo() == ["none", False, 1, 0]
