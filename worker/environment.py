"""What a step finds in its environment: a service's small set, the task's own, and the worker's.

The worker's own commands (`alert:`, `copy:`, pings) find what a step does of which the list says no more.
"""

from collections.abc import Callable, Mapping

from worker import envfile
from worker.errors import ConfigError
from worker.folder import Places
from worker.plan import Step
from worker.task import Given

_CREDENTIALS = "CREDENTIALS_DIRECTORY"
# Passed on from the worker's own environment; everything else is the task's to say (env:, env_file:).
# systemd's own variables (NOTIFY_SOCKET, WATCHDOG_*, LISTEN_*, INVOCATION_ID ...) are not among them.
_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the worker's own environment that every step gets."""
    return {name: value for name, value in environ.items() if name in _INHERITED or name.startswith("LC_")}


def own(environ: Mapping[str, str], given: Given) -> dict[str, str]:
    """Return what a command of the worker's own finds, with all the credentials of the unit.

    Raises ConfigError if an env_file cannot be read now.
    """
    env = inherited(environ) | _said(given)
    if _CREDENTIALS in environ:
        env[_CREDENTIALS] = environ[_CREDENTIALS]
    return env


def own_anyhow(environ: Mapping[str, str], given: Given, warn: Callable[[str], None]) -> dict[str, str]:
    """Return the same for what must not fail for want of a file, which is a warning."""
    try:
        return own(environ, given)
    except ConfigError as exc:
        warn(f"{exc}; going on without 'env_file'")
        return own(environ, given._replace(env_files=()))


def _said(given: Given) -> dict[str, str]:
    env: dict[str, str] = {}
    for path in given.env_files:
        env.update(envfile.load(path))
    return env | given.env


def build(
    base: Mapping[str, str],
    step: Step,
    number: int,
    places: Places,
    notify: str,
    note: str | None,
    secrets: str | None,
    home: str | None,
) -> dict[str, str]:
    """Return the whole environment of attempt `number` of `step`; the last four are paths.

    Without a home of its own it has the worker's.

    Raises ConfigError if an env_file can no longer be read.
    """
    env = dict(base) | ({} if home is None else {"HOME": home}) | _said(Given(step.task.env, step.task.env_files))
    env.update(
        AGENT_RUN=places.run,
        AGENT_STEP=step.id,
        AGENT_ATTEMPT=str(number),
        AGENT_KEY=step.key(places.run),
        AGENT_OUT=places.out,
        STATE_DIRECTORY=places.state(step.id),
        NOTIFY_SOCKET=notify,
        AGENT_ACK="1",  # a message with an X_AGENT_ID= is answered (worker/signs.py)
    )
    if step.item is not None:
        env["AGENT_ITEM"] = step.item
    if note is not None:
        env["AGENT_NOTE"] = note
    if secrets is not None:
        env[_CREDENTIALS] = secrets
    if step.task.watchdog is not None:
        # WATCHDOG_PID stays away: whichever process of the step beats is welcome (sd_watchdog_enabled(3)).
        env["WATCHDOG_USEC"] = str(int(step.task.watchdog * 1e6))
    return env
