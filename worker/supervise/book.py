"""The supervisor's book: the record as it is on the disk, and what people are told."""

from worker.journal import ERROR, Journal
from worker.signs import printable
from worker.supervise import record
from worker.supervise.record import Machine, Record


class Book:
    """Holds the record; what is noted is on the disk, or said not to be."""

    def __init__(self, root: str, known: Record, journal: Journal) -> None:
        self.root = root
        self.known = known
        self._journal = journal
        self._unsaved = False

    def note(self, known: Record, must: bool = False) -> bool:
        """Let the record be this one; return whether it is on the disk.

        One that is not is tried again next time; if it `must` be there before anything is done, it is as before.
        """
        if known == self.known and not self._unsaved:
            return True
        before, self.known = self.known, known
        try:
            record.save(self.root, known)
        except OSError as exc:
            if not self._unsaved:
                text = f"{record.path(self.root)}: cannot be written: {exc.strerror}; going on with what runs"
                self.say("warning", text, ERROR)
            self._unsaved = True
            if must:
                self.known = before
            return False
        self._unsaved = False
        return True

    def put(self, machine: Machine, must: bool = False) -> bool:
        """Note how a machine stands."""
        return self.note(self.known.put(machine), must)

    def say(self, event: str, text: str, priority: int, machine: Machine | None = None) -> None:
        """Tell people what happened, and with which machine; what a machine has said moves no terminal's cursor."""
        self._journal.event(
            event, printable(text), priority=priority, AGENT_MACHINE=machine.name if machine is not None else ""
        )
