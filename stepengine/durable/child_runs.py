"""
``ChildRuns``: enqueues the children of one run for other workers, waits for them, sends them messages and cancels them.

A child is a workflow of its own. Its id follows from its path, so a parent that is executed again finds the child that is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import attrs

from stepengine.data.effects import CallBody, Leaf, SendToRun, Spawn
from stepengine.data.json import freeze_object
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import BodyEnd, Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, EndedRun, RunStatus
from stepengine.data.tools import Yielding
from stepengine.durable.child_budgets import ChildBudgets
from stepengine.durable.database import CHILD_POLL_SECONDS
from stepengine.durable.executions import DurableRun
from stepengine.durable.messages import make_database_topic
from stepengine.durable.outcome_records import OutcomeRecorder, ReservedSteps, UnrecordedStop
from stepengine.durable.queues import make_queue_options
from stepengine.durable.step_names import ENDED_BY_PARENT, REASON
from stepengine.durable.step_records import run_outside_workflow
from stepengine.durable.wire import (
    Ancestor,
    SubmittedRun,
    encode_body_end,
    encode_hook_values,
    parse_body_end,
    parse_child_result,
    parse_inline_end,
)
from stepengine.errors import AgentError, ReplayDivergence, StepEngineError
from stepengine.journal.encoding import decode_stored, encode_stored
from stepengine.journal.records import format_address
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.failfast import LOST
from stepengine.runtime.performer import IO, ForwardingIO, Item, Performer, child_path


class ChildRuns:
    """
    Runs children, and the bodies of tools that are called together, on other workers.

    Args:
        inner: The performer of effects that are not recorded.
        run: The execution.
        outcomes: Records the outcomes of effects.
    """

    def __init__(self, inner: Performer, run: DurableRun, outcomes: OutcomeRecorder) -> None:
        self._inner = inner
        self._run = run
        self._outcomes = outcomes
        self._budgets = ChildBudgets(run)
        self._started: dict[str, _BackgroundStart] = {}

    async def perform_child_run(self, item: Item, io: IO, steps: ReservedSteps) -> Single:
        """Run a child to its end, and return its recorded result."""
        run = self._run
        ended: dict[str, object] = {}

        async def run_child_and_encode() -> dict[str, Any]:
            if steps.race is not None and await steps.race.has_lost_after_lookups(item):
                await _cancel_subtree(run, f"{run.order.root}/{child_path(*item.address)}", LOST)
                return self._outcomes.encode_race_loss(item)
            outcome: Single | None = _find_unknown_body_error(item)
            if outcome is None:
                with self._budgets.reserve_share_for_child(item) as share:
                    outcome = await self._inner.perform(item, _RemoteIO(io, run, item, share, ended))
            run.workflow.is_live = True
            at = None if steps.seeded is None else steps.seeded["at"]
            form = self._outcomes.consume_and_encode_outcome(item, outcome, at=at)
            return form | {name: ended[name] for name in ("left", "started", "rules", "body") if name in ended}

        outcome, form = await self._outcomes.perform_and_record(item, steps, run_child_and_encode)
        self._add_remembered_rules(form)
        if "body" in form:
            self._outcomes.require_equal_body_result(item, steps.seeded, form)
            body = parse_body_end(form["body"])
            run.started += form["started"]
            self._budgets.count_child_usage(item, body.spending.usage, body.spending.cost, form["started"])
            return with_body_end(outcome, body)
        left = parse_inline_end(form["left"]) if "left" in form else None
        return self.count_and_decode_child_result(
            item, outcome, descendant_count=form.get("started", 0), inline_end=left
        )

    def count_and_decode_child_result(
        self, item: Item, outcome: Single, *, descendant_count: int = 0, inline_end: EndedRun | None = None
    ) -> Single:
        """Count the runs and the usage of a child, and return its outcome with the decoded output and *inline_end*."""
        child = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            return outcome
        self._run.started += descendant_count + bool(child.run_id)
        self._budgets.count_child_usage(item, child.usage, child.cost, descendant_count)
        child = attrs.evolve(child, output=self._decode_output(item, child), left=inline_end)
        return attrs.evolve(cast("Value", outcome), value=child)

    def _decode_output(self, item: Item, child: ChildResult) -> Any:
        """Return a child's output as its agent's own type; as JSON if this process can no longer plan the child."""
        if child.output is None or not child.run_id:
            return child.output
        effect = cast("Spawn", item.effect)
        # The planner knows the type of the agent's output; where it refuses by now (an agent that was taken out), the
        # JSON as it is serves better than no result.
        try:
            plan, _ = self._run.tree.services.planner(item.plan, effect, child_path(item.path, effect.seq))
            return plan.agent.decode_output(child.output)
        except StepEngineError:
            return child.output

    def _add_remembered_rules(self, form: Mapping[str, Any]) -> None:
        """Add the lasting approvals from a child's end to those of this run."""
        for rule in form.get("rules", ()):
            self._run.tree.questions.remembered.add(freeze_object(rule))

    # --- in the background --------------------------------------------------------------------------------------------

    async def start_background_child(self, item: Item, io: IO, steps: ReservedSteps) -> Single:
        """Record the start of a background child, then put it on its queue."""
        run = self._run
        path = child_path(item.path, item.effect.seq)
        started = self._started[path] = _BackgroundStart(item)
        performed: list[Single] = []

        async def start_and_encode() -> dict[str, Any]:
            run.workflow.is_live = True
            outcome = await self._inner.perform(item, io)
            performed.append(outcome)
            return self._outcomes.consume_and_encode_outcome(item, outcome)

        with run.activity.count_running():
            # Recorded first and enqueued then, behind `is_recorded`: a child that is at work and of which its parent
            # knows nothing could be ended by nobody.
            outcome, _ = await self._outcomes.perform_and_record(item, steps, start_and_encode)
        if not performed and isinstance(outcome, Value):
            # It is at work, or was; here it is only waited for.
            again = await self._inner.perform(item._replace(has_begun=True), io)
            if not isinstance(again, Value):
                return again
        started.is_recorded.set_result(None)
        return outcome

    async def wait_for_background_child(self, item: Item, io: IO) -> Single:
        """Wait for the end of a background child, which its own workflow records."""
        run, tree = self._run, self._run.tree
        started = self._started[item.path]
        # The row of the child must not be there before the step that starts it is recorded: executed again, the parent
        # would not know that it has a child.
        await started.is_recorded
        ended: dict[str, Any] = {}
        parent = started.item.path
        running = sum(child.rpartition(".")[0] == parent for child in tree.background.iterate_running_paths())
        try:
            with self._budgets.reserve_equal_part(parent, 1 + running) as share:
                outcome = await self._inner.perform(item, _RemoteIO(io, run, started.item, share, ended))
        except UnrecordedStop as stopped:
            run.end.record_divergence(cast("ReplayDivergence", stopped.outcome.error))
            tree.root.stop(stopped.outcome)
            return stopped.outcome
        if not isinstance(outcome, Value) or not isinstance(outcome.value, ChildResult):
            return outcome
        self._add_remembered_rules(ended)
        at = ended.get("at", run.clock.advance_time(outcome.at))
        return attrs.evolve(
            self.count_and_decode_child_result(started.item, outcome, descendant_count=ended.get("started", 0)), at=at
        )

    async def send_message_to_child(self, item: Item, steps: ReservedSteps) -> Single:
        """Send a message to a background child once, in whichever process it runs."""
        run, effect = self._run, cast("SendToRun", item.effect)

        # A step of its own, with a key made of the effect's address: an execution that dies between sending and
        # recording sends it once more, and the database drops a message with a known key. Without the record a
        # resumed run would not know either whether the child was still at work then, which is the result for the
        # handler.
        async def send_and_encode() -> dict[str, Any]:
            run.workflow.is_live = True
            tree = run.tree
            is_running = tree.background.get_child(effect.child).result is None
            if is_running:
                said = {"value": effect.value}
                key = f"tell:{format_address(item.path, effect.seq)}"
                topic = make_database_topic(effect.child, effect.topic)
                await run.workflow.dbos.send_async(run.order.root, said, topic, idempotency_key=key)
            return self._outcomes.encode(item, Value(is_running, run.clock.advance_time(tree.clock.elapsed_ms())))

        with run.activity.count_running():
            return (await self._outcomes.perform_and_record(item, steps, send_and_encode))[0]


