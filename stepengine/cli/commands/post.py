"""``stepengine post``: a message to a run, whoever holds it."""

from __future__ import annotations

import json
import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, operate
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import find_journal, journal_at
from stepengine.cli.options import File, Options
from stepengine.cli.screen.render import dumps
from stepengine.cli.settings import UsageProblem
from stepengine.data.yields import a_topic
from stepengine.errors import BadYield, DataError, InputError, JournalError, StepEngineError

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("MAX_CHARS", "message_in", "post")

MAX_CHARS = 2 * 1024 * 1024


def post(
    file: File,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="What its agent receives on: Receive(TOPIC).")],
    message: Annotated[str, typer.Argument(metavar="JSON", help="What is sent; - reads it from stdin.")] = "null",
    *,
    id: Annotated[
        str,
        typer.Option(help="The id of the message; a second one with the same id is none.", show_default="a new one"),
    ] = "",
    db: Annotated[
        str,
        typer.Option(
            help="A database of durable runs, or @FILE with its URL; RUN is the id of a run in it.", metavar="URL|@FILE"
        ),
    ] = "",
    app: App = "stepengine",
    path: Annotated[str, typer.Option(help="The child that it is for, such as 3.2; default: the run itself.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    r"""
    Send a message to a run: what its Receive on TOPIC gets.

    The message is on the disk when this returns, in the mailbox beside the journal. A run that is under way takes it within
    moments, whatever process has it. One that sleeps has it when it goes on: it is due at once for `stepengine resume --due` if
    it waits for messages. If you are not sure that it was sent, send it again with the same --id.

    Examples:
      stepengine post 20260301T080000Z-1a2b3c deployed '{"version": 3}'
      stepengine post RUNS.db#nightly approved true --id ticket-17
      stepengine post order-1 paid '{"amount": 12}' --db @/run/secrets/db
      curl -s https://example.com/build.json | \
          stepengine post run.jsonl built -
    """
    from stepengine.engine.posting import post_to_journal
    from stepengine.runtime.mail import Message

    value = message_in(message)
    if db:
        return _post_to_database(
            db, str(file), topic, value, app=app, id=id or secrets.token_hex(16), path=path, as_json=as_json
        )
    try:
        made = Message(id or secrets.token_hex(16), path, a_topic(topic), value)
        is_new = post_to_journal(journal_at(find_journal(Options(journal=file)).journal), made)
    except (InputError, BadYield, DataError) as error:
        raise UsageProblem(error.message) from None
    except (JournalError, StepEngineError) as error:
        return complain(error.message, Exit.FAILED)
    if as_json:
        print(dumps({"id": made.id, "topic": topic, "path": path, "new": is_new}))
    else:
        print(made.id if is_new else f"{made.id} (it was there already)")
    return Exit.COMPLETED


def _post_to_database(
    db: str, run: str, topic: str, value: object, *, app: str, id: str, path: str, as_json: bool
) -> Exit:
    async def posted(operator: Operator) -> Exit:
        try:
            await operator.post(run, topic, value, id=id, path=path)
        except (InputError, BadYield, DataError) as error:
            raise UsageProblem(error.message) from None
        print(dumps({"id": id, "topic": topic, "path": path}) if as_json else id)
        return Exit.COMPLETED

    return operate(db, posted, app=app)


def message_in(text: str) -> object:
    """
    Return the JSON that is meant.

    Raises:
        UsageProblem: for anything else.
    """
    if text == "-":
        text = sys.stdin.read(MAX_CHARS + 1)
    if len(text) > MAX_CHARS:
        msg = f"a message has at most 1 MiB as JSON, and this has {len(text):,} characters or more"
        raise UsageProblem(msg)
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"the message is not JSON: {error}; a text stands in quotes, such as '\"done\"'"
        raise UsageProblem(msg) from None
    return value
