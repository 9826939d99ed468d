"""The supervisor from its start to its exit status: read, check, lock, go on from the record."""

import contextlib
import faulthandler
import functools
import json
import os
import shlex
from collections.abc import Callable, Mapping

from worker import alert, folder, journal, ping, privileges, startup
from worker.alert import Alert
from worker.contact import Ping
from worker.errors import OK, WORK_LEFT, AgentError, ConfigError, StateError
from worker.journal import ERROR, NOTICE, Journal
from worker.signs import printable
from worker.supervise import copy, parcel, record, sandbox, sound
from worker.supervise.book import Book
from worker.supervise.clockwork import Clockwork, Stopped
from worker.supervise.command import Runner
from worker.supervise.copier import Copier
from worker.supervise.ending import left
from worker.supervise.loop import Supervisor
from worker.supervise.parcel import Item
from worker.supervise.provider import Hand, passed_on
from worker.supervise.record import Record, moment
from worker.supervise.rest import describe
from worker.supervise.sandbox import Sandbox
from worker.supervise.teller import LEFT, Teller
from worker.systemd import Notifier
from worker.timespan import show

# Two attempts of a minute each, and their pause.
_TELLING = 130.0


def run(path: str, state_folder: Callable[[str], str], environ: Mapping[str, str], chosen: bool = False) -> int:
    """Keep the run of a sandbox file alive; return the exit status, which means what a worker's does.

    `chosen`: the state folder is the file's whatever it keeps, and not found by the file's base name.
    """
    startup.prepare_daemon()
    faulthandler.enable()  # systemd's watchdog kills with SIGABRT: our stack goes to the journal
    send = journal.sender(environ)
    log = Journal("", send)
    try:
        settings = sandbox.load(path)
        log = Journal(settings.run, send)
        root = state_folder(settings.name)
        privileges.refuse_to_work(root, f"supervise {shlex.quote(path)}")
        return _supervise(path, settings, _make(root), log, environ, chosen)
    except ConfigError as exc:
        for problem in exc.problems:
            log.event("warning", str(problem), priority=ERROR)
        return exc.exit_status
    except AgentError as exc:
        log.event("warning", str(exc), priority=ERROR)
        return exc.exit_status


def _supervise(path: str, settings: Sandbox, root: str, log: Journal, environ: Mapping[str, str], chosen: bool) -> int:
    folder.lock(root)  # until the process ends
    notifier = Notifier(environ, log.warning)
    clockwork = Clockwork(notifier)
    runner, beside = Runner(f"{root}/command", clockwork.idle), Runner(f"{root}/copying", clockwork.idle)
    try:
        runner.end_left()
        beside.end_left()
        book = Book(root, _record(settings, root, path, chosen), log)
        if not settings.shared:
            copy.load(root, settings.run, functools.partial(sound.judge, runner=runner))
        given = parcel.pack(root, settings)
        notifier.ready("looking")
        status, news = None, None
        while status is None:
            hand = Hand(settings.provider, runner, environ, settings.max_file)
            copier = Copier(settings, hand, beside, clockwork, book)
            tell = Teller(settings.contact, runner, passed_on(environ), book)
            supervisor = Supervisor(settings, given, hand, copier, book, clockwork, notifier, tell)
            if news is None:
                news = not supervisor.rests()
                _ping("start", settings.contact.ping.start if news else None, runner, environ, log)
            try:
                status = supervisor.work()
            finally:
                copier.drop()
            if status is None:
                clockwork.reload = False
                settings, given = _read_again(path, settings, given, root, log, notifier)
        if status == OK and news:
            _ping("finish", settings.contact.ping.finish, runner, environ, log)
        if status != OK or book.known.left:
            _tell(settings, root, book.known, log, notifier, environ)
        return status
    except Stopped:
        log.event("run-stopped", f"{settings.name}: the supervisor ends; its machines go on", priority=NOTICE)
        return WORK_LEFT
    finally:
        clockwork.close()


def _read_again(
    path: str, settings: Sandbox, given: tuple[Item, ...], root: str, log: Journal, notifier: Notifier
) -> tuple[Sandbox, tuple[Item, ...]]:
    """Return what the files say now; if that is wrong, say so in one line and return what they said before."""
    notifier.reloading()
    try:
        found = sandbox.load(path)
        for name, what in (("name", "the name"), ("run", "the run"), ("shared", "where the ledger is")):
            if getattr(found, name) != getattr(settings, name):
                raise StateError(f"{path}: {what} cannot change while the run is kept alive")
        settings, given = found, parcel.pack(root, found)
        log.event("reloaded", f"{path}: read again", priority=NOTICE)
    except AgentError as exc:
        first, *more = str(exc).split("\n")
        others = f" (and {len(more)} more)" if more else ""
        log.event("reloaded", f"{first}{others}; nothing is changed", priority=ERROR)
    notifier.ready("looking")
    return settings, given


