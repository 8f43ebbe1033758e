"""
The check that every test runs under: what a test leaves behind fails it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    (found,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LEAK_GRACE_SECONDS")]
    monkeypatch.setattr(found, "LEAK_GRACE_SECONDS", 0.05)
    return found


class Node:
    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


def checked(conftest: Any, node: Node, leave: Any) -> str:
    """
    Return what the check says of a test that does *leave*.
    """
    try:
        with conftest.no_leaks(node):
            leave()
    except pytest.fail.Exception as failed:
        return str(failed)
    return ""


@pytest.mark.spec("reliability:R10")
@pytest.mark.deep
def test_a_leaked_thread_process_or_descriptor_fails_the_test(conftest: Any) -> None:
    over, ends = threading.Event(), []

    def thread() -> None:
        made = threading.Thread(target=over.wait, name="left over")
        made.start()
        ends.append(made.join)

    def process() -> None:
        made = subprocess.Popen(["sleep", "600"])
        ends.append(lambda: (made.kill(), made.wait()))

    def descriptor() -> None:
        made = os.open(os.devnull, os.O_RDONLY)
        ends.append(lambda: os.close(made))

    leaves = {"thread: left over": thread, "child process: ": process, "-> /dev/null": descriptor}
    try:
        said = {name: checked(conftest, Node(), leave) for name, leave in leaves.items()}
        excused = checked(conftest, Node("leaks_allowed"), descriptor)
    finally:
        over.set()
        for end in ends:
            end()

    assert [] == [name for name, told in said.items() if name not in told]
    assert ("", "") == (excused, checked(conftest, Node(), lambda: None))


def test_warnings_are_errors_and_every_test_has_a_timeout(request: pytest.FixtureRequest) -> None:
    assert "error" in request.config.getini("filterwarnings")
    assert not request.config.pluginmanager.has_plugin("timeout") or request.node.get_closest_marker("timeout")
