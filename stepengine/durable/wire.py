"""
The stored forms of requests, outcomes and results: portable JSON, encoded and decoded.

An outcome is encoded before it is recorded, and the run continues with the decoded form, so that live and resumed runs see equal
values. Encoding an outcome never fails after its effect has happened: one that cannot be stored becomes a failure with the
reason. Nothing here knows the database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.codec import decode_stored, decode_stored_or_json, encode_stored, encode_stored_or_json
from stepengine.data.hooks import Change
from stepengine.data.json import compact, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import Source, ToolResult, UserMessage
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import BodyEnd, Failure, SetOutput, Single, Stop, Value
from stepengine.data.questions import Answer, AnswerLike, Question, to_answer
from stepengine.data.state import AgentState, ChildResult, EndedRun, RunInfo, RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import DataError, StepEngineError
from stepengine.journal.encoding import decode_outcome, encode_outcome_members, to_storable_error
from stepengine.machine.plan import Finished, RunPlan
from stepengine.redaction import Redactor

SCHEMA_VERSION = 1
"""The version of everything that is stored here; another one is refused."""


def to_portable_json(form: Mapping[str, object]) -> dict[str, object]:
    """Return a form after a round trip through JSON, so with lists for tuples; raise ``DataError`` for a value that cannot be stored."""
    made: dict[str, object] = json.loads(compact(form))
    return made


# --- what a run is started with -----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Ancestor:
    """
    One ``Spawn``, or one call of a tool that yields, on the way from the root to a run.

    Attributes:
        seq: The number of the effect on its path.
        agent_id: The requested agent; for a tool call, the calling agent.
        prompt: The prompt.
        params: The params.
        tool_call_id: The id of the call that requested the child.
        is_inline: Whether the child continues its parent's history.
        at: The time of the effect in milliseconds since the root's start.
        of: The number of children that were requested at once.
        tool_name: The called tool; ``""`` for a ``Spawn``.
        input: The input of the call.
        source: The origin of the call.
        values: The storable part of the values that hooks of the caller share with hooks of the body.
    """

    seq: int
    agent_id: str
    prompt: str = ""
    params: Any = None
    tool_call_id: str = ""
    is_inline: bool = False
    at: int = 0
    of: int = 1
    tool_name: str = ""
    input: Any = None
    source: Source = "model"
    values: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the ancestor as JSON, without members of a tool call if it is a child run."""
        form = attrs.asdict(self, recurse=False)
        return form if self.tool_name else {name: form[name] for name in form if name not in OF_CALLS}


OF_CALLS = ("tool_name", "input", "source", "values")


