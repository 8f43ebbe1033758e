"""
Spans and metrics from run events, under OpenTelemetry's conventions for generative AI.

Spans are made from events alone, so tracing is an observer. A span starts with one event and ends with another; open spans are found by
run, path and number. Parents are set explicitly and not taken from the current context, since the children of a run are concurrent in
one event loop. Only the parent of a root run is the current span of its caller. An observer gets no replayed events: a resumed run
has only spans of its new part. Contents are left out by default, because spans are sent to systems where secrets are not expected.

The package `opentelemetry` (its API alone) is imported only here, on first use. The names of the
conventions are in development, so they are copied and not imported; those of OpenInference stand beside them where viewers of such
spans know no others.

What must not: setting up exporters (the application chooses the SDK), and any influence on a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.events import (
    AgentFinished,
    AgentSpawned,
    Compacted,
    Event,
    ModelFinished,
    ModelRetry,
    ModelStarted,
    PermissionDecided,
    PermissionRequested,
    QuestionAsked,
    RateLimited,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextDelta,
    ThinkingDelta,
    ToolFinished,
    ToolInputDelta,
    ToolStarted,
    WaitFinished,
    WaitStarted,
)
from stepengine.data.messages import AssistantPart, Message, TextPart, ThinkingPart, ToolCallPart, ToolMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError
from stepengine.workspace.installed import get_installed_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

__all__ = ("Tracing",)

NAME = "stepengine"
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""The newest conventions that are published; their successors for generative AI are drafts without a version."""
OTHER = "_OTHER"
STEP = {"openinference.span.kind": "CHAIN"}
"""The conventions have no operation for a step; viewers know this kind of span."""
PROVIDERS = {
    "anthropic_aws": "anthropic",
    "anthropic_google": "anthropic",
    "google": "gcp.gemini",
    "google_interactions": "gcp.gemini",
    "mistral": "mistral_ai",
    "xai": "x_ai",
    "azure": "azure.ai.openai",
    "azure_responses": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "bedrock_converse": "aws.bedrock",
    "bedrock_mantle": "aws.bedrock",
    "foundry": "azure.ai.inference",
    "vertex": "gcp.vertex_ai",
    "moonshot": "moonshot_ai",
    "openai_chat": "openai",
}
"""The conventions' names of providers whose prefix in model strings is another one."""
SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
TOKENS = [1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864]

Attributes: TypeAlias = dict[str, Any]


@attrs.define(eq=False)
class _OpenSpan:
    """An open span, the context for its child spans, its start time in seconds, and the attributes of its metrics."""

    span: Span
    context: Context
    began: float = attrs.field(factory=time.perf_counter)
    told: Attributes = attrs.field(factory=dict)
    has_chunk: bool = False


@attrs.define(eq=False)
class _RunSpans:
    """The open spans of one run of a tree; *calls* has those of model calls by ``seq``, of tool calls by call id."""

    own: _OpenSpan
    step: _OpenSpan | None = None
    has_model: bool = False
    has_failed: bool = False
    calls: dict[int | str, _OpenSpan] = attrs.field(factory=dict)

    @property
    def innermost_span(self) -> _OpenSpan:
        """The span of the open step, else that of the run."""
        return self.step or self.own


