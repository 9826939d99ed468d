"""The daemon from its start to its exit status: read, check, lock, resume, work."""

import contextlib
import errno
import faulthandler
import functools
import gc
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from worker import (
    alert,
    clock,
    config,
    control,
    distant,
    environment,
    folder,
    identity,
    journal,
    plan,
    privileges,
    resume,
    sandbox,
    systemd,
)
from worker.alert import Alert, Words
from worker.awake import Awake
from worker.contact import Contact
from worker.disk import FULL, PATIENCE, awaited
from worker.errors import FAULT, OK, WORK_LEFT, AgentError, ConfigError, Shortage, StateError, StateHeld
from worker.folder import Places
from worker.journal import ERROR, NOTICE, WARNING, Journal
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite.checks import SUSPECT
from worker.run import Run
from worker.scarcity import SCARCE
from worker.startup import prepare_daemon
from worker.succession import Predecessor
from worker.systemd import Notifier
from worker.tasklist import Tasklist
from worker.timespan import show
from worker.workshop import Workshop

# How long each stage of the start may take before systemd is right to give up on it.
_STAGE = 120.0
_DISK_RETRY = 1.0

T = TypeVar("T")


def run(config_path: str, state_folder: Callable[[str], str], environ: Mapping[str, str]) -> int:
    """Work on the run that the configuration describes; return the exit status.

    `state_folder` tells the state folder from the run's name.  A fault that is not ours to mend is
    said in one line each, before READY=1 if it can be known then.
    """
    prepare_daemon()
    faulthandler.enable()  # systemd's watchdog kills with SIGABRT: our stack goes to the journal
    send = journal.sender(environ)
    log = Journal("", send)
    notifier = Notifier(environ, log.warning)
    told: Contact | None = None
    root = environ.get("STATE_DIRECTORY", "").split(":")[0]  # where last words go while the list is not known
    try:
        notifier.starting(_STAGE)
        listed = functools.partial(_listed, config_path)
        settings, steps = _patiently(listed, config_path, log, notifier, what="the list cannot be read now")
        wanted = state_folder(settings.run)
        privileges.refuse_to_work(wanted, f"run {shlex.quote(config_path)}")
        root, told = wanted, settings.contact
        runtime = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        secrets = environ.get("CREDENTIALS_DIRECTORY")
        runtime = _patiently(lambda: folder.prepare(root, runtime or None), root, log, notifier)
        places = Places(settings.run, root, runtime, secrets)
        log = Journal(settings.run, send)
        notifier.starting(_STAGE)
        status = _work(settings, steps, places, log, notifier, environ)
    except _Stopped as exc:
        status = exc.exit_status
        log.event("state", str(exc), priority=NOTICE)
    except AgentError as exc:
        status = exc.exit_status
        for line in str(exc).split("\n"):
            log.event("warning", line, priority=ERROR)
        if root and not isinstance(exc, StateHeld):  # the one who holds it has the say
            alert.say_last(root, Words(status, Alert(alert.GAVE_UP, _cause(exc))))
    except LedgerCorrupt as exc:
        status = FAULT
        text = f"{root}/ledger.db: cannot be read as a ledger: {exc}; the next start sets it aside"
        log.event("warning", text, priority=ERROR)
    _tell(told, root, status, environ, log)
    return status


def _listed(path: str) -> tuple[config.Config, plan.Plan]:
    """Return the list and its plan.  Raises TimeoutError if nothing is in the way but silent file systems."""
    try:
        settings = config.load(path)
        return settings, plan.build(settings)
    except ConfigError as exc:
        if distant.is_silence(exc):
            raise TimeoutError(errno.ETIMEDOUT, _cause(exc)) from exc
        raise


def _cause(exc: AgentError) -> str:
    first, *more = str(exc).split("\n")
    return f"{first} (and {len(more)} more)" if more else first


def _tell(told: Contact | None, root: str, status: int, environ: Mapping[str, str], log: Journal) -> None:
    """Tell of an end for the worse, where no unit does that."""
    words = alert.last_words(root)
    # A full disk may have taken no words.
    due = words.alert if words is not None and words.status == status else alert.of_status(status)
    if told is not None and due is not None and alert.UNIT not in environ:
        base = environment.own_anyhow(environ, told.given, log.warning)
        alert.tell(due, told, root, "", base, log, alert.SHORT_PAUSES)


def _work(
    settings: config.Config,
    steps: plan.Plan,
    places: Places,
    log: Journal,
    notifier: Notifier,
    environ: Mapping[str, str],
) -> int:
    held = folder.lock(places.root)  # until the process ends
    if control.is_served(places.control):  # somebody has removed its lock file; its steps are no dead worker's
        what = f"{places.root}: another worker is at work here, although its lock file has gone"
        raise StateHeld(what, "stop that one first, or use another state folder")
    alert.forget_words(places.root)
    awake = Awake(lambda: settings.keep_awake, places, log)
    try:
        sandbox.check(settings, steps, places)
        return _go_on(settings, steps, places, held, log, notifier, environ, awake)
    except AgentError as exc:  # no other worker will be started
        if not isinstance(exc, StateHeld):  # the one who holds it keeps the machine awake
            awake.close()
        raise


