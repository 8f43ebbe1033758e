"""
Control and expanding tools: their specifications, validation, and what control tools do to a run.

Control tools are done by the machine itself, with no effect and no record (design 3). Expanding tools become other
effects; the batch does that, here stand only their specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, JsonValue, compact, freeze
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.results import ToolResult
from stepengine.data.tools import ToolAnnotations, ToolBinding, ToolSpec, Validated
from stepengine.data.wire import from_dicts
from stepengine.errors import AgentError, DataError, OutputMissing, TranscriptError
from stepengine.machine.checks import STRING, checked, described, issues_of, object_schema
from stepengine.machine.plan import RunPlan
from stepengine.machine.spawning import SPAWN_BINDINGS, SPAWN_SPECS
from stepengine.machine.state import RunState

__all__ = (
    "CONTROL_BINDINGS",
    "CONTROL_SPECS",
    "EXPANDING_SPECS",
    "HANDLER_ONLY",
    "bindings_of",
    "offered_of",
    "run_control",
    "set_output_binding",
)

HARMLESS = ToolAnnotations(read_only=True, idempotent=True)


def _control(name: str, description: str, schema: JsonDict, **flags: Any) -> ToolSpec:
    flags = {"annotations": HARMLESS, "requires_permission": False, "forces_next_step": False, **flags}
    return ToolSpec(name, description, schema, kind="control", category="control", **flags)


SET_OUTPUT = """\
Set the output of this run; a later call replaces it.

Usage: pass the output's fields at the top level, or the whole output in `data`.
Examples: {"data": {"answer": 42}} or {"answer": 42}
When not to use: to talk to the user; write text instead.
Notes: the turn goes on until you stop; when a schema is required and the output does not fit, the earlier output stays."""
END_TURN = """\
End the turn now.

Usage: call it alone, when everything that was asked for is done.
Examples: {} or {"message": "Renamed the function in three files."}
When not to use: while there is work left; simply stopping also ends the turn.
Notes: calls after it in the same reply are not executed."""
TASK_COMPLETED = """\
Say that the whole task is done; the turn ends only when this is called.

Usage: call it once, after you have checked the result.
Examples: {}
When not to use: to report progress, or before your last change was verified.
Notes: calls after it in the same reply are not executed."""
WRITE_TODOS = """\
Write the list of things to do; it replaces the earlier list.

Usage: give every item each time, finished ones with completed=true.
Examples: {"todos": [{"task": "Read the parser", "completed": true}, {"task": "Fix the bug", "completed": false}]}
When not to use: for work of one or two steps.
Notes: the list is shown to the user as it is."""
THINK_DEEPLY = """\
Write down a thought before you act.

Usage: think through a decision that has several good options.
Examples: {"thought": "Renaming breaks two callers; adding an alias does not."}
When not to use: to talk to the user; nobody is shown the thought as an answer.
Notes: it changes nothing and does not end the turn by itself."""
ADD_MESSAGE = "Append a message to the history. For handlers; never shown to a model."
SET_MESSAGES = "Replace the history. For handlers; never shown to a model."
LOOKUP_AGENT_INFO = """\
Look up what an agent is for, what it takes, and what it gives.

Usage: give the agent's id.
Examples: {"agent_id": "code-searcher"}
When not to use: for agents that are described to you already.
Notes: an agent that does not exist gives found=false."""
ASK_USER = """\
Ask the person one or more questions and wait for the answers.

