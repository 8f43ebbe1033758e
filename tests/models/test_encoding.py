"""How our messages look on the two wires: by example, and for any valid transcript."""

from __future__ import annotations

import json
import re

import attrs
import pytest

from stepengine.data.messages import (
    AssistantMessage,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.tools import FIND_TOOLS, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models.anthropic.decode import decode as decode_anthropic
from tests.cases import case
from tests.models.wires import FOUR, HISTORY, MANUAL, MODEL, PNG, TOOL, body, call, made, provider_of, result, sent

# --- both wires -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC92", "ecosystem:EC95")
def test_unset_settings_are_not_sent():
    assert set(body("anthropic", UserMessage("hi"))) == {"model", "max_tokens", "messages", "cache_control"}
    assert set(body("openai_chat", UserMessage("hi"))) == {"model", "messages"}
    assert set(body("openai", UserMessage("hi"))) == {"model", "store", "input"}
    assert set(body("google", UserMessage("hi"))) == {"contents"}


@pytest.mark.spec("requirements:A15", "ecosystem:EC84", "ecosystem:EC85")
def test_request_tool_choice_is_translated_and_overrides_settings():
    named = [
        ("anthropic", "tool_choice", {"type": "tool", "name": "look"}),
        ("openai_chat", "tool_choice", {"type": "function", "function": {"name": "look"}}),
        ("openai", "tool_choice", {"type": "function", "name": "look"}),
        ("google", "toolConfig", {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}),
    ]
    ways = [
        {"tool_choice": "look"},
        {"settings": ModelSettings(tool_choice="look")},
        {"tool_choice": "look", "settings": ModelSettings(tool_choice="none")},
    ]
    for name, member, choice in named:
        for fields in ways:
            with case(name, fields):
                assert body(name, UserMessage("hi"), tools=(TOOL,), **fields)[member] == choice
    assert "tool_choice" not in body("openai_chat", UserMessage("hi"), tool_choice="look")
    assert "toolConfig" not in body("google", UserMessage("hi"), tool_choice="look")


SHOWN = {"type": "adaptive", "display": "summarized"}


def google_thinking(**more):
    return {"generationConfig": {"thinkingConfig": {"includeThoughts": True, **more}}}


@pytest.mark.spec("requirements:A16", "providers:PV6", "providers:PV9", "providers:PV13", "providers:PV15")
@pytest.mark.parametrize(
    ("name", "model", "thinking", "members"),
    [
        (
            "anthropic",
            "claude-opus-4-6",
            Thinking("extended", 2_000),
            {"thinking": {"type": "enabled", "budget_tokens": 2_000}},
        ),
        (
            "anthropic",
            "anthropic.claude-opus-4-8-v1:0",
            Thinking(tokens=2_000),
            {"thinking": SHOWN, "output_config": {"effort": "low"}},
        ),
        ("openai", "gpt-5.1-codex", Thinking("none"), {"reasoning": {"effort": "low"}}),
        ("openai_chat", "o3", Thinking("extended", 1_500), {"reasoning_effort": "low"}),
        ("openai", "gpt-5", Thinking("enabled"), {"reasoning": {"effort": "medium", "summary": "auto"}}),
        ("openai", "gpt-5", Thinking("extended"), {"reasoning": {"effort": "high", "summary": "auto"}}),
        ("openai", "gpt-5", Thinking(tokens=1_500), {"reasoning": {"effort": "low", "summary": "auto"}}),
        ("google", "gemini-3-pro", Thinking("extended"), google_thinking(thinkingBudget=10_000)),
    ],
)
def test_thinking_is_asked_for_in_each_provider_s_way(name, model, thinking, members):
    request = ModelRequest(
        f"{name}/{model}", messages=Transcript([UserMessage("hi")]), settings=ModelSettings(thinking=thinking)
    )
    encoded = json.loads(provider_of(name)._encode(request, stream=False).content)
    assert {
        key: value
        for key, value in encoded.items()
        if key in ("thinking", "output_config", "reasoning", "reasoning_effort", "generationConfig")
    } == members
    if "budget_tokens" in encoded.get("thinking", {}):
        assert encoded["max_tokens"] > encoded["thinking"]["budget_tokens"]


@pytest.mark.spec("ecosystem:EC85")
def test_a_forced_tool_switches_thinking_off_for_that_request():
    settings = ModelSettings(thinking=Thinking("extended"))
    assert "thinking" not in body("anthropic", UserMessage("hi"), tools=(TOOL,), tool_choice="look", settings=settings)


@pytest.mark.spec("ecosystem:EC82")
def test_a_failed_call_is_marked_in_its_result():
    history = [UserMessage("go"), AssistantMessage([call(1, made_by="anthropic")]), result(1, status="error")]
    failed = {"type": "tool_result", "tool_use_id": "their_1", "content": "saw 1", "is_error": True}
    assert sent("anthropic", *history)[2]["content"] == [failed]
    assert sent("openai_chat", *history)[2] == {
        "role": "tool",
        "tool_call_id": "call_c1",
        "content": "Error: saw 1",
    }


@pytest.mark.spec("reliability:MP40", "reliability:MP48")
@pytest.mark.parametrize("name", FOUR)
def test_invalid_call_names_and_arguments_are_sent_in_valid_form(name):
    broken = ToolCallPart("c.1/ü", "7 no such.tool\u200b", raw_input="{nope", input_error="expected a key")
    text = json.dumps(
        sent(name, UserMessage("go"), AssistantMessage([broken]), ToolMessage("c.1/ü", "x", "bad", "error"))
    )
    assert ('"_7_no_such_tool_"' if name == "google" else '"7_no_such_tool_"') in text
    assert "unreadable_arguments" in text
    assert "{nope" in text
    ids = set(re.findall(r'"(?:id|call_id|tool_use_id|tool_call_id)": "([^"]+)"', text))
    assert len(ids) == (0 if name == "google" else 1)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", one) for one in ids)


@pytest.mark.spec("ecosystem:EC90", "ecosystem:EC99", "reliability:MP59", "reliability:MP60")
def test_thinking_and_opaque_parts_return_only_to_their_own_model():
    signed = {"provider": "anthropic", "model": "claude-sonnet-4-5", "signature": "s1"}
    server = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"q": "x"}}
    answered = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    parts = [
        ThinkingPart("hm", provider_data=signed),
        ThinkingPart("", provider_data={**signed, "redacted": "zzz"}),
        ThinkingPart("other", provider_data={**signed, "model": "claude-opus-5"}),
        ThinkingPart("nobody's"),
        ThinkingPart("cut short", provider_data={**signed, "signature": ""}),
        OpaquePart("anthropic", server),
        OpaquePart("anthropic", answered),
        OpaquePart("openai", {"type": "x"}),
        TextPart("answer", provider_data={"provider": "anthropic", "citations": [{"type": "c"}]}),
    ]
    history = [UserMessage("go"), AssistantMessage(parts), UserMessage("on")]
    assert sent("anthropic", *history)[1]["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "redacted_thinking", "data": "zzz"},
        server,
        answered,
        {"type": "text", "text": "answer", "citations": [{"type": "c"}]},
    ]
    assert sent("openrouter", *history)[1] == {"role": "assistant", "content": "answer"}
    details = [{"type": "reasoning.encrypted", "data": "e"}]
    data = {"provider": "openrouter", "model": "vendor/model", "member": "reasoning", "reasoning_details": details}
    own = AssistantMessage([ThinkingPart("hm", provider_data=data), TextPart("answer")])
    expected = {"role": "assistant", "content": "answer", "reasoning": "hm", "reasoning_details": details}
    assert sent("openrouter", UserMessage("go"), own, UserMessage("on"))[1] == expected
    assert sent("ollama", UserMessage("go"), own, UserMessage("on"))[1] == {"role": "assistant", "content": "answer"}


