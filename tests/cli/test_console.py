"""
The reference console: what it shows of a run, what it asks, and where what is typed goes.
"""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import sys
import termios
import time
import tty
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

from stepengine import AgentDefinition, Answer, Engine, RunStatus, tool
from stepengine.cli import ColorScheme, ConsoleRenderer, bench
from stepengine.cli.app import app
from stepengine.cli.commands.chat import chat
from stepengine.cli.screen.console import (
    KEYS,
    LIVE_LINES,
    MAX_BLOCK,
    MAX_SHOWN,
    TYPED,
    WHICH,
    Screen,
    Terminal,
    TypedLines,
    _format_permission_prompt,
    _parse_question_answer,
    _split_markdown_blocks,
    make_console,
    print_markdown,
)
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.data import events as ev
from stepengine.data.questions import Question
from stepengine.data.state import RunPhase, RunResult
from stepengine.errors import AnswerRejected
from stepengine.events import PermissionDecided, PermissionRequested, PhaseChanged
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import ask_user_tool, file_tools, shell_tools

pytestmark = pytest.mark.anyio
POLICY = Policy(
    [Rule.allow_category("read"), Rule.allow_tool("ask_user"), Rule.allow_tool("work"), Rule.ask_for_tool("write_file")]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("color\n")
    return work


def worker(
    *replies: Any,
    folder: Path,
    observers: Any = (),
    more: Any = (),
    policy: Policy | None = None,
    shell: bool = False,
    **options: Any,
) -> tuple[Engine, ScriptedModel]:
    tools = [
        *file_tools(folder, write=True),
        *shell_tools(folder, shell="bash" if shell else None),
        ask_user_tool(),
        *more,
    ]
    agent = AgentDefinition("worker", model="scripted/m", tools=[tool.spec.name for tool in tools])
    model = ScriptedModel(replies)
    return Engine([agent], tools, model, permissions=policy or POLICY, observers=observers, **options), model


async def shown(
    engine: Engine, typed: str, *, out: io.StringIO | None = None, journal: Any = None, **options: Any
) -> tuple[RunResult[Any], str]:
    """
    Return the result of a run on a console where *typed* is the input, and what was shown there.
    """
    out = io.StringIO() if out is None else out
    async with engine, engine.start("worker", "Go.", journal=journal) as handle:
        result = await ConsoleRenderer(handle, input=io.StringIO(typed), output=out, **options).run()
    return result, out.getvalue()


WRITES = tool_call("write_file", {"path": "b.txt", "content": "colour\n"})
REMOVES = tool_call("run_terminal_command", {"command": "rm a.txt"})
ASKED = "write_file b.txt +1 -0: y yes, n no, a always, e all edits > "
ASKS = tool_call("ask_user", {"questions": [{"question": "Which one?", "options": ["British", "American"]}]})


@pytest.mark.spec("requirements:N16", "requirements:M15", "requirements:X47", "interfaces:IF73")
async def test_approval_refusal_and_a_message_between_take_effect(folder: Path) -> None:
    """
    Reading is not asked about. A line that is not an answer becomes the next user message and decides nothing.
    """
    seen: list[Any] = []
    phases: dict[str, RunPhase] = {}
    engine, model = worker(
        tool_call("read_files", {"paths": ["a.txt"]}), WRITES, REMOVES, text("All done."),
        folder=folder, observers=[seen.append, lambda e: phases.setdefault(e.type, last_phase(seen))],
    )  # fmt: skip
    result, out = await shown(engine, "and mind the commas\ny\nn too dangerous\n")
    decided = [event for event in seen if isinstance(event, PermissionDecided)]
    asked = [event for event in seen if isinstance(event, PermissionRequested)]

    assert RunStatus.COMPLETED is result.status
    assert ["write_file", "run_terminal_command"] == [event.tool_name for event in asked]
    assert ["allow", "allow", "deny"] == [event.decision for event in decided]
    assert ("colour\n", True) == ((folder / "b.txt").read_text(), (folder / "a.txt").exists())
    assert "too dangerous" in result.tool_calls[-1].result.text
    assert ["Go.", "and mind the commas"] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert RunPhase.AWAITING_PERMISSION is phases["permission_requested"]
    for line in ("? May write_file run?", "| Write 'b.txt'", "| +colour", "| $ rm a.txt", "All done."):
        assert line in out.splitlines()


def last_phase(events: list[Any]) -> RunPhase:
    return next((e.phase for e in reversed(events) if isinstance(e, PhaseChanged)), RunPhase.IDLE)


@pytest.mark.spec("requirements:N16", "requirements:X54")
@pytest.mark.parametrize(
    ("typed", "answer"),
    [("2\n", "American"), ("British\n", "British"), ("\n1\n", "British"), ("Scots\n", "Scots")],
    ids=["number", "option", "again", "text"],
)
async def test_a_question_is_answered_by_a_number_or_by_text(folder: Path, typed: str, answer: str) -> None:
    engine, _ = worker(ASKS, text("Fine."), folder=folder)
    result, out = await shown(engine, typed)

    assert answer in result.tool_calls[0].result.text
    assert ["? Which one?", "  1. British", "  2. American"] == [
        line for line in out.splitlines() if line.startswith(("? ", "  1.", "  2."))
    ]


@pytest.mark.spec("requirements:X71", "interfaces:IF78")
@pytest.mark.parametrize(
    ("typed", "ran"),
    [
        ("a\n2\nn\nn\n", ["git log -1", "git log --all", "git log -1"]),
        ("a git log\nn\nn\n", ["git log -1", "git log --all", "git log -1"]),
        ("a\n1\nn\nn\nn\n", ["git log -1", "git log -1"]),
        ("a\n3\nyes\n", ["git log -1", "git log --all", "git push", "git log -1"]),
        ("a\n3\ny\nn\nn\nn\nn\n", []),
        ("a\n\nn\nn\nn\nn\n", []),
        ("a\n9\n\nn\nn\nn\nn\n", []),
        ("a\nthe second\n2\nn\nn\n", ["git log -1", "git log --all", "git log -1"]),
    ],
    ids=["by number", "by its words", "this call", "any", "not twice", "none", "no number", "a text first"],
)
async def test_always_states_its_scope_and_confirms_any_input_twice(folder: Path, typed: str, ran: list[str]) -> None:
    done: list[str] = []

    @tool(category="execute")
    def sh(command: str) -> str:
        """Run."""
        done.append(command)
        return "ran"

    commands = ["git log -1", "git log --all", "git push", "git log -1"]
    model = ScriptedModel([*[tool_call("sh", {"command": command}) for command in commands], text("Ok.")])
    agent = AgentDefinition("worker", model="scripted/m", tools=[sh])
    _, out = await shown(Engine([agent], models=model, permissions=Policy()), typed)

    assert ran == done
    covered = [
        "  1. exactly this call",
        "  2. git log with harmless options and paths",
        "  3. ANY call of sh, with any input",
    ]
    assert ("type a number from 1 to 3, or Enter for none" in out) == typed.startswith(("a\n9", "a\nthe"))
    assert ([] if typed.startswith("a git") else covered) == re.findall(r"^  \d\..*", out, re.MULTILINE)


async def test_option_descriptions_are_shown_and_not_recorded(folder: Path) -> None:
    options = [{"label": "SQLite", "description": "One file\x1b[2J"}, {"label": "Other", "description": ""}, "None"]
    asks = tool_call("ask_user", {"questions": [{"question": "Which?", "options": options}]})
    journal = MemoryJournal()
    engine, _ = worker(asks, text("Fine."), folder=folder)
    _, out = await shown(engine, "1\n", journal=journal)

    lines = out.splitlines()
    at = lines.index("? Which?")
    assert ["  1. SQLite", r"     One file\x1b[2J", "  2. Other", "  3. None"] == lines[at + 1 : at + 5]
    assert b"descriptions" not in journal.content()


WORDS = st.text("ab/. -", max_size=120)


@pytest.mark.spec("interfaces:IF73")
@given(
    st.sampled_from(["write_file", "run_terminal_command", "x" * 64]),
    WORDS,
    st.integers(0, 2_000),
    st.integers(76, 200),
)
def test_permission_prompt_fits_one_line_with_room_to_type(name: str, path: str, added: int, width: int) -> None:
    diff = "--- a\n+++ b\n@@ @@\n" + "+--x\n" * added + "--- y\n-x\n"
    preview = {"action": "Do", "details": {"unified_diff": diff}}
    question = Question("q", "May it?", tool_name=name, details={"path": path}, preview=preview)
    prompt = _format_permission_prompt(question, width)
    size = f" +{added} -2: "

    assert len(prompt) + TYPED <= width
    assert (name[:27], True) == (prompt[:27][: len(name)], size in prompt)
    if len(path) + len(name) + len(size) + len(KEYS[-1]) + TYPED < width and path == " ".join(path.split()):
        assert f"{path}{size}" in prompt
    assert "\n" not in prompt


@pytest.mark.spec("interfaces:IF73")
@pytest.mark.parametrize("rows", [10, 24, 60])
async def test_long_diff_leaves_its_question_on_the_screen(folder: Path, rows: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=rows, no_color=True)
    terminal = Terminal(console, TypedLines(io.StringIO("n\n")))
    preview = {"action": "Write", "details": {"unified_diff": "--- a\n+++ b\n" + "+x\n" * 300}}
    question = Question("q", "May it?", tool_name="write_file", details={"path": "a"}, preview=preview)
    await terminal.ask_until_answered(question, lambda _: None, None)  # type: ignore[arg-type]  # nothing else is said
    lines = out.getvalue().splitlines()

    assert "? May it?" in lines[0]
    assert len(lines) < rows - 2
    assert "more lines; v shows them" in out.getvalue()


EDITS = tool_call("str_replace", {"path": "a.txt", "replacements": [{"old": "color", "new": "colour"}]})


@pytest.mark.spec("interfaces:IF73")
@pytest.mark.parametrize(
    ("policy", "line"), [(Policy(), "| +colour"), (Policy(mode="accept_edits"), "+colour")], ids=["asked", "allowed"]
)
async def test_the_difference_of_an_edit_is_shown_once(folder: Path, policy: Policy, line: str) -> None:
    """
    A person who was asked has seen it. Without a question it is shown with the result.
    """
    engine, _ = worker(EDITS, text("Done."), folder=folder, policy=policy)
    _, out = await shown(engine, "y\n")

    assert [line] == [shown.strip() for shown in out.splitlines() if "+colour" in shown]


@pytest.mark.spec("interfaces:IF73")
@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({"command": ["git", "log", "a b"]}, ["? May run_terminal_command run?", "| Run git", "| $ git log 'a b'"]),
        ({"command": "ls | wc"}, ["| Run a shell script", "| $ ls | wc", "| needs_a_shell_because_of: '|' outside of quotes"]),
    ],
    ids=["words", "script"],
)  # fmt: skip
async def test_a_command_is_shown_as_a_line_of_a_shell(folder: Path, given: Any, lines: list[str]) -> None:
    engine, _ = worker(
        tool_call("run_terminal_command", given), text("Done."), folder=folder, policy=Policy(), shell=True
    )
    _, out = await shown(engine, "n\n")
    asked = out[: out.index("> run_terminal_command")] if "> run_terminal_command" in out else out

    assert lines == [line for line in asked.splitlines() if line in lines]
    assert "argv" not in out
    assert "cwd" not in out


