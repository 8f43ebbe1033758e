"""Gemini's Interactions API: bodies that google-genai's own types take, and replies in one piece and streamed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    OpaquePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserMessage,
)
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, ReplyDone, StopReason, TextChunk, Thinking
from stepengine.data.server_tools import FileSearch, WebSearch
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models import GoogleInteractionsProvider
from stepengine.models._byte_reader import ReplyReader
from stepengine.models.google.interactions.decode import InteractionsAccumulator, decode
from stepengine.models.pricing import LIST_PRICES
from tests.faults.scripts import interactions_reply, interactions_stream
from tests.models.histories import histories, users
from tests.models.wires import TOOL, call, made, result

pytestmark = pytest.mark.anyio

NAME, MODEL = "google_interactions", "gemini-3-pro"
ASKED = (made(NAME), "m", None)
USAGE = {"total_input_tokens": 53, "total_output_tokens": 15, "total_cached_tokens": 3, "total_thought_tokens": 41}
SAID = ("It is five.", [("look", '{"at":"x"}'), ("look", "{}")], "tool_use")


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    options = {"tools": (TOOL,), **fields}
    model = options.pop("model", MODEL)
    request = ModelRequest(f"{NAME}/{model}", messages=Transcript(messages or [UserMessage("Hello.")]), **options)
    return json.loads(GoogleInteractionsProvider("k")._encode(request, stream=False).content)


def parse_with_sdk(sent: dict[str, Any]) -> dict[str, Any]:
    """What google-genai's own types make of a body."""
    from google.genai._gaos.types.interactions import CreateModelInteraction

    return CreateModelInteraction.model_validate(sent).model_dump(mode="json", by_alias=True, exclude_none=True)


def whole(*steps: dict[str, Any], status: str = "completed", **told: Any) -> ModelReply:
    return decode({"id": "v1_1", "status": status, "steps": list(steps), "usage": USAGE, **told}, *ASKED)


def read(events: list[bytes], size: int = 100_000) -> ModelReply:
    reader = ReplyReader(InteractionsAccumulator(*ASKED), ASKED[0])
    content = b"".join(events)
    for start in range(0, len(content), size):
        reader.feed(content[start : start + size])
    return reader.finish()


def event(kind: str, **told: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'event_type': kind, **told})}\n\n".encode()


# --- what goes out --------------------------------------------------------------------------------------------------------


def as_ours(part: Any) -> Any:
    """The part as if one of its makers were this wire."""
    if isinstance(part, OpaquePart):
        return OpaquePart(NAME, {"type": "google_search_call", "id": "s", "arguments": {"queries": ["x"]}})
    data = getattr(part, "provider_data", None)
    if data is None or data.get("provider") != "google":
        return part
    step = {"type": "thought", "signature": "c2ln", "summary": [{"type": "text", "text": "Hm."}]}
    return attrs.evolve(part, provider_data={"provider": NAME, "model": MODEL, "id": "same", "step": step})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV138", "requirements:G10", "ecosystem:EC82")
@given(histories, st.lists(users, max_size=1))
def test_any_transcript_is_a_valid_interactions_request(messages, tail):
    messages, tail = (
        [attrs.evolve(one, content=tuple(map(as_ours, one.content))) for one in found] for found in (messages, tail)
    )
    sent = body(*messages, tail=tuple(tail), settings=ModelSettings(max_tokens=50))
    taken = parse_with_sdk(sent)

    assert sent == taken
    assert sent["store"] is False
    kinds = [step["type"] for step in sent["input"]]
    assert "user_input" == kinds[0]
    assert kinds[-1] in {"user_input", "function_result"}
    waiting: list[str] = []
    for step in sent["input"]:
        if step["type"] == "function_call":
            waiting.append(step["id"])
        elif step["type"] == "function_result":
            assert step["call_id"] == waiting.pop(0)
        elif step["type"] == "user_input":
            assert [] == waiting
            assert step["content"]