class Tracing:
    """
    An observer that creates spans and metrics: ``Engine(observers=[Tracing()])``; it needs the extra ``otel``.

    A run is a span ``invoke_agent AGENT``, each of its steps one ``stepengine.step N``, each model call ``chat MODEL``, each tool
    call ``execute_tool TOOL``. Effects in the body of a tool are below its call, a root run below the current span of its caller, and a
    child below the tool call or step that spawned it. Every span has ``stepengine.run_id`` (the root's) and ``stepengine.path``. A
    resumed run has only spans of its new part.

    Without an SDK or another provider, nothing is recorded.

    Args:
        tracer_provider: Where spans go; the global provider by default.
        meter_provider: Where metrics go (``gen_ai.client.operation.duration``, ``.time_to_first_chunk`` and ``.token.usage``);
            the global provider by default.
        content: Whether spans include prompts, replies, inputs and results of tools, and messages of errors.
        steps: Whether steps have spans; if not, model calls and tools are directly below their run.

    Raises:
        DefinitionError: If ``opentelemetry`` is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        content: bool = False,
        steps: bool = True,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            msg = "Tracing needs the package opentelemetry-api: pip install 'stepengine[otel]'"
            raise DefinitionError(msg) from None
        self._trace = trace
        version = get_installed_version("stepengine") or ""
        self._tracer = trace.get_tracer(NAME, version, tracer_provider, SCHEMA)
        meter = metrics.get_meter(NAME, version, meter_provider, SCHEMA)
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of a model call",
            explicit_bucket_boundaries_advisory=TOKENS,
        )
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="How long a model call took",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._first_chunk = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            unit="s",
            description="How long a model call took until its first piece",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._content = content
        self._steps = steps
        self._trees: dict[str, dict[str, _RunSpans]] = {}

    def on_event(self, event: Event) -> None:
        """Start, change or end the span for *event*; ignore events that concern none."""
        begin_or_end = self._TRACED.get(type(event))
        if begin_or_end is not None:
            begin_or_end(self, event)

    # --- runs and steps -----------------------------------------------------------------------------------------------

    def _start_or_update_run_span(self, event: RunStarted) -> None:
        """Start the span of a run unless a resumed one has it, and set its id and input."""
        tree = self._trees.setdefault(event.run_id, {})
        run = tree.get(event.path) or self._start_run_span(
            event, event.path, event.agent_id, self._find_parent_context(tree, event.path)
        )
        run.own.span.set_attribute("stepengine.own_run_id", event.own_id)
        if self._content:
            run.own.span.set_attributes(_make_input_attributes(event.prompt, plain(event.params)))

    def _start_child_span(self, event: AgentSpawned) -> None:
        """Start the span of a child run below the call that started it."""
        parent = self._find_run_spans(event)
        if parent is not None:
            caller = parent.calls.get(event.tool_call_id, parent.innermost_span)
            run = self._start_run_span(event, event.child_path, event.agent_id, caller.context, name=event.display_name)
            if event.is_background:
                run.own.span.set_attribute("stepengine.is_background", True)

    def _start_run_span(
        self, event: Event, path: str, agent_id: str, context: Context | None, *, name: str = ""
    ) -> _RunSpans:
        """Start and store the span of a run or child, and return the spans of the run."""
        about = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.id": agent_id,
            "gen_ai.agent.name": name or agent_id,
        }
        run = _RunSpans(self._open_span(event, f"invoke_agent {name or agent_id}", about, context, path=path))
        self._trees.setdefault(event.run_id, {})[path] = run
        return run

    def _find_parent_context(self, tree: Mapping[str, _RunSpans], path: str) -> Context | None:
        """Return the context of the innermost span of the run above *path*; ``None`` for a root."""
        # Without a parent it is the span that is current where the run was called.
        above = tree.get(path.rpartition(".")[0]) if path else None
        return None if above is None else above.innermost_span.context

    def _start_step_span(self, event: StepStarted) -> None:
        """End the span of the step before, and start that of a step, if steps are traced."""
        run = self._find_run_spans(event)
        if run is None or not self._steps:
            return
        if run.step is not None:
            run.step.span.end()
        about = {"stepengine.step": event.step, **STEP}
        run.step = self._open_span(event, f"stepengine.step {event.step}", about, run.own.context)

    def _end_step_span(self, event: StepFinished) -> None:
        run = self._find_run_spans(event)
        if run is not None and run.step is not None:
            span = run.step.span
            span.set_attributes({"stepengine.ended_turn": event.ended_turn, "stepengine.status": event.status.value})
            if event.status is RunStatus.FAILED:
                span.set_status(self._trace.StatusCode.ERROR)
            run.step.span.end()
            run.step = None

    def _mark_run_failed(self, event: RunFailed) -> None:
        """Mark the span of a run as failed with the kind of its error."""
        run = self._find_run_spans(event)
        if run is not None:
            run.has_failed = True
            self._mark_span_failed(run.own.span, event.kind, event.error)

    def _end_child_spans(self, event: AgentFinished) -> None:
        self._end_run_spans(event, event.child_path, event.status, event.usage, event.text)

    def _end_tree_spans(self, event: RunFinished) -> None:
        """Set session and cost on the root span, and end all spans of the tree, the deepest first."""
        result, tree = event.result, self._trees.get(event.run_id, {})
        root = tree.get("")
        if root is not None and result.session_id is not None:
            root.own.span.set_attribute("gen_ai.conversation.id", result.session_id)
        if root is not None and result.cost is not None:
            root.own.span.set_attribute("operation.cost", float(result.cost))
        # The deepest first: what is left of children was cut off with the run.
        for path in sorted(tree, key=len, reverse=True):
            self._end_run_spans(event, path, result.status, *(() if path else (result.usage, _format_output(result))))
        self._trees.pop(event.run_id, None)

    def _end_run_spans(
        self, event: Event, path: str, status: RunStatus, usage: Usage | None = None, text: str = ""
    ) -> None:
        run = self._trees.get(event.run_id, {}).pop(path, None)
        if run is None:
            return
        for call in reversed(run.calls.values()):
            call.span.end()
        if run.step is not None:
            run.step.span.end()
        span = run.own.span
        span.set_attribute("stepengine.status", status.value)
        if usage is not None:
            span.set_attributes(_make_usage_attributes(usage))
        if text and self._content:
            span.set_attributes(_make_output_attributes(text))
        if status is RunStatus.FAILED and not run.has_failed:
            span.set_status(self._trace.StatusCode.ERROR)
        run.own.span.end()

    # --- calls --------------------------------------------------------------------------------------------------------

    def _start_model_span(self, event: ModelStarted) -> None:
        """Start the span of a model call with the attributes of its request."""
        run = self._find_run_spans(event)
        if run is None:
            return
        provider, model = _split_model(event.model)
        told: Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDERS.get(provider, provider),
            "gen_ai.request.model": model,
        }
        about = {**told, "stepengine.purpose": event.purpose}
        if event.request is not None:
            about |= _make_request_attributes(event.request)
            about |= _make_request_content_attributes(event.request) if self._content else {}
        name = f"chat {model}"
        call = self._open_span(event, name, about, run.innermost_span.context, kind=self._trace.SpanKind.CLIENT)
        call.told = told
        run.calls[event.seq] = call
        if not run.has_model:
            run.has_model = True
            run.own.span.set_attributes({name: told[name] for name in ("gen_ai.provider.name", "gen_ai.request.model")})

    def _record_time_to_first_chunk(self, event: TextDelta | ThinkingDelta | ToolInputDelta) -> None:
        """Record the seconds until the first piece of a reply in its span and in the metric."""
        run = self._find_run_spans(event)
        call = None if run is None else run.calls.get(event.seq)
        if call is not None and not call.has_chunk:
            call.has_chunk = True
            seconds = time.perf_counter() - call.began
            call.span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)
            self._first_chunk.record(seconds, call.told)

    def _end_model_span(self, event: ModelFinished) -> None:
        """Record the duration of a model call, and end its span with the reply or the error."""
        run = self._find_run_spans(event)
        call = None if run is None else run.calls.pop(event.seq, None)
        if call is None:
            return
        reply = event.reply
        if reply is not None:
            self._set_reply_attributes_and_metrics(call, reply, event.call_ids)
        else:
            call.told["error.type"] = kind = event.kind or OTHER
            self._mark_span_failed(call.span, kind, event.error)
        self._duration.record(event.duration_ms / 1_000, call.told)
        call.span.end()

    def _set_reply_attributes_and_metrics(self, call: _OpenSpan, reply: ModelReply, call_ids: Sequence[str]) -> None:
        """Set the attributes of a reply in the span of its call, and record its tokens in the metric."""
        span = call.span
        model = call.told["gen_ai.request.model"] if reply.model is None else _split_model(reply.model)[1]
        call.told["gen_ai.response.model"] = model
        span.set_attribute("gen_ai.response.model", model)
        span.set_attribute("gen_ai.response.finish_reasons", [reply.raw_stop_reason or reply.stop_reason.value])
        if reply.request_id is not None:
            span.set_attribute("stepengine.request_id", reply.request_id)
        if reply.cost is not None:
            span.set_attribute("operation.cost", float(reply.cost))
        if reply.usage is not None:
            span.set_attributes(_make_usage_attributes(reply.usage))
            self._tokens.record(reply.usage.prompt_tokens, {**call.told, "gen_ai.token.type": "input"})
            self._tokens.record(reply.usage.completion_tokens, {**call.told, "gen_ai.token.type": "output"})
        if self._content:
            said = {
                **_make_role_message("assistant", _replace_call_ids(reply.content, call_ids)),
                "finish_reason": reply.stop_reason.value,
            }
            span.set_attribute("gen_ai.output.messages", _to_json_text([said]))

    def _start_tool_span(self, event: ToolStarted) -> None:
        """Start the span of a tool call; for a tool body with effects, also store it as a run of the tree."""
        run = self._find_run_spans(event)
        if run is None:
            return
        about: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.tool_name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": event.tool_call_id,
            "stepengine.source": event.source,
        }
        if self._content:
            about["gen_ai.tool.call.arguments"] = _to_json_text(plain(event.input))
        call = run.calls[event.tool_call_id] = self._open_span(
            event, f"execute_tool {event.tool_name}", about, run.innermost_span.context
        )
        if event.child_path:
            # What the body of a tool asks for stands below the call: it is no agent.
            self._trees[event.run_id][event.child_path] = _RunSpans(call)

    def _end_tool_span(self, event: ToolFinished) -> None:
        """End the span of a tool call with its status, and the open spans of its body."""
        if event.child_path:
            body = self._trees.get(event.run_id, {}).pop(event.child_path, None)
            for left in reversed(body.calls.values()) if body is not None else ():
                left.span.end()
        run = self._find_run_spans(event)
        call = None if run is None else run.calls.pop(event.tool_call_id, None)
        if call is None:
            return
        result = event.result
        call.span.set_attribute("stepengine.status", result.status)
        if self._content:
            call.span.set_attribute("gen_ai.tool.call.result", result.text)
        if result.is_error:
            self._mark_span_failed(call.span, result.status, result.text)
        call.span.end()

    # --- what happens within a span -----------------------------------------------------------------------------------

    def _add_retry_or_limit_event(self, event: ModelRetry | RateLimited) -> None:
        """Add a retry or a wait for a rate limit as an event to the span of its model call."""
        run = self._find_run_spans(event)
        if run is not None:
            wait: Attributes = {} if event.wait is None else {"wait": event.wait}
            about: Attributes = (
                {"attempt": event.attempt, **wait} if isinstance(event, ModelRetry) else {"limit": event.limit, **wait}
            )
            run.calls.get(event.seq, run.innermost_span).span.add_event(f"stepengine.{event.type}", about)

    def _add_event_to_innermost_span(self, event: Event) -> None:
        """Add an event about a question, decision, wait or compaction to the innermost open span of its run."""
        run = self._find_run_spans(event)
        if run is None:
            return
        about: Attributes = {}
        match event:
            case QuestionAsked(question=question):
                about = {"question_id": question.id}
            case PermissionRequested(question=question):
                about = {"question_id": question.id, "tool_name": event.tool_name}
            case PermissionDecided():
                about = {"tool_name": event.tool_name, "decision": event.decision, "rule_id": event.rule_id or ""}
            case WaitStarted():
                told = {"wakes_at": event.wakes_at, "topic": event.topic, "children": ", ".join(event.children)}
                about = {"kind": event.kind, **{name: value for name, value in told.items() if value}}
            case WaitFinished():
                about = {"kind": event.kind, "is_over": event.is_over, "duration_ms": event.duration_ms}
            case Compacted():
                about = {"by": event.by, "tokens_before": event.tokens_before, "tokens_after": event.tokens_after}
            case _:
                pass
        run.innermost_span.span.add_event(f"stepengine.{event.type}", about)

    # --- spans --------------------------------------------------------------------------------------------------------

    def _find_run_spans(self, event: Event) -> _RunSpans | None:
        """Return the open spans of the run of an event; ``None`` if it has none."""
        return self._trees.get(event.run_id, {}).get(event.path)

    def _open_span(
        self,
        event: Event,
        name: str,
        about: Attributes,
        context: Context | None,
        *,
        path: str | None = None,
        kind: Any = None,
    ) -> _OpenSpan:
        """Start a span with the run id and path of *event*, and return it with its context."""
        place = {"stepengine.run_id": event.run_id, "stepengine.path": event.path if path is None else path}
        kind = self._trace.SpanKind.INTERNAL if kind is None else kind
        span = self._tracer.start_span(name, context=context, kind=kind, attributes={**about, **place})
        return _OpenSpan(span, self._trace.set_span_in_context(span, context))

    def _mark_span_failed(self, span: Span, kind: str, message: str) -> None:
        """Set the error status of a span; its message only if contents are traced."""
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.StatusCode.ERROR, message if self._content else None)

    _TRACED: ClassVar[Mapping[type[Event], Callable[[Tracing, Any], None]]] = {
        RunStarted: _start_or_update_run_span,
        RunFailed: _mark_run_failed,
        RunFinished: _end_tree_spans,
        AgentSpawned: _start_child_span,
        AgentFinished: _end_child_spans,
        StepStarted: _start_step_span,
        StepFinished: _end_step_span,
        ModelStarted: _start_model_span,
        ModelFinished: _end_model_span,
        ModelRetry: _add_retry_or_limit_event,
        RateLimited: _add_retry_or_limit_event,
        ToolStarted: _start_tool_span,
        ToolFinished: _end_tool_span,
        **dict.fromkeys((TextDelta, ThinkingDelta, ToolInputDelta), _record_time_to_first_chunk),
        **dict.fromkeys(
            (QuestionAsked, PermissionRequested, PermissionDecided, Compacted, WaitStarted, WaitFinished),
            _add_event_to_innermost_span,
        ),
    }
    """The events that change a span."""


def _make_input_attributes(prompt: str, params: Any) -> Attributes:
    """Return the input attributes of a run: its prompt as a message, and prompt and params as one value."""
    told: Attributes = {}
    if prompt:
        told["gen_ai.input.messages"] = _to_json_text([_make_role_message("user", prompt)])
    if params:
        told["stepengine.params"] = _to_json_text(params)
        return {
            **told,
            "input.value": _to_json_text({"prompt": prompt, "params": params}),
            "input.mime_type": "application/json",
        }
    return {**told, "input.value": prompt, "input.mime_type": "text/plain"} if prompt else told


def _make_output_attributes(text: str) -> Attributes:
    """Return the output attributes of a run: its text as a message, and as one value."""
    message = {**_make_role_message("assistant", text), "finish_reason": "stop"}
    return {"gen_ai.output.messages": _to_json_text([message]), "output.value": text, "output.mime_type": "text/plain"}


def _format_output(result: RunResult[Any]) -> str:
    """Return the output of a run as text; its last text if it has no output, or if the output is its messages."""
    output = result.output
    if output is None or (isinstance(output, Sequence) and any(isinstance(one, Message) for one in output)):
        return result.text
    return output if isinstance(output, str) else _to_json_text(plain(output))


def _replace_call_ids(parts: Sequence[AssistantPart], call_ids: Sequence[str]) -> Iterator[AssistantPart]:
    """Yield the parts of a reply, with the ids of this package for tool calls."""
    ids = iter(call_ids)
    for part in parts:
        yield attrs.evolve(part, tool_call_id=next(ids, part.tool_call_id)) if isinstance(part, ToolCallPart) else part


def _split_model(model: str) -> tuple[str, str]:
    """Return provider and name of a model string, split at the first slash or colon."""
    at = min([place for place in (model.find("/"), model.find(":")) if place >= 0], default=-1)
    return (OTHER, model) if at < 0 else (model[:at], model[at + 1 :])


def _make_usage_attributes(usage: Usage) -> Attributes:
    """Return the tokens of a call or a run; the conventions count cached ones as input, and thinking as output."""
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
    }


def _make_request_attributes(request: ModelRequest) -> Attributes:
    """Return the settings of a model request as attributes, without those that are not set."""
    settings = request.settings
    told = {
        "gen_ai.request.max_tokens": settings.max_tokens,
        "gen_ai.request.temperature": settings.temperature,
        "gen_ai.request.top_p": settings.top_p,
        "gen_ai.request.stop_sequences": list(settings.stop_sequences) or None,
        "gen_ai.output.type": None if settings.response_schema is None else "json",
    }
    return {name: value for name, value in told.items() if value is not None}


def _make_request_content_attributes(request: ModelRequest) -> Attributes:
    """Return the messages and the system prompt of a model request as attributes."""
    shown = {"gen_ai.input.messages": _to_json_text([_message_to_dict(message) for message in request.all_messages])}
    if request.system_prompt:
        shown["gen_ai.system_instructions"] = _to_json_text([{"type": "text", "content": request.system_prompt}])
    return shown


def _message_to_dict(message: Message) -> dict[str, object]:
    """Return a message in the form of the conventions."""
    if isinstance(message, ToolMessage):
        response = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}
        return {"role": "tool", "parts": [response]}
    return _make_role_message(message.role, message.content)


def _make_role_message(role: str, parts: Any) -> dict[str, object]:
    """Return parts, or a text, as a message of a role in the form of the conventions."""
    return {
        "role": role,
        "parts": [_part_to_dict(part) for part in ((TextPart(parts),) if isinstance(parts, str) else parts)],
    }


def _part_to_dict(part: object) -> dict[str, object]:
    """Return a part in the form of the conventions; pictures and documents without their bytes."""
    match part:
        case TextPart():
            return {"type": "text", "content": part.text}
        case ThinkingPart():
            return {"type": "reasoning", "content": part.text}
        case ToolCallPart():
            call = {"id": part.tool_call_id, "name": part.tool_name, "arguments": plain(part.input)}
            return {"type": "tool_call", **call}
        case _:
            return {"type": type(part).__name__}


def _to_json_text(value: object) -> str:
    """Encode a value as compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
