"""The input and the result of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.hooks import Hooks, StepContext
from stepengine.data.json import JsonDict, JsonValue, freeze
from stepengine.data.limits import DEFAULT_LIMITS, Limits
from stepengine.data.messages import Message, ToolResult, to_tuple
from stepengine.data.outcomes import BodyEnd, Stop
from stepengine.data.placeholders import Placeholders
from stepengine.data.provenance import Provenance, Trust
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, EndedRun, RunInfo, RunResult, RunStatus, join_run_and_child_warnings
from stepengine.data.tools import ToolBinding, ToolSpec, Yielding
from stepengine.data.transcript import Transcript
from stepengine.errors import HandlerError, LimitExceeded, StepEngineError, UnknownModel
from stepengine.machine.history import state_without_opening

if TYPE_CHECKING:
    # The class of what comes in as a value; nothing is drawn here.
    from random import Random


def _complete_limits(plan: RunPlan) -> Limits:
    """Return the limits of a plan with defaults in place of missing ones."""
    return plan.given.resolve(DEFAULT_LIMITS)


def _return_true() -> bool:
    return True


def _return_params(_agent: object, params: JsonValue) -> JsonValue:
    return params


def _return_none(_number: int) -> None:
    return None


@frozen(kw_only=True)
class ToolBody:
    """
    The data of a run that is the body of a tool that yields.

    Attributes:
        tool_name: The name by which the tool was called.
        tool_call_id: The id of the call.
        by_model: Whether a model asked for the call, so that the children that the body starts count as a model's.
        steps: Returns the generator of the body for a context.
        timeout: The time limit in seconds; waits for a person, a time, a message or a run do not count.
        values: The objects that the caller's hooks share with later ones.
        recalled: Returns the recorded result of the ``Compute`` with this number, from 0; a ``Stop`` if it was recorded as
            stopped before that; ``None`` without a valid record.
    """

    tool_name: str
    tool_call_id: str
    by_model: bool
    steps: Callable[[StepContext], Any] = attrs.field(eq=False, repr=False)
    timeout: float = math.inf
    values: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    recalled: Callable[[int], JsonValue | Stop] = attrs.field(default=_return_none, eq=False, repr=False)


@frozen(weakref_slot=False)
class OutputSchema:
    """
    The schema of an agent's output, as functions.

    Attributes:
        json_schema: The JSON Schema.
        validate: Turns an output into its stored JSON or raises ``OutputMissing`` with issues.
        decode: Turns the stored JSON into the value that the caller gets, such as a pydantic model; ``None`` if that is the JSON
            itself.
    """

    json_schema: JsonDict
    validate: Callable[[JsonValue], JsonValue]
    decode: Callable[[JsonValue], Any] | None = None


@frozen(kw_only=True, weakref_slot=False)
class PlannedAgent:
    """
    The parts of a plan that are the same for all runs of an agent.

    Attributes:
        definition: The agent.
        offered: Names of the tools that the agent itself has, in order.
        hooks: The engine's hooks followed by the agent's.
        children: The display names of the agents that it may spawn, by normalised id; ``None`` leaves it to the performer of a
            ``Spawn`` to know them.
        repair_child_params: Returns params with corrected names and values, for the id of a child agent or a definition.
        describe_agent: Returns the description of an agent for ``lookup_agent_info``; raises ``AgentError`` for an unknown id.
        output_schema: The schema of its output, if it has one.
        placeholders: The placeholders in its prompts; ``None`` without any.
        package_id: Its id as an agent of a package, ``publisher/name``; ``""`` for any other.
        package_versions: The packages of the agent, and of all agents that may run below it, by such ids.
        notes: Warnings about the definition, for the result.
        source: The planner's own data; the machine does not read it.
    """

    definition: AgentDefinition
    offered: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    hooks: Hooks = attrs.field(factory=Hooks)
    children: Mapping[str, str] | None = None
    repair_child_params: Callable[[Any, JsonValue], JsonValue] = _return_params
    describe_agent: Callable[[str], JsonValue] | None = None
    output_schema: OutputSchema | None = None
    placeholders: Placeholders | None = None
    package_id: str = ""
    package_versions: Mapping[str, str] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()
    source: Any = attrs.field(default=None, eq=False, repr=False)

    def decode_output(self, output: JsonValue) -> Any:
        """Return a stored output as the agent's own type; the JSON itself if there is none."""
        schema = self.output_schema
        return output if schema is None or schema.decode is None else schema.decode(output)


