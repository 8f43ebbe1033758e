"""What is recorded of a program: a call that has its result is replayed without the sandbox, and what goes on finds its variables."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import attrs
import pytest
from pydantic import AfterValidator

from stepengine import AgentDefinition, Answer, Engine, Race, RunResult, Sleep, ToolAnnotations, ToolCall, tool
from stepengine.debugging.debugger import debug
from stepengine.errors import DefinitionError, JournalError, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.permissions import Call, Policy, Rule
from stepengine.sandbox.sessions import OVER, ProgramSession, ProgramTurn, ProgramWaiting
from stepengine.testing import ScriptedModel, text, tool_call

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, ProgramLimits, code_mode, program_tool

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")]


class Watched(MontySandbox):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.fed: list[str] = []

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        session, fed = super().open(functions, **limits), self.fed
        feed = session.feed

        def noted(code: str, now: datetime) -> ProgramTurn:
            fed.append(code)
            return feed(code, now)

        session.feed = noted  # type: ignore[method-assign]
        return session


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


@pytest.fixture
def sandbox(watched: Watched) -> Watched:
    watched.fed.clear()
    return watched


@tool(category="read", annotations=ToolAnnotations(read_only=True))
def price(item: str) -> int:
    """What an item costs."""
    return len(item) * 10


def shopper(sandbox: MontySandbox, *more: Any, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition("shopper", model="test/m", tools=[code_mode(price, *more, sandbox=sandbox, **options)])


def replies(*codes: str) -> list[Any]:
    return [*[tool_call("run_code", {"code": code}) for code in codes], text("end")]


async def recorded(agent: AgentDefinition[Any], *codes: str, journal: Any, **options: Any) -> RunResult:
    async with Engine([agent], models=ScriptedModel(replies(*codes)), **options) as engine:
        return await engine.run(agent, "go", journal=journal)


def cut_before(path: Path, copy: Path, kind: str, of: str, seq: int) -> Path:
    """Copy a journal up to one of its records."""
    lines = path.read_bytes().splitlines(keepends=True)
    found = [json.loads(line) for line in lines]
    place = next(n for n, r in enumerate(found) if (r["kind"], r.get("path"), r.get("seq")) == (kind, of, seq))
    copy.write_bytes(b"".join(lines[:place]))
    return copy


# --- a call that has its result ---------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_without_the_sandbox_finished_runs_replay_and_others_are_refused(
    sandbox: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    codes = ("cost = await price('tea')\nprint(cost)", "cost + await price('milk')", "1 / 0", "prise('tea')")
    result = await recorded(shopper(sandbox), *codes, journal=path)
    unfinished = cut_before(path, tmp_path / "open.jsonl", "result", "1", 0)
    monkeypatch.setattr(program_tool, "_SHARED", [])
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)  # as where it is not installed
    agent, model = AgentDefinition("shopper", model="test/m", tools=[code_mode(price)]), ScriptedModel([])
    async with Engine([agent], models=model) as engine:
        again = await engine.replay(path)
        with pytest.raises(DefinitionError, match=r"pip install 'stepengine\[programs\]'"):
            await engine.run(agent, "go")
        with pytest.raises(DefinitionError, match=r"pip install 'stepengine\[programs\]'"):
            await engine.resume(unfinished)

    assert [one.result.text for one in result.tool_calls] == [one.result.text for one in again.tool_calls]
    assert [] == model.calls


@pytest.mark.spec("programs:PG26")
async def test_a_call_records_its_sandbox_and_old_journals_replay(sandbox: Watched, tmp_path: Path) -> None:
    path, agent = tmp_path / "run.jsonl", shopper(sandbox)
    result = await recorded(agent, "await price('tea')", journal=path)
    history = FileJournal(path).history()
    (call,) = [i for i in history.intents.values() if i.starts_child_or_body and i.type == "tool_call"]
    before = {k: v for k, v in history.form(call).items() if k != "sandbox"}
    old = [
        attrs.evolve(r, line=None)
        if r.kind == "head"
        else attrs.evolve(r, given=before, fp="", read_from=None)
        if r is call
        else r
        for r in history.records
    ]
    journal = MemoryJournal()
    journal.replace([r for r in old if r.kind != "input" or r.input["type"] != "computed"])  # type: ignore[union-attr]

    assert sandbox.name == json.loads(path.read_text().splitlines()[call_line(path)])["effect"]["sandbox"]
    sandbox.fed.clear()
    async with Engine([agent], models=ScriptedModel([])) as engine:
        assert result == await engine.replay(journal)
    assert ["await price('tea')"] == sandbox.fed


def call_line(path: Path) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines()) if '"yields":true' in line)


@pytest.mark.spec("programs:PG26", "programs:PG23")
async def test_a_replay_repeats_denials_and_edits_without_running_programs(sandbox: Watched, tmp_path: Path) -> None:
    """Denials, wrong arguments and outputs leave no effect, and an input that a person edits is another one: the turns tell."""
    policy = Policy(
        [
            Rule("deny", Call("buy")),
            Rule("ask", Call("book")),
            *[Rule("allow", Call(name)) for name in ("run_code", "price", "finish")],
        ]
    )

    @tool(category="network")
    def buy(item: str) -> str:
        """Buy an item."""
        return item

    @tool(category="network")
    def book(item: str) -> str:
        """Book an item."""
        return f"booked {item}"

    @tool(uses=["set_output"])
    def finish(cost: int) -> Any:
        """Finish."""
        yield ToolCall("set_output", {"data": cost})
        return "set"

    code = """
