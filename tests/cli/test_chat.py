"""
`stepengine chat` beyond a turn: what is typed, what goes along, what the chat itself does; once in a real terminal.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.cli.chat_conversation import ChatConversation
from stepengine.cli.chat_screen import Chat, _format_short_status_line
from stepengine.cli.commands.chat_commands import UNDONE
from stepengine.cli.options import Options
from stepengine.cli.screen.console import Screen, TypedLines, make_console, print_markdown, show_run
from stepengine.cli.screen.prompt import (
    PASTE_BYTES,
    PASTED,
    AbovePromptStream,
    PromptHistory,
    PromptReader,
    _complete_path,
    expand_attachments,
)
from stepengine.cli.settings import load_settings
from stepengine.cli.state_folder import find_chat_history_file, list_recorded_runs
from stepengine.data import events as ev
from stepengine.data.definition import AgentDefinition
from stepengine.data.usage import Usage
from stepengine.errors import StepEngineError
from stepengine.journal.recorded_runs import get_runs_folder
from stepengine.permissions import Policy
from stepengine.permissions.policy import MODES
from stepengine.runtime.handle import RunHandle
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls

from .terminal import CODES, READY, Person, people

WRITES = tool_call("write_file", {"path": "b.txt", "content": "colour\n"})
REAL_MODELS = bench.make_model_registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "a.txt").write_text("color\n")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def chats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def chat(*replies: Any, typed: str, options: tuple[str, ...] = ()) -> tuple[Result, ScriptedModel]:
        model = ScriptedModel(replies)
        monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
        return CliRunner().invoke(app, ["chat", "--model", "scripted/m", *options], input=typed), model

    return chat


# --- files and commands of the person ---------------------------------------------------------------------------------


@pytest.mark.spec("interfaces:IF74")
def test_attached_files_must_be_readable_inside_the_folder(folder: Path) -> None:
    (folder.parent / "outside.txt").write_text("outside")
    (folder / ".env").write_text("KEY=secret")
    (folder / "link").symlink_to(folder.parent / "outside.txt")
    (folder / "large").write_text("x" * 70_000)
    (folder / "bytes").write_bytes(b"\xff\xfe")
    said = "Look at @a.txt, @@home me@a.txt @../outside.txt @link @.env @large @bytes @none @a.txt"
    text, notes = expand_attachments(said, folder)
    refused = [note.partition(" is not attached: ")[0] for note in notes[1:]]

    assert f'{said.replace("@@", "@")}\n\n<file path="a.txt">\ncolor\n\n</file>' == text
    assert "+ a.txt (6 bytes)" == notes[0]
    assert ["../outside.txt", "link", ".env", "large", "bytes", "none"] == refused


@pytest.mark.spec("interfaces:IF74")
def test_two_at_signs_are_one_only_at_word_starts(folder: Path) -> None:
    assert ("@a b@@a @@a @ab\n@", []) == expand_attachments("@@a b@@a @@@a @@ab\n@@", folder)


@pytest.mark.spec("interfaces:IF74")
def test_files_that_are_too_much_together_stay_behind(folder: Path) -> None:
    for name in "uvwxyz":
        (folder / name).write_text(name * 60_000)
    _, notes = expand_attachments("@u @v @w @x @y @z", folder)

    assert [True] * 4 + [False] * 2 == [note.startswith("+ ") for note in notes]
    assert "it has more than" in notes[-1]


@pytest.mark.spec("interfaces:IF74")
def test_attached_folder_lists_names_without_secret_files(folder: Path) -> None:
    (folder / "sub/below").mkdir(parents=True)
    for name in ("b.txt", ".env", "below/deep.txt"):
        (folder / "sub" / name).write_text("content")
    (folder / "out").symlink_to(folder.parent)
    text, notes = expand_attachments("Look at @sub/, @out and @..", folder)

    assert 'Look at @sub/, @out and @..\n\n<folder path="sub/">\nb.txt\nbelow/\n</folder>' == text
    assert 1 == len(expand_attachments(f"@{'x' * 300}", folder)[1]) == len(expand_attachments("@a\0b", folder)[1])
    assert ["+ sub/ (12 bytes)", True] == [notes[0], notes[1].startswith("out is not attached: ")]


# --- what the chat itself does ----------------------------------------------------------------------------------------


def chat_in(folder: Path) -> tuple[Chat, list[str]]:
    """
    Return a chat that somebody types at, and what it says.
    """
    said: list[str] = []
    lines = SimpleNamespace(is_terminal=True)
    chat = object.__new__(Chat)
    chat.conversation = cast("Any", SimpleNamespace(options=SimpleNamespace(cwd=folder), notes=[]))
    chat.terminal = cast(
        "Any", SimpleNamespace(was_pasted=False, lines=lines, print_text=lambda text, *_: said.append(text))
    )
    return chat, said


@pytest.mark.spec("interfaces:IF78")
def test_fork_takes_only_an_existing_turn(chats: Any) -> None:
    wrong = ["/fork", "/fork x", f"/fork {'9' * 5_000}", "/fork 2"]
    result, _ = chats(
        text("One."), text("Two."), typed="\n".join([wrong[0], "first", *wrong[1:], "second", "/fork 1", ""])
    )

    assert 1 == result.stdout.count("continues after a turn; there is none yet")
    assert 3 == result.stdout.count("continues after a turn; TURN is 0 to 0")
    assert 1 == result.stdout.count("the conversation continues after turn 1")
    assert 0 == result.exit_code


@pytest.mark.spec("interfaces:IF78")
def test_unknown_chat_command_is_not_sent_and_double_slash_is(chats: Any) -> None:
    result, model = chats(text("Yes?"), typed="/hlep\n\n//help me\n!rm a.txt\n/quit\nnever\n")

    assert "there is no command /hlep; did you mean /help?" in result.stdout
    assert ["/help me"] == [m.text for call in model.calls for m in call.messages if m.role == "user"]
    assert "nothing was run" in result.stderr
    assert Path("a.txt").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF78")
def test_a_conversation_is_saved_forked_and_compacted(chats: Any) -> None:
    result, model = chats(
        text("One. " * 2_000), text("Two."), text("It was about numbers."), text("Three."),
        typed="first @a.txt\nsecond\n/save talk.md\n/save talk.md\n/fork\n/compact numbers only\nthird\n/cost\n/context\n",
    )  # fmt: skip
    asked, last = [[m.text for m in call.messages] for call in model.calls[2:]]

    assert ["## You", "## coder", "## You", "## coder"] == re.findall(
        "^## .*", Path("talk.md").read_text(), re.MULTILINE
    )
    assert 1 == result.stdout.count("wrote talk.md") == result.stdout.count("File exists")
    assert "the conversation continues after turn 1" in result.stdout
    assert ("second" not in asked, any("numbers only" in said for said in asked)) == (True, True)
    assert (["third"], 1) == (last[-1:], sum("It was about numbers." in said for said in last))
    assert not any("first" in said for said in last)
    assert "  turn 3 " in result.stdout
    assert "your messages" in result.stdout


CHOOSES = tool_call("ask_user", {"questions": [{"question": "Which one?", "options": ["red", "blue"]}]})


@pytest.mark.spec("interfaces:IF78")
def test_read_only_commands_answer_at_an_open_question(chats: Any) -> None:
    result, model = chats(
        tool_call("write_todos", {"todos": [{"task": "look", "completed": True}]}, usage=Usage(100, 20)), CHOOSES,
        text("Fine."), typed="go\n/cost\n/hlep\n/help\n/diff\n/mode\n/mode plan\n/todos\n2\n/quit\n",
    )  # fmt: skip
    lines = result.stdout.splitlines()
    answered = next(at for at, line in enumerate(lines) if "< ask_user ok" in line)
    before, after = "\n".join(lines[:answered]), "\n".join(lines[answered:])
    at_once = (
        "this turn so far   at least 100 tokens in, 20 out",
        "there is no command /hlep; did you mean /help?",
        "  /quit ",
        "no files were written in this chat",
        "current mode: default",
    )

    assert at_once == tuple([said for said in at_once if said in before and said not in after])
    assert 2 == before.count("(runs when the turn ends)")
    assert ("mode plan, from" in after, "  [x] look" in after.partition("completed")[2]) == (True, True)
    assert [["go"]] * 3 == [[m.text for m in call.messages if m.role == "user"] for call in model.calls]
    assert '"selected":["blue"]' in model.calls[-1].messages[-1].text.replace(" ", "")


def test_diff_shows_written_files_during_the_turn(chats: Any) -> None:
    result, _ = chats(WRITES, CHOOSES, text("Fine."), typed="/mode accept_edits\ngo\n/diff\n1\n")

    assert "b.txt" in result.stdout.partition("? Which one?")[2].partition("< ask_user ok")[0]


WORDS = st.text("ab/.", min_size=1, max_size=150)


@pytest.mark.deep
@pytest.mark.smoke
@given(st.sampled_from(["openai/gpt-5", f"a/{'m' * 90}"]), WORDS, st.integers(20, 200))
def test_status_line_fits_and_drops_the_provider_before_the_folder(model: str, folder: str, width: int) -> None:
    after = ["87 % of context left", "$0.0123"]
    line = _format_short_status_line(model, "plan", Path("/", folder), after, width)
    whole = " | ".join([model, "plan", str(Path("/", folder)), *after])

    assert len(line) < width
    assert line == whole or len(whole) >= width or len(model) > 60
    assert line.endswith(" | ".join(after)) or width < 110


@pytest.mark.deep
@pytest.mark.smoke
def test_stop_returns_waiting_words_but_no_command_among_them(folder: Path) -> None:
    for waiting, line in ((["one", "/clear", "//two"], "one\n//two"), (["/clear", "/todos"], "/todos")):
        for to_line in (True, False):
            prompt = prompt_in(folder)
            prompt._unsent = [*waiting]
            prompt.clear_queue(to_input_line=to_line)

            assert ((), line if to_line else "") == (prompt.queued_lines, prompt._draft)


@pytest.mark.spec("interfaces:IF70", "interfaces:IF75")
def test_stop_returns_an_unread_command_as_pasted_text(folder: Path) -> None:
    for sent, line in (("!rm a.txt", "!rm a.txt\nlater"), (" /quit", "//quit\nlater")):
        prompt = prompt_in(folder)
        asyncio.run(prompt.run_or_queue_chat_command("!ls"))
        prompt.print_or_queue_refused_line("later", StepEngineError("it has ended"))
        prompt.queue_messages_first([sent])
        prompt.clear_queue(to_input_line=True)

        assert (line, True) == (prompt._draft, prompt._is_draft_pasted)


@pytest.mark.spec("interfaces:IF68", "reliability:UI01")
def test_markdown_has_no_extra_empty_lines_and_code_is_unchanged() -> None:
    code = "def a():\n    pass\n\n\ndef b():\n    pass"
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, color_system="truecolor")
    print_markdown(console, f"\n\nOne \x1b[2J\n\n- a\n- b\n\n```python\n{code}\n```\n\n\nTwo\n\n")
    lines = [CODES.sub("", line).rstrip() for line in file.getvalue().splitlines()]
    drawn = [f" {line}".rstrip() for line in code.splitlines()]

    assert [r"One \x1b[2J", "", " • a", " • b", "", *drawn, "", "Two"] == lines


def prompt_in(folder: Path, typed: str = "") -> PromptReader:
    above = AbovePromptStream(io.StringIO())
    lines, history = TypedLines(io.StringIO(typed)), PromptHistory(find_chat_history_file())
    console = make_console(cast("Any", above))
    return PromptReader(console, lines, above, commands=["/help"], root=folder, history=history, plain=False)


@pytest.mark.spec("interfaces:IF70")
def test_paste_containing_a_placeholder_is_sent_unchanged(folder: Path) -> None:
    prompt = prompt_in(folder)
    texts = ["[paste 2: 12 lines]\n" * 10 + "end", "line\n" * 11 + "end"]
    words = [prompt._store_long_paste(text) for text in texts]

    assert " ".join(texts) == prompt._expand_pastes(" ".join(words))
    assert "[paste 3: 1 lines]" == prompt._expand_pastes("[paste 3: 1 lines]")


@pytest.mark.spec("interfaces:IF70")
def test_short_paste_stays_as_it_is_and_oversized_is_dropped(folder: Path) -> None:
    prompt = prompt_in(folder)
    short, wide = "line\n" * 9 + "end", "x" * 2_000

    assert [short, wide, ""] == [prompt._store_long_paste(pasted) for pasted in (short, wide, "x" * (PASTE_BYTES + 1))]
    assert ["[paste 1: 11 lines]", "[paste 2: 1 lines]"] == [
        prompt._store_long_paste(f"{short}\n"),
        prompt._store_long_paste(f"{wide}x"),
    ]


def test_file_completion_survives_large_folders_and_invalid_paths(folder: Path) -> None:
    for number in range(1_100):
        (folder / f"a{number:04}").touch()
    (folder / "zoo").mkdir()

    assert ["zoo/"] == _complete_path(folder, "zo")
    assert (
        [] == _complete_path(folder, "x" * 300 + "/") == _complete_path(folder, "a\0/") == _complete_path(folder, "../")
    )


@pytest.mark.spec("interfaces:IF67")
def test_without_its_extra_a_terminal_is_read_line_by_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt() -> PromptReader:
        return prompt_in(folder, "said\n")

    with_it = prompt()
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    without = prompt()

    assert (True, False) == (with_it.is_rich, without.is_rich)
    assert "said" == asyncio.run(without.read_next_prompt())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF67", "requirements:X55", "interfaces:IF77")
def test_resume_continues_the_last_conversation_of_the_folder(chats: Any) -> None:
    none, _ = chats(typed="", options=("--resume",))
    chats(text("One."), text("Two."), typed="first\nsecond\n")
    result, model = chats(text("Three."), typed="third\n", options=("--resume",))

    assert (2, True) == (none.exit_code, "no chat to continue in this folder" in none.stderr)
    said = [m.text for m in model.calls[0].messages if m.role in ("user", "assistant")]
    assert ["first", "One.", "second", "Two.", "third"] == said
    assert ["> first", "  One.", "> second", "  Two."] == result.stdout.splitlines()[:4]
    assert ["third", "second", "first"] == [entry.get_text("title") for entry in list_recorded_runs()]


def test_chat_without_a_model_says_so_before_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A newcomer would else type a first request for nothing.
    """
    monkeypatch.delenv("STEPENGINE_MODEL", raising=False)
    without = CliRunner().invoke(app, ["chat"], input="").stdout
    given = CliRunner().invoke(app, ["chat", "--model", "ollama/llama3.2"], input="").stdout

    assert "No model is set yet. Set one with /model PROVIDER/MODEL" in without
    assert "No model is set yet" not in given


