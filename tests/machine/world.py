"""
A synchronous world for the machine: scripted replies, tools, answers, children; no event loop.

``play`` runs a machine to its end and checks on the way what must hold for every run: nothing raises, the emissions are a
word of the order table, numbers are consecutive, nothing is asked for after a stop, histories are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from stepengine.data import yields as y
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import (
    ROWS,
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallFunction,
    CallModel,
    CallTool,
    EndRuns,
    Gather,
    Notify,
    SendToRun,
    Spawn,
)
from stepengine.data.events import Event
from stepengine.data.hooks import Hooks
from stepengine.data.json import JsonDict, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import AssistantMessage, ThinkingPart, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Gathered, Stop, Value
from stepengine.data.questions import Answer, to_answer
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.data.waits import Awaited, ChildRef, Received
from stepengine.errors import LimitExceeded, PerformError, StepEngineError, ToolInputError
from stepengine.machine import Finished, RunPlan, run_agent
from stepengine.machine.plan import PlannedAgent, RunHost, RunInput
from stepengine.machine.protocol import BODY, FIRST, LAST, ORDER, STOPPED, compute_next_states, get_protocol_token
from stepengine.tools.agent_tools import BUILT_IN
from stepengine.tools.control import make_set_output_binding

KNOWN = {name: attrs.evolve(tool.binding(), repair=None) for name, tool in BUILT_IN.items()}
"""What every run knows; inputs are not mended, so that a test sees what is checked."""
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
SPENT = Usage(10, 1)


def line_of(file: str, mark: str) -> str:
    """Return ``file:line`` of the line of a test's *file* that ends with the comment *mark*."""
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
        if line.rstrip().endswith(f"# {mark}"):
            return f"{file}:{number}"
    raise AssertionError(mark)


def call(name: str, _input: Mapping[str, Any] | None = None, /, **values: Any) -> ToolCallPart:
    """Return a call as a model asks for it: without an id."""
    return ToolCallPart("", name, values if _input is None else _input)


def reply(*parts: Any, **fields: Any) -> ModelReply:
    """Return a reply of texts and calls."""
    return ModelReply(parts, **{"usage": SPENT, **fields})


def thought(text: str) -> ThinkingPart:
    return ThinkingPart(text)


def binding(
    name: str, refuse: Callable[[Any], str | None] = lambda _: None, repair: Any = None, **spec: Any
) -> ToolBinding:
    """Return a tool that accepts every input for which *refuse* gives nothing."""

    def validate(value: JsonDict) -> Validated:
        issue = refuse(value)
        if issue:
            raise ToolInputError(f"Invalid parameters for {name}: {issue}", tool_name=name, issues=(issue,))
        return Validated(freeze({**value, "checked": True}) if spec.get("category") == "checked" else value, value)

    return ToolBinding(ToolSpec(name, **spec), validate, repair)


def agent(handler: Any = None, **fields: Any) -> AgentDefinition[Any]:
    return AgentDefinition("tester", **{"model": "test/model", "handle_steps": handler, **fields})


def yielding(*values: Any) -> Callable[[Any], Any]:
    """Return a handler that yields *values* in their order; a text among them is what it returns."""

    def handler(ctx: Any) -> Any:
        for value in values:
            if isinstance(value, str):
                return value
            yield value
        return None

    return handler


