"""
The recorded provider traffic beside the repository, and how the codecs are asked about it.

The folder is not part of the repository: tests that need it are skipped when it is absent.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
import pytest
import yaml

from stepengine.data.models import ModelDelta, ModelReply
from stepengine.models._aws_events import AWSParser
from stepengine.models._byte_reader import ReplyReader
from stepengine.models._failures import RequestLabel
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
from stepengine.models.presets import PRESETS

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

PATHS = {
    "anthropic": r"/messages",
    "openai-responses": r"/responses",
    "openai-chat": r"/chat/completions",
    "google-gla": r"/models/[^/]+:(?:stream)?[gG]enerateContent",
    "bedrock": r"/model/[^/]+/converse(?:-stream)?",
}
"""How the path of an exchange ends, whatever the service."""
HOSTS = {urlsplit(preset.base_url or "").hostname or "": name for name, preset in PRESETS.items()} | {
    "api.openai.com": "",
    "aiplatform.googleapis.com": "vertex",
    "generativelanguage.googleapis.com": "google",
}
"""Which service answers at an address, where that is not the first one of its wire."""
HOSTS.pop("localhost", None)
SUFFIXES = (
    (".openai.azure.com", "azure"),
    (".services.ai.azure.com", "foundry"),
    ("-aiplatform.googleapis.com", "vertex"),
    (".snowflakecomputing.com", "snowflake"),
)


@attrs.frozen
class Recording:
    """
    One recorded exchange with a generating endpoint.

    Attributes:
        service: Who answered, where it is not the first one of the wire.
        answer: The headers of the reply, by their names in small letters.
    """

    name: str
    wire: str
    model: str
    stream: bool
    status: int
    tool_calls: int
    request: Any
    reply: bytes
    service: str = ""
    answer: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def call(self) -> RequestLabel:
        provider = self.service or NAMES[self.wire]
        return RequestLabel(
            provider=provider, model=f"{provider}/{self.model}", credentials=Credentials(None, "no key")
        )

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
    """The HTTP exchanges of a file, none where it holds others or is not a cassette."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    whole = yaml.load((folder / file).read_text(encoding="utf-8"), Loader=loader)
    found = whole.get("interactions") if isinstance(whole, dict) else None
    listed = found if isinstance(found, list) else []
    is_http = all(
        isinstance(i, dict) and all(isinstance(i.get(k), dict) for k in ("request", "response")) for i in listed
    )
    return listed if is_http else []


def body_of(message: dict[str, Any]) -> bytes:
    if "parsed_body" in message:
        return json.dumps(message["parsed_body"]).encode()
    body = message.get("body") or ""
    text = body.get("string") or "" if isinstance(body, dict) else body
    return unpacked(text if isinstance(text, bytes) else text.encode(), headers_of(message))


def headers_of(message: dict[str, Any]) -> dict[str, str]:
    found = message.get("headers")
    if not isinstance(found, dict):
        return {}
    return {str(k).lower(): str(v[0] if isinstance(v, list) and v else v) for k, v in found.items()}


def unpacked(content: bytes, headers: Mapping[str, str]) -> bytes:
    """A body as it was before it was compressed, as far as it goes: many a recorder keeps the compressed one."""
    form = headers.get("content-encoding", "")
    if content.startswith(b"\x1f\x8b") or (form == "deflate" and content[:1] == b"\x78"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(content)
    if form in {"br", "zstd"} and content and not content.isascii():
        msg = f"a body is compressed with {form!r}, which nothing here reads"
        raise ValueError(msg)
    return content


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


NO_EXCHANGES = "it holds no HTTP exchanges"
"""Why a file is not looked at: it is not a cassette, or one of a websocket, of gRPC, of a local model."""


def shown(file: str, folder: Path) -> dict[str, Any]:
    """What is said of a file; of one that is not a cassette, why not."""
    try:
        exchanges = cassette(file, folder)
        if not exchanges:
            return {"file": file, "interactions": [], "foreign": NO_EXCHANGES}
        return {"file": file, "interactions": [seen(i) for i in exchanges]}
    except (
        yaml.YAMLError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OSError,
        RecursionError,
        zlib.error,
    ) as error:
        lines = str(error).splitlines() or [""]
        return {"file": file, "interactions": [], "unreadable": f"{type(error).__name__}: {lines[0][:200]}"}


def seen(exchange: dict[str, Any]) -> dict[str, Any]:
    """What an index would say of an exchange. A wire is known by its path, whatever the host."""
    request, response = exchange["request"], exchange["response"]
    url = urlsplit(request["uri"])
    wire = next((wire for wire, end in PATHS.items() if re.search(f"{end}$", url.path)), "")
    service = service_of(url.hostname or "")
    asked = json_in(body_of(request))
    status = response["status"]
    return {
        "provider": "openrouter" if (wire, service) == ("openai-chat", "openrouter") else wire,
        "service": service_on(wire, service),
        "method": request["method"],
        "path": url.path,
        "model": unquote(url.path.split("/")[-2])
        if wire == "bedrock"
        else str(
            (asked if isinstance(asked, dict) else {}).get("model") or url.path.rpartition("/")[2].partition(":")[0]
        ),
        "stream": re.search("event-?stream", headers_of(response).get("content-type", "")) is not None
        or body_of(response).startswith((b"data: ", b"event: ")),
        "status": status["code"] if isinstance(status, dict) else status,
        "tool_calls": 0,
    }


def service_of(host: str) -> str:
    """The provider that answers at *host*, by our name; ``""`` for one that is not known, or the first one of its wire."""
    return HOSTS.get(host) or next((name for end, name in SUFFIXES if host.endswith(end)), "")


def service_on(wire: str, service: str) -> str:
    """The provider, by our name, by which a service is asked in the way of *wire*; ``""`` for the first one of the wire."""
    split = {("openai-responses", "azure"): "azure_responses", ("anthropic", "vertex"): "vertex_claude"}
    return split.get((wire, service), "" if NAMES.get(wire) == service else service)


def json_in(content: bytes) -> Any:
    """The JSON of a body; of an upload and of anything else that is none, ``None``."""
    try:
        return json.loads(content or b"null")
    except (ValueError, RecursionError):
        return None


def generates(i: dict[str, Any]) -> bool:
    """Whether an entry of the index is an exchange with an endpoint that our adapters ask for replies."""
    if i["method"] != "POST":
        return False
    if "service" in i:
        return bool(i["provider"])
    path = ENDPOINTS.get(i["provider"])
    return path is not None and re.fullmatch(path, i["path"].split("?")[0]) is not None


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
        i.get("service", ""),
        headers_of(exchange["response"]),
    )


def of(wire: str, *, stream: bool | None = None, ok: bool = True) -> list[Recording]:
    """The recordings of a wire that stream or not, that succeeded or not."""
    return [
        r for r in recordings() if r.wire == wire and (r.status < 400) == ok and (stream is None or r.stream == stream)
    ]
