"""
Hypothesis strategies for every value of `stepengine.data`: JSON, parts, messages, paired transcripts, states, errors.

`STORED` has one strategy for every class that the codec can store; `stored()` draws from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import attrs
from hypothesis import strategies as st

from stepengine import errors
from stepengine.data.codec import STORED as STORED_CLASSES
from stepengine.data.codec import get_tag
from stepengine.data.hooks import Change
from stepengine.data.json import freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    SideEffect,
    TextPart,
    ThinkingPart,
    ToolCallLog,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    ToolResult,
    UserMessage,
)
from stepengine.data.models import (
    ModelReply,
    ModelRequest,
    ModelSettings,
    ReplyDone,
    StopReason,
    TextChunk,
    Thinking,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.outcomes import Failure, Gathered, PartialUsage, Stop, Value
from stepengine.data.questions import Answer, Decision, Question
from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, UrlContext, WebSearch
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import ToolAnnotations, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending, Usage
from stepengine.data.waits import Awaited, ChildRef, Received

STATUSES = ("ok", "error", "pending", "skipped", "denied", "cancelled")


# --- JSON -----------------------------------------------------------------------------------------------------------

characters = st.characters(exclude_categories=("Cs",))
text = st.text(characters, max_size=8)
names = st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True)
ids = st.from_regex(r"[a-z]{1,4}(-[a-z]{1,3})?", fullmatch=True)
integers = st.integers() | st.sampled_from([2**63, -(2**63) - 1, 10**4300 - 1, 1 - 10**4300])
counts = st.integers(0, 10_000)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(min_value=0, max_value=1_000, places=4)
costs = st.none() | decimals
scalars = st.none() | st.booleans() | integers | floats | text


def json_values(max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """
    JSON values as callers write them: plain dicts, lists and tuples.
    """
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=max_leaves,
    )


json_objects = st.dictionaries(text, json_values(4), max_size=3)
frozen_values = json_values().map(freeze)


def tuples(item: st.SearchStrategy[Any], max_size: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, max_size=max_size).map(tuple)


def some(
    cls: Callable[..., Any], *args: st.SearchStrategy[Any], **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """
    `cls` with `args`, and with any selection of `fields`.
    """
    return st.builds(
        lambda positional, keywords: cls(*positional, **keywords),
        st.tuples(*args),
        st.fixed_dictionaries({}, optional=fields),
    )


# --- parts and messages ---------------------------------------------------------------------------------------------

provider_data = st.none() | json_objects.map(lambda data: {"provider": "p", **data})
text_parts = some(TextPart, text, provider_data=provider_data)
thinking_parts = some(ThinkingPart, text, provider_data=provider_data)
refusal_parts = some(RefusalPart, text, provider_data=provider_data)
json_parts = st.builds(JsonPart, json_values())
tool_references = st.builds(ToolReferencePart, names)
opaque_parts = some(OpaquePart, names, json_objects, tool=names, text=text)
citation_parts = some(CitationPart, text, text, quote=text, said=text, source=text)
sources = st.fixed_dictionaries({"url": text}) | st.fixed_dictionaries({"data": st.binary(max_size=8)})
sources |= st.fixed_dictionaries({"file_id": names, "provider": names})


@st.composite
def media(draw: st.DrawFn, cls: Callable[..., Any], **fields: st.SearchStrategy[Any]) -> Any:
    kept = draw(st.fixed_dictionaries({}, optional={"provider_data": provider_data, **fields}))
    return cls(**draw(sources), **kept)


image_parts = media(ImagePart, mime_type=st.sampled_from(["image/png", "image/jpeg"]))
document_parts = media(DocumentPart, mime_type=st.sampled_from(["application/pdf", "text/plain"]), name=text)


def call_parts(call_ids: st.SearchStrategy[str] = names) -> st.SearchStrategy[ToolCallPart]:
    extra = {"raw_input": st.none() | text, "input_error": st.none() | text, "provider_data": provider_data}
    return some(ToolCallPart, call_ids, names, json_objects, **extra)


to_result_parts = text_parts | json_parts | image_parts | document_parts | tool_references
talk_parts = text_parts | thinking_parts | refusal_parts | opaque_parts | citation_parts
user_messages = some(UserMessage, tuples(text_parts | image_parts | document_parts), tags=tuples(names))
assistant_messages = some(AssistantMessage, tuples(talk_parts | call_parts()), tags=tuples(names))
tool_messages = some(ToolMessage, names, names, tuples(to_result_parts), status=st.sampled_from(STATUSES))


def steps(first_id: str) -> st.SearchStrategy[tuple[Any, ...]]:
    """
    An assistant message and one result for each of its calls, whose ids start with `first_id`.
    """

    @st.composite
    def step(draw: st.DrawFn) -> tuple[Any, ...]:
        count = draw(st.integers(0, 3))
        calls = [draw(call_parts(st.just(f"{first_id}_{n}"))) for n in range(count)]
        parts = draw(st.permutations([*calls, *draw(st.lists(talk_parts, max_size=2))]))
        ordered = [part for part in parts if isinstance(part, ToolCallPart)]
        results = [
            ToolMessage(c.tool_call_id, c.tool_name, draw(tuples(to_result_parts, 2)), draw(st.sampled_from(STATUSES)))
            for c in ordered
        ]
        return (AssistantMessage(tuple(parts)), *results)

    return step()


@st.composite
def paired_messages(draw: st.DrawFn, max_groups: int = 4) -> list[Any]:
    """
    A list of messages in which every call has its result.
    """
    found: list[Any] = []
    for group in range(draw(st.integers(0, max_groups))):
        found.extend(draw(st.tuples(user_messages) | steps(f"c{group}")))
    return found


transcripts = paired_messages().map(Transcript)


# --- results, tools, models -----------------------------------------------------------------------------------------

usages = some(
    Usage,
    input_tokens=counts,
    output_tokens=counts,
    cache_read_tokens=counts,
    cache_write_tokens=counts,
    reasoning_tokens=counts,
    requests=st.integers(0, 9),
    at_least=st.booleans(),
)
usage_maps = st.dictionaries(names, usages, max_size=2)


@st.composite
def spending_values(draw: st.DrawFn) -> Spending:
    """
    What was spent, by agents and models whose costs are known or not.
    """
    spent = draw(
        some(Spending, usage=usages, cost=costs, credits_used=counts, by_agent=usage_maps, by_model=usage_maps)
    )
    known = [
        {name: cost for name, usage in used.items() if usage != Usage() and (cost := draw(costs)) is not None}
        for used in (spent.by_agent, spent.by_model)
    ]
    return attrs.evolve(spent, agent_costs=known[0], model_costs=known[1])


spendings = spending_values()
side_effects = some(SideEffect, names, target=text, details=json_values())
changes = st.deferred(
    lambda: some(
        Change,
        system_prompt=st.none() | text,
        messages=st.none() | transcripts,
        view=st.none() | transcripts,
        context=st.none() | json_objects,
        tail=tuples(user_messages, 1),
        input=st.none() | json_objects,
        result=st.none() | results,
    )
)
results: st.SearchStrategy[ToolResult] = some(
    ToolResult,
    tuples(to_result_parts),
    status=st.sampled_from(STATUSES),
    tool_name=names,
    tool_call_id=names,
    credits_used=floats,
    side_effects=tuples(side_effects, 2),
    change=st.none() | changes,
)
call_logs = st.builds(
    ToolCallLog, names, json_values(), results, counts, counts, names, st.sampled_from(["model", "handler", "hook"])
)
annotations = some(
    ToolAnnotations,
    read_only=st.booleans(),
    destructive=st.booleans(),
    idempotent=st.booleans(),
    open_world=st.booleans(),
)
specs = some(
    ToolSpec,
    names,
    description=text,
    input_schema=json_objects,
    category=names,
    annotations=annotations,
    parallel_safe=st.booleans(),
    ends_turn=st.booleans(),
    forces_next_step=st.booleans(),
    requires_permission=st.booleans(),
    ephemeral=st.none() | counts,
    max_chars=st.none() | counts,
    timeout=st.none() | floats,
    retries=st.integers(0, 5),
    defer_loading=st.booleans(),
    about=st.none() | st.lists(text, max_size=3).map(tuple),
)
thinkings = some(
    Thinking,
    effort=st.none() | st.sampled_from(["none", "low", "medium", "high", "max", "enabled", "extended"]),
    show=st.booleans(),
    budget_tokens=st.none() | counts,
)
searches = some(
    WebSearch,
    max_uses=st.none() | counts,
    allowed_domains=tuples(names, 2),
    blocked_domains=tuples(names, 2),
    location=st.none() | st.fixed_dictionaries({"city": text}),
)
readings = some(UrlContext, max_uses=st.none() | counts, allowed_domains=tuples(names, 2))
programs = some(Programs, st.just(("look", "find")), direct=st.sampled_from([(), ("look",)]))
server_tools = searches | readings | programs | some(CodeExecution, files=tuples(names))
settings = some(
    ModelSettings,
    temperature=st.none() | floats,
    top_p=st.none() | floats,
    max_tokens=st.none() | counts,
    stop_sequences=tuples(text),
    tool_choice=st.none() | names,
    parallel_tool_calls=st.none() | st.booleans(),
    thinking=st.none() | thinkings,
    output=st.sampled_from([None, "native", "tool"]),
    service_tier=st.sampled_from([None, "auto", "flex"]),
    seed=st.none() | counts,
    logprobs=st.none() | st.integers(0, 20),
    store=st.none() | st.booleans(),
    safety=st.dictionaries(names, names, max_size=2),
    cache=st.sampled_from([None, True, False, "5m", "1h"]),
    cache_key=st.none() | text,
    fallbacks=st.sampled_from([(), ("default",), ("a", "b/c")]),
    server_tools=tuples(server_tools, 2),
    unsupported=st.sampled_from(["warn", "error"]),
    extra=json_objects,
)
requests = some(
    ModelRequest,
    names,
    system_prompt=text,
    messages=transcripts,
    tools=tuples(specs, 2),
    tool_choice=st.none() | names,
    settings=settings,
    tail=tuples(user_messages, 2),
)
stop_reasons = st.sampled_from(StopReason)
replies = some(
    ModelReply,
    tuples(talk_parts | call_parts()),
    usage=st.none() | usages,
    stop_reason=stop_reasons,
    cost=costs,
    raw_stop_reason=st.none() | text,
    model=st.none() | names,
    request_id=st.none() | text,
    provider_data=json_objects,
)
limits = some(
    Limits,
    max_steps=st.none() | counts,
    max_actions=st.none() | counts,
    max_tokens=st.none() | counts,
    max_cost_usd=st.none() | decimals | st.floats(0, 100) | counts,
    max_seconds=st.none() | st.floats(0, 1e6),
    max_depth=st.none() | counts,
    max_total_children=st.none() | counts,
    max_children=st.none() | counts,
    max_concurrent_children=st.none() | counts,
    on_max_steps=st.sampled_from([None, "final_answer", "stop", "raise"]),
)


# --- questions, runs, outcomes, errors ------------------------------------------------------------------------------

questions = some(
    Question,
    names,
    text,
    options=tuples(text),
    multi_select=st.booleans(),
    tool_name=st.none() | names,
    details=json_values(),
    path=st.sampled_from(["", "3", "3.2"]),
    number=st.sampled_from([None, "whole", "any"]),
)
answers = some(
    Answer,
    selected=tuples(text),
    text=text,
    declined=st.booleans(),
    remember=st.sampled_from([None, "session"]),
)
decisions = some(
    Decision,
    st.sampled_from(["allow", "deny", "ask"]),
    message=text,
    rule_id=st.none() | names,
    options=tuples(text),
)
ERROR_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "issues": tuples(text),
    "kind": names,
    "location": text,
    "tool_name": names,
    "available": tuples(names),
    "agent_id": ids,
    "retryable": st.booleans(),
    "request_id": st.none() | text,
    "retry_after": st.none() | floats,
    "usage": st.none() | usages,
    "limit": st.none() | floats | counts,
    "more": st.none() | floats | counts,
    "path": text,
    "rule": names,
    "beside": tuples(text),
    "pid": st.none() | counts,
    "host": text,
    "address": names,
    "step": counts,
    "site": text,
    "diff": tuples(st.tuples(names, text, text)),
    "files": tuples(st.tuples(names, text)),
}


def errors_of(cls: type[errors.StepEngineError]) -> st.SearchStrategy[errors.StepEngineError]:
    status = st.sampled_from(["failed", "cancelled"]) if issubclass(cls, errors.AgentError) else st.none() | counts
    return some(cls, text, **{field: {**ERROR_FIELDS, "status": status}[field] for field in cls.fields})


ERROR_CLASSES: Sequence[type[errors.StepEngineError]] = tuple(
    cls for cls in STORED_CLASSES.values() if issubclass(cls, errors.StepEngineError)
)
engine_errors = st.sampled_from(ERROR_CLASSES).flatmap(errors_of)
statuses = st.sampled_from(RunStatus)
child_results = st.fixed_dictionaries(
    {"agent_id": ids},
    optional={
        "run_id": names,
        "status": statuses,
        "output": frozen_values,
        "text": text,
        "error": st.none() | engine_errors,
        "spending": spendings,
        "questions": tuples(questions, 2),
    },
).map(lambda fields: ChildResult(**fields))
states = some(
    AgentState,
    run_id=names,
    agent_id=ids,
    parent_id=st.none() | names,
    ancestor_run_ids=tuples(names),
    child_run_ids=tuples(names),
    message_history=transcripts,
    view=transcripts,
    system_prompt=text,
    tool_definitions=st.dictionaries(names, specs, max_size=2),
    output=json_values(),
    steps_remaining=counts,
    step_index=counts,
    usage=usages,
    cost=costs,
    credits_used=floats,
    context=json_objects,
    pending=tuples(questions, 2),
    next_call=counts,
    id_prefix=names,
)
outcome_values = replies | results | child_results | frozen_values | tuples(answers)
times = st.integers(0, 10**9)
values = some(Value, outcome_values, at=times, inputs=tuples(user_messages, 1))
failures = some(Failure, engine_errors, at=times, inputs=tuples(user_messages, 1))
begun = st.builds(PartialUsage, usages, costs)
stops = some(
    Stop,
    st.sampled_from(["suspended", "cancelled", "shutdown", "limit", "diverged"]),
    at=times,
    error=st.none() | engine_errors,
    questions=tuples(questions, 2),
    child=st.none() | child_results,
    begun=st.none() | begun,
)
gathered = st.builds(Gathered, tuples(values | failures | stops, 3))
outcomes = values | failures | stops | gathered

paths = st.sampled_from(["3", "3.2", "14"])
child_refs = st.builds(ChildRef, names, ids, paths)
received = some(Received, names, value=json_values())
awaited = some(Awaited, done=tuples(paths), open=tuples(paths))

STORED: dict[str, st.SearchStrategy[Any]] = {
    "agent_state": states,
    "answer": answers,
    "assistant_message": assistant_messages,
    "wait_result": awaited,
    "change": changes,
    "child_ref": child_refs,
    "child_result": child_results,
    "citation": citation_parts,
    "code_execution": some(CodeExecution, files=tuples(names)),
    "decision": decisions,
    "document": document_parts,
    "failure": failures,
    "file_search": some(FileSearch, names.map(lambda name: (name,)), max_results=st.none() | counts),
    "gathered": gathered,
    "image": image_parts,
    "json_content": json_parts,
    "limits": limits,
    "model_reply": replies,
    "model_request": requests,
    "model_settings": settings,
    "opaque": opaque_parts,
    "programs": programs,
    "question": questions,
    "received_message": received,
    "refusal": refusal_parts,
    "reply_done": st.builds(ReplyDone, replies),
    "side_effect": side_effects,
    "spending": spendings,
    "partial_usage": begun,
    "stop": stops,
    "text_chunk": st.builds(TextChunk, text),
    "text": text_parts,
    "thinking_settings": thinkings,
    "thinking_chunk": st.builds(ThinkingChunk, text),
    "thinking": thinking_parts,
    "tool_annotations": annotations,
    "tool_call_chunk": st.builds(ToolCallChunk, counts, text),
    "tool_call_ended": st.builds(ToolCallEnded, counts),
    "tool_call_log": call_logs,
    "tool_call": call_parts(),
    "tool_call_started": st.builds(ToolCallStarted, counts, names),
    "tool_message": tool_messages,
    "tool_result": results,
    "tool_reference": tool_references,
    "tool_spec": specs,
    "transcript": transcripts,
    "url_context": readings,
    "usage": usages,
    "user_message": user_messages,
    "value": values,
    "web_search": searches,
    **{get_tag(cls): errors_of(cls) for cls in ERROR_CLASSES},
}


def stored() -> st.SearchStrategy[Any]:
    """
    A value of any class that the codec can store.
    """
    return st.sampled_from(sorted(STORED)).flatmap(STORED.__getitem__)


# --- what is not JSON -----------------------------------------------------------------------------------------------


class Foreign:
    """
    An object that no record can hold.
    """


not_json = st.sampled_from(
    [
        math.nan,
        math.inf,
        -math.inf,
        b"bytes",
        {1, 2},
        Foreign(),
        Foreign,
        object(),
        1j,
        Decimal(1),
        "\ud800",
        "a\udfffb",
    ]
) | st.sampled_from([10**4300, -(10**4300), 10**5000])
