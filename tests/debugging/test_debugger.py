"""
`debugging.debug`: the handler's own objects, both ways; and how quick that is at 10,000 steps.
"""

from __future__ import annotations

import _thread
import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import (
    STEP,
    AgentDefinition,
    Ask,
    Change,
    Engine,
    Hooks,
    RunStatus,
    call,
    load_agent,
    tool,
)
from stepengine.adapters.ag_ui.asked import page_hooks
from stepengine.data.messages import AssistantMessage, TextPart, ToolCallPart
from stepengine.debugging import debug
from stepengine.debugging.debugger import diff_summaries, summarize_moment
from stepengine.debugging.expressions import has_read_only_syntax
from stepengine.debugging.walks import find_os_fork_problem
from stepengine.errors import InputError, JournalError, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.testing import ScriptedModel, text
from stepengine.tools.bundled import ask_user
from tests import forked_processes


@tool
def read(path: str) -> str:
    """Read."""
    return "text of " + path


def handle_steps(ctx: Any) -> Any:
    seen: list[str] = []
    for number in range(4):
        yield STEP
        seen.append((yield from call("read", str, path=f"a{number}")))
    answer = yield from Ask("Ship it?")
    return [len(seen), answer]


AGENT = AgentDefinition("worker", model="m/x", tools=[read], handle_steps=handle_steps)


@pytest.fixture
def journal() -> MemoryJournal:
    made = MemoryJournal()
    with Engine([AGENT], models=ScriptedModel([text(f"reply {n}") for n in range(4)])) as engine:
        engine.run_sync(AGENT, "go", journal=made)
    return made


def debugger(journal: MemoryJournal, agent: Any = AGENT) -> Any:
    return debug(Engine([agent], models=ScriptedModel([])), journal)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG6", "evaluation:JG3", "evaluation:JG34")
def test_moving_to_a_position_gives_the_same_moment_from_anywhere(journal: MemoryJournal) -> None:
    """
    A walk back and forth over all pairs of positions finds at each one what a walk from the start finds there.
    """

    def told(moment: Any) -> Any:
        values = moment.frames[0].locals if moment.frames else {}
        return moment.address, moment.asked, list(values.get("seen", ())), len(moment.state.message_history)

    with debugger(journal) as one:
        straight = [told(one.move_to(position)) for position in range(one.last + 1)]
        for first in range(one.last + 1):
            for second in range(one.last + 1):
                one.move_to(first)

                assert straight[second] == told(one.move_to(second))
    assert len(straight) == len({moment[0] for moment in straight}) == 9


@pytest.mark.spec("evaluation:JG6", "evaluation:JG20", "evaluation:JG22")
def test_run_until_returns_real_objects_and_reports_whether_it_matched(journal: MemoryJournal) -> None:
    with debugger(journal) as one:
        assert one.run_until("len(seen) == 2")
        assert ["text of a0", "text of a1"] == one.moment().frames[0].locals["seen"]
        assert one.run_until("number == 0", backwards=True)
        assert "#1" == one.moment().address
        assert not one.run_until("missing")
        assert one.problem.startswith("NameError")
        assert one.last == one.position
        assert one.run_until("@read", backwards=True)
        assert "#7" == one.back(0).address
        assert not one.run_until("error", backwards=True)
        assert 0 == one.position


