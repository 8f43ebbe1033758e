"""
Programs that know nothing of stepengine, and their tests as a user writes them: recorded from a local server, replayed without
network and key, failing at an edited prompt.

The frameworks are in an environment of their own, which `.ci/deep` makes; elsewhere their programs are skipped.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from cassettes import record_unchanged
from stepengine.testing import Cassette
from tests.offline import NO_NETWORK, ROOT

COUNTERPARTS = (
    ("pypi:openai-agents", "0.24.0", "works", "a streamed run of an agent with a tool"),
    ("pypi:pydantic-ai-slim", "2.68.0", "works", "a streamed run of an agent with a tool"),
    ("pypi:langgraph", "1.2.24", "works", "a streamed graph with a model and a tool"),
    ("pypi:langchain-openai", "1.7.3", "works", "the model of the LangGraph program"),
)
FOLDER, CASSETTES = ROOT / "examples" / "unchanged_programs", ROOT / "cassettes" / "unchanged_programs"
FRAMEWORKS = {
    "openai_agents_program": "openai-agents",
    "pydantic_ai_program": "pydantic-ai-slim",
    "langgraph_program": "langgraph",
}
EDITED = ("in one sentence.", "in two sentences.")
FIELDS = {
    "openai_sync": "/messages/0/content",
    "openai_async": "/instructions",
    "anthropic_sync": "/system",
    "anthropic_async": "/system",
    "google_sync": "/systemInstruction/parts/0/text",
    "google_async": "/systemInstruction/parts/0/text",
    "openai_agents_program": "/instructions",
    "pydantic_ai_program": "/system",
    "langgraph_program": "/messages/0/content",
}


def installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


PROGRAMS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name in FRAMEWORKS and not installed(FRAMEWORKS[name]), reason=f"{FRAMEWORKS.get(name)} is not installed"
        ),
    )
    for name in FIELDS
]


def run_tests(folder: Path, scratch: Path) -> str:
    """
    Return what pytest prints of the tests in a folder: without keys, without network, as in CI.
    """
    (scratch / "sitecustomize.py").write_text(NO_NETWORK)
    kept = {n: v for n, v in os.environ.items() if not n.endswith(("_API_KEY", "_BASE_URL")) and "PYTEST" not in n}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", str(folder)],
        env={**kept, "CI": "true", "PYTHONPATH": os.pathsep.join([str(scratch), str(ROOT)])},
        cwd=scratch, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_tests(FOLDER, tmp_path_factory.mktemp("replayed"))


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> str:
    scratch = tmp_path_factory.mktemp("edited")
    folder = scratch / "project"
    folder.mkdir()
    for file in FOLDER.glob("*.py"):
        (folder / file.name).write_text(file.read_text().replace(*EDITED))
    shutil.copytree(CASSETTES, folder / "cassettes")
    (folder / "pytest.ini").write_text("[pytest]\n")
    return run_tests(folder, scratch)


def test_every_program_has_one_cassette_and_imports_no_stepengine() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("test_")} - {"orders"}
    assert set(FIELDS) == programs
    assert {f"test_{name}" for name in programs} == {file.stem for file in FOLDER.glob("test_*.py")}
    assert {f"test_{name}/test_answer.yaml" for name in programs} == {
        str(file.relative_to(CASSETTES)) for file in CASSETTES.rglob("*") if file.is_file()
    }
    for name in programs:
        text = (FOLDER / f"{name}.py").read_text()
        imported = {
            module.partition(".")[0]
            for node in ast.walk(ast.parse(text))
            for module in (
                [node.module or ""] if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            )
        }  # fmt: skip
        assert "stepengine" not in text + "".join(imported)
        assert 20 <= len(text.splitlines()) <= 60


@pytest.mark.smoke
@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:Y11", "replay:Y10", "reliability:I3")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unchanged_program_replays_offline_without_a_key(name: str, replayed: str) -> None:
    recorded = Cassette.load(CASSETTES / f"test_{name}" / "test_answer.yaml").interactions

    assert f"PASSED test_{name}.py::test_answer" in shown(replayed), replayed
    assert {200} == {one.response.status for one in recorded}
    assert ["text/event-stream"] * 2 == [one.response.get_header("content-type") for one in recorded]
    assert ["find_order" in one.response.body.decode() for one in recorded] == [True, False]


@pytest.mark.smoke
@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:C14")
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edited_prompt_fails_and_names_the_changed_field(name: str, edited: str) -> None:
    """
    Each part of the output that names a test holds the field with what was recorded and what is asked now.
    """
    assert f"FAILED test_{name}.py::test_answer" in shown(edited), edited
    _, _, rest = edited.partition(f"test_{name}/test_answer.yaml\n")
    lines = rest.splitlines()
    end = next(number for number, line in enumerate(lines) if "cause looks like" in line)
    fields = [line for line in lines[:end] if "two sentences" in line]
    assert fields, edited
    assert fields[0].split()[1].startswith(FIELDS[name])
    assert EDITED[0] in fields[0].partition(" now ")[0]
    assert EDITED[1] in fields[0].partition(" now ")[2]


def shown(output: str) -> str:
    """
    Return pytest's summary with file names alone.
    """
    lines = [line for line in output.splitlines() if line.startswith(("PASSED", "FAILED", "SKIPPED"))]
    return "\n".join(f"{line.split()[0]} {line.split()[1].rpartition('/')[2]}" for line in lines)


@cache
def recorded_again(folder: Path) -> dict[str, Path]:
    return {file.parent.name: file for file in record_unchanged.record(folder)}


def interactions(file: Path) -> list[Any]:
    """
    Return a cassette's interactions without the random ids of frameworks, and without the marks of secrets, whose key is random.
    """
    found = []
    for one in Cassette.load(file).interactions:
        body = json.loads(one.request.body)
        body.pop("prompt_cache_key", None)
        headers = [(header, re.sub("~[0-9a-f]{4}>", ">", value)) for header, value in one.request.headers]
        found.append((one.request.method, one.request.url, headers, body, one.response, one.extras))
    return found


@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:C2")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_script_records_the_same_cassettes_again(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """
    When this fails because a program or an SDK was changed on purpose: python -m cassettes.record_unchanged
    """
    again = recorded_again(tmp_path_factory.getbasetemp() / "recorded-again")

    assert interactions(CASSETTES / f"test_{name}" / "test_answer.yaml") == interactions(again[f"test_{name}"])