@pytest.mark.spec("interfaces:IF78")
def test_chat_commands_report_todos_cost_rules_and_mode(chats: Any) -> None:
    todos = [{"task": "look", "completed": True}, {"task": "write \x1b[2Jit", "completed": True}]
    result, _ = chats(
        tool_call("write_todos", {"todos": todos}, usage=Usage(10, 2)), text("One.", usage=Usage(5, 3)),
        typed="/todos\n/diff\nfirst\n/todos\n/cost\n/rules\n/mode\n/mode bypass\n/mode plan\n/mode\n/clear\n/todos\n",
    )  # fmt: skip
    said = result.stdout

    assert 2 == said.count("there are no todos")
    assert "  [x] look\n  [x] write \\x1b[2Jit\n" in said
    assert re.search(r"  agent coder   15 tokens in, 5 out .*\n  model scripted/m   15 tokens in, 5 out ", said)
    assert "bypass is not a mode of this chat" in said
    assert ["default", "plan"] == re.findall(r"^current mode: (\w+);", said, re.MULTILINE)
    assert "  allow  " in said
    assert "no files were written in this chat" in said


def test_plan_mode_writes_nothing(chats: Any) -> None:
    _, model = chats(WRITES, text("Not."), typed="/mode plan\n/mode bypass\nwrite\n")

    assert not Path("b.txt").exists()
    assert "plan" in next(m.text for m in model.calls[-1].messages if m.role == "tool")