class _BackgroundStart:
    """The start of a child in the background, and a future that is done once the start is recorded."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.is_recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _RemoteChildEnd:
    """The result of a child in another process, shaped like a machine's result."""

    def __init__(self, child: ChildResult) -> None:
        self.status = child.status
        self.pending = child.questions
        self._child = child

    def to_child_result(self, *, is_inline: bool = False) -> ChildResult:
        """Return the child's result for its parent; *is_inline* is ignored, since the child's process has applied it."""
        return self._child


class _RemoteBodyEnd:
    """The result of a tool body in another process, shaped like a machine's result."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self.status = RunStatus(form["status"])
        self.pending = ()
        self.error = None
        self._form = form

    def to_call_result(self, _: Yielding, *, is_typed: bool) -> ToolResult:
        result: ToolResult = decode_stored(self._form["result"])
        return result

    def to_body_end(self) -> BodyEnd:
        """Return the changes of the body for its caller."""
        return parse_body_end(self._form["body"])


class _RemoteIO(ForwardingIO):
    """The ``IO`` of an effect that another worker performs from its queue."""

    def __init__(self, io: IO, run: DurableRun, item: Item, share: Limits | None, ended: dict[str, object]) -> None:
        super().__init__(io)
        self._run = run
        self._item = item
        self._share = share
        self._ended = ended
        # A child can be cancelled only when its row is there; a cancellation before that waits for this.
        self._queued = asyncio.Event()

    async def run_child(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Put the child on its queue unless it is there, and wait for its end; cancel it with its group or at a limit."""
        run, order = self._run, self._run.order
        tree = run.tree
        # The order holds all that the child needs, since another worker has the code, and nothing of this process.
        child = attrs.evolve(
            order,
            spawns=(*order.spawns, *run.bodies, make_ancestor(self._item, plan.agent.definition.id)),
            parent=_select_inherited_state(self._item.effect, plan),
            previous=None,
            slice=self._share,
            rules=tree.questions.remembered.rules,
        )
        # The id is that of the path, so to enqueue it again after a crash finds the child that is there (durable:U5). The
        # release is the parent's, as its record is of that code.
        attributes = {"parent": order.id, "agent": plan.agent.definition.id}
        attributes |= {} if plan.body is None else {"tool": plan.body.tool_name}
        options = make_queue_options(child, attributes, release=run.release)
        # The child belongs to the run and not to this step, which may be done again.
        task = run_outside_workflow(self._enqueue_and_wait_for_child(options, child, state.run_id))
        # Three things end this wait: the child, a cancellation of the child, and a sibling that makes it pointless.
        # In each case the child is waited for until it has ended, so that its spending is known.
        pull = tree.performers.group_stopper.find_stop_signal(path)
        ending = tree.runs.elsewhere[path] = asyncio.get_running_loop().create_future()
        known = tree.background.find_child_stop(path)
        if known is not None:
            ending.set_result(known)
        ends: set[asyncio.Future[Any]] = {task, ending} if pull is None else {task, ending, pull}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                stop = ending.result() if ending.done() else Stop("cancelled")
                await self._cancel_child_once_queued(child.id, stop, task)
            form = await asyncio.shield(task)
        # Cancelled from here only for a limit, which holds for the child, too. In all other cases this execution ends
        # and the child continues.
        except asyncio.CancelledError:
            stop = tree.root.stopping
            if stop is not None and stop.kind == "limit":
                await _cancel_subtree(run, child.id)
            raise
        finally:
            tree.runs.elsewhere.pop(path, None)
            task.cancel()
        self._ended.update(form)
        return cast(
            "Finished", _RemoteChildEnd(parse_child_result(form)) if plan.body is None else _RemoteBodyEnd(form)
        )

    async def _cancel_child_once_queued(self, child: str, stop: Stop, waiting: asyncio.Task[Any]) -> None:
        """Cancel the child once it is on its queue; if only this execution ends, leave the child alone."""
        if not self._run.end.does_stop_end_children(stop):
            raise asyncio.CancelledError
        queued = asyncio.ensure_future(self._queued.wait())
        await asyncio.wait((waiting, queued), return_when=asyncio.FIRST_COMPLETED)
        queued.cancel()
        await _cancel_subtree(self._run, child, "" if stop.error is None else str(stop.error))

    async def _enqueue_and_wait_for_child(
        self, options: Mapping[str, Any], child: SubmittedRun, run_id: str
    ) -> dict[str, object]:
        """Put a child on its queue and return the stored form of its end; raise ``UnrecordedStop`` if it stopped without a result."""
        run, workflow = self._run, self._run.workflow
        seed = run.seed.select_subtree(child.path)
        more = [seed.to_json()] if seed.outcomes else []
        handle = await workflow.dbos.enqueue_workflow_with_options_async(options, child.to_json(), *more)
        self._queued.set()
        try:
            form: dict[str, object] = await handle.get_result(polling_interval_sec=CHILD_POLL_SECONDS)
            return form
        except workflow.errors.DBOSAwaitedWorkflowCancelledError:
            if child.spawns[-1].tool_name:
                cut = Finished(status=RunStatus.CANCELLED, state=AgentState())
                return encode_body_end(
                    cut, cut.to_call_result(cast("Yielding", None), is_typed=False), descendant_count=0
                )
            status = await handle.get_status()
            name = child.spawns[-1].agent_id
            why = (status.attributes or {}).get(REASON)
            error = AgentError(why) if why else None
            gone = ChildResult(agent_id=name, run_id=run_id, status=RunStatus.CANCELLED, error=error)
            return {"child": encode_stored(gone), "started": 0}
        # The child has no result and will have none by itself: it diverged, was set aside as poison, or its row cannot
        # be read. That is no outcome of the parent's effect, for once the cause is mended both continue; recorded as a
        # failure, the handler would have gone another way by then. So the parent stops here, too, unrecorded, and
        # `stepengine deploy retry` resumes both (durable:U5).
        except Exception as error:
            msg = f"the run {child.id!r} cannot continue: {error}"
            raise UnrecordedStop(Stop("diverged", run.clock.elapsed_ms(), ReplayDivergence(msg))) from error


