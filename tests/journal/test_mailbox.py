"""
Mailboxes: whoever does not hold a run posts to it beside its journal, from any process and thread, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Ask, Engine, Parallel, Perform, StepContext, Steps
from stepengine.errors import (
    InputError,
    JournalCorrupt,
    JournalError,
    JournalLocked,
    JournalMissing,
    JournalWriteFailed,
    SecretFound,
    StepEngineError,
)
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, mailbox, send_answers
from stepengine.journal.mailbox import Mailbox, MailboxMessage, StoredMessage, mailbox_path
from stepengine.journal.records import encode_line
from tests.journal.forked import FORKS, in_child
from tests.strategies import json_values

ON_POSIX = pytest.mark.skipif(os.name != "posix", reason="only there files have owners and modes")


def recorded(journal: Journal) -> Journal:
    def handle_steps(ctx: Any) -> Any:
        return (yield from Perform(lambda: 1))

    with Engine([AgentDefinition("waiting", handle_steps=handle_steps)]) as engine:
        return engine.run_sync("waiting", journal=journal).journal or journal


def message(value: Any = None, topic: str = "hooks", **options: Any) -> MailboxMessage:
    return MailboxMessage(kind="message", topic=topic, value=value, **options)


def values(box: Mailbox, after: int = 0) -> list[Any]:
    return [letter.value for letter in box.read(after)[0]]


@pytest.fixture(params=["file", "sqlite"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """
    The path of a journal on the disk that holds a run.
    """
    where = tmp_path / "run.jsonl" if request.param == "file" else tmp_path / "runs.db"
    journal = recorded(FileJournal(where) if request.param == "file" else SqliteJournal(where, "run"))
    return str(where) if isinstance(journal, FileJournal) else f"{where}#run"


@cache
def recorded_once() -> bytes:
    return recorded(MemoryJournal()).content()


@pytest.fixture
def journal(tmp_path: Path) -> FileJournal:
    """
    A journal in a file that holds a run.
    """
    path = tmp_path / "run.jsonl"
    path.write_bytes(recorded_once())
    path.chmod(0o600)
    return FileJournal(path)


# --- posting and reading ----------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT2")
def test_messages_are_read_in_order_while_the_journal_is_held(
    store: Callable[..., Journal],
) -> None:
    recorded(store())
    holder = store().writer()
    with pytest.raises(JournalLocked):
        store().writer()

    assert [True] * 3 == [store().mailbox().send(message(n)) for n in range(3)]
    box = store().mailbox()
    first, place = box.read()
    later = MailboxMessage(kind="answer", topic="q3", value=True, path="3.2", id="the-fourth")
    store().mailbox().send(later)

    assert [0, 1, 2] == [letter.value for letter in first]
    assert box.may_have_messages(0)
    assert box.may_have_messages(place)
    assert ([later], box.read()[1]) == box.read(place)
    assert not box.may_have_messages(box.read()[1])
    assert ([], box.read()[1]) == box.read(box.read()[1])
    holder.close()


@pytest.mark.spec("waiting:WT2")
def test_message_id_is_delivered_once(store: Callable[..., Journal]) -> None:
    recorded(store())
    once = message({"n": 1}, id="once")

    assert store().mailbox().send(once)
    assert not store().mailbox().send(message({"n": 1}, id="once"))
    for other in (
        message({"n": 2}, id="once"),
        message({"n": 1}, "other", id="once"),
        message({"n": 1}, id="once", path="1"),
    ):
        with pytest.raises(InputError, match="has another mailbox message with the id 'once'"):
            store().mailbox().send(other)

    assert [once] == store().mailbox().read()[0]


@pytest.mark.spec("waiting:WT2")
def test_missing_run_gets_no_mailbox(store: Callable[..., Journal], tmp_path: Path) -> None:
    with pytest.raises(JournalMissing):
        store().mailbox().send(message())

    assert [] == list(tmp_path.iterdir())
    assert ([], 0) == FileJournal(tmp_path / "none.jsonl").mailbox().read()
    assert not FileJournal(tmp_path / "none.jsonl").mailbox().may_have_messages(0)


def test_missing_run_in_a_database_raises_journal_missing(tmp_path: Path) -> None:
    recorded(SqliteJournal(tmp_path / "runs.db", "one"))

    with pytest.raises(JournalMissing, match="there is no run 'two'"):
        SqliteJournal(tmp_path / "runs.db", "two").mailbox().send(message())


def test_journal_removed_while_sending_raises_journal_missing(tmp_path: Path) -> None:
    """With its folder, between the look at its head and the lock of the mailbox."""

    class Removed(FileJournal):
        def head(self) -> Any:
            found = super().head()
            shutil.rmtree(self.folder)
            return found

    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "run.jsonl").write_bytes(recorded_once())

    with pytest.raises(JournalMissing, match="does not exist"):
        Removed(folder / "run.jsonl").mailbox().send(message(1))


def test_discarding_a_journal_removes_its_messages(store: Callable[..., Journal], tmp_path: Path) -> None:
    recorded(store())
    store().mailbox().send(message())

    store().discard()
    assert not (tmp_path / "run.jsonl.mail").exists()
    with pytest.raises(JournalMissing):
        store().mailbox().send(message())
    recorded(store())

    assert ([], 0) == store().mailbox().read()
    if (tmp_path / "runs.db").exists():
        with closing(sqlite3.connect(tmp_path / "runs.db")) as database:
            assert [(0,)] == list(database.execute("SELECT count(*) FROM letters"))


@pytest.mark.spec("waiting:WT2")
def test_messages_do_not_reach_a_new_run_of_same_name(journal: FileJournal) -> None:
    journal.mailbox().send(MailboxMessage(kind="answer", topic="q1", value="yes", id="1"))
    journal.path.unlink()
    recorded(journal)

    assert [] == journal.mailbox().read()[0]
    assert journal.mailbox().send(MailboxMessage(kind="answer", topic="q1", value="no", id="1"))
    assert ["no"] == values(journal.mailbox())


def test_runs_in_one_database_have_separate_mailboxes(tmp_path: Path) -> None:
    one, two = [SqliteJournal(tmp_path / "runs.db", name) for name in ("one", "two")]
    for each in (one, two):
        recorded(each)

    one.mailbox().send(message(1, id="same"))
    _, place = one.mailbox().read()
    two.mailbox().send(message(2, id="same"))

    assert [1] == values(one.mailbox())
    assert [2] == values(two.mailbox())
    assert not one.mailbox().may_have_messages(place)


def test_position_of_a_recreated_mailbox_restarts(journal: FileJournal) -> None:
    for n in range(5):
        journal.mailbox().send(message(n))
    _, place = journal.mailbox().read()
    mailbox_path(journal.path).unlink()
    journal.mailbox().send(message("new"))

    assert journal.mailbox().may_have_messages(place)
    assert ["new"] == values(journal.mailbox(), place)


@given(value=json_values())
def test_message_value_round_trips(value: Any) -> None:
    stored = StoredMessage.parse(StoredMessage("run", message(value)).line[:-1], "its line")

    assert stored is not None
    assert value == stored.message.value


def test_secrets_in_messages_are_redacted(store: Callable[..., Journal], tmp_path: Path) -> None:
    recorded(store(secrets={"sesame-4711-sesame": "door"}))
    box = store(secrets={"sesame-4711-sesame": "door"}).mailbox()

    box.send(message({"say": "sesame-4711-sesame!"}))
    with pytest.raises(InputError, match="the id of a mailbox message contains a secret"):
        box.send(message(id="sesame-4711-sesame"))
    with pytest.raises(InputError, match="the topic of a mailbox message contains a secret"):
        box.send(message(topic="sesame-4711-sesame"))

    assert [{"say": "<redacted:door>!"}] == values(box)
    # Not its number alone: ids and checksums of letters are digits and letters by chance.
    assert not [path for path in tmp_path.iterdir() if b"sesame" in path.read_bytes()]


def test_remaining_secret_shape_is_rejected(journal: FileJournal) -> None:
    def spoils(value: Any) -> Any:
        return {"key": "sk-" + "proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEF"}

    box = FileJournal(journal.path, redact=[spoils]).mailbox()

    with pytest.raises(SecretFound):
        box.send(message({"say": "password=hunter2-hunter2-hunter2"}))
    assert not mailbox_path(journal.path).exists()


# --- what a letter is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"kind": "mail", "value": ""},
            "the kind of a mailbox message must be one of message, answer, cancel, input, result, not 'mail'",
        ),
        ({"kind": ["message"], "value": ""}, "the kind of a mailbox message must be one of .* not 'list'"),
        ({"kind": "message"}, "a topic must be 1 to 200 ASCII letters"),
        ({"kind": "message", "topic": "a b"}, "a topic must be 1 to 200 ASCII letters"),
        (
            {"kind": "message", "topic": "a", "id": ""},
            "the id of a mailbox message must be 1 to 200 printable characters",
        ),
        ({"kind": "message", "topic": "a", "id": "x\n"}, "the id of a mailbox message must be"),
        ({"kind": "message", "topic": "a", "path": "x"}, "the path of a mailbox message must be the path of a run"),
        ({"kind": "message", "topic": "a", "value": float("nan")}, "the value of a mailbox message must be JSON"),
        ({"kind": "message", "topic": "a", "value": "x" * mailbox.MAX_VALUE_BYTES}, "at most 1,048,576 bytes as JSON"),
        (
            {"kind": "message", "topic": "a", "sent": datetime(2026, 1, 1)},  # noqa: DTZ001
            "the time of a mailbox message must be a datetime with a time zone",
        ),
        (
            {"kind": "message", "topic": "a", "sent": datetime.max.replace(tzinfo=UTC)},
            "the time of a mailbox message must be a datetime with a time zone",
        ),
        ({"kind": "answer", "value": "yes"}, "the topic of an answer must be the id of its question"),
        ({"kind": "answer", "topic": "q1", "value": 7}, "an answer must be a bool, a text or the stored form"),
        ({"kind": "answer", "topic": "q1", "value": {"type": "answer", "text": 7}}, "an answer must be a bool"),
        ({"kind": "cancel"}, "the value of a mailbox message of the kind 'cancel' must be a text"),
        ({"kind": "cancel", "value": "x", "topic": "t"}, "a mailbox message of the kind 'cancel' must have no topic"),
        ({"kind": "input", "value": True}, "the value of a mailbox message of the kind 'input' must be a text"),
    ],
)
def test_invalid_message_is_rejected_with_a_reason(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        MailboxMessage(**given)

    assert len(str(caught.value)) < 600


# --- processes and threads --------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT2")
def test_concurrent_threads_post_without_deadlock(store: Callable[..., Journal]) -> None:
    recorded(store())
    boxes = [store().mailbox() for _ in range(4)]
    problems: list[BaseException] = []

    def post_all(number: int) -> None:
        try:
            for n in range(6):
                # Two threads have the same letters.
                boxes[number].send(message([number // 2, n], id=f"{number // 2}-{n}"))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=post_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = values(store().mailbox())

    assert not problems
    assert 12 == len(found)
    assert all([[n, k] for k in range(6)] == [v for v in found if v[0] == n] for n in (0, 1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@FORKS
def test_forked_child_can_post_to_its_parents_run(stored: str) -> None:
    from stepengine.journal import as_journal

    holder = as_journal(stored).writer()
    box = as_journal(stored).mailbox()
    box.send(message("parent"))

    assert 0 == in_child(lambda: box.send(message("child")))
    assert ["parent", "child"] == values(box)
    holder.close()


def test_stalled_sender_blocks_others_only_briefly(journal: FileJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(mailbox, "LOCK_SECONDS", 0.05)
    journal.mailbox().send(message(1))
    with mailbox_path(journal.path).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(JournalLocked):
            journal.mailbox().send(message(2))
        assert [1] == values(journal.mailbox()), "reading needs no lock"

    assert journal.mailbox().send(message(2))


# --- files ------------------------------------------------------------------------------------------------------------


def test_mailbox_is_a_private_file_next_to_the_journal(journal: FileJournal) -> None:
    journal.mailbox().send(message())
    box = journal.path.with_name("run.jsonl.mail")

    assert box == mailbox_path(journal.path)
    assert 0o600 == stat.S_IMODE(box.stat().st_mode)
    assert [journal.path] == list(journal.path.parent.glob("*.jsonl"))
    with pytest.raises(JournalError, match="is a mailbox; name its journal"):
        FileJournal(box)


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize("left", ["", '{"run":"x"}', "\0" * 100, "garbage\n"])
def test_torn_message_is_ignored_and_removed_by_the_next(journal: FileJournal, left: str) -> None:
    box = journal.mailbox()
    box.send(message(1))
    _, place = box.read()
    with mailbox_path(journal.path).open("a") as file:
        file.write(left)

    assert ([], place) == box.read(place)
    box.send(message(2))

    assert [2] == values(box, place)
    assert 2 == mailbox_path(journal.path).read_bytes().count(b"\n")


def test_every_prefix_of_a_mailbox_yields_its_whole_messages(journal: FileJournal) -> None:
    for n in range(2):
        journal.mailbox().send(message(n))
    path = mailbox_path(journal.path)
    whole = path.read_bytes()
    for size in [0, 1, *range(whole.index(b"\n"), len(whole) + 1)]:
        path.write_bytes(whole[:size])
        expected = [*range(whole[:size].count(b"\n"))]
        assert expected == values(journal.mailbox())
        if size % 41 == 0:
            journal.mailbox().send(message("next"))
            assert [*expected, "next"] == values(journal.mailbox())


def test_damage_before_the_end_is_reported_with_its_line(journal: FileJournal) -> None:
    for n in range(3):
        journal.mailbox().send(message(n))
    path = mailbox_path(journal.path)
    path.write_bytes(path.read_bytes().replace(b'"value":1', b'"value":7'))

    with pytest.raises(
        JournalCorrupt, match=r"line 2 \(byte \d+\) of .*run.jsonl.mail is damaged: its checksum is wrong"
    ):
        journal.mailbox().read()
    assert journal.mailbox().send(message(3)), "whoever posts does not suffer for it"


def test_damage_in_a_database_is_reported_with_its_message(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "runs.db", "run")
    recorded(journal)
    for n in range(2):
        journal.mailbox().send(message(n))
    for broken in (b"{}\n", "text", 7):
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as database:
            database.execute("UPDATE letters SET line = ? WHERE number = 1", (broken,))

        with pytest.raises(JournalCorrupt, match=r"mailbox message 1 of .*runs\.db"):
            journal.mailbox().read()


def test_unknown_message_kind_is_skipped(journal: FileJournal) -> None:
    journal.mailbox().send(message(1))
    head = journal.head()
    assert head is not None
    with mailbox_path(journal.path).open("ab") as file:
        file.write(encode_line({"run": head.run, "id": "n", "kind": "picture", "page": 7}, 0)[0])
    journal.mailbox().send(message(2))

    assert [1, 2] == values(journal.mailbox())


@pytest.mark.parametrize("bad", [{"sent": "soon"}, {"topic": ""}, {"run": 1}])
def test_message_with_a_valid_checksum_is_still_validated(journal: FileJournal, bad: dict[str, Any]) -> None:
    journal.mailbox().send(message(1))
    path = mailbox_path(journal.path)
    members = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "crc"}
    path.write_bytes(encode_line({**members, **bad}, 0)[0])

    with pytest.raises(JournalCorrupt, match=r"line 1 .* is not a mailbox message"):
        journal.mailbox().read()


def test_full_mailbox_rejects_messages(store: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(store())
    monkeypatch.setattr(mailbox, "MAX_LETTERS", 3)
    box = store().mailbox()
    for n in range(3):
        box.send(message(n, id=str(n)))

    with pytest.raises(JournalWriteFailed, match="is full: it holds at most 3 mailbox messages"):
        box.send(message(3))
    assert not box.send(message(2, id="2"))
    monkeypatch.setattr(mailbox, "MAX_LETTERS", 10)
    monkeypatch.setattr(mailbox, "MAX_MAILBOX_BYTES", 1_000)
    with pytest.raises(JournalWriteFailed, match="is full"):
        box.send(message("x" * 1_000))

    assert [0, 1, 2] == values(box)


async def test_answers_for_a_full_mailbox_are_sent_all_or_none(
    store: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = AgentDefinition("asking", handle_steps=ask_twice)
    asked = await Engine([asking]).run("asking", "", journal=store())
    answers = {question.id: "yes" for question in asked.pending_questions}
    monkeypatch.setattr(mailbox, "MAX_LETTERS", 1)

    with pytest.raises(JournalWriteFailed, match="nothing was sent"):
        send_answers(store(), answers)

    assert len(answers) == 2
    assert [] == store().mailbox().read()[0]


def ask_twice(_: StepContext) -> Steps[tuple[str, str]]:
    return (yield from Parallel(Ask("First?"), Ask("Second?")))


@pytest.mark.parametrize("fault", ["write", "fdatasync"])
def test_message_is_not_posted_partially_on_a_full_disk(
    journal: FileJournal, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    journal.mailbox().send(message(1))
    before = mailbox_path(journal.path).read_bytes()
    real = os.write

    def half(descriptor: int, data: Any) -> int:
        if len(data) > 20:
            return real(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    def none(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, fault, half if fault == "write" else none)
        with pytest.raises(JournalWriteFailed, match="cannot be used as a mailbox"):
            journal.mailbox().send(message(2))

    assert before == mailbox_path(journal.path).read_bytes()
    assert journal.mailbox().send(message(2))


@ON_POSIX
def test_mailbox_writable_by_others_is_rejected(journal: FileJournal) -> None:
    journal.mailbox().send(message(1))
    mailbox_path(journal.path).chmod(0o622)

    for act in (journal.mailbox().read, lambda: journal.mailbox().send(message(2))):
        with pytest.raises(JournalError, match="is writable by other users"):
            act()


@ON_POSIX
@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "dangling"])
def test_non_file_is_no_mailbox(journal: FileJournal, tmp_path: Path, kind: str) -> None:
    path = mailbox_path(journal.path)
    other = tmp_path / "other"
    other.write_bytes(b"")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)

    for act in (journal.mailbox().read, lambda: journal.mailbox().send(message(2))):
        with pytest.raises(JournalError, match=r"run\.jsonl\.mail"):
            act()
    assert b"" == other.read_bytes()
    assert not (tmp_path / "nowhere").exists()


def test_oversized_mailbox_is_not_read(journal: FileJournal) -> None:
    journal.mailbox().send(message(1))
    with mailbox_path(journal.path).open("ab") as file:
        file.truncate(1 << 40)

    for act in (journal.mailbox().read, lambda: journal.mailbox().send(message(2))):
        with pytest.raises(JournalCorrupt, match="a mailbox may have at most 67,108,864; remove it"):
            act()


def test_endless_line_is_repaired_by_the_next_sender(journal: FileJournal) -> None:
    journal.mailbox().send(message(1))
    with mailbox_path(journal.path).open("ab") as file:
        file.write(b"a" * (2 * mailbox.MAX_LETTER_BYTES + 5))

    assert [1] == values(journal.mailbox())
    journal.mailbox().send(message(2))
    assert [1, 2] == values(journal.mailbox())


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    lines = st.one_of(
        st.binary(max_size=60),
        st.dictionaries(
            st.sampled_from(["run", "id", "kind", "path", "topic", "value", "sent", "crc"]), json_values(), max_size=8
        ).map(lambda members: encode_line(members or {"a": 1}, 0)[0]),
    )
    return draw(st.lists(lines, max_size=6).map(b"\n".join))


@given(data=hostile(), after=st.integers(-10, 400))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.deep
def test_arbitrary_mailbox_content_raises_only_typed_errors(journal: FileJournal, data: bytes, after: int) -> None:
    """
    Anything at all in the mailbox: reading and posting raise a typed error or do what was asked.
    """
    path = mailbox_path(journal.path)
    path.write_bytes(data)
    path.chmod(0o600)
    with contextlib.suppress(StepEngineError):
        _, place = journal.mailbox().read(after)
        assert 0 <= place <= len(data)
        assert [] == journal.mailbox().read(place)[0]
    with contextlib.suppress(StepEngineError):
        assert journal.mailbox().send(message("last", id="the last"))
        with contextlib.suppress(JournalCorrupt):
            assert "last" == values(journal.mailbox())[-1]


@pytest.mark.speed
@pytest.mark.parametrize("piece", [b"\n", b"{", b"[", b'"', b"\0"])
def test_a_megabyte_behind_a_letter_takes_two_seconds_at_most(journal: FileJournal, piece: bytes) -> None:
    journal.mailbox().send(message("first"))
    with mailbox_path(journal.path).open("ab") as file:
        file.write(piece * 1_000_000 + b"\n")
    began = time.process_time()
    for work in (lambda: journal.mailbox().read(0), lambda: journal.mailbox().send(message("last"))):
        with contextlib.suppress(StepEngineError):
            work()
    assert time.process_time() - began < 2


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_messages_sent_together_are_stored_all_or_none(store: Callable[..., Journal], place: int) -> None:
    recorded(store())
    first, changed = message(0, id="0"), message("changed", id="0")
    store().mailbox().send(first)
    others = [message(n, id=str(n)) for n in (1, 2)]
    with pytest.raises(InputError, match="has another mailbox message with the id '0'"):
        store().mailbox().send_all([*others[:place], changed, *others[place:]])
    before = store().mailbox().read()[0]
    is_new = [store().mailbox().send_all([*others[:place], first, *others[place:]]) for _ in range(2)]

    assert [first] == before
    assert [True, False] == is_new
    assert [0, 1, 2] == values(store().mailbox())