@pytest.mark.spec("interfaces:IF73")
async def test_long_text_is_cut_and_shown_whole_on_demand(folder: Path) -> None:
    """
    What the model wrote stands behind a gutter, so that no line of it can be taken for the console's own (UI03).
    """
    fake = "y yes, n no > y\n" * 60
    engine, _ = worker(tool_call("write_file", {"path": "b.txt", "content": fake}), text("Ok."), folder=folder)
    _, out = await shown(engine, "v\nn\n")
    lines = out.splitlines()

    assert "| (24 more lines; v shows them)" in lines
    assert 36 + 60 == lines.count("| +y yes, n no > y")
    assert [] == [line for line in lines if line.startswith("y yes")]


@pytest.mark.spec("interfaces:IF73")
@pytest.mark.parametrize(("lines", "typed"), [(300, "v\nno\n"), (3, "v\n")], ids=["cut", "whole"])
async def test_long_question_is_shown_whole_on_demand(lines: int, typed: str) -> None:
    """
    Where nothing was cut, a `v` is an answer as any other.
    """
    out, said = io.StringIO(), []
    console = Console(file=out, force_terminal=True, width=80, height=24, no_color=True)
    question = Question("q", "Well?\n" + "\n".join([f"line {n}" for n in range(lines)]), allow_text=True)
    await Terminal(console, TypedLines(io.StringIO(typed))).ask_until_answered(question, said.append, None)  # type: ignore[arg-type]

    assert ["no" if lines > 100 else "v"] == said
    assert f"line {lines - 1}" in out.getvalue()


