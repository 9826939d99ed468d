"""The workshop: everything that the loop of a run works with, made once, in the order in which one needs the other."""

import os
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from worker import environment
from worker.attempt import Attempt
from worker.awake import Awake
from worker.cgroup import Tree
from worker.companions import Companions
from worker.config import Config
from worker.copies import Copies
from worker.crew import Crew
from worker.disk import Disk
from worker.errands import Errands
from worker.events import Events
from worker.folder import Places
from worker.herald import Herald
from worker.journal import Journal
from worker.keeper import Keeper
from worker.ledger import Ledger, Server
from worker.meter import Meter
from worker.orders import STOPPED, Orders
from worker.results import Results
from worker.slots import Slots
from worker.status import Outcomes
from worker.succession import Predecessor
from worker.systemd import Notifier
from worker.tasklist import Tasklist
from worker.watchdog import Watchdog

T = TypeVar("T")


class Workshop:
    """The parts; each is described where it is made of."""

    def __init__(
        self,
        settings: Config,
        places: Places,
        store: Ledger,
        journal: Journal,
        notifier: Notifier,
        environ: Mapping[str, str],
        before: Predecessor,
        awake: Awake,
    ) -> None:
        self.list = Tasklist(settings, places.secrets, journal)
        self.places = places
        self.journal = journal
        self.notifier = notifier
        self.awake = awake
        awake.wanted = lambda: self.list.settings.keep_awake
        self._store = places.ledger if settings.ledger is None else "the ledger"
        self.events = Events()
        self.running: dict[str, Attempt] = {}
        self.slots = Slots(places, notifier, Tree.find(environ), before.stored, before.same_place)
        # Its cgroup is a unit's, which has not let us divide it.
        self.undivided = environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) and not self.slots.live
        self.watchdog = Watchdog(self.events, notifier, self.running, self._looked)
        self.errands = Errands(self.events, self.watchdog.wait, places.root)
        # SIGHUP is `systemctl reload`, or else a terminal that was closed.
        outlives, hangup_stops = self.slots.live, "NOTIFY_SOCKET" not in environ
        self.orders = Orders(self.running, self.errands, self.events, notifier, outlives, hangup_stops)
        self.disk = Disk(journal, self.watchdog.wait, lambda: self.orders.done)
        self.ledger = self._reached(store)
        self.results = Results(self.ledger, places, self.disk, journal)
        self.meter = Meter(settings.budget, self.ledger, self.running, self.persist)
        self.outcomes = Outcomes()
        base = environment.inherited(environ)
        crew = (places, journal, self.events, self.disk, self.ledger, self.results, self.slots, base)
        self.crew = Crew(self.running, *crew)
        self.crew.bystanders = self.errands.pids
        self.crew.budget_left = lambda: self.meter.state().left()
        self.copies = self._copying(base)
        self.companions = self._accompanied()

    def persist(self, action: Callable[[], T]) -> T:
        """Return `action()` on the ledger; a full disk, or a server that is away, is waited out."""
        return self.disk.persist(self._store, action)

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
        return Copies(wanted, self.places, shared, beside, environ, self.errands, self.journal, hurried)

    def _accompanied(self) -> Companions:
        """Return what accompanies the run, those that others rely on first; a sandbox may sleep after the last one."""
        keeper = Keeper(self.places.checkpoint, self.places.run, self.ledger, self.errands, self.journal)
        herald = Herald(
            lambda: self.list.settings.contact, self.places, self.ledger, self.running, self.meter.state,
            self.errands, self.journal,
        )  # fmt: skip
        return Companions([self.meter, keeper, self.copies, herald, self.awake, self.errands])
