"""Programs that models write: each call of one is an effect, so it is judged, recorded, suspended, resumed and replayed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from pydantic import BaseModel

from stepengine import AgentDefinition, Engine, Parallel, RunStatus, Sleep, ToolCall, tool
from stepengine.errors import DefinitionError, ToolError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.permissions import Call, Policy, Rule
from stepengine.testing import Clock, ScriptedModel, Walk, run_script, simulate, text, tool_call, tool_calls
from stepengine.tools import ToolPreview

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, ProgramLimits, code_mode, program_tool, sessions
from stepengine.sandbox.program_checks import CheckedProgram
from stepengine.sandbox.sessions import CallAnswer, ProgramWaiting
from stepengine.sandbox.stubs import make_stubs

from .programs import outputs, programs, run_programs

pytestmark = pytest.mark.anyio


class Ledger:
    """What really happened outside, counted."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        # Two threads that count the same thing for the first time could both count one.
        self._counting = Lock()

        @tool(category="read")
        def price(item: str) -> int:
            """What an item costs."""
            self._count(f"price {item}")
            return len(item) * 10

        @tool
        def book(item: str, at: int = 0) -> str:
            """Book an item."""
            self._count(f"book {item}")
            return f"booked {item} at {at}"

        @tool
        def fails(why: str) -> str:
            """Fail."""
            raise ValueError(why)

        self.tools = [price, book, fails]

    def _count(self, what: str) -> None:
        with self._counting:
            self.done[what] += 1


def analyst(ledger: Ledger, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition("analyst", model="test/m", tools=[code_mode(*ledger.tools, **options)])


# --- a run with a program ---------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG22")
async def test_gathered_calls_run_concurrently_in_program_order() -> None:
    begun, ended = list[int](), list[int]()
    over = [asyncio.Event() for _ in range(4)]

    @tool(parallel_safe=True)
    async def look(n: int) -> int:
        """Look; each goes on when the one behind it has ended, and the last one when all have begun."""
        begun.append(n)
        if len(begun) == 3:
            over[3].set()
        async with asyncio.timeout(50):
            await over[n + 1].wait()
        ended.append(n)
        over[n].set()
        return n

    agent, journal = AgentDefinition("a", model="test/m", tools=[code_mode(look)]), MemoryJournal()
    result = await run_programs(
        agent, "import asyncio\nawait asyncio.gather(look(0), look(1), look(2))", journal=journal
    )

    assert ([2, 1, 0], ["[0, 1, 2]"]) == (ended, outputs(result))
    calls = [i for i in journal.history().intents.values() if i.path and i.type == "tool_call"]
    assert [0, 1, 2] == [journal.history().form(i)["input"]["n"] for i in calls]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG27")
async def test_variables_last_until_restart_and_programs_run_one_by_one() -> None:
    agent = analyst(Ledger())
    replies = [
        tool_calls(*programs("x = await price('tea')"), *programs("x += 1\nx")),
        *programs("def double(n):\n    return 2 * n"),
        *programs("double(x)"),
        *programs("try:\n    x\nexcept NameError:\n    print('gone')", restart=True),
        text("end"),
    ]
    async with Engine([agent], models=ScriptedModel(replies)) as engine:
        result = await engine.run(agent, "go")

    assert "31" == outputs(result)[1]
    assert "62" == outputs(result)[3]
    assert "gone" == outputs(result)[4]


@pytest.mark.spec("programs:PG23")
async def test_failures_of_calls_are_exceptions_a_program_can_catch() -> None:
    ledger = Ledger()
    policy = Policy(
        [Rule("deny", Call("book")), *[Rule("allow", Call(name)) for name in ("run_code", "price", "fails")]]
    )
    result = await run_programs(
        analyst(ledger),
        """
        seen = []
        for call in (lambda: book("tea"), lambda: fails("broken"), lambda: price(7)):
            try:
                seen.append(await call())
            except PermissionError as error:
                seen.append("permission " + str(error))
            except TypeError as error:
                seen.append("type")
            except ToolError as error:
                seen.append("tool " + str(error))
        seen
        """,
        permissions=policy,
        journal=MemoryJournal(),
    )

    found = json.loads(outputs(result)[0])
    assert found[0].startswith("permission ")
    assert "book" in found[0]
    assert found[1].startswith("tool ")
    assert "broken" in found[1]
    assert "type" == found[2]
    assert ledger.done["book tea"] == 0


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG23")
async def test_a_permission_question_shows_the_program_with_its_waiting_line(tmp_path: Path) -> None:
    def said_of(given: Any) -> ToolPreview:
        return ToolPreview("Buy it", f"1 {given['item']}")

    @tool(category="network", preview=said_of)
    def buy(item: str) -> str:
        """Buy an item."""
        return f"bought {item}"

    ledger = Ledger()
    policy = Policy([Rule("ask", Call("b*")), *[Rule("allow", Call(name)) for name in ("run_code", "price")]])
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(*ledger.tools, buy)])
    code = "\r\n".join(
        [
            *[f"n{i} = {i}" for i in range(30)],
            "a = await price('tea')",
            "b = await book('tea',",
            "    at=a)",
            "await buy('tea')",
        ]
    )
    async with Engine([agent], models=ScriptedModel([*programs(code), text("end")]), permissions=policy) as engine:
        first = await engine.run(agent, "go", journal=tmp_path / "run.jsonl")
        again = await engine.replay(tmp_path / "run.jsonl")
        second = await engine.resume(tmp_path / "run.jsonl", answers={first.pending_questions[0].id: "yes"})

    shown = first.pending_questions[0].preview
    assert shown is not None
    lines = shown["details"]["in the program"].splitlines()
    assert ("", "tea", 30) == (shown["action"], shown["details"]["item"], shown["details"]["at"])
    assert ["  ... 11 lines", "  12 | n11 = 11"] == lines[:2]
    assert [
        "  31 | a = await price('tea')",
        "> 32 | b = await book('tea',",
        "  33 |     at=a)",
        "  34 | await buy('tea')",
    ] == lines[-4:]
    assert first.pending_questions[0].preview == again.pending_questions[0].preview
    other = second.pending_questions[0].preview
    assert other is not None
    assert ("Buy it", "1 tea") == (other["action"], other["details"]["what"])
    assert "> 34 | await buy('tea')" == other["details"]["in the program"].splitlines()[-1]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG23")
