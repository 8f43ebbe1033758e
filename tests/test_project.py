"""
What the project decided about itself: which libraries do what, and when a real model is asked.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.spec("ecosystem:EC216")
def test_sdks_are_base_dependencies() -> None:
    base = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}

    assert {"anthropic", "openai", "google-genai"} <= base


@pytest.mark.spec("replay:Y6")
@pytest.mark.parametrize(("asked", "skipped"), [("", True), ("not deep", True), ("live", False)])
def test_a_live_test_runs_only_on_request(asked: str, skipped: bool, request: Any) -> None:
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


def workflow(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", ["ci.yml", "deep.yml"])
def test_workflows_pin_their_actions_and_have_no_rights(name: str) -> None:
    (job,) = workflow(name)["jobs"].values()
    used = [step["uses"] for step in job["steps"] if "uses" in step]

    assert used
    assert [] == [action for action in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action)]
    assert {"contents": "read"} == workflow(name)["permissions"]
    assert "secrets" not in json.dumps(job)


def test_workflows_run_the_gate_per_change_and_deep_nightly() -> None:
    (gate,), (deep,) = workflow("ci.yml")["jobs"].values(), workflow("deep.yml")["jobs"].values()
    (given,) = [step["with"] for step in deep["steps"] if "setup-python" in step.get("uses", "")]
    minors = {m for c in PROJECT["classifiers"] if (m := c.rpartition(":: ")[2]).startswith("3.")}

    assert ".ci/run" == gate["steps"][-1]["run"]
    assert ".ci/deep" == deep["steps"][-1]["run"]
    assert "deep" == workflow("publish.yml")["jobs"]["publish"]["needs"]
    assert minors == set(given["python-version"].split())
