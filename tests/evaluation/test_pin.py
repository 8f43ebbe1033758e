"""
`stepengine compare pin`: a failed run becomes a test that fails, then passes (evaluation JG80).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, load_agent
from stepengine.cli.exits import Exit
from stepengine.errors import DataError
from stepengine.evaluation import PinnedTest, pin
from stepengine.evaluation.pinned_tests import make_pin_name, render_pin_test
from stepengine.journal import FileJournal, MemoryJournal, scan
from stepengine.testing import ScriptedModel, text
from stepengine.tools.bundled import file_tools

CLERK = '''
from stepengine import *

def stock(given):
    """Nothing that is pinned may call this."""
    with open("asked.txt", "a") as file:
        file.write(given["item"] + "\\n")
    return {"left": 3}

schema = {"type": "object", "properties": {"item": {"type": "string"}}}
tools = [Tool(name="stock", description="Look.", input_schema=schema, run=stock)]

def handle_steps(ctx):
    found = yield from ToolCall("stock", {"item": ctx.prompt})
    yield STEP_ALL
    return found.data["left"] + 1

agent = AgentDefinition("clerk", model="t/m", system_prompt="Be brief.", tools=tools, handle_steps=handle_steps)
'''
KEY = "sk-ant-api03-" + "b" * 90


@pytest.fixture
def clerk(folder: Any) -> Any:
    """
    A run of a clerk who counts wrong: the handler says four where three are left.
    """
    folder.write("agents/clerk.py", CLERK)
    folder.record("runs/wrong.jsonl", "pens", [text("Three pens.")], agent="agents/clerk.py")
    (folder.path / "asked.txt").unlink()
    return folder


def edit(folder: Any, name: str, old: str, new: str) -> None:
    """
    Edit a file of the project, which the next command or test loads anew.
    """
    before = (folder.path / name).read_text()
    assert old in before
    (folder.path / name).write_text(before.replace(old, new))
    for module in [name for name in sys.modules if name.startswith("stepengine_agents_")]:
        del sys.modules[module]


def passes(folder: Any, name: str) -> str:
    """
    Run a written test in this process; its failure, or nothing.
    """
    names: dict[str, Any] = {"__file__": str(folder.path / f"tests/test_pin_{name}.py")}
    exec((folder.path / f"tests/test_pin_{name}.py").read_text(), names)
    try:
        names[f"test_pin_{name}"]()
    except AssertionError as error:
        return str(error) or "failed"
    return ""


def test_python_pins_a_run_as_the_command_does(clerk: Any) -> None:
    clerk.type("compare", "pin", "runs/wrong.jsonl", "--check", "output == 3")
    typed = {path: path.read_bytes() for path in (clerk.path / "tests").rglob("*.*")}
    for path in typed:
        path.unlink()
    with Engine([load_agent("clerk")]) as engine:
        passing = pin(engine, "runs/wrong.jsonl", "output == 4")
        made = pin(engine, "runs/wrong.jsonl", "output == 3")

    assert passing == "this run passes the check, so there is nothing to pin"
    assert isinstance(made, PinnedTest)
    assert (Path("tests/test_pin_wrong.py"), "output == 3 does not hold") == (made.file, made.reason)
    assert typed == {path: path.read_bytes() for path in (clerk.path / "tests").rglob("*.*")}


@pytest.mark.spec("evaluation:JG80")
def test_a_pin_can_be_made_inside_the_tests_folder(clerk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clerk.write("tests/ready.txt", "")
    monkeypatch.chdir(clerk.path / "tests")

    check = ["--check", "output == 3", "--agent", "../agents/clerk.py", "--dir", "journals"]
    said = clerk.type("compare", "pin", "../runs/wrong.jsonl", *check)

    assert ["test_pin_wrong.py", "journals/wrong.jsonl"] == said.stdout.split()
    assert "output == 3 does not hold" in passes(clerk, "wrong")
    edit(clerk, "agents/clerk.py", '["left"] + 1', '["left"]')
    assert "" == passes(clerk, "wrong")
    assert not (clerk.path / "asked.txt").exists()


@pytest.mark.spec("evaluation:JG80")
@pytest.mark.parametrize("name", [b"\xff", "\U0001f600".encode()])
def test_a_pin_works_with_any_file_names(clerk: Any, name: bytes) -> None:
    agent, folder = f"agents{os.fsdecode(name)}/clerk.py", f"tests/journals{os.fsdecode(name)}"
    (clerk.path / "agents").rename((clerk.path / agent).parent)
    with Engine([load_agent(agent)]) as engine:
        pin(engine, "runs/wrong.jsonl", "output == 3", agent_file=agent, folder=Path(folder))

    assert "output == 3 does not hold" in passes(clerk, "wrong")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG80")
def test_the_test_loads_no_file_for_a_contained_agent(folder: Any) -> None:
    folder.write(
        "agents/boss.py",
        """
        from stepengine import *

        def deeper(ctx):
            return (yield from AgentCall("kid", ctx.prompt + "x")) if len(ctx.prompt) < 3 else ctx.prompt

        def handle_steps(ctx):
            return (yield from AgentCall("kid", "x"))

        kid = AgentDefinition("kid", spawnable_agents=["kid", "the-boss"], handle_steps=deeper)
        agent = AgentDefinition("the-boss", spawnable_agents=[kid], handle_steps=handle_steps)
        """,
    )
    folder.record("runs/deep.jsonl", "go", [], agent="agents/boss.py")

    folder.type("compare", "pin", "runs/deep.jsonl", "--check", "output == 'y'", "--agent", "agents/boss.py")

    assert 1 == (folder.path / "tests/test_pin_deep.py").read_text().count("load_agent(")
    assert "output == 'y' does not hold" in passes(folder, "deep")


@pytest.mark.spec("evaluation:JG80")
def test_a_reason_with_controls_and_quotes_is_still_python() -> None:
    reason = 'said """x\x00\x1b[2J \\'
    written = render_pin_test("it", ["a.py"], "steps > 1", reason, "journals/it.jsonl", has_bundled_tools=False)

    names: dict[str, Any] = {"__file__": __file__}
    exec(compile(written, "test_pin_it.py", "exec"), names)
    assert "said '''x\\x00\\x1b[2J \\" in names["__doc__"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG80")
def test_a_repair_that_needs_new_replies_says_which(clerk: Any) -> None:
    """
    A new prompt needs a reply, a new call a result: each failure names it, until the test is whole and passes.
    """
    clerk.type(
        "compare", "pin", "runs/wrong.jsonl", "--check", "text == 'Three pens and two pencils.'", "--name", "pencils"
    )
    test = "tests/test_pin_pencils.py"
    edit(clerk, "agents/clerk.py", "Be brief.", "Look for pencils, too.")
    edit(clerk, "agents/clerk.py", '    return found.data["left"] + 1\n', "")
    first = passes(clerk, "pencils")
    call = "tool_call('stock', {'item': 'pencils'})"
    edit(clerk, test, "REPLIES = []", f"from stepengine.testing import tool_call\nREPLIES = [{call}]")
    second = passes(clerk, "pencils")
    edit(clerk, test, "RESULTS = {}", 'RESULTS = {"stock": {"left": 2}}')
    third = passes(clerk, "pencils")
    edit(clerk, test, f"[{call}]", f"[{call}, 'Three pens and two pencils.']")

    assert "from #1 on, the run sends requests that are not recorded; add their replies to REPLIES" in first
    assert 'the run now calls stock {"item": "pencils"} at #2' in second
    assert "which is not recorded; add its result to RESULTS" in second
    assert "add their replies to REPLIES" in third
    assert "" == passes(clerk, "pencils")
    assert not (clerk.path / "asked.txt").exists()


@pytest.mark.spec("evaluation:JG80")
def test_any_run_name_makes_a_test_name() -> None:
    """
    Names of recorded runs begin with a date; a function's must not.
    """
    assert "run_2026_11_21_desk_a1" == make_pin_name("2026-11-21-desk.A1")
    assert make_pin_name("x" * 500) == "x" * 60
    with pytest.raises(DataError, match="cannot be the name of a test"):
        make_pin_name("!?")


@pytest.mark.spec("evaluation:JG80")
def test_a_kept_journal_contains_no_secret_and_still_fails(folder: Any) -> None:
    """
    A key in a prompt is gone from the kept journal, of which the rest is as it was, and which replays.
    """
    folder.write("agents/clerk.py", CLERK)
    folder.record("runs/leak.jsonl", f"pens with {KEY}", [text("Three.")], agent="agents/clerk.py")
    said = folder.type("compare", "pin", "runs/leak.jsonl", "--check", "output == 3")

    kept = folder.path / "tests/journals/leak.jsonl"
    assert KEY in (folder.path / "runs/leak.jsonl").read_text()
    assert [] == list(scan([kept]))
    assert "what looks like a secret was removed from" in said.stderr
    assert KEY not in said.output + (folder.path / "tests/test_pin_leak.py").read_text()
    assert "output == 3 does not hold" == passes(folder, "leak")


@pytest.mark.spec("evaluation:JG80")
def test_a_check_that_quotes_a_secret_makes_a_pin(folder: Any) -> None:
    folder.write("agents/talker.py", 'from stepengine import *\nagent = AgentDefinition("talker", model="t/m")\n')
    folder.write(
        "checks.py",
        'def short(result):\n    assert len(result.text) < 5, f"too long: {result.text}"\n    return True\n',
    )
    folder.record("runs/leak.jsonl", "Hi", [text(f"Three, says {KEY}.")], agent="agents/talker.py")
    with Engine([load_agent("talker")]) as engine:
        made = pin(engine, "runs/leak.jsonl", "checks:short")

    assert isinstance(made, PinnedTest)
    assert made.reason.startswith("too long: Three, says ")
    assert KEY not in made.reason + made.file.read_text()
    assert made.reason in passes(folder, "leak")


@pytest.mark.spec("evaluation:JG80", "evaluation:JG12")
def test_a_run_failed_only_by_its_secret_is_not_pinned(folder: Any) -> None:
    """
    What is kept has no secret, so that the test would pass from its first day on; that is said, and nothing is left.
    """
    folder.write("agents/clerk.py", CLERK)
    folder.record("runs/leak.jsonl", "pens", [text(f"Three, says {KEY}.")], agent="agents/clerk.py")
    said = folder.type("compare", "pin", "runs/leak.jsonl", "--check", "'api03' not in text", code=Exit.FAILED)

    assert "without its secrets the run passes --check; nothing was written" in said.stderr
    assert not any((folder.path / "tests").rglob("*.*"))


@pytest.mark.spec("evaluation:JG80", "evaluation:JG12")
@pytest.mark.deep
def test_nothing_is_pinned_where_the_run_passes_or_diverges(clerk: Any) -> None:
    """
    Codes 1, 2 and 5, and no file is left by any of them; a second pin of one name does not touch the first.
    """
    words = ("compare", "pin", "runs/wrong.jsonl", "--check")
    assert "nothing to pin" in clerk.type(*words, "output == 4", code=Exit.FAILED).stderr
    clerk.type(*words, "output ==", code=Exit.USAGE)
    clerk.type(*words, "nothing > 3", code=Exit.USAGE)
    clerk.type(*words, "output == 3", "--name", "!?", code=Exit.USAGE)
    clerk.type("compare", "pin", "runs/none.jsonl", "--check", "output == 3", code=Exit.USAGE)
    edit(clerk, "agents/clerk.py", "Be brief.", "Be long.")
    clerk.type(*words, "output == 3", code=Exit.DIVERGED)
    assert not (clerk.path / "tests").exists() or not any((clerk.path / "tests").rglob("*.*"))

    edit(clerk, "agents/clerk.py", "Be long.", "Be brief.")
    clerk.type(*words, "output == 3")
    kept = {path: path.read_bytes() for path in (clerk.path / "tests").rglob("*.*")}
    clerk.type(*words, "output == 3", code=Exit.USAGE)
    assert kept == {path: path.read_bytes() for path in (clerk.path / "tests").rglob("*.*")}


@pytest.mark.spec("evaluation:JG80")
def test_when_the_clean_copy_is_not_clean_nothing_is_written(clerk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A scan has the last word: what it finds in the copy ends the command, and the copy is gone.
    """
    monkeypatch.setattr("stepengine.evaluation.pinned_tests.scrub", _copied)
    clerk.record("runs/leak.jsonl", f"pens with {KEY}", [text("Three.")], agent="agents/clerk.py")
    said = clerk.type("compare", "pin", "runs/leak.jsonl", "--check", "output == 3", code=Exit.USAGE)

    assert "still contains a possible secret" in said.stderr
    assert KEY not in said.output
    assert not any((clerk.path / "tests").rglob("*.*"))


def _copied(journal: Any) -> Any:
    return MemoryJournal(journal.lines(), redact="off")


@pytest.mark.spec("evaluation:JG80")
def test_a_pin_finds_project_checks_and_bundled_tools(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The test finds both from its own place, whatever folder it is started in.
    """
    folder.write(
        "agents/reader.py",
        """
        from stepengine import *
        agent = AgentDefinition("reader", model="t/m", tools=["read_files"], system_prompt="Read.")
        """,
    )
    folder.write(
        "checks.py", "def polite(result):\n    assert 'please' in result.text, 'it says no please'\n    return True\n"
    )
    agent = load_agent("agents/reader.py")
    with Engine([agent], [*file_tools(folder.path)], ScriptedModel(["Read it yourself."]), pricing=None) as engine:
        engine.run_sync(agent, "go", journal=FileJournal("rude.jsonl"))
    folder.type("compare", "pin", "rude.jsonl", "--agent", "agents/reader.py", "--check", "checks:polite")
    (folder.path / "elsewhere").mkdir()
    monkeypatch.chdir(folder.path / "elsewhere")

    assert "it says no please" == passes(folder, "rude")
