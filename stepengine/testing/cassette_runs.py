"""
A recorded cassette as a journal, so that commands that show or compare runs also work with cassettes.

The journal is in memory and holds one run. Its effects are the recorded requests in the order of the file: a model call for each
request in one of the four protocols, and a ``perform`` with method, URL and status for any other HTTP request. A cassette holds no
times and no code. So the run has neither durations nor handler lines, and its results of tools are those in the next request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs

from stepengine.data.effects import CallModel
from stepengine.data.json import JsonDict, compact, find_first_difference
from stepengine.data.messages import OpaquePart, ToolMessage
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Value
from stepengine.data.state import ChildResult
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.journal import MemoryJournal
from stepengine.journal.history import History, engine_version
from stepengine.journal.records import Head, Intent, Record, Result
from stepengine.journal.show import compute_spending
from stepengine.models._byte_reader import (
    MAX_REPLY_BYTES,
    ReplyReader,
    decode_or_raise_protocol_error,
    require_reply_text_size,
)
from stepengine.models._failures import error_from_body, find_request_id, make_protocol_error
from stepengine.models._json import parse_json
from stepengine.models.pricing import LIST_PRICES
from stepengine.testing.cassette_files import Interaction, RecordedResponse, is_event_stream
from stepengine.testing.cassette_requests import ModelCall, fill_text_of_opaque_part, parse_model_call
from stepengine.testing.recordings import load_interactions, make_path_relative_to_cwd
from stepengine.testing.traffic_redaction import Cleaner, find_header_secrets

PROGRAM = "program"
"""The id of the agent in such a journal."""
KEPT_TRANSCRIPTS = 4
PIECE = 1_024
OK, MULTIPLE_CHOICES = 200, 300
UNREADABLE = frozenset({"protocol", "unanswerable"})
"""Errors that the adapters raise for replies that a run of ours cannot continue from; a program can."""


class CassetteJournal(MemoryJournal):
    """
    A cassette as a read-only journal of one run.

    Args:
        path: The file.
        records: The records of the run.
    """

    records_tools = False

    def __init__(self, path: Path, records: Sequence[Record]) -> None:
        self._path = path
        super().__init__()
        self.replace_records_unchecked(list(records))

    @property
    def name(self) -> str:
        """The name of the cassette file."""
        return make_path_relative_to_cwd(self._path)


def load_cassette_as_journal(path: Path) -> CassetteJournal:
    """
    Return the cassette at *path* as a journal of one run.

    Prices are those of the day on which the file was written.

    Raises:
        DataError: for a file that is not a cassette.
        OSError: for a file that cannot be read.
    """
    written = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    return CassetteJournal(path, list(_make_run_records(load_interactions(path), path.name, written)))


def _make_run_records(interactions: Iterable[Interaction], name: str, written: datetime) -> list[Record]:
    """Return the records of a run with one effect for each interaction: a model call, or a ``perform``."""
    created = written.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    start = {"type": "agent_call", "agent_id": PROGRAM, "prompt": "", "params": None, "run_id": name}
    records: list[Record] = [
        Head(engine=engine_version(), agent=PROGRAM, definition="", run=name, seed="0", created=created),
        Intent("", -1, start),
    ]
    transcripts = _Transcripts()
    for seq, recorded in enumerate(interactions):
        interaction = _decompress_and_redact(recorded)
        call = parse_model_call(interaction.request)
        if call is None:
            records += _make_http_records(seq, interaction)
            continue
        request = attrs.evolve(call.request, messages=transcripts.share_messages_with_earlier(call.request.messages))
        records.append(Intent("", seq, CallModel(seq, request)))
        records.append(Result("", seq, 0, _make_outcome(call, interaction.response, written)))
    spending = compute_spending(History(records, name))
    return [*records, Result("", -1, 0, ChildResult(agent_id=PROGRAM, run_id=name, spending=spending))]


def _decompress_and_redact(interaction: Interaction) -> Interaction:
    """Return an interaction decompressed and without secrets, which other recorders leave in."""
    cleaner = Cleaner(find_header_secrets(interaction.request.headers))
    return attrs.evolve(
        interaction,
        request=cleaner.clean_request(interaction.request),
        response=cleaner.clean_response(_decompress(interaction.response)),
    )


def _decompress(response: RecordedResponse) -> RecordedResponse:
    """Return a response decompressed; unchanged if it is not compressed as its header says, or is too long."""
    encoding = response.get_header("content-encoding")
    if not encoding or not encoding.isascii():
        return response
    import httpx2

    # Small pieces, so that a body that unpacks to gigabytes is noticed early.
    pieces = (response.body[start : start + PIECE] for start in range(0, len(response.body), PIECE))
    unpacked = httpx2.Response(OK, headers={"content-encoding": encoding}, content=pieces)
    content = bytearray()
    try:
        for piece in unpacked.iter_bytes():
            content += piece
            if len(content) > MAX_REPLY_BYTES:
                return response
    except httpx2.DecodingError:
        return response
    headers = tuple([(name, value) for name, value in response.headers if name.lower() != "content-encoding"])
    return attrs.evolve(response, headers=headers, body=bytes(content))


def _make_http_records(seq: int, interaction: Interaction) -> tuple[Record, Record]:
    """Return intent and result of a ``perform`` for a request that is no model call; the result is its status."""
    request = interaction.request
    name = f"{request.method} {request.url}"
    effect = {"type": "perform", "name": name, "args": [], "kwargs": {}}
    return Intent("", seq, effect), Result("", seq, 0, Value(JsonDict(status=interaction.response.status)))


class _Transcripts:
    """The transcripts of the last requests, so that equal messages are stored once."""

    def __init__(self) -> None:
        self._kept: list[Transcript] = []

    def share_messages_with_earlier(self, transcript: Transcript) -> Transcript:
        """Return an equal transcript that shares its first messages with the most similar stored request, and store it."""
        messages = list(transcript)
        made = transcript
        found = [(find_first_difference(known, messages), known) for known in self._kept]
        shared, known = max(found, key=lambda pair: pair[0], default=(0, transcript))
        # A call and its results are added together.
        while 0 < shared < len(messages) and isinstance(messages[shared], ToolMessage):
            shared -= 1
        if shared:
            made = Transcript.from_parts(known.parts[0], shared).extend(tuple(messages[shared:]))
        self._kept = [*self._kept[1 - KEPT_TRANSCRIPTS :], made]
        return made


# --- replies ----------------------------------------------------------------------------------------------------------


def _make_outcome(call: ModelCall, response: RecordedResponse, at: datetime) -> ModelReply | Failure:
    try:
        reply = _decode_reply(call, response)
    except ModelError as error:
        return Failure(error.with_traceback(None), 0)
    parts = tuple([fill_text_of_opaque_part(part) for part in reply.content])
    cost = LIST_PRICES.price_reply(call.label.model, reply, at) if reply.cost is None else reply.cost
    return attrs.evolve(reply, content=parts, cost=cost)


def _decode_reply(call: ModelCall, response: RecordedResponse) -> ModelReply:
    """Return the model reply in *response*; raise ``ModelError`` for an error status. A reply of unknown form becomes an opaque part."""
    headers = {name.lower(): value for name, value in response.headers}
    content = response.body
    if not OK <= response.status < MULTIPLE_CHOICES:
        raise error_from_body(content, response.status, headers, call.label)
    request_id = find_request_id(headers)
    events = _to_event_stream(response, content)
    if events is not None:
        reader = ReplyReader(call.protocol.accumulator(call.label, call.model, request_id), call.label)
        reader.feed(events)
        return reader.finish()
    try:
        data = parse_json(content)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise make_protocol_error(call.label, "it is not a JSON object")
    decode = call.protocol.decode
    try:
        return decode_or_raise_protocol_error(
            call.label, lambda: require_reply_text_size(decode(data, call.label, call.model, request_id), call.label)
        )
    except ModelError as error:
        if error.kind not in UNREADABLE:
            raise
        part = OpaquePart(call.label.provider, data, text=compact(data))
        return ModelReply((part,), usage=error.usage)


def _to_event_stream(response: RecordedResponse, content: bytes) -> bytes | None:
    """Return a streamed body as events, or None for a whole reply; Google can stream a JSON array."""
    if is_event_stream(response) or content.startswith((b"data:", b"event:")):
        return content
    if not content.lstrip().startswith(b"["):
        return None
    try:
        chunks = parse_json(content)
    except ValueError:
        return None
    return b"".join([b"data: " + compact(chunk).encode() + b"\n\n" for chunk in chunks])
