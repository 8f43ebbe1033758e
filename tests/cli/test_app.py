"""
The commands in process: arguments, what goes to which stream, exit codes. Models are scripted or absent.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import Result

from stepengine import load_agent
from stepengine.cli.app import app
from stepengine.cli.command_table import GROUPS, LISTED, UNDER
from stepengine.testing import text, tool_call
from tests.cli.command import command, typed

pytestmark = pytest.mark.usefixtures("folder")
AGENT = """
from stepengine import *

{body}
"""


def agent_file(body: str, name: str = "mine") -> str:
    Path(f"{name}.py").write_text(AGENT.format(body=body))
    return f"./{name}.py"


def ran(body: str, *options: str) -> Result:
    return typed("run", agent_file(body), *options)


# --- help -----------------------------------------------------------------------------------------------------------


HELPS = {
    **{name: each.load() for commands in GROUPS.values() for name, each in commands.items()},
    **{f"{first} {name}": each.load() for first, (_, several) in UNDER.items() for name, each in several.items()},
}


@functools.cache
def parsed() -> dict[str, Any]:
    """
    Return every command as it is parsed, by its words.
    """
    root: Any = typer.main.get_command(app)
    words = [name.partition(" ") for name in HELPS]
    return {
        f"{first}{space}{last}": root.commands[first].commands[last] if last else root.commands[first]
        for first, space, last in words
    }


def examples(name: str) -> list[tuple[str, list[str]]]:
    """
    Return the examples in the help of a command: the words of the command that each is of, and what is typed behind them.
    """
    text = inspect.cleandoc(HELPS[name].__doc__ or "").replace("\\\n", "")
    found = []
    for line in [line for line in text.splitlines() if line.startswith("  ")]:
        if typed := re.search(rf"(?:^ +|\| )stepengine ((?:(?:{'|'.join(UNDER)}) )?[a-z]+)(.*)", line):
            words = shlex.split(re.split(r"(?<=\S) {3,}(?=[a-z])", typed[2])[0])
            ends = [words.index(mark) for mark in ("|", "--") if mark in words]  # behind `--` is another program
            found.append((typed[1], words[: min(ends, default=len(words))]))
    return found


there = functools.cache(load_agent)


@pytest.mark.parametrize("name", HELPS)
def test_options_and_agents_of_examples_exist(name: str) -> None:
    assert examples(name) or name == "acp", name
    for words, arguments in examples(name):
        options = {option for each in parsed()[words].params for option in each.opts}
        first = next((n for n, word in enumerate(arguments) if word.startswith("-")), len(arguments))
        agents = {"run": arguments[:1], "chat": arguments[:1], "mcp serve": arguments[:first]}.get(words, [])

        assert words == "mcp inspect" or {word for word in arguments if word[:1] == "-" and word != "-"} <= options, (
            arguments
        )
        assert [] == [a for a in agents if not {".", "/"} & {*a} and a[0] != "-" and not there(a)], arguments


def test_no_command_prints_ten_lines_to_start_with() -> None:
    """
    They fit a terminal, and what they name is there; it is no mistake to type nothing.
    """
    result = typed()

    assert (0, "") == (result.exit_code, result.stderr)
    lines = [line for line in result.stdout.splitlines() if line]
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 79
    named = re.findall(r"(?:^ +|`)(?:stepengine )?([a-z]+)[ `]", result.stdout, re.MULTILINE)
    assert (
        {"demo", "init", "config", "run", "agents", "chat", "show", "resume", "replay"}
        <= {*named}
        <= {*LISTED, "stepengine"}
    )


@pytest.mark.parametrize("arguments", [["nope"], ["run"], ["run", "x", "--nope"]])
@pytest.mark.spec("ecosystem:EC140", "ecosystem:EC141")
def test_wrong_usage_is_reported_on_stderr(arguments: list[str]) -> None:
    result = typed(*arguments)

    assert (2, "") == (result.exit_code, result.stdout)
    assert "Error" in result.stderr


def test_the_version_is_an_option_and_no_command() -> None:
    assert typed("--version").stdout.startswith("stepengine ")
    assert typed("--version").stdout == typed("--version", "run").stdout
    assert 2 == typed("version").exit_code


# --- agents ---------------------------------------------------------------------------------------------------------


def test_agents_list_shows_tools_and_source() -> None:
    Path("agents").mkdir()
    agent_file('agent = AgentDefinition("mine", description="Does \\x1b[2J things.")', "agents/mine")
    agent_file("x = 1", "agents/broken")

    result = command("agents", "list")

    assert "code-searcher\n" in result.stdout
    assert "tools   read_files, code_search, str_replace, write_file" in result.stdout
    assert f"source  {Path('agents/mine.py').resolve()}" in result.stdout
    assert r"Does \x1b[2J things." in result.stdout
    assert "broken.py" in result.stderr


def test_agents_as_json_is_one_array() -> None:
    found = {entry["id"]: entry for entry in json.loads(typed("agents", "list", "--json").stdout)}

    assert ["code_search"] == found["code-searcher"]["tools"]
    assert Path(found["editor"]["source"]).is_file()


def test_local_agent_hides_the_bundled_one_of_the_same_id() -> None:
    Path("agents").mkdir()
    agent_file('agent = AgentDefinition("editor")', "agents/editor")

    found = [e for e in json.loads(typed("agents", "list", "--json").stdout) if e["id"] == "editor"]

    assert [None, str(Path("agents/editor.py").resolve())] == [e["hidden_by"] for e in found]


# --- run: results ---------------------------------------------------------------------------------------------------

RETURNS = """
def handle_steps(ctx):
    yield from ()
    return {value}