async def test_a_call_timeout_can_be_caught_by_the_program() -> None:
    @tool(timeout=0.05)
    async def slow() -> str:
        """Take a while."""
        await asyncio.sleep(5)
        return "done"

    @tool(timeout=0.001)
    def slow_body() -> Any:
        """Take a while, too."""
        yield ToolCall("slow", {})
        yield ToolCall("slow", {})

    code = """
        for call in (slow, slow_body):
            try:
                await call()
            except TimeoutError as error:
                print(error)
    """
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(slow, slow_body)])
    result = await run_programs(agent, code, journal=MemoryJournal())

    assert ["tool 'slow' timed out after 0.05 s\ntool 'slow_body' timed out after 0.001 s of work"] == outputs(result)


@pytest.mark.deep
@pytest.mark.spec("programs:PG26")
async def test_a_sleeping_program_suspends_with_its_runs_clock_and_chance(tmp_path: Path) -> None:
    agent, path = analyst(Ledger()), tmp_path / "run.jsonl"
    code = """
        import asyncio, datetime, random
        before = datetime.datetime.now()
        drawn = random.random()
        await asyncio.sleep(7200)
        [str(before), str(datetime.datetime.now()), drawn]
    """
    clock = Clock(datetime(2026, 5, 1, 7, tzinfo=UTC))
    async with Engine([agent], models=ScriptedModel([*programs(code), text("end")]), clock=clock) as engine:
        first = await engine.run(agent, "go", journal=path)
        assert (RunStatus.SUSPENDED, datetime(2026, 5, 1, 9, tzinfo=UTC)) == (first.status, first.wakes_at)
        clock.advance(hours=2)
        result = await engine.resume(path)
        again = await engine.replay(path)

    before, after, _ = json.loads(outputs(result)[0])
    assert timedelta(hours=2) == datetime.fromisoformat(after) - datetime.fromisoformat(before)
    assert outputs(result) == outputs(again)


