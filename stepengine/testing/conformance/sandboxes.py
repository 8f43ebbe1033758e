"""``check_sandbox``: the promises of a sandbox, in sessions of programs and in runs of ``code_mode``."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from stepengine.data.definition import AgentDefinition
from stepengine.data.yields import Ask, ToolCall
from stepengine.engine.engine import Engine
from stepengine.errors import ToolError
from stepengine.journal.store import MemoryJournal
from stepengine.sandbox.check_workers import StopSignal
from stepengine.sandbox.program_tool import code_mode
from stepengine.sandbox.sessions import (
    SLEEP,
    CallAnswer,
    ProgramEnded,
    ProgramRaised,
    ProgramSession,
    ProgramTurn,
    ProgramWaiting,
    Sandbox,
)
from stepengine.sandbox.stubs import make_stubs
from stepengine.testing.conformance.promises import Promises, require, require_equal
from stepengine.tools.definition import Tool

MakeSandbox: TypeAlias = Callable[[], Sandbox]

SANDBOX: Promises[MakeSandbox] = Promises("check_sandbox(make")

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MEMORY = 64 * 1024 * 1024
SLOW_SECONDS = 20.0
"""On a busy machine each start and end takes seconds; nothing here depends on speed."""
PRINTED = 1_000
ENDLESS = "while True:\n    pass"
LOOK = Tool(
    "look",
    "Look up a number.",
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    lambda given: given["n"] * 10,
)
STUBS = make_stubs([LOOK.spec], [], ask=False)


def check_sandbox(make: MakeSandbox, *, only: str = "", skip: Collection[str] = ()) -> None:
    """
    Check that a sandbox meets the promises of its interface; this does not prove that it stops every attacker.

    Args:
        make: Returns a sandbox. If it has a method ``close``, this is called after each promise.
        only: The name of one promise; by default all are checked.
        skip: Names of promises that are not checked.

    Raises:
        AssertionError: when a promise is broken; the message names it and the call that checks it alone.
    """
    SANDBOX.check(make, only, skip)


@contextlib.contextmanager
def _use_sandbox(make: MakeSandbox) -> Iterator[Sandbox]:
    """Yield a new sandbox; call its ``close`` behind the block, if it has one."""
    sandbox = make()
    try:
        yield sandbox
    finally:
        close = getattr(sandbox, "close", None)
        if close is not None:
            close()


@contextlib.contextmanager
def _open_session(sandbox: Sandbox, **limits: Any) -> Iterator[ProgramSession]:
    """Yield a session with generous limits and the tools ``look`` and ``shout``; close it behind the block."""
    options = {"seconds": SLOW_SECONDS, "memory": MEMORY, "printed": PRINTED, "seed": 7, **limits}
    session = sandbox.open(("look", "shout"), **options)
    try:
        yield session
    finally:
        session.close()


def _expect_waiting(turn: ProgramTurn) -> ProgramWaiting:
    """Return *turn* if the program waits for calls; raise ``AssertionError`` otherwise."""
    require(isinstance(turn, ProgramWaiting), f"the program does not wait for its calls: {turn!r}")
    assert isinstance(turn, ProgramWaiting)  # noqa: S101
    return turn


def _expect_raised(turn: ProgramTurn, program: str) -> ProgramRaised:
    """Return *turn* if *program* ended with an exception; raise ``AssertionError`` otherwise."""
    require(isinstance(turn, ProgramRaised), f"{program} is not ended: {turn!r}")
    assert isinstance(turn, ProgramRaised)  # noqa: S101
    return turn


@SANDBOX.add("name", "It has a name for journals, always the same one.")
def _check_stable_name(make: MakeSandbox) -> None:
    """Fail unless the sandbox has a name, which is always the same."""
    with _use_sandbox(make) as first, _use_sandbox(make) as second:
        require(first.name, "`name` is empty")
        require_equal(first.name, second.name, "name of a second object")


@SANDBOX.add("check", "The check rejects a syntax error with its line, and accepts every program that runs.")
def _check_syntax_check(make: MakeSandbox) -> None:
    """Fail unless the check rejects a syntax error with its line and accepts valid programs."""
    with _use_sandbox(make) as sandbox:
        wrong = sandbox.check("x = 1\nx = = 2", STUBS, (), StopSignal()).refused
        require_equal([2], [problem.line for problem in wrong], "lines of the problems of a syntax error")
        for code in ("import math\nmath.floor(2.5)", "found = await look(2)\nfound + earlier"):
            refused = sandbox.check(code, STUBS, {"earlier"}, StopSignal()).refused
            require(not refused, f"the program {code!r} is refused: {refused!r}")


@SANDBOX.add("result", "A program ends with the value of its last expression and its output; variables remain.")
def _check_program_result(make: MakeSandbox) -> None:
    """Fail unless a program returns its last value and output, and its variables remain for the next one."""
    code = "print('one', 2)\nprint('three')\nx = [1, 2.5, None, True, 'ü', {'k': []}]\nx"
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        require_equal(ProgramEnded([1, 2.5, None, True, "ü", {"k": []}]), session.feed(code, NOW), "result")
        require_equal("one 2\nthree\n", session.printed, "printed")
        require_equal(ProgramEnded(6), session.feed("len(x)", NOW), "result of a second program")
        require_equal("", session.printed, "printed by a second program")
        require_equal(ProgramEnded(None), session.feed("y = 1", NOW), "result of a program without a last expression")


@SANDBOX.add("call", "A call arrives with its name, arguments and line, and its answer is the value of the call.")
def _check_tool_call(make: MakeSandbox) -> None:
    """Fail unless a call arrives with name, arguments and line, and its answer becomes its value."""
    answer = {"found": [1, None, "ü"], "more": False}
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        first = _expect_waiting(session.feed("a = 1\nb = await look(a, where=['x', {'deep': None}])\nb", NOW))
        require_equal(1, len(first.calls), "number of calls")
        call = first.calls[0]
        found = (call.name, list(call.args), dict(call.kwargs), call.line, first.line, call.is_cut)
        require_equal(("look", [1], {"where": ["x", {"deep": None}]}, 2, 2, False), found, "call")
        require_equal(ProgramEnded(answer), session.answer({call.id: CallAnswer(answer)}, NOW), "result")


@SANDBOX.add("together", "Calls of one `gather` arrive together, in order, and each gets its own answer.")
def _check_gathered_calls(make: MakeSandbox) -> None:
    """Fail unless the calls of one ``gather`` arrive together and each gets its own answer."""
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        code = "import asyncio\nawait asyncio.gather(look(1), shout(2), look(3))"
        waiting = _expect_waiting(session.feed(code, NOW))
        require_equal(["look", "shout", "look"], [call.name for call in waiting.calls], "calls")
        require_equal(3, len({call.id for call in waiting.calls}), "number of different ids")
        answers = {call.id: CallAnswer(call.args[0] * 10) for call in reversed(waiting.calls)}
        require_equal(ProgramEnded([10, 20, 30]), session.answer(answers, NOW), "result")


@SANDBOX.add("sleep", "`asyncio.sleep` is a call with that name and its seconds; the sandbox does not sleep.")
def _check_sleep_call(make: MakeSandbox) -> None:
    """Fail unless ``asyncio.sleep`` arrives as a call with its seconds, and the sandbox does not sleep."""
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        waiting = _expect_waiting(session.feed("import asyncio\nawait asyncio.sleep(86400)\n'awake'", NOW))
        found = [(call.name, list(call.args)) for call in waiting.calls]
        require_equal([(SLEEP, [86400])], found, "calls")
        require_equal(ProgramEnded("awake"), session.answer({waiting.calls[0].id: CallAnswer()}, NOW), "result")


@SANDBOX.add("unawaited", "A call that is never awaited is reported at the end of the program.")
def _check_unawaited_call(make: MakeSandbox) -> None:
    """Fail unless a call that was never awaited is reported at the end of the program."""
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        ended = session.feed("look(2)\n'end'", NOW)
        require(isinstance(ended, ProgramEnded), f"the program does not end: {ended!r}")
        assert isinstance(ended, ProgramEnded)  # noqa: S101
        found = [(call.name, list(call.args), call.line) for call in ended.unawaited]
        require_equal([("look", [2], 1)], found, "calls that were not awaited")


@SANDBOX.add("failed_call", "A failed call raises the named exception with its text, and the program may catch it.")
def _check_failed_call(make: MakeSandbox) -> None:
    """Fail unless a failed call raises the named exception with its text, which the program may catch."""
    with _use_sandbox(make) as sandbox:
        for kind in ("ToolError", "PermissionError", "TimeoutError", "TypeError"):
            with _open_session(sandbox) as session:
                code = f"try:\n    await look(1)\nexcept {kind} as error:\n    print(error)\nawait look(2)"
                first = _expect_waiting(session.feed(code, NOW)).calls[0]
                second = _expect_waiting(session.answer({first.id: CallAnswer("nobody there", kind)}, NOW)).calls[0]
                require_equal("nobody there\n", session.printed, f"printed when a call raises {kind}")
                failed = _expect_raised(
                    session.answer({second.id: CallAnswer("still nobody", kind)}, NOW), "a failed program"
                )
                require_equal(5, failed.line, f"line of an uncaught {kind}")
                require(
                    "still nobody" in failed.text, f"the text does not contain the text of the call: {failed.text!r}"
                )


@SANDBOX.add("error", "An exception is a result with its class, text and line, and the session remains usable.")
def _check_raised_exception(make: MakeSandbox) -> None:
    """Fail unless an exception ends a program with class, text and line, and the session remains usable."""
    with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
        for code, kind, line, words in (
            ("print('before')\nx = 5\n1 / 0", "ZeroDivisionError", 3, "division"),
            ("def pick():\n    return [][3]\n\n\npick()", "IndexError", 2, "index"),
            ("raise ValueError('my words')", "ValueError", 1, "my words"),
        ):
            failed = _expect_raised(session.feed(code, NOW), f"the program {code!r}")
            found = failed.kind, failed.line, failed.is_fatal
            require_equal((kind, line, False), found, f"class, line and `is_fatal` of {code!r}")
            for word in (kind, words):
                require(word in failed.text, f"the text lacks {word!r}: {failed.text!r}")
        require_equal(ProgramEnded(5), session.feed("x", NOW), "variable of a failed program")


def _run_and_require_limit_error(make: MakeSandbox, kind: str, codes: Collection[str], **limits: Any) -> None:
    """Check that each program ends with an error *kind*, prints no more than allowed, and does not break later sessions."""
    with _use_sandbox(make) as sandbox:
        for code in codes:
            with _open_session(sandbox, **limits) as session:
                failed = _expect_raised(session.feed(code, NOW), f"the program {code!r}")
                require_equal(kind, failed.kind, f"`kind` of a program over a limit, with the text {failed.text!r}")
                require(
                    len(session.printed) <= PRINTED, f"it printed {len(session.printed):,} characters of {PRINTED:,}"
                )
            with _open_session(sandbox) as other:
                require_equal(ProgramEnded(2), other.feed("1 + 1", NOW), "result in a later session")


@SANDBOX.add("time", "A program that computes longer than `seconds` ends with `TimeoutError`.")
def _check_time_limit(make: MakeSandbox) -> None:
    """Fail unless a program that computes for too long ends with ``TimeoutError``."""
    start = time.monotonic()
    _run_and_require_limit_error(make, "TimeoutError", [ENDLESS, "sum(range(10**12))"], seconds=0.3)
    require(time.monotonic() - start < SLOW_SECONDS, "it takes much longer than `seconds`")


@SANDBOX.add("memory", "A program that uses more than `memory` ends with `MemoryError`.")
def _check_memory_limit(make: MakeSandbox) -> None:
    """Fail unless a program that uses too much memory ends with ``MemoryError``."""
    codes = [f"x = 'x' * {MEMORY}", "x = []\nwhile True:\n    x.append('y' * 100_000 + str(len(x)))"]
    _run_and_require_limit_error(make, "MemoryError", codes, memory=MEMORY // 4)


@SANDBOX.add("printed", "A program that prints more than `printed` bytes ends with the kind `printed`.")
def _check_output_limit(make: MakeSandbox) -> None:
    """Fail unless a program that prints too much ends with the kind ``printed``."""
    _run_and_require_limit_error(
        make, "printed", ["for n in range(2_000):\n    print('y' * 100)", f"print('y' * {MEMORY // 4})"]
    )


ESCAPE = """
for kind in ().__class__.__base__.__subclasses__():
    found = getattr(getattr(kind, "__init__", None), "__globals__", {{}})
    if "{name}" in found:
        print({action})
