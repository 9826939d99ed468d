"""The ledger: what was tried, what was done, and what came of it.

One row for each attempt.  A row is inserted when a step is claimed and closed when the attempt has
ended; a step is done when it has a row whose outcome is "done", and it can have only one.  Everything
else (how many failures count, what is waiting) is derived from the rows, so nothing is stored twice.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from worker.ledger.effects import Effect, Effects

DONE, FAILED, STALLED, INTERRUPTED = "done", "failed", "stalled", "interrupted"
DEFERRED, AGAIN = "deferred", "again"  # the step said "not now", or "restart me fresh"
UNKNOWN = "unknown"  # cut off, and nobody can tell whether its effect happened
REDO = "redo"  # a person said that an attempt which was cut off had done nothing
MOVED = "moved"  # in place of a boot's id: the attempt was open when the ledger was copied to another place
OUTCOMES = (DONE, FAILED, STALLED, INTERRUPTED, DEFERRED, AGAIN, UNKNOWN, REDO)


class StorageFull(Exception):
    """The disk took no more, or is failing; nothing was changed and the same call may work later."""


class LedgerLocked(StorageFull):
    """Another program holds the database; the same call works when it has let go."""


class LedgerAway(StorageFull):
    """The server cannot be reached; whether the call did anything is found out when it is made again."""


class LedgerBusy(LedgerAway):
    """The server has undone the call, since it was in the way of another one; it may be made again at once."""


class LedgerCorrupt(Exception):
    """The database cannot be read as a ledger; the message is one line, whatever the database has put into it."""

    def __init__(self, what: str) -> None:
        line = " ".join(what.split())
        super().__init__("".join(c if c.isprintable() else "\ufffd" for c in line))


class Claim(NamedTuple):
    """The start of an attempt; times are wall-clock seconds.

    `key` is what its effect is known by outside, empty where that is RUN:STEP.  `harmless`: the step may be
    begun again without being asked about, so that a claim which a power cut takes away is no loss.  `item` is that
    of a step which was made from a list, else None.
    """

    step: str
    number: int
    definition: str
    started: float
    boot: str
    key: str = ""
    harmless: bool = True
    item: str | None = None


class Ending(NamedTuple):
    """The end of an attempt.

    `counted`: it uses up one of the step's attempts.  `final`: the step has failed for good.  `took`
    and `delay`, the wait for the next attempt, are seconds.  `progress` is the furthest the attempt
    got, `spend` what it said that it had spent, `detail` what it was doing when it was ended for a limit.
    `output` is the whole result when it is small; None when it lies in the file out/STEP.
    `log` is what the step wrote to standard error, or the end of it.  `unsure`: it was cut off while its
    effect may have happened.  `digest` is that of the whole result (`result_digest`), empty where there is none.
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
    unsure: bool = False
    digest: str = ""


class Row(NamedTuple):
    """One attempt as the ledger has it, without its output and log; `outcome` None: it was not closed.

    `seq` grows from claim to claim, and is the token without which nothing is committed.  `worker` names the
    worker that made the attempt where several share the ledger.  `progress` and `spend` of an open attempt are as of
    the last `heard`.  `item` and `digest` are those of its Claim and its Ending.
    """

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
    unsure: bool = False
    key: str = ""
    worker: str = ""
    item: str | None = None
    digest: str = ""


class Heard(NamedTuple):
    """What an open attempt has said so far: the furthest that it got, 0 for nothing, and what it has spent in all."""

    progress: float = 0.0
    spend: float = 0.0


class Saved(NamedTuple):
    """A file that a step keeps for its later attempts; `content` is None where it was too large for the ledger.

    `name` is its path below the step's own folder, `size` its length in bytes, `at` when it was written (wall clock).
    """

    step: str
    name: str
    content: bytes | None
    size: int
    at: float


class Holdings(NamedTuple):
    """What a run holds, of which a ledger is made: its attempts with their inline outputs, and all beside them."""

    rows: Sequence[tuple[Row, bytes | None]] = ()
    facts: Mapping[str, str] = MappingProxyType({})
    effects: Sequence[Effect] = ()
    revision: int = 0
    saved: Sequence[Saved] = ()
    items: Mapping[str, Sequence[str]] = MappingProxyType({})


class Recorded(NamedTuple):
    """What came of a `record`: the claims that are ours now, and the steps whose endings were refused.

    `taken`: steps among those that were to be claimed which others are at, or have done.
    """

    claims: list[Claim]
    lost: list[str]
    taken: tuple[str, ...] = ()


