"""
``JournaledRun``: one run tree with its journal: recording it, resuming it, replaying it.

An engine asks it for the plan, the state and the services that the run is started with; everything else happens behind the
performer. The driver, the machine and the adapters know nothing of it.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from stepengine.data.effects import RUNS, Spawn
from stepengine.data.json import JsonValue
from stepengine.data.limits import Limits
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Outcome, Stop, Value
from stepengine.data.questions import AnswerLike
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.waiting import Waits
from stepengine.errors import JournalError, StepEngineError, UnknownModel
from stepengine.journal.encoding import bare, too_long, without_secret
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import (
    STABLE_CREATED,
    ChosenModels,
    History,
    Opening,
    created_of,
    new_head,
    opening_of,
    root_form,
    stop_of,
)
from stepengine.journal.modes import Adding, Extending, Forking, Mode, Recording, Replaying, Resuming, Walking
from stepengine.journal.ordering import in_address_order
from stepengine.journal.provenance import is_own, record_own
from stepengine.journal.questions import InDoubt, check_answers, kept_answers, sorted_answers
from stepengine.journal.recorder import Recorder, lookups, recall_lookups
from stepengine.journal.records import ROOT, Address, Input, Intent, Record, Result, shown_address, to_text
from stepengine.journal.run_mailbox import RunMailbox
from stepengine.journal.store import Commits, Extension, Journal, MemoryJournal, Writer
from stepengine.journal.timing import Pace, Timing
from stepengine.machine.plan import Finished, RunPlan
from stepengine.redaction import left_out
from stepengine.runtime.performer import Item, Middleware, Performer, is_repeatable
from stepengine.runtime.prices import Prices
from stepengine.runtime.services import ChildPlanner, Level, MachineMaker, ModelRegistry, Services
from stepengine.workspace.writes import FileWrite

if TYPE_CHECKING:
    from decimal import Decimal

    from stepengine.data.usage import Usage
    from stepengine.journal.replayer import Leeway, RecordedPart, Replayer
    from stepengine.journal.sleeping import Bed

__all__ = ("JournaledRun",)

LISTED_EFFECTS = 10
"""Enough to see which effects they are; further ones are only counted."""
Around: TypeAlias = "Callable[[Performer, Callable[[str, Usage], Decimal | None]], Performer]"
"""Wraps a performer, given a function that returns the cost of a usage."""


class JournaledRun:
    """
    One run tree and its journal. Made by ``record``, ``resume``, ``replay``, ``walk``, ``rerecord``, ``new`` and ``fork``.

    Attributes:
        mode: What is done with the journal.
        source: The journal that was given.
        journal: The journal that the run's result names: the one that is written, or for a replay the one that it makes.
        opening: What the run was started with; ``None`` for a new one.
        answers: The answers that the run is given, by question id or text.
        decisions: Answers to questions about effects that are in doubt.
        in_doubt: What becomes of an effect that may or may not have happened.
        past: What was recorded already; ``None`` for a new run.
        replayer: Answers from it.
        fatal: Why nothing goes on any more: a divergence, or a record that could not be written.
        warnings: What the result should mention.
        raises: Whether a divergence is raised to the caller of the run; by default it is in the result.
        is_traced: Whether somebody sees every outcome on its way to the machine.
        tells: Whether providers are told of the calls that the record answers; by default they know only of live ones.
        leftover: What of the record was not used by a run that may leave something.
        pace: How fast results of the record come; ``None`` for at once.
        timing: The run's own clock.
        machines: The machines of the tree, by path.
        decoders: What makes the output of a run of its JSON, by path, where that is of the author's own type.
        waits: Whether what was appended is lost without ``durable``.
        durable: See ``Commits``; calls of one tick share one commit. Where a commit never waits long, it is
            that commit.
        writes: What was written to files by calls whose results are not recorded yet.
        kept: What of the record serves although something else is asked for now.
        wakes_now: Whether recorded sleeps are over at once.
        mail: The mailbox messages of the run.
        writer: Writes the journal; ``None`` before the run starts.
        commits: Makes what was written durable.
        unwritten: Notes that are written with the next record.
    """

    def __init__(self, mode: Mode, journal: Journal, answers: Mapping[str, AnswerLike] | None = None) -> None:
        # Everything that any of the ways to open a run may need is declared here, and the class methods below fill in
        # what is theirs. They are no subclasses: what they do differently is asked of the mode, since with the ways in
        # here 31 places asked which of seven theirs was.
        self.mode = mode
        self.source = journal
        self.journal = journal
        self.opening: Opening | None = None
        self.answers, self.decisions = sorted_answers(answers)
        self.in_doubt: InDoubt = "fail"
        self.past: RecordedPart | None = None
        self.replayer: Replayer | None = None
        self.fatal: StepEngineError | None = None
        self.warnings: list[str] = []
        self.raises = False
        self.tells = False
        self.is_traced = False
        self.leftover: StepEngineError | None = None
        self.pace: Pace | None = None
        self.timing = Timing(stable=journal.stable)
        self.machines: dict[str, Any] = {}
        self.decoders: dict[str, Callable[[Any], Any]] = {}
        self.kept: list[Input] = []
        self.unwritten: list[Input] = []
        self.writer: Writer | None = None
        self._write: Callable[[Record], None] = _leave_out
        self.commits: Commits | None = None
        self._give_back: Callable[[], Any] | None = None
        self._models: ModelRegistry | None = None
        self._around: Around | None = None
        self._seed = ""
        self._is_own = False
        self.writes: dict[Address, list[FileWrite]] = {}
        self.waits = self.wakes_now = False
        self.mail = RunMailbox(self)

    @classmethod
    def record(
        cls, journal: Journal, answers: Mapping[str, AnswerLike] | None = None, *, seed: str = ""
    ) -> JournaledRun:
        """Return a new run, to be recorded; its seed is drawn unless one is given."""
        run = cls(Recording(), journal, answers)
        run._seed = seed
        return run

    @classmethod
    def resume(
        cls,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None = None,
        in_doubt: InDoubt = "fail",
        *,
        ahead: Mapping[str, AnswerLike] | None = None,
        keep: bool = False,
        now: bool = False,
        asks_again: bool = False,
    ) -> JournaledRun:
        """
        Return a recorded run that goes on; it owns the journal from now on, ``close`` gives it back.

        With *keep*, what was edited since does not end the run where the record has an effect of the same kind. Unlike
        *answers*, those given *ahead* need not fit an open question: they may be asked for later. With *now* recorded sleeps
        and timeouts are over at once. With *asks_again* nobody is believed who posted a permission.

        Raises:
            JournalMissing: when there is none; nothing is made.
            JournalError: when the journal cannot be used; see ``Journal.writer``.
            AnswerRejected: when an answer fits no open question; nothing is changed.
        """
        from stepengine.journal.replayer import Leeway

        run = cls(Resuming(), journal, answers)
        run.in_doubt = in_doubt
        # Asked before the writer is taken, since taking it makes the file: a misspelt name would leave an empty journal
        # behind.
        if not journal.is_there():
            raise journal.missing()
        writer = run._take(journal.writer())
        # From here on the journal is locked for this process, so whatever goes wrong must give it back: until the
        # process ends nobody else could go on with the run.
        try:
            run._is_own = is_own(journal)
            run._remember(writer.history, Leeway(keeps=keep))
            journal.check_goes_on(writer.history)
            # Before anything is changed: an answer that fits no question is a slip, such as of the run's id, and a run
            # that went on without it would ask again somewhere else.
            check_answers(writer.history, {**run.answers, **run.decisions})
            run.mail.collect(writer.history, asks_again=asks_again)
            run.wakes_now = now
            # The later ones win: those of this call over those that the record keeps, and both over those given
            # *ahead*, which were meant for whatever may still be asked.
            run.answers = {**kept_answers(writer.history), **run.answers}
            if keep:
                run._answer_by_ids(writer.history)
            run.answers = {**(ahead or {}), **run.answers}
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def replay(cls, journal: Journal, *, leeway: Leeway | None = None, pace: Pace | None = None) -> JournaledRun:
        """Return a recorded run that is repeated without performing anything; the journal is only read."""
        run = cls._again(Replaying(), journal, None, leeway)
        run.pace = pace
        return run

    @classmethod
    def walk(cls, journal: Journal, history: History, *, leeway: Leeway | None = None) -> JournaledRun:
        """Return a recorded run whose machines the caller drives; any number of them share one *history* of the journal."""
        # No writer and no lock: a debugger makes a walk for each place that somebody looks at, and all of them read one
        # history.
        run = cls(Walking(), journal)
        run._remember(history, leeway)
        return run

    @classmethod
    def rerecord(
        cls, journal: Journal, answers: Mapping[str, AnswerLike] | None = None, *, leeway: Leeway | None = None
    ) -> JournaledRun:
        """
        Return a recorded run that is repeated as far as it still holds, then goes live.

        The journal is replaced when the run has ended, and stays as it is when it fails. Effects that changed the world
        and do not hold any more end the run, unless they may be repeated.
        """
        return cls._again(Extending(), journal, answers, leeway)

    @classmethod
    def new(
        cls, journal: Journal, answers: Mapping[str, AnswerLike] | None = None, *, leeway: Leeway | None = None
    ) -> JournaledRun:
        """
        Return a recorded run that is repeated, and performs what is not recorded; what differs is an error.

        The journal is replaced when something came to it.
        """
        # A mode of its own beside resuming: this is for recordings in tests (`--stepengine-record=new`), which are kept
        # stable and in order. To resume goes on in the journal itself, behind what it holds, and an edited agent would
        # leave its old records in there; here all is repeated into a copy, which takes the old one's place at the end,
        # and only if something came.
        return cls._again(Adding(), journal, answers, leeway)

    @classmethod
    def fork(
        cls, journal: Journal, replayer: Callable[[JournaledRun, RecordedPart], Replayer], around: Around
    ) -> JournaledRun:
        """
        Return a recorded run that is repeated up to a place, and goes on from there; the journal is only read.

        Args:
            journal: The journal.
            replayer: Makes what says where that place is, and what answers after it.
            around: Wraps the performer of what is live, given the prices of models.
        """
        run = cls._again(Forking(), journal, None, None, around)
        assert run.past is not None  # noqa: S101 - it was read from the journal
        run.replayer = replayer(run, run.past)
        return run

    @classmethod
    def _again(
        cls,
        mode: Mode,
        journal: Journal,
        answers: Mapping[str, AnswerLike] | None,
        leeway: Leeway | None,
        around: Around | None = None,
    ) -> JournaledRun:
        run = cls(mode, journal, answers)
        run._around = around
        # Into a memory journal, so that the one that was given is only read: whatever goes wrong, the recording is as
        # it was. Redaction is off in the copy, since what it holds was cleaned when it was recorded, and would not be
        # byte-equal if it were cleaned twice.
        run._remember(journal.history(), leeway)
        copy = MemoryJournal(redact="off", link=journal.link, stable=journal.stable)
        run.journal = copy.with_rules_of(journal)
        run._take(copy.writer())
        return run

    def _take(self, writer: Writer) -> Writer:
        self.writer, self.commits = writer, Commits(writer)
        if self.mode.writes:
            self._write = writer.append
        self.waits = writer.waits
        # Where a commit blocks (a disk), it goes to a thread and results of one tick share it; where it does not, a
        # thread and a future would cost more than the commit.
        self.durable = self.commits.durable if writer.blocks else writer.commit
        # Called by `close`, too: while it waits, it keeps the writer alive, and with it every error and its frames.
        self._give_back = weakref.finalize(self, self.commits.close)
        if writer.repaired:
            self.warnings.append(
                f"{self.source.name}: {writer.repaired} bytes of a record that was cut off by a crash were removed"
            )
        return writer

    def _remember(self, history: History, leeway: Leeway | None) -> None:
        # Loaded for a run that has a past: a new one starts 4 ms earlier.
        from stepengine.journal.replayer import NO_LEEWAY, RecordedPart, Replayer

        self.past = RecordedPart(history, Fingerprints(self.source.redactor), leeway or NO_LEEWAY)
        self.replayer = Replayer(self, self.past)
        self.opening = opening_of(history)
        if self.mode.goes_on(history):
            self._tell_of_secrets(self.opening)

    def _tell_of_secrets(self, opening: Opening) -> None:
        """
        Warn of params that a journal kept without their secrets: what happens from now on is given placeholders.

        They are not put back: whoever wrote the journal would choose which of this process's secrets go where.
        """
        names = left_out(to_text(opening.params))
        if names:
            told = ", ".join(names)
            self.warnings.append(
                f"{self.source.name} does not keep the secrets that the params of this run held ({told}): what goes on is given "
                f"{f'<redacted:{names[0]}>'!r} in place of the value; give agents the name of a secret, and look up its value "
                "in the function or tool that needs it"
            )

    # --- for the engine -----------------------------------------------------------------------------------------------

    def start(
        self,
        plan: RunPlan,
        state: AgentState,
        *,
        limits: Limits | None = None,
        models: Mapping[str, str] | None = None,
        own_models: Mapping[str, str] | None = None,
        workspace: str = "",
    ) -> tuple[RunPlan, AgentState]:
        """
        Return the plan and the state that the root run is started with, and write down that it starts.

        Args:
            plan: As the engine made it; of a recorded run from ``opening``.
            state: With its system prompt resolved.
            limits: The limits that the caller gave.
            models: Models that the engine has in place of those that agents name, by agent id.
            own_models: Those that were chosen for this run alone.
            workspace: What the place is called that the engine's agents work in; ``""`` for a folder of this machine.

        Raises:
            JournalError: when the journal is locked, damaged, of a newer version, holds a run already or cannot be written, or its
                run works in another container, sandbox or machine.
            ReplayDivergence: when agent, prompt or params are not those that were recorded.
        """
        # Two kinds of failure, one rule: the journal is given back. What is ours is kept as the reason why nothing goes
        # on, so that a second look at the run says the same.
        try:
            if self.past is None:
                return self._start_new(plan, state, limits, (models or {}, own_models or {}), workspace)
            self._check_place(self.past.history, workspace)
            return self._start_again(self.past, plan, state, limits, (models or {}, own_models or {}))
        except StepEngineError as error:
            self.close()
            raise self.fail(error) from error.__cause__
        except BaseException:
            self.close()
            raise

    def _check_place(self, history: History, workspace: str) -> None:
        """
        Raise where what was begun in a container or sandbox would go on outside of it.

        Raises:
            JournalError: where it would.
        """
        recorded = "" if history.head is None else history.head.workspace
        if recorded and recorded != workspace and self.mode.goes_on(history):
            now = workspace or "a folder of this machine"
            msg = (
                f"{self.source.name} has a run that works in {recorded!r}, and would go on in {now}; "
                "Engine(workspace=...), or --workspace, with the place that it began in would be fine, or a fork"
            )
            raise JournalError(msg)

    def _start_new(
        self, plan: RunPlan, state: AgentState, limits: Limits | None, models: ChosenModels, workspace: str
    ) -> tuple[RunPlan, AgentState]:
        # Committed recordings: each of these would differ in every recording, and a diff of an agent's test would show
        # nothing but ids and times.
        if self.source.stable:
            self._seed = "0"
            plan = attrs.evolve(plan, run_id="run", created=STABLE_CREATED)
        else:
            self._seed = self._seed or secrets.token_hex(8)
            # Cut to milliseconds here, as the record does: a handler that asks `ctx.now()` must be told the same live
            # and on replay.
            created = plan.created
            plan = attrs.evolve(plan, created=created.replace(microsecond=created.microsecond // 1_000 * 1_000))
        plan, state = self._with_random(plan), attrs.evolve(state, run_id=plan.run_id)
        self.journal = self.source.bound(plan.run_id)
        writer = self.journal.writer()
        if writer.history.head is not None and len(self.journal.records()) == 1:
            # A crash left the head alone: no run has started.
            writer.close()
            self.journal.replace([])
            writer = self.journal.writer()
        self._take(writer)
        # Refused and not appended to: one file is one run. To record over one by a slip would destroy what may have
        # cost money.
        if writer.history.head is not None:
            msg = f"{self.journal.name} holds a run already; resume, replay or fork it, delete it first, or record into another journal"
            raise JournalError(msg)
        # Recordings of tests keep nothing that could be undone.
        self._is_own = not self.source.stable
        # What is committed is the same on every machine, and names of places have paths of this one.
        where = "" if self.source.stable else workspace
        head = new_head(plan, self._seed, link=self.journal.link, signed=self.journal.signed_by, workspace=where)
        self.append(head)
        # Recorded only where the engine chose it: a model that the agent names comes from its code, and a change of it
        # is to be seen.
        model = plan.model if plan.definition.model is None else None
        self.append(Intent(*ROOT, root_form(plan, state, limits, model, models)))
        return self._looked_up(plan, state)

    def _start_again(
        self, past: RecordedPart, plan: RunPlan, state: AgentState, limits: Limits | None, models: ChosenModels
    ) -> tuple[RunPlan, AgentState]:
        history, head = past.history, past.history.head
        assert head is not None  # noqa: S101 - an opening was read from it
        self.warnings += past.changes(plan)
        self._seed = head.seed
        # As the engine made it, the plan is created now, by the engine's clock.
        created, now = created_of(head), plan.created
        plan = attrs.evolve(plan, run_id=str(history.root["run_id"]), created=created)
        plan, state = self._with_random(plan), attrs.evolve(state, run_id=plan.run_id)
        model, chosen = (
            history.root.get("model"),
            (history.root.get("models") or {}, history.root.get("run_models") or {}),
        )
        # The limits of then are compared with, not those of now: other limits on resume hold for what is live, and are
        # no divergence (reliability:JR29).
        recorded = self.opening.limits if self.opening else None
        asked = Intent(*ROOT, root_form(plan, state, recorded, model, chosen))
        # The start is compared like any effect: an agent that is resumed with another prompt would take all the
        # recorded answers for answers to that.
        is_equal = past.equals(history.intents[ROOT], asked)
        if self.mode.cuts_off:
            if not is_equal:
                past.start_over()
            models = (models[0] or chosen[0], models[1] or chosen[1])
            asked = Intent(*ROOT, root_form(plan, state, recorded if is_equal else limits, model, models))
        elif not is_equal:
            assert self.replayer is not None  # noqa: S101 - there is one for everything recorded
            self.replayer.starts_alike(asked)
        self.timing.go_on(history.last_at, created, now)
        self.mode.write_start(self, head, asked, is_equal=is_equal)
        self.mail.take_first()
        return self._looked_up(plan, state)

    def _with_random(self, plan: RunPlan) -> RunPlan:
        # By path, so that each child has chance of its own: drawn from one source, what a child gets would depend on
        # which sibling was faster.
        return attrs.evolve(plan, random=partial(Random, f"{self._seed}:{plan.path}"))

    def wrap(self, services: Services) -> Services:
        """Return *services* with the journal built in."""
        # What was made for this run alone knows nothing of what the run did before, unless it is told.
        self._models = services.models if self.tells or getattr(services.models, "is_for_run", False) else None
        self.is_traced = bool(services.outermost)
        if self.pace is not None:
            self.pace.sleep = services.clock.sleep
        # The whole of recording is built in here, by what the engine lends to the tree. Driver and machine have no flag
        # for it, so there is none that could be wrong (docs/the-machine.md).
        return attrs.evolve(
            services,
            machine=self._machine(services.machine),
            planner=self._planner(services.planner),
            middlewares=(*self._innermost(services), *services.middlewares, self._recorder),
            seed=self._seed,
            # A recording of a test is repeated anywhere, never undone; and replays write nothing.
            keep_write=self._keep_write if self.mode.keeps_writes and not self.source.stable else None,
            since=self.timing.since,
            resumable=True,
            sleep_in_process=services.sleep_in_process if self.mode.waits else 0.0,
            wakes_now=self.wakes_now,
            mail=self.mail if self.mode.writes else None,
            record=cast("Level", self) if self._goes_on_at_several_places() else None,
        )

    def _goes_on_at_several_places(self) -> bool:
        """
        Return whether runs go on beside each other, which all have to come to the end of their records before anything is new.

        Else one of them could end another one, as its parent or as who wins a race, in the middle of what that did long ago.
        """
        past = self.past
        if past is None or self.mode.is_closed(past.history):
            return False
        results = past.history.results
        return any(
            i.is_background or (i.gather is not None and i.begins_run and address not in results)
            for address, i in past.history.intents.items()
        )

    def has_begun(self, item: Item) -> bool:
        """Return whether an effect was begun, or never will be."""
        assert self.past is not None and self.replayer is not None  # noqa: S101, PT018 - something goes on
        return self.past.intent((item.path, item.effect.seq)) is not None or self.replayer.halts(item)

    def has_outcome(self, item: Item) -> bool:
        """Return whether nothing new has to happen for an effect: it has a result, or its run is recorded to have ended before it."""
        assert self.past is not None and self.replayer is not None  # noqa: S101, PT018 - something goes on
        if type(item.effect) in RUNS:
            return self.has_begun(item)
        return self.past.result((item.path, item.effect.seq)) is not None or self.replayer.halts(item)

    def _innermost(self, services: Services) -> Iterator[Middleware]:
        """Give the wrappers of live effects, beside those of the services."""
        around = self._around
        if around is not None:
            prices = Prices(services.pricing, services.clock.now)
            yield lambda inner: around(inner, prices.for_usage)

    def tell(self, request: ModelRequest, times: int) -> None:
        """Tell the provider of a model call that the record answers it, with every attempt that it took."""
        if self._models is None:
            return
        with contextlib.suppress(UnknownModel):
            provider = self._models.provider_for(request.model)
            for _ in range(times):
                getattr(provider, "answered", _nothing)(request)

    def close(self) -> None:
        """Give the journal back; may be called twice."""
        if self._give_back is not None:
            self._give_back()

    # --- built into the services --------------------------------------------------------------------------------------

    def _recorder(self, inner: Performer) -> Performer:
        return Recorder(inner, self)

    def _machine(self, inner: MachineMaker) -> MachineMaker:
        def machine(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
            # Only what a machine can see of the record is put into its plan: stand-ins for tools that are gone, and
            # what keeps an output from being recorded. It does not know that there is a record.
            known = plan if self.past is None else self.past.with_gone_tools(plan)
            if plan.definition.handle_steps is not None:
                known = attrs.evolve(known, output_problem=self._output_problem)
            if plan.decode_output is not None:
                self.decoders[plan.path] = plan.decode_output
            running = self.machines[plan.path] = inner(known, state)
            return running

        return machine

    def _output_problem(self, output: JsonValue) -> str:
        """Return why an output cannot be recorded in this journal, ``""`` if it can."""
        return too_long(output, self.source.inline)

    def _planner(self, inner: ChildPlanner) -> ChildPlanner:
        def plan_child(parent: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
            plan, state = inner(parent, effect, path)
            if plan.body is not None and self.replayer is not None:
                plan = attrs.evolve(plan, body=attrs.evolve(plan.body, recalled=partial(self.replayer.computed, path)))
            return self._looked_up(self._with_random(plan), state)

        return plan_child

    def _looked_up(self, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
        """Return *plan* and *state* with what was looked up when the run was recorded, and keep what is not recorded."""
        known: Collection[str] = ()
        if self.past is not None:
            plan, state = recall_lookups(self.past.history, plan, state)
            known = self.mode.known_lookups(self.past.history, plan.path)
        # Recorded as inputs, since no effect asked for them: a prompt that is computed, and a window from a price list,
        # may be others tomorrow.
        for record in lookups(plan, state):
            if record.input["type"] not in known:
                self.append(record)
        return plan, state

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Write a record; it is durable with the next commit. A run that is only walked through writes nothing."""
        # Written with the next record and not when the difference was accepted: a resume that fails at once must leave
        # the journal as it was.
        if self.unwritten and self.writer is not None and self.mode.writes:
            self._write_kept(self.writer)
        self._write(record)

    def _keep_write(self, path: str, seq: int, write: FileWrite) -> None:
        self.writes.setdefault((path, seq), []).append(write)

    def writes_of(self, item: Item, *, again: bool) -> list[Mapping[str, Any]]:
        """Return the stored form of what a call wrote, without what no journal may hold; *again*: it was begun before."""
        redactor, forms = self.source.redactor, list[Mapping[str, Any]]()
        for write in self.writes.pop((item.path, item.effect.seq), ()):
            # Done twice, a call that is like one done once finds its own work, or nothing of it.
            doubtful = again and (write.was == write.after or not is_repeatable(item))
            forms.append(attrs.evolve(without_secret(write, redactor), doubtful=doubtful).form())
        return forms

    def _answer_by_ids(self, history: History) -> None:
        """
        Let open questions go by their ids alone.

        A question whose text was edited is asked as it is now, and who answers has seen the one that was recorded.
        """
        by_text: dict[str, list[str]] = {}
        for key, (_, question) in history.open_questions().items():
            by_text.setdefault(question.text, []).append(key)
        found = {key: answer for text, answer in self.answers.items() for key in by_text.get(text, [text])}
        self.answers = {**found, **{key: answer for key, answer in self.answers.items() if key not in by_text}}

    def accept(self, address: Address, fp: str) -> None:
        """Note that the record at an address serves for what has this fingerprint; a replay accepts exactly that."""
        note = Input(*address, self.timing.last, {"type": "accepted_difference", "fp": fp})
        self.kept.append(note)
        if self.past is not None and self.mode.goes_on(self.past.history):
            # Written with the next record: where nothing new is recorded, because the run cannot go on, nothing is accepted.
            self.unwritten.append(note)

    def _write_kept(self, writer: Writer) -> None:
        notes, self.unwritten = self.unwritten, []
        for note in notes:
            writer.append(note)

    def remember(self, intent: Intent) -> None:
        """Let later requests be stored as differences to a recorded one that was asked for again."""
        if self.writer is not None and intent.live is not None:
            self.writer.remember(intent.path, intent.seq, intent.live.request.messages)

    def fail(self, error: StepEngineError) -> StepEngineError:
        """Let nothing go on any more; return the first reason that was given."""
        # The first reason only: once one record could not be written, or one effect was another, all that follows are
        # consequences.
        self.fatal = self.fatal or error
        return self.fatal

    # --- the end ------------------------------------------------------------------------------------------------------

    async def finish(self, finished: Finished, waits: Sequence[Waits] = ()) -> Finished:
        """
        Write down how the run ended, give the journal back, and return what its result is made of; called once its machine has ended.

        Args:
            finished: How it ended.
            waits: What it waits for, where it is suspended.
        """
        if self.commits is None or self.writer is None:
            return finished
        # In a thread, as it writes and syncs; the loop has other runs.
        if self.writer.blocks or self.mode.replaces:
            return await self.commits.apart(lambda: self._finish(finished, waits))
        return self._finish(finished, waits)

    def _finish(self, finished: Finished, waits: Sequence[Waits]) -> Finished:
        bed = self._bed(finished)
        # The journal is given back on every way, before anybody is told that the run ended: who waited for its result
        # may open it at once.
        try:
            if self.fatal is None:
                if bed is not None and waits:
                    self._lie_down(bed, waits, finished.state.agent_id)
                self._end(finished)
        except StepEngineError as error:
            self.fail(error)
        finally:
            self.close()
            if self._is_own:
                record_own(self.journal)
        if bed is not None and self.fatal is None:
            self._look_again(bed) if waits else self._rise(bed)
        if self.fatal is not None:
            finished = attrs.evolve(finished, status=RunStatus.FAILED, error=self.fatal, output=None)
        return attrs.evolve(finished, warnings=(*finished.warnings, *self.warnings)) if self.warnings else finished

    def _bed(self, finished: Finished) -> Bed | None:
        """Return where the run sleeps now, or slept until now; for a run that never waits, nothing is looked up."""
        is_asleep = finished.status is RunStatus.SUSPENDED
        extends = self.mode.cuts_off
        past = None if self.past is None else self.past.history
        slept = past is not None and (extends or self.mode.goes_on(past)) and bool(past.waits())
        if not (self.mode.takes_letters or extends) or self.source.stable or not (is_asleep or slept):
            return None
        from stepengine.journal.sleeping import bed_of

        return bed_of(self.source if extends else self.journal)

    def _lie_down(self, bed: Bed, waits: Sequence[Waits], agent_id: str) -> None:
        """Note when the run wakes, before its suspension is durable; what is not noted is found in the journal."""
        from stepengine.journal.sleeping import sleeping

        # Noted before the suspension is durable: a run that is noted and does not sleep is looked at once in vain; one
        # that sleeps and is not noted would never wake.
        found = sleeping(bed.run, waits, agent_id)
        assert found is not None  # noqa: S101 - it waits
        with self._told_of(bed), bed.index() as index:
            index.note(found.run, found.wakes_at, found.kinds, found.agent_id)

    def _look_again(self, bed: Bed) -> None:
        """Let the run be due at once when something came that this process did not take in any more."""
        from stepengine.journal.sleeping import first_unread

        with self._told_of(bed):
            box = self.mail.box()
            # By the record, and not by what was read: what this process read while the run lay down, nobody may have taken in.
            late = (
                box is not None
                and box.changed(0)
                and first_unread(self.journal, self.journal.history(), self.mail.early_ids())
            )
            if late or self.mail.was_answered:
                with bed.index() as index:
                    index.post_arrived(bed.run, "input")

    def _rise(self, bed: Bed) -> None:
        """Forget a run that slept, and does not any more."""
        with self._told_of(bed), bed.index() as index:
            index.forget(bed.run)

    @contextlib.contextmanager
    def _told_of(self, bed: Bed) -> Iterator[None]:
        try:
            yield
        except StepEngineError as error:
            self.warnings.append(
                f"when {bed.run!r} is to be woken could not be noted: {error.message}; `stepengine resume --due {bed.place}` finds it in its journal"
            )

    def _end(self, finished: Finished) -> None:
        """Write down how the root run ended; a run that was only stopped can be resumed, so it has no end."""
        self._warn_of_kept()
        # A run that was stopped gets no end in its record, for nothing may follow one (replay:J17): a cancelled run can
        # be gone on with, a finished one cannot.
        past, stop = self.past, stop_of(finished.status, finished.error)
        if past is not None and stop is None:
            unused = past.unused(finished.state.agent_id, finished.error) if not self.mode.cuts_off else None
            assert self.replayer is not None  # noqa: S101 - there is one for everything recorded
            self.replayer.ends(unused)
            self.leftover = unused
        if past is not None and self.mode.resumes and past.history.is_complete:
            return
        if stop is None:
            self.append(Result(*ROOT, self.timing.last, self._end_value(Value(finished.as_child(), self.timing.last))))
        elif self.mode.tells_stop(stop, past):
            if stop.kind == "cancelled":
                self.mail.record_cancels()
            # Whoever follows the run waits for the next process then, and is not told that it ended.
            kind = "shutdown" if finished.is_left and stop.kind == "cancelled" else stop.kind
            self.append(_record_of_stop(attrs.evolve(stop, kind=kind), self.timing.last))
        assert self.writer is not None  # noqa: S101 - there is one from start to end
        self._write_kept(self.writer)
        self.writer.commit()
        self.mode.settle(self, failed=finished.status is RunStatus.FAILED)

    def _warn_of_kept(self) -> None:
        if self.kept:
            places = [shown_address(note.path, note.seq) for note in self.kept]
            listed = ", ".join(places[:LISTED_EFFECTS]) + (
                f" and {len(places) - LISTED_EFFECTS} more" if len(places) > LISTED_EFFECTS else ""
            )
            self.warnings.append(
                f"something else is asked for than {self.source.name} holds at {listed}; what is recorded there was kept"
            )

    def _end_value(self, end: Value) -> Value:
        """Return how the root ended; a replay keeps the recorded form of the same end, as it does for children."""
        past = self.past
        known = past.history.results.get(ROOT) if past is not None and self.mode.repeats(past) else None
        if past is None or known is None:
            return end
        recorded = past.history.outcome(known)
        return recorded if isinstance(recorded, Value) and past.same_child(recorded, end.value) else end

    def replace_source(self) -> None:
        """Put what was made in the place of the journal that was given."""
        if self.mode.cuts_off:
            self.source.extended = self._extension()
        was_own = not self.source.stable and is_own(self.source)
        self.put_in_order(self.source)
        self.journal = self.source
        if was_own:
            record_own(self.source)

    def _extension(self) -> Extension:
        """Return how much of the record was kept, after it was put aside: nothing else tells of what was cut off."""
        assert self.past is not None  # noqa: S101 - what is extended was read
        answered = self.past.answered
        asked, held = len(self.journal.history().intents) - 1, len(self.past.history.intents) - 1
        return Extension(answered, held, asked - answered, self.source.set_aside())

    def put_in_order(self, target: Journal) -> None:
        """Put what was made into *target*, in the order of the addresses if that is to be stable."""
        records = self.journal.records()
        target.replace(in_address_order(records) if target.stable else records)


def _leave_out(_: Record) -> None:
    """Stand in for a writer where nothing is written."""


def _nothing(_: ModelRequest) -> None:
    """Stand in for a provider that wants to know nothing."""


def _record_of_stop(stop: Stop, at: int) -> Input:
    error: Mapping[str, object] = {"error": bare(stop.error)} if isinstance(stop.error, StepEngineError) else {}
    return Input("", -1, at, {"type": "stop", "kind": stop.kind, **error})
