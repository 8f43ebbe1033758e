"""
The text of a tool call for people: its subject, its shell command, its diff, and the parts of its preview.

Every surface takes these from here and only draws them. Texts are as the model or tool gave them: a surface escapes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from stepengine.data.codec import plain
from stepengine.data.questions import Question

NEEDS_A_SHELL = "needs_a_shell_because_of"
"""The detail with the reason why a command is a script."""
DIFFS = ("unified_diff", "diff")
FILES = ("path", "file_path", "file")
SUBJECTS = (*FILES, "paths", "files", "pattern", "query", "url", "agent_type", "name")
"""Members of an input, the first of which names the subject of a call."""


class PreviewPart(NamedTuple):
    """
    A part of the preview of a call.

    Attributes:
        kind: ``"action"``, the summary; ``"command"``, a line for a shell; ``"diff"``; ``"member"``, any other value.
        name: The name of the member; ``""`` for the others, and for details that are no object.
        value: A text; of a member any JSON.
    """

    kind: Literal["action", "command", "diff", "member"]
    name: str
    value: object


class TodoItem(NamedTuple):
    """A todo of an agent: its task, and whether it is done."""

    task: str
    completed: bool


def preview_parts(preview: Mapping[str, object]) -> Iterator[PreviewPart]:
    """Yield the parts of a preview; the command replaces the members that repeat it."""
    if preview.get("action"):
        yield PreviewPart("action", "", str(preview["action"]))
    details = plain(preview.get("details"))
    if not isinstance(details, dict):
        if details is not None:
            yield PreviewPart("member", "", details)
        return
    command, is_shown = find_shell_command(details), False
    for name, value in details.items():
        is_diff = name in DIFFS and isinstance(value, str)
        if not command or not (value == command or _is_command_as_list(value, command)):
            if not command or (name, value) != ("cwd", "."):
                yield PreviewPart("diff" if is_diff else "member", name, value)
        elif not is_shown:
            is_shown = True
            yield PreviewPart("command", "", command)


def _is_command_as_list(value: object, command: str) -> bool:
    return isinstance(value, list) and find_shell_command({"argv": value}) == command


def find_shell_command(details: object) -> str:
    """
    Return the command in a tool's input or preview as it is typed in a shell; ``""`` where there is none.

    Next to a file, ``command`` is a word of the tool's own, such as the ``view`` of an editor.
    """
    if not isinstance(details, Mapping) or any(name in details for name in FILES):
        return ""
    for name in ("command", "argv", *(("script",) if NEEDS_A_SHELL in details else ())):
        value = details.get(name)
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value):
            return shlex.join(value)
    return ""


def find_call_subject(tool_input: object) -> str:
    """Return the command, file, pattern or URL in a tool's input; ``""`` where there is none."""
    if not isinstance(tool_input, Mapping):
        return ""
    value = find_shell_command(tool_input) or next((tool_input[name] for name in SUBJECTS if tool_input.get(name)), "")
    several = value if isinstance(value, list | tuple) else ()
    return value if isinstance(value, str) else ", ".join(map(str, several))


def find_question_diff(question: Question) -> str:
    """Return the unified diff that a permission question shows; ``""`` when it shows none."""
    details = None if question.preview is None else question.preview["details"]
    found = [details.get(name) for name in DIFFS] if isinstance(details, Mapping) else []
    return next((diff for diff in found if isinstance(diff, str)), "")


def find_result_diff(data: object) -> str:
    """Return the unified diff of a file that a tool wrote, from the data of its result; ``""`` when it wrote none."""
    diff = data.get("unified_diff") if isinstance(data, Mapping) else None
    return diff if isinstance(diff, str) else ""


def parse_todos(todos: object) -> list[TodoItem]:
    """Return the valid todos in the stored value of an agent, which its tools and hooks may have replaced; other items are skipped."""
    found = [todo for todo in todos if isinstance(todo, Mapping)] if isinstance(todos, list | tuple) else []
    return [TodoItem(todo["task"], bool(todo.get("completed"))) for todo in found if isinstance(todo.get("task"), str)]