async def _cancel_subtree(run: DurableRun, child: str, reason: str = "") -> None:
    """Cancel a child and its descendants without waiting for them, outside of recorded steps."""
    # It may happen in one execution and not in the next, so it is no step.
    await run_outside_workflow(_cancel_child_workflows(run.workflow.dbos, child, reason))


async def _cancel_child_workflows(dbos: Any, child: str, reason: str) -> None:
    """Record that the parent cancels a child, and why; cancel it and its unfinished descendants."""
    # By itself the package cancels the one workflow. Those below it are found by their ids, which are their paths.
    below = await dbos.list_workflows_async(
        workflow_id_prefix=f"{child}.", load_input=False, load_output=False, status=["PENDING", "ENQUEUED"]
    )
    known = {ENDED_BY_PARENT: True} | ({REASON: reason} if reason else {})
    await dbos.update_workflow_attributes_async(child, known, merge=True)
    await dbos.cancel_workflows_async([child, *[status.workflow_id for status in below]])


def make_ancestor(item: Item, agent_id: str = "") -> Ancestor:
    """Return the ancestor for an effect that starts a run of the agent *agent_id*."""
    effect = cast("Spawn | CallBody", item.effect)
    if isinstance(effect, CallBody):
        return Ancestor(
            seq=effect.seq, agent_id=agent_id or item.plan.agent.definition.id, tool_call_id=effect.tool_call_id, at=effect.at,
            tool_name=effect.tool_name, input=effect.input, source=effect.source, values=encode_hook_values(effect.values),
        )  # fmt: skip
    return Ancestor(
        seq=effect.seq, agent_id=agent_id, prompt=effect.prompt, params=effect.params,
        tool_call_id=effect.tool_call_id, is_inline=effect.is_inline, at=effect.at, of=effect.of,
    )  # fmt: skip


