"""What a start loads, which is the same on every machine. Nothing here takes times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.starts import AGENT

ROOT = Path(__file__).resolve().parents[2]
COUNT = """
import json, sys
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
SDKS = ("anthropic", "openai", "google.genai", "boto3", "genai_prices")
UNASKED = (
    "stepengine.models.anthropic",
    "stepengine.models.clouds",
    "stepengine.models.openai_chat",
    "stepengine.models._byte_reader",
    "stepengine.permissions",
    "stepengine.tools.bundled.web",
)
"""Modules that are needed only to call a model, to apply a policy, or to reach the web."""


def loaded(code: str, *arguments: str) -> list[str]:
    """
    Return the modules that a program has loaded in the end.
    """
    program = f"import atexit\natexit.register(lambda: exec({COUNT!r}, {{}}))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    names: list[str] = json.loads(done.stderr.strip().splitlines()[-1])
    return names


def of_ours(names: list[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("stepengine.")}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("performance:Q8")
def test_a_command_loads_no_other_command() -> None:
    names = loaded("from stepengine.cli import main; main()", "run", "--help")

    assert ["stepengine.cli.commands.run"] == [name for name in names if name.startswith("stepengine.cli.commands.")]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("performance:Q8")
def test_a_run_loads_no_unused_adapter_or_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(AGENT)

    names = loaded("from stepengine.cli import main; main()", "run", str(tmp_path / "mine.py"), "--quiet")

    assert [] == [name for name in SDKS if name in names]
    assert [] == [n for n in names if n.startswith(UNASKED)]
    assert "stepengine.evaluation" not in of_ours(names)
