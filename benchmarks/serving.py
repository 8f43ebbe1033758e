"""
How many runs a server carries, and what who watches them sees: ``python -m benchmarks.serving [--peers DIR] [--runs N] [--watchers N]``.

The same scripted work on ``stepengine serve``, with a folder and with a database, on LangGraph's dev server, and on ADK's ``api_server``: a
model that takes 50 ms asks for one tool call and then ends. All runs are started at once, each with a watcher of its own; then idle
watchers are connected to runs whose tool takes an hour. Each server is a process of its own on loopback, and is measured from outside: its
answers by the clock, its CPU and memory by the system. What did not come to its end is counted, and said. ``--make DIR`` makes the
environments of the peers first. The times are those of one busy machine; what counts is how servers of one call stand to each other.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import ENVIRONMENTS, Peers, make

SERVED = Path(__file__).parent / "servers"
RUNS = 1_000
WATCHERS = 5_000
READERS = 100
"""Watchers of one idle run, where a run may have several."""
DELAY = 0.05
READY_SECONDS = 120.0
LOAD_SECONDS = 300.0
IDLE_SECONDS = 10.0
AT_ONCE = 250
"""Idle watchers that connect at the same time."""
CALLERS = 10
"""Tokens among which requests are spread: what one caller may ask is limited."""
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PEERS = ("langgraph_server", "google_adk")


class Refused(Exception):
    """A server answered with an error."""


# --- a client that costs little ---------------------------------------------------------------------------------------


async def lines_of(port: int, method: str, path: str, headers: Mapping[str, str], body: object) -> AsyncIterator[bytes]:
    """
    Give the lines of a response's body as they come.

    Raises:
        Refused: when its status is none of success.
    """
    content = b"" if body is None else json.dumps(body).encode()
    told = {"host": f"127.0.0.1:{port}", "connection": "close", "content-length": str(len(content)), **headers}
    if content:
        told["content-type"] = "application/json"
    head = "".join([f"{name}: {value}\r\n" for name, value in told.items()])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        said = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = said.split(b" ", 2)[1].decode()
        if not status.startswith("2"):
            raise Refused(status)
        is_chunked = b"transfer-encoding: chunked" in said
        rest = b""
        while True:
            piece = await _chunk(reader) if is_chunked else await reader.read(65_536)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest
    finally:
        writer.close()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).strip() or b"0", 16)
    piece = await reader.readexactly(size)
    await reader.readline()
    return piece


async def answer_of(port: int, path: str, headers: Mapping[str, str], body: object) -> Any:
    """Return the JSON that a request is answered with."""
    return json.loads(b"\n".join([line async for line in lines_of(port, "POST", path, headers, body)]))


# --- the servers ------------------------------------------------------------------------------------------------------


class Server(abc.ABC):
    """
    A server under load.

    Args:
        python: The interpreter of its environment.
        folder: Where its files may be.
        runs: How many runs it is to have at a time.

    Attributes:
        name: How the table calls it.
        readers: How many watchers one idle run has here.
    """

    name = ""
    readers = READERS

    def __init__(self, python: str, folder: Path, runs: int) -> None:
        self.python, self.folder, self.runs = python, folder, runs
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    @abc.abstractmethod
    def command(self) -> list[str]:
        """Return what is typed to start it."""

    @abc.abstractmethod
    def ready_path(self) -> str:
        """Return what is asked to see whether it is there."""

    @abc.abstractmethod
    async def start(self, agent: str, number: int) -> Any:
        """Start a run, and return what watches it."""

    @abc.abstractmethod
    def watch(self, run: Any) -> AsyncIterator[bytes]:
        """Give the lines of a run's events."""

    @abc.abstractmethod
    def ends(self, line: bytes) -> bool:
        """Return whether a line says that the run has ended well."""

    @abc.abstractmethod
    def works(self, line: bytes) -> bool:
        """Return whether a line says that the tool was asked for."""

    @contextmanager
    def open(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the server within the block."""
        environment = {**os.environ, "DELAY": str(DELAY), "LANGSMITH_TRACING": "false"}
        log = self.folder / "log.txt"
        with log.open("wb") as said:
            process = subprocess.Popen(
                self.command(), cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    async def ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it answers."""
        end = time.monotonic() + READY_SECONDS
        while True:
            with suppress(OSError, Refused, asyncio.IncompleteReadError):
                async for _ in lines_of(self.port, "GET", self.ready_path(), {}, None):
                    pass
                return
            if process.poll() is not None or time.monotonic() > end:
                msg = f"{self.name} does not start: {(self.folder / 'log.txt').read_text()[-2_000:]}"
                raise RuntimeError(msg)
            await asyncio.sleep(0.1)


class Ours(Server):
    """``stepengine serve`` with a folder of journals."""

    name = "stepengine serve, a folder"
    place = "runs"

    def __init__(self, python: str, folder: Path, runs: int) -> None:
        super().__init__(python, folder, runs)
        from stepengine.server import Tokens

        tokens = Tokens.open(folder / "tokens.json")
        self._tokens = [tokens.add(f"caller{number}", ["read", "run"]) for number in range(CALLERS)]

    def command(self) -> list[str]:
        """Return what is typed."""
        typed = ["-m", "stepengine", "serve", str(SERVED / "stepengine_agents.py"), "--port", str(self.port)]
        typed += [
            "--tokens",
            "tokens.json",
            "--runs",
            self.place,
            "--max-live",
            str(max(64, self.runs)),
            "--drain",
            "0",
        ]
        return [self.python, *typed]

    def ready_path(self) -> str:
        """Return its own path for that."""
        return "/ready"

    async def start(self, agent: str, number: int) -> Any:
        """Start a run."""
        headers = {"authorization": f"Bearer {self._tokens[number % CALLERS]}"}
        answer = await answer_of(self.port, "/runs", headers, {"agent": agent, "prompt": f"go {number}"})
        return answer["run_id"], headers

    def watch(self, run: Any) -> AsyncIterator[bytes]:
        """Watch it."""
        return lines_of(self.port, "GET", f"/runs/{run[0]}/events", run[1], None)

    def ends(self, line: bytes) -> bool:
        """Look for its last event."""
        return line.startswith(b"data: ") and b'"type":"run_finished"' in line and b'"status":"completed"' in line

    def works(self, line: bytes) -> bool:
        """Look for the call."""
        return line.startswith(b"event: tool_started")


class OursInDatabase(Ours):
    """``stepengine serve`` with a database."""

    name = "stepengine serve, SQLite"
    place = "runs.db"


class LangGraph(Server):
    """LangGraph's dev server, with as many jobs at a time as there are runs; by default it has 10."""

    name = "langgraph dev"

    def command(self) -> list[str]:
        """Return what is typed."""
        shutil.copytree(SERVED / "langgraph_app", self.folder, dirs_exist_ok=True)
        typed = [
            "dev",
            "--no-browser",
            "--no-reload",
            "--port",
            str(self.port),
            "--n-jobs-per-worker",
            str(max(64, self.runs)),
        ]
        return [str(Path(self.python).with_name("langgraph")), *typed, "--server-log-level", "ERROR"]

    def ready_path(self) -> str:
        """Return its own path for that."""
        return "/ok"

    async def start(self, agent: str, number: int) -> Any:
        """Start a run in a thread of its own."""
        thread = (await answer_of(self.port, "/threads", {}, {}))["thread_id"]
        message = {"role": "user", "content": f"go {number}"}
        asked = {"assistant_id": agent, "input": {"messages": [message]}, "stream_mode": ["updates"]}
        run = await answer_of(self.port, f"/threads/{thread}/runs", {}, {**asked, "stream_resumable": True})
        return f"/threads/{thread}/runs/{run['run_id']}/stream"

    def watch(self, run: Any) -> AsyncIterator[bytes]:
        """Join its stream from the first event on."""
        return lines_of(self.port, "GET", run, {"last-event-id": "-1"}, None)

    def ends(self, line: bytes) -> bool:
        """Look for what the model says last."""
        return line.startswith(b"data: ") and b'"content":"done"' in line

    def works(self, line: bytes) -> bool:
        """Look for the call."""
        return line.startswith(b"data: ") and b'"tool_calls":[{' in line


class Adk(Server):
    """ADK's ``api_server``: to run is to watch, in one request."""

    name = "adk api_server"
    readers = 1

    def command(self) -> list[str]:
        """Return what is typed."""
        shutil.copytree(SERVED / "adk_app", self.folder / "agents", dirs_exist_ok=True)
        typed = ["api_server", "--no-reload", "--port", str(self.port), "--log_level", "error", "agents"]
        return [str(Path(self.python).with_name("adk")), *typed]

    def ready_path(self) -> str:
        """Return what it has."""
        return "/list-apps"

    async def start(self, agent: str, number: int) -> Any:
        """Make a session, which is what there is before the run."""
        session = (await answer_of(self.port, f"/apps/{agent}/users/u/sessions", {}, {}))["id"]
        message = {"role": "user", "parts": [{"text": f"go {number}"}]}
        return {"appName": agent, "userId": "u", "sessionId": session, "newMessage": message, "streaming": False}

    def watch(self, run: Any) -> AsyncIterator[bytes]:
        """Run, and watch."""
        return lines_of(self.port, "POST", "/run_sse", {}, run)

    def ends(self, line: bytes) -> bool:
        """Look for what the model says last."""
        return line.startswith(b"data: ") and b'"text":"done"' in line

    def works(self, line: bytes) -> bool:
        """Look for the call."""
        return line.startswith(b"data: ") and b'"functionCall"' in line


class AdkInMemory(Adk):
    """The same with sessions in memory; by default they are in an SQLite file beside each agent."""

    name = "adk api_server, in memory"

    def command(self) -> list[str]:
        """Return what is typed."""
        *typed, agents = super().command()
        return [*typed, "--session_service_uri", "memory://", agents]


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """
    What became of one load; times in seconds from the moment at which a client began.

    Attributes:
        asked: How many clients there were.
        starts: When each start was answered.
        firsts: When each had its first event.
        wholes: When each had what it waited for.
        failed: What happened to the others, and to how many.
        seconds: How long all of it took.
        cpu: Seconds of CPU of the server.
        memory: Bytes that it grew by.
        idle: Share of a core while nothing happened.
    """

    asked: int
    starts: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    idle: float = 0.0

    async def taken(self, work: Awaitable[None]) -> None:
        """Do the work of one client, and note why it did not come to its end."""
        try:
            await work
        except Refused as error:
            self.failed[f"HTTP {error}"] += 1
        except (OSError, EOFError, ValueError) as error:
            self.failed[type(error).__name__] += 1


def tree_of(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += tree_of(int(child))
    return found


def spent(pid: int) -> float:
    """Return the seconds of CPU that a process and those below it used."""
    total = 0
    for each in tree_of(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def held(pid: int) -> int:
    """Return the bytes of memory that a process and those below it have."""
    total = 0
    for each in tree_of(pid):
        with suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * PAGE
    return total


@dataclass
class Client:
    """
    Somebody who starts a run, or watches one.

    Attributes:
        server: The server.
        load: Where what becomes of it is noted.
        began: When it began.
        there: Is set when it has what it waited for, or never gets it.
    """

    server: Server
    load: Load
    began: float = field(default_factory=time.perf_counter)
    there: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, agent: str, number: int) -> Any:
        """Start a run, and note when that was answered."""
        run = await self.server.start(agent, number)
        self.load.starts.append(time.perf_counter() - self.began)
        return run

    async def follow(self, run: Any, wanted: Callable[[bytes], bool], stay: asyncio.Event | None = None) -> None:
        """Watch a run until what is wanted comes, and where there is something to *stay* for, until that comes, too."""
        lines, is_first = self.server.watch(run), True
        async for line in lines:
            if is_first and line.startswith(b"data: "):
                self.load.firsts.append(time.perf_counter() - self.began)
                is_first = False
            if wanted(line):
                self.load.wholes.append(time.perf_counter() - self.began)
                break
        else:
            self.load.failed["stream ended early"] += 1
            return
        self.there.set()
        if stay is not None:
            await self._stay(lines, stay)

    async def _stay(self, lines: AsyncIterator[bytes], stay: asyncio.Event) -> None:
        ending = asyncio.ensure_future(stay.wait())
        reading = asyncio.ensure_future(_all_of(lines))
        await asyncio.wait((ending, reading), return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            self.load.failed["cut while idle"] += 1
        ending.cancel()
        reading.cancel()
        await asyncio.gather(ending, reading, return_exceptions=True)


async def _all_of(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        pass


async def finished(load: Load, tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Wait for clients, and count those that take too long."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    if late:
        load.failed[f"not done after {seconds:.0f} s"] += len(late)


async def all_at_once(server: Server, pid: int, count: int, seconds: float) -> Load:
    """Start so many runs at once, each with a watcher."""
    load = Load(count)

    async def one(number: int) -> None:
        client = Client(server, load)
        await client.follow(await client.start("working", number), server.ends)

    before, memory, began = spent(pid), held(pid), time.perf_counter()
    await finished(load, [asyncio.ensure_future(load.taken(one(number))) for number in range(count)], seconds)
    load.seconds, load.cpu, load.memory = time.perf_counter() - began, spent(pid) - before, held(pid) - memory
    return load


async def idle(server: Server, pid: int, count: int, seconds: float, rest: float) -> Load:
    """Connect so many watchers to runs in which nothing happens."""
    load, stay, gate = Load(count), asyncio.Event(), asyncio.Semaphore(AT_ONCE)
    runs: list[Any] = []
    if server.readers > 1:
        runs = [await server.start("waiting", number) for number in range(-(-count // server.readers))]
        # Each is watched once before, so that what a run costs is not taken for what a watcher costs.
        seen = Load(len(runs))
        known = [seen.taken(Client(server, seen).follow(run, server.works)) for run in runs]
        await finished(seen, [asyncio.ensure_future(one) for one in known], seconds)

    async def one(number: int) -> None:
        async with gate:
            client = Client(server, load)
            run = runs[number // server.readers] if runs else await client.start("waiting", number)
            task = asyncio.ensure_future(client.follow(run, server.works, stay))
            task.add_done_callback(lambda _: client.there.set())
            await client.there.wait()
        connected.release()
        await task

    connected = asyncio.Semaphore(0)
    before, memory = spent(pid), held(pid)
    tasks = [asyncio.ensure_future(load.taken(one(number))) for number in range(count)]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for _ in range(count):
                await connected.acquire()
                if sum(load.failed.values()) + len(load.wholes) >= count:
                    break
    load.cpu, load.memory = spent(pid) - before, held(pid) - memory
    quiet = spent(pid)
    await asyncio.sleep(rest)
    load.idle = (spent(pid) - quiet) / rest
    stay.set()
    await finished(load, tasks, 30.0)
    return load


# --- the table --------------------------------------------------------------------------------------------------------


def at(times: list[float]) -> str:
    """Return the median and the 99th of a hundred, in milliseconds."""
    if len(times) < 2:
        return "-"
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return f"{cuts[49] * 1_000:,.0f} / {cuts[98] * 1_000:,.0f}"


def said(failed: Counter[str]) -> str:
    """Return what went wrong."""
    return ", ".join([f"{count:,} {what}" for what, count in failed.most_common()]) or "-"


def run_row(name: str, load: Load) -> str:
    """Return the row of a load of runs."""
    done = len(load.wholes)
    cells = [
        name,
        f"{done:,} of {load.asked:,}",
        at(load.starts),
        at(load.firsts),
        at(load.wholes),
        f"{load.seconds:.1f}",
    ]
    cells += [
        f"{load.cpu / done * 1_000:.1f}" if done else "-",
        f"{load.memory / max(1, done) / 1_024:.0f}",
        said(load.failed),
    ]
    return f"| {' | '.join(cells)} |"


def idle_row(name: str, load: Load) -> str:
    """Return the row of a load of idle watchers."""
    done = len(load.wholes)
    cells = [name, f"{done:,} of {load.asked:,}", at(load.firsts), f"{load.memory / max(1, done) / 1_024:.0f}"]
    cells += [f"{load.cpu / done * 1_000:.1f}" if done else "-", f"{load.idle:.1%}", said(load.failed)]
    return f"| {' | '.join(cells)} |"


RUN_HEAD = """| runs at once | ended | start answered, p50 / p99 ms | first event | end | all, s | CPU ms a run | KiB kept a run | failed |
|---|---|---|---|---|---|---|---|---|"""
IDLE_HEAD = """| idle watchers | connected | first event, p50 / p99 ms | KiB a watcher | CPU ms to connect | CPU while idle | failed |
|---|---|---|---|---|---|---|"""


def raise_limit() -> int:
    """Let this process, and the servers below it, have as many open connections as the system allows; return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def servers(peers: Peers, only: list[str]) -> list[tuple[type[Server], str]]:
    """Return who is measured, each with its interpreter."""
    known: list[tuple[str, type[Server], str]] = [
        ("folder", Ours, sys.executable),
        ("database", OursInDatabase, sys.executable),
    ]
    if peers.place is not None:
        known += [
            ("langgraph", LangGraph, peers.python("langgraph_server")),
            ("adk", Adk, peers.python("google_adk")),
            ("adk-memory", AdkInMemory, peers.python("google_adk")),
        ]
    return [(kind, python) for name, kind, python in known if not only or name in only]


async def measured(kind: type[Server], python: str, asked: argparse.Namespace) -> tuple[str, Load, Load]:
    """Measure one server."""
    loads = []
    for work in ("runs", "idle"):
        with tempfile.TemporaryDirectory() as folder:
            server = kind(python, Path(folder), asked.runs if work == "runs" or kind.readers > 1 else asked.watchers)
            with server.open() as process:
                await server.ready(process)
                # What is imported at the first run is none of the load.
                warm = Load(1)
                await warm.taken(Client(server, warm).follow(await server.start("working", 0), server.ends))
                if work == "runs":
                    loads.append(await all_at_once(server, process.pid, asked.runs, asked.seconds))
                else:
                    loads.append(await idle(server, process.pid, asked.watchers, asked.seconds, asked.rest))
    return kind.name, loads[0], loads[1]


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers",
        metavar="DIR",
        help="the folder that `python -m benchmarks.peers --make DIR` filled; else only stepengine",
    )
    parser.add_argument(
        "--make", metavar="DIR", type=Path, help="make the environments of the peers there first, and use them"
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="runs at once")
    parser.add_argument("--watchers", type=int, default=WATCHERS, help="idle watchers")
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS, help="how long one load may take")
    parser.add_argument("--rest", type=float, default=IDLE_SECONDS, help="seconds in which idle CPU is measured")
    parser.add_argument(
        "--only",
        choices=["folder", "database", "langgraph", "adk", "adk-memory"],
        action="append",
        default=[],
        help="may be repeated",
    )
    asked = parser.parse_args()
    if asked.make is not None:
        make(asked.make, list(PEERS), newest=False)
    limit = raise_limit()
    print(
        f"{time.strftime('%-d %B %Y')}, {os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}, ",
        end="",
    )
    print(f"load {os.getloadavg()[0]:.1f} before, {limit:,} descriptors; a model that takes {DELAY * 1_000:.0f} ms")
    for name in PEERS if asked.peers or asked.make else ():
        print(f"{name}: {' '.join(ENVIRONMENTS[name])}")
    rows: list[tuple[str, Load, Load]] = []
    for kind, python in servers(Peers(asked.peers or asked.make), asked.only):
        rows.append(asyncio.run(measured(kind, python, asked)))
        print(run_row(rows[-1][0], rows[-1][1]), file=sys.stderr, flush=True)
        print(idle_row(rows[-1][0], rows[-1][2]), file=sys.stderr, flush=True)
    print("\n".join(["", RUN_HEAD, *[run_row(name, load) for name, load, _ in rows]]))
    print("\n".join(["", IDLE_HEAD, *[idle_row(name, load) for name, _, load in rows]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