@pytest.mark.spec("evaluation:JG30")
def test_evaluate_changes_no_recorded_value_with_or_without_fork(
    journal: MemoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for forks in (True, False):
        if not forks:
            monkeypatch.setattr("stepengine.debugging.debugger.find_os_fork_problem", lambda: "no")
        with debugger(journal) as one:
            one.goto(3)

            assert ["2", "[2, 2]"] == [one.evaluate("number"), one.evaluate("[number for _ in seen]")]
            assert "['text of a0', 'text of a1', 9]" == one.evaluate("seen.append(9) or seen")
            assert "2" == one.evaluate("len(seen)")
            with pytest.raises(InputError, match="the debugger runs no statements"):
                one.evaluate("seen = 1")
            with pytest.raises(InputError, match="frame 9 does not exist"):
                one.evaluate("seen", 9)


def test_read_only_syntax_excludes_calls_assignments_and_iteration() -> None:
    looks = ["a", "a.b[0]", "len(a) == 2 and not b", "a + 1 > -2", "x in (1, 2)", "a[-1] not in 'xyz'", "a[1:b]"]
    acts = ["a.pop()", "f(a)", "[x for x in a]", "(a := 1)", "(yield)", "open('f')", "len(f())"]
    acts += [
        "1 in a",
        "x in (1,) in a",
        "x not in a.b",
        "sum(a)",
        "min(a)",
        "max(a)",
        "any(a)",
        "all(a)",
        "a['key']",
        "a[b]",
    ]

    assert [True] * len(looks) + [False] * len(acts) == [has_read_only_syntax(each) for each in looks + acts]


def consuming_steps(ctx: Any) -> Any:
    items, known = iter(["a0", "a1", "a2", "a3"]), defaultdict[str, int](int)
    for item in items:
        yield STEP
        yield from call("read", str, path=item)
    answer = yield from Ask("Ship it?")
    return [len(known), answer]


@pytest.mark.spec("evaluation:JG22", "evaluation:JG20")
@pytest.mark.parametrize(
    "condition",
    [
        "'a2' in items",
        "'a9' not in items",
        "any(items)",
        "all(items)",
        "min(items)",
        "max(items) == 'a3'",
        "not known['x']",
    ],
)
def test_run_until_leaves_the_run_as_it_was(journal: MemoryJournal, condition: str) -> None:
    with debugger(journal, attrs.evolve(AGENT, handle_steps=consuming_steps)) as one:
        assert one.run_until(condition)
        assert "0" == one.evaluate("len(known)")
        places = [one.next().address for _ in range(one.last - one.position)]

    assert [f"#{number}" for number in range(2, 9)] == places


@pytest.mark.spec("evaluation:JG20", "evaluation:JG111")
def test_goto_unknown_position_raises_and_keeps_the_position(journal: MemoryJournal) -> None:
    with debugger(journal) as one:
        one.goto(2)
        for place in (9, "99999999999999", "#77", "3#1", "x", "#5.5", ""):
            with pytest.raises(JournalError):
                one.goto(place)
        with pytest.raises(JournalError, match="effect #-1 is not in"):
            one.goto("-1")

        assert 2 == one.position


@pytest.mark.spec("evaluation:JG38")
def test_diverging_code_stops_at_the_last_matching_position(journal: MemoryJournal) -> None:
    def edited(ctx: Any) -> Any:
        for number in range(4):
            yield STEP
            yield from call(read, f"a{number if number < 2 else 9}")

    with debugger(journal, attrs.evolve(AGENT, handle_steps=edited)) as one:
        for _ in range(3):
            with pytest.raises(ReplayDivergence) as raised:
                one.goto(4)

            assert ("#5", "/input/path", 4) == (raised.value.address, raised.value.diff[0].pointer, one.position)
            assert ("#4", 2) == (one.moment().address, one.moment().frames[0].locals["number"])
        assert "#3" == one.back().address
        for places in [(1, "#7"), ("#7", 1)]:
            with pytest.raises(ReplayDivergence):
                one.diff(*places)

            assert ("#3", 3) == (one.moment().address, one.position)


@pytest.mark.spec("evaluation:JG22")
def test_line_condition_matches_whole_names_of_files(journal: MemoryJournal) -> None:
    line = handle_steps.__code__.co_firstlineno + 4
    folder, name = Path(__file__).parts[-2:]
    with debugger(journal) as one:
        found = {}
        for file in [name, f"{folder}/{name}", f"./{name}", __file__, name[1:], f"g/{name}", f"x/{name}"]:
            one.move_to(0)
            found[file] = one.run_until(f"{file}:{line}")

    assert [True] * 4 + [False] * 3 == list(found.values()), found


@pytest.mark.spec("evaluation:JG20")
def test_diff_lists_added_removed_and_changed_values(journal: MemoryJournal) -> None:
    with debugger(journal) as one:
        one.goto(2)
        lines = one.diff(1, "#5")

        assert 2 == one.position
    assert "~ number 0 -> 2" in lines
    assert "~ seen [] -> ['text of a0', 'text of a1']" in lines
    assert [line for line in lines if line.startswith("+ message") and "reply 1" in line]
    before, after = ({"agent": "a", "messages": m, "context": c, "budgets": {}, "usage": {}, "locals": {}} for m, c in (
        (["x", "y"], {"k": "1"}), (["x", "z"], {}),
    ))  # fmt: skip
    assert ["- message 1 y", "+ message 1 z", "- context k 1"] == diff_summaries(before, after)


@pytest.mark.spec("evaluation:JG20")
@pytest.mark.parametrize("late", [True, False], ids=["text", "call"])
def test_summaries_of_different_messages_differ_however_late(journal: MemoryJournal, late: bool) -> None:
    def summary(said: str) -> dict[str, Any]:
        call_ = ToolCallPart("c", "read", {"path": "" if late else said})
        message = AssistantMessage([TextPart("x" * 300 + (said if late else "")), call_])
        with debugger(journal) as one:
            moment = one.moment()
            state = attrs.evolve(moment.state, message_history=[*moment.state.message_history, message])
            return summarize_moment(attrs.evolve(moment, state=state), one.texts)

    assert [] == diff_summaries(summary("a"), summary("a"))
    assert ["- message", "+ message"] == [line[:9] for line in diff_summaries(summary("a"), summary("b"))]


LATE: dict[str, tuple[Any, Any, str]] = {
    "text": ("x" * 3_000, "x" * 2_999 + "y", "xxx' -> ...xxx"),
    "bytes": (b"x" * 3_000, b"x" * 2_999 + b"y", "xxx' -> ...xxx"),
    "list": ([0] * 300, [0] * 299 + [1], "0, 0] -> ... 0, 0"),
    "nested": ({"a": ["x" * 300, "b"]}, {"a": ["x" * 300, "c"]}, "'b']} -> ..."),
    "deep": ([[[[[[1]]]]]], [[[[[[2]]]]]], "[[[[[[1]]]]]] -> [[[[[[2]]]]]]"),
    "longer": ("x" * 300, "x" * 301, "xxx' -> ...xxx"),
}


@pytest.mark.spec("evaluation:JG20")
@pytest.mark.parametrize(("was", "now", "part"), LATE.values(), ids=LATE)
def test_diff_shows_where_long_variables_differ(was: Any, now: Any, part: str) -> None:
    def handle(ctx: Any) -> Any:
        value = was
        yield STEP
        value = now
        yield STEP
        return value

    agent, journal = AgentDefinition("worker", model="m/x", handle_steps=handle), MemoryJournal()
    with Engine([agent], models=ScriptedModel([text("a"), text("b")])) as engine:
        engine.run_sync(agent, "go", journal=journal)
    with debugger(journal, agent) as one:
        lines = one.diff(1, 2)

    (line,) = [line for line in lines if line.startswith("~ value ")]
    assert part in line
    assert 500 > len(line)


@pytest.mark.spec("evaluation:JG28", "evaluation:JG111")
async def test_fork_continues_with_another_outcome_or_an_answer(journal: MemoryJournal) -> None:
    lines = journal.content()
    with Engine([AGENT], models=ScriptedModel([])) as engine, debug(engine, journal) as one:
        one.goto("#7")
        forked = await one.fork("other", models=ScriptedModel([]), allow_repeat=True)
        one.move_to(one.last)
        answered = await one.fork("yes")
        with pytest.raises(JournalError, match="answer"):
            await one.fork()

    assert RunStatus.SUSPENDED is forked.status
    assert "other" in [m.text for m in forked.state.message_history]
    assert [4, "yes"] == answered.output
    assert lines == journal.content()


TOPPINGS = ("ham", "egg, fried", "kale")
ASKED = {"question": "Which toppings?", "options": TOPPINGS, "multi_select": True}


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG28", "evaluation:JG111")
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "answered"])
@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(TOPPINGS), min_size=1, unique=True), st.integers(1, 3))
def test_fork_gives_each_question_its_whole_answer(is_open: bool, chosen: list[str], count: int) -> None:
    def asking(ctx: Any) -> Any:
        said = yield from call(ask_user, [{**ASKED, "question": f"Which toppings on pizza {n}?"} for n in range(count)])
        return [list(answer["selected"]) for answer in said["answers"]]

    agent = AgentDefinition("asker", tools=[ask_user], handle_steps=asking)
    journal = MemoryJournal()
    with Engine([agent]) as engine:
        asked = engine.run_sync(agent, "go", journal=journal).pending_questions
        if not is_open:
            engine.resume_sync(journal, answers={question.id: "kale" for question in asked})
        with debug(engine, journal) as one:
            one.goto(0)
            forked = asyncio.run(one.fork(chosen if count == 1 else [chosen] * count, allow_repeat=True))
            with pytest.raises(JournalError, match="answer"):
                asyncio.run(one.fork([chosen] * (count + 1), allow_repeat=True))

    assert [chosen] * count == forked.output