# --- what a program may not -------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("programs:PG21", "programs:PG25")
@pytest.mark.parametrize(
    ("code", "limits", "expected"),
    [
        ("while True:\n    pass", {"seconds": 0.2}, "0.2 s between two waits"),
        ("x = 'a' * 10**9", {}, "MemoryError"),
        ("def f():\n    return f()\nf()", {}, "RecursionError"),
        ("while True:\n    print('x' * 1000)", {"printed": 5_000}, "may print 5,000 characters"),
        ("while True:\n    await price('a')", {"calls": 7}, "more than 7 calls"),
        ("open('/etc/passwd').read()", {}, "PermissionError"),
        ("await book('x' * 300)", {"value": 200}, "one may have 200"),
        ("1 / 0", {}, "ZeroDivisionError"),
    ],
)
async def test_breaking_a_limit_or_escaping_is_a_named_error(code: str, limits: dict[str, Any], expected: str) -> None:
    ledger = Ledger()
    result = await run_programs(analyst(ledger, limits=ProgramLimits(**limits)), code, "1 + 1", journal=MemoryJournal())

    assert expected in outputs(result)[0], outputs(result)[0]
    assert "2" == outputs(result)[1]
    assert ["error", "ok"] == [one.result.status for one in result.tool_calls]


@pytest.mark.spec("programs:PG21")
async def test_a_run_that_is_stopped_ends_its_program_at_once() -> None:
    agent = analyst(Ledger(), limits=ProgramLimits(seconds=3_000))
    async with Engine([agent], models=ScriptedModel(programs("while True:\n    pass"))) as engine:
        handle = engine.start(agent, "go")
        while not any(seat.is_busy and seat.pid for shared in program_tool._SHARED for seat in shared._seats):  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.01)
        handle.interrupt()
        result = await handle.result()

    assert RunStatus.CANCELLED is result.status


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG25")
async def test_programs_that_wait_hold_no_worker() -> None:
    waiting, all_wait = Counter[int](), asyncio.Event()

    @tool(parallel_safe=True)
    async def slow(n: int) -> int:
        """Wait until every program waits."""
        waiting[n] += 1
        if len(waiting) == 12:
            all_wait.set()
        await all_wait.wait()
        return n

    sandbox = MontySandbox(workers=2)
    code = "a = await slow({n})\nb = await slow(a)\na + b"
    agents = [AgentDefinition(f"a{n}", model=f"test/m{n}", tools=[code_mode(slow, sandbox=sandbox)]) for n in range(12)]
    models = {agent.model: [*programs(code.format(n=n)), text("end")] for n, agent in enumerate(agents)}
    results = await asyncio.gather(
        *[Engine([agent], models=ScriptedModel(models[agent.model])).run(agent, "go") for agent in agents]
    )

    sandbox.close()

    assert [str(2 * n) for n in range(12)] == [outputs(result)[0] for result in results]


def closed(sandbox: MontySandbox, *sessions: Any) -> None:
    for session in sessions:
        session.close()
    sandbox.close()


NOON = datetime(2026, 1, 1, tzinfo=UTC)


def fed(session: Any, code: str, value: Any = 1) -> Any:
    """Bring a program to its end, with the same answer to each of its calls."""
    turn = session.feed(code, NOON)
    while isinstance(turn, ProgramWaiting):
        turn = session.answer({call.id: CallAnswer(value) for call in turn.calls}, NOON)
    return turn


