"""
``Steps``: the performer that makes the effects of one run durable.

It takes the place of the recorder, between the meter of limits and the gate. Before effects begin, their numbered steps are
reserved, in program order and in the run's own task: markers, intents, the steps of results. An outcome is recorded under
the number that was reserved for it, whenever it arrives. No rule of the machine is here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs

from stepengine.data.effects import (
    CHILD_ENDS,
    RUNS,
    WAITS,
    AskPerson,
    CallBody,
    CallModel,
    EndRuns,
    Gather,
    RunInBackground,
    SendToRun,
    Spawn,
)
from stepengine.data.events import Warned
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.durable.child_runs import ChildRuns, make_ancestor, with_body_end
from stepengine.durable.executions import DurableRun
from stepengine.durable.outcome_records import (
    OutcomeRecorder,
    RaceRecord,
    ReservedSteps,
    UnrecordedStop,
    find_race_bounds,
)
from stepengine.durable.step_names import BODY, CHILD, INTENT, SPAWN, WAIT, get_effect_step_kind, parse_step_fingerprint
from stepengine.durable.step_records import ReservedStep
from stepengine.durable.wire import mark_usage_uncertain, parse_answers
from stepengine.errors import DataError, StepEngineError, UnknownOutcome
from stepengine.journal.encoding import decode_stored, encode_effect, encode_stored
from stepengine.journal.recorder import AttemptsIO
from stepengine.journal.records import format_address
from stepengine.runtime.core_performer import is_deferred_call
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.performer import IO, Item, Performer, is_repeatable
from stepengine.runtime.questions import render_questions
from stepengine.runtime.suspension import list_waits

LONG_RUN_EFFECTS = 5_000
"""A run with so many effects warns that resuming it takes long."""
FOREVER_SECONDS = 10 * 365 * 24 * 3600.0
"""DBOS waits only with a time limit, so a question without one gets ten years."""
_Seeded: TypeAlias = "tuple[str, str, Mapping[str, Any] | None]"
"""An effect in the seed: its kind, its fingerprint, and its outcome if it has one."""


class Steps:
    """
    Performs the effects of one run, each of them once.

    Args:
        inner: The performer of effects that are not recorded.
        run: The execution.
    """

    def __init__(self, inner: Performer, run: DurableRun) -> None:
        self._inner = inner
        self._run = run
        self._outcomes = OutcomeRecorder(run)
        self._children = ChildRuns(inner, run, self._outcomes)
        self._races: dict[tuple[str, int], RaceRecord] = {}
        self._reserved: dict[tuple[str, int], ReservedSteps] = {}
        # An intent is a recorded step, so a second execution is given the first one's back. By the token it sees that
        # the intent was another execution's: then the effect was begun before, and is in doubt (durable:U18).
        self._token = secrets.token_hex(8)

    async def begin(self, batch: Sequence[Item]) -> None:
        """
        Reserve the steps of effects in order, compare them with the record, and record the marks of started effects.

        Raises:
            ReplayDivergence: When a step differs from the record.
        """
        # Numbers are drawn here, in the run's own task and one after the other: the package numbers steps in the order
        # in which they are requested. Were they drawn when members of a group are performed, the faster member would
        # have the lower number, and the next execution another record (durable:U20).
        run = self._run
        run.end.raise_if_stopping()
        is_early = not run.workflow.is_live
        if batch[0].effect.seq < LONG_RUN_EFFECTS <= batch[-1].effect.seq + 1 and not is_early:
            self._warn_of_long_run()
        started, reserved, marks = [], list[ReservedStep](), dict[int, Any]()
        together = [item.effect.seq for item in batch if self._has_certain_step(item)]
        for item in batch:
            started.append((item, await self._reserve_effect_steps(item, reserved, marks, together)))
            # One mark of a group has the numbers: in each of thousands they would fill the database.
            together = [] if isinstance(item.effect, (AskPerson, *WAITS)) else together
        await self._compare_steps_and_record_marks(reserved, marks, item)
        for item, steps in started:
            if steps.intent is not None:
                token = marks[steps.intent.number]["token"]
                steps = steps._replace(is_doubtful=token != self._token)  # noqa: PLW2901
            race = self._find_or_create_race_record(item)
            self._reserved[item.address] = steps._replace(is_early=is_early, race=race)
        await self._inner.begin(batch)

    def _has_certain_step(self, item: Item) -> bool:
        """Return whether an effect of a group always gets a step: a mark if it waits, else its outcome."""
        known = self._run.seed.outcomes.get(item.address)
        if item.gather is None or isinstance(item.effect, RUNS) or (known is not None and known[2] is not None):
            return False
        # One that is cut off by others of its group may have no outcome. Of those in a race it is known when that is over.
        return isinstance(item.effect, (AskPerson, *WAITS)) or not item.gather.fail_fast

    def _find_or_create_race_record(self, item: Item) -> RaceRecord | None:
        """Return the record that the members of a race share, ``None`` for an effect in no race; records of earlier groups are dropped."""
        race = find_race_bounds(item)
        if race is None or item.gather is None:
            return None
        together = item.gather.effects
        # Races of before this group have ended, and a run may have thousands.
        for over in [key for key in self._races if key[0] == item.path and key[1] < together[0].seq]:
            del self._races[over]
        return self._races.setdefault((item.path, together[race[0]].seq), RaceRecord())

    def _warn_of_long_run(self) -> None:
        """Warn that the run grows long. No new run is started, since it would not have the handler's variables."""
        message = (
            f"the run {self._run.order.id!r} has {LONG_RUN_EFFECTS:,} effects. Resuming it reads all of them first, with about a third of "
            "a second of CPU per 1,000. Move longer work to children: a resume reads only their results"
        )
        LOGGER.warning(message)
        self._run.tree.emit(Warned(message=message))

    async def _compare_steps_and_record_marks(
        self, reserved: list[ReservedStep], marks: dict[int, Any], item: Item
    ) -> None:
        """Compare the steps reserved so far, up to *item*, record their marks and add them to *marks* by number."""
        if reserved:
            where = format_address(*item.address)
            # All of them first: where one differs, nothing is marked.
            await self._run.workflow.compare_recorded_steps(reserved, where)
            for step in reserved:
                if step.mark is not None:
                    marks[step.number] = await self._run.workflow.load_or_record_mark(step, where)
            reserved.clear()

    async def _reserve_effect_steps(
        self, item: Item, reserved: list[ReservedStep], marks: dict[int, Any], together: Sequence[int]
    ) -> ReservedSteps:
        """
        Reserve the steps of an effect; those to look up before it starts are added to *reserved*.

        A question is also recorded here, and the wait for its answer starts. The mark of a group's first wait has the numbers of the
        effects that start *together* with it: the run is not suspended before each of them has ended or waits, too.
        """
        run, effect = self._run, item.effect
        # Form and fingerprint are those of a journal: so a durable run can be exported as one, and is compared by the
        # same rules.
        form = encode_effect(item)
        print_ = run.prints.for_effect(form)
        name = f"{get_effect_step_kind(form)}:{print_}"
        _refuse_unsupported_effect(item)
        seeded = run.seed.outcomes.get(item.address)
        if seeded is not None:
            steps = self._reuse_seeded_steps(item, name, seeded)
            if steps is not None:
                return steps
        if isinstance(effect, AskPerson):
            # How many numbers it draws follows from its record, so the steps before it are compared first.
            await self._compare_steps_and_record_marks(reserved, marks, item)
            return await self._record_questions_and_start_waits(item, name, together)
        intent: ReservedStep | None = None
        # A wait has a marker before it, since the wait itself is recorded only when it is over, and
        # `stepengine deploy status` has to see it meanwhile. A repeatable effect needs no mark: the step with its outcome
        # is enough.
        if isinstance(effect, WAITS):
            reserved.append(run.workflow.reserve_next_step(f"{WAIT}:{print_}", _make_wait_json(item, together)))
        elif isinstance(effect, RUNS) and not _starts_background_child(item):
            return self._reserve_start_steps(item, name, seeded, reserved)
        elif not is_repeatable(item):
            mark = {"seq": effect.seq, "token": self._token, **run.make_path_member(item)}
            intent = run.workflow.reserve_next_step(f"{INTENT}:{print_}", mark)
            reserved.append(intent)
        step = run.workflow.reserve_next_step(name)
        reserved.append(step)
        return ReservedSteps(name, step, intent=intent)

    def _reserve_start_steps(
        self, item: Item, name: str, seeded: _Seeded | None, reserved: list[ReservedStep]
    ) -> ReservedSteps:
        """Reserve the steps for the start of a child or tool body, and for the end of one driven elsewhere."""
        # The marker comes before the child is enqueued: the database compares names of steps and nothing else, and a
        # child's row is found by its id alone, so a changed spawn would be given another child's result (durable:U15).
        run, print_ = self._run, parse_step_fingerprint(name)
        known = None if seeded is None else seeded[2]
        mark = {"seq": item.effect.seq, **run.make_path_member(item)}
        if not _is_body_in_this_run(item):
            spawning = run.workflow.reserve_next_step(f"{SPAWN}:{print_}", mark)
            step = run.workflow.reserve_next_step(f"{CHILD}:{print_}")
            reserved += [spawning, step]
            return ReservedSteps(step.name, step, seeded=known)
        if known is None:
            reserved.append(run.workflow.reserve_next_step(f"{BODY}:{print_}", mark))
        return ReservedSteps(name, seeded=known)

    def _reuse_seeded_steps(self, item: Item, name: str, seeded: _Seeded) -> ReservedSteps | None:
        """
        Return the recorded steps of an effect in the seed, or ``None`` if the effect must be performed again.

        Raises:
            ReplayDivergence: when the seed has another effect at this address.
        """
        run, (kind, fp, form) = self._run, seeded
        # The seed is a record from elsewhere (an import, another release), and is held to the same comparison as the
        # database's own.
        if f"{kind}:{fp}" != name:
            where = format_address(*item.address)
            raise run.end.make_and_record_divergence(where, [f"{kind}:{fp}", name])
        if form is None:
            return (
                None
                if is_repeatable(item)
                else ReservedSteps(name, run.workflow.reserve_next_step(name), is_doubtful=True)
            )
        # No journal has the changes of an inline child or a tool body: it is driven over its own part of the seed.
        return None if _has_unrecorded_changes(item, form) else ReservedSteps(name, seeded=form, is_settled=True)

    async def _record_questions_and_start_waits(self, item: Item, name: str, together: Sequence[int]) -> ReservedSteps:
        """Record questions, start to wait for those without an answer, and return the steps of both."""
        run = self._run
        effect = cast("AskPerson", item.effect)

        async def ask_and_encode() -> dict[str, Any]:
            outcome = await self._inner.perform(item, run.tree)
            run.workflow.is_live = True
            if not isinstance(outcome, Stop):
                return self._outcomes.consume_and_encode_outcome(item, outcome)
            if outcome.kind != "suspended":
                raise UnrecordedStop(outcome)
            open_ = [encode_stored(question) for question in render_questions(item)]
            form = {"seq": effect.seq, "path": item.path, "at": run.clock.elapsed_ms(), "questions": open_}
            form |= _make_group_json(item, together)
            return cast("dict[str, Any]", run.redactor.value(form))

        found = await run.workflow.reserve_and_load_or_perform_step(name, ask_and_encode, format_address(*item.address))
        if "questions" not in found:
            return ReservedSteps(name, asked=found)
        topic = f"ask:{item.path}:{effect.seq}"
        waiting = asyncio.create_task(run.workflow.dbos.recv_async(topic, timeout_seconds=FOREVER_SECONDS))
        # The wait draws its numbers when it first runs: now, before anybody else draws any.
        await asyncio.sleep(0)
        return ReservedSteps(name, asked=found, answer=waiting)

    # --- performing ---------------------------------------------------------------------------------------------------

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Return the outcome of an effect: the recorded one, or that of performing it."""
        effect = item.effect
        if isinstance(effect, RunInBackground):
            return self._children.wait_for_background_child(item, io)
        steps = self._reserved.pop(item.address)
        if steps.is_settled:
            return self._read_seed_outcome(item, cast("Mapping[str, object]", steps.seeded))
        if isinstance(effect, AskPerson):
            return self._wait_for_answers(item, steps)
        if isinstance(effect, (*WAITS, EndRuns)):
            return self._perform_wait(item, io, steps)
        if isinstance(effect, SendToRun):
            return self._children.send_message_to_child(item, steps)
        if _starts_background_child(item):
            return self._children.start_background_child(item, io, steps)
        if isinstance(effect, RUNS):
            return (
                self._perform_tool_body(item, io, steps)
                if _is_body_in_this_run(item)
                else self._children.perform_child_run(item, io, steps)
            )
        return self._perform_leaf(item, io, steps)

    async def _read_seed_outcome(self, item: Item, form: Mapping[str, object]) -> Single:
        """Return the outcome of an effect in the seed, after counting what its child used."""
        outcome = self._outcomes.load_outcome_and_advance_clock(form, format_address(*item.address))
        self._run.workflow.was_replayed = True
        return self._children.count_and_decode_child_result(item, outcome)

    async def _perform_leaf(self, item: Item, io: IO, steps: ReservedSteps) -> Single:
        """Perform an effect that starts no run, once, as a recorded step; one that is in doubt fails with ``UnknownOutcome``."""
        run = self._run
        attempts: list[object] = []

        async def perform_and_encode() -> dict[str, Any]:
            run.workflow.is_live = True
            # First of all: a race that is recorded as won must not be run for once more by a member whose own end was
            # not recorded.
            if steps.race is not None and await steps.race.has_lost_after_lookups(item):
                return self._outcomes.encode_race_loss(item)
            # A model call has no intent. Whether an earlier execution has made it cannot be seen, only that there was
            # one; so the sums say `at_least` (reliability:R3).
            again = isinstance(item.effect, CallModel) and steps.is_early and await run.workflow.is_repeated_execution()
            if steps.is_doubtful:
                error = UnknownOutcome(
                    "the process ended before what it did was recorded; it may or may not have happened"
                )
                return self._outcomes.encode(item, Failure(error, run.clock.elapsed_ms()))
            if again:
                attempts.append(
                    {"error": encode_stored(UnknownOutcome("the process ended before the reply was recorded"))}
                )
            # Inside the step, around the work alone: a worker has hundreds of runs that wait, and only running effects
            # count against its limit (durable:U21).
            async with run.effects:
                outcome = await self._inner.perform(
                    item, AttemptsIO(io, attempts) if isinstance(item.effect, CallModel) else io
                )
            outcome = mark_usage_uncertain(outcome) if again else outcome
            return self._outcomes.consume_and_encode_outcome(item, outcome, attempts)

        with run.activity.count_running():
            return (await self._outcomes.perform_and_record(item, steps, perform_and_encode))[0]

    async def _wait_for_answers(self, item: Item, steps: ReservedSteps) -> Single:
        """Return the answers to an effect's questions, recorded or once they arrive; ``Failure`` for a message that is no answer."""
        run, where = self._run, format_address(*item.address)
        asked = cast("Mapping[str, Any]", steps.asked)
        if steps.answer is None:
            return self._outcomes.load_outcome_and_advance_clock(asked, where)
        clock, workflow = run.clock, run.workflow
        clock.advance_to(asked["at"])
        workflow.is_live = workflow.is_live or not steps.answer.done()
        try:
            with run.activity.count_waiting():
                said = await workflow.await_or_stop_execution(steps.answer, where)
        finally:
            steps.answer.cancel()
        questions: tuple[Question, ...] = tuple([decode_stored(question) for question in asked["questions"]])
        # The time of an answer is that of its sender, whose clock may be wrong: it may neither turn the run's time
        # back nor move it into the future.
        clock.advance_to(min(int(said["at"]), clock.elapsed_ms()))
        try:
            return Value(parse_answers(said["answers"], questions), clock.last)
        # Answers of ours are checked before they are sent (durable:U37), so this is a message that some other client of
        # the database wrote. The question is used up by it: the package has delivered the message and recorded that. So
        # it can neither be asked again nor be left open, and an exception would come again at each execution; a
        # failure reaches the handler, which may ask once more.
        except (DataError, LookupError, TypeError) as error:
            return Failure(
                StepEngineError(f"the message sent as the answer at {where} is not a valid answer: {error}"), clock.last
            )

    # --- bodies of tools ----------------------------------------------------------------------------------------------

    async def _perform_tool_body(self, item: Item, io: IO, steps: ReservedSteps) -> Single:
        """
        Run the body of a tool in this run, and return its result: the recorded one, with the current changes of the body.

        Its effects are recorded one by one as the run's own are, so a resumed run repeats it.
        """
        run, where = self._run, format_address(*item.address)
        run.bodies.append(make_ancestor(item))
        try:
            outcome = await self._inner.perform(item, io)
        finally:
            run.bodies.pop()
        run.end.raise_if_stopping()
        if isinstance(outcome, Stop) and outcome.kind != "limit":
            return outcome
        now = self._outcomes.encode(item, outcome)

        async def make_result_record() -> dict[str, Any]:
            run.workflow.is_live = True
            return now | {"at": run.clock.advance_time(outcome.at)} | run.messages.pop_consumed_message_keys(outcome)

        # The result is recorded, and still a resumed run repeats the body: its changes (of the conversation, of what was
        # spent) are in no record, and follow from its effects alone.
        known = steps.seeded or await run.workflow.reserve_and_load_or_perform_step(
            steps.name, make_result_record, where
        )
        self._outcomes.require_equal_body_result(item, known, now)
        return with_body_end(
            self._outcomes.load_outcome_and_advance_clock(known, where), getattr(outcome, "body", None)
        )

    # --- waits --------------------------------------------------------------------------------------------------------

    async def _perform_wait(self, item: Item, io: IO, steps: ReservedSteps) -> Single:
        """
        Wait for a time, a message or children, and record the outcome; an ``EndRuns`` cancels the children first.

        The time needs no timer of the database: it follows from the record, so that a resumed run waits for the same one.
        """
        run = self._run
        found: list[Single] = []

        async def wait_and_encode() -> dict[str, Any]:
            run.workflow.is_live = True
            if steps.race is not None and await steps.race.has_lost_after_lookups(item):
                return self._outcomes.encode_race_loss(item)
            outcome = await self._inner.perform(item._replace(has_begun=True), io)
            form = self._outcomes.consume_and_encode_outcome(item, outcome)
            found.append(outcome)
            return form

        with run.activity.count_waiting():
            outcome, _ = await self._outcomes.perform_and_record(item, steps, wait_and_encode)
        if not isinstance(item.effect, CHILD_ENDS) or not isinstance(outcome, Value):
            return outcome
        if found:
            return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=found[0].value.ended))  # type: ignore[union-attr]
        return await self._add_child_ends(item, outcome, io)

    async def _add_child_ends(self, item: Item, outcome: Value, io: IO) -> Single:
        """Return a recorded outcome with the ends of the children that it names, once they are known; an ``EndRuns`` cancels them first."""
        if isinstance(item.effect, EndRuns):
            self._run.tree.background.cancel_children(item.effect.children, item.effect.reason)
        ended = await io.wait_for_children(item, outcome.value.done)
        if ended is None:
            return Stop("cancelled", self._run.clock.elapsed_ms())
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))


