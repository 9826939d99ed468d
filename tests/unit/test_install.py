"""install.sh, staged below DESTDIR: what it writes, what it refuses, and that it leaves the system alone."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2]
UNITS = "usr/local/lib/systemd/system"
DROPIN = "etc/systemd/system/agent.service.d/50-workdir.conf"
FORBIDDEN = ["systemctl", "useradd", "userdel", "chown", "chgrp", "restorecon"]

LIST = "tasks:\n  - {id: a, run: echo a}\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


def _distribution_has_the_packages() -> bool:
    probe = ["/usr/bin/python3", "-I", "-c", "import sys, yaml, sdnotify; assert sys.version_info >= (3, 11)"]
    return Path(probe[0]).exists() and subprocess.run(probe, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(
        not _distribution_has_the_packages(),
        reason="/usr/bin/python3 lacks python3-yaml or python3-sdnotify, so staging would download them",
    ),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run install.sh with a PATH in which touching the system is a failure that leaves a trace."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in FORBIDDEN:
        (poison / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{tmp_path}/forbidden"\nexit 97\n')
        (poison / name).chmod(0o755)

    def run(*args: str, source: Path = SOURCE, **env: str) -> subprocess.CompletedProcess[str]:
        # What the installer can do without is not fetched for every test.
        env = {"PIP_NO_INDEX": "1", **env}
        env = {"PATH": f"{poison}:{os.environ['PATH']}", "DESTDIR": f"{tmp_path}/dest dir", **env}
        done = subprocess.run(["sh", source / "install.sh", *args], env=env, capture_output=True, text=True)
        assert not (tmp_path / "forbidden").exists(), (tmp_path / "forbidden").read_text()
        return done

    return run


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest dir"


def snapshot(root: Path) -> dict[str, object]:
    """Every path below `root` with mode, times and bytes: equal means untouched."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (stat.st_mode, stat.st_mtime_ns, stat.st_ino, content)
    return found


