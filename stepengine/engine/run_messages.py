"""Messages to runs of this engine or of a journal: the implementation of ``Engine.send_message``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stepengine.data.yields import require_topic
from stepengine.engine.handles import EngineRuns
from stepengine.errors import JournalMissing
from stepengine.journal import messages
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.messages import Message, choose_message_id

if TYPE_CHECKING:
    from stepengine.journal import JournalLike


async def send_message(
    runs: EngineRuns, run: RunHandle | JournalLike, topic: str, value: object, *, id: str | None, path: str
) -> bool:
    """Send a message to a run of this process, else to the journal; return False if *id* was sent before."""
    if isinstance(run, RunHandle):
        return await asyncio.to_thread(run.send_message, topic, value, id=id, path=path)
    message = Message(choose_message_id(id), path, require_topic(topic), value)
    if isinstance(run, str) and (running := runs.find_by_id(run)[1]):
        return await asyncio.to_thread(running[0].tree.send, message)
    try:
        return await asyncio.to_thread(messages.send_message, run, topic, message.value, id=message.id, path=path)
    except JournalMissing as error:
        if isinstance(run, str):
            msg = f"{run!r} is neither a run in this engine nor a journal: {error.message}"
            raise JournalMissing(msg, path=error.path, beside=error.beside) from None
        raise
