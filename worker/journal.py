"""What the worker tells people: events with fields, and the output of steps line by line.

Under systemd both go to the journal: an event with a MESSAGE_ID and AGENT_RUN, AGENT_STEP,
AGENT_ATTEMPT, AGENT_EVENT; a step's lines under the step's own SYSLOG_IDENTIFIER.  Where the journal
or the systemd package is missing, the same lines are printed.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from worker.lines import LINE_MAX
from worker.signs import printable

_OURS = "agent"  # our own identifier, as opposed to a step's
ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6  # priorities of syslog(3)

# What happened, and its id in the journal (journalctl MESSAGE_ID=...).  Ids never change.
MESSAGE_IDS = {
    "run-started": "b2524b165d594af49f877165d6a3ca11",
    "run-done": "8e0a288031724084964cd3875b4a1acb",
    "run-failed": "92902a84a7b04f679ef218d2355c9dcb",
    "run-stopped": "671fecfebcbc43a4be65e1348335a345",
    "run-left": "0e452fbd407b4fc397a1f24a5130b716",
    "nothing-to-do": "af5254dc21764f3fb777744e9f588446",
    "step-started": "25da9a48ae3f40aeb256b6ba3e4aff6f",
    "step-adopted": "c087d7725f1b4dec8a4e502acca51ae7",
    "step-done": "22dcbde21e7f4a59ae144ce7a28598fa",
    "step-failed": "07e1d6de5ad34efba2573f2ebea18f69",
    "step-retry": "396f6c52977547d1ada22f3c7b1717fe",
    "step-deferred": "5afe807229544d76ba54cbf386b66596",
    "step-again": "9aad33de3e0a4c308aaee877ea56b00d",
    "step-interrupted": "28761534c586451f8f454b462793a9e5",
    "step-ending": "be5363fc28ce4327b7c925551458cffb",
    "step-unknown": "954c743932014186a338e8065d8417b0",
    "step-lost": "6918775bb99340e598cee1e68dcf24eb",
    "effect": "78c8b5bd649748b4ac28e2e70faf74ef",
    "settled": "0fc08f9ff0d1417bbc043a45f8bccb0e",
    "leftovers": "57bf8a79479d4b749ca813a7bf45f63d",
    "alerted": "c919616c5723452a9080c159b68986c2",
    "waiting": "11bbb3c5561f4bdf8b3d4119e17b515b",
    "budget-spent": "747892fa52b145c0863d247706126aec",
    "budget-raised": "04f2ce3488134d1eaa3493192b3f1897",
    "run-out-of-budget": "4698765d23b64ec0a8bf5888f7559b27",
    "paused": "ffa533ce97f34c0eaa1641aa567a50c9",
    "resumed": "fabeda7dc19f49cb87e4dcc04302976f",
    "state": "4671d87b5fcb4c39a12b7c709903dabd",
    "plan-changed": "19d81f544705464ab8cbcdeffe571519",
    "reloaded": "20cf9916a68b4b47ac18ca60df9d9825",
    "copy": "63a1187d27774df1a7d6491af98313b0",
    "machine-made": "620256000b1f43b2a257ba2fe1fc6539",
    "machine-started": "51659a6fa5c5485296e333d65755226a",
    "machine-restarted": "20bcb7cbf81a4231aa1b733372afa452",
    "machine-resumed": "51164768935940c1b945e0885304d4ca",
    "machine-left": "342cf46a7ca74dd4b933a3dc026fe735",
    "supervision-ended": "9db9f65b05aa4997afef666085eaea30",
    "warning": "502b35831c5440baa1cae4b4328faaee",
}

Send = Callable[[str, int, Mapping[str, str]], None]


class Journal:
    """The journal of one run."""

    def __init__(self, run: str, send: Send) -> None:
        self._run = run
        self._send = send

    def event(
        self,
        event: str,
        message: str,
        *,
        step: str | None = None,
        attempt: int | None = None,
        priority: int = INFO,
        **fields: str,
    ) -> None:
        """Say what happened.  `event` is a key of MESSAGE_IDS."""
        entry = {"MESSAGE_ID": MESSAGE_IDS[event], "AGENT_EVENT": event, "AGENT_RUN": self._run, **fields}
        if step is not None:
            entry["AGENT_STEP"] = step
        if attempt is not None:
            entry["AGENT_ATTEMPT"] = str(attempt)
        if not message.isprintable():  # a server's words, a command's, a file's name
            message = "\n".join(map(printable, message.split("\n")))
        # File names need not be UTF-8; the journal's fields must be.
        self._send(message.encode(errors="backslashreplace").decode(), priority, entry)

    def warning(self, message: str) -> None:
        """Say that something is wrong which the worker survives."""
        self.event("warning", message, priority=WARNING)

    def output(self, step: str, attempt: int, line: str, priority: int) -> None:
        """Pass on one line that a step printed."""
        self._send(
            line,
            priority,
            {
                "SYSLOG_IDENTIFIER": step,
                "AGENT_RUN": self._run,
                "AGENT_STEP": step,
                "AGENT_ATTEMPT": str(attempt),
            },
        )


class Ration:
    """How many lines of a step may go to the journal: a burst, then a steady rate.

    A step that prints a million lines must not push everything else out of the journal; none is
    lost in its own output file.
    """

    __slots__ = ("_allowance", "_at")

    BURST = 500
    PER_SECOND = 100

    def __init__(self, now: float) -> None:
        self._allowance = float(self.BURST)
        self._at = now

    def left(self, now: float) -> int:
        """Return how many lines may pass now."""
        self._allowance = min(self.BURST, self._allowance + (now - self._at) * self.PER_SECOND)
        self._at = now
        return int(self._allowance)

    def take(self, lines: int) -> None:
        """Note that so many have passed."""
        self._allowance -= lines


def sender(environ: Mapping[str, str]) -> Send:
    """Return the best way to the reader: the journal, or standard error as this process has it."""
    if _stderr_is_journal(environ.get("JOURNAL_STREAM", "")):
        return _journal_sender() or _printing(_line_with_priority)
    return _printing(_line)


def _stderr_is_journal(stream: str) -> bool:
    """Compare JOURNAL_STREAM with standard error, as systemd.exec(5) says."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def _journal_sender() -> Send | None:
    try:
        from systemd import journal

        from worker.inlet import Inlet
    except ImportError:
        return None

    def put(entry: Sequence[str]) -> None:
        journal.sendv(*entry)

    inlet = Inlet(put)
    atexit.register(inlet.close)
    instead = _printing(_line_with_priority)

    def send(message: str, priority: int, fields: Mapping[str, str]) -> None:
        try:
            inlet.pass_on(_entry(message, priority, fields), event="MESSAGE_ID" in fields)
        except OSError:
            instead(message, priority, fields)  # journald is restarting

    return send


