"""
What the project decided about itself: which libraries do what, and when a real model is asked.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pydantic
import pytest

import stepengine
from stepengine import tool
from stepengine.errors import ToolInputError
from stepengine.runtime.logs import LOGGER
from stepengine.tools import ToolRegistry

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SDKS = {"anthropic": "anthropic", "openai": "openai", "google-genai": "google.genai"}


@pytest.mark.spec("requirements:X48")
def test_the_sdks_are_in_the_base_install_and_loaded_when_they_are_used() -> None:
    base = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    code = f"import json, sys, stepengine.models\nstepengine.Engine\nprint(json.dumps([n for n in {[*SDKS.values()]} if n in sys.modules]))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert set(SDKS) <= base
    assert [] == json.loads(loaded)


@pytest.mark.spec("requirements:X48")
async def test_values_are_attrs_classes_tool_input_is_checked_by_pydantic_and_lines_go_to_standard_logging() -> None:
    values = [getattr(stepengine, name) for name in stepengine.__all__]
    kept = [v for v in values if inspect.isclass(v) and v.__module__.startswith("stepengine.data") and attrs.has(v)]

    class Point(pydantic.BaseModel):
        x: int

    @tool(in_thread=False)
    def look(at: Point) -> int:
        return at.x

    assert len(kept) > 20
    assert 3 == (await ToolRegistry([look]).execute("look", {"at": {"x": "3"}})).data
    with pytest.raises(ToolInputError, match=r"at\.x"):
        look.binding().validate({"at": {"x": "three"}})
    assert isinstance(LOGGER, logging.Logger)
    assert "stepengine" == LOGGER.name


@pytest.mark.spec("requirements:X33")
@pytest.mark.parametrize(("asked", "skipped"), [("", True), ("not deep", True), ("live", False)])
def test_a_test_that_asks_a_real_model_runs_on_request_only(asked: str, skipped: bool, request: Any) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    added: list[Any] = []
    item = SimpleNamespace(
        nodeid="test_it", keywords={"live"}, add_marker=added.append, iter_markers=lambda name: iter(()),
        get_closest_marker=lambda name: None,
    )  # fmt: skip
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(has_plugin=lambda name: False), option=SimpleNamespace(markexpr=asked)
    )

    conftest.pytest_collection_modifyitems(config, [item])
    assert skipped == any(mark.name == "skip" for mark in added)
