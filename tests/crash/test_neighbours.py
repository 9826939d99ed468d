"""Steps under one worker in the foreground: what one of them says of another is not believed."""

import os
import re
import sys

from tests.conftest import MakeWorker
from tests.support import ROOT
from worker import control

# The path of the other's socket is in its environment, which /proc shows to the same user.
FORGE = r"""
import glob, os, socket, sys
def environ():
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            found = dict(e.split(b"=", 1) for e in open(path, "rb").read().split(b"\0") if b"=" in e)
        except OSError:
            continue
        if found.get(b"AGENT_STEP") == b"victim" and os.environb[b"AGENT_RUN"] == found[b"AGENT_RUN"]:
            return found
while not (victim := environ()): pass
def say():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(b"STATUS=forged\nX_AGENT_PROGRESS=9/9", victim[b"NOTIFY_SOCKET"])
"""
GONE = FORGE + "pid = os.fork()\nif not pid: say(); os._exit(0)\nos.waitpid(pid, 0)\n"


def test_s13_a_child_that_has_gone_does_not_speak_for_another_step(worker: MakeWorker) -> None:
    """
    S13: a sender that cannot be asked any more is believed only where nobody else can be meant.
    """
    w = worker(f"""
run: gone
concurrency: 2
tasks:
  - {{id: victim, run: 'mkfifo gate; echo >&2 ready; read _ <gate'}}
  - id: evil
    run: [{sys.executable}, forge.py]
""")
    (w.state / "work").mkdir(parents=True)
    (w.state / "work/forge.py").write_text(GONE)
    w.start()
    w.until("evil: done")
    shown = control.ask(str(w.state / "run/control"))
    assert shown is not None
    assert [one["step"] for one in shown["current"]] == ["victim"]
    assert "forged" not in str(shown)
    with open(w.state / "work/gate", "w") as gate:
        gate.write("go\n")
    assert w.wait() == 0


def test_s13_what_a_step_says_last_is_heard_where_it_runs_alone(worker: MakeWorker) -> None:
    """
    S13: of a step that runs alone the last word counts, although its sender has ended by then.
    """
    said = "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    said += "s.sendto(b'X_AGENT_SPEND=3', os.environ['NOTIFY_SOCKET']); os._exit(0)"
    w = worker(f"run: last\ntasks:\n  - id: a\n    run: [{sys.executable}, -c, {said!r}]\n")
    assert w.run() == 0
    assert [row.spend for row in w.rows()] == [3.0]


CLAIM = (
    FORGE
    + r"""
from worker import wire
def ask(name, key):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(os.path.join(os.path.dirname(os.environ["NOTIFY_SOCKET"]), "control"))
        claim = {"once": "claim", "key": key, "parameters": "p", "step": name, "lease": 60, "claimant": "a" * 32}
        s.sendall(wire.encode(claim))
        return s.recv(65536).decode()
print(ask("victim", "one"), ask(os.environ["AGENT_STEP"], "two"), sep="", end="")
"""
)


def test_s14_no_step_claims_an_effect_in_the_name_of_another(worker: MakeWorker) -> None:
    """
    S14: the other would have it in its log, and would be taken for one that rightly waits.
    """
    w = worker(f"""
run: claims
concurrency: 2
tasks:
  - {{id: victim, run: 'mkfifo gate; echo >&2 ready; read _ <gate'}}
  - {{id: evil, run: [{sys.executable}, claim.py], env: {{PYTHONPATH: {ROOT}}}}}
""")
    (w.state / "work").mkdir(parents=True)
    (w.state / "work/claim.py").write_text(CLAIM)
    w.start()
    w.until("evil: done")
    refused, granted = w.output("evil").decode().splitlines()
    assert refused.startswith("error="), refused
    assert "verdict=granted" in granted
    with open(w.state / "work/gate", "w") as gate:
        gate.write("go\n")
    w.wait()


def test_s13_the_path_of_a_socket_is_a_secret_of_its_step(worker: MakeWorker) -> None:
    """
    S13: it cannot be guessed, nor read in /proc/net/unix; what one step makes of it is mended for the next.
    """
    breaks = 'dirname "$NOTIFY_SOCKET"; rm -r "$(dirname "$NOTIFY_SOCKET")"'
    w = worker(f"""
run: paths
defaults: {{env: {{PYTHONPATH: {ROOT}, CTL: {sys.executable} -m worker}}}}
tasks:
  - {{id: first, run: 'dirname "$NOTIFY_SOCKET"; $CTL once k -- echo one; cat /proc/net/unix >net'}}
  - {{id: breaks, run: '{breaks}'}}
  - {{id: last, run: '$CTL once l -- echo two; $CTL spend 3'}}
""")
    assert w.run() == 0, w.lines
    folder, said = w.output("first").decode().splitlines()
    assert said == "one"
    assert re.fullmatch(rf"{re.escape(str(w.state))}/run/notify\.0\.[0-9a-f]{{16}}", folder), folder
    shown = (w.state / "work/net").read_text()
    assert "/proc/self/fd/" in shown
    assert folder not in shown, "the kernel shows the path to all"
    assert w.output("last") == b"two\n"
    assert [row.spend for row in w.rows()] == [0.0, 0.0, 3.0]
    assert not os.path.exists(folder)
