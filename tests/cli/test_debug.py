"""
`stepengine debug` as people use it: commands in a terminal, from a pipe and from `--exec`, in processes that it forks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import Engine, load_agent
from stepengine.cli.app import app
from stepengine.errors import ModelError
from stepengine.journal import FileJournal, diff
from stepengine.testing import ScriptedModel, failure, text
from tests import forked_processes
from tests.cli.recordings import copy_recording, recording
from tests.evaluation.runs import KEY
from tests.phrases import FROM_RESULT

from .terminal import Person, people

pytestmark = pytest.mark.usefixtures("forks")
PROGRAM = [sys.executable, "-m", "stepengine.cli"]
AGENT = '''
import time

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Hooks, Change, Parallel, ToolCall, call, retry, tool


@tool
def read(path: str) -> str:
    """Read."""
    return "text of " + path


def inner(number):
    got = yield from call(read, f"a{number}")
    return got


def handle_child(ctx):
    mine = []
    for number in range(3):
        mine.append((yield from call(read, f"{ctx.prompt}{number}")))
    return mine


def noted(ctx):
    return Change(context={"noted": True})


child = AgentDefinition("child", tools=[read], handle_steps=handle_child)


def handle_steps(ctx):
    seen, token = [], "sword" + "fish"
    for number in range(3):
        yield STEP
        EXTRA
        seen.append((yield from retry(lambda: inner(number))))
    left, right = yield from Parallel(AgentCall(child, "x"), AgentCall(child, "y"))
    answer = yield from Ask("Ship it?")
    return {"seen": len(seen), "answer": answer}


agent = AgentDefinition(
    "worker", model="openai/m", tools=[read], spawnable_agents=[child], handle_steps=handle_steps, hooks=Hooks(pre_step=[noted])
)
'''
WAYS = [pytest.param("fork", marks=pytest.mark.deep), "paused"]
"""Forks have processes of their own, which take their time; one test of them is among the fast ones."""


def write(folder: Path, extra: str = "pass", **changes: str) -> None:
    code = AGENT.replace("EXTRA", extra)
    for old, new in changes.items():
        code = code.replace(old, new)
    if (folder / "worker.py").exists():
        (folder / "edited").touch()
    (folder / "worker.py").write_text(code)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with a run of the agent.
    """
    folder = tmp_path_factory.mktemp("recorded")
    with recording(folder):
        write(Path())
        agent = load_agent("worker.py")
        with Engine([agent], models=ScriptedModel([text(f"reply {n}") for n in range(3)])) as engine:
            engine.run_sync(agent, "go", journal="run.jsonl")
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    copy_recording(recorded, tmp_path)
    return tmp_path