@frozen(kw_only=True)
class SubmittedRun:
    """
    The immutable request of a run, stored once.

    Attributes:
        root: The id of the root run; that of a child is ``ROOT/PATH``.
        agent_id: The agent of the root run.
        prompt: The prompt of the root run.
        params: The params of the root run as JSON.
        created: The time of the submission, RFC 3339 in UTC; the run's times count from it.
        seed: The seed of random numbers, used together with each run's path.
        info: The caller's information about the run.
        limits: The caller's limits.
        models: Models for this run tree by agent id; they replace the models that agents name.
        previous: The state to continue from.
        answers: Answers to later questions, by question id or text.
        priority: Smaller numbers first; 0 for none. Children have the priority of their root.
        pool: The pool of the workers.
        spawns: The effects from the root to this run; empty for the root.
        parent: The part of the parent's state that the child inherits.
        slice: The part of the tree's budgets that this child may use.
        turn: The number of the turn in the session of ``info``; 0 for a run that is not a turn.
        rules: Lasting approvals from before the start; a turn loads them when it starts.
        before: The record of the previous turn, from ``load_previous_turn``; ``None`` before this turn starts. Never stored.
    """

    root: str
    agent_id: str
    prompt: str = ""
    params: Any = None
    created: str
    seed: str
    info: RunInfo = RunInfo()
    limits: Limits | None = None
    models: Mapping[str, str] = attrs.field(factory=dict)
    previous: AgentState | None = None
    answers: Mapping[str, AnswerLike] = attrs.field(factory=dict)
    priority: int = 0
    pool: str = "default"
    spawns: tuple[Ancestor, ...] = ()
    parent: AgentState | None = None
    slice: Limits | None = None
    turn: int = 0
    rules: tuple[Any, ...] = ()
    before: Mapping[str, Any] | None = None

    @property
    def path(self) -> str:
        """The run's path."""
        return ".".join([str(spawn.seq) for spawn in self.spawns])

    @property
    def id(self) -> str:
        """The run's own id in the database."""
        return f"{self.root}/{self.path}" if self.spawns else self.root

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON; raise ``DataError`` for a value that cannot be stored."""
        info = self.info
        form: dict[str, object] = {
            "schema": SCHEMA_VERSION,
            "root": self.root,
            "agent_id": self.agent_id,
            "prompt": self.prompt,
        }
        form |= {"params": freeze(self.params, "params"), "created": self.created, "seed": self.seed}
        form |= {"info": {"session_id": info.session_id, "user_id": info.user_id, "metadata": info.metadata}}
        for name in ("limits", "previous", "parent", "slice"):
            value = getattr(self, name)
            form |= {} if value is None else {name: encode_stored(value)}
        form |= {"models": dict(self.models)} if self.models else {}
        form |= {"priority": self.priority} if self.priority else {}
        form |= {"turn": self.turn} if self.turn else {}
        form |= {"rules": list(self.rules)} if self.rules else {}
        form |= {"answers": {k: _encode_answer(v) for k, v in self.answers.items()}} if self.answers else {}
        form |= {"pool": self.pool, "spawns": [spawn.to_json() for spawn in self.spawns]}
        return to_portable_json(form)

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> SubmittedRun:
        """
        Parse the stored form of an order.

        Raises:
            DataError: when this version did not write it.
        """
        if form.get("schema") != SCHEMA_VERSION:
            msg = f"this run was submitted with schema {form.get('schema')!r}; this version reads {SCHEMA_VERSION}: use the release that wrote it"
            raise DataError(msg)
        try:
            info = form["info"]
            given = {n: decode_stored(form[n]) for n in ("limits", "previous", "parent", "slice") if n in form}
            plain = {n: form[n] for n in ("root", "agent_id", "prompt", "params", "created", "seed", "pool")}
            plain |= {n: form[n] for n in ("models", "priority", "turn") if n in form}
            plain |= {"rules": tuple(map(freeze, form["rules"]))} if "rules" in form else {}
            return cls(
                **plain,
                **given,
                info=RunInfo(info["session_id"], info["user_id"], freeze(info["metadata"])),
                answers={
                    k: v if isinstance(v, str | bool) else decode_stored(v) for k, v in form.get("answers", {}).items()
                },
                spawns=tuple([Ancestor(**spawn) for spawn in form["spawns"]]),
            )
        except (LookupError, TypeError, AttributeError) as error:
            msg = f"the stored request of a run is invalid: {type(error).__name__}: {error}"
            raise DataError(msg) from error


@frozen(kw_only=True)
class Reply:
    """
    A message that answers questions which were asked at once.

    Attributes:
        run: The run that asks.
        topic: The topic on which the run waits for the message.
        key: The idempotency key of the message.
        message: The time of sending in the run's own time, the answers by question id, and the id of the sender, if there is one.
    """

    run: str
    topic: str
    key: str
    message: dict[str, Any]


@frozen
class StartOutcomes:
    """
    The outcomes of a journal from which a run continues.

    Attributes:
        outcomes: Kind, fingerprint and stored outcome by address; the last is ``None`` for an effect that may have happened.
        lookups: The recorded prompts and context windows of runs, by path.
    """

    outcomes: Mapping[tuple[str, int], tuple[str, str, Mapping[str, Any] | None]] = attrs.field(factory=dict)
    lookups: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the outcomes and look-ups of a seed as JSON."""
        outcomes = [[path, seq, *found] for (path, seq), found in self.outcomes.items()]
        return to_portable_json({"outcomes": outcomes, "lookups": self.lookups})

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> StartOutcomes:
        """Parse the stored form of a seed."""
        outcomes = {(path, seq): (kind, fp, found) for path, seq, kind, fp, found in form["outcomes"]}
        return cls(outcomes, form["lookups"])

    def select_subtree(self, path: str) -> StartOutcomes:
        """Return the part for the run at *path* and its descendants."""
        inside = f"{path}."
        outcomes = {a: found for a, found in self.outcomes.items() if a[0] == path or a[0].startswith(inside)}
        return StartOutcomes(
            outcomes, {p: found for p, found in self.lookups.items() if p == path or p.startswith(inside)}
        )


# --- outcomes -----------------------------------------------------------------------------------------------------------


def encode_outcome(seq: int, outcome: Single, redactor: Redactor, *, attempts: Sequence[object] = ()) -> dict[str, Any]:
    """Return the stored form of an outcome, without known secrets; never fails."""
    if isinstance(outcome, Stop):
        error = encode_error(outcome.error) if outcome.error is not None else None
        return {"seq": seq, "at": outcome.at, "stop": outcome.kind, "error": error}
    if isinstance(outcome, Failure):
        outcome = attrs.evolve(outcome, error=to_storable_error(outcome.error))
    try:
        members = to_portable_json(encode_outcome_members(outcome))
    except DataError as error:
        msg = f"the effect happened, but its outcome cannot be stored: {error.message}"
        members = to_portable_json(encode_outcome_members(Failure(StepEngineError(msg))))
    form: dict[str, object] = {"seq": seq, "at": outcome.at, **members}
    form |= {"attempts": to_portable_json({"": list(attempts)})[""]} if attempts else {}
    if redactor.may_contain_secret(compact(form)):
        form = dict(redactor.value(form))
    return form