@pytest.mark.spec("evaluation:JG28", "evaluation:JG7")
async def test_served_fork_runs_no_tool_and_reuses_recorded_results(journal: MemoryJournal) -> None:
    @tool(name="read")
    def refused(path: str) -> str:
        """Read."""
        raise AssertionError(path)

    agent = attrs.evolve(AGENT, tools=[refused])
    models = ScriptedModel([text("anew"), text("anew")])
    with Engine([agent], models=ScriptedModel([])) as engine, debug(engine, journal) as one:
        one.goto("#3")
        forked = await one.fork("other", models=models, served=True)
        with pytest.raises(
            JournalError, match="served=True needs an effect with a recorded outcome, and a new outcome for"
        ):
            await one.fork(served=True)

    assert RunStatus.SUSPENDED is forked.status
    assert 2 == len(models.calls)
    assert ["text of a0", "other", "text of a2", "text of a3"] == [
        m.text for m in forked.state.message_history if m.role == "tool"
    ]


@pytest.mark.spec("evaluation:JG6", "evaluation:JG32")
def test_position_converts_to_json_and_closing_closes_handlers(journal: MemoryJournal) -> None:
    closed: list[int] = []

    def closing(ctx: Any) -> Any:
        try:
            yield from handle_steps(ctx)
        finally:
            closed.append(1)

    agent = attrs.evolve(AGENT, handle_steps=closing)
    with Engine([agent], models=ScriptedModel([])) as engine:
        with debug(engine, journal) as one:
            one.goto(3)
            told = json.loads(json.dumps(one.to_dict()))
            assert [] == closed
        assert [1] == closed
        with pytest.raises(JournalError), debug(engine, journal) as one:
            one.goto("#99")

    assert (3, "#4", "2") == (told["step"], told["address"], told["frames"][1]["locals"]["number"])
    assert [1, 1] == closed


