"""
The stores of conversations: a saved session can be loaded, no writer overwrites another, and broken data are repaired or rejected.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data import codec
from stepengine.data.messages import AssistantMessage, TextPart, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.questions import Question
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import SessionConflict, SessionError
from stepengine.sessions import (
    FileSessions,
    SqliteSessions,
)
from stepengine.sessions.session import LOST, repair_transcript
from stepengine.sessions.stores import make_folder_name
from stepengine.workspace.write_ahead import enable_write_ahead
from tests.sessions.stores import KINDS, store_of

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    def __init__(self):
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self):
        self.now += timedelta(seconds=1)
        return self.now


def made(kind, folder, clock=None):
    return store_of(kind, folder, clock=clock or Clock())


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def store(kind, tmp_path):
    return made(kind, tmp_path)


def talk(*texts):
    return Transcript([(UserMessage if n % 2 == 0 else AssistantMessage)(t) for n, t in enumerate(texts)])


def call(n=1, name="add"):
    return AssistantMessage([TextPart("so"), ToolCallPart(f"c{n}", name, {"a": n})])


def calls(ids):
    return AssistantMessage([TextPart("so"), *[ToolCallPart(call_id, "add", {}) for call_id in ids]])


def result(n=1, name="add"):
    return ToolMessage(f"c{n}", name, "3")


def with_messages(session, messages, **changes):
    return attrs.evolve(session, messages=messages, **changes)


@pytest.mark.spec("requirements:L3", "requirements:D18")
def test_state_survives_save_and_is_gone_after_a_save_without(kind, tmp_path):
    clock = Clock()
    store = made(kind, tmp_path, clock)
    question = Question("q1", "Really?", ["yes", "no"])
    record, view = Transcript([UserMessage("a"), call(), result(), AssistantMessage("b")]), talk("short")
    state = AgentState(
        run_id="r", agent_id="a", message_history=record, context={"n": 1}, next_call=2, pending=[question]
    )
    saved = store.save(with_messages(store.load("x"), record, state=state, journal="turns/1.jsonl", turns=1))
    store = store if kind == "memory" else made(kind, tmp_path, clock)
    found = store.load("x")

    assert saved == found
    assert ((question,), "turns/1.jsonl", ()) == (found.state.pending, found.journal, found.repairs)
    assert found.state.view is found.state.message_history is found.messages
    other = store.save(attrs.evolve(found, state=attrs.evolve(found.state, view=view)))
    assert (record, view) == (store.load("x").state.message_history, store.load("x").state.view)
    store.save(attrs.evolve(other, state=None))
    assert None is store.load("x").state


@pytest.mark.spec("reliability:SS01")
def test_one_of_many_concurrent_saves_of_a_version_wins(store):
    loaded, won, lost = store.load("x"), [], []

    def save(n):
        try:
            won.append(store.save(with_messages(loaded, talk(str(n)))))
        except SessionConflict as error:
            lost.append(str(error))

    threads = [threading.Thread(target=save, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (1, 7) == (len(won), len(lost))
    assert all("version 0 was loaded, and version 1 is stored" in said for said in lost)
    assert won[0] == store.load("x")


ADDS = """
import sys, attrs
from stepengine.data.messages import UserMessage
from stepengine.errors import SessionConflict
from stepengine.sessions import FileSessions, SqliteSessions
kind, place, who = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
store = FileSessions(place) if kind == "files" else SqliteSessions(place)
for n in range(15):
    while True:
        session = store.load("shared")
        try:
            store.save(attrs.evolve(session, messages=session.messages.append(UserMessage(f"{who}{n}"))))
            break
        except SessionConflict:
            pass
