"""Telling somebody of a trouble that is no end: a supervision that can do nothing more by itself.

Each kind once, until it is over; as long as it cannot be told it is tried again.  systemd is pinged meanwhile.
"""

import math
from collections.abc import Mapping

from worker import alert, clock
from worker.alert import Alert
from worker.contact import Contact
from worker.journal import NOTICE, WARNING
from worker.signs import printable
from worker.supervise.book import Book
from worker.supervise.command import Runner

# What AGENT_ALERT says.
LEFT = "machine-left"  # a machine may run on that nobody wants any more
NO_MACHINE = "no-machine"  # none can be made, none works, or none answers
NO_COPY = "no-copy"  # what is done there does not come here
NO_LIST = "no-list"  # a changed list does not reach the machine at work
TIMES = 5  # in a row that something may fail before somebody is told

_AGAIN = 60.0  # after one that could not be told
# As the alert's own command runs it, in the folder of the file that names it.
_THERE = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')


class Teller:
    """Runs the sandbox's `alert:`."""

    def __init__(self, contact: Contact, runner: Runner, environ: Mapping[str, str], book: Book) -> None:
        """`environ`: what the command finds beside what it is told."""
        self._contact = contact
        self._runner = runner
        self._environ = environ
        self._book = book
        self._next = -math.inf

    def tell(self, kind: str, cause: str, about: str = "") -> None:
        """See to it that somebody is told of `kind`, once for each `about`."""
        key, known = f"{kind} {about}", self._book.known
        if not self._contact.argv or key in known.told or clock.monotonic() < self._next:
            return
        cause, unit = printable(cause), self._environ.get(alert.UNIT, "")
        env = dict(self._environ) | alert.environment(Alert(kind, cause), self._contact, unit)
        answer = self._runner.run([*_THERE, self._contact.folder, *self._contact.argv], env, alert.TIMEOUT)
        if answer.ok:
            self._book.say("alerted", f"{kind}: {cause}; told", NOTICE)
            self._book.note(self._book.known._replace(told=(*known.told, key)))
        else:
            self._next = clock.monotonic() + _AGAIN
            self._book.say("warning", f"alert: {self._contact.argv[0]!r} {answer.fault()}; again later", WARNING)

    def over(self, kind: str, about: str = "") -> None:
        """Let it be told again when it comes again."""
        key, known = f"{kind} {about}", self._book.known
        if key in known.told:
            self._book.note(known._replace(told=tuple(other for other in known.told if other != key)))
