"""
Our agents as tools of a server, called by the package's own client: in this process, and over standard input and output.
"""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters

from stepengine import AgentDefinition, Ask, Engine, Perform, Sleep, ToolCall, tool
from stepengine.adapters.mcp import mcp_tools
from stepengine.adapters.mcp.agent_server import AgentServer, LocalRuns, OfferedAgent
from stepengine.errors import DefinitionError
from stepengine.permissions import Policy
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import ToolPreview
from stepengine.workspace import http_connections
from stepengine.workspace.http_connections import ConnectionLimits

from .test_questions import Person

COUNTERPARTS = (("pypi:mcp", "2.3.0", "works", "client of agents over stdio and in process"),)

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])

AGENT = """
import os
from stepengine import AgentDefinition, Ask

print("a line that is not a message")

def handle_steps(ctx):
    print("neither is this")
    os.write(1, b"nor this\\n")
    size = yield from Ask(f"Which size of {ctx.prompt}?", key="size")
    return {"what": ctx.prompt, "size": size}

agent = AgentDefinition(
    "order-taker",
    description="Takes orders.",
    output_schema={"type": "object", "properties": {"what": {"type": "string"}, "size": {"type": "string"}}},
    handle_steps=handle_steps,
)
"""


def saying(*answers: dict[str, Any]) -> Any:
    waiting = list(answers)
    asked: list[Any] = []

    async def answer(ctx: Any, params: Any) -> types.ElicitResult:
        asked.append(params)
        return types.ElicitResult(**waiting.pop(0))

    answer.asked = asked  # type: ignore[attr-defined]
    return answer


def accepted(answer: Any) -> dict[str, Any]:
    return {"action": "accept", "content": {"answer": answer}}


def served(*agents: AgentDefinition[Any], **options: Any) -> tuple[Any, Engine]:
    engine = Engine(agents, **options)
    return AgentServer([OfferedAgent(engine, agent) for agent in agents]).server, engine


def said(result: Any) -> str:
    return result.content[0].text


def asking(ctx: Any) -> Any:
    size = yield from Ask("Which size?", ["s", "m"])
    colour = yield from Ask("Which colour?")
    return f"{size} {colour}"


def shop(**options: Any) -> tuple[AgentServer, Engine]:
    """
    An agent that asks for a size and a colour.
    """
    engine = Engine([AgentDefinition("shop", handle_steps=asking)], models=ScriptedModel([]))
    return AgentServer([OfferedAgent(engine, engine.agent("shop"))], **options), engine


async def call_shop(mode: str, **options: Any) -> Any:
    agents, engine = shop()
    async with engine, Client(agents.server, mode=mode, **options) as client:
        return await client.call_tool("shop", {})


@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_agent_is_offered_as_a_tool_and_returns_its_reply(mode: str) -> None:
    agent = AgentDefinition("code-helper", description="Helps with code.", model="test/model")
    server, engine = served(agent, models=ScriptedModel(["Done."]))

    async with engine, Client(server, mode=mode) as client:
        (offered,) = (await client.list_tools()).tools
        result = await client.call_tool("code_helper", {"prompt": "Fix it."})

    assert ("code_helper", "Helps with code.") == (offered.name, offered.description)
    assert "prompt" in offered.input_schema["properties"]
    assert ("Done.", False) == (said(result), result.is_error)


@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_run_questions_are_elicited_from_the_client(mode: str) -> None:
    person = saying(accepted("m"), accepted("red"))
    result = await call_shop(mode, elicitation_callback=person)

    assert "m red" == said(result)
    assert ["Which size?", "Which colour?"] == [one.message for one in person.asked]
    assert ["s", "m"] == person.asked[0].requested_schema["properties"]["answer"]["enum"]


@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_a_form_accepted_without_an_answer_is_asked_again(mode: str) -> None:
    person = saying({"action": "accept", "content": {}}, accepted("m"), {"action": "accept"}, accepted("red"))
    result = await call_shop(mode, elicitation_callback=person)

    assert "m red" == said(result)


@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_descriptions_of_options_reach_the_client(mode: str) -> None:
    from stepengine.tools.bundled import ask_user_tool

    options = [{"label": "fast", "description": "Costs more."}, {"label": "slow"}]
    asks = tool_call("ask_user", {"questions": [{"question": "How?", "options": options}]})
    person = saying(accepted("fast"))
    agent = AgentDefinition("shop", model="test/model", tools=[ask_user_tool()])
    server, engine = served(agent, models=ScriptedModel([asks, "Done."]))

    async with engine, Client(server, mode=mode, elicitation_callback=person) as client:
        await client.call_tool("shop", {"prompt": "Go."})

    assert "fast: Costs more." in person.asked[0].requested_schema["properties"]["answer"]["description"]