@attrs.define(kw_only=True)
class World:
    """
    What is outside of the machine.

    Attributes:
        replies: Replies in order, errors among them, or a function from the number of the call.
        tools: Functions of the input that give a ``ToolResult``, an outcome, or an error to fail with.
        answers: Answers by question id; what is missing suspends.
        children: Child results, outcomes, errors or functions of the effect by agent id.
        at: Outcomes for effects by their number, instead of what would come.
        inputs: Messages delivered with the outcome of an effect, by its number.
        mail: Messages by topic, in order; what is missing is a timeout.
        refuses: Whether a limit refuses each model call once, and is then raised by whom it asks.
        watched: Whether anybody looks at the run; what an unwatched one emits is not checked against the table.
    """

    replies: Any = ()
    tools: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    answers: Mapping[str, Any] = attrs.field(factory=dict)
    children: Mapping[str, Any] = attrs.field(factory=dict)
    at: Mapping[int, Any] = attrs.field(factory=dict)
    inputs: Mapping[int, Sequence[UserMessage]] = attrs.field(factory=dict)
    mail: Mapping[str, list[Any]] = attrs.field(factory=dict)
    background: dict[str, Any] = attrs.field(factory=dict)
    backwards: bool = False
    asked: int = 0
    emitted: list[Any] = attrs.field(factory=list)
    outcomes: dict[int, Any] = attrs.field(factory=dict)
    states: frozenset[str] = frozenset([FIRST])
    rows: set[tuple[str, str]] = attrs.field(factory=set)
    stopped: bool = False
    watched: bool = True
    refuses: bool = False
    has_refused: bool = False

    # --- what was seen ----------------------------------------------------------------------------------------------

    @property
    def leaves(self) -> list[Any]:
        """All effects with a number, in the order in which they were emitted."""
        found: list[Any] = []
        for effect in self.emitted:
            found += effect.effects if type(effect) is Gather else [] if type(effect) is Notify else [effect]
        return found

    @property
    def events(self) -> list[Event]:
        return [effect.event for effect in self.emitted if type(effect) is Notify]

    @property
    def tokens(self) -> list[str]:
        return [get_protocol_token(effect) for effect in self.emitted]

    @property
    def models(self) -> list[CallModel]:
        return [effect for effect in self.leaves if type(effect) is CallModel]

    @property
    def requests(self) -> list[Any]:
        return [effect.request for effect in self.models]

    @property
    def calls(self) -> list[CallTool]:
        return [effect for effect in self.leaves if isinstance(effect, CallTool)]

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    # --- what comes back --------------------------------------------------------------------------------------------

    def answer(self, effect: Any) -> Any:
        self._advance(get_protocol_token(effect))
        self.emitted.append(effect)
        if type(effect) is Notify:
            return None
        assert not self.stopped, f"{get_protocol_token(effect)} was emitted after a stop"
        if type(effect) is Gather:
            members = list(enumerate(effect.effects))
            done = {i: self._one(e) for i, e in (reversed(members) if self.backwards else members)}
            outcome: Any = Gathered(tuple([done[i] for i, _ in members]))
            self._tell(effect, outcome.outcomes)
        else:
            outcome = self._one(effect)
            self._tell(effect, (outcome,))
        return outcome

    def _tell(self, effect: Any, outcomes: Iterable[Any]) -> None:
        kinds = {type(outcome).__name__ for outcome in outcomes}
        if "Stop" in kinds:
            self.stopped, self.states = True, frozenset([STOPPED])
        elif self.states <= {"asking", "asking_last"}:
            self._advance(*kinds)

    def _advance(self, token: str) -> None:
        if not self.watched:
            return
        before, self.states = self.states, compute_next_states(self.states, token)
        assert self.states, f"{token} must not come in {sorted(before)}; so far: {self.tokens}"
        self.rows |= {(state, token) for state in ORDER if token in ORDER[state] and ORDER[state][token] in self.states}

    def _one(self, effect: Any) -> Any:
        seq = effect.seq
        made = self.at.get(seq)
        outcome = self._outcome(made if made is not None else self._made(effect), seq + 1)
        if seq in self.inputs and not isinstance(outcome, Stop):
            outcome = attrs.evolve(outcome, inputs=tuple(self.inputs[seq]))
        self.outcomes[seq] = outcome
        return outcome

    def _outcome(self, value: Any, at: int) -> Any:
        if isinstance(value, Value | Failure | Stop):
            return value
        return Failure(value, at) if isinstance(value, StepEngineError) else Value(value, at)

    def _made(self, effect: Any) -> Any:
        if type(effect) is CallModel:
            self.has_refused = self.refuses and not self.has_refused
            if self.has_refused:
                return LimitExceeded("too much", kind="tokens", limit=effect.seq, more=1)
            index, self.asked = self.asked, self.asked + 1
            if callable(self.replies):
                return self.replies(index)
            assert index < len(self.replies), (
                f"call {index} of the model has no scripted reply: {effect.request.messages[:]}"
            )
            return self.replies[index]
        if isinstance(effect, CallTool):
            return self.tools[effect.tool_name](**effect.input)
        if type(effect) is Spawn:
            made = self.children[effect.agent_id]
            child = made(effect) if callable(made) else made
            return self._started(effect, child) if effect.is_background else child
        if type(effect) is CallFunction:
            return self._performed(effect)
        if type(effect) is not AskPerson:
            return self._waited(effect)
        if effect.purpose == "limit" and self.refuses:
            return (Answer(selected=("yes",)),)
        waiting = [q for q in effect.questions if q.id not in self.answers]
        return Stop("suspended") if waiting else tuple([to_answer(self.answers[q.id], q) for q in effect.questions])

    def _started(self, effect: Spawn, child: Any) -> Any:
        """Start a child in the background, which has ended as soon as somebody waits for it."""
        if not isinstance(child, ChildResult):
            return child
        path = str(effect.seq)
        self.background[path] = attrs.evolve(child, run_id=f"r1-{path}")
        return ChildRef(f"r1-{path}", effect.agent_id, path)

    def _waited(self, effect: Any) -> Any:
        match effect:
            case AwaitTime():
                return Value(None, effect.wakes)
            case AwaitMessage():
                found = self.mail.get(effect.topic)
                return Received(f"m{effect.seq}", found.pop(0)) if found else None
            case AwaitRuns() | EndRuns():
                return Awaited(effect.children, (), {path: self.background[path] for path in effect.children})
            case SendToRun():
                return effect.child in self.background
        return ROWS[type(effect)].outcome()

    def _performed(self, effect: CallFunction) -> Any:
        try:
            return freeze(effect.call.fn(*effect.call.args, **effect.call.kwargs))
        except Exception as error:
            return PerformError(f"raised {type(error).__name__}: {error}", kind=type(error).__name__)


