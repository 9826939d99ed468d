"""A ledger on a server, used from the worker's loop without ever blocking it.

Calls are made by one thread, one after the other, while the loop goes on: it hears its steps, enforces their
limits and pings systemd for as long as they are well.  The thread knows nothing of steps and pings nobody.
"""

import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from worker import clock
from worker.events import Events
from worker.ledger import Claim, Ending, Heard, LedgerBusy, Recorded, Row, Saved, Server
from worker.ledger.effects import Answer, Effect

# A server that gives no answer for so long is hung up on, should the ledger itself not have noticed; a call that moves
# many rows may take longer.
_PATIENCE, _LONG = 20.0, 120.0
# Calls that were in each other's way are made again so often, after up to so many seconds.
_TRIES, _TURN = 20, 0.05
# A claim that was granted, or renewed, so many seconds ago need not be asked about before its step begins.
_MOMENT = 1.0

T = TypeVar("T")


class Caller:
    """The thread, and the way to it."""

    def __init__(self, store: Server, events: Events, wait: Callable[[float], None]) -> None:
        """`wait` handles the loop's events until a time on the monotonic clock, or returns earlier."""
        self._store = store
        self._events = events
        self._wait = wait
        self._watched = -1
        self._busy = False
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        events.watch(self._ended, lambda: os.eventfd_read(self._ended))
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()
        self.woken = False  # another worker has something to tell

    def call(self, action: Callable[[], T], patience: float = _PATIENCE) -> T:
        """Return `action()`, made in the thread; raises what it raises.

        It is waited for to its end, which comes soon after its connection was broken: what a call was granted must
        not be granted to nobody.
        """
        gives_up = clock.monotonic() + patience
        self._listen(False)
        answer: list[T] = []
        fault: list[Exception] = []

        def job() -> None:
            try:
                answer.append(_repeated(action))
            except Exception as exc:
                fault.append(exc)
            self._busy = False
            os.eventfd_write(self._ended, 1)

        self._busy = True
        self._jobs.put(job)
        while self._busy:
            if clock.monotonic() >= gives_up:
                _hang_up(self._store.fileno())
                gives_up = clock.monotonic() + patience
            self._wait(gives_up)
        self._listen(True)
        if fault:
            raise fault[0]
        return answer[0]

    def close(self) -> None:
        """End the thread, if it is not in the middle of a call that hangs; then the process's end ends it."""
        self._listen(False)
        self._jobs.put(None)
        self._thread.join(1.0)
        self._events.forget(self._ended)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _listen(self, on: bool) -> None:
        """Watch the connection for what the server says by itself, but not while an answer is due there."""
        if self._watched >= 0:
            self._events.forget(self._watched)
        self._watched = self._store.fileno() if on else -1
        if self._watched >= 0:
            self._events.watch(self._watched, self._hear)

    def _hear(self) -> None:
        self.woken = self._store.notified() or self.woken
        if self._store.fileno() != self._watched:
            self._listen(True)


def _repeated(action: Callable[[], T]) -> T:
    """Return `action()`, made again at once where another call was in its way."""
    for _ in range(_TRIES):
        try:
            return action()
        except LedgerBusy:
            time.sleep(random.random() * _TURN)
    return action()


def _hang_up(connection: int) -> None:
    """Break a connection in which the thread may be waiting."""
    if connection >= 0:
        try:
            with socket.socket(fileno=os.dup(connection)) as broken:
                broken.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is broken already


class RemoteEffects:
    """The effects of a ledger on a server; see worker.ledger.effects.Effects."""

    def __init__(self, store: Server, call: Caller) -> None:
        self._effects = store.effects
        self._call = call.call

    def claim(self, key: str, parameters: str, step: str, lease: float, take_over: bool, claimant: str = "") -> Answer:
        return self._call(lambda: self._effects.claim(key, parameters, step, lease, take_over, claimant))

    def renew(self, key: str, token: int, lease: float) -> bool:
        return self._call(lambda: self._effects.renew(key, token, lease))

    def commit(self, key: str, token: int, result: bytes | None, size: int, claimant: str = "") -> bool:
        return self._call(lambda: self._effects.commit(key, token, result, size, claimant))

    def release(self, key: str, token: int, claimant: str = "") -> bool:
        return self._call(lambda: self._effects.release(key, token, claimant))

    def abandon(self, key: str, token: int) -> bool:
        return self._call(lambda: self._effects.abandon(key, token))

    def settle(self, key: str, result: bytes | None) -> Effect | None:
        return self._call(lambda: self._effects.settle(key, result))

    def all(self) -> Iterator[Effect]:
        yield from self._call(lambda: list(self._effects.all()))

    def restore(self, effects: Iterable[Effect]) -> int:
        return self._call(lambda: self._effects.restore(effects))


