"""Fixtures that every kind of test may use."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests import postgres
from tests.loop import Loop
from tests.support import Worker, end_all
from tests.surroundings import Surroundings

MakeWorker = Callable[..., Worker]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[MakeWorker]:
    """Make workers in the test's own folder; whatever still lives at the end is ended."""
    made: list[Worker] = []

    def make(tasks: str, folder: str = ".", environ: Mapping[str, str] | None = None) -> Worker:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        made.append(Worker(place, tasks, environ))
        return made[-1]

    yield make
    for one in made:
        one.close()
    if made:
        end_all(tmp_path)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """A loop for errands; those that are under way at the end are ended."""
    found = Loop(tmp_path)
    yield found
    found.close()


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Surroundings]:
    """What a step finds around it, for a process that the test starts itself."""
    made = Surroundings(tmp_path)
    yield made
    made.listener.close()


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    """A PostgreSQL server; without one the test is skipped, or fails with AGENT_REQUIRE_SYSTEM=1 (as in CI)."""
    reason = postgres.why_not()
    if reason and os.environ.get("AGENT_REQUIRE_SYSTEM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    made = postgres.Server()
    try:
        yield made.start()
    finally:
        made.remove()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have a worker or a server; `make test-quick` leaves them out."""
    for item in items:
        if {"worker", "server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("programs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were skipped: each reason once, with the number of tests."""
    skipped: list[pytest.TestReport] = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")
