"""A supervision whose machines are folders, for tests that have many of them.

What is on the machines are a few lines of sh in the place of systemctl and agentctl, which write down what they were
asked and say what a test wants them to.  The supervisor, its files, its commands and the signals are real.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1]

# The provider's commands: each writes down that it was run, and one of them kills the supervisor, before or after.
PROVIDER = """
commands:
  state: exec sh "ROOT/do" state "$id"
  create: exec sh "ROOT/do" create "$name"
  exec: exec sh "ROOT/do" exec "$id"
  put: exec sh "ROOT/do" put "$id" "$local" "$remote"
  get: exec sh "ROOT/do" get "$id" "$remote" "$local"
  resume: exec sh "ROOT/do" resume "$id"
  pause: exec sh "ROOT/do" pause "$id"
"""
DO = r"""
cd "$(dirname "$0")"
fatal=$(cat fatal)
exec 9>>counting  # a copy runs beside the other commands
flock 9
echo "$1${2##*-}" >>calls
calls=$(wc -l <calls)
exec 9>&-
[ "$calls" != "$((fatal / 2))" ] || [ "$((fatal % 2))" = 0 ] || kill -9 "$PPID"
disk=$PWD/disks/$2 log=$PWD/log
case $1 in
    state) if [ -e "$disk/mute" ]; then :; elif [ -d "$disk" ]; then cat "$disk/power"; else echo gone; fi ;;
    create) [ ! -e hang ] || { mv hang hung; echo $$ >hung; sleep 1000; }
        [ ! -e broken ] || { mv broken mended; rm -f disks/*/mute; echo "no room" >&2; exit 1; }
        echo "create $2" >>"$log"; mkdir -p "$disk" && echo running >"$disk/power" ;;
    resume) echo "resume $2" >>"$log"; echo running >"$disk/power" ;;
    pause) echo "pause $2" >>"$log"
        if [ -e "$disk/mute" ]; then . ./mute; false; else echo stopped >"$disk/power"; rm -f "$disk/worker"; fi ;;
    put) [ -e "$disk/power" ] && [ "$(cat "$disk/power")" = running ] && echo "put $2" >>"$log" && cp "$3" "$disk/$4" ;;
    get) [ ! -e stuck ] || { mv stuck hung; echo $$ >hung; exec sleep 1000; }
        cp "$disk/$3" "$4" ;;
    exec) [ ! -e "$disk/mute" ] && [ "$(cat "$disk/power")" = running ] &&
        PATH=$PWD/bin:$PATH disk=$disk log=$log sh -c 'cd "$disk"; . /dev/stdin' ;;
esac
status=$?
[ "$calls" != "$((fatal / 2))" ] || [ "$((fatal % 2))" = 1 ] || kill -9 "$PPID"
exit $status
"""
SYSTEMCTL = r"""
case "$*" in
    *"start agent") echo "start ${disk##*/}" >>"$log"; : >"$disk/worker" ;;
    "disable --now"*) echo "pause ${disk##*/}" >>"$log"; rm -f "$disk/worker" ;;
    *"reload agent") [ -e "$disk/worker" ] && echo "reload ${disk##*/}" >>"$log" ;;
    *"stop agent"*) rm -f "$disk/worker" ;;
    "show -P User"*) id -un ;;
    *show*) if [ -e "$disk/worker" ]; then echo ActiveState=active
        elif [ -e "$disk/exit" ]; then echo ActiveState=failed
        else echo ActiveState=inactive; fi
        echo "ExecMainStatus=$(cat "$disk/exit" 2>/dev/null)" ;;
esac
"""
AGENTCTL = r"""
if [ "$1" = restore ]; then exec cp "$3" "$disk/restored.json"; fi
echo x >>"$disk/looks"
looks=$(wc -l <"$disk/looks")
number=${disk##*-}
printf '{"format": 2, "run": "job", "revision": %s, "facts": {},\n"effects": [\n{}],\n"attempts": [\n{}\n]}\n' \
    "$((number * 10 + looks))" >"$disk/checkpoint.new"
mv "$disk/checkpoint.new" "$disk/checkpoint.json"
status=running worker=absent run=job
[ ! -e "$disk/worker" ] || worker=active
spend=0
. "$disk/../../story"
printf '{\n"run": "%s", "status": "%s", "worker": {"state": "%s"}, "last_sign_age": 0.1,
"budget": {"spend": {"used": %s}}, "steps": {"total": 9, "done": %s}\n}\n' \
    "$run" "$status" "$worker" "$spend" "${done-$looks}"
