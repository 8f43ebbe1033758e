"""
Suspension: a question without an answer is the whole state, and an answer is good or refused, never lost.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Answer,
    Ask,
    Engine,
    Parallel,
    Perform,
    RunStatus,
)
from stepengine.errors import AnswerRejected
from stepengine.journal import FileJournal, MemoryJournal, check
from stepengine.journal.pending_items import find_open_questions
from stepengine.testing import text, tool_call
from stepengine.tools.bundled import ask_user_tool
from tests.phrases import NO_OPTION


def asker(done: list[str], **options: Any) -> AgentDefinition[Any]:
    def handle_steps(ctx):
        yield from Perform(done.append, "before")
        answer = yield from Ask("Open a ticket?", options=["yes", "no"], **options)
        yield from Perform(done.append, f"after {answer}")
        return answer

    return AgentDefinition("asker", handle_steps=handle_steps)


@pytest.mark.spec("requirements:K3", "reliability:R2", "reliability:JR37")
def test_run_waits_for_its_answer_and_continues(rig, store):
    done: list[str] = []
    asked = rig(asker(done)).record(store())
    assert (asked.status, asked.text, asked.error) == (RunStatus.SUSPENDED, "", None)
    (question,) = asked.pending_questions
    assert (question.id, question.options) == ("q1", ("yes", "no"))
    assert not store().history().is_complete
    again = rig(asker(done)).resume(store())
    assert (again.status, again.pending_questions) == (RunStatus.SUSPENDED, asked.pending_questions)
    answered = rig(asker(done)).resume(store(), {"q1": "yes"})
    assert (answered.status, answered.output) == (RunStatus.COMPLETED, "yes")
    assert done == ["before", "after yes"]
    assert rig(asker(done)).replay(store()).output == "yes"
    assert done == ["before", "after yes"]
    assert check(store())


def alone(ctx):
    return (yield from Ask("Really?"))


def beside(ctx):
    _, answer = yield from Parallel(Perform.idempotent(len, "ab"), Ask("Really?"))
    return answer


def leading(ctx):
    children = yield from Parallel(AgentCall("kid"), AgentCall("kid"))
    return [child.output for child in children]


def grand(ctx):
    return (yield from AgentCall("boss"))


class Somebody:
    """
    Who is asked, and does not answer: nobody is there, or the run is stopped in that moment.
    """

    def __init__(self, way: str) -> None:
        self.way = way
        self.handle: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stopping: list[asyncio.Task[Any]] = []

    async def ask(self, question):
        if self.way == "waits":
            return
        handle = await self.handle
        if self.way == "interrupt":
            handle.interrupt()
        elif not self.stopping:
            self.stopping.append(asyncio.create_task(handle.shutdown()))
        await asyncio.Event().wait()


WAYS = ("waits", "interrupt", "shutdown")


@pytest.mark.spec("replay:J16", "reliability:JR37", "reliability:R2", "reliability:I3", "reliability:I12")
@pytest.mark.parametrize(
    ("shape", "processes"),
    [(alone, 2), *[pytest.param(one, 3, marks=pytest.mark.deep) for one in (alone, beside, leading, grand)]],
)
async def test_replay_ends_like_the_last_of_several_stopped_processes(shape, processes):
    """
    The journal tells a run that waits for its answer from one that was stopped meanwhile, and so does a journal of the replay.
    """
    kid = AgentDefinition("kid", handle_steps=alone)
    boss = AgentDefinition("boss", handle_steps=leading, spawnable_agents=[kid])
    agent = AgentDefinition("asks", handle_steps=shape, spawnable_agents=[kid, boss])
    for stable, *ways in itertools.product([False, True], *[WAYS] * processes):
        journal = MemoryJournal(stable=stable)
        for number, way in enumerate(ways):
            somebody = Somebody(way)
            async with Engine([agent], interactor=somebody) as engine:
                if number:
                    handle = await engine.start_resume(journal, agent=agent)
                else:
                    handle = engine.start(agent, journal=journal)
                somebody.handle.set_result(handle)
                ended = await handle.result()
                await asyncio.gather(*somebody.stopping)
                again = await engine.replay(journal, agent=agent)
                twice = await engine.replay(again.journal, agent=agent)

            assert (RunStatus.SUSPENDED if way == "waits" else RunStatus.CANCELLED) == ended.status, ways
            assert ended.status == again.status == twice.status, ways
            assert ended.pending_questions == again.pending_questions == twice.pending_questions
            assert journal.lines() == again.journal.lines() == twice.journal.lines()
            assert check(journal)
        async with Engine([agent]) as engine:
            open_ = find_open_questions(journal.history())
            result = await engine.resume(journal, agent=agent, answers=dict.fromkeys(open_, "yes"))
        assert RunStatus.COMPLETED == result.status, result.error


@pytest.mark.spec("requirements:X54", "reliability:JR37")
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"q7": "yes"}, "'q7' is not a question of this run; open are: 'q1' \\(Open a ticket\\?\\)"),
        ({"q1": 5}, "a string, a bool or an Answer, not a int"),
        ({"q1": "maybe"}, f"'q1' is 'maybe', which is {NO_OPTION}: 'yes', 'no'"),
        ({"Open a ticket?": Answer(text="x" * 300)}, rf"'x{{200}}\.\.\.', which is {NO_OPTION}"),
        ({"q1": Answer(selected=("maybe",))}, r"selects \['maybe'\]; its options are \['yes', 'no'\]"),
        ({"q1": Answer(selected=("yes", "no"))}, "selects 2 options; only one can be chosen"),
    ],
)
def test_invalid_answer_is_rejected_and_changes_nothing(rig, answers, said):
    done: list[str] = []
    journal = MemoryJournal()
    rig(asker(done)).record(journal)
    before = journal.lines()
    with pytest.raises(AnswerRejected, match=said):
        rig(asker(done)).resume(journal, answers)
    assert journal.lines() == before
    assert done == ["before"]
    assert rig(asker(done)).resume(journal, {"Open a ticket?": False}).output == "no"


@pytest.mark.spec("requirements:X54")
def test_second_answer_to_a_long_question_has_a_short_error(rig):
    long = "Open a ticket? " + "x" * 40_000

    def handle_steps(_):
        return (yield from Ask(long, options=["yes", "no"]))

    agent = AgentDefinition("asker", handle_steps=handle_steps)
    journal = MemoryJournal()
    rig(agent).record(journal)
    with pytest.raises(AnswerRejected, match="is not a question of this run; open are: 'q0'") as caught:
        rig(agent).resume(MemoryJournal(journal.lines()), {"q7": "yes"})
    assert len(str(caught.value)) < 2_000
    rig(agent).resume(journal, {"q0": "yes"})
    for key in ("q0", long):
        with pytest.raises(AnswerRejected, match="is already answered; open are: none") as caught:
            rig(agent).resume(MemoryJournal(journal.lines()), {key: "no"})
        assert len(str(caught.value)) < 2_000


@pytest.mark.spec("requirements:X54")
@pytest.mark.parametrize(
    ("answer", "got"), [("something else", "something else"), (True, "yes"), (Answer(declined=True), "")]
)
def test_text_bool_and_declined_answers_are_accepted(rig, answer, got):
    free = {"allow_text": got == answer}
    journal = MemoryJournal()
    rig(asker([], **free)).record(journal)
    assert rig(asker([], **free)).resume(journal, {"q1": answer}).output == got


@pytest.mark.spec("reliability:R2", "reliability:R1")
def test_question_is_durable_before_a_person_is_asked(rig, tmp_path):
    """
    Who has seen it may answer it, also when the process that asked was killed.
    """

    class Person:
        def ask(self, question):
            seen.append(list(find_open_questions(FileJournal(path).history())))
            return "yes"

    seen, path = [], tmp_path / "run.jsonl"

    def handle_steps(ctx):
        yield from Perform.idempotent(len, "x")
        return (yield from Parallel(Ask("One?"), Ask("Two?")))

    rig(AgentDefinition("asker", handle_steps=handle_steps), interactor=Person()).record(FileJournal(path))

    assert ["q1", "q2"] == seen[0]


@pytest.mark.spec("requirements:K6", "reliability:JR37")
def test_partial_answers_of_one_call_are_kept(rig):
    questions = {"questions": [{"question": "Red?"}, {"question": "Blue?"}]}
    replies = [tool_call("ask_user", questions), text("thanks")]
    agent = AgentDefinition("poll", model="t/m", tools=[ask_user_tool()])
    journal = MemoryJournal()
    asked = rig(agent, replies).record(journal)
    ids = [q.id for q in asked.pending_questions]
    assert len(ids) == 2
    half = rig(agent, ["unused"]).resume(MemoryJournal(journal.lines()), {ids[1]: "sure"})
    assert half.status is RunStatus.SUSPENDED
    with pytest.raises(AnswerRejected, match="is already answered"):
        rig(agent).resume(MemoryJournal(half.journal.lines()), {ids[1]: "no"})
    result = rig(agent, [text("thanks")]).resume(MemoryJournal(half.journal.lines()), {ids[0]: "never"})
    assert result.text == "thanks"
    answers = result.tool_calls[0].result.data["answers"]
    assert [a["text"] for a in answers] == ["never", "sure"]
