"""Each line of the tables of "Coming from Codebuff" that says what is otherwise here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    AssistantMessage,
    Engine,
    GenerateN,
    Limits,
    RunStatus,
    StepText,
    ToolCall,
    Transcript,
    UserMessage,
    load_agent,
    tool,
)
from stepengine.data.limits import DEFAULT_LIMITS
from stepengine.engine.handler_sources import SourceWarning
from stepengine.errors import HandlerError, ModelError, ToolNotAvailable
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls
from stepengine.tools.bundled import Fetched, ask_user_tool, file_tools, search_tools, shell_tools, web_tools

from .pages import ROOT, page

PAGE = page("coming-from/codebuff.md")
REFERENCE = page("reference/bundled-tools.md")


def rows(title: str) -> list[list[str]]:
    """
    Return the cells of the table below a title, without its head.
    """
    section = part(title)
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


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


# --- bounds -----------------------------------------------------------------------------------------------------------


class Docs:
    async def read(self, library: str, topic: str, max_tokens: int) -> str:
        return "words"

    async def fetch(self, url: str) -> Fetched:
        return Fetched(url, 200, "text/plain", b"words")


BOUNDS = (
    ("code_search", "max_results", 250),
    ("find_files", "max_results", 30),
    ("glob", "max_results", 2_000),
    ("read_docs", "max_tokens", 20_000),
    ("read_files", "paths", 50),
    ("read_subtree", "max_tokens", 20_000),
    ("read_subtree", "paths", 50),
    ("read_url", "max_chars", 50_000),
)
VALID = {
    "code_search": {"pattern": "x"},
    "find_files": {"prompt": "x"},
    "glob": {"pattern": "*"},
    "read_docs": {"library_title": "a", "topic": "b"},
    "read_files": {},
    "read_subtree": {},
    "read_url": {"url": "https://a.example"},
}


@pytest.mark.spec("generator-contract:T39")
@pytest.mark.parametrize(("name", "key", "bound"), BOUNDS)
def test_bounds_in_schema_and_reference_match_and_excess_is_reported(
    name: str, key: str, bound: int, tmp_path: Path
) -> None:
    tools = [*file_tools(tmp_path), *search_tools(tmp_path), *web_tools(docs=Docs(), fetch=Docs())]
    (schema,) = [each.spec.input_schema["properties"][key] for each in tools if each.name == name]
    is_list = "maximum" not in schema
    more = [f"f{n}" for n in range(bound + 1)] if is_list else bound + 1
    result = called(name, {**VALID[name], key: more}, *tools)

    assert bound == (schema["maxItems"] if is_list else schema["maximum"])
    assert not result.is_error
    told = REFERENCE.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    row = re.search(rf"^\| `{key}` \| ([^|]+) \|", told, re.MULTILINE)
    assert row is not None
    if is_list:
        assert f"at most {bound} entries" in row[1] or f"**Limits**: {bound} {key}," in told
    else:
        assert row[1].endswith(f" to {bound:,}")
    assert ("in another call" if is_list else f"at most {bound:,}") in result.text


# --- decided otherwise ------------------------------------------------------------------------------------------------


def last_message_is_text(folder: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield StepText("a")
        yield STEP

    def runs_a_command(_: Any) -> Any:
        yield ToolCall("run_terminal_command", {"command": "echo done"})

    def looks_and_ends(_: Any) -> Any:
        yield STEP_ALL

    look = tool_call("write_todos", {"todos": []}, text="I look.")
    assert run(handle_steps, replies=["b"]).output == "a\n\nb"
    ended = run(looks_and_ends, "write_todos", "end_turn", replies=[look, tool_call("end_turn", {})])
    assert "I look." == ended.output
    assert "done" in run(runs_a_command, *shell_tools(folder)).output


def outputs_hold_no_thoughts(_: Path) -> None:
    agent = AgentDefinition("thinker", model="t/m")
    with Engine([agent], models=ScriptedModel(["<think>Hm.</think>Yes."])) as engine:
        result = engine.run_sync(agent, "go")
    assert ("Yes.", "<think>Hm.</think>Yes.") == (result.output, result.state.message_history[-1].text)


def all_messages_are_those_of_the_run(_: Path) -> None:
    kid = AgentDefinition("kid", model="t/m", output_mode="all_messages", include_message_history=True)

    def handle_steps(_: Any) -> Any:
        yield STEP
        return (yield from AgentCall("kid", "More."))

    output = run(handle_steps, replies=["One.", "Two."], spawnable_agents=[kid]).output
    assert Transcript([UserMessage("More."), AssistantMessage("Two.")]).to_dicts() == output


def set_output_replaces_the_text(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield STEP
        yield ToolCall("set_output", {"a": 1}, include_tool_call=False)

    result = run(handle_steps, replies=["Done."])
    assert {"a": 1} == result.output
    assert ["output_mode='structured_output'"] == [warning.rpartition(" say ")[2] for warning in result.warnings]


def steps_are_fifty(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        while (turn := (yield STEP)).agent_state.steps_remaining:
            pass
        return turn.agent_state.step_index

    assert run(handle_steps, replies=["x"] * 60).output == 50
    few = run(handle_steps, replies=["x"] * 60, limits=Limits(max_steps=3))
    assert few.output == 3


def children_are_bounded(_: Path) -> None:
    kid = AgentDefinition("kid", handle_steps=lambda ctx: (yield from echo(1)))

    def handle_steps(_: Any) -> Any:
        agents = [{"agent_type": "kid"}] * 17
        return (yield ToolCall("spawn_agents", {"agents": agents}, include_tool_call=False)).tool_result.data

    output = run(handle_steps, spawnable_agents=[kid]).output
    assert [1] * 16 == [entry["output"] for entry in output[:16]]
    assert "max_children is 16" in output[16]["error"]
    assert (8, 5) == (DEFAULT_LIMITS.max_concurrent_children, DEFAULT_LIMITS.max_depth)


def ask_user_suspends(_: Path) -> None:
    asked = tool_call("ask_user", {"questions": [{"question": "Which?"}]})
    agent = AgentDefinition("asker", tools=[ask_user_tool()], model="t/m")
    journal = MemoryJournal()
    with Engine([agent], models=ScriptedModel([asked, "Done."])) as engine:
        first = engine.run_sync(agent, "go", journal=journal)
        (question,) = first.pending_questions
        second = engine.resume_sync(journal, answers={question.id: "red"})
    assert (RunStatus.SUSPENDED, RunStatus.COMPLETED, "Done.") == (first.status, second.status, second.output)


def secrets_are_not_read(root: Path) -> None:
    secret = [".env", ".env.example", ".npmrc", "key.pem"]
    for name in (*secret, "a.log"):
        (root / name).write_text("text\n")
    (root / ".gitignore").write_text("*.log\n")
    *withheld, ignored = called("read_files", {"paths": [*secret, "a.log"]}, *file_tools(root)).data
    assert [True] * 4 == ["error" in entry for entry in withheld]
    assert "text\n" == ignored["content"]


def paths_are_as_given(root: Path) -> None:
    (root / "a").write_text("\ufeffone\n")
    for given in ("./a", str(root / "a")):
        (entry,) = called("read_files", {"paths": [given]}, *file_tools(root)).data
        assert (given, "one\n") == (entry["path"], entry["content"])


def contents_are_written_as_they_are(root: Path) -> None:
    for content in ("\nabc\n", "```js\nx\n```\n"):
        called("write_file", {"path": "a", "content": content}, *file_tools(root, write=True))
        assert content == (root / "a").read_text()


def equal_contents_are_written(root: Path) -> None:
    (root / "a").write_text("x\n")
    for name in ("write_file", "propose_write_file"):
        assert not called(name, {"path": "a", "content": "x\n"}, *file_tools(root, write=True, propose=True)).is_error


def unknown_parameters_are_refused(root: Path) -> None:
    calls = [{"path": "a", "content": "x", "foo": 1}, {"path": "b", "content": "x"}]
    agent = AgentDefinition("asker", model="t/m", tools=file_tools(root, write=True))
    replies = [*[tool_call("write_file", value) for value in calls], "Done."]
    with Engine([agent], models=ScriptedModel(replies)) as engine:
        made = engine.run_sync(agent, "go").tool_calls
    assert [True, False] == [call.result.is_error for call in made]


def refused_agents_keep_their_place(_: Path) -> None:
    kid = AgentDefinition("kid", model="t/m")
    entries = [{"agent_type": name, "prompt": "go"} for name in ("nope", "kid")]

    def handle_steps(_: Any) -> Any:
        return (yield ToolCall("spawn_agents", {"agents": entries})).tool_result.data

    refused, ran = run(handle_steps, "spawn_agents", replies=["Yes."], spawnable_agents=[kid]).output
    assert ("error" in refused, ran["output"]) == (True, "Yes.")


def fitting_text_is_an_output(_: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    agent = AgentDefinition("asker", model="t/m", output_schema=schema)
    fits, never = ScriptedModel(['{"a": 1}']), ScriptedModel(["x"] * 9)
    for model, status, calls in ((fits, RunStatus.COMPLETED, 1), (never, RunStatus.FAILED, 3)):
        with Engine([agent], models=model) as engine:
            assert status is engine.run_sync(agent, "go").status
        assert calls == len(model.calls)


def cut_replies_go_on(_: Path) -> None:
    agent = AgentDefinition("asker", model="t/m")
    with Engine([agent], models=ScriptedModel([text("Part", stop_reason="max_tokens"), "Done."])) as engine:
        assert "PartDone." == engine.run_sync(agent, "go").output


def thoughts_with_an_output_end_the_turn(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        return (yield STEP).steps_complete

    for name, value in (("set_output", {"a": 1}), ("think_deeply", {"thought": "Hm."})):
        reply = tool_call(name, value, text="<think>Hm.</think>")
        assert run(handle_steps, name, replies=[reply], output_mode="structured_output").output is True
    assert run(handle_steps, replies=["<think>Hm.</think>"]).output is False


def slashes_are_prompts(_: Path) -> None:
    model = ScriptedModel(["Done."])
    with Engine([AgentDefinition("asker", model="t/m")], models=model) as engine:
        engine.run_sync("asker", "/compact").unwrap()
    assert ["/compact"] == [message.text for message in model.calls[0].messages]


def any_value_is_an_output(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield ToolCall("set_output", {"data": "hello"}, include_tool_call=False)

    assert "hello" == run(handle_steps, output_mode="structured_output").output


def agents_are_listed_in_a_message(_: Path) -> None:
    kid = AgentDefinition("kid", model="t/m", description="Helps.")
    agent = AgentDefinition("asker", model="t/m", tools=["spawn_agents"], spawnable_agents=[kid])
    model = ScriptedModel(["Done."])
    with Engine([agent], models=model) as engine:
        engine.run_sync(agent, "go").unwrap()
    assert any("<system-reminder>" in m.text and "kid" in m.text for m in model.calls[0].messages)


def small_summaries_drop_the_first_prompt(_: Path) -> None:
    large, small = [pruned(3_000, "word ", maxContextLength=most)[0] for most in (3_000, 500)]
    assert ("[USER]\ngo" in large, "[USER]" in small) == (True, False)
    assert "Progress note:" in small


def glob_gives_a_hundred_files(root: Path) -> None:
    for n in range(101):
        (root / f"{n}.ts").write_text("")
    found = called("glob", {"pattern": "*"}, *search_tools(root)).data
    assert (100, 101) == (len(found["files"]), found["count"])
    assert sorted(found["files"]) == found["files"]


def only_gitignore_leaves_out(root: Path) -> None:
    names = ["a.min.js", "b.gen.js", "node_modules/c.js", "package-lock.json"]
    for name in (*names, "d.js"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    (root / ".codebuffignore").write_text("b.gen.js\n")
    (root / ".gitignore").write_text("d.js\n")
    tools = [*file_tools(root), *search_tools(root)]
    (tree,) = called("read_subtree", {}, *tools).data
    assert names == called("glob", {"pattern": "**"}, *tools).data["files"]
    assert all(Path(name).name in tree["printed_tree"] for name in names)


def wrong_calls_are_raised(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield ToolCall("no_such_tool", {})

    with pytest.warns(SourceWarning, match="'no_such_tool' is not available"):
        error = run(handle_steps).error
    assert isinstance(error, ToolNotAvailable)
    assert error.where.startswith(f"{__file__}:")


def failed_model_calls_are_raised(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        try:
            yield STEP
        except ModelError:
            return "caught"

    assert "caught" == run(handle_steps, replies=[failure(ModelError("down"))]).output


def exceptions_fail_the_run(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield from ()
        raise ValueError("boom")

    result = run(handle_steps)
    assert isinstance(result.error, HandlerError)
    assert (RunStatus.FAILED, None) == (result.status, result.output)
    assert Path(__file__).name in result.error.where


def state_is_frozen(_: Path) -> None:
    def handle_steps(ctx: Any) -> Any:
        yield from ()
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            ctx.agent_state.output = 1
        return "frozen"

    assert run(handle_steps).output == "frozen"


def the_context_has_the_first_state(_: Path) -> None:
    def handle_steps(ctx: Any) -> Any:
        turn = yield STEP
        return [len(state.message_history) for state in (ctx.agent_state, turn.agent_state)]

    assert run(handle_steps, replies=["Yes."]).output == [1, 2]


def text_calls_listed_tools(root: Path) -> None:
    for name in "ab":
        (root / name).write_text(name)
    calls = [
        f'<codebuff_tool_call>\n{{"cb_tool_name": "read_files", "paths": ["{name}"]}}\n</codebuff_tool_call>'
        for name in "ab"
    ]

    def handle_steps(_: Any) -> Any:
        turn = yield StepText("\n".join(calls))
        if turn.tool_result.is_error:
            return turn.tool_result.text
        return [turn.tool_result.data[0]["path"], *[result.data[0]["path"] for result in turn.tool_results]]

    assert ["b", "a", "b"] == run(handle_steps, *file_tools(root)).output
    agent = AgentDefinition("asker", handle_steps=handle_steps)
    with Engine([agent], file_tools(root)) as engine:
        assert "not available" in engine.run_sync(agent, "go").output


def tags_within_a_line_are_calls(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        call = '{"cb_tool_name": "think_deeply", "thought": "Hm."}'
        return len((yield StepText(f"So <codebuff_tool_call>{call}</codebuff_tool_call> it is.")).tool_results)

    assert 1 == run(handle_steps, "think_deeply").output


def candidates_come_once(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        first = yield GenerateN(1)
        second = yield ToolCall("think_deeply", {"thought": "Hm."}, include_tool_call=False)
        return [list(turn.n_responses) for turn in (first, second)]

    assert [["Yes."], []] == run(handle_steps, replies=["Yes."]).output


def calls_after_the_end_are_skipped(root: Path) -> None:
    for name in ("end_turn", "task_completed"):
        agent = AgentDefinition("asker", model="t/m", tools=[name, *file_tools(root, write=True)])
        reply = tool_calls(tool_call(name, {}), tool_call("write_file", {"path": "a", "content": "x"}))
        with Engine([agent], models=ScriptedModel([reply])) as engine:
            calls = engine.run_sync(agent, "go").tool_calls
        assert [False, True] == [call.is_error for call in calls]
        assert not (root / "a").exists()


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


def add_message_is_for_handlers(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        yield STEP_ALL

    wrong = tool_call("add_message", {"role": "user", "content": "x"})
    result = run(handle_steps, "add_message", replies=[wrong, "ok"])
    assert [True] == [call.is_error for call in result.tool_calls]
    assert "add_message" in result.warnings[0]


def candidates_are_texts(_: Path) -> None:
    def handle_steps(_: Any) -> Any:
        return list((yield GenerateN(1)).n_responses)

    reply = tool_call("read_files", {"paths": ["a"]}, text="I would read.")
    assert run(handle_steps, replies=[reply]).output == ["I would read."]


def spawns_of_a_reply_run_together(_: Path) -> None:
    both = asyncio.Barrier(2)

    @tool(timeout=20)
    async def meet() -> str:
        """Wait for the other child."""
        await both.wait()
        return "met"

    def meets(ctx: Any) -> Any:
        return [ctx.prompt, (yield ToolCall("meet", {})).tool_result.text]

    kid = AgentDefinition("kid", tools=[meet], handle_steps=meets)
    spawns = [tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": p}]}) for p in ("one", "two")]
    agent = AgentDefinition("asker", model="t/m", tools=["spawn_agents"], spawnable_agents=[kid])
    with Engine([agent], models=ScriptedModel([tool_calls(*spawns), "Done."])) as engine:
        calls = engine.run_sync(agent, "go").tool_calls
    assert [["one", "met"], ["two", "met"]] == [list(call.result.data[0]["output"]) for call in calls]


def models_see_parts_of_long_results(_: Path) -> None:
    @tool
    def long() -> str:
        """Return much."""
        return "x" * 150_000

    def handle_steps(_: Any) -> Any:
        turn = yield ToolCall("long", {})
        yield STEP
        return len(turn.tool_result.text)

    agent = AgentDefinition("asker", model="t/m", tools=[long], handle_steps=handle_steps)
    model = ScriptedModel(["Done."])
    with Engine([agent], models=model) as engine:
        assert 150_000 == engine.run_sync(agent, "go").output
    assert 100_000 < len(model.calls[0].messages[-1].text) < 101_000


def prompts_are_not_wrapped(_: Path) -> None:
    model = ScriptedModel(["Done."])
    with Engine([AgentDefinition("asker", model="t/m")], models=model) as engine:
        engine.run_sync("asker", "go").unwrap()
    assert ["go"] == [message.text for message in model.calls[0].messages]


def wrong_calls_of_models_are_stored(_: Path) -> None:
    agent = AgentDefinition("asker", model="t/m", tools=[ask_user_tool()])
    replies = [tool_call("no_such_tool", {}), tool_call("ask_user", {"questions": 1}), "Done."]
    with Engine([agent], models=ScriptedModel(replies)) as engine:
        result = engine.run_sync(agent, "go")
    called, refused = result.state.message_history[1:5:2], result.state.message_history[2:5:2]
    assert ["no_such_tool", "ask_user"] == [message.tool_calls[0].tool_name for message in called]
    assert [("no_such_tool", True), ("ask_user", True)] == [(m.tool_name, m.result.is_error) for m in refused]


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


def inline_prompts_are_removed(_: Path) -> None:
    kid = AgentDefinition("kid", instructions_prompt="Be brief.")

    def handle_steps(_: Any) -> Any:
        inline = ToolCall("spawn_agent_inline", {"agent_type": "kid", "prompt": "Help."}, include_tool_call=False)
        return [message.text for message in (yield inline).agent_state.message_history]

    assert run(handle_steps, replies=["Yes."], spawnable_agents=[kid]).output == ["go", "Yes."]
    start = tool_call("spawn_agent_inline", {"agent_type": "kid", "prompt": "Help."}, text="I ask.")
    agent = AgentDefinition("asker", model="t/m", tools=["spawn_agent_inline"], spawnable_agents=[kid])
    with Engine([agent], models=ScriptedModel([start, "Yes.", "Done."])) as engine:
        history = engine.run_sync(agent, "go").state.message_history
    assert ["Yes.", "I ask.", "Done."] == [m.text for m in history if isinstance(m, AssistantMessage)]


def replacements_are_exact(root: Path) -> None:
    (root / "a").write_text("if x:\n    return 1\n")
    value = {"path": "a", "replacements": [{"oldString": "if x:\n  return 1", "newString": "pass"}]}
    assert called("str_replace", value, *file_tools(root, write=True)).is_error


def missing_servers_fail_the_run(root: Path) -> None:
    from stepengine.adapters.mcp import mcp_tools  # a second to import, for one line

    agent = AgentDefinition("asker", model="t/m", tools=[mcp_tools([str(root / "none")], name="shop")])
    with Engine([agent], models=ScriptedModel([])) as engine:
        result = engine.run_sync(agent, "go")
    assert RunStatus.FAILED is result.status
    assert "the MCP server 'shop' did not start" in str(result.error)


def pruned(words: int, reply: str, **params: Any) -> list[str]:
    """
    Return the conversation after the pruner was asked about a reply of so many words, and another question.
    """
    pruner = load_agent("context-pruner")
    agent = AgentDefinition("asker", model="t/m", tools=["spawn_agents"], spawnable_agents=[pruner])
    with Engine([agent], models=ScriptedModel([reply * words])) as engine:
        first = engine.run_sync(agent, "go")

    def handle_steps(_: Any) -> Any:
        call = ToolCall(
            "spawn_agent_inline", {"agent_type": "context-pruner", "params": params}, include_tool_call=False
        )
        return [message.text for message in (yield call).agent_state.message_history]

    output: list[str] = run(handle_steps, spawnable_agents=[pruner], previous=first.state).output
    return output


def pruner_defaults() -> Any:
    schema: Any = load_agent("context-pruner").input_schema
    return schema.params.model_validate({})


def pruning_waits_for_its_params(_: Path) -> None:
    minutes = {"idle_ms": 45 * 60_000}
    assert "<conversation_summary>" not in pruned(3_000, "word ", **minutes)[0]
    assert "<conversation_summary>" in pruned(3_000, "word ", **minutes, cacheExpiryMs=300_000)[0]
    assert "<conversation_summary>" not in pruned(3, "word ", **minutes, cacheExpiryMs=300_000)[0]
    assert "<conversation_summary>" not in pruned(3, "word ", maxContextLength=10)[0]
    assert 200_000 == pruner_defaults().max_context_length


def outputs_are_forgotten_by_name(_: Path) -> None:
    assert [] == pruner_defaults().forgotten_agents


def held_by(*names: str) -> Callable[[Path], None]:
    """
    Return a check that the tests of bundled tools that hold a line exist.
    """

    def check(_: Path) -> None:
        for name in names:
            file, _, test = name.partition("::")
            source = (ROOT / "tests" / "bundled_tools" / file).read_text(encoding="utf-8")
            assert f"def {test}(" in source, name

    return check


def echo(value: Any) -> Any:
    yield from ()
    return value


OTHERWISE: dict[str, Callable[[Path], None]] = {
    "`last_message` is a list of messages": last_message_is_text,
    "outputs hold thoughts": outputs_hold_no_thoughts,
    "`all_messages` leaves out the first message": all_messages_are_those_of_the_run,
    "`set_output` counts only for `structured_output`": set_output_replaces_the_text,
    "200 steps": steps_are_fifty,
    "any number of children": children_are_bounded,
    "a missing program is an exit code 127; `command -v x` and other builtins run alone": held_by(
        "test_shell_tools.py::test_a_program_that_cannot_execute_is_named_in_the_error",
        "test_shell_tools.py::test_shell_builtins_are_not_programs",
    ),
    "commands are run by a shell": held_by(
        "test_shell_tools.py::test_shell_syntax_is_refused_unless_a_shell_is_allowed"
    ),
    "commands see the environment and the home folder": held_by(
        "test_shell_tools.py::test_a_command_sees_only_the_variables_of_the_list",
        "test_shell_tools.py::test_home_is_a_private_folder_unless_home_is_real",
    ),
    "`ask_user` waits in the process": ask_user_suspends,
    "a replacement that fails is skipped": held_by(
        "test_file_tools.py::test_if_one_replacement_fails_nothing_is_written"
    ),
    "any file of the system can be read": held_by(
        "test_confinement.py::test_a_path_that_leads_out_is_refused_by_every_tool"
    ),
    "the content of `.env` and ignored files is `[BLOCKED]`": secrets_are_not_read,
    "`list_directory`, `glob` and `code_search` find all files": held_by(
        "test_confinement.py::test_secrets_are_not_read_listed_searched_or_written"
    ),
    "paths in results of `read_files` start at the root; contents keep a byte order mark": paths_are_as_given,
    "`write_file` writes any file of the project": held_by(
        "test_confinement.py::test_secrets_are_not_read_listed_searched_or_written",
        "test_confinement.py::test_protected_files_are_not_written_unless_allowed",
    ),
    "an edit applies to what the file contains now": held_by(
        "test_file_tools.py::test_a_file_changed_since_the_run_read_it_is_kept"
    ),
    "`write_file` removes a leading newline and a code fence": contents_are_written_as_they_are,
    "`write_file` and `propose_write_file` with the same content are errors": equal_contents_are_written,
    "unknown parameters of a tool are dropped, unquoted JSON is repaired": unknown_parameters_are_refused,
    "an agent that may not be spawned is left out of the call and the result": refused_agents_keep_their_place,
    "JSON text is no output; `set_output` is asked for once, then the output is null": fitting_text_is_an_output,
    "a reply that was cut at `max_tokens` ends the turn": cut_replies_go_on,
    "`<think>` text with only a call of `set_output`, `think_deeply` or the like continues the turn": (
        thoughts_with_an_output_end_the_turn
    ),
    "`/compact`, `/init` and `/export` are commands": slashes_are_prompts,
    '`set_output({"data": ...})` needs an object': any_value_is_an_output,
    "a list of the agents that may be spawned is part of the tool": agents_are_listed_in_a_message,
    "summaries of `context-pruner` keep more messages": small_summaries_drop_the_first_prompt,
    "`code_search` gives paths from `cwd`, as in `./a.ts`": held_by(
        "test_search_tools.py::test_both_engines_find_the_same"
    ),
    "`glob` matches paths from the root, also with `cwd`": held_by(
        "test_search_tools.py::test_glob_lists_the_same_files_as_python_glob"
    ),
    "`glob` and `read_subtree` leave out `node_modules`, `*.min.*`, `package-lock.json` and what `.codebuffignore` names": (
        only_gitignore_leaves_out
    ),
    "`glob` accepts `*.ts?(x)`, `{1..3}` and `!*.ts`": held_by(
        "test_search_tools.py::test_glob_rejects_the_syntax_of_other_globs",
        "test_search_tools.py::test_glob_sorts_by_path_and_counts_all_files",
    ),
    "`glob` gives all files": glob_gives_a_hundred_files,
    "`read_files` gives up to 100,000 characters of a file": held_by(
        "test_file_tools.py::test_files_are_read_in_portions_of_lines",
        "test_file_tools.py::test_long_lines_are_cut_and_many_characters_end_the_call",
    ),
    "`timeout_seconds: -1` waits without end, 0 not at all": held_by(
        "test_shell_tools.py::test_the_requested_timeout_is_clamped_to_its_bounds",
        "test_shell_tools.py::test_a_command_is_killed_at_its_timeout_with_output_kept",
    ),
    "results have messages such as `Created file successfully.` and `Exit code: 0`": held_by(
        "test_file_tools.py::test_a_file_is_created_with_its_parents_or_overwritten",
        "test_file_tools.py::test_replacements_are_made_in_order_and_shown_as_a_diff",
    ),
    "a wrong call of a handler has no result": wrong_calls_are_raised,
    "a failed model call ends the run": failed_model_calls_are_raised,
    "an exception in a handler is an output": exceptions_fail_the_run,
    "`agentState` can be changed": state_is_frozen,
    "the `agentState` that a handler is given changes with the run": the_context_has_the_first_state,
    "`toolResult` of `STEP_TEXT` starts with the first call's, and any tool can be called": text_calls_listed_tools,
    "`STEP_TEXT` parses calls only between tags on lines of their own": tags_within_a_line_are_calls,
    "`nResponses` is there until the next step": candidates_come_once,
    "calls after `end_turn` or `task_completed` in a reply are executed": calls_after_the_end_are_skipped,
    "a handler's calls of `set_output`, `write_todos` and the like are stored": calls_of_listed_tools_are_stored,
    "`add_message` is offered to models": add_message_is_for_handlers,
    "candidates may hold calls": candidates_are_texts,
    "`find_files` asks a model": held_by("test_overview_tools.py::test_find_files_ranks_the_described_file_first"),
    "several `spawn_agents` of a reply run one after another": spawns_of_a_reply_run_together,
    "models see whole results of tools and children": models_see_parts_of_long_results,
    "prompts are wrapped in `<user_message>`": prompts_are_not_wrapped,
    "a model's wrong call becomes a user message with `<system>Error`": wrong_calls_of_models_are_stored,
    "a run without a reply is an error, or has the output before it": empty_replies_complete,
    "a direct call of an agent is stored as `spawn_agents`": direct_calls_keep_their_name,
    "prompt and instructions of an inline child stay in the history": inline_prompts_are_removed,
    "`str_replace` also finds text with other white space": replacements_are_exact,
    "tools of an MCP server that does not start are left out": missing_servers_fail_the_run,
    "`context-pruner` prunes after 5 idle minutes or from 400,000 tokens": pruning_waits_for_its_params,
    "`context-pruner` forgets outputs of `file-picker`, `basher` and others": outputs_are_forgotten_by_name,
}


def test_each_documented_difference_has_a_check() -> None:
    lines = rows("Decided otherwise")

    assert [line[0] for line in lines] == [*OTHERWISE]
    assert all(len(line) == 2 and line[1] for line in lines)


SLOW = [pytest.mark.deep]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=SLOW if check is missing_servers_fail_the_run else [])
        for line, check in OTHERWISE.items()
    ],
)
def test_each_documented_difference_holds(line: str, tmp_path: Path) -> None:
    OTHERWISE[line](tmp_path)
