"""
Find out whether a stream of a model provider is complete.

An SDK stops reading at the last event of the provider's protocol and closes the connection. The HTTP body then has no end that anybody
read, although nothing is missing. And a proxy that gives up ends the HTTP body properly in the middle of a reply. So the events decide
wherever the protocol is known, and the end of the HTTP body decides elsewhere.
"""

from __future__ import annotations

import json
import re
from typing import Any

EVENT_END = re.compile(r"\r\n\r\n|\n\n|\r\r")
LINE_END = re.compile(r"\r\n|\n|\r")
STARTS = frozenset(
    {"message_start", "response.created", "response.queued", "response.in_progress", "interaction.created"}
)
ENDS = frozenset({
    "message_stop", "response.completed", "response.incomplete", "response.failed", "response.cancelled",
    "interaction.completed",
})  # fmt: skip
CHUNKS = frozenset({"chat.completion.chunk", "text_completion"})


def is_stream_complete(body: str, *, read_to_end: bool, with_errors: bool = False) -> bool:
    """
    Return True if no event is missing from a stream of server-sent events.

    Args:
        body: The stream as far as it was read, decompressed.
        read_to_end: Whether the client read the HTTP body to its end.
        with_errors: Whether an error event completes the stream, too.
    """
    *events, rest = EVENT_END.split(body)
    if read_to_end and rest.strip():  # some servers leave out the empty line behind the last event
        if _is_cut_event(rest):
            return False
        events.append(rest)
    found = [data for event in events if (data := _join_event_data(event))]
    if any(data.startswith("[DONE]") for data in found):
        return True
    trees = [_parse_json_object(data) for data in found]
    if any(map(_is_last_event, trees)):
        return True
    if any(map(_is_error_event, trees)):
        return with_errors or read_to_end
    candidates = {index: done for tree in trees for index, done in _find_google_candidate_ends(tree).items()}
    if candidates:
        return all(candidates.values())
    if not found:  # only comments, with which a server keeps the connection open
        return read_to_end and not body.strip()
    # Several servers of chat completions never send `[DONE]`: a finish reason and the end of the body are enough.
    return read_to_end and (any(map(_has_finish_reason, trees)) or not any(map(_is_known_protocol_event, trees)))


def _is_last_event(tree: dict[str, Any]) -> bool:
    """Return True for the last event of a protocol's stream."""
    return _get_event_type(tree) in ENDS or _is_prompt_blocked_by_google(tree) or _is_rpc_answer(tree)


def _is_error_event(tree: dict[str, Any]) -> bool:
    return "error" in tree and (_get_event_type(tree) == "error" or len(tree) == 1)


def _is_known_protocol_event(tree: dict[str, Any]) -> bool:
    """Return True for an event of a protocol whose streams have a last event."""
    return tree.get("object") in CHUNKS or _get_event_type(tree) in STARTS


def _get_event_type(tree: dict[str, Any]) -> object:
    return tree.get("type") or tree.get("event_type")


def _join_event_data(event: str) -> str:
    """Return the text of all data lines of a server-sent event."""
    lines = [line[5:].removeprefix(" ") for line in LINE_END.split(event) if line.startswith("data:")]
    return "\n".join(lines).strip()


def _is_cut_event(event: str) -> bool:
    """Return True if the last event of a body ends in the middle of a field, as far as that shows."""
    data = _join_event_data(event)
    if not data:
        return not event.startswith(":")
    return data.startswith("{") and not _parse_json_object(data)


def _parse_json_object(data: str) -> dict[str, Any]:
    """Return the JSON object in *data*; an empty one for anything else."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _find_google_candidate_ends(tree: dict[str, Any]) -> dict[object, bool]:
    """Return for each candidate in an event of Google, by its index, whether it has a finish reason."""
    found = tree.get("candidates")
    listed = [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []
    return {str(c.get("index", 0)): bool(c.get("finishReason")) for c in listed}


def _is_prompt_blocked_by_google(tree: dict[str, Any]) -> bool:
    """Return whether an event of Google says that the prompt was blocked."""
    feedback = tree.get("promptFeedback")
    return isinstance(feedback, dict) and bool(feedback.get("blockReason"))


def _is_rpc_answer(tree: dict[str, Any]) -> bool:
    """Return True for the answer of an MCP server: it is the last event of its stream."""
    return "jsonrpc" in tree and "id" in tree and ("result" in tree or "error" in tree)


def _has_finish_reason(tree: dict[str, Any]) -> bool:
    """Return whether an event of Chat Completions has a finish reason."""
    choices = tree.get("choices") if tree.get("object") in CHUNKS else None
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices)