"""
"""A well-known way to the modules of an interpreter without an import."""


def _run_and_require_secret_invisible(make: MakeSandbox, codes: Collection[str], secret: str) -> None:
    """Run programs; raise ``AssertionError`` if one of them returns or prints *secret*."""
    with _use_sandbox(make) as sandbox:
        for code in codes:
            with _open_session(sandbox, printed=MEMORY // 4) as session:
                came = f"{session.feed(code, NOW)!r}{session.printed}"
                require(secret not in came, f"the host's secret is visible to the program {code!r}")


@SANDBOX.add("files", "A program cannot read, list or write files of the host.")
def _check_no_file_access(make: MakeSandbox) -> None:
    """Fail if a program can read, list or write files of the host."""
    secret = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        known, new = Path(folder, "known.txt"), Path(folder, "new.txt")
        known.write_text(secret, encoding="utf-8")
        Path(folder, secret).touch()
        read = f"open({str(known)!r}).read()"
        _run_and_require_secret_invisible(
            make,
            [
                read,
                f"import io\nio.{read}",
                f"import pathlib\npathlib.Path({str(known)!r}).read_text()",
                f"import os\nos.listdir({folder!r})",
                ESCAPE.format(name="listdir", action=f"found['listdir']({folder!r})"),
                f"open({str(new)!r}, 'w').write('x')",
                f"import pathlib\npathlib.Path({str(new)!r}).write_text('x')",
                f"import os\nos.mkdir({str(new)!r})",
                f"import os\nos.system('touch {new}')",
                f"import subprocess\nsubprocess.run(['touch', {str(new)!r}])",
                ESCAPE.format(name="system", action=f"found['system']('touch {new}')"),
            ],
            secret,
        )
        require(not new.exists(), "a program created a file")


@SANDBOX.add("environment", "A program cannot see the environment of the host.")
def _check_no_environment_access(make: MakeSandbox) -> None:
    """Fail if a program can read the environment of the host."""
    name, secret = f"STEPENGINE_CHECK_{secrets.token_hex(4)}", secrets.token_hex(8)
    os.environ[name] = secret
    try:
        _run_and_require_secret_invisible(
            make,
            [
                "import os\nprint(dict(os.environ))",
                f"import os\nprint(os.getenv({name!r}))",
                "import posix\nprint(posix.environ)",
                "print(open('/proc/self/environ').read())",
                "print(open('/proc/1/environ').read())",
                ESCAPE.format(name="environ", action="dict(found['environ'])"),
            ],
            secret,
        )
    finally:
        del os.environ[name]


@SANDBOX.add("network", "A program cannot connect to anything.")
def _check_no_network_access(make: MakeSandbox) -> None:
    """Fail if a program can connect to a server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}))"
        codes = [
            f"import socket\n{connect}",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
            f"import asyncio\nawait asyncio.open_connection('127.0.0.1', {port})",
            f"try:\n    import os\n    os.system('echo > /dev/tcp/127.0.0.1/{port}')\nexcept Exception:\n    socket = __import__('socket')\n    {connect}",
        ]
        with _use_sandbox(make) as sandbox:
            for code in codes:
                with _open_session(sandbox) as session:
                    session.feed(code, NOW)
                with contextlib.suppress(BlockingIOError):
                    server.accept()[0].close()
                    require(False, f"the program {code!r} connected")


