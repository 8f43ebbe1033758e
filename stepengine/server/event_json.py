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
"""Proxies cut what says nothing, most after 60 s."""
AT_ONCE = 64
"""Events that go out together at most."""
INNER = frozenset({"request", "_clean"})
"""What only a debugger has a use for: what the model was sent; and so has the whole final state, with every message of the run."""


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


def sse_line(event: Event, *, full: bool = False, id: str | None = None) -> str:
    """
    Return an event as one server-sent event: its id, its type, and its JSON.

    Args:
        event: The event.
        full: Whether what the model was sent and the final state are there, too.
        id: What the client brings back as ``Last-Event-ID``; the event's own id by default.
    """
    # `EventsDropped` has no id: it must not move the place from which the browser asks next time.
    given = event.id if id is None else id
    place = f"id: {given}\n" if given else ""
    told = _event_to_dict(event, full=full)
    data = _to_compact_json(told)
    if KNOWN.may_contain_secret(data):
        data = _to_compact_json(KNOWN.redact_keeping_machine_details(told))
    return f"{place}event: {event.type}\ndata: {data}\n\n"


def _to_compact_json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def encode_event_stream(
    events: AsyncGenerator[Event, None],
    first: Event | None,
    *,
    had: ReaderPosition | None,
    full: bool,
    stopping: asyncio.Event,
    ping: float = PING_SECONDS,
) -> AsyncIterator[str]:
    """
    Yield events as server-sent events, and a comment after *ping* seconds without one.

    Args:
        events: What is shown; it is closed when the reader goes.
        first: One that was taken out of it already.
        had: What the reader has; what it is given is noted in it. ``None`` where an event's own id says that.
        full: See ``sse_line``.
        stopping: When the server is to end: the reader comes back to the next one.
        ping: Seconds.
    """
    yield RETRY
    if first is not None:
        yield sse_line(first, full=full, id=None if had is None else had.record_received_event(first))
    coming: asyncio.Future[Event | None] = asyncio.ensure_future(anext(events, None))
    ending = asyncio.ensure_future(stopping.wait())
    try:
        while not ending.done():
            lines: list[str] = []
            # What is there already goes out at once: a line by itself costs a call of the system, and its reader is behind.
            while coming.done() and len(lines) < AT_ONCE:
                event = coming.result()
                if event is None:
                    yield "".join(lines)
                    return
                lines.append(sse_line(event, full=full, id=None if had is None else had.record_received_event(event)))
                coming = asyncio.ensure_future(anext(events, None))
                await asyncio.sleep(0)
            if lines:
                yield "".join(lines)
                continue
            await asyncio.wait((coming, ending), timeout=ping, return_when=asyncio.FIRST_COMPLETED)
            if not (coming.done() or ending.done()):
                yield PING
    finally:
        ending.cancel()
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await events.aclose()
