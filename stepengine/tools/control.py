"""
The tools that a run executes itself, and ``ask_user``.

This module contains their descriptions, their schemas, and the validation of their inputs. The machine implements their effects
on a run; it receives the tools as bindings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs

from stepengine.data.json import JsonDict, freeze, freeze_object
from stepengine.data.messages import ToolResult
from stepengine.data.questions import Answer, Interactor, Question, validate_interactor
from stepengine.data.result_cuts import ShortenJson
from stepengine.data.schemas import nest_schema_under_property
from stepengine.data.tools import Action, Asking, Control, Runs, ToolAnnotations, ToolBinding, ToolSpec, Validated
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, TranscriptError
from stepengine.machine.control import HANDLER_ONLY
from stepengine.tools.definition import Tool
from stepengine.tools.repair import Aliases, make_repairer
from stepengine.tools.schemas import STRING, UNFIT_AT_TOP, make_object_schema, make_validator, with_description

HARMLESS = ToolAnnotations(read_only=True, idempotent=True)
ALIASES: Aliases = {
    "agents.agent_type": ("agent", "agent_id", "agentId"),
    "agent_type": ("agent", "agent_id", "agentId"),
    "questions.multi_select": ("multiple",),
}

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
HAND_OFF = """\
Hand the conversation over to another agent, which answers from now on.

Usage: give the id of one of the agents that you may run; it sees the whole conversation.
Examples: {"agent": "billing"}
When not to use: to get a result that you need yourself; run the agent instead.
Notes: your turn ends with this call; calls after it in the same reply are not executed."""
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
FIND = """\
Search for further tools by words: there are more than you are shown.

Usage: give words of what you want to do, or a name; what is found can be called from then on.
Examples: {"query": "exchange rate"}
When not to use: for tools that you are shown.
Notes: the best few are found; a search that finds nothing need not be repeated with the same words."""
ASK_USER = """\
Ask the person one or more questions and wait for the answers.