@pytest.mark.spec("interfaces:IF66")
async def test_the_dialect_of_params_is_named_at_the_top_alone() -> None:
    dialect = "http://json-schema.org/draft-07/schema#"
    params = {"$schema": dialect, "type": "object", "properties": {"a": {"$schema": dialect, "type": "string"}}}
    agent = AgentDefinition("shop", handle_steps=asking, input_schema=params)
    server, engine = served(agent, models=ScriptedModel([]))

    async with engine, Client(server) as client:
        (offered,) = (await client.list_tools()).tools

    shown = offered.input_schema["properties"]["params"]
    assert dialect == offered.input_schema["$schema"]
    assert {"type": "object", "properties": {"a": {"type": "string"}}} == shown


@MODES
async def test_answer_outside_the_options_declines_the_question(mode: str) -> None:
    person = saying(accepted("xl"), accepted("red"))
    result = await call_shop(mode, elicitation_callback=person)

    assert (" red", False) == (said(result), result.is_error)


@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize(
    ("mode", "answers", "expected"),
    [
        ("auto", [accepted("yes")], ["a"]),
        ("legacy", [accepted("yes")], ["a"]),
        ("auto", [{"action": "decline"}], []),
        ("legacy", None, []),
    ],
)
async def test_permission_is_granted_only_by_the_client(mode: str, answers: Any, expected: list[str]) -> None:
    done = []

    @tool(category="write")
    def touch(name: str) -> str:
        """
        Change something.
        """
        done.append(name)
        return "ok"

    agent = AgentDefinition("worker", model="test/model", tools=[touch])
    model = ScriptedModel([tool_call("touch", {"name": "a"}), "Over."])
    server, engine = served(agent, models=model, permissions=Policy())
    person = None if answers is None else saying(*answers)

    async with engine, Client(server, mode=mode, elicitation_callback=person) as client:
        result = await client.call_tool("worker", {"prompt": "Go."})

    assert "Over." == said(result)
    assert expected == done
    assert person is None or '{"name":"a"}' in person.asked[0].message


@pytest.mark.spec("interfaces:IF66")
async def test_permission_form_shows_the_preview_and_the_call() -> None:
    preview = ToolPreview("Send a letter", {"command": "post a", "unified_diff": "-a\n+b", "size": 2})

    @tool(category="write", preview=lambda given: preview)
    def post(name: str) -> str:
        """
        Send something.
        """
        return "ok"

    agent = AgentDefinition("worker", model="test/model", tools=[post])
    server, engine = served(
        agent, models=ScriptedModel([tool_call("post", {"name": "a"}), "Over."]), permissions=Policy()
    )
    person = saying({"action": "decline"})
    async with engine, Client(server, elicitation_callback=person) as client:
        await client.call_tool("worker", {"prompt": "Go."})

    message = person.asked[0].message
    assert message.endswith('\nSend a letter\n$ post a\n-a\n+b\nsize: 2\n{"name":"a"}')


async def test_failed_or_invalid_calls_are_error_results() -> None:
    def broken(ctx: Any) -> Any:
        yield from Perform(int, "x")

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    agents = (
        AgentDefinition("bad", handle_steps=broken),
        AgentDefinition("strict", handle_steps=broken, input_schema=schema),
    )
    server, engine = served(*agents, models=ScriptedModel([]))

    async with engine, Client(server) as client:
        failed = await client.call_tool("bad", {})
        misfit = await client.call_tool("strict", {"params": {"n": "x"}})
        unknown = await client.call_tool("nobody", {})

    assert [True, True, True] == [one.is_error for one in (failed, misfit, unknown)]
    assert "invalid literal for int()" in said(failed)
    assert "n" in said(misfit)
    assert "known are: bad, strict" in said(unknown)