@attrs.define
class Played:
    """A run that has ended, and the world that it ended in."""

    finished: Finished
    world: World
    plan: RunPlan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finished, name) if hasattr(self.finished, name) else getattr(self.world, name)

    @property
    def history(self) -> Transcript:
        return self.finished.state.message_history

    @property
    def shown(self) -> list[str]:
        """The history as short lines."""
        return lines(self.history)


def lines(messages: Iterable[Any]) -> list[str]:
    """Return messages as short lines: ``user: ...``, ``assistant: text [call c1 name]``, ``tool c1 ok: ...``."""
    shown = []
    for message in messages:
        if isinstance(message, ToolMessage):
            shown.append(f"tool {message.tool_call_id} {message.status}: {message.text}")
        elif isinstance(message, AssistantMessage):
            calls = "".join([f"[{c.tool_name} {c.tool_call_id}]" for c in message.tool_calls])
            shown.append(f"assistant: {message.text}{calls}")
        else:
            shown.append(f"user: {message.text}")
    return shown


def plan_of(definition: AgentDefinition[Any], **fields: Any) -> RunPlan:
    """Return the plan of a run; *fields* are fields of the plan and of its parts."""
    tools, output = fields.pop("tools", ()), fields.get("output_schema")
    named = {**fields.pop("known", KNOWN), **{b.spec.name: b for b in tools}}
    if output is not None:
        named["set_output"] = make_set_output_binding(output.json_schema)
    given = {
        "definition": definition,
        "hooks": definition.hooks,
        "limits": definition.limits,
        "run_id": "r1",
        "created": CREATED,
        "random": partial(Random, 1),
        "model": definition.model,
        "offered": definition.tool_names,
        "prompt": "go",
        "tools": named,
        **fields,
    }
    agent, host, asked = (part(**_pop_fields(part, given)) for part in (PlannedAgent, RunHost, RunInput))
    return RunPlan(agent=agent, host=host, input=asked, **given)