try:
    await buy("tea")
except PermissionError:
    print("denied")
try:
    await price(["no text"])
except TypeError:
    print("wrong")
print(await book("tea"))
await finish(await price("tea"))
"""
    made = code_mode(price, buy, book, finish, sandbox=sandbox)
    agent = AgentDefinition("shopper", model="test/m", tools=[made, "set_output"], output_mode="structured_output")
    path = tmp_path / "run.jsonl"
    waiting = await recorded(agent, code, journal=path, permissions=policy)
    (question,) = waiting.pending_questions
    async with Engine([agent], models=ScriptedModel([text("end")]), permissions=policy) as engine:
        result = await engine.resume(path, answers={question.id: Answer(edited_input={"item": "milk"})})
        sandbox.fed.clear()
        again = await engine.replay(path)

    assert ["denied\nwrong\nbooked milk\nset"] == [
        one.result.text for one in result.tool_calls if one.tool_name == "run_code"
    ]
    assert 30 == result.output
    assert result == again
    assert [] == sandbox.fed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_a_program_stopped_while_computing_replays_without_computing(sandbox: Watched) -> None:
    """A program that lost a race never ended, and a replay does not wait for its time limit either."""
    endless = code_mode(price, sandbox=sandbox, limits=ProgramLimits(seconds=5_000))

    def work(ctx: Any) -> Any:
        won = yield from Race(
            ToolCall("run_code", {"code": "await price('tea')\nwhile True:\n    pass"}), Sleep(seconds=0.2)
        )
        return won[0] if isinstance(won, tuple) else won.index

    agent, journal = AgentDefinition("racer", tools=[endless], handle_steps=work), MemoryJournal()
    async with Engine([agent], models=ScriptedModel([])) as engine:
        result = await engine.run(agent, "go", journal=journal)
        sandbox.fed.clear()
        again = await engine.replay(journal)

    assert 1 == result.output
    assert result == again
    assert [] == sandbox.fed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26", "programs:PG27")
async def test_a_resumed_program_finds_variables_and_only_earlier_programs_rerun(
    sandbox: Watched, tmp_path: Path
) -> None:
    codes = (
        "a = await price('tea')",
        "boom = 1\n1 / 0",
        "forgotten = 1",
        "b = a + await price('milk')\nprint(b, boom)",
    )
    path, agent = tmp_path / "run.jsonl", shopper(sandbox)
    result = await recorded(agent, *codes, journal=path)
    copy = cut_before(path, tmp_path / "open.jsonl", "result", "7", 0)
    sandbox.fed.clear()
    async with Engine([agent], models=ScriptedModel([text("end")])) as engine:
        resumed = await engine.resume(copy, in_doubt="retry")
        assert list(codes) == sandbox.fed
        sandbox.fed.clear()
        assert resumed == await engine.replay(copy)

    assert [one.result.text for one in result.tool_calls] == [one.result.text for one in resumed.tool_calls]
    assert [] == sandbox.fed


class Other(Watched):
    """Another version, which reads one number differently."""

    name = "monty/99"  # type: ignore[assignment]

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        session = super().open(functions, **limits)
        feed, answer = session.feed, session.answer
        session.feed = lambda code, now: self._other(feed(code, now))  # type: ignore[method-assign]
        session.answer = lambda answers, now: self._other(answer(answers, now))  # type: ignore[method-assign]
        return session

    @staticmethod
    def _other(turn: ProgramTurn) -> ProgramTurn:
        if not isinstance(turn, ProgramWaiting):
            return turn
        calls = [call._replace(args=("coffee",)) if call.args == ("milk",) else call for call in turn.calls]
        return attrs.evolve(turn, calls=tuple(calls))


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()


@pytest.mark.spec("programs:PG26")
async def test_a_divergent_call_is_reported_with_line_and_sandbox(
    sandbox: Watched, other: Other, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    await recorded(shopper(sandbox), "a = await price('tea')\nb = await price('milk')\nb", journal=path)
    copy = cut_before(path, tmp_path / "open.jsonl", "result", "1", 1)
    before = copy.read_bytes()
    agent = shopper(other)
    async with Engine([agent], models=ScriptedModel([text("end")])) as engine:
        with pytest.raises(ReplayDivergence) as raised:
            await engine.resume(copy, in_doubt="retry")
        whole = await engine.replay(path)  # there nothing has to be run

    assert "line 2 of the program: b = await price('milk')" in raised.value.message
    assert f"the program ran in {sandbox.name} when it was recorded, and runs in monty/99 now" in raised.value.message
    assert before == copy.read_bytes()
    assert ["40"] == [one.result.text for one in whole.tool_calls]


@pytest.mark.spec("programs:PG26")
async def test_an_irreproducible_earlier_program_ends_the_run(sandbox: Watched, other: Other, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await recorded(shopper(sandbox), "a = await price('milk')", "a + await price('tea')", journal=path)
    copy = cut_before(path, tmp_path / "open.jsonl", "intent", "3", 0)
    before = copy.read_bytes()
    agent = shopper(other)
    async with Engine([agent], models=ScriptedModel([text("end")])) as engine:
        with pytest.raises(ReplayDivergence, match=r"in line 1, `a = await price\('milk'\)`.*monty/99"):
            await engine.resume(copy)

    assert before in copy.read_bytes()
    assert not [r for r in FileJournal(copy).records() if r.kind == "result" and (r.path, r.seq) == ("", 3)]


@pytest.mark.spec("programs:PG26", "programs:PG27")
@pytest.mark.parametrize(
    "code", ["rows: list[int] = ['3', '4']\nsum(rows)", "rows: list[int] = ['3']\nprint(1)\n1 / 0"]
)
async def test_warnings_of_an_earlier_failed_program_are_no_difference(
    code: str, sandbox: Watched, tmp_path: Path
) -> None:
    path, agent = tmp_path / "run.jsonl", shopper(sandbox)
    result = await recorded(agent, code, "await price('tea')\nrows", journal=path)
    copy = cut_before(path, tmp_path / "open.jsonl", "intent", "3", 0)
    async with Engine([agent], models=ScriptedModel([text("end")])) as engine:
        resumed = await engine.resume(copy)

    assert "What was seen before it ran" in result.tool_calls[0].result.text
    assert [one.result.text for one in result.tool_calls] == [one.result.text for one in resumed.tool_calls]


class Slower(Watched):
    """A slower machine, on which one program takes too long."""

    def open(self, functions: Collection[str], **limits: Any) -> ProgramSession:
        session = super().open(functions, **limits)
        feed = session.feed
        session.feed = lambda code, now: OVER if code == "a = 1" else feed(code, now)  # type: ignore[method-assign]
        return session


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26", "programs:PG27")
async def test_an_earlier_program_that_exceeds_a_limit_loses_the_variables(sandbox: Watched, tmp_path: Path) -> None:
    path, slower = tmp_path / "run.jsonl", Slower()
    await recorded(shopper(sandbox), "a = 1", "a + await price('tea')", journal=path)
    copy = cut_before(path, tmp_path / "open.jsonl", "intent", "3", 0)
    try:
        async with Engine([shopper(slower)], models=ScriptedModel([*replies("a"), text("end")])) as engine:
            resumed = await engine.resume(copy)
            assert resumed == await engine.replay(copy)
    finally:
        slower.close()

    found = [one.result.text for one in resumed.tool_calls]
    assert "the variables of earlier programs could not be restored" in found[1]
    assert "A program may compute for 5 s" in found[1]
    assert "there is no `a`" in found[2]


@pytest.mark.spec("programs:PG26")
async def test_irreproducible_variables_are_shown_nowhere_later(sandbox: Watched, other: Other, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await recorded(shopper(sandbox), "a = await price('milk')", "b = 1", "c = 2", journal=path)
    async with Engine([shopper(other)], models=ScriptedModel([])) as engine:
        with debug(engine, FileJournal(path)) as debugger:
            shown = []
            for at in ("#2", "#4", "#6"):
                debugger.goto(at)
                shown.append(debugger.variables())

    assert [{}, {}, {}] == shown


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_only_a_fork_inside_a_program_runs_it_again(sandbox: Watched, tmp_path: Path) -> None:
    path, agent = tmp_path / "run.jsonl", shopper(sandbox)
    await recorded(agent, "a = await price('tea')\nb = await price('milk')\na + b", journal=path)
    sandbox.fed.clear()
    async with Engine([agent], models=ScriptedModel([text("again"), text("again")])) as engine:
        behind = await engine.fork(path, at="#1", into=tmp_path / "behind.jsonl")
        assert [] == sandbox.fed
        inside = await engine.fork(path, at="1#0", edit=99, into=tmp_path / "inside.jsonl")
        assert 1 == len(sandbox.fed)
        assert inside == await engine.replay(tmp_path / "inside.jsonl")
        assert behind == await engine.replay(tmp_path / "behind.jsonl")

    assert ("70", "139") == (behind.tool_calls[0].result.text, inside.tool_calls[0].result.text)
    assert 1 == len(sandbox.fed)


@pytest.mark.spec("programs:PG26")
async def test_a_rewritten_journal_keeps_the_results_of_programs(sandbox: Watched, tmp_path: Path) -> None:
    def of(item: str) -> AgentDefinition[Any]:
        def work(ctx: Any) -> Any:
            yield ToolCall("run_code", {"code": "await price('tea')"})
            yield ToolCall("price", {"item": item})

        return attrs.evolve(shopper(sandbox), tools=[code_mode(price, sandbox=sandbox), price], handle_steps=work)

    path = tmp_path / "run.jsonl"
    async with Engine([of("milk")], models=ScriptedModel([])) as engine:
        await engine.run("shopper", journal=path)
    sandbox.fed.clear()
    async with Engine([of("bread")], models=ScriptedModel([])) as engine:
        fork = await engine.fork(path, tools="idempotent")
        await engine.replay(fork.journal)
        await engine.resume(path, on_divergence="extend")
        await engine.replay(path)

    assert "#1" == fork.broke_at
    assert [] == sandbox.fed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_redacted_values_are_no_difference_when_a_program_reruns(sandbox: Watched, tmp_path: Path) -> None:
    asked: list[str] = []

    @tool(category="read", annotations=ToolAnnotations(read_only=True))
    def look(key: str) -> str:
        """Look."""
        asked.append(key)
        return "seen"

    key = "ghp_" + "a1B2" * 9
    codes = ("key = 'ghp_' + 'a1B2' * 9\nprint(key, await look(key))", "await look(key)")
    path, copy, agent = tmp_path / "run.jsonl", tmp_path / "open.jsonl", shopper(sandbox, look)
    whole = await recorded(agent, *codes, journal=FileJournal(path, redact="all"))
    cut_before(path, copy, "intent", "3", 0)
    async with Engine([agent], models=ScriptedModel([text("end")])) as engine:
        result = await engine.resume(FileJournal(copy, redact="all"))
        assert result == await engine.replay(FileJournal(copy, redact="all"))

    assert key not in path.read_text() + copy.read_text()
    assert [key, key, key] == asked
    assert [one.result.text for one in whole.tool_calls] == [one.result.text for one in result.tool_calls]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_a_program_that_meets_another_answer_continues_with_it(sandbox: Watched, tmp_path: Path) -> None:
    """A run is extended with a tool that takes its input otherwise: from that call on its program is run, not told from the record."""

    def of(change: Any) -> AgentDefinition[Any]:
        @tool(category="read", annotations=ToolAnnotations(read_only=True))
        def cost(item: Annotated[str, AfterValidator(change)]) -> int:
            """What an item costs."""
            return len(item) * 10

        return AgentDefinition("shopper", model="test/m", tools=[code_mode(price, cost, sandbox=sandbox)])

    code = "a = await price('tea')\nb = await cost('milk')\nc = await cost('x' if b == 40 else 'yyy')\n[a, b, c]"
    path = tmp_path / "run.jsonl"
    await recorded(of(str), code, journal=path)
    sandbox.fed.clear()
    other = of(lambda item: item * 2)
    async with Engine([other], models=ScriptedModel([text("again")])) as engine:
        result = await engine.resume(path, on_divergence="extend")
        assert 1 == len(sandbox.fed)
        assert result == await engine.replay(path)

    assert ["[30, 80, 60]"] == [one.result.text for one in result.tool_calls]
    assert 1 == len(sandbox.fed)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG26")
async def test_forged_turns_are_refused_or_ignored(sandbox: Watched) -> None:
    agent, journal = shopper(sandbox), MemoryJournal()
    await recorded(agent, "await price('tea')", journal=journal)
    call = {"id": 0, "name": "price", "line": 1, "input": {"item": "tea"}}
    for values in (
        ["said"],
        [{}],
        [{"calls": 3}],
        [{"calls": [{}], "line": 1}],
        [{"calls": [call], "line": 10**9}, {"said": "other"}],
        [{"calls": [{**call, "input": {"item": "ale"}}], "line": -5}, {"said": "30"}],
        [{"calls": [{**call, "name": "gone"}], "line": 1}, {"said": "30"}],
        [{"calls": [call], "line": 1}],
        [],
    ):
        altered = MemoryJournal()
        altered.replace(
            [
                attrs.evolve(r, input={**r.input, "values": values}, line=None) if is_computed(r) else r
                for r in journal.records()
            ]
        )
        async with Engine([agent], models=ScriptedModel([])) as engine:
            with pytest.raises(JournalError):
                await engine.replay(MemoryJournal(altered.lines()))


def is_computed(record: Any) -> bool:
    return record.kind == "input" and record.input["type"] == "computed"
