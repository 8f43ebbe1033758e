"""
Agents of others are led: the example of the TypeScript SDK of the protocol, and coding agents as npm gives them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, RunStatus
from stepengine.adapters.acp import ExternalAgent
from stepengine.errors import ExternalAgentError
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule
from tests.servers import Quiet, served

from .npm import needs, root_of

COUNTERPARTS = (
    ("npm:@agentclientprotocol/sdk", "1.9.0", "works", "example child agent: text, tool calls, permissions"),
    (
        "npm:@agentclientprotocol/claude-agent-acp",
        "0.49.0",
        "works",
        "child agent with a local model: approvals, questions, tokens, cost",
    ),
    (
        "npm:@google/gemini-cli",
        "0.61.0",
        "partly",
        "child agent up to its request for an API key",
    ),
    (
        "npm:@zed-industries/codex-acp",
        "0.16.0",
        "partly",
        "child agent up to its request for an API key",
    ),
)
ROOT = root_of("acp1")
AGENTS = Path(os.environ.get("ACP_AGENTS", ".")).resolve() / "node_modules" / ".bin"
pytestmark = pytest.mark.deep


def example(project: Path, name: str = "example") -> ExternalAgent:
    program = Path(str(ROOT), "node_modules", "acp1", "dist", "examples", "agent.js")
    return ExternalAgent(name, command=["node", str(program)], workspace=project)


@needs(ROOT)
@pytest.mark.spec("interfaces:IF120", "interfaces:IF121")
async def test_typescript_sdk_example_runs_three_times_in_parallel_and_replays(project: Path, tmp_path: Path) -> None:
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


class Messages(Quiet):
    """
    A model behind Anthropic's API: it has a file written, and then says that it is.
    """

    protocol_version = "HTTP/1.1"
    file: Path

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if not asked.get("stream"):
            self.answer("application/json", json.dumps({"input_tokens": 5}))
            return
        is_done = "tool_result" in json.dumps(asked["messages"][-1])
        given = json.dumps({"file_path": str(self.file), "content": "hello\n"})
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": f"toolu_{len(asked['messages'])}",
            "name": "Write",
            "input": {},
        }
        delta = {"type": "input_json_delta", "partial_json": given}
        if is_done:
            block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "It is written."}
        message = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 1},
        }  # fmt: skip
        ended = {"stop_reason": "end_turn" if is_done else "tool_use", "stop_sequence": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ]
        lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
        self.answer("text/event-stream", "".join(lines))

    def answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def claude(project: Path, tmp_path: Path) -> Iterator[ExternalAgent]:
    """
    Claude's coding agent, with a model in this process.
    """
    program = AGENTS / "claude-agent-acp"
    if shutil.which("node") is None or not program.exists():
        pytest.skip(MISSING)
    with served(type("Here", (Messages,), {"file": project / "new.txt"})) as url:
        env = {
            "HOME": str(tmp_path), "PATH": os.environ["PATH"], "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }  # fmt: skip
        yield ExternalAgent("claude", command=[str(program)], env=env, workspace=project, timeout=100)


@pytest.mark.spec("interfaces:IF121", "interfaces:IF123")
async def test_coding_agent_writes_when_allowed_and_its_cost_is_counted(claude: ExternalAgent, project: Path) -> None:
    events: list[Any] = []
    refused = await Engine([claude], permissions=Policy([Rule.deny_category("write")])).run("claude", "Write new.txt.")
    assert (RunStatus.COMPLETED, False) == (refused.status, (project / "new.txt").exists()), refused.error

    policy = Policy([Rule.allow_category("write")])
    result = await Engine([claude], permissions=policy, observers=[events.append]).run("claude", "Write new.txt.")
    assert ("It is written.", "hello\n") == (result.unwrap()["text"], (project / "new.txt").read_text())
    assert (20, 14, True) == (result.usage.input_tokens, result.usage.output_tokens, bool(result.cost))
    ids = [(event.type, event.tool_call_id) for event in events if "/toolu" in getattr(event, "tool_call_id", "")]
    assert [("tool_started", ids[0][1]), ("tool_finished", ids[0][1])] == ids


@pytest.mark.spec("interfaces:IF121", "interfaces:IF122")
async def test_coding_agent_resumes_its_session_after_an_approval_and_replays(
    claude: ExternalAgent, project: Path, tmp_path: Path
) -> None:
    def saved(event: Any) -> None:
        # It writes its session down in its own time, and one that it has not written it cannot load.
        until = time.monotonic() + 60
        while event.type in ("permission_requested", "question_asked") and time.monotonic() < until:
            if any("toolu_" in file.read_text() for file in (tmp_path / ".claude").rglob("*.jsonl")):
                break
            time.sleep(0.05)

    journal, engine = tmp_path / "run.jsonl", Engine([claude], permissions=Policy(), observers=[saved])
    asked = await engine.run("claude", "Write new.txt.", journal=FileJournal(journal))
    (question,) = asked.pending_questions
    assert (True, "claude_edit") == (str(project / "new.txt") in str(question.details), question.tool_name)
    result = await engine.resume(journal, answers={question.id: True})

    assert ("It is written.", "hello\n") == (result.unwrap()["text"], (project / "new.txt").read_text())
    (project / "new.txt").unlink()
    gone = ExternalAgent("claude", command=["no-such-program"], workspace=project)
    assert result.unwrap() == (await Engine([gone], permissions=Policy()).replay(journal)).unwrap()
    assert not (project / "new.txt").exists()


MISSING = "needs node and the coding agents of npm, here or in ACP_AGENTS=path/to/folder"
CODING = {
    "claude": ["claude-agent-acp"],
    "gemini": ["gemini", "--experimental-acp"],
    "codex": ["codex-acp"],
}


@pytest.mark.spec("interfaces:IF125")
@pytest.mark.parametrize("name", CODING)
async def test_coding_agent_without_a_key_fails_with_auth_required(name: str, project: Path, tmp_path: Path) -> None:
    program, *more = CODING[name]
    if shutil.which("node") is None or not (AGENTS / program).exists():
        pytest.skip(MISSING)
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    agent = ExternalAgent(name, command=[str(AGENTS / program), *more], env=env, workspace=project)
    result = await Engine([agent]).run(name, "hello")

    assert (RunStatus.FAILED, ExternalAgentError) == (result.status, type(result.error))
    assert "auth_required" == result.error.kind, result.error