@pytest.mark.spec("providers:PV68")
@pytest.mark.parametrize("summary", ["What was before.", None])
def test_anthropic_compaction_is_sent_back_unchanged_and_continued(summary):
    blocks = [{"type": "compaction", "content": summary}, {"type": "text", "text": "I go on."}]
    message = {"content": blocks, "stop_reason": "compaction"}
    reply = decode_anthropic(message, made("anthropic"), MODEL["anthropic"], None)
    assert reply.stop_reason == "pause"
    (_, longer) = sent("anthropic", UserMessage("go"), tail=(AssistantMessage(reply.content),))
    assert longer == {"role": "assistant", "content": blocks}


def test_refusal_is_sent_back_in_the_wires_own_form():
    history = [UserMessage("go"), AssistantMessage([RefusalPart("No.")]), UserMessage("please")]
    assert sent("openai_chat", *history)[1] == {"role": "assistant", "content": None, "refusal": "No."}
    assert sent("ollama", *history)[1] == {"role": "assistant", "content": "No."}
    assert sent("anthropic", *history)[1]["content"] == [{"type": "text", "text": "No."}]


# --- media ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC82")
def test_result_media_stay_in_the_result_or_follow_the_batch():
    history = [
        UserMessage("go"),
        AssistantMessage([call(1), call(2)]),
        result(1, TextPart("a picture"), ImagePart("https://x/i.png")),
        result(2, JsonPart({"n": 1})),
        UserMessage("well?"),
    ]
    image = {"type": "image", "source": {"type": "url", "url": "https://x/i.png"}}
    blocks = sent("anthropic", *history)[2]["content"]
    assert blocks[0]["content"] == [{"type": "text", "text": "a picture"}, image]
    assert blocks[1]["content"] == '{"n":1}'
    messages = sent("openai_chat", *history)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert messages[2]["content"].startswith("a picture\n")
    assert [piece["type"] for piece in messages[4]["content"]] == ["text", "image_url", "text"]
    assert messages[4]["content"][-1]["text"] == "well?"


