"""What a confined step may touch: the rules, without a worker; tests/system/test_confined.py has the exploits."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plans import task
from worker import confine, gitfolders, landlock, process, shelf, textfile
from worker.cgroup import Group
from worker.confine import Confinement, Own
from worker.credentials import Vault
from worker.errors import ConfigError
from worker.folder import Places
from worker.homes import Homes
from worker.shelter import Shelter
from worker.systemd import Notifier
from worker.task import Confine, Expect, Task

UNIT = {"AGENT_UNIT": "agent.service"}
needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    # Not below /tmp, which every step may write.
    root = Path("/var/lib" if os.geteuid() == 0 else Path.home()) / f".agent-test-{os.getpid()}"
    state, runtime = root / "state", root / "run"
    for folder in (*(state / name for name in ("out", "steps/a", "steps/b", "log", "work", "home")), runtime):
        folder.mkdir(parents=True)
    (state / "ledger.db").write_text("precious")
    (state / ".gitconfig").write_text("[user]")
    (root / "project").mkdir()
    yield Places("r", str(state), str(runtime))
    subprocess.run(["rm", "-rf", str(root)], check=True)


def run(places: Places, entry: Task, script: str, cwd: str | None = None) -> str:
    """Run a script as a program of `entry`, confined, and return what it prints."""
    confinement = Confinement(places, UNIT, print)
    own = Own((places.state("a"),), ())
    read, write = os.pipe()
    try:
        ruleset = confinement.ruleset(entry, cwd or places.work, {}, own)
        argv = ["/bin/sh", "-c", script]
        pid = process.launch(
            "/bin/sh", argv, {"PATH": "/usr/bin:/bin"}, cwd or places.work, write, write, None, (), ruleset
        )
        os.close(write)
        with open(read) as file:
            said = file.read()
        os.waitpid(pid, 0)
        return said
    finally:
        confinement.close()


@needs_landlock
@pytest.mark.parametrize(
    "script, allowed",
    [
        ("echo x >{state}/steps/a/x", True),
        ("echo x >x; mv x y; mkdir d; ln -s y z; rm -r y z d", True),
        ("cat {state}/.gitconfig; ls {state}/out {state}/steps/b; cat /etc/passwd; ls /usr", True),
        ("echo x >/tmp/agent-test-x; mv /tmp/agent-test-x {state}/work/", True),
        ("cat {state}/ledger.db", False),
        ("echo x >>{state}/ledger.db", False),
        ("mv {state}/ledger.db {state}/work/", False),
        ("rm {state}/ledger.db", False),
        ("echo x >{state}/alerted", False),
        ("echo x >{state}/steps/b/x", False),
        ("echo x >{state}/out/x", False),
        ("ls {state}", False),
        ("ls {run}", False),
        ("echo x >{state}/../project/x", False),
    ],
)
def test_a_confined_step_writes_what_is_its_own_and_reads_the_rest(places: Places, script: str, allowed: bool) -> None:
    """
    S12, S13: not the ledger, nor another step's folder, nor a project that is not where it works.
    """
    text = script.format(state=places.root, run=places.runtime)
    assert ("yes\n" in run(places, task("a"), f"({text}) >/dev/null && echo yes")) == allowed


@needs_landlock
def test_what_the_list_opens_is_open(places: Places) -> None:
    """
    `confine: {write: ...}`, the folder of an expected file, TMPDIR; a folder with the run's own files cannot be.
    """
    project = f"{os.path.dirname(places.root)}/project"
    entry = task("a")._replace(confine=Confine(True, (project,)))
    assert run(places, entry, f"echo x >{project}/x && cat {project}/x") == "x\n"
    entry = task("a")._replace(expect=Expect(file=f"{project}/y"))
    assert run(places, entry, f"echo y >{project}/y && cat {project}/y") == "y\n"
    for path in (places.root, os.path.dirname(places.root), places.runtime, f"{places.root}/out"):
        with pytest.raises(process.SpawnError, match="confine: no"):
            run(places, task("a")._replace(confine=Confine(True, (path,))), "true")
        with pytest.raises(process.SpawnError, match="confine: no"):
            run(places, task("a"), "true", cwd=path)
    assert Confinement(places, {}, print).ruleset(task("a"), places.work, {}, Own((), ())) is None
    free = task("a")._replace(confine=Confine(False))
    assert Confinement(places, UNIT, print).ruleset(free, places.work, {}, Own((), ())) is None


@needs_landlock
def test_the_same_ruleset_serves_until_something_has_changed(places: Places) -> None:
    """
    Another folder under the same path is another one, also where the file system gives it the same number.
    """
    confinement = Confinement(places, UNIT, print)
    own = Own((places.state("a"),), ())

    def made() -> int | None:
        return confinement.ruleset(task("a"), places.work, {}, own)

    first = made()
    assert made() == first
    os.rename(places.state("a"), places.state("c"))
    other = Own((places.state("c"),), ())
    assert confinement.ruleset(task("c"), places.work, {}, other) == first, "the same folder under another name"
    os.rename(places.state("c"), places.state("a"))
    os.rmdir(places.state("a"))
    os.mkdir(places.state("a"))
    assert made() != first
    confinement.close()


@needs_landlock
@pytest.mark.parametrize("sheltered", [False, True])
def test_a_program_begins_when_no_thread_of_the_worker_is_confined_with_it(
    places: Places, sheltered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    S13: in the ruleset of that thread a program could end the worker by a signal to it; 299 of 400 found it there.
    """
    within = landlock.within
    made, threads = f"{places.state('a')}/made", []

    def slow(ruleset: int, action: Callable[[], int]) -> int:
        def watched() -> int:
            threads.append(threading.get_native_id())
            pid = action()
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                pass  # it has come to its gate, or to its end
            assert not os.path.exists(made)
            return pid

        pid = within(ruleset, watched)
        assert not os.path.exists(f"/proc/self/task/{threads[-1]}")
        return pid

    monkeypatch.setattr(landlock, "within", slow)
    confinement = Confinement(places, UNIT, print)
    ruleset = confinement.ruleset(task("a"), places.work, {}, Own((places.state("a"),), ()))
    argv, env = ["/bin/sh", "-c", f"echo x >{made}; sleep 600 & kill $!; wait; exit 7"], {"PATH": "/usr/bin:/bin"}
    if sheltered:
        Path(places.runtime, "slot-0").mkdir()
        pipes = [os.open("/dev/null", os.O_RDWR) for _ in range(2)]
        home = Shelter(Group(f"{places.runtime}/slot-0"), Notifier({}, print), places, 0, *pipes)
        home.announce(dict)
        pid = home.spawn(argv, env, places.work, ruleset)
    else:
        pid = process.spawn(argv, env, places.work, ruleset).pid
    _pid, status = os.waitpid(pid, 0)
    assert (os.waitstatus_to_exitcode(status), os.path.exists(made)) == (7, True)
    if sheltered:
        found = home.report()
        assert found is not None and (found.pid, found.status) == (pid, 7)
        home.close()
    confinement.close()


