"""
The texts of a run as items: started before their pieces, ended after them, and whole at their ends.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepengine import events as ev
from stepengine.adapters.display_items import CallItems, TextItems, find_unsaid
from stepengine.data.json import ABSENT
from stepengine.data.messages import ToolResult


def items_of(*events: Any) -> list[tuple[str, int, str, bool]]:
    texts = TextItems()
    return [
        (step, text.number, piece, gone) for event in events for step, text, piece, gone in texts.show(event)
    ]  # fmt: skip


def test_completed_text_adds_missed_pieces() -> None:
    assert [("start", 1, "", False), ("piece", 1, "Hel", False), ("piece", 1, "lo.", False), ("end", 1, "", False)] == (
        items_of(ev.TextDelta(text="Hel"), ev.TextCompleted(text="Hello."))
    )
    assert [] == items_of(ev.TextDelta(text=""), ev.TextCompleted(text=""))


def test_contradicting_text_is_discarded_and_shown_again() -> None:
    assert [
        ("start", 1, "", False), ("piece", 1, "wrong", False), ("end", 1, "", True),
        ("start", 2, "", False), ("piece", 2, "right", False), ("end", 2, "", False),
    ] == items_of(ev.ThinkingDelta(text="wrong"), ev.ThinkingCompleted(text="right"))  # fmt: skip


def test_discarded_call_discards_only_its_own_texts() -> None:
    texts = TextItems()
    for event in (ev.TextDelta(text="a", seq=1), ev.TextDelta(text="b", seq=2), ev.TextDelta(text="c", path="1")):
        list(texts.show(event))

    assert [("a", True), ("b", False)] == [(one.text.shown, one.is_discarded) for one in texts.end("", discarded=1)]
    assert ([], ["c"]) == (list(texts.end("")), [one.text.shown for one in texts.end("1", discarded="all")])


def test_output_is_shown_unless_the_root_model_said_it() -> None:
    texts = TextItems()
    for event in (ev.TextCompleted(text="It is red."), ev.TextCompleted(text="blue", path="1")):
        list(texts.show(event))
    last = ev.TextDelta(text="")

    assert [0, 0, 2] == [len(list(texts.show_output(last, said))) for said in ("red", " \n", "blue")]
    assert ("blue", "") == (find_unsaid("blue", ["red"]), find_unsaid("re", ["red"]))


@given(st.lists(st.tuples(st.sampled_from(["delta", "thought", "text"]), st.integers(0, 2), st.text(max_size=3))))
def test_every_text_starts_once_and_ends_once(made: list[tuple[str, int, str]]) -> None:
    kinds = {"delta": ev.TextDelta, "thought": ev.ThinkingCompleted, "text": ev.TextCompleted}
    texts = TextItems()
    events = [kinds[kind](text=text, seq=seq) for kind, seq, text in made]
    items = [*[item for event in events for item in texts.show(event)], *texts.end("")]
    steps: dict[int, list[str]] = {}
    for step, text, _, _ in items:
        steps.setdefault(text.number, []).append(step)

    assert all(["start", "end"] == [one for one in each if one != "piece"] for each in steps.values())
    assert all(each[0] == "start" and each[-1] == "end" and len(each) > 2 for each in steps.values())


def calls_of(calls: CallItems, *events: Any) -> list[tuple[str, str, str, object, bool]]:
    return [
        (one.step, one.call, one.piece, one.given, one.is_streamed) for event in events for one in calls.show(event)
    ]  # fmt: skip


def test_call_input_is_shown_once_before_its_result() -> None:
    started = ev.ToolStarted(tool_name="t", tool_call_id="c", input={"a": 1})
    piece = ev.ToolInputDelta(tool_name="t", tool_call_id="c", text="{")
    finished = ev.ToolFinished(tool_name="t", tool_call_id="c", result=ToolResult.text("ok"))

    assert [
        ("start", "c", "", ABSENT, True),
        ("piece", "c", "{", ABSENT, True),
        ("input", "c", "", {"a": 1}, True),
    ] == (calls_of(CallItems(), piece, started, finished))
    assert [("input", "c", "", {"a": 1}, False)] == calls_of(CallItems(), started, started, finished)
    assert [("input", "c", "", ABSENT, False)] == calls_of(CallItems(), finished)
    assert [] == calls_of(CallItems(["c"]), started, finished)
    assert [] == calls_of(CallItems(), ev.ToolInputDelta(tool_name="t", tool_call_id="", text="{"))


def test_broken_off_call_input_starts_again_unless_over() -> None:
    piece = ev.ToolInputDelta(tool_name="t", tool_call_id="c", text="{")
    broken, over = CallItems(), CallItems()
    for calls in (broken, over):
        calls_of(calls, piece)

    assert (["c"], ["c"]) == (broken.pop_coming("", are_over=False), over.pop_coming("", are_over=True))
    assert (["start", "piece"], ["piece"]) == tuple([[one[0] for one in calls_of(c, piece)] for c in (broken, over)])
    assert [] == over.pop_coming("", are_over=True)


def test_reopened_call_shows_its_input_again() -> None:
    calls = CallItems()
    started = [ev.ToolStarted(tool_name="t", tool_call_id=name, input={}) for name in ("a", "b")]
    calls_of(calls, *started)

    assert [("", "b")] == calls.reopen(lambda _, call: call == "a")
    assert ["b"] == [one[1] for one in calls_of(calls, *started)]