@pytest.mark.spec("programs:PG25")
def test_a_session_compacts_its_record_and_survives_losing_its_worker() -> None:
    sandbox = MontySandbox(1)
    limits = {"seconds": 5, "memory": 1 << 26, "printed": 1_000}
    long, evicted, other = [sandbox.open(("look",), seed=7, **limits) for _ in range(3)]
    codes = [
        "import random\nclass Thing:\n    pass\nnumber = 0\nkept = []",
        *[
            "text = await look()\nnumber += len(text)\nkept.append(Thing())\ngone = [Thing() for _ in range(50)]\ngone = None"
        ]
        * 12,
        "[number, len(kept), random.random(), id([]), id(Thing()), [id(one) for one in {Thing() for _ in range(20)}]]",
    ]
    turns = [[fed(session, code, "x" * 300_000) for code in codes] for session in (long,)]
    turns.append([])
    for code in codes:
        fed(other, "1")  # the only worker is taken from the one, and then from the other
        turns[1].append(fed(evicted, code, "x" * 300_000))
    told = [
        sum(len(answer.value) for program in session._told for given, _ in program.answers for answer in given.values())
        for session in (long, evicted)
    ]
    closed(sandbox, long, evicted, other)

    assert turns[0] == turns[1]
    assert 3_600_000 == turns[0][-1].value[0]
    assert max(told) <= 1_200_000


@pytest.mark.spec("programs:PG24")
def test_a_checked_program_is_cached_per_functions_and_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []

    def look(_: Any, code: str, stubs: Any, known: Any) -> CheckedProgram:
        looked.append(code)
        return CheckedProgram(is_whole=code != "half")

    monkeypatch.setattr(sessions, "check_with_monty", look)
    sandbox, stubs = MontySandbox(1), make_stubs([one.spec for one in Ledger().tools], [], ask=False)
    more = make_stubs([one.spec for one in Ledger().tools], [], ask=True)
    for code, of, known in (
        *[("a", stubs, {"x"}), ("a", stubs, {"x"}), ("a", stubs, {"y"}), ("a", more, {"x"})],
        *[("half", stubs, {"x"}), ("half", stubs, {"x"})],
    ):
        sandbox.check(code, of, known)
    assert ["a", "a", "a", "half", "half"] == looked
    sandbox.close()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG20")
async def test_functions_are_values_and_agents_take_params() -> None:
    class Topic(BaseModel):
        topic: str

    def work(ctx: Any) -> Any:
        yield from Sleep(0)
        return f"read of {ctx.params.topic}"

    reader = AgentDefinition("reader", input_schema=Topic, handle_steps=work)
    ledger = Ledger()
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(*ledger.tools, agents=[reader])])
    result = await run_programs(
        agent, "f = price\nawait f('tea')", "await reader(params={'topic': 'bees'})", journal=MemoryJournal()
    )

    assert ["30", "read of bees"] == outputs(result)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG20")
async def test_over_thirty_functions_there_is_a_catalogue_that_programs_search() -> None:
    def made(n: int) -> Any:
        @tool(name=f"look_{n}", description=f"Looks at number {n}.")
        def look(what: str) -> str:
            return f"{n} {what}"

        return look

    agent = AgentDefinition("a", model="test/m", tools=[code_mode(*[made(n) for n in range(40)])])
    result = await run_programs(
        agent,
        "print(await search('number 17'))\nprint(await describe('look_17'))\nawait look_17('x')",
        journal=MemoryJournal(),
    )

    assert "look_17" in outputs(result)[0]
    assert outputs(result)[0].endswith("17 x")


@pytest.mark.spec("programs:PG24")
async def test_a_program_that_cannot_succeed_is_refused_before_it_runs() -> None:
    ledger = Ledger()
    result = await run_programs(
        analyst(ledger),
        "await price('tea')\nawait prise('tea')",
        "price('tea')\n1",
        "import socket",
        "for",
        journal=MemoryJournal(),
    )

    assert all(text.startswith("Nothing was run") for text in outputs(result))
    assert ["line 2", "line 1", "line 1", "line 1"] == [text.split("\n")[1][:6] for text in outputs(result)]
    assert not ledger.done


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG25")
async def test_calls_are_counted_by_program_and_not_by_session() -> None:
    codes = ["for n in range(10):\n    await price('a')\nn"] * 3
    result = await run_programs(analyst(Ledger(), limits=ProgramLimits(calls=10)), *codes)

    assert ["9"] * 3 == outputs(result)


