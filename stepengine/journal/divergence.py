"""
When a replayed run does something else than its journal says: one good error.

It names the step, the effect, the agent and the author's line, shows which fields differ, guesses why, and says what can be
done. Only the first difference is told; what follows is consequence.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from stepengine.data.effects import CallModel
from stepengine.data.json import ABSENT, find_differences, find_first_difference
from stepengine.data.outcomes import Failure, Single, Value
from stepengine.data.state import ChildResult
from stepengine.data.visible import cut_after
from stepengine.errors import ReplayDivergence
from stepengine.journal.encoding import encode_outcome_members, get_sandbox_name, to_comparable_json
from stepengine.journal.fingerprints import UNSEEN, Fingerprints, select_fingerprinted_part
from stepengine.journal.history import History
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import (
    ROOT,
    Address,
    Intent,
    format_address,
    format_file_argument,
    get_starter_address,
)
from stepengine.machine.run import Machine
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item

DivergenceKind: TypeAlias = Literal["changed", "kind", "extra", "unused", "undecodable", "live_result", "end"]
SHOWN_FIELDS = 12
"""With a dozen fields the message still fits on one screen; a request that differs in more was made by different code."""
WINDOW_CHARS = 200
"""About two lines of a terminal for each side: the difference and enough around it to find the place."""
WHOLE_CHARS = 60
"""A shorter text is shown whole; both sides of it fit on one line with the pointer."""


class FieldDifference(NamedTuple):
    """One difference: a JSON pointer, and both values as text; ``"(absent)"`` for a missing value."""

    pointer: str
    recorded: str
    now: str


def find_waiting_location(machine: object) -> str:
    """Return the location where the author's code of a machine waits, or ``""`` if it is not the machine of an agent."""
    return machine.location if isinstance(machine, Machine) else ""


def find_definition_line(handler: object) -> str:
    """Return ``file:line`` of a handler's definition, or ``""`` if the handler is not a function."""
    code = getattr(inspect.unwrap(handler), "__code__", None) if callable(handler) else None
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def make_divergence_error(
    history: History,
    address: Address,
    kind: DivergenceKind,
    *,
    problem: str,
    agent_id: str = "",
    location: str = "",
    fields: Sequence[FieldDifference] = (),
    hint: str = "",
    now_calls_model: bool = False,
) -> ReplayDivergence:
    """
    Return the error for the first difference of a run from its record.

    Args:
        history: The recorded run.
        address: The address of the first difference.
        kind: The kind of the difference.
        problem: The action of the run, in a few words.
        agent_id: The agent whose handler requested the effect.
        location: ``file:line`` of the ``yield``, or of a handler that has ended.
        fields: The differing fields.
        hint: The likely cause, or ``""``.
        now_calls_model: Whether the run requested a model call here. The call belongs to the step that it starts.
    """
    path, seq = address
    at_end = kind == "end"
    calls = [s for (p, s), i in history.intents.items() if p == path and i.type == "model_call" and (at_end or s < seq)]
    step = len(calls) + now_calls_model
    whose = f" of {agent_id}" if agent_id else ""
    where = f"at its end, after step {step}" if at_end else f"at step {step}, effect {format_address(*address)}"
    lines = [f"the run diverged from {history.name} {where}{whose}: {problem}"]
    if location:
        lines.append(f"  {location}")
    lines += [f"    {f.pointer:<34} recorded {f.recorded}   now {f.now}" for f in fields[:SHOWN_FIELDS]]
    if len(fields) > SHOWN_FIELDS:
        lines.append(f"    and {len(fields) - SHOWN_FIELDS} more")
    if hint:
        lines.append(f"  cause looks like: {hint}")
    lines.append(_format_advice(history, path, seq, can_keep=kind == "changed" and not history.is_complete))
    return ReplayDivergence(
        "\n".join(lines), kind=kind, address=format_address(*address), step=step, site=location, diff=fields
    )


