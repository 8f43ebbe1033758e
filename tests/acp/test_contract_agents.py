"""
Agents of others are led: the example of the protocol's TypeScript SDK, `stepengine acp`, and coding agents as npm gives them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, RunStatus
from stepengine.acp import ExternalAgent
from stepengine.errors import ExternalAgentError
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule

from .npm import needs, root_of

COUNTERPARTS = (
    (
        "npm:@agentclientprotocol/sdk",
        "1.9.0",
        "works",
        "its example agent as a child: text, tool calls, permissions, cancelling",
    ),
)
ROOT = root_of("acp1")
AGENTS = Path(os.environ.get("ACP_AGENTS", ".")).resolve() / "node_modules" / ".bin"
HERE = Path(__file__).parent
pytestmark = pytest.mark.deep


def example(project: Path, name: str = "example") -> ExternalAgent:
    program = Path(str(ROOT), "node_modules", "acp1", "dist", "examples", "agent.js")
    return ExternalAgent(name, command=["node", str(program)], workspace=project)


def ours(project: Path, tmp_path: Path) -> ExternalAgent:
    """
    A small agent of ours behind `stepengine acp`'s own serving, with sessions, permissions and tools.
    """
    return ExternalAgent(
        "ours",
        command=[sys.executable, str(HERE / "server.py"), "1", str(tmp_path / "sessions")],
        env={"PYTHONPATH": str(HERE.parents[1]), "PATH": os.environ["PATH"]},
        workspace=project,
    )


@needs(ROOT)
@pytest.mark.spec("interfaces:IF120", "interfaces:IF121")
async def test_the_example_of_the_typescript_sdk_is_led_three_at_once_and_replayed(
    project: Path, tmp_path: Path
) -> None:
    three = [example(project, name) for name in ("one", "two", "three")]
    policy = Policy([Rule.allow_tool("one_edit"), Rule.deny_tool("two_edit"), Rule.allow_tool("three_edit")])

    def handle(ctx: Any) -> Any:
        children = yield from Parallel(*[AgentCall(agent, "Mend the configuration.") for agent in three])
        return [child.unwrap()["text"].rpartition(" ")[0][-40:] for child in children]

    boss = AgentDefinition("boss", spawnable_agents=three, handle_steps=handle)
    journal, events = tmp_path / "run.jsonl", []
    result = await Engine([boss], permissions=policy, observers=[events.append]).run(
        "boss", journal=FileJournal(journal)
    )

    first, second, third = result.unwrap()
    assert ("have been", "configuration", first) == (first[-9:], second[-13:], third)
    shown = [
        (event.path, event.type, event.tool_name) for event in events if "/call_" in getattr(event, "tool_call_id", "")
    ]
    assert [("0", "tool_started", "read"), ("0", "tool_finished", "read")] == [one for one in shown if one[0] == "0"][
        :2
    ]
    again = await Engine([boss], permissions=policy).replay(journal)
    assert result.unwrap() == again.unwrap()


@pytest.mark.spec("interfaces:IF120", "interfaces:IF121", "interfaces:IF122")
async def test_an_agent_of_ours_is_led_as_any_other_with_its_edits_allowed_and_its_session_loaded(
    project: Path, tmp_path: Path
) -> None:
    agent = ours(project, tmp_path)
    allowed, refused = (
        Engine([agent], permissions=Policy([rule]))
        for rule in (Rule.allow_tool("ours_edit"), Rule.deny_tool("ours_edit"))
    )
    first = await allowed.run("ours", "edit shop.py rate tax")
    text = (project / "shop.py").read_text()
    assert ("tax = 1\nname = 2\n", True) == (text, first.text.startswith("Done, after 1 prompts"))

    second = await refused.run("ours", "edit shop.py name title", previous=first.state)
    text = (project / "shop.py").read_text()
    assert ("tax = 1\nname = 2\n", True) == (text, second.text.startswith("Done, after 2 prompts"))


@pytest.mark.spec("interfaces:IF122")
async def test_a_question_outlives_the_program_of_an_agent_of_ours(project: Path, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    engine = Engine([ours(project, tmp_path)], permissions=Policy())
    asked = await engine.run("ours", "edit shop.py rate tax", journal=FileJournal(journal))
    (question,) = asked.pending_questions
    result = await engine.resume(journal, answers={question.id: True})

    assert (RunStatus.SUSPENDED, RunStatus.COMPLETED) == (asked.status, result.status), result.error


HANDLER = """
from stepengine import AgentDefinition, ToolCall


def handle(ctx):
    ran = yield ToolCall("run_terminal_command", {"command": ["git", "--version"]})
    yield ToolCall("write_file", {"path": "out.txt", "content": ran.tool_result.data["stdout"]})
    return "It is written."


agent = AgentDefinition("hand", tools=["run_terminal_command", "write_file"], handle_steps=handle)
"""


@pytest.mark.spec("interfaces:IF120", "interfaces:IF121")
async def test_the_command_that_serves_editors_is_led_with_its_commands_judged_by_our_rules(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "hand.py").write_text(HANDLER)
    command = [sys.executable, "-m", "stepengine.cli", "acp", str(tmp_path / "hand.py")]
    env = {"PYTHONPATH": str(HERE.parents[1]), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    agent = ExternalAgent("hand", command=command, env=env, workspace=project)
    policy = Policy([Rule.allow_command(["git", "--version"]), Rule.allow_category("write")])
    result = await Engine([agent], permissions=policy).run("hand", "go")

    written = (project / "out.txt").read_text()
    assert ("It is written.", True) == (result.unwrap()["text"], written.startswith("git version"))


CODING = {
    "claude": ["claude-agent-acp"],
    "gemini": ["gemini", "--experimental-acp"],
    "codex": ["codex-acp"],
}


@pytest.mark.spec("interfaces:IF125")
@pytest.mark.parametrize("name", CODING)
async def test_a_coding_agent_without_a_key_says_so_as_an_error_with_a_kind(
    name: str, project: Path, tmp_path: Path
) -> None:
    program, *more = CODING[name]
    if shutil.which("node") is None or not (AGENTS / program).exists():
        pytest.skip("needs node and the coding agents of npm, here or in ACP_AGENTS=path/to/folder")
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    agent = ExternalAgent(name, command=[str(AGENTS / program), *more], env=env, workspace=project)
    result = await Engine([agent]).run(name, "hello")

    assert (RunStatus.FAILED, ExternalAgentError) == (result.status, type(result.error))
    assert "auth_required" == result.error.kind, result.error
