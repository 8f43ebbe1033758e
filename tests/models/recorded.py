"""
The recorded provider traffic beside the repository, and how the codecs are asked about it.

The folder is not part of the repository: tests that need it are skipped when it is absent.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
import pytest
import yaml

from stepengine.data.models import ModelDelta, ModelReply
from stepengine.models._aws_events import AWSParser
from stepengine.models._failures import Call
from stepengine.models._reading import ReplyReader
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.bedrock_converse.decode import decode as decode_converse
from stepengine.models.bedrock_converse.stream import ConverseAccumulator
from stepengine.models.google.decode import GoogleAccumulator
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.keys import Credentials
from stepengine.models.openai.decode import ResponsesAccumulator
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import ChatAccumulator
from stepengine.models.openai_chat.decode import decode as decode_chat

FOLDER = Path(__file__).parents[3] / "shared" / "recorded"
needs_recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason="the folder with recorded traffic is absent")

ENDPOINTS = {
    "anthropic": r"/v1/messages",
    "openai-responses": r"/v1/responses",
    "openai-chat": r"/v1/chat/completions",
    "openrouter": r"/api/v1/chat/completions",
    "google-gla": r"/v1beta/models/.+:(?:stream)?[gG]enerateContent",
    "bedrock": r"/model/[^/]+/converse(?:-stream)?",
}
NAMES = {
    "anthropic": "anthropic",
    "openai-responses": "openai",
    "openai-chat": "openai_chat",
    "openrouter": "openrouter",
    "google-gla": "google",
    "bedrock": "bedrock_converse",
}
DECODERS = {
    "anthropic": decode_anthropic,
    "openai": decode_responses,
    "google": decode_google,
    "bedrock_converse": decode_converse,
}
ACCUMULATORS = {
    "anthropic": AnthropicAccumulator,
    "openai": ResponsesAccumulator,
    "google": GoogleAccumulator,
    "bedrock_converse": ConverseAccumulator,
}
MARKERS = {
    "anthropic": b"event: message_stop",
    "openai": b"event: response.completed",
    "google": b'"finishReason"',
    "bedrock_converse": b"messageStop",
}
"""Where the terminal event of a recorded stream begins; chat: the finish reason's event."""


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
        kind = ACCUMULATORS.get(NAMES[self.wire], ChatAccumulator)
        parser = AWSParser(self.call) if self.wire == "bedrock" else None
        return ReplyReader(kind(self.call, self.model, None), self.call, parser)

    def decoded(self) -> ModelReply:
        decode = DECODERS.get(NAMES[self.wire], decode_chat)
        return decode(json.loads(self.reply), self.call, self.model, None)

    @property
    def marker(self) -> bytes:
        return MARKERS.get(NAMES[self.wire], b'"finish_reason":"')

    @property
    def events(self) -> list[bytes]:
        """The events of a stream that precede its end."""
        if self.wire != "bedrock":
            ends = [self.reply.find(marker) for marker in (self.marker, self.marker.replace(b':"', b': "'))]
            end = min(place for place in ends if place >= 0)
            before = self.reply[:end].replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
            return [event + b"\n\n" for event in before]
        found, start = [], 0
        while self.marker not in (event := self.reply[start : start + struct.unpack_from(">I", self.reply, start)[0]]):
            found.append(event)
            start += len(event)
        return found

    def streamed(self, piece: int) -> tuple[list[ModelDelta], ModelReply]:
        reader, deltas = self.reader(), []
        for start in range(0, len(self.reply), piece):
            deltas += reader.feed(self.reply[start : start + piece])
        return deltas, reader.finish()


@functools.cache
def cassette(file: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((folder / file).read_text(encoding="utf-8"), Loader=loader)["interactions"]


def body_of(message: dict[str, Any]) -> bytes:
    if "parsed_body" in message:
        return json.dumps(message["parsed_body"]).encode()
    body = message.get("body") or ""
    text = body["string"] if isinstance(body, dict) else body
    return text if isinstance(text, bytes) else text.encode()


@functools.cache
def recordings(folder: Path = FOLDER) -> tuple[Recording, ...]:
    """Every exchange of *folder* with an endpoint of these adapters, by its index or, without one, in the order of files."""
    found: list[Recording] = []
    for entry in index_of(folder):
        found += [take(entry, number, i, folder) for number, i in enumerate(entry["interactions"]) if generates(i)]
    return tuple(found)


def index_of(folder: Path) -> list[dict[str, Any]]:
    """What is said of every file of a folder; of one without an index, what the recordings themselves show."""
    if not folder.is_dir():
        return []
    index = folder / "index.jsonl"
    if index.is_file():
        return [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
    files = sorted(path.relative_to(folder).as_posix() for end in ("yaml", "yml") for path in folder.rglob(f"*.{end}"))
    return [shown(file, folder) for file in files]


def shown(file: str, folder: Path) -> dict[str, Any]:
    """What is said of a file; of one that is no cassette, why not."""
    try:
        return {"file": file, "interactions": [seen(i) for i in cassette(file, folder)]}
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        lines = str(error).splitlines() or [""]
        return {"file": file, "interactions": [], "unreadable": f"{type(error).__name__}: {lines[0][:200]}"}


def seen(exchange: dict[str, Any]) -> dict[str, Any]:
    """What an index would say of an exchange. A wire is known by its path, whatever the host."""
    request, response = exchange["request"], exchange["response"]
    path = urlsplit(request["uri"]).path
    wire = next((wire for wire, end in ENDPOINTS.items() if re.fullmatch(f"(?:/.*)?{end}", path)), "")
    asked = json_in(body_of(request))
    status = response["status"]
    named = (asked if isinstance(asked, dict) else {}).get("model") or path.rpartition("/")[2].partition(":")[0]
    return {
        "provider": wire,
        "method": request["method"],
        "path": re.sub(r"^/.*(?=/v1)", "", path) if wire != "openrouter" else path,
        "model": unquote(path.split("/")[-2]) if wire == "bedrock" else str(named),
        "stream": re.search("event-?stream", str(response.get("headers"))) is not None,
        "status": status["code"] if isinstance(status, dict) else status,
        "tool_calls": 0,
    }


def json_in(content: bytes) -> Any:
    """The JSON of a body; of an upload and of anything else that is none, ``None``."""
    try:
        return json.loads(content or b"null")
    except ValueError:
        return None


def generates(i: dict[str, Any]) -> bool:
    """Whether an entry of the index is an exchange with an endpoint that our adapters ask for replies."""
    path = ENDPOINTS.get(i["provider"])
    return path is not None and i["method"] == "POST" and re.fullmatch(path, i["path"].split("?")[0]) is not None


def take(entry: dict[str, Any], number: int, i: dict[str, Any], folder: Path = FOLDER) -> Recording:
    exchange = cassette(entry["file"], folder)[number]
    return Recording(
        f"{entry['file']}#{number}",
        i["provider"],
        i["model"] or unquote(i["path"].split("/")[-2]),
        i["stream"],
        i["status"],
        i["tool_calls"],
        json_in(body_of(exchange["request"])),
        body_of(exchange["response"]),
    )


def of(wire: str, *, stream: bool | None = None, ok: bool = True) -> list[Recording]:
    """The recordings of a wire that stream or not, that succeeded or not."""
    return [
        r for r in recordings() if r.wire == wire and (r.status < 400) == ok and (stream is None or r.stream == stream)
    ]
