"""
`show` and `diff` of cassettes, as of journals.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import command
from tests.debugging.pages import opened

PROGRAMS = Path(__file__).parents[2] / "cassettes" / "unchanged_programs"
CHAT = PROGRAMS / "test_openai_sync" / "test_answer.yaml"

pytestmark = [pytest.mark.spec("replay:Y35"), pytest.mark.usefixtures("folder")]


def changed(*edits: tuple[str, str]) -> Path:
    text = CHAT.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = Path("changed.yml")
    path.write_text(text)
    return path


def test_show_prints_model_calls_with_messages_tools_tokens_and_cost():
    shown = command("show", CHAT).stdout

    for line in (
        "run program  completed  2 effects  2 model calls  tokens 60 in / 24 out  cost $0.000303750",
        "#0  model openai_chat/gpt-5  step 1  messages 1 (+1)  tools find_order",
        "Where is order 17?",
        "number: 17",
        "tool  find_order  c1",
        "shipped on Tuesday",
        "Order 17 was shipped on Tuesday.",
    ):
        assert line in shown


def test_diff_names_the_field_of_a_request():
    same = command("compare", "diff", CHAT, CHAT).stdout
    found = command(
        "compare", "diff", CHAT, changed(("order 17?", "order 18?"), ('"find_order"', '"seek_order"')), code=1
    ).stdout

    assert same.strip() == "no difference"
    assert '/messages/0/content/0/text   "Where is order 17?"  ->  "Where is order 18?"' in found
    assert "/tools" in found


@pytest.mark.parametrize("content", [b"", b"interactions: 5"])
def test_file_that_is_no_cassette_is_named_without_traceback(content):
    Path("damaged.yaml").write_bytes(content)

    for words, code in (
        (("show", "damaged.yaml"), 1),
        (("show", "--html", "damaged.yaml"), 2),
        (("compare", "diff", CHAT, "damaged.yaml"), 1),
    ):
        told = command(*words, code=code).output
        assert "damaged.yaml" in told
        assert "Traceback" not in told
    assert not Path("damaged.html").exists()


@pytest.mark.spec("replay:Y34")
def test_secrets_that_another_recorder_left_in_are_not_shown():
    key, token = "sk-proj-" + "Ab1Cd2Ef3Gh4" * 5, "hunter2-hunter2-hunter2"
    leaking = changed(
        ("Where is order 17?", f"Is {key} a key, or {token}?"),
        ("      accept:\n", f"      authorization:\n      - Bearer {token}\n      accept:\n"),
        ("/v1/chat/completions", f"/v1/chat/completions?key={key}"),
    )
    command("show", "--html", leaking, "-o", "page.html")
    told = [
        command("show", leaking).stdout,
        command("show", leaking, "--step", "1").stdout,
        command("show", leaking, "--step", "1", "--json").stdout,
        command("compare", "diff", CHAT, leaking, code=1).stdout,
        json.dumps(opened(Path("page.html").read_text())),
    ]

    assert ["a key, or" in text for text in told] == [True] * 5
    assert not [text for text in told if key in text or token in text]
