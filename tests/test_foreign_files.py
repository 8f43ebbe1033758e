"""
Files of other programs are never changed: no command and no method that takes a path writes to one, locks it in a way that leaves a
trace, or makes a file next to it.

`COMMANDS` has a line for each path that a command takes, `METHODS` one for each public function, class and method that takes a path. What is
not in these tables is named by a test. `@` is the file of another program.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib
import inspect
import io
import itertools
import json
import os
import pickle
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import uvicorn
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine, EventFile, Schedule, Scheduler, Waker
from stepengine.cli.app import app
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.debugging import debug
from stepengine.engine import trust
from stepengine.errors import JournalError, StepEngineError
from stepengine.evaluation import blame, impact, replay_waiting
from stepengine.events import RunStarted
from stepengine.journal import (
    FileJournal,
    SqliteJournal,
    as_journal,
    check_recorded_calls,
    diff,
    repair,
    send_message,
    undo,
)
from stepengine.journal.sources import DATABASES
from stepengine.models import AnthropicProvider, Batched
from stepengine.permissions import Policy, PolicyFile
from stepengine.server import Tokens, Webhooks
from stepengine.server import app as make_server
from stepengine.sessions import FileSessions, Session, SessionInfo, SqliteSessions
from stepengine.testing import Cassette, CassetteFixture, JournalFixture, record_program, replay_program, simulate
from tests.forked_processes import run as run_process

HEAD = (
    b'{"kind":"head","format":"stepengine.journal/1","engine":"0.1.0","agent":"a","definition":"0","run":"r","seed":"0",'
    b'"created":"2026-01-01T00:00:00.000Z","crc":"00000000"}\n'
)
TABLE = "CREATE TABLE invoices (id INTEGER PRIMARY KEY, amount REAL)"


def make_database(*statements: str, keeps_log: bool = False) -> tuple[bytes, bytes]:
    """
    Return an SQLite database of another program and its write-ahead log, which is left where a program was killed.
    """
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.db")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            for statement in statements:
                database.execute(statement)
            log = path.with_name("made.db-wal")
            if keeps_log:
                return path.read_bytes(), log.read_bytes()
        return path.read_bytes(), b""


def make_archive(kind: str) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr(zipfile.ZipInfo("a.txt"), "text")
    else:
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return made.getvalue()


def make_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)) + chunk(b"IEND", b"")


@cache
def foreign_files() -> dict[str, bytes]:
    """
    Return files of other programs by their names.
    """
    plain, _ = make_database(TABLE, "INSERT INTO invoices VALUES (1, 2.5)")
    logged, log = make_database(
        "PRAGMA journal_mode=WAL", TABLE, "INSERT INTO invoices VALUES (1, 2.5)", keeps_log=True
    )
    closed, _ = make_database("PRAGMA journal_mode=WAL", TABLE)
    ours, _ = make_database(
        "CREATE TABLE lines (run TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID"
    )
    other_id, _ = make_database("PRAGMA application_id = 252006674", TABLE)
    line, pretty = json.dumps({"name": "app", "port": 80}).encode(), json.dumps({"a": [1, 2]}, indent=2).encode()
    return {
        # One line, with and without its end: the last record of a journal looks like this after a crash.
        "config.json": line, "settings.json": line + b"\n", "package.json": pretty, "list.json": b"[1, 2, 3]", "deep.json": b"{" * 9,
        "rows.jsonl": b'{"a":1}\n{"a":2}\n', "row.jsonl": b'{"a":1}', "open.jsonl": b'{"a":1}\n{"a"', "kind.jsonl": b'{"kind":"event","id":1}\n',
        "chat.jsonl": b'{"role":"user","content":"hello"}\n', "types.jsonl": b'{"type":"user","message":"hi"}\n',
        "cut.jsonl": HEAD[:70], "short.jsonl": HEAD[:20], "nearly.jsonl": HEAD[:-3], "later.jsonl": b"\n" + HEAD,
        "run.jsonl.mail": b"From: ann\nTo: bob\n\nHello", "archive.zip": make_archive("zip"), "archive.tar": make_archive("tar"),
        "page.html.gz": gzip.compress(b"page", mtime=0), "picture.png": make_png(), "book.pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n%%EOF",
        "shop.db": plain, "shop.sqlite": plain, "logged.db": logged, "logged.db-wal": log, "closed.sqlite3": closed, "lines.db": ours,
        "other.db": other_id, "plain": plain, "text.db": b"not a database", "long.db": b"not a database " * 100, "cut.db": plain[:99],
        "notes.txt": b"buy tea", "lines.txt": b"buy tea\nand bread\n", "windows.txt": b"one\r\ntwo\r\n", "utf16.txt": "tea".encode("utf-16"),
        "values.yaml": b"a: 1\nb: [2]\n", "compose.yml": b"services:\n  web: {}\n", "table.csv": b"a,b\n1,2\n", "data.pickle": pickle.dumps({"a": 1}),
        "program": b"\x7fELF\x02\x01\x01" + b"\0" * 9, "image.bin": b"\0" * 512, "latin.txt": "caf\u00e9".encode("latin-1"), "blank.txt": b"\n\n",
        "script.sh": b"#!/bin/sh\nexit 0\n", "pyproject.toml": b"[project]\nname = 'a'\n",
    }  # fmt: skip


NAMES = tuple(foreign_files())
MODES = (0o644, 0o640, 0o664, 0o600)
OLD_NS = 1_000_000_000_123_456_789


class Foreign:
    """
    A folder of files of other programs, and a working folder with an agent.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.work = tmp_path / "foreign", tmp_path / "work"
        self.folder.mkdir()
        self.work.mkdir()
        self.fill()
        (self.work / "a.py").write_text(AGENT)
        self.before = self.look()

    def fill(self) -> None:
        for number, (name, data) in enumerate(foreign_files().items()):
            path = self.folder / name
            path.write_bytes(data)
            path.chmod(MODES[number % len(MODES)])
            os.utime(path, ns=(OLD_NS, OLD_NS + number))

    def look(self) -> dict[str, tuple[bytes, int, int]]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            status = path.stat()
            found[path.relative_to(self.folder).as_posix()] = (
                path.read_bytes() if path.is_file() else b"", status.st_mode, status.st_mtime_ns,
            )  # fmt: skip
        return found

    def changed(self) -> list[str]:
        """
        Return the names of files that were changed, made or removed.
        """
        now = self.look()
        return sorted(name for name in {*now, *self.before} if now.get(name) != self.before.get(name))