@pytest.mark.spec("programs:PG20")
def test_code_mode_refuses_wrong_tools_agents_and_limits() -> None:
    for wrong in (code_mode, lambda: code_mode(len), lambda: code_mode(*Ledger().tools, agents=["x"])):
        with pytest.raises(DefinitionError):
            wrong()


# --- replays and crashes ----------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG22")
async def test_concurrent_programs_of_a_handler_run_or_are_refused(tmp_path: Path) -> None:
    """They share a session, in which one runs at a time; a replay comes to the same."""

    def handle_steps(ctx: Any) -> Any:
        codes = [f"await price('{'tea' * number}')" for number in range(1, 5)]
        results = yield from Parallel([ToolCall("run_code", {"code": code}) for code in codes])
        again = yield from ToolCall("run_code", {"code": "1 + 1"})
        return [result.text for result in [*results, again]]

    @tool
    def price(item: str) -> int:
        """Return the price of an item."""
        return len(item)

    agent = AgentDefinition("analyst", tools=[code_mode(price)], handle_steps=handle_steps)
    journal = FileJournal(tmp_path / "run.jsonl")
    async with Engine([agent]) as engine:
        result = await engine.run("analyst", "go", journal=journal)
        again = await engine.replay(journal)

    texts = result.unwrap()
    assert again.output == texts
    assert "2" == texts[-1]
    for number, answer in enumerate(texts[:-1], 1):
        assert answer == f"{3 * number}" or "another program of this run has not ended" in answer
    assert any(answer.isdecimal() for answer in texts[:-1])


# --- stepping ---------------------------------------------------------------------------------------------------------


class Counting(MontySandbox):
    """Knows the sessions that are open."""

    def __init__(self) -> None:
        super().__init__(2)
        self.opened, self.closed = 0, 0

    def open(self, functions: Any, **limits: Any) -> Any:
        session = super().open(functions, **limits)
        self.opened += 1
        close = session.close

        def noted() -> None:
            self.closed += 1
            close()

        session.close = noted  # type: ignore[method-assign]
        return session


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG27", "programs:PG28")
def test_stepping_through_a_program_always_closes_its_session(tmp_path: Path) -> None:
    sandbox, ledger = Counting(), Ledger()
    run_code = code_mode(*ledger.tools, sandbox=sandbox)
    given = {"code": "print(await price('tea'))\nawait price('milk')"}
    walk = Walk(run_code, params=given)
    assert "price" == walk.asked.calls[0].tool
    assert "30\n40" == walk.send([30]).send([40]).returned
    assert (1, 1) == (sandbox.opened, sandbox.closed)
    left = Walk(run_code, params=given)
    left.fork().close()
    left.close()
    assert "30\n40" == run_script(run_code, [(Parallel, [30]), (Parallel, [40])], params=given)
    assert (4, 4) == (sandbox.opened, sandbox.closed)
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        Walk(run_code, params={"code": "1 / 0"})

    agent = AgentDefinition("a", model="test/m", tools=[run_code])
    simulate(agent, range(5), replies=[*programs(given["code"]), text("end")])
    assert sandbox.opened == sandbox.closed >= 10
    with Engine([agent], models=ScriptedModel([*programs(given["code"]), text("end")])) as engine:
        engine.run_sync(agent, "go", journal=tmp_path / "run.jsonl")
        before = sandbox.opened
        with engine.stepper(tmp_path / "run.jsonl") as stepper:
            while stepper.advance():
                pass
        assert before == sandbox.opened  # what has ended is in the record
        cut = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)[:-5]
        (tmp_path / "cut.jsonl").write_bytes(b"".join(cut))
        with engine.stepper(tmp_path / "cut.jsonl") as stepper:
            while stepper.advance():
                pass
        assert sandbox.opened == sandbox.closed > before
    sandbox.close()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG27")