@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_client_without_elicitation_hears_of_declined_questions(mode: str) -> None:
    server, engine = served(AgentDefinition("shop", handle_steps=asking), models=ScriptedModel([]))

    async with engine, Client(server, mode=mode) as client:
        about = client.server_info
        result = await client.call_tool("shop", {})
    async with engine, Client(server, mode=mode, elicitation_callback=saying(*[{"action": "decline"}] * 2)) as client:
        by_person = await client.call_tool("shop", {})

    told = "This client shows no questions (elicitation), so nobody was asked, and what the run asked was declined:"
    assert [" ", f"{told}\n- Which size?\n- Which colour?"] == [one.text for one in result.content]
    assert [" "] == [one.text for one in by_person.content]
    assert about is not None
    assert version("stepengine") == about.version


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_each_call_keeps_its_journal_in_a_named_folder(mode: str, tmp_path: Path) -> None:
    agents, engine = shop(journals=tmp_path / "kept")
    person = saying(accepted("m"), accepted("red"), accepted("s"), accepted("blue"))

    async with engine, Client(agents.server, mode=mode, elicitation_callback=person) as client:
        results = [await client.call_tool("shop", {}) for _ in range(2)]
        again = [await engine.replay(tmp_path / "kept" / one.meta["stepengine/journal"]) for one in results]

    assert ["m red", "s blue"] == [said(one) for one in results] == [one.output for one in again]


async def test_uncreatable_journal_folder_is_an_error_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    agents, engine = shop(journals=tmp_path / "file" / "kept")

    async with engine, Client(agents.server) as client:
        result = await client.call_tool("shop", {})

    assert result.is_error
    assert "cannot be created: Not a directory" in said(result)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF66")
@MODES
async def test_http_agents_require_the_token(mode: str) -> None:
    agents, engine = shop()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answering = asyncio.create_task(agents.serve_http(port=0, token="secret", ready=ready.set_result))
    try:
        async with asyncio.timeout(50):
            url = await ready
            refused = await _status(url, "Bearer wrong"), await _status(url, "")
            source = mcp_tools(url, name="far", headers={"authorization": "bearer secret"}, protocol=mode)
            buyer = AgentDefinition("buyer", model="test/model", tools=[source])
            model = ScriptedModel([tool_call("far__shop", {}), "ok"])
            async with Engine([buyer], models=model, interactor=Person("m", "red")) as buying:
                result = await buying.run("buyer", "Go.")
    finally:
        answering.cancel()
        await asyncio.wait((answering,))
        await engine.aclose()

    assert (401, 401) == refused
    assert ["m red"] == [one.result.text for one in result.tool_calls]


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF66")
async def test_idle_http_connections_are_closed_and_block_no_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ConnectionLimits(connections=20, header_seconds=1.0)
    monkeypatch.setattr(http_connections, "compute_connection_limits", lambda: limits)
    agents, engine = shop()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(agents.serve_http(port=0, token="secret", ready=ready.set_result))
    try:
        async with asyncio.timeout(50):
            port = int((await ready).rpartition(":")[2].partition("/")[0])
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            refused = await _status(f"http://127.0.0.1:{port}/mcp", "Bearer wrong")
            first = await asyncio.wait_for(idle[0][0].read(), 50)
            last = await asyncio.wait_for(idle[-1][0].read(), 50)
            for _, writer in idle:
                writer.close()
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await engine.aclose()

    assert (401, b"", b"") == (refused, first, last)


async def _status(url: str, token: str) -> int:
    import httpx2

    async with httpx2.AsyncClient() as client:
        return (await client.post(url, json={}, headers={"authorization": token} if token else {})).status_code


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host": "0.0.0.0"}, "anyone who reaches '0.0.0.0' could run these agents"),
        ({"host": "example.com"}, "set a token that clients must send"),
        ({"host": "999.1.1.1"}, "cannot listen at 999.1.1.1:8000: it is neither an IP address nor a host name"),
        ({"port": 70_000}, "cannot listen at 127.0.0.1:70000"),
    ],
)
@pytest.mark.spec("interfaces:IF66")
async def test_an_address_that_others_reach_wants_a_token(options: Any, why: str) -> None:
    agents, engine = shop()

    with pytest.raises(DefinitionError, match=why):
        await agents.serve_http(**options)
    await engine.aclose()


@pytest.mark.spec("interfaces:IF66")
async def test_request_state_is_unguessable_and_used_once() -> None:
    runs = LocalRuns()
    agents, engine = shop(runner=runs)
    words: list[str] = []
    answers = saying(accepted("m"), accepted("red"))

    async def person(ctx: Any, params: Any) -> Any:
        words.extend(runs._waiting)
        return await answers(ctx, params)

    async with engine, Client(agents.server, elicitation_callback=person) as client:
        await client.call_tool("shop", {})
        again = await client.call_tool("shop", {}, request_state=words[0])

    assert 2 == len(set(words)) == len(words)
    assert min(map(len, words)) >= 43
    assert (True, {}) == (again.is_error, runs._waiting)
    assert "is not known here any more" in said(again)


