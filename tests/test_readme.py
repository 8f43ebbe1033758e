"""
What README and the pages next to it say is so: their Python runs, the commands exist, the tables name what is there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import stepengine
from stepengine import load_agents
from stepengine.cli.app import app
from stepengine.cli.commands import ask, run
from stepengine.cli.exits import Exit
from stepengine.cli.options import parse_json_params
from stepengine.data.yields import YIELDABLES
from tests.servers import Quiet, served

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
GUIDE = (ROOT / "docs" / "writing-an-agent.md").read_text(encoding="utf-8")
BUNDLED = (ROOT / "docs" / "bundled.md").read_text(encoding="utf-8")
TERMINAL = (ROOT / "docs" / "running-agents.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
SHELL = [code for kind, code in BLOCKS if kind == "sh"]
COMMANDS = [
    line
    for code in re.findall(r"^```console\n(.*?)^```$", TERMINAL, re.DOTALL | re.MULTILINE)
    for line in code.splitlines()
]

IN_GUIDE = [m[1] for m in re.finditer(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)]
IN_BUNDLED = [m[1] for m in re.finditer(r"^```python\n(.*?)^```$", BUNDLED, re.DOTALL | re.MULTILINE)]
RULES = re.findall(r"^```toml\n.*?^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize(
    "code",
    [*PYTHON, *IN_GUIDE, *IN_BUNDLED],
    ids=[
        f"{page} {i}"
        for page, blocks in (("README", PYTHON), ("guide", IN_GUIDE), ("bundled", IN_BUNDLED))
        for i in range(len(blocks))
    ],
)
def test_every_python_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each without network and keys, and on its own, in a folder that holds what a reader has saved and no more.
    """
    monkeypatch.chdir(tmp_path)
    if "todo_fixer.py" in code:
        (tmp_path / "todo_fixer.py").write_text(PYTHON[0], encoding="utf-8")

    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


class Chat(Quiet):
    """
    A server that says what the test has written down, one reply a request.
    """

    replies: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        said = self.replies[min(len(self.asked), len(self.replies)) - 1]
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
        reason = "tool_calls" if "tool_calls" in said else "stop"
        chunk = {
            "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": usage,
            "choices": [{"index": 0, "delta": {"role": "assistant", **said}, "finish_reason": reason}],
        }  # fmt: skip
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())


def says(text: str, **call: Any) -> dict[str, Any]:
    """
    A reply, with a call of `str_replace` where one is given.
    """
    function = {"name": "str_replace", "arguments": json.dumps(call)}
    made = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
    return {"content": text, **({"tool_calls": made} if call else {})}


TODO = "# TODO: two"
REPAIR = says("", path="shop.py", replacements=[{"old_string": f"1  {TODO}", "new_string": "2"}])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("replies", "asked", "line"),
    [
        ([says("It looks fine."), REPAIR, says("Now it is two.")], 3, "x = 2\n"),
        ([REPAIR, says("Now it is two.")], 2, "x = 2\n"),
        ([says("It looks fine.")], 3, f"x = 1  {TODO}\n"),
    ],
    ids=["sent back", "done at once", "never does it"],
)
def test_the_first_agent_runs_by_its_shown_command(
    replies: list[dict[str, Any]], asked: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Saved under the name that stands there, beside another file with the same mark, by the command that stands there; it ends by
    itself, far below the ceiling of steps.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Chat, "replies", replies)
    monkeypatch.setattr(Chat, "asked", [])
    (file,) = re.search(r"[Ss]ave it as `(\w+\.py)`", README).groups()  # type: ignore[union-attr]
    (command,) = re.findall(r"^(stepengine run .*) --script replies\.json$", SHELL[2], re.MULTILINE)
    Path(file).write_text(PYTHON[0], encoding="utf-8")
    Path("other.py").write_text(f"y = 1  {TODO}\n", encoding="utf-8")
    Path("shop.py").write_text(f"x = 1  {TODO}\n", encoding="utf-8")

    with served(Chat) as url:
        typed = [
            *shlex.split(command)[1:],
            "--model",
            "played",
            "--base-url",
            f"{url}/v1",
            "--max-steps",
            "8",
            "--json",
        ]
        result = CliRunner().invoke(app, typed)

    assert 0 == result.exit_code, result.output
    told = json.loads(result.stdout)
    assert "completed" == told["status"]
    assert replies[-1]["content"] == told["output"]
    assert asked == len(Chat.asked) == told["steps"]
    assert line == Path("shop.py").read_text(encoding="utf-8")
    assert TODO in json.dumps(Chat.asked[0]["messages"])  # the file was read before any model was asked
    sent_back = [m for m in Chat.asked[-1]["messages"] if "There are TODOs left." in str(m["content"])]
    assert len(sent_back) == (2 if asked == 3 and len(replies) == 1 else len(replies) - 2)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST12")
