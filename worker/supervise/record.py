"""The record of a supervision: its machines, what has been spent, and where it stands; one JSON file.

What is about to be done is written down before it is done: a machine's name before the machine is made, "starting"
before the worker is started there.  A supervisor that is killed at any moment finds in the record what to look for,
so it neither loses a machine nor makes a second one beside it.  One writer: the caller holds the folder's lock.
"""

import contextlib
import json
import os
import shlex
from typing import Any, NamedTuple

from worker import clock, files
from worker.errors import StateError

FORMAT = 1

# How a machine stands.
CREATING = "creating"  # it has a name, and may be there
PREPARING = "preparing"  # it is there; files are put on it, and no worker has been started by us
STARTING = "starting"  # the worker may have been started: nothing may be put in its place any more
WORKING = "working"
LEAVING = "leaving"  # given up; it must not work on beside the next one
PAUSED = "paused"  # kept for a look
KEPT = "kept"  # left running at the end, as the sandbox wants it
GONE = "gone"  # said to be, at several looks in a row
LEFT = "left"  # could be neither paused nor be seen to be gone: it may run on, see `quiet`
TAKEN = "taken"  # another supervision has it: not ours to stop

HERE = (CREATING, PREPARING, STARTING, WORKING, LEAVING)


class Moment(NamedTuple):
    """A moment that can be told from another even after the wall clock was set, or after a reboot."""

    wall: float
    monotonic: float
    boot: str

    def until(self, now: "Moment") -> float:
        """Return the seconds from this moment to `now`; never negative."""
        if self.boot == now.boot:
            return max(0.0, now.monotonic - self.monotonic)
        return max(0.0, now.wall - self.wall)


def moment() -> Moment:
    """Return this moment."""
    return Moment(clock.wall(), clock.monotonic(), clock.boot_id())


class Machine(NamedTuple):
    """One machine, and what the judge remembers of it."""

    number: int
    name: str
    id: str
    state: str
    made: Moment
    well: Moment  # when its worker was last seen at work, or was given time to get there
    begun: bool = False  # `create` has been run at least once
    progress: bool = False  # a step was done there
    why: str = ""  # it was given up, or is not ready yet
    unanswered: int = 0  # looks in a row
    resumes: int = 0  # since it was last well
    restarts: int = 0  # since a step was last done there
    faults: int = 0  # times that it could not be made, prepared, or given a changed list
    given: tuple[tuple[str, str], ...] = ()  # what was put on it: paths there, and digests
    done: int = 0  # steps of the run, the most that were seen; at first, those that it goes on from
    awaited: Moment | None = None  # since when it is to boot, and may be silent
    extended: Moment | None = None  # the last time; None until it has been prepared
    fence: Moment | None = None  # since when somebody waits for it to be surely dead
    absent: int = 0  # looks in a row at which it was said to be gone
    returned: bool = False  # given up and well again, as it seemed, and not looked at successfully since
    quiet: bool = False  # its agent was stopped in order and does not come back by itself


class Record(NamedTuple):
    """Everything that a restarted supervisor has to know."""

    name: str
    run: str
    token: str  # tells the machines of this supervision from those of another one of the same name
    started: Moment
    machines: tuple[Machine, ...] = ()
    outcome: str | None = None  # "done", "failed", "out-of-budget", "configuration": how it ended
    concluded: bool = False  # and nothing is left to do about it
    why: str = ""
    spend: float = 0.0  # what the run has reported
    spend_lost: float = 0.0  # what machines had reported after the last copy that was gone on from
    steps: dict[str, Any] = {}  # noqa: RUF012 - counts of steps as last seen; never changed in place
    told: tuple[str, ...] = ()  # troubles of which somebody was told, and which are not over
    file: str = ""  # the sandbox's; "" in one of an earlier version until it is gone on with

    @property
    def machine(self) -> Machine | None:
        """The machine that has the run now, or None while there is none."""
        last = self.machines[-1] if self.machines else None
        return last if last is not None and last.state in HERE else None

    @property
    def left(self) -> tuple[Machine, ...]:
        """Machines that may run on, though nobody wants them to."""
        return tuple(machine for machine in self.machines if machine.state == LEFT)

    def drop(self, machine: Machine) -> "Record":
        """Return the record without this machine, the last one, of which nothing was ever begun."""
        return self._replace(machines=tuple(known for known in self.machines if known.number != machine.number))

    def put(self, machine: Machine) -> "Record":
        """Return the record with this machine in the place of the one of the same number, or added."""
        others = (known for known in self.machines if known.number != machine.number)
        return self._replace(machines=tuple(sorted((*others, machine), key=lambda known: known.number)))

    def add(self, now: Moment) -> "Record":
        """Return the record with one more machine, which is still to be made."""
        number = len(self.machines) + 1
        name = f"{self.name}-{self.token}-{number}"
        return self.put(Machine(number, name, name, CREATING, now, now))


def path(root: str) -> str:
    return f"{root}/machines.json"


def load(root: str) -> Record | None:
    """Return the record in the state folder, or None if there was never one.

    Raises StateError for one that cannot be read: an empty one in its place would lose machines.
    """
    try:
        content = json.loads(files.read(path(root)))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, this program knows {FORMAT}")
        machines = tuple(_machine(entry) for entry in content["machines"])
        known = {name: content[name] for name in Record._fields if name in content}
        known |= {"machines": machines, "started": Moment(*content["started"]), "told": tuple(content.get("told", ()))}
        return Record(**known)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StateError(f"{path(root)}: cannot be read: {exc.strerror}", "use sudo, or mend that") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise StateError(
            f"{path(root)}: cannot be read: {exc}",
            "nothing was changed; it names the machines: put it right, or see to them and remove it",
        ) from exc


def save(root: str, record: Record) -> None:
    """Replace the record, atomically and durably.  Raises OSError with the old one whole."""
    content = record._asdict() | {"format": FORMAT, "machines": [machine._asdict() for machine in record.machines]}
    files.replace(path(root), [json.dumps(content, indent=1).encode() + b"\n"])


def new(name: str, run: str, file: str, now: Moment) -> Record:
    """Return the record of a supervision that begins."""
    return Record(name, run, os.urandom(3).hex(), now, file=file)


def check_file(root: str, known: Record, file: str) -> None:
    """Raise StateError if the record is that of another sandbox's file, of the same base name say."""
    if known.file in ("", file):
        return
    with contextlib.suppress(OSError):
        if os.path.samefile(known.file, file):
            return
    here = shlex.quote(file)
    raise StateError(
        f"{root}: keeps the run of {known.file} alive, not of {file}",
        f"give this one another name ('name:' in it), or another folder: agentctl supervise {here} --state DIR; "
        f"if that file has become this one: agentctl supervise {here} --state {shlex.quote(root)}",
    )


_MOMENTS = ("made", "well", "awaited", "extended", "fence")


def _machine(entry: dict[str, Any]) -> Machine:
    known: dict[str, Any] = {name: value for name, value in entry.items() if name in Machine._fields}
    known |= {name: Moment(*entry[name]) for name in _MOMENTS if entry.get(name)}
    known["given"] = tuple((str(there), str(digest)) for there, digest in entry.get("given", ()))
    return Machine(**known)
