# ruff: noqa: INP001
"""Write ``docs/reference/bundled-tools.md`` from what the tools say of themselves: ``python docs/make_bundled_tools.py``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from stepengine.tools.bundled import shapes
from stepengine.tools.bundled.reference import Form, Parameter, ResultKey, ToolPage, document_tools

TARGET = Path(__file__).parent / "reference" / "bundled-tools.md"
HEAD = """\
# The bundled tools

What every tool of the package takes and gives, when it fails, and what its limits are.

Made by `python docs/make_bundled_tools.py`; do not edit it by hand. `stepengine agents tools NAME` says the same in a terminal, with `--json`
for programs. Which set is made how is told in [What comes with it](../bundled.md), and what may be denied in
[Permissions](../permissions.md).

A tool gives one JSON value, or a text. A handler has it in three ways:

```python
from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall, call
from stepengine.tools.bundled import code_search, read_files


def handle_steps(ctx: StepContext) -> Steps[list[object]]:
    turn = yield ToolCall("read_files", {"paths": ["README.md", "nowhere"]})
    entries = turn.tool_result.data  # any JSON; an error is a result with `is_error`
    result = yield from ToolCall("read_files", {"paths": ["README.md"]})  # a `ToolResult`; an error is raised
    found = yield from call(code_search, "stepengine", flags="-w")  # a `SearchResult`: type checkers know its keys
    (entry,) = yield from call(read_files, ["README.md"], limit=1)
    return ["error" in entries[1], result.is_error, found["count"] > 0, entry["content"]]


agent = AgentDefinition("looker", tools=[read_files, code_search], handle_steps=handle_steps)
with Engine([agent], workspace=".") as engine:
    assert engine.run_sync(agent).output == [True, False, True, "# stepengine\\n"]
```

`read_files`, `code_search` and the others in `stepengine.tools.bundled` are names with types: they stand wherever a name of a tool may, and
`call` is typed by them. They make nothing; the engine's workspace does. The classes of results are in
[stepengine.tools.bundled.shapes](stepengine.tools.bundled.shapes.md).

