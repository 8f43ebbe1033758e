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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Agent'"):
        stepengine.Agent


def test_the_facade_of_events_has_them_all():
    assert {*events.__all__} - {"DELTAS", "EVENTS", "SENT_AS_DATA", "EventRow"} == {*stepengine.events.__all__}
    assert all(getattr(stepengine.events, n) is getattr(events, n) for n in stepengine.events.__all__)


@pytest.mark.spec("ecosystem:EC216", "performance:Q8")
@pytest.mark.parametrize("program", ["import stepengine", "from stepengine import *"])
def test_importing_stepengine_loads_nothing_heavy(program):
    code = f"import json, sys\n{program}\nprint(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert [] == [name for name in HEAVY if name in loaded]
