"""The conformance command takes any folder of recordings, and says of each that is not equal what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.faults.scripts import ANTHROPIC, CHAT
from tests.models.conformance import main

URIS = {"anthropic": "https://host/v1/messages", "openai_chat": "https://host/openai/v1/chat/completions"}


def exchange(wire: Any, body: bytes, *, stream: bool) -> dict[str, Any]:
    kind = "text/event-stream" if stream else "application/json"
    return {
        "request": {"method": "POST", "uri": URIS[wire.name], "body": json.dumps({"model": "m", "messages": []})},
        "response": {
            "status": {"code": 200},
            "headers": {"content-type": [kind]},
            "body": {"string": body.decode()},
        },
    }


def test_a_folder_without_an_index_is_checked_in_stream_errors_survived_and_the_unequal_named(tmp_path, capsys):
    said = ("It is five.", [], "end_turn")
    files = {
        "good/a": [exchange(wire, wire.reply(*said), stream=False) for wire in (ANTHROPIC, CHAT)],
        "good/b": [exchange(wire, b"".join(wire.stream(*said)), stream=True) for wire in (ANTHROPIC, CHAT)],
        "overloaded": [exchange(ANTHROPIC, ANTHROPIC.stream(*said)[0] + ANTHROPIC.stream_error[0], stream=True)],
    }
    (tmp_path / "good").mkdir()
    for name, exchanges in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"interactions": exchanges}))
    assert main(tmp_path) == 0
    said_of = capsys.readouterr().out
    assert "in all: 5 files, 2 plain, 2 streams, 0 errors, 1 failed" in said_of
    assert "not equal" not in said_of

    broken = exchange(CHAT, b'{"choices": 5}', stream=False)
    cut = exchange(ANTHROPIC, b"".join(ANTHROPIC.stream(*said)[:-1]), stream=True)
    for name, each in (("broken", broken), ("cut", cut)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"interactions": [each]}))
    from tests.models.recorded import cassette, recordings

    recordings.cache_clear()
    cassette.cache_clear()
    assert main(tmp_path) == 1
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("not equal")]
    assert [line.partition("#")[0] for line in lines] == ["broken.yaml", "cut.yaml"]


NO_CASSETTES = {
    "empty.yaml": "",
    "list.yml": "- 1\n",
    "no_yaml.yaml": "a: [",
    "other.yaml": "services: {db: {image: postgres}}",
    "no_status.yaml": "interactions: [{request: {method: POST, uri: x}, response: {}}]",
}


def test_no_folder_ends_in_a_traceback_and_each_file_that_is_no_cassette_is_named(tmp_path, capsys) -> None:
    for name, text in NO_CASSETTES.items():
        (tmp_path / name).write_text(text)
    upload = exchange(CHAT, b"{}", stream=False)
    upload["request"] |= {"uri": "https://host/v1/files", "body": "--boundary"}
    good = exchange(CHAT, CHAT.reply("It is five.", [], "end_turn"), stream=False)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump({"interactions": [upload, good]}))

    assert main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "by file: 1 equal, 0 documented, 0 not ours, 5 different" in lines
    assert sorted(NO_CASSETTES) == sorted(line.split()[-1] for line in lines if line.startswith("  different: "))
    assert sorted(NO_CASSETTES) == sorted(
        line.split()[2].strip(":") for line in lines if line.startswith("not equal: ")
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.jsonl", "{"),
        ("index.jsonl", json.dumps({"file": "gone.yaml", "interactions": [{}]})),
        ("closed_loops.jsonl", json.dumps({"file": "gone.yaml", "steps": [0, 1]})),
    ],
)
def test_an_index_that_leads_nowhere_is_one_line(tmp_path, capsys, name, text) -> None:
    (tmp_path / name).write_text(text)

    assert main(tmp_path) == 1
    assert capsys.readouterr().out.startswith(f"the index of {tmp_path} cannot be followed: ")
