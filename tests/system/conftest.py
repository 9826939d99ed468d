"""Machines for the tests of this folder; where none can boot, the tests are skipped, with the reason."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.system.machine import Machine, MachineError
from tests.system.supervisor import HOST, why_not
from tests.system.tree import base_tree, why_not_build

LOG_LINES = "100"


@pytest.fixture(scope="session")
def needs_machine() -> None:
    """Skip unless machines can boot here; with AGENT_REQUIRE_SYSTEM=1 (as in CI), fail instead."""
    reason = why_not()
    if reason and os.environ.get("AGENT_REQUIRE_SYSTEM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def machine(needs_machine: None) -> Iterator[Machine]:
    """A machine made of the host's own programs, without the agent."""
    with Machine() as m:
        yield m


@pytest.fixture(scope="session")
def installed_image(needs_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The upper folder of a machine, now off, in which `make install` was run; a layer for others.

    The units it enabled are disabled again and listed in the folder's file `enabled`, so that a
    machine on it comes up with the agent as never started.
    """
    return install(HOST, tmp_path_factory.mktemp("installed"))


def install(base: str | Path, upper: Path) -> Path:
    """Run `make install` in a machine on `base`, and turn it off; return its upper folder, as `installed_image`."""
    with Machine(base, upper=upper, network=True) as m:
        done = m.run("make -C /src install", check=False, timeout=300)
        if done.rc:
            pytest.fail(f"make install exited with status {done.rc}\n{done.out}{done.err}", pytrace=False)
        listed = m.run("systemctl list-unit-files --state=enabled --no-legend 'agent.*' 'agent@*'", check=False)
        units = [line.split()[0] for line in listed.out.splitlines()]
        if units:
            m.run(["systemctl", "disable", "--now", *units])
        (upper / "enabled").write_text("\n".join(units))
        m.poweroff()
    return upper


@pytest.fixture
def agent(installed_image: Path) -> Iterator[Machine]:
    """A machine with the agent installed and enabled, but not started; the next boot will."""
    with Machine(layers=[installed_image]) as m:
        units = (installed_image / "enabled").read_text().split()
        if units:
            m.run(["systemctl", "enable", *units])
        yield m


@pytest.fixture(scope="session")
def release(needs_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return what makes, once, a Debian of some name with the agent installed: its tree, and the layer above it."""

    @functools.cache
    def made(suite: str) -> tuple[Path, Path]:
        if reason := why_not_build():
            pytest.skip(reason)
        base = base_tree(suite)
        return base, install(base, tmp_path_factory.mktemp(suite))

    return made


@pytest.fixture(scope="module", params=["host", "trixie"])
def image(request: pytest.FixtureRequest, release: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """Each release of systemd in turn, with the agent installed: its tree, and the layer above it."""
    if request.param == "host":
        return Path(HOST), request.getfixturevalue("installed_image")
    return release(request.param)


@pytest.fixture
def on_each(image: tuple[Path, Path]) -> Iterator[Machine]:
    """A machine of each release, with the agent installed but neither enabled nor started."""
    base, layer = image
    with Machine(base, layers=[layer]) as m:
        yield m


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the journal of each machine that a failed test had."""
    report = yield
    if call.when == "call" and report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Machine):
                report.sections.append((f"journal of '{name}'", _journal(value)))
    return report


def _journal(m: Machine) -> str:
    try:
        return m.run(["journalctl", "--lines", LOG_LINES, "--output=short-precise"], timeout=10).out
    except MachineError as exc:
        return str(exc)