def _format_advice(history: History, path: str, seq: int, *, can_keep: bool) -> str:
    """Return the lines of an error message with the commands that continue or inspect a diverged run."""
    file = format_file_argument(history.name)
    lines: list[str] = []
    if can_keep:
        how = 'engine.resume(journal, on_divergence="keep")'
        lines += [
            "  to continue where the run stopped, with the recorded results:",
            f"    {how}  or  stepengine resume {file} --on-divergence keep   calls no model again",
        ]
    how = 'engine.resume(journal, on_divergence="extend")'
    lines += [
        "  to continue from here with the new code:",
        f"    {how}  or  stepengine resume {file} --on-divergence extend   keeps the effects that still match and records the rest again",
    ]
    if seq > 0:
        at = format_address(path, seq - 1)
        lines.append(
            f"    engine.fork(journal, at={at!r})  or  stepengine fork {file} --at '{at}'   continues in another journal"
        )
    lines.append("    --stepengine-record=extend in a test, or =rewrite to record it all again")
    lines += [
        f"  to inspect the steps and variables before this: stepengine debug {file}",
        "  to compare two journals: diff(a, b)  or  stepengine compare diff A B",
    ]
    return "\n".join(lines)


def describe_effect(form: CallModel | Mapping[str, object]) -> str:
    """Return the kind of an effect and the name of its tool, function or agent, such as ``"tool_call read_files"``."""
    if isinstance(form, CallModel):
        return "model_call"
    members: Mapping[str, Any] = form
    name = members.get("tool_name") or members.get("name") or members.get("agent_id") or ""
    return f"{members['type']} {name}".rstrip()


# --- what differs ---------------------------------------------------------------------------------------------------


def compare_effects(
    requests: RecordedRequests, intent: Intent, requested: Intent, redactor: Redactor
) -> list[FieldDifference]:
    """Return the differences between a recorded effect and the requested one."""
    history = requests.history
    recorded, asked = history.form(intent), history.form(requested)
    if recorded["type"] != asked["type"]:
        return [FieldDifference("/type", format_value(recorded["type"]), format_value(asked["type"]))]
    if recorded["type"] == "model_call":
        old = {**recorded["request"], "messages": requests.get_messages(intent)}
        return compare_requests(redactor.value(old), redactor.value(asked["request"]))
    return list(
        compare_values(
            redactor.value(select_fingerprinted_part(recorded)), redactor.value(select_fingerprinted_part(asked))
        )
    )


def compare_requests(recorded: Mapping[str, object], requested: Mapping[str, object]) -> list[FieldDifference]:
    """Return the differences between two stored requests, inserted and removed messages included."""
    names = [
        n for n in ("model", "system_prompt", "tools", "tool_choice", "settings") if n in recorded or n in requested
    ]
    fields: list[FieldDifference] = []
    for name in names:
        fields += compare_values(recorded.get(name, ABSENT), requested.get(name, ABSENT), f"/{name}")
    return fields + list(_compare_messages(_list_comparable_messages(recorded), _list_comparable_messages(requested)))


def _list_comparable_messages(request: Mapping[str, Any]) -> list[object]:
    messages = [*request.get("messages", ()), *request.get("tail", ())]
    return [{k: v for k, v in message.items() if k not in UNSEEN} for message in messages]


def _compare_messages(recorded: list[object], requested: list[object]) -> Iterator[FieldDifference]:
    """Yield the differences between messages, without those at the start and the end that are equal."""
    start = 0
    while start < min(len(recorded), len(requested)) and recorded[start] == requested[start]:
        start += 1
    end = 0
    while end < min(len(recorded), len(requested)) - start and recorded[-1 - end] == requested[-1 - end]:
        end += 1
    old, new = recorded[start : len(recorded) - end], requested[start : len(requested) - end]
    for offset in range(max(len(old), len(new))):
        theirs = old[offset] if offset < len(old) else ABSENT
        ours = new[offset] if offset < len(new) else ABSENT
        yield from compare_values(theirs, ours, f"/messages/{start + offset}")


def compare_values(recorded: object, requested: object, pointer: str = "") -> Iterator[FieldDifference]:
    """Yield each difference between two JSON values."""
    for found in find_differences(recorded, requested, pointer):
        yield FieldDifference(found.pointer or "/", *_format_value_pair(found.recorded, found.now))