@frozen(kw_only=True, weakref_slot=False)
class RunInput:
    """
    The prompt and the params of a run.

    Attributes:
        prompt: The prompt; ``""`` when there is none.
        params: The validated params as the handler sees them: a pydantic model or an immutable mapping.
        json: The validated params as JSON; ``None`` when there are none.
    """

    prompt: str = ""
    params: Any = JsonDict()
    json: JsonValue = attrs.field(default=None, converter=freeze)


@frozen(kw_only=True, weakref_slot=False)
class RunHost:
    """
    Functions of the process that drives a run tree.

    Attributes:
        is_own_thread: Whether the caller is in the tree's own thread; only there may a handler or hook log, emit or send.
        is_watched: Whether anyone receives step, phase and text events; otherwise they are not made.
        set_history: Receives a function that returns the history of the root run, when that starts.
    """

    is_own_thread: Callable[[], bool] = _return_true
    is_watched: Callable[[], bool] = _return_true
    set_history: Callable[[Callable[[], Transcript]], None] | None = None


@frozen(kw_only=True, weakref_slot=False)
class RunPlan:
    """
    The data that a run is started with, other than its state.

    Attributes:
        agent: The parts that all runs of its agent share.
        run_id: The run's id.
        path: Its path in the tree; ``""`` for the root.
        created: When the root run was created (UTC); outcomes count milliseconds from here.
        starts_at: How many of these milliseconds had passed when this run began; 0 for the root.
        random: Gives the run's random source, seeded from (seed, path); only a handler needs one.
        model: The model string in force, or ``None``.
        tools: Every tool that the run knows by name: those of the engine and the agent, and those that every run knows. The
            table is the run's own where ``pre_run`` hooks may add to it.
        sent: Tool definitions that are sent in place of its own: those of the parent whose system prompt it inherits.
        note: The text after its instructions: the available agents and tools.
        is_inline: Whether it continues the history of the run that spawned it, and leaves its own there.
        given: The explicit limits of this run and the runs above it; the argument ``limits``.
        limits: The limits in force: *given*, with defaults for the rest.
        input: The prompt and the params.
        info: The session, user and metadata of the caller.
        context_window: The model's context length in tokens, when known; looked up for agents with ``pre_step`` hooks.
        host: The functions of the process that drives it.
        body: The tool call whose body it is; ``None`` for the run of an agent.
        records_output: Whether the output is recorded, and so has to be JSON.
        provenance: The origins that a child or body receives when it starts, where a policy needs them; ``None`` for a root.
        clean: Takes secrets out of a value, as the journal does; ``None`` where nothing is recorded.
    """

    agent: PlannedAgent
    run_id: str
    path: str = ""
    created: datetime
    starts_at: int = 0
    random: Callable[[], Random] | None = None
    model: str | None = None
    tools: Mapping[str, ToolBinding] = attrs.field(factory=dict)
    sent: tuple[ToolSpec, ...] | None = None
    note: str = ""
    is_inline: bool = False
    given: Limits = attrs.field(factory=Limits, alias="limits")
    limits: Limits = attrs.field(init=False, default=attrs.Factory(_complete_limits, takes_self=True))
    input: RunInput = RunInput()
    info: RunInfo = RunInfo()
    context_window: int | None = None
    host: RunHost = attrs.field(default=RunHost(), eq=False, repr=False)
    body: ToolBody | None = None
    records_output: bool = attrs.field(default=False, eq=False)
    provenance: Provenance | None = attrs.field(default=None, eq=False, repr=False)
    clean: Callable[[Any], Any] | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def is_hand_off(self) -> bool:
        """Whether the run continues a conversation that was handed over to its agent, with its own prompt and tools."""
        return self.is_inline and self.sent is None

    def resolve_model(self, override: str | None = None) -> str:
        """Return the model string in force, or raise ``UnknownModel`` when there is none."""
        model = override or self.model
        if model:
            return model
        # Raised when a step is asked for and not when the run is planned: an agent whose handler calls only tools needs
        # no model.
        msg = (
            f"agent {self.agent.definition.id!r} has no model: set AgentDefinition(model='provider/model') or "
            "Engine(default_model=...), or name one in StepWith or Complete"
        )
        raise UnknownModel(msg, kind="no_model")


COMMON_FIELDS = tuple(field.name for field in attrs.fields(EndedRun))
_get_common_values = attrgetter(*COMMON_FIELDS)