@pytest.mark.deep
@pytest.mark.smoke
async def test_sdk_client_and_provider_exchange_identical_requests_and_replies():
    """Both ways in which our bytes go out; and google-genai, given the body in its own words."""
    from google import genai

    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        if json.loads(request.content).get("stream"):
            kind = {"content-type": "text/event-stream"}
            return httpx2.Response(200, content=b"".join(interactions_stream(*SAID)), headers=kind)
        return httpx2.Response(200, content=interactions_reply(*SAID), headers={"content-type": "application/json"})

    history = [UserMessage([TextPart("?"), ImagePart(data=b"x")]), AssistantMessage([call(1)]), result(1)]
    settings = ModelSettings(temperature=0.5, tool_choice="look", response_schema=TOOL.input_schema, seed=7)
    request = ModelRequest(f"{NAME}/{MODEL}", "Be good.", Transcript(history), (TOOL,), settings=settings)
    provider = GoogleInteractionsProvider("k" * 20, transport=httpx2.MockTransport(answer))
    reply = await provider.complete(request)
    deltas = [delta async for delta in provider.stream(request)]
    await provider.close()
    client = genai.Client(
        api_key="k" * 20, http_options={"httpx_client": httpx2.Client(transport=httpx2.MockTransport(answer))}
    )
    sent = json.loads(seen[0].content)
    theirs = client.interactions.create(**sent)
    events = list(client.interactions.create(**sent, stream=True))
    client.close()

    assert sent == json.loads(seen[2].content)
    assert {**sent, "stream": True} == json.loads(seen[1].content) == json.loads(seen[3].content)
    assert 1 == len({(one.method, str(one.url), one.headers["x-goog-api-key"]) for one in seen})
    assert isinstance(deltas[-1], ReplyDone)
    assert deltas[-1].reply == reply
    assert theirs.output_text == reply.text == "".join([one.text for one in deltas if isinstance(one, TextChunk)])
    assert theirs.usage.total_tokens == reply.usage.total_tokens
    calls = [step for step in theirs.steps if step.type == "function_call"]
    assert [(one.name, one.arguments, one.id) for one in calls] == [
        (one.tool_name, dict(one.input), one.provider_data["id"]) for one in reply.tool_calls
    ]
    assert "interaction.completed" == events[-1].event_type


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV138")
def test_media_thinking_and_tools_use_the_api_terms():
    parts = [DocumentPart(data=b"x", name="a.pdf"), DocumentPart("https://x/v.mp4", mime_type="video/mp4")]
    uploaded = ImagePart(file_id="https://g/files/1", provider="google")
    tools = (WebSearch(), FileSearch(stores=("s",)))
    safety = {"harassment": "only_high", "HARM_CATEGORY_HATE_SPEECH": "OFF"}
    settings = ModelSettings(thinking=Thinking(effort="max"), server_tools=tools, tool_choice="required", safety=safety)
    sent = body(UserMessage([TextPart("?"), *parts, uploaded]), settings=settings)

    assert [
        {"type": "text", "text": "?"},
        {"type": "document", "mime_type": "application/pdf", "data": "eA=="},
        {"type": "video", "mime_type": "video/mp4", "uri": "https://x/v.mp4"},
        {"type": "image", "mime_type": "image/png", "uri": "https://g/files/1"},
    ] == sent["input"][0]["content"]
    assert {"thinking_level": "high", "thinking_summaries": "auto", "tool_choice": "any"} == sent["generation_config"]
    limits = [{"type": "harassment", "threshold": "block_only_high"}, {"type": "hate_speech", "threshold": "off"}]
    assert limits == sent["safety_settings"]
    taken = parse_with_sdk(sent)
    assert sent == taken
    names = [tool["type"] for tool in sent["tools"]]
    assert ["function", "google_search", "file_search"] == names
    with pytest.raises(ModelError, match="it accepts images"):
        body(UserMessage([DocumentPart(data=b"x", mime_type="application/zip")]))


@pytest.mark.spec("providers:PV138")
@pytest.mark.parametrize(("model", "level"), [("gemini-3-pro", "low"), ("gemini-3-flash-preview", "minimal")])
def test_thinking_none_requests_the_lowest_level_of_the_model(model, level):
    sent = body(UserMessage("?"), model=model, settings=ModelSettings(thinking=Thinking("none")))

    assert {"thinking_level": level} == sent["generation_config"]


@pytest.mark.spec("providers:PV138")
def test_failed_call_is_flagged_and_result_files_follow_results():
    pdf = DocumentPart(data=b"x")
    history = [UserMessage("?"), AssistantMessage([call(1), call(2)]), result(1, TextPart("a"), pdf)]
    sent = body(*history, result(2, "gone", status="error"), UserMessage("So?"))["input"][3:]

    assert ["function_result", "function_result", "user_input", "user_input"] == [step["type"] for step in sent]
    assert [("a", None), ("gone", True)] == [(step["result"], step.get("is_error")) for step in sent[:2]]
    assert ["text", "document"] == [piece["type"] for piece in sent[2]["content"]]


