"""What all tests of programs need: no worker outlives a test, and what the sandbox opens once is there before the first."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

if importlib.util.find_spec("pydantic_monty") is not None:
    from stepengine.sandbox import MontySandbox

    # What the package opens once for a process is there before any test, so that none of them seems to have left it behind.
    first = MontySandbox(1)
    first.open((), seconds=1, memory=1 << 26, printed=10, seed=1).feed("1", datetime(2026, 1, 1, tzinfo=UTC))
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


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """Workers live as long as their process; a test leaves none behind."""
    from stepengine.sandbox import program_tool

    yield
    for sandbox in program_tool._SHARED:
        sandbox.close()
