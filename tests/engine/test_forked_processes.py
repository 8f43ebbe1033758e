"""
A child that the operating system forked off has the memory of its parent and none of its threads: each kind of thing that holds
threads, locks, event loops or connections works in it, and goes on working in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, RateLimit, RunStatus, call, tool
from stepengine.engine import loop_thread
from stepengine.engine import run as running
from stepengine.errors import DataError
from stepengine.journal import FileJournal, SqliteJournal
from stepengine.models import Batched, Models, OpenAIChatProvider
from stepengine.runtime import watchdog
from stepengine.sessions import FileSessions, MemorySessions
from stepengine.testing import ScriptedModel, tool_call
from stepengine.workspace.threads import ThreadPool
from tests.servers import Quiet, served

COUNTERPARTS = (("pypi:gunicorn", "27.0.1", "works", "forked workers run agents and tools"),)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
SECONDS = 50


def in_child(act: Callable[[], Any]) -> Any:
    """
    Return what *act* returns in a forked child, as JSON; one that freezes is killed, and fails the test.
    """
    return said_by(*forked(act))


def forked(act: Callable[[], Any]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        # Who waits for what there is only in the parent waits for longer than that.
        loop_thread.JOIN_SECONDS = running.CLOSE_SECONDS = 60.0 * SECONDS
        os.close(reading)
        try:
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(said).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def said_by(pid: int, reading: int) -> Any:
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.readline()  # a child of the child may hold the other end
    _, status = os.waitpid(pid, 0)

    assert 0 == os.waitstatus_to_exitcode(status), "the child froze"
    return json.loads(said)


class Bench:
    """
    A tool in a thread that can be held, and engines that use it.
    """

    def __init__(self) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.torn_down: list[int] = []

        @tool
        def look() -> int:
            """
            Tell which process this is.
            """
            self.arrived.set()
            assert self.go.wait(30)
            return os.getpid()

        def handle(ctx: Any) -> Any:
            try:
                pid = yield from call("look", int)
                return pid
            finally:
                self.torn_down.append(os.getpid())

        self.agent = AgentDefinition("looker", model="test/model", tools=[look], handle_steps=handle)

    @contextmanager
    def held(self, run: Callable[[], Any]) -> Iterator[None]:
        """
        Have a run of the parent stand in its tool.
        """
        self.arrived.clear()
        self.go.clear()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert self.arrived.wait(30)
            yield
        finally:
            self.go.set()
            thread.join()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def pid_of(result: Any) -> int:
    assert RunStatus.COMPLETED is result.status, result.error
    return result.unwrap()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_forked_child_and_parent_both_run_tools_afterwards(bench: Bench) -> None:
    with Engine([bench.agent], models=ScriptedModel([])) as engine:
        before = pid_of(engine.run_sync("looker"))
        child = in_child(lambda: [os.getpid(), pid_of(engine.run_sync("looker"))])
        after = pid_of(engine.run_sync("looker"))

    assert before == after == os.getpid() != child[0] == child[1]


def test_child_forked_during_a_run_leaves_it_to_the_parent(bench: Bench) -> None:
    ended: list[Any] = []
    engine = Engine([bench.agent], models=ScriptedModel([]))

    def child() -> list[Any]:
        bench.go.set()
        mine = pid_of(engine.run_sync("looker"))
        engine.close()
        return [mine == os.getpid(), [*bench.torn_down] == [os.getpid()]]

    with bench.held(lambda: ended.append(engine.run_sync("looker"))):
        told = in_child(child)
    engine.close()

    assert [True, True] == told
    assert [os.getpid()] == [pid_of(one) for one in ended]
    assert [os.getpid()] == bench.torn_down


def test_forked_child_waits_for_no_lock_of_a_parent_thread(bench: Bench, tmp_path: Path) -> None:
    """
    Every lock of the process is held at the moment of the fork.
    """
    engine = Engine(
        [bench.agent],
        models=ScriptedModel([]),
        sessions=MemorySessions(),
        rate_limits=RateLimit(max_concurrency=1),
    )
    engine.run_sync("looker", session_id="s", journal=None)
    engine.run_sync("looker", session_id="s")

    def child() -> bool:
        first = pid_of(engine.run_sync("looker", session_id="s"))
        engine.close()
        return first == os.getpid()

    with engine, every_lock_held() as number:
        told = in_child(child)

    assert told is True
    assert number > 5


@contextmanager
def every_lock_held() -> Iterator[int]:
    """
    Take all locks of the package, and those of its pools, as threads that a child does not have.
    """
    from stepengine.workspace import after_fork

    known = list(after_fork._things)
    held = [one._lock for one in known if isinstance(one, after_fork.Lock)]
    held += [one._ready for one in known if isinstance(one, ThreadPool)]
    held = [one for one in held if one.acquire(blocking=False)]
    patience, after_fork.PATIENCE_SECONDS = after_fork.PATIENCE_SECONDS, 0
    try:
        yield len(held)
    finally:
        after_fork.PATIENCE_SECONDS = patience
        for one in held:
            one.release()


def test_forked_child_is_not_warned_of_its_parents_blocked_loops(bench: Bench) -> None:
    engine = Engine([bench.agent], models=ScriptedModel([]))

    def child() -> list[int]:
        return [len(watchdog._watchdogs), len(watchdog._threads)]

    with engine, bench.held(lambda: engine.run_sync("looker")):
        told = in_child(child)

    assert [0, 0] == told


# --- event loops and connections --------------------------------------------------------------------------------------


class Answers(Quiet):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": f"connection {self.client_address[1]}"}
        reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        text = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", **reply}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.deep
@pytest.mark.smoke
def test_forked_child_has_own_connections_and_keeps_its_parents_open() -> None:
    with served(Answers) as address:
        provider = OpenAIChatProvider("near", base_url=f"{address}/v1", api_key="none")
        agent = AgentDefinition("asker", model="near/m")
        with Engine([agent], models=Models({"near": provider}), pricing=None) as engine:

            def asked() -> str:
                return engine.run_sync("asker", "hello").unwrap()

            def child() -> list[Any]:
                told = [asked(), asked()]
                engine.close()
                return told

            first = asked()
            one, same = in_child(child)
            last = asked()

    assert first == last
    assert one == same != first


@pytest.mark.deep
@pytest.mark.smoke
async def test_child_forked_in_a_loop_starts_its_own_tool_server() -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    from stepengine.adapters.mcp import mcp_tools

    server = Path(__file__).parent.parent / "adapters" / "mcp" / "odd_server.py"
    source = mcp_tools([sys.executable, "-S", "-E", str(server), "plain"], name="odd", start_timeout=30)
    agent = AgentDefinition("worker", model="test/model", tools=[source])
    engine = Engine([agent], models=ScriptedModel(lambda r: "ok" if r.messages[-1].role == "tool" else look))
    look = tool_call("odd__look", {})

    def child() -> str:
        text = engine.run_sync("worker", "Look.").tool_calls[0].result.text
        engine.close()
        return text

    async with engine:
        before = (await engine.run("worker", "Look.")).tool_calls[0].result.text
        pid, reading = forked(child)
        told = await asyncio.to_thread(said_by, pid, reading)
        (connection,) = source._connections.values()
        pipe = connection._live.pipe
        after = (await engine.run("worker", "Look.")).tool_calls[0].result.text
        is_same = next(iter(source._connections.values()))._live.pipe is pipe

    assert "seen" == told
    assert ("seen", "seen", True) == (before, after, is_same)


# --- what is shared by files ------------------------------------------------------------------------------------------


def test_forked_child_enters_a_session_that_its_parent_runs_in(bench: Bench, tmp_path: Path) -> None:
    engine = Engine([bench.agent], models=ScriptedModel([]), sessions=MemorySessions())

    def child() -> bool:
        bench.go.set()
        return pid_of(engine.run_sync("looker", session_id="s")) == os.getpid()

    with engine, bench.held(lambda: engine.run_sync("looker", session_id="s")):
        told = in_child(child)

    assert told is True


def test_forked_child_counts_limits_only_for_its_own_runs() -> None:
    arrived, go = threading.Event(), threading.Event()

    async def held(request: Any) -> str:
        arrived.set()
        await asyncio.to_thread(go.wait, 30)
        return "ok"

    class Held(ScriptedModel):
        async def complete(self, request: Any) -> Any:
            await held(request)
            return await super().complete(request)

    agent = AgentDefinition("asker", model="test/model")
    engine = Engine([agent], models=Held(lambda _: "ok"), rate_limits=RateLimit(max_concurrency=1))

    def child() -> str:
        go.set()
        return engine.run_sync("asker", "hello").unwrap()

    thread = threading.Thread(target=lambda: engine.run_sync("asker", "hello"))
    with engine:
        thread.start()
        assert arrived.wait(30)
        told = in_child(child)
        go.set()
        thread.join()

    assert "ok" == told


@pytest.mark.parametrize("store", ["file", "sqlite"])
@pytest.mark.spec("reliability:SS14")
def test_journal_of_a_dead_owner_is_free_despite_its_fork(bench: Bench, tmp_path: Path, store: str) -> None:
    """
    The owner is a process that is killed in the middle of a run; its own child goes on.
    """

    def journal() -> Any:
        return FileJournal(tmp_path / "run.jsonl") if store == "file" else SqliteJournal(tmp_path / "runs.db", "run")

    kept, gone = os.pipe()

    def owner() -> int:
        engine = Engine([bench.agent], models=ScriptedModel([]))
        bench.go.clear()
        threading.Thread(target=lambda: engine.run_sync("looker", journal=journal()), daemon=True).start()
        assert bench.arrived.wait(30)
        is_up, up = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(up, b".")
            os.close(gone)
            os.read(kept, 1)
            os._exit(0)
        os.read(is_up, 1)  # a child gives back what it inherited when it begins
        return pid

    pid, reading = forked(owner)
    child = said_by(pid, reading)  # the owner has ended without giving anything back
    try:
        os.kill(child, 0)
        writer = journal().writer()
        records = len(journal().records())
        writer.close()
    finally:
        os.close(gone)
        os.close(kept)

    assert records > 0


@pytest.mark.parametrize("kind", ["session", "policy"])
def test_forked_child_keeps_no_short_lived_lock(tmp_path: Path, kind: str) -> None:
    sessions = FileSessions(tmp_path / "sessions")
    (tmp_path / "one").mkdir()
    from stepengine.permissions import policy as policies

    def locked() -> Any:
        return sessions._lock(tmp_path / "one") if kind == "session" else policies._lock_file(tmp_path / "policy.json")

    kept, gone = os.pipe()
    with locked():
        pid = os.fork()
        if not pid:
            os.close(gone)
            os.read(kept, 1)
            os._exit(0)
    entered = threading.Event()

    def enter() -> None:
        with locked():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    is_free = entered.wait(50)
    os.close(gone)
    os.close(kept)
    thread.join()
    os.waitpid(pid, 0)

    assert is_free


def test_parent_and_children_make_ids_of_their_own(bench: Bench) -> None:
    with Engine([bench.agent], models=ScriptedModel([])) as engine:
        engine.run_sync("looker")

        def made() -> str:
            return engine.run_sync("looker").state.run_id

        ids = [in_child(made), in_child(made), made()]

    assert 3 == len({*ids})


# --- servers that fork ------------------------------------------------------------------------------------------------

APP = '''
import os
from stepengine import AgentDefinition, Engine, call, tool
from stepengine.testing import ScriptedModel

@tool
def look() -> int:
    """Tell which process this is."""
    return os.getpid()

def handle(ctx):
    pid = yield from call("look", int)
    return pid

agent = AgentDefinition("looker", model="test/model", tools=[look], handle_steps=handle)
engine = Engine([agent], models=ScriptedModel([]))
PRELOADED = engine.run_sync("looker").unwrap()

def app(environ, start_response):
    text = f"{PRELOADED} {os.getpid()} {engine.run_sync('looker').unwrap()}".encode()
    start_response("200 OK", [("content-length", str(len(text)))])
    return [text]
'''


@pytest.mark.deep
def test_gunicorn_serves_a_preloaded_application_that_ran_a_tool(tmp_path: Path) -> None:
    """
    The workers are forked from a process that has run an agent; the server is gunicorn's own.
    """
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    (tmp_path / "site_app.py").write_text(APP)
    listening = tmp_path / "web.sock"
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--preload",
        "--workers",
        "2",
        "--timeout",
        "20",
        "--bind",
        f"unix:{listening}",
    ]
    server = subprocess.Popen([*command, "site_app:app"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        answers = [asked_over(listening, server) for _ in range(6)]
    finally:
        server.terminate()
        _, said = server.communicate(timeout=30)

    assert {str(server.pid)} == {preloaded for preloaded, _, _ in answers}, said
    assert all(worker == tool != str(server.pid) for _, worker, tool in answers), said


def asked_over(path: Path, server: subprocess.Popen[str]) -> list[str]:
    """
    Return the words of the answer to a request over a Unix socket, as soon as somebody listens there.
    """
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(30)
            line.connect(str(path))
            line.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: line.recv(4096), b"")).partition(b"\r\n\r\n")[2].decode().split()
        time.sleep(0.05)
    pytest.fail("nobody listens")


@pytest.mark.deep
async def test_a_child_ends_nothing_that_its_parent_has_under_way() -> None:
    """Not even when it collects garbage: what only the parent's event loop would continue is not garbage."""
    ended: list[int] = []
    arrived = asyncio.Event()

    @tool
    async def waits() -> str:
        """Wait."""
        try:
            arrived.set()
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(os.getpid())
        return "never"

    def child() -> list[int]:
        gc.collect()
        return ended

    agent = AgentDefinition("waiter", tools=[waits], handle_steps=lambda ctx: (yield from call(waits)))
    engine = Engine([agent], models=ScriptedModel([]))
    engine.start("waiter")
    await arrived.wait()
    told = in_child(child)
    with pytest.warns(ResourceWarning, match="the engine was closed before the result of"):
        await engine.aclose()

    assert [] == told
    assert [os.getpid()] == ended


def test_forked_child_learns_that_its_parent_holds_the_batch_file(tmp_path: Path) -> None:
    class Batching(ScriptedModel):
        def encode_batch_member(self, request: Any) -> Any:
            return {}

    provider: Any = Batched(Batching([]), file=tmp_path / "batches.db")
    provider._get_or_open_sent_calls()

    def child() -> str:
        try:
            provider._get_or_open_sent_calls()
        except DataError as error:
            return error.message
        return "opened"

    told = in_child(child)
    provider._out.close()

    assert "another process uses it; give each process its own file" in told