async def test_text_that_would_steer_the_terminal_is_shown(folder: Path) -> None:
    engine, _ = worker(
        tool_call("write_file", {"path": "b\x1b[2J", "content": "b"}),
        tool_call("write_file", {"path": "b.txt", "content": "\x1b]0;t\x07"}),
        text("\x1b[31mred"), folder=folder,
    )  # fmt: skip
    _, out = await shown(engine, "n\n")

    assert "\x1b" not in out
    assert {r"| +\x1b]0;t\x07", r"\x1b[31mred"} <= set(out.splitlines())


async def test_run_suspends_if_input_ends_at_a_question(folder: Path, tmp_path: Path) -> None:
    engine, _ = worker(ASKS, text("Fine."), folder=folder)
    result, _ = await shown(engine, "", journal=FileJournal(tmp_path / "run.jsonl"))

    assert (RunStatus.SUSPENDED, 1) == (result.status, len(result.pending_questions))


async def test_question_answered_elsewhere_is_withdrawn(folder: Path) -> None:
    """
    Here by an observer of the run, while nobody types at the console.
    """
    with terminal() as (_, stream):
        handles: list[Any] = []

        def elsewhere(event: Any) -> None:
            if isinstance(event, PermissionRequested):
                asyncio.get_running_loop().call_later(0.05, handles[0].answer, event.question.id, True)

        engine, _ = worker(WRITES, text("Done."), folder=folder, observers=[elsewhere])
        out = io.StringIO()
        async with engine, engine.start("worker", "Go.") as handle:
            handles.append(handle)
            result = await ConsoleRenderer(handle, input=stream, output=out).run()

    assert (RunStatus.COMPLETED, True) == (result.status, "(answered elsewhere)" in out.getvalue())


