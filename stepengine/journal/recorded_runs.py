"""
The runs in the state folder of the user: their list, and the companion file next to each journal.

A companion has what a journal does not: the agent's file, the working folder, the options. It is rebuilt from the journal if it is lost.
Must not be here: the writing of companions, which is the command line's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from stepengine.data.state import RunStatus
from stepengine.data.visible import one_line, truncate_text
from stepengine.data.waits import describe_wait
from stepengine.errors import JournalError
from stepengine.journal.journal_files import lock_file, unlock_and_close
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.journal.sources import as_journal, parse_database_path
from stepengine.redaction import ANY
from stepengine.workspace.user_state import RUNS, get_user_state_folder, is_writable_only_by_user

if TYPE_CHECKING:
    from stepengine.data.waits import Waits
    from stepengine.journal.store import Journal

STEM = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
# A companion has a few kilobytes; the rest leaves room for fields of newer versions.
COMPANION_BYTES = 256 * 1024
# A title is one line of a list in a terminal.
TITLE_CHARS = 80
# A list shows the beginning of a question; the journal has the whole text.
QUESTION_CHARS = 400
# More waits than a screen has lines; the journal has them all.
MAX_WAITS = 50
ENDED = frozenset(s.value for s in RunStatus) - {RunStatus.SUSPENDED.value}
GOES_ON = ("suspended", "interrupted")
"""Statuses of runs that can be resumed."""


def get_runs_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the folder of recorded runs, even if it does not exist; ``None`` without a home."""
    state = get_user_state_folder(environ)
    return None if state is None else state / RUNS


class RecordedRun(NamedTuple):
    """
    A recorded run.

    Attributes:
        stem: The name of its files, without a suffix.
        info: The members of its companion file.
        folder: The folder that holds the companion file.
    """

    stem: str
    info: Mapping[str, Any]
    folder: Path

    @property
    def journal(self) -> str:
        """The path of its journal, or the name of its store."""
        own = self.folder / f"{self.stem}.jsonl"
        return str(own) if own.exists() else self.get_text("journal") or str(own)

    @property
    def status(self) -> str:
        """The final status, or ``suspended``, ``running`` or ``interrupted``."""
        status = str(self.info.get("status"))
        return "interrupted" if status == "running" and not self._is_process_alive() else status

    @property
    def is_ended(self) -> bool:
        """Whether the run has ended, so that it cannot be resumed."""
        return self.status in ENDED

    def get_text(self, *keys: str) -> str:
        """Return the text in the companion file at this path of keys; ``""`` if there is none."""
        value = self._find_value(keys)
        return value if isinstance(value, str) else ""

    def get_flag(self, *keys: str) -> bool:
        """Return whether the value in the companion file at this path of keys is true."""
        return self._find_value(keys) is True

    def _find_value(self, keys: tuple[str, ...]) -> object:
        """Return the value in the companion file at this path of keys, or ``None``."""
        value: object = self.info
        for name in keys:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def to_json(self) -> dict[str, Any]:
        """Return the companion as JSON, with the name and the status."""
        return {**self.info, "stem": self.stem, "status": self.status}

    def _is_process_alive(self) -> bool:
        """Return whether the process that the companion names still runs, or the journal is locked."""
        pid = self.info.get("pid")
        if type(pid) is not int or pid < 1:
            return False
        try:
            os.kill(pid, 0)
        except (OSError, OverflowError):
            with contextlib.suppress(JournalError):  # the number may be one of another container
                return as_journal(self.journal).is_held()
            return False
        return self.info.get("pid_began") in (
            None,
            find_process_start_ticks(pid),
        )  # another process may have the number by now

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """
        Lock the journal while the block runs; yield whether it was free. A missing journal is free.

        A run in a database is not locked, since its database is never removed.
        """
        database = parse_database_path(self.journal)
        if database is not None and database[1]:
            yield not as_journal(self.journal).is_held()
            return
        path = Path(self.journal)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            yield True
            return
        try:
            lock_file(descriptor, path, unsafe_no_lock=True)
        except JournalError:
            yield False
        else:
            yield True
        finally:
            unlock_and_close(descriptor)


