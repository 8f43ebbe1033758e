"""
``RecordedPermissions``: which recorded permissions are believed.

A permission lets something run. One that was recorded for another input, or by somebody else, must let nothing run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from stepengine.data.effects import AskPerson
from stepengine.data.outcomes import Failure, Value
from stepengine.data.questions import Answer
from stepengine.errors import JournalError
from stepengine.journal.encoding import get_recorded_questions
from stepengine.journal.modes import OpenJournal
from stepengine.journal.recorded_part import RecordedPart
from stepengine.journal.records import Address, format_address
from stepengine.runtime.performer import Item


def limit_to_one_call(answer: Any) -> Any:
    """Return an answer limited to its own call: a lasting approval becomes an approval of one call."""
    if not isinstance(answer, Answer) or answer.remember is None:
        return answer
    # A journal of somebody else may hold "always allow"; believed as that it would let calls run which its reader never
    # saw. The yes counts for the one recorded call.
    return attrs.evolve(answer, text="yes" if answer.agrees else answer.text, remember=None, covers="")


def list_answers(outcome: Value | Failure) -> list[Answer]:
    """Return the answers in a recorded outcome; an empty list for one without answers."""
    value = getattr(outcome, "value", None)
    return [each for each in value if isinstance(each, Answer)] if isinstance(value, list | tuple) else []


def is_permission(item: Item) -> bool:
    """Return whether an effect asks for permission to run a call."""
    return isinstance(item.effect, AskPerson) and item.effect.purpose == "permission"


class RecordedPermissions:
    """
    The recorded permissions of a run.

    Args:
        journal: The journal of the run.
        past: The recorded part of the run.
    """

    def __init__(self, journal: OpenJournal, past: RecordedPart) -> None:
        self._past = past
        self._leeway = past.leeway
        self._mode = journal.mode
        self._writer = journal.writer
        self._answers = journal.answers

    def has_wider_approval(self, item: Item) -> bool:
        """
        Return whether a recorded approval would cover a call with another input.

        False if the call has a recorded result or was not approved, since then no call starts.
        """
        # "Keep what is recorded" must not mean that a yes to `rm a` is one to `rm b` (reliability:R8).
        effect, address = item.effect, item.address
        if not isinstance(effect, AskPerson) or effect.purpose != "permission":
            return False
        if self._past.find_result(address) is None:
            return any(map(self._answers.has_answer, effect.questions))
        return bool(self._find_approving_answers(address)) and not self._has_call_result(item.path, effect.tool_call_id)

    def must_ask_again(self, item: Item) -> bool:
        """
        Return whether a recorded permission is untrusted here and has to be asked for again.

        Raises:
            JournalError: when nobody can be asked, because the run is only repeated.
        """
        if not is_permission(item):
            return False
        address = item.address
        if (
            self._leeway.asks_about_calls
            and self._find_approving_answers(address)
            and not self._has_permission_with_same_call_id(item)
        ):
            if self._mode.cuts_off:
                return True
            msg = (
                f"{self._past.history.name} was written by others, and its record at {format_address(*address)} does not approve the "
                f"call of {item.effect.questions[0].tool_name!r}. Fork the run before that address to be asked for approval"  # type: ignore[union-attr]
            )
            raise self._writer.keep_first_fatal_error(JournalError(msg))
        if not self._leeway.doubts_yes:
            return False
        # A journal that somebody else wrote may hold any permission. It is believed for a call whose result is recorded
        # with it, since then nothing runs; anything else would let a stranger's file allow calls on this machine.
        approval = self._find_approving_answers(address)
        if not approval:
            return False
        if self._mode.cuts_off:
            return not self._has_approved_result(address, approval[0])
        if "tool_call" not in self._leeway.live:
            return False
        msg = (
            f"{self._past.history.name} is somebody else's, and its permission at {format_address(*address)} would let "
            f"{item.effect.questions[0].tool_name!r} run, which nobody here allowed; a replay asks nobody"  # type: ignore[union-attr]
        )
        raise self._writer.keep_first_fatal_error(JournalError(msg))

    def refuse_untrusted_call(self, item: Item) -> None:
        """
        Raise if a call would start on an untrusted recorded permission.

        Raises:
            JournalError: when the call would start, since the record was discarded after the permission.
        """
        # A yes was believed since the call that it allowed has its result in the record. If the record is then cut
        # between the two, that yes would let a call run that nobody here has allowed.
        call_id = getattr(item.effect, "tool_call_id", "")
        if not self._leeway.doubts_yes or not call_id or is_permission(item):
            return
        for address in self._past.list_reached_permissions(item.path, call_id):
            if self._find_approving_answers(address):
                msg = (
                    f"{self._past.history.name} is somebody else's, and its permission at {format_address(*address)} would let "
                    f"a call run anew that nobody here allowed; fork it before that, so that you are asked"
                )
                raise self._writer.keep_first_fatal_error(JournalError(msg))

    def _has_permission_with_same_call_id(self, item: Item) -> bool:
        """Return whether the effect recorded at this address is a permission question with the same tool call id."""
        effect: Any = item.effect
        form = self._past.history.form(self._past.history.intents[item.address])
        is_permission_there = form["type"] == "ask" and form["purpose"] == "permission"
        return bool(is_permission_there and form.get("tool_call_id", "") == effect.tool_call_id)

    def _find_approving_answers(self, address: Address) -> Sequence[Answer]:
        """Return the recorded answers to the permission question at *address* if one of them approves, else nothing."""
        known = self._past.find_result(address)
        answers = [] if known is None else list_answers(self._past.history.outcome(known))
        return answers if any(answer.agrees for answer in answers) else ()

    def _has_call_result(self, path: str, tool_call_id: str) -> bool:
        """Return whether the record has a result of a tool call of the run at *path*."""
        calls = self._past.calls.find_effects_of_call("tool_call", path, tool_call_id)
        return any((path, call.seq) in self._past.history.results for call in calls)

    def _has_approved_result(self, permission_address: Address, answer: Answer) -> bool:
        """Return whether the record has a result for the call that the permission at *permission_address* allowed, with the same input."""
        form = self._past.history.form(self._past.history.intents[permission_address])
        (question,) = get_recorded_questions(form)
        wanted = question.details if answer.edited_input is None else answer.edited_input
        calls = self._past.calls.find_effects_of_call("tool_call", permission_address[0], form.get("tool_call_id"))
        forms = [self._past.history.form(call) for call in calls if call.address in self._past.history.results]
        return any((call["tool_name"], call["input"]) == (question.tool_name, wanted) for call in forms)
