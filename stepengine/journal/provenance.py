"""
Provenance: whether this user's own runs wrote a journal, from notes in the user's state folder.

A journal is known by the hash of its content, not by its path or id. Everybody who received a journal knows its id, and an archive or a
repository can put a file at any path. A run records the note when it ends. It does so only where it wrote the journal
from its first record on, or resumed one that was known: a resumed third-party journal stays a third-party one.
A run that was killed leaves no note. Its journal is known by the keyed digests of its lines (``line_macs``).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from stepengine.errors import JournalError
from stepengine.journal.journal_files import NO_LINK
from stepengine.journal.line_macs import are_written_by_user, split_into_lines
from stepengine.journal.records import Record
from stepengine.journal.store import Journal
from stepengine.workspace.atomic import create_folder_durably, replace_path
from stepengine.workspace.calls import OWNER_FILE_MODE
from stepengine.workspace.file_formats import FileFormat
from stepengine.workspace.user_state import RUNS, get_user_state_folder, is_writable_only_by_user

NOTES = "known-journals"
KEPT_NOTES = 10_000
"""About 700 KB. A user who has recorded more runs is asked again about the permissions of the oldest."""
Kind: TypeAlias = Literal["own", "seen"]
"""``own``: this user's runs wrote all of it. ``seen``: this user was asked for all of its permissions."""
NOTES_FILE = FileFormat("the list of known journals", re.compile(rb"[0-9a-f]{64} "), JournalError)
LINE = 64 + len(" seen\n")
PADDED: dict[Kind, str] = {"own": " own \n", "seen": " seen\n"}


def is_written_by_user(journal: Journal) -> bool:
    """Return whether this user's runs wrote all records of a journal; False if that is unknown."""
    if journal.is_own:
        return True
    try:
        return _is_trusted_by_folder(journal) or has_macs_of_user(journal) or _has_note(journal, ("own",))
    except (OSError, JournalError):
        return False


def determine_ownership(journal: Journal) -> bool | None:
    """Return whether this user's runs wrote a journal; ``None`` for a journal in memory that only the program itself has written."""
    return is_written_by_user(journal) or (journal.is_own if journal.is_in_memory else False)


def has_trusted_permissions(journal: Journal, *, trust: bool | None = None) -> bool:
    """
    Return whether this user gave all permissions in a journal: in a run of this user, or in a later review.

    *trust*, if not ``None``, is returned unchanged.
    """
    if trust is not None:
        return trust
    if journal.is_in_memory and journal.is_own is not False:
        return True
    try:
        return is_in_private_runs_folder(journal) or has_macs_of_user(journal) or _has_note(journal, ("own", "seen"))
    except (OSError, JournalError):
        return False


def are_calls_trusted(journal: Journal, *, trust: bool | None = None) -> bool:
    """
    Return whether the calls in a journal can run without a new approval, because this user's runs or this program wrote them.

    A *trust* other than ``None`` is returned unchanged. A journal in memory is trusted unless it was derived from an unknown one. A
    review of the journal's permissions does not make its calls trusted.
    """
    return determine_ownership(journal) is not False if trust is None else trust


def replace_records_by_derived(target: Journal, records: Sequence[Record], source: Journal) -> None:
    """
    Replace the records of *target* by ones derived from *source*; record *target* as this user's if *source* is.

    Raises:
        JournalError: as ``Journal.replace``.
    """
    mark, macs = determine_ownership(source), target.macs
    if target.is_in_memory:
        target.replace(records)
        target.is_own, target.macs = mark, macs
        return
    # A stable recording is the same for every user, and is known by its note alone.
    target.macs = "new" if mark and not target.stable else macs
    try:
        target.replace(records)
    finally:
        target.macs = macs
    if mark:
        record_as_written_by_user(target)


def has_macs_of_user(journal: Journal) -> bool:
    """Return whether the lines of a journal have the keyed digests of this user's runs, from the first one to the last."""
    head = journal.head()
    # Most journals in memory have none: nothing is encoded to find that out.
    has_one = head is not None and head.line is not None and "mac" in head.line
    return has_one and are_written_by_user(split_into_lines(journal.read_piece))


def is_in_private_runs_folder(journal: Journal) -> bool:
    """Return whether a journal is in the user's folder of recorded runs and only this user can write there."""
    folder = _find_private_folder()
    try:
        return (
            folder is not None
            and journal.file is not None
            and journal.file.resolve().parent == (folder / RUNS).resolve()
            and is_writable_only_by_user(folder / RUNS)
        )
    except OSError:
        return False


def record_as_written_by_user(journal: Journal) -> None:
    """Record that this user's runs wrote a journal. Without a usable state folder nothing is recorded."""
    if journal.is_in_memory:
        journal.is_own = True
    elif not _is_trusted_by_folder(journal):
        _append_note(journal, "own")


def record_permission_review(journal: Journal) -> None:
    """Record that this user gave or was asked for all permissions in a journal."""
    if not is_in_private_runs_folder(journal):
        _append_note(journal, "seen")


def _is_trusted_by_folder(journal: Journal) -> bool:
    """Return whether the folder of a journal alone proves that it is this user's. It does not for a fork, which copies records of a parent."""
    try:
        return is_in_private_runs_folder(journal) and (head := journal.head()) is not None and not head.parent
    except JournalError:
        return False


def _find_private_folder() -> Path | None:
    """Return the user's state folder; ``None`` if it is missing or others can write to it."""
    folder = get_user_state_folder()
    try:
        return folder if folder is not None and is_writable_only_by_user(folder) else None
    except OSError:
        return None


def _has_note(journal: Journal, kinds: tuple[Kind, ...]) -> bool:
    """Return whether the user's notes have the hash of a journal's content, with one of these kinds."""
    folder = _find_private_folder()
    if folder is None or not (folder / NOTES).is_file():
        return False
    notes, digest = (folder / NOTES).read_bytes(), _compute_content_digest(journal)
    return any(f"{digest}{PADDED[kind]}".encode() in notes for kind in kinds)


def _append_note(journal: Journal, kind: Kind) -> None:
    """Append a note with the hash of a journal's content; do nothing if the state folder cannot be used."""
    folder = get_user_state_folder()
    if folder is None:
        return
    try:
        create_folder_durably(folder, 0o700)
        if not is_writable_only_by_user(folder):
            return
        line = f"{_compute_content_digest(journal)}{PADDED[kind]}".encode()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | NO_LINK
        descriptor = os.open(folder / NOTES, flags, OWNER_FILE_MODE)
        try:
            NOTES_FILE.check(folder / NOTES, descriptor)
            # One write that appends: notes of other processes are not mixed with it.
            os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > 2 * KEPT_NOTES * LINE:
            # A note that another process adds meanwhile is lost, and its journal is unknown.
            replace_path(folder / NOTES, (folder / NOTES).read_bytes()[-KEPT_NOTES * LINE :], mode=OWNER_FILE_MODE)
    except (OSError, JournalError):
        pass  # the journal is unknown, which costs a question


def _compute_content_digest(journal: Journal) -> str:
    """Return the SHA-256 of the stored bytes of a journal."""
    if journal.file is not None:
        with journal.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(journal.content()).hexdigest()
