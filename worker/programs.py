"""The programs of an attempt, one after the other, and what their exit statuses say of the step's effect.

check (where an earlier attempt may have had it) ─► before ─► the step's own ─► expect ─► after
"""

from typing import Any, NamedTuple

from worker import doubt
from worker.decide import Effect
from worker.errors import FAULT, TEMPORARY
from worker.plan import Step

_OF_HTTP = {doubt.FAILED: FAULT, doubt.REFUSED: FAULT, doubt.NOT_NOW: TEMPORARY, doubt.NO_HOST: TEMPORARY}

CHECK = "check"  # finds out whether an attempt that was cut off had its effect


class Program(NamedTuple):
    """One of them; `name` is empty for the step's own."""

    name: str
    argv: list[str]
    ours: bool = False  # it ends with a line in the log that says why it has failed

    @property
    def own(self) -> bool:
        return not self.name

    @property
    def gives_result(self) -> bool:
        """Whether its standard output may be the step's result; that of the others belongs to the log."""
        return self.own or self.name == CHECK

    def said(self, text: str) -> str:
        """Return what is to be said of it; of the step's own there is no need to say which one it is."""
        return f"{self.name}: {text}" if self.name else text


class Programs:
    """Those still to come, and `effect`: what is known of the step's own."""

    def __init__(self, step: Step, output: str, ask_first: bool) -> None:
        """`output` is where the result can be looked at; `ask_first`: an earlier attempt was cut off."""
        self._task = step.task
        self.effect: Effect = "none"
        self.found = False  # the check said that it had happened
        self.hopeless = False  # what it waits for does not exist
        self.accepted = 0  # the step's own exit status, if the list takes it for done and it is not 0
        self._left = _programs(step, output, ask_first)

    @property
    def left(self) -> bool:
        return bool(self._left)

    def memo(self) -> list[Any]:
        """Return what `resume` needs."""
        return [self.effect, self.found, len(self._left), self.accepted]

    def resume(self, memo: list[Any]) -> Program:
        """Return the program that runs, according to another worker's `memo`; those behind it are still to come.

        Raises ValueError if the memo is of other programs, or none had begun.
        """
        self.effect, self.found, left, *more = memo
        self.accepted = int(more[0]) if more else 0
        if self.found:
            self._skip_own()
        place = len(self._left) - int(left)
        if not 0 < place <= len(self._left):
            raise ValueError("its programs are others by now")
        program, self._left = self._left[place - 1], self._left[place:]
        return program

    def next(self) -> Program:
        """Return the next one, which is to be started now."""
        return self._left.pop(0)

    def started(self, program: Program) -> None:
        if program.own:
            self.effect = "open"

    def not_started(self, program: Program) -> None:
        if program.own:
            self.effect = "none"

    def plain(self, program: Program, status: int | None) -> int | None:
        """Return what the list takes an exit status for: 0 for one that means "done"; of our own programs, 1 and 75."""
        if not program.own or status is None:
            return status
        if self._task.http is not None:
            return _OF_HTTP.get(status, status)
        return 0 if status in self._task.retry.success else status

    def ended(
        self, program: Program, status: int | None, by_itself: bool, fault: str | None
    ) -> tuple[Program | None, str]:
        """Note an exit status as it is, which is the program's own word if nobody made it end (`by_itself`).

        `fault`: what was expected of it and is not so.  Return the one to start now, or None and why no other one
        follows, where there is more to say than the status does.
        """
        raw, status = status, self.plain(program, status)
        if program.own and raw and status and (raw == TEMPORARY or (raw > 0 and by_itself)):
            self.effect = self._word(raw)
            self.hopeless = self._task.http is not None and raw == doubt.NO_HOST
        elif program.own and raw and status == 0 and by_itself:
            self.accepted = raw
        elif program.name == CHECK and status == 0 and by_itself:
            self.found = True
            self._skip_own()
        if program.name == CHECK and status == 1 and by_itself:  # it had not happened
            return self.next(), ""
        if status == 0 and by_itself:
            if fault:
                return None, f"exited with status {raw}, but {fault}"
            return (self.next() if self._left else None), ""
        if program.own or not status:
            return None, ""
        return None, program.said(f"ended with status {status}" if status > 0 else f"ended with signal {-status}")

    def _word(self, status: int) -> Effect:
        """Return what the exit status of the step's own program, which is not its success, says of the effect."""
        if self._task.http is not None:
            return "refused" if status in (TEMPORARY, doubt.REFUSED, doubt.NO_HOST) else "open"
        if doubt.of_status(status, self._task.retry.unsure) or (self._task.python and status == doubt.FAILED):
            return "open"
        return "refused" if status == TEMPORARY else "failed"

    def _skip_own(self) -> None:
        self._left = [other for other in self._left if other.name not in ("before", "")]


def _programs(step: Step, output: str, ask_first: bool) -> list[Program]:
    task = step.task
    programs = [Program(CHECK, step.command(task.check))] if task.check and ask_first else []
    if task.before:
        programs.append(Program("before", step.command(task.before)))
    programs.append(Program("", step.argv(), ours=task.run is None))
    if task.expect and task.expect.matches:
        programs.append(Program("expect", step.matches(output), ours=True))
    if task.expect and task.expect.run:
        programs.append(Program("expect", step.command(task.expect.run)))
    if task.after:
        programs.append(Program("after", step.command(task.after)))
    return programs