@pytest.mark.spec("evaluation:JG3")
def test_moment_has_hooks_and_request_of_its_step(journal: MemoryJournal) -> None:
    def noted(ctx: Any) -> Change:
        return Change(context={"size": len(ctx.state.message_history)})

    agent = attrs.evolve(AGENT, hooks=Hooks(pre_step=[noted]))
    with debugger(journal, agent) as one:
        moment = one.goto(3)

    assert ["pre_step"] == [called.point for called in moment.hooks]
    assert {"size": len(moment.request.messages)} == moment.state.context
    assert moment.hooks[0].said.context == moment.state.context


@pytest.mark.spec("evaluation:JG5")
def test_engine_hooks_without_changes_are_not_shown(journal: MemoryJournal) -> None:
    def mine(ctx: Any) -> None:
        """Change nothing."""

    agent = attrs.evolve(AGENT, hooks=page_hooks() + Hooks(pre_run=[mine]))
    with debugger(journal, agent) as one:
        called = [hook.hook for n in range(1, 5) for hook in one.goto(n).hooks]

    assert ["mine"] == list(dict.fromkeys([name.rpartition(".")[2] for name in called]))


@pytest.mark.spec("evaluation:JG34")
def test_process_with_threads_is_not_forked() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()

    assert "threads are running, and a fork needs a single thread" in find_os_fork_problem()

    ended.set()
    thread.join()
    # As a library starts one that `threading` never hears of.
    going, ended = threading.Event(), threading.Event()
    _thread.start_new_thread(lambda: (going.set(), ended.wait()), ())
    going.wait()
    said = find_os_fork_problem()
    ended.set()

    assert "threads are running, and a fork needs a single thread" in said


BIG = """
from stepengine import STEP, AgentDefinition, Limits, ToolCall, tool


@tool
def read(path: str) -> str:
    'Read.'
    return "text of " + path


def handle_steps(ctx):
    total = 0
    for number in range(10_000):
        yield STEP
        yield from ToolCall("read", {"path": f"p{number}"}, include_tool_call=False)
        total += number
    return total


agent = AgentDefinition("big", model="openai/m", tools=[read], handle_steps=handle_steps, limits=Limits(max_steps=20_000, max_actions=20_000))
"""


COUNTED = """
import os
import sys

MADE = [0]


def noted(frame, event, _):
    MADE[0] += event == "call"


def numbered():
    for number in range_of(3_000):
        os.write(LOG, f"{number} {MADE[0]}\\n".encode())
        yield number


LOG = os.open(os.environ["COUNTED"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
range_of = range
range = lambda count: numbered() if count == 3_000 else range_of(count)
sys.setprofile(noted)
"""
SHORTER = BIG.replace("10_000", "3_000")
BARE = """
from stepengine import Engine, load_agent

agent = load_agent("counted.py")
with Engine([agent]) as engine:
    engine.stepper("run.jsonl", agent=agent).advance_to(5198)
"""