@pytest.mark.spec("requirements:N4", "requirements:N16")
async def test_turns_of_an_open_handle_are_one_conversation(folder: Path) -> None:
    engine, model = worker(ASKS, text("First."), text("Second."), folder=folder)
    out = io.StringIO()
    async with engine, engine.start("worker", "Go.", keep_open=True) as handle:
        result = await ConsoleRenderer(handle, input=io.StringIO("1\n\nAnd now?\n"), output=out).run()

    assert ["Go.", "And now?"] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert ("Second.", True) == (result.output, handle.done)
    assert ["First.", "Second."] == [line for line in out.getvalue().splitlines() if line in ("First.", "Second.")]


# --- colours ----------------------------------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.spec("requirements:N16")
async def test_colours_follow_the_scheme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    engine, _ = worker(WRITES, text("Done."), folder=folder)
    _, said = await shown(engine, "y\n", out=Tty(), colors=ColorScheme(tool="green", question="bold red"))

    assert "\x1b[32m    model > write_file" in said
    assert "\x1b[1;31m? May write_file run?" in said


# --- at a terminal ----------------------------------------------------------------------------------------------------


@contextmanager
def terminal() -> Iterator[tuple[int, Any]]:
    """
    The keyboard's end and the program's end of a terminal.
    """
    keyboard, program = pty.openpty()
    tty.setcbreak(program)
    settings = termios.tcgetattr(program)
    settings[3] |= termios.ICANON
    termios.tcsetattr(program, termios.TCSANOW, settings)
    with os.fdopen(program) as stream:
        yield keyboard, stream
    os.close(keyboard)


@pytest.mark.spec("reliability:UI04", "requirements:X47")
async def test_input_typed_before_a_question_does_not_answer_it() -> None:
    """
    A line that was sent is something that the person says; one that was not sent is dropped.
    """
    asked, said = Question("q1", "May rm run?", tool_name="rm"), []

    async def other(line: str) -> None:
        said.append(f"other {line}")

    with terminal() as (keyboard, stream):
        os.write(keyboard, b"y\nhalf of an ans")
        lines = TypedLines(stream)
        await asyncio.to_thread(lines_there, stream)
        out = io.StringIO()
        there = asyncio.ensure_future(Terminal(make_console(out), lines).ask_until_answered(asked, said.append, other))
        while "May rm run?" not in out.getvalue():  # noqa: ASYNC110  (what is printed sets no event)
            await asyncio.sleep(0.01)
        before = list(said)
        os.write(keyboard, b"n no\n")
        done = await asyncio.wait_for(there, 50)

    assert (["other y"], True) == (before, done)
    assert ["other y", Answer(declined=True, reason="no")] == said


def lines_there(stream: Any) -> None:
    import select

    assert select.select([stream], [], [], 50)[0]


