"""
Spans and metrics of runs, read with the exporter of OpenTelemetry's own SDK.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, ToolResult, call, tool
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply
from stepengine.otel import Tracing
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls

COUNTERPARTS = (
    ("pypi:opentelemetry-sdk", "1.45.2", "works", "spans and metrics under the conventions for generative AI"),
)

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
async def test_runs_steps_calls_and_children_are_spans_nested_as_they_happened(traces: Traces) -> None:
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


@pytest.mark.spec("requirements:O6", "ecosystem:EC135", "ecosystem:EC136", "requirements:G16")
async def test_attributes_and_metrics_are_those_of_the_conventions(traces: Traces) -> None:
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
async def test_what_fails_is_an_error_and_every_span_ends_however_the_run_does(traces: Traces) -> None:
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
async def test_without_an_sdk_nothing_happens_and_without_steps_calls_stand_below_their_run(traces: Traces) -> None:
    for observer in (Tracing(), traces.observer(steps=False)):
        replies = [tool_call("say", {"what": "x"}), "done"]
        async with Engine([BOSS], models=ScriptedModel(replies), observers=[observer]) as engine:
            assert "done" == (await engine.run("boss", "go")).text
        assert {} == observer._trees
    chat = "chat claude-sonnet-4-5"
    assert [{"invoke_agent boss": [chat, "execute_tool say", chat]}] == traces.tree()