def _format_value_pair(recorded: object, requested: object) -> tuple[str, str]:
    """Return both values as texts; long texts start shortly before their first difference."""
    if isinstance(recorded, str) and isinstance(requested, str) and max(len(recorded), len(requested)) > WHOLE_CHARS:
        start = max(0, find_first_difference(recorded, requested) - WHOLE_CHARS // 3)
        return _format_excerpt(recorded, start), _format_excerpt(requested, start)
    return format_value(recorded), format_value(requested)


def _format_excerpt(text: str, start: int) -> str:
    part = json.dumps(text[start : start + WINDOW_CHARS], ensure_ascii=False)
    return ("..." if start else "") + part + ("..." if start + WINDOW_CHARS < len(text) else "")


def format_value(value: object) -> str:
    """Return a JSON value as short text."""
    if value is ABSENT:
        return repr(ABSENT)
    text = json.dumps(value, ensure_ascii=False, default=dict)
    return cut_after(text, WINDOW_CHARS)


# --- why ------------------------------------------------------------------------------------------------------------


def guess_cause(history: History, address: Address, fingerprint: str, fields: Sequence[FieldDifference]) -> str:
    """Return the likely cause of a difference in one line, or ``""`` if the cause is unknown."""
    for (path, seq), intent in history.intents.items():
        if path == address[0] and seq != address[1] and intent.fp and intent.fp == fingerprint:
            what = "inserted" if seq < address[1] else "removed"
            return f"the same effect was recorded as {format_address(path, seq)}, so an effect was {what} before it"
    pointer = fields[0].pointer if fields else ""
    for start, cause in CAUSES.items():
        if pointer.startswith(start):
            return cause
    return ""


CAUSES = {
    "/model": "another model",
    "/system_prompt": "the system prompt was changed, or it depends on a value that is not recorded",
    "/tools": "the tools of the agent, or their descriptions or schemas, were changed",
    "/settings": "the model settings were changed",
    "/messages": "a prompt was changed, a hook changes the history differently, or the handler uses a value that is not "
    "recorded: the clock (use ctx.now()), a random number (use ctx.random), the environment, the order of a set",
    "/input": "the handler was edited, or computes the input from a value that is not recorded: the clock (use "
    "ctx.now()), a random number (use ctx.random), files, the environment",
    "/name": "the function was renamed, or another one is called; replay matches a call by function name and arguments",
    "/args": "the handler was edited, or computes an argument from a value that is not recorded: the clock (use "
    "ctx.now()), a random number (use ctx.random), the environment, the order of a set",
    "/kwargs": "the handler was edited, or computes an argument from a value that is not recorded",
    "/type": "the handler yields something else here",
}


def compare_child_results(redactor: Redactor, recorded: ChildResult, current: ChildResult) -> list[FieldDifference]:
    """Return the differences between the recorded and the current end of a child."""
    return list(
        compare_values(redactor.value(to_comparable_json(recorded)), redactor.value(to_comparable_json(current)))
    )


def compare_outcomes(redactor: Redactor, recorded: Value | Failure, current: Value | Failure) -> list[FieldDifference]:
    """Return the differences between the recorded and the current outcome of an effect."""
    return list(
        compare_values(
            redactor.value(encode_outcome_members(recorded)), redactor.value(encode_outcome_members(current))
        )
    )


class DivergenceErrors:
    """
    Makes the errors of a run that differs from its record.

    Args:
        history: The recorded run.
        prints: Computes the fingerprints of requested effects.
        running: The machines by path; each knows the line of the author's code where it waits.
    """

    def __init__(self, history: History, prints: Fingerprints, running: Mapping[str, object]) -> None:
        self._history = history
        self._prints = prints
        self._running = running

    def make_changed_error(self, recorded: Intent, requested: Intent, item: Item) -> ReplayDivergence:
        """Return the error for an effect that differs from the recorded one."""
        # All of them, here where the replay ends anyway: the guess at the cause says whether the same effect stands at
        # another address, so that it was inserted or removed before.
        for intent in self._history.intents.values():
            intent.fp = intent.fp or self._prints.for_effect(intent.effect)
        fields = compare_effects(RecordedRequests(self._history), recorded, requested, self._prints.redactor)
        old, new = describe_effect(recorded.effect), describe_effect(requested.effect)
        kind: DivergenceKind = "kind" if fields and fields[0].pointer == "/type" else "changed"
        hint = guess_cause(self._history, item.address, requested.fp, fields)
        said = f"{new} instead of {old}" if kind == "kind" else f"{new} changed"
        return self._make_error(kind, said, item, fields=fields, hint=hint)

    def make_start_error(self, requested: Intent) -> ReplayDivergence:
        """Return the error for a root run that starts differently from its record."""
        known = self._history.intents[ROOT]
        fields = compare_effects(RecordedRequests(self._history), known, requested, self._prints.redactor)
        said = "the run starts with different arguments"
        return make_divergence_error(self._history, ROOT, "changed", problem=said, fields=fields)

    def make_extra_effect_error(self, requested: Intent, item: Item) -> ReplayDivergence:
        """Return the error for an effect after the recorded end of a run."""
        said = f"{describe_effect(requested.effect)} is requested, but the recorded run ended before it"
        return self._make_error("extra", said, item)

    def make_undecodable_error(self, reason: str, item: Item) -> ReplayDivergence:
        """Return the error for a recorded outcome that can no longer be decoded."""
        said = f"the recorded outcome cannot be read: {reason}"
        return self._make_error("undecodable", said, item)

    def make_child_end_error(self, recorded: Value, outcome: Single, item: Item) -> ReplayDivergence:
        """Return the error for a child whose end differs from the record."""
        ours: object = outcome.value if isinstance(outcome, Value) else None
        fields = (
            compare_child_results(self._prints.redactor, recorded.value, ours) if isinstance(ours, ChildResult) else ()
        )
        said = f"the child {recorded.value.agent_id} ended differently"
        hint = "the child's handler computes its output differently"
        return self._make_error("changed", said, item, fields=fields, hint=hint)

    def make_unrecorded_error(self, requested: Intent, item: Item) -> ReplayDivergence:
        """Return the error for an unrecorded effect that must not be performed."""
        said = f"{describe_effect(requested.effect)} with this input is not recorded, has no simulated result, and must not be performed here"
        return self._make_error("extra", said, item)

    def make_different_result_error(
        self,
        recorded: Value | Failure,
        current: Value | Failure,
        item: Item,
        kind: DivergenceKind = "live_result",
    ) -> ReplayDivergence:
        """Return the error for a repeated effect or tool body with a different result."""
        fields = compare_outcomes(self._prints.redactor, recorded, current)
        said = f"{describe_effect(self._history.intents[item.address].effect)} has a different result than the recorded one"
        return self._make_error(kind, said, item, fields=fields)

    def _make_error(
        self,
        kind: DivergenceKind,
        action: str,
        item: Item,
        *,
        fields: Sequence[FieldDifference] = (),
        hint: str = "",
    ) -> ReplayDivergence:
        # The line of the author's code where the run waits is the most useful thing in the message, and only the parked
        # machine knows it.
        hint = self._find_sandbox_hint(item) or hint
        return make_divergence_error(
            self._history,
            item.address,
            kind,
            problem=action,
            agent_id=item.plan.agent.definition.id,
            location=find_waiting_location(self._running.get(item.path)),
            fields=fields,
            hint=hint,
            now_calls_model=isinstance(item.effect, CallModel),
        )

    def _find_sandbox_hint(self, item: Item) -> str:
        """Return the warning for a tool body that ran in another sandbox when recorded, or ``""``."""
        call, body = self._history.intents.get(get_starter_address(item.path)), item.plan.body
        form = {} if call is None or body is None else self._history.form(call)
        then, now = form.get("sandbox", ""), "" if body is None else get_sandbox_name(item.plan, body.tool_name)
        return (
            ""
            if not then or then == now
            else f"the program ran in {then} when it was recorded, and runs in {now or 'none'} now"
        )