class Ledger(Protocol):
    """What the worker asks of a ledger.  Every method may raise StorageFull or LedgerAway; then call again.

    `shared`: other workers may be at work on the same run.  Then a claim holds for a lease that `renew` extends,
    by the clock of the database; one that stays run out is taken over by whoever asks for `orphans` next.
    """

    shared: bool
    worker: str  # our name in `Row.worker`; empty where there are no others

    @property
    def effects(self) -> Effects: ...

    def enlist(
        self,
        steps: Sequence[tuple[str, str]],
        identity: Sequence[tuple[str, str]] | None = None,
        found: Collection[str] = (),
    ) -> dict[str, bool] | None:
        """Let the ledger know the plan: ids and definitions in order.  Where it is shared, one plan for all.

        `identity`: as much of it as has to be the same for all, by default all of it.  `found`: the steps that are
        there only because this machine has found their items.  While others are at work such steps are neither added
        nor dropped; then the steps that the run has are returned, each with whether it is done, and else None.
        Raises StateError if others are at work on another plan under this run's name.
        """

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim], most: int | None = None) -> Recorded:
        """Close attempts and open `claims`, up to `most` of them from the first on, in one durable transaction.

        All of it, or none; calling it again after LedgerAway does nothing twice.  An ending whose claim is
        no longer ours changes nothing and is named in `lost`.  A claim of a step that is done, that another
        worker holds, or that has had another attempt meanwhile, is passed over.
        """

    def renew(self, steps: Sequence[str]) -> list[str]:
        """Extend our claims of these steps; return the steps that are no longer ours."""

    def still_ours(self, step: str) -> bool:
        """Return whether our claim of a step that is about to begin holds, so that nobody else has begun or done it.

        Where the ledger is shared the database is asked again if it last said so more than a moment ago.
        """

    def surely_ours(self, step: str) -> bool:
        """Return whether nobody can have taken over our claim of a step yet.  Asks nobody, and raises nothing."""

    def orphans(self) -> list[Row]:
        """Take over attempts whose holders are gone: from now on they are ours to close.  Return them.

        A holder is gone if its lease has run out and half a lease later is still the same: it has not been renewed
        three times in a row, whatever the clock of the database did meanwhile.
        """

    def news(self, idle: bool) -> list[Row]:
        """Return what other workers have begun or ended since the last call; the same may come twice.

        `idle`: we have nothing to do until there is more, so that others had better wake us.
        """

    def rows(self) -> Iterator[Row]:
        """Yield every attempt, oldest first; one that is open stands where it was claimed."""

    def fact(self, name: str) -> str | None:
        """Return a fact about the run, such as its state, or None."""

    def note(self, facts: dict[str, str]) -> None:
        """Store facts about the run, durably, in one transaction.  Raises StorageFull."""

    def add(
        self, amounts: Mapping[str, float], facts: Mapping[str, str] = {}, mark: tuple[str, str] | None = None
    ) -> None:
        """Add to facts that are numbers, 0 where there is none yet, and store `facts`, durably, in one transaction.

        `mark`: the name and the value of a fact that is stored along.  Where it has that value already all of this has
        been done, and nothing is done; without it, what is done again after LedgerAway may count twice.
        """

    def heard(self, said: Mapping[tuple[str, int], Heard]) -> None:
        """Note durably what open attempts, by step and number, have said so far; passes over those not ours."""

    def save_files(self, step: str, files: Sequence[Saved]) -> None:
        """Let these be the files that `step` has saved, in one durable transaction; those it had before are gone.

        They are forgotten when the step is done.
        """

    def saved(self, step: str | None = None) -> Iterator[Saved]:
        """Yield the files that steps have saved, or those of one step, by step and name."""

    def restore_saved(self, files: Iterable[Saved]) -> int:
        """Add the files of steps of which nothing is saved here and that are not done; return how many those were."""

    def add_items(self, task: str, items: Sequence[str]) -> None:
        """Add those of `items` that `task` does not have yet after those it has, durably, in one transaction."""

    def items(self) -> dict[str, list[str]]:
        """Return the items that were added to tasks, each in the order in which they were."""

    def usage(self, facts: Sequence[str]) -> tuple[dict[str, str], float]:
        """Return those of these facts that there are, and what all attempts have spent, the open ones as far as noted.

        Cheap enough to be asked again and again.
        """

    def last_closed(self, step: str) -> Row | None:
        """Return the newest attempt of a step that has ended, or None."""

    def output(self, seq: int) -> bytes | None:
        """Return the inline output of an attempt, or None."""

    def log(self, seq: int) -> bytes:
        """Return the log of an attempt, or the end of it."""

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        """Add what a checkpoint knows and the ledger does not; return how many rows that were."""

    def revision(self) -> int:
        """Return a number that grows with every claim and ending, and with all that is saved or added."""

    def close(self) -> None: ...


class Server(Ledger, Protocol):
    """A ledger behind a connection.

    `lease`: how many seconds our claims hold.  `replaced`: another process works under our name, and we get nothing
    more.  `overdue_at`: when to ask for `orphans` again (monotonic clock), since a claim has run out and its holder
    will be gone if it is still so then.
    """

    lease: float
    replaced: bool

    def confirmed_at(self, step: str) -> float:
        """Return when we last asked the database something that made it say that it holds our claim (monotonic clock).

        -inf if the claim is not ours.
        """

    @property
    def overdue_at(self) -> float: ...

    def fileno(self) -> int:
        """Return the connection's descriptor, -1 while there is none."""

    def notified(self) -> bool:
        """Return whether another worker has waked us, or the connection is broken; never blocks."""
