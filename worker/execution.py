"""The execution of an attempt's programs, each from its spawn until nothing of it is left.

    RUNNING ──► (ENDING ──►) SWEEPING ──► the next program, or OVER
       │            │            └ the program has ended; what it left behind is ended too
       │            └ it was asked to end: SIGTERM, then SIGKILL
       └ output and exit arrive as events

Why a program is to end, what its exit status means and what follows is its attempt's business.
"""

import contextlib
import math
import signal
from collections.abc import Callable, Mapping
from typing import Any

from worker import points, process
from worker.errors import TEMPORARY
from worker.events import Events
from worker.family import Family
from worker.journal import NOTICE
from worker.leader import Leader
from worker.programs import Program
from worker.slot import Slot
from worker.streams import Streams

RUNNING, ENDING, SWEEPING, OVER = range(4)

# Between SIGTERM and SIGKILL for what a program left behind.
_LEFTOVER_GRACE = 1.0
# How long processes may take to vanish after SIGKILL before the worker no longer vouches for the step.
_KILL_PATIENCE = 30.0
_KILL_AGAIN = 1.0


class Execution:
    """One program after the other; `status` is how the last one ended, None if nobody knows.

    `kill_at`: when to call `tick` next, and until when the worker vouches for processes that were asked to end
    (`vouched_until`), both on the monotonic clock.  `fault`: what else the kernel tells of the end.
    """

    def __init__(
        self,
        slot: Slot,
        family: Family,
        streams: Streams,
        events: Events,
        say: Callable[[str, str, int], None],
        gone: Callable[[float], None],
    ) -> None:
        """`gone` is called when nothing of a program is left, and at each look after that until the next one begins."""
        self.phase = RUNNING
        self.program = Program("", [])
        self.status: int | None = None
        self.fault = ""
        self.kills_before = 0  # processes killed for memory in this slot before the attempt
        self.kill_at = self.vouched_until = math.inf
        self._slot = slot
        self._family = family
        self._streams = streams
        self._events = events
        self._say = say
        self._gone = gone
        self._leader = Leader(family, slot.shelter, events, self._on_exit)

    def start(
        self,
        program: Program,
        env: Mapping[str, str],
        cwd: str,
        memo: Callable[[], dict[str, Any]],
        ruleset: int | None,
    ) -> None:
        """Spawn `program`, confined by `ruleset`.  `memo` returns what a worker to come is to know of the attempt.

        Raises SpawnError, and OSError for want of descriptors.
        """
        self.program, self.phase, self.status = program, RUNNING, None
        self._leader.trouble = ""
        self.kill_at = self.vouched_until = math.inf
        shelter = self._slot.shelter
        if shelter is not None:  # from now on this program is the one that the next worker goes on with
            self._streams.attach(shelter.pipes, program.gives_result)
            shelter.announce(memo)
        try:
            argv = self._slot.hand(program.argv)
        except OSError as exc:
            raise process.SpawnError(f"its arguments cannot be written: {exc.strerror}") from exc
        pipes = self._leader.start(argv, env, cwd, ruleset)
        points.at("program-started")
        if pipes is not None:
            self._streams.attach(pipes, program.gives_result)
            if program.gives_result:
                with contextlib.suppress(OSError):  # then it is made later, where a full disk is waited out
                    self._slot.output.prepare()

    @property
    def trouble(self) -> str:
        """Why the program was not begun, although its leader was; empty if it was."""
        return self._leader.trouble

    def hold(self) -> None:
        """Let `program` be the one that is to be started, and nothing of it be there."""
        self.phase, self.status = RUNNING, None
        self.kill_at = self.vouched_until = math.inf

    def adopt(self, streams: dict[str, Any], lost: str, now: float) -> bool:
        """Go on with `program`, which an earlier worker has started and which may have ended since.

        `streams`: how far its output was taken; `lost`: why that is not there any more.  Return False if it never
        began.
        """
        shelter = self._slot.shelter
        assert shelter is not None
        if not self._leader.find():
            return False
        self._streams.attach(shelter.pipes, self.program.gives_result)
        self._streams.resume(streams)
        self._streams.fault = self._streams.fault or lost
        if self.phase == ENDING:
            self.kill_at, self.vouched_until = now, now + _KILL_PATIENCE
        self._leader.watch()
        return True

    def give(self, grace: float, now: float) -> None:
        """Let the program have `grace` seconds to end, from when it is told to; a time that runs is made no longer."""
        self.phase = ENDING
        self.kill_at = min(self.kill_at, now + grace)
        self.vouched_until = self.kill_at + _KILL_PATIENCE

    def terminate(self) -> None:
        """Tell it to end."""
        process.terminate(self._family.members())

    def excuse(self, seconds: float) -> None:
        """Charge nobody for `seconds` in which the worker itself did not run."""
        self.kill_at += seconds
        self.vouched_until += seconds

    def tick(self, now: float) -> None:
        """Kill what did not end in its time."""
        if self.phase in (ENDING, SWEEPING) and now >= self.kill_at:
            self._family.kill()
            self.kill_at = now + _KILL_AGAIN  # a process may have been forked while we looked
            self.look(now)

    def on_exits(self, ended: Mapping[int, int], now: float) -> None:
        """Note which of our children have ended."""
        if self.phase in (RUNNING, ENDING):
            self._leader.reaped(ended)
        else:
            self.look(now)

    def look(self, now: float) -> None:
        """See whether what the program left behind is gone."""
        if self.phase == SWEEPING and not self._family.left():
            self._gone(now)

    def finish(self) -> None:
        """Let no other program follow."""
        self.phase = OVER
        self._leader.forget()

    def _on_exit(self, status: int | None) -> None:
        """Note the end of the program's leader."""
        points.at("program-ended")
        if status and status != TEMPORARY and self.phase == RUNNING:
            self.fault = self._family.memory_fault(self.kills_before, status)
        self.status = -signal.SIGKILL if status is None and self.phase == ENDING else status  # we did it
        self.phase = SWEEPING
        self._sweep(self._events.now)

    def _sweep(self, now: float) -> None:
        left = self._family.left()
        if not left:
            self._gone(now)
            return
        names = ", ".join(map(str, left[:8]))
        self._say("leftovers", f"ended and left processes behind; ending them: {names}", NOTICE)
        self.kill_at = now + _LEFTOVER_GRACE
        self.vouched_until = self.kill_at + _KILL_PATIENCE
        process.terminate(left)
