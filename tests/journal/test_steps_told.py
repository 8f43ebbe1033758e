"""Steps that are told: whatever befalls a run, each step that its events begin ends once, in order, and before the run does."""

from __future__ import annotations

from collections import Counter

import pytest

from stepengine import STEP, AgentDefinition, RunStatus
from stepengine.errors import ModelError
from stepengine.events import AgentFinished, ModelStarted, RunFinished, StepFinished, StepStarted
from stepengine.journal import MemoryJournal
from stepengine.testing import failure, text, tool_call


class Stream:
    """An observer that notes what a stream tells, and checks that it is told of whole steps."""

    def __init__(self):
        self.seen = []
        self.open = {}
        self.ended = Counter()
        self.statuses = []

    def on_event(self, event):
        self.seen.append(event)
        if isinstance(event, StepStarted):
            assert event.path not in self.open, "a step begins while another one of its run is under way"
            self.open[event.path] = event.step
        elif isinstance(event, StepFinished):
            assert self.open.pop(event.path, None) == event.step, "a step ends that nobody saw begin"
            self.ended[event.path, event.step, event.status] += 1
            self.statuses.append(event.status)
        elif isinstance(event, AgentFinished):
            assert event.child_path not in self.open, "a child ends in the middle of a step"
        elif isinstance(event, RunFinished):
            assert self.open == {}, "the run ends in the middle of a step"

    def check(self):
        """Return how the steps ended, once it is over."""
        assert isinstance(self.seen[-1], RunFinished)
        assert self.open == {}
        assert {times for key, times in self.ended.items() if key[2] is RunStatus.COMPLETED} <= {1}
        return self.statuses


def told(world, begin):
    stream = Stream()
    result = begin(world.rig(observers=[stream]))
    return result, stream.check(), stream


@pytest.fixture
def whole(fresh_world):
    journal = MemoryJournal()
    result, statuses, stream = told(fresh_world(), lambda rig: rig.record(journal))
    assert result.status is RunStatus.COMPLETED
    assert statuses == [RunStatus.COMPLETED] * len(statuses)
    assert len(statuses) == 6
    return journal.lines(), stream


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF11")
def test_resumed_run_reports_whole_steps_after_any_cut(fresh_world, whole):
    lines, first = whole
    going_on = 0
    for cut in range(2, len(lines)):
        journal = MemoryJournal(lines[:cut])
        news, statuses, stream = told(fresh_world(), lambda rig, journal=journal: rig.resume(journal))
        open_paths, resumed = set(), [e.path for e in stream.seen if isinstance(e, StepStarted) and e.resumed]
        assert len(resumed) == len(set(resumed)), "a step goes on once"
        for event in stream.seen:
            if isinstance(event, StepStarted):
                open_paths.add(event.path)
            elif isinstance(event, StepFinished):
                open_paths.discard(event.path)
            elif isinstance(event, ModelStarted):
                assert event.path in open_paths, f"cut at {cut}: the model is asked outside of a step"
        going_on += len(resumed)
        if news.status is RunStatus.COMPLETED:
            assert set(statuses) <= {RunStatus.COMPLETED}
            assert set(stream.ended) <= set(first.ended)
    assert statuses == [], "nothing of any step was news at the last cut"
    assert going_on > 10
    assert not any(e.resumed for e in first.seen if isinstance(e, StepStarted))


@pytest.mark.spec("interfaces:IF11")
def test_suspended_step_starts_again_with_the_answer(rig):
    asks = AgentDefinition("asks", model="test/m", tools=["ask_user"])
    journal, first, second = MemoryJournal(), Stream(), Stream()
    call = tool_call("ask_user", {"questions": [{"question": "Which?"}]})
    rig(asks, [call], observers=[first]).record(journal)
    assert first.check() == [RunStatus.SUSPENDED]
    (question,) = first.seen[-1].result.pending_questions
    rig(asks, [text("done")], observers=[second]).resume(journal, {question.id: "this"})
    assert second.check() == [RunStatus.COMPLETED, RunStatus.COMPLETED]
    assert [e.step for e in second.seen if isinstance(e, StepStarted)] == [0, 1]


@pytest.mark.spec("interfaces:IF11")
def test_failed_step_is_reported_and_its_number_reused(rig):
    def handler(ctx):
        with pytest.raises(ModelError):
            yield STEP
        yield STEP

    stream = Stream()
    agent = AgentDefinition("tries", model="test/m", handle_steps=handler)
    rig(agent, [failure(ModelError("no", kind="bad_request")), text("yes")], observers=[stream]).record(MemoryJournal())
    assert stream.check() == [RunStatus.FAILED, RunStatus.COMPLETED]
    assert [e.step for e in stream.seen if isinstance(e, StepStarted)] == [0, 0]