agent = AgentDefinition("mine", handle_steps=handle_steps)
"""


@pytest.mark.spec("ecosystem:EC141")
def test_the_output_goes_to_stdout_and_progress_to_stderr(scripted: Any) -> None:
    scripted(text("Hello \x1b[2J Ada."))

    result = typed("run", agent_file('agent = AgentDefinition("mine", model="x/y")'), "Say hello")

    assert (0, "Hello \\x1b[2J Ada.\n") == (result.exit_code, result.stdout)
    assert "step 1\n" in result.stderr
    assert "completed | 1 step" in result.stderr


def test_quiet_run_prints_only_the_output() -> None:
    assert ("hi\n", "") == ((r := ran(RETURNS.format(value='"hi"'), "-q")).stdout, r.stderr)


def test_missing_output_prints_nothing() -> None:
    assert "" == ran(RETURNS.format(value="None"), "-q").stdout


@pytest.mark.spec("ecosystem:EC141")
def test_json_prints_exactly_one_object_with_the_whole_result(scripted: Any) -> None:
    scripted(tool_call("add", {"a": 1, "b": 2}), text("3"))
    body = '''
@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b
agent = AgentDefinition("mine", model="x/y", tools=[add])
'''

    result = ran(body, "--json")
    found = json.loads(result.stdout)

    assert ("completed", "3", 2, None) == (found["status"], found["output"], found["steps"], found["error"])
    assert [{"tool": "add", "input": {"a": 1, "b": 2}}] == [
        {k: call[k] for k in ("tool", "input")} for call in found["tool_calls"]
    ]


def test_run_reads_the_prompt_from_stdin(scripted: Any) -> None:
    model = scripted(text("ok"))

    typed("run", agent_file('agent = AgentDefinition("mine", model="x/y")'), "-", input="from a pipe")

    assert "from a pipe" == model.calls[0].messages[0].text


def test_spawnable_agents_are_found_beside_the_file() -> None:
    Path("team").mkdir()
    agent_file(RETURNS.format(value='"from the helper"').replace('"mine"', '"the-helper"'), "team/the_helper")
    body = """
