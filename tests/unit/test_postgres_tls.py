"""The ledger in PostgreSQL and who its server is: passwords, certificates, and warnings."""

import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.listener import Listener
from tests.postgres import PASSWORD, USER, Server
from worker import report
from worker.errors import OK, StateError
from worker.ledger import LedgerAway

pytest.importorskip("psycopg")
import psycopg

from tests.unit.test_postgres_server import join, refusal
from worker.ledger.postgres import errors, tls

needs_require_auth = pytest.mark.skipif(psycopg.pq.version() < 160000, reason="libpq knows no require_auth")


class Middle(Listener):
    """A server in the middle: it refuses encryption, asks for the password in clear, and keeps what it is told."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.told = bytearray()
        super().__init__(host)

    def talk(self, client: socket.socket) -> None:
        client.settimeout(10)
        while True:
            size, code = struct.unpack("!II", client.recv(8, socket.MSG_WAITALL))
            client.recv(size - 8, socket.MSG_WAITALL) if size > 8 else b""
            if code in (80877103, 80877104):  # SSLRequest, GSSENCRequest
                client.sendall(b"N")
                continue
            client.sendall(b"R" + struct.pack("!II", 8, 3))  # AuthenticationCleartextPassword
            self.told += client.recv(1024)
            return


@pytest.fixture
def middle() -> Iterator[Middle]:
    made = Middle()
    yield made
    made.close()


@needs_require_auth
def test_the_server_in_the_middle_gets_no_password(middle: Middle) -> None:
    """
    S18: it refuses encryption and asks for the password in clear; it is told nothing, and we are told what to do.
    """
    said = refusal(lambda: join(f"postgresql://agent:hunter2@127.0.0.1:{middle.port}/agent"))
    assert b"hunter2" not in middle.told
    assert "asks for the password in clear" in said and "sslmode=verify-full" in said


@needs_require_auth
def test_who_wants_it_in_clear_may_say_so(middle: Middle) -> None:
    """
    S18: a server that asks another one (LDAP, PAM) needs it; the address decides.  Likewise for a password of a file.
    """
    with pytest.raises((StateError, LedgerAway)):
        join(f"postgresql://agent:hunter2@127.0.0.1:{middle.port}/agent?require_auth=password")
    assert b"hunter2" in middle.told


def test_a_password_of_one_host_goes_to_no_other(
    middle: Middle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    S18: libpq looks `host` up in the password file and connects to `hostaddr`.
    """
    (tmp_path / ".pgpass").write_text("db.example.com:*:*:*:hunter2\n")
    (tmp_path / ".pgpass").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / ".pgpass"))
    address = f"host=db.example.com hostaddr=127.0.0.1 port={middle.port} user=agent dbname=agent"
    said = refusal(lambda: join(address))
    assert "hostaddr" in said and "verify-full" in said
    refusal(lambda: join(address + " sslmode=verify-full"))
    assert b"hunter2" not in middle.told


