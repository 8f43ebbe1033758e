"""
A console for a coding agent: it streams the text, and asks before it changes files or runs commands.

``python examples/console.py`` needs no key, because scripted replies and inputs replace the model and the user. Files and permissions
are real. To use it yourself, omit ``models=`` and ``input=`` and set ANTHROPIC_API_KEY.
"""

import asyncio
import io
import tempfile
from pathlib import Path

from stepengine import AgentDefinition, Engine
from stepengine.cli import ColorScheme, ConsoleRenderer
from stepengine.models import ModelReply, ModelRequest
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import control_tools, file_tools, search_tools, shell_tools

POLICY = Policy(
    [
        Rule.allow_category("read"),
        Rule.ask_for_tool("run_terminal_command"),
        Rule.ask_for_tool("write_file"),
        Rule.ask_for_tool("str_replace"),
    ]
)
TYPED = """\
and keep it short
y
n it is still needed
What did you do?
/quit
"""
REPLIES = [
    tool_call("read_files", {"paths": ["letter.txt"]}),
    tool_call("write_todos", {"todos": [{"task": "Correct letter.txt", "completed": False}]}),
    tool_call("write_file", {"path": "letter.txt", "content": "colour\n"}),
    tool_call("run_terminal_command", {"command": "rm old.txt"}),
    text("I corrected the letter.\nThe old file stays."),
    text("I wrote letter.txt."),
]


def coder(folder: Path) -> tuple[AgentDefinition, list[object]]:
    """Return the agent and its tools, which the programmer chooses."""
    tools = [*file_tools(folder, write=True), *search_tools(folder), *shell_tools(folder), *control_tools()]
    names = ["read_files", "write_file", "str_replace", "code_search", "run_terminal_command", "write_todos"]
    agent = AgentDefinition(
        "coder", model="anthropic/claude-sonnet-4-5", tools=names, system_prompt="You work on the files of a project."
    )
    return agent, tools


def reply(request: ModelRequest) -> ModelReply:
    return REPLIES[sum(message.role == "assistant" for message in request.messages)]


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("letter.txt", "old.txt"):
            (folder / file).write_text("color\n")
        agent, tools = coder(folder)
        async with (
            Engine([agent], tools, ScriptedModel([reply] * len(REPLIES)), permissions=POLICY) as engine,
            engine.start(agent, "Correct the spelling.", keep_open=True) as handle,
        ):
            result = await ConsoleRenderer(handle, colors=ColorScheme(tool="cyan"), input=io.StringIO(TYPED)).run()
        said = [message.text for message in result.state.message_history if message.role == "user"]
        assert said == ["Correct the spelling.", "and keep it short", "What did you do?"]
        assert (folder / "letter.txt").read_text() == "colour\n"
        assert (folder / "old.txt").exists()


if __name__ == "__main__":
    asyncio.run(main())