def test_the_first_screen_runs_without_a_key(tmp_path: Path) -> None:
    """
    The agent is saved under the name on the page, and a shell runs the block below it.
    """
    (file,) = re.search(r"[Ss]ave it as `(\w+\.py)`", README).groups()  # type: ignore[union-attr]
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / file).write_text(PYTHON[0], encoding="utf-8")
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}

    done = subprocess.run(
        ["sh", "-e", "-c", SHELL[2]], check=False, capture_output=True, text=True, cwd=project, env=env, timeout=60
    )

    assert (0, "It is 2 now.\n") == (done.returncode, done.stdout), done.stderr
    assert "price = 2\n" == (project / "shop.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    ``run`` and ``ask`` are replaced after their options were read; the params are JSON that fits the agent.
    """
    seen: list[Any] = []
    monkeypatch.setattr(run, "_run_and_record_agent", lambda options, _: seen.append(options) or Exit.COMPLETED)
    monkeypatch.setattr(ask, "run_agent_to_end", lambda *_: None)
    monkeypatch.setattr(ask, "_print_result", lambda *_, **__: Exit.COMPLETED)

    result = CliRunner().invoke(app, shlex.split(line)[1:])

    assert 0 == result.exit_code, result.output
    for options in seen:
        from stepengine.engine import load_agent

        load_agent(options.agent)
        parse_json_params(options.params)


def test_the_list_of_exit_codes_is_complete() -> None:
    listed = REFERENCE.partition("## Exit codes\n")[2].partition("\n## ")[0]
    codes = [int(code) for code in re.findall(r"^(\d+) ", listed, re.MULTILINE)]

    assert sorted(Exit) == sorted(codes)


def test_the_table_of_yieldables_is_complete() -> None:
    table = README.partition("| yieldable |")[2].partition("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))

    assert {"STEP", "STEP_ALL"} <= named
    assert {kind.__name__ for kind in YIELDABLES} - {"Sentinel"} == named - {"STEP", "STEP_ALL"}
    assert all(hasattr(stepengine, name) for name in named)


def test_the_tables_name_exactly_the_existing_tools(tmp_path: Path) -> None:
    from stepengine.tools.agent_tools import BUILT_IN
    from stepengine.tools.bundled import FileChangeHook, change_hook_tools, child_tools, shell_tools, sleep_tool
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    tables = BUNDLED.partition("## Agents")[0]
    cells = [row.split("|")[-2] for row in tables.splitlines() if row.startswith("|")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    hooks = change_hook_tools(tmp_path, [FileChangeHook("check", ["true"])])
    tools = {
        t.spec.name
        for t in [
            *list_all_workspace_tools(tmp_path),
            *hooks,
            *child_tools(),
            sleep_tool(),
            *shell_tools(tmp_path, watch=True),
        ]
    }

    assert {*tools, *BUILT_IN} == named


def test_the_table_names_exactly_the_shipped_agents() -> None:
    table = BUNDLED.partition("| agents | what they do |")[2].partition("\n\n")[0]

    assert sorted(re.findall(r"`([a-z0-9-]+)`", table)) == sorted(a.id for a in load_agents(ROOT / "agents"))


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_files_that_are_linked_exist(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


def test_every_page_is_reachable_from_the_readme() -> None:
    """
    Generated parts of a site have an index of their own.
    """
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/index.md"}
    named = set(re.findall(r"\]\((docs/[^)#]+\.md)\)", README))
    further = {f"docs/{link}" for page in named for link in re.findall(r"\]\(([\w-]+\.md)", (ROOT / page).read_text())}

    assert pages <= named | further


def test_the_install_page_lists_exactly_the_extras() -> None:
    """
    What only work on the package itself needs, and empty extras, are told elsewhere.
    """
    from stepengine.testing.installation_checks import DEVELOPMENT

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)`", page.partition("| extra | adds |")[2], re.MULTILINE)

    assert sorted(set(extras) - {*DEVELOPMENT, "anthropic", "openai", "google"}) == named


def test_importing_on_a_non_posix_system_names_the_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")

    with pytest.raises(ImportError, match=r"needs a POSIX system .* run it in WSL"):
        stepengine.__getattr__("Engine")


def test_no_code_block_is_missed() -> None:
    """
    Every fence of these pages opens or closes a block that was found.
    """
    assert 2 * len(BLOCKS) == README.count("```")
    assert 2 * (len(IN_GUIDE) + len(RULES)) == GUIDE.count("```")
    assert 2 * len(IN_BUNDLED) == BUNDLED.count("```")
    assert 2 == TERMINAL.count("```")
