"""The conformance command takes any folder of recordings, and says of each that is not equal what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from tests.faults.scripts import ANTHROPIC, CHAT
from tests.models.conformance import main
from tests.models.recorded import FOLDER, Recording, cassette, needs_recordings, recordings

URIS = {"anthropic": "https://host/v1/messages", "openai_chat": "https://host/openai/v1/chat/completions"}
SAID = ("It is five.", [], "end_turn")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    recordings.cache_clear()
    cassette.cache_clear()


def exchange(wire: Any, body: bytes, *, stream: bool, uri: str = "") -> dict[str, Any]:
    kind = "text/event-stream" if stream else "application/json"
    return {
        "request": {
            "method": "POST",
            "uri": uri or URIS[wire.name],
            "body": json.dumps({"model": "m", "messages": []}),
        },
        "response": {
            "status": {"code": 200},
            "headers": {"content-type": [kind]},
            "body": {"string": body.decode()},
        },
    }


def keep(folder: Path, **files: Any) -> None:
    for name, exchanges in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"interactions": exchanges}))


def said_of(folder: Path, capsys: Any, status: int = 0) -> str:
    assert status == main(folder)
    return capsys.readouterr().out


def test_conformance_reads_a_folder_without_an_index(tmp_path, capsys):
    keep(
        tmp_path,
        a=[exchange(wire, wire.reply(*SAID), stream=False) for wire in (ANTHROPIC, CHAT)],
        b=[exchange(wire, b"".join(wire.stream(*SAID)), stream=True) for wire in (ANTHROPIC, CHAT)],
        overloaded=[exchange(ANTHROPIC, ANTHROPIC.stream(*SAID)[0] + ANTHROPIC.stream_error[0], stream=True)],
    )
    told = said_of(tmp_path, capsys)

    assert "in all: 5 files, 2 plain, 2 streams, 0 errors, 1 failed" in told
    assert "4 read twice" in told
    assert "by file: 3 equal, 0 client's doing, 0 documented, 0 different" in told
    assert "not equal" not in told


def test_incompletely_recorded_stream_is_attributed_to_its_recorder(tmp_path, capsys):
    keep(tmp_path, cut=[exchange(ANTHROPIC, b"".join(ANTHROPIC.stream(*SAID)[:-1]), stream=True)])
    told = said_of(tmp_path, capsys)

    assert "  client's doing: cut.yaml" in told.splitlines()
    assert "whoever recorded the stream did not read it to its end" in told


def lost_call(reply: ModelReply) -> ModelReply:
    return attrs.evolve(reply, content=[part for part in reply.content if not isinstance(part, ToolCallPart)])


FAULTS: dict[str, Callable[[ModelReply], ModelReply]] = {
    "text": lambda reply: attrs.evolve(reply, content=[TextPart("It is six."), *reply.content[1:]]),
    "calls": lost_call,
    "stop": lambda reply: attrs.evolve(reply, raw_stop_reason="max_tokens"),
    "prompt": lambda reply: attrs.evolve(reply, usage=Usage(1_000, 5)),
    "completion": lambda reply: attrs.evolve(reply, usage=attrs.evolve(reply.usage, output_tokens=0)),
}


@pytest.mark.parametrize("wire", [ANTHROPIC, CHAT], ids=lambda wire: wire.name)
@pytest.mark.parametrize("member", FAULTS)
def test_conformance_detects_a_codec_that_disagrees_with_the_sdk(member, wire, tmp_path, capsys, monkeypatch) -> None:
    reply = wire.reply("It is five.", [("look", '{"at": "1"}')], "tool_use")
    keep(tmp_path, a=[exchange(wire, reply, stream=False)])
    assert "1 equal" in said_of(tmp_path, capsys)

    right = Recording.decoded
    monkeypatch.setattr(Recording, "decoded", lambda self: FAULTS[member](right(self)))
    lines = said_of(tmp_path, capsys, 1).splitlines()
    found = {line.split(": ")[2] for line in lines if line.startswith("not equal: a.yaml#0")}

    assert member in found


@pytest.mark.spec("providers:PV81")
def test_conformance_reports_a_cost_that_differs_from_the_bill(tmp_path, capsys, monkeypatch):
    body = json.loads(CHAT.reply(*SAID))
    body["usage"] |= {"cost": 0.25, "is_byok": False}
    uri = "https://openrouter.ai/api/v1/chat/completions"
    keep(tmp_path, a=[exchange(CHAT, json.dumps(body).encode(), stream=False, uri=uri)])

    assert "| openrouter | 1 | 0.250000 | 0.250000 |" in said_of(tmp_path, capsys)
    right = Recording.decoded
    monkeypatch.setattr(Recording, "decoded", lambda self: attrs.evolve(right(self), cost=None))
    assert "the service says that it cost 0.25, ours " in said_of(tmp_path, capsys, 1)


@pytest.mark.smoke
@needs_recordings
@pytest.mark.deep
@pytest.mark.spec("requirements:G1")
def test_recorded_traffic_agrees_with_the_sdks_and_the_bills(capsys) -> None:
    assert "0 different" in said_of(FOLDER, capsys)