def _is_body_in_this_run(item: Item) -> bool:
    """
    Return whether the work of an effect is part of this run: the body of a tool that was called alone.

    Bodies that are called together are separate runs, as children are: one run would number their steps as they end.
    """
    return isinstance(item.effect, CallBody) and item.gather is None


def _starts_background_child(item: Item) -> bool:
    return isinstance(item.effect, Spawn) and item.effect.is_background


def _refuse_unsupported_effect(item: Item) -> None:
    """Raise ``StepEngineError`` for an effect that a durable run cannot perform, before it starts."""
    # Not when the result fails to arrive: the sender would deliver to a process that has forgotten the call.
    if is_deferred_call(item):
        msg = f"the result of {item.effect.tool_name!r} comes from outside; durable runs wait only with Receive"  # type: ignore[union-attr]
        raise StepEngineError(msg)
    if isinstance(item.effect, AskPerson) and find_race_bounds(item) is not None:
        msg = "a durable run cannot ask a person in a race: ask in a child, and race with that child"
        raise StepEngineError(msg)


def _has_unrecorded_changes(item: Item, form: Mapping[str, Any]) -> bool:
    """Return whether an effect changed more than a journal records of its end."""
    effect = item.effect
    if not isinstance(effect, CallBody):
        return isinstance(effect, Spawn) and effect.is_inline
    # One that was cut off with its group would continue now; one that was refused never started.
    return "error" not in form and form["value"].get("status") != "cancelled"


def _make_wait_json(item: Item, together: Sequence[int]) -> dict[str, Any]:
    """Return the stored form of a wait, for operators; effects with the numbers *together* start with it."""
    wait = list_waits(item)[0]
    until = None if wait.wakes_at is None else wait.wakes_at.isoformat(timespec="milliseconds")
    form: dict[str, Any] = {"seq": item.effect.seq, "path": item.path, "kind": wait.kind, "wakes_at": until}
    form |= {"topic": wait.topic} if wait.topic else {}
    race = find_race_bounds(item)
    form |= {} if race is None or item.gather is None else {"race": _get_first_and_last_number(item.gather, race)}
    form |= _make_group_json(item, together)
    return form | ({"children": list(wait.children)} if wait.children else {})


def _make_group_json(item: Item, together: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of the effects that start *together* with *item*, and those of their races; empty if it starts alone."""
    if not together or item.gather is None:
        return {}
    races = [_get_first_and_last_number(item.gather, race) for race in item.gather.races]
    return {"together": together} | ({"races": races} if races else {})


def _get_first_and_last_number(group: Gather, race: tuple[int, int]) -> list[int]:
    start, end = race
    return [group.effects[start].seq, group.effects[end - 1].seq]