@pytest.mark.spec("providers:PV138")
def test_steps_keep_their_order_and_refused_thoughts_stay_away():
    def output(text: str) -> dict[str, Any]:
        return {"type": "model_output", "content": [{"type": "text", "text": text}]}

    steps = [output("a"), BACK["thought"], output("b"), BACK["search"], output("c")]
    parts = decode({"status": "completed", "steps": steps}, made(NAME, MODEL), MODEL, None).content
    history = Transcript([UserMessage("?"), AssistantMessage(parts), UserMessage("!")])
    request = ModelRequest(f"{NAME}/{MODEL}", messages=history)
    again = GoogleInteractionsProvider("k")._encode(request, stream=False, previous_failure="invalid_signature")

    assert steps == body(*history)["input"][1:-1]
    assert "thought" not in [step["type"] for step in json.loads(again.content)["input"]]


@pytest.mark.spec("providers:PV138")
def test_schema_is_sent_with_tools_and_oversized_media_are_refused():
    strict, schema = attrs.evolve(TOOL, strict=True), TOOL.input_schema
    sent = body(tools=(strict,), settings=ModelSettings(response_schema=schema))

    assert "validated" == sent["generation_config"]["tool_choice"]
    assert (schema, 1) == (sent["response_format"]["schema"], len(sent["tools"]))
    assert "response_format" in body(settings=ModelSettings(response_schema={"type": "object"}))
    with pytest.raises(ModelError, match=r"it has 15,000,001 bytes"):
        body(UserMessage([ImagePart(data=bytes(15_000_001))]))


@pytest.mark.spec("providers:PV137")
@pytest.mark.parametrize("extra", [{"background": True}, {"body": {"previous_interaction_id": "v1_1"}}])
def test_background_or_linked_interactions_are_refused(extra):
    with pytest.raises(ModelError, match="contains its whole history") as caught:
        body(settings=ModelSettings(extra=extra))

    assert "settings" == caught.value.kind


# --- what comes back ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV137", "reliability:MP20")
def test_stream_equals_the_whole_reply_and_needs_its_last_event():
    expected = decode(json.loads(interactions_reply(*SAID)), *ASKED)
    events = interactions_stream(*SAID)
    for size in (1, 7, 100_000):
        assert expected == read(events, size)
    last = next(index for index, one in enumerate(events) if b"interaction.completed" in one)
    for end in range(last + 1):
        with pytest.raises(TruncatedReply):
            read(events[:end])

    assert "It is five." == expected.text
    assert [("look", {"at": "x"}), ("look", {})] == [(one.tool_name, dict(one.input)) for one in expected.tool_calls]
    assert (StopReason.TOOL_USE, "requires_action") == (expected.stop_reason, expected.raw_stop_reason)
    assert Usage(50, 15, 3, 0, 41) == expected.usage
    assert 109 == expected.usage.total_tokens


FOUND = {"type": "google_search_result", "call_id": "s1", "result": [{"search_suggestions": "<b>"}]}
BACK = {
    "thought": {"type": "thought", "signature": "c2ln", "summary": [{"type": "text", "text": "Hm."}]},
    "thought of tomorrow": {"type": "thought", "depth": 3},
    "call": {"type": "function_call", "id": "f1", "name": "look", "arguments": {"at": "x"}},
    "call of tomorrow": {
        "type": "function_call",
        "id": "f1",
        "name": "look",
        "arguments": {},
        "caller": {"by": "code"},
    },
    "search": {"type": "google_search_call", "id": "s1", "arguments": {"queries": ["a", "b"]}},
    "found": FOUND,
    "text of tomorrow": {"type": "model_output", "content": [{"type": "text", "text": "a", "mood": "fine"}]},
    "image": {"type": "model_output", "content": [{"type": "image", "data": "iVBORw==", "mime_type": "image/png"}]},
    "image by address": {"type": "model_output", "content": [{"type": "image", "uri": "https://x"}]},
    "step of tomorrow": {"type": "hologram", "depth": 3},
    "output of tomorrow": {"type": "model_output", "content": [{"type": "text", "text": "a"}], "mood": "fine"},
}