class RemoteLedger:
    """A ledger on a server; see worker.ledger.Ledger."""

    shared = True

    def __init__(self, store: Server, events: Events, wait: Callable[[float], None]) -> None:
        self.worker = store.worker
        self._store = store
        self._caller = Caller(store, events, wait)
        self._call = self._caller.call
        self.effects = RemoteEffects(store, self._caller)

    @property
    def replaced(self) -> bool:
        """Whether another process works under our name, so that nothing is granted to us any more."""
        return self._store.replaced

    @property
    def overdue_at(self) -> float:
        """When to ask for orphans again (monotonic clock)."""
        return self._store.overdue_at

    def woken(self) -> bool:
        """Return whether another worker has waked us since the last time this was asked."""
        woken, self._caller.woken = self._caller.woken, False
        return woken

    def enlist(
        self,
        steps: Sequence[tuple[str, str]],
        identity: Sequence[tuple[str, str]] | None = None,
        found: Collection[str] = (),
    ) -> dict[str, bool] | None:
        return self._caller.call(lambda: self._store.enlist(steps, identity, found), _LONG)

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim], most: int | None = None) -> Recorded:
        return self._call(lambda: self._store.record(endings, claims, most))

    def renew(self, steps: Sequence[str]) -> list[str]:
        return self._call(lambda: self._store.renew(steps))

    def still_ours(self, step: str) -> bool:
        """See Ledger.still_ours.  An answer that took longer than half a lease may be out of date: it is asked again.

        Nobody takes a claim over before that time, see Ledger.orphans.
        """
        good_for = _MOMENT
        while clock.monotonic() - (before := self._store.confirmed_at(step)) > good_for:
            if self.renew([step]) or self._store.confirmed_at(step) == before:
                return False
            good_for = self._store.lease / 2
        return True

    def surely_ours(self, step: str) -> bool:
        return clock.monotonic() - self._store.confirmed_at(step) <= self._store.lease / 2

    def orphans(self) -> list[Row]:
        return self._call(self._store.orphans)

    def news(self, idle: bool) -> list[Row]:
        return self._call(lambda: self._store.news(idle))

    def rows(self) -> Iterator[Row]:
        yield from self._caller.call(lambda: list(self._store.rows()), _LONG)

    def fact(self, name: str) -> str | None:
        return self._call(lambda: self._store.fact(name))

    def note(self, facts: dict[str, str]) -> None:
        self._call(lambda: self._store.note(facts))

    def add(
        self, amounts: Mapping[str, float], facts: Mapping[str, str] = {}, mark: tuple[str, str] | None = None
    ) -> None:
        self._call(lambda: self._store.add(amounts, facts, mark))

    def heard(self, said: Mapping[tuple[str, int], Heard]) -> None:
        self._call(lambda: self._store.heard(said))

    def save_files(self, step: str, files: Sequence[Saved]) -> None:
        self._call(lambda: self._store.save_files(step, files))

    def saved(self, step: str | None = None) -> Iterator[Saved]:
        yield from self._call(lambda: list(self._store.saved(step)))

    def restore_saved(self, files: Iterable[Saved]) -> int:
        return self._call(lambda: self._store.restore_saved(files))

    def add_items(self, task: str, items: Sequence[str]) -> None:
        self._call(lambda: self._store.add_items(task, items))

    def items(self) -> dict[str, list[str]]:
        return self._call(self._store.items)

    def usage(self, facts: Sequence[str]) -> tuple[dict[str, str], float]:
        return self._call(lambda: self._store.usage(facts))

    def last_closed(self, step: str) -> Row | None:
        return self._call(lambda: self._store.last_closed(step))

    def output(self, seq: int) -> bytes | None:
        return self._call(lambda: self._store.output(seq))

    def log(self, seq: int) -> bytes:
        return self._call(lambda: self._store.log(seq))

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        return self._caller.call(lambda: self._store.restore(rows), _LONG)

    def revision(self) -> int:
        return self._call(self._store.revision)

    def close(self) -> None:
        """End the thread; the ledger itself stays open for whoever opened it."""
        self._caller.close()