def _tell(
    settings: Sandbox, root: str, known: Record, log: Journal, notifier: Notifier, environ: Mapping[str, str]
) -> None:
    """Tell whom the file names that the run has not ended well, or not all of its machines, once for each such end."""
    notifier.stopping("telling how it ended", _TELLING)  # from here on the watchdog waits as well
    kinds = {"failed": alert.FAILED, "out-of-budget": alert.OUT_OF_BUDGET, "done": LEFT}
    contact = settings.contact
    if known.outcome == "done":
        contact = contact._replace(ping=Ping())  # the run itself is well
    cause = f"{settings.name}: {known.outcome} ({known.why}){left(known)}"
    told = Alert(kinds.get(known.outcome or "", alert.GAVE_UP), cause)
    alert.tell(told, contact, root, environ.get("AGENT_UNIT", ""), passed_on(environ), log, alert.SHORT_PAUSES)


def _ping(kind: str, url: str | None, runner: Runner, environ: Mapping[str, str], log: Journal) -> None:
    """Let a dead-man service know; it is waited for as for a provider's command."""
    if url is None:
        return
    answer = runner.run(ping.PROGRAM, ping.environment(url, passed_on(environ)), ping.LONGEST)
    if not answer.ok:
        log.warning(f"ping: {kind}: {answer.output.strip() or f'{ping.host(url)}: {answer.fault()}'}")


def _make(root: str) -> str:
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise StateError(f"{exc.filename or root}: the state folder cannot be made: {exc.strerror}") from exc
    return root


def _record(settings: Sandbox, root: str, path: str, chosen: bool) -> Record:
    known = record.load(root)
    if known is None:
        return record.new(settings.name, settings.run, path, moment())
    if not chosen:
        record.check_file(root, known, path)
    if known.run != settings.run:
        raise StateError(
            f"{root}: is of the run '{known.run}', not of '{settings.run}'",
            "give this one another name ('name:'), or another folder (--state)",
        )
    if known.file != path:
        known = known._replace(file=path)
        with contextlib.suppress(OSError):  # it is tried again with what is noted next
            record.save(root, known)
    return known


def show_status(path: str, state_folder: Callable[[str], str], as_json: bool, chosen: bool = False) -> int:
    """Print what the record says; `chosen` as for `run`."""
    root = state_folder(sandbox.load(path).name)
    privileges.give_up(root)
    known = record.load(root)
    if known is None:
        raise StateError(f"{root}: nothing has been supervised here", f"begin: agentctl supervise {path}")
    if not chosen:
        record.check_file(root, known, path)
    pid = folder.holder(root)
    if as_json:
        print(json.dumps(_facts(known, pid), indent=2, ensure_ascii=startup.json_ascii()))
    else:
        _print(known, pid)
    return OK


def rehearse(path: str, environ: Mapping[str, str]) -> int:
    """Try whom the file names to be told, once, and note nothing down."""
    from worker import rehearsal

    return rehearsal.hold(sandbox.load(path).contact, "", passed_on(environ))


def _facts(known: Record, pid: int | None) -> dict[str, object]:
    now = moment()
    return {
        "run": known.run,
        "status": (known.outcome if known.concluded else None) or ("running" if pid is not None else "stopped"),
        "why": printable(known.why),
        "supervisor": {"pid": pid},
        "hours": round(known.started.until(now) / 3600, 4),
        "spend": known.spend + known.spend_lost,
        "steps": known.steps,
        "machines": [
            {"name": machine.name, "id": machine.id, "state": machine.state, "why": printable(machine.why)}
            | {
                "age": round(machine.made.until(now), 3),
                "may_run": machine.state in (*record.HERE, record.LEFT, record.KEPT),
            }
            for machine in known.machines
        ],
    }


def _print(known: Record, pid: int | None) -> None:
    facts = _facts(known, pid)
    steps = f", {known.steps['done']}/{known.steps['total']} done" if known.steps.get("total") else ""
    print(printable(f"run {known.run}: {facts['status']}{steps}{f' ({known.why})' if known.why else ''}"))
    age = show(known.started.until(moment()))
    print(f"supervisor: {f'process {pid}' if pid is not None else 'not running'}; the run was first started {age} ago")
    for machine in known.machines:
        may = f"; {describe(machine)}" if machine in known.left else ""
        print(printable(f"  {machine.id}: {machine.state}{f'; {machine.why}' if machine.why else ''}{may}"))
