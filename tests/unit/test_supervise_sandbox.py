"""The YAML of a supervision: what it may say, and that every mistake in it is named at once."""

import math
from pathlib import Path

import pytest

from worker.errors import ConfigError
from worker.supervise import sandbox
from worker.supervise.sandbox import Sandbox

JOB = "run: job\ntasks:\n  - {id: a, run: 'true'}\n"
PROVIDER = """
variables: {WHERE: , SIZE: small}
commands:
  state: echo running
  create: [make, "{name}", "{SIZE}"]
  exec: [enter, "{id}"]
  put: cp "$local" "$WHERE/$id$remote"
  get: cp "$WHERE/$id$remote" "$local"
timeouts: {create: 1h}
"""
SHIPPED = {"nspawn": "BASE: /srv/base", "ssh": "HOSTS: a b", "hosted": "IMAGE: debian"}


def load(folder: Path, text: str, name: str = "nightly.yaml") -> Sandbox:
    (folder / "job.yaml").write_text(JOB)
    (folder / "own.yaml").write_text(PROVIDER)
    (folder / name).write_text(text)
    return sandbox.load(str(folder / name))


def mistakes(folder: Path, text: str, name: str = "nightly.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, name)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_little_has_to_be_said(tmp_path: Path) -> None:
    """
    A task list and a provider; the rest has defaults, and a number of machines is one of them.
    """
    found = load(tmp_path, "config: job.yaml\nprovider: ./own.yaml\nvariables: {WHERE: /m}\n")
    assert (found.name, found.run, found.config) == ("nightly", "job", f"{tmp_path}/job.yaml")
    assert found.budget == (10, 168, None)
    assert math.isinf(found.limits.age)
    assert found.provider.variables == {"WHERE": "/m", "SIZE": "small"}
    assert (found.provider.timeouts["create"], found.provider.timeouts["pause"]) == (3600, 60)


def test_a_sandbox_says_what_is_otherwise_than_with_its_provider(tmp_path: Path) -> None:
    """
    One command, one limit, one variable of a provider's file can be another one; the rest stays.
    """
    found = load(
        tmp_path,
        "config: job.yaml\nprovider: own.yaml\nvariables: {WHERE: /m, SIZE: big}\n"
        "commands: {pause: [halt, '{id}']}\ntimeouts: {look: 5s}\nlimit: 12h\nat_end: keep\n"
        "files: {/etc/agent/config.d/more.yaml: job.yaml}\nresults: {out/report: /var/lib/agent/out/report}\n"
        "budget: {hours: 1.5, spend: 20}\nmax_file: 3MiB\n",
    )
    assert found.provider.commands["pause"] == ("halt", "{id}")
    assert found.provider.commands["create"] == ("make", "{name}", "{SIZE}")
    assert (found.provider.timeouts["look"], found.limits.age, found.keep) == (5, 43200, True)
    assert found.files == (("/etc/agent/config.d/more.yaml", f"{tmp_path}/job.yaml"),)
    assert found.results == ((f"{tmp_path}/out/report", "/var/lib/agent/out/report"),)
    assert found.budget == (10, 1.5, 20)
    assert found.max_file == 3 * 2**20


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_providers_are_whole(tmp_path: Path, name: str) -> None:
    """
    Each has every command, and says what has to be given.
    """
    assert {path.stem for path in Path(sandbox.SHIPPED).glob("*.yaml")} == set(SHIPPED)
    found = load(tmp_path, f"config: job.yaml\nprovider: {name}\nvariables: {{{SHIPPED[name]}}}\n")
    needed = {"state", "create", "exec", "put", "get", "pause"}
    assert needed <= set(found.provider.commands)
    (problem,) = mistakes(tmp_path, f"config: job.yaml\nprovider: {name}\n")
    assert problem.startswith(
        f"nightly.yaml:2:11: variables: the provider needs a value for {SHIPPED[name].split(':')[0]}"
    )


def test_every_mistake_is_named_at_once_with_its_place(tmp_path: Path) -> None:
    """
    Case R4: the file, the provider's file and the task list, all in one go.
    """
    (tmp_path / "bad-job.yaml").write_text("tasks:\n  - {id: a, rum: x}\n")
    (tmp_path / "bad.yaml").write_text("variables: {low: x}\ncommands:\n  state: [show, '{idd}']\n  exce: x\n")
    found = mistakes(
        tmp_path,
        "config: bad-job.yaml\nprovider: ./bad.yaml\nvariables: {NONE: x}\npolll: 3s\npoll: 0\nlimit: often\n"
        "files: {etc/x: job.yaml, /etc/y: nowhere}\nbudget: {machines: 0}\nat_end: explode\n",
    )
    for line in (
        "bad-job.yaml:2:13: unknown key 'rum'; did you mean 'run'?",
        "bad.yaml:1:13: variables: 'low' cannot name a variable; use A-Z, 0-9 and '_'",
        "bad.yaml:3:10: commands: state: nothing stands for '{idd}'; '{idd}' could be id, name, number, local, "
        "remote, script, NONE",
        "bad.yaml:4:3: unknown key 'exce'; did you mean 'exec'?",
        "bad.yaml:1:1: commands: 'create' is missing; add 'create:'",
        "bad.yaml:1:1: commands: 'put' is missing; add 'put:'",
        "nightly.yaml:3:13: variables: the provider knows no 'NONE'; it has none",
        "nightly.yaml:4:1: unknown key 'polll'; did you mean 'poll'?",
        "nightly.yaml:5:7: poll: must be longer than 0; write a time span, or leave the key out",
        "nightly.yaml:7:9: 'etc/x' is a path on the machine; write it from '/' on",
        "nightly.yaml:8:20: machines: wants a whole number from 1 on, found '0'",
        "nightly.yaml:9:9: at_end: cannot be 'explode'; write stop or keep",
    ):
        assert line in found, "\n".join(found)
    assert any(line.startswith("nightly.yaml:6:8: limit: 'often' is not a time span") for line in found)
    assert any(line.startswith("nightly.yaml:7:34: there is no file '") for line in found)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """
    No provider of that name, no task list, no name that a host could bear.
    """
    found = mistakes(tmp_path, "provider: cloud\n", "Not_A_Host.yaml")
    assert "Not_A_Host.yaml:1:1: 'config' is missing; add 'config:'" in found
    assert any(
        "provider: there is no" in line and "write hosted, nspawn, ssh, or a path with a '/'" in line for line in found
    )
    assert any("'Not_A_Host' cannot name machines" in line for line in found)
