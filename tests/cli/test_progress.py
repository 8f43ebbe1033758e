"""
Progress lines: what each event looks like on stderr, and that nothing in it is taken for markup or control.
"""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stepengine.cli.bench import make_progress_display
from stepengine.cli.options import Options
from stepengine.cli.screen.progress import LEVELS, ProgressDisplay
from stepengine.data import events as ev
from stepengine.data.messages import ToolCallLog, ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, RunPhase, RunResult, RunStatus
from stepengine.data.usage import Usage

NASTY = "[red]not markup[/red] \x1b[2J\x9b\u202e :smile: {0} %s"


def shown(*events: ev.Event, **options: Any) -> str:
    """
    Return what plain progress prints for *events*.
    """
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out, highlight=False), **options)
    with progress.show_status_line():
        for event in events:
            progress.on_event(event)
    return out.getvalue()


def on_terminal(*events: ev.Event) -> str:
    """
    Return what reaches a terminal with colours and a live status line.
    """
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=100, highlight=False)
    progress = ProgressDisplay(console, live=True)
    with progress.show_status_line():
        for event in events:
            progress.on_event(event)
    return out.getvalue()


def test_a_run_of_two_steps_reads_from_top_to_bottom() -> None:
    edit = {"path": "shop.py", "replacements": [{"old_string": "a", "new_string": "b"}]}
    diff = "--- a/shop.py\n+++ b/shop.py\n@@ -1 +1 @@\n-a\n+b\n"
    lines = shown(
        ev.ToolStarted(tool_name="read_files", tool_call_id="c1", input={"paths": ["shop.py"]}, source="handler"),
        ev.ToolFinished(tool_name="read_files", tool_call_id="c1", result=ToolResult.json([]), duration_ms=3),
        ev.StepStarted(step=0, steps_remaining=49),
        ev.ModelStarted(model="m"),
        ev.TextDelta(text="I will "),
        ev.TextDelta(text="edit it.\nNow"),
        ev.TextCompleted(text="I will edit it.\nNow"),
        ev.ToolStarted(tool_name="str_replace", tool_call_id="c2", input=edit),
        ev.ToolFinished(
            tool_name="str_replace", tool_call_id="c2", result=ToolResult.json({"unified_diff": diff}), duration_ms=5
        ),
        ev.ModelFinished(model="m", reply=ModelReply("x", usage=Usage(10, 2))),
        ev.StepStarted(step=1, steps_remaining=48),
        ev.ModelStarted(model="m"),
        ev.TextCompleted(text="Done."),
    ).splitlines()

    assert lines == [
        "  handler > read_files shop.py",
        "          < read_files ok, 3 ms",
        "step 1",
        "I will edit it.",
        "Now",
        "    model > str_replace shop.py, a",
        "          < str_replace ok, 5 ms",
        *[f"            {line}" for line in diff.splitlines()],
        "step 2",
        "Done.",
    ]


def test_waiting_tool_call_is_shown_as_waiting() -> None:
    waiting = ev.ToolFinished(
        tool_name="release", tool_call_id="c1", result=ToolResult.make_pending("0.q2"), duration_ms=22
    )
    assert "          < release waits, 22 ms\n" == shown(waiting)


def test_a_step_that_never_reaches_a_model_is_not_announced() -> None:
    assert "" == shown(ev.StepStarted(step=0, steps_remaining=50))