def _entry(message: str, priority: int, fields: Mapping[str, str]) -> list[str]:
    named = {"MESSAGE": message, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": _OURS} | dict(fields)
    return [f"{name}={value}" for name, value in named.items()]


def _printing(line: Callable[[Mapping[str, str]], str]) -> Send:
    """Return what prints entries on standard error, each as the `line` that is made of its fields."""
    from worker.inlet import Inlet
    from worker.printer import Printer

    printer, encoding = Printer(2), sys.stderr.encoding

    def put(entry: Sequence[str]) -> bool:
        named = dict(field.split("=", 1) for field in entry)
        return printer.put(f"{line(named)}\n".encode(encoding, errors="backslashreplace"))

    inlet = Inlet(put, takes=printer.takes, name="standard error")
    atexit.register(inlet.close)

    def send(message: str, priority: int, fields: Mapping[str, str]) -> None:
        shown = (
            f"MESSAGE={message}",
            f"PRIORITY={priority}",
            f"SYSLOG_IDENTIFIER={fields.get('SYSLOG_IDENTIFIER', _OURS)}",
        )
        inlet.pass_on(shown, event="MESSAGE_ID" in fields)

    return send


def _line_with_priority(named: Mapping[str, str]) -> str:
    """Return the line as sd-daemon(3) describes: with a priority in angle brackets, which journald takes off."""
    return f"<{named['PRIORITY']}>{_line(named)}"


def _line(named: Mapping[str, str]) -> str:
    message, identifier = named["MESSAGE"], named["SYSLOG_IDENTIFIER"]
    return message if identifier == _OURS else f"{identifier}: {message}"[: LINE_MAX + len(identifier)]