@SANDBOX.add("imports", "A program cannot import modules of the host or modules that reach the operating system.")
def _check_no_host_imports(make: MakeSandbox) -> None:
    """Fail if a program can import modules of the host, or those that reach the operating system."""
    with tempfile.TemporaryDirectory() as folder:
        module = f"own_{secrets.token_hex(4)}"
        Path(folder, f"{module}.py").touch()
        sys.path.insert(0, folder)
        try:
            with _use_sandbox(make) as sandbox:
                for name in ("stepengine", module, "subprocess", "ctypes", "socket", "importlib", "_thread"):
                    with _open_session(sandbox) as session:
                        _expect_raised(session.feed(f"import {name}", NOW), f"`import {name}`")
        finally:
            sys.path.remove(folder)


EQUAL = """
for name in ("random", "datetime", "time"):
    try:
        if name == "random":
            import random
            print(random.random(), random.sample(range(1000), 5))
        elif name == "datetime":
            import datetime
            print(datetime.datetime.now(), datetime.date.today())
        else:
            import time
            print(time.time(), time.time_ns())
    except Exception as error:
        print(type(error).__name__)
print({"spring", "summer", "autumn", "winter"}, sorted({"a", "b"}))
found = [await look(n) for n in range(3)]
print({*found}, random.random())
found
"""


