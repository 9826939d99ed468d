"""A slot: the place of one step at a time, with what the next step there can use again.

Making a socket, a folder or a file costs a millisecond on some file systems, and renaming does not; a
list of many short steps would feel it.
"""

import contextlib
import errno
import os
from collections.abc import Sequence

from worker import argspace, plan
from worker.folder import Places
from worker.output import Spool
from worker.process import NOTHING_INHERITED, Inherited
from worker.shelter import Shelter
from worker.signs import NotifySocket
from worker.steps import IN_FILE


class Slot:
    """Holds a notify socket, the files into which output and log are written, a spare folder between steps.

    `shelter` is there where a step can outlive the worker; `inherited`: what is no step's.
    """

    def __init__(
        self,
        number: int,
        places: Places,
        socket: NotifySocket,
        shelter: Shelter | None = None,
        inherited: Inherited = NOTHING_INHERITED,
    ) -> None:
        self.inherited = inherited
        self.number = number
        self.socket = socket
        self.shelter = shelter
        self.output = Spool(places.part(number))
        self.log = Spool(places.log_part(number))
        self._spare = places.spare(number)
        self._credentials = places.credentials(number)
        self._source = places.secrets
        self._spec = places.spec(number)
        self._has_spec = False

    def furnish(self, folder: str) -> None:
        """Let the socket and the step's own folder be there, the folder as its last attempt left it.

        Raises OSError.
        """
        if not self.socket.in_place():  # a step has removed it
            os.makedirs(os.path.dirname(self.socket.path), mode=0o700, exist_ok=True)
            gone, self.socket = self.socket, NotifySocket(self.socket.path)
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

    def lay_out(self, secrets: Sequence[str]) -> str | None:
        """Return a folder that holds just these of the worker's credentials, None for none.  Raises OSError.

        They are links: no secret is written anywhere.
        """
        if not secrets:
            return None
        _remove_tree(self._credentials)  # whatever a step, or a worker that died, has left there
        os.makedirs(self._credentials, mode=0o700)
        for name in secrets:
            source = os.path.join(self._source or "", name)
            if not os.path.exists(source):
                raise FileNotFoundError(errno.ENOENT, "the unit has no such credential", name)
            os.symlink(source, os.path.join(self._credentials, name))
        return self._credentials

    def hand(self, argv: list[str]) -> list[str]:
        """Return how a program is started: one of ours finds in a file what is too long for an argument.

        Raises OSError.
        """
        ours = tuple(argv[: len(plan.OUR_PROGRAM)]) == plan.OUR_PROGRAM
        if not ours or argspace.excess(argv[-1]) is None:
            return argv
        self._has_spec = True
        with open(
            os.open(self._spec, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(argv[-1])
        return [*argv[:-1], IN_FILE + self._spec]

    def clear(self, folder: str) -> None:
        """Take an empty folder back, and forget what the step said and wrote; what it keeps stays."""
        for _late in self.socket.receive(to_the_end=True):
            pass
        self.socket.drop()
        self.output.restart()
        self.log.restart()
        if self.shelter is not None:
            self.shelter.forget()
        _remove_tree(self._credentials)
        if self._has_spec:
            self._has_spec = False
            with contextlib.suppress(OSError):
                os.unlink(self._spec)
        with contextlib.suppress(OSError):
            if not os.listdir(folder):
                os.rename(folder, self._spare)

    def close(self) -> None:
        """Remove the socket, the spare folder and the files of output that never was."""
        self.socket.close()
        self.output.close()
        self.log.close()
        if self.shelter is not None:
            self.shelter.close()
        for path in (self.output.path, self.log.path):
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(self._spare)


def _remove_tree(folder: str) -> None:
    if os.path.lexists(folder):
        import shutil  # for the few steps that have secrets

        shutil.rmtree(folder, ignore_errors=True)
