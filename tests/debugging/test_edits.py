"""
A place of a recorded run under code that is edited meanwhile: each look in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, load_agent
from stepengine.debugging.edits import MomentPreview, Walker, WatchedMoment
from stepengine.engine.tape import Tape
from stepengine.errors import JournalError
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text

CODE = '''
from helper import worth
from stepengine import STEP, AgentDefinition, call, tool


@tool
def price_of(item: str) -> int:
    """Return the price of an item."""
    raise RuntimeError("a tool ran")


def handle_steps(ctx):
    total = 0
    for item in ctx.prompt.split():
        price = yield from call(price_of, item)
        total = worth(price)
        yield STEP
    return total


agent = AgentDefinition("tally", model="t/m", tools=[price_of], instructions_prompt="Be brief.", handle_steps=handle_steps)
'''
HELPER = "def worth(price):\n    return price + 0\n"


RECORD = """
from stepengine import Engine, load_agent
from stepengine.testing import ScriptedModel, text

agent = load_agent("tally.py")
Engine([agent], models=ScriptedModel(lambda _: text("ok"))).run_sync(agent, "tea milk sugar", journal="run.jsonl")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """
    A journal that a process of its own made: this one must not have imported what is edited.
    """
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "helper.py").write_text(HELPER)
    (folder / "tally.py").write_text(CODE.replace('raise RuntimeError("a tool ran")', "return 10 * len(item)"))
    subprocess.run([sys.executable, "-c", RECORD], cwd=folder, check=True)
    return (folder / "run.jsonl").read_text()


@pytest.fixture
def project(tmp_path: Path, recorded: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "tally.py").write_text(CODE)
    (tmp_path / "run.jsonl").write_text(recorded)
    return tmp_path


def load() -> tuple[Engine, Any]:
    agent = load_agent("tally.py")
    return Engine([agent], models=ScriptedModel(lambda _: text("a model was asked"))), agent


def seen(at: str = "#4", *, prints: bool = False, **options: Any) -> MomentPreview:
    with closing(Walker(load, Tape(FileJournal("run.jsonl")), prints=prints)) as walker:
        return walker.preview_position(at, **options)