@SANDBOX.add("equal", "Equal programs with equal seeds, times and answers give equal results, also in another session.")
def _check_deterministic_results(make: MakeSandbox) -> None:
    """Fail unless equal programs with equal seeds, times and answers have equal results."""

    def run_program() -> list[Any]:
        came: list[Any] = []
        with _use_sandbox(make) as sandbox, _open_session(sandbox) as session:
            turn = session.feed(EQUAL, NOW)
            while isinstance(turn, ProgramWaiting):
                came += [turn, session.printed]
                turn = session.answer({call.id: CallAnswer(f"no {call.args[0]}") for call in turn.calls}, NOW)
            require_equal(ProgramEnded(["no 0", "no 1", "no 2"]), turn, "result")
            return [*came, turn, session.printed]

    require_equal(run_program(), run_program(), "turns and output of the same program in another session")


@SANDBOX.add("many", "Many sessions wait at the same time, and each continues with its own variables.")
def _check_many_sessions(make: MakeSandbox) -> None:
    """Fail unless many sessions wait at the same time, and each continues with its own variables."""
    with _use_sandbox(make) as sandbox, contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(_open_session(sandbox)) for _ in range(10)]
        waiting = [_expect_waiting(one.feed(f"x = {n}\ny = await look(x)", NOW)) for n, one in enumerate(sessions)]
        for n in reversed(range(10)):
            turn = sessions[n].answer({waiting[n].calls[0].id: CallAnswer(n * 100)}, NOW)
            require_equal(ProgramEnded(None), turn, "result")
        found = [one.feed("x + y", NOW) for one in sessions]
        require_equal([ProgramEnded(n * 101) for n in range(10)], found, "variables of the sessions")