@pytest.mark.spec("providers:PV137", "generator-contract:T5")
@pytest.mark.parametrize("what", BACK)
def test_each_step_of_a_reply_goes_back_as_it_came(what):
    last = {"type": "google_search_result", "call_id": "s9", "result": []}
    given = {"status": "completed", "steps": [BACK[what], last]}
    reply = decode(given, made(NAME, MODEL), MODEL, None)
    parts = [attrs.evolve(p, tool_call_id="c1") if isinstance(p, ToolCallPart) else p for p in reply.content]
    history = [UserMessage("Hi."), AssistantMessage(parts)]
    history += [result(1)] if any(isinstance(part, ToolCallPart) for part in parts) else [UserMessage("So?")]

    assert [BACK[what], last] == body(*history)["input"][1:3]
    elsewhere = decode(given, made(NAME, "other"), "other", None).content
    if what == "thought":
        assert [last] == body(UserMessage("?"), AssistantMessage(elsewhere), UserMessage("!"))["input"][1:-1]


def test_thoughts_sources_and_searches_are_decoded():
    note = {"type": "url_citation", "url": "https://x", "title": "X", "start_index": 4, "end_index": 9}
    text = {"type": "text", "text": "Né: Paris.", "annotations": [note]}
    reply = whole(BACK["thought"], {"type": "model_output", "content": [text]}, BACK["search"], FOUND)
    thought, said, source, asked, found = reply.content

    assert (ThinkingPart, "Hm.") == (type(thought), thought.text)
    assert ("Né: Paris.", CitationPart("https://x", "X", said=" Pari")) == (said.text, source)
    assert [("web_search", "a\nb"), ("web_search", "")] == [(part.tool, part.text) for part in (asked, found)]


STREAMS: dict[str, list[dict[str, Any]]] = {
    "thought": [
        {"step": {"type": "thought"}},
        {"delta": {"type": "thought_summary", "content": {"type": "text", "text": "H"}}},
        {"delta": {"type": "thought_summary", "content": {"type": "text", "text": "m."}}},
        {"delta": {"type": "thought_signature", "signature": "c2ln"}},
    ],
    "search": [
        {"step": {"type": "google_search_call", "id": "s1"}},
        {"delta": {"type": "google_search_call", "arguments": {"queries": ["a", "b"]}}},
    ],
    "image": [
        {"step": {"type": "model_output"}},
        {"delta": {"type": "image", "data": "iVBORw==", "mime_type": "image/png"}},
    ],
    "step of tomorrow": [{"step": {"type": "hologram"}}, {"delta": {"type": "light", "depth": 3}}],
}


@pytest.mark.spec("providers:PV137", "generator-contract:T5")
@pytest.mark.parametrize("what", STREAMS)
def test_each_streamed_step_equals_the_whole_step(what):
    pieces = [event(f"step.{'start' if 'step' in piece else 'delta'}", index=0, **piece) for piece in STREAMS[what]]
    ended = {"id": "v1_1", "status": "completed", "usage": USAGE}

    assert whole(BACK[what]) == read(
        [*pieces, event("step.stop", index=0), event("interaction.completed", interaction=ended)]
    )


def test_text_around_an_image_keeps_its_place():
    outputs = [{"type": "text", "text": "ab"}, {"type": "image", "data": "iVBORw==", "mime_type": "image/png"}]
    outputs.append({"type": "text", "text": "c", "annotations": [{"type": "url_citation", "url": "https://x"}]})
    deltas = [{"type": "text", "text": "b"}, outputs[1], {"type": "text", "text": "c"}]
    deltas.append({"type": "text_annotation_delta", "annotations": outputs[2]["annotations"]})
    start = event("step.start", index=0, step={"type": "model_output", "content": [{"type": "text", "text": "a"}]})
    told = [event("step.delta", index=0, delta=delta) for delta in deltas]
    ended = event("interaction.completed", interaction={"id": "v1_1", "status": "completed", "usage": USAGE})

    assert whole({"type": "model_output", "content": outputs}) == read(
        [start, *told, event("step.stop", index=0), ended]
    )


@pytest.mark.spec("providers:PV137")
def test_steps_are_ordered_by_index_and_done_marker_ends_nothing():
    pieces = [
        piece
        for index, text in ((1, "b"), (0, "a"))
        for piece in (
            event("step.start", index=index, step={"type": "model_output"}),
            event("step.delta", index=index, delta={"type": "text", "text": text}),
            event("step.stop", index=index),
        )
    ]
    done = b"event: done\ndata: [DONE]\n\n"
    ended = event("interaction.completed", interaction={"status": "completed", "usage": USAGE})

    assert ["a", "b"] == [part.text for part in read([*pieces, ended, done]).content]
    with pytest.raises(TruncatedReply):
        read([*pieces, done])


