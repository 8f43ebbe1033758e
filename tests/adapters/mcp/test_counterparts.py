"""
Contracts with the programs that others wrote: their clients call our agents, and we use their servers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import OAuthClientMetadata

from stepengine import Engine, RunStatus, Sleep, ToolCall
from stepengine.adapters.mcp import Notice, get_non_media_content, mcp_tools
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.testing import ScriptedModel, tool_call

from .conformance_client import Browser, Storage
from .peers import command, fastmcp_python, needs_fastmcp, needs_npm, npm_folder

COUNTERPARTS = (
    ("pypi:mcp", "2.3.0", "works", "client over streamable HTTP, both protocols: elicitation"),
    ("npm:@modelcontextprotocol/sdk", "1.32.2", "works", "client over stdio and streamable HTTP: elicitation, progress, structured output"),
    ("npm:@modelcontextprotocol/client", "2.4.0", "works", "stdio and streamable HTTP, both protocols: elicitation, declined questions, structured output"),
    ("npm:@modelcontextprotocol/server", "2.4.0", "works", "both protocols: stateless elicitation, roots, changes of the tool list"),
    ("npm:@modelcontextprotocol/inspector", "2.12.0", "works", "--cli over stdio and streamable HTTP; without elicitation"),
    ("npm:@modelcontextprotocol/server-everything", "2026.8.31", "works", "roots, tasks with elicitation, forms, logging, resource updates, blobs"),
    ("npm:@modelcontextprotocol/server-filesystem", "2026.8.31", "works", "roots; results are sent to the model once"),
    ("npm:@modelcontextprotocol/server-memory", "2026.8.31", "works", "results are sent to the model once"),
    ("npm:@modelcontextprotocol/server-sequential-thinking", "2026.8.31", "works", "results are sent to the model once"),
    ("pypi:fastmcp", "4.1.2", "partly", 'client and server, with OAuth; elicitation needs protocol="legacy"'),
)  # fmt: skip
"""Counterpart, version, how it goes, and what was seen."""
pytestmark = pytest.mark.deep

HERE = Path(__file__).parent
AGENT = """
from stepengine import AgentDefinition, Ask, ToolCall, tool


@tool
def look(what: str) -> str:
    "Look."
    return what


def handle_steps(ctx):
    yield ToolCall("look", {"what": ctx.prompt})
    size = yield from Ask(f"Which size of {ctx.prompt}?", ["small", "large"], key="size")
    return {"what": ctx.prompt, "size": size}


