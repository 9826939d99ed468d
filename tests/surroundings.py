"""What a step's process finds around it, without a worker: a notify socket that is read, folders, secrets."""

import array
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.support import PATIENCE, ROOT, alive

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from worker.steps import main; main(sys.argv[1:])"


class Listener:
    """A notify socket; `read_all` begins to read it, as the worker would.

    `answers`: what the next messages with an id are answered, empty for a worker that dies before it can.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.answers: list[bytes] = []
        self.messages: list[str] = []
        self.unbelievable: list[str] = []  # read when their sender was gone
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.path)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def read_all(self) -> "Listener":
        self._thread.start()
        return self

    def wait_for_one(self) -> None:
        """Return when a message has come, and leave it unread."""
        self._socket.settimeout(PATIENCE)
        self._socket.recv(1, socket.MSG_PEEK)
        self._socket.settimeout(None)

    def close(self) -> None:
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", self.path)
            self._thread.join(PATIENCE)
        self._socket.close()

    def _read(self) -> None:
        while True:
            data, control, _, _ = self._socket.recvmsg(65536, 1024)
            if not data:
                return
            numbers = {kind: array.array("i", value) for _, kind, value in control}
            if not alive(numbers[socket.SCM_CREDENTIALS][0]):
                self.unbelievable.append(data.decode())
            if data != b"BARRIER=1":
                self.messages.append(data.decode())
            for descriptor in numbers.get(socket.SCM_RIGHTS, ()):
                if b"X_AGENT_ID=" in data and (answer := self.answers.pop(0)):
                    os.write(descriptor, answer)
                os.close(descriptor)


class Surroundings:
    """A step's folder, state, secrets and notify socket below one folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.cwd, self.state, self.secrets = folder / "cwd", folder / "state", folder / "secrets"
        for made in (self.cwd, self.state, self.secrets):
            made.mkdir()
        self.listener = Listener(folder / "notify")
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "AGENT_KEY": "run:step",
            "STATE_DIRECTORY": str(self.state),
            "CREDENTIALS_DIRECTORY": str(self.secrets),
            "NOTIFY_SOCKET": self.listener.path,
        }

    @property
    def messages(self) -> list[str]:
        return self.listener.messages

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start this Python with `arguments`."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *arguments], env=self.environ, cwd=self.cwd, stdin=pipe, stdout=pipe, stderr=pipe
        )

    def run(self, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run this Python with `arguments` to its end."""
        with self.start(*arguments) as process:
            out, err = process.communicate(data, PATIENCE)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def agentctl(self, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return self.run("-m", "worker", *arguments, data=data)

    def program(self, kind: str, spec: str) -> subprocess.CompletedProcess[bytes]:
        """Run the http or python program on `spec`, isolated as the worker does."""
        return self.run(*self.command(kind, spec))

    def command(self, kind: str, spec: str) -> list[str]:
        return ["-I", "-c", _BOOT, str(ROOT), kind, spec]

    def forget(self, *names: str) -> None:
        """Forget variables of the environment, as when a step's script is run by hand."""
        for name in names:
            del self.environ[name]
