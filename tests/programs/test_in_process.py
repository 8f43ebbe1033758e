"""The stand-in sandbox: what a program asks for, prints and gives there is what it does in the sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, RunResult, RunStatus, tool
from stepengine.errors import DefinitionError, ToolError
from stepengine.journal import FileJournal
from stepengine.programs import InProcessSandbox, MontySandbox, ProgramLimits, code_mode, in_process
from stepengine.programs.sessions import CallAnswer, ProgramCall, ProgramEnded, ProgramRaised, ProgramWaiting, Sandbox
from stepengine.testing import ScriptedModel, text, tool_call
from tests.programs import corpus

pytestmark = [pytest.mark.anyio]

STUBS = corpus.stubs()
NOW = datetime(2026, 5, 1, 7, 30, tzinfo=UTC)
DIFFERENT = ("__name__", "max(seen, key=len)")
"""What a program shows of Python itself: functions of the sandbox have no names, and its sets have an order."""


if importlib.util.find_spec("pydantic_monty"):
    # What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
    first = MontySandbox(1)
    first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", NOW)
    first.close()


@pytest.fixture
def monty() -> Iterator[MontySandbox]:
    pytest.importorskip("pydantic_monty", reason="needs the extra programs")
    made = MontySandbox(1)
    yield made
    made.close()


def answered(call: ProgramCall) -> CallAnswer:
    function = STUBS.functions.get(call.name)
    if function is None:
        return CallAnswer() if call.name == "asyncio.sleep" else CallAnswer(f"no {call.name}", "NameError")
    try:
        return CallAnswer(corpus.answer(function.of, function.input_of(call.args, call.kwargs)))
    except (PermissionError, TypeError) as error:
        return CallAnswer(str(error), type(error).__name__)
    except Exception as error:
        return CallAnswer(str(error), "ToolError")


def went(sandbox: Sandbox, *codes: str, seed: int = 7) -> list[Any]:
    """Run programs in one session, and return what they asked for, printed and gave."""
    session = sandbox.open(STUBS.functions, seconds=5, memory=1 << 26, printed=100_000, seed=seed)
    found: list[Any] = []
    for code in codes:
        turn = session.feed(code, NOW)
        while isinstance(turn, ProgramWaiting):
            found.append((turn.line, [(call.name, call.args, call.kwargs, call.line) for call in turn.calls]))
            turn = session.answer({call.id: answered(call) for call in turn.calls}, NOW)
        match turn:
            case ProgramEnded(value, unawaited):
                found.append((session.printed, repr(value), [(call.name, call.line) for call in unawaited]))
            case ProgramRaised(kind, _, line, is_fatal):
                found.append((session.printed, kind, line, is_fatal))
    session.close()
    return found


def tangled(rng: random.Random) -> str:
    """Return a program whose coroutines wait for each other in many ways."""
    lines = ["import asyncio", "seen = []"]
    for name in ("a", "b", "c", "d"):
        earlier = [other for other in "abcd" if other < name]
        body = [line for n in range(rng.randint(1, 4)) for line in spun(rng, name, n, earlier)]
        lines += [f"async def {name}(n):", *["    " + line for line in body], "    return n"]
    for n in range(3):
        lines += spun(rng, "top", n, ["a", "b", "c", "d"])
    return "\n".join([*lines, "(seen, v)"])


def spun(rng: random.Random, name: str, n: int, others: list[str]) -> list[str]:
    number = rng.randint(0, 9)

    def one() -> str:
        other = rng.choice(others) if others and rng.random() < 0.6 else ""
        return f"{other}({number})" if other else rng.choice([f"add({number}, 1)", "lookup('missing')", "price('fig')"])

    several = ", ".join([one() for _ in range(rng.randint(1, 4))])
    said = f"seen.append(({name!r}, {n}))"
    match rng.choice(["one", "gather", "caught", "kept", "said"]):
        case "one":
            return [f"v = await add({number}, 2)", said]
        case "gather" | "caught":
            return [
                "try:",
                f"    v = await asyncio.gather({several})",
                "except ToolError as e:",
                "    v = str(e)",
                said,
            ]
        case "kept":
            return [
                f"kept = asyncio.gather({several})",
                said,
                "try:",
                "    v = await kept",
                "except ToolError:",
                "    v = 0",
            ]
        case _:
            return [said, f"v = {number}"]


# --- the same as the sandbox ------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG30")
def test_programs_of_the_corpus_ask_print_and_give_what_they_do_in_the_sandbox(monty: MontySandbox) -> None:
    stand_in = InProcessSandbox()
    programs = [one for one in [*corpus.WRITTEN, *corpus.families()] if not any(part in one for part in DIFFERENT)]
    different = [program for program in programs if went(stand_in, program) != went(monty, program)]

    assert [] == different
    assert len(programs) > 230


@pytest.mark.spec("programs:PG30")
@pytest.mark.parametrize("first", [0, pytest.param(60, marks=pytest.mark.deep)])
def test_coroutines_wait_for_each_other_in_the_same_order(first: int, monty: MontySandbox) -> None:
    stand_in = InProcessSandbox()
    for seed in range(first, 60 if not first else 2_000):
        program = tangled(random.Random(seed))
        assert went(monty, program) == went(stand_in, program), (seed, program)


SAME = {
    "a clock": """
        import time
        from datetime import date, datetime, timedelta, timezone
        now = datetime.now()
        print(now, repr(now + timedelta(days=1)), datetime.now(timezone.utc), date.today(), repr(date.today()))
        print(time.time(), time.monotonic_ns(), time.strftime("%Y-%m-%d %H"), time.ctime(), time.gmtime().tm_yday)
        print(isinstance(now, date), isinstance(now.date(), date), datetime.strptime("2026-01-02", "%Y-%m-%d") < now)
    """,
    "chance": "import random\nprint(random.random(), random.randint(1, 9), random.sample(range(9), 3))",
    "a return at the top": "if await add(1, 2) == 3:\n    return 'three'\nprint('never')",
    "a loop inside of a function": """
        import asyncio
        def main():
            return asyncio.run(go(3))
        async def go(n):
            await asyncio.sleep(n)
            return await add(n, n)
        main()
    """,
    "calls that were not awaited": "p = add(1, 2)\nq = add(3, 4)\nprint(await q, await p, await q)\nkept = add(5, 6)",
    "an error": "def f(x):\n    return 1 // x\n\nprint('before')\nf(0)",
    "an exit": "raise SystemExit",
    "an error that is raised from another": "try:\n    [][1]\nexcept IndexError as e:\n    raise ValueError('no') from e",
    "no end of calls": "def f(n):\n    return f(n + 1)\nf(0)",
    "no function can wait inside of map": """
        for each in (lambda: list(map(add, [1], [2])), lambda: list(filter(price, ["a"]))):
            try:
                each()
            except RuntimeError as error:
                print(error)
    """,
    "what reaches out": """
        import os, os.path, time, pathlib
        tries = [
            lambda: open("/etc/passwd"), lambda: os.listdir("/"), lambda: os.getenv("HOME"), lambda: time.sleep(1),
            lambda: os.path.exists("a"), lambda: pathlib.Path("a").read_text(), lambda: pathlib.Path("a").exists(),
            lambda: os.remove("/x"), lambda: os.urandom(4),
        ]
        for each in tries:
            try:
                print("done", each())
            except Exception as error:
                print(type(error).__name__, error)
        print(os.getcwd(), pathlib.Path.cwd() / "a", os.path.abspath("b"))
    """,
    "what there is not": """
        for name in ("socket", "subprocess", "ctypes", "importlib", "builtins"):
            try:
                if name == "socket":
                    import socket
                else:
                    raise ImportError(name)
            except ImportError as error:
                print(type(error).__name__)
    """,
    "waits of any length": """
        import asyncio
        for delay in (-1, -0.5, 0, True, 2, 10**400, 1e300, float("inf"), -float("inf"), float("nan"), "x", None):
            try:
                print(await asyncio.sleep(delay))
            except (TypeError, ValueError) as error:
                print(type(error).__name__)
    """,
    "what holds itself": """
        rows, members = [1], {"a": 1}
        rows.append(rows)
        members["b"] = [members, rows]
        await fetch("u", headers=members)
        await fetch("u", headers={"same": [rows[:1], rows[:1]]})
        [rows, members, rows]
    """,
    "a list that is changed after a call": "rows = [1]\ncall = fetch('u', headers={'x': rows})\nrows.append(2)\nprint(type(await call))",
}


@pytest.mark.spec("programs:PG30")
@pytest.mark.parametrize("program", SAME.values(), ids=SAME)
def test_what_a_program_has_and_has_not_is_the_same(program: str, monty: MontySandbox) -> None:
    code = textwrap.dedent(program).strip()

    assert went(monty, code) == went(InProcessSandbox(), code)


@pytest.mark.spec("programs:PG30")
def test_variables_live_on_from_one_program_to_the_next(monty: MontySandbox) -> None:
    programs = ["x = await add(1, 2)\ndef twice(n):\n    return 2 * n", "1 / 0", "twice(x)", "x = y = 5", "x + y"]

    assert went(monty, *programs) == went(InProcessSandbox(), *programs)


@pytest.mark.spec("programs:PG30")
def test_a_traceback_has_the_lines_of_the_program_and_none_of_ours() -> None:
    session = InProcessSandbox().open((), seconds=5, memory=1, printed=100, seed=1)
    code = "import asyncio\n\nasync def f(x):\n    return 1 / x\n\nasync def g():\n    await asyncio.gather(f(1), f(0))\n\nawait g()"
    turn = session.feed(code, NOW)
    session.close()

    assert isinstance(turn, ProgramRaised)
    expected = """\
        Traceback (most recent call last):
          File "<python-input-1>", line 9, in <module>
            await g()
          File "<python-input-1>", line 7, in g
            await asyncio.gather(f(1), f(0))
          File "<python-input-1>", line 4, in f
            return 1 / x
        ZeroDivisionError: division by zero"""
    assert textwrap.dedent(expected) == turn.text


# --- in a run ---------------------------------------------------------------------------------------------------------


@tool(category="read")
def price(item: str) -> int:
    """What an item costs."""
    return len(item) * 10


def buyer(sandbox: Sandbox, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition("buyer", model="test/m", tools=[code_mode(price, sandbox=sandbox, **options)])


def programs(*codes: str) -> list[Any]:
    return [tool_call("run_code", {"code": textwrap.dedent(code)}) for code in codes]


def said(result: RunResult) -> list[str]:
    return [one.result.text for one in result.tool_calls]


SHOPPING = """
    import asyncio
    items = ["tea", "coffee", "milk"]
    prices = await asyncio.gather(*[price(i) for i in items])
    if await ask("Which one?", items) == "tea":
        print(await price("tea" * 2))
    sum(prices)
