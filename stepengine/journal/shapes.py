"""
What may stand in a record: names and types of its members, so that whoever reads one later can rely on them (replay J41).

A journal may be anybody's, with checksums that are right. What is checked here raises ``ValueError`` or ``DataError``, which
whoever knows the record's place makes a ``JournalCorrupt`` of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from stepengine.data.codec import restored
from stepengine.data.limits import Limits
from stepengine.data.messages import AssistantMessage, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelSettings
from stepengine.data.outcomes import Failure, StopKind, Value
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, ChildResult
from stepengine.errors import StepEngineError

__all__ = (
    "EFFECTS",
    "UNREADABLE",
    "check_attempts",
    "check_effect",
    "check_head",
    "check_input",
    "check_members",
    "check_outcome",
    "check_place",
)

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading foreign data raises when they are not what they should be; ``DataError`` is said apart."""

MAX_SEQ = 10**9
MAX_AT = 10**13
"""More than three hundred years in milliseconds; what is added to a date must leave a date."""
LAST_YEAR = 9_000
PATH = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})*)?")
MESSAGES = UserMessage | AssistantMessage | ToolMessage
ANY = object

Shape = Mapping[str, type]
"""Types by name; a name that ends in ``?`` may be missing."""

EFFECTS: Mapping[str, Shape] = {
    "CallModel": {"purpose": str, "request": dict},
    "CallTool": {"tool_name": str, "input": ANY, "tool_call_id": str, "source": str, "idempotent?": bool},
    "Spawn": {"agent_id": str, "prompt": str, "params": ANY, "tool_call_id?": str},
    "Perform": {"name": str, "args": list, "kwargs": dict, "idempotent?": bool},
    "Ask": {"questions": list, "purpose": str, "tool_call_id?": str},
}
START: Shape = {
    "run_id": str, "previous?": dict, "session_id?": str, "user_id?": str, "metadata?": dict, "model?": str, "limits?": dict,
}  # fmt: skip
REQUEST: Shape = {
    "model": str, "messages": list, "system_prompt?": str, "tools?": list, "tool_choice?": ANY, "settings?": dict, "tail?": list,
}  # fmt: skip
TOOL: Shape = {"name": str, "description": str, "input_schema": dict}
SLICE: Shape = {"seq": int, "start": int, "stop": int, "path?": str}
INPUTS: Mapping[str, Shape] = {
    "SystemPrompt": {"text": str},
    "ContextWindow": {"tokens": int},
    "Stop": {"kind": str, "error?": dict},
    "Answered": {"question_id": str, "answer": ANY},
    "Kept": {"fp": str},
}
OUTCOMES: Mapping[str, type] = {"CallModel": ModelReply, "CallTool": ToolResult, "Spawn": ChildResult, "Ask": tuple}


def check_members(value: Any, shape: Shape, what: str) -> None:
    """Raise unless *value* is an object with the members of *shape*."""
    if not isinstance(value, Mapping):
        msg = f"{what} should be an object, not a {type(value).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - one kind of error for whatever was read
    for name, kind in shape.items():
        member = name.rstrip("?")
        if member not in value:
            if member == name:
                msg = f"{what} lacks the member {member!r}"
                raise ValueError(msg)
        elif kind is not ANY and type(value[member]) is not kind:
            msg = f"the member {member!r} of {what} should be a {kind.__name__}, not a {type(value[member]).__name__}"
            raise ValueError(msg)


def check_place(path: str, seq: int, at: int = 0) -> None:
    """Raise for an address or a time that no run has."""
    if PATH.fullmatch(path) is None:
        msg = f"{path[:80]!r} is no path of a run"
        raise ValueError(msg)
    if not (-1 <= seq < MAX_SEQ and 0 <= at < MAX_AT):
        msg = f"seq {seq} and at {at} should be below {MAX_SEQ} and {MAX_AT}"
        raise ValueError(msg)