async def test_input_during_a_run_is_sent_to_it(folder: Path) -> None:
    with terminal() as (keyboard, stream):

        def reply(request: Any) -> Any:
            os.write(keyboard, b"and quickly\n")
            return tool_call("read_files", {"paths": ["a.txt"]})

        @tool
        async def work() -> None:
            """Work until what was typed is sent."""
            while "(sent;" not in out.getvalue():  # noqa: ASYNC110  (what is printed sets no event)
                await asyncio.sleep(0.01)

        out = io.StringIO()
        engine, model = worker(reply, tool_call("work", {}), text("Done."), folder=folder, more=[work])
        async with engine, engine.start("worker", "Go.") as handle:
            result = await ConsoleRenderer(handle, input=stream, output=out).run()

    told = [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert (RunStatus.COMPLETED, ["Go.", "and quickly"]) == (result.status, told)
    assert "(sent; the run reads it before its next model call)" in out.getvalue()


async def test_an_answer_that_is_refused_is_asked_for_again() -> None:
    def answer(said: Any) -> None:
        if said == "blue":
            msg = "there is no blue"
            raise AnswerRejected(msg)
        given.append(said)

    given: list[Any] = []
    out = io.StringIO()
    there = Terminal(make_console(out), TypedLines(io.StringIO("blue\n1, 2\n")))
    question = Question("q1", "Which?", ("red", "green"), multi_select=True)
    done = await there.ask_until_answered(question, answer, given.append)

    assert (True, [Answer(selected=("red", "green"))]) == (done, given)
    assert "there is no blue" in out.getvalue()


def test_a_number_of_thousands_of_digits_is_a_text() -> None:
    long = "9" * 5_000

    assert long == _parse_question_answer(Question("q1", "Which?", ("red", "green")), long)


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)

    def chat(*replies: Any, typed: str) -> tuple[Result, ScriptedModel]:
        model = ScriptedModel(replies)
        monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
        return CliRunner().invoke(app, ["chat", "--model", "scripted/m"], input=typed), model

    return chat


@pytest.fixture
def at_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """
    Return a function that chats at a terminal, where *says* gives the line that is typed at a prompt.
    """

    def run(says: Callable[[str], str | None], *replies: Any) -> int:
        async def read_line_with_prompt(_: Terminal, prompt: str) -> str | None:
            return says(prompt)

        model = ScriptedModel(replies)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(Terminal, "read_line_with_prompt", read_line_with_prompt)
        monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
        with terminal() as (_, stream):
            monkeypatch.setattr(sys, "stdin", stream)
            code = chat(agent="coder", model=["scripted/m"])
            monkeypatch.undo()
        return code

    return run


@pytest.mark.spec("interfaces:IF67", "requirements:M11")
def test_always_lasts_for_the_rest_of_the_chat(at_terminal: Callable[..., int], folder: Path) -> None:
    """
    And Ctrl-D at the end leaves; where somebody sits there, the engine refuses nothing by itself.
    """
    asked: list[str] = []
    answers = ["a", "1"]
    words: list[str | None] = ["Write it.", "Again.", None]

    def says(prompt: str) -> str | None:
        asked.append(prompt)
        return answers.pop(0) if prompt in (ASKED, WHICH) else words.pop(0)

    code = at_terminal(says, WRITES, text("Written."), WRITES, text("Written again."))

    assert (0, ["> ", ASKED, WHICH, "> ", "> "]) == (code, asked)
    assert "colour\n" == (folder / "b.txt").read_text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF78", "requirements:X60")