AGENT = """\
from stepengine import AgentDefinition


def handle_steps(ctx):
    yield from ()
    return "done"


agent = AgentDefinition("a", handle_steps=handle_steps)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    made = Foreign(tmp_path)
    monkeypatch.setattr(trust, "is_trusted", lambda folder: True)
    monkeypatch.setattr(uvicorn.Server, "serve", _serve_nothing)
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(made.work)
    return made


async def _serve_nothing(server: uvicorn.Server, sockets: Any = None) -> None:
    """
    Stand in for a server that is stopped at once.
    """


# --- commands -------------------------------------------------------------------------------------------------------

COMMANDS = """
init @
demo --config @
run @ Go -q
run a.py Go -q --journal @
run a.py Go -q --journal @#r
run a.py Go -q --params @@
run a.py Go -q --script @
chat @ Hello --plain
runs --schedules @
runs --schedules a.py --runs @
runs --schedules a.py --db @@
show @
show @ @
show @#r
show @ --html
show @ --html -o page.html
show @ --agent a.py --html
show good.jsonl --html -o @
studio @ --no-open
studio . --no-open --runs @
studio . --no-open --reports @
studio . --no-open --tokens @
resume @ -q
resume @#r -q
resume @ -q --on-divergence extend
resume --due @
resume --due . --agents @
resume good.jsonl -q --agent @
replay @
fork @ --at -1
fork good.jsonl --at #-1 --into @ -q
fork good.jsonl --at #-1 --into @#r -q
fork good.jsonl --at #-1 --into forked.jsonl --edit @@ -q
eval @
eval @ --agent base=@
eval @ --out out
eval a.py --out @
eval a.py --against @
eval a.py --recheck @
eval a.py --continue @
serve a.py --port 0 --runs @
serve a.py --port 0 --runs @@
serve a.py --port 0 --tokens @
serve a.py --port 0 --reports @
serve a.py --port 0 --webhooks @
serve @ --port 0
test @
test --chaos a.py -n 1 --results @@
debug @
undo @
send @ Hello
send @#r Hello
cancel @
acp @
journal check @
journal repair @
journal repair @ --seal
journal repair @ --until 1
journal repair good.jsonl --until 1 --into @
journal repair good.jsonl --seal --against @
journal scrub @ copy.jsonl
journal scrub good.jsonl @
journal export r --into @ --db @@
journal import @ --db postgresql://127.0.0.1:9/none
journal import good.jsonl --db @@
compare diff @ good.jsonl
compare diff good.jsonl @
compare impact @
compare impact good.jsonl --baseline @
compare blame @
compare pin @
compare pin good.jsonl --dir @
compare improve @ --eval a.py
compare improve a.py --eval @
compare improve a.py --eval a.py --out @
compare improve a.py --continue @
compare price @
agents check @
agents trust @
config policy @
config policy good.jsonl --against @
mcp serve a.py --journals @
mcp serve @
cassette record @ -- python -c pass
cassette replay @ -- python -c pass
deploy worker @
deploy worker a.py --embedded-db @
tokens add ann --file @
tokens list --file @
tokens revoke ann --file @
""".strip().splitlines()
SHARED = {"--config", "--script", "--agent", "--params", "--db"}
"""Options that one function reads for all commands; one line has each of them."""
WITHOUT_PATHS = {
    "agents tools", "agents agree", "agents list", "agents models", "ask", "config show", "config doctor", "mcp inspect",
    "deploy submit", "deploy status", "deploy release", "deploy takeover", "deploy retry", "deploy migrate", "deploy gc",
}  # fmt: skip
"""Commands without a path, or with those of ``SHARED`` alone."""
PATH_NAME = re.compile(r"FILE|FOLDER|PATH|DIR|PLACE|\bDB\b|RUNS|COPY")
ADDRESS = "N|PATH#N"


def list_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """
    Give all commands of the command line with their parameters.
    """
    names = getattr(command, "commands", None)
    if names is None:
        yield " ".join(words), command.params
        return
    for name in names:
        yield from list_commands(names[name], (*words, name))


def paths_without_line() -> Iterator[str]:
    every = [line.split() for line in COMMANDS]
    for name, parameters in list_commands(typer.main.get_command(app)):
        own = [line.split() for line in COMMANDS if f"{line} ".startswith(f"{name} ")]
        if not own and name not in WITHOUT_PATHS:
            yield name
        for one in parameters:
            if one.metavar is None or one.metavar == ADDRESS or PATH_NAME.search(one.metavar) is None:
                continue
            lines = own if SHARED.isdisjoint(one.opts) else every
            if one.param_type_name == "argument":
                at = len(name.split())
                is_there = any("@" in word for words in lines for word in words[at : at + 2])
            else:
                is_there = any(
                    word in one.opts and "@" in after for words in lines for word, after in itertools.pairwise(words)
                )
            if not is_there:
                yield f"{name} {one.opts[-1]}"


@pytest.mark.deep
@pytest.mark.smoke
def test_every_path_of_a_command_is_in_the_table() -> None:
    assert [] == [*paths_without_line()]


def record_good_run(work: Path) -> None:
    agent = AgentDefinition("a", handle_steps=_finish)
    with Engine([agent]) as engine:
        engine.run_sync("a", "Go", journal=work / "good.jsonl")


def _finish(ctx: Any) -> Any:
    yield from ()
    return "done"


IN_PROCESSES = ("acp", "mcp")


def run_command(line: str, file: Path) -> None:
    run = file.name + "#r" if file.suffix in DATABASES else file.name
    places = {"@": file, "@@": f"@{file}", "@#r": file.with_name(run), "base=@": f"base={file}"}
    words = [str(places.get(word, word)) for word in line.split()]
    if line.startswith(IN_PROCESSES):  # they speak by the descriptors of the process
        run_process(
            [sys.executable, "-m", "stepengine", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        )
        return
    result = CliRunner().invoke(app, words)

    assert result.exception is None or isinstance(result.exception, SystemExit), (line, file.name, result.exception)


WRITING = re.compile(
    r"--journal |--into |--runs |--tokens |--file |record |^(?:send|cancel|resume|fork|undo) @|--seal$|scrub good"
)


def check_files_unchanged(foreign: Foreign, line: str, names: Iterable[str]) -> None:
    record_good_run(foreign.work)
    for name in names:
        run_command(line, foreign.folder / name)

        assert [] == foreign.changed(), name


@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize(
    "line", [line if WRITING.search(line) else pytest.param(line, marks=pytest.mark.deep) for line in COMMANDS]
)
def test_commands_leave_third_party_files_unchanged(foreign: Foreign, line: str) -> None:
    """
    Each with a ninth of the files: those that open a store in the fast suite, all in the deep one.
    """
    check_files_unchanged(foreign, line, NAMES[COMMANDS.index(line) % 9 :: 9])


@pytest.mark.deep
@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize("line", [*filter(WRITING.search, COMMANDS)])
def test_commands_that_open_stores_leave_every_kind_of_file_unchanged(foreign: Foreign, line: str) -> None:
    check_files_unchanged(foreign, line, NAMES)


# --- methods --------------------------------------------------------------------------------------------------------


def with_engine(act: Callable[[Engine, Path], object]) -> Callable[[Path], object]:
    def call(file: Path) -> object:
        with Engine([AgentDefinition("a", handle_steps=_finish)]) as engine:
            return act(engine, file)

    return call


def awaited(act: Callable[[Path], Any]) -> Callable[[Path], object]:
    def call(file: Path) -> object:
        async def wait() -> object:
            return await act(file)

        return asyncio.run(wait())

    return call


def write_journal(file: Path) -> None:
    """
    Try each method of a journal that writes.
    """
    for kind, given in ((FileJournal, []), (SqliteJournal, ["r"])):
        for act in (
            lambda journal: journal.writer().close(),
            lambda journal: journal.replace([]),
            lambda journal: journal.discard(),
            lambda journal: journal.lock()(),
            lambda journal: journal.mailbox().read(),
            lambda journal: journal.append_bytes(b"x", 0),
            lambda journal: journal.records(),
            lambda journal: journal.head(),
            lambda journal: journal.is_held(),
        ):
            with contextlib.suppress(StepEngineError, OSError):
                act(kind(file, *given))


def write_mailbox(file: Path) -> None:
    """
    Send to a journal whose mailbox is the file of another program.
    """
    journal = Path.cwd() / f"{file.name}.jsonl"
    shutil.copy(Path.cwd() / "good.jsonl", journal)
    box = journal.with_name(f"{journal.name}.mail")
    box.write_bytes(file.read_bytes())
    box.chmod(0o600)
    os.utime(box, ns=(OLD_NS, OLD_NS))
    engine_journal = FileJournal(journal)
    for act in (lambda: send_message(engine_journal, "topic", "Hello"), engine_journal.discard):
        with pytest.raises(JournalError, match="not a mailbox of stepengine and was left unchanged"):
            act()
    assert (file.read_bytes(), OLD_NS, True) == (box.read_bytes(), box.stat().st_mtime_ns, journal.exists())


def write_sessions(file: Path) -> None:
    store = SqliteSessions(file)
    store.save(Session(info=SessionInfo(session_id="x")))


def write_session_files(file: Path) -> None:
    """
    Save a session in a folder whose history is the file of another program.
    """
    for name in ("history.jsonl", "metadata.json", "state.json", "history.1.jsonl", "state.1.json"):
        place = Path.cwd() / file.name / name / "x" / name
        place.parent.mkdir(parents=True)
        place.write_bytes(file.read_bytes())
        place.chmod(0o644)
        os.utime(place, ns=(OLD_NS, OLD_NS))
        store = FileSessions(place.parents[1])
        for act, given in (
            (store.save, Session(info=SessionInfo(session_id="x"))),
            (store.load, "x"),
            (store.delete, "x"),
        ):
            with pytest.raises(StepEngineError, match="of a session of stepengine and was left unchanged"):
                act(given)
        assert [place] == [*place.parent.iterdir()]
        assert (file.read_bytes(), 0o644, OLD_NS) == (
            place.read_bytes(), place.stat().st_mode & 0o777, place.stat().st_mtime_ns,
        )  # fmt: skip


def write_wake_index(file: Path) -> None:
    """
    Use a folder of journals in which the file of the index belongs to another program.
    """
    from stepengine.journal.wake_index import WAKING, WakeIndex

    place = Path.cwd() / f"runs of {file.name}" / WAKING
    place.parent.mkdir()
    place.write_bytes(file.read_bytes())
    with WakeIndex.for_store(place.parent, list) as index, pytest.raises(StepEngineError, match="left unchanged"):
        index.record_sleep("r", None, ["question"], "a")
    assert (file.read_bytes(), [place]) == (place.read_bytes(), [*place.parent.iterdir()])


async def serve_from(file: Path, **options: Any) -> None:
    async with Engine([AgentDefinition("a", handle_steps=_finish)]) as engine:
        served = make_server(engine, **options)
        async with served.lifespan():
            pass


async def schedule_into(file: Path) -> None:
    agent = AgentDefinition("a", handle_steps=_finish)
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [Schedule(agent, cron="* * * * *", id="often")], runs=file)
        async with scheduler:
            scheduler.book.load_known_schedules()


async def wake_from(file: Path) -> None:
    async def resume(*_: Any) -> None:
        return None

    await Waker(file, resume).once()


async def batch_into(file: Path) -> None:
    batched = Batched(AnthropicProvider("k"), file)
    try:
        await batched.complete(ModelRequest("anthropic/m", "Hi", Transcript([UserMessage("go")])))
    finally:
        await batched.close()


def journal_like(name: str, **options: Any) -> Callable[[Path], object]:
    """
    Return a call of a function of a public module with the file as its journal.
    """
    module, _, function = name.rpartition(".")

    def call(file: Path) -> object:
        found = getattr(importlib.import_module(f"stepengine.{module}"), function)(file, **options)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    return call


RENDERERS = ("describe_compactions", "describe_run", "render_compactions", "render_text")


def add_to_shared_cassette(file: Path) -> None:
    fixture = CassetteFixture(file, "rewrite")
    fixture.set_recorded_files({file})
    fixture.write_recordings()


METHODS: dict[str, Callable[[Path], object]] = {
    "Engine.run": with_engine(lambda engine, file: engine.run_sync("a", journal=file)),
    "Engine.resume": with_engine(lambda engine, file: engine.resume_sync(file)),
    "Engine.resume with extend": with_engine(lambda engine, file: engine.resume_sync(file, on_divergence="extend")),
    "Engine.replay": with_engine(lambda engine, file: engine.replay_sync(file)),
    "Engine.fork": with_engine(lambda engine, file: engine.fork_sync(file, at=-1)),
    "Engine.fork into": with_engine(lambda engine, file: engine.fork_sync("good.jsonl", at=-1, into=file)),
    "Engine.send_message": with_engine(lambda engine, file: engine.send_message_sync(file, "topic", 1)),
    "Engine.stepper": with_engine(lambda engine, file: engine.stepper(file)),
    "EventFile": lambda file: EventFile(file).on_event(RunStarted(own_id="r", agent_id="a")),
    "Scheduler": awaited(schedule_into),
    "Waker": awaited(wake_from),
    "FileJournal": write_journal,
    "Mailbox": write_mailbox,
    "WakeIndex": write_wake_index,
    "SqliteSessions": write_sessions,
    "FileSessions": write_session_files,
    "Cassette.save": lambda file: Cassette().save(file),
    "Cassette.load": Cassette.load,
    "CassetteFixture": lambda file: CassetteFixture(file, "rewrite").write_recordings(),
    "CassetteFixture.set_recorded_files": add_to_shared_cassette,
    "JournalFixture": lambda file: JournalFixture(file, "rewrite").write_recordings(),
    "record_program": lambda file: record_program(file, ["python", "-c", "pass"]),
    "replay_program": lambda file: replay_program(file, ["python", "-c", "pass"]),
    "Policy.save": lambda file: Policy().save(file),
    "Policy.load": Policy.load,
    "PolicyFile": PolicyFile,
    "Tokens.open": lambda file: Tokens.open(file).add("ann", ["run"]),
    "Webhooks.load": Webhooks.load,
    "app runs": awaited(lambda file: serve_from(file, runs=file)),
    "app tokens": awaited(lambda file: serve_from(file, tokens=file)),
    "app webhooks": awaited(lambda file: serve_from(file, webhooks=file)),
    "Batched": awaited(batch_into),
    "as_journal": lambda file: as_journal(file).records(),
    "repair": lambda file: repair("good.jsonl", into=file, until=1),
    "render_run": journal_like("debugging.render_run"),
    "send_message": journal_like("journal.send_message", topic="topic", value="Hello"),
    "send_cancel": journal_like("journal.send_cancel"),
    "scrub": journal_like("journal.scrub"),
    "seal_journal": journal_like("journal.seal_journal"),
    "check": journal_like("journal.check"),
    "verify": journal_like("journal.verify", keys="key.pub"),
    "price": journal_like("evaluation.price"),
    "assert_prefix_stable": journal_like("testing.assert_prefix_stable"),
    "blame": with_engine(lambda engine, file: asyncio.run(blame(engine, file, "status == completed"))),
    "impact": with_engine(lambda engine, file: asyncio.run(impact(engine, [file]))),
    "replay_waiting": with_engine(lambda engine, file: asyncio.run(replay_waiting(engine, [file]))),
    "debug": with_engine(debug),
    "value_sources": journal_like("journal.value_sources", value="x"),
    "diff": lambda file: diff("good.jsonl", file),
    "undo": lambda file: undo(file, Path.cwd()),
    "simulate": lambda file: simulate(AgentDefinition("a", handle_steps=_finish), [1], from_journal=file),
    "check_recorded_calls": lambda file: [*check_recorded_calls(file, Policy(), {})],
    **{name: journal_like(f"journal.{name}") for name in ("call_origins", "decisions")},
    **{name: journal_like(f"debugging.{name}") for name in RENDERERS},
}


WITHOUT_STORE = {
    # Folders that tools, agents and editors work in, files of agents, and names of files in values.
    "Engine", "Workspace", "Workspace.bubblewrap", "Workspace.docker", "Workspace.from_command", "Workspace.kubernetes", "Workspace.parse",
    "Workspace.podman", "Workspace.snapshot", "Workspace.ssh", "load_agent", "load_agents", "load_schedules", "check_installation",
    "check_package", "RecordedRun", "list_runs", "machine_data", "ListedAgent", "Settings.load", "list_agents", "make_project",
    "trust_folder", "untrust_folder", "skill_tools", "project_context", "mcp_tools", "EditorAgent", "ExternalAgent", "serve", "app",
    "Evaluation.problems", "EvaluationReport", "PinnedTest", "Trials", "WorkingFiles", "JournalLocation", "WakePlace",
    # Files that are only read: keys, uploads, settings.
    "SigningKey", "Journal", "LineJournal", "Files.upload", "Webhooks.parse_file", "scan",
    # As other names of these tables do.
    "Cassette", "CassetteFixture.load", "CassetteFixture.save", "SqliteJournal", "send_answers", "send_input", "send_tool_result",
    # Folders in which they make files with names of their own; databases of PostgreSQL.
    "AgentServer", "run_embedded_postgres", "evaluate", "improve", "Improvement", "pin", "DurableEngine.submit_journal", "DurableEngine.export", "Example.run", "Tokens",
}  # fmt: skip
TAKES_PATH = re.compile(r"\bPath\b|PathLike|JournalLike")


def list_path_takers() -> Iterator[str]:
    """
    Give the public functions, classes and methods that take a path, each once.
    """
    surface = importlib.import_module("tests.test_surface")
    for module in surface.MODULES:
        found = importlib.import_module(module)
        if module in ("stepengine.events", "stepengine.errors"):
            continue
        for name in found.__all__:
            one = getattr(found, name)
            members = inspect.getmembers(one, callable) if isinstance(one, type) else []
            for called, function in [(name, one), *[(f"{name}.{n}", m) for n, m in members if not n.startswith("_")]]:
                with contextlib.suppress(TypeError, ValueError):
                    if any(
                        TAKES_PATH.search(str(p.annotation)) for p in inspect.signature(function).parameters.values()
                    ):
                        yield called


@pytest.mark.deep
@pytest.mark.smoke
def test_every_public_name_that_takes_a_path_is_called() -> None:
    called = {name.partition(" ")[0] for name in METHODS}
    names = {re.sub(r"_sync$|(?<=\.)start_", "", name) for name in list_path_takers()}

    assert [] == sorted(names - called - WITHOUT_STORE)


def call_method(name: str, file: Path) -> None:
    # Whether it is refused is for other tests: some only read the file.
    with contextlib.suppress(StepEngineError, OSError):
        METHODS[name](file)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize("name", METHODS)
def test_methods_leave_third_party_files_unchanged(foreign: Foreign, name: str) -> None:
    record_good_run(foreign.work)
    for file in NAMES[[*METHODS].index(name) % 6 :: 6]:
        call_method(name, foreign.folder / file)

        assert [] == foreign.changed(), file


@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize("name", ["config.json", "cut.jsonl", "shop.db"])
def test_the_error_names_the_expected_kind_of_file(foreign: Foreign, name: str) -> None:
    ours = "a database of stepengine" if name.endswith(".db") else "a journal of stepengine"
    for act in ("Engine.run", "Engine.resume"):
        with pytest.raises(JournalError) as caught:
            METHODS[act](foreign.folder / name)

        assert name in caught.value.message
        assert f"is not {ours} and was left unchanged. Use another path" in caught.value.message


EVALUATION = """
from stepengine import AgentDefinition
from stepengine.evaluation import Case, Evaluation


