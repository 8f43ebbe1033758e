"""
A cassette as a journal: requests of the four protocols in our terms, and nothing in a request that is an error.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stepengine.errors import DataError
from stepengine.journal import diff
from stepengine.journal.show import make_run_tree, render
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse, dump_cassette
from stepengine.testing.cassette_runs import load_cassette_as_journal

CASSETTES = Path(__file__).parents[2] / "cassettes"
UNCHANGED = sorted((CASSETTES / "unchanged_programs").rglob("*.yaml"))
WIRES = sorted((CASSETTES / "wires").glob("*.yaml"))
JSON = (("content-type", "application/json"),)
CHAT = "https://api.openai.com/v1/chat/completions"
RESPONSES = "https://api.openai.com/v1/responses"
ANTHROPIC = "https://api.anthropic.com/v1/messages"
GOOGLE = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:generateContent"
USER = {"role": "user", "content": "Hi."}
REPLY = {"choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}]}
REPLIES = {
    CHAT: REPLY,
    RESPONSES: {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello."}]}]},
    ANTHROPIC: {"content": [{"type": "text", "text": "Hello."}], "stop_reason": "end_turn"},
    GOOGLE: {"candidates": [{"content": {"parts": [{"text": "Hello."}]}, "finishReason": "STOP"}]},
}  # fmt: skip


def exchange(url: str, body: object, reply: object = None, status: int = 200, **more: Any) -> Interaction:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = (
        reply if isinstance(reply, bytes) else json.dumps(REPLIES.get(url, {}) if reply is None else reply).encode()
    )
    headers = more.pop("headers", JSON)
    return Interaction(
        RecordedRequest(more.pop("method", "POST"), url, JSON, content), RecordedResponse(status, "", headers, answer)
    )


def tree_of(folder: Path, *exchanges: Interaction, name: str = "c.yaml") -> dict[str, Any]:
    path = folder / name
    path.write_bytes(dump_cassette(exchanges))
    return make_run_tree(load_cassette_as_journal(path))


def step_of(folder: Path, url: str, body: object, reply: object = None, **more: Any) -> dict[str, Any]:
    (step,) = tree_of(folder, exchange(url, body, reply, **more))["steps"]
    return step


def parts_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for message in step["said"] for part in message["parts"]]


@pytest.mark.spec("replay:Y34")
@pytest.mark.parametrize("path", UNCHANGED, ids=lambda path: path.parent.name)
def test_each_program_has_two_model_calls_with_their_details(path):
    tree = make_run_tree(load_cassette_as_journal(path))
    first, second = tree["steps"]

    assert tree["model_calls"] == 2
    assert tree["tokens"] == {"in": 64 if "anthropic/" in first["name"] else 60, "out": 24}
    assert first["system"] == "You answer the customers of a shop in one sentence."
    assert first["tools"] == ["find_order"]
    assert parts_of(first) == [{"text": "Where is order 17?"}]
    assert [(p["tool"], p["input"]) for p in first["outcome"]["parts"]] == [("find_order", {"number": 17})]
    (result,) = second["said"]
    assert (result["role"], result["name"]) == ("tool", "find_order")
    assert "shipped on Tuesday" in json.dumps(result["parts"])
    assert second["outcome"]["parts"] == [{"text": "Order 17 was shipped on Tuesday."}]


def without_effort(step: dict[str, Any]) -> tuple[Any, ...]:
    """What one exchange of the wire cassettes shows, whatever the wire."""
    outcome = step["outcome"]
    texts = [part["text"] for part in outcome.get("parts", ()) if "text" in part]
    calls = [(part["tool"], part["input"]) for part in outcome.get("parts", ()) if "tool" in part]
    return step["messages"], texts, calls, outcome.get("error", {}).get("type")


@pytest.mark.spec("replay:Y34")
@pytest.mark.parametrize("path", WIRES, ids=lambda path: path.stem)
def test_streamed_and_whole_replies_of_each_wire_read_the_same(path):
    steps = make_run_tree(load_cassette_as_journal(path))["steps"]
    shown = [without_effort(step) for step in steps]

    assert {step["kind"] for step in steps} == {"model"}
    assert shown.count((1, ["Count to a thousand."], [], None)) == 0
    assert (1, ["One, two, three"], [], None) in shown
    assert (4, ["They are 5 and 9."], [], None) in shown
    assert shown.count((4, ["They are 5 and 9."], [], None)) == 2
    assert [("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})] in [calls for _, _, calls, _ in shown]
    assert "TruncatedReply" in [error for _, _, _, error in shown]
    assert not [step for step in steps if "opaque" in json.dumps(step.get("said", "")) and step["messages"] < 3]


@pytest.mark.spec("replay:Y34")
@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"model": "gpt-5", "messages": [USER, {"role": "user", "content": [{"type": "hologram", "of": "a cat"}]}]}),
        (RESPONSES, {"model": "gpt-5", "input": [USER, {"type": "hologram", "role": "user", "content": [{"type": "hologram", "of": "a cat"}]}]}),
        (ANTHROPIC, {"model": "claude-opus-5", "messages": [USER, {"role": "user", "content": [{"type": "hologram", "of": "a cat"}]}]}),
        (GOOGLE, {"contents": [{"parts": [{"text": "Hi."}]}, {"role": "user", "parts": [{"type": "hologram", "of": "a cat"}]}]}),
    ],
    ids=["chat", "responses", "anthropic", "google"],
)  # fmt: skip
def test_an_unknown_part_of_a_message_is_shown_as_json(tmp_path, url, body):
    step = step_of(tmp_path, url, body)

    assert parts_of(step) == [{"text": "Hi."}, {"text": '{"type":"hologram","of":"a cat"}'}]
    assert step["outcome"]["parts"] == [{"text": "Hello."}]


@pytest.mark.spec("replay:Y34")
@pytest.mark.parametrize("messages", [[None], [5, True], ["text"], [{"role": 5}], [{"role": "king", "content": []}]])
def test_a_message_of_another_type_is_shown_as_json(tmp_path, messages):
    step = step_of(tmp_path, CHAT, {"model": "m", "messages": messages})

    assert [json.loads(part["text"]) for part in parts_of(step)] == messages


@pytest.mark.spec("replay:Y34")
def test_unknown_members_are_shown_as_json(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
    message = {**USER, "name": "ann"}
    body = {
        "model": "m",
        "temperature": 0.5,
        "messages": [message],
        "tools": [tool, {"type": "web_search"}],
        "frobnicate": [1],
    }
    step = step_of(
        tmp_path, CHAT, {**body, "stream": False, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    )

    assert parts_of(step) == [{"text": "Hi."}, {"text": '{"name":"ann"}'}]
    assert (step["tools"], step["tool_choice"]) == (["look"], "look")
    left = {"frobnicate": [1], "tools": [{"name": "look", "strict": True}, {"type": "web_search"}]}
    assert step["settings"] == {"temperature": 0.5, "extra": {"body": left}}


@pytest.mark.spec("replay:Y34")
def test_unpaired_calls_and_results_are_shown_as_json(tmp_path):
    result = {"type": "function_call_output", "call_id": "call_1", "output": "5"}
    after = step_of(tmp_path, RESPONSES, {"model": "m", "previous_response_id": "resp_1", "input": [result]})
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    dangling = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "Well?"},
    ]
    before = step_of(tmp_path, CHAT, {"model": "m", "messages": dangling})

    assert [json.loads(part["text"]) for part in parts_of(after)] == [result]
    assert after["settings"] == {"extra": {"body": {"previous_response_id": "resp_1"}}}
    (shown,) = [part for part in parts_of(before) if "opaque" in part]
    assert (shown["did"], json.loads(shown["shows"])) == ("look", {"at": "x"})


@pytest.mark.spec("replay:Y34")
def test_reordered_results_and_equal_ids_belong_to_their_calls(tmp_path):
    def turn(*numbers: int) -> list[dict[str, Any]]:
        said = [{"type": "tool_use", "id": f"t{n}", "name": f"look{n}", "input": {}} for n in numbers]
        results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": f"saw {n}"} for n in reversed(numbers)]
        return [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [{"type": "text", "text": "Go on."}, *results]},
        ]

    messages = [USER, *turn(1, 2), *turn(1, 2)]
    step = step_of(tmp_path, ANTHROPIC, {"model": "claude-opus-5", "messages": messages})

    results = [(m["name"], m["parts"], m["id"]) for m in step["said"] if m["role"] == "tool"]
    assert results == [
        ("look1", [{"text": "saw 1"}], "c1"), ("look2", [{"text": "saw 2"}], "c2"),
        ("look1", [{"text": "saw 1"}], "c3"), ("look2", [{"text": "saw 2"}], "c4"),
    ]  # fmt: skip


@pytest.mark.spec("replay:Y34")
def test_an_equal_result_of_a_later_call_is_shown_again(tmp_path):
    def said(number: int) -> dict[str, Any]:
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def told(number: int) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": "sunny"}

    calls = [{"choices": [{"message": said(n), "finish_reason": "tool_calls"}]} for n in (1, 2)]
    histories = [[USER], [USER, said(1), told(1)], [USER, said(1), told(1), said(2), told(2)]]
    exchanges = [
        exchange(CHAT, {"model": "m", "messages": history}, reply)
        for history, reply in zip(histories, [*calls, REPLY], strict=True)
    ]
    steps = tree_of(tmp_path, *exchanges)["steps"]

    shown = [[message["role"] for message in step.get("said", ())] for step in steps]
    assert shown == [["user"], ["tool"], ["tool"]]


@pytest.mark.spec("replay:Y34")
def test_media_is_shown_by_kind_and_broken_media_as_json(tmp_path):
    def image(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    content = [
        image("aGVsbG8="),
        image("!"),
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,aGVsbG8="}},
    ]
    step = step_of(tmp_path, CHAT, {"model": "m", "messages": [{"role": "user", "content": content}]})
    shown = parts_of(step)

    assert shown[0]["media"].startswith("image/png 5 bytes")
    assert json.loads(shown[1]["text"]) == image("!")
    assert shown[2]["media"].startswith("application/pdf 5 bytes")

    url_safe = {"inlineData": {"mimeType": "image/jpeg", "data": "_9j_4A=="}}
    (part,) = parts_of(step_of(tmp_path, GOOGLE, {"contents": [{"role": "user", "parts": [url_safe]}]}))
    assert part["media"].startswith("image/jpeg 4 bytes")


@pytest.mark.spec("replay:Y34")
def test_other_http_requests_are_listed_with_method_url_and_status(tmp_path):
    tree = tree_of(
        tmp_path,
        exchange("https://api.openai.com/v1/embeddings", {"model": "e", "input": "x"}),
        exchange("https://weather.test/today?key=abc", b"", b"sunny", method="GET", headers=()),
        exchange("https://chat.test/v1/messages", {"text": "not for a model"}, status=404),
        exchange("https://api.openai.com/v1/responses", b"\xff\xfe", status=400),
    )

    assert [(step["kind"], step["name"], step["outcome"]) for step in tree["steps"]] == [
        ("perform", "POST https://api.openai.com/v1/embeddings", {"value": {"status": 200}}),
        ("perform", "GET https://weather.test/today?key=<redacted:key>", {"value": {"status": 200}}),
        ("perform", "POST https://chat.test/v1/messages", {"value": {"status": 404}}),
        ("perform", "POST https://api.openai.com/v1/responses", {"value": {"status": 400}}),
    ]
    assert tree["model_calls"] == 0


@pytest.mark.spec("replay:Y34")
def test_compressed_bodies_and_googles_arrays_are_read(tmp_path):
    packed = gzip.compress(json.dumps(REPLY).encode())
    stream = GOOGLE.replace(":g", ":streamG")
    chunks = [
        {"candidates": [{"content": {"parts": [{"text": "Hel"}]}}]},
        {"candidates": [{"content": {"parts": [{"text": "lo."}]}, "finishReason": "STOP"}]},
    ]
    tree = tree_of(
        tmp_path,
        exchange(CHAT, {"model": "m", "messages": [USER]}, packed, headers=(*JSON, ("Content-Encoding", "gzip"))),
        exchange(CHAT, {"model": "m", "messages": [USER]}, REPLY, headers=(*JSON, ("content-encoding", "\xe9"))),
        exchange(stream, {"contents": [{"parts": [{"text": "Hi."}]}]}, chunks),
    )

    assert [step["outcome"]["parts"] for step in tree["steps"]] == [[{"text": "Hello."}]] * 3


@pytest.mark.spec("replay:Y34")
def test_a_reply_that_cannot_be_continued_is_shown_as_json(tmp_path):
    click = {"status": "completed", "output": [{"type": "computer_call", "call_id": "x", "action": {"type": "click"}}]}
    step = step_of(tmp_path, RESPONSES, {"model": "m", "input": "Click."}, click)

    (part,) = step["outcome"]["parts"]
    assert json.loads(part["shows"]) == click


BODIES = [b"", b"[]", b"null", b"{}", b"[1]", b'{"choices": 5}', b"<html>", b"\xff", b"data: {", b"[" * 500]


@pytest.mark.spec("replay:Y34")
@pytest.mark.parametrize(
    ("body", "status"), [*[(body, 200) for body in BODIES], (b"", 302), (b"<html>", 429), (b"{}", 500)]
)
def test_no_reply_is_an_error_of_the_reader(tmp_path, body, status):
    exchanges = [
        exchange(CHAT, {"model": "m", "messages": [USER]}, body, status),
        exchange(ANTHROPIC, {"model": "m", "messages": [USER]}, body, status),
        exchange(RESPONSES, {"model": "m", "input": "Hi."}, body, status),
        exchange(GOOGLE, {"contents": [{"parts": [{"text": "Hi."}]}]}, body, status),
    ]
    tree = tree_of(tmp_path, *exchanges)

    assert [step["kind"] for step in tree["steps"]] == ["model"] * 4
    assert all("outcome" in step for step in tree["steps"])


@pytest.mark.spec("replay:Y34")
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path):
    path = tmp_path / "damaged.yaml"
    path.write_bytes(b"interactions: [5]")

    with pytest.raises(DataError, match=r"damaged\.yaml"):
        load_cassette_as_journal(path)


@pytest.mark.spec("replay:Y34")
def test_provider_ids_make_no_difference_but_changed_results_do(tmp_path):
    def loop(name: str, call_id: str, result: str) -> Path:
        call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": call_id, "content": result}
        first = {"choices": [{"message": said, "finish_reason": "tool_calls"}]}
        tree_of(
            tmp_path,
            exchange(CHAT, {"model": "m", "messages": [USER]}, first),
            exchange(CHAT, {"model": "m", "messages": [USER, said, told]}),
            name=name,
        )
        return tmp_path / name

    one, same, other = loop("a.yaml", "x1", "sunny"), loop("b.yaml", "x2", "sunny"), loop("c.yaml", "x3", "rain")

    assert not diff(load_cassette_as_journal(one), load_cassette_as_journal(same))
    (change,) = diff(load_cassette_as_journal(one), load_cassette_as_journal(other)).changes
    assert [(f.pointer, f.recorded, f.now) for f in change.fields] == [
        ("/messages/2/content/0/text", '"sunny"', '"rain"')
    ]


@pytest.mark.spec("replay:Y34", "reliability:I4")
def test_a_reply_without_usage_makes_the_cost_a_lower_bound(tmp_path):
    body = {"model": "gpt-5-mini", "messages": [USER]}
    known = exchange(
        CHAT, body, {**REPLY, "model": "gpt-5-mini", "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
    )
    exact = tree_of(tmp_path, known)
    tree = tree_of(tmp_path, known, exchange(CHAT, body))
    text = render(tree)

    assert "at_least" not in exact
    assert (True, None, {"in": 9, "out": 5}) == (tree["at_least"], tree["cost_usd"], tree["tokens"])
    assert "tokens at least 9 in / 5 out" in text
    assert "cost unknown" in text
