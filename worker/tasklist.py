"""The task list as a worker holds it: read again when it has changed; one that is wrong changes nothing."""

from collections.abc import Callable

from worker import config, plan, sandbox
from worker.config import Config
from worker.errors import AgentError, ConfigError
from worker.folder import Places
from worker.journal import ERROR, Journal
from worker.plan import Plan


class Tasklist:
    """The settings in force, and where they come from."""

    def __init__(self, settings: Config, places: Places, journal: Journal) -> None:
        self.settings = settings
        self.refused: AgentError | None = None  # why the list as it is now is not the one in force
        self.next_run: str | None = None  # the run that the list is of by now, if that is another one
        self.path = settings.files[0]
        self._places = places
        self._journal = journal
        self._fingerprint = config.fingerprint(self.path)

    def changed(self) -> bool:
        """Return whether the files are others than those that were read last."""
        return config.fingerprint(self.path) != self._fingerprint

    def read_again(self, enlist: Callable[[Plan], Plan]) -> Plan | None:
        """Return the plan of the list as it is now, whose settings are in force then; None if it cannot be taken.

        Why not is said in the journal.  `enlist` lets the ledger know the plan and returns the one to work on; it may
        raise AgentError.
        """
        self._fingerprint = config.fingerprint(self.path)
        self.refused = self.next_run = None
        try:
            settings = config.load(self.path)
            steps = plan.build(settings)
            sandbox.check(settings, steps, self._places)
        except ConfigError as exc:
            self.refused = exc
            for problem in exc.problems:
                self._say(str(problem))
            self._say("the configuration is wrong; the former one stays")
            return None
        if settings.run != self.settings.run:
            self.next_run = settings.run
            self._say(f"the list is that of the run '{settings.run}' by now; it is begun when this run has ended")
            return None
        try:
            steps = enlist(steps)
        except AgentError as exc:
            self.refused = exc
            self._say(f"{exc}; the former list stays")
            return None
        self.settings = settings
        return steps

    def _say(self, text: str) -> None:
        self._journal.event("reloaded", text, priority=ERROR)
