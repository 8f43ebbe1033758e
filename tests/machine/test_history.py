"""Record and view of a run, without a run: what is said, how long it stays, what children take over and leave."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine.data.messages import AssistantMessage, TextPart, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.machine.history import SLICE_MESSAGES, LastTexts, RunHistory
from tests.machine.world import lines


def history(*messages, view=None, keeps=None):
    record = Transcript(messages)
    return RunHistory(record, record if view is None else Transcript(view), keeps or {})


def said(text, **fields):
    return UserMessage(text, **fields)


def calling(call_id, name="look", text=""):
    parts = [TextPart(text)] if text else []
    return AssistantMessage((*parts, ToolCallPart(call_id, name, {})))


def result(call_id, name="look", text="seen"):
    return ToolResult.text(text, tool_name=name, tool_call_id=call_id)


@pytest.mark.parametrize("calls", [0, 1, SLICE_MESSAGES - 1, SLICE_MESSAGES, 3 * SLICE_MESSAGES])
def test_last_answer_is_found_behind_any_number_of_calls(calls):
    past = history(AssistantMessage("before the run"))
    texts = LastTexts(past)

    def work(word):
        for n in range(calls):
            past.append_reply(calling(f"{word}{n}"), [result(f"{word}{n}")])

    work("a")
    assert texts.get_joined_text() == ""
    past.add([AssistantMessage("thinking aloud"), AssistantMessage(" ")])
    work("b")
    assert texts.get_joined_text() == texts.get_joined_text() == "thinking aloud"
    past.append_reply(calling("c", text="more"), [result("c")])
    work("d")
    assert texts.get_joined_text() == ("more" if calls else "thinking aloud\n\nmore")


@pytest.mark.spec("requirements:X11")
def test_reopened_step_returns_its_calls_and_later_messages():
    waiting = ToolResult.make_pending("q1", tool_name="look", tool_call_id="c1")
    past = history(said("a"))
    past.append_reply(calling("c1"), [waiting])
    past.add([said("are you there?")])
    taken_up = RunHistory(past.record, past.view, {})
    assert taken_up.reopen_suspended_step([said("yes")])
    assert lines(taken_up.inbox) == ["user: are you there?", "user: yes"]
    assert lines(taken_up.record) == lines(taken_up.view) == ["user: a"]
    assert taken_up.open_step is not None
    message, results = taken_up.open_step
    assert (message.tool_calls[0].tool_call_id, [m.status for m in results]) == ("c1", ["pending"])
    untouched = history(said("a"))
    assert not untouched.reopen_suspended_step([said("b")])
    assert untouched.inbox == []


# --- what this run added ------------------------------------------------------------------------------------------------


TIMES = st.sampled_from([None, None, "agent_step", "user_prompt"])


def shortened(data, past, before, own, new):
    """A record as handlers and policies make them of what stands: shorter, begun anew, longer, or another one."""
    return data.draw(
        st.sampled_from(
            [[*past.record][data.draw(st.integers(0, len(past.record))) :], own, [*new, *own], [*before, *new], new, []]
        )
    )


@pytest.mark.spec("requirements:H4")
@given(data=st.data())
@settings(max_examples=25)
def test_added_messages_are_exactly_those_of_this_run(data):
    """
    The run's messages, kept here in a list of their own, are what is told as added: after messages that left, before and
    behind where the run began; in a record that lost its beginning; in another one, from where the run began on.
    """
    numbers = itertools.count()

    def some(least=0):
        return [said(f"m{next(numbers)}", ttl=data.draw(TIMES)) for _ in range(data.draw(st.integers(least, 3)))]

    before, own = some(), list[UserMessage]()
    past = history(*before)
    for what in data.draw(st.lists(st.sampled_from(["add", "expire", "replace", "view"]), max_size=8)):
        if what == "add":
            new = some(1)
            past.add(new)
            own += new
        elif what == "expire":
            ttl = data.draw(st.sampled_from(["agent_step", "user_prompt"]))
            past.remove_expired(ttl)
            before, own = ([m for m in messages if m.ttl != ttl] for messages in (before, own))
        elif what == "view":
            past.replace(None, Transcript(some()))
        else:
            record = shortened(data, past, before, own, some())
            past.replace(Transcript(record), None)
            end = len(record) - len(own) if own and record[-len(own) :] == own else min(len(before), len(record))
            before, own = record[:end], record[end:]

        assert [*past.record] == before + own
        assert [*past.list_added_messages()] == own


@given(st.integers(0, 3), st.integers(0, 5))
def test_unstarted_run_has_added_nothing(old, new):
    past = history(*[said(f"old {n}") for n in range(old)])
    past.replace(Transcript([said(f"new {n}") for n in range(new)]), None, has_begun=False)

    assert past.list_added_messages() == ()
    past.add([said("mine")])
    assert lines(past.list_added_messages()) == ["user: mine"]


@given(st.integers(0, 3), st.integers(0, 3))
def test_reopened_step_counts_as_added_by_the_finishing_run(before, after):
    stored = [said(f"before {n}") for n in range(before)]
    pending = [calling("c1"), ToolMessage("c1", "look", (), "pending")]
    past = history(*stored, *pending, *[said(f"after {n}") for n in range(after)])
    past.reopen_suspended_step(())
    came = past.pop_inbox_messages()
    past.append_reply(past.open_step[0], [result("c1")])
    past.add(came)

    assert [*past.record][:before] == stored
    assert len(past.list_added_messages()) == 2 + after


# --- what an inline child leaves ----------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("ab")), st.sampled_from("ab"), st.lists(st.sampled_from("ab")))
def test_inline_child_leaves_inherited_texts_of_other_replies(before, text, own):
    past = history(said("task"), *[AssistantMessage(one, ("OPEN_REPLY",)) for one in before])
    past.set_open_reply(calling("c1", text=text))
    inherited = past.make_inherited_history("c1")
    added = [said(one) for one in own]
    left = AgentState("r", "child", message_history=inherited.record.with_messages(added))

    record, view = past.make_history_after_inline_child(left, "c1")

    assert [*record] == [*view] == [*past.record, *added]
