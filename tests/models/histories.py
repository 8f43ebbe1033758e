"""Strategies for transcripts that hold anything that a transcript may hold, made by anybody."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelSettings, Thinking
from tests.models.wires import FOUR, MANUAL, MODEL

SOMEBODY = "somebody"
OPAQUE = {
    "anthropic": {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    "openai": {"type": "compaction", "id": "cmp_1", "encrypted_content": "e"},
    "openai_chat": {"type": "refusal", "refusal": "No."},
    "google": {"executableCode": {"language": "PYTHON", "code": "1 + 1"}},
    SOMEBODY: {"type": "strange"},
}
PICTURE = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "output_format": "png"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"}

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
makers = st.sampled_from([*FOUR, SOMEBODY])


def mark_of(name: str) -> dict[str, Any]:
    """What each maker leaves on the parts that it makes; the ids are the same again and again."""
    marks = {
        "anthropic": {"signature": "c2ln"},
        "openai": {"item_id": "fc_1"},
        "openai_chat": {"member": "reasoning_content"},
        "google": {"signature": "c2ln"},
    }
    return {"provider": name, "model": MODEL.get(name, "m"), "id": "same", **marks.get(name, {})}


marks = makers.map(mark_of)
owners = marks | st.none()
texts = st.builds(TextPart, words, provider_data=owners)
thoughts = st.builds(ThinkingPart, words, provider_data=marks.map(lambda mark: {**mark, "item": REASONING}) | st.none())
images = st.builds(ImagePart, st.just("https://x/i.png")) | st.just(ImagePart(data=b"\x89PNG"))
documents = st.builds(DocumentPart, data=st.binary(max_size=4), mime_type=st.just("text/plain"), name=words)
opaques = makers.map(lambda maker: OpaquePart(maker, OPAQUE[maker]))
made = st.builds(
    ImagePart, data=st.just(b"\x89PNG"), provider_data=marks.map(lambda mark: {**mark, "item": PICTURE}) | st.none()
)
citations = st.builds(CitationPart, words, words, quote=words, said=words, source=words)
talk = texts | thoughts | st.builds(RefusalPart, words, provider_data=owners) | opaques | citations | made
inputs = st.dictionaries(words, words | st.integers(-(2**60), 2**60), max_size=2)
contents = st.lists(
    texts | images | documents | st.builds(JsonPart, inputs) | st.just(ToolReferencePart("look")), max_size=3
)
users = st.builds(UserMessage, st.lists(texts | images | documents, max_size=3))


@st.composite
def steps(draw: st.DrawFn) -> list[Any]:
    parts: list[Any] = draw(st.lists(talk | st.just("call"), max_size=4))
    messages: list[Any] = []
    for index, part in enumerate(parts):
        if part == "call":
            call_id = f"c{draw(st.integers(0, 10**9))}_{draw(st.uuids())}"
            error = draw(st.none() | words)
            parts[index] = ToolCallPart(
                call_id, draw(words), draw(inputs), raw_input=error, input_error=error, provider_data=draw(owners)
            )
            status = draw(st.sampled_from(["ok", "error", "pending"]))
            messages.append(ToolMessage(call_id, "t", tuple(draw(contents)), status))
    return [AssistantMessage(tuple(parts)), *messages]


histories = st.lists(users.map(lambda message: [message]) | steps(), max_size=6).map(
    lambda groups: [message for group in groups for message in group]
)
settings = st.sampled_from([ModelSettings(), MANUAL, ModelSettings(thinking=Thinking("enabled"))])