async def test_a_continued_run_says_that_its_variables_are_gone() -> None:
    agent = analyst(Ledger())
    note = "This run of yours began without variables: those of your programs before it are gone."
    codes = ["tea = await price('tea')", "tea", "tea", "tea = 1", "tea", "tea"]
    replies = [
        *programs(*codes[:2]),
        text("end"),
        *programs(*codes[2:5]),
        text("end"),
        *programs("tea", restart=True),
        text("end"),
    ]
    journal = MemoryJournal()
    async with Engine([agent], models=ScriptedModel(replies)) as engine:
        first = await engine.run(agent, "go")
        second = await engine.run(agent, "go on", previous=first.state, journal=journal)
        third = await engine.run(agent, "go on", previous=second.state)
        assert second == await engine.replay(journal)

    assert [False, False] == [note in text for text in outputs(first)]
    assert [True, False, False] == [note in text for text in outputs(second)]
    assert "there is no `tea`" in outputs(second)[0]
    assert [False] == [note in text for text in outputs(third)]


@pytest.mark.spec("programs:PG20")
async def test_a_direct_tool_is_callable_by_programs_and_the_model() -> None:
    ledger = Ledger()
    price, book, _ = ledger.tools
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(price, direct=[book])])
    model = ScriptedModel(
        [tool_call("book", {"item": "tea"}), *programs("await book('milk', at=await price('milk'))"), text("end")]
    )
    async with Engine([agent], models=model) as engine:
        result = await engine.run(agent, "go", journal=(journal := MemoryJournal()))
        assert result == await engine.replay(journal)
        refused = await Engine([agent], models=ScriptedModel([tool_call("price", {"item": "x"}), text("end")])).run(
            agent, "go"
        )

    assert ["run_code", "book"] == [spec.name for spec in model.calls[0].tools]
    assert ["booked tea at 0", "booked milk at 40"] == outputs(result)
    assert "error" == refused.tool_calls[0].result.status

    both = AgentDefinition("a", model="test/m", tools=[code_mode(price, direct=[book]), book])
    async with Engine([both], models=ScriptedModel([text("end")])) as engine:
        assert (await engine.run(both, "go")).text == "end"


@pytest.mark.spec("programs:PG20")
def test_names_that_code_mode_is_given_twice_are_refused() -> None:
    price, book, _ = Ledger().tools

    @tool(name="run_code")
    def other() -> str:
        """Run."""
        return ""

    @tool(ends_turn=True)
    def leave() -> str:
        """Leave."""
        return ""

    for wrong, words in (
        (lambda: code_mode(price, direct=[price]), "code_mode got two tools named 'price'"),
        (lambda: code_mode(price, other), "code_mode got two tools named 'run_code'"),
        (lambda: code_mode(price, direct=["book"]), r"more tools in direct=\[...\]"),  # type: ignore[list-item]
        (lambda: code_mode(price, direct=[leave]), "ends a turn"),
    ):
        with pytest.raises(DefinitionError, match=words):
            wrong()
    assert code_mode(direct=[book]).name == "run_code"


@tool(category="read")
def price_of(item: str) -> int:
    """What an item costs."""
    return len(item) * 10


@pytest.mark.spec("programs:PG20")
async def test_a_tool_spec_means_the_tool_of_the_engine() -> None:
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(price_of.spec)])
    replies = [tool_call("run_code", {"code": "await price_of('tea')"}), text("end")]
    async with Engine([agent], [price_of], ScriptedModel(replies)) as engine:
        assert ["30"] == outputs(await engine.run(agent, "go"))
    with pytest.raises(DefinitionError, match="price_of"):
        Engine([agent], models=ScriptedModel([])).run_sync(agent, "go")
