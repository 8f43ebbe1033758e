"""Thinking that a provider does not know again, and a call that it could not read itself: worth one more try, and no third."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine.data.messages import AssistantMessage, TextPart, ThinkingPart, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from tests.faults.scripts import WIRES, Wire
from tests.faults.server import fault_server, json_answer

pytestmark = pytest.mark.parametrize("wire", WIRES, ids=str)


async def twice(wire: Wire, *answers: Any, request: ModelRequest | None = None) -> list[tuple[str, bool]]:
    """Ask the same twice, as a retry coordinator does."""
    found = []
    request = request or wire.request()
    async with fault_server(*answers) as server:
        provider = wire.make(server.url)
        for _ in range(2):
            with pytest.raises(ModelError) as caught:
                await provider.complete(request)
            found.append((caught.value.kind, caught.value.retryable))
        await provider.close()
    return found


def thought(wire: Wire) -> ThinkingPart:
    model = wire.model.partition("/")[2]
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "SIGNATURE"}
    more = {"signature": "SIGNATURE", "item": item, "reasoning_details": [{"type": "x", "data": "SIGNATURE"}]}
    return ThinkingPart("hm", provider_data={"provider": wire.name, "model": model, **more})


@pytest.mark.spec("reliability:MP60", "ecosystem:EC98", "ecosystem:EC99")
@pytest.mark.parametrize(
    "words",
    [
        "messages.1.content.0: Invalid `signature` in `thinking` block",
        "thinking blocks are bound to a different conversation",
        "The encrypted content could not be verified: encrypted_content",
        "Function call is missing a thought_signature",
    ],
)
async def test_the_retry_after_a_refused_signature_omits_the_thinking(wire, words):
    own = {"provider": wire.name, "model": wire.model.partition("/")[2], "id": "msg_1"}
    said = AssistantMessage([thought(wire), TextPart("answer", provider_data=own)])
    history = Transcript([UserMessage("go"), said, UserMessage("on")])
    refused = json_answer(wire.error("invalid_request_error", words), 400)
    async with fault_server(refused, json_answer(wire.reply("fine", [], "end_turn"))) as server:
        provider = wire.make(server.url)
        request = ModelRequest(wire.model, messages=history)
        with pytest.raises(ModelError) as caught:
            await provider.complete(request)
        assert (caught.value.kind, caught.value.retryable) == ("invalid_signature", True)
        assert (await provider.complete(request)).text == "fine"
        await provider.close()
    (_, first), (_, second) = server.requests
    assert b"SIGNATURE" in first
    assert b"SIGNATURE" not in second
    assert b"answer" in second
    ask = ModelRequest(wire.model, messages=history)
    assert await twice(wire, refused, request=ask) == [("invalid_signature", True), ("invalid_signature", False)]


@pytest.mark.spec("ecosystem:EC97", "ecosystem:EC109")
async def test_a_malformed_call_of_the_provider_is_retried_once(wire):
    if wire.name == "google":
        reply = wire.reply("", [], "end_turn").replace(b'"STOP"', b'"MALFORMED_FUNCTION_CALL"')
        malformed = json_answer(reply)
    else:
        malformed = json_answer(wire.error("tool_use_failed", "Failed to call a function."), 400)
    assert await twice(wire, malformed) == [("malformed_call", True), ("malformed_call", False)]