@pytest.fixture
def authority(server: Server, tmp_path: Path) -> Iterator[Path]:
    """The certificate of an authority that has signed the server's for 'localhost'."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    new = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*new, *named], cwd=tmp_path, check=True, capture_output=True)
    data = server.folder / "data"
    for name in ("key", "cert"):
        shutil.copy(tmp_path / f"{name}.pem", data / f"{name}.pem")
        shutil.chown(data / f"{name}.pem", data.stat().st_uid, data.stat().st_gid)
        (data / f"{name}.pem").chmod(0o600)
    settings = {"ssl_cert_file": f"{data}/cert.pem", "ssl_key_file": f"{data}/key.pem", "ssl": "on"}
    for name, value in settings.items():
        server.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    server.execute("SELECT pg_reload_conf()")
    yield tmp_path / "cert.pem"
    for name in settings:
        server.execute(f"ALTER SYSTEM RESET {name}")
    server.execute("SELECT pg_reload_conf()")


def test_a_certificate_is_checked_in_full(server: Server, authority: Path) -> None:
    """
    S18: with sslmode=verify-full the authority and the name have to be right; public authorities need no file named.
    """
    place = f"postgresql://{USER}:{PASSWORD.replace(' ', '%20')}@localhost:{server.port}/scratch?sslmode=verify-full"
    server.empty_database()
    join(f"{place}&sslrootcert={authority}").close()
    assert "certificate verify failed" in refusal(lambda: join(place)), "the machine's authorities have not signed it"
    elsewhere = place.replace("localhost", "127.0.0.1")
    assert "does not match" in refusal(lambda: join(f"{elsewhere}&sslrootcert={authority}"))


@pytest.mark.parametrize(
    ("given", "environ", "roots"),
    [
        ("sslmode=verify-full", {}, "bundle"),
        ("sslrootcert=system", {}, "bundle"),
        ("sslmode=verify-full sslrootcert=/mine", {}, "/mine"),
        ("sslmode=verify-full", {"PGSSLROOTCERT": "/mine"}, None),
        ("", {"PGSSLMODE": "verify-full"}, "bundle"),
        ("sslmode=require", {}, None),
        ("", {}, None),
    ],
)
def test_the_roots_are_the_machines(
    given: str, environ: dict[str, str], roots: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    S18: a psycopg with an OpenSSL of its own finds no "system"; a file of the user's, where there is one, goes first.
    """
    bundle = tmp_path / "bundle.crt"
    bundle.write_text("")
    monkeypatch.setattr(tls, "_BUNDLES", ("/nowhere", str(bundle)))
    environ = environ | {"HOME": str(tmp_path)}
    expected = str(bundle) if roots == "bundle" else roots
    assert tls.protected(errors.parse(f"host=db {given}"), environ).get("sslrootcert") == expected
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").write_text("")
    if given == "sslmode=verify-full" and "PGSSLROOTCERT" not in environ:
        assert "sslrootcert" not in tls.protected(errors.parse(f"host=db {given}"), environ)


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("postgresql://agent@db/agent", True),
        ("postgresql://agent@db.example.com:5433/agent?sslmode=prefer", True),
        ("postgresql://agent@db/agent?sslmode=require", True),
        ("postgresql://agent@localhost,db/agent", True),
        ("postgresql://agent@10.0.0.7/agent", True),
        ("postgresql://agent@127.evil.example/agent", True),
        ("postgresql://agent@localhost.example/agent", True),
        ("host=localhost hostaddr=10.0.0.7", True),
        ("postgresql://agent@[2001:db8::1]/agent", True),
        ("postgresql://agent@db/agent?sslmode=verify-full", False),
        ("postgresql://agent@db/agent?sslmode=verify-ca&sslrootcert=/mine", False),
        ("postgresql://agent@db/agent?sslmode=disable", False),
        ("postgresql://agent@localhost/agent", False),
        ("postgresql://agent@127.0.0.1/agent", False),
        ("postgresql://agent@[::1]/agent", False),
        ("postgresql:///agent", False),
        ("postgresql://%2Fvar%2Frun%2Fpostgresql/agent", False),
        ("postgresql:///agent?host=/run/postgresql", False),
    ],
)
def test_a_server_that_proves_nothing_is_warned_of(address: str, warns: bool) -> None:
    """
    S18: one on another machine; this machine and sockets need no proof, and a list may say that none is wanted.
    """
    assert (tls.exposure(errors.parse(address), {}) is not None) is warns


def test_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    S18: it is no mistake, so that the status is 0; nothing of the password is shown.
    """
    path = tmp_path / "list.yaml"
    path.write_text(
        'run: r\nledger: "postgresql://agent:{secret:db}@db.example.com/agent"\ntasks: [{id: a, run: "true"}]\n'
    )
    assert report.check(str(path), "agent", installed=False) == OK
    said = capsys.readouterr().err
    assert "nothing proves that 'db.example.com' is the right server" in said and said.count("\n") == 1
    path.write_text(
        'run: r\nledger: "postgresql://agent:pw@db/agent?sslmode=verify-full"\ntasks: [{id: a, run: "true"}]\n'
    )
    assert report.check(str(path), "agent", installed=False) == OK
    assert capsys.readouterr().err == ""


def test_each_start_says_so(worker: MakeWorker, server: Server) -> None:
    """
    S18: in the journal, and the run goes on; 0.0.0.0 stands for another machine and leads to this one.
    """
    address = server.empty_database().replace("127.0.0.1", "0.0.0.0")
    tasks = "tasks: [{id: a, run: 'true'}, {id: b, run: 'true'}]\n"
    for _ in range(2):
        w = worker(f"run: warned\nledger: {address}\n{tasks}")
        assert w.run() == OK
        assert w.matching("nothing proves that '0.0.0.0' is the right server"), w.lines
    w = worker(f"run: warned\nledger: {address}?sslmode=disable\n{tasks}")
    assert w.run() == OK
    assert not w.matching("nothing proves")
