"""What all tests of programs need: no worker outlives a test, and what the sandbox opens once is there before the first."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

NOW = datetime(2026, 1, 1, tzinfo=UTC)

if importlib.util.find_spec("pydantic_monty") is not None:
    from stepengine.sandbox import MontySandbox

    # What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
    first = MontySandbox(1)
    first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", NOW)
    first.close()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[MontySandbox]:
    """A sandbox with two workers. Each program has its own session, and a worker that was killed is replaced."""
    made = MontySandbox(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """A worker of the package itself, which checks and runs programs."""
    monty = pytest.importorskip("pydantic_monty", reason="needs the extra 'programs'")
    with monty.Monty(max_processes=1) as made:
        yield made


def start_workers(sandbox: MontySandbox) -> None:
    """Start two workers for programs and two for checks; they wait for others when their sessions have ended."""
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            session = sandbox.open((), seconds=5, memory=1 << 26, printed=10, seed=1)
            stack.callback(session.close)
            session.feed("1", NOW)
            stack.enter_context(sandbox.checks.checkout())


@pytest.fixture(scope="module")
def kept_workers() -> Iterator[None]:
    """Keep the workers of the shared sandbox for the tests of a module; they are there before the first one."""
    from stepengine.sandbox import program_tool

    sandbox = program_tool.shared_sandbox()
    start_workers(sandbox)
    yield
    sandbox.close()


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """End the workers of the shared sandbox if a test has started or ended one, so that a test leaves none behind."""
    from stepengine.sandbox import program_tool

    before = child_processes()
    yield
    if child_processes() != before:
        for sandbox in program_tool._SHARED:
            sandbox.close()


def child_processes() -> set[str]:
    """Return the ids of the children of this process, where the system tells them."""
    files = Path("/proc/self/task").glob("*/children")
    return {pid for file in files for pid in file.read_text().split()}
