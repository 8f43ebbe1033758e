"""
``RunMailbox``: the mailbox messages of one recorded run: what was posted while nobody held the run, and what arrives while it runs.

A run tree has it as its ``PostBox``. Each message is recorded once, before it takes effect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stepengine.data.questions import AnswerLike, Question, answer_problem, answered
from stepengine.errors import JournalError, JournalMissing
from stepengine.journal.encoding import bare, questions_of
from stepengine.journal.history import History, parent_of
from stepengine.journal.mailbox import Letter, Mailbox
from stepengine.journal.modes import Mode
from stepengine.journal.records import Address, Input, Record
from stepengine.journal.store import Commits, Journal, Writer
from stepengine.journal.timing import Timing
from stepengine.runtime.mail import Message, answer_in

if TYPE_CHECKING:
    from stepengine.journal.replayer import RecordedPart

__all__ = ("MailedRun", "RunMailbox")


class MailedRun(Protocol):
    """The members of a recorded run that its mailbox uses; see ``JournaledRun``."""

    mode: Mode
    source: Journal
    journal: Journal
    past: RecordedPart | None
    timing: Timing
    answers: dict[str, AnswerLike]
    warnings: list[str]
    unwritten: list[Input]
    writer: Writer | None
    commits: Commits | None

    def append(self, record: Record) -> None:
        """Write a record."""


class RunMailbox:
    """
    The mailbox messages of one recorded run.

    Attributes:
        results_sent: The addresses of deferred calls whose results wait in the mailbox.
        was_answered: Whether an answer arrived to a question that no effect of this process waits for.
    """

    def __init__(self, run: MailedRun) -> None:
        self._run = run
        self._box: Mailbox | None = None
        self._place = 0
        self._looking = asyncio.Lock()
        self._known: set[str] = set()
        self._came, self._early = list[Letter](), list[Letter]()
        self.results_sent = set[Address]()
        self._first: list[Message] = []
        self._begun: set[Address] = set()
        self._cancels: dict[str, Message] = {}
        self.was_answered = False
        self._left_open: dict[str, tuple[Address, Question]] = {}

    def unread(self) -> list[Message]:
        """Return the messages of the record that no run took, and what was posted when the run was taken over."""
        past, first, self._first = self._run.past, self._first, []
        kept = [] if past is None else [Message(**one) for one in past.history.unread_messages()]
        return [*kept, *first]

    def unheard(self, path: str) -> Sequence[str]:
        """Return what was said to the run at *path* before this process took over, and did not reach it."""
        past = self._run.past
        return () if past is None or not self._run.mode.goes_on(past.history) else past.history.unheard(path)

    def has(self, message_id: str) -> bool:
        """Return whether the record has a message of this id."""
        return message_id in self._known

    async def fetch(self) -> Sequence[Message]:
        """Return what other processes sent since this was last asked, written down."""
        box = self.box()
        if box is None or self._run.writer is None or self._run.commits is None:
            return ()
        async with self._looking:  # two at once would find the same letters, and each do what they say
            look = partial(_letters_behind, box, self._place)
            letters, self._place = await self._run.commits.apart(look) if self._run.writer.blocks else look()
        # Letters to a child that had not begun when they were read: they are looked at again each time, until it has.
        early, self._early = self._early, []
        return [*self._cancels.values(), *self._taken_in([*early, *letters])]

    def keep(self, message: Message) -> bool:
        """Record a message of this process, unless its run has not begun: a record without a run would spoil the journal."""
        if not self._is_there(message.path):
            return False
        self._known.add(message.id)
        said = {"type": "message", "id": message.id, "topic": message.topic, "value": message.value}
        self._run.append(Input(message.path, -1, self._run.timing.last, said))
        return True

    def _is_there(self, path: str) -> bool:
        known = self._run.past is not None and self._run.past.history.has_run(path)
        return not path or known or parent_of(path) in self._begun

    def begins(self, address: Address) -> None:
        """Take note of a run that begins, so that letters find it; its beginning was written down."""
        self._begun.add(address)

    def refuse(self, message: Message, why: str) -> None:
        """Write down that a message was left out."""
        self._known.add(message.id)
        self._run.append(
            Input(message.path, -1, self._run.timing.last, {"type": "rejected_message", "id": message.id, "why": why})
        )

    def post(self, message: Message) -> bool:
        """Put a message into the mailbox; return whether it is new."""
        box = self.box()
        if box is None:
            return message.id not in self._known
        letter = Letter(kind=message.kind, value=message.value, id=message.id, path=message.path, topic=message.topic)
        try:
            return box.post(letter)
        except JournalMissing:
            assert self._run.writer is not None  # noqa: S101 - it has begun
            # A run that has begun nothing yet need not be on the disk; whoever posts to it wants it to be.
            self._run.writer.commit()
            return box.post(letter)

    def leaves_open(self, address: Address, questions: Sequence[Question]) -> None:
        """Take note of questions for whose answers nobody here waits."""
        self._left_open.update({question.id: (address, question) for question in questions})

    def box(self) -> Mailbox | None:
        """Return the mailbox of the run; ``None`` where nobody posts, as for the recording of a test, which is to be repeated."""
        if not self._run.mode.takes_letters or self._run.source.stable:
            return None
        # Opened when first asked for, since most runs are never posted to; a journal of a kind that has no mailbox is
        # no error here, only nobody can post to it.
        if self._box is None:
            with contextlib.suppress(JournalError):
                self._box = self._run.journal.mailbox()
        return self._box

    def collect(self, history: History, *, asks_again: bool) -> None:
        """Read what was posted while nobody held the run; answers are those that the run is given, others wait for its start."""
        self._known = history.kept_ids()
        box = self.box()
        if box is None or not self._run.mode.goes_on(history):
            return
        letters, self._place = _letters_behind(box, 0)
        waiting = {key: question for key, (_, question) in history.open_questions().items()}
        asked = {q.id for i in history.intents.values() if i.type == "ask" for q in questions_of(history.form(i))}
        # Answers first of all: the run is opened with them, since the question may be the very effect at which the
        # record ends.
        for letter in letters:
            if letter.kind == "result":
                # Its call is over where it has a result; the others have theirs as soon as they wait.
                if (place := (letter.path, int(letter.topic))) not in history.results:
                    self.results_sent.add(place)
                    self._came.append(letter)
            elif letter.id in self._known or letter.kind != "answer":
                self._came.append(letter)
            elif letter.topic in waiting:
                self._take_answer(letter, waiting[letter.topic], asks_again=asks_again)
            elif letter.topic not in asked:
                self._leave_out(letter, f"{letter.topic!r} is not a question of this run")

    def _take_answer(self, letter: Letter, question: Question, *, asks_again: bool) -> None:
        """Let a question be answered by a letter, unless whoever resumes the run answers it."""
        answer = answer_in(letter.value)
        problem = answer_problem(answer, question)
        # Whoever can write to the folder can post a yes. An answer to a question is only text for the agent; a
        # permission lets something run, so on a folder that others share it is asked again.
        if asks_again and question.tool_name is not None:
            problem = f"{question.id!r} is a permission, and whoever posted that it is given may be anybody"
        if problem:
            self._leave_out(letter, problem)
        elif question.id not in self._run.answers and question.text not in self._run.answers:
            self._run.answers[question.id] = answer

    def _leave_out(self, letter: Letter, why: str) -> None:
        self._run.unwritten.append(
            Input("", -1, self._run.timing.last, {"type": "rejected_message", "id": letter.id, "why": why})
        )
        self._known.add(letter.id)
        self._run.warnings.append(f"an answer that was sent was left out: {why}")

    def _taken_in(self, letters: Sequence[Letter]) -> list[Message]:
        """Write down what was posted, and return what is to be done with it; each letter only once."""
        found = []
        for letter in self._of_runs(letters):
            message = Message(letter.id, letter.path, letter.topic, letter.value, letter.kind)
            if letter.id not in self._known and self._is_to_be_done(letter, message):
                found.append(message)
        return found

    def _is_to_be_done(self, letter: Letter, message: Message) -> bool:
        """Write down what was posted; return whether something is to be done with it beside."""
        match letter.kind:
            case "message":
                self.keep(message)
            case "input":
                self._keep_letter(message)
            case "answer" if letter.topic in self._left_open:
                self._keep_answer(letter)
                return False
            case "cancel":
                # Written down when it has come to its end: a crash before that is not to lose it.
                is_new = letter.id not in self._cancels
                self._cancels[letter.id] = message
                return is_new
            case _:
                pass
        return True

    def _of_runs(self, letters: Sequence[Letter]) -> Iterator[Letter]:
        """Give the letters to runs that are there; the others wait until these begin."""
        for letter in letters:
            if letter.kind == "answer" or self._is_there(letter.path):
                yield letter
            else:
                self._early.append(letter)

    def _keep_letter(self, message: Message) -> None:
        self._known.add(message.id)
        # Written down before it is done: a message that made the run go another way has to be in the record in front of
        # what it led to.
        said = {"type": "mailbox_message", "id": message.id, "kind": message.kind, "value": message.value}
        self._run.append(Input(message.path, -1, self._run.timing.last, said))

    def _keep_answer(self, letter: Letter) -> None:
        """Keep the answer to a question that nobody here waits for any more: whoever resumes the run finds it."""
        (path, seq), question = self._left_open[letter.topic]
        answer = answer_in(letter.value)
        if problem := answer_problem(answer, question):
            self._leave_out(letter, problem)
            return
        del self._left_open[letter.topic]
        self._known.add(letter.id)
        self.was_answered = True
        said = {"question_id": question.id, "answer": bare(answered(answer, question))}
        self._run.append(Input(path, seq, self._run.timing.last, {"type": "answer", **said}))

    def take_first(self) -> None:
        """Record what was collected, when the run has started; ``unread`` returns it."""
        if self._came:
            self._first = self._taken_in(self._came)
            self._came = []

    def record_cancels(self) -> None:
        """Record the messages that cancelled the root."""
        for message in [one for one in self._cancels.values() if not one.path]:
            self._keep_letter(message)

    def early_ids(self) -> set[str]:
        """Return the ids of messages to runs that have not begun."""
        return {one.id for one in self._early}


def _letters_behind(box: Mailbox, place: int) -> tuple[list[Letter], int]:
    """Return the letters behind a place, and the next place; waits for the disk."""
    return box.read(place) if box.changed(place) else ([], place)
