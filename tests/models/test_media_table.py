"""The table of ``docs/reference/media.md``: as what each kind of media goes on each wire, read from encoded bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepengine.data.messages import DocumentPart, ImagePart, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from tests.models.test_vocabulary_table import MODELS
from tests.models.wires import provider_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "media.md"
BEGIN, END = "<!-- table of media -->\n", "<!-- end of the table of media -->\n"
WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
KINDS = {
    "image": (ImagePart, "image/png"),
    "PDF": (DocumentPart, "application/pdf"),
    "text": (DocumentPart, "text/plain"),
    "Word": (DocumentPart, WORD),
    "sound (WAV)": (DocumentPart, "audio/wav"),
    "video": (DocumentPart, "video/mp4"),
}
SOURCES = ("bytes", "address", "uploaded")


def part(name: str, kind: str, source: str) -> Any:
    cls, mime = KINDS[kind]
    holder = {"openai_chat": "openai", "google_interactions": "google"}.get(name, name)
    given = {
        "bytes": {"data": b"x"},
        "address": {"url": "https://a/x"},
        "uploaded": {"file_id": "f", "provider": holder},
    }
    return cls(mime_type=mime, **given[source])


def cell(name: str, kind: str, source: str) -> str:
    history = Transcript([UserMessage(["What is it?", part(name, kind, source)])])
    try:
        sent = provider_of(name)._encode(ModelRequest(f"{name}/{MODELS[name]}", "", history), stream=False)
    except ModelError as error:
        return {"unsupported_part": "refused"}[error.kind]
    body = json.loads(sent.content)
    message = next(body[member] for member in ("messages", "input", "contents") if member in body)[-1]
    pieces = [piece for piece in message.get("content") or message["parts"] if "cachePoint" not in piece]
    piece = pieces[-1]
    word = piece.get("type") or next(iter(piece))
    return f"`{word}`" if "source" not in piece else f"`{word}`, {piece['source']['type']}"


def table() -> str:
    lines = [f"|  | {' | '.join(MODELS)} |", "| --- " * (len(MODELS) + 1) + "|"]
    lines += [
        f"| {kind}, {source} | {' | '.join(cell(name, kind, source) for name in MODELS)} |"
        for kind in KINDS
        for source in SOURCES
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.spec("providers:PV47", "providers:PV48", "providers:PV49", "providers:PV51")
def test_media_table_of_the_page_matches_the_encoders():
    page = PAGE.read_text(encoding="utf-8")
    assert table() == page.partition(BEGIN)[2].partition(END)[0]
