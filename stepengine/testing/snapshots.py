"""
Snapshots of runs, requests and events for syrupy: files that people review.

``run_snapshot``, ``request_snapshot`` and ``events_snapshot`` are fixtures of the pytest plugin; the classes here are what
they use. A snapshot is text with one fact per line, in a file per assertion below ``__snapshots__``, and ``pytest
--snapshot-update`` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from stepengine.data.events import DELTAS, Event
from stepengine.data.state import RunResult
from stepengine.data.visible import visible
from stepengine.errors import DataError
from stepengine.journal import Journal, as_journal
from stepengine.journal.records import format_address
from stepengine.journal.show import make_result_tree, make_run_tree, redact_and_shorten_tree, render
from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.traffic_redaction import Cleaner, find_header_secrets

if TYPE_CHECKING:
    from syrupy.types import PropertyFilter, PropertyMatcher

UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


def run_to_snapshot_tree(run: object, *, cost: bool = False) -> dict[str, Any]:
    """
    Return a run as the JSON value of its snapshot, without secrets and local folders; raise ``DataError`` for another object.

    Args:
        run: A ``RunResult``, a journal, or the path of a journal's file. A result without a journal shows its messages
            instead of its effects.
        cost: Whether it says what the run cost; prices change by themselves.

    Raises:
        DataError: for anything else.
        JournalError: when the journal cannot be read.
    """
    if isinstance(run, RunResult):
        tree = make_result_tree(run) if run.journal is None else make_run_tree(run.journal)
    elif isinstance(run, Journal | str | Path):
        tree = make_run_tree(as_journal(run))
    else:
        msg = f"a snapshot of a run takes a RunResult, a journal or the path of one, not a {type(run).__name__}"
        raise DataError(msg)
    if not cost:
        del tree["cost_usd"]
    clean: dict[str, object] = redact_and_shorten_tree(tree, portable=True)
    return clean


class _TextSnapshot(SingleFileSnapshotExtension):
    """A syrupy extension with one text file per assertion; subclasses convert the value to JSON and text."""

    _write_mode = WriteMode.TEXT

    def serialize(
        self,
        data: object,
        *,
        exclude: PropertyFilter | None = None,
        include: PropertyFilter | None = None,
        matcher: PropertyMatcher | None = None,
    ) -> str:
        """Return the snapshot's text; filters and matchers see the JSON value behind it."""
        return self.to_text(_apply_filters(self.to_json_value(data), (), exclude, include, matcher))

    def to_json_value(self, data: Any) -> Any:
        return run_to_snapshot_tree(data) if not isinstance(data, Mapping) else dict(data)

    def to_text(self, value: object) -> str:
        """Return the text of the file: the value as indented JSON, unless a subclass renders it."""
        return _to_indented_json(value)


class RunSnapshot(_TextSnapshot):
    """A run as text, made from a ``RunResult``, a journal, its path, or a result of ``run_to_snapshot_tree``."""

    file_extension = "run.md"

    def to_text(self, value: Any) -> str:
        """Return the run as Markdown."""
        return render(value)


class RunJsonSnapshot(_TextSnapshot):
    """A run as indented JSON: ``assert result == run_snapshot(extension_class=RunJsonSnapshot)``."""

    file_extension = "run.json"


class RequestSnapshot(_TextSnapshot):
    """
    The body of one request as it went over the wire, as indented JSON, its keys in their own order.

    It takes a request of httpx2 or of a cassette, an interaction, or a body: bytes, text or a JSON value.
    """

    file_extension = "request.json"

    def to_json_value(self, data: Any) -> Any:
        """Return the body as JSON, with secrets redacted and long texts cut to their start, length and digest."""
        body = data.request if isinstance(data, Interaction) else data
        if not isinstance(body, RecordedRequest) and hasattr(body, "headers"):
            kept = tuple([(n.lower(), v) for n, v in body.headers.items()])
            body = RecordedRequest(body.method, str(body.url), kept, body.read())
        if isinstance(body, RecordedRequest):
            body = Cleaner(find_header_secrets(body.headers)).clean_request(body).body
        text = body.decode(errors="backslashreplace") if isinstance(body, bytes) else body
        if not isinstance(text, str):
            return redact_and_shorten_tree(text)
        try:
            return redact_and_shorten_tree(json.loads(text))
        except ValueError:
            return redact_and_shorten_tree(text)


class EventsSnapshot(_TextSnapshot):
    """The names and addresses of events in order, without deltas; of any iterable of events."""

    file_extension = "events.txt"

    def to_json_value(self, data: Iterable[Event]) -> Any:
        """Return a line with address and class for each event that is no delta."""
        return [f"{format_address(e.path, e.seq)}  {type(e).__name__}" for e in data if not isinstance(e, DELTAS)]

    def to_text(self, value: Any) -> str:
        """Return the lines as text."""
        return "".join([f"{visible(str(line), strict=True)}\n" for line in value])


def _to_indented_json(value: object) -> str:
    """Return JSON with one member per line, in which every character can be seen."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n"


def _apply_filters(
    value: Any,
    path: tuple[Any, ...],
    exclude: PropertyFilter | None,
    include: PropertyFilter | None,
    matcher: PropertyMatcher | None,
) -> object:
    """Return a JSON value after syrupy's filters and matchers; *path* has the keys above it with their types."""
    if matcher is not None:
        value = matcher(data=value, path=path)
    if isinstance(value, dict):
        return {
            key: _apply_filters(member, (*path, (key, type(member))), exclude, include, matcher)
            for key, member in value.items()
            if not (exclude and exclude(prop=key, path=path)) and (not include or include(prop=key, path=path))
        }
    if isinstance(value, list):
        rows = enumerate(value)
        return [_apply_filters(member, (*path, (n, type(member))), exclude, include, matcher) for n, member in rows]
    return value
