"""Events for clients: as JSON, and as server-sent events that a browser can resume."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from stepengine.data.events import RunFinished
from stepengine.redaction import KNOWN

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.server.watchers import ReaderPosition

RETRY = "retry: 2000\n\n"
PING = ": ping\n\n"
PING_SECONDS = 15.0
"""Proxies close a silent connection, most of them after 60 s."""
AT_ONCE = 64
"""The most events that are sent together."""
INNER = frozenset({"request", "_clean"})
"""Members that only a debugger uses: the request to the model. The final state with all messages is left out, too."""


def _event_to_dict(event: Event, *, full: bool) -> dict[str, Any]:
    """Return an event as JSON values; unless *full* without requests to the model and without the final state."""
    told = event.to_json()
    if isinstance(event, RunFinished):
        result = event.result
        told |= {"status": result.status.value, "output": told.get("result", {}).get("output"), "text": result.text}
        told["questions"] = [question.id for question in result.pending_questions]
        told["warnings"] = list(result.warnings)
        if not full:
            del told["result"]
    return told if full else {name: value for name, value in told.items() if name not in INNER}


def encode_sse_event(event: Event, *, full: bool = False, id: str | None = None) -> str:
    """
    Encode an event as one server-sent event with its id, its type and its JSON, in which secrets are redacted.

    Args:
        event: The event.
        full: Whether to include requests to the model and the final state.
        id: The id that the client sends back as ``Last-Event-ID``; the event's own id by default.
    """
    # `EventsDropped` has no id: the position from which the browser reconnects must not change.
    given = event.id if id is None else id
    place = f"id: {given}\n" if given else ""
    told = _event_to_dict(event, full=full)
    data = _to_compact_json(told)
    if KNOWN.may_contain_secret(data):
        data = _to_compact_json(KNOWN.redact_keeping_machine_details(told))
    return f"{place}event: {event.type}\ndata: {data}\n\n"


def _to_compact_json(value: dict[str, Any]) -> str:
    """Encode a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def encode_event_stream(
    events: AsyncGenerator[Event, None],
    first: Event | None,
    *,
    position: ReaderPosition | None,
    full: bool,
    stopping: asyncio.Event,
) -> AsyncIterator[str]:
    """
    Yield events as server-sent events, and a comment after ``PING_SECONDS`` without an event, until they end or the server stops.

    Args:
        events: The events; the generator is closed when the client disconnects.
        first: An event that was already read from *events*, or ``None``.
        position: The position of the client, which is updated with each event; ``None`` if the event's own id is the position.
        full: See ``encode_sse_event``.
        stopping: Is set when the server stops; the client then reconnects to the next one.
    """
    yield RETRY
    if first is not None:
        yield encode_sse_event(first, full=full, id=None if position is None else position.record_received_event(first))
    coming: asyncio.Future[Event | None] = asyncio.ensure_future(anext(events, None))
    ending = asyncio.ensure_future(stopping.wait())
    try:
        while not ending.done():
            lines: list[str] = []
            # Events that are ready are sent together: each send is a system call, and this reader is behind.
            while coming.done() and len(lines) < AT_ONCE:
                event = coming.result()
                if event is None:
                    yield "".join(lines)
                    return
                lines.append(
                    encode_sse_event(
                        event, full=full, id=None if position is None else position.record_received_event(event)
                    )
                )
                coming = asyncio.ensure_future(anext(events, None))
                await asyncio.sleep(0)
            if lines:
                yield "".join(lines)
                continue
            await asyncio.wait((coming, ending), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (coming.done() or ending.done()):
                yield PING
    finally:
        ending.cancel()
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await events.aclose()
