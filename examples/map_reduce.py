"""
Map and reduce: one agent per file, several in parallel, then one model call over their results.

``python examples/map_reduce.py`` needs no key: a function replaces the model, and the files are real. To call a real model, omit
``models=`` and set ANTHROPIC_API_KEY.
"""

import tempfile
from pathlib import Path

from stepengine import AgentDefinition, Complete, Engine, StepContext, Steps, ToolCall, map_agents
from stepengine.models import ModelRequest
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import file_tools, search_tools

FILES = {"monday.txt": "Rain. 3 customers.", "tuesday.txt": "Sun. 9 customers.", "wednesday.txt": "\0"}


def summarise(ctx: StepContext) -> Steps[str]:
    """Map: the file is read before the model is asked, so a file that cannot be read costs nothing."""
    turn = yield ToolCall("read_files", {"paths": [ctx.prompt]})
    (file,) = turn.tool_results[0].data
    if "content" not in file:
        raise ValueError(file["error"])
    reply = yield from Complete(f"Say in a sentence what matters here:\n{file['content']}")
    return reply.text


summariser = AgentDefinition("summariser", tools=["read_files"], handle_steps=summarise)


def report(ctx: StepContext) -> Steps[str]:
    found = yield ToolCall("glob", {"pattern": ctx.prompt}, include_tool_call=False)
    paths = sorted(found.tool_results[0].data["files"])
    days = yield from map_agents(summariser, paths, prompt=str, concurrency=4)  # results in the order of the items
    lines = [f"{p}: {d.error.message if d.is_error else d.output}" for p, d in zip(paths, days, strict=True)]
    reply = yield from Complete("Sum these days up:\n" + "\n".join(lines))
    return "\n".join([*lines, reply.text])


reporter = AgentDefinition(
    "reporter", model="anthropic/claude-sonnet-4-5", spawnable_agents=[summariser], handle_steps=report
)


def play(request: ModelRequest) -> str:
    asked, _, material = request.messages[0].text.partition("\n")
    return f"Of note: {material}" if asked.startswith("Say") else "Sun is good for business."


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in FILES.items():
            Path(folder, name).write_text(content)
        tools = [*file_tools(folder), *search_tools(folder)]
        with Engine([reporter], tools, ScriptedModel([play] * 3)) as engine:
            result = engine.run_sync(reporter, "*.txt")
    print(result.output)
    print(f"{len(result.children)} children, {result.usage.requests} model calls")
    assert [child.is_error for child in result.children] == [False, False, True]


if __name__ == "__main__":
    main()