def handle_steps(ctx):
    return (yield from AgentCall("the-helper"))
agent = AgentDefinition("lead", spawnable_agents=["the-helper"], handle_steps=handle_steps)
"""

    result = typed("run", agent_file(body, "team/lead"))

    assert (0, "from the helper\n") == (result.exit_code, result.stdout), result.stderr
    assert "agent the-helper ended: completed" in result.stderr


# --- run: what goes wrong -------------------------------------------------------------------------------------------

USAGE = {
    "unknown agent": (["run", "nobody"], "nobody"),
    "no such file": (["run", "./nobody.py"], "nobody.py"),
    "params are no JSON": (["run", "code_searcher", "--params", "{"], "--params is not JSON"),
    "params name a key twice": (
        ["run", "code_searcher", "--params", '{"a": {"b": 1, "b": 2}}'],
        "an object has a key twice",
    ),
    "params are no object": (["run", "code_searcher", "--params", "[1]"], "not an object"),
    "params of a durable run are too deep": (
        ["deploy", "submit", "x", "--params", "[" * 100_000],
        "--params is not JSON",
    ),
    "params file is missing": (["run", "code_searcher", "--params", "@none.json"], "none.json"),
    "params file is not text": (["run", "code_searcher", "--params", "@binary"], "binary"),
    "params do not fit": (["run", "code_searcher", "--params", '{"search_queries": [{}]}'], "pattern"),
    "params are missing": (["run", "code_searcher"], "search_queries"),
    "editing is not allowed": (["run", "editor", "Do it."], "--write"),
    "no such folder": (["run", "code_searcher", "--cwd", "none"], "none"),
    "no model": (["run", "editor", "Do it.", "--write"], "ANTHROPIC_API_KEY"),
    "no key": (["run", "editor", "Do it.", "--write", "--model", "anthropic/claude-x"], "ANTHROPIC_API_KEY"),
    "unknown provider": (["run", "editor", "Do it.", "--write", "--model", "nope/x"], "nope"),
    "unknown provider of a served agent": (["mcp", "serve", "code_searcher", "--model", "nope/x"], "nope"),
    "no address": (["run", "editor", "Do it.", "--write", "--model", "x", "--base-url", "localhost"], "--base-url"),
}
AS_JSON = ["unknown agent", "no model"]


@pytest.mark.spec("ecosystem:EC141", "ecosystem:EC140", "requirements:G23")
@pytest.mark.parametrize(("name", "options"), [*[(n, []) for n in USAGE], *[(n, ["--json"]) for n in AS_JSON]])
def test_wrong_usage_is_one_message_without_a_traceback(name: str, options: list[str]) -> None:
    Path("binary").write_bytes(b"\xff\xfe\x00")
    arguments, said = USAGE[name]

    result = command(*arguments, *options, code=2)

    assert options or not result.stdout
    assert result.stderr.startswith("stepengine: ")
    assert 1 == result.stderr.count("stepengine: ")
    assert said in result.stderr


@pytest.mark.spec("ecosystem:EC140")
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "mine.py", "--script", ""],
        ["run", "mine.py", "--journal="],
        ["run", "mine.py", "--model", "a/b", "--model", ""],
        ["eval", "evals.py", "--recheck", ""],
        ["mcp", "serve", "mine.py", "--http", ""],
        ["serve", "mine.py", "--quota", ""],
        ["serve", "mine.py", "--host", ""],
        ["deploy", "submit", "mine", "--pool", ""],
    ],
)
def test_an_empty_option_is_wrong_usage(arguments: list[str]) -> None:
    agent_file("agent = AgentDefinition('mine')")

    assert "the value is empty" in command(*arguments, code=2).stderr


@pytest.mark.spec("ecosystem:EC140")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "evals.py", "--agent", "new=a.py", "--agent", "new=b.py"], "--agent is given twice for 'new'"),
        (["run", "editor", "go", "--write", "--model", "a/b", "--model", "c/d"], "--model is given twice; pass"),
        (["run", "editor", "go", "--write", "--model", "editor=a", "--model", "editor=b"], "twice for 'editor'"),
        (["send", "run.jsonl", "--answer", "q1=no", "--answer", "q1=yes"], "--answer is given twice for 'q1'"),
        (["mcp", "inspect", "--env", "A=1", "--env", "A=2", "none"], "--env is given twice for 'A'"),
        (["mcp", "inspect", "http://[::1]:1", "--header", "A:1", "--header", "A:2"], "--header is given twice for 'A'"),
        (
            ["deploy", "worker", "mine.py", *["--max-concurrency", "a=1"] * 2],
            "--max-concurrency is given twice for 'a'",
        ),
        (["serve", "mine.py", *["--quota", "open-runs=7"] * 2], "the quota 'open-runs' is given twice"),
    ],
)
def test_one_name_with_two_values_is_wrong_usage(arguments: list[str], said: str) -> None:
    agent_file("agent = AgentDefinition('mine')")
    Path("evals.py").write_text(
        "from stepengine.evaluation import *\nevaluation = Evaluation('it', agents={}, cases=[Case('one', 'Go', checks=[contains('a')])])"
    )

    assert said in command(*arguments, code=2).stderr


def test_agent_without_model_calls_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPENGINE_MODEL", "anthropic/claude-x")

    assert 0 == ran(RETURNS.format(value="1")).exit_code
    asked = command("run", "editor", "Do it.", "--write", code=2)

    assert "STEPENGINE_MODEL" in asked.stderr
    assert "ANTHROPIC_API_KEY" in asked.stderr


ENDINGS = {
    "raises": ("yield from ()\n    raise ValueError('oh \\x1b[2J no')", 1, r"oh \x1b[2J no"),
    "yields nonsense": ("yield 42", 1, "mine.py"),
    "asks": ("yield Ask('Really?', options=['yes', 'no'])", 3, "Really?"),
    "never stops": pytest.param(
        "while True:\n        yield ToolCall('think_deeply', {'thought': 'x'}, include_tool_call=False)",
        4,
        "1000",
        marks=pytest.mark.deep,
    ),
}


@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.parametrize(("body", "code", "said"), ENDINGS.values(), ids=ENDINGS.keys())
def test_incomplete_run_exits_with_the_code_of_its_ending(body: str, code: int, said: str) -> None:
    result = ran(f'def h(ctx):\n    {body}\nagent = AgentDefinition("mine", handle_steps=h)', "--json")

    assert code == result.exit_code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads(result.stdout)["status"] in ("failed", "suspended", "max_steps")


@pytest.mark.spec("reliability:GN03", "ecosystem:EC141")
@pytest.mark.parametrize("as_json", [False, True])
def test_rejected_construction_names_lines_of_child_and_caller(as_json: bool) -> None:
    Path("team").mkdir()
    child = 'def h(ctx):\n    yield GenerateN(0)  # the child\'s line\nagent = AgentDefinition("kid", handle_steps=h)'
    agent_file(child, "team/kid")
    body = """