def variables(found: MomentPreview) -> dict[str, str]:
    assert found.place is not None, (found.problem, found.differs)
    return {name: value for name, value in found.place["frames"][0]["locals"].items() if name != "ctx"}


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
def test_each_save_is_previewed_in_a_fresh_process(project: Path) -> None:
    """
    All saves have one size, and come within a second: what is known by second and size would be the old code.
    """
    known, totals = {*sys.modules}, []
    for sign in "+-*":
        (project / "helper.py").write_text(HELPER.replace("+ 0", f"{sign} 3"))
        found = seen()
        totals.append(variables(found)["total"])

    assert ["43", "37", "120"] == totals
    assert ("completed: 50", "completed: 150") == found.ends
    assert {"tally.py", "helper.py"} == {Path(file).name for file in found.files}
    assert "price = yield from call(price_of, item)" in dict(found.lines)[found.place["frames"][0]["line"]]
    assert not [name for name in {*sys.modules} - known if name.startswith("stepengine_agents_")]
    assert not list(project.rglob("*.pyc"))


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_edited_prompt_is_replayed_with_the_recorded_replies(project: Path) -> None:
    (project / "tally.py").write_text(CODE.replace("Be brief.", "Be loud."))
    found = seen()

    assert ("#1", "#3", "#5") == found.changed
    assert ("", "40") == (found.differs, variables(found)["total"])


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(("at", "is_before", "total"), [("#0", False, "0"), ("#5", True, "40")])
@pytest.mark.deep
def test_divergence_is_reported_before_and_after_the_shown_position(
    project: Path, at: str, is_before: bool, total: str
) -> None:
    (project / "tally.py").write_text(
        CODE.replace("call(price_of, item)", 'call(price_of, item.replace("sugar", "salt"))')
    )
    found = seen(at)

    assert ("#4", is_before, total) == (found.differs_at, found.is_before, variables(found)["total"])
    assert '"sugar"   now "salt"' in found.differs
    assert "to go on" not in found.differs


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("        total = worth(price)", lambda found: found.differs),
        ("    return total", lambda found: found.ends[1]),
    ],
    ids=["on the way", "at the end"],
)
@pytest.mark.deep
def test_exception_in_edited_code_is_reported_with_its_line(
    project: Path, line: str, told: Callable[[MomentPreview], str]
) -> None:
    broken = CODE.replace(line, line.replace("=", "= 1 / 0 +").replace("return", "return 1 / 0 +"))
    (project / "tally.py").write_text(broken)
    number = next(n for n, text_ in enumerate(broken.splitlines(), start=1) if "1 / 0" in text_)
    found = seen("#0")

    assert f"raised ZeroDivisionError: division by zero ({project / 'tally.py'}:{number})" in told(found)


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    "made", ["'A' * 300 + str(total)", "['A' * 90] * 9 + [total]", "{'a': 'A' * 300, 'total': total}"]
)
@pytest.mark.deep
def test_changed_end_is_reported_however_late_it_differs(project: Path, made: str) -> None:
    recorded = CODE.replace("return total", f"return {made}").replace(
        'raise RuntimeError("a tool ran")', "return 10 * len(item)"
    )
    (project / "tally.py").write_text(recorded)
    subprocess.run([sys.executable, "-c", RECORD.replace("run.", "long.")], cwd=project, check=True)
    (project / "tally.py").write_text(CODE.replace("return total", f"total += 7\n    return {made}"))
    with closing(Walker(load, Tape(FileJournal("long.jsonl")))) as walker:
        found = walker.preview_position()

    assert ["50", "57"] == [re.findall("[0-9]+", end)[-1] for end in found.ends]
    assert all(len(end) < 250 for end in found.ends)


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_file_watched_under_two_names_is_reported_once(project: Path) -> None:
    watched = WatchedMoment(load, Tape(FileJournal("run.jsonl")), files=lambda: ["tally.py"])
    try:
        watched.reload_and_preview()
        (project / "tally.py").write_text(CODE.replace("+ 0", "+ 1"))
        saved = watched.find_saved_files()
    finally:
        watched.close()

    assert [str(project / "tally.py")] == saved


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_run_that_starts_differently_has_no_position(project: Path) -> None:
    (project / "tally.py").write_text(CODE.replace("    total = 0\n", "    total = 0\n    yield STEP\n"))
    found = seen()

    assert (None, "#0") == (found.place, found.differs_at)


CHILD = """
from stepengine import AgentCall


def lead_steps(ctx):
    for _ in range(BEFORE):
        yield STEP
    return (yield from AgentCall("tally", "tea milk"))


kid, agent = agent, AgentDefinition("lead", model="t/m", spawnable_agents=["tally"], handle_steps=lead_steps)
"""
RECORD_CHILD = RECORD.replace("[agent]", "[agent, tally.kid]").replace("agent = ", "import tally; agent = ")


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.deep
def test_child_that_starts_differently_is_never_shown_as_equal(project: Path, before: int) -> None:
    code = CODE + CHILD.replace("BEFORE", str(before))
    (project / "tally.py").write_text(code.replace('raise RuntimeError("a tool ran")', "return 10 * len(item)"))
    (project / "run.jsonl").unlink()
    subprocess.run([sys.executable, "-c", RECORD_CHILD], cwd=project, check=True)
    (project / "tally.py").write_text(code.replace("call(price_of, item)", "call(price_of, item.upper())"))
    with closing(Walker(load_with_child, Tape(FileJournal("run.jsonl")))) as walker:
        looks = [walker.preview_position(at) for at in ("", f"{before}#0", f"{before}#1", f"{before}#0")]

    assert [f"{before}#0"] * 4 == [found.differs_at for found in looks], [found.problem for found in looks]
    shown = [(None if found.place is None else found.place["address"], found.is_before) for found in looks]
    assert ([("#0", False)] + [("#1", True)] * 3 if before else [(None, True)] * 4) == shown