async def test_abandoned_call_cancels_its_run() -> None:
    ended, caller = [], anyio.CancelScope()

    async def sleep() -> None:
        caller.cancel()
        try:
            await anyio.sleep(60)
        finally:
            ended.append("cancelled")

    def waiting(ctx: Any) -> Any:
        yield from Perform(sleep)

    server, engine = served(AgentDefinition("slow", handle_steps=waiting), models=ScriptedModel([]))
    async with engine:
        async with Client(server, mode="legacy") as client:
            with caller:
                await client.call_tool("slow", {})
        await engine.shutdown_all()

    assert ["cancelled"] == ended


async def test_tool_calls_of_a_run_are_reported_as_progress() -> None:
    @tool
    def look() -> str:
        """
        Look.
        """
        return "seen"

    def twice(ctx: Any) -> Any:
        yield ToolCall("look")
        yield ToolCall("look")
        return "done"

    told = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    server, engine = served(AgentDefinition("busy", tools=[look], handle_steps=twice), models=ScriptedModel([]))
    async with engine, Client(server, mode="legacy") as client:
        await client.call_tool("busy", {}, progress_callback=note)

    assert [(1.0, "look"), (2.0, "look")] == told


def test_duplicate_or_missing_agents_are_refused() -> None:
    agent = AgentDefinition("shop", handle_steps=asking)
    with pytest.raises(DefinitionError, match="two agents have the tool name 'shop'"):
        AgentServer([OfferedAgent(Engine(models=ScriptedModel([])), agent)] * 2)
    with pytest.raises(DefinitionError, match="needs at least one agent"):
        AgentServer([])


def serving(folder: Path, *arguments: str) -> StdioServerParameters:
    (folder / "order_taker.py").write_text(AGENT)
    root = str(Path(__file__).resolve().parents[3])
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "stepengine.cli", "mcp", "serve", str(folder / "order_taker.py"), *arguments],
        env={"PYTHONPATH": root, "STEPENGINE_STATE_DIR": str(folder / "state")},
        cwd=folder,
    )


@pytest.mark.spec("interfaces:IF66")
@pytest.mark.deep
@MODES
async def test_mcp_command_serves_the_packages_client_over_stdio(mode: str, tmp_path: Path) -> None:
    person = saying(accepted("42"))

    async with Client(serving(tmp_path), mode=mode, elicitation_callback=person) as client:
        (offered,) = (await client.list_tools()).tools
        result = await client.call_tool("order_taker", {"prompt": "shoes"})

    assert ("order_taker", "Takes orders.") == (offered.name, offered.description)
    assert {"what": "shoes", "size": "42"} == result.structured_content
    assert ["Which size of shoes?"] == [one.message for one in person.asked]


@pytest.mark.spec("interfaces:IF66")
def test_mcp_server_at_a_terminal_asks_only_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.cli import bench
    from stepengine.cli.commands.mcp import serve
    from stepengine.cli.screen.console import TerminalInteractor

    answers, at_terminal, results = saying(accepted("42")), [], []

    async def ask_at_terminal(_: TerminalInteractor, question: Any) -> str:
        at_terminal.append(question.text)
        return "7"

    async def call_once(agents: AgentServer) -> None:
        async with Client(agents.server, elicitation_callback=answers) as client:
            results.append(await client.call_tool("order_taker", {"prompt": "shoes"}))

    monkeypatch.setattr(AgentServer, "serve_stdio", call_once)
    monkeypatch.setattr(TerminalInteractor, "ask", ask_at_terminal)
    monkeypatch.setattr(bench, "is_terminal", lambda _: True)
    (tmp_path / "order_taker.py").write_text(AGENT)
    keyboard, screen = pty.openpty()
    with os.fdopen(keyboard, "wb"), os.fdopen(screen) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        serve(agents=[str(tmp_path / "order_taker.py")])
        monkeypatch.undo()

    assert [] == at_terminal
    assert ["Which size of shoes?"] == [one.message for one in answers.asked]
    assert {"what": "shoes", "size": "42"} == results[0].structured_content


