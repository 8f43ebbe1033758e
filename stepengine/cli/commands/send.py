"""``stepengine send``: a message to a run, or answers to its questions, whichever process runs it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import frozen

from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.deployment import App, Db, find_journal_unless_durable, run_mailbox_command, run_with_operator
from stepengine.cli.exits import Exit
from stepengine.cli.journals import parse_answers
from stepengine.cli.options import Answers, read_text_or_stdin
from stepengine.cli.screen.render import to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.yields import require_topic

if TYPE_CHECKING:
    from stepengine.durable import Operator
    from stepengine.journal import Journal

MAX_CHARS = 2 * 1024 * 1024


def send(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A journal, the beginning of a recorded run's name, or the id of a durable run."
        ),
    ],
    message: Annotated[
        str, typer.Argument(metavar="TEXT|JSON", help="Text, or JSON with --topic; - reads it from stdin.")
    ] = "",
    *,
    topic: Annotated[str, typer.Option(help="Send JSON to the agent's Receive(TOPIC).", metavar="TOPIC")] = "",
    answer: Answers = None,
    always: Annotated[
        list[str] | None,
        typer.Option(help="Approve the call, and all such calls for the rest of the session.", metavar="ID"),
    ] = None,
    id: Annotated[
        str,
        typer.Option(help="Id of the message; a second message with the same id is ignored.", show_default="a new one"),
    ] = "",
    path: Annotated[
        str, typer.Option(help="With --topic: the receiving child, such as 3.2; default: the run itself.")
    ] = "",
    db: Db = "",
    app: App = "stepengine",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    r"""
    Send a message or an answer to a run, in any process.

    You can send:
      TEXT                  a user message before the run's next model call
      --answer ID=TEXT      the answer to an open question
      --topic TOPIC JSON    the value of the agent's Receive(TOPIC)

    When the command returns, the message is stored, in the mailbox next to the journal or in the database. A
    running run receives it within moments; a run that waits for it becomes due for `stepengine resume --due`. No
    worker has to be alive. Ended runs accept no messages.

    `stepengine runs` and `stepengine deploy status RUN` list the open questions. Answer questions that were asked
    together in one command. If you are not sure that a message was sent, send it again with the same --id.

    Examples:
      stepengine send run.jsonl "Leave the tests out."
      stepengine send run.jsonl --answer q1=Friday --answer q2=yes
      stepengine send review-17 --always q4 --db @/run/secrets/db
      stepengine send 20260301T080000Z-1a2b3c --topic deployed '{"version": 3}'
      stepengine send RUNS.db#nightly --topic approved true --id ticket-17
      curl -s https://example.com/build.json | \
          stepengine send run.jsonl --topic built -
    """
    answers = _parse_answers_and_approvals(answer or (), always or ())
    if answers and (message or topic or id or path):
        msg = "--answer and --always cannot be combined with a message or its options; send the message with a separate command"
        raise UsageProblem(msg)
    if not (answers or message or topic):
        msg = "nothing to send; pass TEXT, --answer ID=TEXT, or --topic TOPIC with JSON"
        raise UsageProblem(msg)
    if path and not topic:
        msg = "--path names the child that receives on a topic; add --topic"
        raise UsageProblem(msg)
    if not topic:
        refuse_inside_tool("stepengine send --answer" if answers else "stepengine send TEXT")
    content = parse_json_message(message or "null") if topic else read_message_text(message)
    sent = _Outgoing(id or secrets.token_hex(16), require_topic(topic) if topic else "", path, content, answers)
    if (journal := find_journal_unless_durable(run, db)) is not None:
        return run_mailbox_command(
            lambda posting: sent.print_sent_ids(sent.send_to_journal(posting, journal), as_json=as_json)
        )

    async def send_message(operator: Operator) -> Exit:
        """Send the answers or the message to the durable run, and print its id."""
        sent.print_sent_ids(await sent.send_to_database(operator, run), as_json=as_json)
        return Exit.COMPLETED

    return run_with_operator(db, send_message, app=app)


@frozen
class _Outgoing:
    """Answers, or a message with its id and topic; the topic of a user message is ``""``."""

    id: str
    topic: str
    path: str
    content: Any
    answers: Mapping[str, AnswerLike]

    def send_to_journal(self, posting: Any, journal: Journal) -> bool | None:
        """Send the answers or the message to the mailbox of a journal; return whether a message is new, ``None`` for answers."""
        is_new: bool | None
        if self.answers:
            is_new = posting.send_answers(journal, self.answers)
        elif self.topic:
            is_new = posting.send_message(journal, self.topic, self.content, id=self.id, path=self.path)
        else:
            is_new = posting.send_input(journal, self.content, id=self.id)
        return is_new

    async def send_to_database(self, operator: Operator, run: str) -> bool | None:
        """Send the answers or the message to a durable run; return whether a message with a topic is new, else ``None``."""
        if self.topic:
            return await operator.send_message(run, self.topic, self.content, id=self.id, path=self.path)
        if self.answers:
            await operator.answer(run, self.answers)
        else:
            await operator.send_input(run, self.content, id=self.id)
        return None

    def print_sent_ids(self, is_new: bool | None, *, as_json: bool) -> None:
        """Print the id of a message; with *as_json* also the ids of answered questions."""
        if as_json and self.answers:
            print(to_ascii_json({"answered": [*self.answers]}))
        elif as_json:
            print(to_ascii_json({"id": self.id, "topic": self.topic, "path": self.path, "new": is_new}))
        elif not self.answers:
            print(f"{self.id} (already sent)" if is_new is False else self.id)


def _parse_answers_and_approvals(answers: Iterable[str], always: Iterable[str]) -> dict[str, AnswerLike]:
    """
    Parse ``--answer`` and ``--always`` into answers by question id.

    Raises:
        UsageProblem: when an option is not ``ID=TEXT``, or a question has two answers.
    """
    given, allowed = parse_answers(answers), dict.fromkeys(always, Answer(text="yes", remember="session"))
    if twice := sorted(given.keys() & allowed):
        msg = f"--answer and --always both answer {twice[0]!r}; pass one of them"
        raise UsageProblem(msg)
    return {**given, **allowed}


def read_message_text(text: str) -> str:
    """
    Return a typed message, or the text of stdin for ``-``.

    Raises:
        UsageProblem: when the message is too large, or stdin is not text.
    """
    text = read_text_or_stdin(text, MAX_CHARS + 1)
    if len(text) > MAX_CHARS:
        msg = f"a message may have at most 1 MiB, and this one has {len(text):,} characters or more"
        raise UsageProblem(msg)
    return text


def parse_json_message(text: str) -> object:
    """
    Parse a typed JSON message, or the text of stdin for ``-``.

    Raises:
        UsageProblem: when the text is not JSON or too large.
    """
    try:
        value: object = json.loads(read_message_text(text))
    except (ValueError, RecursionError) as error:
        msg = f"the message is not JSON: {error}; put a text in quotes, such as '\"done\"'"
        raise UsageProblem(msg) from None
    return value