Usage: give options when there are sensible choices; free text is always possible.
Examples: {"questions": [{"question": "Which database?", "options": ["PostgreSQL", "SQLite"]}]}
When not to use: for what you can find out with your tools.
Notes: the run pauses until somebody answers."""

_TODO = {
    "type": "object",
    "properties": {
        "task": described(STRING, "What to do."),
        "completed": {"type": "boolean", "description": "Whether it is done."},
    },
    "required": ["task", "completed"],
    "additionalProperties": False,
}
_OPTION = {
    "type": "object",
    "properties": {"label": STRING, "description": STRING},
    "required": ["label"],
    "additionalProperties": False,
}
_QUESTION = {
    "type": "object",
    "properties": {
        "question": described(STRING, "The question."),
        "header": described(STRING, "A short title."),
        "options": {
            "type": "array",
            "items": {"anyOf": [STRING, _OPTION]},
            "description": "Choices, each a text or a label with a description: none, or at least two.",
        },
        "multi_select": {"type": "boolean", "description": "Whether several options may be chosen."},
    },
    "required": ["question"],
    "additionalProperties": False,
}

FREE_OUTPUT = JsonDict(
    freeze(
        {"type": "object", "properties": {"data": {"description": "The whole output."}}, "additionalProperties": True}
    )
)

CONTROL_SPECS: Mapping[str, ToolSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _control("set_output", SET_OUTPUT, FREE_OUTPUT),
            _control("set_messages", SET_MESSAGES, object_schema(("messages",), messages={"type": "array"})),
            _control(
                "add_message",
                ADD_MESSAGE,
                object_schema(
                    ("role", "content"),
                    role={"enum": ["user", "assistant"]},
                    content=STRING,
                    tags={"type": "array", "items": STRING},
                    ttl={"enum": ["agent_step", "user_prompt"]},
                ),
            ),
            _control(
                "end_turn",
                END_TURN,
                object_schema(message=described(STRING, "A last word.")),
                ends_turn=True,
                forces_next_step=True,
            ),
            _control("task_completed", TASK_COMPLETED, object_schema(), ends_turn=True),
            _control(
                "write_todos",
                WRITE_TODOS,
                object_schema(("todos",), todos={"type": "array", "items": _TODO, "description": "The whole list."}),
                forces_next_step=True,
            ),
            _control(
                "think_deeply", THINK_DEEPLY, object_schema(("thought",), thought=described(STRING, "The thought."))
            ),
        )
    }
)
"""The specifications of the control tools by name."""

LOOKUP_SPEC = ToolSpec(
    "lookup_agent_info",
    LOOKUP_AGENT_INFO,
    object_schema(("agent_id",), agent_id=described(STRING, "The agent's id.")),
    kind="control",
    category="read",
    annotations=HARMLESS,
    requires_permission=False,
)

EXPANDING_SPECS: Mapping[str, ToolSpec] = MappingProxyType(
    {
        **SPAWN_SPECS,
        "ask_user": ToolSpec(
            "ask_user",
            ASK_USER,
            object_schema(
                ("questions",),
                questions={"type": "array", "items": _QUESTION, "minItems": 1, "description": "The questions."},
            ),
            kind="expanding",
            category="ask",
            requires_permission=False,
        ),
    }
)
"""The specifications of the expanding tools by name."""

HANDLER_ONLY = ("set_messages", "add_message")
"""Control tools that no model is ever offered (requirements F18)."""


def _message_issues(value: JsonDict) -> Iterator[str]:
    try:
        from_dicts(value["messages"])
    except (TranscriptError, DataError) as error:
        yield f"messages: {error.message}"


def _question_issues(value: JsonDict) -> Iterator[str]:
    for index, question in enumerate(value["questions"]):
        options, path = question.get("options", ()), f"questions[{index}].options"
        if len(options) == 1:
            yield f"{path}: none or at least two, not one"
        for position, option in enumerate(options):
            if not isinstance(option, str):
                yield from issues_of(_OPTION, option, f"{path}[{position}]")


CONTROL_BINDINGS: Mapping[str, ToolBinding] = MappingProxyType(
    {
        **{name: checked(spec) for name, spec in CONTROL_SPECS.items()},
        "set_messages": checked(CONTROL_SPECS["set_messages"], _message_issues),
        **SPAWN_BINDINGS,
        "lookup_agent_info": checked(LOOKUP_SPEC),
        "ask_user": checked(EXPANDING_SPECS["ask_user"], _question_issues),
    }
)
"""What every machine knows, control and expanding tools alike."""


def set_output_binding(schema: JsonDict) -> ToolBinding:
    """Return ``set_output`` as an agent with an ``output_schema`` has it: the schema itself, or wrapped in ``data``."""
    is_object = schema.get("type") == "object"
    shown = schema if is_object else object_schema(("data",), data=schema)
    spec = attrs.evolve(CONTROL_SPECS["set_output"], input_schema=shown)
    return ToolBinding(spec, lambda value: Validated(value, value))


def bindings_of(plan: RunPlan) -> dict[str, ToolBinding]:
    """Return every tool that a run may call, the machine's own and those of its plan, by name."""
    bindings = {**CONTROL_BINDINGS, **plan.tools}
    if plan.validate_output is not None and plan.output_json_schema is not None:
        bindings["set_output"] = set_output_binding(plan.output_json_schema)
    return bindings


