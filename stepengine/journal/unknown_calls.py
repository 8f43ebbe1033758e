"""
``UnknownCalls``: the calls that only a journal of somebody else asked for, about which a person is asked before they start.

A record can hold a call that has begun and not ended, or a reply of a model that asks for calls. In a journal that this user's runs did
not write, neither is a reason to perform anything: for this user the call has never happened, and no policy has judged who asks for it.
"""

from __future__ import annotations

from typing import Any

from stepengine.data.effects import AskPerson, CallBody, CallFunction, CallTool, Spawn
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Answer
from stepengine.errors import JournalError, PermissionDenied
from stepengine.journal.history import History
from stepengine.journal.permission_reset import find_effective_approvals
from stepengine.journal.provenance import are_calls_trusted, has_trusted_permissions
from stepengine.journal.questions import make_unknown_call_question
from stepengine.journal.recorded_part import RecordedPart
from stepengine.journal.records import Address, Intent, format_address, get_starter_address
from stepengine.journal.store import Journal
from stepengine.runtime.effect_events import make_end_events, make_start_events
from stepengine.runtime.performer import IO, Item, Performer, child_path

HARMLESS_CATEGORIES = ("read", "control")
"""Tools of these categories change nothing and start nothing; one that reaches beyond this machine is asked about all the same."""

STEPS = ("step", "final_answer")
"""The purposes of the model calls that a run's steps make."""


def find_unknown_calls(history: History) -> list[Address]:
    """
    Return the addresses of effects that only the record requests and that a resumed run would perform.

    These are started calls without a result, and last replies of a model that request calls without a result.
    """
    if history.is_complete:
        return []
    found: list[Address] = []
    last: dict[str, list[Intent]] = {}
    for intent in history.intents.values():
        if intent.type == "model_call":
            # The next step of a run comes when the calls before it are over; a candidate's calls may still be chosen.
            is_step = history.form(intent)["purpose"] in STEPS
            if is_step or intent.path not in last:
                last[intent.path] = []
            last[intent.path].append(intent)
        is_call = intent.type in ("tool_call", "perform") or (
            intent.type == "agent_call" and "tool_call_id" in history.form(intent)
        )
        if is_call and intent.address not in history.results and not history.tree.has_ended(intent.path):
            found.append(intent.address)
    for path, asked in last.items():
        ended = None if history.tree.has_ended(path) else _list_ended_call_ids(history, path)
        found += [each.address for each in asked if ended is not None and _requests_open_call(history, each, ended)]
    return found


def refuse_unknown_calls(journal: Journal, *, trust: bool | None = None) -> None:
    """
    Raise if a journal of another user requests or approves calls that a resumed run would perform; see ``resume`` for *trust*.

    Raises:
        JournalError: when there are such effects; the error names them and a remedy.
    """
    history = journal.history()
    is_own = are_calls_trusted(journal, trust=trust)
    found = [] if is_own else [format_address(*each) for each in find_unknown_calls(history)]
    found += [] if has_trusted_permissions(journal, trust=trust) else find_effective_approvals(history)
    if found:
        msg = (
            f"{journal.name} was written or changed by others, and its {', '.join(found)} would run calls that you did not request or approve; "
            "`stepengine resume` asks you first, and trust=True (--trust-journal) accepts them"
        )
        raise JournalError(msg)


def _list_ended_call_ids(history: History, path: str) -> set[str]:
    """Return the ids of the calls of the run at *path* that have a result."""
    return {
        history.form(intent).get("tool_call_id", "")
        for address, intent in history.intents.items()
        if intent.path == path and intent.type in ("tool_call", "agent_call") and address in history.results
    }


def _requests_open_call(history: History, model_call: Intent, ended_call_ids: set[str]) -> bool:
    """Return whether the recorded reply to a model call requests a tool call whose id is not in *ended_call_ids*."""
    result = history.results.get(model_call.address)
    reply: Any = None if result is None else getattr(history.outcome(result), "value", None)
    return reply is not None and any(call.tool_call_id not in ended_call_ids for call in reply.tool_calls)


