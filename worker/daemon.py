"""The daemon from its start to its exit status: read, check, lock, resume, work."""

import faulthandler
import gc
import time
from collections.abc import Callable, Mapping

from worker import clock, config, folder, journal, plan, resume, sandbox, systemd
from worker.disk import FULL, PATIENCE
from worker.errors import AgentError, ConfigError, StateError
from worker.folder import Places
from worker.journal import ERROR, WARNING, Journal
from worker.ledger import LedgerAway, StorageFull
from worker.run import Run
from worker.succession import Predecessor
from worker.systemd import Notifier

# How long each stage of the start may take before systemd is right to give up on it.
_STAGE = 120.0
_DISK_RETRY = 1.0


def run(config_path: str, state_folder: Callable[[str], str], environ: Mapping[str, str]) -> int:
    """Work on the run that the configuration describes; return the exit status.

    `state_folder` tells the state folder from the run's name.  A fault that is not ours to mend is
    said in one line each, before READY=1 if it can be known then.
    """
    faulthandler.enable()  # systemd's watchdog kills with SIGABRT: our stack goes to the journal
    send = journal.sender(environ)
    log = Journal("", send)
    notifier = Notifier(environ, log.warning)
    try:
        notifier.starting(_STAGE)
        settings = config.load(config_path)
        steps = plan.build(settings)
        root = state_folder(settings.run)
        runtime = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        secrets = environ.get("CREDENTIALS_DIRECTORY")
        places = Places(settings.run, root, folder.prepare(root, runtime or None), secrets)
        log = Journal(settings.run, send)
        notifier.starting(_STAGE)
        return _work(settings, steps, places, log, notifier, environ)
    except ConfigError as exc:
        for problem in exc.problems:
            log.event("warning", str(problem), priority=ERROR)
        return exc.exit_status
    except AgentError as exc:
        log.event("warning", str(exc), priority=ERROR)
        return exc.exit_status


def _work(
    settings: config.Config,
    steps: plan.Plan,
    places: Places,
    log: Journal,
    notifier: Notifier,
    environ: Mapping[str, str],
) -> int:
    held = folder.lock(places.root)  # until the process ends
    sandbox.check(steps, places.secrets)
    resumed = _resume(settings, steps, places, held.in_order, log, notifier)
    try:
        for notice in resumed.notices:
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
        run = Run(settings, steps, places, resumed.ledger, log, notifier, environ, before)
        status = run.work()
        folder.leave(held)
        return status
    except OSError as exc:
        raise StateError(f"{exc.filename or places.root}: {exc.strerror}") from exc
    finally:
        resumed.ledger.close()


def _resume(
    settings: config.Config, steps: plan.Plan, places: Places, in_order: bool, log: Journal, notifier: Notifier
) -> resume.Resumed:
    """Open what an earlier worker left; a full disk, or a server that is away, is waited out with systemd's leave."""
    told = False
    gives_up = clock.monotonic() + PATIENCE
    while True:
        try:
            shared = settings.ledger is not None
            return resume.join(settings, steps, places) if shared else resume.open_ledger(places, in_order)
        except (StorageFull, OSError) as exc:
            if (isinstance(exc, OSError) and exc.errno not in FULL) or clock.monotonic() > gives_up:
                raise StateError(f"{places.root}: the state cannot be opened: {exc}") from exc
            if not told:
                what = "the server" if isinstance(exc, LedgerAway) else "space"
                text = f"{places.root}: the state cannot be opened ({exc}); waiting for {what}, nothing is lost"
                log.event("waiting", text, priority=ERROR)
            told = True
            notifier.starting(_STAGE)
            time.sleep(_DISK_RETRY)  # nothing runs yet that could be heard
