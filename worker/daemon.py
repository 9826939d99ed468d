"""The daemon from its start to its exit status: read, check, lock, resume, work."""

import faulthandler
import gc
from collections.abc import Callable, Mapping

from worker import config, folder, journal, plan, resume, sandbox
from worker.errors import AgentError, ConfigError
from worker.folder import Places
from worker.journal import ERROR, WARNING, Journal
from worker.run import Run
from worker.systemd import Notifier

# How long each stage of the start may take before systemd is right to give up on it.
_STAGE = 60.0


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
    lock = folder.lock(places.root)  # held until the process ends
    assert lock >= 0
    sandbox.check(steps, places.secrets)
    resumed = resume.open_ledger(places)
    try:
        for notice in resumed.notices:
            log.event("state", notice, priority=WARNING)
        gc.freeze()  # the plan lives as long as the process: no collection need look at it again
        return Run(settings, steps, places, resumed.ledger, log, notifier, environ).work()
    finally:
        resumed.ledger.close()