What holds for all of them: input is checked against the schema before anything runs, and refused with the fields that do not fit
(`ToolInputError` at a handler's yield); what fails is an error result with a text that says why (`turn.tool_result.is_error`), which
`yield from` raises as `ToolError`; a call takes 120 seconds at most unless its limits say otherwise; a model is shown 100,000
characters of a result, and `call` gives all of it.
"""
FILE = {"file": "file", "message": "message"}
ENDED = {
    "command": "command", "exit_code": "exitCode", "signal": "", "duration_seconds": "", "message": "message", "stdout": "stdout",
    "stderr": "stderr", "truncated": "",
}  # fmt: skip
CODEBUFF: Mapping[str, Mapping[str, str]] = {
    "FileEntry": {
        "path": "path", "content": "content", "error": "in `content`, as a status", "total_lines": "", "offset": "", "has_more": "",
        "hash": "", "message": "",
    },
    "Listing": {"files": "files", "directories": "directories", "path": "path", "message": ""},
    "TreeEntry": {
        "path": "path", "type": "type", "printed_tree": "printedTree", "token_count": "tokenCount",
        "truncation_level": "truncationLevel", "variables": "variables", "message": "", "error": "errorMessage",
    },
    "WrittenFile": FILE,
    "EditedFile": {**FILE, "unified_diff": "unifiedDiff (of proposals)"},
    "FilesByPattern": {"files": "files", "count": "count", "message": "message"},
    "FilesByDescription": {"files": "the files themselves, as of read_files", "symbols": "", "message": "message"},
    "SearchResult": {"stdout": "stdout", "message": "message", "count": "", "matches": "", "stderr": "stderr"},
    "CommandResult": ENDED,
    "StartedJob": {"command": "", "job_id": "", "pid": "", "message": "", "output_file": ""},
    "JobStatus": {},
    "HookEntry": {"hook_name": "hookName", **ENDED, "message": "", "error": "errorMessage"},
    "WebResults": {"results": "result, as JSON text", "message": ""},
    "Documentation": {"documentation": "documentation", "message": ""},
    "WebPage": {
        "url": "url", "final_url": "finalUrl", "status": "status", "content_type": "contentType", "title": "title",
        "description": "description", "text": "text", "truncated": "truncated", "message": "",
    },
    "Confirmation": {"message": "message"},
    "Answers": {"answers": "answers", "skipped": "skipped"},
    "AnswerGiven": {
        "question_index": "questionIndex", "selected": "selectedOption, selectedOptions", "text": "otherText",
    },
    "ChildEntry": {
        "agent_type": "agentType", "run_id": "", "status": "", "output": "value",
        "error": "value.errorMessage, value.message",
    },
    "AgentInfo": {"found": "found", "agent": "agent", "error": "error"},
    "AgentFacts": {
        "id": "id", "full_agent_id": "fullAgentId", "display_name": "displayName", "model": "model", "tool_names": "toolNames",
        "spawnable_agents": "spawnableAgents", "include_message_history": "includeMessageHistory",
        "spawner_prompt": "spawnerPrompt", "input_schema": "inputSchema", "output_mode": "outputMode",
        "output_schema": "outputSchema",
    },
}  # fmt: skip
"""The key at codebuff by the key here; ``""`` for what it does not have, nothing for tools that it does not have."""
INPUTS = """
## Objects in inputs

Type checkers know the objects in inputs by these classes of `stepengine.tools.bundled.shapes`.

| class | content | keys |
|---|---|---|
"""
BESIDE = """
## Keys of results, here and at codebuff

For handlers that are ported: what a result's key is called there. `-` has no counterpart. A result there is a list of parts whose first
one holds the value; here `turn.tool_result.data` is the value. A failure there is a value with `errorMessage`; here it is an error
result (`is_error`, and its `text`), or `error` in the entry that it concerns. A text there is
`{message}`, as the results of the control tools are here.

| tool | here | at codebuff |
|---|---|---|
"""


def cell(text: str) -> str:
    """Return text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def parameter(one: Parameter) -> str:
    """Return the row of a parameter."""
    default = "required" if one.is_required else "" if one.default is None else f"`{json.dumps(one.default)}`"
    return f"| `{one.name}` | {cell(one.type)} | {default} | {cell(one.text)} |"


def rows(form: Form, above: str = "") -> Iterator[str]:
    """Give the rows of the keys of a form."""
    for key in form.keys:
        known = key.form is not None and key.form.shape in shapes.__all__
        kind = f"{cell(key.type)} (`{key.form.shape}`)" if known else cell(key.type)
        yield f"| `{above}{key.name}` | {kind} | {'always' if key.is_always else ''} | {cell(key.text)} |"
        if key.form is not None:
            yield from rows(key.form, inner(above, key))


def given(form: Form, *, is_other: bool) -> Iterator[str]:
    """Give what a form says."""
    gives = 'With `process_type="BACKGROUND"` it gives' if is_other else "Gives"
    if not form.shape:
        yield from (f"{gives} a text.", "")
        return
    each = ", each" if form.type.startswith("list") else ""
    yield from (f"{gives} {'an' if form.type == 'object' else 'a'} {form.type} (`{form.shape}`){each} with:", "")
    yield from ("| key | | | |", "|---|---|---|---|", *rows(form), "")


def section(one: ToolPage) -> Iterator[str]:
    """Give the section of a tool."""
    yield from (f"### {one.name}", "", one.text, "")
    if one.parameters:
        yield from ("| takes | | default | |", "|---|---|---|---|", *map(parameter, one.parameters), "")
    for number, form in enumerate(one.forms):
        yield from given(form, is_other=number > 0)
    yield from (f"**Fails**: {one.errors}", "", f"**Limits**: {one.limits}", "")
    yield from ("```json", json.dumps(one.example, ensure_ascii=False), "```", "")


def beside() -> Iterator[str]:
    """Give the rows of the table of keys here and at codebuff."""
    for one in document_tools():
        for number, form in enumerate(one.forms):
            name = f"`{one.name}` in the background" if number else f"`{one.name}`"
            yield from [f"| {name} | {line}" for line in pairs(form)]


def pairs(form: Form, above: str = "") -> Iterator[str]:
    """Give the last two columns for each key of a form; none for one that codebuff does not have."""
    names = CODEBUFF.get(form.shape, {})
    for key in form.keys if names else ():
        yield f"`{above}{key.name}` | {theirs(names[key.name])} |"
        if key.form is not None:
            yield from pairs(key.form, inner(above, key))


def inner(above: str, key: ResultKey) -> str:
    """Return what stands before the names of keys that are inside of a key."""
    return f"{above}{key.name}{'[]' if key.type.startswith('list') else ''}."


def theirs(text: str) -> str:
    """Return how a key is called at codebuff: a name as code, words as they are."""
    name, _, words = text.partition(" ")
    return f"`{name}`{f' {words}' if words else ''}" if name.isidentifier() and not words else text or "-"


def input_objects() -> Iterator[str]:
    """Give the rows of the objects in inputs: the classes that are neither a result nor a part of one."""
    in_results = {name for one in document_tools() for form in one.forms for name in names_in(form)}
    for name in shapes.__all__:
        if name not in in_results:
            cls = getattr(shapes, name)
            keys = [f"`{key}`" if key in cls.__required_keys__ else f"`{key}`, optional" for key in cls.__annotations__]
            yield f"| `{name}` | {inspect.getdoc(cls)} | {'; '.join(keys)} |"


def names_in(form: Form) -> Iterator[str]:
    """Give the names of the classes of a result and of the objects in it."""
    yield form.shape
    for key in form.keys:
        if key.form is not None:
            yield from names_in(key.form)


def page() -> str:
    """Return the whole page."""
    lines: list[str] = []
    for maker, found in groupby(document_tools(), lambda one: one.maker):
        lines += [f"## {f'`{maker}`' if maker else 'Known to every run'}", ""]
        for one in found:
            lines += section(one)
    inputs = INPUTS + "\n".join(input_objects()) + "\n"
    return HEAD + "\n" + "\n".join(lines).rstrip() + "\n" + inputs + BESIDE + "\n".join(beside()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