@pytest.mark.speed
@pytest.mark.spec("evaluation:JG34")
def test_long_walk_executes_each_step_once_at_constant_cost(tmp_path: Path) -> None:
    """
    Calls of Python functions are counted, in all processes that went there one after the other, and compared with those of
    a stepper that keeps no places to go back to.
    """
    (tmp_path / "big.py").write_text(SHORTER)
    agent = load_agent(tmp_path / "big.py")
    with Engine([agent], models=ScriptedModel([text("ok")] * 3_000)) as engine:
        engine.run_sync(agent, "go", journal=FileJournal(tmp_path / "run.jsonl", sync="write"))
    (tmp_path / "counted.py").write_text(COUNTED + SHORTER)

    def counted(name: str, *command: str) -> list[list[int]]:
        subprocess.run(
            [sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, timeout=300,
            env={**os.environ, "COUNTED": str(tmp_path / name)},
        )  # fmt: skip
        return [list(map(int, line.split())) for line in (tmp_path / name).read_text().splitlines()]

    walked = ["-m", "stepengine.cli", "debug", "run.jsonl", "--agent", "counted.py", "--exec", "goto 2600"]
    both = counted("went", *walked), counted("bare", "-c", BARE)
    went, bare = [[calls for _, calls in lines] for lines in both]
    compared = counted("compared", *walked, "--exec", "diff 50 2600")
    parts = [after - before for before, after in zip(went[200::400], went[600::400], strict=False)]
    print(f"calls a step: {(went[-1] - went[0]) / 2_600:.1f}, bare {(bare[-1] - bare[0]) / 2_600:.1f}; {parts}")

    assert [list(range(2_600))] * 2 == [[number for number, _ in lines] for lines in both]
    assert max(parts) < 1.05 * min(parts)
    assert went[-1] - went[0] < 1.05 * (bare[-1] - bare[0])
    # From the nearest places alone, of which there is one in 375 steps.
    assert 2_600 < len(compared) < 2_600 + 50 + 2 * 375


WALK = """
from types import SimpleNamespace
from stepengine.debugging.walks import ForkedWalk

walk = ForkedWalk(SimpleNamespace(position=0, tape=SimpleNamespace(last_position=0), close=lambda: None))
{}
code = walk.fork_and_wait_in_parent()
if code is None:
    walk.end_all_processes(3)
print("went on with", code)
"""


def walked_by(code: str) -> tuple[str, int]:
    """
    Return what a process says that walks with something done to its walk, and its exit code.
    """
    words = [sys.executable, "-c", WALK.format(code)]
    ran = forked_processes.run(words, capture_output=True, text=True, timeout=60)
    print(ran.stderr)
    return ran.stdout, ran.returncode


WOKEN_TWICE = """
import os, signal

leave = walk._wait_for_forks_and_exit

def twice(code):
    code = leave(code)
    if os.getpid() == walk._first:
        os.kill(os.getpid(), signal.SIGUSR1)  # of one that slept in between, and saw the end later
    return code

walk._wait_for_forks_and_exit = twice
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.usefixtures("forks")
def test_forked_walk_survives_an_extra_wakeup_signal() -> None:
    assert ("went on with 3\n", 0) == walked_by(WOKEN_TWICE)


HANDED_OVER = """
import os
from stepengine.debugging.walks import Rewound

first, (reading, writing), seen = os.getpid(), os.pipe(), []
read, fork, end = walk._read_shared_message, walk.fork_and_wait_in_parent, walk.end_all_processes

def read_before_the_end():
    known = read()
    if os.getpid() == first and known["active"] and not seen:
        seen.append(known)
        os.write(writing, b".")
        os.waitid(os.P_PID, known["active"], os.WEXITED | os.WNOWAIT)
    return known

def hand_over(code):
    os.read(reading, 1)
    walk.wake_nearest_and_exit(0)

def fork_and_end():
    try:
        return fork()
    except Rewound:
        end(3)

walk._read_shared_message, walk.fork_and_wait_in_parent, walk.end_all_processes = read_before_the_end, fork_and_end, hand_over
"""


@pytest.mark.deep
@pytest.mark.usefixtures("forks")
def test_process_that_handed_over_does_not_end_the_walk() -> None:
    """
    The sleeping process reads which one is active; that one hands over and ends before its end is collected.
    """
    assert ("went on with 3\n", 0) == walked_by(HANDED_OVER)