def load_with_child() -> tuple[Engine, Any]:
    agent = load_agent("tally.py")
    kid = sys.modules[agent.handle_steps.__module__].kid
    return Engine([agent, kid], models=ScriptedModel(lambda _: text("a model was asked"))), agent


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda code: code.replace("for item in", "for item of"), "SyntaxError: invalid syntax (tally.py, line "),
        (lambda code: code + "\nimport os\nos._exit(3)\n", "the agent's code ended the process"),
        (lambda code: code.replace("    return total", "    import os\n    os._exit(3)"), "the agent's code ended the process"),
        (lambda code: code + "\nwhile True:\n    pass\n", "the process was stopped after 1 s"),
    ],
    ids=["syntax", "an end", "an end later", "a loop"],
)  # fmt: skip
@pytest.mark.deep
def test_code_that_cannot_be_replayed_gives_an_error_and_recovers(
    project: Path, change: Callable[[str], str], problem: str
) -> None:
    (project / "tally.py").write_text(change(CODE))
    # What ends by itself has time, also on a machine that does much else.
    broken = seen(seconds=1 if "stopped after" in problem else 30)
    (project / "tally.py").write_text(CODE)

    assert (None, True) == (broken.place, problem in broken.problem), broken.problem
    assert "40" == variables(seen())["total"]


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_files_in_the_folder_of_the_environment_are_watched(project: Path) -> None:
    """
    As with ``python -m venv .`` in a project, or a project below ``/usr``.
    """
    venv.create(project, symlinks=True)
    installed = project / sysconfig.get_path("purelib", vars={"base": "."})
    (installed / "stepengine_env.pth").write_text("\n".join(sys.path[1:]))
    (installed / "library.py").write_text("")
    code = "from stepengine.debugging.edits import is_editable_source; import sys; print([is_editable_source(f) for f in sys.argv[1:]])"
    files = [project / "helper.py", installed / "library.py"]
    ran = subprocess.run([project / "bin/python", "-c", code, *files], capture_output=True, text=True, check=True)

    assert "[True, False]\n" == ran.stdout


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_previewed_code_has_no_network_keys_or_terminal_output(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    probe = """
import os, socket
try:
    socket.create_connection(("127.0.0.1", 9))
except OSError as error:
    reached = str(error)
print("printed")
"""
    (project / "helper.py").write_text(
        f"{probe}\ndef worth(price):\n    return [reached, sorted(set(os.environ) & {{'OPENAI_API_KEY'}})]\n"
    )

    assert "['the debugger allows no network while it evaluates an expression', []]" == variables(seen())["total"]
    assert ("", "") == capfd.readouterr()
    seen(prints=True)
    assert ("", "printed\n") == capfd.readouterr()


MANY_TOOLS = 'tools=[price_of, *[Tool(f"t{n}", "\\U0001f600" * 4_000, {}, price_of) for n in range(100)]]'


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST6")
def test_next_request_above_4_mib_is_not_shown(project: Path) -> None:
    code = CODE.replace("tools=[price_of]", MANY_TOOLS).replace("import STEP,", "import STEP, Tool,")
    (project / "tally.py").write_text(code)
    with closing(WatchedMoment(load, Tape(FileJournal("run.jsonl")))) as watched:
        found = watched.reload_and_find_next_request()

    assert found.request is None
    assert "more than 4,194,304 bytes" in found.why


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_preview_of_a_missing_step_raises(project: Path) -> None:
    with pytest.raises(JournalError, match="step 12 does not exist; the run has"):
        seen("12")