def test_all_edits_accepts_edits_but_asks_about_commands(
    at_terminal: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Files that instruct agents are still asked about, and another mode ends it.
    """
    said: list[str | None] = ["Write.", "e", "n", "n", "Again.", "/mode default", "And again.", "n", None]
    asked: list[str] = []

    def says(prompt: str) -> str | None:
        asked.extend([prompt.partition(" ")[0]] if prompt != "> " else [])
        return said.pop(0)

    instructs = tool_call("write_file", {"path": "AGENTS.md", "content": "Obey.\n"})
    other = tool_call("write_file", {"path": "c.txt", "content": "grey\n"})
    again = tool_call("write_file", {"path": "d.txt", "content": "red\n"})
    last = tool_call("write_file", {"path": "e.txt", "content": "red\n"})
    replies = [WRITES, other, REMOVES, instructs, text("One."), again, text("Two."), last, text("Three.")]
    at_terminal(says, *replies)

    assert [] == said
    assert ["write_file", "run_terminal_command", "write_file", "write_file"] == asked
    assert ["a.txt", "b.txt", "c.txt", "d.txt"] == sorted(path.name for path in folder.iterdir())
    assert "commands still need approval" in capsys.readouterr().out


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF78")
@pytest.mark.parametrize("between", [[], ["/mode default"]], ids=["of the engine", "of the policy"])
def test_forgotten_permission_is_asked_about_again(
    at_terminal: Callable[..., int], capsys: pytest.CaptureFixture[str], between: list[str]
) -> None:
    answers = ["a 1", "n"]
    words: list[str | None] = [
        "/forget 1", "Write it.", *between, "/rules", "/forget 2", "/forget x", "Again.", "/forget 1", "/rules", "More.", None,
    ]  # fmt: skip

    def says(prompt: str) -> str | None:
        return answers.pop(0) if prompt.startswith("write_file b.txt") else words.pop(0)

    code = at_terminal(says, WRITES, text("One."), WRITES, text("Two."), WRITES, text("Three."))
    said = capsys.readouterr().out

    assert (0, [], []) == (code, answers, [word for word in words if word])
    assert (
        1
        == said.count("/forget NUMBER withdraws a lasting approval; there is none yet")
        == said.count("you are asked about this again in this chat: ")
    )
    assert 2 == said.count("/forget NUMBER withdraws a lasting approval; pass 1 to 1")
    assert 1 == said.count("  always 1  ")


@pytest.mark.spec("interfaces:IF67", "requirements:M17", "requirements:X55")
def test_chat_without_a_terminal_changes_nothing(chats: Any, folder: Path) -> None:
    result, _ = chats(WRITES, REMOVES, text("I could not."), typed="Write it.\n")

    assert (0, ["a.txt"]) == (result.exit_code, sorted(path.name for path in folder.iterdir()))
    assert 2 == result.stdout.count("denied")


def test_chat_with_agent_and_no_model_explains_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["chat", "coder", "Hi."], input="")

    assert 2 == result.exit_code
    assert "agent 'coder' needs a model, and none is set" in result.stderr


def test_chat_given_a_message_for_an_agent_shows_the_order(folder: Path) -> None:
    said = CliRunner().invoke(app, ["chat", "Say hello"])
    order = "stepengine chat coder 'Say hello'"

    assert (2, True) == (said.exit_code, said.stderr.rstrip().endswith(order)), said.stderr
    assert order[:21] not in CliRunner().invoke(app, ["chat", "nobody", "Say hello"]).stderr


@pytest.mark.spec("interfaces:IF67", "requirements:F20")
def test_chat_shows_todos_and_reminds_of_open_ones(chats: Any) -> None:
    def todos(*done: bool) -> Any:
        listed = [{"task": f"task {n}", "completed": is_done} for n, is_done in enumerate(done, start=1)]
        return tool_call("write_todos", {"todos": listed})

    result, model = chats(
        todos(True, True, False), text("I stop."), todos(True, True, True), text("Now."), typed="Do it.\n"
    )
    reminders = [m for m in model.calls[-1].messages if m.role == "user" and "still open" in m.text]
    shown_todos = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("[")]

    assert [1, 1] == [len(reminders), reminders[0].text.count("- task 3")]
    assert ["[x] task 1", "[x] task 2", "[ ] task 3", "[x] task 1", "[x] task 2", "[x] task 3"] == shown_todos


OWN_TODOS = """
from stepengine import AgentDefinition, Change, ToolResult, tool

@tool(category="read")
def write_todos(items: list) -> ToolResult:
    "Keep items."
    return ToolResult("kept", change=Change(context={"todos": items}))

agent = AgentDefinition("keeper", tools=[write_todos])
"""


def test_chat_continues_after_an_own_write_todos_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel([tool_call("write_todos", {"items": ["a", 1]}), text("Kept.")])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
    (folder / "keeper.py").write_text(OWN_TODOS)
    words = ["chat", "./keeper.py", "--model", "scripted/m"]
    result = CliRunner().invoke(app, words, input="Do it.\n/todos\n")

    assert 0 == result.exit_code, (result.stdout, result.stderr, result.exception)
    assert "Kept." in result.stdout
    assert "there are no todos" in result.stdout
    assert "require_finished_todos" not in result.stdout
    assert ["completed"] == [entry.status for entry in list_recorded_runs()]


# --- what stands above the line that is typed -------------------------------------------------------------------------

MARKDOWN_LINES = [
    "para", "- item", "  more", "1. one", "```", "```py", "````", "~~~", "# head", "", "    indented", "> quote", "| a | b |", "|---|---|",
    "---", "===", "[a]: http://x.test", "<div>", "a\rb", "a\r", "a\u2028b", "\0",
]  # fmt: skip
FOREIGN = "\x1b[2J\x9b\u202e\x1b]8;;http://evil.test\x07[red]x[/red]"


def screen_on(width: int = 80) -> tuple[Screen, io.StringIO]:
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, highlight=False, color_system="standard")
    return Screen(console, markdown=True), file


def bare(text: str) -> str:
    """Return *text* without our own colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.spec("reliability:UI01", "interfaces:IF68", "reliability:UI07")
@pytest.mark.parametrize("width", [20, 80, 160])
def test_live_display_is_escaped_and_fits_the_width(width: int) -> None:
    screen, _ = screen_on(width)
    for event in (
        ev.TextDelta(text=f"{FOREIGN} open " * 20),
        ev.AgentSpawned(agent_id="helper", prompt=FOREIGN * 9, child_path="3", only_child=True, of=1),
        ev.ToolStarted(path="3", tool_name=FOREIGN, tool_call_id="c1", input={}, source="model"),
        ev.PhaseChanged(phase=RunPhase.EXECUTING_TOOL, detail=FOREIGN),
    ):
        screen.on_event(event)
    live = bare(screen.render_live_area())
    lines = live.split("\n")

    assert set() == {c for c in live if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")}
    assert "helper" in lines[-2]
    assert lines[-1].startswith("executing tool"[: width - 1])
    assert len(lines) <= LIVE_LINES + 2
    assert max(map(cell_len, lines)) <= width


def without_seconds(screen: Screen) -> list[str]:
    return [line.rpartition(" | ")[0] for line in bare(screen.render_live_area()).split("\n")[:-1]]


@pytest.mark.spec("interfaces:IF68")
@pytest.mark.spec("reliability:UI07")
@pytest.mark.parametrize(
    "reply",
    [
        "Write:\n\n````md\n```py\nx = 1\n\ny = 2\n```\n\nrest\n````\n\nDone\n",
        "```py\nprint(1)\n```sh\n\nprint(2)\n```\n\nDone\n",
        "1. one\n\n   still one\n\n2. two\n\nDone\n",
        "- a\u2028b\n\n- c\x0bd\n\n  more\r\n\r\nDone\n",
    ],
    ids=["fence in a longer fence", "opening fence in a fence", "list with paragraphs", "characters that end no line"],
)
@pytest.mark.parametrize("size", [1, 1_000])
def test_markdown_is_split_into_blocks_as_commonmark_has_them(reply: str, size: int) -> None:
    screen, file = screen_on()
    for start in range(0, len(reply), size):
        screen.on_event(ev.TextDelta(text=reply[start : start + size]))
    screen.close_line_or_block()
    whole = io.StringIO()
    print_markdown(Console(file=whole, force_terminal=True, width=80, highlight=False, color_system="standard"), reply)

    assert lines_of(whole) == lines_of(file)


def lines_of(file: io.StringIO) -> list[str]:
    return [line.rstrip() for line in bare(file.getvalue()).split("\n") if line.strip()]


@pytest.mark.deep
@pytest.mark.smoke
@given(st.lists(st.sampled_from(MARKDOWN_LINES), max_size=12).map("\n".join), st.integers(1, 9))
def test_splitting_markdown_loses_nothing_and_blocks_end_with_newline(markdown: str, size: int) -> None:
    blocks, held = list[str](), ""
    for start in range(0, len(markdown), size):
        *done, held = _split_markdown_blocks(held + markdown[start : start + size])
        blocks += done

    assert markdown == "".join([*blocks, held])
    assert all(block.endswith("\n") for block in blocks)


PIECES = pytest.mark.parametrize(
    "piece",
    ["[", "`", "a\n\n", "```\n", "\r", *[pytest.param(p, marks=pytest.mark.deep) for p in ("- a\n", "|a|b|\n|-|-|\n")]],
)


def split(piece: str, rounds: int = 100) -> Iterator[int]:
    """Give the length of what is held back each time when such pieces come, one after the other."""
    held = ""
    for _ in range(rounds):
        *_, held = _split_markdown_blocks(held + (piece * 200)[:200] + "\n")
        yield len(held)


@PIECES
def test_of_no_markdown_more_than_a_block_is_held_back(piece: str) -> None:
    assert max(split(piece, 2 * MAX_BLOCK // 200 + 3)) <= MAX_BLOCK


@pytest.mark.speed
@PIECES
def test_splitting_markdown_takes_bounded_time(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, slowest = [], 0.0
    parse = MarkdownIt.parse
    monkeypatch.setattr(MarkdownIt, "parse", lambda self, text: parsed.append(len(text)) or parse(self, text))
    begun = time.process_time()
    for _ in split(piece):
        slowest, begun = max(slowest, time.process_time() - begun), time.process_time()

    assert len(parsed) == 100
    assert slowest < 2


@pytest.mark.parametrize("markdown", [True, False])
def test_notes_wait_until_the_streaming_text_ends(markdown: bool) -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, width=80), markdown=markdown)
    screen.print_or_delay_note("(before)")
    for piece in ("One ", "sentence.\n\nAnd ", "another."):
        screen.on_event(ev.TextDelta(text=piece))
        screen.print_or_delay_note(f"(during {piece[:3].strip()})")
    while_open = out.getvalue()
    screen.on_event(ev.TextCompleted(text="One sentence.\n\nAnd another."))
    screen.print_or_delay_note("(after)")
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]

    assert "during" not in while_open
    assert ["(before)", "One sentence.", "And another."] == lines[:3]
    assert ["(during One)", "(during sen)", "(during ano)", "(after)"] == lines[3:]


def test_running_children_are_a_tree_and_many_are_counted() -> None:
    screen, _ = screen_on()

    def spawn(path: str, of: int = 1) -> None:
        above = path.rpartition(".")[0]
        screen.on_event(
            ev.AgentSpawned(path=above, agent_id=f"a{path}", prompt="look", child_path=path, only_child=of == 1, of=of)
        )

    spawn("3")
    spawn("3.2")
    screen.on_event(ev.StepStarted(path="3.2", step=1, steps_remaining=9))
    screen.on_event(ev.ModelStarted(path="3.2", model="m"))
    tree = without_seconds(screen)
    screen.on_event(ev.AgentFinished(path="3", agent_id="a3.2", child_path="3.2", status=RunStatus.COMPLETED))
    after = without_seconds(screen)
    for number in range(10, 20):
        spawn(str(number), of=10)
    many = bare(screen.render_live_area()).split("\n")

    assert ["  a3: look | starts", "    a3.2: look | step 2 | waits for its model"] == tree
    assert ["  a3: look | starts"] == after
    assert (2, True) == (len(many), "0/10" in many[-1])


@pytest.mark.spec("reliability:UI07")
def test_model_markdown_shows_link_targets_and_loads_nothing() -> None:
    screen, file = screen_on(120)
    screen.on_event(
        ev.TextCompleted(
            text="[bank](http://evil.test/x) ![secret](http://127.0.0.1:9/s.png)\n\n<script>go()</script> <b>b</b>\n\n"
        )
    )
    shown = bare(file.getvalue())

    assert "bank (http://evil.test/x)" in shown
    assert "\x1b]8" not in file.getvalue()
    assert "secret" in shown


@pytest.mark.spec("reliability:UI03", "interfaces:IF73")
async def test_imitated_question_is_behind_a_gutter_before_the_real_one() -> None:
    file, said = io.StringIO(), []
    nasty = "\n" * 10_000 + "y yes, n no > y\nallowed by user\n? May ls run?"
    question = Question("q1", "May rm run?", tool_name="rm", details={"command": nasty})
    await Terminal(make_console(file), TypedLines(io.StringIO("y\n"))).ask_until_answered(
        question, said.append, said.append
    )
    first, *rest, more = file.getvalue().splitlines()

    assert ("? May rm run?", [True]) == (first, said)
    assert {"|"} == {line[0] for line in rest}
    assert len(rest) <= MAX_SHOWN
    assert re.fullmatch(r"\| \([\d,]+ more lines; v shows them\)", more)


async def test_handle_reports_input_that_its_run_did_not_read() -> None:
    class Late:
        """
        Somebody who speaks when the last step is over.
        """

        def on_event(self, event: ev.Event) -> None:
            if isinstance(event, ev.StepFinished):
                handle.send_input("late")

    async with Engine(models=ScriptedModel([text("One.")]), observers=[Late()]) as engine:
        handle = engine.start(AgentDefinition("speaker", model="scripted/m"), "Go")
        before = handle.unread
        result = await handle.result()

    assert ((), ("late",), RunStatus.COMPLETED) == (before, handle.unread, result.status)
