"""
What the commands say of runs that a crash cut off, that are damaged, that end otherwise, or that share an SQLite file.
"""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli import TerminalInteractor
from stepengine.cli.app import app
from stepengine.data.questions import Answer, Question
from stepengine.journal import FileJournal, MemoryJournal
from tests.cli.command import command
from tests.cli.recordings import copy_recording, recording

AGENT = """
from stepengine import AgentDefinition, Ask, Perform

def pay(sum):
    with open("paid.txt", "a") as file:
        file.write(f"{sum};")
    return sum

def handle_steps(ctx):
    yield from Perform(pay, 1)
    yield from Perform(pay, 2)
    return (yield from Ask("Ship it?"))

agent = AgentDefinition("payer", handle_steps=handle_steps)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Commands run in a folder that holds nothing but an agent.
    """
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    Path("agents/payer.py").write_text(AGENT)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with the journal of a run that died while it paid the second sum.
    """
    folder = tmp_path_factory.mktemp("recorded")
    with recording(folder):
        Path("agents").mkdir()
        Path("agents/payer.py").write_text(AGENT)
        command("run", "payer", "--journal", "whole.jsonl", "-q", code=3)
        lines = FileJournal("whole.jsonl").lines()
        last = next(n for n, line in enumerate(lines) if b'"args":[2]' in line)
        MemoryJournal(lines[: last + 1]).copy_to(FileJournal("cut.jsonl"))
        Path("paid.txt").unlink()
    return folder


@pytest.fixture
def cut_off(recorded: Path, tmp_path: Path) -> str:
    copy_recording(recorded, tmp_path)
    return "cut.jsonl"


def hinted(result: Result, after: str) -> list[str]:
    """
    Return the arguments of the command that a message names.
    """
    (line,) = [line for line in result.stderr.splitlines() if after in line]
    return shlex.split(line.partition("stepengine resume")[2])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R3", "reliability:R2", "replay:Y18", "replay:J31")
@pytest.mark.parametrize(("answer", "code", "paid"), [("yes", 3, "2;"), ("no", 1, "")])
def test_hints_after_a_crash_lead_to_the_open_question(cut_off: str, answer: str, code: int, paid: str) -> None:
    replayed = command("replay", cut_off, "-q", code=1)
    assert "cut.jsonl ends before the end of its run" in replayed.stderr
    asked = command("resume", *hinted(replayed, "resume it with"), "-q", code=3)
    assert "pay (#1) was cut off and may have happened. Do it again?" in asked.stderr
    answering = [argument.replace("TEXT", answer) for argument in hinted(asked, "answer it with")]
    # The answer decides also where somebody leaves the policy out.
    plain = [argument for argument in answering if argument not in ("--in-doubt", "ask")]
    assert plain != answering
    command("resume", *plain, "-q", code=code)
    assert (Path("paid.txt").read_text() if Path("paid.txt").exists() else "") == paid


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Somebody sits there.
    """
    monkeypatch.setattr("stepengine.cli.commands.resume.can_ask_at_terminal", lambda: True)


@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(
    ("typed", "code", "paid", "said"),
    [
        ("y\n", 3, "2;", "Ship it?"),
        ("what?\nno\n", 1, "", "UnknownOutcome"),
        ("result:2\n", 3, "", "Ship it?"),
        ("\n", 3, "", "question doubt:#1 waits for an answer"),
        ("", 3, "", "--answer doubt:#1=result:TEXT-or-JSON"),
    ],
)
@pytest.mark.usefixtures("at_terminal")
def test_resume_at_a_terminal_asks_about_an_effect_in_doubt(
    cut_off: str, typed: str, code: int, paid: str, said: str
) -> None:
    result = CliRunner().invoke(app, ["resume", cut_off, "-q"], input=typed)

    assert code == result.exit_code, result.stderr
    assert "pay (#1) was cut off and may have happened. Do it again?" in result.stderr
    assert '"args":[2]' in result.stderr
    assert said in result.stderr
    assert paid == (Path("paid.txt").read_text() if Path("paid.txt").exists() else "")


