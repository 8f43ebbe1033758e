"""What a pruned history keeps of tool calls: one line per call, and the few results that matter (generator-contract P17-P19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stepengine.data.json import compact
from stepengine.data.messages import JsonPart, ToolCallPart, ToolMessage
from stepengine.data.thoughts import parted

__all__ = ("FORGOTTEN_AGENTS", "clipped", "cut", "line_of", "result_of")

CHARS_PER_TOKEN = 3
NOTICE_CHARS = 50
HEAD_SHARE = 0.8
COMMAND_CHARS = 50
QUESTION_CHARS = 200
AGENT_CHARS = 1_000
ERROR_CHARS = 100
ANSWER_CHARS = 10_000
EDIT_CHARS = 2_000
OUTPUT_TOKENS = 1_300
RESULT_TOKENS = 5_000

FORGOTTEN_AGENTS = (
    "file-picker",
    "researcher-web",
    "researcher-docs",
    "basher",
    "code-reviewer",
    "code-reviewer-opus",
    "code-reviewer-multi-prompt",
    "librarian",
    "tmux-cli",
    "browser-use",
)
"""Agents whose outputs are not kept: what they found was used at once (generator-contract P19)."""
EDITING = ("write_file", "str_replace", "apply_patch", "propose_write_file", "propose_str_replace")
SPAWNING = ("spawn_agents", "spawn_agent_inline", "task")


def cut(text: str, tokens: int) -> str:
    """Return *text* cut to three characters per token: 80 % of its head, 20 % of its tail, and how much is missing."""
    limit = tokens * CHARS_PER_TOKEN
    if len(text) <= limit:
        return text
    kept = max(0, limit - NOTICE_CHARS)
    head = int(kept * HEAD_SHARE)
    tail = text[len(text) - (kept - head) :]
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{tail}"


def clipped(text: str, chars: int) -> str:
    """Return *text* on one line and at most *chars* characters long."""
    line = " ".join(text.split())
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def _said(value: Any) -> str:
    """Return a JSON value as text: strings as they are, lists of them joined by commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return "" if value is None else compact(value)


def _paths(given: Mapping[str, Any]) -> str:
    paths = given.get("paths") or given.get("path")
    listed = paths if isinstance(paths, list) else [paths]
    return ", ".join([_said(p.get("path") if isinstance(p, Mapping) else p) for p in listed])


def _patched(given: Mapping[str, Any]) -> str:
    operation = given.get("operation")
    return f"Edited {_said(operation.get('path') if isinstance(operation, Mapping) else None)}"


def _search(given: Mapping[str, Any]) -> str:
    flags = _said(given.get("flags"))
    return f"Searched code for {_said(given.get('pattern'))}" + (f" ({flags})" if flags else "")


def _command(given: Mapping[str, Any]) -> str:
    command = given.get("command")
    words = " ".join(map(_said, command)) if isinstance(command, list) else _said(command)
    return f"Ran {clipped(words, COMMAND_CHARS)}"


def _docs(given: Mapping[str, Any]) -> str:
    return f"Read docs: {_said(given.get('library_title'))} - {_said(given.get('topic'))}"


def _members(given: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = given.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _todos(given: Mapping[str, Any]) -> str:
    todos = _members(given, "todos")
    left = [_said(t.get("task")) for t in todos if not t.get("completed")]
    return f"Todos: {len(todos) - len(left)} of {len(todos)} done" + (f"; left: {'; '.join(left)}" if left else "")


def _questions(given: Mapping[str, Any]) -> str:
    asked = [_said(q.get("question")) for q in _members(given, "questions")]
    return f"Asked the user: {clipped(' / '.join(asked), QUESTION_CHARS)}"


def _agents(given: Mapping[str, Any]) -> str:
    shown = []
    for agent in _members(given, "agents") or [given]:
        name = _said(agent.get("agent_type") or agent.get("agent"))
        parts = [_said(agent.get("prompt")), compact(agent["params"]) if agent.get("params") else ""]
        said = [clipped(part, AGENT_CHARS) for part in parts if part]
        shown.append(f"{name} ({'; '.join(said)})" if said else name)
    return f"Delegated to {', '.join(shown)}"


def _about(verb: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda given: f"{verb} {_said(given.get(name))}"


LINES: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "read_files": lambda given: f"Read {_paths(given)}",
        "write_file": _about("Wrote", "path"),
        "str_replace": _about("Edited", "path"),
        "apply_patch": _patched,
        "propose_write_file": _about("Proposed to write", "path"),
        "propose_str_replace": _about("Proposed to edit", "path"),
        "read_subtree": lambda given: f"Read the tree of {_paths(given) or '.'}",
        "code_search": _search,
        "glob": _about("Listed files like", "pattern"),
        "list_directory": _about("Listed the directory", "path"),
        "find_files": _about("Looked for files:", "prompt"),
        "run_terminal_command": _command,
        "read_url": _about("Read", "url"),
        "web_search": _about("Searched the web for", "query"),
        "read_docs": _docs,
        "write_todos": _todos,
        "ask_user": _questions,
        **dict.fromkeys(SPAWNING, _agents),
        "set_output": lambda _: "Set the output",
        "set_messages": lambda _: "Changed the messages",
    }
)
"""What a call of a tool did, from its input (generator-contract P17); of other tools the name is kept."""


