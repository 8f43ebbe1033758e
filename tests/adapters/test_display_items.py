"""
The texts of a run as items: started before their pieces, ended after them, and whole at their ends.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepengine import events as ev
from stepengine.adapters.display_items import TextItems


def test_discarded_call_discards_only_its_own_texts() -> None:
    texts = TextItems()
    for event in (ev.TextDelta(text="a", seq=1), ev.TextDelta(text="b", seq=2), ev.TextDelta(text="c", path="1")):
        list(texts.make_items(event))

    assert [("a", True), ("b", False)] == [
        (one.text.shown, one.is_discarded) for one in texts.end_texts("", discarded=1)
    ]
    assert ([], ["c"]) == (list(texts.end_texts("")), [one.text.shown for one in texts.end_texts("1", discarded="all")])


@given(st.lists(st.tuples(st.sampled_from(["delta", "thought", "text"]), st.integers(0, 2), st.text(max_size=3))))
def test_every_text_starts_once_and_ends_once(made: list[tuple[str, int, str]]) -> None:
    kinds = {"delta": ev.TextDelta, "thought": ev.ThinkingCompleted, "text": ev.TextCompleted}
    texts = TextItems()
    events = [kinds[kind](text=text, seq=seq) for kind, seq, text in made]
    items = [*[item for event in events for item in texts.make_items(event)], *texts.end_texts("")]
    steps: dict[int, list[str]] = {}
    for step, text, _, _ in items:
        steps.setdefault(text.number, []).append(step)

    assert all(["start", "end"] == [one for one in each if one != "piece"] for each in steps.values())
    assert all(each[0] == "start" and each[-1] == "end" and len(each) > 2 for each in steps.values())
