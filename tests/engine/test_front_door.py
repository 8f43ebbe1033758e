"""
The public names, and that importing them loads nothing heavy.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import stepengine
import stepengine.events
from stepengine.data import events

HEAVY = (
    "anthropic",
    "openai",
    "google.genai",
    "httpx2",
    "genai_prices",
    "docstring_parser",
    "jsonschema",
    "opentelemetry",
    "vcr",
    "typer",
    "rich",
    "mcp",
    "dbos",
)


def test_dir_of_the_package_lists_exactly_its_public_names():
    assert sorted(stepengine.__all__) == dir(stepengine)


def test_type_checkers_see_every_public_name():
    """
    A name that is only in `__all__` would be `Any` to whoever imports it, without a word from mypy.
    """
    tree = ast.parse(Path(stepengine.__file__).read_text(encoding="utf-8"))
    (checked,) = [s for s in tree.body if isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING"]
    imported = [alias.asname or alias.name for s in checked.body if isinstance(s, ast.ImportFrom) for alias in s.names]
    defined = [s.name for s in tree.body if isinstance(s, ast.FunctionDef)]

    assert {*stepengine.__all__} - {*imported, *defined, "__version__", "events", "errors"} == set()


def test_the_facade_of_events_has_them_all():
    assert {*events.__all__} - {"DELTAS", "EVENTS", "SENT_AS_DATA", "EventRow"} == {*stepengine.events.__all__}
    assert all(getattr(stepengine.events, n) is getattr(events, n) for n in stepengine.events.__all__)


PROGRAM = """
import json, sys
loaded = {}

def note(moment):
    loaded[moment] = sorted(sys.modules)

import stepengine
note("import stepengine")
from stepengine import AgentDefinition, Engine
Engine([AgentDefinition("a")]).close()
note("the first engine")
from stepengine import *
note("from stepengine import *")
from stepengine.testing import ScriptedModel

@tool(in_thread=False)
def look(ctx: ToolContext) -> str:
    "Look."
    assert ctx.remaining_tokens is None
    return "x"

def handle(ctx):
    yield ToolCall("look", {})

with Engine(models=ScriptedModel([])) as engine:
    result = engine.run_sync(AgentDefinition("a", model="test/m", tools=[look], handle_steps=handle), "go")
assert result.status == "completed"
note("a run without a model call")
print(json.dumps(loaded))
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC216", "performance:Q8", "requirements:G17")
def test_imports_engines_and_runs_load_only_what_they_need():
    """
    One interpreter says what it has loaded: four would take four times as long.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)

    for moment in ("import stepengine", "from stepengine import *"):
        assert [] == [name for name in HEAVY if name in loaded[moment]], moment
    assert "stepengine.journal" not in loaded["the first engine"]
    assert "genai_prices" not in loaded["a run without a model call"]