def check_head(created: str, parent: Any, hooks: Any) -> None:
    """Raise unless these members of a head are what they should be."""
    when = datetime.fromisoformat(created)
    if when.tzinfo is None or when.year > LAST_YEAR:
        msg = f"the run cannot have been created at {created!r}"
        raise ValueError(msg)
    if parent is not None:
        check_members(parent, {"run": str, "at": str}, "the parent")
    if not isinstance(hooks, list) or not all(isinstance(name, str) for name in hooks):
        msg = "the hooks should be a list of names"
        raise ValueError(msg)


def check_effect(form: Mapping[str, Any], *, is_start: bool) -> None:
    """Raise unless *form* is the stored form of an effect, its blobs put in; *is_start* says that it starts the root run."""
    shape = EFFECTS.get(form["type"])
    if shape is None or (is_start and form["type"] != "Spawn"):
        msg = f"{form['type'][:80]!r} is no effect that may stand here"
        raise ValueError(msg)
    check_members(form, shape, "the effect")
    if is_start:
        check_members({k: v for k, v in form.items() if v is not None}, START, "the start of the run")
        if form["params"] is not None:
            check_members(form["params"], {}, "what params hold")
        _check_stored([form.get("previous")] if form.get("previous") is not None else [], AgentState)
        _check_stored([form.get("limits")] if form.get("limits") is not None else [], Limits)
    elif form["type"] == "CallModel":
        _check_request(form["request"])
    elif form["type"] == "Ask":
        _check_stored(form["questions"], Question)


def _check_request(request: Mapping[str, Any]) -> None:
    check_members(request, REQUEST, "the request")
    for item in request["messages"]:
        if isinstance(item, dict) and item.get("type") == "Slice":
            check_members(item, SLICE, "a slice")
            check_place(item.get("path", ""), item["seq"])
            if not 0 <= item["start"] < item["stop"]:
                msg = f"a slice goes from {item['start']} to {item['stop']}"
                raise ValueError(msg)
        else:
            _check_stored([item], MESSAGES)
    _check_stored(request.get("tail", ()), MESSAGES)
    _check_stored([request["settings"]] if "settings" in request else [], ModelSettings)
    for spec in request.get("tools", ()):
        check_members(spec, TOOL, "a tool")
        if set(spec) != set(TOOL):
            msg = "a tool has a name, a description and an input_schema, and nothing else"
            raise ValueError(msg)


def _check_stored(values: Sequence[Any], kind: Any) -> None:
    for value in values:
        if not isinstance(made := restored(value), kind):
            msg = f"a {type(made).__name__} stands where it cannot"
            raise ValueError(msg)  # noqa: TRY004 - one kind of error for whatever was read


def check_outcome(effect: str, outcome: Value | Failure, asked: int = 0) -> None:
    """Raise unless an effect of this type may have this outcome; *asked* is how many questions it asks."""
    value = outcome.value if isinstance(outcome, Value) else None
    fits = isinstance(outcome, Failure) or isinstance(value, OUTCOMES.get(effect, ANY))
    if fits and isinstance(value, tuple) and effect == "Ask":
        fits = len(value) == asked and all(isinstance(answer, Answer) for answer in value)
    if not fits:
        msg = f"a {type(value).__name__} is no outcome of this {effect}"
        raise ValueError(msg)
    if not all(isinstance(message, UserMessage) for message in outcome.inputs):
        msg = "what was sent to the run meanwhile is no user message"
        raise ValueError(msg)


def check_attempts(attempts: Any) -> None:
    """Raise unless these are failed attempts of a model call."""
    for attempt in attempts:
        check_members(attempt, {"error": dict, "usage?": dict}, "an attempt")
        _check_stored([{"type": "Failure", "error": attempt["error"]}], Failure)


def check_input(said: Mapping[str, Any]) -> None:
    """Raise unless this came from outside; what a newer version knows is left alone."""
    check_members(said, {"type": str}, "the input")
    check_members(said, INPUTS.get(said["type"], {}), "the input")
    if said["type"] == "Answered":
        _check_stored([said["answer"]], Answer)
    if said["type"] == "Stop":
        if said["kind"] not in get_args(StopKind):
            msg = f"a run stops for one of {', '.join(get_args(StopKind))}, not {said['kind'][:80]!r}"
            raise ValueError(msg)
        _check_stored([said["error"]] if "error" in said else [], StepEngineError)