def debug(
    folder: Path, *commands: str, options: tuple[str, ...] = (), way: str = "fork", keys: str | None = None
) -> Any:
    """
    Run the command: in a process of its own where it forks others, which a process with threads cannot, and where the
    agent was edited, which this one has loaded.
    """
    given = [each for command in commands for each in ("--exec", command)]
    arguments = ["debug", "run.jsonl", "--agent", "worker.py", *given, *options]
    if way == "paused" and keys is None and not (folder / "edited").exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("COLUMNS", "120")
            done = CliRunner().invoke(app, [*arguments, "--no-fork"])
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
    return forked_processes.run(
        [*PROGRAM, *arguments, *(["--no-fork"] if way == "paused" else [])],
        cwd=folder, capture_output=True, text=True, timeout=50, check=False, input=keys or "",
        env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip


def objects(folder: Path, *commands: str, way: str = "fork") -> list[dict[str, Any]]:
    done = debug(folder, *commands, options=("--json",), way=way)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG20", "evaluation:JG34", "evaluation:JG87")
@pytest.mark.parametrize("way", WAYS)
def test_debugger_moves_both_ways_and_shows_variables_of_each_position(folder: Path, way: str) -> None:
    commands = [
        "first",
        "next",
        "next 2",
        "back",
        "step",
        "unstep 2",
        "goto 3",
        "goto #5",
        "goto 7#1",
        "last",
        "goto 1",
    ]
    found = objects(folder, *commands, way=way)
    numbers = [moment["frames"][0]["locals"].get("number") for moment in found]

    assert ["#0", "#1", "#3", "#2", "#4", "#0", "#4", "#5", "7#1", "#8", "#0"] == [
        moment["address"] for moment in found
    ]
    assert ["0", "0", "1", "1", "2", "0", "2", "2", "1", "2", "0"] == numbers
    assert "stepengine.debug/1" == found[0]["format"]
    assert ("Ship it?", None) == (found[9]["asked"], found[9]["outcome"])
    assert [0, 9] == [found[0]["position"], found[8]["position"]]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG22")
@pytest.mark.parametrize("way", WAYS)
def test_until_finds_lines_tools_and_expressions_both_ways(folder: Path, way: str) -> None:
    line = next(n for n, text in enumerate((folder / "worker.py").read_text().splitlines(), 1) if "yield STEP" in text)
    cases = {
        f"until {line}": "#2",
        f"until worker.py:{line}": "#2",
        "until @read": "#1",
        "until len(seen) == 2": "#4",
        "until seen.append(1) or number == 2": "#4",
    }
    for command, address in cases.items():
        found, listed = objects(folder, command, "print len(seen)", way=way)

        assert (command, address) == (command, found["address"])
        assert str(found["frames"][0]["locals"]["seen"].count("text")) == listed["text"]
    went, back, never, end = objects(folder, "last", "rback number == 1", "until nothing == 1", way=way)

    assert ("#8", "#3", "#8") == (went["address"], back["address"], end["address"])
    assert "is true at none of the 5 positions searched" in never["error"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("start", "search"), [("#1", "until @read"), ("#3", "rback @read"), ("#1", "until nothing")])
def test_search_selects_the_outermost_frame_of_its_position(folder: Path, way: str, start: str, search: str) -> None:
    told = objects(folder, f"goto {start}", "down", "locals", search, "locals", way=way)
    inner, outer = [each["locals"] for each in told if "locals" in each]

    assert "seen" not in inner
    assert "seen" in outer


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG20")
def test_stepping_in_a_child_counts_only_its_positions(folder: Path) -> None:
    found = objects(folder, "into 7", "next", "next", "back 2", "out", "next", way="paused")

    assert ["7#0", "7#1", "7#2", "7#0", None, "6#1"] == [moment.get("address") for moment in found]
    assert "no run has the path '99'; known paths: 6, 7" in objects(folder, "into 99", way="paused")[0]["error"]
    over, before, *_, after = objects(folder, "last", "into 7", "back", "next 2", "next", way="paused")[1:]

    assert "7#0" == over["address"]
    assert "this is the first position of the run 7; `out` follows all runs again" == before["error"]
    assert "this is the last position of the run 7; `out` follows all runs again" == after["error"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG20", "evaluation:JG30", "evaluation:JG32", "evaluation:JG13")
@pytest.mark.parametrize("way", WAYS)
def test_printing_an_expression_changes_nothing_and_shows_no_secret(folder: Path, way: str) -> None:
    commands = [
        "print [number for _ in seen]",
        "print seen.append(9) or seen",
        "print len(seen)",
        "p 1/0",
        "p x = 1",
        "locals",
    ]
    listed, changed, after, raised, refused, values = objects(folder, "goto 2", *commands, way=way)[1:]

    assert ("[1]", "['text of a0', 9]", "1") == (listed["text"], changed["text"], after["text"])
    assert "ZeroDivisionError: division by zero" == raised["text"]
    assert "the debugger runs no statements" in refused["error"]
    assert "<redacted>" == values["locals"]["token"]
    assert "swordfish" not in debug(folder, "goto 2", "locals", way=way).stdout


@pytest.mark.spec("evaluation:JG12", "evaluation:JG30")
@pytest.mark.parametrize("way", WAYS)
def test_script_with_a_failing_expression_continues_and_exits_with_1(folder: Path, way: str) -> None:
    raised = debug(folder, "goto 2", "p unknown", "pp unknown", "p number", options=("--json",), way=way)
    fine = debug(folder, "goto 2", "p number", way=way)
    told = [json.loads(line) for line in raised.stdout.splitlines()][1:]

    assert (1, 0) == (raised.returncode, fine.returncode)
    assert [True, True, False] == [each["raised"] for each in told]
    assert ["NameError: name 'unknown' is not defined"] * 2 + ["1"] == [each["text"] for each in told]


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG30")
def test_hanging_or_flooding_expression_is_stopped(folder: Path) -> None:
    hang, flood, net, left = objects(
        folder,
        "goto 2",
        "p __import__('time').sleep(60)",
        "p 'x' * 10**8",
        "p __import__('socket').create_connection(('127.0.0.1', 9))",
        "p number",
    )[1:]

    assert "no result within 2 s" in hang["text"]
    assert len(flood["text"]) < 70_000
    assert "the debugger allows no network" in net["text"]
    assert "1" == left["text"]


@pytest.mark.spec("evaluation:JG20")
@pytest.mark.parametrize("way", WAYS)
def test_where_hooks_request_and_diff_describe_the_position(folder: Path, way: str) -> None:
    where, down, hooks, request, differs, still = (
        objects(folder, "goto #3", "where", "down", "goto 2", "hooks", "request", "diff 1 3", "print number", way=way)[
            1:
        ][0:2]
        + objects(folder, "goto 2", "hooks", "request", "diff 1 3", "print number", way=way)[1:]
    )

    assert ["handle_steps", "inner"] == [frame["function"] for frame in where["frames"]]
    assert "yield from call(read" in down["source"]
    assert ["pre_step", "noted"] in [called[:2] for called in hooks["hooks"]]
    assert any("reply 0" in line for line in request["messages"])
    assert {"~ number 0 -> 2", "+ context noted True"} & set(differs["diff"]) == {"~ number 0 -> 2"}
    assert [line for line in differs["diff"] if line.startswith("+ message")]
    assert "1" == still["text"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("provenance:PV13")
def test_origins_of_arguments_and_values_are_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{'f"a{number}"': 'f"a{number}" if number else "go"', 'AgentCall(child, "y")': f"AgentCall(child, {KEY!r})"},
    )
    agent = load_agent(tmp_path / "worker.py")
    with Engine([agent], models=ScriptedModel([text(f"reply {n}") for n in range(3)])) as engine:
        engine.run_sync(agent, "go", journal=tmp_path / "run.jsonl")

    answers = objects(
        tmp_path, "origins", "goto #1", "origins", "goto #3", "origins", "goto #7", "origins", "origins a1", "origins z9",
        way="paused",
    )  # fmt: skip
    none, mine, handlers, child, value, missing = [answer["origins"] for answer in answers if "origins" in answer]

    assert [] == none == missing
    assert ["path go: from your request"] == mine
    assert ["path a1: written by the model; not in your request"] == handlers
    assert child[0].startswith("prompt <redacted:")
    assert f"{FROM_RESULT} read('a1') in step 2" in value
    assert "there is no call with arguments here" in debug(tmp_path, "origins", way="paused").stdout
    assert KEY not in debug(tmp_path, "goto #7", "origins", way="paused").stdout


@pytest.mark.spec("evaluation:JG20")
def test_results_and_failures_are_shown_in_full(folder: Path) -> None:
    (folder / "run.jsonl").unlink()
    agent = load_agent(folder / "worker.py")
    said = "there is no such place: " + "far away, " * 40
    with Engine([agent], models=ScriptedModel([failure(ModelError(f"{said}\x1b[2J"))])) as engine:
        engine.run_sync(agent, "go", journal=folder / "run.jsonl")

    result, reply = objects(folder, "result", "reply", way="paused")

    assert [f"ModelError: {said}\\x1b[2J"] == result["result"] == reply["result"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG28", "evaluation:JG5")
@pytest.mark.parametrize("way", WAYS)
def test_fork_with_another_result_becomes_current_until_parent(folder: Path, way: str) -> None:
    (folder / "replies.yaml").write_text("- again\n- and again\n")
    before = (folder / "run.jsonl").read_bytes()
    forked, stood, seen, back = objects(
        folder,
        "goto #3",
        "fork --result gone --script replies.yaml --allow-repeat",
        "last",
        "print seen",
        "parent",
        way=way,
    )[1:]

    assert ("run-1.jsonl", "#3", "suspended") == (forked["journal"], forked["at"], forked["status"])
    assert "Ship it?" == stood["asked"]
    assert "['text of a0', 'gone', 'text of a2']" == seen["text"]
    assert "#3" == back["address"]
    assert before == (folder / "run.jsonl").read_bytes()
    assert diff(FileJournal(folder / "run.jsonl"), FileJournal(folder / "run-1.jsonl"))


@pytest.mark.spec("evaluation:JG28", "evaluation:JG86")
def test_live_fork_estimates_the_cost_of_the_remaining_run(folder: Path) -> None:
    (folder / "run.jsonl").unlink()
    agent = load_agent(folder / "worker.py")
    with Engine([agent], models=ScriptedModel([text("reply", cost="0.01") for _ in range(3)])) as engine:
        engine.run_sync(agent, "go", journal=folder / "run.jsonl")

    *_, second, in_child = objects(
        folder, "goto 2", "fork --live --into a.jsonl", "goto 6#1", "fork --live --into b.jsonl", way="paused"
    )[1::2]

    assert "about $0.0200 to $0.0400" in second["error"]
    assert "about $0.0000 to $0.0000" in in_child["error"]


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG12", "evaluation:JG20", "evaluation:JG38", "evaluation:JG119")
@pytest.mark.parametrize("way", WAYS)
def test_debugger_exit_code_reflects_the_commands(folder: Path, way: str) -> None:
    near = debug(folder, "prnit 1", way=way)
    far = debug(folder, "goto 99", "print number", way=way)

    assert (1, 1, 0) == (near.returncode, far.returncode, debug(folder, "print 1", way=way).returncode)
    assert "did you mean 'print'?" in near.stderr
    assert "the run has 3 steps" in far.stderr
    assert "0" == far.stdout.splitlines()[-1]
    write(folder, **{'f"a{number}"': '"b" if number == 2 else f"a{number}"'})
    line = next(n for n, text in enumerate((folder / "worker.py").read_text().splitlines(), 1) if '"b" if' in text)
    edited = debug(folder, "goto 2", "goto 6#1", "print number", way=way)

    assert 5 == edited.returncode
    assert "/input/path" in edited.stderr
    assert f"worker.py:{line}" in edited.stderr
    assert "2" == edited.stdout.splitlines()[-1]
    assert 5 == debug(folder, options=("--at", "6#1"), way=way).returncode
    looked = debug(folder, "until str(number).strip() == '7'", "print number", way=way)

    assert (5, "2") == (looked.returncode, looked.stdout.splitlines()[-1])
    assert f"worker.py:{line}" in looked.stderr
    (folder / "run.jsonl").write_text("{}\n")

    damaged = debug(folder, "first", way=way)

    assert (2, "") == (damaged.returncode, damaged.stdout)
    assert "Traceback" not in edited.stderr + damaged.stderr


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG33")
def test_commands_are_read_from_a_pipe_and_quiet_hides_prints(folder: Path) -> None:
    write(folder, extra='print("HANDLER", number)')
    loud = debug(folder, keys="goto 3\nback\np number\n")
    hushed = debug(folder, keys="goto 3\nback\np number\nquit\nfoo\n", options=("--quiet",))

    assert (0, 0) == (loud.returncode, hushed.returncode)
    assert "code between yields runs again; recorded effects do not" in loud.stdout
    assert "HANDLER 1" in loud.stdout
    assert "HANDLER" not in hushed.stdout.replace('"HANDLER"', "")
    assert "1" == hushed.stdout.splitlines()[-1]
    assert "foo" not in hushed.stderr


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG12", "evaluation:JG33")
@pytest.mark.parametrize("way", WAYS)
def test_handler_output_stays_out_of_json_and_quiet_output(folder: Path, way: str) -> None:
    write(folder, extra='print("HANDLER", number, flush=True)')
    commands = ("goto 3", "until len(seen).real == 9", "rback number == 1", "fork --allow-repeat")
    told = debug(folder, *commands, options=("--json",), way=way)
    hushed = debug(folder, *commands, options=("--quiet",), way=way)

    addresses = [json.loads(line).get("address") for line in told.stdout.splitlines()]
    assert ["#4", None, "#8", "#3", None] == addresses
    assert "HANDLER 1" in told.stderr
    assert "HANDLER " not in (hushed.stdout + hushed.stderr).replace('"HANDLER",', "")


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG36")
@pytest.mark.parametrize("way", WAYS)
def test_breakpoint_opens_the_loop_and_is_skipped_while_seeking(folder: Path, way: str) -> None:
    write(folder, extra="breakpoint()")
    stopped, there, refused, shown, _ = objects(
        folder, "next", "print number", "next", "continue", "print seen", way=way
    )

    assert ("handle_steps", "0") == (stopped["breakpoint"], there["text"])
    assert "the handler is stopped at a breakpoint" in refused["error"]
    assert "#1" == shown["address"]
    assert ["#4"] == [moment["address"] for moment in objects(folder, "goto 3", way=way)]


class Terminal(Person):
    """
    A person at a terminal of 100 columns.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__([*PROGRAM, *arguments], folder, columns=100, environment={"TERM": "xterm"})

    def interrupts(self) -> None:
        """
        Press Ctrl-C until that is seen: readline misses one that comes while it sets itself up.
        """
        for _ in range(30):
            self.types("\x03")
            if select.select([self.keyboard], [], [], 1)[0]:
                break
        self.sees("interrupted")


@pytest.fixture
def terminal(folder: Path) -> Iterator[Any]:
    with people(partial(Terminal, folder)) as sits:
        yield sits


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG33", "evaluation:JG34", "evaluation:JG20")
@pytest.mark.parametrize("way", ["fork", "paused"])
def test_terminal_session_goes_back_and_survives_ctrl_c(terminal: Any, folder: Path, way: str) -> None:
    write(folder, extra="time.sleep(60 if number == 9 else 0)")
    here = terminal("debug", "run.jsonl", "--agent", "worker.py", *(["--no-fork"] if way == "paused" else []))
    here.sees(f"snapshots: {way}", "recorded effects do not", "`help` lists", "step 1 of 3", "(step 1) ")
    here.types("goto 3\n")
    here.sees("step 3 of 3", "> ", "yield STEP", "(step 3) ")
    here.types("back 2\n")
    here.sees("(step 2) ")
    here.types("p number\n")
    here.sees("1", "(step 2) ")
    here.interrupts()
    here.sees("(step 2) ")
    here.types("p number + 41\n")
    here.sees("42", "(step 2) ")
    here.types("\x04")

    assert 0 == here.leaves()


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG33", "evaluation:JG22")
@pytest.mark.parametrize("way", ["fork", "paused"])
def test_ctrl_c_stops_a_long_search_and_keeps_the_position(terminal: Any, folder: Path, way: str) -> None:
    here = terminal("debug", "run.jsonl", "--agent", "worker.py", *(["--no-fork"] if way == "paused" else []))
    here.sees("(step 1) ")
    here.types("until [time.sleep(30)]\n" if way == "paused" else "until time.sleep(30)\n")
    assert not select.select([here.keyboard], [], [], 0.1)[1]
    here.sees("until")
    here.process.poll()
    import time

    time.sleep(1)
    here.interrupts()
    here.sees("(step 1) ")
    here.types("p number\nq\n")
    here.sees("0")

    assert 0 == here.leaves()


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG36")
def test_replay_with_pdb_opens_at_the_divergence(terminal: Any, folder: Path) -> None:
    write(folder, **{'f"a{number}"': '"b" if number == 1 else f"a{number}"'})
    here = terminal("replay", "run.jsonl", "--agent", "worker.py", "--pdb")
    here.sees("diverged", "/input/path", "(step 2) ")
    here.types("recorded\n")
    here.sees("/input/path", "a1", "(step 2) ")
    here.types("asked\n")
    here.sees("/input/path", "b", "(step 2) ")
    here.types("p number\n")
    here.sees("1", "(step 2) ")
    here.types("next\n")
    here.sees("diverges from its record here", "(step 2) ")
    here.types("q\n")

    assert 5 == here.leaves()
    done = forked_processes.run(
        [*PROGRAM, "replay", "run.jsonl", "--agent", "worker.py", "--pdb"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (2, True) == (done.returncode, "needs a terminal" in done.stderr)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG28", "evaluation:JG111")
def test_fork_answers_on_a_copy_and_rejects_repeated_calls(folder: Path) -> None:
    asked, answered, ended = objects(folder, "last", "fork --result yes", "print 1", "state")[0:3]
    refused, live, unknown = objects(
        folder, "goto 2", "fork --into a.jsonl", "fork --live --allow-repeat --into b.jsonl", "fork --nothing"
    )[1:]

    assert "Ship it?" == asked["asked"]
    assert "completed" == answered["status"]
    assert "1" == ended["text"]
    assert "may happen again" in refused["error"]
    assert "this needs your approval, and there is no terminal" in live["error"]
    assert "fork has no option '--nothing'" in unknown["error"]


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG36")
def test_breakpoint_without_a_terminal_is_ignored_with_one_warning(folder: Path) -> None:
    write(folder, extra="breakpoint()")
    done = debug(folder, keys="next\nnext\nnext\np number\n")

    assert (0, 1) == (done.returncode, done.stderr.count("breakpoint() is ignored"))
    assert "1" == done.stdout.splitlines()[-1]


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG22", "evaluation:JG30")
def test_expression_that_changes_the_run_is_rejected_and_undone(folder: Path) -> None:
    broken, still, went = objects(
        folder, "until inner.__globals__.update(call=None)", "print number", "until len(seen) == 2"
    )

    assert "changes the run, so it cannot be searched for" in broken["error"]
    assert ("0", "#4") == (still["text"], went["address"])