def git(folder: Path, *words: str) -> None:
    config = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    env = config | dict.fromkeys(names, "a@b")
    subprocess.run(["git", "-c", "protocol.file.allow=always", *words], cwd=folder, env=env, check=True)


def test_the_folders_of_a_checkout_are_those_that_the_repository_names_too(tmp_path: Path) -> None:
    """
    A worktree's and a submodule's repository; not one that a step only says is its own.
    """
    main, tree, other = tmp_path / "main", tmp_path / "tree", tmp_path / "other"
    for folder in (main, other):
        folder.mkdir()
        git(folder, "init", "-q")
        git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    git(main, "worktree", "add", "-q", str(tree))
    git(main, "submodule", "add", "-q", str(other), "sub")
    (main / "deep/er").mkdir(parents=True)
    assert gitfolders.of(str(main / "deep/er")) == (str(main),)
    assert gitfolders.of(str(tree)) == (str(tree), str(main / ".git"))
    assert gitfolders.of(str(main / "sub")) == (str(main / "sub"), str(main / ".git/modules/sub"))
    assert gitfolders.of(str(tmp_path)) in ((), gitfolders.of(str(tmp_path.parent)))
    forged = tmp_path / "forged"
    forged.mkdir()
    for target in (main / ".git", main / ".git/worktrees/tree", main / ".git/modules/sub", Path("/etc")):
        (forged / ".git").write_text(f"gitdir: {target}\n")
        assert gitfolders.of(str(forged)) == (str(forged),)
    os.mkfifo(tmp_path / "gitdir")
    (forged / ".git").write_text(f"gitdir: {tmp_path}\n")
    assert gitfolders.of(str(forged)) == (str(forged),)
    (forged / ".git").unlink()
    (forged / ".git").symlink_to(other / ".git")
    assert gitfolders.of(str(forged)) == ()


