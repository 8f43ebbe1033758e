"""
The recorded provider traffic beside the repository, and how the codecs are asked about it.

The folder is not part of the repository: tests that need it are skipped when it is absent.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from stepengine.data.models import ModelDelta, ModelReply
from stepengine.models._failures import Call
from stepengine.models._http import ReplyReader
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.keys import Credentials
from stepengine.models.openai_chat.decode import ChatAccumulator
from stepengine.models.openai_chat.decode import decode as decode_chat

FOLDER = Path(__file__).parents[3] / "shared" / "recorded"
needs_recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason="the folder with recorded traffic is absent")

ENDPOINTS = {
    "anthropic": ("/v1/messages",),
    "openai-chat": ("/v1/chat/completions",),
    "openrouter": ("/api/v1/chat/completions",),
}
NAMES = {"anthropic": "anthropic", "openai-chat": "openai", "openrouter": "openrouter"}


@attrs.frozen
class Recording:
    """One recorded exchange with a generating endpoint."""

    name: str
    wire: str
    model: str
    stream: bool
    status: int
    tool_calls: int
    request: Any
    reply: bytes

    @property
    def call(self) -> Call:
        provider = NAMES[self.wire]
        return Call(provider=provider, model=f"{provider}/{self.model}", credentials=Credentials(None, "no key"))

    def reader(self) -> ReplyReader:
        kind = AnthropicAccumulator if self.wire == "anthropic" else ChatAccumulator
        return ReplyReader(kind(self.call, self.model, None), self.call)

    def decoded(self) -> ModelReply:
        decode = decode_anthropic if self.wire == "anthropic" else decode_chat
        return decode(json.loads(self.reply), self.call, self.model, None)

    def streamed(self, piece: int) -> tuple[list[ModelDelta], ModelReply]:
        reader, deltas = self.reader(), []
        for start in range(0, len(self.reply), piece):
            deltas += reader.feed(self.reply[start : start + piece])
        return deltas, reader.finish()


@functools.cache
def cassette(file: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((FOLDER / file).read_text(encoding="utf-8"), Loader=loader)["interactions"]


def body_of(message: dict[str, Any]) -> bytes:
    if "parsed_body" in message:
        return json.dumps(message["parsed_body"]).encode()
    body = message.get("body") or ""
    text = body["string"] if isinstance(body, dict) else body
    return text if isinstance(text, bytes) else text.encode()


@functools.cache
def recordings() -> tuple[Recording, ...]:
    """Every exchange of the index with an endpoint of these adapters, in file order."""
    if not FOLDER.is_dir():
        return ()
    found = []
    for line in (FOLDER / "index.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        wires = [i for i in entry["interactions"] if i["path"].split("?")[0] in ENDPOINTS.get(i["provider"], ())]
        if wires:
            found += [take(entry, number, i) for number, i in enumerate(entry["interactions"]) if i in wires]
    return tuple(found)


def take(entry: dict[str, Any], number: int, i: dict[str, Any]) -> Recording:
    exchange = cassette(entry["file"])[number]
    return Recording(
        f"{entry['file']}#{number}",
        i["provider"],
        i["model"],
        i["stream"],
        i["status"],
        i["tool_calls"],
        json.loads(body_of(exchange["request"])),
        body_of(exchange["response"]),
    )


def of(*, stream: bool | None = None, ok: bool = True) -> list[Any]:
    """Parameters for pytest: the recordings that stream or not, that succeeded or not."""
    chosen = [r for r in recordings() if (r.status < 400) == ok and (stream is None or r.stream == stream)]
    return [pytest.param(r, id=r.name) for r in chosen] or [
        pytest.param(None, marks=pytest.mark.skip(reason="no recordings"))
    ]