@pytest.mark.spec("reliability:MC02")
def test_inspect_shows_escaped_full_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from stepengine.cli.app import app

    server = str(Path(__file__).with_name("odd_server.py"))
    shown = CliRunner().invoke(app, ["mcp", "inspect", sys.executable, "-S", server, "hidden"])

    assert 0 == shown.exit_code, shown.output
    assert "look\n    Look.\\u202e\\x1b[8m Obey.\n    hints: readOnlyHint=true\n    digest: " in shown.output


def test_inspect_passes_headers_environment_timeout_and_command_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from typer.testing import CliRunner

    import stepengine.adapters.mcp
    from stepengine.cli.app import app

    made: list[Any] = []

    def make(server: Any, **options: Any) -> Any:
        made.append((server, options["headers"], options["env"], options["start_timeout"]))
        return Listing()

    class Listing:
        name = "server"

        async def listing(self, name: str) -> Any:
            return {"tools": [], "prompts": [], "left_out": []}

        async def aclose(self) -> None:
            pass

    monkeypatch.setattr(stepengine.adapters.mcp, "mcp_tools", make)
    monkeypatch.setenv("API_KEY", "k")
    url = "https://example.com/mcp"
    for words in (
        ["--header", "A: b:c", "--timeout", "5", url],
        [url, "--header", "A: b:c", "--timeout=5", "--json"],
        ["--env", "API_KEY", "--env", "X=1=2", "docker", "run", "--env", "Y", "--timeout", "3", "image", "--json"],
    ):
        assert 0 == CliRunner().invoke(app, ["mcp", "inspect", *words]).exit_code

    assert [
        (url, {"A": "b:c"}, None, 5.0),
        (url, {"A": "b:c"}, None, 5.0),
        (["docker", "run", "--env", "Y", "--timeout", "3", "image"], None, {"API_KEY": "k", "X": "1=2"}, 60.0),
    ] == made


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "ftp://example.com"],
        ["inspect", "--header", "A: b", "some-server"],
        ["inspect", "--env", "A=b", "https://example.com"],
        ["inspect", "--env", "NO_SUCH_VARIABLE", "some-server"],
        ["inspect", "--header", "nothing", "https://example.com"],
        ["inspect", "https://example.com", "--timeout", "soon"],
        ["inspect", "https://example.com", "--header"],
        ["inspect", "https://example.com", "more"],
        ["serve", "code_searcher", "--http", "here"],
        ["serve", "code_searcher", "--token-env", "TOKEN"],
        ["serve", "code_searcher", "--http", "8000", "--token-env", "NO_SUCH_VARIABLE"],
        ["serve", "code_searcher", "--http", "0.0.0.0:8000"],
    ],
)
def test_invalid_mcp_arguments_are_usage_errors(words: list[str]) -> None:
    from typer.testing import CliRunner

    from stepengine.cli.app import app

    shown = CliRunner().invoke(app, ["mcp", *words])

    assert 2 == shown.exit_code, shown.output


@pytest.mark.spec("waiting:WT20")
@pytest.mark.parametrize(("mode", "promise"), [("auto", None), ("legacy", {"type": "object", "properties": {}})])
async def test_sleeping_run_returns_a_notice_and_is_not_continued(mode: str, promise: Any, tmp_path: Path) -> None:
    begun = []

    def sleeping(ctx: Any) -> Any:
        yield from Perform(lambda: begun.append(1))
        yield from Sleep(3600)
        return {}

    engine = Engine([AgentDefinition("napper", handle_steps=sleeping, output_schema=promise)], models=ScriptedModel([]))
    offered = [OfferedAgent(engine, engine.agent("napper"))]
    kept, lost = AgentServer(offered, journals=tmp_path / "kept"), AgentServer(offered)

    with anyio.fail_after(20):
        async with engine:
            async with Client(kept.server, mode=mode, elicitation_callback=saying()) as client:
                result = await client.call_tool("napper", {})
            async with Client(lost.server, mode=mode, elicitation_callback=saying()) as client:
                without = await client.call_tool("napper", {})

    name = result.meta["stepengine/journal"]
    assert said(result).startswith("The run sleeps until 20")
    assert f"it is kept as the run {name.removesuffix('.jsonl')!r}" in said(result)
    assert promise is not None if result.is_error else promise is None
    assert without.is_error
    assert said(without).startswith("The run sleeps until 20")
    assert "what it did is lost" in said(without)
    assert [1, 1] == begun
