"""
``deliver_messages_until_cancelled``: delivers messages from the database to the runs of this process, once each.

A message waits in the database next to the run. The worker that has the run puts the message into the run's inbox, or gives it to the
effect that receives on its topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from stepengine.durable.database import nul_free_sql
from stepengine.durable.deployment import Deployment
from stepengine.durable.executions import DurableRun
from stepengine.durable.messages import TOPIC, find_text_problem, parse_database_topic, parse_message_json
from stepengine.errors import DatabaseUnavailable
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.messages import Message

DELIVERY_SECONDS = 0.5
"""A person hardly notices half a second; each worker asks the database twice in a second for all of its runs together."""
POSTED = """
    select destination_uuid, message_uuid, topic, message from dbos.notifications
    where destination_uuid = any(%s) and topic like 'post:%%' and serialization = 'portable_json'
        and message_uuid <> all(%s)
    order by created_at_epoch_ms, message_uuid
"""
WAITING = """
    select destination_uuid, message_uuid, message from dbos.notifications
    where destination_uuid = any(%s) and topic = %s and not consumed and serialization = 'portable_json'
        and message_uuid <> all(%s)
    order by created_at_epoch_ms, message_uuid
"""
RECORDED = f"""
    select 1 from dbos.operation_outputs
    where workflow_uuid = %s and serialization = 'portable_json'
        and exists (select from json_array_elements_text({nul_free_sql("output")}::json->'heard') as heard (key) where key = %s)
"""  # noqa: S608 - of names of ours


async def deliver_messages_until_cancelled(
    database: Deployment, list_runs: Callable[[], Collection[DurableRun]]
) -> None:
    """Deliver messages to the runs of this process until cancelled."""
    while True:
        await asyncio.sleep(DELIVERY_SECONDS)
        # A run that still repeats its record may be about to reach the record of having received the message.
        live = [run for run in list_runs() if run.end.tree is not None and run.workflow.is_live]
        found = {run.order.root: run for run in live if not run.order.spawns}
        if live:
            try:
                await _deliver_user_input(database, found)
                await _deliver_topic_messages(database, live)
            except DatabaseUnavailable:
                continue
            except Exception as error:  # noqa: BLE001  (an error in one row must not stop later messages)
                LOGGER.warning("messages to runs could not be delivered: %s", error)


async def _deliver_user_input(database: Deployment, runs_by_root: Mapping[str, DurableRun]) -> None:
    """Deliver unread user input to root runs, except messages that they have recorded or that contain no text."""
    # Messages stay in the database: those that were received are not read again at every look.
    received = [key for listening in runs_by_root.values() for key in listening.messages.known_keys]
    for run, key, said in await database.fetch_rows(WAITING, list(runs_by_root), TOPIC, received):
        listening = runs_by_root[run]
        if listening.workflow.was_replayed and await database.fetch_rows(RECORDED, run, key):
            listening.messages.mark_received(key)
            continue
        text = _parse_message_text(said)
        if text is None:
            listening.messages.mark_received(key)
            LOGGER.warning("the run %r does not receive the message %r, which contains no text", run, key)
        else:
            listening.messages.deliver_user_text(listening.tree, key, text)


async def _deliver_topic_messages(database: Deployment, live: Sequence[DurableRun]) -> None:
    """Deliver the messages to a path of a tree, for a topic or as user input. They are stored for the root of each tree."""
    runs: dict[str, list[DurableRun]] = {}
    for listening in live:
        runs.setdefault(listening.order.root, []).append(listening)
    received = [set(listening.messages.known_keys) for listening in live]
    for root, key, topic, said in await database.fetch_rows(POSTED, list(runs), list(set.intersection(*received))):
        path, name = parse_database_topic(topic)
        form = parse_message_json(said)
        for listening in runs[root]:
            own = listening.order.path
            # The body of a tool may be part of the run of its caller, which alone knows of it.
            is_for = path == own or (bool(name) and (not own or path.startswith(f"{own}.")))
            if not is_for or key in listening.messages.known_keys:
                continue
            is_recorded = listening.workflow.was_replayed and await database.fetch_rows(
                RECORDED, listening.order.id, key
            )
            if is_recorded or "value" not in form:
                listening.messages.mark_received(key)
            elif name:
                message = Message(key.removesuffix(f"::{root}"), path, name, form["value"])
                listening.messages.deliver_topic_message(listening.tree, key, message)
            else:
                listening.messages.deliver_user_text(listening.tree, key, str(form["value"]), path)


def _parse_message_text(message: str) -> str | None:
    """Return the text of a message; ``None`` if it has none."""
    text = parse_message_json(message).get("text")
    return text if isinstance(text, str) and not find_text_problem(text) else None
