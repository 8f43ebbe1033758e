"""
What the project decided about itself: which libraries do what, and when a real model is asked.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pydantic
import pytest
import yaml

import stepengine
from stepengine import tool
from stepengine.errors import ToolInputError
from stepengine.runtime.logs import LOGGER
from stepengine.tools import ToolRegistry

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SDKS = {"anthropic": "anthropic", "openai": "openai", "google-genai": "google.genai"}


@pytest.mark.spec("ecosystem:EC216")
def test_the_sdks_are_in_the_base_install_and_loaded_when_they_are_used() -> None:
    base = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    code = f"import json, sys, stepengine.models\nstepengine.Engine\nprint(json.dumps([n for n in {[*SDKS.values()]} if n in sys.modules]))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert set(SDKS) <= base
    assert [] == json.loads(loaded)


@pytest.mark.spec("ecosystem:EC216")
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


@pytest.mark.spec("replay:Y6")
@pytest.mark.parametrize(("asked", "skipped"), [("", True), ("not deep", True), ("live", False)])
def test_a_test_that_asks_a_real_model_runs_on_request_only(asked: str, skipped: bool, request: Any) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    added: list[Any] = []
    item = SimpleNamespace(
        name="test_it", location=("tests/test_x.py", 6, ""),
        nodeid="test_it", add_marker=added.append, iter_markers=lambda: iter([pytest.mark.live.mark]),
    )  # fmt: skip
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(has_plugin=lambda name: False), option=SimpleNamespace(markexpr=asked)
    )

    conftest.pytest_collection_modifyitems(config, [item])
    assert skipped == any(mark.name == "skip" for mark in added)


def test_the_workflow_runs_every_check_with_pinned_actions_and_rights_to_nothing(request: Any) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    (given,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    minors = {m for c in PROJECT["classifiers"] if (m := c.rpartition(":: ")[2]).startswith("3.")}

    assert used
    assert [] == [action for action in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action)]
    assert {"contents": "read"} == workflow["permissions"]
    assert "secrets" not in text
    assert ".ci/run" == job["steps"][-1]["run"]
    assert minors == set(given["python-version"].split())
    # Of what can be asked for, everything that `.ci/run` does not ask for by itself.
    assert set(conftest.REQUIRED) - {"core-dump", "durable", "podman"} == set(
        conftest.required(job["steps"][-1]["env"]["STEPENGINE_TESTS_REQUIRE"])
    )


def test_the_checks_find_every_python_of_the_machine_also_those_without_the_global_lock(tmp_path: Path) -> None:
    places = {
        "bin/python3": "3.12", "bin/python3.12": "3.12", "bin/python3.13": "3.13", "bin/python3.14": "3.14", "bin/python3.15": "2.7",
        "pyenv/versions/3.11.9/bin/python": "3.11", "pyenv/versions/3.14.1/bin/python": "3.14",
        "pyenv/versions/3.14.1t/bin/python": "3.14t", "pyenv/versions/3.15.0t/bin/python": "3.15t",
    }  # fmt: skip
    for place, version in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / place).chmod(0o755)
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^found_pythons\(\) \{.*?^\}", text, re.DOTALL | re.MULTILINE)

    (tmp_path / "bin" / "sed").symlink_to(str(shutil.which("sed")))  # and no interpreter of this machine
    env = {"PATH": f"{tmp_path}/bin", "PYENV_ROOT": f"{tmp_path}/pyenv", "python": "python3"}
    found = subprocess.run(
        [str(shutil.which("bash")), "-euo", "pipefail", "-c", f"{function}\nfound_pythons"],
        env=env, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip

    versions = [places[Path(line).relative_to(tmp_path).as_posix()] for line in found.splitlines()]
    assert ["3.11", "3.13", "3.14", "3.14t", "3.15t"] == versions
