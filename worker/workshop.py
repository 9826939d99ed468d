"""The workshop: everything that the loop of a run works with, made once, in the order in which one needs the other."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from worker import clock, environment, process
from worker.attempt import Attempt
from worker.awake import Awake
from worker.board import Replay
from worker.broker import Broker
from worker.cgroup import Tree
from worker.companions import Companions
from worker.config import Config
from worker.copies import Copies
from worker.crew import Crew
from worker.disk import Disk, Stopped
from worker.errands import Errands
from worker.events import Events
from worker.folder import Places
from worker.herald import Herald
from worker.homes import Removal
from worker.journal import Journal
from worker.keeper import Keeper
from worker.ledger import Ledger, Server
from worker.meter import Meter
from worker.orders import STOPPED, Orders
from worker.pause import Pause
from worker.peers import Alone, Peers
from worker.plan import Plan
from worker.results import Results
from worker.savings import Savings
from worker.slot import Means
from worker.slots import Slots
from worker.standing import Standing
from worker.stateguard import StateGuard
from worker.status import Outcomes
from worker.steward import Steward
from worker.succession import Kept, Predecessor, Succession, Ways
from worker.systemd import Notifier
from worker.tasklist import Tasklist
from worker.voice import Voice
from worker.warden import Warden
from worker.watchdog import Watchdog

if TYPE_CHECKING:
    from worker.ledger.remote import RemoteLedger

T = TypeVar("T")

# Descriptors: each step at a time needs so many, the worker itself so many others.
_EACH, _OTHERS = 10, 256


class Workshop:
    """The parts; what each is for is said in the file of its class."""

    def __init__(
        self,
        settings: Config,
        steps: Plan,
        places: Places,
        store: Ledger,
        journal: Journal,
        notifier: Notifier,
        environ: Mapping[str, str],
        before: Predecessor,
        awake: Awake,
    ) -> None:
        self.list = Tasklist(settings, places, journal)
        self.places = places
        self.journal = journal
        self.notifier = notifier
        self.awake = awake
        awake.wanted = lambda: self.list.settings.keep_awake
        self._store = places.ledger if settings.ledger is None else "the ledger"
        self.guard = StateGuard(places.root, places.ledger if settings.ledger is None else None)
        self.events = Events()
        self.running: dict[str, Attempt] = {}
        means = Means.of(places, environ, journal.warning)
        self.slots = Slots(places, notifier, Tree.find(environ), before.stored, before.same_place, means)
        # Its cgroup is a unit's, which has not let us divide it.
        self.undivided = environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) and not self.slots.live
        self.watchdog = Watchdog(self.events, notifier, self.running, self._looked)
        # One that ended in order has ended them; what a dead one left in this very cgroup the slots have killed.
        leftovers = not (before.in_order or (self.slots.live and before.same_place))
        self.errands = Errands(self.events, self.watchdog.wait, places.root, leftovers)
        # SIGHUP is `systemctl reload`, or else a terminal that was closed.
        outlives, hangup_stops = self.slots.live, "NOTIFY_SOCKET" not in environ
        self.orders = Orders(self.running, self.errands, self.events, notifier, outlives, hangup_stops)
        self.disk = Disk(journal, self.watchdog.wait, lambda: self.orders.done)
        self.ledger = self._reached(store)
        self.results = Results(self.ledger, places, self.disk, journal)
        self.savings = Savings(self.ledger, places, self.running, self.persist)
        self.meter = Meter(settings.budget, self.ledger, self.running, self.persist)
        self.outcomes = Outcomes()
        self.pause = Pause(places.root, self.running)
        base = environment.inherited(environ)
        crew = (places, journal, self.events, self.disk, self.ledger, self.results, self.slots, base)
        self.crew = Crew(self.running, *crew)
        self.crew.bystanders = self.errands.pids
        self.crew.budget_left = lambda: self.meter.state().left()
        self.copies = self._copying(environ)
        self.companions = self._accompanied(environ, Removal(means.homes, self.errands))
        self.before = before
        self.boot = clock.boot_id()
        self._know(steps)

    def _know(self, steps: Plan) -> None:
        """Make those parts that know how the run stands."""
        asks = lambda: self.list.settings.after_restore == "ask"  # noqa: E731
        self.standing = Standing(steps, self.ledger, self.persist, asks)
        self.voice = Voice(
            self.standing, self.running, self.places, self.journal, self.disk, self.crew, self.meter, self.copies,
            self.outcomes,
        )  # fmt: skip
        self.peers = self._others()
        self.disk.meanwhile = self.peers.renew
        self.steward = Steward(
            self.running, self.ledger, self.places, self.journal, self.outcomes, self.persist, self.companions.changed,
            self.read_all, self.pause,
        )  # fmt: skip
        ask, note, told = self.steward.vouches, self.steward.note, self.steward.told
        doubts = self.standing.doubts_effect
        speaks_for = lambda client, step: self.steward.speaks_for(client, step, self.slots.is_ours)  # noqa: E731
        self.broker = Broker(self.ledger.effects, self.persist, ask, note, told, doubts, speaks_for)
        self.broker.changed = self.companions.changed
        self.errands.meanwhile = self._listen
        self.succession = Succession(
            self.standing, self.crew, self.slots, Kept(self.ledger, self.places, self.results, self.journal),
            Ways(self.persist, self.watchdog.wait, self.voice.ended), self.boot, self.before,
        )  # fmt: skip

    def persist(self, action: Callable[[], T]) -> T:
        """Return `action()` on the ledger; a full disk, or a server that is away, is waited out."""
        return self.disk.persist(self._store, action)

    def read_all(self) -> Replay:
        """Bring everything that is known of the run up to date with the whole ledger."""
        self.meter.read()
        return self.peers.read_all()

    def allow_descriptors(self) -> None:
        """Let the process have as many open as the list, as it is now, needs."""
        process.allow_descriptors(_EACH * self.list.settings.concurrency + _OTHERS)

    def _looked(self, now: float) -> None:
        """The loop has looked around, whatever it waits for."""
        self.slots.looked(now)
        self.awake.keep(now)

    def _reached(self, store: Ledger) -> Ledger:
        """Return a ledger that can be asked without blocking the loop."""
        if not store.shared:
            return store
        from worker.ledger.remote import RemoteLedger  # threads and sockets, for those who share

        return RemoteLedger(cast(Server, store), self.events, self.watchdog.wait)

    def _copying(self, environ: Mapping[str, str]) -> Copies:
        def hurried() -> bool:
            return self.orders.leaving or self.orders.ending == STOPPED

        beside = os.path.dirname(self.list.path)
        wanted, shared = lambda: self.list.settings.copy, self.ledger.shared
        env = lambda: environment.own(environ, self.list.settings.contact.given)  # noqa: E731
        return Copies(wanted, self.places, shared, beside, env, self.errands, self.journal, hurried)

    def _accompanied(self, environ: Mapping[str, str], removal: Removal) -> Companions:
        """Return what accompanies the run, those that others rely on first; a sandbox may sleep after the last one."""
        keeper = Keeper(self.places.checkpoint, self.places.run, self.ledger, self.errands, self.journal)
        herald = Herald(
            lambda: self.list.settings.contact, self.places, self.ledger, self.running, self.meter.state,
            environ, self.errands, self.journal,
        )  # fmt: skip
        slots = self.slots
        warden = Warden(slots.tree, slots.sentinel, slots.bystanders, self.running, self.errands.pids, self.journal)
        others = (self.savings, keeper, self.copies, removal, herald, self.awake, self.errands)
        return Companions([warden, self.meter, *others])

    def _others(self) -> Peers | Alone:
        if not self.ledger.shared:
            return Alone(self.running, self.standing)
        remote, lease = cast("RemoteLedger", self.ledger), self.list.settings.lease
        return Peers(remote, self.running, self.standing, self.results, self.persist, self.journal, lease)

    def _listen(self) -> None:
        """Hear what people say while the end waits for the last copy, and count that time."""
        with contextlib.suppress(Stopped):
            self.broker.work(clock.monotonic())
            self.meter.keep(clock.monotonic())
