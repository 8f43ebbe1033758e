"""
Control and expanding tools: their specifications, validation, and what control tools do to a run.

Control tools are done by the machine itself, with no effect and no record (design 3). Expanding tools become other
effects; the batch does that, here stand only their specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stepengine.data.json import JsonDict, JsonValue, compact, freeze
from stepengine.data.messages import AssistantMessage, Message, UserMessage
from stepengine.data.results import ToolResult
from stepengine.data.tools import ToolAnnotations, ToolBinding, ToolSpec, Validated
from stepengine.data.wire import from_dicts
from stepengine.errors import DataError, OutputMissing, ToolInputError, TranscriptError

if TYPE_CHECKING:
    from stepengine.machine.live import Live

__all__ = ("CONTROL_BINDINGS", "CONTROL_SPECS", "EXPANDING_SPECS", "HANDLER_ONLY", "run_control", "set_output_binding")

STRING = {"type": "string"}
HARMLESS = ToolAnnotations(read_only=True, idempotent=True)


def _object(required: tuple[str, ...] = (), **properties: Any) -> JsonDict:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return JsonDict(freeze(schema))


def _described(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {**schema, "description": text}


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
SPAWN_AGENTS = """\
Run one or more agents at the same time and get their results in order.

Usage: give one entry per agent with its id in `agent_type`, what it should do in `prompt`, and `params` if it takes any.
Examples: {"agents": [{"agent_type": "code-searcher", "params": {"search_queries": [{"pattern": "retry"}]}}]}
When not to use: for what one of your own tools does directly.
Notes: a child that fails gives an entry with `error`; the others are not affected."""
ASK_USER = """\
Ask the person one or more questions and wait for the answers.