def h(ctx):
    yield from AgentCall("kid")  # the lead's line
agent = AgentDefinition("lead", spawnable_agents=["kid"], handle_steps=h)
"""

    result = typed("run", agent_file(body, "team/lead"), "-q", *["--json"] * as_json)

    places = [f"at {place_of('team/kid.py', 'child')}", f"at {place_of('team/lead.py', 'lead')}"]
    assert 1 == result.exit_code
    assert [f"  {place}" for place in places] == result.stderr.splitlines()[1:]
    assert not as_json or places == json.loads(result.stdout)["error"]["notes"]


def place_of(file: str, whose: str) -> str:
    """Return ``file:line`` of the line with the comment about *whose* it is."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if f"# the {whose}'s line" in line)
    return f"{Path(file).resolve()}:{number}"


@pytest.mark.parametrize("mistake", ['agent = AgentDefinition("Bad Id")', "x = GenerateN(0)"])
def test_module_level_error_of_an_agent_file_names_its_line(mistake: str) -> None:
    result = ran(f"{mistake}  # the author's line")

    assert 2 == result.exit_code
    assert place_of("mine.py", "author") in result.stderr


# --- what the system refuses ------------------------------------------------------------------------------------------

SHELL = 'cd "$1" && shift && exec "$0" -m stepengine.cli "$@" '
REFUSING = {
    "the output has no room": (["--version"], ">/dev/full", 1, "No space left on device"),
    "a result has no room": (["run", "./mine.py", "--json", "-q"], ">/dev/full", 1, "No space left on device"),
    "stderr is closed": pytest.param(["run", "./mine.py"], "2>&-", 0, "", marks=pytest.mark.deep),
    "stderr has no room": pytest.param(["run", "./mine.py"], "2>/dev/full", 0, "", marks=pytest.mark.deep),
    "all streams are closed": (["run", "./mine.py"], "<&- >&- 2>&-", 0, ""),
    "the working directory is gone": (["run", "code_searcher"], "", 2, "the working directory was deleted"),
}


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "redirected", "code", "said"), REFUSING.values(), ids=REFUSING.keys())
def test_system_error_is_one_line_with_a_documented_exit_code(
    tmp_path: Path, arguments: list[str], redirected: str, code: int, said: str
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(AGENT.format(body=RETURNS.format(value="'done'")), encoding="utf-8")
    script = SHELL.replace("&& shift", '&& rm -r "$1" && shift') if code == 2 else SHELL

    done = subprocess.run(
        ["/bin/sh", "-c", script + redirected, sys.executable, str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )

    assert code == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert (1 if said else 0) == len(done.stderr.splitlines())


# --- who is asked -----------------------------------------------------------------------------------------------------

WRITES = """
def handle_steps(ctx):
    result = yield ToolCall("write_file", {"path": "a.txt", "content": "a"})
    return result.tool_result.status

agent = AgentDefinition("mine", tools=["write_file"], handle_steps=handle_steps)
"""


class Screen(io.StringIO):
    """
    A terminal.
    """

    def isatty(self) -> bool:
        return True


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:M17", "requirements:X55")
@pytest.mark.parametrize(
    ("stdin", "stderr", "options", "status"),
    [
        (Screen, Screen, [], "ok"),
        (Screen, Screen, ["-q"], "ok"),
        (Screen, Screen, ["-q", "--json"], "ok"),
        (Screen, io.StringIO, [], "denied"),
        (io.StringIO, Screen, [], "denied"),
        (io.StringIO, io.StringIO, ["-q"], "denied"),
    ],
)
def test_run_asks_for_approval_only_at_a_visible_terminal(
    stdin: Any, stderr: Any, options: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Its result goes to stdout, which is captured in all of these.
    """
    Path("asking.toml").write_text('[permissions]\nmode = "default"\n')
    said = {"stdin": stdin("y\n"), "stdout": io.StringIO(), "stderr": stderr()}
    for name, stream in said.items():
        monkeypatch.setattr(sys, name, stream)
    arguments = ["run", agent_file(WRITES), "--write", "--config", "asking.toml", *options]
    app(arguments, standalone_mode=False)
    output = said["stdout"].getvalue()

    assert status == (json.loads(output)["output"] if "--json" in options else output.strip())
    assert (status == "ok") == Path("a.txt").exists() == ("| +a" in said["stderr"].getvalue())


def test_id_equal_to_a_file_name_suggests_that_file() -> None:
    agent_file('agent = AgentDefinition("ok", model="t/m")', "ok")
    result = command("run", "ok", "hi", code=2)

    assert "did you mean ./ok.py?" in " ".join(result.stderr.split())
