"""
Spans of runs as logfire reads them; its package is in an extra of its own, see `pyproject.toml`.
"""

from __future__ import annotations

from decimal import Decimal

import pytest

pytest.importorskip("logfire.testing", reason="needs the extra 'logfire', in an environment of its own")

import logfire
from logfire.testing import TestExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from stepengine import AgentDefinition, Engine, Usage, tool
from stepengine.adapters.otel import Tracing
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, tool_call

COUNTERPARTS = (("pypi:logfire", "5.2.0", "works", "span names, nesting, messages, tokens, costs"),)


@tool(in_thread=False, requires_permission=False)
def say(what: str) -> str:
    """
    Say.
    """
    return what


@pytest.mark.spec("requirements:O6", "ecosystem:EC136")
async def test_logfire_reads_span_names_nesting_content_tokens_and_cost() -> None:
    exporter = TestExporter()
    own = logfire.configure(
        local=True, send_to_logfire=False, console=False, metrics=False,
        additional_span_processors=[SimpleSpanProcessor(exporter)],
    )  # fmt: skip
    bot = AgentDefinition("bot", model="anthropic/claude-sonnet-4-5", tools=[say])
    reply = ModelReply("done", usage=Usage(20, 5), cost=Decimal("0.25"))
    tracing = Tracing(own.config.get_tracer_provider(), content=True)
    models = ScriptedModel([tool_call("say", {"what": "the password is x"}), reply])
    async with Engine([bot], models=models, observers=[tracing]) as engine:
        with own.span("request"):
            await engine.run("bot", "go")

    spans = exporter.exported_spans_as_dict(strip_filepaths=False)
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    nested = [(span["name"], names.get((span["parent"] or {}).get("span_id"))) for span in spans]
    assert [
        ("chat claude-sonnet-4-5", "stepengine.step 0"), ("execute_tool say", "stepengine.step 0"),
        ("stepengine.step 0", "invoke_agent bot"), ("chat claude-sonnet-4-5", "stepengine.step 1"),
        ("stepengine.step 1", "invoke_agent bot"), ("invoke_agent bot", "request"), ("request", None),
    ] == nested  # fmt: skip
    chat = spans[3]["attributes"]
    assert ("chat", "anthropic", "claude-sonnet-4-5", 20, 5, 0.25, "span") == tuple(
        [chat[name] for name in (
            "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.usage.input_tokens",
            "gen_ai.usage.output_tokens", "operation.cost", "logfire.span_type",
        )]
    )  # fmt: skip
    assert '"role":"tool"' in chat["gen_ai.input.messages"]
    assert "done" in chat["gen_ai.output.messages"]
    own.config.get_tracer_provider().shutdown()