def _agent_of(call: ToolCallPart) -> str:
    """Return which agent a call hands its whole task to: that of ``task``, or the one that the tool stands for, or ``""``."""
    if call.tool_name == "task":
        return _said(call.input.get("agent"))
    is_agent = call.tool_name not in LINES and "prompt" in call.input and call.input.keys() <= {"prompt", "params"}
    return call.tool_name.replace("_", "-") if is_agent else ""


def line_of(call: ToolCallPart) -> str:
    """Return one line that says what a call did to what."""
    describe, agent = LINES.get(call.tool_name), _agent_of(call)
    if agent and describe is None:
        line = _agents({**call.input, "agent_type": agent})
    else:
        line = call.tool_name if describe is None else describe(call.input)
    return f"- {' '.join(line.split())}"


def _data(message: ToolMessage) -> Any:
    """Return the JSON value of a result, or ``None`` when it is text."""
    return next((part.value for part in message.content if isinstance(part, JsonPart)), None)


def result_of(message: ToolMessage, call: ToolCallPart, forgotten: frozenset[str]) -> str:
    """
    Return what is kept of a result, ``""`` for nothing (generator-contract P18).

    Args:
        message: The result.
        call: Its call.
        forgotten: Agents whose outputs are not kept.
    """
    kept = cut("\n".join(_kept(message, call, forgotten)), RESULT_TOKENS)
    return f"[{message.tool_name} result]\n{kept}" if kept else ""


def _kept(message: ToolMessage, call: ToolCallPart, forgotten: frozenset[str]) -> Iterator[str]:
    data, agent = _data(message), _agent_of(call)
    if children := _children(data):
        yield from _outputs(children, forgotten)
    elif message.is_error:
        yield from _failure(data, message.text)
    elif agent:
        yield from _outputs([{"agent_type": agent, "output": message.text}], forgotten)
    elif message.tool_name == "ask_user":
        yield from _answers(data)
    elif message.tool_name in EDITING:
        yield _limited(message.text, EDIT_CHARS)
    else:
        yield from _failure(data, "")


def _failure(data: Any, text: str) -> Iterator[str]:
    """Give the exit code of a result when it is not 0, and its error, *text* when the data name neither."""
    fields = data if isinstance(data, Mapping) else {}
    code = fields.get("exit_code", fields.get("exitCode"))
    if isinstance(code, int) and code:
        yield f"Exit code {code}"
    said = fields.get("error_message") or fields.get("errorMessage") or ("" if code else text)
    if said:
        yield f"Error: {clipped(_said(said), ERROR_CHARS)}"


def _limited(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _answers(data: Any) -> Iterator[str]:
    if not isinstance(data, Mapping) or data.get("skipped"):
        yield "The user skipped the question."
    else:
        answers = [_said(a.get("selected") or a.get("text")) for a in _members(data, "answers")]
        yield _limited(f"The user answered: {'; '.join(answers)}", ANSWER_CHARS)


def _children(data: Any) -> list[Mapping[str, Any]]:
    """Return the entries of a result that lists agents, known by its form: such a tool may have any name."""
    listed = data if isinstance(data, list) else []
    return [entry for entry in listed if isinstance(entry, Mapping) and "agent_type" in entry]


def _outputs(children: Sequence[Mapping[str, Any]], forgotten: frozenset[str]) -> Iterator[str]:
    for child in children:
        name = _said(child.get("agent_type"))
        if "error" in child:
            yield f"{name} failed: {clipped(_said(child['error']), ERROR_CHARS)}"
        if name not in forgotten and (said := parted(_said(child.get("output"))).said.strip()):
            yield f"{name}: {cut(said, OUTPUT_TOKENS)}"
