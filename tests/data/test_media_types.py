"""The type of an image or a file is that of its bytes, wherever it comes from and whatever is stated."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.adapters.mcp.results import make_content_parts
from stepengine.data.ai_sdk import convert_to_wire_message
from stepengine.data.media_types import SIGNATURES, find_media_type, normalize_media_type, resolve_media_type
from stepengine.data.messages import DocumentPart, ImagePart, TextPart, UserMessage
from stepengine.data.wire import read_messages
from stepengine.errors import DataError, ModelError
from stepengine.tools.conversion import make_tool_result
from tests.models.wires import FOUR, body

FILES = {
    "image/png": b"\x89PNG\r\n\x1a\n....",
    "image/jpeg": b"\xff\xd8\xff\xe0....",
    "image/gif": b"GIF89a....",
    "image/webp": b"RIFF\x10\0\0\0WEBPVP8 ",
    "image/avif": b"\0\0\0\x1cftypavif",
    "image/heic": b"\0\0\0\x1cftypheic",
    "image/tiff": b"II*\0....",
    "application/pdf": b"%PDF-1.7\n",
    "audio/wav": b"RIFF\x10\0\0\0WAVEfmt ",
    "audio/flac": b"fLaC....",
    "audio/mpeg": b"ID3\x04....",
    "audio/ogg": b"OggS....",
}
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
WRONG = ("image/png", "image/jpg", "IMAGE/JPEG", "image/webp; charset=binary", "application/octet-stream", "")


def test_every_signature_has_an_example():
    assert {kind for _, kind, _ in SIGNATURES} == {*FILES}
    assert {kind: find_media_type(data) for kind, data in FILES.items()} == {kind: kind for kind in FILES}


@pytest.mark.spec("providers:PV140")
@given(st.sampled_from([*FILES]), st.sampled_from(WRONG))
def test_bytes_decide_the_type_of_every_part(kind, stated):
    data = FILES[kind]

    assert ImagePart(data=data, mime_type=stated).mime_type == kind
    assert DocumentPart(data=data, mime_type=stated).mime_type == kind
    assert resolve_media_type(kind, data) == kind


@pytest.mark.parametrize(
    ("stated", "data"),
    [("audio/opus", b"OggS...."), ("video/mp4", b"\0\0\0\x1cftypisom"), ("text/plain", b"ID3 is a tag"), ("image/x-nikon-nef", b"II*\0..")],
)  # fmt: skip
def test_a_narrower_type_than_that_of_the_bytes_stays(stated, data):
    assert DocumentPart(data=data, mime_type=stated).mime_type == stated


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        ("image/jpg", "image/jpeg"),
        (" Image/PJPEG ; q=1", "image/jpeg"),
        ("APPLICATION/PDF;version=1.7", "application/pdf"),
        ("Audio/MP3", "audio/mpeg"),
        ("text/plain; charset=latin-1", "text/plain; charset=latin-1"),
        ("audio/L16;codec=pcm;rate=24000", "audio/l16;codec=pcm;rate=24000"),
    ],
)
def test_stated_types_get_their_usual_name(stated, kind):
    assert normalize_media_type(stated) == kind
    assert ImagePart("https://x/i", mime_type=stated).mime_type == kind
    assert DocumentPart(data=b"unknown", mime_type=stated).mime_type == kind


def data_urls(kind: str, data: bytes) -> list[str]:
    encoded = base64.b64encode(data).decode()
    return [
        f"data:{kind};base64,{encoded}",
        f"DATA:{kind};BASE64,{encoded}",
        f"data:{kind};charset=utf-8;base64,{encoded}",
        f"data:;base64,{encoded}",
        f"data:{kind};base64,{quote(encoded, safe='')}",
        f"data:{kind};base64,{encoded.rstrip('=')}",
        f"data:{kind};base64,{base64.urlsafe_b64encode(data).decode()}",
        f"data:{kind};base64,{encoded[:4]}\n {encoded[4:]}",
        f"data:{kind},{quote(data)}",
        f"data:{kind};charset=utf-8,{quote(data)}",
    ]


@pytest.mark.spec("providers:PV140")
@given(st.sampled_from(IMAGES), st.sampled_from(["image/jpg", "image/png"]), st.binary(max_size=9))
def test_data_urls_become_data_in_every_message_form(kind, stated, more):
    data = FILES[kind] + more
    for url in data_urls(stated, data):
        made = ImagePart(data=data, mime_type=kind)
        history: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
            {"role": "user", "content": [{"type": "image", "image": url}]},
            {"role": "user", "content": [{"type": "file", "data": url, "mediaType": "IMAGE/JPG"}]},
        ]
        assert ImagePart(url=url) == made
        assert [m.content[0] for m in read_messages([convert_to_wire_message(each) for each in history])] == [made] * 4
        assert make_tool_result(ImagePart(url=url)).content == (made,)


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:image/png;base64,a", "data:image/png;base64,%%%"])
def test_broken_data_url_raises_a_clear_error(url):
    with pytest.raises(DataError, match="data: address"):
        ImagePart(url=url)


@pytest.mark.spec("providers:PV140")
@pytest.mark.parametrize("wire", FOUR)
def test_an_unsupported_image_is_named_by_its_bytes(wire):
    part = ImagePart(data=FILES["image/tiff"], mime_type="image/png")
    if wire == "google":  # takes any type
        assert "image/tiff" in json.dumps(body(wire, UserMessage([part])))
        return
    with pytest.raises(ModelError, match="of type 'image/tiff'") as caught:
        body(wire, UserMessage([part]))
    assert caught.value.kind == "unsupported_part"


@given(st.sampled_from([*IMAGES, "application/pdf"]), st.sampled_from(WRONG), st.booleans())
def test_media_of_mcp_servers_have_the_type_of_their_bytes(kind, stated, is_resource):
    encoded = base64.b64encode(FILES[kind]).decode()
    block = {"type": "image", "data": encoded, "mimeType": stated}
    if is_resource:
        block = {"type": "resource", "resource": {"uri": "x://y", "blob": encoded, "mimeType": stated}}
    (part,) = make_content_parts([block])

    assert not isinstance(part, TextPart)
    assert (part.data, part.mime_type) == (FILES[kind], kind)
