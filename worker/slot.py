"""A slot: the place of one step at a time, with what the next step there can use again.

Making a socket, a folder or a file costs a millisecond on some file systems, and renaming does not; a
list of many short steps would feel it.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worker import deeptree, lastwords, plan
from worker.confine import Confinement, Own
from worker.credentials import Vault
from worker.folder import Places
from worker.homes import Homes
from worker.output import Spool
from worker.process import NOTHING_INHERITED, Inherited
from worker.shelter import Shelter
from worker.signs import NotifySocket
from worker.steps import IN_FILE
from worker.task import Task

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Means(NamedTuple):
    """What all slots share, by which a step has something that no other step has."""

    homes: Homes
    vault: Vault
    confinement: Confinement

    @classmethod
    def of(cls, places: Places, environ: Mapping[str, str], warn: Callable[[str], None]) -> "Means":
        """Return those of a worker with this environment."""
        return cls(Homes(places, environ), Vault(places, environ), Confinement(places, environ, warn))


class Slot:
    """Holds a notify socket, the files into which output and log are written, a spare folder between steps.

    `shelter` is there where a step can outlive the worker; `inherited`: what is no step's.
    """

    def __init__(
        self,
        number: int,
        places: Places,
        socket: NotifySocket,
        means: Means,
        shelter: Shelter | None = None,
        inherited: Inherited = NOTHING_INHERITED,
    ) -> None:
        self.inherited = inherited
        self.number = number
        self.socket = socket
        self.shelter = shelter
        self.output = Spool(places.part(number))
        self.log = Spool(places.log_part(number))
        self.owner = lastwords.Owner(places, number)
        self._spare = places.spare(number)
        self._places = places
        self._given = places.given(number)
        self._means = means
        self._own = Own((), ())
        self._has_credentials = False
        os.makedirs(self._given, mode=0o700, exist_ok=True)
        self._spec = places.spec(number)
        self._has_spec = os.path.exists(self._spec)  # an earlier worker's

    def furnish(self, folder: str) -> None:
        """Let the socket and the step's own folder be there, the folder as its last attempt left it.

        Raises OSError.
        """
        if not self.socket.in_place():  # a step has removed it
            inside = os.path.dirname(self.socket.path) != self._places.runtime  # not as an older worker had it
            make = NotifySocket.in_folder if inside else NotifySocket
            gone, self.socket = self.socket, make(self.socket.path)
            gone.close(unlink=False)
            if self.shelter is not None:
                self.shelter.keep_socket(self.socket.fileno())
        if os.path.isdir(folder):
            return
        try:
            os.rename(self._spare, folder)
        except OSError:
            os.makedirs(folder)
        os.chmod(folder, 0o750)  # whatever the last step made of it

    def settle_in(
        self, step: str, secrets: Sequence[str], laid_out: str | None = None
    ) -> tuple[str | None, str | None]:
        """Return the step's home, None for the worker's, and a folder with just these credentials, None for none.

        `laid_out`: that folder, if an earlier worker has laid it out for this attempt.  Raises OSError.
        """
        home = self._means.homes.give(self.number, step)
        if not (laid_out and os.path.isdir(laid_out)):
            laid_out = self._means.vault.lay_out(self.number, secrets)
        self._has_credentials = laid_out is not None
        given = dict.fromkeys((self._given, self._means.vault.folder(self.number)))
        self._own = Own((self._places.state(step), *([home] if home else [])), tuple(given))
        return home, laid_out

    def ruleset(self, task: Task, cwd: str, env: Mapping[str, str]) -> int | None:
        """Return the ruleset (see landlock.py) for a program of the step that has settled in; None for none.

        Raises process.SpawnError and OSError.
        """
        return self._means.confinement.ruleset(task, cwd, env, self._own)

    def hand(self, argv: list[str]) -> list[str]:
        """Return how a program is started: one of ours finds in a file what it is to do.

        Everybody on the machine can read a command line, and a request may have a token in it.  Raises OSError.
        """
        if tuple(argv[: len(plan.OUR_PROGRAM)]) != plan.OUR_PROGRAM:
            return argv
        os.makedirs(self._given, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._spec)  # an earlier program's, or what a step has put there
        self._has_spec = True
        with open(os.open(self._spec, _NEW, 0o600), "w", encoding="utf-8") as file:
            file.write(argv[-1])
        return [*argv[:-1], IN_FILE + self._spec]

    def clear(self, step: str, done: bool) -> None:
        """Take an empty folder back, and forget what the step said and wrote; what it keeps stays.

        Its home stays as well, unless it is done.
        """
        for _late in self.socket.receive(to_the_end=True):
            pass
        self.socket.drop()
        self.output.restart()
        self.log.restart()
        if self.shelter is not None:
            self.shelter.forget()
        if self._has_credentials:
            self._has_credentials = False
            self._means.vault.clear(self.number)
        if self._has_spec:
            self._has_spec = False
            with contextlib.suppress(OSError):
                os.unlink(self._spec)
        folder = self._places.state(step)
        with contextlib.suppress(OSError):
            if not os.listdir(folder):
                os.rename(folder, self._spare)
        self._means.homes.take_back(self.number, step, done)

    def close(self) -> None:
        """Remove the socket, the spare folder and the files of output that never was."""
        self.socket.close()
        folder = os.path.dirname(self.socket.path)
        if folder != self._places.runtime:
            deeptree.remove(folder)
        self.output.close()
        self.log.close()
        self.owner.close()
        if self.shelter is not None:
            self.shelter.close()
        for path in (self.output.path, self.log.path):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._means.homes.close(self.number)
        self._means.vault.close(self.number)
        with contextlib.suppress(OSError):
            os.unlink(self._places.note(self.number))
        for folder in (self._spare, self._given):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
