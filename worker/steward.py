"""The steward: answers for the steps before the broker of effects, and does what a person tells the run."""

from collections.abc import Callable, Mapping
from typing import Any

from worker import clock, status
from worker.attempt import Attempt
from worker.control import Connection
from worker.errors import StateError
from worker.folder import Places
from worker.journal import NOTICE, Journal
from worker.ledger import Ledger
from worker.pause import Pause
from worker.status import Outcomes


class Steward:
    """What the broker asks about the running steps, and whom it tells what became of their effects."""

    def __init__(
        self,
        running: Mapping[str, Attempt],
        store: Ledger,
        places: Places,
        journal: Journal,
        outcomes: Outcomes,
        persist: Callable[[Callable[[], Any]], Any],
        changed: Callable[[], None],
        read: Callable[[], object],
        pause: Pause,
    ) -> None:
        """`changed` is called when the ledger knows more, `read` brings all that is known of it up to date."""
        self._running = running
        self._ledger = store
        self._places = places
        self._journal = journal
        self._outcomes = outcomes
        self._persist = persist
        self._changed = changed
        self._read = read
        self._pause = pause

    def vouches(self, step: str) -> bool:
        """Return whether a step runs here and is within its limits."""
        attempt = self._running.get(step)
        return attempt is not None and not attempt.lost and attempt.within_limits(clock.monotonic())

    def speaks_for(self, client: Connection, step: str, is_ours: Callable[[int], bool]) -> bool:
        """Return whether a client may claim for a step; a program of another one may not.  `is_ours`: see Slots."""
        attempt = self._running.get(step)
        if attempt is None:
            return True
        with client.peer() as sender:
            return attempt.holds(sender) or not is_ours(client.pid)

    def note(self, step: str, key: str, outcome: str) -> None:
        """Note what became of an effect that `step` asked for."""
        attempt = self._running.get(step)
        if attempt is not None and outcome == "unknown":
            attempt.unknown = key
        elif attempt is not None and attempt.unknown == key:
            attempt.unknown = ""  # settled meanwhile
        self._outcomes.effect(outcome)
        self._changed()
        news = status.effect(step, key, outcome)
        self._journal.event(news.event, news.text, step=step, priority=news.priority, AGENT_OUTCOME=outcome)

    def park(self, waiting: set[str]) -> None:
        """Hold no limit but their timeouts against steps that wait for an effect which another step of ours is at."""
        for name, attempt in self._running.items():
            attempt.park(name in waiting, clock.monotonic())

    def told(self, request: dict[str, str], result: bytes | None) -> str:
        """Do what a person says; return it in words.  Raises AgentError, KeyError or ValueError."""
        from worker import grant, settle  # for the rare moment

        who = request["who"]
        if "pause" in request or "resume" in request:
            return self._hold(request)
        if "grant" in request:
            event, more, id = "budget-raised", grant.parse(request["grant"].split()), request.get("id", grant.new_id())
            done: str = self._persist(lambda: grant.grant(self._ledger, more, who, id))
        else:
            event, said = "settled", (result or b"") if request["kept"] == "yes" else None
            done = self._persist(lambda: settle.settle(self._ledger, self._places, request["settle"], said, who))
        self._journal.event(event, done, priority=NOTICE)
        self._read()
        self._changed()
        return done

    def _hold(self, request: Mapping[str, str]) -> str:
        """Pause the agent, or let it go on; the loop says so."""
        try:
            done = self._pause.told(request)
        except OSError as exc:
            raise StateError(f"{exc.filename}: cannot be written: {exc.strerror}", "nothing was changed") from exc
        self._pause.apply(clock.monotonic())
        return done
