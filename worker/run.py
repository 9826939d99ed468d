"""The run: next step, attempt, commit, checkpoint, until nothing is left.

One thread, one loop.  Each turn settles the attempts that are over, asks `decide` what follows, writes
ends and new claims in one durable transaction, starts what was claimed, and waits for events.
"""

import contextlib
import functools
import json
import math
from typing import Any

from worker import __version__, atlimit, clock, control, decide, folder, fromcopy, points, process
from worker import board as boards
from worker.attempt import Attempt
from worker.board import Board
from worker.crew import Ended
from worker.disk import Stopped
from worker.errors import OK, STEP_FAILED, WORK_LEFT, AgentError
from worker.errors import OUT_OF_BUDGET as BUDGET_SPENT
from worker.events import Signals
from worker.files import as_text
from worker.fromcopy import only_a_person_knows
from worker.ledger import DONE, Claim, Ending
from worker.orders import EXIT_GRACE, LEFT, OUT_OF_BUDGET, STOP_GRACE, STOPPED, Orders
from worker.plan import Plan
from worker.workshop import Workshop

# Where other workers were quicker, so many times in a row others are claimed before we look at what they have done.
_CLAIM_TRIES = 3


class Run:
    """One worker's work on one run.  The caller holds the state folder's lock."""

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._list = shop.list
        self._places = shop.places
        self._notifier = shop.notifier
        self._running = shop.running
        self._watchdog = shop.watchdog
        self._orders = shop.orders
        self._ledger = shop.ledger
        self._results = shop.results
        self._crew = shop.crew
        self._meter = shop.meter
        self._outcomes = shop.outcomes
        self._companions = shop.companions
        self._persist = shop.persist
        self._before = shop.before
        self._boot = shop.boot
        self._standing = shop.standing
        self._voice = shop.voice
        self._peers = shop.peers
        self._broker = shop.broker
        self._succession = shop.succession
        self._guard = shop.guard
        self._limit = atlimit.AtLimit()
        self._pause = shop.pause
        shop.disk.stopping = self._gives_up

    def work(self) -> int:
        """Work until nothing is left or the worker is told to stop; return the exit status."""
        signals = Signals(self._shop.events, Orders.SIGNALS, self._orders.hear)
        server = control.Server(
            self._places.control, self._shop.events, self._snapshot, self._broker, self._shop.slots.is_ours
        )
        try:
            self._notifier.ready("reading what was done before")
            self._begin()
            self._shop.disk.look = self._mind_budget
            finished: str | None = None
            while finished is None:
                finished = LEFT if self._orders.leaving else self._turn()
                if finished is not None:
                    self._conclude(finished)
                    if self._goes_on(finished):
                        finished = None
                        self._companions.begin()
            if finished != LEFT:
                self._crew.close()
            return self._exit_status(finished)
        except Stopped:
            return self._give_up()
        except (AgentError, OSError):  # no other worker will be started
            if self._guard.moved:
                self._crew.kill()
            else:
                self._crew.close()
            raise
        finally:
            self._shop.errands.close()
            self._crew.leave()
            server.close()
            signals.close()
            self._peers.close()

    def _begin(self) -> None:
        """Take up what an earlier worker left."""
        found = self._standing.read()
        process.keep_descriptors()
        self._shop.allow_descriptors()
        process.become_subreaper()
        same_boot = self._persist(lambda: self._ledger.fact("boot")) == self._boot and not self._before.machine_died
        self._results.restore(thorough=not same_boot)
        self._meter.open(found.unclosed, self._before.ends, same_boot and not self._before.in_order)
        folder.forget_ended(self._places.root)
        facts = {
            "state": "running",
            "boot": self._boot,
            "version": __version__,
            "config": as_text(self._list.path),
            "home": as_text(self._places.root),
        }
        found = self._standing.enter(facts) or found
        unbegun, closing = self._succession.enter(found.unclosed)
        if self._orders.ending:  # told to meanwhile
            closing += self._succession.give_back(unbegun)
            unbegun = []
            self._orders.end(self._orders.ending)
        if self._succession.close(closing):
            self._companions.changed()
        self._broker.inherit(self._succession.claims())
        self._outcomes.effect("skipped", self._board.count(boards.DONE))
        self._voice.opening(found, self._before.ends.faults, self._shop.undivided)
        self._succession.know_again(found.gone)
        work_is_left = self._upcoming().finished is None
        if self._orders.ending or self._limit.reached:  # for the budget, or told to only just now
            self._succession.close(self._succession.give_back(unbegun))
        elif not self._orders.leaving:
            self._succession.begin(unbegun)
        if work_is_left and not self._orders.done:
            self._companions.begin()

    @property
    def _board(self) -> Board:
        return self._standing.board

    @property
    def _plan(self) -> Plan:
        return self._standing.plan

    # -- the loop

    def _turn(self) -> str | None:
        """Do everything that can be done now, then wait; return how the run ended, once it has."""
        if not self._guard.check(clock.monotonic()) and self._orders.ending != STOPPED:
            self._voice.state_lost(str(self._guard.fault))
            self._orders.end(STOPPED)
        if self._orders.reload:
            self._reload_config()
        self._meter.note()
        self._broker.work(clock.monotonic())
        self._shop.steward.park(self._broker.waiting())
        self._rest()
        self._hear_peers()
        self._learn()
        for attempt in [attempt for attempt in self._crew.over() if attempt.lost]:
            self._crew.dismiss(attempt)
            self._broker.ended(attempt.step.id)
            self._shop.read_all()
        endings = [self._settle(attempt) for attempt in self._crew.over()]
        upcoming = self._claimable()
        for _ in range(_CLAIM_TRIES):
            if not endings and not upcoming.start:
                break
            claims = [self._standing.claim(step, self._places.run, self._boot) for step in upcoming.start]
            if not self._commit(endings, claims, upcoming.most):
                break
            endings, upcoming = [], self._claimable()
        if self._orders.ending and upcoming.finished is None and not self._running:
            return self._orders.ending
        if upcoming.finished is not None and not self._running:
            done = upcoming.finished == "done" and not self._standing.unsettled
            return None if self._more_to_do() or self._others_differ() else "done" if done else "failed"
        if not self._crew.over():
            self._watchdog.wait(
                min(
                    upcoming.wake_at, self._companions.due_at(), self._broker.due_at(), self._look_at(),
                    self._guard.due_at(),
                )
            )  # fmt: skip
        self._companions.keep(clock.monotonic())
        return None

    def _rest(self) -> None:
        """Hold the steps at work if the agent is paused, and let them go on if it is not."""
        self._pause.apply(clock.monotonic())
        self._meter.rest(self._pause.rests)
        if self._pause.changed():
            self._voice.paused(self._pause.state)
            self._notifier.status(self._summary(), clock.monotonic())

    def _summary(self) -> str:
        """Return one line for `systemctl status`."""
        return self._voice.summary() if self._pause.state is None else f"{self._pause.state} · {self._voice.summary()}"

    def _snapshot(self) -> dict[str, Any]:
        """Return how the run stands, for the control socket."""
        return self._voice.snapshot() | {"paused": self._pause.describe()}

    def _upcoming(self) -> decide.Next:
        """Return what to do next: nothing new once the worker ends, or the budget is spent while work is left."""
        spent = self._meter.state().spent()
        if not spent:
            raised = self._limit.forget()
            if self._orders.ending == OUT_OF_BUDGET:
                self._orders.ending = None  # steps that were asked to end do so, and are begun again
                raised = True
            if raised:
                self._voice.budget_raised()
        if self._orders.ending == STOPPED:
            return decide.Next([])
        upcoming = self._decide()
        if upcoming.start and not spent and self._meter.ask():
            spent = self._meter.state().spent()
        if self._pause.state is not None and upcoming.finished is None and not spent:
            return decide.Next([])
        if upcoming.finished is not None or not spent:
            return upcoming
        return decide.Next([], wake_at=self._at_limit(spent))

    def _mind_budget(self) -> None:
        """End the steps once the budget is spent, also while the loop waits for the ledger."""
        spent = self._meter.state().spent()
        if spent and not self._orders.done and self._decide().finished is None:
            self._at_limit(spent)

    def _at_limit(self, spent: str) -> float:
        """Let no step begin; end those at work once their time is over.  Return when that is (monotonic clock)."""
        policy, now, at_work = self._list.settings.at_limit, clock.monotonic(), self._crew.at_work()
        if self._limit.reach(now) and at_work and not self._orders.ending:
            self._voice.budget_reached(spent, atlimit.terms(policy))
        ends_at = self._limit.ends_at(policy)
        if not self._orders.ending and (not at_work or now >= ends_at):
            self._voice.budget_spent(spent, at_work)
            self._orders.end(OUT_OF_BUDGET)
        return math.inf if self._orders.ending else ends_at

    def _decide(self) -> decide.Next:
        settings = self._list.settings
        stop_for = [boards.FAILED] if settings.on_failure == "stop" else []
        stop_for += [boards.UNKNOWN] if settings.on_unknown == "stop" else []
        # Taken off the list meanwhile.
        strangers = sum(step not in self._plan.by_id and not a.over for step, a in self._running.items())
        slots = settings.concurrency - strangers
        in_turn = settings.concurrency == 1
        return decide.next_steps(self._board, slots, clock.monotonic(), stop_for, self._peers.spare, in_turn)

    def _settle(self, attempt: Attempt) -> Ended:
        step = self._plan.by_id.get(attempt.step.id, attempt.step)
        ended = self._crew.judge(attempt, self._board.progress(step.id), step.task)
        self._standing.mark(ended.ending, attempt.definition)
        if ended.ending.outcome != DONE:
            self._shop.savings.take(step.id)
        return ended

    def _commit(self, ended: list[Ended], claims: list[Claim], most: int) -> bool:
        """Make ends and claims durable in one transaction; then start what was claimed.

        Return whether to claim others at once, since other workers have taken these.
        """
        endings = [entry.ending for entry in ended]
        recorded = self._persist(lambda: self._ledger.record(endings, claims, most))
        self._meter.closed([ending for ending in endings if ending.step not in recorded.lost])
        for entry in ended:
            self._crew.dismiss(entry.attempt, entry.ending.outcome == DONE)
            self._broker.ended(entry.ending.step)
            points.at("attempt-dismissed")
        for attempt, verdict, ending, found, again in ended:
            if ending.step in recorded.lost:
                self._discard(ending)
                continue
            self._outcomes.step(verdict.outcome, found, again)
            self._voice.ended(ending.step, ending.number, verdict, clock.monotonic() - attempt.started)
        if ended or not all(claim.harmless for claim in recorded.claims):
            self._companions.changed()
            self._companions.keep(clock.monotonic())
        again = self._peers.claimed(claims, most, recorded)
        if self._orders.ending or self._limit.reached:  # told to while the ledger was asked
            self._give_back(recorded.claims)
            return False
        self._start(recorded.claims)
        self._notifier.status(self._summary(), clock.monotonic())
        return again

    def _claimable(self) -> decide.Next:
        """Return what to do next; steps that may have happened since a copy was made are unknown by then."""
        while True:
            upcoming = self._upcoming()
            unknown = [step for step in upcoming.start if only_a_person_knows(step, self._board)]
            if not unknown:
                return upcoming
            for ending, verdict in self._standing.give_up(unknown, self._places.run, self._boot):
                self._outcomes.step(verdict.outcome, False, False)
                self._voice.ended(ending.step, ending.number, verdict)
            self._companions.changed()

    def _start(self, claims: list[Claim]) -> None:
        """Begin the attempts that were claimed, until the worker is to end."""
        for place, claim in enumerate(claims):
            if self._orders.ending or self._limit.reached:  # told to while the one before was being prepared
                self._give_back(claims[place:])
                break
            step, number = claim.step, claim.number
            self._board.set(step, boards.RUNNING)
            if number > 1:
                self._voice.key_kept(claim)
            announce = functools.partial(self._voice.started, step, number)
            if not self._crew.start(claim, self._plan.by_id[step], self._board.progress(step), announce):
                self._board.set(step, boards.ELSEWHERE)
                self._voice.late(step, number)
            elif self._orders.ending:
                self._orders.interrupt(self._running[step])

    def _give_back(self, claims: list[Claim]) -> None:
        """Close attempts that were claimed and not begun."""
        stopped = self._orders.ending not in (None, OUT_OF_BUDGET)
        why = "the worker was stopped" if stopped else "the budget was spent"
        self._standing.give_back(claims, f"{why} before it began")

    # -- other workers of the run

    def _hear_peers(self) -> None:
        """Take in what other workers have done, and take over what they have left."""
        if clock.monotonic() >= self._look_at():
            orphans = self._peers.hear(self._on_awaited)
            self._broker.look_again()
            self._meter.hear()
            if self._succession.close(orphans):
                self._companions.changed()

    def _look_at(self) -> float:
        return self._peers.due_at(idle=not self._running)

    def _on_awaited(self) -> None:
        self._outcomes.effect("awaited")
        self._companions.changed()

    def _others_differ(self) -> bool:
        """At the end of the list, look at the whole ledger: return whether others have left something to do."""
        if not self._ledger.shared:
            return False
        self._shop.read_all()
        return self._decide().finished is None

    def _discard(self, ending: Ending) -> None:
        """Forget what an attempt did whose claim was lost before its end could be recorded."""
        self._results.discard(ending.step)
        self._voice.lost(ending)
        self._shop.read_all()

    # -- another list

    def _learn(self) -> None:
        """Let the plan grow by the items of tasks whose file is made by now."""
        found = self._standing.learn(self._running)
        if found:
            self._succession.know_again(self._shop.read_all().gone)
            self._voice.learnt(found)
            self._persist(lambda: self._ledger.note(self._standing.totals()))
            self._companions.changed()

    def _more_to_do(self) -> bool:
        """At the end of the list, take in what was added to the configuration meanwhile."""
        if not self._list.changed() and self._plan.lacks is None:
            return False
        self._reload_config()
        return self._decide().finished is None

    def _reload_config(self) -> None:
        """Read the configuration again; one that is wrong changes nothing."""
        self._orders.reload = False
        self._notifier.reloading()
        steps = self._list.read_again(self._standing.enlist)
        if steps is not None:
            self._shop.allow_descriptors()
            self._standing.take(steps)
            self._meter.limits = self._list.settings.budget
            found = self._shop.read_all()
            self._succession.know_again(found.gone)
            facts = {"state": "running", **self._standing.totals()}
            self._persist(lambda: self._ledger.note(facts))
            self._voice.reloaded(found)
        self._notifier.ready(self._summary())

    # -- the end

    def _goes_on(self, finished: str) -> bool:
        """Take in what has come while the end was made known: work that was dropped in, or a larger budget."""
        if finished == OUT_OF_BUDGET and not self._meter.state().spent():
            self._persist(lambda: self._ledger.note({"state": "running"}))
            return True
        return finished not in (STOPPED, LEFT, OUT_OF_BUDGET) and self._more_to_do()

    def _gives_up(self) -> bool:
        """Return whether not to wait for the ledger any longer: for the budget alone nothing done or paid is lost."""
        if self._orders.leaving or self._orders.ending != OUT_OF_BUDGET:
            return self._orders.done
        return not (self._crew.at_stake() or self._broker.committing or self._meter.owes())

    def _give_up(self) -> int:
        """End although nothing can be written; the steps have their time to end, unless they outlive us."""
        until = clock.monotonic() + STOP_GRACE
        while not self._orders.leaving and clock.monotonic() < until and self._crew.at_work():
            self._watchdog.wait(until)
        finished = LEFT if self._orders.leaving else self._orders.ending or STOPPED
        if finished == OUT_OF_BUDGET:
            self._voice.unrecorded()
        self._conclude(finished)
        if not self._orders.leaving:
            self._crew.close()
        return self._exit_status(finished)

    def _conclude(self, finished: str) -> None:
        """Write down how the run stands, and say so."""
        if self._guard.fault is not None:
            self._companions.changed()  # checkpoint.json is what is left of the ledger
        if finished not in (STOPPED, LEFT):
            with contextlib.suppress(Stopped):
                facts = {"state": finished, "outcomes": json.dumps(self._outcomes.counts), **self._standing.totals()}
                if finished == "done":
                    facts |= fromcopy.LIFTED
                self._persist(lambda: self._ledger.note(facts))
            self._companions.changed()
        self._voice.closing(finished)
        self._companions.conclude(finished)
        self._meter.settle()

    def _exit_status(self, finished: str) -> int:
        self._notifier.stopping(self._summary(), EXIT_GRACE)
        if self._guard.fault is not None:
            raise self._guard.fault
        if finished not in (STOPPED, LEFT) and self._list.next_run is not None:
            self._voice.next_run(self._list.next_run, finished)
            if finished == "done":
                return WORK_LEFT
        return {"done": OK, "failed": STEP_FAILED, OUT_OF_BUDGET: BUDGET_SPENT}.get(finished, WORK_LEFT)