def offered_of(plan: RunPlan, bindings: Mapping[str, ToolBinding]) -> dict[str, ToolSpec]:
    """Return the specifications of the tools that the run's agent has itself, in order."""
    names = [name for name in plan.offered if name not in HANDLER_ONLY]
    if plan.definition.output_schema is not None and "set_output" not in names:
        names.append("set_output")
    return {name: bindings[name].spec for name in names}


def run_control(run: RunState, name: str, value: JsonDict) -> ToolResult:
    """Carry out a control tool on the run; *value* is validated."""
    action: Callable[[RunState, JsonDict], ToolResult] = _ACTIONS[name]
    return action(run, value)


def _set_output(run: RunState, value: JsonDict) -> ToolResult:
    _warn_of_mode(run)
    candidates: list[JsonValue] = [value]
    if "data" in value and (run.plan.validate_output is not None or len(value) == 1):
        candidates.append(value["data"])
    if run.plan.validate_output is None:
        run.set_output(candidates[-1])
        return ToolResult.text("Output set.")
    refused: list[tuple[str, ...]] = []
    for candidate in candidates:
        try:
            run.set_output(run.check_output(candidate))
        except OutputMissing as error:
            refused.append(error.issues or (error.message,))
        else:
            return ToolResult.text("Output set.")
    run.refuse_output(min(refused, key=len))
    listed = "; ".join(run.output_issues)
    return ToolResult.error(f"Invalid output, the earlier one stays: {listed}. Given: {compact(value)}")


def _warn_of_mode(run: RunState) -> None:
    mode = run.agent.output_mode
    what = {"last_message": "in the place of its last message", "all_messages": "nowhere"}.get(mode)
    if what is None:
        return
    text = (
        f"agent {run.agent.id!r} calls set_output, but its output_mode is {mode!r}, where what is set stands {what}; "
        "say output_mode='structured_output'"
    )
    if text not in run.warnings:
        run.warn(text)
        run.side_events.warning(text)


def _set_messages(run: RunState, value: JsonDict) -> ToolResult:
    history = from_dicts(value["messages"])
    run.apply(Change(messages=history), "set_messages")
    return ToolResult.text(f"History replaced by {len(history)} messages.")


def _add_message(run: RunState, value: JsonDict) -> ToolResult:
    kind = UserMessage if value["role"] == "user" else AssistantMessage
    run.history.add([kind(value["content"], value.get("tags", ()), ttl=value.get("ttl"))])
    return ToolResult.text("Message added.")


def _end_turn(_: RunState, value: JsonDict) -> ToolResult:
    return ToolResult.text(value.get("message") or "Turn ended.")


def _task_completed(_: RunState, __: JsonDict) -> ToolResult:
    return ToolResult.text("Task completed.")


def _write_todos(run: RunState, value: JsonDict) -> ToolResult:
    run.apply(Change(context=JsonDict({"todos": value["todos"]})))
    done = sum(bool(todo["completed"]) for todo in value["todos"])
    return ToolResult.text(f"{done} of {len(value['todos'])} done.")


def _think_deeply(_: RunState, __: JsonDict) -> ToolResult:
    return ToolResult.text("Thought noted.")


def _lookup_agent_info(run: RunState, value: JsonDict) -> ToolResult:
    lookup = run.plan.agent_info
    try:
        if lookup is not None:
            return ToolResult.json({"found": True, "agent": lookup(value["agent_id"])})
        problem = "no other agents are known here"
    except AgentError as error:
        problem = error.message
    return ToolResult.json({"found": False, "error": problem})


_ACTIONS: Mapping[str, Callable[[Any, JsonDict], ToolResult]] = {
    "set_output": _set_output,
    "set_messages": _set_messages,
    "add_message": _add_message,
    "end_turn": _end_turn,
    "task_completed": _task_completed,
    "write_todos": _write_todos,
    "think_deeply": _think_deeply,
    "lookup_agent_info": _lookup_agent_info,
}
