"""Messages from outside that a run tree carries out: an answer, the result of a call, a cancellation, a user message."""

from __future__ import annotations

from typing import Protocol

from stepengine.data.json import thaw
from stepengine.data.messages import UserMessage
from stepengine.errors import AnswerRejected
from stepengine.runtime.active_runs import ActiveRuns
from stepengine.runtime.background import BackgroundChildren
from stepengine.runtime.deferred_calls import DeferredCalls
from stepengine.runtime.hub import Hub
from stepengine.runtime.messages import Inboxes, Message, RunMessages, parse_answer
from stepengine.runtime.questions import OpenQuestions

# Such a message comes from somebody who does not hold the run and cannot press again, so what is under way gets a chance
# to be no doubt later. Whoever holds the run says how long.
GRACE_SECONDS = 5.0
"""
How long effects that cannot be repeated may take to end when a mailbox message cancels their run: a usual HTTP request
ends in time.
"""


class SteerableTree(Protocol):
    """The parts of a tree that messages reach."""

    runs: ActiveRuns
    background: BackgroundChildren
    inboxes: Inboxes
    questions: OpenQuestions
    deferred: DeferredCalls
    mail: RunMessages
    hub: Hub


def apply_outside_message(tree: SteerableTree, message: Message) -> None:
    """Apply *message* to *tree*; ordinary messages have no effect."""
    said = str(message.value)
    match message.kind:
        case "input":
            tree.inboxes.add(message.path, UserMessage(said))
        # A child in the background is ended by way of who keeps account of it: how it ended is told to its parent,
        # and the reason with it.
        case "cancel" if message.path:
            known = tree.background.is_running(message.path)
            tree.background.cancel_children((message.path,), said) if known else tree.runs.cancel(message.path, said)
        case "cancel":
            tree.hub.failures.warnings.append(
                f"the run was cancelled by a mailbox message{f': {said}' if said else ''}"
            )
            tree.runs.interrupt(GRACE_SECONDS)
        case "answer":
            _deliver_or_refuse_answer(tree, message)
        case "result":
            tree.deferred.deliver_now_or_later((message.path, int(message.topic)), thaw(message.value))
        case "message":
            pass


def _deliver_or_refuse_answer(tree: SteerableTree, message: Message) -> None:
    """Answer the question of *message*; a rejected answer is refused with a warning, unless the run is just being suspended."""
    try:
        tree.questions.answer(message.topic, parse_answer(message.value))
    # Somebody was told that the answer arrived, so it cannot simply vanish: that it was left out, and why, stands
    # in the record and in the run's warnings.
    except AnswerRejected as error:
        if tree.questions.is_left_unanswered(message.topic):
            return  # it came in the moment in which the run is suspended, and is there for whoever resumes it
        tree.mail.refuse(message, error.message)
        tree.hub.failures.warnings.append(f"an answer from the mailbox was ignored: {error.message}")
