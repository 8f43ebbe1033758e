"""
``/metrics`` as somebody else's programs read it: the parser of prometheus_client, and Prometheus' own ``promtool``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stepengine import AgentDefinition, Engine
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.server import Tokens, app
from stepengine.server.ledger import Ledger, RunRow, make_register_run_act
from stepengine.testing import ScriptedModel
from tests.waits import until

from .house import House, answered, ended, question_of, started

COUNTERPARTS = (
    ("pypi:prometheus-client", "0.26.0", "works", "`/metrics` of `stepengine serve` parses as OpenMetrics"),
)
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    house.tokens["scraper"] = Tokens.open(house.folder / "tokens.json").add("scraper", ["metrics"])
    with house.open() as opened:
        yield opened


def samples(answer: httpx2.Response) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """
    Return what somebody else's parser finds, by name and labels.
    """
    assert 200 == answer.status_code, answer.text
    assert OPEN_METRICS == answer.headers["content-type"]
    families = list(text_string_to_metric_families(answer.text))
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def scraped(house: House) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with house.client("scraper") as client:
        return samples(client.get("/metrics"))


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV14")
def test_run_metrics_parse_as_openmetrics(house: House) -> None:
    before = scraped(house)
    with house.client() as client:
        done = started(client, "quick")
        ended(client, done)
        waits = started(client)
        question_of(client, waits)
        between = scraped(house)
        with client.stream("GET", f"/runs/{waits}/events"):
            watched = until(lambda: value(scraped(house), "stepengine_watchers") == 1)
        until(lambda: value(scraped(house), "stepengine_watchers") == 0)
        answered(client, waits)
        after = until(lambda: (now := scraped(house)) and value(now, "stepengine_live_runs") == 0 and now)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert watched
    assert (1, 1) == (value(between, "stepengine_live_runs"), value(between, "stepengine_live_questions"))
    for agent in ("quick", "asker"):
        assert 1 == more("stepengine_runs_started_total", agent=agent, resumed="false")
        assert 1 == more("stepengine_runs_finished_total", agent=agent, status="completed")
        assert 1 == more("stepengine_runs", agent=agent, status="completed")
    assert 2 == more("stepengine_http_requests_total", route="start_run", method="POST", status="2xx")
    assert 2 == more("stepengine_http_request_seconds_count", route="start_run", status="2xx")


@pytest.mark.spec("studio:SV14")
def test_request_data_never_becomes_a_metric_label(house: House) -> None:
    with house.client() as client:
        run = started(client, "quick", prompt="xx-prompt")
        ended(client, run)
        client.get("/xx-path/xx-more")
        client.get("/runs/xx-run", headers={"x-xx": "xx-header"})
        client.post("/runs", json={"agent": "xx-agent"})
        client.request("XXMETHOD", "/runs")
        client.post("/hooks/xx-topic/xx-run", content=b"{}")
    with house.client(None) as client:
        client.get("/runs", headers={"authorization": "Bearer xx-token"})
    with house.client("scraper") as client:
        text = client.get("/metrics").text

    assert "xx-" not in text.lower()
    assert "xxmethod" not in text.lower()
    assert run not in text
    assert 'stepengine_webhooks_received_total{outcome="refused",topic="other"} 1.0' in text
    assert re.search(r'stepengine_http_requests_total{method="GET",route="none",status="4xx"} [1-9]', text)
    assert 'method="other"' in text


async def test_model_metrics_count_calls_tokens_and_cost_with_bounded_labels(tmp_path: Path) -> None:
    from stepengine.server import metrics

    token = Tokens.open(tmp_path / "tokens.json").add("root", ["admin"])
    agent = AgentDefinition("bot", model="anthropic/claude-sonnet-4-5")
    reply = ModelReply("Hello.", usage=Usage(input_tokens=7, output_tokens=3), cost=Decimal("0.25"))
    async with Engine([agent], models=ScriptedModel([reply])) as engine:
        served = app(engine, runs=tmp_path / "runs", tokens=tmp_path / "tokens.json")
        ledger = Ledger(tmp_path / "runs")
        (tmp_path / "runs").mkdir(mode=0o700)
        ledger.write(
            [make_register_run_act(RunRow("r", "ann", "an-agent-of-last-year", "completed", 1.0, 1.0, {}), None)]
        )
        ledger.close()
        await engine.run(agent, "Hi.")
        counted: metrics.Metrics = served.app.state.metrics  # type: ignore[attr-defined]
        for number in range(2 * metrics.MOST_MODELS):
            counted._register_model_label(f"some/model-{number}")
        headers = {"authorization": f"Bearer {token}"}
        transport = httpx2.ASGITransport(app=served)
        async with (
            served.lifespan(),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
        ):
            found = samples(await client.get("/metrics"))

    assert 1 == value(found, "stepengine_model_calls_total", model="anthropic/claude-sonnet-4-5", outcome="completed")
    tokens = {
        kind: value(found, "stepengine_model_tokens_total", model="anthropic/claude-sonnet-4-5", kind=kind)
        for kind in metrics.TOKENS
    }
    assert {"input": 7, "output": 3, "cache_read": 0, "cache_write": 0, "reasoning": 0} == tokens
    assert 0.25 == value(found, "stepengine_model_cost_usd_total", model="anthropic/claude-sonnet-4-5")
    assert 1 == value(found, "stepengine_runs", agent="other", status="completed")
    assert "other" == counted._register_model_label("some/more")
    assert metrics.MOST_MODELS == len(counted._models)
