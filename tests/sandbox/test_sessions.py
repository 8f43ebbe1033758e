"""Sessions of the sandbox: whoever stops, takes, kills or forks what, a worker is left for others and a program comes to the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, tool
from stepengine.errors import DefinitionError, ToolError
from stepengine.testing import ScriptedModel, text, tool_call

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, ProgramLimits, code_mode, sessions
from stepengine.sandbox.sessions import (
    CallAnswer,
    ProgramEnded,
    ProgramRaised,
    ProgramSession,
    ProgramWaiting,
)
from tests.forked_processes import run as run_process
from tests.waits import until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = {"seconds": 30.0, "memory": 1 << 26, "printed": 1_000, "seed": 1}
ENDLESS = "while True:\n    pass"


@pytest.fixture
def one() -> Iterator[MontySandbox]:
    """A sandbox with a single worker."""
    sandbox = MontySandbox(1)
    yield sandbox
    sandbox.close()


def opened(sandbox: MontySandbox, **limits: Any) -> ProgramSession:
    return sandbox.open(("look",), **{**LIMITS, **limits})


def in_thread(turn: Any) -> tuple[threading.Thread, list[Any]]:
    """Have a turn in a thread; what comes of it is the one member of the list."""
    came: list[Any] = []

    def work() -> None:
        try:
            came.append(turn())
        except ToolError as error:
            came.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, came


def busy(sandbox: MontySandbox) -> bool:
    return any(seat.is_busy and seat.pid for seat in sandbox._seats)


@pytest.mark.spec("programs:PG25")
@pytest.mark.parametrize("limits", [{"memory": 2_000}, {"seconds": 1e-9}])
def test_a_limit_too_small_to_start_is_named(one: MontySandbox, limits: dict[str, Any]) -> None:
    for _ in range(3):
        turn = opened(one, **limits).feed("1", NOW)
        assert isinstance(turn, ProgramRaised)
        assert (True, True) == (turn.is_fatal, turn.kind in {"MemoryError", "TimeoutError"})

    assert ProgramEnded(2) == opened(one).feed("1 + 1", NOW)


@pytest.mark.spec("programs:PG21")
@pytest.mark.parametrize(
    "loop",
    [
        "from datetime import datetime\nwhile True:\n    datetime.now()",
        "while True:\n    look(1)",
    ],
)
def test_a_program_that_polls_the_host_forever_is_ended(one: MontySandbox, loop: str) -> None:
    """The sandbox's own clock begins anew with everything that it asks for, if only the time."""
    assert ProgramRaised("TimeoutError", "TimeoutError", 0, is_fatal=True) == opened(one, seconds=0.1).feed(loop, NOW)
    assert ProgramEnded(2) == opened(one).feed("1 + 1", NOW)


@pytest.mark.spec("programs:PG25")
def test_a_dead_worker_is_replaced_and_its_program_continues(one: MontySandbox) -> None:
    session = opened(one)
    assert ProgramEnded(None) == session.feed("x = 20", NOW)
    first = session.feed("a = await look(1)\nprint(a)\nb = await look(2)\na + b + x", NOW)
    assert isinstance(first, ProgramWaiting)
    os.kill(one._seats[0].pid, signal.SIGKILL)
    until(lambda: not one._seats[0].is_alive)
    second = session.answer({first.calls[0].id: CallAnswer(1)}, NOW)
    assert isinstance(second, ProgramWaiting)
    os.kill(one._seats[0].pid, signal.SIGKILL)
    until(lambda: not one._seats[0].is_alive)

    assert ProgramEnded(23) == session.answer({second.calls[0].id: CallAnswer(2)}, NOW)
    assert "1\n" == session.printed


@pytest.mark.spec("programs:PG25")
def test_session_is_replayed_again_after_a_failed_inspection(
    one: MontySandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = opened(one)
    assert ProgramEnded(None) == session.feed("import time\nx = 1\ntime.time()\nx = 2", NOW)
    assert ProgramEnded(None) == session.feed("y = 3", NOW)
    opened(one).feed("1", NOW)  # ends the session's worker
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "time", SimpleNamespace(monotonic=count(step=1_000).__next__))
        with pytest.raises(ToolError, match="could not be brought back"):
            session.variables(["x", "y"])

    assert {"x": "2", "y": "3"} == session.variables(["x", "y"])
    assert ProgramEnded((2, 3)) == session.feed("(x, y)", NOW)