"""
# What a story may say: `[ $looks = 3 ] && gone`, with $number for the machine's.
STORY = r"""
gone() { mv "$disk" "$disk.lost"; }
off() { echo stopped >"$disk/power"; rm -f "$disk/worker"; }
ends() { rm -f "$disk/worker"; worker=absent status=$1; [ -z "${2-}" ] || echo "$2" >"$disk/exit"; }
mute() { : >"$disk/mute"; }
"""
DONE = "[ $looks -lt 3 ] || ends done\n"
# The first one goes when a copy has come from it.
COPIED = '[ $looks -ge 3 ] && [ -e "$disk/../../state/checkpoint.json" ]'
TWO_MACHINES = f"if [ $number = 1 ]; then ! {{ {COPIED}; }} || gone; else {DONE.strip()}; fi\n"

# A machine's paths are below its folder, and it needs no time to boot.
DRIVER = """
import os, signal, sys
from worker import cli, points
from worker.supervise import life, remote, transfer
remote.STAGE, remote.CONFIG, life._SOON = "stage", "etc/config.yaml", 0.0
remote.CHECKPOINT, remote._LAST_WORDS, transfer._SPARE = "checkpoint.json", "last-words", "spare"
left = [int(sys.argv[2])]
def at(point):
    left[0] -= point == sys.argv[1]
    if point == sys.argv[1] and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
points.at = at
sys.exit(cli.main(sys.argv[3:]))
"""


class World:
    """A supervision whose machines are folders below `root`; at each look the story says what becomes of one.

    `mute` is what happens each time that one which does not answer is to be paused.
    """

    def __init__(
        self, root: Path, story: str, more: str = "", mute: str = "", provider: str = "provider: ./provider.yaml"
    ) -> None:
        self.root = root
        self._provider = provider.replace("ROOT", str(root))
        (root / "bin").mkdir(parents=True)
        (root / "disks").mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("agentctl", AGENTCTL)):
            (root / "bin" / name).write_text(f"#!/bin/sh\n{text}")
            (root / "bin" / name).chmod(0o755)
        (root / "do").write_text(DO)
        (root / "story").write_text(STORY + story)
        (root / "mute").write_text(mute)
        (root / "fatal").write_text("0")
        (root / "calls").write_text("")
        (root / "provider.yaml").write_text(PROVIDER.replace("ROOT", str(root)))
        (root / "job.yaml").write_text("run: job\ntasks:\n  - {id: a, run: 'true'}\n")
        self.configure(more)

    def configure(self, more: str) -> None:
        """Write the sandbox's file, with so much more in it."""
        usual = "" if "copy_every:" in more else "copy_every: 10ms\n"
        (self.root / "sandbox.yaml").write_text(
            f"config: job.yaml\n{self._provider}\npoll: 10ms\nboot: 5s\n{usual}{more}"
        )

    def supervise(self, point: str = "", number: int = 0) -> int:
        """Run a supervisor until it ends, one way or the other; it is killed when it is at `point` for that time."""
        done = subprocess.run(self.command(point, number), cwd=SOURCE, capture_output=True, text=True, timeout=60)
        self.said = done.stderr
        return done.returncode

    @contextlib.contextmanager
    def supervisor(self, **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """Start a supervisor; a test that fails kills it instead of waiting for its end."""
        with subprocess.Popen(self.command(), cwd=SOURCE, **options) as started:
            try:
                yield started
            except BaseException:
                started.kill()
                raise

    def command(self, point: str = "", number: int = 0) -> list[str]:
        driven = [sys.executable, "-c", DRIVER, point, str(number)]
        return [*driven, "supervise", str(self.root / "sandbox.yaml"), "--state", str(self.root / "state")]

    def own(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a supervisor without --state, whose state is below this world's parent."""
        driven = [sys.executable, "-c", DRIVER, "", "0", "supervise", str(self.root / "sandbox.yaml"), *options]
        env = {name: value for name, value in os.environ.items() if name != "STATE_DIRECTORY"}
        env["XDG_STATE_HOME"] = str(self.root.parent / "home")
        return subprocess.run(driven, cwd=SOURCE, env=env, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """Return the provider's commands that were run, in order, each with the machine's number."""
        return (self.root / "calls").read_text().split()

    def log(self) -> list[str]:
        return (self.root / "log").read_text().splitlines()

    def words(self) -> str:
        """Return the kinds of things that were done, in order, each with the machine's number."""
        return " ".join(f"{kind}{name.split('-')[-1]}" for kind, name in (line.split() for line in self.log()))

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "state/machines.json").read_text()))

    def machines(self) -> list[tuple[str, str]]:
        return [(machine["name"].split("-")[-1], machine["state"]) for machine in self.record()["machines"]]
