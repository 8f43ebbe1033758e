"""The open waits of a recorded run, and the messages that it has not received."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from stepengine.data.effects import KINDS
from stepengine.data.questions import Question
from stepengine.data.waits import Received, Waits, WaitsFor
from stepengine.errors import JournalError
from stepengine.journal.encoding import get_recorded_questions
from stepengine.journal.history import History, parse_created
from stepengine.journal.records import Address, Intent
from stepengine.journal.store import Journal
from stepengine.runtime.messages import Message

WAITING: Mapping[str, WaitsFor] = {kind: row.waits_for for kind, row in KINDS.items() if row.waits_for}
"""The subject of each kind of effect that only waits."""


def find_open_questions(history: History) -> dict[str, tuple[Address, Question]]:
    """Return the questions without an answer by id, each with the address of its effect."""
    found: dict[str, tuple[Address, Question]] = {}
    asked = [(a, i) for a, i in history.open.items() if i.type == "ask" and not history.tree.has_ended(a[0])]
    # Inputs are searched only if a question is open: a long run may have thousands.
    answered = {i.input["question_id"] for i in history.inputs if i.input.get("type") == "answer"} if asked else ()
    for address, intent in asked:
        for question in get_recorded_questions(history.form(intent)):
            if question.id not in answered:
                found[question.id] = (address, question)
    return found


def find_waits(history: History) -> list[Waits]:
    """Return the waits of a run whose process has ended: questions without an answer first."""
    asks = [
        Waits(kind="question", path=path, seq=seq, question=question)
        for (path, seq), question in find_open_questions(history).values()
    ]
    if history.is_complete:
        return asks
    known = [i for i in history.inputs if i.input.get("type") == "wake_time"] if history.open else []
    wake_times = {i.address: int(i.input["until"]) for i in known}
    waiting = [(a, i) for a, i in history.open.items() if i.type in WAITING and not history.tree.has_ended(a[0])]
    return [
        *asks,
        *[_make_wait_of_effect(history, address, intent, wake_times.get(address)) for address, intent in waiting],
    ]


def _make_wait_of_effect(history: History, address: Address, intent: Intent, until: int | None) -> Waits:
    """Return the wait of an effect; *until* is its wake time in milliseconds since the root run was created."""
    form, head = history.form(intent), history.head
    wakes_at = None
    if until is not None and head is not None:
        with contextlib.suppress(OverflowError):
            wakes_at = parse_created(head) + timedelta(milliseconds=until)
    about = {name: form[name] for name in ("topic", "children") if name in KINDS[intent.type].members}
    return Waits(kind=WAITING[intent.type], path=address[0], seq=address[1], wakes_at=wakes_at, **about)


def find_unread_messages(history: History) -> list[dict[str, Any]]:
    """Return the messages sent to runs that were neither received nor refused, in order of arrival."""
    gone = {i.input["id"] for i in history.inputs if i.input.get("type") == "rejected_message"}
    for address, intent in history.intents.items():
        result = history.results.get(address) if intent.type == "receive" else None
        received = None if result is None else getattr(history.outcome(result), "value", None)
        if isinstance(received, Received):
            gone.add(received.id)
    found = [i for i in history.inputs if i.input.get("type") == "message" and i.input["topic"]]
    names = ("id", "topic", "value")
    return [{"path": i.path, **{n: i.input[n] for n in names}} for i in found if i.input["id"] not in gone]


def list_unread_messages(journal: Journal) -> list[Message]:
    """Return the messages on topics that the run of a journal has not received, recorded ones and new ones in its mailbox."""
    history = journal.history()
    known = {record.input.get("id") for record in history.inputs}
    box = None
    with contextlib.suppress(JournalError):  # a journal of this kind has none
        box = journal.mailbox()
    mailbox_messages = [] if box is None else box.read()[0]
    return [
        *[Message(**one) for one in find_unread_messages(history)],
        *[
            Message(mailbox_message.id, mailbox_message.path, mailbox_message.topic, mailbox_message.value)
            for mailbox_message in mailbox_messages
            if mailbox_message.kind == "message" and mailbox_message.id not in known
        ],
    ]


def find_unreceived_input(history: History) -> dict[str, list[str]]:
    """Return the user input that parents and mailbox messages sent to each run, by path, and that it did not receive."""
    sent: dict[str, list[str]] = {}
    for record in history.inputs:
        content = record.input
        is_input = content.get("type") == "mailbox_message" and content["kind"] == "input"
        if is_input or (content.get("type") == "message" and not content["topic"]):
            sent.setdefault(record.path, []).append(str(content["value"]))
    # An outcome may also have input that a handle sent, which is in no input record.
    received: dict[str, Counter[str]] = {}
    for (path, _), result in history.results.items() if sent else ():
        if path in sent:
            received.setdefault(path, Counter()).update([message.text for message in history.outcome(result).inputs])
    return {path: _remove_counted_texts(texts, received.get(path, Counter())) for path, texts in sent.items()}


def _remove_counted_texts(texts: Sequence[str], counts: Counter[str]) -> list[str]:
    """Return *texts* without as many first occurrences of each text as *counts* has, and subtract them from *counts*."""
    left: list[str] = []
    for text in texts:
        if counts[text] > 0:
            counts[text] -= 1
        else:
            left.append(text)
    return left


def list_message_ids(history: History) -> set[str]:
    """Return the ids of all recorded messages, mailbox messages included."""
    kinds = ("message", "rejected_message", "mailbox_message")
    return {str(i.input["id"]) for i in history.inputs if i.input.get("type") in kinds}
