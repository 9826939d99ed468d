"""The standing of a run: its plan, the board, and how each claim, ending and reading of the ledger changes it."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from worker import begun, clock, decide, foreach, fromcopy, late, ledger, shared_plan, status
from worker import board as boards
from worker.begun import Unlisted
from worker.board import Board, Replay
from worker.decide import Verdict
from worker.errors import ConfigError
from worker.fromcopy import Doubt
from worker.ledger import Claim, Ending, Ledger, Row
from worker.plan import Plan, Step

# So many tasks that are defined otherwise than when they were done are named one by one.
_TASKS_NAMED = 20


# So long a file that is not here is left to the machine that has made it; seconds.
_MADE_ELSEWHERE = 120.0


class Learnt(NamedTuple):
    """A task whose items were to be read: what stands in the way of that, if anything does."""

    task: str
    problem: str = ""


class Standing:
    """What is known of every step; `read` takes it from the ledger, the other methods keep it up to date."""

    def __init__(
        self,
        plan: Plan,
        store: Ledger,
        persist: Callable[[Callable[[], Any]], Any],
        asks: Callable[[], bool] = lambda: True,
    ) -> None:
        """`persist` repeats what the ledger cannot do yet.  `asks`: after a copy a person is asked where nobody else
        knows.
        """
        self.plan = plan
        self.doubt: Doubt | None = None  # in which the run is, since its ledger came from a copy
        self._asks = asks
        self.board = Board(plan)
        self._ledger = store
        self._persist = persist
        self.unlisted: dict[str, Unlisted] = {}  # steps whose task a person has taken out while they were not done
        self._succeeded: set[str] = set()  # steps that are not in the plan, and for whose key another one is
        self._unreadable: set[str] = set()  # tasks whose items cannot be known
        self._awaited: dict[str, float] = {}  # since when another machine is to read a task's items (monotonic clock)
        self._claimed: dict[str, str] = {}  # the keys of the attempts that we have claimed
        self._counted_from = 0
        self._done_left = 0  # done steps that are not in the plan

    def totals(self) -> dict[str, str]:
        """Return the facts by which the rows can be counted when the list cannot be read."""
        left = json.dumps(sorted(self.unlisted))
        return {"total": str(self.board.total), "done_left": str(self._done_left), begun.LEFT: left}

    def enter(self, facts: Mapping[str, str]) -> Replay | None:
        """Note that a worker is at it, with these facts about it.

        Return what the ledger says now if that is not what was read before.
        """
        facts = {**facts, **self.totals()}
        failed = self._persist(lambda: self._ledger.fact("state")) == "failed"
        if failed:
            # The run had come to its end; whoever starts it again wants the failed steps tried again.
            seqs = self._persist(lambda: [row.seq for row in self._ledger.rows()])
            facts["counted_from"] = str(max(seqs, default=0))
        self._persist(lambda: self._ledger.note(facts))
        return self.read() if failed else None

    def read(self, running: Iterable[str] = ()) -> Replay:
        """Bring the board up to date with the whole ledger; what runs here (`running`) goes on.

        The plan has all the steps then that were begun, are not done, and have their task in the list.
        """
        if self.plan.late:
            self.plan = late.known(self.plan, self._persist(self._ledger.items))
        self.plan = begun.without_misfits(self.plan)
        found: Replay = self._persist(self._replay)
        kept = begun.keep(self.plan, found.left)
        if kept is not self.plan:
            self.plan = kept
            found = self._persist(self._replay)
        self.board = found.board
        here = set(running)
        self._succeeded = begun.succeeded(self.plan, found.left)
        others = {row.step for row in found.left if row.outcome is None and row.worker != self._ledger.worker}
        self.unlisted = {entry.step: entry for entry in begun.unlisted(self.plan, found.left, here | others)}
        self._done_left = sum(row.outcome == ledger.DONE for row in found.gone)
        for task in self._unreadable & self.plan.late:
            self.board.set(f"{task}@", boards.FAILED)
        for step in here:
            if step in self.plan.by_id:
                self.board.set(step, boards.RUNNING)
        self.hold_misfits()
        return found

    @property
    def unsettled(self) -> bool:
        """Whether a step that is no longer in the list may have happened, and nobody has settled it."""
        return any(entry.doubt for entry in self.unlisted.values())

    def hold_misfits(self) -> None:
        """Let no step wait for another attempt whose task can do it no more; see worker/begun.py."""
        for step in self.plan.kept:
            if self.board.state(step) == boards.WAITING and begun.misfit(self.plan.by_id[step]):
                self.board.set(step, boards.UNKNOWN if self.board.progress(step).unsure else boards.FAILED)

    def take(self, plan: Plan) -> None:
        """Let this be the plan; `read` brings the board up to date with it."""
        self.plan = plan
        self._unreadable = set()

    def enlist(self, plan: Plan) -> Plan:
        """Let the ledger know a plan, and return the one to work on.  Raises as Ledger.enlist does."""
        listed: Plan = self._persist(lambda: shared_plan.enlist(plan, self._ledger))
        return listed

    def learn(self, running: Iterable[str]) -> list[Learnt]:
        """Read the items of those tasks whose file is made by now, durably; return what came of it.

        The plan has their steps when this returns, and the ledger knows them; `read` brings the board up to date.
        """
        found: list[Learnt] = []
        due = self.board.due()
        if not due:
            return found
        items: dict[str, list[str]] = self._persist(self._ledger.items)
        for name in due:
            entry = self.plan.tasks[name]
            try:
                if late.key(entry) in items:
                    self.plan = late.known(self.plan, {late.key(entry): items[late.key(entry)]})
                elif self._made_elsewhere(name):
                    self._leave_to_others(name, running)
                    continue
                else:
                    texts, self.plan = late.read(self.plan, name)
                    if late.stay(entry, self._ledger.shared):
                        self._persist(functools.partial(self._ledger.add_items, late.key(entry), texts))
            except ConfigError as exc:
                self.plan = late.without(self.plan, name)
                self._unreadable.add(name)
                found.append(Learnt(name, str(exc)))
            else:
                found.append(Learnt(name))
        if found:
            self.plan = self.enlist(self.plan)
        return found

    def _leave_to_others(self, name: str, running: Iterable[str]) -> None:
        """Let the items of a task be those that another machine reads."""
        if f"{name}@" not in self.plan.by_id:  # its file was here before
            self.plan = late.without(self.plan, name)
            self.read(running)
        self.board.set(f"{name}@", boards.ELSEWHERE)

    def _made_elsewhere(self, name: str) -> bool:
        """Return whether to wait for another machine of the run to read what is not here."""
        if not self._ledger.shared or foreach.is_there(self.plan.tasks[name]):
            return False
        since = self._awaited.setdefault(name, clock.monotonic())
        return clock.monotonic() - since < _MADE_ELSEWHERE

    def changed(self, steps: Sequence[str]) -> Iterator[str]:
        """Yield a line for each task some of whose done steps, `steps`, are defined otherwise now: each once.

        When all have been taken, it is durable that they were.
        """
        found = {task: (count, digest) for task, count, digest in self._by_task(steps)}
        told: dict[str, str] = json.loads(self._persist(lambda: self._ledger.fact("changed_told")) or "{}")
        now = {task: digest for task, (_count, digest) in found.items()}
        if len(now) > _TASKS_NAMED:
            first, steps_of_all = next(iter(now)), len(steps)
            now = {"*": hashlib.blake2b("".join(now.values()).encode(), digest_size=8).hexdigest()}
            if told != now:
                yield status.changed_line(first, steps_of_all, len(found))
        else:
            for task, digest in now.items():
                if told.get(task) != digest:
                    yield status.changed_line(task, found[task][0], 1)
        if told != now:
            self._persist(lambda: self._ledger.note({"changed_told": json.dumps(now)}))

    def _by_task(self, steps: Sequence[str]) -> Iterator[tuple[str, int, str]]:
        """Yield the tasks of these steps, with how many of them each has, and a digest of what those are now."""
        known: dict[str, list[str]] = {}
        for step in steps:
            entry = self.plan.by_id[step]
            known.setdefault(entry.task.id, []).append(f"{step} {self.plan.digest(entry)}")
        for task, texts in known.items():
            yield task, len(texts), hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()

    def claim(self, step: Step, run: str, boot: str) -> Claim:
        """Return the claim of the next attempt at `step`: under the key of the last one if that was cut off.

        What that one did outside is known by its key alone, whatever the list says by now.
        """
        past = self.board.progress(step.id)
        key = step.key(run) if step.task.key is not None else ""
        if past.unsure and past.key is not None:
            key = past.key
        self._claimed[step.id] = key
        return Claim(
            step=step.id,
            number=past.number + 1,
            definition=self.plan.digest(step),
            started=clock.wall(),
            boot=boot,
            key=key,
            harmless=step.task.redo == "always",
            item=step.item,
        )

    def give_up(self, steps: Iterable[Step], run: str, boot: str) -> list[tuple[Ending, Verdict]]:
        """Record that nobody but a person knows whether these have happened; return what was recorded."""
        assert self.doubt is not None
        verdict = Verdict(
            ledger.UNKNOWN, fromcopy.cause(self.doubt), counted=False, final=False, delay=0.0, unsure=True
        )
        claims = [self.claim(step, run, boot) for step in steps]
        granted: list[Claim] = self._persist(lambda: self._ledger.record([], claims)).claims
        now = clock.wall()
        endings = [decide.ending(claim.step, claim.number, verdict, None, now) for claim in granted]
        lost = self._persist(lambda: self._ledger.record(endings, [], 0)).lost
        self.pass_over({claim.step for claim in claims} - {claim.step for claim in granted} | set(lost))
        kept = [(ending, claim) for ending, claim in zip(endings, granted, strict=True) if ending.step not in lost]
        for ending, claim in kept:
            self.mark(ending, claim.definition)
        return [(ending, verdict) for ending, _claim in kept]

    def doubts_effect(self, key: str) -> Literal["no", "look", "ask"]:
        """Return whether an effect that the ledger does not know may have happened since a copy was made.

        Then who has a look-up looks; who has none is to "ask" a person, if the list wants that.
        """
        if self.doubt is None or self._persist(lambda: fromcopy.is_settled(self._ledger, key)):
            return "no"
        return "ask" if self._asks() else "look"

    def give_back(self, claims: Sequence[Claim], cause: str) -> None:
        """Close attempts that were claimed and not begun.

        What had been cut off before them is as doubtful as it was, and their numbers are used up: a run whose budget
        is raised meanwhile goes on.
        """
        now, known = clock.wall(), self.board.progress
        endings = [
            Ending(c.step, c.number, ledger.INTERRUPTED, False, False, cause, None, now, unsure=known(c.step).unsure)
            for c in claims
        ]
        lost = self._persist(lambda: self._ledger.record(endings, [], 0)).lost if endings else []
        for ending, claim in zip(endings, claims, strict=True):
            if ending.step in lost:
                self.board.set(ending.step, boards.ELSEWHERE)
            else:
                self.mark(ending, claim.definition)

    def mark(self, ending: Ending, definition: str) -> None:
        """Bring the board up to date with the end of an attempt at what `definition` stood for."""
        step = ending.step
        claimed = self._claimed.pop(step, None)
        if step not in self.plan.by_id:  # taken off the list while it ran
            self.unlisted.pop(step, None)
            if ending.outcome == ledger.DONE:
                self._done_left += 1
            elif step not in self._succeeded:
                self.unlisted[step] = begun.of_ending(ending)
            return
        if ending.outcome == ledger.DONE:
            self.board.set(step, boards.DONE)
            return
        mended = definition != self.plan.digest(self.plan.by_id[step])
        before = self.board.progress(step)
        spent = boards.charged(before, ending.took) + ending.delay
        if mended:  # all its attempts anew
            known = boards.Progress(number=ending.number, unsure=ending.unsure)
        else:
            known = boards.advance(before, ending.outcome, ending.counted, spent, ending.progress)
            retry_at = clock.monotonic() + ending.delay
            known = known._replace(number=ending.number, retry_at=retry_at, unsure=ending.unsure)
        key = (before.key if claimed is None else claimed) if ending.unsure else None
        known = known._replace(begun=before.begun or boards.has_begun(ending), key=key)
        self.board.set_progress(step, known)
        if ending.outcome == ledger.UNKNOWN:
            self.board.set(step, boards.UNKNOWN)
        else:
            self.board.set(step, boards.FAILED if ending.final and not mended else boards.WAITING)
            self.hold_misfits()

    def pass_over(self, steps: Iterable[str]) -> None:
        """Note that others are at these steps, or have done them; the news will say which, and how it went."""
        for step in steps:
            if self.board.state(step) == boards.WAITING:
                self.board.set(step, boards.ELSEWHERE)

    def hear(self, row: Row) -> bool:
        """Take in what another worker has begun or ended; return whether a step of ours is done by that."""
        step, state = self.plan.by_id.get(row.step), self.board.state(row.step)
        if step is None or state in (boards.DONE, boards.RUNNING):
            return False
        known = self.board.progress(row.step).number
        old = row.number < known or (row.number == known and state != boards.ELSEWHERE)
        if old and row.outcome != ledger.DONE:  # what a look at everything has told us already
            return False
        if row.outcome == ledger.DONE:
            self.board.set(row.step, boards.DONE)
            return True
        digest = self.plan.digest(step)
        boards.take(self.board, step, row, digest, self._counted_from, clock.now(), self._ledger.worker)
        return False

    def _replay(self) -> Replay:
        self._counted_from = int(self._ledger.fact("counted_from") or 0)
        self.doubt, tried = fromcopy.read(self._ledger), set[str]()
        rows = fromcopy.watch(self._ledger.rows(), self.doubt, tried)
        found = boards.replay(self.plan, rows, self._counted_from, clock.now(), self._ledger.worker)
        if self.doubt is not None:
            fromcopy.spread(found.board, self.plan, tried, self._asks())
        return found
