"""A real PostgreSQL server of the tests' own: made in a temporary folder, durable as in production, gone afterwards."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE = 60.0
USER, PASSWORD = "postgres", "correct horse"  # a space, so that it must be escaped


def why_not() -> str | None:
    """Return why no server can run here, or None."""
    if _programs() is None:
        return "needs PostgreSQL: apt-get install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "needs psycopg 3: pip install 'psycopg[binary]', or apt-get install python3-psycopg"
    if os.geteuid() == 0 and _owner() is None:
        return "needs a user for PostgreSQL, which refuses to run as root: apt-get install postgresql"
    return None


class Server:
    """One cluster, with password authentication on a TCP port and none on its socket."""

    def __init__(self, copy_of: Server | None = None) -> None:
        """Make the files of a new cluster, or of a standby of another one; nothing runs yet."""
        self.folder = Path(tempfile.mkdtemp(prefix="agent-postgres-"))
        self.port = _free_port()
        self._owner = _owner() if os.geteuid() == 0 else None
        if self._owner is not None:
            os.chown(self.folder, self._owner.pw_uid, self._owner.pw_gid)
        if copy_of is None:
            (self.folder / "password").write_text(PASSWORD + "\n")
            os.chmod(self.folder / "password", 0o644)
            access = ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={self.folder}/password"]
            # Only the making of it is not synced; the server itself has fsync on.
            self._run("initdb", "-D", self._data, "-U", USER, "-E", "UTF8", "--locale=C", "--no-sync", *access)
        else:
            source = f"host={copy_of.folder} port={copy_of.port} user={USER}"
            self._run("pg_basebackup", "-d", source, "-D", self._data, "-R", "-X", "stream", "-c", "fast", "--no-sync")

    def start(self) -> Server:
        """Start it; it takes connections when this returns."""
        options = (
            f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories={self.folder} "
            "-c max_connections=60 -c logging_collector=off"
        )
        self._run("pg_ctl", "-D", self._data, "-l", f"{self.folder}/log", "-w", "-o", options, "start")
        return self

    def stop(self, mode: str = "fast") -> None:
        """Stop it; "immediate" is like a power cut."""
        self._run("pg_ctl", "-D", self._data, "-w", "-m", mode, "stop")

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def pause(self) -> None:
        """Freeze all of it: connections stay, nobody answers."""
        for pid in self._processes():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._processes():
            os.kill(pid, signal.SIGCONT)

    def remove(self) -> None:
        """Stop it, if it runs, and delete all of it."""
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self.resume()
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def dsn(self, database: str = "postgres", user: str = USER, password: str = PASSWORD) -> str:
        """Return its address, with the password."""
        return f"postgresql://{user}:{password.replace(' ', '%20')}@127.0.0.1:{self.port}/{database}"

    def empty_database(self) -> str:
        """Return the address of a database in which no worker has ever been; it is the same one each time."""
        if not self.execute("SELECT true FROM pg_database WHERE datname = 'scratch'"):
            self.execute("CREATE DATABASE scratch")
        self.execute("DROP SCHEMA IF EXISTS agent CASCADE", database="scratch")
        return self.dsn("scratch")

    def execute(self, query: str, values: tuple[object, ...] = (), database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, whatever the server thinks of passwords and networks."""
        import psycopg

        address = f"host={self.folder} port={self.port} user={USER} dbname={database}"
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    @property
    def _data(self) -> str:
        return f"{self.folder}/data"

    def _run(self, program: str, *arguments: str) -> None:
        programs = _programs()
        assert programs is not None
        environ = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
        user = {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []} if self._owner else {}
        with open(self.folder / "output", "wb") as output:  # a pipe would be kept open by the server
            done = subprocess.run(
                [f"{programs}/{program}", *arguments],
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_PATIENCE,
                **user,  # type: ignore[call-overload]
            )
        if done.returncode:
            said = (self.folder / "output").read_text(errors="replace")
            raise subprocess.CalledProcessError(done.returncode, program, said)

    def _processes(self) -> Iterator[int]:
        """Yield the server's processes, the parent of them all first."""
        parent = int(Path(self._data, "postmaster.pid").read_text().split()[0])
        yield parent
        for stat in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, _, rest = Path(stat).read_text(errors="replace").partition(" ")
                if int(rest.rpartition(") ")[2].split()[1]) == parent:
                    yield int(pid)


class Pool:
    """A pgbouncer in front of a server, which lends its connections out; `mode` is its pool_mode."""

    def __init__(self, server: Server, mode: str, size: int = 20) -> None:
        """It takes connections when this returns."""
        self.port = _free_port()
        settings = server.folder / f"pool-{self.port}.ini"
        settings.write_text(
            f"[databases]\n* = host={server.folder} port={server.port} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nauth_type = any\n"
            f"pool_mode = {mode}\ndefault_pool_size = {size}\nunix_socket_dir =\n"
        )
        owner = _owner() if os.geteuid() == 0 else None
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
        with open(server.folder / f"pool-{self.port}.log", "wb") as log:
            self._process = subprocess.Popen(
                ["pgbouncer", str(settings)],
                stderr=log,
                cwd="/",
                **user,  # type: ignore[call-overload]
            )
        gives_up = time.monotonic() + _PATIENCE
        while time.monotonic() < gives_up and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
        raise AssertionError(log.name + ": " + Path(log.name).read_text())

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)


def _programs() -> str | None:
    """Return the folder of the newest server programs."""
    found = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    found.sort(key=lambda path: int(path.split("/")[4]) if path.split("/")[4].isdecimal() else 0)
    best = found[-1] if found else shutil.which("initdb")
    return os.path.dirname(best) if best else None


def _owner() -> pwd.struct_passwd | None:
    """Return the user whom the package has made for the server."""
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
