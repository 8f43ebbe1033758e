"""
Folders with an agent file, journals of it, and scripted models that stand in for the ones of providers.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine import Engine, load_agent
from stepengine.cli.app import app
from stepengine.engine import trust
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel

SHOP = """
from stepengine import *

def looked(given):
    with open("looked.txt", "a") as file:
        file.write(given["shelf"] + "\\n")
    return f"three on {given['shelf']}"

def counted(given):
    return f"counted {given['shelf']}"

schema = {"type": "object", "properties": {"shelf": {"type": "string"}}, "required": ["shelf"]}
look = Tool(name="look", description="Look at a shelf.", input_schema=schema, run=looked)
count = Tool(name="count", description="Count what is there.", input_schema=schema, run=counted)
agent = AgentDefinition("shop", model="t/m", tools=[look, count])
"""
"""Writes down each real call of `look`: nothing that judges may add a line."""

BOOK = '''
from stepengine.testing import text, tool_call, tool_calls

def replies(request):
    """Look, count, tell; with another text of the tool, three customers are counted first, and one gets another shelf."""
    customer = next(m.text for m in request.messages if m.role == "user")
    done = [m.tool_name for m in request.messages if m.role == "tool"]
    closely = "closely" in request.tools[0].description
    first, second = ("count", "look") if closely and customer in ("c0", "c1", "c2") else ("look", "count")
    shelf = "another" if closely and customer == "c3" else customer
    if len(done) == 2:
        return text("three", cost="0.02")
    return tool_call(first if not done else second, {"shelf": shelf}, cost="0.015" if closely else "0.01")
'''


@pytest.fixture(autouse=True)
def folders_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The folders of these tests were made by them, as those of the command line's.
    """
    monkeypatch.setattr(trust, "is_trusted", lambda folder: True)


class Folder:
    """
    Somebody's project: what they write, the runs that they recorded, the commands that they type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> str:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    def record(self, file: str, prompt: str, replies: Any, *, agent: str = "agents/shop.py", **options: Any) -> str:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Engine([load_agent(agent)], models=ScriptedModel(replies), pricing=None) as engine:
            engine.run_sync(load_agent(agent), prompt, journal=FileJournal(file), **options)
        return file

    def type(self, *words: str, code: int | None = 0) -> Result:
        result = CliRunner().invoke(app, list(words))
        assert code is None or code == result.exit_code, f"{result.exit_code}\n{result.output}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.type(*words, "--json", code=code).stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """
    A folder with an agent and nothing else, in which commands are typed; no key, no model.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Folder(tmp_path)
    made.write("agents/shop.py", SHOP)
    made.write("book.py", BOOK)
    return made


@pytest.fixture(scope="session")
def ten_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The journals of ten customers, made once and copied.
    """
    made = Folder(tmp_path_factory.mktemp("ten"))
    made.write("agents/shop.py", SHOP)
    names: dict[str, Any] = {}
    exec(BOOK, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.path)
        for number in range(10):
            made.record(f"journals/c{number}.jsonl", f"c{number}", names["replies"])
    return made.path / "journals"


@pytest.fixture
def ten(folder: Folder, ten_runs: Path) -> Folder:
    """
    Ten customers, each with a journal, and `now.py`: the same agent with another text of one tool.
    """
    shutil.copytree(ten_runs, folder.path / "journals")
    folder.write("now.py", SHOP.replace("Look at a shelf.", "Look closely at a shelf."))
    return folder