def test_credentials_are_copies_for_one_slot(tmp_path: Path) -> None:
    """
    S12: in memory, closed, under a name that nobody can guess; links only where there is no memory to have them in.
    """
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    memory = tmp_path / "memory"
    memory.mkdir()
    places = Places("r", str(tmp_path / "state"), str(tmp_path), str(tmp_path))
    vault = Vault(places, {"XDG_RUNTIME_DIR": str(memory)})
    first = vault.lay_out(0, ["one"])
    assert first is not None and first.startswith(f"{memory}/agent-")
    assert [(entry.name, entry.read_text(), entry.stat().st_mode & 0o777) for entry in Path(first).iterdir()] == [
        ("one", "one", 0o400)
    ]
    assert os.stat(first).st_mode & 0o777 == 0o500
    second = vault.lay_out(0, ["one"])
    assert second != first and not os.path.exists(first)
    other = vault.lay_out(1, ["two"])
    assert vault.lay_out(1, []) is None
    base = Path(first).parent.parent
    (base / "credentials.0").mkdir()
    (base / "credentials.0/one").symlink_to("/etc/passwd")
    Vault(places, {"XDG_RUNTIME_DIR": str(memory)}).clear_others([1])
    assert [os.path.exists(path or "") for path in (second, other)] == [False, True]
    assert not (base / "credentials.0").exists() and os.path.exists("/etc/passwd"), "of an earlier version"
    for slot in (0, 1):
        vault.close(slot)
    assert not os.listdir(memory)
    with pytest.raises(FileNotFoundError):
        vault.lay_out(0, ["three"])


def test_homes_are_given_and_taken_back(tmp_path: Path) -> None:
    """
    S37: kept for the next attempt, an empty one is used again, that of a step that is done is on its way out.
    """
    places = Places("r", str(tmp_path), str(tmp_path))
    homes = Homes(places, UNIT)
    home = homes.give(0, "a")
    assert home == places.home("a") and os.stat(home).st_mode & 0o777 == 0o700
    inode = os.stat(home).st_ino
    homes.take_back(0, "a", done=True)
    assert os.listdir(places.homes) == [".spare-0"] and not homes.gone
    home = homes.give(0, "b")
    assert home is not None and os.stat(home).st_ino == inode
    Path(home, "x").touch()
    homes.take_back(0, "b", done=False)
    assert homes.give(1, "b") == home and os.listdir(home) == ["x"]
    homes.take_back(1, "b", done=True)
    assert homes.gone and homes.old() == [f"{places.homes}/{name}" for name in os.listdir(places.homes)]
    assert Homes(places, {}).give(0, "a") is None


