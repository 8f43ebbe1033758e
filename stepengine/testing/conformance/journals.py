"""
``check_journal``: the promises of a journal store.

Records of real runs are written, read, followed, replaced and damaged through the public interface. One run is killed in a process of
its own and resumed here. Cost is counted in calls and bytes, so that a slow machine breaks no promise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeAlias

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.yields import Ask, Perform
from stepengine.engine.engine import Engine
from stepengine.errors import JournalCorrupt, JournalError, JournalLocked, JournalWriteFailed
from stepengine.journal.line_journal import LineJournal
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.records import Intent, Record, Result
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.testing.conformance.promises import Promises, require, require_equal, require_error

MakeJournal: TypeAlias = Callable[[str], Journal]
KILLED_AT = 3
LOCK_SECONDS = 30.0
"""A lock that is a lease may outlive a killed process for as long."""
CHILD_SECONDS = 120.0
"""An import and some steps take two seconds; a machine that runs a whole suite may need many times as long."""
GAP_SECONDS = 2.0
"""A store that makes readers wait, or that makes very many calls, is not slowed down for longer."""
EARLY, LATE, WINDOW = 100, 1_600, 100
MOST_CALLS, MOST_BYTES, MOST_SYSTEM_BYTES = 1.5, 1.5, 3.0
"""How much more a late step may cost. A database writes some pages now and then, which the system counts."""

JOURNAL: Promises[MakeJournal] = Promises("check_journal(make")


def check_journal(make: MakeJournal, *, only: str = "", processes: bool = True) -> None:
    """
    Check that a journal store meets the promises of its interface.

    Args:
        make: Returns the journal with a name. Called again with the same name, it returns another object over the same store. Another
            process finds it by its name: a function or class of a module, or ``functools.partial`` of one with texts, numbers and paths.
        only: The name of one promise; by default all are checked.
        processes: Whether a journal outlives its process. ``False`` is for stores in memory.

    Raises:
        AssertionError: when a promise is broken; the message names it and the call that checks it alone.
    """
    JOURNAL.check(make, only, () if processes else ("killed",))


# --- runs to record -------------------------------------------------------------------------------------------------


def _counting_handler(ctx: Any) -> Any:
    """Perform as many calls as the prompt says, and return the sum of their results."""
    total = 0
    for number in range(int(ctx.prompt)):
        total += yield from Perform.idempotent(abs, -number)
    return total


def _asking_handler(_ctx: Any) -> Any:
    """Ask a question, perform one effect, and return the answer."""
    answer = yield from Ask("Which one?", options=["left", "right"])
    yield from Perform.idempotent(abs, -1)
    return answer


def _killing_handler(_ctx: Any) -> Any:
    """Perform calls, one of which kills the process that records them."""
    for number in range(2 * KILLED_AT):
        yield from Perform.idempotent(_kill_recording_process, number)
    return "done"


def _kill_recording_process(number: int) -> int:
    """Kill this process at the call ``KILLED_AT`` if it is the one that records; return *number* otherwise."""
    if number == KILLED_AT and os.environ.get(VICTIM) == str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return number


VICTIM = "STEPENGINE_CONFORMANCE_VICTIM"
CHILD = f"""
import json, sys
sys.path[:], *made = json.load(sys.stdin)
from {__name__} import record_until_killed
record_until_killed(*made)
"""
AGENTS = [
    AgentDefinition("count", handle_steps=_counting_handler),
    AgentDefinition("ask", handle_steps=_asking_handler),
    AgentDefinition("slow", handle_steps=_killing_handler),
]


def _record_run(journal: Journal, agent: str, prompt: str) -> Any:
    with Engine(AGENTS) as engine:
        return engine.run_sync(agent, prompt, journal=journal)


def _make_records_of_steps(steps: int) -> list[Record]:
    """Return the records of a run with this number of steps: head, intents and results."""
    journal = MemoryJournal()
    _record_run(journal, "count", str(steps))
    return journal.records()


def _require_same_records(expected: Sequence[Record], actual: Sequence[Record], subject: str) -> None:
    """Raise ``AssertionError`` unless both lists of records are encoded to equal lines."""
    judge = MemoryJournal()
    before, after = judge.encode_lines(expected), judge.encode_lines(actual)
    for number, (one, other) in enumerate(zip(before, after, strict=False), start=1):
        require(one == other, f"{subject}: record {number} differs: expected {one!r}, found {other!r}")
    require_equal(len(before), len(after), f"{subject}: number of records")


@contextmanager
def _open_writer(journal: Journal) -> Iterator[Any]:
    """Yield the writer of *journal*, and close it behind the block."""
    writer = journal.writer()
    try:
        yield writer
    finally:
        writer.close()


def _append_records(journal: Journal, records: Sequence[Record]) -> None:
    """Append each record and commit it, with a new writer that is closed at the end."""
    with _open_writer(journal) as writer:
        for record in records:
            writer.append(record)
            writer.commit()


# --- promises -------------------------------------------------------------------------------------------------------


@JOURNAL.add("names", "Journals with different names do not share records.")
def _check_separate_journals(make: MakeJournal) -> None:
    """Fail if journals with different names share records."""
    one, two = _make_records_of_steps(2), _make_records_of_steps(4)
    _append_records(make("one"), one)
    _append_records(make("two"), two)
    _require_same_records(one, make("one").records(), "the first journal")
    _require_same_records(two, make("two").records(), "the second journal")


@JOURNAL.add("append", "Committed records can be read in order, both while the writer is open and after it is closed.")
def _check_append_order(make: MakeJournal) -> None:
    """Fail unless committed records are read in order, both while the writer is open and after it is closed."""
    records = _make_records_of_steps(20)
    require_equal([], list(make("append").records()), "records of a new journal")
    with _open_writer(make("append")) as writer:
        for number, record in enumerate(records[:-1], start=1):
            writer.append(record)
            writer.commit()
            if number % 10 == 1:
                _require_same_records(records[:number], make("append").records(), "records of an open journal")
        writer.append(records[-1])
    _require_same_records(records, make("append").records(), "records after `close`, which commits")


@JOURNAL.add("reopen", "A journal that is opened again continues behind its last record.")
def _check_append_after_reopen(make: MakeJournal) -> None:
    """Fail unless a journal that is opened again continues after its last record."""
    records = _make_records_of_steps(6)
    for start in range(0, len(records), 4):
        _append_records(make("reopen"), records[start : start + 4])
    _require_same_records(records, make("reopen").records(), "records of several writers")
    with _open_writer(make("reopen")) as writer:
        _require_same_records(records, list(writer.history.records), "`history` of a writer")


@JOURNAL.add("lock", "A journal has one writer; a second one raises JournalLocked until the first is closed.")
def _check_single_writer(make: MakeJournal) -> None:
    """Fail unless a second writer raises ``JournalLocked`` until the first one is closed."""
    records = _make_records_of_steps(2)
    first = make("lock").writer()
    try:
        for writer in (make("lock"), make("lock")):
            require_error(JournalLocked, writer.writer, "a second writer")
        for record in records:
            first.append(record)
        first.commit()
    finally:
        first.close()
    first.close()
    _require_same_records(records, make("lock").records(), "records of the first writer")
    _append_records(make("lock"), ())


@JOURNAL.add("replace", "`replace` and `discard` replace all records at once; on failure nothing changes.")
def _check_replace_and_discard(make: MakeJournal) -> None:
    """Fail unless ``replace`` and ``discard`` replace all records at once, and nothing after an error."""
    records, others = _make_records_of_steps(9), _make_records_of_steps(2)
    _append_records(make("replace"), records)
    make("replace").replace(others)
    _require_same_records(others, make("replace").records(), "records after a replacement by fewer")
    require_error(JournalError, lambda: make("replace").replace(others[1:]), "records without a head")
    _require_same_records(others, make("replace").records(), "records after a refused replacement")
    make("replace").discard()
    require_equal([], make("replace").records(), "records after `discard`")
    _append_records(make("replace"), records)
    locked = make("replace")
    unlock = locked.lock()
    locked.replace(others)
    unlock()
    _require_same_records(others, make("replace").records(), "records after a replacement under the lock")
    make("replace").replace(records)
    _require_same_records(records, make("replace").records(), "a new run after `discard`")
    if isinstance(make("gap"), LineJournal):
        _check_replacement_is_atomic(_require_line_journal(make("gap")), make("gap"))


@JOURNAL.add("follow", "A tail returns each record once, in order, and starts again after a replacement.")
def _check_tail_of_new_records(make: MakeJournal) -> None:
    """Fail unless a tail returns each record once, in order, and starts again after a replacement."""
    records, others = _make_records_of_steps(12), _make_records_of_steps(3)
    tail = make("follow").make_start_position()
    require_equal(0, len(tail.read_new_records().records), "new records of an empty journal")
    with _open_writer(make("follow")) as writer:
        for start in range(0, len(records), 5):
            for record in records[start : start + 5]:
                writer.append(record)
            writer.commit()
            require(tail.may_have_new_records(), "`may_have_new_records` is false after a commit")
            found = tail.read_new_records()
            require(not found.again, f"a tail started again ({found.again}) while records were only appended")
            _require_same_records(records[start : start + 5], found.records, "new records")
            require_equal(0, len(tail.read_new_records().records), "new records without a commit")
    make("follow").replace(others)
    found = tail.read_new_records()
    require(found.again, "`again` is empty after a replacement")
    _require_same_records(others, found.records, "records after a replacement")


@JOURNAL.add("resume", "A run that waits for an answer is resumed from the store alone, and its record replays.")
def _check_resume_and_replay(make: MakeJournal) -> None:
    """Fail unless a run that waits for an answer is resumed from the store alone, and its record replays."""
    waiting = _record_run(make("resume"), "ask", "")
    require_equal(1, len(waiting.pending_questions), "open questions")
    with Engine(AGENTS) as engine:
        result = engine.resume_sync(make("resume"), answers={waiting.pending_questions[0].id: "right"})
        require_equal("right", result.output, "output of the resumed run")
        require_equal("right", engine.replay_sync(make("resume")).output, "output of the replay")


@JOURNAL.add(
    "mailbox", "If the store has a mailbox, a run receives each message once, and only messages for its own run."
)
def _check_mailbox_delivery(make: MakeJournal) -> None:
    """Fail unless a run receives each message for it once, if the store has a mailbox."""
    _append_records(make("mailbox"), _make_records_of_steps(2))
    try:
        box = make("mailbox").mailbox()
    except JournalError:
        return
    sent = [MailboxMessage(kind="message", topic="news", value=number) for number in range(3)]
    place = 0
    for letter in sent:
        require(make("mailbox").mailbox().send(letter), "a new message is reported as known")
        require(box.may_have_messages(place), "`may_have_messages` is false after a message")
        found, place = box.read(place)
        require_equal([letter.id], [one.id for one in found], "messages after the position")
    require(not make("mailbox").mailbox().send(sent[0]), "the same message is stored twice")
    require_equal([one.id for one in sent], [one.id for one in box.read()[0]], "all messages")
    make("mailbox").discard()
    _append_records(make("mailbox"), _make_records_of_steps(2))
    require_equal([], make("mailbox").mailbox().read()[0], "messages of the run before, in a new run")


@JOURNAL.add(
    "foreign bytes",
    "A writer appends nothing after bytes of another writer, and rejects bytes of another program.",
)
def _check_foreign_bytes(make: MakeJournal) -> None:
    journal = make("foreign")
    if not isinstance(journal, LineJournal):
        return
    records = _make_records_of_steps(3)
    writer = journal.writer()
    try:
        for record in records[:-1]:
            writer.append(record)
        writer.commit()
        before = make("foreign").content()
        _require_line_journal(make("foreign")).append_bytes(b"bytes of another writer\n", len(before))
        writer.append(records[-1])
        require_error(JournalWriteFailed, writer.commit, "a commit after bytes of another writer")
    finally:
        writer.close()
    require_equal(before + b"bytes of another writer\n", make("foreign").content(), "stored bytes")
    _require_line_journal(make("foreign")).replace_bytes(before.replace(b'"kind"', b'"kinds"', 1))
    for _ in range(2):
        require_error(
            JournalCorrupt, make("foreign").writer, "a writer of a damaged journal, which must not stay locked"
        )


@JOURNAL.add("torn line", "An incomplete last line is removed before an append; all earlier lines are kept.")
def _check_torn_line_repair(make: MakeJournal) -> None:
    """Fail unless an incomplete last line is removed before an append, and all earlier lines remain."""
    if not isinstance(make("torn"), LineJournal):
        return
    records = _make_records_of_steps(4)
    _append_records(make("torn"), records[:-1])
    whole = make("torn").content()
    for cut in (1, 7, 40):
        _require_line_journal(make("torn")).replace_bytes(whole[:-cut])
        kept = make("torn").records()
        _require_same_records(records[: len(kept)], kept, f"records without the last {cut} bytes")
        with _open_writer(make("torn")) as writer:
            require_equal(cut > 1, bool(writer.repaired), "whether bytes were removed")
            for record in records[len(kept) :]:
                writer.append(record)
        _require_same_records(records, make("torn").records(), "records after the repair")


@JOURNAL.add("growth", f"A step costs the same after {LATE:,} steps as after {EARLY}, in calls and in bytes.")
def _check_constant_step_cost(make: MakeJournal) -> None:
    """Fail unless a late step of a run costs as many calls and bytes as an early one."""
    early, late = _measure_early_and_late_steps(make("growth"))
    for what, most in (
        ("function calls", MOST_CALLS),
        ("bytes of the store", MOST_BYTES),
        ("bytes of system calls", MOST_SYSTEM_BYTES),
    ):
        before, after = early[what], late[what]
        require(
            after <= before * most,
            f"{what} of {WINDOW} steps: {before:,} after {EARLY} steps, {after:,} after {LATE:,} steps, at most {most} times as many",
        )


@JOURNAL.add("killed", "A run whose process is killed is resumed from its last commit in another process.")
def _check_resume_after_kill(make: MakeJournal) -> None:
    """Fail unless another process resumes a run from its last commit after its process was killed."""
    # A new interpreter, and no fork: a fork would share connections and threads of the store.
    child = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", CHILD],
        input=json.dumps([sys.path, *_make_importable_reference(make)]).encode(),
        capture_output=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    said = child.stderr.decode(errors="replace")
    require_equal(-signal.SIGKILL, child.returncode, f"exit code of the process that records, which printed {said!r}")
    done = [record for record in make("killed").records() if isinstance(record, Result)]
    require(
        len(done) >= KILLED_AT, f"{len(done)} results are stored, at least {KILLED_AT} were committed before the kill"
    )
    _wait_until_unlocked(make("killed"))
    with Engine(AGENTS) as engine:
        require_equal("done", engine.resume_sync(make("killed")).output, "output of the resumed run")


def _make_importable_reference(make: MakeJournal) -> tuple[str, str, list[Any], dict[str, Any]]:
    """Return module, name and arguments of the factory *make*, with which another process calls it."""
    call = make if isinstance(make, partial) else partial(make)
    function: Any = call.func
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    is_plain = all(isinstance(value, str | int | float | Path) for value in (*call.args, *call.keywords.values()))
    require(
        found is function and module != "__main__" and is_plain,
        "another process cannot import make; use a function or class of a module, or functools.partial of one with strings, numbers and paths",
    )
    return module, name, list(map(_path_to_json, call.args)), {n: _path_to_json(v) for n, v in call.keywords.items()}


def _path_to_json(value: Any) -> Any:
    """Return a path as ``{"path": ...}``, and any other value unchanged."""
    return {"path": str(value)} if isinstance(value, Path) else value


def _path_from_json(value: Any) -> Any:
    """Return the path in ``{"path": ...}``, and any other value unchanged."""
    return Path(value["path"]) if isinstance(value, dict) else value


def record_until_killed(module: str, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Record a run that kills this process; its journal is made by the function *name* of *module*."""
    os.environ[VICTIM] = str(os.getpid())
    given = {key: _path_from_json(value) for key, value in keywords.items()}
    make = partial(getattr(import_module(module), name), *map(_path_from_json, arguments), **given)
    _record_run(make("killed"), "slow", "")