# No JSON value that an agent keeps as its todos breaks the display.
TODOS = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda value: (
        st.lists(value, max_size=3) | st.dictionaries(st.sampled_from(["task", "completed", "x"]), value, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.deep
@pytest.mark.smoke
@given(TODOS)
def test_agent_with_its_own_write_todos_tool_is_shown(items: Any) -> None:
    lines = shown(
        ev.ToolStarted(tool_name="write_todos", tool_call_id="c1", input={"items": items}),
        ev.TodosChanged(todos=items),
        ev.ToolFinished(tool_name="write_todos", tool_call_id="c1", result=ToolResult("kept"), duration_ms=1),
    ).splitlines()

    assert lines[0].startswith("    model > write_todos")
    assert "          < write_todos ok, 1 ms" == lines[-1]


EVERY_TEXT = [
    ev.TextCompleted(text=NASTY),
    ev.TextDelta(text=f"{NASTY}\n"),
    ev.ThinkingCompleted(text=NASTY),
    ev.ToolStarted(tool_name=NASTY, input={"x": NASTY}),
    ev.ToolFinished(tool_name=NASTY, result=ToolResult.error(NASTY)),
    ev.ToolFinished(tool_name=NASTY, result=ToolResult.json({"unified_diff": f"+{NASTY}"})),
    ev.ToolProgress(message=NASTY, percent=50),
    ev.ToolLog(message=NASTY, level="error"),
    ev.LogLine(message=NASTY, level=NASTY),
    ev.Notification(message=NASTY),
    ev.AgentSpawned(agent_id="a", child_path="1", prompt=NASTY),
    ev.ModelRetry(model="m", attempt=1, wait=0.5, error=NASTY),
    ev.HookFailed(point="pre_tool", hook="h", error=NASTY),
    ev.HandlerNotice(kind="k", message=NASTY),
    ev.TodosChanged(todos=[{"task": NASTY, "completed": True}]),
    ev.Warned(message=NASTY),
    ev.QuestionAsked(question=Question("q1", NASTY)),
    ev.PermissionRequested(question=Question("q1", NASTY), tool_name=NASTY),
]


@pytest.mark.spec("reliability:UI01")
@pytest.mark.parametrize("event", EVERY_TEXT, ids=[f"{e.type}-{i}" for i, e in enumerate(EVERY_TEXT)])
def test_untrusted_text_is_shown_escaped(event: ev.Event) -> None:
    plain = shown(event, verbose=True)
    colours = re.sub(r"\x1b\[[0-9;?]*[mKAJlhG]|\r", "", on_terminal(event))

    assert "[red]not markup[/red]" in plain
    assert ":smile:" in plain
    assert r"\x1b[2J\x9b\u202e" in plain
    for text in (plain, colours):
        assert set() == {c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf")}


def test_the_live_line_shows_text_while_it_streams() -> None:
    assert "half a sent" in on_terminal(ev.PhaseChanged(phase=RunPhase.CALLING_MODEL), ev.TextDelta(text="half a sent"))


def test_the_live_line_counts_steps_tokens_and_cost() -> None:
    reply = ModelReply("x", usage=Usage(input_tokens=1200, output_tokens=34), cost=Decimal("0.5"))

    line = on_terminal(
        ev.StepStarted(step=2, steps_remaining=9),
        ev.ModelStarted(model="m"),
        ev.ModelFinished(model="m", reply=reply),
        ev.ModelFinished(path="1", model="m", reply=reply),
        ev.PhaseChanged(phase=RunPhase.EXECUTING_TOOL, detail="glob"),
        ev.Notification(message="now"),
    )

    assert "step 3 | executing tool glob | 2,400 tokens in, 68 out | $1.00 | " in line


@pytest.mark.spec("ecosystem:EC130")
@pytest.mark.parametrize(
    ("variables", "live", "coloured"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"CI": "true"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1", "CI": "true"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_environment_decides_colours_and_live_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], live: bool, coloured: bool
) -> None:
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = make_progress_display(Options(agent="x"))
    assert progress is not None
    with progress.show_status_line():
        progress.on_event(ev.Warned(message="careful"))

    assert live == ("\x1b[?25l" in terminal.getvalue())
    assert coloured == ("\x1b[33m" in terminal.getvalue())


def test_a_reply_that_broke_off_is_taken_back() -> None:
    lines = shown(ev.TextDelta(text="half"), ev.ReplyDiscarded(model="m"), ev.TextCompleted(text="whole"))

    assert ["(the reply was interrupted and discarded)", "whole"] == lines.splitlines()


def test_parallel_children_are_labelled_in_the_output() -> None:
    lines = shown(
        ev.AgentSpawned(agent_id="kid", child_path="1", prompt="left", only_child=False),
        ev.AgentSpawned(agent_id="kid", child_path="2", only_child=False),
        ev.AgentSpawned(path="1", agent_id="grandchild", child_path="1.0"),
        ev.TextCompleted(path="2", text="two"),
        ev.TextCompleted(path="1.0", text="one"),
        ev.TextCompleted(path="1", text="still one"),
        ev.AgentFinished(agent_id="kid", child_path="1", status=RunStatus.COMPLETED),
        ev.TextCompleted(path="2", text="two again"),
    )

    assert lines.splitlines() == [
        "agent kid starts: left",
        "agent kid starts",
        "  [kid: left]",
        "  agent grandchild starts",
        "  [kid]",
        "  two",
        "  [kid: left]",
        "    one",
        "  still one",
        "agent kid ended: completed",
        "  [kid]",
        "  two again",
    ]


@pytest.mark.spec("ecosystem:EC130")
@pytest.mark.parametrize("level", LEVELS)
def test_log_lines_below_the_level_are_left_out(level: str) -> None:
    lines = shown(*[ev.LogLine(level=each, message=each) for each in LEVELS], level=level).split()

    assert [f"{each}:" for each in LEVELS[LEVELS.index(level) :]] == lines[::2]


def test_long_diff_is_cut_with_a_count() -> None:
    lines = shown(ev.ToolFinished(tool_name="t", result=ToolResult.json({"unified_diff": "+x\n" * 100}))).splitlines()

    assert "            (60 more lines)" == lines[-1]
    assert 42 == len(lines)


def spawned(number: int, of: int) -> ev.AgentSpawned:
    return ev.AgentSpawned(agent_id="kid", child_path=str(number), prompt=f"do {number}", only_child=False, of=of)


def ended(number: int, status: RunStatus = RunStatus.COMPLETED) -> ev.AgentFinished:
    return ev.AgentFinished(agent_id="kid", child_path=str(number), status=status)


def work_of(number: int) -> list[ev.Event]:
    at = {"path": str(number)}
    return [
        ev.StepStarted(**at, step=0, steps_remaining=9),
        ev.ModelStarted(**at, model="m"),
        ev.ToolStarted(**at, tool_name="glob"),
        ev.ToolFinished(**at, tool_name="glob", result=ToolResult.json([])),
        ev.AgentSpawned(**at, agent_id="grandkid", child_path=f"{number}.1"),
        ev.TextCompleted(path=f"{number}.1", text="hidden"),
        ev.AgentFinished(**at, agent_id="grandkid", child_path=f"{number}.1", status=RunStatus.COMPLETED),
        ev.TextCompleted(**at, text="done"),
    ]


@pytest.mark.deep
@pytest.mark.smoke
def test_many_children_are_one_line_with_their_failures() -> None:
    events: list[ev.Event] = [spawned(number, 200) for number in range(200)]
    for number in range(200):
        events += [*work_of(number), ended(number, RunStatus.FAILED if number == 7 else RunStatus.COMPLETED)]
    events.insert(300, ev.LogLine(path="3", level="error", message="careful"))

    assert [
        "agent kid ended: failed", "  [kid: do 3]", "    error: careful", "agents kid: 200/200",
    ] == shown(*events).splitlines()  # fmt: skip
    assert "hidden" in shown(*events, verbose=True)


def test_waves_of_children_are_counted_together() -> None:
    waves = [
        event
        for start in range(0, 72, 8)
        for event in [*[spawned(n, 8) for n in range(start, start + 8)], *[ended(n) for n in range(start, start + 8)]]
    ]

    assert [f"agents kid: {n}/{n}" for n in (8, 16, 32, 64)] == shown(*waves).splitlines()
    assert "kid 3/8 | " in on_terminal(*waves[:11])


def test_status_line_stops_waiting_after_the_answer() -> None:
    question = Question("q1", "Ship it?")
    events = [
        ev.PhaseChanged(path="", phase=RunPhase.AWAITING_ANSWER),
        ev.QuestionAsked(path="", question=question),
        ev.AnswerReceived(path="", question_id="q1", answer=Answer("yes")),
    ]

    assert "awaiting answer | " in on_terminal(*events[:2])
    assert "awaiting" not in on_terminal(*events)


def test_the_summary_counts_the_whole_tree() -> None:
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out, highlight=False, width=200))
    for event in [spawned(1, 9), *work_of(1), ended(1), *[ev.StepStarted(path="2", step=0, steps_remaining=9)]]:
        progress.on_event(event)
    # After a hand-off the result lists the call of the child, which its event has counted.
    listed = (ToolCallLog("t", {}, ToolResult.error("no"), 0, 0, "c1", path="1"),)
    state = AgentState(run_id="r", agent_id="a", step_index=3)
    progress.print_run_summary(RunResult(status=RunStatus.COMPLETED, state=state, tool_calls=listed))

    assert "agents kid: 1/9\ncompleted | 5 steps | 1 tool call | 2 child runs | no model call | " in out.getvalue()