CALL, DELTA = {"index": 0, "step": {"type": "function_call", "name": "look"}}, {"index": 0, "delta": {"type": "text"}}


@pytest.mark.spec("providers:PV137")
@pytest.mark.parametrize(
    "events",
    [
        [event("step.delta", **DELTA)],
        [event("step.start", **CALL), event("step.start", **CALL)],
        [event("step.start", **CALL), event("step.delta", **DELTA)],
        [event("step.start", **CALL), event("step.stop", index=0), event("step.stop", index=0)],
        [event("step.start", index=-1, step={})],
    ],
)
def test_events_in_an_impossible_order_are_no_reply(events):
    with pytest.raises(ModelError) as caught:
        read([*events, event("interaction.completed", interaction={"status": "completed"})])

    assert ("protocol", True) == (caught.value.kind, caught.value.retryable)


@pytest.mark.spec("providers:PV137")
@pytest.mark.parametrize(
    ("status", "stop"),
    [
        ("completed", StopReason.END_TURN),
        ("incomplete", StopReason.MAX_TOKENS),
        ("budget_exceeded", StopReason.MAX_TOKENS),
        ("requires_continuation", StopReason.MAX_TOKENS),
        ("a_status_of_tomorrow", StopReason.END_TURN),
    ],
)
def test_statuses_map_to_stop_reasons(status, stop):
    reply = whole({"type": "model_output", "content": [{"type": "text", "text": "a"}]}, status=status, of_tomorrow=5)

    assert (stop, 5) == (reply.stop_reason, reply.provider_data["of_tomorrow"])


@pytest.mark.spec("providers:PV137")
@pytest.mark.parametrize(
    ("status", "told", "kind", "retryable"),
    [
        ("failed", {"errors": [{"code": "RESOURCE_EXHAUSTED", "message": "Too much."}]}, "http", True),
        ("failed", {"errors": [{"code": "INVALID_ARGUMENT", "message": "Too odd."}]}, "http", False),
        ("cancelled", {}, "http", True),
        ("in_progress", {}, "unanswerable", False),
        ("completed", {"steps": None}, "protocol", True),
        ("completed", {"steps": [{"type": "model_output", "error": {"code": 8, "message": "Gone."}}]}, "http", True),
    ],
)
def test_interaction_without_a_reply_is_a_typed_error_with_usage(status, told, kind, retryable):
    with pytest.raises(ModelError) as caught:
        whole(status=status, **told)

    assert (kind, retryable, Usage(50, 15, 3, 0, 41)) == (caught.value.kind, caught.value.retryable, caught.value.usage)


def test_provider_tool_tokens_count_as_prompt_tokens():
    used = {**USAGE, "total_tool_use_tokens": 129, "total_tokens": 238}

    assert (182, 238) == ((usage := whole(usage=used).usage).prompt_tokens, usage.total_tokens)


def test_an_error_in_a_stream_is_that_error():
    error = {"code": "RESOURCE_EXHAUSTED", "message": "Too much."}
    with pytest.raises(ModelError, match="Too much") as caught:
        read([event("interaction.created", interaction={}), event("error", error=error)])

    assert (429, True) == (caught.value.status, caught.value.retryable)


@pytest.mark.spec("providers:PV138")
def test_interactions_cost_equals_generate_content_and_search_is_unpriced():
    at, usage = datetime(2026, 11, 1, tzinfo=UTC), {"total_input_tokens": 1_000_000, "total_output_tokens": 0}
    reply = whole(BACK["search"], FOUND, usage={**usage, "total_tokens": 1_000_000})
    found = [LIST_PRICES.price_reply(f"{prefix}/gemini-2.5-flash", reply, at) for prefix in (NAME, "google")]

    assert [Decimal("0.3"), Decimal("0.3")] == found
    assert ("google_search_call",) == LIST_PRICES.list_unpriced(f"{NAME}/gemini-2.5-flash", reply, at)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC84")
async def test_tool_choice_with_only_server_tools_is_reported_dropped():
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=interactions_reply(*SAID)))
    provider = GoogleInteractionsProvider("k", transport=transport)
    given = ModelSettings(server_tools=(WebSearch(),), tool_choice="required")
    reply = await provider.complete(
        ModelRequest(f"{NAME}/{MODEL}", messages=Transcript([UserMessage("Hello.")]), settings=given)
    )
    await provider.close()
    assert "tool_choice" in reply.provider_data["dropped"]