def handle_steps(ctx):
    yield from ()
    return "done"


def is_done(run):
    return run.result.output == "done"


agent = AgentDefinition("a", handle_steps=handle_steps)
evaluation = Evaluation(name="e", cases=[Case("one", "Go")], agents={"a": agent}, checks=[is_done])
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize("name", ["results.json", "report.html"])
def test_results_replace_no_third_party_file(foreign: Foreign, name: str) -> None:
    (foreign.work / "e.py").write_text(EVALUATION)
    (foreign.work / "out").mkdir()
    (foreign.work / "out" / name).write_text('{"a": 1}')
    command = ["eval", "e.py", "--out", "out", "--yes", "-q", "--html", "-n", "1"]

    refused = CliRunner().invoke(app, command)
    left = [(path.name, path.read_text()) for path in (foreign.work / "out").iterdir()]
    (foreign.work / "out" / name).unlink()
    codes = [CliRunner().invoke(app, command).exit_code for _ in range(2)]

    assert (2, [(name, '{"a": 1}')]) == (refused.exit_code, left)
    assert f"{name}' is not a results file of stepengine and was left unchanged" in " ".join(refused.stderr.split())
    assert [0, 0] == codes


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR49")
def test_files_of_stores_are_recognized_after_writing(tmp_path: Path) -> None:
    """
    What each store wrote is taken by the next writer; an empty file is taken, too.
    """
    for name in ("run.jsonl", "runs.db", "sessions.sqlite", "events.jsonl", "policy.json", "calls.yaml"):
        (tmp_path / name).touch()
    for _ in range(2):
        for prompt in ("one", "two"):
            with Engine(
                [AgentDefinition("a", handle_steps=_finish)], observers=[EventFile(tmp_path / "events.jsonl")]
            ) as engine:
                engine.run_sync("a", prompt, journal=tmp_path / "runs.db").unwrap()
        SqliteSessions(tmp_path / "sessions.sqlite").set_cached("k", 1)
        FileSessions(tmp_path / "sessions").set_cached("k", 1)
        FileSessions(tmp_path / "sessions").save(FileSessions(tmp_path / "sessions").load("x"))
        Policy().save(tmp_path / "policy.json")
        Cassette().save(tmp_path / "calls.yaml")
        FileJournal(tmp_path / "run.jsonl").writer().close()

    assert 4 == len(SqliteJournal(tmp_path / "runs.db").runs())
    assert 0x53746570 == int.from_bytes((tmp_path / "runs.db").read_bytes()[68:72], "big")
