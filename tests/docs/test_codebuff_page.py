"""Each line of the tables of "Coming from Codebuff" that says what is otherwise here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentDefinition,
    AssistantMessage,
    Engine,
    GenerateN,
    ToolCall,
    load_agent,
)
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.bundled import file_tools

from .pages import ROOT, page

PAGE = page("coming-from/codebuff.md")


def part(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def run(handler: Any, *tools: Any, replies: Any = (), **options: Any) -> Any:
    """
    Run a handler of an agent with these tools.
    """
    fields = {name: options.pop(name) for name in ("limits", "spawnable_agents", "output_mode") if name in options}
    agent = AgentDefinition("asker", tools=list(tools), handle_steps=handler, model="t/m", **fields)
    with Engine([agent], models=ScriptedModel(list(replies))) as engine:
        return engine.run_sync(agent, "go", **options)


def called(name: str, value: Any, *tools: Any) -> Any:
    """
    Return the result of a handler's call.
    """

    def handle_steps(_: Any) -> Any:
        return (yield ToolCall(name, value)).tool_result

    return run(handle_steps, *tools).output


# --- what bundled agents return ---------------------------------------------------------------------------------------


RETURNED = [
    (agent_id, keys)
    for agents, keys in re.findall(r"^- (.+?): (.+)$", part("What bundled agents return"), re.MULTILINE)
    for agent_id in words(agents)
]


def test_all_agents_of_the_page_are_parsed() -> None:
    assert len(RETURNED) == 11


@pytest.mark.parametrize(("agent_id", "keys"), RETURNED)
def test_a_bundled_agent_returns_the_keys_of_the_page(agent_id: str, keys: str) -> None:
    schema: Any = load_agent(agent_id).output_schema
    if schema is not None:
        found = set(schema.model_json_schema()["properties"])
    else:
        journal = ROOT / "cassettes" / "agents" / f"{agent_id}.jsonl"
        found = set(output_of(journal, agent_id))

    assert found == set(words(keys))


def output_of(journal: Path, agent_id: str) -> dict[str, Any]:
    """
    Return what an agent returned in its recorded run: as the root, or as a child of the agent that ran it.
    """
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    values = [
        line["value"] for line in lines if line.get("kind") in {"result", "end"} and isinstance(line.get("value"), dict)
    ]
    found = [v for v in values if v.get("agent_id") in {None, agent_id} and isinstance(v.get("output"), dict)]
    output: dict[str, Any] = next(v for v in found if v.get("agent_id") == agent_id or lines[0]["agent"] == agent_id)[
        "output"
    ]
    return output


# --- decided otherwise ------------------------------------------------------------------------------------------------


def paths_are_as_given(root: Path) -> None:
    (root / "a").write_text("\ufeffone\n")
    for given in ("./a", str(root / "a")):
        (entry,) = called("read_files", {"paths": [given]}, *file_tools(root)).data
        assert (given, "one\n") == (entry["path"], entry["content"])


def equal_contents_are_written(root: Path) -> None:
    (root / "a").write_text("x\n")
    for name in ("write_file", "propose_write_file"):
        assert not called(name, {"path": "a", "content": "x\n"}, *file_tools(root, write=True, propose=True)).is_error


def thoughts_with_an_output_end_the_turn(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        return (yield STEP).steps_complete

    for name, value in (("set_output", {"a": 1}), ("think_deeply", {"thought": "Hm."})):
        reply = tool_call(name, value, text="<think>Hm.</think>")
        assert run(handle_steps, name, replies=[reply], output_mode="structured_output").output is True
    assert run(handle_steps, replies=["<think>Hm.</think>"]).output is False


def calls_of_listed_tools_are_stored(_: Path) -> None:
    def stored(name: str, value: Any, *tools: str) -> list[str]:
        def handle_steps(_: Any) -> Any:
            return [message.role for message in (yield ToolCall(name, value)).agent_state.message_history]

        output: list[str] = run(handle_steps, *tools).output
        return output

    for name, value in (("set_output", {"a": 1}), ("write_todos", {"todos": []})):
        assert ["user"] == stored(name, value)
        assert ["user", "assistant", "tool"] == stored(name, value, name)
    assert ["user", "user"] == stored("add_message", {"role": "user", "content": "More."}, "add_message")
    assert [] == stored("set_messages", {"messages": []}, "set_messages")


def candidates_are_texts(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        return list((yield GenerateN(1)).n_responses)

    reply = tool_call("read_files", {"paths": ["a"]}, text="I would read.")
    assert run(handle_steps, replies=[reply]).output == ["I would read."]


def empty_replies_complete(_: Path) -> None:
    kid = AgentDefinition("kid", model="t/m")

    def handle_steps(_: Any) -> Any:
        return (yield ToolCall("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": "go"}]})).tool_result.data

    (entry,) = run(handle_steps, "spawn_agents", replies=[""], spawnable_agents=[kid]).output
    assert ("completed", "") == (entry["status"], entry["output"])
    previous = run(lambda _: (yield STEP), replies=["First."]).state
    assert "" == run(lambda _: (yield from echo(None)), previous=previous).output


def direct_calls_keep_their_name(_: Path) -> None:
    kid = AgentDefinition("kid", model="t/m", description="Helps.")
    agent = AgentDefinition("asker", model="t/m", tools=["spawn_agents"], spawnable_agents=[kid])
    with Engine([agent], models=ScriptedModel([tool_call("kid", {"prompt": "go"}), "Yes.", "Done."])) as engine:
        history = engine.run_sync(agent, "go").state.message_history
    calls = [
        call.tool_name for message in history if isinstance(message, AssistantMessage) for call in message.tool_calls
    ]
    assert ["kid"] == calls


def echo(value: Any) -> Any:
    yield from ()
    return value


def pruner_defaults(_: Path) -> None:
    schema: Any = load_agent("context-pruner").input_schema
    params = schema.params.model_validate({})
    assert (200_000, []) == (params.max_context_length, params.forgotten_agents)


OTHERWISE: dict[str, Callable[[Path], None]] = {
    "paths in results of `read_files` start at the root; contents keep a byte order mark": paths_are_as_given,
    "`write_file` and `propose_write_file` with the same content are errors": equal_contents_are_written,
    "`<think>` text with only a call of `set_output`, `think_deeply` or the like continues the turn": (
        thoughts_with_an_output_end_the_turn
    ),
    "a handler's calls of `set_output`, `write_todos` and the like are stored": calls_of_listed_tools_are_stored,
    "candidates may hold calls": candidates_are_texts,
    "a run without a reply is an error, or has the output before it": empty_replies_complete,
    "a direct call of an agent is stored as `spawn_agents`": direct_calls_keep_their_name,
    "`context-pruner` forgets outputs of `file-picker`, `basher` and others": pruner_defaults,
}
"""Lines that no test of the package that they are about holds."""


@pytest.mark.parametrize("line", OTHERWISE)
def test_each_documented_difference_holds(line: str, tmp_path: Path) -> None:
    assert f"| {line} |" in part("Other differences")
    OTHERWISE[line](tmp_path)