# --- odd histories --------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC100")
@pytest.mark.parametrize("name", FOUR)
def test_history_ending_with_the_assistant_gets_a_nudge_when_encoded(name):
    history = Transcript([UserMessage("go"), AssistantMessage("I begin.")])
    request = ModelRequest(f"{name}/{MODEL[name]}", messages=history)
    messages = json.loads(provider_of(name)._encode(request, stream=False).content)[HISTORY.get(name, "messages")]
    ours = "model" if name == "google" else "assistant"
    assert [m["role"] for m in messages] == ["user", ours, "user"]
    assert "Continue." in json.dumps(messages[-1])
    assert len(history) == 2
    # Later the same place holds the same words, so that what was sent once stays a prefix.
    longer = sent(name, *history, AssistantMessage("I go on."), UserMessage("fine"))
    assert longer[:3] == messages
    # A reply that the provider paused is handed back as it is, to be gone on with.
    paused = sent(name, UserMessage("go"), tail=(AssistantMessage("half a"),))
    assert [m["role"] for m in paused] == ["user", ours]
    assert "Continue." in json.dumps(sent(name))


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.spec("providers:PV37")
def test_blank_user_text_is_not_sent(name):
    blank, picture = UserMessage(" \n\t"), ImagePart(data=PNG)
    said = [UserMessage("a"), UserMessage([picture, "b"])]

    assert sent(name, *said) == sent(name, blank, said[0], blank, UserMessage([" ", picture, "", "b", "\n"]))
    assert sent(name) == sent(name, blank, tail=(blank,))