@frozen(kw_only=True, weakref_slot=False)
class Finished(EndedRun[Any]):
    """
    How a run ended, as the machine sees it; its transcripts are paired.

    Attributes:
        limit: The first spent budget, if any; a run without an error may also have ended because of it.
        pending: The open questions of a suspended run, including those of its children.
        began: Whether its ``pre_run`` hooks let it start.
        is_left: Whether it stopped only because its process had to end, so that another process should resume it.
        opening: The first messages of the run: the user's prompt and the instructions.
        changes: For the body of a tool, the changes that it requests in its caller's run, in order.
        computed: For the body of a tool, the result of each ``Compute``, in order.
        trust: For a child, whether its output may contain text of third parties.
        text_trust: For a child, whether any of its other text may contain text of third parties.
        own_warnings: The warnings of the run itself; ``warnings`` also has those of its children.
        successor: The end of the agent to which the conversation was handed over; that agent is a child, too.
    """

    limit: LimitExceeded | None = None
    pending: tuple[Question, ...] = ()
    began: bool = True
    is_left: bool = False
    opening: tuple[Message, ...] = attrs.field(default=(), repr=False)
    changes: tuple[Any, ...] = ()
    computed: tuple[JsonValue, ...] = ()
    trust: Trust = "untrusted"
    text_trust: Trust = "untrusted"
    own_warnings: tuple[str, ...] = ()
    successor: EndedRun | None = attrs.field(default=None, repr=False)

    def with_warnings(self, texts: Iterable[str]) -> Finished:
        """Return this end with more warnings of the run itself."""
        own = (*self.own_warnings, *texts)
        return attrs.evolve(self, own_warnings=own, warnings=join_run_and_child_warnings(own, self.children))

    def with_children(self, children: Sequence[ChildResult]) -> Finished:
        """Return this end with the spending and warnings of *children* that its machine does not know."""
        every = (*self.children, *children)
        spending = sum([child.spending for child in children], self.spending)
        warnings = join_run_and_child_warnings(self.own_warnings, every)
        return attrs.evolve(self, spending=spending, children=every, warnings=warnings)

    def _merge_with_successor(self) -> dict[str, Any]:
        """Return the fields of ``EndedRun``, including the calls, thoughts and children of the agents that took over the conversation."""
        known = dict(zip(COMMON_FIELDS, _get_common_values(self), strict=True))
        later = self.successor
        if later is not None:
            known["stop_reason"] = later.stop_reason or self.stop_reason
            for name in ("tool_calls", "thinking", "children"):
                known[name] += getattr(later, name)
        return known

    def to_run_result(self, **more: object) -> RunResult:
        """Return the caller's result of this run; *more* are the fields that its machine does not know."""
        return RunResult(**{**self._merge_with_successor(), "pending_questions": self.pending, **more})

    def to_call_result(self, runs: Yielding, *, is_typed: bool) -> ToolResult:
        """Return the result of the tool call whose body this run was; *is_typed* if the caller may read it by its type."""
        if self.status is RunStatus.COMPLETED:
            return runs.shown(self.output, None, is_typed=is_typed)
        if self.status is RunStatus.CANCELLED:
            return make_stopped_body_result()
        error = self.error
        if isinstance(error, HandlerError) and error.__cause__ is not None:
            error = error.__cause__
        return runs.shown(None, error, is_typed=is_typed)

    def to_body_end(self) -> BodyEnd:
        """Return the outcome of this run, a tool's body, for the caller of the tool, apart from its result."""
        return BodyEnd(
            spending=self.spending,
            children=self.children,
            questions=self.pending,
            changes=self.changes,
            computed=self.computed,
            warnings=self.own_warnings,
        )

    def _make_inline_end(self) -> EndedRun:
        """Return the end of this inline run for its parent, without the opening messages."""
        return EndedRun(**{**self._merge_with_successor(), "state": state_without_opening(self.state, self.opening)})

    def to_child_result(self, *, is_inline: bool = False) -> ChildResult:
        """Return the result of this run as its parent receives it."""
        why = self.limit if self.status is RunStatus.MAX_STEPS else self.error
        error = why if isinstance(why, StepEngineError) else None
        return ChildResult(
            agent_id=self.state.agent_id,
            run_id=self.state.run_id,
            status=self.status,
            output=self.output,
            text=self.text,
            error=error,
            spending=self.spending,
            questions=self.pending,
            left=self._make_inline_end() if is_inline else None,
            trust=self.trust,
            text_trust=self.text_trust,
            warnings=self.warnings,
        )


@cache
def make_stopped_body_result() -> ToolResult:
    """Return the result of a call whose body was stopped, without the reason, which a replay does not know."""
    return ToolResult.error(
        "Cancelled before it gave a result; what it had begun may have had effects.", status="cancelled"
    )
