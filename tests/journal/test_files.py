"""
Files: torn tails, locks, full and failing disks, files that are moved or written by others, and what a commit costs.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

import attrs
import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Engine, Hooks, Parallel, Perform, RunStatus, Tool, ToolCall
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import JournalCorrupt, JournalError, JournalLocked, JournalWriteFailed
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, as_journal, check
from stepengine.journal.disk_reserve import DiskReserve
from stepengine.journal.line_journal import LockedStore
from stepengine.journal.locked_file import LockedFile
from stepengine.journal.recorded_runs import RecordedRun
from stepengine.journal.records import Input
from stepengine.testing import text, tool_call
from tests.journal.forked import FORKS, hold_in_child, in_child
from tests.waits import until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "one.jsonl"


@pytest.fixture
def recorded(path, world):
    world.rig().record(FileJournal(path))
    return path


# --- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:SC08", "replay:K13")
@pytest.mark.parametrize("kind", [FileJournal, SqliteJournal])
def test_opening_for_writing_makes_a_journal_private(tmp_path, world, kind):
    path = tmp_path / "deep" / "deeper" / "runs.db"
    masked = os.umask(0)
    try:
        first = world.rig().record(kind(path)).journal
        assert [folder.stat().st_mode & 0o777 for folder in path.parents[:2]] == [0o700, 0o700]
        path.chmod(0o666)
        path.parent.chmod(0o755)
        world.rig().replay(first)
        assert path.stat().st_mode & 0o777 == 0o666, "who only reads changes nothing"
        writer = first.writer()
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
        writer.close()
    finally:
        os.umask(masked)
    assert set(modes.values()) == {0o600}, modes
    assert path.parent.stat().st_mode & 0o777 == 0o755, "a folder that was there is its owner's business"


@pytest.mark.spec("reliability:SC08", "reliability:JR34")
@pytest.mark.parametrize("kind", [FileJournal, SqliteJournal])
def test_symbolic_link_is_rejected_as_a_journal(tmp_path, world, kind):
    path, link, loose = tmp_path / "runs.db", tmp_path / "link.db", tmp_path / "loose.db"
    first = world.rig().record(kind(path)).journal
    link.symlink_to(path)
    loose.symlink_to(tmp_path / "nothing.db")
    run = [] if kind is FileJournal else [first.run]
    before = first.content()
    for place in (link, loose):
        linked = kind(place, *run)
        for act in (linked.writer, lambda linked=linked: linked.replace(first.records())):
            with pytest.raises(JournalError, match="symbolic link"):
                act()
    assert first.content() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.db", "loose.db", "runs.db"]


@pytest.mark.spec("reliability:JR13", "reliability:JR14")
def test_database_has_one_lock_per_path_and_rejects_hard_links(tmp_path, world):
    (tmp_path / "real").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "real")
    journal = world.rig().record(SqliteJournal(tmp_path / "real" / "runs.db")).journal
    writer = journal.writer()
    try:
        with pytest.raises(JournalLocked):
            SqliteJournal(tmp_path / "way" / "runs.db", journal.run).writer()
    finally:
        writer.close()
    os.link(tmp_path / "real" / "runs.db", tmp_path / "second.db")
    for name in ("real/runs.db", "second.db"):
        # SQLite keeps what is not in the file yet beside its name: whoever wrote by the other one would damage it.
        with pytest.raises(JournalError, match="2 names"):
            SqliteJournal(tmp_path / name, journal.run).writer()


@pytest.mark.spec("reliability:JR17", "reliability:SC08")
def test_a_lock_of_a_database_follows_no_link(tmp_path, world):
    journal = world.rig().record(SqliteJournal(tmp_path / "runs.db")).journal
    status = (tmp_path / "runs.db").stat()
    (tmp_path / f".{status.st_dev:x}-{status.st_ino:x}.{journal.run}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(JournalError, match="symbolic link"):
        journal.writer()
    assert not (tmp_path / "victim").exists()


@pytest.mark.spec("reliability:JR17", "reliability:R23")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, world):
    fifo = tmp_path / "fifo.jsonl"
    os.mkfifo(fifo)
    for journal in (FileJournal(fifo), SqliteJournal(fifo, "run")):
        for act in (world.rig().replay, world.rig().resume, lambda j: j.content(), lambda j: j.replace([])):
            with pytest.raises(JournalError, match="not a regular file"):
                act(journal)
        assert "not a regular file" in check(journal).problems[0]


@pytest.mark.spec("reliability:JR17")
@pytest.mark.parametrize("name", ["run.jsonl", "runs.db#run"])
def test_path_that_the_system_rejects_is_a_journal_error(tmp_path, name):
    journal = as_journal(str(tmp_path / f"{'x' * 300}-{name}"))
    with Engine() as engine:
        for act in (
            journal.is_there,
            journal.is_held,
            journal.size,
            journal.make_missing_error,
            lambda: engine.resume_sync(journal),
        ):
            with pytest.raises(JournalError, match="cannot be used as a journal: File name too long"):
                act()


@pytest.mark.spec("reliability:JR01", "replay:J37")
def test_torn_tail_is_cut_before_appending_and_reported(recorded, world):
    whole = recorded.read_bytes()
    cut = whole[: whole.rindex(b"\n", 0, -1) + 1]
    recorded.write_bytes(cut + b'{"kind":"result","path":"","se')
    result = world.rig().resume(FileJournal(recorded))
    assert result.status is RunStatus.COMPLETED
    assert "30 bytes" in result.warnings[0]
    assert recorded.read_bytes() == whole
    assert not FileJournal(recorded).history().records[-1].line.get("torn")


@pytest.mark.spec("reliability:JR02")
def test_damaged_journal_runs_no_effect(recorded, world):
    data = bytearray(recorded.read_bytes())
    data[data.index(b"\n") + 20] ^= 4
    recorded.write_bytes(data)
    world.done.clear()
    for act in (world.rig().resume, world.rig().replay):
        with pytest.raises(JournalCorrupt, match="record 2"):
            act(FileJournal(recorded))
    assert not world.done
    assert recorded.read_bytes() == data


@FORKS
@pytest.mark.parametrize("store", ["file", "sqlite"])
@pytest.mark.spec("reliability:SS14")
def test_forked_process_cannot_advance_the_run(world, tmp_path, store):
    """
    The child has the descriptor and its lock, and whatever waits to be stored.
    """
    journal = FileJournal(tmp_path / "run.jsonl") if store == "file" else SqliteJournal(tmp_path / "runs.db", "a")
    recorded = MemoryJournal()
    world.rig().record(recorded)
    first, second, *_ = recorded.records()
    writer = journal.writer()
    writer.append(first)

    def work() -> None:
        for act in (lambda: writer.append(second), writer.commit):
            with pytest.raises(JournalWriteFailed, match="was forked from it"):
                act()
        writer.close()

    with writer._storing if store == "file" else nullcontext():  # as a thread that does not exist in the child
        assert 0 == in_child(work)
    assert [] == list(journal.records())
    with pytest.raises(JournalLocked):
        journal.writer()
    writer.append(second)
    writer.close()
    assert 2 == len(journal.records())


@pytest.mark.spec("reliability:JR06")
def test_empty_file_accepts_a_run_and_used_file_rejects_another(path, world):
    path.parent.mkdir()
    path.touch()
    assert world.rig().record(FileJournal(path)).status is RunStatus.COMPLETED
    before = path.read_bytes()
    with pytest.raises(JournalError, match="holds a run already; resume, replay or fork"):
        world.rig().record(FileJournal(path))
    assert path.read_bytes() == before


@pytest.mark.spec("reliability:JR17")
def test_read_only_location_is_rejected_before_the_first_effect(path, world, monkeypatch):
    path.parent.mkdir()
    opened = os.open

    def refused(place, flags, *rest, **kwargs):
        if flags & (os.O_RDWR | os.O_CREAT) and str(place).startswith(str(path.parent)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(place, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(JournalWriteFailed, match=f"{os.strerror(errno.EROFS)}; nothing was run"):
        world.rig().record(FileJournal(path))
    assert not world.done


@pytest.mark.spec("reliability:JR17", "reliability:JR34")
def test_non_file_is_rejected_before_the_first_effect(tmp_path, world):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "elsewhere.jsonl")
    for place in (tmp_path, fifo, link, Path("/dev/null"), Path("/proc/version/x")):
        with pytest.raises(JournalError):
            world.rig().record(FileJournal(place))
    with pytest.raises(JournalError, match="NUL"):
        FileJournal("a\0b")
    assert not world.done


# --- one owner ------------------------------------------------------------------------------------------------------


@FORKS
@pytest.mark.spec("reliability:JR13")
def test_second_process_is_refused_with_the_owners_pid(recorded, world):
    with hold_in_child(FileJournal(recorded).writer) as pid:
        with pytest.raises(JournalLocked, match=f"process {pid} on ") as caught:
            world.rig().resume(FileJournal(recorded))
        assert caught.value.pid == pid
        assert world.rig().replay(FileJournal(recorded)).status is RunStatus.COMPLETED

    assert world.rig().resume(FileJournal(recorded)).status is RunStatus.COMPLETED


@pytest.mark.spec("reliability:JR14", "reliability:JR15")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_released_journal_is_free_despite_inherited_descriptors(tmp_path, store):
    """
    Between fork and exec a child has every open file of its parent: here another descriptor of the same one stands for it.
    """
    journal = FileJournal(tmp_path / "a.jsonl") if store == "file" else SqliteJournal(tmp_path / "a.db", "one")
    writer = journal.writer()
    copy = os.dup([*LockedFile._all][-1].descriptor)
    try:
        writer.close()
        journal.writer().close()
    finally:
        os.close(copy)


@pytest.mark.spec("reliability:JR13")
@pytest.mark.parametrize("kind", ["file", "sqlite", "list of runs"])
def test_writer_opens_while_others_look_whether_it_is_held(tmp_path, kind, monkeypatch):
    journal = SqliteJournal(tmp_path / "runs.db", "run") if kind == "sqlite" else FileJournal(tmp_path / "run.jsonl")
    listed = RecordedRun("run", {"status": "running", "pid": 2**31 - 1}, tmp_path)
    writer = journal.writer()
    left = [*tmp_path.glob(".*.lock")]
    writer.close()
    for path in left:  # as if that writer had been killed
        path.touch(0o600)
    real_flock, has_tried, opened = fcntl.flock, threading.Event(), []

    def flock(descriptor, operation):
        if threading.current_thread() is threading.main_thread():
            real_flock(descriptor, operation)
            if operation != fcntl.LOCK_UN:
                opened.append(pool.submit(lambda: journal.writer().close()))
                assert has_tried.wait(20)
            return
        try:
            real_flock(descriptor, operation)
        finally:
            has_tried.set()

    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr("fcntl.flock", flock)
        if kind == "list of runs":
            assert "interrupted" == listed.status
        else:
            assert not journal.is_held()
        opened[0].result()


@pytest.mark.spec("reliability:JR15")
def test_file_system_without_locks_is_rejected_with_advice(path, world, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(JournalError, match="unsafe_no_lock=True"):
        world.rig().record(FileJournal(path))
    assert world.rig().record(FileJournal(path, unsafe_no_lock=True)).status is RunStatus.COMPLETED


@pytest.mark.spec("reliability:JR15")
@pytest.mark.parametrize("harm", ["grow", "delete", "replace", "rename"])
def test_file_changed_by_another_program_stops_the_run(path, world, harm):
    def meddle(name):
        if harm == "grow":
            with path.open("ab") as file:
                file.write(b"x")
        elif harm == "delete":
            path.unlink()
        elif harm == "rename":
            path.rename(path.with_name("other"))
        else:
            path.with_name("new").write_bytes(path.read_bytes())
            path.with_name("new").rename(path)
        return "done"

    result = run_performing(world, FileJournal(path), meddle)
    assert result.status is RunStatus.FAILED
    assert isinstance(result.error, JournalWriteFailed)
    assert ("another program wrote" if harm == "grow" else "moved, deleted or replaced") in str(result.error)
    assert "perform #0 happened, but its result is not in the journal" in result.error.__notes__[0]
    assert world.done == []


def run_performing(world, journal, fn):
    """
    Record a run that performs *fn*, then something else.
    """

    def handle_steps(ctx):
        yield from Perform(fn, "x")
        yield from Perform(world.done.append, "after")

    return type(world.rig())(AgentDefinition("a", handle_steps=handle_steps)).record(journal)


# --- disks that fail ------------------------------------------------------------------------------------------------


class Disk:
    """
    A disk that takes *room* bytes and then fails.
    """

    def __init__(self, room):
        self.room, self.syncs = room, 0

    def write(self, descriptor, data):
        part = bytes(data)[: max(self.room, 0)]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(part)
        return os.write(descriptor, part)

    def sync(self, descriptor):
        self.syncs += 1

    def under(self, journal):
        journal._write, journal._to_disk = self.write, self.sync
        return journal


# --- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.speed
@pytest.mark.spec("performance:Q10", "reliability:R1")
def test_step_costs_at_most_three_syncs(path, world):
    disk = Disk(10_000_000)
    assert world.rig().record(disk.under(FileJournal(path))).status is RunStatus.COMPLETED
    effects = len(FileJournal(path).history().intents) - 1
    assert disk.syncs <= 1.5 * effects

    names = [f"n{i}" for i in range(8)]

    def handle_steps(ctx):
        yield from Parallel(*[ToolCall("look", {"n": n}) for n in range(len(names))])
        yield STEP

    agent = attrs.evolve(world.sample(), handle_steps=handle_steps, hooks=None)
    disk = Disk(10_000_000)
    type(world.rig())(agent, ["done"]).record(disk.under(FileJournal(path.with_name("two.jsonl"))))
    # The start, eight results of read-only tools together, one reply, the end.
    assert disk.syncs == 4


class Counting(Disk):
    """
    A disk with room, that knows what was in *path* whenever it synced.
    """

    def __init__(self, path):
        super().__init__(10_000_000)
        self.path, self.durable = path, b""

    def sync(self, descriptor):
        super().sync(descriptor)
        self.durable = self.path.read_bytes()


def acting(disk, seen, **options):
    """
    Return an agent whose model asks three times for a tool, and its replies; *seen* gets who sees a word that is not on disk.
    """

    def see(who, word):
        if word.encode() not in disk.durable:
            seen.append(f"{who} sees {word}")

    def run(arguments):
        see("the tool", f"word {arguments['n']}")
        # What is begun is on disk, too, unless it may simply happen again.
        if not read_only and disk.durable.count(b'"effect":{"type":"tool_call"') != arguments["n"] + 1:
            seen.append(f"call {arguments['n']} began too early")
        return "ok"

    read_only = options.pop("read_only", False)
    tool = Tool(
        name="act",
        description="Act.",
        input_schema={"type": "object", "properties": {"n": {"type": "integer"}, "w": {"type": "string"}}},
        run=run,
        annotations=ToolAnnotations(read_only=read_only),
        in_thread=False,
    )
    # What asks for a tool that nobody has is answered without any effect.
    called = options.pop("called", "act")
    replies = [tool_call(called, {"n": n, "w": f"word {n}"}) for n in range(3)]
    return AgentDefinition("plain", model="t/m", tools=[tool], **options), [*replies, "done"], see


@pytest.mark.spec("reliability:R1", "reliability:R2")
@pytest.mark.parametrize("read_only", [False, True])
def test_reply_is_durable_before_its_call_starts(path, rig, read_only):
    disk, seen = Counting(path), []
    agent, replies, _ = acting(disk, seen, read_only=read_only)
    result = rig(agent, replies).record(disk.under(FileJournal(path)))
    assert (result.status, seen) == (RunStatus.COMPLETED, []), result.error
    assert disk.durable == path.read_bytes()


@pytest.mark.spec("reliability:R1")
@pytest.mark.parametrize("who", ["pre_tool", "post_step", "handler", "observer"])
def test_reply_is_durable_before_hooks_handlers_and_observers(path, rig, who):
    disk, seen, looked = Counting(path), [], []

    def look(*given):
        looked.append(who)
        see(who, f"word {min(len(looked), 3) - 1}")

    def handle_steps(ctx):
        while True:
            turn = yield STEP
            if turn.steps_complete:
                return
            look()

    def observe(event):
        if type(event).__name__ == "ModelFinished" and len(looked) < 3:
            look()

    hooks = Hooks(**{who: [look]}) if who in ("pre_tool", "post_step") else None
    handler = handle_steps if who == "handler" else None
    called = "act" if who in ("pre_tool", "observer") else "missing"
    agent, replies, see = acting(disk, seen, hooks=hooks, handle_steps=handler, called=called)
    watching = {"observers": [observe]} if who == "observer" else {}
    result = rig(agent, replies, **watching).record(disk.under(FileJournal(path)))
    assert (result.status, seen) == (RunStatus.COMPLETED, []), result.error
    assert len(looked) >= 3


@pytest.mark.spec("reliability:JR08")
def test_unstored_reply_is_reported_and_calls_no_tool(path, rig, monkeypatch):
    monkeypatch.setattr(DiskReserve, "acquire_for_disk_of", lambda path: None)
    disk, called = Disk(10_000_000), []

    def fill(request):
        disk.room = 200
        return tool_call("act", {"word": "precious"})

    tool = Tool(name="act", description="Act.", input_schema={"type": "object"}, run=called.append, in_thread=False)
    result = rig(AgentDefinition("a", model="t/m", tools=[tool]), [fill]).record(disk.under(FileJournal(path)))
    assert isinstance(result.error, JournalWriteFailed)
    assert called == []
    assert "model_call #0 happened, but its result is not in the journal" in result.error.__notes__[0]
    # What was committed before is whole: asked again, the model is asked for the first time as far as anybody can tell.
    again = rig(AgentDefinition("a", model="t/m", tools=[tool]), ["done"]).resume(FileJournal(path))
    assert (again.status, again.text, called) == (RunStatus.COMPLETED, "done", [])


# --- waiting for it beside the event loop ---------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R1")
def test_event_loop_runs_while_a_journal_syncs(path, world, monkeypatch):
    threads, ticks = set(), []
    append = LockedStore.append

    def slow(self, data):
        threads.add(threading.get_ident())
        before = len(ticks)
        # On the thread of the loop this would never end: nobody else ticks.
        until(lambda: len(ticks) > before + 1)  # the event loop turns meanwhile
        append(self, data)

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.001)

    async def go(rig):
        ticking = asyncio.create_task(tick())
        try:
            return (await rig.arun(lambda: rig.JournaledRun.record(journal)))[0]
        finally:
            ticking.cancel()

    monkeypatch.setattr(LockedStore, "append", slow)
    journal = FileJournal(path)
    result = asyncio.run(go(world.rig()))
    assert result.status is RunStatus.COMPLETED
    assert check(result.journal)
    assert threading.get_ident() not in threads


@pytest.mark.spec("reliability:R1", "reliability:R2")
def test_stopped_run_keeps_the_result_being_written(path, rig):
    done, begun, goes_on = [], threading.Event(), threading.Event()

    class Slow(Disk):
        def sync(self, descriptor):
            if done:
                begun.set()
                goes_on.wait(50)

    def handle_steps(ctx):
        yield from Perform(done.append, "once")
        yield from Perform(done.append, "then")

    async def go(made):
        live = made.begin(made.JournaledRun.record(Slow(10_000_000).under(FileJournal(path))))
        task = asyncio.create_task(live.run())
        await asyncio.to_thread(begun.wait, 50)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.005)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.engine.aclose()

    agent = AgentDefinition("a", handle_steps=handle_steps)
    asyncio.run(go(rig(agent)))
    assert done == ["once"]
    assert ("", 0) in FileJournal(path).history().results
    assert rig(agent).resume(FileJournal(path)).status is RunStatus.COMPLETED
    assert done == ["once", "then"]


# --- SQLite ---------------------------------------------------------------------------------------------------------


def test_sqlite_journal_without_a_run_has_its_file_as_address(tmp_path):
    assert str(tmp_path / "runs.db") == SqliteJournal(tmp_path / "runs.db").address


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR39")
def test_runs_in_one_sqlite_file_are_separate_journals(tmp_path, world):
    store = SqliteJournal(tmp_path / "runs.db")
    results = [world.rig().record(store) for _ in range(2)]
    assert sorted(store.runs()) == sorted(r.state.run_id for r in results)
    for result in results:
        assert result.journal.run == result.state.run_id
        assert check(result.journal)
        assert world.rig().replay(result.journal).output == result.output
    assert results[0].journal.content() == b"".join(results[0].journal.lines())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.db"]
    with pytest.raises(JournalError, match="choose one with"):
        store.records()
    with pytest.raises(JournalError, match="not a run id"):
        SqliteJournal(tmp_path / "runs.db", "../../x")


@pytest.mark.spec("reliability:JR39")
def test_locked_sqlite_file_ends_the_run_with_an_error(tmp_path, world, monkeypatch):
    monkeypatch.setattr("stepengine.journal.sqlite.BUSY_SECONDS", 0.05)
    journal = SqliteJournal(tmp_path / "runs.db", "mine")
    writer = journal.writer()
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            JournalWriteFailed, match=r"locked: another program has locked it for 0\.05 s without a commit"
        ):
            writer.append(Input("", -1, 0, {"type": "stop", "kind": "cancelled"}))
            writer.commit()
        other.execute("ROLLBACK")
    writer.close()
    assert journal.records() == []


@pytest.mark.spec("reliability:R1")
def test_new_and_replaced_files_sync_their_folder(path, world, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    journal = FileJournal(path)
    journal.writer().close()
    assert str(path.parent) in synced
    synced.clear()
    recorded = MemoryJournal()
    world.rig().record(recorded)
    recorded.copy_to(journal)
    assert synced[-1] == str(path.parent)
    assert len(synced) == 2
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# --- fit for git ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:J23", "replay:F23")
def test_stable_recording_is_independent_of_timing(tmp_path, rig):
    async def slow(name, ms):
        await asyncio.sleep(ms / 1000)
        return name

    def agent(waits):
        def kid_steps(ctx):
            yield from Perform.idempotent(slow, ctx.prompt, waits[ctx.prompt])
            yield STEP

        def handle_steps(ctx):
            yield from Parallel(AgentCall("kid", "left"), AgentCall("kid", "right"))
            return ctx.random.random()

        # The arguments are not what differs: the clock of the machine is.
        kid = AgentDefinition("kid", model="t/m", system_prompt="You.", handle_steps=kid_steps)
        return AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handle_steps)

    made = []
    for number, waits in enumerate([{"left": 0, "right": 20}, {"left": 20, "right": 0}]):
        journal = FileJournal(tmp_path / f"{number}.jsonl", link=False, stable=True)
        recorded = rig(agent(waits), [lambda r: text(r.messages[0].text)] * 2).record(journal)
        assert recorded.status is RunStatus.COMPLETED
        assert check(journal)
        made.append([line for line in journal.content().splitlines() if b'"type":"perform"' not in line])
    assert made[0] == made[1]


@pytest.mark.spec("replay:J23", "replay:J1")
def test_a_file_and_a_memory_hold_the_same_lines(tmp_path, fresh_world):
    journals = [FileJournal(tmp_path / "j.jsonl", link=False, stable=True), MemoryJournal(link=False, stable=True)]
    for journal in journals:
        fresh_world().rig().record(journal)
    assert journals[0].content() == journals[1].content()


@pytest.mark.spec("reliability:JR39", "reliability:JR17")
def test_invalid_sqlite_file_is_rejected_before_the_first_effect(tmp_path, world):
    path = tmp_path / "runs.db"
    path.write_bytes(b"this is not a database, but it is long enough to be looked at" * 20)
    for act in (lambda: world.rig().record(SqliteJournal(path)), lambda: SqliteJournal(path, "one").records()):
        with pytest.raises(JournalError, match=r"cannot be (used|read) as a journal"):
            act()
    with pytest.raises(JournalError, match="not a regular file"):
        world.rig().record(SqliteJournal(tmp_path))
    assert world.done == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.db"]


def test_non_journal_argument_is_rejected_with_alternatives():
    with pytest.raises(JournalError, match="a journal must be a MemoryJournal, FileJournal or SqliteJournal"):
        as_journal(5)


RACER = """
import os, sys, threading, time
from stepengine.errors import JournalLocked
from stepengine.journal import FileJournal, SqliteJournal

