"""
Spans and metrics of runs, read with the exporter of OpenTelemetry's own SDK.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import StatusCode

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Complete,
    Engine,
    Parallel,
    Receive,
    RunStatus,
    Send,
    Start,
    Steps,
    ToolResult,
    Wait,
    call,
    tool,
)
from stepengine.adapters.otel import Tracing
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls

COUNTERPARTS = (("pypi:opentelemetry-sdk", "1.45.2", "works", "spans and metrics by the generative AI conventions"),)

SECRET = "a word that nobody may export"


class Traces:
    """
    An SDK that keeps what it is given.
    """

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])

    def observer(self, **options: Any) -> Tracing:
        return Tracing(self.provider, self.meters, **options)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def tree(self) -> list[Any]:
        """
        The names of the spans, nested as their parents say, in the order in which they began.
        """
        spans = sorted(self.spans, key=lambda span: span.start_time or 0)
        below: dict[Any, list[Any]] = {}
        for span in spans:
            below.setdefault(span.parent.span_id if span.parent else None, []).append(span)

        def shown(span: ReadableSpan) -> Any:
            children = [shown(child) for child in below.get(span.context.span_id, [])]
            return {span.name: children} if children else span.name

        known = {span.context.span_id for span in spans}
        roots = [span for parent, spans in below.items() if parent not in known for span in spans]
        return [shown(root) for root in roots]

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if m.name == name]
        return [point for metric in found for point in metric.data.data_points]


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.provider.shutdown()
    made.meters.shutdown()


@tool(in_thread=False, requires_permission=False)
def say(what: str) -> ToolResult:
    """
    Say.
    """
    return ToolResult.error("no") if what == "wrong" else ToolResult.text(what)


def reply(content: Any, **more: Any) -> ModelReply:
    return ModelReply(content, usage=Usage(7, 5, 20, 3, 2), cost=Decimal("0.25"), request_id="req_1", **more)


KID = AgentDefinition("kid", model="anthropic/claude-haiku-4-5")
BOSS = AgentDefinition(
    "boss",
    model="anthropic/claude-sonnet-4-5",
    tools=[say, "spawn_agents"],
    spawnable_agents=[KID],
    system_prompt=SECRET,
)
SPAWN = tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": SECRET}]})


@pytest.mark.spec("requirements:O6", "ecosystem:EC135", "ecosystem:EC136", "ecosystem:EC137")
async def test_runs_steps_calls_and_children_are_nested_spans(traces: Traces) -> None:
    replies = [tool_calls(tool_call("say", {"what": "x"}), SPAWN), text(SECRET), reply("done")]
    async with Engine([BOSS], models=ScriptedModel(replies), observers=[traces.observer()]) as engine:
        with traces.provider.get_tracer("app").start_as_current_span("request"):
            await engine.run("boss", SECRET, session_id="s1")

    kid = {"invoke_agent kid": [{"stepengine.step 0": ["chat claude-haiku-4-5"]}]}
    first = ["chat claude-sonnet-4-5", "execute_tool say", {"execute_tool spawn_agents": [kid]}]
    boss = {"invoke_agent boss": [{"stepengine.step 0": first}, {"stepengine.step 1": ["chat claude-sonnet-4-5"]}]}
    assert [{"request": [boss]}] == traces.tree()
    assert 1 == len({span.attributes["stepengine.run_id"] for span in traces.spans if span.name != "request"})
    assert {"2"} == {span.attributes["stepengine.path"] for span in traces.spans if "kid" in span.name}
    assert "s1" == traces.one("invoke_agent boss").attributes["gen_ai.conversation.id"]


@pytest.mark.spec("requirements:O6", "ecosystem:EC135", "ecosystem:EC136", "ecosystem:EC76")
async def test_attributes_and_metrics_follow_the_conventions(traces: Traces) -> None:
    replies = [reply([*tool_call("say", {"what": "x"}).content]), reply("done", model="anthropic/claude-sonnet-4-5-1")]
    async with Engine([BOSS], models=ScriptedModel(replies), observers=[traces.observer()]) as engine:
        await engine.run("boss", "go")

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for span in traces.spans for name in span.attributes if name.startswith("gen_ai.")}
    assert set() == used - known
    chat = dict(traces.spans[-3].attributes)
    assert 0 <= chat.pop("gen_ai.response.time_to_first_chunk") < 60
    run_id = chat.pop("stepengine.run_id")
    assert {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "anthropic", "gen_ai.request.model": "claude-sonnet-4-5",
        "gen_ai.response.model": "claude-sonnet-4-5-1", "gen_ai.response.finish_reasons": ("end_turn",),
        "gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 20,
        "gen_ai.usage.cache_creation.input_tokens": 3, "gen_ai.usage.reasoning.output_tokens": 2,
        "operation.cost": 0.25, "stepengine.path": "", "stepengine.purpose": "step", "stepengine.request_id": "req_1",
    } == chat  # fmt: skip
    run = traces.one("invoke_agent boss")
    assert (60, 14, 0.5, run_id) == tuple(
        [
            run.attributes[name]
            for name in (
                "gen_ai.usage.input_tokens",
                "gen_ai.usage.output_tokens",
                "operation.cost",
                "stepengine.run_id",
            )
        ]
    )
    tokens = {p.attributes["gen_ai.token.type"]: 0 for p in traces.points("gen_ai.client.token.usage")}
    for point in traces.points("gen_ai.client.token.usage"):
        tokens[point.attributes["gen_ai.token.type"]] += point.sum
    assert {"input": 60, "output": 14} == tokens
    assert 2 == sum(point.count for point in traces.points("gen_ai.client.operation.duration"))
    assert 2 == sum(point.count for point in traces.points("gen_ai.client.operation.time_to_first_chunk"))


def everything(spans: Any) -> str:
    return "".join([span.to_json() for span in spans])


@pytest.mark.spec("reliability:SC15")
async def test_content_is_exported_only_on_request(traces: Traces) -> None:
    def handler(ctx: Any) -> Any:
        yield STEP
        yield from call(say, what=SECRET)
        yield STEP

    agent = AgentDefinition("boss", model="m/m", tools=[say], system_prompt=SECRET, handle_steps=handler)
    replies = [tool_call("say", {"what": SECRET}), failure(ModelError(SECRET))]
    for content in (False, True):
        models = ScriptedModel(replies)
        async with Engine([agent], models=models, observers=[traces.observer(content=content)]) as engine:
            result = await engine.run("boss", SECRET)
        assert "failed" == result.status
        assert content is (SECRET in everything(traces.spans))
    whole = next(s for s in traces.spans if "gen_ai.input.messages" in s.attributes).attributes
    assert [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}] == json.loads(
        whole["gen_ai.input.messages"]
    )
    (said,) = json.loads(whole["gen_ai.output.messages"])
    assert ("assistant", "tool_call", {"what": SECRET}, "tool_use") == (
        said["role"], said["parts"][0]["type"], said["parts"][0]["arguments"], said["finish_reason"],
    )  # fmt: skip


@pytest.mark.spec("requirements:O6")
async def test_failures_set_error_status_and_every_span_ends(traces: Traces) -> None:
    def asking(ctx: Any) -> Any:
        yield Parallel([AgentCall("kid", prompt="a"), AgentCall("kid", prompt="b")])
        yield from Ask("Which?")

    waiting = AgentDefinition("waiting", model="m/m", spawnable_agents=[KID], handle_steps=asking)
    failing = AgentDefinition("failing", model="m/m", tools=[say])
    models = ScriptedModel([tool_call("say", {"what": "wrong"}), failure(ModelError("broken")), "a", "b"])
    journal = MemoryJournal()
    async with Engine([waiting, failing], models=models, observers=[traces.observer()]) as engine:
        assert "failed" == (await engine.run("failing", "x")).status
        (chat, *_), run = [s for s in traces.spans if s.name == "chat m"][::-1], traces.one("invoke_agent failing")
        assert {StatusCode.ERROR} == {s.status.status_code for s in (chat, run, traces.one("execute_tool say"))}
        assert ("ModelError", "failed") == (run.attributes["error.type"], run.attributes["stepengine.status"])
        first, last = (traces.one(f"stepengine.step {number}") for number in (0, 1))
        assert ["completed", "failed"] == [step.attributes["stepengine.status"] for step in (first, last)]
        assert [StatusCode.UNSET, StatusCode.ERROR] == [step.status.status_code for step in (first, last)]
        traces.exporter.clear()
        waits = await engine.run("waiting", "x", journal=journal)
        assert ["stepengine.question_asked"] == [e.name for e in traces.one("invoke_agent waiting").events]
        kids = [{"invoke_agent kid": [{"stepengine.step 0": ["chat claude-haiku-4-5"]}]}] * 2
        assert [{"invoke_agent waiting": kids}] == traces.tree()
        assert "suspended" == traces.one("invoke_agent waiting").attributes["stepengine.status"]
        traces.exporter.clear()
        await engine.resume(journal, answers={waits.pending_questions[0].id: "this"})
        assert ["invoke_agent waiting"] == traces.tree()


@pytest.mark.spec("requirements:O6")
async def test_no_sdk_exports_nothing_and_steps_can_be_omitted(traces: Traces) -> None:
    for observer in (Tracing(), traces.observer(steps=False)):
        replies = [tool_call("say", {"what": "x"}), "done"]
        async with Engine([BOSS], models=ScriptedModel(replies), observers=[observer]) as engine:
            assert "done" == (await engine.run("boss", "go")).text
        assert {} == observer._trees
    chat = "chat claude-sonnet-4-5"
    assert [{"invoke_agent boss": [chat, "execute_tool say", chat]}] == traces.tree()


async def traced(agent: AgentDefinition, replies: Any, prompt: str = "go", **options: Any) -> Traces:
    """
    Everything that one run exports, what was said included.
    """
    traces = Traces()
    async with Engine([agent], models=ScriptedModel(replies), observers=[traces.observer(content=True)]) as engine:
        await engine.run(agent, prompt, **options)
    traces.provider.shutdown()
    traces.meters.shutdown()
    return traces


def said_in(span: ReadableSpan, name: str) -> list[Any]:
    return json.loads(span.attributes.get(f"gen_ai.{name}.messages", "[]"))


@pytest.mark.spec("ecosystem:EC134")
async def test_instrumentation_scope_names_our_version_and_newest_schema() -> None:
    traces = Traces()
    async with Engine([BOSS], models=ScriptedModel([reply("done")]), observers=[traces.observer()]) as engine:
        await engine.run("boss", "go")

    newest = max((one.value for one in Schemas), key=lambda url: [int(part) for part in re.findall(r"\d+", url)])
    (metrics,) = traces.reader.get_metrics_data().resource_metrics
    scopes = {span.instrumentation_scope for span in traces.spans} | {one.scope for one in metrics.scope_metrics}
    assert {("stepengine", version("stepengine"), newest)} == {(s.name, s.version, s.schema_url) for s in scopes}
    traces.provider.shutdown()
    traces.meters.shutdown()


@pytest.mark.spec("ecosystem:EC135", "reliability:SC15")
async def test_run_spans_hold_inputs_and_outputs_of_runs_and_children() -> None:
    schema = {"type": "object", "properties": {"rooms": {"type": "integer"}}}
    typed = AgentDefinition("typed", model="m/m", output_schema=schema)
    nested = await traced(BOSS, [SPAWN, "It is empty.", "All is well."], "Look around.")
    counted = await traced(typed, [tool_call("set_output", {"rooms": 2}), "Done."], "Count.", params={"floor": 1})

    run, kid, other = nested.one("invoke_agent boss"), nested.one("invoke_agent kid"), counted.one("invoke_agent typed")
    texts = [
        [message["parts"][0]["content"] for name in ("input", "output") for message in said_in(span, name)]
        for span in (run, kid, other)
    ]
    assert [["Look around.", "All is well."], [SECRET, "It is empty."], ["Count.", '{"rooms":2}']] == texts
    assert ("Look around.", "All is well.") == (run.attributes["input.value"], run.attributes["output.value"])
    assert {"prompt": "Count.", "params": {"floor": 1}} == json.loads(other.attributes["input.value"])
    assert ("anthropic", "claude-sonnet-4-5") == tuple(
        [run.attributes[f"gen_ai.{name}"] for name in ("provider.name", "request.model")]
    )


@pytest.mark.spec("ecosystem:EC135", "reliability:SC15")
async def test_failure_reason_is_exported_with_content() -> None:
    traces = await traced(AgentDefinition("bot", model="m/m"), [failure(ModelError("broken"))])

    assert {"broken"} == {traces.one(name).status.description for name in ("chat m", "invoke_agent bot")}


@pytest.mark.spec("ecosystem:EC136")
@pytest.mark.parametrize("kind", [ModelError, ContextOverflow, TruncatedReply])
async def test_model_error_type_is_its_class_name(kind: type[ModelError], traces: Traces) -> None:
    agent = AgentDefinition("bot", model="m/m")
    async with Engine([agent], models=ScriptedModel([failure(kind("no"))]), observers=[traces.observer()]) as engine:
        await engine.run("bot", "go")

    name = kind.__name__
    (point,) = traces.points("gen_ai.client.operation.duration")
    named = [traces.one(one).attributes["error.type"] for one in ("chat m", "invoke_agent bot")]
    assert [name, name, name] == [*named, point.attributes["error.type"]]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC136", "ecosystem:EC137")
@settings(max_examples=10)
@given(replies=st.lists(st.integers(0, 3), min_size=1, max_size=4), before=st.integers(0, 2))
async def test_call_id_is_equal_in_reply_span_and_next_request(replies: list[int], before: int) -> None:
    def handler(ctx: Any) -> Any:
        for _ in range(before):
            yield from call(say, what="b")
        yield STEP_ALL

    agent = AgentDefinition("bot", model="m/m", tools=[say], handle_steps=handler)
    asked = [tool_calls(*[tool_call("say", {"what": f"{at}"}) for at in range(n)]) for n in replies if n]
    traces = await traced(agent, [*asked, "done"])

    chats = sorted((s for s in traces.spans if s.name == "chat m"), key=lambda span: span.start_time)
    ids = [p["id"] for chat in chats for m in said_in(chat, "output") for p in m["parts"] if p["type"] == "tool_call"]
    run = [s for s in traces.spans if s.attributes.get("stepengine.source") == "model"]
    answered = [p["id"] for m in said_in(chats[-1], "input") for p in m["parts"] if p["type"] == "tool_call_response"]
    assert sum(replies) == len(set(ids))
    assert set(ids) == {span.attributes["gen_ai.tool.call.id"] for span in run}
    assert ids == answered[before:]


@tool(uses=[say])
def say_twice(what: str) -> Steps[str]:
    """
    Say it twice.
    """
    yield from call(say, what)
    yield from Complete("think")
    yield from call(say, what)
    return what


@pytest.mark.spec("programs:PG3")
@pytest.mark.anyio
async def test_calls_in_a_tool_body_are_nested_below_it(traces: Traces) -> None:
    agent = AgentDefinition("boss", model="test/m", tools=[say_twice])
    model = ScriptedModel([tool_call(say_twice, {"what": "x"}), text("hm"), text("end")])
    engine = Engine([agent], models=model, observers=[traces.observer(steps=False)])
    await engine.run(agent, "go")
    inside = ["execute_tool say", "chat m", "execute_tool say"]
    assert traces.tree() == [{"invoke_agent boss": ["chat m", {"execute_tool say_twice": inside}, "chat m"]}]


@pytest.mark.spec("requirements:O6")
async def test_background_child_span_lasts_until_its_own_end(traces: Traces) -> None:
    """
    Its parent goes on meanwhile, and waits for it later.
    """

    def slow(ctx: Any) -> Any:
        yield from Receive("go")
        yield STEP

    def leading(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("slow", "x"))
        yield from call("say", what="meanwhile")
        yield from Send(ref, None, topic="go")
        yield from Wait(ref)

    kid = AgentDefinition("slow", model="m/x", handle_steps=slow)
    boss = AgentDefinition("boss", model="m/x", tools=[say], spawnable_agents=[kid], handle_steps=leading)
    async with Engine([boss], models=ScriptedModel(["done"]), observers=[traces.observer()]) as engine:
        result = await engine.run("boss", "go")

    assert RunStatus.COMPLETED is result.status
    child, run = traces.one("invoke_agent slow"), traces.one("invoke_agent boss")
    meanwhile, last = traces.one("execute_tool say"), traces.one("chat x")
    assert child.parent is not None
    assert run.context.span_id == child.parent.span_id
    assert ["stepengine.is_background"] == [name for name, value in child.attributes.items() if value is True]
    assert child.start_time <= meanwhile.start_time <= meanwhile.end_time <= last.start_time
    assert last.end_time <= child.end_time <= run.end_time