def _pop_fields(part: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of *part* and remove them from *given*."""
    return {field.name: given.pop(field.name) for field in attrs.fields(part) if field.name in given}


def play(
    definition: AgentDefinition[Any],
    world: World | None = None,
    *,
    state: AgentState | None = None,
    checked: bool = True,
    **fields: Any,
) -> Played:
    """Run *definition* in *world* and check what must hold for every run."""
    world = world or World()
    plan = plan_of(definition, is_watched=lambda: world.watched, **fields)
    if plan.body is not None:
        world.states = frozenset([BODY])
    start = state if state is not None else AgentState(run_id="r1", agent_id=definition.id)
    machine = run_agent(plan, start)
    sent: Any = None
    while True:
        try:
            effect = machine.send(sent)
        except StopIteration as stop:
            finished = stop.value
            break
        sent = world.answer(effect)
    world._advance("Finished")
    played = Played(finished, world, plan)
    if checked:
        check(played)
    return played


def check(played: Played) -> None:
    """Check what must hold for every run that has ended."""
    finished, world = played.finished, played.world
    assert isinstance(finished, Finished)
    assert not world.watched or world.states == {LAST}
    assert [effect.seq for effect in world.leaves] == list(range(len(world.leaves)))
    for transcript in (finished.state.message_history, finished.state.view):
        assert Transcript(list(transcript)) == transcript
    replied = [o.value.usage for e in world.models if isinstance(o := world.outcomes[e.seq], Value)]
    failed = [getattr(o.error, "usage", None) for e in world.models if isinstance(o := world.outcomes[e.seq], Failure)]
    children = [child.spending.usage for child in finished.children]
    known = sum([u for u in [*replied, *failed, *children] if u is not None], Usage())
    assert finished.spending.usage.total_tokens == known.total_tokens
    assert finished.spending.usage.requests == len(replied) + sum(u.requests for u in children)
    assert finished.state.usage == finished.spending.usage


def hooks(**points: Any) -> Hooks:
    return Hooks(**points)


def limits(**fields: Any) -> Limits:
    return Limits(**fields)


def child(output: Any = "done", **fields: Any) -> ChildResult[Any]:
    return ChildResult(**{"agent_id": "helper", "run_id": "r1-0", "output": output, "text": "done", **fields})


ADD = binding("add")


def adding(a: int = 0, b: int = 0, **_: Any) -> ToolResult:
    return ToolResult.json(a + b)


def play_adding(handler: Any, replies: Any, **fields: Any) -> Played:
    """Run an agent that has the tool "add" and these replies; *fields* are those of the agent."""
    world = World(replies=replies, tools={"add": adding})
    return play(agent(handler, tools=["add"], **fields), world, tools=[ADD])


STEP, STEP_ALL = y.STEP, y.STEP_ALL

REF: ChildRef[Any] = ChildRef("r1-0", "helper", "0")
"""The first child that a run starts."""
BY_HAND: dict[str, Any] = {
    "ToolCall": y.ToolCall("add", {"a": 1}),
    "AgentCall": y.AgentCall("helper"),
    "STEP": STEP,
    "STEP_ALL": STEP_ALL,
    "StepWith": y.StepWith(model="test/other"),
    "StepText": y.StepText('<tool_call>{"name": "add", "input": {}}</tool_call>'),
    "GenerateN": y.GenerateN(2),
    "Complete": y.Complete("?"),
    "Parallel": y.Parallel(y.ToolCall("add"), y.Perform(int)),
    "Perform": y.Perform(int),
    "Ask": y.Ask("Sure?"),
    "Sleep": y.Sleep(3600),
    "Receive": y.Receive("news"),
    "Race": y.Race(y.Perform(int), y.Sleep(5)),
    "Start": y.Start(y.AgentCall("helper")),
    "Wait": y.Wait(REF),
    "Send": y.Send(REF, "look there, too"),
    "Cancel": y.Cancel(REF),
}
OF_CHILDREN = ("Wait", "Send", "Cancel")
OF_TYPES: dict[Any, Any] = {str: "three eggs", int: 3, float: 0.5, bool: True}


def example_of(kind: type) -> Any:
    """Return one of a kind of yieldable with no attribute that is not needed: texts, numbers, the first of several choices."""
    types, given = get_type_hints(kind), {}
    for attribute in attrs.fields(kind):
        if attribute.default is attrs.NOTHING:
            wanted = types[attribute.name]
            is_choice = get_origin(wanted) is Literal
            assert is_choice or wanted in OF_TYPES, f"BY_HAND of tests/machine/world.py lacks {kind.__name__!r}"
            given[attribute.name] = get_args(wanted)[0] if is_choice else OF_TYPES[wanted]
    return kind(**given)


EXAMPLES = {row.name: BY_HAND[row.name] if row.name in BY_HAND else example_of(row.kind) for row in y.YIELDS}
"""One of everything that a handler may yield."""