def test_no_file_of_items_is_a_link_to_what_steps_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    S12: the worker reads the lines of a file that a step has made, and gives them to steps.
    """
    for name in ("state/work", "state/out", "credentials", "project"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    for name in ("credentials/token", "state/ledger.db", "state/out/a", "project/items"):
        (tmp_path / name).write_text("x")
    lines = tmp_path / "project/lines"
    for target, allowed in (
        ("credentials/token", False),
        ("state/ledger.db", False),
        ("state/out/a", True),
        ("project/items", True),
    ):
        lines.symlink_to(tmp_path / target)
        if allowed:
            assert textfile.read(str(lines), 100) == "x"
        else:
            with pytest.raises(ConfigError, match="a link to one of the agent's own files"):
                textfile.read(str(lines), 100)
        lines.unlink()
    assert textfile.read(str(tmp_path / "credentials/token"), 100) == "x", "named by the list itself"


def test_a_home_stays_with_its_run(tmp_path: Path) -> None:
    """
    S37: a step of the same name in another run finds nothing of it; it is there again when its run comes back.
    """
    one, other = Places("one", str(tmp_path), str(tmp_path)), Places("other", str(tmp_path), str(tmp_path))
    home = Homes(one, UNIT).give(0, "a")
    assert home is not None
    Path(home, ".gitconfig").touch()
    shelf.put_away(other, "one")
    second = Homes(other, UNIT).give(0, "a")
    assert second == home and os.listdir(home) == []
    shelf.put_away(one, "other")
    assert shelf.take_out(one)
    assert Homes(one, UNIT).give(0, "a") == home and os.listdir(home) == [".gitconfig"]


@needs_landlock
def test_a_folder_that_cannot_be_opened_is_named_before_the_run(places: Places) -> None:
    """
    The folder of the run's own files, what is around them, what is in them: a problem, with what to do about it.
    """
    above = os.path.dirname(places.root)
    tasks = [
        task("a")._replace(cwd=places.root),
        task("b")._replace(confine=Confine(True, (above, f"{above}/project"))),
        task("c")._replace(cwd=places.work),
        task("d")._replace(cwd=places.root, confine=Confine(False)),
    ]
    found = [(problem.what, problem.hint) for problem in confine.problems(tasks, places, True)]
    why = "holds the agent's own files, or lies among them"
    hint = "use another folder, or 'confine: no' for this task"
    assert found == [(f"cwd: '{places.root}' {why}", hint), (f"confine: write: '{above}' {why}", hint)]
    assert len(confine.problems(tasks, places, False)) == 1


@needs_landlock
@pytest.mark.parametrize("abi", [1, 2, 3, 5])
def test_an_older_kernel_confines_as_far_as_it_can(places: Places, abi: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What a version does not know is not asked of it; reading and writing are closed under each.
    """
    monkeypatch.setattr(landlock, "version", lambda: abi)
    script = f"(cat {places.ledger} || echo x >>{places.ledger} || rm {places.ledger}) 2>/dev/null || echo closed"
    assert run(places, task("a"), script) == "closed\n"
    assert run(places, task("a"), f"echo x >x && mv x {places.state('a')}/x && echo moved") == "moved\n"


def test_without_landlock_the_worker_says_so_once(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An old kernel, or a container's filter: the steps run, and nothing in the list stands in their way.
    """
    monkeypatch.setattr(landlock, "version", lambda: 0)
    said: list[str] = []
    confinement = Confinement(places, UNIT, said.append)
    for _ in range(2):
        assert confinement.ruleset(task("a"), places.root, {}, Own((), ())) is None
    assert said == ["this kernel has no Landlock, or refuses it: steps are not confined against one another"]
    assert confine.problems([task("a")._replace(cwd=places.root)], places, True) == []
    assert confine.describe([task("a")], True) == [
        "confine: this kernel has no Landlock, or refuses it: no step is confined"
    ]


def test_check_says_what_applies() -> None:
    """
    The kernel's version, who is not confined, and whose program mounts.
    """
    tasks = [task("a", "bwrap --ro-bind / / true"), task("b")._replace(confine=Confine(False)), task("c")]
    said = "\n".join(confine.describe(tasks, True))
    if landlock.version():
        assert "not confined: b" in said and "task 'a' runs bwrap" in said and "'c'" not in said
    assert confine.describe(tasks, False) == []
    assert landlock.gaps(2) == ["empty files with truncate(2)", "send signals"]
    assert landlock.gaps(5) == ["send signals"] and landlock.gaps(7) == []
