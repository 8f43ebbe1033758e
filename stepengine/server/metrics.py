"""
``/metrics``: the metrics of a server in the formats OpenMetrics and Prometheus.

Names from requests and ids are not used as labels. The values of a label come from the engine, the table of routes or the file of
webhooks, so the number of series is limited.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS
from prometheus_client.openmetrics.exposition import generate_latest
from starlette.responses import Response

from stepengine.data.events import ModelFinished, RunFinished, RunStarted
from stepengine.server.openapi import Operation

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from stepengine.data.events import Event
    from stepengine.server.run_service import RunService

__all__ = ("OPERATIONS", "Metrics", "handle_and_measure")

OTHER = "other"
"""The label of an agent that the engine does not have, of an unknown topic, and of a request without a route."""
NONE = "none"
BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKENS = ("input", "output", "cache_read", "cache_write", "reasoning")
STATUSES = frozenset({"completed", "failed", "cancelled", "max_steps", "truncated", "suspended", "stranded", "running", "started"})  # fmt: skip


class Metrics:
    """
    The metrics of one server process.

    Counters start at 0 with the process. ``stepengine_runs`` is read from the ledger, and is the same for all servers of a store.

    Args:
        runs: Its runs.
    """

    def __init__(self, runs: RunService) -> None:
        self._runs = runs
        self.registry = CollectorRegistry()
        counter, gauge = self._make_counter, self._make_gauge
        self._started = counter("runs_started", "Runs that this process started or resumed.", "agent", "resumed")
        self._finished = counter("runs_finished", "Runs that ended or were suspended in this process.", "agent", "status")  # fmt: skip
        self._calls = counter("model_calls", "Calls of models.", "model", "outcome")
        self._tokens = counter("model_tokens", "Tokens of models, by kind; each token counts once.", "model", "kind")
        self._cost = counter("model_cost_usd", "Cost of model calls in US dollars, where a price is known.", "model")
        self._posts = counter("webhooks_sent", "Attempts to send a webhook.", "type", "outcome")
        self._events = counter("webhooks_received", "Events received from other services.", "topic", "outcome")
        self._quotas = counter("quota_refusals", "Requests that exceeded a quota of their owner.", "quota")
        self._requests = counter("http_requests", "Requests that were answered.", "route", "method", "status")
        gauge("live_runs", "Runs that are running in this process.").set_function(lambda: runs.live_count)
        gauge("live_questions", "Open questions of runs that are running in this process.").set_function(
            lambda: runs.open_question_count
        )
        self._watchers = gauge("watchers", "Open event streams of this process.")
        self._seconds = Histogram(
            "stepengine_http_request_seconds",
            "Seconds until the response to a request started.",
            ("route", "status"),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._agent_of: dict[str, str] = {}
        self._models: set[str] = set()

    def _make_counter(self, name: str, description: str, *labels: str) -> Counter:
        """Register and return a counter with the prefix ``stepengine_``."""
        return Counter(f"stepengine_{name}", description, labels, registry=self.registry)

    def _make_gauge(self, name: str, description: str) -> Gauge:
        """Register and return a gauge with the prefix ``stepengine_``."""
        return Gauge(f"stepengine_{name}", description, registry=self.registry)

    # --- counting -----------------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Count the start or end of a root run, or a model call; ignore other events."""
        match event:
            case RunStarted(path=""):
                self._agent_of[event.run_id] = self._get_agent_label(event.agent_id)
                self._started.labels(self._get_agent_label(event.agent_id), str(event.resumed).lower()).inc()
            case RunFinished(path=""):
                agent = self._agent_of.pop(event.run_id, OTHER)
                self._finished.labels(agent, event.result.status.value).inc()
            case ModelFinished():
                self._count_model_call(event)
            case _:
                pass

    def _count_model_call(self, event: ModelFinished) -> None:
        """Count a model call by its outcome, and its tokens and cost."""
        model = self._register_model_label(event.model)
        self._calls.labels(model, "failed" if event.reply is None else "completed").inc()
        if event.reply is None:
            return
        if event.reply.usage is not None:
            for kind in TOKENS:
                self._tokens.labels(model, kind).inc(getattr(event.reply.usage, f"{kind}_tokens"))
        if event.reply.cost is not None:
            self._cost.labels(model).inc(float(event.reply.cost))

    def _register_model_label(self, model: str) -> str:
        """Return the name of a model as its label, and store it; ``other`` if 100 other models have labels."""
        # A handler may choose its model, by what it was asked for if its author lets it.
        if len(self._models) < MOST_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER

    def _get_agent_label(self, agent: str) -> str:
        """Return the id of an agent as its label; ``other`` if the engine does not have the agent."""
        return agent if any(agent == known.id for known in self._runs.engine.agents) else OTHER

    def count_received_webhook(self, topic: str, outcome: str) -> None:
        """Count an event of another service; *topic* is a configured topic or empty."""
        self._events.labels(topic or OTHER, outcome).inc()

    def count_webhook_attempt(self, kind: str, is_accepted: bool) -> None:  # noqa: FBT001 - a callback of one's own
        """Count an attempt to send a webhook."""
        self._posts.labels(kind, "taken" if is_accepted else "failed").inc()

    def count_quota_refusal(self, quota: str) -> None:
        """Count a request that exceeded a quota."""
        self._quotas.labels(quota).inc()

    def count_response(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a response that has started, and the seconds until then."""
        known = method if method in METHODS else OTHER
        told = f"{status // 100}xx"
        self._requests.labels(route, known, told).inc()
        self._seconds.labels(route, told).observe(seconds)

    def adjust_event_stream_count(self, change: int) -> None:
        """Add *change* to the number of open event streams."""
        self._watchers.inc(change)

    # --- output -------------------------------------------------------------------------------------------------------

    async def collect_and_encode_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their media type: OpenMetrics, or the older Prometheus format on request."""
        places = _CollectedMetrics(
            [self._make_run_metric(await self._runs.reader.count_runs_by_agent_and_status()), *self.registry.collect()]
        )
        if "openmetrics-text" not in accept and "text/plain" in accept:
            encode, kind = choose_encoder("text/plain")
            return encode(places), kind
        return generate_latest(places), OPEN_METRICS  # type: ignore[no-untyped-call]  # theirs

    def _make_run_metric(self, rows: Iterable[tuple[str, str, int]]) -> Metric:
        """Return a gauge of the number of stored runs by agent and status."""
        told = GaugeMetricFamily("stepengine_runs", "Runs in the store, by agent and status.", labels=("agent", "status"))  # fmt: skip
        counts: dict[tuple[str, str], int] = {}
        for agent, status, count in rows:
            key = (self._get_agent_label(agent), status if status in STATUSES else OTHER)
            counts[key] = counts.get(key, 0) + count
        for labels, count in sorted(counts.items()):
            told.add_metric(labels, count)
        return told


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Each value of a label is a row for ever, in this process and in every Prometheus that reads it; names that come from
# outside are therefore counted, and from some number on are all "other".
MOST_MODELS = 100


class _CollectedMetrics:
    """A registry of metrics that were collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


async def handle_and_measure(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, metrics: Metrics, route: list[str]
) -> None:  # fmt: skip
    """Handle a request with *app*; count its response, and the event stream while it is open. *app* adds the name to *route*."""
    begun = time.perf_counter()
    is_watching = False

    async def send_and_count(message: Message) -> None:
        """Send a message of a response; at its start, count the response and the start of an event stream."""
        nonlocal is_watching
        if message["type"] == "http.response.start":
            name = route[0] if route else NONE
            metrics.count_response(name, scope["method"], message["status"], time.perf_counter() - begun)
            is_watching = any(k.lower() == b"content-type" and v.startswith(STREAM) for k, v in message["headers"])
            metrics.adjust_event_stream_count(int(is_watching))
        await send(message)

    try:
        await app(scope, receive, send_and_count)
    finally:
        metrics.adjust_event_stream_count(-int(is_watching))


STREAM = b"text/event-stream"


async def show_metrics(request: Request) -> Response:
    """Return all metrics in the format that the client accepts."""
    # The application's own registry and not the process's: two applications in one process would count into each other,
    # and a second one of the same names is an error there.
    metrics: Metrics = request.app.state.metrics
    text, kind = await metrics.collect_and_encode_metrics(",".join(request.headers.getlist("accept"))[:1_000])
    return Response(text, headers={"content-type": kind})


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/metrics", name="show_metrics", scope="metrics", handler=show_metrics,
        gives={200: "application/openmetrics-text"},
        about="Return the metrics of this server as OpenMetrics.\nThey cover the runs of all callers, so they have a scope of their own.",
    ),
)  # fmt: skip
