"""What is known of the installed unit, with a systemctl that says what the test wants."""

from pathlib import Path

import pytest

from worker import unit
from worker.errors import Mark


def test_a_secret_in_a_ping_is_wanted_by_who_tells_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    agent-alert@ has credentials of its own; a unit that systemd does not know is nobody's mistake.
    """
    (tmp_path / "agent.service").write_text("[Service]\nLoadCredential=uuid:/etc/agent/uuid\n")
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done; cat "{tmp_path}/$1"\n')
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    mark = Mark("config.yaml", 1, 7)
    assert unit.ping_problems(["uuid"], mark, "agent") == []
    (tmp_path / "agent-alert@agent.service").write_text("[Service]\n")
    (found,) = unit.ping_problems(["uuid"], mark, "agent")
    assert str(found).startswith("config.yaml:1:7: ping: agent-alert@agent.service has no credential 'uuid'; add Load")
    (tmp_path / "agent-alert@agent.service").write_text("[Service]\nSetCredentialEncrypted=uuid: x\n")
    assert unit.ping_problems(["uuid"], mark, "agent") == []