@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("1", Answer(selected=("yes",))),
        ("N", Answer(selected=("no",))),
        ('what?\nresult:{"sum": 2}', Answer(result={"sum": 2}, by="command line")),
        ("/skip", None),
        ("", None),
    ],
)
async def test_interactor_asks_about_an_effect_in_doubt(typed: str, answer: Answer | None) -> None:
    shown = io.StringIO()
    question = Question("doubt:#1", "Do it again?", ("yes", "no"), details={"args": [2]})

    assert answer == await TerminalInteractor(input=io.StringIO(f"{typed}\n"), output=shown).ask(question)
    assert '| with: {"args":[2]}' in shown.getvalue()


@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(("given", "taken"), [("2", 2), ('{"sum": 2}', {"sum": 2}), ("paid by hand", "paid by hand")])
def test_answer_gives_the_result_of_an_effect_in_doubt(cut_off: str, given: str, taken: object) -> None:
    command("resume", cut_off, "--answer", f"doubt:#1=result:{given}", "-q", code=3)
    history = FileJournal(cut_off).history()

    assert not Path("paid.txt").exists()
    assert taken == getattr(history.outcome(history.results["", 1]), "value", None)
    assert ["command line"] == [i.input["by"] for i in history.inputs if i.input["type"] == "manual_result"]


@pytest.mark.spec("requirements:X73")
def test_effect_in_doubt_fails_without_a_terminal(cut_off: str) -> None:
    assert "it may or may not have happened" in command("resume", cut_off, "-q", code=1).stderr


@pytest.mark.spec("requirements:X54", "reliability:JR37")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "doubt:#1=perhaps",
            "must be 'yes' (do it again), 'no' (the handler gets UnknownOutcome) or the result (Answer(result=...), ",
        ),
        ("doubt:#7=yes", "effects in doubt: doubt:#1"),
    ],
)
def test_invalid_answer_about_an_effect_in_doubt_changes_nothing(cut_off: str, answer: str, said: str) -> None:
    before = Path(cut_off).read_bytes()
    assert said in command("resume", cut_off, "--answer", answer, "-q", code=2).stderr
    assert Path(cut_off).read_bytes() == before
    assert not Path("paid.txt").exists()


def test_suite_reports_a_cut_off_run_as_not_ended(cut_off: str) -> None:
    assert "ok        cut.jsonl  not ended" in command("test", cut_off).stdout


@pytest.mark.spec("reliability:JR02")
def test_damaged_journal_is_not_called_resumable() -> None:
    Path("bad.jsonl").write_bytes(b"no journal\nat all\n")
    said = command("journal", "check", "bad.jsonl", code=1).stdout
    assert "BAD bad.jsonl  not usable as it is" in said
    assert "bad.jsonl is not a journal: record 1 (byte 0) is text, not a record" in said
    assert "repair" not in said  # there is nothing to keep


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J1")
def test_one_sqlite_file_holds_many_runs_named_after_a_hash() -> None:
    first = command("run", "payer", "--journal", "runs.db", "-q", code=3)
    command("run", "payer", "--journal", "runs.db#second", "-q", code=3)
    command("run", "payer", "--journal", "runs.db#second", "-q", code=2)
    done = command("resume", *[a.replace("TEXT", "now") for a in hinted(first, "answer it with")], "-q")
    assert done.stdout == "now\n"
    command("fork", "runs.db#second", "--at", "1", "--into", "runs.db#third", "-q", code=3)
    reports = json.loads(command("journal", "check", "runs.db", "--json").stdout)
    assert [report["ok"] for report in reports] == [True, True, True]
    assert "3 of 3 as recorded" in command("test", "runs.db").stdout
    command("journal", "scrub", "runs.db#second", "runs.db#public")
    command("replay", "runs.db#public", "-q", code=3)
