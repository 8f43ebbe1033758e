"""``assert_prefix_stable``: requests of one run may only grow, or the provider's prompt cache is lost."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from stepengine.data.json import find_first_difference
from stepengine.data.state import RunResult
from stepengine.errors import DataError
from stepengine.journal import Journal, JournalLike, as_journal
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import Intent, format_address

__tracebackhide__ = True  # a failed test ends at its author's line

WINDOW = 40


def assert_prefix_stable(run: JournalLike | RunResult, *, cut_at: Collection[str] = ()) -> None:
    """
    Check that each request of a run begins with the one before it: system prompt, tools and messages, byte for byte.

    Model calls of one path are compared one after the other. Messages that a hook adds for one call only (the ``tail``) stand
    after the history and do not count.

    Args:
        run: A journal, the path of one, or the result of a run that has one.
        cut_at: Addresses of model calls, such as ``"#3"``, before which the history is cut on purpose.

    Raises:
        AssertionError: naming the two effects, and the first place and byte at which they differ.
        DataError: when a result has no journal.
        JournalError: when the journal cannot be read.
    """
    journal = run.journal if isinstance(run, RunResult) else run
    if journal is None:
        msg = "this run has no journal; give it one: engine.run(..., journal=MemoryJournal())"
        raise DataError(msg)
    made = journal if isinstance(journal, Journal) else as_journal(journal)
    history = made.history()
    requests = RecordedRequests(history)
    last: dict[str, tuple[Intent, list[tuple[str, str]]]] = {}
    for (path, seq), intent in sorted(history.intents.items(), key=lambda item: item[0]):
        if intent.type != "model_call" or history.form(intent)["purpose"] != "step":
            continue
        now = list(_iterate_request_parts(requests, intent))
        before = last.get(path)
        if before is not None and format_address(path, seq) not in cut_at:
            _require_prefix(made.name, *before, intent, now)
        last[path] = (intent, now)


def _iterate_request_parts(requests: RecordedRequests, intent: Intent) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each part of a request, in the order in which they are sent."""
    request = requests.history.form(intent)["request"]
    yield "/system_prompt", _to_compact_json(request.get("system_prompt", ""))
    yield "/tools", _to_compact_json(request.get("tools", []))
    for index, message in enumerate(requests.get_messages(intent)):
        yield f"/messages/{index}", _to_compact_json({k: v for k, v in message.items() if k != "tags"})


def _to_compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=dict)


def _require_prefix(
    name: str, earlier: Intent, old: list[tuple[str, str]], later: Intent, new: list[tuple[str, str]]
) -> None:
    """Raise ``AssertionError`` with the first difference unless the request parts *new* start with the parts *old*."""
    sent = 0
    for index, (place, text) in enumerate(old):
        other = new[index][1] if index < len(new) else ""
        if text == other:
            sent += len(text.encode())
            continue
        same = find_first_difference(text, other)
        first, second = format_address(earlier.path, earlier.seq), format_address(later.path, later.seq)
        is_gone = index >= len(new)
        msg = (
            f"the request of effect {second} in {name} does not start with the request of {first}, so the provider's "
            f"prompt cache is lost from byte {sent + len(text[:same].encode())} on\n"
            f"  first difference in {place}{'' if is_gone else f', character {same}'}\n"
            f"    {first:<6} {_cut_window(text, same)}\n"
            f"    {second:<6} {'(absent)' if is_gone else _cut_window(other, same)}\n"
            f"  a request may only grow at its end; if history is cut on purpose, pass cut_at=({second!r},)"
        )
        raise AssertionError(msg)


def _cut_window(text: str, position: int) -> str:
    """Return the part of *text* around the position *position*, with dots where it is cut."""
    start, stop = max(0, position - WINDOW), position + WINDOW
    return f"{'...' if start else ''}{text[start:stop]}{'...' if stop < len(text) else ''}"
