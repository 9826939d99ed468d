"""What a person tells a run from outside: through its living worker, whose ledger it is, else here and now."""

import contextlib
import os
import pwd
from collections.abc import Callable, Mapping

from worker import control, folder, report
from worker.errors import AgentError, StateError
from worker.folder import Places
from worker.installed import Installed
from worker.ledger import Ledger, LedgerAway, StorageFull


def tell(
    root: str,
    unit: Installed | None,
    request: Mapping[str, object],
    result: bytes | None,
    action: Callable[[Ledger], str],
    again: str,
) -> str:
    """Have the worker of the state folder `root` do what `request` says, or do `action` where none lives.

    Return what was done, in words.  Raises AgentError, with `again` as the hint if nobody knows whether it was done.
    """
    if folder.holder(root) is not None:
        return _by_worker(Places("", root, folder.runtime(root)).control, request, result, again)
    report.open_ledger(root, unit).close()  # says what is wrong, before there is a lock file where no run is
    held = folder.lock(root)
    try:
        with contextlib.closing(report.open_ledger(root, unit, writable=True)) as store:
            done = action(store)
    except LedgerAway as exc:
        raise StateError(f"the ledger's server does not answer ({exc}); it may have been done", again) from exc
    except StorageFull as exc:
        raise StateError(f"{root}: cannot be written: {exc}", "nothing was changed; try again") from exc
    except OSError as exc:
        raise StateError(f"{exc.filename or root}: {exc.strerror}", "nothing was changed; try again") from exc
    finally:
        os.close(held.fd)
    return f"{done}; it counts from the next start on: systemctl start {unit.name}" if unit else done


def user() -> str:
    """Return the name of the person who says it."""
    try:
        return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def _by_worker(path: str, request: Mapping[str, object], result: bytes | None, again: str) -> str:
    try:
        answer = control.request(path, request, result)
    except ConnectionResetError:
        answer = None
    except OSError as exc:
        raise AgentError(f"the worker cannot be asked: {path}: {exc.strerror}", "use sudo, or try again") from exc
    if answer is None:
        raise AgentError("the worker does not answer; it may do it yet, or have done it", again)
    if "error" in answer:
        raise AgentError(answer["error"])
    return str(answer["told"])