@pytest.mark.spec("programs:PG21")
def test_closing_a_session_that_waits_for_a_worker_ends_it(one: MontySandbox) -> None:
    working, waiting = opened(one), opened(one)
    first, ended = in_thread(lambda: working.feed(ENDLESS, NOW))
    until(lambda: busy(one))
    second, gave_up = in_thread(lambda: waiting.feed(ENDLESS, NOW))
    waiting.close()
    second.join(50)

    assert not second.is_alive()
    assert isinstance(gave_up[0], ToolError)
    working.close()
    first.join(50)
    assert ended[0].is_fatal


@pytest.mark.spec("programs:PG21", "programs:PG25")
@pytest.mark.parametrize("steps", [12, pytest.param(60, marks=pytest.mark.deep)])
def test_sessions_closed_at_any_moment_free_their_workers(steps: int) -> None:
    sandbox = MontySandbox(2)
    try:
        for step in range(steps):
            session = opened(sandbox)
            thread, came = in_thread(lambda session=session: session.feed(ENDLESS, NOW))
            time.sleep((step % 12) / 4_000)
            session.close()
            thread.join(50)
            assert not thread.is_alive(), step
            assert isinstance(came[0], ToolError) or came[0].is_fatal
        assert ProgramEnded(2) == opened(sandbox).feed("1 + 1", NOW)
        assert not [seat for seat in sandbox._seats if seat.is_busy]
    finally:
        sandbox.close()


FORKS = """
import os, signal, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from datetime import UTC, datetime
from stepengine.errors import DefinitionError, ToolError
from stepengine.sandbox import MontySandbox, ProgramLimits, code_mode, sessions

def value(sandbox):
    try:
        return sandbox.open((), seconds=5, memory=1 << 26, printed=10, seed=1).feed("1 + 1", datetime(2026, 1, 1, tzinfo=UTC)).value
    except ToolError as error:
        return error.message

def told_by_child(sandbox):
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        signal.alarm(20)
        os.write(theirs, str(value(sandbox or MontySandbox(1))).encode())
        if sandbox is not None:
            sandbox.close()
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    return os.fdopen(ours).read()

made = MontySandbox(1)
print(told_by_child(made))
print(value(made))
print(told_by_child(made))
print(told_by_child(None))
made.close()
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.usefixtures("forks")
@pytest.mark.spec("programs:PG25")
def test_forked_children_are_refused_once_a_program_has_run() -> None:
    done = run_process([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    refused = "programs cannot run in a process that was forked after another program had run; start a new one"

    assert ("", ["2", "2", refused, refused]) == (done.stderr, done.stdout.splitlines())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG25")
def test_a_forked_child_closing_a_session_ends_no_parent_turn(one: MontySandbox) -> None:
    session = opened(one)
    thread, came = in_thread(lambda: session.feed("n = 0\nwhile n < 3_000_000:\n    n += 1\nn", NOW))
    until(lambda: busy(one))
    if not (pid := os.fork()):
        session.close()
        os._exit(0)
    os.waitpid(pid, 0)
    thread.join(60)

    assert [ProgramEnded(3_000_000)] == came


@pytest.mark.anyio
@pytest.mark.spec("programs:PG21")
async def test_limits_outside_the_countable_range_are_refused() -> None:
    names = ("calls", "seconds", "memory", "printed", "value")
    for wrong in (0, -1, 10**15 + 1, 2**80, float("inf"), float("nan"), True, "5"):
        for name in names:
            with pytest.raises(DefinitionError, match=rf"ProgramLimits\({name}=...\) must be a "):
                ProgramLimits(**{name: wrong})

    @tool
    def look(n: int) -> int:
        """Look."""
        return n

    sandbox = MontySandbox(1)
    limits = ProgramLimits(**dict.fromkeys(names, 10**15))
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(look, limits=limits, sandbox=sandbox)])
    replies = [tool_call("run_code", {"code": "print(1)\nawait look(2)"}), text("end")]
    async with Engine([agent], models=ScriptedModel(replies)) as engine:
        result = await engine.run(agent, "go")
    sandbox.close()

    assert "1\n2" == result.tool_calls[0].result.text