def list_runs(*, working_folder: Path | None = None, waiting: bool = False) -> list[RecordedRun]:
    """
    Return the recorded runs of this user, newest first; the data of a missing or broken companion is read from the journal.

    Args:
        working_folder: Return only the runs that were started in this folder.
        waiting: Return only the runs that wait or were interrupted.

    Raises:
        JournalError: when other users can write to the folder of runs.
    """
    folder = get_runs_folder()
    if folder is None or not folder.is_dir():
        return []
    if problem := describe_unsafe_folder(folder):
        raise JournalError(problem)
    stems = {path.stem for path in folder.iterdir() if path.suffix in (".json", ".jsonl") and STEM.fullmatch(path.stem)}
    found = [
        RecordedRun(stem, read_companion(folder, stem) or _rebuild_companion(folder, stem), folder) for stem in stems
    ]
    chosen = [e for e in found if e.info and (working_folder is None or e.get_text("cwd") == str(working_folder))]
    chosen = [e for e in chosen if not waiting or e.status in GOES_ON]
    return sorted(chosen, key=lambda e: (e.get_text("created"), e.stem), reverse=True)


def describe_unsafe_folder(runs: Path) -> str:
    """Return a sentence if other users can write in a folder of runs or its parent, which makes its files unsafe; else ``""``."""
    unsafe = next((folder for folder in (runs.parent, runs) if not is_writable_only_by_user(folder)), None)
    if unsafe is None:
        return ""
    return f"others may write in {unsafe}; make it yours alone with `chmod 700`, or set STEPENGINE_STATE_DIR"


def find_recorded_run(folder: Path, stem: str) -> RecordedRun | None:
    """Return the recorded run of that name in a folder, if it has a companion."""
    info = read_companion(folder, stem) if STEM.fullmatch(stem) else None
    return None if info is None else RecordedRun(stem, info, folder)


def read_companion(folder: Path, stem: str) -> dict[str, Any] | None:
    """Return the companion of a run; ``None`` if it is missing or broken."""
    try:
        with (folder / f"{stem}.json").open("rb") as file:
            info = json.loads(file.read(COMPANION_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return info if isinstance(info, dict) and isinstance(info.get("status"), str) else None


def _rebuild_companion(folder: Path, stem: str) -> dict[str, object]:
    """Return a companion made from the journal of a run; empty if there is no journal."""
    from stepengine.journal.files import FileJournal

    path = folder / f"{stem}.jsonl"
    return summarize_journal(FileJournal(path), str(path)) if path.is_file() else {}


def summarize_journal(journal: Journal, name: str) -> dict[str, object]:
    """Return the summary of the journal *name* in the form of a companion file; only name and status if it cannot be read."""
    from stepengine.journal.show import compute_spending, get_run_id, get_run_status

    try:
        history = journal.history()
        root, spending, status = history.root, compute_spending(history), get_run_status(history)
        questions = [question_to_companion(q) for _, q in find_open_questions(history).values()]
    except JournalError:
        return {"version": 1, "status": "unreadable", "journal": name}
    if status not in ENDED | {"suspended"}:
        status = "running" if journal.is_held() else "interrupted"
    return {
        "version": 1,
        "run_id": get_run_id(history),
        "agent": {"id": root["agent_id"] if history.head is None else history.head.agent},
        "journal": name,
        "created": history.started or None,
        "status": status,
        "title": make_title(str(root.get("prompt", ""))),
        "questions": [] if history.is_complete else questions,
        "waits": waits_to_companion(find_waits(history)) if status == "suspended" else [],
        "usage": attrs.asdict(spending.usage),
        "cost": None if spending.cost is None else str(spending.cost),
    }


def make_title(prompt: str) -> str:
    """Return the beginning of a prompt as one line, with secrets redacted."""
    return one_line(ANY.redact_beginning(prompt, TITLE_CHARS), TITLE_CHARS)


def question_to_companion(question: Any) -> dict[str, str]:
    """Return a question for a companion file: its id, and its text shortened and with secrets redacted."""
    return {
        "id": question.id,
        "text": truncate_text(ANY.redact_beginning(question.text, QUESTION_CHARS), QUESTION_CHARS),
    }


def waits_to_companion(waits: Sequence[Waits]) -> list[dict[str, object]]:
    """Return at most 50 waits of a run for a companion file, without questions; each has kind, text and wake time."""
    others = [one for one in waits if one.kind != "question"][:MAX_WAITS]
    return [
        {"kind": o.kind, "said": describe_wait(o), "wakes_at": o.wakes_at and o.wakes_at.isoformat()} for o in others
    ]


def find_process_start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks of the system; ``None`` if unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