kind, path, inside, seconds = sys.argv[1:]
counts = {"tried": 0, "owned": 0, "doubled": 0}
until = time.monotonic() + float(seconds)

def race():
    # So many times, however slow the disk is; whoever is never let in gives up in the end.
    while counts["owned"] < 80 and time.monotonic() < until:
        journal = FileJournal(path, sync="write") if kind == "file" else SqliteJournal(path, "one")
        counts["tried"] += 1
        try:
            writer = journal.writer()
        except JournalLocked:
            continue
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            counts["owned"] += 1
            os.unlink(inside)
        except (FileExistsError, FileNotFoundError):
            counts["doubled"] += 1
        finally:
            writer.close()

print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=race) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(counts["tried"], counts["owned"], counts["doubled"], flush=True)
"""


@pytest.mark.deep
@pytest.mark.spec("reliability:JR13", "reliability:JR14")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_racing_processes_own_a_journal_one_at_a_time(tmp_path, kind):
    """
    Whoever has it makes a file that nobody else may find there.
    """
    command = [sys.executable, "-c", RACER, kind, str(tmp_path / "runs"), str(tmp_path / "inside"), "60"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    racers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    try:
        assert ["ready\n"] * 3 == [racer.stdout.readline() for racer in racers]
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        said = [racer.communicate(timeout=120)[0] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    tried, owned, doubled = (sum(column) for column in zip(*[map(int, line.split()) for line in said], strict=True))

    assert 0 == doubled
    assert owned > 200
    assert tried > owned