# --- helpers --------------------------------------------------------------------------------------------------------


def _require_line_journal(journal: Journal) -> LineJournal:
    """Return *journal* if it is a ``LineJournal``; raise ``TypeError`` otherwise."""
    if not isinstance(journal, LineJournal):
        msg = "make returns a LineJournal for some names and another class for others; return one class"
        raise TypeError(msg)
    return journal


def _check_replacement_is_atomic(journal: LineJournal, other: Journal) -> None:
    """Read *other* in another thread during each call that ``replace_bytes`` makes; it must have the old or the new content."""
    old, new = (b"".join(journal.encode_lines(_make_records_of_steps(steps))) for steps in (9, 2))
    journal.replace_bytes(old)
    whole: list[bool] = []
    is_over = threading.Event()
    until = time.monotonic() + GAP_SECONDS

    def read_until_over() -> None:
        """Read the journal repeatedly, and record whether each content is the old or the new one."""
        while not is_over.is_set():
            whole.append(other.content() in (old, new))

    def wait_for_two_reads(*_: object) -> None:
        """Wait until the other thread has read twice more."""
        # The first of two reads may have started before this call.
        enough = len(whole) + 2
        while len(whole) < enough and time.monotonic() < until:
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_until_over)
        profile = sys.getprofile()
        sys.setprofile(wait_for_two_reads)
        try:
            journal.replace_bytes(new)
        finally:
            sys.setprofile(profile)
            is_over.set()
    reading.result()
    require(all(whole), "a reader found neither the old nor the new content while `replace_bytes` was running")