def put(path: Path, text: str = "somebody else's\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def remains(dest: Path) -> list[str]:
    return [str(path.relative_to(dest)) for path in sorted(dest.rglob("*")) if not path.is_dir()]


def copy_of_source(to: Path) -> Path:
    """A source folder a test may change."""
    ignore = shutil.ignore_patterns(".git", ".venv", ".agent", "__pycache__", ".*_cache", "tests")
    return Path(shutil.copytree(SOURCE, to, ignore=ignore, symlinks=True))


def test_staging_writes_a_whole_program_and_leaves_the_system_alone(run: Run, dest: Path) -> None:
    done = run("install")

    assert done.returncode == 0, done.stderr
    current = dest / "usr/local/lib/agent/current"
    imported = subprocess.run(
        [current / "bin/python", "-IB", "-c", "import worker, yaml, sdnotify; print(worker.__file__)"],
        capture_output=True,
        text=True,
    )
    assert imported.stdout.startswith(str(dest)), imported.stderr
    assert (dest / "usr/local/bin/agentctl").stat().st_mode & 0o777 == 0o755
    assert (dest / "etc/agent").stat().st_mode & 0o777 == 0o750
    assert (dest / "etc/agent/config.d").is_dir()
    assert (dest / "etc/agent/config.yaml").read_bytes() == (SOURCE / "config.example.yaml").read_bytes()
    assert not (dest / DROPIN).exists()
    for unit in (
        "agent.service",
        "agent@.service",
        "agent.path",
        "agent-alert@.service",
        "agent-thaw@.service",
        "agent-supervisor@.service",
    ):
        path = dest / UNITS / unit
        source = "agent.service" if unit == "agent@.service" else unit
        assert path.read_bytes() == (SOURCE / "units" / source).read_bytes()
        assert not path.is_symlink(), "a template that is a link to a plain unit is not loaded"


def test_nothing_staged_names_the_staging_folder(run: Run, dest: Path) -> None:
    run("install")

    named = [p for p in dest.rglob("*") if p.is_file() and not p.is_symlink() and str(dest).encode() in p.read_bytes()]
    assert named == []


def test_i6_second_install_changes_no_bytes(run: Run, dest: Path) -> None:
    run("install")
    before = snapshot(dest)

    done = run("install")

    assert done.stdout == "nothing changed\n"
    assert snapshot(dest) == before


def test_upgrade_flips_current_keeps_the_previous_release_and_edited_config(
    run: Run, dest: Path, tmp_path: Path
) -> None:
    source = copy_of_source(tmp_path / "source")
    releases = dest / "usr/local/lib/agent/releases"
    current = dest / "usr/local/lib/agent/current"
    config = dest / "etc/agent/config.yaml"
    seen: list[str] = []
    for n in range(3):
        with open(source / "worker/__init__.py", "a") as f:
            f.write(f"# change {n}\n")
        assert run("install", source=source).returncode == 0
        config.write_text("run: mine\n")
        seen.append(current.resolve().name)

    assert len(set(seen)) == 3
    assert sorted(p.name for p in releases.iterdir()) == sorted(seen[1:])
    assert config.read_text() == "run: mine\n"


def test_a_failed_upgrade_leaves_the_installed_program_as_it_was(run: Run, dest: Path, tmp_path: Path) -> None:
    run("install")
    before = snapshot(dest / "usr/local/lib/agent/current/")
    source = copy_of_source(tmp_path / "source")
    (source / "worker/__init__.py").write_text("raise RuntimeError('broken on purpose')\n")

    done = run("install", source=source)

    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert snapshot(dest / "usr/local/lib/agent/current/") == before
    assert len(list((dest / "usr/local/lib/agent/releases").iterdir())) == 1


def test_installing_does_not_write_into_the_source_folder(run: Run, tmp_path: Path) -> None:
    source = copy_of_source(tmp_path / "source")
    before = snapshot(source)

    assert run("install", source=source).returncode == 0

    assert snapshot(source) == before


def test_i7_workdir_with_spaces_percent_and_dollar(run: Run, dest: Path) -> None:
    done = run("install", "--user", "someone", "--workdir", "/home/someone/my 100%i $HOME", "--workdir", "/workspace")

    assert done.returncode == 0, done.stderr
    lines = (dest / DROPIN).read_text().splitlines()
    assert "User=someone" in lines
    assert "Group=someone" in lines
    assert 'BindPaths="/home/someone/my 100%%i $HOME"' in lines
    assert 'ReadWritePaths="/home/someone/my 100%%i $HOME"' in lines
    assert 'ReadWritePaths="/workspace"' in lines
    assert 'BindPaths="/workspace"' not in lines
    assert "TemporaryFileSystem=/home:ro,mode=0755 /root:ro,mode=0755 /run/user:ro,mode=0755" in lines


@pytest.mark.parametrize("path", ["relative", "/a:b", '/a"b', "/a'b", "/a\\b", "/a\nb", "/", "/home", "/etc"])
def test_i7_workdir_that_cannot_be_opened_is_refused_up_front(run: Run, dest: Path, path: str) -> None:
    done = run("install", "--workdir", path)

    assert done.returncode == 1
    assert "--workdir" in done.stderr
    assert list(dest.iterdir()) == []


def test_whoever_tells_of_the_agent_has_its_rights_and_its_home(run: Run, dest: Path) -> None:
    """The folders of the unit that is down, whose name is the instance there; also where it was not there before."""
    run("install", "--user", "someone", "--workdir", "/home/someone/100%N")
    dropin, shared = dest / DROPIN, dest / DROPIN.replace("agent.service", "agent-alert@.service")
    before = dropin.read_text()
    assert "Environment=HOME=%S/%N\n" in before and "100%%N" in before
    assert shared.read_text() == before.replace("HOME=%S/%N", "HOME=%S/%i")
    shared.unlink()
    run("install")
    assert shared.exists() and dropin.read_text() == before


def test_a_workdir_within_another_is_no_door_of_its_own(run: Run, dest: Path) -> None:
    """
    A step could move away what it is in, and leave a link there, which the next start would open.
    """
    paths = ("/home/someone/app/a/b", "/home/someone/app", "/home/someone/apple")
    run("install", "--user", "someone", *(word for path in paths for word in ("--workdir", path)))
    text = (dest / DROPIN).read_text()
    opened = [line for line in text.splitlines() if line.startswith(("ReadWritePaths", "BindPaths"))]
    assert sorted(opened) == [
        f'{key}="/home/someone/{name}"' for key in ("BindPaths", "ReadWritePaths") for name in ("app", "apple")
    ]


def test_workdir_outside_home_leaves_home_closed(run: Run, dest: Path) -> None:
    run("install", "--user", "someone", "--workdir", "/workspace/home/x")

    text = (dest / DROPIN).read_text()
    assert "ProtectHome" not in text
    assert "BindPaths" not in text


def test_later_install_without_options_keeps_the_dropin(run: Run, dest: Path) -> None:
    run("install", "--user", "someone", "--workdir", "/workspace")
    before = (dest / DROPIN).read_text()

    done = run("install")

    assert done.stdout == "nothing changed\n"
    assert (dest / DROPIN).read_text() == before


def test_without_root_it_refuses_and_says_sudo(run: Run, tmp_path: Path) -> None:
    (tmp_path / "poison/id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "poison/id").chmod(0o755)

    for command in ("install", "uninstall", "purge"):
        done = run(command, DESTDIR="")
        assert done.returncode == 1
        assert f"sudo make {command}" in done.stderr
        assert done.stdout == ""


def test_a_python_that_is_too_old_is_named(run: Run, dest: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)

    done = run("install", PYTHON=str(old))

    assert done.returncode == 1
    assert "3.11 or newer" in done.stderr
    assert "3.9.2" in done.stderr
    assert list(dest.iterdir()) == []


def test_i3_vanished_interpreter_is_one_clear_line(run: Run, dest: Path) -> None:
    run("install")
    agentctl = dest / "usr/local/bin/agentctl"
    lib = f"{dest}/usr/local/lib/agent"
    agentctl.write_text(agentctl.read_text().replace("/usr/local/lib/agent/current", f"'{lib}/current'"))
    python = dest / "usr/local/lib/agent/current/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.0")

    done = subprocess.run([agentctl, "status"], capture_output=True, text=True)

    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "make install" in done.stderr
    python.unlink()
    assert run("install").returncode == 0, "installing again mends it"
    assert python.exists()


def test_uninstall_keeps_config_and_state_and_purge_does_not(run: Run, dest: Path) -> None:
    run("install", "--user", "someone", "--workdir", "/workspace")
    for state in ("agent", "agent@nightly"):
        (dest / "var/lib" / state).mkdir(parents=True)

    done = run("uninstall")

    assert done.returncode == 0, done.stderr
    for kept in ("/etc/agent", "/var/lib/agent", "/var/lib/agent@nightly"):
        assert f"kept {kept}\n" in done.stdout
        assert (dest / kept[1:]).is_dir()
    assert not (dest / "usr/local/lib/agent").exists()
    assert not (dest / "usr/local/bin/agentctl").exists()
    assert not (dest / UNITS).exists()

    assert run("purge").returncode == 0
    assert [p for p in dest.rglob("*") if not p.is_dir()] == []
    assert not (dest / "etc/agent").exists()
    assert not (dest / "var/lib/agent").exists()


@pytest.mark.parametrize("path", ["etc/agent", "var/lib/agent"])
def test_n19_a_link_is_judged_by_the_folder_that_it_leads_to(run: Run, dest: Path, path: str) -> None:
    """N19: an empty folder on another disk is fine, a full one is somebody's; purge takes the link alone."""
    elsewhere = dest / "data/agent"
    put(elsewhere / "vendor.db")
    (dest / path).parent.mkdir(parents=True, exist_ok=True)
    (dest / path).symlink_to(elsewhere)
    assert run("install").returncode == 1

    (elsewhere / "vendor.db").unlink()
    assert run("install").returncode == 0
    put(dest / "data/agent/.agent-worker", "")
    put(dest / "data/agent/later", "")
    done = run("purge")
    assert f"removed the link /{path}; kept what it led to" in done.stdout
    assert not (dest / path).is_symlink()
    assert (elsewhere / "later").exists()


def test_n19_a_mark_made_by_hand_says_that_the_files_are_meant_for_this_agent(run: Run, dest: Path) -> None:
    """N19: the way to go on that the message names works as printed."""
    put(dest / "etc/agent/secrets.env", "KEY=1\n")
    put(dest / "etc/agent/config.yaml", LIST)
    put(dest / "etc/systemd/system/agent.service.d/limits.conf", "[Service]\nNice=5\n")
    assert "sudo touch /etc/agent/.agent-worker" in run("install").stderr

    put(dest / "etc/agent/.agent-worker", "")

    assert run("install").returncode == 0
    assert (dest / "etc/agent/config.yaml").read_text() == LIST
    assert run("install").stdout == "nothing changed\n"
    run("purge")
    assert remains(dest) == ["etc/systemd/system/agent.service.d/limits.conf"]


def test_n19_a_list_that_was_put_there_before_is_no_stranger(run: Run, dest: Path) -> None:
    """N19: as configuration management does it, and a checkpoint that a run shall go on from."""
    put(dest / "etc/agent/config.yaml", LIST)
    put(dest / "etc/agent/config.d/more.yaml", LIST)
    put(dest / "var/lib/agent/checkpoint.json", '{"format": 2, "run": "l", "revision": 2, "written": ""}\n')

    done = run("install")

    assert done.returncode == 0, done.stderr
    assert (dest / "etc/agent/config.yaml").read_text() == LIST


def test_n19_an_installation_without_marks_is_upgraded_and_purged_by_what_is_in_it(run: Run, dest: Path) -> None:
    """
    N19: an older installer marked nothing, and put the agent beside another program's files.
    """
    assert run("install").returncode == 0
    (dest / "etc/agent/.agent-worker").unlink()
    other = put(dest / "etc/agent/other.conf")
    vendor = put(dest / "var/lib/agent/vendor.db")
    for name in ("out/a", "log/a.1", "lock", ".cache/x"):
        put(dest / "var/lib/agent" / name, "")
    put(dest / "var/lib/agent/ledger.db", "SQLite format 3\0")
    put(dest / "var/cache/agent/tmp.1", "")
    put(dest / "var/lib/agent@red/ledger.db", "SQLite format 3\0")
    put(dest / "etc/systemd/system/agent.service.d/limits.conf", "[Service]\nNice=5\n")

    assert run("install").stdout == "nothing changed\n", "not marked: not all of it is the agent's"
    assert run("uninstall").returncode == 0
    assert run("install").returncode == 0, "nor in the way"
    done = run("purge")

    assert done.returncode == 0
    assert remains(dest) == [
        "etc/agent/other.conf",
        "etc/systemd/system/agent.service.d/limits.conf",
        "var/lib/agent/.cache/x",
        "var/lib/agent/vendor.db",
    ]
    assert other.read_text() == vendor.read_text()
    assert "kept /var/lib/agent, in which these are not known to be the agent's: vendor.db, .cache" in done.stdout


@pytest.mark.parametrize("text", ["run: mine\n", "tusks:\n- {id: a\n", ""])
def test_n19_a_list_that_is_being_edited_stops_no_upgrade(run: Run, dest: Path, text: str) -> None:
    """N19: it may leave the tasks to drop-ins, or be broken just now; the folder is the agent's for all that."""
    run("install")
    (dest / "etc/agent/.agent-worker").unlink()
    put(dest / "etc/agent/config.yaml", text)

    assert run("install").returncode == 0
    assert run("uninstall").returncode == 0
    assert run("install").returncode == 0
    assert (dest / "etc/agent/config.yaml").read_text() == text


def test_n19_an_installation_without_marks_and_without_strangers_is_marked(run: Run, dest: Path) -> None:
    """N19: with the next upgrade, so that files that come later are removed with it."""
    run("install")
    (dest / "etc/agent/.agent-worker").unlink()

    assert run("install").returncode == 0

    assert (dest / "etc/agent/.agent-worker").exists()


def test_n19_a_program_that_came_after_the_agent_is_not_overwritten(run: Run, dest: Path) -> None:
    """N19: another maker's agentctl, or unit, in place of ours: an upgrade stops, uninstall leaves it."""
    run("install")
    program = put(dest / "usr/local/bin/agentctl", "#!/bin/sh\n")
    unit = put(dest / UNITS / "agent.path", "[Path]\n")

    done = run("install")

    assert done.returncode == 1
    assert "/usr/local/bin/agentctl: is another program" in done.stderr
    assert f"/{UNITS}/agent.path: is another program's unit" in done.stderr
    assert run("purge").returncode == 0
    assert [program, unit] == [p for p in sorted(dest.rglob("*")) if not p.is_dir()]


def test_n19_a_first_install_that_was_killed_is_not_in_its_own_way(run: Run, dest: Path) -> None:
    """N19: whatever it had written by then."""
    run("install")
    (dest / "usr/local/bin/agentctl").unlink()
    (dest / "usr/local/lib/agent/current").unlink()
    (dest / "usr/local/lib/agent/releases/.new").mkdir()
    shutil.rmtree(dest / UNITS)

    assert run("install").returncode == 0


def test_n19_the_user_of_the_steps_may_be_the_one_that_is_there(run: Run, dest: Path) -> None:
    """N19: `USER=agent` takes somebody's user of that name, `USER=ann` needs none; foreign state stops both."""
    put(dest / "etc/passwd", "agent:x:1000:1000:Agent Smith:/home/agent:/bin/bash\n")
    assert "sudo make install USER=agent" in run("install").stderr
    state = put(dest / "var/lib/agent/vendor.db")
    assert "vendor.db" in run("install", "--user", "ann").stderr
    shutil.rmtree(state.parent)

    assert run("install", "--user", "agent").returncode == 0
    assert "User=agent\n" in (dest / DROPIN).read_text()
    assert run("install").stdout == "nothing changed\n"


def test_the_lock_covers_what_the_project_asks_for() -> None:
    """The runtime section is what the installer trusts: pinned, hashed, and nothing else in it."""
    import tomllib

    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    asked = {d.split(">=")[0].lower() for d in project["dependencies"]}
    lock = (SOURCE / "requirements.lock").read_text()
    runtime = lock.split("# == runtime ==")[1].split("# ==")[0]
    pins = [line for line in runtime.splitlines() if line and not line.startswith((" ", "#"))]

    assert {p.split("==")[0] for p in pins} >= asked
    assert all("==" in p for p in pins)
    assert runtime.count("--hash=sha256:") >= len(pins)
    for extra in ("http", "postgres"):
        section = lock.split(f"# == {extra} ==")[1].split("# ==")[0]
        for name in project["optional-dependencies"][extra]:
            assert f"\n{name.split('>=')[0].split('[')[0]}==" in section
    assert "://" not in lock


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_i10_the_unit_check_fails_on_unknown_keys(tmp_path: Path) -> None:
    units = tmp_path / "units"
    shutil.copytree(SOURCE / "units", units)
    check = ["make", "-s", "-C", str(SOURCE), "check-units", f"UNITS={units}"]
    assert subprocess.run(check, capture_output=True).returncode == 0

    text = (units / "agent.service").read_text()
    (units / "agent.service").write_text(text.replace("KillMode=", "KilMode="))
    unknown = subprocess.run(check, capture_output=True, text=True)
    assert unknown.returncode != 0
    assert "KilMode" in unknown.stderr

    (units / "agent.service").write_text(text.replace("CapabilityBoundingSet=\n", "").replace("User=agent\n", ""))
    assert subprocess.run(check, capture_output=True).returncode != 0, "an exposed unit passed"


def test_make_passes_user_and_workdir_only_from_its_command_line() -> None:
    """Everybody's environment has a USER; a path may hold a dollar sign."""
    make = ["make", "-s", "-n", "-C", str(SOURCE), "install"]
    env = {**os.environ, "USER": "me", "WORKDIR": "/x"}

    plain = subprocess.run(make, env=env, capture_output=True, text=True, check=True)
    given = subprocess.run(
        [*make, "USER=bob", "WORKDIR=/a b/it's $c"], env=env, capture_output=True, text=True, check=True
    )

    assert plain.stdout.split() == ["./install.sh", "install"]
    assert given.stdout.strip() == "./install.sh install --user 'bob' --workdir '/a b/it'\\''s $c'"
