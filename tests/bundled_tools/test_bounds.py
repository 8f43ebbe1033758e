"""What is accepted in a call of a bundled tool although it is more, less or written otherwise than the tool gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP_ALL, AgentDefinition, Engine, ToolCall
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import Fetched, file_tools, search_tools, spawn_tools, web_tools


class Docs:
    """Documentation without end."""

    async def read(self, library: str, topic: str, max_tokens: int) -> str:
        return f"{library} {topic} {max_tokens}"

    async def fetch(self, url: str) -> Fetched:
        return Fetched(url, 200, "text/plain", b"word " * 20_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("one = 1\ntwo = 2\n")
    (tmp_path / "b.js").write_text("one\n")
    return tmp_path


def asked(root: Path, name: str, value: Mapping[str, Any], by: str) -> Any:
    """
    Return the result of a call, which a handler or a model made.
    """
    docs = Docs()
    tools = [*file_tools(root), *search_tools(root), *web_tools(docs=docs, fetch=docs), *spawn_tools()]

    def handle_steps(_: Any) -> Any:
        if by == "handler":
            return (yield ToolCall(name, value)).tool_result
        turn = yield STEP_ALL
        return next(m.result for m in reversed(turn.agent_state.message_history) if m.role == "tool")

    kid = AgentDefinition(
        "kid",
        input_schema={"params": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        handle_steps=lambda ctx: (yield from echo(ctx.params)),
    )
    agent = AgentDefinition("asker", tools=tools, spawnable_agents=[kid], handle_steps=handle_steps)
    with Engine([agent], models=ScriptedModel([tool_call(name, value), text("done")]), default_model="t/m") as engine:
        return engine.run_sync(agent, "go").unwrap()


def echo(value: Any) -> Any:
    yield from ()
    return dict(value)


CLAMPED = {
    "read_subtree": ({"maxTokens": 500_000}, lambda data: data[0]["message"], "max_tokens was 500,000 and is at most 20,000"),
    "code_search": (
        {"pattern": "one", "maxResults": 100_000}, lambda data: data["message"], "max_results was 100,000 and is at most 250"
    ),
    "glob": ({"pattern": "*", "max_results": 9_000}, lambda data: data["message"], "max_results was 9,000 and is at most 2,000"),
    "find_files": (
        {"prompt": "one", "max_results": 99}, lambda data: data["message"], "max_results was 99 and is at most 30"
    ),
    "read_docs": (
        {"library_title": "a", "topic": "b", "max_tokens": 99_000},
        lambda data: data["message"],
        "max_tokens was 99,000 and is at most 20,000",
    ),
    "read_url": (
        {"url": "https://a.example", "max_chars": 99_000},
        lambda data: data["message"],
        "max_chars was 99,000 and is at most 50,000",
    ),
}  # fmt: skip


@pytest.mark.spec("generator-contract:T39")
@pytest.mark.parametrize(("name", "by"), [*[(name, "handler") for name in CLAMPED], ("glob", "model")])
def test_an_argument_above_its_maximum_is_clamped_and_reported(root: Path, name: str, by: str) -> None:
    """
    codebuff has no such bounds, and agents that were written for it ask for more.
    """
    value, message_of, said = CLAMPED[name]
    result = asked(root, name, value, by)

    assert not result.is_error, result.text
    assert said in message_of(result.data)


def test_a_clamped_argument_gets_the_maximum_of_the_schema(root: Path) -> None:
    read = asked(root, "read_url", {"url": "https://a.example", "max_chars": 99_000}, "handler").data
    (schema,) = [tool.spec.input_schema for tool in web_tools(fetch=Docs()) if tool.name == "read_url"]

    assert (50_000, True) == (len(read["text"]), read["truncated"])
    assert 50_000 == schema["properties"]["max_chars"]["maximum"]
    assert "a b 20000" == asked(root, "read_docs", CLAMPED["read_docs"][0], "handler").data["documentation"]


@pytest.mark.spec("generator-contract:T39", "generator-contract:T2")
@pytest.mark.parametrize(
    ("name", "value", "data"),
    [
        ("spawn_agents", {"agents": []}, []),
        ("read_files", {"paths": []}, []),
        ("list_directory", {"path": ""}, {"files": ["a.py", "b.js"], "directories": [], "path": "."}),
    ],
    ids=["spawn_agents", "read_files", "list_directory"],
)
def test_empty_arguments_return_nothing_and_an_empty_path_the_root(
    root: Path, name: str, value: Any, data: Any
) -> None:
    """
    codebuff returns an empty list for the first two, too, and the files of the root for the third.
    """
    codebuff = {"spawn_agents": [], "read_files": [], "list_directory": ["a.py", "b.js"]}
    result = asked(root, name, value, "handler")

    assert codebuff[name] == (data["files"] if name == "list_directory" else data)

    assert (data, False) == (result.data, result.is_error)


@pytest.mark.spec("generator-contract:T2")
@pytest.mark.parametrize("params", ['{"n": 5}', {"n": "5"}, '{"n": "5"}', '"{\\"n\\": 5}"'])
def test_child_params_are_accepted_as_json_text_and_numeric_text(root: Path, params: Any) -> None:
    result = asked(root, "spawn_agents", {"agents": [{"agent_type": "kid", "params": params}]}, "model")

    assert [{"n": 5}] == [entry.get("output", entry) for entry in result.data]


@pytest.mark.spec("generator-contract:T13")
@pytest.mark.parametrize(
    "flags",
    ["-n --type-not js", "--type-not=js -n", "-nT js", "--line-number --glob '*.py'", "--type py --ignore-case"],
)
async def test_flags_that_codebuffs_agents_use_are_read(root: Path, flags: str) -> None:
    from stepengine.tools import ToolRegistry

    tools = ToolRegistry(search_tools(root, prefer_python=True))
    found = await tools.execute("code_search", {"pattern": "one", "flags": flags})

    assert [{"path": "a.py", "line": 1}] == found.data["matches"]
    assert "'--count=3'" in (await tools.execute("code_search", {"pattern": "one", "flags": "--count=3"})).text