@pytest.mark.spec("interfaces:IF78")
def test_other_agent_or_cleared_chat_starts_without_history(chats: Any, folder: Path) -> None:
    (folder / "other.py").write_text(
        "from stepengine import AgentDefinition\nagent = AgentDefinition(id='other', description='Says little.')\n"
    )
    result, model = chats(
        text("One."), text("Two."), text("Three."), typed="first\n/agent other.py\nsecond\n/clear\nthird\n"
    )

    assert "other: Says little." in result.stdout
    assert [["first"], ["second"], ["third"]] == [
        [m.text for m in call.messages if m.role == "user" and m.text in ("first", "second", "third")]
        for call in model.calls
    ]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF77")
def test_resume_continues_a_conversation_by_its_run_name(chats: Any) -> None:
    chats(text("One."), typed="first\n")
    chats(text("Other."), typed="another\n")
    older = list_recorded_runs()[-1].stem
    _, model = chats(text("Two."), typed="second\n", options=("--resume", older))

    assert ["first", "One.", "second"] == [m.text for m in model.calls[0].messages if m.role in ("user", "assistant")]


@pytest.mark.spec("interfaces:IF78")
def test_memory_shows_notes_of_project_and_user(chats: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.tools.bundled import FileMemory
    from stepengine.tools.bundled.note_tools import get_project_scope

    monkeypatch.setenv("XDG_DATA_HOME", str(folder.parent / "data"))
    none, _ = chats(typed="/memory\n")
    store = FileMemory()
    for scope, note in ((get_project_scope(folder), "Tests need \x1b[2Jdocker."), ("user", "Small commits.")):
        asyncio.run(store.write(scope, note, ["x"], "run 1"))
    result, _ = chats(typed="/memory\n")

    assert "there are no notes" in none.stdout
    shown = re.findall(r"^  (\w+)  - \[m1\] .* #x run 1: (.*)$", result.stdout, re.MULTILINE)
    assert [("project", r"Tests need \x1b[2Jdocker."), ("user", "Small commits.")] == shown


@pytest.mark.spec("interfaces:IF78")
def test_skill_sends_its_instructions_without_attaching_their_files(chats: Any, folder: Path) -> None:
    place = folder / ".agents/skills/greet"
    place.mkdir(parents=True)
    (place / "SKILL.md").write_text("---\nname: greet\ndescription: Says hello.\n---\nRead @b.txt and greet.\n")
    (folder / "b.txt").write_text("not asked for")
    result, model = chats(text("Hello."), typed="/skill\n/skill gret\n/skill greet in @a.txt\n")
    (asked,) = [m.text for m in model.calls[0].messages if m.role == "user" and "greet" in m.text]

    assert "  greet  Says hello." in result.stdout
    assert "there is no skill 'gret'; near to it: greet" in result.stdout
    assert 1 == len(model.calls)
    assert "Read @b.txt and greet." in asked
    assert asked.endswith('in @a.txt\n\n<file path="a.txt">\ncolor\n\n</file>')
    assert 1 == asked.count("<file ")
    assert "/skill greet in @a.txt" == list_recorded_runs()[0].get_text("title")


@pytest.mark.spec("interfaces:IF78")
def test_debug_names_the_journal_of_the_last_turn(chats: Any) -> None:
    result, _ = chats(text("One."), typed="/debug\nfirst\n/debug\n")

    assert "no turn of this chat is recorded" in result.stdout
    assert f"inspect it with: stepengine debug {list_recorded_runs()[0].journal}" in result.stdout.replace("\n", " ")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF78")
def test_undo_restores_files_after_confirmation_and_informs_the_agent(chats: Any) -> None:
    change = tool_call("write_file", {"path": "a.txt", "content": "colour\n"})
    result, model = chats(
        tool_calls(WRITES, change), text("Written."), change, text("Again."), text("I see."),
        typed="/undo\n/mode accept_edits\nwrite\n/undo\nn\n/undo\ny\nand now\n/undo\ny\nthen\n",
    )  # fmt: skip
    told = [[m.text for m in call.messages if m.role == "user"][-1] for call in model.calls]

    assert "there is no recorded turn to undo" in result.stdout
    assert ("nothing was changed" in result.stdout, "removed   b.txt" in result.stdout) == (True, True)
    assert (False, "color\n") == (Path("b.txt").exists(), Path("a.txt").read_text())
    assert ["write", "write", f"{UNDONE}\n\nand now", f"{UNDONE}\n\nand now", f"{UNDONE}\n\nthen"] == told


@pytest.mark.spec("interfaces:IF78")
def test_undo_lists_and_keeps_files_changed_since_the_turn(
    chats: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(request: Any) -> Any:
        (folder / "b.txt").write_text("mine\n")
        return text("Written.")

    change = tool_call("write_file", {"path": "a.txt", "content": "colour\n"})
    result, _ = chats(tool_calls(WRITES, change), changed, typed="/mode accept_edits\nwrite\n/undo\ny\n")

    assert 2 == result.stdout.count("left      b.txt: it was changed later")
    assert ("mine\n", "color\n") == (Path("b.txt").read_text(), Path("a.txt").read_text())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF78")
def test_model_command_rejects_unknown_providers_and_shows_the_price(
    chats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, model = chats(text("One."), typed="/model openai/gpt-4o\n/model\nfirst\n")
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bench,
            "make_model_registry",
            lambda options, *_: REAL_MODELS(options) if "nowhere/x" in options.model else model,
        )
        refused = CliRunner().invoke(app, ["chat", "--model", "scripted/m"], input="/model nowhere/x\n")

    assert ["openai/gpt-4o"] == [call.model for call in model.calls]
    assert "current model: openai/gpt-4o\n" in result.stdout
    assert re.search(r"  price    input \$[\d.]+, output \$[\d.]+.* per million tokens", result.stdout)
    assert "unknown provider 'nowhere'" in refused.stdout
    assert "from the next turn on" not in refused.stdout


@pytest.mark.spec("interfaces:IF78")
def test_agents_command_shows_a_tree(chats: Any) -> None:
    Path("boss.py").write_text(
        "from stepengine import AgentDefinition\nkid = AgentDefinition('kid')\n"
        "agent = AgentDefinition('boss', tools=['spawn_agents'], spawnable_agents=[kid])\n"
    )
    result, _ = chats(typed="/agent boss.py\n/agents\n")

    assert ["boss", "boss", "kid"] == [  # the one of now, and the tree
        line.split()[-1] for line in result.stdout.splitlines() if line.endswith(("boss", "kid"))
    ]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF77")
def test_resume_shows_the_last_twenty_messages_of_a_conversation(chats: Any) -> None:
    chats(*[text(f"reply {n}") for n in range(12)], typed="\n".join([f"said {n}" for n in range(12)]))
    result, _ = chats(typed="", options=("--resume",))
    shown = [line.split()[-1] for line in result.stdout.splitlines() if re.match(r"(> said|  reply) ", line)]

    assert [str(n) for n in range(2, 12) for _ in range(2)] == shown


@pytest.mark.spec("interfaces:IF75")
async def test_agent_sees_shell_commands_unless_hidden_or_pasted(folder: Path) -> None:
    """
    Only what somebody typed is run: a paste is not, and neither is what comes through a pipe.
    """
    chat, said = chat_in(folder)
    await chat._run_shell_command_and_add_note("!cat a.txt; head -c 20000 /dev/zero | tr '\\0' x")
    await chat._run_shell_command_and_add_note("!!echo quiet")
    await chat._run_shell_command_and_add_note("!echo a\0b")
    chat.terminal.was_pasted = True
    await chat._run_shell_command_and_add_note("!touch pasted")

    (note,) = chat.conversation.notes
    assert note.startswith("(I ran `cat a.txt; ")
    assert ("color\nxxx" in note, 8_192, "quiet" in note) == (True, len(note.partition("printed:)\n")[2]), False)
    assert ["quiet", "the command was not run: embedded null byte", PASTED] == said[1:]
    assert not (folder / "pasted").exists()


def shown_blocks(*pieces: str) -> list[str]:
    """
    What stands in the scrollback after each piece of a reply.
    """
    file = io.StringIO()
    screen = Screen(make_console(file), markdown=True)
    lines = []
    for piece in pieces:
        screen.on_event(ev.TextDelta(text=piece))
        lines.append(file.getvalue())
    return lines


@pytest.mark.spec("interfaces:IF68")
def test_markdown_block_is_shown_at_an_empty_line_outside_fences() -> None:
    first, second, fence, closed = shown_blocks("One\n", "two.\n\nThree", "\n\n```\na = 1\n\nb", " = 2\n```\n\n")
    long = shown_blocks("word\n" * 700, "word\n" * 200)

    assert ("", "One two.") == (first, second.rstrip())
    assert ("a = 1" in fence, "Three" in fence, "b = 2" in closed) == (False, True, True)
    assert ("", True) == (long[0], "word" in long[1])


@pytest.mark.spec("requirements:N16")
@pytest.mark.parametrize(
    ("returned", "shown"),
    [("ctx.prompt.upper()", ["PAINT."]), ("{'size': 3}", ["size: 3"]), ("'Said.'", []), ("None", [])],
    ids=["text", "object", "said by the model", "nothing"],
)
def test_handler_output_is_shown_unless_the_model_said_it(
    chats: Any, folder: Path, returned: str, shown: list[str]
) -> None:
    (folder / "own.py").write_text(
        "from stepengine import STEP, AgentDefinition\n\ndef handle_steps(ctx):\n    yield STEP\n"
        f"    return {returned}\n\nagent = AgentDefinition('own', handle_steps=handle_steps)\n"
    )
    result, _ = chats(text("Said."), typed="Paint.\n", options=("own.py",))
    lines = result.stdout.splitlines()

    assert ["Said.", *shown] == [line for line in lines if line in ("Said.", "PAINT.", "size: 3")]


@pytest.mark.spec("interfaces:IF77")
def test_resumed_conversation_asks_each_open_question_in_turn(
    chats: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Also when the run gets to the next one before anybody looks at it.
    """

    async def late(handle: Any, *given: Any, **more: Any) -> Any:
        while more["answered_ids"] and not (handle.questions or handle.done):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)
        return await show_run(handle, *given, **more)

    monkeypatch.setattr("stepengine.cli.chat_screen.show_run", late)
    (folder / "asks.py").write_text(
        "from stepengine import AgentDefinition, Ask\n\ndef handle_steps(ctx):\n    colour = yield from Ask('Which?', ['red', 'blue'])\n"
        "    why = yield from Ask('Why?')\n    return f'{colour}, {why}'\n\n"
        "agent = AgentDefinition('asks', handle_steps=handle_steps)\n"
    )
    waiting, _ = chats(typed="Paint.\n", options=("asks.py",))
    result, _ = chats(typed="1\nit is warm\n", options=("--resume",))

    assert (3, 0) == (waiting.exit_code, result.exit_code), (waiting.output, result.output)
    assert "red, it is warm" in result.stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF77")
def test_resume_lists_conversations_and_continues_the_chosen_one(chats: Any, folder: Path) -> None:
    """
    Turns of one conversation are one line, and what is continued is the same conversation.
    """
    chats(text("One."), text("Two."), typed="first\nsecond\n")
    chats(text("Else."), typed="other\n")
    listed, model = chats(
        text("Mine."), text("Three."), text("Four."), typed="new\n/resume\n2\nthird\n/resume\n\nfourth\n"
    )
    again, _ = chats(text("Five."), typed="/resume 1\nfifth\n/resume 99\n/resume nothing\n")
    lines = [line for line in listed.stdout.splitlines() if re.match(r" +\d\. ", line)]

    assert [("1 turn", "other"), ("2 turns", "first")] == [
        (line.split("  ")[-2], line.split("  ")[-1]) for line in lines[:2]
    ]
    assert ["first", "second", "third", "fourth"] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert ["> first", "  One.", "> second", "  Two."] == [
        line for line in listed.stdout.splitlines() if line in ("> first", "  One.", "> second", "  Two.")
    ]
    assert ("1 turn", "new") == tuple(lines[2].split("  ")[-2:])
    assert "> fourth" in again.stdout
    assert 2 == again.stdout.count("/resume lists them")
    ids = [entry.get_text("session_id") for entry in list_recorded_runs()]
    assert [5, 1, 1] == sorted([ids.count(one) for one in set(ids)], reverse=True)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF77", "interfaces:IF78")
@pytest.mark.parametrize("typed", ["/resume 1\nmore\n", "more\n"], ids=["of the chat", "at its start"])
def test_a_turn_in_another_mode_is_continued_and_replayed(chats: Any, folder: Path, typed: str) -> None:
    chats(WRITES, text("Written."), typed="/mode accept_edits\nwrite\n")
    replayed = CliRunner().invoke(app, ["replay", "--last"])
    result, model = chats(text("Yes."), typed=typed, options=() if "/" in typed else ("--resume",))

    assert (0, 0) == (replayed.exit_code, result.exit_code), (replayed.output, result.output)
    assert ["write", "more"] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert "Yes." in result.stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF77")
@pytest.mark.parametrize("typed", ["/resume 1\nthird\n", "third\n"], ids=["of the chat", "at its start"])
def test_resume_continues_from_the_last_turn_without_failure(chats: Any, typed: str) -> None:
    chats(text("One."), failure("server_error"), typed="first\nsecond\n")
    statuses = [entry.status for entry in list_recorded_runs()]
    _, model = chats(text("Three."), typed=typed, options=() if "/" in typed else ("--resume",))

    assert ["failed", "completed"] == statuses
    said = [m.text for m in model.calls[-1].messages if m.role in ("user", "assistant")]
    assert ["first", "One.", "third"] == said


@pytest.mark.spec("interfaces:IF77")
@pytest.mark.parametrize("is_named", [False, True])
def test_resume_refuses_a_turn_running_in_another_process(chats: Any, is_named: bool) -> None:
    chats(text("One."), typed="first\n")
    entry = list_recorded_runs()[0]
    # This process is alive, so that the run counts as one that it runs.
    companion = entry.folder / f"{entry.stem}.json"
    companion.write_text(json.dumps({**entry.info, "status": "running"}))
    words = ("--resume", entry.stem) if is_named else ("--resume",)
    result, model = chats(text("Two."), typed="second\n", options=words)

    assert (2, []) == (result.exit_code, model.calls)
    assert f"{entry.stem} is running in another process; wait until it ends" in result.stderr


@pytest.mark.spec("interfaces:IF77")
@pytest.mark.parametrize("typed", ["/resume 1\nsecond\n", "second\n"], ids=["of the chat", "at its start"])
def test_resume_finds_a_moved_agent_by_its_id(chats: Any, folder: Path, typed: str) -> None:
    file = folder / "mover.py"
    file.write_text("from stepengine import AgentDefinition\nagent = AgentDefinition(id='mover')\n")
    chats(text("One."), typed="first\n", options=("./mover.py",))
    (folder / "agents").mkdir()
    file.rename(folder / "agents/mover.py")
    result, model = chats(text("Two."), typed=typed, options=() if "/" in typed else ("--resume",))

    assert 0 == result.exit_code, (result.stdout, result.stderr)
    said = [m.text for m in model.calls[-1].messages if m.role in ("user", "assistant")]
    assert ["first", "One.", "second"] == said


@pytest.mark.parametrize("started", MODES)
@pytest.mark.parametrize("resumed", MODES)
async def test_every_mode_of_a_resumed_turn_has_a_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started: Any, resumed: Any
) -> None:
    monkeypatch.setattr(bench, "make_model_registry", lambda *_: ScriptedModel([]))
    options = Options(asks=True, policy=Policy([], started), settings=load_settings())
    agent = AgentDefinition("talker", model="scripted/m")
    talk = ChatConversation(options, agent)
    async with talk.engines:
        await talk.switch_to_new_engine(attrs.evolve(options, policy=None, chat_policy=Policy([], resumed)), agent)
        first = talk.mode
        modes = [talk.schedule_next_permission_mode() for _ in talk.modes]

    assert resumed == first
    assert sorted(talk.modes) == sorted(modes)
    assert ("bypass" == started) == ("bypass" in modes)


# --- in a terminal ----------------------------------------------------------------------------------------------------

PROGRAM = """
import time
from stepengine.cli import bench, main
from stepengine.data.usage import Usage
from stepengine.testing import ScriptedModel, text, tool_call

def slow(request):
    time.sleep(0.01)
    return tool_call("run_terminal_command", {"command": "sleep 30"})

model = ScriptedModel([
    text("# Title\\n\\nIt says **color**.\\n\\n\\x1b[2J[link](http://example.test)\\n"),
    tool_call("write_file", {"path": "b.txt", "content": "colour\\n"}),
    text("Written."),
    slow,
])
bench.make_model_registry = lambda *_: model
main()
"""


class Somebody(Person):
    """
    A person at a terminal of 80 columns.
    """

    def __init__(self, folder: Path, *arguments: str, program: str = PROGRAM, **variables: str) -> None:
        command = [sys.executable, "-c", program, "chat", "--model", "scripted/m", *arguments]
        made = {"CI": "", "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **variables}
        super().__init__(command, folder, columns=80, environment=made)


@pytest.fixture
def somebody(folder: Path) -> Iterator[Any]:
    with people(partial(Somebody, folder)) as sits:
        yield sits


@pytest.mark.deep
@pytest.mark.spec(
    "interfaces:IF67", "reliability:UI03", "reliability:UI07", "interfaces:IF71", "interfaces:IF72", "interfaces:IF78"
)
def test_chat_in_a_terminal_supports_approval_undo_interrupt_and_exit(somebody: Any, folder: Path) -> None:
    there = somebody()
    there.sees(READY)
    there.types("Look at @a.txt\nsecond line\r")
    there.sees("+ a.txt (6 bytes)", "It says color.", r"\x1b[2Jlink (http://example.test)", "completed", READY)
    there.types("Write it\r")
    there.sees("| +colour", "always")
    assert not (folder / "b.txt").exists()
    there.types("y\n")
    there.sees("Written.", READY)
    there.types("\x0f")
    there.sees("| {", "b.txt")
    assert "colour\n" == (folder / "b.txt").read_text()
    there.types("/undo\r")
    there.sees("removed   b.txt", "y/n >")
    there.types("y\n")
    there.sees(READY)
    assert not (folder / "b.txt").exists()
    there.types("!echo $((6 * 7))\r")
    there.sees("42\r\n", READY)
    there.types("Take long\r")
    there.sees("sleep 30")
    there.types("y\n")
    there.sees("> run_terminal_command")
    there.types("\x03")
    there.sees("interrupted | 1 step", READY)
    there.types("\x03")
    there.sees("press Ctrl-C again or Ctrl-D to leave")
    there.types("\x03")

    assert signal.SIGINT + 128 == there.leaves()
    runs = get_runs_folder()
    assert runs is not None
    history = runs.parent / "chat-history.jsonl"
    said = [json.loads(line) for line in history.read_text().splitlines()]
    assert ["Look at @a.txt\nsecond line", "Write it", "/undo", "!echo $((6 * 7))", "Take long"] == said
    assert 0o600 == history.stat().st_mode & 0o777


@pytest.mark.spec("interfaces:IF76")
@pytest.mark.deep
@pytest.mark.parametrize(("arguments", "variables"), [(["--plain"], {}), ([], {"TERM": "dumb"}), ([], {"CI": "1"})])
def test_plain_chat_shows_raw_text_and_redraws_nothing(
    somebody: Any, arguments: list[str], variables: dict[str, str]
) -> None:
    there = somebody(*arguments, **variables)
    there.sees("> ")
    there.types("Look\n")
    there.sees("It says **color**.")
    there.sees("> ")
    there.types("/quit\n")

    assert 0 == there.leaves()


GATED = """
import asyncio, sys
from functools import partial
from pathlib import Path
from stepengine.cli import bench, main
from stepengine.testing import ScriptedModel, text, tool_call

class Gated(ScriptedModel):
    async def stream(self, request):
        async for delta in super().stream(request):
            while not Path(f"gate{len(self.calls)}").exists():
                await asyncio.sleep(0.01)
            yield delta
            await asyncio.sleep(0.01)

def last(request):
    Path("last").write_text(request.messages[-1].text)
    return text("Heard.")

model = Gated([REPLIES])
bench.make_model_registry = lambda *_: model
main()
"""
"""Each reply comes when there is a file ``gateN``, and slowly: what is open can be seen."""


def gated(replies: str) -> str:
    return GATED.replace("REPLIES", replies)


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF68", "interfaces:IF71")
@pytest.mark.parametrize("arguments", [["--plain"], []], ids=["plain", "lines"])
def test_input_does_not_split_the_streaming_text(somebody: Any, folder: Path, arguments: list[str]) -> None:
    """
    It is shown below the text, when that has ended. A plain terminal gets its echo back.
    """
    there = somebody(*arguments, program=gated("text('Begin ' + 'word ' * 300 + 'end.'), last"))
    there.sees("> " if arguments else READY)
    there.types("first\n" if arguments else "first\r")
    there.sees("step 1")
    (folder / "gate1").touch()
    there.sees("Begin word")
    there.types("second\n" if arguments else "second\r")
    if not arguments:
        there.types("/todo\r")
        there.sees("> /todo", "did you mean /todos?")
    there.sees(*(["word " * 100 + "end."] if arguments else ["end."]), "> second", "(sent;")
    (folder / "gate2").touch()
    there.sees("Heard.", "completed", "> " if arguments else READY)
    echo = termios.tcgetattr(there.keyboard)[3] & termios.ECHO
    there.types("/quit\n" if arguments else "/quit\r")

    assert (0, bool(arguments)) == (there.leaves(), bool(echo))
    assert "second" == (folder / "last").read_text()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF72")
@pytest.mark.parametrize(
    ("arguments", "key"), [([], "\x1b"), ([], "\x03"), (["--plain"], "\x03")], ids=["Esc", "Ctrl-C", "plain"]
)
def test_interrupted_turn_takes_one_line_and_the_chat_continues(
    somebody: Any, folder: Path, arguments: list[str], key: str
) -> None:
    enter, ready = ("\n", "> ") if arguments else ("\r", READY)
    there = somebody(*arguments, program=gated("text('Never ' + 'word ' * 2_000), last"))
    there.sees(ready)
    there.types(f"first{enter}")
    (folder / "gate1").touch()
    there.sees("Never word")
    there.types(key)
    shown = there.sees("interrupted | 0 steps")
    after = there.sees(ready)
    (folder / "gate2").touch()
    there.types(f"second{enter}")
    there.sees("Heard.", "completed", ready)
    there.types(f"/quit{enter}")

    assert 0 == there.leaves()
    assert 1 == after.count("\n")
    assert [] == [said for said in ("stepengine:", "broke off", "SIGINT", "Traceback") if said in shown + after]


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF72")
def test_esc_at_a_permission_interrupts_and_alt_enter_still_works(somebody: Any, folder: Path) -> None:
    there = somebody(program=gated("tool_call('write_file', {'path': 'b.txt', 'content': 'colour'}), last"))
    for number in (1, 2):
        (folder / f"gate{number}").touch()
    there.sees(READY)
    there.types("Write it\r")
    there.sees("e all edits >")
    there.types("\x1b")
    there.sees("interrupted | ", READY)
    there.types("one\x1b\rtwo\r")
    there.sees("Heard.", "completed", READY)
    there.types("/quit\r")

    assert 0 == there.leaves()
    assert ("one\ntwo", False) == ((folder / "last").read_text(), (folder / "b.txt").exists())


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF72")
def test_ctrl_c_at_a_plain_prompt_exits_with_a_newline(somebody: Any) -> None:
    there = somebody("--plain")
    there.sees("> ")
    there.types("\x03")
    there.sees("^C\r\n")

    assert 128 + signal.SIGINT == there.leaves()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF71", "interfaces:IF72", "interfaces:IF78")
@pytest.mark.parametrize(
    ("answer", "sees"), [("n\r", "> "), ("\r", "> second"), ("y\r", "> second")], ids=["no", "back", "yes"]
)
def test_commands_answer_during_a_turn_and_ctrl_c_offers_input(
    somebody: Any, folder: Path, answer: str, sees: str
) -> None:
    there = somebody(program=gated("text('Never.'), last"))
    there.sees(READY)
    there.types("\x1b[30;1R")  # where the cursor is, as a terminal says it when it is asked
    there.sees("m | default | ")
    there.types("first\r")
    there.sees("calling model")
    there.types("/cost\r")
    there.sees("this turn so far")
    there.types("/hlep\r")
    there.sees("did you mean /help?")
    there.types("second\r")
    there.sees("(sent;")
    there.types("\x03")
    there.sees("not sent yet: second", "send it now?")
    there.types(answer)
    there.sees(READY if answer == "n\r" else sees)
    there.types("third\r" if answer != "y\r" else "")
    there.sees("calling model")
    for number in (1, 2):
        (folder / f"gate{number}").touch()
    there.sees("Heard.", "completed", READY)
    there.types("/quit\r")

    assert {"n\r": "third", "\r": "secondthird", "y\r": "second"}[answer] == (folder / "last").read_text()
    assert 0 == there.leaves()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF67", "interfaces:IF72", "interfaces:IF77")
def test_second_ctrl_c_in_a_turn_leaves_a_resumable_chat(somebody: Any, folder: Path) -> None:
    there = somebody(program=gated("tool_call('write_file', {'path': 'b.txt', 'content': 'colour'})"))
    (folder / "gate1").touch()
    there.sees(READY)
    there.types("Write it\r")
    there.sees("always")
    there.types("\x04")
    there.sees("waits for an answer")
    assert 3 == there.leaves()

    there = somebody("--resume", program=gated("text('Never seen.')"))
    (folder / "gate1").unlink()
    there.sees("> Write it", "| +colour", "always")
    there.types("y\r")
    there.sees("write_file ok", "calling model")
    assert "colour" == (folder / "b.txt").read_text()
    there.types("\x03\x03")
    there.sees("you left during a turn", "resume it with: stepengine resume ")

    assert signal.SIGINT + 128 == there.leaves()


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF72")
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "in a turn"])
def test_sigterm_ends_a_chat_and_restores_the_terminal(somebody: Any, is_idle: bool) -> None:
    there = somebody(program=gated("last"))
    there.sees(READY)
    if not is_idle:
        there.types("first\r")
        there.sees("calling model")
    there.process.send_signal(signal.SIGTERM)

    assert 128 + signal.SIGTERM == there.leaves()
    assert termios.ECHO | termios.ICANON == termios.tcgetattr(there.keyboard)[3] & (termios.ECHO | termios.ICANON)
    assert ([] if is_idle else ["interrupted"]) == [entry.status for entry in list_recorded_runs()]


@pytest.mark.spec("interfaces:IF70", "interfaces:IF75")
@pytest.mark.deep
def test_long_paste_is_folded_and_pasted_command_is_not_run(somebody: Any, folder: Path) -> None:
    there = somebody(program=gated("last, last"))
    (folder / "gate1").touch()
    pasted = "\n".join([f"line {number} \x07" for number in range(400)])
    there.sees(READY)
    there.types(f"Look: \x1b[200~{pasted}\x1b[201~")
    there.sees("[paste 1: 400 lines]")  # what stands before it may be drawn by moving the cursor
    there.types("\r")
    there.sees("Heard.", "completed", READY)

    assert f"Look: {pasted}" == (folder / "last").read_text()
    there.types("\x1b[200~!rm a.txt\x1b[201~")
    there.sees("!rm a.txt")
    there.types("\r")
    there.sees("that was pasted is not run")
    there.types("again\r")
    there.sees("calling model")
    there.types("\x1b[200~!rm a.txt\x1b[201~\r")
    there.sees("that was pasted is not run")
    (folder / "gate2").touch()
    there.sees("completed", READY)
    there.types("/quit\r")

    assert 0 == there.leaves()
    assert (folder / "a.txt").exists()


@pytest.mark.spec("interfaces:IF70", "interfaces:IF75")
@pytest.mark.deep
def test_paste_stays_one_at_a_question_and_in_history(somebody: Any, folder: Path) -> None:
    there = somebody(program=gated("tool_call('write_file', {'path': 'b.txt', 'content': 'colour'}), last"))
    there.sees(READY)
    there.types("\x1b[200~!touch early\x1b[201~\r")
    there.sees("that was pasted is not run", READY)
    there.types("\x1b[A")
    there.types("Write it\r")  # no pasted command is in the history above it
    there.sees("> Write it")
    there.sees("calling model")
    there.types("\x1b[200~!touch draft\x1b[201~")
    there.sees("!touch draft")
    (folder / "gate1").touch()
    there.sees("e all edits >")
    there.types("\x1b[200~!touch answer\x1b[201~\r")
    there.sees("that was pasted is not run", "e all edits >")
    there.types("y\r")
    there.sees("write_file ok", "!touch draft")
    there.types("\r")
    there.sees("that was pasted is not run")
    (folder / "gate2").touch()
    there.sees("Heard.", "completed", READY)
    there.types("/quit\r")

    assert 0 == there.leaves()
    assert ["a.txt", "b.txt"] == sorted(path.name for path in folder.glob("*") if path.name[:4] not in ("gate", "last"))


@pytest.mark.spec("interfaces:IF71", "interfaces:IF75")
@pytest.mark.deep
def test_keys_complete_switch_mode_and_stop_a_shell_command(somebody: Any, folder: Path) -> None:
    there = somebody(program=gated("last"))
    there.sees(READY)
    there.types("/tod\t")
    there.sees("/todos")
    there.types("\r")
    there.sees("there are no todos", READY)
    there.types("\x1b[Z")
    there.sees("mode plan, from the next turn on")
    there.types("/mode\r")
    there.sees("current mode: plan", READY)
    there.types("\x1b[A\r")  # what was said last
    there.sees("current mode: plan", READY)
    there.types("nonsense\x03/todos\r")  # what is cleared is not said
    there.sees("there are no todos", READY)
    there.types("!touch began; sleep 60; touch ended\r")
    while not (folder / "began").exists():
        assert there.process.poll() is None
    there.types("\x03")
    there.sees("(exit code -9)", READY)
    assert not (folder / "ended").exists()
    there.types("/quit\r")

    assert 0 == there.leaves()


@pytest.mark.spec("interfaces:IF71")
def test_prompt_history_stores_no_secret(folder: Path) -> None:
    secret = "sk-ant-api03-" + "a1B2" * 23 + "AA"
    history = PromptHistory(find_chat_history_file())
    history.append_redacted(f"My key is {secret}, use it")
    history.append_redacted("next")

    assert ["next"] == history.load()[1:]
    assert secret not in history.load()[0]
    assert history.load()[0].startswith("My key is ")


@pytest.mark.spec("requirements:X47")
def test_unread_input_of_a_turn_is_sent_as_the_next(chats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["late", "/help"]
    monkeypatch.setattr(RunHandle, "unread", property(lambda _: [late.pop(0)] if late else []))
    result, model = chats(text("One."), text("Two."), text("Three."), typed="first\n/quit\n")

    assert ["first", "late", "/help"] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert "> late\nstep 1" in result.stdout


@pytest.mark.spec("interfaces:IF74", "interfaces:IF75", "requirements:X47")
def test_unread_message_is_never_a_command(chats: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Anyone with `stepengine send` can write one, so it runs and attaches nothing.
    """
    sent = ["!touch ran", " /quit", "/quit", "See @a.txt and @@home", "  "]
    late = [*sent]
    monkeypatch.setattr(RunHandle, "unread", property(lambda _: [late.pop(0)] if late else []))
    monkeypatch.setattr(TypedLines, "is_terminal", property(lambda _: True, lambda *_: None), raising=False)
    _, model = chats(*map(text, "123456"), typed="first\n/quit\n")

    assert ["first", *sent[:-1]] == [m.text for m in model.calls[-1].messages if m.role == "user"]
    assert not (folder / "ran").exists()


OWN_ASK_USER = """
from pathlib import Path
from stepengine import AgentDefinition, tool

@tool(category="execute")
def ask_user(command: str) -> str:
    \"\"\"Run a command.\"\"\"
    Path("ran").touch()
    return "done"

agent = AgentDefinition("own", model="scripted/m", tools=[ask_user])
"""


@pytest.mark.spec("interfaces:IF67")
def test_own_tool_named_ask_user_needs_approval(chats: Any, folder: Path) -> None:
    (folder / "own.py").write_text(OWN_ASK_USER)
    calls = tool_call("ask_user", {"command": "deploy"}), text("Well.")
    result, model = chats(*calls, typed="go\n/quit\n", options=("./own.py",))

    assert "Well." in result.stdout
    assert (2, False) == (len(model.calls), (folder / "ran").exists())


@pytest.mark.spec("interfaces:IF75")
def test_shell_command_as_the_prompt_argument_is_refused(chats: Any) -> None:
    result, model = chats(typed="", options=("coder", "!touch ran"))

    assert (2, []) == (result.exit_code, model.calls)
    assert "'!touch ran' is a !command, which runs only if it is typed" in result.stderr
