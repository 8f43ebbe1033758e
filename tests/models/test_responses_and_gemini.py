"""Our messages on the Responses wire and on Gemini's, by example, and events in an order that cannot be."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from typing import Any

import attrs
import httpx2
import pytest

from stepengine import AgentDefinition, Engine
from stepengine.data.events import TextDelta
from stepengine.data.json import thaw
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserMessage,
)
from stepengine.data.models import ModelRequest, StopReason
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models import GoogleProvider, Models, OpenAIProvider
from stepengine.models._failures import DANGLING_REASONING, INVALID_SIGNATURE
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.google.decode import parse_usage as google_usage
from stepengine.models.google.encode import DUMMY_SIGNATURE, parse_generation
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai.decode import parse_usage as responses_usage
from tests.faults.scripts import event, google_chunk, unnamed
from tests.models.wires import MODEL, PNG, call, made, provider_of, reader, result, sent

PDF = base64.b64encode(b"%PDF").decode()
PICTURE = base64.b64encode(PNG).decode()
SIGNATURE = "AB+/cd=="
GO, ON = UserMessage("go"), UserMessage("on")


def own(name: str, **more: Any) -> dict[str, Any]:
    return {"provider": name, "model": MODEL[name], **more}


# --- Responses ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:G7", "requirements:B12", "ecosystem:EC73", "ecosystem:EC90", "ecosystem:EC91")
def test_responses_items_return_unchanged_and_in_order():
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "e1"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [{"type": "url_citation"}]},
                {"type": "refusal", "refusal": "But not there."},
            ],
            "phase": "commentary",
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at":"1"}'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    ]  # fmt: skip
    reply = decode_responses({"output": output, "status": "completed"}, made("openai"), MODEL["openai"], None)
    kinds = [type(part) for part in reply.content]
    assert kinds == [ThinkingPart, TextPart, CitationPart, RefusalPart, ToolCallPart, OpaquePart]
    parts = [ToolCallPart("c1", p.tool_name, p.input, provider_data=p.provider_data) if isinstance(p, ToolCallPart) else p for p in reply.content]  # fmt: skip
    items = sent("openai", GO, AssistantMessage(tuple(parts)), result(1))
    assert items[1:-1] == output
    assert items[-1] == {"type": "function_call_output", "call_id": "call_1", "output": "saw 1"}
    # Another model of the same provider gets the words, and calls without the ids that meant reasoning.
    theirs = sent("openai", GO, AssistantMessage([mark_elsewhere(p) for p in parts]), result(1))
    assert theirs[1:3] == [
        {"role": "assistant", "content": "I look.\n\nBut not there."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at":"1"}'},
    ]


def mark_elsewhere(part: Any) -> Any:
    data = getattr(part, "provider_data", None)
    return part if data is None else attrs.evolve(part, provider_data={**thaw(data), "model": "gpt-other"})


UNKNOWN = {"type": "output_hologram", "shape": [1]}
HI, HO = ({"type": "output_text", "text": text, "annotations": []} for text in ("hi", "ho"))


@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("content", [(UNKNOWN, HI), (HI, UNKNOWN, HO), (UNKNOWN, UNKNOWN, HI, HO)])
def test_message_with_unknown_content_returns_as_one_item(content):
    message = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": list(content)}
    reply = decode_responses({"output": [message], "status": "completed"}, made("openai"), MODEL["openai"], None)
    assert [message] == sent("openai", GO, AssistantMessage(reply.content), ON)[1:-1]


@pytest.mark.spec("reliability:MP59")
def test_text_after_unknown_content_without_id_is_sent():
    message = {"type": "message", "role": "assistant", "content": [UNKNOWN, HI, HO]}
    reply = decode_responses({"output": [message], "status": "completed"}, made("openai"), MODEL["openai"], None)
    assert sent("openai", GO, AssistantMessage(reply.content), ON)[1:-1] == [
        {**message, "content": [UNKNOWN]},
        {"role": "assistant", "content": "hiho"},
    ]


@pytest.mark.spec("ecosystem:EC91", "ecosystem:EC73")
def test_reasoning_without_encrypted_content_is_not_sent():
    bare = ThinkingPart("hm", provider_data=own("openai", item={"type": "reasoning", "id": "rs_1", "summary": []}))
    assert sent("openai", GO, AssistantMessage([bare, "answer"]), ON) == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "on"},
    ]


@pytest.mark.spec("ecosystem:EC82", "ecosystem:EC86", "reliability:TL09", "requirements:B14")
def test_responses_takes_images_and_documents_from_users_and_in_results():
    media = [ImagePart("https://x/i.png"), ImagePart(data=PNG), DocumentPart(data=b"%PDF", name="a.pdf"), DocumentPart("https://x/d.pdf")]  # fmt: skip
    encoded = [
        {"type": "input_image", "detail": "auto", "image_url": "https://x/i.png"},
        {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PICTURE}"},
        {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
        {"type": "input_file", "file_url": "https://x/d.pdf"},
    ]
    assert sent("openai", UserMessage(media))[0]["content"] == encoded
    items = sent("openai", GO, AssistantMessage([call(1)]), result(1, "seen", *media, JsonPart({"n": 1})))
    said = [{"type": "input_text", "text": "seen"}, *encoded, {"type": "input_text", "text": '{"n":1}'}]
    assert items[-1]["output"] == said
    with pytest.raises(ModelError, match="ImagePart"):
        sent("openai", UserMessage([ImagePart(data=b"x", mime_type="image/tiff")]))


@pytest.mark.spec("ecosystem:EC97", "providers:PV70")
@pytest.mark.parametrize(
    ("data", "stop", "raw"),
    [
        ({"status": "completed"}, "end_turn", "completed"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "max_tokens",
            "max_output_tokens",
        ),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_messages"}}, "max_tokens", "max_messages"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "refusal", "content_filter"),
        ({"status": "incomplete", "incomplete_details": {"reason": "from_the_future"}}, "end_turn", "from_the_future"),
        ({"status": "cancelled"}, "error", "cancelled"),
        ({"status": "queued"}, "error", "queued"),
        ({}, "end_turn", None),
    ],
)
def test_the_status_of_a_response_maps_onto_our_stop_reasons(data, stop, raw):
    reply = decode_responses({"output": [], **data}, made("openai"), "m", None)
    assert (reply.stop_reason, reply.raw_stop_reason) == (stop, raw)


@pytest.mark.spec("reliability:MP22", "providers:PV70")
@pytest.mark.parametrize(
    ("code", "status", "retryable"),
    [
        ("server_error", 500, True),
        ("invalid_prompt", 400, False),
        ("odd", None, True),
    ],
)
def test_a_failed_response_is_the_matching_status(code, status, retryable):
    failed = {"output": [], "status": "failed", "error": {"code": code, "message": "Sorry."}, "usage": {"input_tokens": 3, "output_tokens": 0}}  # fmt: skip
    it = reader("openai")
    for decode in (
        lambda: decode_responses(failed, made("openai"), "m", None),
        lambda: (it.feed(event({"type": "response.failed", "response": failed})), it.finish()),
    ):
        with pytest.raises(ModelError) as caught:
            decode()
        assert (caught.value.status, caught.value.retryable, caught.value.usage) == (status, retryable, Usage(3, 0))


@pytest.mark.spec("ecosystem:EC97")
@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ("MALFORMED_FUNCTION_CALL", "malformed_call"),
        ("UNEXPECTED_TOOL_CALL", "malformed_call"),
        ("MISSING_THOUGHT_SIGNATURE", "invalid_signature"),
        *[(word, "given_up") for word in ("MALFORMED_RESPONSE", "OTHER", "IMAGE_OTHER", "NO_IMAGE")],
    ],
)
def test_gemini_malformed_finish_reasons_are_retryable_errors(raw, kind):
    data = {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": raw, "finishMessage": "Hm."}]}
    with pytest.raises(ModelError, match="Hm") as caught:
        decode_google(data, made("google"), "m", None)
    assert (caught.value.kind, caught.value.retryable) == (kind, True)


@pytest.mark.spec("ecosystem:EC97")
def test_unexpected_gemini_tool_call_is_still_a_call():
    parts = [{"functionCall": {"name": "made_up", "args": {"a": 1}}}]
    data = {"candidates": [{"content": {"parts": parts}, "finishReason": "UNEXPECTED_TOOL_CALL"}]}
    reply = decode_google(data, made("google"), "m", None)
    assert reply.stop_reason == "tool_use"
    assert [(part.tool_name, part.input) for part in reply.content] == [("made_up", {"a": 1})]


@pytest.mark.spec("ecosystem:EC76", "reliability:MP61")
@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (None, None),
        ({"input_tokens": None}, None),
        ({"input_tokens": 10, "output_tokens": 4, "input_tokens_details": None}, Usage(10, 4)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 9,
                "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 5},
            },
            Usage(5, 4, 3, 2, 5),
        ),
        ({"input_tokens": -1, "output_tokens": 2}, Usage(0, 2, at_least=True)),
    ],
)
def test_responses_usage_falls_into_disjoint_buckets(raw, usage):
    assert responses_usage(raw) == usage


@pytest.mark.spec("ecosystem:EC73")
def test_streamed_reasoning_counts_as_its_done_event_has_it():
    item = {"type": "reasoning", "id": "rs_1", "summary": []}
    it = reader("openai")
    for kind, secret in (("added", "partial"), ("done", "whole")):
        it.feed(
            event(
                {
                    "type": f"response.output_item.{kind}",
                    "output_index": 0,
                    "item": {**item, "encrypted_content": secret},
                }
            )
        )
    whole = {"output": [{**item, "encrypted_content": "in other words"}], "status": "completed"}
    it.feed(event({"type": "response.completed", "response": whole}))
    (part,) = it.finish().content
    assert part.provider_data["item"]["encrypted_content"] == "whole"


# --- Gemini ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:G23", "requirements:B12", "ecosystem:EC90", "ecosystem:EC91")
def test_gemini_signatures_return_unchanged_on_their_own_part():
    parts = [
        {"text": "Hm.", "thought": True},
        {"text": "I look.", "thoughtSignature": SIGNATURE},
        {"functionCall": {"name": "look", "args": {"at": "1"}, "id": "g1"}, "thoughtSignature": "x/y+"},
        {"functionCall": {"name": "look", "args": {"at": "2"}}},
        {"executableCode": {"language": "PYTHON", "code": "1"}, "thoughtSignature": "zz=="},
        {"text": "", "thoughtSignature": "end+"},
    ]
    data = {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}
    reply = decode_google(data, made("google"), MODEL["google"], None)
    content: list[Any] = []
    for number, part in enumerate(reply.content):
        content.append(ToolCallPart(f"c{number}", part.tool_name, part.input, provider_data=part.provider_data) if isinstance(part, ToolCallPart) else part)  # fmt: skip
    contents = sent("google", GO, AssistantMessage(tuple(content)), result(2), result(3))
    assert contents[1] == {"role": "model", "parts": parts}
    assert contents[2]["parts"] == [
        {"functionResponse": {"name": "look", "id": "g1", "response": {"output": "saw 2"}}},
        {"functionResponse": {"name": "look", "response": {"output": "saw 3"}}},
    ]


@pytest.mark.spec("ecosystem:EC99", "reliability:MP60")
@pytest.mark.parametrize(("model", "after"), [("gpt-5", ""), ("gpt-5-mini", ""), ("gpt-5", DANGLING_REASONING)])
def test_server_calls_return_only_together_with_their_reasoning(model, after):
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": picture},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    ]  # fmt: skip
    reply = decode_responses(
        {"id": "r", "status": "completed", "output": output}, made("openai", "gpt-5"), "gpt-5", None
    )
    request = ModelRequest(f"openai/{model}", "", Transcript([GO, AssistantMessage(reply.content), ON]))
    sent_back = OpenAIProvider("k")._encode(request, stream=False, previous_failure=after).content.decode()

    is_whole = model == "gpt-5" and not after
    assert [is_whole] * 4 == [f'"{name}"' in sent_back for name in ("rs_1", "ws_1", "ig_1", "msg_1")]
    assert picture in sent_back


@pytest.mark.spec("ecosystem:EC83")
def test_repeated_replies_send_no_item_id_twice():
    item = {"provider": "openai", "model": MODEL["openai"], "id": "call_1", "item_id": "fc_1"}
    first, again = [ToolCallPart(ours, "look", {}, provider_data=item) for ours in ("c1", "c2")]
    items = sent("openai", GO, AssistantMessage([first]), result(1), AssistantMessage([again]), result(2))
    ids = [one["id"] for one in items if "id" in one]
    assert ["fc_1"] == ids


@pytest.mark.anyio
@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wire", ["openai", "openai_chat"])
async def test_failed_reply_reports_its_usage_in_both_modes(wire, stream):
    error = {"code": "server_error", "message": "x"}
    if wire == "openai":
        told = {"input_tokens": 10, "output_tokens": 5}
        whole: Any = {"id": "r", "status": "failed", "error": error, "output": [], "usage": told}
        events = [{"type": "response.created", "response": {"id": "r"}}, {"type": "response.failed", "response": whole}]
    else:
        told = {"prompt_tokens": 10, "completion_tokens": 5}
        whole = {"id": "r", "choices": [{"index": 0, "message": {}, "error": error}], "usage": told}
        events = [{**whole, "choices": [{"index": 0, "delta": {}, "error": error}]}]
    body = b"".join(map(unnamed, events)) if stream else json.dumps(whole).encode()
    kind = "text/event-stream" if stream else "application/json"
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=body, headers={"content-type": kind}))
    provider = provider_of(wire, transport=transport)
    request = ModelRequest(f"{wire}/{MODEL[wire]}", "", Transcript([GO]))
    with pytest.raises(ModelError) as caught:
        [delta async for delta in provider.stream(request)] if stream else await provider.complete(request)
    await provider.close()
    assert (10, 5) == (caught.value.usage.input_tokens, caught.value.usage.output_tokens)


@pytest.mark.anyio
@pytest.mark.spec("reliability:MP60")
async def test_each_attempt_with_an_unchanged_request_may_be_retried_once():
    bad = httpx2.Response(400, json={"error": {"message": "Failed to call a function", "code": "tool_use_failed"}})
    good = httpx2.Response(200, json={"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
    answers = [bad, bad, good, bad, bad, bad]
    provider = provider_of("groq", transport=httpx2.MockTransport(lambda _: copy.copy(answers.pop(0))))
    request = ModelRequest("groq/m", "", Transcript([GO]))

    async def may_be_retried():
        try:
            await provider.complete(request)
        except ModelError as error:
            return error.retryable

    assert [True, True] == await asyncio.gather(may_be_retried(), may_be_retried())
    assert [None, True, False, False] == [await may_be_retried() for _ in range(4)]
    await provider.close()


@pytest.mark.spec("reliability:MP60", "ecosystem:EC98")
def test_after_a_refused_signature_no_part_goes_back_with_one():
    parts = [
        {"text": "I look.", "thoughtSignature": SIGNATURE},
        {"executableCode": {"language": "PYTHON", "code": "1"}, "thoughtSignature": "zz=="},
    ]
    reply = decode_google(google_chunk(parts, "STOP"), made("google"), MODEL["google"], None)
    request = ModelRequest(f"google/{MODEL['google']}", "", Transcript([GO, AssistantMessage(reply.content), ON]))

    for after, signatures in (("", [SIGNATURE, "zz=="]), (INVALID_SIGNATURE, [None, None])):
        content = GoogleProvider("k")._encode(request, stream=False, previous_failure=after).content
        sent_back = json.loads(content)["contents"][1]["parts"]
        assert signatures == [part.get("thoughtSignature") for part in sent_back]
        assert {"language": "PYTHON", "code": "1"} == sent_back[1]["executableCode"]


@pytest.mark.spec("ecosystem:EC74", "ecosystem:EC91")
def test_signed_stream_part_is_not_merged_with_neighbours():
    it = reader("google")
    for part in ({"text": "a"}, {"text": "b"}, {"text": "c", "thoughtSignature": "s1"}, {"text": "d"}, {"text": "", "thoughtSignature": "s2"}):  # fmt: skip
        it.feed(b"data: %s\r\n\r\n" % json.dumps(google_chunk([part])).encode())
    it.feed(b"data: %s\r\n\r\n" % json.dumps(google_chunk([], "STOP")).encode())
    found = [(p.text, (p.provider_data or {}).get("signature")) for p in it.finish().content]
    assert found == [("ab", None), ("c", "s1"), ("d", None), ("", "s2")]


@pytest.mark.spec("ecosystem:EC74", "reliability:MP20")
def test_gemini_text_after_the_first_finish_reason_is_kept():
    it = reader("google")
    for text, reason in (("", "STOP"), ("a", "STOP"), ("b", None), ("c", "STOP")):
        it.feed(unnamed(google_chunk([{"text": text}] if text else [], reason)))
    trailer = {"candidates": [{"finishReason": None}], "usageMetadata": {"promptTokenCount": 3}}
    it.feed(unnamed(trailer))
    reply = it.finish()
    assert ("abc", "STOP", Usage(3, 0)) == (reply.text, reply.raw_stop_reason, reply.usage)


@pytest.mark.spec("requirements:G10", "reliability:MP60", "ecosystem:EC91")
@pytest.mark.parametrize(
    ("model", "signed"),
    [
        ("gemini-3-pro", True),
        ("gemini-flash-latest", True),
        ("gemini-2.5-pro", False),
    ],
)
def test_foreign_calls_to_gemini_3_carry_the_dummy_signature(model, signed, monkeypatch):
    assert (parse_generation(model) >= 3) == signed
    history = [GO, AssistantMessage([call(1), call(2, made_by="anthropic")]), result(1), result(2)]
    monkeypatch.setitem(MODEL, "google", model)
    parts = sent("google", *history)[1]["parts"]
    assert [part.get("thoughtSignature") for part in parts] == [DUMMY_SIGNATURE if signed else None, None]
    assert base64.b64decode(DUMMY_SIGNATURE) == b"skip_thought_signature_validator"
    assert all("id" not in part["functionCall"] for part in parts)


@pytest.mark.spec("ecosystem:EC82", "ecosystem:EC86", "reliability:TL09", "requirements:B14", "requirements:G24")
def test_gemini_media_go_inside_results_or_after_for_old_models(monkeypatch):
    media = [ImagePart("https://x/i.png"), ImagePart(data=PNG), DocumentPart(data=b"%PDF")]
    encoded = [
        {"fileData": {"mimeType": "image/png", "fileUri": "https://x/i.png"}},
        {"inlineData": {"mimeType": "image/png", "data": PICTURE}},
        {"inlineData": {"mimeType": "application/pdf", "data": PDF}},
    ]
    assert sent("google", UserMessage(media))[0]["parts"] == encoded
    history = [
        GO,
        AssistantMessage([call(1), call(2)]),
        result(1, *media),
        result(2, JsonPart({"n": 1}), status="error"),
        ON,
    ]
    answers = sent("google", *history)[2]["parts"]
    assert answers == [
        {"functionResponse": {"name": "look", "response": {"output": ""}, "parts": encoded}},
        {"functionResponse": {"name": "look", "response": {"error": {"n": 1}}}},
        {"text": "on"},
    ]
    monkeypatch.setitem(MODEL, "google", "gemini-2.5-flash")
    old = sent("google", *history)[2]["parts"]
    assert [next(iter(part)) for part in old] == ["functionResponse", "functionResponse", "text", "fileData", "inlineData", "inlineData", "text"]  # fmt: skip
    with pytest.raises(ModelError, match="DocumentPart"):
        sent("google", UserMessage([DocumentPart(data=b"x", mime_type="application/msword")]))


@pytest.mark.spec("ecosystem:EC97", "reliability:MP54")
@pytest.mark.parametrize(
    ("raw", "stop"),
    [
        ("STOP", "end_turn"),
        ("MAX_TOKENS", "max_tokens"),
        ("CONTINUATION", "max_tokens"),
        *[(word, "refusal") for word in ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "IMAGE_SAFETY", "MODEL_ARMOR", "ESCALATION")],
        ("TOO_MANY_TOOL_CALLS", "max_tokens"),
        ("PUP_LIMITED_DISABLED", "error"),
        ("FROM_THE_FUTURE", "end_turn"),
    ],
)  # fmt: skip
def test_finish_reasons_of_gemini_map_onto_ours(raw, stop):
    data = {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": raw}]}
    reply = decode_google(data, made("google"), "m", None)
    assert (reply.stop_reason, reply.raw_stop_reason) == (stop, raw)


@pytest.mark.spec("ecosystem:EC76", "reliability:MP61", "providers:PV81")
@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (None, None),
        ({}, None),
        ({"promptTokenCount": 10, "candidatesTokenCount": 4}, Usage(10, 4)),
        (
            {
                "promptTokenCount": 10,
                "candidatesTokenCount": 4,
                "thoughtsTokenCount": 5,
                "cachedContentTokenCount": 3,
                "toolUsePromptTokenCount": 2,
            },
            Usage(9, 4, 3, 0, 5),
        ),
        (
            {"promptTokenCount": 2, "cachedContentTokenCount": 9, "candidatesTokenCount": -1},
            Usage(0, 0, 2, at_least=True),
        ),
    ],
)
def test_gemini_usage_falls_into_disjoint_buckets(raw, usage):
    assert google_usage(raw) == usage


@pytest.mark.spec("ecosystem:EC74", "reliability:MP15", "reliability:MP20")
def test_missing_candidate_is_an_error_and_missing_finish_is_truncation():
    with pytest.raises(ModelError) as caught:
        decode_google({"candidates": []}, made("google"), "m", None)
    assert (caught.value.kind, caught.value.retryable) == ("protocol", True)
    it = reader("google")
    it.feed(b"data: %s\n\n" % json.dumps(google_chunk([{"functionCall": {"name": "rm", "args": {}}}])).encode())
    with pytest.raises(TruncatedReply):
        it.finish()


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:G10", "providers:PV62")
@pytest.mark.parametrize("name", ["openai", "openai_chat"])
def test_text_cut_by_citations_is_joined_into_sentences(name):
    parts = [TextPart("Water boils "), TextPart("at 100 °C"), CitationPart("https://a", "A"), TextPart(".")]
    thought = ThinkingPart("hm", provider_data={"provider": "anthropic", "model": "claude-sonnet-4-5"})
    said = sent(name, GO, AssistantMessage([*parts, thought, TextPart("And so.")]), ON)[1]
    assert "Water boils at 100 °C.\n\nAnd so." == said["content"]

    items = [TextPart(text, provider_data={"provider": "xai", "id": text}) for text in ("I look.", "Here.")]
    assert "I look.\n\nHere." == sent(name, GO, AssistantMessage(items), ON)[1]["content"]


# --- a reply that is longer than one request gives ------------------------------------------------------------------


def long_answer(*texts: str, token: str = "", **more: Any) -> dict[str, Any]:
    end = {"finishReason": "CONTINUATION", "continuationToken": token} if token else {"finishReason": "STOP"}
    content = {"role": "model", "parts": [{"text": text} for text in texts]}
    return {"candidates": [{"content": content, **end, **more}], "usageMetadata": {"promptTokenCount": 3}}


@pytest.mark.spec("providers:PV114", "reliability:MP56")
@pytest.mark.parametrize("watched", [True, False])
async def test_long_gemini_reply_continues_with_its_token(watched):
    """It used to count as cut by the output limit, and the model was asked in words to go on."""
    asked: list[dict[str, Any]] = []
    answers = [long_answer("One, ", token="dDE="), long_answer("two, ", token="dDI="), long_answer("three.")]

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(json.loads(request.content))
        answer = answers[len(asked) - 1] if len(asked) <= len(answers) else long_answer("Yes.")
        if "alt=sse" in str(request.url):
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=unnamed(answer))
        return httpx2.Response(200, json=answer)

    provider = GoogleProvider("k", transport=httpx2.MockTransport(handler))
    agent = AgentDefinition("counter", model="google/gemini-4-argon")
    async with Engine([agent], models=Models({"google": provider})) as engine:
        run = engine.start("counter", "Count.")
        said = (
            [told.text async for told in run.events() if isinstance(told, TextDelta)]
            if watched
            else ["One, two, three."]
        )
        result = await run.result()
        again = await engine.run("counter", "Sure?", previous=result.state)

    first, second, third, last = asked
    assert "One, two, three." == result.text == "".join(said)
    assert (StopReason.END_TURN, 9) == (result.stop_reason, result.spending.usage.input_tokens)
    assert {**first, "continuationToken": "dDE="} == second
    assert {**first, "continuationToken": "dDI="} == third
    assert "Yes." == again.text
    assert "continuationToken" not in json.dumps(last)
    assert [{"text": "One, "}, {"text": "two, "}, {"text": "three."}] == last["contents"][1]["parts"]


@pytest.mark.spec("providers:PV114")
def test_cut_gemini_call_is_not_continued():
    data = long_answer(token="dDE=")
    data["candidates"][0]["content"]["parts"] = [{"functionCall": {"name": "look", "willContinue": True}}]

    assert decode_google(data, made("google"), "m", None).stop_reason is StopReason.MAX_TOKENS


def test_steered_response_ends_the_turn_with_its_text():
    data = {"status": "incomplete", "incomplete_details": {"reason": "steered"}, "output": []}
    reply = decode_responses(data, made("openai"), "m", None)

    assert (StopReason.END_TURN, "steered") == (reply.stop_reason, reply.raw_stop_reason)


@pytest.mark.spec("reliability:MP54", "ecosystem:EC74")
def test_a_blocked_prompt_without_any_candidate_is_a_refusal():
    body = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 3}}
    it = reader("google")
    it.feed(unnamed(body))
    replies = [decode_google(body, made("google"), "m", None), it.finish()]

    assert [((), StopReason.REFUSAL, "PROHIBITED_CONTENT", 3)] * 2 == [
        (reply.content, reply.stop_reason, reply.raw_stop_reason, reply.usage.input_tokens) for reply in replies
    ]