def _go_on(
    settings: config.Config,
    steps: plan.Plan,
    places: Places,
    held: folder.Lock,
    log: Journal,
    notifier: Notifier,
    environ: Mapping[str, str],
    awake: Awake,
) -> int:
    """Work on what an earlier worker has left; return the exit status."""
    resumed = _resume(settings, steps, places, held.in_order, log, notifier, awake)
    try:
        moved = identity.check(settings, resumed.ledger, places.root)
        for notice in [*resumed.notices, *([moved] if moved else [])]:
            log.event("state", notice, priority=WARNING)
        gc.freeze()  # the plan lives as long as the process: no collection need look at it again
        folder.begin(held, places.runtime)
        ends, stored = folder.ended(places.root), systemd.stored(environ)
        # Where no worker has ever begun, what is open came from another machine, and no step took that down.
        in_order = held.in_order or not held.runtime
        # The unit writes down how each worker ends, unless the machine goes first.  In a container, where the kernel
        # and so the boot's id stay the same, nothing else tells.
        machine_died = "AGENT_UNIT" in environ and not in_order and ends.at is None
        before = Predecessor(in_order, ends, stored, held.runtime == places.runtime, machine_died)
        shop = Workshop(settings, resumed.steps or steps, places, resumed.ledger, log, notifier, environ, before, awake)
        try:
            status = Run(shop).work()
        except AgentError:
            if shop.guard.lost:  # its steps were ended, and did not die with it
                folder.leave(held)
            raise
        folder.leave(held)
        return _last_look(shop.list, status, log)
    except OSError as exc:
        if exc.errno in SCARCE and exc.errno not in FULL:
            raise Shortage(f"cannot begin now: {exc.strerror}", "start it again in a moment; its unit does") from exc
        raise StateError(f"{exc.filename or places.root}: {exc.strerror}") from exc
    except AgentError:
        raise
    except Exception:  # the next start looks at each value before it believes it
        with contextlib.suppress(OSError):
            os.close(os.open(places.ledger + SUSPECT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
        raise
    finally:
        resumed.ledger.close()


def _last_look(listed: Tasklist, status: int, log: Journal) -> int:
    """Return the exit status of a worker that has ended with `status`: a list that is done may be another one by now.

    Raises AgentError if it cannot be worked on as it is.
    """
    if status == OK and listed.changed():  # too late to be taken in
        log.event("state", "the list has changed at the very end; the next worker reads it", priority=NOTICE)
        return WORK_LEFT
    if status == OK and listed.refused is not None:
        raise listed.refused
    return status


def _resume(
    settings: config.Config,
    steps: plan.Plan,
    places: Places,
    in_order: bool,
    log: Journal,
    notifier: Notifier,
    awake: Awake,
) -> resume.Resumed:
    """Open what an earlier worker left; a full disk, or a server that is away, is waited out.

    Such a wait comes after READY=1: `systemctl daemon-reload` forgets what a start was granted beyond its limit.
    """
    shared = settings.ledger is not None
    return _patiently(
        lambda: resume.join(settings, steps, places) if shared else resume.open_ledger(places, in_order),
        places.root, log, notifier, lambda: awake.keep(clock.monotonic()),
    )  # fmt: skip


class _Stopped(AgentError):
    """The worker was told to stop while it waited."""

    exit_status = WORK_LEFT


def _patiently(
    action: Callable[[], T],
    root: str,
    log: Journal,
    notifier: Notifier,
    meanwhile: Callable[[], None] = lambda: None,
    what: str = "the state cannot be opened",
) -> T:
    """Return `action()`, repeated while the disk is full or failing, or a server or a file system does not answer.

    Raises StateError when that takes longer than PATIENCE, and AgentError with exit status 75 for SIGTERM meanwhile.
    """
    told = ""
    gives_up = clock.monotonic() + PATIENCE
    before: dict[int, Any] = {}

    def stop(*_: object) -> NoReturn:
        raise _Stopped(f"{root}: stopped while waiting for {told}")

    try:
        while True:
            try:
                return action()
            except (StorageFull, OSError) as exc:
                waits = not isinstance(exc, OSError) or exc.errno in FULL or isinstance(exc, TimeoutError)
                if not waits or clock.monotonic() > gives_up:
                    raise StateError(f"{root}: {what}: {exc}") from exc
                if not told:
                    told = awaited(exc)
                    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
                    cause = exc.strerror if isinstance(exc, TimeoutError) else exc
                    till = f"waiting for {told}, up to {show(PATIENCE)}, nothing is lost"
                    log.event("waiting", f"{root}: {what} ({cause}); {till}", priority=ERROR)
                    notifier.ready(f"waiting for {told}")
                notifier.ping()
                meanwhile()
                time.sleep(_DISK_RETRY)  # nothing runs yet that could be heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
