"""Tools that a model searches for: found and called on every wire, by the provider's search or by ours, whoever takes over."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentDefinition,
    AssistantMessage,
    Engine,
    ModelSettings,
    RetryPolicy,
    StepWith,
    Tool,
    Transcript,
    UserMessage,
    tool,
)
from stepengine.data.estimate import tool_tokens
from stepengine.data.messages import OpaquePart, ToolReferencePart, ToolResult
from stepengine.models import (
    AnthropicProvider,
    GoogleProvider,
    ModelRequest,
    Models,
    OpenAIChatProvider,
    OpenAIProvider,
)
from stepengine.models._settings import warn_once
from stepengine.tools.agent_tools import BUILT_IN
from tests.faults.search_server import Searching, streamed
from tests.faults.server import fault_server, json_answer, sse

PROVIDERS = {
    "anthropic": lambda url: AnthropicProvider("k", url),
    "openai": lambda url: OpenAIProvider("k", f"{url}/v1"),
    "openai_chat": lambda url: OpenAIChatProvider(api_key="k", base_url=f"{url}/v1"),
    "google": lambda url: GoogleProvider("k", url),
}
NATIVE = ("anthropic/claude-sonnet-4-5", "openai/gpt-5.4")
OURS = ("anthropic/claude-opus-4-1", "openai/gpt-5", "openai_chat/gpt-5.4", "google/gemini-3-pro")
RATE = ("get_exchange_rate", '{"pair": "USD/EUR"}')


@tool(in_thread=False)
def look(at: str) -> str:
    """Look at something."""
    return f"nothing at {at}"


@tool(defer_loading=True, in_thread=False)
def get_exchange_rate(pair: str) -> str:
    """Look up the exchange rate of two currencies."""
    return f"{pair}: 0.92"


async def work(input: dict[str, Any]) -> str:
    return "worked"


def shelf(count: int, **options: Any) -> list[Tool[..., Any]]:
    """Tools of the size that those of servers have."""
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "The path of the file, relative to the root of the workspace."},
            "depth": {"type": "integer", "description": "How many levels below it are read, from 1 to 10."},
        },
        "required": ["path"],
    }
    about = "Manage the records of department {}: list, create, update and archive them by their path in the workspace."
    return [Tool(f"manage_records_{n}", about.format(n), schema, work, **options) for n in range(count)]


HIDDEN = shelf(40, defer_loading=True)


async def ran(server: Searching, model: str, *, tools: Any = None, twice: Any = None, **fields: Any) -> Any:
    """Run an agent on *model*; *twice* is a second server and model that go on with the conversation."""
    tools = [look, get_exchange_rate, *HIDDEN] if tools is None else tools
    previous, results = None, []
    for rule, name in ((server, model), *([twice] if twice else [])):
        async with fault_server(rule) as at:
            prefix = name.partition("/")[0]
            models = Models({prefix: PROVIDERS[prefix](at.url)})
            agent = AgentDefinition("clerk", model=name, tools=tools, **fields)
            async with Engine(
                [agent], models=models, retry=RetryPolicy(attempts=2, base_seconds=0), pricing=None
            ) as engine:
                result = await engine.run("clerk", "What is the rate?", previous=previous)
        results.append(result)
        previous = result.state
    return results if twice else results[0]


def called(result: Any) -> list[tuple[str, str]]:
    return [(call.tool_name, call.result.text) for call in result.tool_calls]


def names(body: dict[str, Any]) -> list[str]:
    """The tools that stand in a request, in order."""
    tools = body.get("tools", [])
    tools = tools[0]["functionDeclarations"] if tools and "functionDeclarations" in tools[0] else tools
    return [tool.get("function", tool).get("name", tool.get("type")) for tool in tools]


# --- the provider searches -------------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV63", "providers:PV64")
@pytest.mark.parametrize("model", NATIVE)
async def test_a_model_with_native_search_finds_and_calls_hidden_tools(model):
    server = Searching([RATE, ("manage_records_3", '{"path": "a"}'), RATE])
    result = await ran(server, model)
    assert [] == server.refused
    rate = ("get_exchange_rate", "USD/EUR: 0.92")
    assert [rate, ("manage_records_3", "worked"), rate] == called(result)
    assert "Done." == result.unwrap()
    assert "find_tools" not in names(server.bodies[0])
    assert 41 == sum(tool.get("defer_loading", False) for tool in server.bodies[0]["tools"])
    assert [1, 4] == [len({json.dumps(body["tools"]) for body in server.bodies}), len(server.bodies)]
    parts = [part for part in result.state.message_history[1].content if isinstance(part, OpaquePart)]
    assert [("tool_search", "get_exchange_rate")] * 2 == [(part.tool, part.text) for part in parts]


BY_CLIENT = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object"},
}


@pytest.mark.spec("providers:PV122")
@pytest.mark.parametrize("stream", [False, True])
async def test_find_tools_answers_a_search_that_openai_delegates(stream):
    server = Searching([RATE, RATE])
    settings = ModelSettings(extra={"tools": [BY_CLIENT]})
    serving = server if not stream else lambda body: sse(*streamed(json.loads(server(body).items[0])), "fin")
    async with fault_server(serving) as at:
        agent = AgentDefinition(
            "clerk", model="openai/gpt-5.4", tools=[look, get_exchange_rate, *HIDDEN], settings=settings
        )
        models = Models({"openai": PROVIDERS["openai"](at.url)})
        async with Engine([agent], models=models, retry=RetryPolicy(attempts=1), pricing=None) as engine:
            if stream:
                result = [event async for event in engine.stream("clerk", "What is the rate?")][-1].result
            else:
                result = await engine.run("clerk", "What is the rate?")
    assert [] == server.refused
    assert ["find_tools", "get_exchange_rate", "get_exchange_rate"] == [name for name, _ in called(result)]
    (output,) = [item for item in server.bodies[-1]["input"] if item.get("type") == "tool_search_output"]
    (search,) = [item for item in server.bodies[-1]["input"] if item.get("type") == "tool_search_call"]
    assert {"queries": ["get exchange rate"], "limit": 3} == search["arguments"]
    assert [("get_exchange_rate", True)] == [(tool["name"], tool["defer_loading"]) for tool in output["tools"]]
    assert ("client", "completed", search["call_id"]) == (output["execution"], output["status"], output["call_id"])
    assert [1] * len(server.bodies) == [names(body).count("tool_search") for body in server.bodies]


@pytest.mark.spec("providers:PV122")
@pytest.mark.parametrize("asked", [{}, {"queries": ["zzz"]}, '{"q": 5}', None])
async def test_a_delegated_search_without_matches_returns_no_tools(asked):
    item = {"type": "tool_search_call", "id": "c", "call_id": None, "execution": "client", "arguments": asked}
    done = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
    replies = [{"id": "r", "model": "gpt-5.4", "status": "completed", "output": [one]} for one in (item, done)]
    bodies = []

    def answer(body: bytes) -> Any:
        bodies.append(json.loads(body))
        return json_answer(json.dumps(replies[len(bodies) - 1]).encode())

    async with fault_server(answer) as at:
        agent = AgentDefinition("clerk", model="openai/gpt-5.4", tools=[look])
        models = Models({"openai": PROVIDERS["openai"](at.url)})
        async with Engine([agent], models=models, pricing=None) as engine:
            assert "No." == (await engine.run("clerk", "What is the rate?")).unwrap()
    search, output = bodies[1]["input"][1:3]
    assert {**item, "call_id": output["call_id"]} == search
    assert [] == output["tools"]


@pytest.mark.spec("providers:PV63")
async def test_the_cache_mark_is_at_the_last_visible_tool():
    server = Searching([RATE])
    await ran(server, NATIVE[0])
    marked = [tool["name"] for tool in server.bodies[0]["tools"] if "cache_control" in tool]
    assert ["tool_search_tool_bm25"] == marked


@pytest.mark.spec("providers:PV64", "providers:PV58")
async def test_a_search_in_a_responses_stream_goes_back_unchanged():
    server = Searching([RATE])
    bodies: list[Any] = []

    def answer(body: bytes) -> Any:
        bodies.append(json.loads(body))
        return sse(*streamed(json.loads(server(body).items[0])), "fin")

    async with fault_server(answer) as at:
        agent = AgentDefinition("clerk", model="openai/gpt-5.4", tools=[look, get_exchange_rate])
        async with Engine([agent], models=Models({"openai": PROVIDERS["openai"](at.url)}), pricing=None) as engine:
            result = await engine.run("clerk", "What is the rate?")
    assert ([], "Done.") == (server.refused, result.unwrap())
    search, found, call = bodies[1]["input"][1:4]
    assert ("tool_search_call", {"paths": ["get_exchange_rate"]}) == (search["type"], search["arguments"])
    assert ("tool_search_output", ["get_exchange_rate"]) == (found["type"], [t["name"] for t in found["tools"]])
    assert "get_exchange_rate" == call["namespace"]


# --- a tool of ours searches -----------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV63", "providers:PV64")
@pytest.mark.parametrize("model", OURS)
async def test_without_native_search_our_tool_finds_and_appends_tools(model):
    server = Searching([RATE, ("manage_records_7", '{"path": "a"}'), RATE, ("manage_records_3", '{"path": "a"}')])
    result = await ran(server, model)
    assert [] == server.refused
    rate = ("get_exchange_rate", "USD/EUR: 0.92")
    seventh, third = [(f"manage_records_{number}", "worked") for number in (7, 3)]
    found = [("find_tools", f"The tool {name} can be called from now on.\n") for name, _ in (rate, seventh, third)]
    assert [found[0], rate, found[1], seventh, rate, found[2], third] == called(result)
    assert ["look", "find_tools"] == names(server.bodies[0])
    assert ["look", "find_tools", RATE[0], "manage_records_7", "manage_records_3"] == names(server.bodies[-1])
    for earlier, later in pairwise(server.bodies):
        assert names(earlier) == names(later)[: len(names(earlier))]


@pytest.mark.spec("providers:PV88")
@pytest.mark.parametrize("model", NATIVE)
async def test_a_refused_native_search_is_replaced_by_ours(model, caplog):
    warn_once.cache_clear()
    server = Searching(
        [RATE], cannot="BM25 tool search is not supported on Bedrock. Use tool_search_tool_regex instead."
    )
    result = await ran(server, model)
    assert 1 == len(server.refused)
    assert "find_tools is offered in its place" in caplog.text
    assert ["find_tools", "get_exchange_rate"] == [name for name, _ in called(result)]


@pytest.mark.spec("providers:PV56")
async def test_token_counting_leaves_out_the_search_tool():
    bodies: list[Any] = []

    def answer(body: bytes) -> Any:
        bodies.append(json.loads(body))
        return json_answer(b'{"input_tokens": 7}')

    tools = (look.spec, get_exchange_rate.spec, BUILT_IN["find_tools"].spec)
    request = ModelRequest(NATIVE[0], "", Transcript([UserMessage("hi")]), tools)
    async with fault_server(answer) as at:
        provider = PROVIDERS["anthropic"](at.url)
        assert 7 == await provider.count_tokens(request)
        await provider.close()
    assert ["look", "find_tools"] == names(bodies[0])


@pytest.mark.spec("providers:PV56")
@pytest.mark.parametrize(
    ("model", "block"),
    [
        (NATIVE[0], {"type": "server_tool_use", "id": "srvtoolu_1", "name": "tool_search_tool_regex", "input": {}}),
        (NATIVE[1], {"type": "tool_search_call", "id": "tsc_1", "execution": "server", "arguments": {"paths": ["a"]}}),
    ],
)
def test_a_search_in_wire_format_by_the_author_passes_through(model, block):
    provider = PROVIDERS[model.partition("/")[0]]("http://127.0.0.1:9")
    said = AssistantMessage([OpaquePart(provider.name, block)])
    own = ModelSettings(extra={"tools": [{"type": "tool_search"}]})
    request = ModelRequest(model, "", Transcript([UserMessage("hi")]), settings=own, tail=(said,))
    assert json.dumps(block) in json.dumps(json.loads(provider._encode(request, stream=False).content))
    bare = attrs.evolve(request, settings=ModelSettings())
    assert block["id"] not in provider._encode(bare, stream=False).content.decode()


@pytest.mark.parametrize("model", OURS)
async def test_a_hidden_tool_called_unseen_runs_and_stays_visible(model):
    server = Searching([RATE], remembers=True)
    result = await ran(server, model)
    assert [("get_exchange_rate", "USD/EUR: 0.92")] == called(result)
    assert ["look", "find_tools", "get_exchange_rate"] == names(server.bodies[1])


# --- who takes over --------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV57", "providers:PV63", "providers:PV64")
@pytest.mark.parametrize("second", [*NATIVE, OURS[2]])
@pytest.mark.parametrize("first", [*NATIVE, "google/gemini-3-pro"])
async def test_found_tools_survive_a_change_of_provider(first, second):
    before, after = Searching([RATE]), Searching([RATE])
    one, two = await ran(before, first, twice=(after, second))
    assert ([], []) == (before.refused, after.refused)
    assert ("Done.", "Done.") == (one.unwrap(), two.unwrap())
    assert [("get_exchange_rate", "USD/EUR: 0.92")] == called(two), "no second search"


@pytest.mark.spec("providers:PV57")
@pytest.mark.parametrize("model", NATIVE)
async def test_a_conversation_continues_without_a_formerly_found_tool(model):
    server = Searching([RATE])
    async with fault_server(server) as at:
        prefix = model.partition("/")[0]
        whole = AgentDefinition("clerk", model=model, tools=[look, get_exchange_rate, *HIDDEN])
        fewer = AgentDefinition("fewer", model=model, tools=[look, *HIDDEN])
        bare = AgentDefinition("bare", model=model)
        models = Models({prefix: PROVIDERS[prefix](at.url)})
        async with Engine([whole, fewer, bare], models=models, pricing=None) as engine:
            one = await engine.run("clerk", "What is the rate?")
            two = await engine.run("fewer", "And now?", previous=one.state)
            three = await engine.run("bare", "And now?", previous=two.state)
    assert [] == server.refused
    assert ["Done."] * 3 == [result.unwrap() for result in (one, two, three)]


@pytest.mark.spec("providers:PV63", "providers:PV64")
@pytest.mark.parametrize("model", [*NATIVE, *OURS])
async def test_a_result_of_an_own_tool_can_reveal_others(model):
    @tool(in_thread=False)
    def open_counter() -> ToolResult:
        """Open the counter for money."""
        return ToolResult.parts(["The counter is open.", ToolReferencePart("get_exchange_rate")])

    server = Searching([("open_counter", "{}"), RATE])
    result = await ran(server, model, tools=[open_counter, get_exchange_rate, *HIDDEN])
    assert [] == server.refused
    assert ["open_counter", "get_exchange_rate"] == [name for name, _ in called(result)]


# --- what an author says for one step -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [*NATIVE, OURS[0]])
async def test_tools_named_for_a_step_are_shown_to_the_model(model):
    def handle(ctx: Any) -> Any:
        yield StepWith(tools=["get_exchange_rate"])

    server = Searching([RATE])
    result = await ran(server, model, handle_steps=handle)
    assert [] == server.refused
    assert ["get_exchange_rate"] == names(server.bodies[0]) == [name for name, _ in called(result)]
    assert "defer_loading" not in json.dumps(server.bodies[0])


@pytest.mark.parametrize("model", [*NATIVE, OURS[0]])
async def test_a_hidden_tool_that_is_demanded_by_name_is_shown(model):
    def handle(ctx: Any) -> Any:
        yield StepWith(tool_choice="get_exchange_rate")

    server = Searching([RATE])
    await ran(server, model, handle_steps=handle)
    assert [] == server.refused
    shown = [tool for tool in server.bodies[0]["tools"] if "defer_loading" not in tool]
    assert "get_exchange_rate" in json.dumps(shown)


def test_the_prompt_estimate_leaves_out_deferred_tools():
    assert 0 == tool_tokens([one.spec for one in HIDDEN]) < tool_tokens([one.spec for one in shelf(40)])