"""


@pytest.mark.deep
@pytest.mark.spec("reliability:SS01")
@pytest.mark.parametrize("kind", ["files", "sqlite"])
def test_processes_saving_one_session_at_once_lose_nothing(kind, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    place = str(tmp_path / "s")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADDS, kind, place, who], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who in "abc"
    ]  # fmt: skip
    for process in processes:
        assert "ready\n" == process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=50)
        assert 0 == process.returncode
    store = FileSessions(place) if kind == "files" else SqliteSessions(place)
    texts = [m.text for m in store.load("shared").messages]

    assert sorted(f"{who}{n}" for who in "abc" for n in range(15)) == sorted(texts)
    for who in "abc":
        assert [f"{who}{n}" for n in range(15)] == [t for t in texts if t.startswith(who)]


def test_opening_a_locked_database_is_retried(tmp_path):
    class Held(sqlite3.Connection):
        left = 3

        def execute(self, sql, *values):
            if "journal_mode" in sql and self.left:
                self.left -= 1
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            return super().execute(sql, *values)

    database = sqlite3.connect(tmp_path / "a.db", factory=Held, isolation_level=None)
    enable_write_ahead(database, 60)
    assert ("wal",) == database.execute("PRAGMA journal_mode").fetchone()
    database.left = 1
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        enable_write_ahead(database, 0)
    database.close()


# --- ids ------------------------------------------------------------------------------------------------------------

IDS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=60)


@pytest.mark.spec("reliability:SS05")
@given(IDS, IDS)
def test_folder_names_are_safe_and_different_for_different_ids(one, other):
    name = make_folder_name(one)

    assert set() == set(name) & set("/\\:\0")
    assert name == name.strip(".")
    assert name == name.lower()
    assert len(name) <= 100
    assert (one == other) == (name == make_folder_name(other))


@pytest.mark.spec("reliability:SS05", "reliability:SS06")
def test_odd_session_ids_never_collide_and_invalid_ones_raise(store):
    ids = [
        "alice:1",
        "alice:1/../bob:2",
        "../x",
        "A",
        "a",
        "\u0430",
        "e\u0301",
        "\u00e9",
        ".",
        "..",
        "x" * 900,
        "x" * 901,
        "con",
        "a/b",
        "a%2fb",
    ]
    for number, identity in enumerate(ids):
        store.save(with_messages(store.load(identity), talk(f"canary {number}")))

    assert [f"canary {n}" for n in range(len(ids))] == [store.load(i).messages[0].text for i in ids]
    assert list(reversed(ids)) == [info.session_id for info in store.list()]
    for identity in ("", "x" * 1_001, "\ud800", None, 3):
        with pytest.raises(SessionError):
            store.load(identity)


# --- lineage, metadata, lists, cache --------------------------------------------------------------------------------


@pytest.mark.spec("requirements:L2", "requirements:L13")
def test_metadata_lineage_and_lists_survive(kind, tmp_path):
    clock = Clock()
    store = made(kind, tmp_path, clock)
    store.set_metadata("lead", "title", "Shop")
    store.set_metadata("lead", "tags", ["a", {"b": None}])
    for n in range(2):
        store.add_child("lead", f"child{n}", tool_call_id=f"c{n}")
    store.set_metadata("lead", "title", None)
    store = store if kind == "memory" else made(kind, tmp_path, clock)

    assert {"tags": ["a", {"b": None}]} == store.get_metadata("lead")
    assert ("child0", "child1") == store.load("lead").info.child_session_ids
    assert ("lead", "c1") == (
        store.load("child1").info.parent_session_id,
        store.load("child1").info.parent_tool_call_id,
    )
    assert ["lead", "child1", "child0"] == [info.session_id for info in store.list()]
    store.delete("child0")
    store.delete("child0")
    assert 0 == store.load("child0").version


@pytest.mark.spec("requirements:L9")
def test_file_store_writes_the_documented_layout(tmp_path):
    store = FileSessions(tmp_path, clock=Clock())
    session = with_messages(store.load("user:chat"), talk("hi", "hello"))
    store.save(attrs.evolve(session, info=attrs.evolve(session.info, agent_id="bot", model="test/m", provider="test")))
    folder = tmp_path / "user%3achat"
    described = json.loads((folder / "metadata.json").read_text())

    assert {
        "session_id": "user:chat", "agent_type": "bot", "parent_session_id": None, "parent_tool_use_id": None,
        "child_session_ids": [], "model": "test/m", "provider": "test", "created_at": "2026-01-02T03:04:06.000000Z",
        "updated_at": "2026-01-02T03:04:06.000000Z", "metadata": {}, "version": 1, "turns": 0, "journal": None,
        "user_id": None, "status": None, "usage": {"type": "usage"},
    } == described  # fmt: skip
    assert ["hi", "hello"] == [
        json.loads(line)["content"][0]["text"] for line in (folder / "history.jsonl").read_text().splitlines()
    ]
    assert {0o600} == {f.stat().st_mode & 0o777 for f in folder.iterdir()}
    assert 0o700 == folder.stat().st_mode & 0o777


def test_deleting_a_session_removes_its_journals_and_mailboxes(tmp_path):
    store = FileSessions(tmp_path, clock=Clock())
    store.save(with_messages(store.load("chat"), talk("hi", "hello")))
    turns = tmp_path / "chat" / "turns"
    turns.mkdir()
    for name in ("0001.jsonl", "0001.jsonl.mail", "0002.jsonl"):
        (turns / name).write_bytes(b"")

    store.delete("chat")

    assert [] == list(turns.iterdir())


@pytest.mark.spec("requirements:L2")
def test_cached_value_expires(kind, tmp_path):
    clock = Clock()
    store = made(kind, tmp_path, clock)
    store.set_cached("for ever", {"a": [1]})
    store.set_cached("short", "x", 10)

    assert ({"a": [1]}, "x", None) == tuple(store.get_cached(k) for k in ("for ever", "short", "never"))
    clock.now += timedelta(seconds=10)
    assert ({"a": [1]}, None) == tuple(store.get_cached(k) for k in ("for ever", "short"))
    store.set_cached("short", "y", None)
    assert "y" == store.get_cached("short")


# --- what breaks ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:L11", "reliability:SS02")
def test_unchanged_prefix_is_not_rewritten_and_torn_line_is_dropped(tmp_path):
    store = FileSessions(tmp_path, clock=Clock())
    history = tmp_path / "x" / "history.jsonl"
    first = store.save(with_messages(store.load("x"), talk("a", "b"), state=AgentState(message_history=talk("a", "b"))))
    inode = history.stat().st_ino
    store.save(with_messages(first, talk("a", "b", "c")))
    assert inode == history.stat().st_ino
    whole = history.read_bytes()

    for cut in range(len(whole)):
        history.write_bytes(whole[:cut])
        loaded = store.load("x")
        assert whole[:cut].count(b"\n") == len(loaded.messages)
    saved = store.save(with_messages(store.load("x"), talk("a", "b", "d")))
    assert talk("a", "b", "d") == store.load("x").messages == saved.messages


@pytest.mark.spec("reliability:SS04")
@given(
    st.lists(
        st.one_of(
            st.sampled_from([result(1), result(2), UserMessage("u"), AssistantMessage("a")]),
            st.lists(st.sampled_from(["c1", "c2", ""]), min_size=1, max_size=3).map(calls),
        ),
        max_size=8,
    )
)
def test_any_history_is_repaired_to_paired_calls_and_otherwise_unchanged(messages):
    transcript, notes = repair_transcript(messages)

    try:
        Transcript(messages)
    except Exception:
        assert notes
    else:
        assert (Transcript(messages), ()) == (transcript, notes)
    ids = {call.tool_call_id for m in messages if isinstance(m, AssistantMessage) for call in m.tool_calls}
    assert ids - {""} == {m.tool_call_id for m in transcript if isinstance(m, ToolMessage)}
    said = [m for m in messages if isinstance(m, UserMessage)]
    assert said == [m for m in transcript if isinstance(m, UserMessage)]
    assert {m.text for m in messages if isinstance(m, AssistantMessage)} == {
        m.text for m in transcript if isinstance(m, AssistantMessage)
    }


@pytest.mark.spec("reliability:SS04")
def test_results_in_another_order_are_sorted_and_reported():
    transcript, notes = repair_transcript([calls(["c1", "c2", "c3"]), result(3), result(1)])

    assert [("c1", "3"), ("c2", LOST), ("c3", "3")] == [(m.tool_call_id, m.text) for m in transcript[1:]]
    assert (
        "the results of the calls 'c3', 'c1' were not in the order of the calls",
        "the call 'c2' of add had no result",
    ) == notes


@pytest.mark.spec("reliability:SS04")
def test_broken_history_is_repaired_on_load_and_repairs_are_listed(tmp_path):
    store = FileSessions(tmp_path, clock=Clock())
    store.save(
        with_messages(store.load("x"), Transcript([UserMessage("u"), call(1), result(1), AssistantMessage("done")]))
    )
    history = tmp_path / "x" / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(b"".join([lines[0], lines[1], lines[3], lines[2]]))
    session = store.load("x")

    assert ("the call 'c1' of add had no result", "a result for 'c1' had no call") == session.repairs
    assert ["user", "assistant", "tool", "assistant"] == [m.role for m in session.messages]
    assert () == store.save(session).repairs
    assert () == store.load("x").repairs


@pytest.mark.spec("requirements:L2", "reliability:SS04")
def test_sessions_without_times_load_list_last_and_save(tmp_path):
    """
    Times that lack, are null or name no zone, which is then UTC; the first save by us sets those that lack.
    """
    times = [
        {"updated_at": "2025-06-01T12:00:00"},
        {},
        {"created_at": None, "updated_at": "2025-06-01T12:00:00+02:00"},
        {"created_at": "2025-01-01T00:00:00Z", "updated_at": None},
    ]
    for number, members in enumerate(times):
        folder = tmp_path / f"s{number}"
        folder.mkdir()
        (folder / "metadata.json").write_text(json.dumps({"session_id": f"s{number}", "agent_type": None, **members}))
        (folder / "history.jsonl").write_text("")
    store = FileSessions(tmp_path, clock=Clock())

    assert ["s0", "s2"] == [info.session_id for info in store.list()][:2]
    assert [12, 10, None, None] == [at and at.astimezone(UTC).hour for at in (info.updated_at for info in store.list())]
    for number, members in enumerate(times):
        before = store.load(f"s{number}")
        after = store.save(with_messages(before, talk("hi"))).info
        assert (before.info.created_at is None) == (members.get("created_at") is None)
        assert after.updated_at == store.load(f"s{number}").info.updated_at is not None
        assert after.created_at == (before.info.created_at or after.updated_at)


@pytest.mark.parametrize("name", ["metadata.json", "state.json", "history.jsonl"])
@pytest.mark.parametrize(
    "content",
    [b"\xff\n", b"{\n", b"[" * 100_000 + b"\n", b"3\n", b'{"type": "user_message"}\n', b'{"session_id": 3}\n', b"{}\n"],
    ids=lambda content: ascii(content)[:20],
)
def test_damaged_file_is_named_and_never_misread(tmp_path, name, content):
    store = FileSessions(tmp_path, clock=Clock())
    store.save(with_messages(store.load("x"), talk("a"), state=AgentState(message_history=talk("a"))))
    (tmp_path / "x" / name).write_bytes(content)
    session, refused = None, ""
    try:
        session = store.load("x")
    except SessionError as error:
        refused = error.message

    assert (
        name in refused
        if session is None
        else (name, None, talk("a")) == ("state.json", session.state, session.messages)
    )


@pytest.mark.spec("reliability:R20")
@pytest.mark.parametrize("name", [".lock", "metadata.json", "history.jsonl", "state.json"])
def test_folder_in_place_of_a_session_file_raises_session_error(tmp_path, name):
    store = FileSessions(tmp_path, clock=Clock())
    store.save(with_messages(store.load("x"), talk("a")))
    (tmp_path / "x" / name).unlink()
    (tmp_path / "x" / name).mkdir()

    for act in (store.load, store.delete):
        with pytest.raises(SessionError, match=re.escape(str(tmp_path / "x"))):
            act("x")


@pytest.mark.spec("reliability:JR15")
def test_store_without_its_folder_raises_session_error(tmp_path):
    store = FileSessions(tmp_path / "sessions", clock=Clock())
    store.root.rmdir()

    for act in (store.list, lambda: store.set_cached("key", 1)):
        with pytest.raises(SessionError, match=re.escape(str(store.root))):
            act()


def test_links_and_special_files_raise(tmp_path):
    store = FileSessions(tmp_path / "s", clock=Clock())
    store.save(with_messages(store.load("x"), talk("a")))
    (tmp_path / "elsewhere").write_text("{}")
    for name in ("metadata.json", "history.jsonl"):
        path = tmp_path / "s" / "x" / name
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(SessionError, match="cannot be read"):
            store.load("x")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(SessionError, match="not a regular file"):
            store.load("x")
        path.unlink()
        path.write_bytes(kept)
    with pytest.raises(SessionError, match="cannot be opened"):
        SqliteSessions(tmp_path / "missing" / "x.db")
    (tmp_path / "no.db").write_text("this is not a database, but it is long enough to be taken for one" * 20)
    with pytest.raises(SessionError):
        SqliteSessions(tmp_path / "no.db").load("x")
    SqliteSessions(tmp_path / "s.db")
    (tmp_path / "link.db").symlink_to(tmp_path / "s.db")
    with pytest.raises(SessionError, match="not a regular file"):
        SqliteSessions(tmp_path / "link.db")


@pytest.mark.spec("reliability:R20")
def test_stored_state_of_another_type_raises_session_error(tmp_path):
    store = FileSessions(tmp_path, clock=Clock())
    store.save(with_messages(store.load("x"), talk("a"), state=AgentState(message_history=talk("a"))))
    path = tmp_path / "x" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": codec.to_json(Usage())}))

    with pytest.raises(
        SessionError, match=r"state\.json contains a state that cannot be read: .*Usage, not AgentState"
    ):
        store.load("x")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists locks")
def test_opening_a_database_keeps_locks_of_other_threads(tmp_path):
    store = SqliteSessions(tmp_path / "s.db")
    store.save(store.load("x"))
    inode = f":{store.path.stat().st_ino} "

    def held():
        return [
            line for line in Path("/proc/locks").read_text().splitlines() if inode in line and str(os.getpid()) in line
        ]

    other = sqlite3.connect(store.path)
    try:
        other.execute("BEGIN")
        other.execute("SELECT * FROM sessions").fetchall()
        assert held()
        store.load("x")

        assert held()
    finally:
        other.close()
