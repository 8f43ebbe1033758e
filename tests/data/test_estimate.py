"""
How large histories are, and histories inside the input of a call.
"""

from __future__ import annotations

import attrs
import pytest

from stepengine.data.codec import plain
from stepengine.data.estimate import (
    Measured,
    estimate_tokens,
    message_tokens,
    tool_tokens,
)
from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantMessage,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    OpaquePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
)
from stepengine.data.models import ModelRequest
from stepengine.data.state import AgentState, estimate_next_prompt_tokens
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.yields import ToolCall
from stepengine.runtime.sizes import estimate_request_tokens

SENT = Transcript([UserMessage("hello there")])
PNG = ImagePart(data=b"\x89PNG")


@pytest.mark.spec("requirements:I1")
@pytest.mark.parametrize(
    ("value", "tokens"), [("", 0), ("abcd", 1), ("abcde", 2), (["abcd"], 2), ({"a": [1, 2]}, 3), (None, 1)]
)
def test_a_value_has_a_quarter_of_its_characters_rounded_up(value: object, tokens: int) -> None:
    assert tokens == estimate_tokens(value)


@pytest.mark.spec("requirements:I1")
@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        (UserMessage(""), 8),
        (UserMessage("abcde"), 10),
        (UserMessage(("abc", PNG, "de")), 1_610),
        (UserMessage((DocumentPart(data=b"x", mime_type="text/plain"), PNG)), 3_208),
        (AssistantMessage((ToolCallPart("c1", "look", {"a": 1}),)), 11),
        (AssistantMessage((ToolCallPart("c1", "look", {}, raw_input="12345"),)), 11),
        (AssistantMessage((ThinkingPart("abcd"), TextPart("abcd"))), 10),
        (AssistantMessage((OpaquePart("p", {"a": 1}),)), 10),
        (ToolMessage("c1", "look", (JsonPart({"a": 1}),)), 10),
    ],
)
def test_message_tokens_count_texts_calls_media_and_overhead(message: Message, tokens: int) -> None:
    assert tokens == message_tokens(message)


@pytest.mark.spec("requirements:I1")
def test_state_and_its_request_have_equal_estimates() -> None:
    tools = [ToolSpec(f"tool_{k}", "Do it." * k, {"type": "object", "properties": {"a" * k: {}}}) for k in range(9)]
    state = AgentState(system_prompt="s" * 41, message_history=SENT, tool_definitions={t.name: t for t in tools})
    request = ModelRequest("m", state.system_prompt, state.view, tuple(tools))

    assert state.context_tokens == estimate_request_tokens(request)
    longer = attrs.evolve(request, tail=(UserMessage("y" * 40),))
    assert estimate_request_tokens(longer) == estimate_request_tokens(request) + 18
    assert sum([-(-len(t.name + t.description + compact(t.input_schema)) // 4) for t in tools]) == tool_tokens(tools)


@pytest.mark.spec("requirements:X45")
def test_reported_size_applies_while_the_sent_prefix_is_kept() -> None:
    state = AgentState(system_prompt="s", message_history=SENT)
    known = Measured("s", SENT, 5_000)
    longer = attrs.evolve(state, view=SENT.append(UserMessage("y" * 40)))
    others = [attrs.evolve(state, system_prompt="other"), attrs.evolve(state, view=Transcript([UserMessage("z")]))]

    assert 5_000 == estimate_next_prompt_tokens(state, known)
    assert 5_000 + message_tokens(longer.view[-1]) == estimate_next_prompt_tokens(longer, known)
    assert [other.context_tokens for other in others] == [estimate_next_prompt_tokens(other, known) for other in others]
    assert longer.context_tokens == estimate_next_prompt_tokens(longer, None)


@pytest.mark.spec("generator-contract:T26")
@pytest.mark.parametrize("history", [SENT, list(SENT), [*SENT, {"role": "assistant", "content": "hi"}]])
def test_message_history_in_a_call_input_is_stored_as_dicts(history: object) -> None:
    stored = [plain(m) if isinstance(m, UserMessage) else m for m in history]  # type: ignore[attr-defined]

    assert {"messages": stored} == ToolCall("set_messages", {"messages": history}).input


def test_text_named_messages_in_an_input_is_unchanged() -> None:
    assert {"messages": "hi"} == ToolCall("other", {"messages": "hi"}).input
