"""Files that come from a machine: whole, within bounds, and none that the agent's user could not read."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from worker.supervise import remote, transfer
from worker.supervise.command import Runner
from worker.supervise.provider import TIMEOUTS, Hand, Provider
from worker.supervise.record import Machine, Moment

pytestmark = pytest.mark.programs

NOW = Moment(0.0, 0.0, "b")
MACHINE = Machine(1, "job-1f-1", "m", "working", NOW, NOW)
MOST = 100_000


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that is this one, with a folder for what is to be fetched."""
    monkeypatch.setattr(remote, "STAGE", str(tmp_path / "stage"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "there").mkdir()
    user(tmp_path, pwd.getpwuid(os.getuid()).pw_name)
    return tmp_path / "there"


def user(tmp_path: Path, name: str) -> None:
    (tmp_path / "bin/systemctl").write_text(f"#!/bin/sh\necho {name}\n")
    (tmp_path / "bin/systemctl").chmod(0o755)


def get(tmp_path: Path, path: Path, command: str = 'cp "$remote" "$local"') -> str:
    hand = hand_of(tmp_path, {"get": command})
    return transfer.get(hand, MACHINE, str(path), str(tmp_path / "here"), "result", MOST)


def test_a_file_comes_as_it_was_when_it_was_asked_for(tmp_path: Path, there: Path) -> None:
    """
    A6: what its owner writes meanwhile makes no half of it.
    """
    (there / "file").write_bytes(b"x" * MOST)
    assert get(tmp_path, there / "file", f'echo more >>{there}/file; cp "$remote" "$local"') == ""
    assert (tmp_path / "here").read_bytes() == b"x" * MOST


@pytest.mark.parametrize("command", ['head -c 9 "$remote" >"$local"', ": ", ': >"$local"', 'cat "$remote" >>"$local"'])
def test_what_is_not_what_was_sent_is_not_taken(tmp_path: Path, there: Path, command: str) -> None:
    """
    A6: though the command ends with 0.
    """
    (there / "file").write_bytes(b"0123456789")
    if ">>" in command:
        (tmp_path / "here").write_bytes(b"of before")
    fault = get(tmp_path, there / "file", command)
    assert fault in ("what came is not what was sent", "nothing came")


def test_no_link_device_or_pipe_is_read(tmp_path: Path, there: Path) -> None:
    """
    S9: what a step has put in the place of its file.
    """
    (there / "zero").symlink_to("/dev/zero")
    os.mkfifo(there / "fifo")
    (there / "folder").mkdir()
    for name in ("zero", "fifo", "folder", "none"):
        assert "there is no such file" in get(tmp_path, there / name), name
    assert not (tmp_path / "here").exists()


def test_nothing_larger_than_is_allowed_comes_or_stays(tmp_path: Path, there: Path) -> None:
    """
    S9: by the machine's own word, and when it does not keep it.
    """
    with open(there / "large", "wb") as file:
        file.truncate(10 * MOST)
    assert f"it is larger than {MOST} bytes" in get(tmp_path, there / "large")
    (there / "small").write_bytes(b"x")
    assert get(tmp_path, there / "small", 'exec cat /dev/zero >"$local"') == "what comes is larger than it may be"
    assert (tmp_path / "here").stat().st_size <= MOST + 512
    assert sum(path.stat().st_size for path in (tmp_path / "stage").iterdir()) < 100


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who could read it")
def test_a_file_is_read_as_the_agents_user(tmp_path: Path, there: Path) -> None:
    """
    S9: a link of a step to what is root's opens nothing.
    """
    secret = Path("/run") / f"secret-{os.getpid()}"
    secret.write_text("root's")
    secret.chmod(0o600)
    try:
        assert get(tmp_path, secret) == ""
        user(tmp_path, "nobody")
        assert "Permission denied" in get(tmp_path, secret)
    finally:
        secret.unlink()


def test_a_machine_names_no_path_and_no_size_without_limit(tmp_path: Path, there: Path) -> None:
    """
    S9: what is fetched is for us to say.
    """
    digest = "0" * 64
    for said in (f"/etc 5 {digest}", f"{tmp_path}/stage {MOST + 1} {digest}", f"{tmp_path}/stage 5 x", ""):
        reply = remote.Reply(f"Offer={said}\n")
        assert transfer.offered(reply, "result.1", MOST) == "the machine does not say what it sends", said
    offer = transfer.offered(remote.Reply(f"Offer={tmp_path}/stage 5 {digest}\n"), "result.1", MOST)
    assert not isinstance(offer, str) and offer.path == f"{tmp_path}/stage/result.1"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, and another user")
def test_no_file_is_placed_through_a_link_of_the_agents_user(tmp_path: Path, there: Path) -> None:
    """
    S35: where he may write the file is placed with his rights; where he may not, as before.
    """
    user(tmp_path, "nobody")
    with tempfile.TemporaryDirectory(dir="/run") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for sub in ("his", "closed", "ours"):
            (folder / sub).mkdir(mode=0o755)
        os.chown(folder / "his", pwd.getpwnam("nobody").pw_uid, -1)
        (folder / "his/link").symlink_to(folder / "closed")
        (tmp_path / "given").write_text("content")
        assert not renew(tmp_path, f"{folder}/his/link/file").ok
        assert not renew(tmp_path, f"{folder}/his/link/below/file").ok
        assert list((folder / "closed").iterdir()) == []
        assert renew(tmp_path, f"{folder}/his/sub/file").ok
        assert (folder / "his/sub/file").read_text() == "content"
        assert (folder / "his/sub/file").owner() == (folder / "his/sub").owner() == "nobody"
        assert renew(tmp_path, f"{folder}/ours/sub/file").ok
        found = (folder / "ours/sub/file").stat()
        assert (found.st_uid, found.st_mode & 0o777) == (0, 0o640)


def renew(tmp_path: Path, path: str) -> remote.Reply:
    hand = hand_of(tmp_path, {"put": 'cp "$local" "$remote"'})
    return remote.renew(hand, MACHINE, [(path, str(tmp_path / "given"), "")], [])


def test_a_result_is_not_written_through_a_link_of_another_user_here(tmp_path: Path, there: Path) -> None:
    """
    S10's kind: the folder for results may be somebody else's, who has put links in the way.
    """
    (there / "file").write_text("result")
    (tmp_path / "theirs").mkdir()
    for name in ("out", "out.incoming", ".out.new"):
        (tmp_path / "victim").write_text("precious")
        (tmp_path / "theirs" / name).symlink_to(tmp_path / "victim")
    hand = hand_of(tmp_path, {"get": 'cp "$remote" "$local"'})
    pairs = [(str(tmp_path / "theirs/out"), str(there / "file")), (str(tmp_path / "none/x"), str(there / "file"))]
    (fault,) = transfer.fetch(hand, MACHINE, pairs, str(tmp_path), MOST)
    assert "none/x" in fault and "No such file" in fault
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "theirs/out").read_text() == "result" and not (tmp_path / "theirs/out").is_symlink()
    assert not (tmp_path / "result.incoming").exists() and not (tmp_path / "theirs/out.incoming").exists()


def hand_of(tmp_path: Path, commands: dict[str, str]) -> Hand:
    known = {"exec": f"PATH={tmp_path}/bin:$PATH exec sh"} | commands
    runner = Runner(str(tmp_path / "command"), lambda: None)
    return Hand(Provider("p.yaml", dict(known), {}, TIMEOUTS), runner, {"PATH": os.environ["PATH"]}, MOST)