@SANDBOX.add("close", "Closing a session ends its running program; closing it again does nothing.")
def _check_close_ends_program(make: MakeSandbox) -> None:
    """Fail unless closing a session ends its running program, and closing it again does nothing."""
    came: list[ProgramTurn | ToolError] = []

    def run_until_closed(session: ProgramSession) -> None:
        try:
            came.append(session.feed(ENDLESS, NOW))
        except ToolError as error:
            came.append(error)

    with _use_sandbox(make) as sandbox:
        for seconds in (0.0, 0.2):
            with _open_session(sandbox) as session:
                thread = threading.Thread(target=run_until_closed, args=(session,), daemon=True)
                thread.start()
                time.sleep(seconds)
                session.close()
                thread.join(2 * SLOW_SECONDS)
            require(came, "the program is still running")
            turn = came.pop()
            is_ended = isinstance(turn, ToolError) or (isinstance(turn, ProgramRaised) and turn.is_fatal)
            require(is_ended and getattr(turn, "kind", "") != "TimeoutError", f"the program was not ended: {turn!r}")
        with _open_session(sandbox) as session:
            _expect_waiting(session.feed("await look(1)", NOW))
            session.close()
            session.close()
        with _open_session(sandbox) as session:
            require_equal(ProgramEnded(2), session.feed("1 + 1", NOW), "result in a later session")