agent = AgentDefinition(
    "order-taker",
    description="Takes orders.",
    tools=[look],
    output_schema={"type": "object", "properties": {"what": {"type": "string"}, "size": {"type": "string"}}},
    handle_steps=handle_steps,
)
"""
DECLINED = "This client shows no questions (elicitation), so nobody was asked, and what the run asked was declined:"


def environment(folder: Path) -> dict[str, str]:
    root = str(HERE.parents[2])
    return {**os.environ, "PYTHONPATH": root, "STEPENGINE_STATE_DIR": str(folder / "state")}


@pytest.fixture
def serving(tmp_path: Path) -> list[str]:
    """
    Give the command that offers the agent on standard input and output.
    """
    (tmp_path / "order_taker.py").write_text(AGENT)
    return [sys.executable, "-m", "stepengine.cli", "mcp", "serve", str(tmp_path / "order_taker.py")]


@contextmanager
def running(argv: list[str], folder: Path, ready: str) -> Iterator[str]:
    """
    Run a server until the block ends; gives what stood where *ready* has a group.
    """
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environment(folder), stdout=out, stderr=out, cwd=folder)
    try:
        yield _told(process, log, ready)
        process.terminate()
        assert process.wait(20) in (143, -15), log.read_text(errors="replace")
    finally:
        process.kill()
        process.wait()


def _told(process: Any, log: Path, ready: str) -> str:

    for _ in range(2_400):
        if found := re.search(ready, log.read_text(errors="replace")):
            return found[1]
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


@pytest.fixture
def address(serving: list[str], tmp_path: Path) -> Iterator[str]:
    """
    Offer the agent over HTTP, and keep journals.
    """
    argv = [*serving, "--http", "0", "--journals", str(tmp_path / "journals")]
    with running(argv, tmp_path, r"listening at (\S+)") as url:
        yield url


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def output_of(argv: list[str], folder: Path) -> Any:
    done = subprocess.run(
        argv,
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


# --- their clients ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_python_client_elicits_over_http_and_finds_the_journal(mode: str, address: str, tmp_path: Path) -> None:
    asked: list[str] = []

    async def person(ctx: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": "large"})

    async with Client(address, mode=mode, elicitation_callback=person) as client:
        about = client.server_info
        result = await client.call_tool("order_taker", {"prompt": "shoes"})
    async with Client(address, mode=mode) as client:
        silent = await client.call_tool("order_taker", {"prompt": "hats"})

    assert ["Which size of shoes?"] == asked
    assert {"what": "shoes", "size": "large"} == result.structured_content
    assert about is not None
    assert re.match(r"\d+\.\d+", about.version)
    assert [f"{DECLINED}\n- Which size of hats?"] == [one.text for one in silent.content[1:]]  # type: ignore[union-attr]
    kept = tmp_path / "journals" / str((result.meta or {})["stepengine/journal"])
    assert '"shoes"' in FileJournal(kept).content().decode()


@needs_npm
@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize("over", ["stdio", "http"])
def test_typescript_client_elicits_and_hears_of_declined_questions(
    over: str, serving: list[str], address: str, tmp_path: Path
) -> None:
    target = serving if over == "stdio" else [address]
    script = ["node", str(HERE / "sdk_client.mjs"), str(npm_folder())]

    asking = output_of([*script, "large", *target], tmp_path)
    silent = output_of([*script, "", *target], tmp_path)

    assert ["order_taker"] == asking["tools"]
    assert "stepengine" == asking["server"]["name"]
    assert re.match(r"\d+\.\d+", asking["server"]["version"])
    assert (["Which size of shoes?"], ["look"]) == (asking["asked"], asking["told"])
    assert {"what": "shoes", "size": "large"} == asking["structured"]
    assert f"{DECLINED}\n- Which size of shoes?" == silent["texts"][1]
    assert {"what": "shoes", "size": ""} == silent["structured"]


@needs_npm
@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize(("over", "mode"), [("stdio", "auto"), ("http", "legacy")])
def test_the_second_typescript_client_speaks_both_protocols_with_us(
    over: str, mode: str, serving: list[str], address: str, tmp_path: Path
) -> None:
    target = serving if over == "stdio" else [address]
    script = ["node", str(HERE / "sdk2_client.mjs"), str(npm_folder()), mode]

    asking = output_of([*script, "large", *target], tmp_path)
    silent = output_of([*script, "", *target], tmp_path)

    assert {"auto": "2026-07-28", "legacy": "2025-11-25"}[mode] == asking["protocol"]
    assert re.match(r"\d+\.\d+", asking["server"]["version"])
    assert ["Which size of shoes?"] == asking["asked"]
    assert {"what": "shoes", "size": "large"} == asking["structured"]
    assert f"{DECLINED}\n- Which size of shoes?" == silent["texts"][1]


@needs_npm
@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize("over", ["stdio", "http"])
def test_inspector_lists_calls_and_reports_declined_questions(
    over: str, serving: list[str], address: str, tmp_path: Path
) -> None:
    target = serving if over == "stdio" else [address, "--transport", "http"]
    inspector = ["node", command("mcp-inspector"), "--cli", *target, "--method"]

    listed = output_of([*inspector, "tools/list"], tmp_path)
    called = output_of([*inspector, "tools/call", "--tool-name", "order_taker", "--tool-arg", "prompt=shoes"], tmp_path)

    assert ["order_taker"] == [one["name"] for one in listed["tools"]]
    assert {"what": "shoes", "size": ""} == called["structuredContent"]
    assert called["content"][1]["text"].startswith(DECLINED)


@needs_fastmcp
@pytest.mark.spec("interfaces:IF66")
@pytest.mark.parametrize("over", ["stdio", "http"])
def test_fastmcp_client_elicits_and_hears_of_declined_questions(
    over: str, serving: list[str], address: str, tmp_path: Path
) -> None:
    target = serving if over == "stdio" else [address]
    script = [fastmcp_python(), str(HERE / "fastmcp_client.py")]

    asking = output_of([*script, "large", *target], tmp_path)
    silent = output_of([*script, "", *target], tmp_path)

    assert (["order_taker"], ["Which size of shoes?"]) == (asking["tools"], asking["asked"])
    assert {"what": "shoes", "size": "large"} == asking["structured"]
    assert f"{DECLINED}\n- Which size of shoes?" == silent["texts"][1]


# --- their servers ----------------------------------------------------------------------------------------------------


class Person:
    """
    Takes the first choice, or says a number.
    """

    def __init__(self, **said: str) -> None:
        self.said = said
        self.asked: list[Any] = []

    def ask(self, question: Any) -> str:
        self.asked.append(question)
        for word, answer in self.said.items():
            if word in question.text:
                return answer
        return question.options[0] if question.options else "3"


def everything(**options: Any) -> Any:
    return mcp_tools([command("mcp-server-everything"), "stdio"], name="ev", **{"start_timeout": 120, **options})


@needs_npm
@pytest.mark.spec("interfaces:IF62", "interfaces:IF64")
async def test_everything_task_elicits_midway_and_its_run_replays(agent: Any) -> None:
    journal, person = MemoryJournal(), Person()
    call = tool_call("ev__simulate-research-query", {"topic": "tea", "ambiguous": True})

    async with Engine([agent(everything())], models=ScriptedModel([call, "ok"]), interactor=person) as engine:
        lived = await engine.run("worker", "Go.", journal=journal)
    async with Engine([agent(mcp_tools(["gone"], name="ev"))], models=ScriptedModel([])) as engine:
        again = await engine.replay(journal)

    assert "# Research Report: tea (technical)" in lived.tool_calls[0].result.text
    assert ("Technical/scientific perspective", "Historical perspective") == person.asked[0].options[:2]
    assert lived.tool_calls == again.tool_calls


@needs_npm
@pytest.mark.spec("interfaces:IF64")
async def test_everything_form_is_asked_by_field_with_limits_and_titles(agent: Any) -> None:
    person = Person(email="ann@example.com", website="https://example.com", birth="2000-01-01", first_line="default")
    person.said |= {"first line": "default"}
    model = ScriptedModel([tool_call("ev__trigger-elicitation-request", {}), "ok"])

    async with Engine([agent(everything(elicitation=True))], models=model, interactor=person) as engine:
        result = (await engine.run("worker", "Go.")).tool_calls[0].result

    questions = [one.text for one in person.asked]
    sent = json.loads(result.text[result.text.index("Raw result: ") + len("Raw result: ") :])["content"]
    assert any("a whole number, at least 1, at most 100, optional, default: 42" in one for one in questions)
    assert "It was a dark and stormy night." == sent["firstLine"]
    assert ["hero-1", "fish-1", "pet-1"] == [
        value[0] if isinstance(value, list) else value
        for name, value in sent.items()
        if name in ("titledSingleSelectEnum", "titledMultipleSelectEnum", "legacyTitledEnum")
    ]
    assert len(sent) > 10


@needs_npm
@pytest.mark.spec("interfaces:IF65", "reliability:MC10")
async def test_everything_gets_roots_and_sends_logs_and_resource_updates(agent: Any, tmp_path: Path) -> None:
    told: list[Notice] = []
    watched = "demo://resource/dynamic/text/1"
    calls = [
        tool_call("ev__get-roots-list", {}),
        tool_call("ev__get-resource-reference", {"resourceType": "Blob", "resourceId": 1}),
        tool_call("ev__toggle-simulated-logging", {}),
        tool_call("ev__toggle-subscriber-updates", {}),
        tool_call("ev__trigger-long-running-operation", {"duration": 12, "steps": 2}),
        "ok",
    ]
    source = everything(roots=[tmp_path], subscribe=[watched], on_notice=told.append)

    async with Engine([agent(source)], models=ScriptedModel(calls)) as engine:
        result = await engine.run("worker", "Go.")

    roots, blob, *_ = [one.result for one in result.tool_calls]
    assert tmp_path.as_uri() in roots.text
    assert 1 == len(get_non_media_content(blob))
    assert {"log", "tools", "resource"} <= {one.kind for one in told}
    assert {watched} == {one.uri for one in told if one.kind == "resource"}


@needs_npm
@pytest.mark.spec("interfaces:IF62", "interfaces:IF65")
async def test_filesystem_server_works_in_the_given_roots(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "started").mkdir()
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "a.txt").write_text("one\n" * 2_000)
    file = str(tmp_path / "told" / "a.txt")
    argv = [command("mcp-server-filesystem"), str(tmp_path / "started")]
    source = mcp_tools(argv, name="fs", start_timeout=120, roots=[tmp_path / "told"])

    def steps(_: Any) -> Any:
        # It takes what it is told of after its answer to `initialize`, between our calls: nothing says when it has.
        while str(tmp_path / "told") not in (yield ToolCall("fs__list_allowed_directories")).tool_result.text:
            yield Sleep(0.05)
        yield ToolCall("fs__read_text_file", {"path": file})
        yield ToolCall("fs__read_text_file", {"path": str(tmp_path / "started" / "a.txt")})

    async with Engine([agent(source, handle_steps=steps)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert RunStatus.COMPLETED == result.status, result.error
    read, refused = [one.result.text for one in result.tool_calls[-2:]]

    assert "one\n" * 2_000 == read
    assert "outside allowed directories" in refused


@needs_npm
@pytest.mark.spec("interfaces:IF62")
async def test_memory_and_thinking_servers_report_each_result_once(agent: Any, tmp_path: Path) -> None:
    memory = mcp_tools(
        [command("mcp-server-memory")],
        name="memory",
        env={"MEMORY_FILE_PATH": str(tmp_path / "memory.jsonl")},
        start_timeout=120,
    )
    thinking = mcp_tools([command("mcp-server-sequential-thinking")], name="think", start_timeout=120)
    entity = {"name": "Tea", "entityType": "drink", "observations": ["is hot and unmistakable"]}
    thought = {"thought": "First.", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    calls = [
        tool_call("memory__create_entities", {"entities": [entity]}),
        tool_call("memory__read_graph", {}),
        tool_call("think__sequentialthinking", thought),
        "ok",
    ]

    async with Engine([agent(memory, thinking)], models=ScriptedModel(calls)) as engine:
        result = await engine.run("worker", "Go.")

    _, graph, thinks = [one.result for one in result.tool_calls]
    assert RunStatus.COMPLETED is result.status
    assert 1 == graph.text.count("is hot and unmistakable")
    assert 1 == thinks.text.count("thoughtNumber")
    assert ["is hot and unmistakable"] == graph.data["entities"][0]["observations"]


@needs_npm
@pytest.mark.spec("interfaces:IF60", "interfaces:IF64", "interfaces:IF65")
@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_a_server_of_the_second_typescript_package_asks_and_grows(
    agent: Any, tmp_path: Path, protocol: Any
) -> None:
    journal, person = MemoryJournal(), Person(tea="Large")
    argv = ["node", str(HERE / "sdk_server.mjs"), str(npm_folder())]
    source = mcp_tools(argv, name="sdk", start_timeout=120, protocol=protocol, roots=[tmp_path])
    calls = [
        tool_call("sdk__order", {"what": "tea"}),
        tool_call("sdk__roots", {}),
        tool_call("sdk__grow", {}),
        tool_call("sdk__roots", {}),
        tool_call("sdk__grown", {}),
        "ok",
    ]

    async with Engine([agent(source)], models=ScriptedModel(calls), interactor=person) as engine:
        lived = await engine.run("worker", "Go.", journal=journal)
    async with Engine([agent(mcp_tools(["gone"], name="sdk"))], models=ScriptedModel([])) as engine:
        again = await engine.replay(journal)

    ordered, roots, *_, grown = [one.result.text for one in lived.tool_calls]
    assert "tea in l" == ordered
    assert [("Small", "Large", "default")] == [one.options for one in person.asked]
    assert tmp_path.as_uri() in roots
    assert "new" == grown
    assert [one.result.text for one in lived.tool_calls] == [one.result.text for one in again.tool_calls]


@needs_fastmcp
@pytest.mark.spec("interfaces:IF64")
async def test_fastmcp_server_elicits_only_in_the_legacy_protocol(agent: Any) -> None:
    argv = [fastmcp_python(), str(HERE / "fastmcp_server.py"), "stdio"]
    calls = [tool_call("fast__add", {"a": 1, "b": 2}), tool_call("fast__order", {"what": "tea"}), "ok"]
    texts: dict[str, list[str]] = {}

    for protocol in ("auto", "legacy"):
        source = mcp_tools(argv, name="fast", start_timeout=120, protocol=protocol)
        async with Engine([agent(source)], models=ScriptedModel(calls), interactor=Person()) as engine:
            result = await engine.run("worker", "Go.")
        texts[protocol] = [one.result.text for one in result.tool_calls]

    assert ["3", "tea: accept Size(size=3, colour='red')"] == texts["legacy"]
    assert "elicitation via server-initiated requests is unavailable on 2026-07-28 connections" in texts["auto"][1]


def signing_in(url: str, store: Storage) -> Any:
    """
    Return the OAuth provider of the package, whose browser is a request of our own.
    """
    browser = Browser()
    about = OAuthClientMetadata.model_validate(
        {
            "client_name": "contract",
            "redirect_uris": ["http://127.0.0.1:9/callback"],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "scope": "use",
        }
    )
    return OAuthClientProvider(url, about, store, browser.open, browser.result)


@needs_fastmcp
@pytest.mark.spec("reliability:MC09", "interfaces:IF137")
async def test_fastmcp_server_accepts_the_packages_oauth_provider(agent: Any, tmp_path: Path) -> None:
    port, store = free_port(), Storage(None)
    url = f"http://127.0.0.1:{port}/mcp"
    argv = [fastmcp_python(), str(HERE / "fastmcp_server.py"), "oauth", str(port)]
    add = tool_call("fast__add", {"a": 1, "b": 2})

    async def used(**options: Any) -> Any:
        source = mcp_tools(url, name="fast", start_timeout=120, **options)
        async with Engine([agent(source)], models=ScriptedModel([add, "ok"])) as engine:
            return await engine.run("worker", "Go.")

    with running(argv, tmp_path, r"(running on)"):
        unsigned = await used()
        signed = await used(auth=signing_in(url, store))
        kept = store.tokens.access_token
        again = await used(auth=lambda run: {"Authorization": f"Bearer {kept}"})

    assert "it answered 401 Unauthorized" in unsigned.error.message
    assert "or sign in with mcp_tools(auth=...)" in unsigned.error.message
    assert ["3", "3"] == [one.tool_calls[0].result.text for one in (signed, again)]