class UnknownCalls:
    """
    The calls of a resumed run that only its record requests.

    Args:
        past: The recorded part of the run.
        inner: The performer that asks people.
    """

    def __init__(self, past: RecordedPart, inner: Performer) -> None:
        self._past = past
        self._inner = inner
        self._approved = set[tuple[str, str]]()
        self._replies: dict[str, bool] = {}
        self._started = set[str]()

    def record_reply_source(self, path: str, *, is_recorded: bool) -> None:
        """Record whether the next calls of the run at *path* are requested by the record, or by a live model or person."""
        self._replies[path] = is_recorded

    def record_model_call_source(self, item: Item, *, is_recorded: bool) -> None:
        """Record whether a model's reply that may request calls comes from the record; ignore replies to ``Complete``."""
        effect: Any = item.effect
        if effect.purpose != "complete":
            self.record_reply_source(item.path, is_recorded=is_recorded)

    def record_started_child(self, item: Item) -> None:
        """Record that a child runs because of its recorded start. Its calls need approval, unless the handler started it."""
        effect: Any = item.effect
        if effect.tool_call_id:
            self._started.add(child_path(*item.address))

    def record_approval(self, item: Item, outcome: Single) -> None:
        """Record an approval that a person gives now, so that no call needs approval twice."""
        effect: Any = item.effect
        if isinstance(outcome, Value) and all(answer.agrees for answer in outcome.value):
            self._approved.add((item.path, effect.tool_call_id))

    def _is_started_by_record(self, path: str) -> bool:
        """Return whether, according to the record, a model started the run at *path* or one of its ancestors."""
        while path and path not in self._started:
            path = get_starter_address(path)[0]
        return bool(path)

    def needs_approval(self, item: Item) -> bool:
        """Return whether a person has to be asked about an effect before it starts."""
        effect = item.effect
        if not isinstance(effect, CallTool | CallBody | CallFunction | Spawn):
            return False
        has_begun = self._past.find_intent(item.address) is not None
        if isinstance(effect, CallFunction):
            return has_begun or self._is_started_by_record(item.path)
        # A child without a call is the handler's.
        is_free = not effect.tool_call_id if isinstance(effect, Spawn) else _is_harmless(item, effect.tool_name)
        if is_free or (item.path, effect.tool_call_id) in self._approved:
            return False
        return has_begun or self._is_started_by_record(item.path) or self._is_last_reply_recorded(item.path)

    def make_refusal_error(self, item: Item) -> JournalError:
        """Return the error for a call that a replay would perform, because a replay cannot ask a person."""
        effect: Any = item.effect
        name = effect.call.name if isinstance(effect, CallFunction) else effect.tool_name
        return JournalError(
            f"{self._past.history.name} was written or changed by others, and {format_address(*item.address)} would run {name!r}, which "
            "you did not request, and a replay cannot ask you. trust=True (--trust-journal) replays it like your own"
        )

    async def ask_person(self, item: Item, io: IO) -> Answer | Stop:
        """Ask a person whether an effect may start; return the answer, or a stop with the open question."""
        question = make_unknown_call_question(item)
        asking = item._replace(effect=AskPerson(item.effect.seq, (question,)), gather=None)
        for event in make_start_events(asking):
            io.emit(event)
        outcome = await self._inner.perform(asking, io)
        for event in make_end_events(asking, outcome, 0):
            io.emit(event)
        if isinstance(outcome, Stop):
            return outcome
        answer: object = outcome.value[0] if isinstance(outcome, Value) else Answer(declined=True)
        assert isinstance(answer, Answer)  # noqa: S101 - one for the one question
        return answer

    def _is_last_reply_recorded(self, path: str) -> bool:
        """Return whether the last model reply in the run at *path* is recorded; without one, that in the run around it."""
        while path and path not in self._replies:
            path = get_starter_address(path)[0]
        return self._replies.get(path, False)


def replace_failure_by_denial(item: Item, decided: Single) -> Single:
    """Return the denial of a tool call or of the start of an agent in place of a failure; return other outcomes unchanged."""
    if isinstance(decided, Failure) and isinstance(item.effect, CallTool) and not isinstance(item.effect, CallBody):
        return Value(ToolResult.error(f"A person denied the call of {item.effect.tool_name}.", status="denied"), 0)
    if isinstance(decided, Failure) and isinstance(item.effect, Spawn):
        return Failure(PermissionDenied(f"A person denied the start of the agent {item.effect.agent_id!r}."), 0)
    return decided


def _is_harmless(item: Item, tool: str) -> bool:
    """Return whether a tool neither changes nor starts anything, nor reaches beyond this machine."""
    binding = item.plan.tools.get(tool)
    if binding is None:
        return False
    spec = binding.spec
    return spec.category in HARMLESS_CATEGORIES and not spec.annotations.open_world
