"""
``RunMailbox``: the mailbox messages of one recorded run, from before it was resumed and while it runs.

A run tree has it as its ``MessageStore``. Each message is recorded once, before it takes effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from stepengine.data.questions import Question, find_answer_problem, to_answer
from stepengine.errors import JournalError, JournalMissing
from stepengine.journal.encoding import encode_stored, get_recorded_questions
from stepengine.journal.history import History
from stepengine.journal.mailbox import Mailbox, MailboxMessage
from stepengine.journal.modes import OpenJournal
from stepengine.journal.pending_items import (
    find_open_questions,
    find_unread_messages,
    find_unreceived_input,
    list_message_ids,
)
from stepengine.journal.records import Address, Input, get_starter_address
from stepengine.runtime.messages import Message, parse_answer


class RunMailbox:
    """
    The mailbox messages of one recorded run.

    Args:
        journal: The journal of the run.
        history: The recorded history; ``None`` for a new run.

    Attributes:
        results_sent: The addresses of deferred calls whose results wait in the mailbox.
        was_answered: Whether an answer arrived to a question that no effect of this process waits for.
    """

    def __init__(self, journal: OpenJournal, history: History | None) -> None:
        self._journal = journal
        self._history = history
        self._box: Mailbox | None = None
        self._place = 0
        self._looking = asyncio.Lock()
        self._known: set[str] = set()
        self._came, self._early = list[MailboxMessage](), list[MailboxMessage]()
        self.results_sent = set[Address]()
        self._first: list[Message] = []
        self._unreceived: dict[str, list[str]] | None = None
        self._begun: set[Address] = set()
        self._cancels: dict[str, Message] = {}
        self.was_answered = False
        self._left_open: dict[str, tuple[Address, Question]] = {}

    def list_unread_messages(self) -> list[Message]:
        """Return the recorded messages that no run received, and remove and return the new ones collected before the start."""
        first, self._first = self._first, []
        kept = [] if self._history is None else [Message(**one) for one in find_unread_messages(self._history)]
        return [*kept, *first]

    def list_unreceived_texts(self, path: str) -> Sequence[str]:
        """Return the texts sent to the run at *path* before this process resumed it and not received."""
        if self._history is None or not self._journal.mode.appends_to_source(self._history):
            return ()
        if self._unreceived is None:
            self._unreceived = find_unreceived_input(self._history)
        return self._unreceived.get(path, ())

    def has_message(self, message_id: str) -> bool:
        """Return whether a message with this id is recorded, also if it was refused."""
        return message_id in self._known

    async def fetch(self) -> Sequence[Message]:
        """Record and return the messages that other processes sent since the last call."""
        box = self.find_mailbox()
        if box is None or not self._journal.writer.has_opened:
            return ()
        async with self._looking:  # two at once would find and act on the same messages
            mailbox_messages, self._place = await self._journal.writer.run_in_thread_if_blocking(
                partial(_read_new_messages, box, self._place)
            )
        # Messages to a child that has not started are tried again at each call, until it has.
        early, self._early = self._early, []
        # That of a child may come before the child is driven. That of the root is returned once: to be cancelled again
        # ends the grace of the first time.
        again = [message for message in self._cancels.values() if message.path]
        return [*again, *self._record_new_messages([*early, *mailbox_messages])]

    def store_message(self, message: Message) -> bool:
        """Record a message of this process; return ``False`` if its run has not started."""
        if not self._has_started(message.path):
            return False
        self._known.add(message.id)
        said = {"type": "message", "id": message.id, "topic": message.topic, "value": message.value}
        self._journal.writer.append(Input(message.path, -1, self._journal.timing.last, said))
        return True

    def _has_started(self, path: str) -> bool:
        """Return whether the run at *path* was started, by the record or in this process; the root always was."""
        known = self._history is not None and self._history.tree.has_run(path)
        return not path or known or get_starter_address(path) in self._begun

    def register_run(self, address: Address) -> None:
        """Register a started run, so that its messages are delivered."""
        self._begun.add(address)

    def refuse(self, message: Message, reason: str) -> None:
        """Record that a message fits no receiver, and the *reason*; it is not delivered again."""
        self._known.add(message.id)
        self._journal.writer.append(
            Input(
                message.path,
                -1,
                self._journal.timing.last,
                {"type": "rejected_message", "id": message.id, "why": reason},
            )
        )

    def send(self, message: Message) -> bool:
        """Put a message into the mailbox; return whether it is new."""
        box = self.find_mailbox()
        if box is None:
            return message.id not in self._known
        mailbox_message = MailboxMessage(
            kind=message.kind, value=message.value, id=message.id, path=message.path, topic=message.topic
        )
        try:
            return box.send(mailbox_message)
        except JournalMissing:
            # A run that has begun nothing yet need not be on the disk; whoever posts to it wants it to be.
            self._journal.writer.commit()
            return box.send(mailbox_message)

    def register_open_questions(self, address: Address, questions: Sequence[Question]) -> None:
        """Register questions whose answers no one in this process waits for."""
        self._left_open.update({question.id: (address, question) for question in questions})

    def find_mailbox(self) -> Mailbox | None:
        """Return the mailbox, or ``None`` if mode or journal have none, or the recording must be repeatable."""
        if not self._journal.mode.reads_mailbox or self._journal.writer.source.stable:
            return None
        # Opened when first asked for, since most runs are never posted to; a journal of a kind that has no mailbox is
        # no error here, only nobody can send to it.
        if self._box is None:
            with contextlib.suppress(JournalError):
                self._box = self._journal.writer.journal.mailbox()
        return self._box

    def receive_earlier_messages(self, history: History, *, asks_again: bool) -> None:
        """Read the messages sent while no process had the run. Answers are used at once; other messages are stored until the run starts."""
        self._known = list_message_ids(history)
        box = self.find_mailbox()
        if box is None or not self._journal.mode.appends_to_source(history):
            return
        mailbox_messages, self._place = _read_new_messages(box, 0)
        waiting = {key: question for key, (_, question) in find_open_questions(history).items()}
        asked = {
            q.id for i in history.intents.values() if i.type == "ask" for q in get_recorded_questions(history.form(i))
        }
        # Answers first of all: the run is opened with them, since the question may be the very effect at which the
        # record ends.
        for mailbox_message in mailbox_messages:
            if mailbox_message.kind == "result":
                # Its call is over where it has a result; the others have theirs as soon as they wait.
                if (place := (mailbox_message.path, int(mailbox_message.topic))) not in history.results:
                    self.results_sent.add(place)
                    self._came.append(mailbox_message)
            elif mailbox_message.id in self._known or mailbox_message.kind != "answer":
                self._came.append(mailbox_message)
            elif mailbox_message.topic in waiting:
                self._accept_or_refuse_answer(mailbox_message, waiting[mailbox_message.topic], asks_again=asks_again)
            elif mailbox_message.topic not in asked:
                self._refuse_answer(mailbox_message, f"{mailbox_message.topic!r} is not a question of this run")

    def _accept_or_refuse_answer(
        self, mailbox_message: MailboxMessage, question: Question, *, asks_again: bool
    ) -> None:
        """Use a mailbox message as the answer unless the caller answers the question; refuse an invalid one, or all if *asks_again*."""
        answer = parse_answer(mailbox_message.value)
        problem = find_answer_problem(answer, question)
        # Whoever wrote the journal could put a mailbox message beside it, and say of a permission that it is another question.
        if asks_again:
            problem = f"{question.id!r} is asked again, because anyone may have sent the answer"
        if problem:
            self._refuse_answer(mailbox_message, problem)
        elif not self._journal.answers.has_answer(question):
            self._journal.answers.by_question[question.id] = answer

    def _refuse_answer(self, message: MailboxMessage, reason: str) -> None:
        """Record an answer as refused, with the next record, and add a warning to the result."""
        self._journal.writer.unwritten.append(
            Input("", -1, self._journal.timing.last, {"type": "rejected_message", "id": message.id, "why": reason})
        )
        self._known.add(message.id)
        self._journal.writer.warnings.append(f"an answer from the mailbox was ignored: {reason}")

    def _record_new_messages(self, mailbox_messages: Sequence[MailboxMessage]) -> list[Message]:
        """Record mailbox messages, each once, and return the messages that need action."""
        found = []
        for mailbox_message in self._select_for_started_runs(mailbox_messages):
            message = Message(
                mailbox_message.id,
                mailbox_message.path,
                mailbox_message.topic,
                mailbox_message.value,
                mailbox_message.kind,
            )
            if mailbox_message.id not in self._known and self._record_new_message(mailbox_message, message):
                found.append(message)
        return found

    def _record_new_message(self, mailbox_message: MailboxMessage, message: Message) -> bool:
        """Record a mailbox message; return whether its message needs action."""
        match mailbox_message.kind:
            case "message":
                self.store_message(message)
            case "input":
                self._append_message_record(message)
            case "answer" if mailbox_message.topic in self._left_open:
                self._record_answer_for_resume(mailbox_message)
                return False
            case "cancel":
                # Written down when it has come to its end: a crash before that is not to lose it.
                is_new = mailbox_message.id not in self._cancels
                self._cancels[mailbox_message.id] = message
                return is_new
            case _:
                pass
        return True

    def _select_for_started_runs(self, mailbox_messages: Sequence[MailboxMessage]) -> Iterator[MailboxMessage]:
        """Yield the answers and the messages to started runs; keep the others for later calls."""
        for mailbox_message in mailbox_messages:
            if mailbox_message.kind == "answer" or self._has_started(mailbox_message.path):
                yield mailbox_message
            else:
                self._early.append(mailbox_message)

    def _append_message_record(self, message: Message) -> None:
        """Record user input or a cancellation from the mailbox."""
        self._known.add(message.id)
        # Written down before it is done: a message that made the run go another way has to be in the record in front of
        # what it led to.
        said = {"type": "mailbox_message", "id": message.id, "kind": message.kind, "value": message.value}
        self._journal.writer.append(Input(message.path, -1, self._journal.timing.last, said))

    def _record_answer_for_resume(self, mailbox_message: MailboxMessage) -> None:
        """Record the answer to a question that no effect in this process waits for. The resumed run reads it."""
        (path, seq), question = self._left_open[mailbox_message.topic]
        answer = parse_answer(mailbox_message.value)
        if problem := find_answer_problem(answer, question):
            self._refuse_answer(mailbox_message, problem)
            return
        del self._left_open[mailbox_message.topic]
        self._known.add(mailbox_message.id)
        self.was_answered = True
        said = {"question_id": question.id, "answer": encode_stored(to_answer(answer, question))}
        self._journal.writer.append(Input(path, seq, self._journal.timing.last, {"type": "answer", **said}))

    def record_collected_messages(self) -> None:
        """Record the collected mailbox messages once the run has started; ``list_unread_messages`` returns them."""
        if self._came:
            self._first = self._record_new_messages(self._came)
            self._came = []

    def record_root_cancels(self) -> None:
        """Append the mailbox messages that cancelled the root run to the journal."""
        for message in [one for one in self._cancels.values() if not one.path]:
            self._append_message_record(message)

    def list_undelivered_ids(self) -> set[str]:
        """Return the ids of messages to runs that have not started."""
        return {one.id for one in self._early}


def _read_new_messages(mailbox: Mailbox, position: int) -> tuple[list[MailboxMessage], int]:
    """Read the messages after a position from the disk; return them and the next position."""
    return mailbox.read(position) if mailbox.may_have_messages(position) else ([], position)