def _count_process_resources() -> Mapping[str, int]:
    """Return how many threads, descriptors and children this process has; without ``/proc``, threads alone."""
    counts = {"threads": threading.active_count()}
    with contextlib.suppress(OSError):
        counts["descriptors"] = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        counts["children"] = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended just now
                parent = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
                counts["children"] += parent == str(os.getpid())
    return counts


@SANDBOX.add("left", "Closed sessions leave no threads, descriptors or processes behind.")
def _check_no_leaked_resources(make: MakeSandbox) -> None:
    """Fail if closed sessions leave threads, descriptors or processes behind."""

    def use_three_sessions(sandbox: Sandbox) -> None:
        with _open_session(sandbox) as waiting, _open_session(sandbox, seconds=0.1) as late, _open_session(sandbox):
            _expect_waiting(waiting.feed("await look(1)", NOW))
            _expect_raised(late.feed(ENDLESS, NOW), "an endless program")

    with _use_sandbox(make) as sandbox:
        for _ in range(2):
            use_three_sessions(sandbox)  # starts what the sandbox keeps for all sessions
        before = _count_process_resources()
        for _ in range(5):
            use_three_sessions(sandbox)
        end = time.monotonic() + SLOW_SECONDS / 4
        while (after := _count_process_resources()) != before and time.monotonic() < end:
            time.sleep(0.05)
        more = {name: after[name] - before[name] for name in before if after[name] > before[name]}
        require(not more, f"15 sessions left behind: {more}")


@SANDBOX.add("run", "In a run, a program calls tools, and a later process restores its variables.")
def _check_agent_run(make: MakeSandbox) -> None:
    """Fail unless a program of a run calls tools, and a later process restores its variables."""

    def run_programs_and_ask(_ctx: Any) -> Any:
        yield from ToolCall(
            "run_code", {"code": "import random\nx = await look(4)\nmark = random.random()\nprint(mark)"}
        )
        answer = yield from Ask("Again?", options=["yes", "no"])
        found = yield from ToolCall("run_code", {"code": "[x + await look(1), mark]"})
        return [answer, found.text]

    def make_agent(sandbox: Sandbox) -> AgentDefinition[Any]:
        return AgentDefinition("caller", tools=[code_mode(LOOK, sandbox=sandbox)], handle_steps=run_programs_and_ask)

    journal = MemoryJournal()
    with _use_sandbox(make) as sandbox, Engine([make_agent(sandbox)]) as engine:
        waiting = engine.run_sync("caller", journal=journal)
    require_equal(1, len(waiting.pending_questions), f"open questions of a run with the error {waiting.error!r}")
    with _use_sandbox(make) as sandbox, Engine([make_agent(sandbox)]) as engine:
        result = engine.resume_sync(journal, answers={waiting.pending_questions[0].id: "yes"})
        output = result.unwrap()
        require(output[1].startswith("[50, "), f"the second program returned {output[1]!r}")
        require_equal(output, engine.replay_sync(journal).unwrap(), "output of the replay")