Usage: give options when there are sensible choices; free text is always possible.
Examples: {"questions": [{"question": "Which database?", "options": ["PostgreSQL", "SQLite"]}]}
When not to use: for what you can find out with your tools.
Notes: the run pauses until somebody answers."""

_TODO = {
    "type": "object",
    "properties": {
        "task": _described(STRING, "What to do."),
        "completed": {"type": "boolean", "description": "Whether it is done."},
    },
    "required": ["task", "completed"],
    "additionalProperties": False,
}
_AGENT = {
    "type": "object",
    "properties": {
        "agent_type": _described(STRING, "The agent's id."),
        "prompt": _described(STRING, "What the agent should do."),
        "params": {"type": "object", "description": "The agent's parameters."},
    },
    "required": ["agent_type"],
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
        "question": _described(STRING, "The question."),
        "header": _described(STRING, "A short title."),
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
            _control("set_messages", SET_MESSAGES, _object(("messages",), messages={"type": "array"})),
            _control(
                "add_message",
                ADD_MESSAGE,
                _object(("role", "content"), role={"enum": ["user", "assistant"]}, content=STRING),
            ),
            _control(
                "end_turn",
                END_TURN,
                _object(message=_described(STRING, "A last word.")),
                ends_turn=True,
                forces_next_step=True,
            ),
            _control("task_completed", TASK_COMPLETED, _object(), ends_turn=True),
            _control(
                "write_todos",
                WRITE_TODOS,
                _object(("todos",), todos={"type": "array", "items": _TODO, "description": "The whole list."}),
                forces_next_step=True,
            ),
            _control("think_deeply", THINK_DEEPLY, _object(("thought",), thought=_described(STRING, "The thought."))),
        )
    }
)
"""The specifications of the control tools by name."""

EXPANDING_SPECS: Mapping[str, ToolSpec] = MappingProxyType(
    {
        "spawn_agents": ToolSpec(
            "spawn_agents",
            SPAWN_AGENTS,
            _object(
                ("agents",),
                agents={"type": "array", "items": _AGENT, "minItems": 1, "description": "The agents to run."},
            ),
            kind="expanding",
            category="agent",
            requires_permission=False,
        ),
        "ask_user": ToolSpec(
            "ask_user",
            ASK_USER,
            _object(
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


def _refused(tool: ToolSpec, issues: Sequence[str]) -> ToolInputError:
    listed = "; ".join(issues)
    msg = f"Invalid parameters for {tool.name}: {listed}"
    return ToolInputError(msg, tool_name=tool.name, issues=issues)


def _checked(spec: ToolSpec, also: Callable[[JsonDict], Iterator[str]] | None = None) -> ToolBinding:
    """Return a binding that checks the flat schemas of this file: known members, required ones, and simple types."""

    def validate(value: JsonDict) -> Validated:
        issues = list(_issues(spec.input_schema, value, ""))
        if also is not None and not issues:
            issues.extend(also(value))
        if issues:
            raise _refused(spec, issues)
        return Validated(value, value)

    return ToolBinding(spec, validate)


_TYPES: Mapping[str, tuple[Any, str]] = {
    "string": (str, "text"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (Mapping, "an object"),
}


def _issues(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    kind, word = _TYPES.get(schema.get("type", ""), (object, ""))
    if not isinstance(value, kind):
        yield f"{path or 'input'}: expected {word}, not {type(value).__name__}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: expected one of {list(schema['enum'])}, not {value!r}"
    elif kind is Mapping:
        yield from _member_issues(schema, value, path)
    elif kind is list:
        yield from _item_issues(schema, value, path)


def _item_issues(schema: Mapping[str, Any], value: Sequence[Any], path: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{path}: at least {schema['minItems']} needed"
    for index, item in enumerate(value):
        yield from _issues(schema.get("items", {}), item, f"{path}[{index}]")


def _member_issues(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{prefix}{name}: missing"
    for name, member in value.items():
        if name in properties:
            yield from _issues(properties[name], member, f"{prefix}{name}")
        elif not schema.get("additionalProperties", True):
            yield f"{prefix}{name}: unknown; known are {sorted(properties)}"


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
                yield from _issues(_OPTION, option, f"{path}[{position}]")


CONTROL_BINDINGS: Mapping[str, ToolBinding] = MappingProxyType(
    {
        **{name: _checked(spec) for name, spec in CONTROL_SPECS.items()},
        "set_messages": _checked(CONTROL_SPECS["set_messages"], _message_issues),
        "spawn_agents": _checked(EXPANDING_SPECS["spawn_agents"]),
        "ask_user": _checked(EXPANDING_SPECS["ask_user"], _question_issues),
    }
)
"""What every machine knows, control and expanding tools alike."""


def set_output_binding(schema: JsonDict) -> ToolBinding:
    """Return ``set_output`` as an agent with an ``output_schema`` has it: the schema itself, or wrapped in ``data``."""
    is_object = schema.get("type") == "object"
    shown = schema if is_object else _object(("data",), data=schema)
    spec = CONTROL_SPECS["set_output"]
    described = ToolSpec(spec.name, spec.description, shown, **_flags(spec))
    return ToolBinding(described, lambda value: Validated(value, value))


def _flags(spec: ToolSpec) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "category": spec.category,
        "annotations": spec.annotations,
        "requires_permission": spec.requires_permission,
        "forces_next_step": spec.forces_next_step,
    }


def run_control(live: Live, name: str, value: JsonDict) -> ToolResult:
    """Carry out a control tool on the run; *value* is validated."""
    action: Callable[[Live, JsonDict], ToolResult] = _ACTIONS[name]
    return action(live, value)


def _set_output(live: Live, value: JsonDict) -> ToolResult:
    candidates: list[JsonValue] = [value]
    if "data" in value and (live.plan.validate_output is not None or len(value) == 1):
        candidates.append(value["data"])
    if live.plan.validate_output is None:
        live.set_output(candidates[-1])
        return ToolResult.text("Output set.")
    refused: list[tuple[str, ...]] = []
    for candidate in candidates:
        try:
            live.set_output(live.check_output(candidate))
        except OutputMissing as error:
            refused.append(error.issues or (error.message,))
        else:
            return ToolResult.text("Output set.")
    live.output_issues = min(refused, key=len)
    listed = "; ".join(live.output_issues)
    return ToolResult.error(f"Invalid output, the earlier one stays: {listed}. Given: {compact(value)}")


def _set_messages(live: Live, value: JsonDict) -> ToolResult:
    history = from_dicts(value["messages"])
    live.replace_history(history)
    return ToolResult.text(f"History replaced by {len(history)} messages.")


def _add_message(live: Live, value: JsonDict) -> ToolResult:
    message: Message = UserMessage(value["content"]) if value["role"] == "user" else AssistantMessage(value["content"])
    live.add([message])
    return ToolResult.text("Message added.")


def _end_turn(_: Live, value: JsonDict) -> ToolResult:
    return ToolResult.text(value.get("message") or "Turn ended.")


def _task_completed(_: Live, __: JsonDict) -> ToolResult:
    return ToolResult.text("Task completed.")


def _write_todos(live: Live, value: JsonDict) -> ToolResult:
    live.set_context("todos", value["todos"])
    done = sum(bool(todo["completed"]) for todo in value["todos"])
    return ToolResult.text(f"{done} of {len(value['todos'])} done.")


def _think_deeply(_: Live, __: JsonDict) -> ToolResult:
    return ToolResult.text("Thought noted.")


_ACTIONS: Mapping[str, Callable[[Any, JsonDict], ToolResult]] = {
    "set_output": _set_output,
    "set_messages": _set_messages,
    "add_message": _add_message,
    "end_turn": _end_turn,
    "task_completed": _task_completed,
    "write_todos": _write_todos,
    "think_deeply": _think_deeply,
}
