"""
Agents in editors, driven by the client of the protocol's own package over the stdin and stdout of a real process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import pytest
from acp import RequestError, schema

from stepengine import AgentDefinition, Engine, Usage
from stepengine.adapters.acp import EditorAgent
from stepengine.adapters.acp.stdio import _MessageReader
from stepengine.errors import DefinitionError
from stepengine.testing import ScriptedModel, text

from .server import small

COUNTERPARTS = (
    (
        "pypi:agent-client-protocol",
        "0.12.1",
        "works",
        "spawn_agent_process: prompts, permissions, diffs, cancelling, loading, forking, listing, closing",
    ),
)

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).with_name("server.py")


class Editor:
    """
    An editor: it keeps what it is shown, and answers permissions as it is told; an answer may take its time.
    """

    def __init__(self, choose: Callable[[Any, Any], Any] = lambda call, options: "yes") -> None:
        self.updates: list[Any] = []
        self.asked: list[Any] = []
        self.choose = choose

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        self.asked.append((tool_call, options))
        chosen = self.choose(tool_call, options)
        if asyncio.iscoroutine(chosen):
            chosen = await chosen
        if chosen is None:
            return schema.RequestPermissionResponse(outcome=schema.DeniedOutcome(outcome="cancelled"))
        return schema.RequestPermissionResponse(outcome=schema.AllowedOutcome(outcome="selected", option_id=chosen))

    def on_connect(self, conn: Any) -> None:
        self.conn = conn

    def said(self, kind: str = "agent_message_chunk") -> str:
        return "".join([u.content.text for u in self.updates if u.session_update == kind])

    def calls(self) -> dict[str, dict[str, Any]]:
        """
        Every tool call, with what its updates made of it.
        """
        found: dict[str, dict[str, Any]] = {}
        for update in self.updates:
            if update.session_update in {"tool_call", "tool_call_update"}:
                told = dict(update.model_dump(exclude_none=True).items())
                found.setdefault(update.tool_call_id, {}).update(told)
        return found


@asynccontextmanager
async def served(editor: Editor, tmp_path: Path, kind: str = "1") -> AsyncIterator[Any]:
    command = (sys.executable, str(SERVER), kind, str(tmp_path / "sessions"))
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    errors = (tmp_path / "stderr").open("ab")
    try:
        async with acp.spawn_agent_process(
            editor, *command, env=env, use_unstable_protocol=True, transport_kwargs={"stderr": errors}
        ) as (agent, process):
            await agent.initialize(acp.PROTOCOL_VERSION)
            yield agent
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 50)
    finally:
        errors.close()


async def said_to(agent: Any, session: str, text: str) -> Any:
    async with asyncio.timeout(30):
        return await agent.prompt(session_id=session, prompt=[acp.text_block(text)])


@pytest.mark.spec(
    "interfaces:IF45", "interfaces:IF46", "interfaces:IF47", "interfaces:IF51", "interfaces:IF27", "interfaces:IF29"
)
@pytest.mark.deep
async def test_prompt_streams_and_an_edit_asks_with_a_diff(tmp_path: Path, project: Path) -> None:
    editor = Editor()
    async with served(editor, tmp_path) as agent:
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        first = await said_to(agent, session, "edit shop.py rate tax")
        chunks = [u for u in editor.updates if u.session_update == "agent_message_chunk"]
        assert ("end_turn", "tax = 1\nname = 2\n") == (first.stop_reason, (project / "shop.py").read_text())
        assert len(chunks) > 1
        assert editor.said().startswith("Done, after 1 prompts")
        ((asked, options),) = editor.asked
        (diff,) = asked.content
        assert ("diff", str(project / "shop.py"), "rate", "tax") == (diff.type, diff.path, diff.old_text, diff.new_text)
        # The second offer covers all edits of files.
        assert [
            ("yes", "allow_once"),
            ("always", "allow_always"),
            ("always1", "allow_always"),
            ("no", "reject_once"),
        ] == [(o.option_id, o.kind) for o in options]
        call = editor.calls()[asked.tool_call_id]
        assert ("completed", "edit", "str_replace shop.py") == (call["status"], call["kind"], call["title"])
        assert str(project / "shop.py") == call["locations"][0]["path"]
        assert ("rate", "tax") == (call["content"][0]["old_text"], call["content"][0]["new_text"])

        editor.choose = lambda call, options: "no"
        await said_to(agent, session, "write shop.py nothing")
        assert ("failed", "tax = 1\nname = 2\n") == (
            list(editor.calls().values())[-1]["status"],
            (project / "shop.py").read_text(),
        )
        (diff,) = editor.asked[-1][0].content
        assert ("tax = 1\nname = 2\n", "nothing") == (diff.old_text, diff.new_text)

        editor.choose = lambda call, options: "always"
        for old, new in (("tax", "vat"), ("vat", "sum")):
            await said_to(agent, session, f"edit shop.py {old} {new}")
        assert (3, "sum = 1\nname = 2\n") == (len(editor.asked), (project / "shop.py").read_text())
    assert "what an agent's file prints" in (tmp_path / "stderr").read_text()


@pytest.mark.spec("interfaces:IF47")
@pytest.mark.deep
async def test_turn_is_cancelled_while_its_question_is_open(tmp_path: Path, project: Path) -> None:
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(call: Any, options: Any) -> Any:
        waiting.set()
        await cancelled.wait()

    editor = Editor(slow)
    async with served(editor, tmp_path) as agent:
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        turn = asyncio.create_task(said_to(agent, session, "edit shop.py rate tax"))
        await waiting.wait()
        with pytest.raises(RequestError) as second:
            await said_to(agent, session, "hello")
        await agent.cancel(session_id=session)
        assert "cancelled" == (await turn).stop_reason
        cancelled.set()
        assert -32602 == second.value.code
        assert "rate = 1\nname = 2\n" == (project / "shop.py").read_text()
        assert "end_turn" == (await said_to(agent, session, "hello")).stop_reason
        assert "You said: hello" == editor.said()
        await agent.close_session(session_id=session)
        again = len(editor.updates)
        await agent.load_session(cwd=str(project), session_id=session, mcp_servers=[])
        editor.updates = editor.updates[again:]
        assert ("edit shop.py rate taxhello", "You said: hello") == (editor.said("user_message_chunk"), editor.said())
        assert "end_turn" == (await said_to(agent, session, "hello")).stop_reason


@pytest.mark.spec("interfaces:IF47")
async def test_cancel_before_the_run_starts_ends_the_turn(tmp_path: Path, project: Path) -> None:
    bot, make = small(1)
    editor, agent = Editor(), EditorAgent(make, bot.id, tmp_path / "sessions")
    agent.on_connect(editor)  # type: ignore[arg-type]
    session = (await agent.new_session(cwd=str(project))).session_id
    turn = asyncio.create_task(said_to(agent, session, "write a.txt b"))
    await asyncio.sleep(0)  # the turn has begun, and its run has not
    await agent.cancel(session_id=session)
    following = await said_to(agent, session, "hello")
    await agent.aclose()

    assert ("cancelled", "end_turn") == ((await turn).stop_reason, following.stop_reason)
    assert ([], "You said: hello") == (editor.asked, editor.said())


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF31", "interfaces:IF51")
async def test_option_question_is_a_request_and_text_uses_next_prompt(tmp_path: Path, project: Path) -> None:
    editor = Editor(lambda call, options: next(o.option_id for o in options if o.name == "L"))
    async with served(editor, tmp_path) as agent:
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        assert "end_turn" == (await said_to(agent, session, "ask me")).stop_reason
        assert "Which name?" in editor.said()
        assert "end_turn" == (await said_to(agent, session, "Ann")).stop_reason
        assert editor.said().endswith("Ann in L")
    assert ["Which size?"] == [call.title for call, _ in editor.asked]
    replayed = Editor()
    async with served(replayed, tmp_path) as agent:
        await agent.load_session(cwd=str(project), session_id=session, mcp_servers=[])
    assert "ask me" == replayed.said("user_message_chunk")


async def opened(editor: Editor, tmp_path: Path, capabilities: Any = None) -> Any:
    """
    Return an agent in this process, as the editor starts it each time.
    """
    bot, make = small(1)
    agent: Any = EditorAgent(make, bot.id, tmp_path / "sessions")
    agent.on_connect(editor)
    await agent.initialize(acp.PROTOCOL_VERSION, capabilities)
    return agent


@pytest.mark.spec("interfaces:IF31", "interfaces:IF50")
@pytest.mark.parametrize("way", ["load_session", "resume_session"])
async def test_open_question_survives_close_and_is_answered_later(tmp_path: Path, project: Path, way: str) -> None:
    editor = Editor(lambda call, options: next(o.option_id for o in options if o.name == "L"))
    agent = await opened(editor, tmp_path)
    session = (await agent.new_session(cwd=str(project))).session_id
    await said_to(agent, session, "ask me")
    await agent.aclose()
    agent = await opened(editor, tmp_path)
    editor.updates.clear()
    await getattr(agent, way)(cwd=str(project), session_id=session)
    assert "end_turn" == (await said_to(agent, session, "Ann")).stop_reason
    assert "\n\nWhich name?Ann in L" == editor.said()
    assert 1 == len(editor.asked), "what was answered before is not asked again"
    editor.updates.clear()
    await said_to(agent, session, "hello")
    await agent.aclose()
    assert "You said: hello" == editor.said()


@pytest.mark.spec("interfaces:IF31", "interfaces:IF50")
async def test_question_on_screen_at_close_is_shown_again(tmp_path: Path, project: Path) -> None:
    waiting = asyncio.Event()

    async def slow(call: Any, options: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    editor = Editor(slow)
    agent = await opened(editor, tmp_path)
    session = (await agent.new_session(cwd=str(project))).session_id
    turn = asyncio.create_task(said_to(agent, session, "ask me"))
    await waiting.wait()
    await agent.close_session(session_id=session)
    assert "cancelled" == (await turn).stop_reason
    await agent.resume_session(cwd=str(project), session_id=session)
    with pytest.raises(RequestError):
        await said_to(agent, session, "neither")
    await said_to(agent, session, "S")
    await said_to(agent, session, "Bo")
    await agent.aclose()
    assert "\n\nWhich size?\n- S\n- L\n\nWhich name?Bo in S" == editor.said()


PERMISSION = "\n\nMay str_replace run? The run continues with your next prompt, and asks for this permission again.\n\n"


@pytest.mark.spec("interfaces:IF50")
@pytest.mark.parametrize("way", ["load_session", "resume_session"])
@pytest.mark.parametrize("end", ["close", "lost connection"])
async def test_open_permission_survives_close_and_is_requested_again(
    tmp_path: Path, project: Path, way: str, end: str
) -> None:
    waiting, lost = asyncio.Event(), asyncio.Event()

    async def slow(call: Any, options: Any) -> Any:
        waiting.set()
        await lost.wait()
        raise ConnectionError

    editor = Editor(slow)
    agent = await opened(editor, tmp_path)
    session = (await agent.new_session(cwd=str(project))).session_id
    turn = asyncio.create_task(said_to(agent, session, "edit shop.py rate tax"))
    await waiting.wait()
    if end == "lost connection":
        lost.set()
        other = (await agent.new_session(cwd=str(project))).session_id
        await said_to(agent, other, "hello")  # meanwhile the first run would use an answer
    await agent.aclose()
    assert "cancelled" == (await turn).stop_reason

    agent, editor.choose = await opened(editor, tmp_path), lambda call, options: "yes"
    editor.updates.clear()
    await getattr(agent, way)(cwd=str(project), session_id=session)
    assert "end_turn" == (await said_to(agent, session, "go on")).stop_reason
    assert f"{PERMISSION}You said: go on" == editor.said()
    assert (2, "tax = 1\nname = 2\n") == (len(editor.asked), (project / "shop.py").read_text())
    editor.updates.clear()
    await said_to(agent, session, "hello")
    await agent.aclose()
    assert "You said: hello" == editor.said()


@pytest.mark.spec("interfaces:IF31", "interfaces:IF50")
@pytest.mark.parametrize("kind", ["form", "request", "permission"])
async def test_question_on_screen_survives_a_killed_process(tmp_path: Path, project: Path, kind: str) -> None:
    waiting = asyncio.Event()

    async def slow(*_: Any, **__: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    editor: Any = Editor(slow)
    editor.create_elicitation = slow
    forms = schema.ElicitationCapabilities(form=schema.ElicitationFormCapabilities())
    can = schema.ClientCapabilities(elicitation=forms) if kind == "form" else None
    first = await opened(editor, tmp_path, can)
    session = (await first.new_session(cwd=str(project))).session_id
    await said_to(first, session, "hello")
    said = "edit shop.py rate tax" if kind == "permission" else "ask me"
    turn = asyncio.create_task(said_to(first, session, said))
    await waiting.wait()
    assert (kind == "form") == (not editor.asked)
    shutil.copytree(tmp_path / "sessions", tmp_path / "killed" / "sessions")  # what a killed process leaves
    await first.aclose()
    await turn

    editor.updates.clear()
    editor.choose = lambda call, options: "no"
    agent = await opened(editor, tmp_path / "killed")
    await agent.load_session(cwd=str(project), session_id=session)
    assert f"hello{said}" == editor.said("user_message_chunk")
    await said_to(agent, session, "S")
    if kind != "permission":
        await said_to(agent, session, "Bo")
    await agent.aclose()
    asked = "\n\nWhich size?\n- S\n- L\n\nWhich name?Bo in S"
    assert editor.said().endswith(f"{PERMISSION}You said: S" if kind == "permission" else asked)


@pytest.mark.spec("interfaces:IF47", "interfaces:IF50")
async def test_cancel_ends_the_question_of_a_reopened_session(tmp_path: Path, project: Path) -> None:
    editor = Editor(lambda call, options: next(o.option_id for o in options if o.name == "L"))
    agent = await opened(editor, tmp_path)
    session = (await agent.new_session(cwd=str(project))).session_id
    await said_to(agent, session, "ask me")
    await agent.close_session(session_id=session)
    await agent.resume_session(cwd=str(project), session_id=session)
    await agent.cancel(session_id=session)
    await agent.close_session(session_id=session)
    editor.updates.clear()
    await agent.load_session(cwd=str(project), session_id=session)
    await said_to(agent, session, "hello")
    await agent.aclose()
    assert "You said: hello" == editor.said()


@pytest.mark.spec("interfaces:IF21", "interfaces:IF50")
@pytest.mark.parametrize("way", ["load_session", "resume_session"])
async def test_reopened_session_reports_the_cost_of_all_turns(tmp_path: Path, project: Path, way: str) -> None:
    def make(cwd: Path, /, *, observers: Any = ()) -> Engine:
        reply = text("Hi.", usage=Usage(input_tokens=90, output_tokens=10))
        bot = AgentDefinition("bot", model="anthropic/claude-sonnet-4-5")
        return Engine([bot], models=ScriptedModel([] if observers else [reply] * 4), observers=observers)

    def costs() -> list[float]:
        return [one.cost.amount for one in editor.updates if one.session_update == "usage_update"]

    editor, agent = Editor(), EditorAgent(make, "bot", tmp_path / "sessions")
    agent.on_connect(editor)  # type: ignore[arg-type]
    session = (await agent.new_session(cwd=str(project))).session_id
    for _ in range(3):
        await said_to(agent, session, "hello")
    one, _, three = costs()
    editor.updates.clear()
    await getattr(agent, way)(cwd=str(project), session_id=session)
    await said_to(agent, session, "hello")
    await agent.aclose()
    assert pytest.approx([three, three + one]) == costs()[-2:]


@pytest.mark.spec("interfaces:IF47")
@pytest.mark.parametrize("path", ["shop.py", "sh\0op.py", "round/shop.py"])
async def test_unknown_permission_outcome_counts_as_denial(tmp_path: Path, project: Path, path: str) -> None:
    """
    Also about a file of which nobody can say what it holds.
    """
    (project / "round").symlink_to("round")

    class Odd(Editor):
        async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
            return schema.RequestPermissionResponse.model_validate({"outcome": {"outcome": "perhaps"}})

    bot, make = small(1)
    editor, agent = Odd(), EditorAgent(make, bot.id, tmp_path / "sessions")
    agent.on_connect(editor)  # type: ignore[arg-type]
    session = (await agent.new_session(cwd=str(project))).session_id
    ended = await said_to(agent, session, f"write {path} tax")
    await agent.aclose()

    assert "end_turn" == ended.stop_reason
    assert "rate = 1\nname = 2\n" == (project / "shop.py").read_text()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF49", "interfaces:IF50", "interfaces:IF24")
async def test_another_process_loads_continues_forks_lists_and_closes_a_session(tmp_path: Path, project: Path) -> None:
    first = Editor()
    async with served(first, tmp_path) as agent:
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        await said_to(agent, session, "edit shop.py rate tax")
        await said_to(agent, session, "hello")
    (project / "shop.py").write_text("tax = changed since\n")

    loaded = Editor()
    async with served(loaded, tmp_path) as agent:
        await agent.load_session(cwd=str(project), session_id=session, mcp_servers=[])
        before = len(loaded.updates)
        assert ("edit shop.py rate taxhello", first.said()) == (loaded.said("user_message_chunk"), loaded.said())
        # Of the first run there is also the moment in which it waited.
        assert {k: v["content"] for k, v in first.calls().items()} == {
            k: v["content"] for k, v in loaded.calls().items()
        }
        assert ([], "tax = changed since\n") == (loaded.asked, (project / "shop.py").read_text())

        fork = (await agent.fork_session(cwd=str(project), session_id=session)).session_id
        for each in (session, fork):
            await said_to(agent, each, "read shop.py")
        assert 2 == loaded.said().count("Done, after 3 prompts")
        await agent.close_session(session_id=session)
        with pytest.raises(RequestError):
            await said_to(agent, session, "hello")
        await agent.resume_session(cwd=str(project), session_id=session, mcp_servers=[])
        assert before < len(loaded.updates)
        await said_to(agent, session, "read shop.py")
        assert "Done, after 4 prompts" in loaded.said()
        listed = (await agent.list_sessions(cwd=str(project))).sessions
        assert [session, fork] == [each.session_id for each in listed]
        assert "edit shop.py rate tax" == listed[0].title
        assert [] == (await agent.list_sessions(cwd=str(tmp_path))).sessions


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF49", "interfaces:IF46", "interfaces:IF47")
async def test_invalid_session_requests_raise_errors_with_reasons(tmp_path: Path, project: Path) -> None:
    editor = Editor()
    async with served(editor, tmp_path) as agent:
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        await said_to(agent, session, "hello")
        for call in (
            agent.new_session(cwd="project", mcp_servers=[]), agent.new_session(cwd=str(tmp_path / "no"), mcp_servers=[]),
            agent.load_session(cwd=str(project), session_id="../../etc", mcp_servers=[]),
            agent.load_session(cwd=str(project), session_id="0" * 16, mcp_servers=[]),
            agent.prompt(session_id="0" * 16, prompt=[acp.text_block("x")]),
            agent.prompt(session_id=session, prompt=[acp.audio_block("AAAA", "audio/wav")]),
            agent.prompt(session_id=session, prompt=[acp.image_block("no base64", "image/png")]),
            agent.list_sessions(cursor="x"),
        ):  # fmt: skip
            with pytest.raises(RequestError) as refused:
                await call
            assert -32602 == refused.value.code
    edited = Editor()
    async with served(edited, tmp_path, "2") as agent:
        await agent.load_session(cwd=str(project), session_id=session, mcp_servers=[])
        assert "hello" == edited.said("user_message_chunk")
        assert "another version of the agent" in edited.said()
        with pytest.raises(RequestError, match="another version"):
            await said_to(agent, session, "hello")


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF45")
async def test_acp_command_without_a_key_reports_it_at_first_prompt(tmp_path: Path, project: Path) -> None:
    editor = Editor()
    arguments = ("-m", "stepengine.cli", "acp", "coder", "--model", "anthropic/claude-sonnet-4-5")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "STEPENGINE_STATE_DIR": str(tmp_path / "state")}
    async with acp.spawn_agent_process(editor, sys.executable, *arguments, env=env, use_unstable_protocol=True) as (
        agent,
        process,
    ):
        told = await agent.initialize(acp.PROTOCOL_VERSION)
        assert (1, True, "stepengine") == (
            told.protocol_version,
            told.agent_capabilities.load_session,
            told.agent_info.name,
        )
        session = (await agent.new_session(cwd=str(project), mcp_servers=[])).session_id
        with pytest.raises(RequestError, match="ANTHROPIC_API_KEY"):
            await said_to(agent, session, "hello")
        process.stdin.close()
        assert 0 == await asyncio.wait_for(process.wait(), 50)
    assert 0o700 == (tmp_path / "state" / "editors").stat().st_mode & 0o777


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF45")
def test_invalid_lines_are_answered_and_the_connection_stays_open(tmp_path: Path) -> None:
    odd = [
        b"[]", b"null", b"5", b'"x"', b"{}", b"no json", b"\xff\xfe", b'{"id": [1], "result": 1}', b'{"id": {}, "method": "x"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": 5}', b'{"method": null}', b"[" * 5_000, b'[{"jsonrpc": "2.0", "id": 1}]',
    ]  # fmt: skip
    asks = b'{"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {"protocolVersion": 1}}'
    answered_nothing = b'{"jsonrpc": "2.0", "id": 99, "result": null}'
    done = subprocess.run(
        [sys.executable, str(SERVER), "1", str(tmp_path / "sessions")],
        input=b"\n".join([*odd, b"", answered_nothing, asks, b""]),
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    *refused, told = [json.loads(line) for line in done.stdout.splitlines()]

    assert [(None, -32600)] * len(odd) == [(one["id"], one["error"]["code"]) for one in refused]
    assert (7, 1) == (told["id"], told["result"]["protocolVersion"])
    assert b"Traceback" not in done.stderr


@pytest.mark.spec("interfaces:IF45")
async def test_missing_key_is_auth_required_until_it_is_set(tmp_path: Path, project: Path) -> None:
    def make(cwd: Path, /, *, observers: Any = ()) -> Engine:
        return Engine([AgentDefinition("bot", model="anthropic/claude-sonnet-4-5")], observers=observers)

    agent = EditorAgent(make, "bot", tmp_path / "sessions")
    agent.on_connect(Editor())  # type: ignore[arg-type]
    told = await agent.initialize(7)
    (method,) = told.auth_methods
    await agent.authenticate(method.id)
    with pytest.raises(RequestError) as unknown:
        await agent.authenticate("password")
    session = (await agent.new_session(cwd=str(project))).session_id
    with pytest.raises(RequestError, match="ANTHROPIC_API_KEY") as prompted:
        await said_to(agent, session, "hello")
    with pytest.raises(RequestError, match="ANTHROPIC_API_KEY") as signed_in:
        await agent.authenticate(method.id)
    await agent.aclose()

    assert acp.PROTOCOL_VERSION == told.protocol_version, "the newest that we know, whatever was asked for"
    assert [-32602, -32000, -32000] == [unknown.value.code, prompted.value.code, signed_in.value.code]


def with_or_without_key(cwd: Path, /, *, observers: Any = (), model: str = "") -> Engine:
    """
    Return an engine whose agent has a key only for the model "m/m".
    """
    bot = AgentDefinition("bot", model=model or "anthropic/claude-sonnet-4-5")
    return Engine([bot], models=ScriptedModel(["Hi."]) if model == "m/m" else None, observers=observers)


@pytest.mark.spec("interfaces:IF45")
async def test_sign_in_succeeds_once_the_chosen_model_has_a_key(tmp_path: Path, project: Path) -> None:
    agent = EditorAgent(with_or_without_key, "bot", tmp_path / "sessions", models=["", "m/m"])
    agent.on_connect(Editor())  # type: ignore[arg-type]
    first, second = [(await agent.new_session(cwd=str(project))).session_id for _ in range(2)]
    await agent.set_config_option("model", second, "m/m")

    async def fail_without_key() -> None:
        for attempt in (said_to(agent, first, "hello"), agent.authenticate("environment")):
            with pytest.raises(RequestError, match="ANTHROPIC_API_KEY"):
                await attempt

    await fail_without_key()
    await said_to(agent, second, "hello")
    await agent.authenticate("environment")
    await fail_without_key()
    await agent.set_config_option("model", first, "m/m")
    await agent.authenticate("environment")
    assert "end_turn" == (await said_to(agent, first, "hello")).stop_reason
    await agent.aclose()


@pytest.mark.spec("interfaces:IF49")
async def test_image_of_a_refused_prompt_is_not_replayed(tmp_path: Path, project: Path) -> None:
    editor = Editor()
    agent = EditorAgent(with_or_without_key, "bot", tmp_path / "sessions", models=["", "m/m"])
    agent.on_connect(editor)  # type: ignore[arg-type]
    session = (await agent.new_session(cwd=str(project))).session_id
    with pytest.raises(RequestError, match="ANTHROPIC_API_KEY"):
        await agent.prompt(session, [acp.text_block("see"), acp.image_block("iVBORw0KGgo=", "image/png")])
    await agent.set_config_option("model", session, "m/m")
    await said_to(agent, session, "hello")
    editor.updates.clear()
    await agent.load_session(str(project), session)
    await said_to(agent, session, "hello")
    await agent.aclose()

    shown = [one.content.type for one in editor.updates if one.session_update == "user_message_chunk"]
    assert ["text"] == shown


@pytest.mark.spec("interfaces:IF50")
async def test_engine_factory_without_choices_serves_without_modes(tmp_path: Path, project: Path) -> None:
    def make(cwd: Path, /, *, observers: Any = ()) -> Engine:
        return Engine([AgentDefinition("bot", model="m/m")], models=ScriptedModel(["Hi."]), observers=observers)

    with pytest.raises(DefinitionError, match="modes= offers a choice"):
        EditorAgent(make, "bot", tmp_path, modes=["default"])
    with pytest.raises(DefinitionError, match="unknown mode 'dreaming' of a policy"):
        EditorAgent(make, "bot", tmp_path, modes=["dreaming"])
    editor, agent = Editor(), EditorAgent(make, "bot", tmp_path / "sessions")
    agent.on_connect(editor)  # type: ignore[arg-type]
    made = await agent.new_session(cwd=str(project))
    await said_to(agent, made.session_id, "hello")
    with pytest.raises(RequestError, match="'default' is not a valid value for 'mode'"):
        await agent.set_session_mode(session_id=made.session_id, mode_id="default")
    with pytest.raises(RequestError, match="Method not found"):
        await agent.ext_method("session/delete", {"sessionId": made.session_id})
    await agent.aclose()

    assert (None, None, "Hi.") == (made.modes, made.config_options, editor.said())


async def routed(*messages: Any) -> list[Any]:
    """
    Return what the protocol's package is given of the lines of an editor.
    """
    reader = _MessageReader(limit=1_000_000)
    for message in messages:
        reader.feed_data(json.dumps(message).encode() + b"\n")
    last = {"jsonrpc": "2.0", "id": "last", "result": None}
    reader.feed_data(json.dumps(last).encode() + b"\n")
    found: list[Any] = []
    while last not in found:
        found.append(json.loads(await reader.readuntil()))
    return found[:-1]


@pytest.mark.spec("interfaces:IF47")
async def test_cancel_request_cancels_its_turn_and_other_notes_are_ignored() -> None:
    def prompt(id: Any, session: str) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": id, "method": "session/prompt", "params": {"sessionId": session}}

    def given_up(id: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": id}}

    odd = [given_up(99), given_up([1]), given_up(None), {"jsonrpc": "2.0", "method": "$/progress"},
           {"jsonrpc": "2.0", "method": "$/cancel_request", "params": 5}]  # fmt: skip
    asked = {"jsonrpc": "2.0", "id": 8, "method": "$/unknown"}
    delete = {"jsonrpc": "2.0", "id": 9, "method": "session/delete", "params": {"sessionId": "s"}}

    def cancel(session: str) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session}}

    assert [
        prompt(1, "s"), prompt("1", "t"), cancel("t"), cancel("s"), asked, delete | {"method": "_session/delete"},
    ] == await routed(prompt(1, "s"), prompt("1", "t"), given_up("1"), *odd, given_up(1), asked, delete)  # fmt: skip


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF45", "interfaces:IF1")
def test_acp_command_without_a_pipe_says_an_editor_starts_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepengine.cli", "acp", "coder"], cwd=tmp_path, stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "STEPENGINE_STATE_DIR": str(tmp_path / "state")},
        text=True, capture_output=True, timeout=50, check=False,
    )  # fmt: skip
    assert (2, "") == (done.returncode, done.stdout)
    assert "stdin is not a pipe" in done.stderr