def parse_outcome(form: Mapping[str, Any]) -> Single:
    """
    Parse the stored form of an outcome.

    Raises:
        DataError: when it does not fit the codec any more.
    """
    if "stop" in form:
        return Stop(form["stop"], form["at"], parse_error(form["error"]))
    return decode_outcome(form)


def mark_usage_uncertain(outcome: Single) -> Single:
    """Return an outcome whose model usage is marked as a lower bound, because a crash may have hidden a call."""
    if not isinstance(outcome, Value) or not isinstance(outcome.value, ModelReply):
        return outcome
    usage = attrs.evolve(outcome.value.usage or Usage(), at_least=True)
    return attrs.evolve(outcome, value=attrs.evolve(outcome.value, usage=usage))


# --- errors -------------------------------------------------------------------------------------------------------------


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return the stored form of an error; other errors than ours by name and message."""
    if not isinstance(error, StepEngineError):
        error = StepEngineError(f"{type(error).__name__}: {error}")
    try:
        form: dict[str, object] = encode_stored(Failure(to_storable_error(error)))["error"]
        return to_portable_json(form)
    except DataError:
        return to_portable_json(encode_stored(Failure(StepEngineError(error.message)))["error"])


def parse_error(form: Mapping[str, object] | None) -> StepEngineError | None:
    """Parse the stored form of an error; ``None`` for none."""
    if form is None:
        return None
    error: StepEngineError = decode_stored({"type": "failure", "error": form}).error
    return error


# --- answers ------------------------------------------------------------------------------------------------------------


def _encode_answer(value: AnswerLike) -> object:
    return value if isinstance(value, str | bool) else encode_stored(value)


def encode_answers(questions: Sequence[Question], answers: Mapping[str, AnswerLike]) -> dict[str, Any]:
    """Return the answers to *questions* as they are sent, by question id."""
    return to_portable_json(
        {question.id: encode_stored(to_answer(answers[question.id], question)) for question in questions}
    )


def parse_answers(form: Mapping[str, object], questions: Sequence[Question]) -> tuple[Answer, ...]:
    """
    Return the answers to *questions* in their order.

    Raises:
        DataError: when one is missing, or is none.
    """
    missing = [question.id for question in questions if question.id not in form]
    if missing:
        msg = f"no answer to {missing[0]!r} was sent"
        raise DataError(msg)
    return tuple([decode_stored(form[question.id]) for question in questions])


# --- how runs end -------------------------------------------------------------------------------------------------------


def encode_child_result(
    finished: Finished, plan: RunPlan, *, descendant_count: int, approval_rules: Sequence[object]
) -> dict[str, Any]:
    """
    Return the stored form of a child's end, with the number of its descendants and the lasting approvals.

    The state that an inline child leaves to its parent is a member of its own, since no ``ChildResult`` is stored with it.
    """
    child = finished.to_child_result(is_inline=plan.is_inline)
    members = encode_outcome_members(Value(child))["value"]
    left: dict[str, object] = {} if child.left is None else {"left": _encode_inline_end(child.left, plan)}
    left |= {"rules": list(approval_rules)} if approval_rules else {}
    return to_portable_json({"schema": SCHEMA_VERSION, "child": members, "started": descendant_count, **left})


def parse_child_result(form: Mapping[str, Any]) -> ChildResult:
    """Parse the stored form of a child's end; its output is JSON."""
    child: ChildResult = decode_stored(form["child"])
    return attrs.evolve(child, left=parse_inline_end(form["left"])) if "left" in form else child


def _encode_inline_end(ended: EndedRun, plan: RunPlan) -> dict[str, object]:
    """Return the stored form of the data that an inline child returns to its parent; its calls only after a hand-off."""
    # Only after a hand-off the parent lists the calls. Those of another inline child may contain a whole conversation.
    listed = ended if plan.is_hand_off else attrs.evolve(ended, tool_calls=(), thinking=(), children=())
    return {"status": ended.status.value, "state": encode_stored(ended.state), **_encode_calls_and_children(listed)}


def parse_inline_end(form: Mapping[str, Any]) -> EndedRun:
    """Parse the data that an inline child returns to its parent."""
    return EndedRun(
        status=RunStatus(form["status"]), state=decode_stored(form["state"]), **_parse_calls_and_children(form)
    )