def _wait_until_unlocked(journal: Journal) -> None:
    """Wait until a writer can be opened; raise ``AssertionError`` after ``LOCK_SECONDS``."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            journal.writer().close()
        except JournalLocked:
            require(time.monotonic() < until, f"a killed process still has the lock after {LOCK_SECONDS:g} seconds")
            time.sleep(0.1)
        else:
            return


def _measure_early_and_late_steps(journal: Journal) -> tuple[dict[str, int], dict[str, int]]:
    """Return the calls and bytes of ``WINDOW`` steps after ``EARLY`` steps, and of as many after ``LATE`` steps."""
    sample = _make_records_of_steps(2)
    intent = next(record for record in sample if isinstance(record, Intent))
    result = next(record for record in sample if isinstance(record, Result))

    def write_steps(first: int, last: int, commit: Callable[[], None]) -> None:
        """Append the records of steps, and commit each step."""
        for number in range(first, last):
            for record in (attrs.evolve(intent, seq=number), attrs.evolve(result, seq=number)):
                writer.append(record)
                commit()

    with _Meter(journal) as meter, _open_writer(journal) as writer:
        writer.append(sample[0])
        write_steps(0, EARLY, lambda: None)
        writer.commit()
        early = meter.measure(lambda: write_steps(EARLY, EARLY + WINDOW, writer.commit))
        write_steps(EARLY + WINDOW, LATE, lambda: None)
        writer.commit()
        late = meter.measure(lambda: write_steps(LATE, LATE + WINDOW, writer.commit))
    return early, late


class _Meter:
    """Counts calls and bytes; those of the store only for a ``LineJournal``."""

    METHODS = ("read_bytes", "append_bytes", "replace_bytes")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._is_counted = isinstance(journal, LineJournal)
        self._calls = self._moved = 0

    def __enter__(self) -> Self:
        for name in self.METHODS if self._is_counted else ():
            setattr(self._journal, name, self._wrap_to_count_bytes(getattr(self._journal, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.METHODS if self._is_counted else ():
            delattr(self._journal, name)

    def measure(self, work: Callable[[], None]) -> dict[str, int]:
        """Call *work*, and return the numbers of function calls and of bytes that it caused."""
        self._calls = self._moved = 0
        system, profile = _read_system_bytes(), sys.getprofile()
        sys.setprofile(self._count_call)
        try:
            work()
        finally:
            sys.setprofile(profile)
        return {
            "function calls": self._calls,
            "bytes of the store": self._moved,
            "bytes of system calls": _read_system_bytes() - system,
        }

    def _count_call(self, _frame: object, event: str, _argument: object) -> None:
        """Count a call of a Python or C function: a profile function."""
        self._calls += event in ("call", "c_call")

    def _wrap_to_count_bytes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return *method* with the bytes of its arguments and its result counted."""

        def call_and_count(*arguments: Any) -> Any:
            """Call the method, and count the bytes in its arguments and result."""
            found = method(*arguments)
            self._moved += sum(len(one) for one in (*arguments, found) if isinstance(one, bytes))
            return found

        return call_and_count


def _read_system_bytes() -> int:
    """Return how many bytes this thread has read and written by system calls; 0 where the system does not count them."""
    try:
        lines = Path("/proc/thread-self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
