"""The homes of steps: in the unit each step has one of its own, so what it leaves there runs in no other step.

STATE/home/STEP        while the step is not done
STATE/home/.spare-N    an empty one for the next step in slot N: renaming is cheap
STATE/home/.gone-*     of a step that is done, and about to be removed beside the steps
"""

import contextlib
import os
import time
from collections.abc import Mapping

from worker import process
from worker.companions import Companion
from worker.errands import Errands, Report
from worker.folder import Places

_UNIT = "AGENT_UNIT"  # in the environment of a worker that is our unit's
_GONE = ".gone-"
_ERRAND, _TIMEOUT = "homes", 3600.0
# Programs leave folders there that their owner may not write (Go's module cache).
_REMOVE = 'chmod -R u+rwX "$@" 2>/dev/null; exec rm -rf "$@"'


class Homes:
    """Gives them, and takes them back; `gone`: some are to be removed."""

    def __init__(self, places: Places, environ: Mapping[str, str]) -> None:
        self._places = places
        self._used = _UNIT in environ  # elsewhere HOME is that of the person who has started the worker
        self.gone = False

    def give(self, slot: int, step: str) -> str | None:
        """Return the home of a step, as its last attempt has left it; None where it has the worker's.

        Raises OSError.
        """
        if not self._used:
            return None
        home = self._places.home(step)
        try:
            os.rename(self._spare(slot), home)  # not where something is in one
        except OSError:
            if os.path.islink(home):
                os.unlink(home)
            os.makedirs(home, mode=0o700, exist_ok=True)
        os.chmod(home, 0o700)  # whatever the last step made of it
        return home

    def take_back(self, slot: int, step: str, done: bool) -> None:
        """Take back the home of a step that has ended: an empty one, and that of one that is done."""
        if not self._used:
            return
        home = self._places.home(step)
        with contextlib.suppress(OSError):
            if not os.listdir(home):
                os.rename(home, self._spare(slot))
                return
        with contextlib.suppress(OSError):
            if done and os.path.lexists(home):
                os.rename(home, f"{self._places.homes}/{_GONE}{slot}-{time.monotonic_ns()}")
                self.gone = True

    def close(self, slot: int) -> None:
        """Remove the spare one of a slot."""
        if self._used:
            with contextlib.suppress(OSError):
                os.rmdir(self._spare(slot))

    def old(self) -> list[str]:
        """Return those that are to be removed."""
        self.gone = False
        try:
            names = os.listdir(self._places.homes)
        except OSError:
            return []
        return [f"{self._places.homes}/{name}" for name in names if name.startswith(_GONE)]

    def _spare(self, slot: int) -> str:
        return f"{self._places.homes}/.spare-{slot}"


class Removal(Companion):
    """Removes old homes beside the steps; they may be large.  What is left at the end the next worker removes."""

    def __init__(self, homes: Homes, errands: Errands) -> None:
        self._homes = homes
        self._errands = errands

    def begin(self) -> None:
        self._homes.gone = True

    def keep(self, now: float) -> None:
        if not self._homes.gone or self._errands.busy(_ERRAND):
            return
        old = self._homes.old()
        if not old:
            return
        env = {"PATH": process.DEFAULT_PATH}
        with contextlib.suppress(process.SpawnError, OSError):  # then with the next one
            self._errands.start(_ERRAND, ["/bin/sh", "-c", _REMOVE, "sh", *old], env, "/", _TIMEOUT, self._ended)

    def _ended(self, report: Report) -> None:
        pass
