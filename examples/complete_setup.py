"""
A coding assistant with a session, permissions, a person who answers, tools, a specialist and a log.

``python examples/complete_setup.py`` needs no key, because scripted replies replace the model. Files, permissions and the session are
real. To call a real model, omit ``models=`` and set ANTHROPIC_API_KEY.
"""

import logging
import sys
import tempfile
from pathlib import Path

from stepengine import AgentDefinition, Engine, Hooks, Question
from stepengine.context import usage_logger
from stepengine.models import ModelReply, ModelRequest
from stepengine.permissions import Policy, Rule
from stepengine.sessions import FileSessions
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import ask_user_tool, file_tools, search_tools, shell_tools, spawn_tools

MODEL = "anthropic/claude-sonnet-4-5"


class Colleague:
    """Stands in for whoever sits before the screen: answers questions, and permits everything but removing files."""

    def ask(self, question: Question) -> str:
        """Return the answer; ``None`` would leave the question open, and the next message of the session answers it."""
        answer = "British" if question.tool_name is None else "no" if "rm" in str(question.details) else "yes"
        print(f"  asked: {question.text.splitlines()[0]} -> {answer}")
        return answer


POLICY = Policy(
    [
        Rule.allow_category("read"),
        Rule.allow_tool("ask_user"),
        Rule.allow_tool("spawn_agents"),
        Rule.deny_path("secret/**", "Nobody looks there."),
    ],
    mode="default",  # what no rule speaks of is asked
)
PROMPT = "You are a helpful coding assistant. Always explain your reasoning before making changes."


def assistant(folder: Path) -> AgentDefinition:
    """Return the agent; its tools are given what they need when they are made."""
    looking = [*file_tools(folder, write=True), *search_tools(folder)]
    researcher = AgentDefinition(
        "researcher",
        description="Researches codebases to answer questions.",
        system_prompt="You are a code researcher.",
        tools=[tool for tool in looking if tool.name in ("read_files", "glob", "code_search")],
    )
    tools = [*looking, *shell_tools(folder), *spawn_tools(), ask_user_tool(Colleague())]
    return AgentDefinition("assistant", model=MODEL, system_prompt=PROMPT, tools=tools, spawnable_agents=[researcher])


REPLIES = [
    tool_call("spawn_agents", {"agents": [{"agent_type": "researcher", "prompt": "Which files are letters?"}]}),
    tool_call("ask_user", {"questions": [{"question": "British or American?", "options": ["British", "American"]}]}),
    tool_call("write_file", {"path": "a.txt", "content": "colour\n"}),
    tool_call("run_terminal_command", {"command": "rm a.txt"}),
    tool_call("read_files", {"paths": ["secret/key.txt"]}),
    text("I wrote British English."),
    text("You asked for British English."),
]


def reply(request: ModelRequest) -> ModelReply:
    if request.system_prompt == "You are a code researcher.":
        return text("Only a.txt.")
    return REPLIES[sum(message.role == "assistant" for message in request.messages)]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="  log: %(message)s", stream=sys.stdout)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "work")
        (folder / "secret").mkdir(parents=True)
        (folder / "a.txt").write_text("color\n")
        agent = assistant(folder)
        with Engine(
            [agent],
            models=ScriptedModel([reply] * 9),
            sessions=FileSessions(Path(name, "sessions")),
            permissions=POLICY,
            interactor=Colleague(),
            hooks=Hooks(post_run=[usage_logger(logging.getLogger("usage"))]),
        ) as engine:
            for words in ("Correct the spelling.", "What did I ask for?"):
                result = engine.run_sync(agent, words, session_id="ann:1")
                print(f"{words} {result.text}")
                for call in result.tool_calls:
                    print(f"  {call.tool_name}: {call.result.status}")
        assert (folder / "a.txt").read_text() == "colour\n"


if __name__ == "__main__":
    main()
