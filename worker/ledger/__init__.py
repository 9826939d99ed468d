"""The ledger: what was tried, what was done, and what came of it.

One row for each attempt.  A row is inserted when a step is claimed and closed when the attempt has
ended; a step is done when it has a row whose outcome is "done", and it can have only one.  Everything
else (how many failures count, what is waiting) is derived from the rows, so nothing is stored twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

DONE, FAILED, STALLED, INTERRUPTED = "done", "failed", "stalled", "interrupted"
DEFERRED, AGAIN = "deferred", "again"  # the step said "not now", or "restart me fresh"


class StorageFull(Exception):
    """The disk took no more, or is failing; nothing was changed and the same call may work later."""


class LedgerCorrupt(Exception):
    """The database cannot be read as a ledger."""


class Claim(NamedTuple):
    """The start of an attempt; times are wall-clock seconds."""

    step: str
    number: int
    definition: str
    started: float
    boot: str


class Ending(NamedTuple):
    """The end of an attempt.

    `counted`: it uses up one of the step's attempts.  `final`: the step has failed for good.  `took`
    and `delay`, the wait for the next attempt, are seconds.  `progress` is the furthest the attempt
    got, `spend` what it said that it had spent, `detail` what it was doing when it was ended for a limit.
    `output` is the whole result when it is small; None when it lies in the file out/STEP.
    `log` is what the step wrote to standard error, or the end of it.
    """

    step: str
    number: int
    outcome: str
    counted: bool
    final: bool
    cause: str
    status: int | None
    ended: float
    took: float = 0.0
    delay: float = 0.0
    progress: float = 0.0
    spend: float = 0.0
    detail: str = ""
    output: bytes | None = None
    output_size: int = 0
    log: bytes = b""
    log_size: int = 0


class Row(NamedTuple):
    """One attempt as the ledger has it, without its output and log; `outcome` None: it was not closed."""

    seq: int
    step: str
    number: int
    definition: str
    started: float
    boot: str
    outcome: str | None
    counted: bool
    final: bool
    cause: str
    status: int | None
    ended: float | None
    took: float
    delay: float
    progress: float
    spend: float
    detail: str
    output_size: int
    log_size: int


class Ledger(Protocol):
    """What the worker asks of a ledger."""

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim]) -> None:
        """Close and open attempts in one durable transaction; all of it, or none.

        Raises StorageFull.  A step that is done already is not done again: its ending is refused
        with ValueError.
        """

    def rows(self) -> Iterator[Row]:
        """Yield every attempt, oldest first."""

    def fact(self, name: str) -> str | None:
        """Return a fact about the run, such as its state, or None."""

    def note(self, facts: dict[str, str]) -> None:
        """Store facts about the run, durably, in one transaction.  Raises StorageFull."""

    def last_closed(self, step: str) -> Row | None:
        """Return the newest attempt of a step that has ended, or None."""

    def output(self, seq: int) -> bytes | None:
        """Return the inline output of an attempt, or None."""

    def log(self, seq: int) -> bytes:
        """Return the log of an attempt, or the end of it."""

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        """Add what a checkpoint knows and the ledger does not; return how many rows that were."""

    def revision(self) -> int:
        """Return a number that grows with every claim and every ending."""

    def close(self) -> None: ...