def with_body_end(ended: Single, body: BodyEnd | None) -> Single:
    """Return the outcome of a call with the end of its body. A call that failed before its body started has no end: ``None``."""
    return ended if isinstance(ended, Failure) else attrs.evolve(cast("Value", ended), body=body)


def _find_unknown_body_error(item: Item) -> Failure | None:
    """Return a failure if the tool comes from a source, so that no other worker knows its body."""
    effect = item.effect
    if not isinstance(effect, CallBody) or effect.tool_name in item.plan.agent.source.tools:
        return None
    msg = (
        f"the tool {effect.tool_name!r} yields and comes from a source of tools; in a durable run, call it alone, not together with "
        "others"
    )
    return Failure(StepEngineError(msg))


def _select_inherited_state(effect: Leaf, plan: RunPlan) -> AgentState:
    """Return the part of a caller's state that its child or tool body starts with."""
    # Only the fields that are read there: a whole state holds the conversation twice, and each row would store it.
    if isinstance(effect, CallBody):
        caller = effect.state()
        names = (
            "run_id",
            "ancestor_run_ids",
            "message_history",
            "view",
            "system_prompt",
            "tool_definitions",
            "context",
            "left_out",
        )
        return AgentState(**{name: getattr(caller, name) for name in names})
    parent = cast("Spawn", effect).parent()
    known: dict[str, Any] = {"run_id": parent.run_id, "ancestor_run_ids": parent.ancestor_run_ids}
    if plan.sent is not None:
        known |= {"system_prompt": parent.system_prompt, "tool_definitions": parent.tool_definitions}
    if plan.is_inline or plan.agent.definition.include_message_history:
        known |= {"message_history": parent.message_history, "view": parent.view, "next_call": parent.next_call}
        known["left_out"] = parent.left_out
    if plan.is_inline:
        known["context"] = parent.context
    return AgentState(**known)