Usage: give options when there are sensible choices; free text is always possible.
Examples: {"questions": [{"question": "Which database?", "options": ["PostgreSQL", "SQLite"]}]}
When not to use: for what you can find out with your tools.
Notes: the run pauses until somebody answers."""

_TODO = {
    "type": "object",
    "properties": {
        "task": with_description(STRING, "What to do."),
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
        "question": with_description(STRING, "The question."),
        "header": with_description(STRING, "A short title."),
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


def make_tool_with_validation(
    spec: ToolSpec,
    runs: Runs,
    find_more_issues: Callable[[JsonDict], Iterator[str]] | None = None,
    *,
    shorten_json: ShortenJson | None = None,
) -> Tool:
    """Return a tool that a run itself executes, as *runs* says; inputs are repaired, then validated by schema and *find_more_issues*."""
    validate = make_validator(spec.name, spec.input_schema, find_more_issues)
    mend = make_repairer(spec.input_schema, ALIASES)
    return Tool.for_binding(ToolBinding(spec, validate, mend, runs=runs, shorten_json=shorten_json))


def _find_message_issues(value: JsonDict) -> Iterator[str]:
    """Yield an issue if the messages are not a valid transcript."""
    try:
        Transcript.from_dicts(value["messages"])
    except (TranscriptError, DataError) as error:
        yield f"messages: {error.message}"


def _find_option_issues(value: JsonDict) -> Iterator[str]:
    """Yield an issue for each question with exactly one option."""
    for index, question in enumerate(value["questions"]):
        if len(question.get("options", ())) == 1:
            yield f"questions.{index}.options: none or at least two, not one"


def _make_control_tool(
    name: Action,
    description: str,
    schema: JsonDict,
    find_more_issues: Callable[[JsonDict], Iterator[str]] | None = None,
    **flags: Any,
) -> Tool:
    """Return a control tool; by default it is read-only, needs no permission and forces no next step."""
    flags = {
        "category": "control",
        "annotations": HARMLESS,
        "requires_permission": False,
        "forces_next_step": False,
        **flags,
    }
    return make_tool_with_validation(ToolSpec(name, description, schema, **flags), Control(name), find_more_issues)


@cache
def get_control_tools_by_name() -> Mapping[str, Tool]:
    """Return the control tools by name; they are created at the first call."""
    made = (
        _make_control_tool("set_output", SET_OUTPUT, FREE_OUTPUT),
        _make_control_tool(
            "set_messages",
            SET_MESSAGES,
            make_object_schema(("messages",), messages={"type": "array"}),
            _find_message_issues,
        ),
        _make_control_tool(
            "add_message",
            ADD_MESSAGE,
            make_object_schema(
                ("role", "content"),
                role={"enum": ["user", "assistant"]},
                content=STRING,
                tags={"type": "array", "items": STRING},
                ttl={"enum": ["agent_step", "user_prompt"]},
            ),
        ),
        _make_control_tool(
            "end_turn",
            END_TURN,
            make_object_schema(message=with_description(STRING, "A last word.")),
            ends_turn=True,
            forces_next_step=True,
        ),
        _make_control_tool(
            "hand_off",
            HAND_OFF,
            make_object_schema(("agent",), agent=with_description(STRING, "The agent's id.")),
            ends_turn=True,
            forces_next_step=True,
        ),
        _make_control_tool("task_completed", TASK_COMPLETED, make_object_schema(), ends_turn=True),
        _make_control_tool(
            "write_todos",
            WRITE_TODOS,
            make_object_schema(("todos",), todos={"type": "array", "items": _TODO, "description": "The whole list."}),
            forces_next_step=True,
        ),
        _make_control_tool(
            "think_deeply",
            THINK_DEEPLY,
            make_object_schema(("thought",), thought=with_description(STRING, "The thought.")),
        ),
    )
    return MappingProxyType({tool.name: tool for tool in made})


def make_lookup_agent_info_tool() -> Tool:
    """Return the tool ``lookup_agent_info``, which describes an agent of the engine."""
    return _make_control_tool(
        "lookup_agent_info",
        LOOKUP_AGENT_INFO,
        make_object_schema(("agent_id",), agent_id=with_description(STRING, "The agent's id.")),
        category="read",
        forces_next_step=True,
        about=(),
    )


def make_find_tools_tool() -> Tool:
    """Return the tool ``find_tools``, which searches for tools that the model has not received."""
    return _make_control_tool(
        "find_tools",
        FIND,
        make_object_schema(("query",), query=with_description(STRING, "Words of names and descriptions.")),
        category="read",
        forces_next_step=True,
        about=(),
    )


def make_set_output_binding(schema: JsonDict) -> ToolBinding:
    """
    Return the binding of ``set_output`` for an output schema; a schema that providers reject as input is wrapped in ``data``.

    The binding validates nothing. The machine validates the input by the agent's own ``OutputSchema``.
    """
    free = get_control_tools_by_name()["set_output"].binding()
    # Providers reject such schemas for the input of a tool.
    if schema.get("type") != "object" or any(word in schema for word in UNFIT_AT_TOP):
        inner, definitions = nest_schema_under_property(schema, "data")
        schema = freeze_object({**make_object_schema(("data",), data=inner), **definitions})
    spec = attrs.evolve(free.spec, input_schema=schema)
    return ToolBinding(spec, lambda value: Validated(value, value), runs=free.runs)


def control_tools() -> list[Tool]:
    """
    Return ``set_output``, ``end_turn``, ``task_completed``, ``write_todos`` and ``think_deeply``.

    Handlers may always use them. Pass them to an agent to offer them to its model. The list does not contain ``set_messages``
    and ``add_message``, which are only for handlers, and ``hand_off``, which is for agents with ``spawnable_agents``.
    """
    without = (*HANDLER_ONLY, "hand_off")
    return [tool for name, tool in get_control_tools_by_name().items() if name not in without]


def _parse_questions(value: JsonDict) -> list[Question]:
    """Return the questions in a call's input, with empty ids; a question with options also accepts a text."""
    return [
        Question(
            "",
            q["question"],
            q.get("options", ()),
            q.get("multi_select", False),
            allow_text=bool(q.get("options")),
            descriptions=_get_option_descriptions(q.get("options", ())),
        )
        for q in value["questions"]
    ]


def _get_option_descriptions(options: Sequence[object]) -> list[str]:
    """Return the description of each option, ``""`` for a missing one; an empty list if no option has a description."""
    said = [str(option.get("description") or "") if isinstance(option, Mapping) else "" for option in options]
    return said if any(said) else []


def _result_from_answers(answers: Sequence[Answer]) -> ToolResult:
    """Return a result with the index and answer of each question; with ``skipped`` if all questions were declined."""
    if all(a.declined for a in answers):
        return ToolResult.json({"skipped": True})
    entries: list[Any] = [{"question_index": i, **_answer_to_json(a)} for i, a in enumerate(answers)]
    return ToolResult.json({"answers": entries})


def _answer_to_json(answer: Answer) -> dict[str, Any]:
    """Return the selected options and the text of an answer as JSON; a declined answer has an empty text."""
    if answer.declined:
        return {"text": ""}
    selected = {"selected": list(answer.selected)} if answer.selected else {}
    return {**selected, "text": answer.text} if answer.text or not selected else selected


def ask_user_tool(interactor: Interactor | None = None) -> Tool:
    """
    Return ``ask_user``, by which a model asks a person questions.

    Args:
        interactor: An object with a method ``ask(question)`` that answers the questions of this tool in process. By default
            the engine's interactor answers, or the run is suspended.

    Raises:
        DefinitionError: If *interactor* has no such method.
    """
    somebody = validate_interactor(interactor, "ask_user_tool(interactor)")
    questions = {"type": "array", "items": _QUESTION, "minItems": 1, "description": "The questions."}
    spec = ToolSpec(
        "ask_user",
        ASK_USER,
        make_object_schema(("questions",), questions=questions),
        category="ask",
        requires_permission=False,
    )
    return make_tool_with_validation(
        spec, Asking(_parse_questions, _result_from_answers, somebody), _find_option_issues
    )