def encode_body_end(
    finished: Finished, result: ToolResult, *, descendant_count: int, approval_rules: Sequence[object] = ()
) -> dict[str, Any]:
    """
    Return the stored form of a tool body's end, with the number of its descendants and the lasting approvals.

    Its changes for the caller are stored next to the *result*; of the values that hooks share, only those that can be stored.
    """
    end = finished.to_body_end()
    try:
        told = encode_stored(result)
    except DataError as error:
        told = encode_stored(ToolResult.error(f"The tool ended, but its result cannot be stored: {error.message}"))
    left: dict[str, object] = {
        "spending": encode_stored(end.spending),
        "children": [encode_outcome_members(Value(child))["value"] for child in end.children],
        "changes": [_encode_change(change) for change in end.changes],
        "warnings": list(end.warnings),
    }
    form: dict[str, object] = {"schema": SCHEMA_VERSION, "status": finished.status.value, "result": told, "body": left}
    return to_portable_json(
        form | {"started": descendant_count} | ({"rules": list(approval_rules)} if approval_rules else {})
    )


def parse_body_end(form: Mapping[str, Any]) -> BodyEnd:
    """Parse the end of a tool body, apart from its result, from the member ``body`` of its form."""
    return BodyEnd(
        spending=decode_stored(form["spending"]),
        children=tuple([decode_stored(child) for child in form["children"]]),
        changes=tuple([_parse_change(change) for change in form["changes"]]),
        warnings=tuple(form["warnings"]),
    )


def _encode_change(change: Change | SetOutput | UserMessage) -> dict[str, object]:
    """Return the stored form of a change that a tool body made: a ``Change``, an output or a message."""
    if isinstance(change, SetOutput):
        return {"output": change.value}
    if isinstance(change, UserMessage):
        return {"said": encode_stored(change)}
    values = {} if change.values is None else {"values": encode_hook_values(change.values)}
    return {"change": encode_stored(change), **values}


def _parse_change(form: Mapping[str, Any]) -> Change | SetOutput | UserMessage:
    """Parse the stored form of a change that a tool body made."""
    if "output" in form:
        return SetOutput(freeze(form["output"]))
    if "said" in form:
        said: UserMessage = decode_stored(form["said"])
        return said
    change: Change = decode_stored(form["change"])
    return attrs.evolve(change, values=parse_hook_values(form["values"])) if "values" in form else change


def encode_hook_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the storable part of the values that hooks share; other objects stay in their process."""
    kept: dict[str, object] = {}
    for name, value in values.items():
        try:
            kept[name] = encode_stored_or_json(value)
        except DataError:
            continue
    return to_portable_json(kept)


def parse_hook_values(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse the values that hooks share."""
    return {name: decode_stored_or_json(value) for name, value in (form or {}).items()}


def _encode_calls_and_children(ended: EndedRun) -> dict[str, object]:
    """Return the stored stop reason, tool calls, thinking and children of an ended run."""
    return {
        "stop_reason": ended.stop_reason and ended.stop_reason.value,
        "tool_calls": [encode_stored(call) for call in ended.tool_calls],
        "thinking": list(ended.thinking),
        "children": [encode_outcome_members(Value(child))["value"] for child in ended.children],
    }


def _parse_calls_and_children(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an ended run: stop reason, tool calls, thinking and children."""
    return {
        "stop_reason": None if form["stop_reason"] is None else StopReason(form["stop_reason"]),
        "tool_calls": tuple([decode_stored(call) for call in form["tool_calls"]]),
        "thinking": tuple(form["thinking"]),
        "children": tuple([decode_stored(child) for child in form["children"]]),
    }


def encode_result(result: RunResult) -> dict[str, Any]:
    """Return the stored form of a root run's result."""
    output = encode_outcome_members(Value(ChildResult(agent_id="", output=result.output)))["value"].get("output")
    form: dict[str, object] = {
        "schema": SCHEMA_VERSION,
        "status": result.status.value,
        "text": result.text,
        "output": output,
    }
    form |= {
        "state": encode_stored(result.state),
        "spending": encode_stored(result.spending),
        **_encode_calls_and_children(result),
    }
    form |= {"session_id": result.session_id, "warnings": list(result.warnings), "leaked": list(result.leaked)}
    form |= {} if result.error is None else {"error": encode_error(result.error)}
    return to_portable_json(form)


def parse_result(form: Mapping[str, Any], output: object = None) -> RunResult:
    """Parse the stored result of a root run; *output* replaces the stored JSON if its type is known."""
    return RunResult(
        status=RunStatus(form["status"]),
        state=decode_stored(form["state"]),
        output=freeze(form["output"]) if output is None else output,
        text=form["text"],
        spending=decode_stored(form["spending"]),
        **_parse_calls_and_children(form),
        session_id=form["session_id"],
        error=parse_error(form.get("error")),
        warnings=tuple(form["warnings"]),
        leaked=tuple(form["leaked"]),
        session_saved=form["session"]["is_saved"] if "session" in form else None,
    )
