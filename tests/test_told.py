"""
What a run of these tests says of a test that is skipped for want of what the run asks for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


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
