"""Effects: what a step has done to the outside world under a key, so that it is not done twice.

    nothing ──claim──► claimed ──commit───► committed: the result, for every later caller
                          │ └───release──► nothing: it said that it failed, so it did not happen
                          └─ its holder is gone: the next claim takes it over, or finds it
                             unknown: cut off, and nobody can tell; a person settles it

A claim gives a token; without the newest token nothing is committed.  A process that claims gives a secret of its
own, the claimant: one that lives and has not heard of its claim is granted it again, and no other commits or
releases it.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

CLAIMED, COMMITTED, UNKNOWN = "claimed", "committed", "unknown"
# Answers to a claim, besides COMMITTED and UNKNOWN.
GRANTED, TAKEN_OVER, HELD, CONFLICT = "granted", "taken-over", "held", "conflict"
# A result up to this size is kept for later callers.
RESULT_MAX = 1024 * 1024


class Effect(NamedTuple):
    """What the ledger has under a key.

    `parameters` is a digest of what the effect was to be.  `step` is the step that claimed it last, `worker`
    the worker that holds the claim, `at` when it was claimed, committed or given up (wall-clock seconds).
    `result` is None while there is none, and for one longer than RESULT_MAX; `size` is its length.
    `claimant` is the secret of the process that claimed it last, empty where it gave none.  `taken`: it took the
    effect over from one that may have begun it.
    """

    key: str
    parameters: str
    state: str
    step: str
    token: int
    worker: str
    at: float
    result: bytes | None = None
    size: int = 0
    claimant: str = ""
    taken: bool = False


class Answer(NamedTuple):
    """What came of a claim: GRANTED or TAKEN_OVER, and the effect is ours with a new token; HELD by another;
    COMMITTED; UNKNOWN; CONFLICT: the key stands for something else."""

    verdict: str
    effect: Effect


class Effects(Protocol):
    """The effects of one run.  Each call is one durable transaction, and may raise StorageFull or LedgerAway."""

    def claim(self, key: str, parameters: str, step: str, lease: float, take_over: bool, claimant: str = "") -> Answer:
        """Take `key` for `step`, or say why not.  The row is durable before this returns.

        A claim whose holder is gone, or an effect that is UNKNOWN, is TAKEN_OVER if `take_over`, else it is
        UNKNOWN.  A claimant that has this claim already never heard of it, and is granted it again with a new token and
        the same verdict, also if it is UNKNOWN by now.  Where workers share the ledger, a holder of which nothing was
        heard for `lease` seconds is gone.
        """

    def renew(self, key: str, token: int, lease: float) -> bool:
        """Extend a claim, which an earlier life of ours may have granted; return False if it is no longer ours."""

    def commit(self, key: str, token: int, result: bytes | None, size: int, claimant: str = "") -> bool:
        """Store the result and the committed mark; return False, nothing changed, if the token is not the newest.

        Nor is anything changed if the claim is another claimant's.

        Again is once; an UNKNOWN effect is committed as well, since whoever has its token knows.
        """

    def release(self, key: str, token: int, claimant: str = "") -> bool:
        """Forget a claim whose effect did not happen; return False if it is not ours."""

    def abandon(self, key: str, token: int) -> bool:
        """Let go of a claim of which nobody knows whether its effect happened, as if its holder were gone."""

    def settle(self, key: str, result: bytes | None) -> Effect | None:
        """Commit an effect that is UNKNOWN, or a claim that nobody holds, with `result`, or forget it if that is None.

        Return the effect as it was, or None if there is no such one.
        """

    def all(self) -> Iterator[Effect]:
        """Yield every effect, by key."""

    def restore(self, effects: Iterable[Effect]) -> int:
        """Add what is not known here, or not as committed; return how many.  Nobody holds a claim among them."""
