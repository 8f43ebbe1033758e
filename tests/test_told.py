"""
What a run of these tests says: a failure when it happens, and one for a test that is skipped for want of what the run asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {
    "ai-sdk": "tests/web/test_vercel_sdk.py::test_sdk_reads_every_run_and_reports_only_failures",
    "bubblewrap": "tests/bundled_tools/test_shell_sandbox.py",
    "chromium": "tests/debugging/test_view_in_a_browser.py",
    "fastmcp": "tests/adapters/mcp/test_counterparts.py::test_named_fastmcp_version_is_the_installed_one",
    "llmock": "tests/faults/test_llmock.py",
    "openapi-python-client": "tests/server/test_openapi.py::test_a_generated_client_starts_watches_and_answers_a_run",
    "mcp-npm": "tests/adapters/mcp/test_reference_servers.py",
    "podman": "tests/bundled_tools/test_containers.py::test_a_container_without_snapshots_refuses_one[podman]",
    "tmux": "tests/examples/test_from_codebuff.py::test_the_script_records_the_same_run_again[tmux_cli]",
}
"""Tests that are skipped where a command is not on the path."""


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    (found,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LEAK_GRACE_SECONDS")]
    return found


def skipped(reason: str) -> Any:
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_it.py", 1, f"Skipped: {reason}"))


def test_skipping_a_required_tool_fails_the_test(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "ASKED", ["git", "tmux"])
    wanted = conftest.insisted(skipped("tmux is not there"))
    other = [conftest.insisted(skipped(reason)) for reason in ("needs Chromium", "only five digits")]

    assert "failed" == wanted.outcome
    assert "'tmux' is not there, which STEPENGINE_TESTS_REQUIRE asks for. Skipped: tmux is not there" == wanted.longrepr
    assert {"skipped"} == {each.outcome for each in other}


@pytest.mark.parametrize(
    ("given", "expected"), [("", []), ("git", ["git"]), (" git,  ai-sdk\ttmux ", ["git", "ai-sdk", "tmux"])]
)
def test_required_tools_are_separated_by_commas_or_spaces(conftest: Any, given: str, expected: list[str]) -> None:
    assert expected == conftest.required(given)


def test_an_unknown_required_tool_is_a_usage_error(conftest: Any) -> None:
    with pytest.raises(pytest.UsageError, match=r"STEPENGINE_TESTS_REQUIRE knows acp-sdk, ai-sdk, .*; not chrome"):
        conftest.required("git chrome")


@pytest.mark.deep
def test_requiring_all_tools_turns_every_skip_into_a_failure(tmp_path: Path) -> None:
    asked = " ".join([*NEEDS, "axe-core"])
    said = ran(tmp_path, *NEEDS.values(), "-m", "", PATH=str(tmp_path), STEPENGINE_TESTS_REQUIRE=asked)

    assert set() == {word for word in NEEDS if f"{word!r} is not there" not in said}
    assert "skipped" not in said.splitlines()[-1]


@pytest.mark.deep
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_failure_is_printed_when_it_happens(tmp_path: Path, workers: str) -> None:
    """
    The first test fails, the second waits for the file that whoever reads that makes.
    """
    (tmp_path / "test_two.py").write_text(
        "import pathlib, time\n\n\ndef test_bad():\n    assert 1 == 2\n\n\ndef test_waits():\n"
        f"    while not pathlib.Path({str(tmp_path / 'told')!r}).exists():\n        time.sleep(0.01)\n"
    )
    command = [*PYTEST, str(tmp_path), "-n", workers, "--dist", "load", "-p", "tests.conftest"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            if "test_two.py::test_bad (call): " in line:
                (tmp_path / "told").touch()
                break
        rest = running.stdout.read()

    assert line.endswith("test_bad (call): assert 1 == 2\n")
    assert "1 failed, 1 passed" in rest


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def ran(folder: Path, *arguments: str, **environment: str) -> str:
    command = [*PYTEST, "--basetemp", str(folder / "base"), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=500
    )
    return done.stdout