@pytest.mark.parametrize("kind", ["thinking", "redacted"])
@pytest.mark.spec("generator-contract:L15")
def test_anthropic_is_sent_no_message_that_ends_with_a_thought(kind):
    data = {"provider": "anthropic", "model": "claude-sonnet-4-5"}
    data |= {"signature": "s"} if kind == "thinking" else {"redacted": "zz"}
    thought = ThinkingPart("hm", provider_data=data)
    alone = sent("anthropic", UserMessage("go"), AssistantMessage([thought, thought]), UserMessage("b"))
    assert [m["role"] for m in alone] == ["user"]
    _, said, _ = sent("anthropic", UserMessage("go"), AssistantMessage([thought, "x", thought]), UserMessage("b"))
    assert [block["type"] for block in said["content"]] == [
        "thinking" if kind == "thinking" else "redacted_thinking",
        "text",
    ]
    _, called, _ = sent("anthropic", UserMessage("go"), AssistantMessage([thought, call(1)]), result(1))
    assert [block["type"] for block in called["content"]][1:] == ["tool_use"]


# --- foreign calls and thinking -------------------------------------------------------------------------------------

SIGNED = ThinkingPart("hm", provider_data={"provider": "anthropic", "model": "claude-sonnet-4-5", "signature": "s"})


@pytest.mark.spec("requirements:G10", "reliability:MP60")
def test_unsigned_calls_become_text_when_thinking_has_a_budget():
    gathered = [UserMessage("go"), AssistantMessage([call(1)]), result(1, "a file", ImagePart("https://x/i.png"))]
    messages = sent("anthropic", *gathered, settings=MANUAL)
    assert [m["role"] for m in messages] == ["user"]
    assert messages[0]["content"] == [
        {"type": "text", "text": "go"},
        {"type": "text", "text": 'The tool look was called with {"at":"1"}. Its result:'},
        {"type": "text", "text": "a file"},
        {"type": "image", "source": {"type": "url", "url": "https://x/i.png"}},
    ]
    # The model's own turn keeps its calls, and what was sent before stays as it was.
    own = [*gathered, AssistantMessage([SIGNED, call(2, made_by="anthropic")]), result(2)]
    longer = sent("anthropic", *own, settings=MANUAL)
    assert longer[0] == messages[0]
    assert [block["type"] for block in longer[1]["content"]] == ["thinking", "tool_use"]
    assert longer[2]["content"][0] == {"type": "tool_result", "tool_use_id": "their_2", "content": "saw 2"}
    # Thinking that the model doses itself makes no such demand.
    adaptive = body("anthropic", *gathered)["messages"]
    assert [block["type"] for block in adaptive[1]["content"]] == ["tool_use"]


@pytest.mark.spec("requirements:G10", "providers:PV63")
def test_tool_references_outside_results_are_sent_as_text():
    hidden = attrs.evolve(TOOL, defer_loading=True)
    found = ToolMessage("c1", FIND_TOOLS, [ToolReferencePart("look")])
    finding = ToolSpec(FIND_TOOLS, "Find tools.", {"type": "object", "properties": {}})
    gathered = [UserMessage("go"), AssistantMessage([call(1, FIND_TOOLS)]), found]
    for settings, kinds in ((MANUAL, {"text"}), (ModelSettings(), {"text", "tool_use", "tool_result"})):
        messages = sent("anthropic", *gathered, tools=(finding, hidden), settings=settings)
        assert kinds == {block["type"] for message in messages for block in message["content"]}
    assert "tool_reference" in json.dumps(messages)


@pytest.mark.spec("providers:PV37")
def test_anthropic_begins_with_the_user_and_takes_no_blank_text():
    messages = sent("anthropic", AssistantMessage([TextPart("  \n"), TextPart("hello")]), UserMessage("hi"))
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == [{"type": "text", "text": "hello"}]
    (_, _, answer) = sent(
        "anthropic", UserMessage("go"), AssistantMessage([call(1, made_by="anthropic")]), result(1, "")
    )
    assert "content" not in answer["content"][0]
