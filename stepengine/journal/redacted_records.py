"""``redact_records``: the records of a journal as a process with other redaction rules would write them."""

from __future__ import annotations

from typing import Any

import attrs

from stepengine.data.effects import CallModel
from stepengine.journal.encoding import drop_secret_old_content
from stepengine.journal.history import History
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import Blob, Head, Input, Intent, Record, Result
from stepengine.redaction import Redactor


def redact_records(history: History, redactor: Redactor) -> list[Record]:
    """
    Return the records with the rules of *redactor* applied, to be encoded again.

    Blobs are left out: the journal that stores the records makes those that it needs.

    Raises:
        JournalCorrupt: when one cannot be read.
    """
    requests = RecordedRequests(history)
    records = [record for record in history.records if not isinstance(record, Blob)]
    return [_redact_record(history, requests, record, redactor) for record in records]


def _redact_record(history: History, requests: RecordedRequests, record: Record, redactor: Redactor) -> Record:
    """Return a record as decoded values, without its line, so that the rules of *redactor* apply when it is encoded."""
    match record:
        case Intent():
            form: Any = history.form(record)
            if form["type"] == "model_call":
                form = CallModel(record.seq, requests.get_request(record), form["purpose"])
            return attrs.evolve(record, given=form, fp="", read_from=None)
        case Result():
            writes = [drop_secret_old_content(write, redactor).to_json() for write in history.writes(record)]
            extras = {**history.extras(record), "writes": writes} if writes else history.extras(record)
            return attrs.evolve(record, given=history.outcome(record), extras=extras, read_from=None)
        case Input():
            with history.convert_damage_errors(record):
                return attrs.evolve(record, input=history.get_filled_input(record), line=None)
        case Head() | Blob():
            return attrs.evolve(record, line=None)