"""


@pytest.mark.spec("programs:PG30", "programs:PG26")
async def test_a_journal_of_the_one_is_resumed_and_replayed_with_the_other(monty: MontySandbox, tmp_path: Path) -> None:
    for name, one, other in (("ours", InProcessSandbox(), monty), ("monty", monty, InProcessSandbox())):
        path = tmp_path / f"{name}.jsonl"
        async with Engine([buyer(one, ask=True)], models=ScriptedModel(programs(SHOPPING))) as engine:
            waiting = await engine.run("buyer", "go", journal=path)
        (question,) = waiting.pending_questions
        async with Engine([buyer(other, ask=True)], models=ScriptedModel([text("end")])) as engine:
            result = await engine.resume(path, answers={question.id: "tea"})
            assert result == await engine.replay(path)
        async with Engine([buyer(one, ask=True)], models=ScriptedModel([])) as engine:
            assert result == await engine.replay(path)
        assert ["60\n130"] == said(result)


@pytest.mark.spec("programs:PG30")
async def test_a_journal_that_is_cut_anywhere_goes_on_to_the_same(tmp_path: Path) -> None:
    path, code = tmp_path / "run.jsonl", "found = [await price('x' * n) for n in range(4)]\nsum(found)"
    async with Engine([buyer(InProcessSandbox())], models=ScriptedModel([*programs(code), text("end")])) as engine:
        whole = await engine.run("buyer", "go", journal=path)
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in range(2, len(lines)):
        copy = tmp_path / f"{cut}.jsonl"
        copy.write_bytes(b"".join(lines[:cut]))
        held = FileJournal(copy).history()
        answered = sum(i.type == "model_call" and a in held.results for a, i in held.intents.items())
        replies = [*programs(code), text("end")][answered:]
        async with Engine([buyer(InProcessSandbox())], models=ScriptedModel(replies)) as engine:
            result = await engine.resume(copy, in_doubt="retry")
        assert ["60"] == said(whole) == said(result), cut


@pytest.mark.spec("programs:PG30")
@pytest.mark.parametrize(
    ("code", "limits", "expected"),
    [
        ("while True:\n    pass", {"seconds": 0.2}, "0.2 s between two waits"),
        ("def f(n):\n    return f(n - 1) + f(n - 1) if n else 1\nf(60)", {"seconds": 0.2}, "0.2 s between two waits"),
        ("import itertools\n[n for n in itertools.count()]", {"seconds": 0.2}, "0.2 s between two waits"),
        ("while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass", {"seconds": 0.2}, "0.2 s"),
        ("while True:\n    print('x' * 1000)", {"printed": 5_000}, "may print 5,000 characters"),
        ("try:\n    print('x' * 9)\nexcept BaseException:\n    pass", {"printed": 5}, "may print 5 characters"),
        ("x = 1\nwhile True:\n    await price('a')", {"calls": 7}, "ended in line 3: it made more than 7 calls"),
        ("import socket", {}, "Nothing was run"),
        ("await prise('a')", {}, "did you mean `price`"),
    ],
)  # fmt: skip
async def test_what_breaks_a_limit_is_an_error_result_and_the_next_program_runs(
    code: str, limits: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = in_process._InProcessSession.feed

    def fed(self: Any, code: str, now: datetime) -> Any:
        """Give the next program its time: a thread of a busy machine may not begin within what the first one had."""
        self._seconds = 30.0 if code == "1 + 1" else self._seconds
        return feed(self, code, now)

    monkeypatch.setattr(in_process._InProcessSession, "feed", fed)
    agent = buyer(InProcessSandbox(), limits=ProgramLimits(**limits))
    async with Engine([agent], models=ScriptedModel([*programs(code, "1 + 1"), text("end")])) as engine:
        result = await engine.run(agent, "go")

    assert expected in said(result)[0], said(result)[0]
    assert ["error", "ok"] == [one.result.status for one in result.tool_calls]
    assert "2" == said(result)[1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("program ")]


@pytest.mark.spec("programs:PG30")
async def test_a_run_that_is_stopped_ends_its_program() -> None:
    agent = buyer(InProcessSandbox(), limits=ProgramLimits(seconds=30))
    async with Engine([agent], models=ScriptedModel(programs("while True:\n    pass"))) as engine:
        handle = engine.start(agent, "go")
        while not any(each.name.startswith("program ") and each.is_alive() for each in threading.enumerate()):  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.01)
        began = time.monotonic()
        handle.interrupt()
        result = await handle.result()

    assert RunStatus.CANCELLED is result.status
    assert time.monotonic() - began < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("program ")]


@pytest.mark.spec("programs:PG30")
@pytest.mark.parametrize("when", ["before it is told", "while its thread begins"])
def test_a_session_that_is_closed_before_its_program_has_begun_runs_nothing_of_it(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = InProcessSandbox().open((), seconds=30, memory=1, printed=10, seed=1)
    start = threading.Thread.start

    def begins(thread: threading.Thread) -> None:
        session.close()
        start(thread)

    if when == "before it is told":
        session.close()
    else:
        monkeypatch.setattr(in_process._Program, "start", begins)
    turn = session.feed("while True:\n    pass", NOW)

    assert ProgramRaised("RuntimeError", "the program was ended", 0, is_fatal=True) == turn


@pytest.mark.spec("programs:PG20")
async def test_a_specification_stands_for_the_tool_of_its_name_that_the_engine_has() -> None:
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(price.spec, sandbox=InProcessSandbox())])
    async with Engine([agent], [price], ScriptedModel([*programs("await price('tea')"), text("end")])) as engine:
        assert ["30"] == said(await engine.run(agent, "go"))
    with pytest.raises(DefinitionError, match="price"):
        Engine([agent], models=ScriptedModel([])).run_sync(agent, "go")


@pytest.mark.spec("programs:PG30")
async def test_a_hundred_programs_wait_at_once() -> None:
    @tool(parallel_safe=True)
    async def slow(n: int) -> int:
        """Take a while."""
        await asyncio.sleep(0.2)
        return n

    sandbox = InProcessSandbox()
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(slow, sandbox=sandbox)])
    model = ScriptedModel(lambda request: text("end") if len(request.messages) > 2 else programs("await slow(3)")[0])
    async with Engine([agent], models=model) as engine:
        results = await asyncio.gather(*[engine.run(agent, "go") for _ in range(100)])

    assert ["3"] * 100 == [said(result)[0] for result in results]


@pytest.mark.spec("programs:PG30")
def test_a_forked_child_is_told_that_it_cannot_go_on() -> None:
    session = InProcessSandbox().open(["price"], seconds=5, memory=1, printed=10, seed=1)
    waiting = session.feed("await price('a')", NOW)
    assert isinstance(waiting, ProgramWaiting)
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        try:
            session.answer({waiting.calls[0].id: CallAnswer(1)}, NOW)
        except ToolError as error:
            os.write(theirs, error.message.encode())
        session.close()
        os._exit(0)
    os.waitpid(pid, 0)
    told = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    turn = session.answer({waiting.calls[0].id: CallAnswer(1)}, NOW)

    assert "forked" in told
    assert ProgramEnded(1) == turn


WITHOUT = """
import sys
sys.modules["pydantic_monty"] = None
from stepengine import AgentDefinition, Engine, tool
from stepengine.programs import InProcessSandbox, code_mode
from stepengine.testing import ScriptedModel, text, tool_call

@tool
def price(item: str) -> int:
    "What an item costs."
    return len(item) * 10

buyer = AgentDefinition("buyer", model="test/m", tools=[code_mode(price, sandbox=InProcessSandbox())])
model = ScriptedModel([tool_call("run_code", {"code": "await price('tea')"}), text("end")])
with Engine([buyer], models=model) as engine:
    print(engine.run_sync(buyer, "go").tool_calls[0].result.text)
"""


@pytest.mark.spec("programs:PG30")
def test_it_needs_no_extra() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT], check=False, capture_output=True, text=True, timeout=60)

    assert ("30\n", "") == (ran.stdout, ran.stderr)
