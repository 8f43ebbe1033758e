"""
`journal=`, `resume`, `replay` and `fork` of the engine: the same runs as without a journal, and the record of them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Limits,
    Perform,
    RunStatus,
    Tool,
    ToolCall,
)
from stepengine.errors import (
    AgentError,
    AnswerRejected,
    InputError,
    JournalError,
    LimitExceeded,
    MissingKey,
    UnknownModel,
)
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal
from stepengine.models import Models, Provider
from stepengine.testing import ScriptedModel, text, tool_call


class Forbidden(Provider):
    """
    A provider that nobody may use.
    """

    name = "forbidden"

    def supports_model(self, model: str) -> bool:
        raise AssertionError(model)

    def check(self, model: str) -> None:
        raise AssertionError(model)

    async def complete(self, request: Any) -> Any:
        raise AssertionError(request)


class Desk:
    """
    An agent that uses a model, a tool, its own I/O and a person; `done` lists what was really done.
    """

    def __init__(self, prompt: str = "You help.", *, forbidden: bool = False, model: str | None = "test/big") -> None:
        self.done: list[str] = []
        self.forbidden = forbidden
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        tool = Tool(name="send", description="Send.", input_schema=schema, run=self.send, in_thread=False)

        def handle_steps(ctx: Any) -> Any:
            config = yield from Perform(self.act, "config")
            yield STEP_ALL
            answer = yield from Ask("Ship it?", options=["yes", "no"])
            sent = yield from ToolCall("send", {"n": 9}, include_tool_call=False)
            return {
                "config": config,
                "answer": answer,
                "sent": sent.data,
                "at": str(ctx.now()),
                "r": ctx.random.random(),
            }

        self.agent = AgentDefinition("desk", model=model, system_prompt=prompt, tools=[tool], handle_steps=handle_steps)

    def act(self, what: str) -> str:
        assert not self.forbidden
        self.done.append(what)
        return what

    def send(self, arguments: Any) -> Any:
        return self.act(f"send {arguments['n']}")

    def engine(self, *replies: Any, **options: Any) -> Engine:
        return Engine([self.agent], models=ScriptedModel(replies), **options)


REPLIES = (tool_call("send", {"n": 1}), text("sent"))


def recorded(journal: Any) -> Any:
    """
    Return the result of a whole run that was recorded in two sittings.
    """
    desk = Desk()
    with desk.engine(*REPLIES) as engine:
        asked = engine.run_sync("desk", "go", journal=journal)
    (question,) = asked.pending_questions
    with desk.engine() as engine:
        return engine.resume_sync(journal, answers={question.id: "yes"})


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run.jsonl"


@pytest.mark.spec("requirements:K3", "reliability:R2", "reliability:JR37")
def test_suspended_run_resumes_with_answers_in_another_engine_without_repeats(journal: Any) -> None:
    desk = Desk()
    with desk.engine(*REPLIES) as engine:
        asked = engine.run_sync("desk", "go", journal=journal)
    assert (asked.status, len(asked.pending_questions)) == (RunStatus.SUSPENDED, 1)
    assert asked.journal is not None
    later = Desk()
    with later.engine() as engine:
        done = engine.resume_sync(journal, answers={asked.pending_questions[0].id: "yes"})
    assert done.status is RunStatus.COMPLETED, done.error
    assert (desk.done, later.done) == (["config", "send 1"], ["send 9"])
    assert done.output["answer"] == "yes"


@pytest.mark.spec("reliability:I3")
def test_replay_performs_nothing_and_equals_result_and_journal(journal: Any) -> None:
    first = recorded(journal)
    desk = Desk(forbidden=True)
    copies = []
    for _ in range(2):
        with Engine([desk.agent], models=Forbidden()) as engine:
            again = engine.replay_sync(journal)
        assert again == first
        copies.append(again.journal.lines())
    assert copies[0] == copies[1] == first.journal.content().splitlines(keepends=True)


@pytest.mark.spec("reliability:I3")
@pytest.mark.parametrize(
    ("named", "default"), [("anthropic/claude-x", None), ("nobody/knows", None), ("claude-x", None), (None, "nobody/y")]
)
def test_a_replay_needs_neither_key_nor_provider_nor_default_model(
    named: str | None, default: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    journal = MemoryJournal()
    agent = AgentDefinition("plain", model=named, hooks=Hooks(pre_step=[lambda ctx: None]))
    with Engine([agent], models=ScriptedModel([text("hi")]), default_model=default) as engine:
        first = engine.run_sync("plain", "go", journal=journal)
    assert first.text == "hi", first.error
    with Engine([agent]) as engine:
        assert engine.replay_sync(journal).text == "hi"
        assert engine.resume_sync(journal).text == "hi"
    if named == "anthropic/claude-x":
        cut = MemoryJournal(journal.lines()[:2])
        with Engine([agent]) as engine, pytest.raises(MissingKey):
            engine.resume_sync(cut)


@pytest.mark.parametrize("now", [None, "test:m", "nobody/knows"])
def test_root_without_a_model_is_replayed_with_its_recorded_one(now: str | None) -> None:
    """Whatever the engine has for a default by now; a run that goes on is asked of the recorded one too."""
    journal, agent = MemoryJournal(), AgentDefinition("plain", handle_steps=lambda ctx: (yield STEP))
    models = Models({"test": (scripted := ScriptedModel([text("hi"), text("ho")]))})
    with Engine([agent], models=models, default_model="test/m") as engine:
        engine.run_sync("plain", "go", journal=journal)

    with Engine([agent], models=models, default_model=now) as engine:
        assert "hi" == engine.replay_sync(journal).text
        cut = MemoryJournal(journal.lines()[:2])
        assert "ho" == engine.resume_sync(cut).text
    assert ["test/m", "test/m"] == [request.model.replace(":", "/") for request in scripted.calls]


@pytest.mark.spec("reliability:R2")
def test_run_that_cannot_start_releases_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Desk().engine(*REPLIES) as engine:
        engine.run_sync("desk", "go", journal=path)
    with Engine() as empty:
        for attempt in (empty.resume_sync, empty.replay_sync):
            with pytest.raises(AgentError, match="'desk'"):
                attempt(path)
        with pytest.raises(JournalError, match="not a int"):
            empty.run_sync(Desk().agent, journal=5)
    FileJournal(path).writer().close()


def test_streams_and_handles_record_and_resume_emits_only_new_events() -> None:
    async def go() -> None:
        streamed, started, seen = MemoryJournal(), MemoryJournal(), []
        desk = Desk()
        async with desk.engine(*REPLIES, *REPLIES) as engine:
            events = [event async for event in engine.stream("desk", "go", journal=streamed)]
            assert events[-1].result.journal is streamed
            async with engine.start("desk", "go", journal=started) as handle:
                result = await handle.result()
            assert result.journal is started
        async with desk.engine(observers=[seen.append]) as engine:
            await engine.resume(started, answers={result.pending_questions[0].id: "yes"})
        told = [event.type for event in seen]
        assert (type(seen[0]).__name__, told.count("run_finished") + told.count("RunFinished")) == ("RunStarted", 1)
        assert not [e for e in seen if "Model" in type(e).__name__]
        assert [e.tool_name for e in seen if type(e).__name__ == "ToolFinished"] == ["send"]
        assert [e.index for e in seen] == list(range(len(seen)))

    asyncio.run(go())


def test_run_at_its_step_limit_is_recorded_and_replays_alike() -> None:
    def handle_steps(ctx: Any) -> Any:
        for _ in range(3):
            yield STEP
        return "done"

    agent = AgentDefinition("steps", model="t/m", handle_steps=handle_steps)
    journal = MemoryJournal()
    with Engine([agent], models=ScriptedModel([text("a"), text("b"), text("c")])) as engine:
        try:
            first = engine.run_sync("steps", journal=journal, limits=Limits(max_steps=2))
        except LimitExceeded as error:
            first = error.result
        assert first.journal is journal
        again = engine.replay_sync(journal)
        assert again.status is first.status


@pytest.mark.spec("reliability:JR13")
def test_unread_stream_releases_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def go() -> Any:
        async with Desk().engine(*REPLIES) as engine:
            events = engine.stream("desk", "go", journal=path)
            await events.aclose()
            del events
            return await engine.resume(path)

    assert asyncio.run(go()).status is RunStatus.SUSPENDED


def test_fork_before_the_first_model_call_knows_the_model() -> None:
    journal = MemoryJournal()
    agent = AgentDefinition("plain", handle_steps=lambda ctx: (yield STEP))
    with Engine([agent], models=ScriptedModel([text("a")]), default_model="test/m") as engine:
        engine.run_sync("plain", "go", journal=journal)
    with Engine([agent], models=ScriptedModel([text("b")])) as engine:
        forked = engine.fork_sync(journal, at=-1)
    assert (forked.status, forked.text) == (RunStatus.COMPLETED, "b"), forked.error


@pytest.mark.spec("replay:J1")
def test_sqlite_path_stores_many_runs_selected_after_a_hash(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "runs.db")
    agent = AgentDefinition("plain", handle_steps=lambda ctx: (yield Perform(len, ctx.prompt)))
    with Engine([agent]) as engine:
        first = engine.run_sync("plain", "a", journal=path)
        assert engine.replay_sync(path) == first  # the only one
        second = engine.run_sync("plain", "bb", journal=path)
        runs = SqliteJournal(path).runs()
        assert len(runs) == 2
        replayed = [engine.replay_sync(f"{path}#{run}") for run in runs]
        assert sorted(replayed, key=lambda result: result.state.run_id) == sorted(
            [first, second], key=lambda result: result.state.run_id
        )
        with pytest.raises(JournalError, match=f"Its runs: {', '.join(runs)}"):
            engine.replay_sync(path)


def test_unknown_choice_is_refused_before_any_decision(tmp_path: Path) -> None:
    journal = MemoryJournal()
    recorded(journal)
    before = journal.lines()
    given: Any = "bogus"
    with Desk(forbidden=True).engine() as engine:
        with pytest.raises(JournalError, match="in_doubt must be one of fail, retry, ask, not 'bogus'"):
            engine.resume_sync(journal, in_doubt=given)
        with pytest.raises(JournalError, match="on_divergence must be one of raise, stop, keep, not 'bogus'"):
            engine.replay_sync(journal, on_divergence=given)
    with pytest.raises(JournalError, match="sync must be one of disk, write, not 'bogus'"):
        FileJournal(tmp_path / "run.jsonl", sync=given)
    assert journal.lines() == before


@pytest.mark.parametrize("answers", [["yes"], "yes", 3, {3: "yes"}])
def test_answers_that_are_no_mapping_are_refused_before_anything_happens(tmp_path, answers):
    def asking(ctx):
        return (yield from Ask("Go on?"))

    path = tmp_path / "run.jsonl"
    with Engine([AgentDefinition("asking", handle_steps=asking)]) as engine:
        with pytest.raises(InputError, match="answers must be a mapping from the id or text of a question"):
            engine.run_sync("asking", answers=answers)
        engine.run_sync("asking", journal=path)
        before = path.read_bytes()
        for go_on in (engine.resume_sync, partial(engine.resume_sync, on_divergence="extend")):
            with pytest.raises(AnswerRejected, match="answers must be a mapping from the id or text of a question"):
                go_on(path, answers=answers)
        with pytest.raises(AnswerRejected, match="answers must be a mapping from the id or text of a question"):
            engine.fork_sync(path, at=-1, answers=answers, into=tmp_path / "fork.jsonl")
    assert before == path.read_bytes()
    assert not (tmp_path / "fork.jsonl").exists()


@pytest.mark.spec("replay:D11")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_fork_that_cannot_start_leaves_no_journal_behind(tmp_path, kind):
    agent = AgentDefinition("talker", model="test/model")
    journal = tmp_path / "run.jsonl"
    made = [FileJournal(tmp_path / "fork.jsonl"), SqliteJournal(tmp_path / "runs.db", "fork")][kind == "sqlite"]
    with Engine([agent], models=ScriptedModel([text("one")])) as engine:
        engine.run_sync("talker", "hi", journal=journal)
    with Engine([attrs.evolve(agent, model="nowhere/model")]) as engine, pytest.raises(UnknownModel):
        engine.fork_sync(journal, at=-1, into=made)

    assert [] == made.records()
    assert kind == "sqlite" or not made.path.exists()
    with Engine([agent], models=ScriptedModel([text("two")])) as engine:
        assert "two" == engine.fork_sync(journal, at=-1, into=made).unwrap()


@pytest.mark.spec("replay:C15", "requirements:A5")
def test_run_recorded_without_a_model_ignores_provider_defaults_on_replay():
    def handle_steps(ctx):
        try:
            yield STEP
        except UnknownModel as error:
            return error.message

    agent = AgentDefinition("lost", handle_steps=handle_steps)
    journal = MemoryJournal()
    with Engine([agent], models={"test": ScriptedModel([])}) as engine:
        assert "no model" in engine.run_sync(agent, journal=journal).unwrap()
    with Engine([agent], models=ScriptedModel(["never"])) as engine:
        assert "no model" in engine.replay_sync(journal).unwrap()
