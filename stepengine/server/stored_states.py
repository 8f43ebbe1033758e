"""
The last state of a run for the next run of its conversation, as the ledger stores it.

Most of a state is texts that the run's journal has already. The ledger stores a fingerprint in place of each of these, so that what a
client sent is not stored once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data import codec
from stepengine.data.json import JsonDict
from stepengine.errors import JournalError
from stepengine.journal.encoding import decode_with_blobs, encode_with_blobs
from stepengine.journal.fingerprints import fingerprint
from stepengine.journal.records import to_compact_json

if TYPE_CHECKING:
    from stepengine.data.state import AgentState
    from stepengine.journal.files import FileJournal
    from stepengine.journal.sqlite import SqliteJournal

SHARED_CHARS = 500
"""Shorter texts are stored again, because a fingerprint with its marks takes fifty characters and a search in the journal."""


def encode_state_with_references(state: AgentState, journal: FileJournal | SqliteJournal) -> str:
    """
    Return a state as JSON, without the texts that *journal* has.

    Args:
        state: The last state of a run.
        journal: The journal of that run; if the journal cannot be read, the result has all texts.
    """
    if not state.pending:
        # Nothing reads them: the next run gets its own. The tools of a page are needed while one of its calls waits.
        state = attrs.evolve(state, system_prompt="", tool_definitions=JsonDict())
    texts: dict[str, object] = {}
    packed = encode_with_blobs(codec.to_json(state), texts, SHARED_CHARS)
    if texts:
        with suppress(JournalError, ValueError):
            recorded = _read_texts_by_fingerprint(journal)
            texts = {fp: text for fp, text in texts.items() if fp not in recorded}
    return to_compact_json({"state": packed, "texts": texts})


def decode_state_with_references(stored: str, journal: FileJournal | SqliteJournal) -> AgentState:
    """
    Return the state that ``encode_state_with_references`` encoded.

    Raises:
        JournalError: If the journal cannot be read, or lacks a text.
        DataError: If the state is invalid.
    """
    read = json.loads(stored)
    try:
        packed = decode_with_blobs(read["state"], read["texts"])
    except KeyError:
        packed = _unpack_with_journal(read["state"], read["texts"], journal)
    state: AgentState = codec.from_json(packed)
    return state


def _unpack_with_journal(packed: Any, texts: Mapping[str, object], journal: FileJournal | SqliteJournal) -> object:
    """Return a packed state with its texts from *texts* and from the journal; raise ``JournalError`` if one is missing."""
    try:
        return decode_with_blobs(packed, {**_read_texts_by_fingerprint(journal), **texts})
    except (KeyError, ValueError) as error:
        msg = f"{journal.name} lacks a text of the last state of its run"
        raise JournalError(msg) from error


def _read_texts_by_fingerprint(journal: FileJournal | SqliteJournal) -> dict[str, str]:
    return {
        fingerprint(text): text
        for line in journal.content().splitlines()
        for text in _iterate_texts(json.loads(line))
        if len(text) > SHARED_CHARS
    }


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, but no keys."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
