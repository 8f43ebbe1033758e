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
from stepengine.data.json import ABSENT, differences, parting
from stepengine.errors import ReplayDivergence
from stepengine.journal.fingerprints import fingerprinted_part
from stepengine.journal.history import History
from stepengine.journal.records import Address, Intent, file_of, shown_address
from stepengine.machine.run import Machine
from stepengine.redaction import Redactor

__all__ = (
    "DivergenceKind",
    "Field",
    "defined_at",
    "divergence_error",
    "effect_label",
    "fields_between",
    "fields_of_effects",
    "guess",
    "parked_at",
    "request_fields",
    "shown_value",
)

DivergenceKind: TypeAlias = Literal["changed", "kind", "extra", "unused", "undecodable", "live_result"]
SHOWN_FIELDS = 12
"""With a dozen fields the message still fits on one screen; a request that differs in more was made by different code."""
WINDOW_CHARS = 200
"""About two lines of a terminal for each side: the difference and enough around it to find the place."""
WHOLE_CHARS = 60
"""A shorter text is shown whole; both sides of it fit on one line with the pointer."""


class Field(NamedTuple):
    """One difference: a JSON pointer, and both sides as text; ``"(absent)"`` where one has nothing."""

    pointer: str
    recorded: str
    now: str


def parked_at(machine: object) -> str:
    """Return where the author's code of a machine waits, as ``Machine.location``; ``""`` for what is no machine of an agent."""
    return machine.location if isinstance(machine, Machine) else ""


def defined_at(handler: object) -> str:
    """Return ``file:line`` of a handler's definition, ``""`` for what is not a function."""
    code = getattr(inspect.unwrap(handler), "__code__", None) if callable(handler) else None
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def divergence_error(
    history: History,
    address: Address,
    kind: DivergenceKind,
    *,
    asked: str,
    agent_id: str = "",
    location: str = "",
    fields: Sequence[Field] = (),
    hint: str = "",
    now_calls_model: bool = False,
) -> ReplayDivergence:
    """
    Return the error for the first difference.

    Args:
        history: What was recorded.
        address: Where they differ.
        kind: How.
        asked: What the run did, in a few words.
        agent_id: Whose handler asked.
        location: ``file:line`` of the ``yield``, or of a handler that has ended.
        fields: What differs.
        hint: The cause, as far as one can tell.
        now_calls_model: Whether the run asked for a model call here, which then belongs to the step it opens.
    """
    path, seq = address
    before = sum(1 for (p, s), i in history.intents.items() if p == path and s < seq and i.type == "model_call")
    step = before + now_calls_model
    whose = f" of {agent_id}" if agent_id else ""
    lines = [f"the run diverged from {history.name} at step {step}, effect {shown_address(*address)}{whose}: {asked}"]
    if location:
        lines.append(f"  {location}")
    lines += [f"    {f.pointer:<34} recorded {f.recorded}   now {f.now}" for f in fields[:SHOWN_FIELDS]]
    if len(fields) > SHOWN_FIELDS:
        lines.append(f"    and {len(fields) - SHOWN_FIELDS} more")
    if hint:
        lines.append(f"  cause looks like: {hint}")
    lines.append(_advice(history, path, seq, can_keep=kind == "changed" and not history.is_complete))
    return ReplayDivergence(
        "\n".join(lines), kind=kind, address=shown_address(*address), step=step, site=location, diff=fields
    )


def _advice(history: History, path: str, seq: int, *, can_keep: bool) -> str:
    file = file_of(history.name)
    lines: list[str] = []
    if can_keep:
        how = 'engine.resume(journal, on_divergence="keep")'
        lines += [
            "  to go on where the run stopped, with what is recorded:",
            f"    {how}  or  stepengine resume {file} --on-divergence keep   asks no model again",
        ]
    how = 'engine.resume(journal, on_divergence="extend")'
    lines += [
        "  to go on from here with the new code:",
        f"    {how}  or  stepengine resume {file} --on-divergence extend   keeps what is still equal and records the rest again",
    ]
    if seq > 0:
        at = shown_address(path, seq - 1)
        lines.append(
            f"    engine.fork(journal, at={at!r})  or  stepengine fork {file} --at '{at}'   goes on in another journal"
        )
    lines.append("    --stepengine-record=extend in a test, or =rewrite to record it all again")
    lines += [
        f"  to look at what led here, with the variables: stepengine debug {file}",
        "  to compare two journals: diff(a, b)  or  stepengine compare diff A B",
    ]
    return "\n".join(lines)


def effect_label(form: CallModel | Mapping[str, object]) -> str:
    """Return the kind of an effect and the name of its tool, function or agent, such as ``"tool_call read_files"``."""
    if isinstance(form, CallModel):
        return "model_call"
    members: Mapping[str, Any] = form
    name = members.get("tool_name") or members.get("name") or members.get("agent_id") or ""
    return f"{members['type']} {name}".rstrip()


# --- what differs ---------------------------------------------------------------------------------------------------


def fields_of_effects(history: History, intent: Intent, now: Intent, redactor: Redactor) -> list[Field]:
    """Return what differs between a recorded effect and the one that was asked for."""
    recorded, asked = history.form(intent), history.form(now)
    if recorded["type"] != asked["type"]:
        return [Field("/type", shown_value(recorded["type"]), shown_value(asked["type"]))]
    if recorded["type"] == "model_call":
        old = {**recorded["request"], "messages": history.messages(intent)}
        return request_fields(redactor.value(old), redactor.value(asked["request"]))
    return list(fields_between(redactor.value(fingerprinted_part(recorded)), redactor.value(fingerprinted_part(asked))))


def request_fields(recorded: Mapping[str, object], now: Mapping[str, object]) -> list[Field]:
    """Return what differs between two stored requests; messages that were inserted or removed show as such."""
    names = [n for n in ("model", "system_prompt", "tools", "tool_choice", "settings") if n in recorded or n in now]
    fields: list[Field] = []
    for name in names:
        fields += fields_between(recorded.get(name, ABSENT), now.get(name, ABSENT), f"/{name}")
    return fields + list(_messages(_comparable_messages(recorded), _comparable_messages(now)))


def _comparable_messages(request: Mapping[str, Any]) -> list[object]:
    messages = [*request.get("messages", ()), *request.get("tail", ())]
    return [{k: v for k, v in message.items() if k != "tags"} for message in messages]


def _messages(recorded: list[object], now: list[object]) -> Iterator[Field]:
    start = 0
    while start < min(len(recorded), len(now)) and recorded[start] == now[start]:
        start += 1
    end = 0
    while end < min(len(recorded), len(now)) - start and recorded[-1 - end] == now[-1 - end]:
        end += 1
    old, new = recorded[start : len(recorded) - end], now[start : len(now) - end]
    for offset in range(max(len(old), len(new))):
        theirs = old[offset] if offset < len(old) else ABSENT
        ours = new[offset] if offset < len(new) else ABSENT
        yield from fields_between(theirs, ours, f"/messages/{start + offset}")


def fields_between(recorded: object, now: object, pointer: str = "") -> Iterator[Field]:
    """Give every place where two JSON values differ."""
    for found in differences(recorded, now, pointer):
        yield Field(found.pointer or "/", *_pair(found.recorded, found.now))


def _pair(recorded: object, now: object) -> tuple[str, str]:
    """Return both sides; long texts from where they begin to differ."""
    if isinstance(recorded, str) and isinstance(now, str) and max(len(recorded), len(now)) > WHOLE_CHARS:
        start = max(0, parting(recorded, now) - WHOLE_CHARS // 3)
        return _window(recorded, start), _window(now, start)
    return shown_value(recorded), shown_value(now)


def _window(text: str, start: int) -> str:
    part = json.dumps(text[start : start + WINDOW_CHARS], ensure_ascii=False)
    return ("..." if start else "") + part + ("..." if start + WINDOW_CHARS < len(text) else "")


def shown_value(value: object) -> str:
    """Return a JSON value as short text."""
    if value is ABSENT:
        return repr(ABSENT)
    text = json.dumps(value, ensure_ascii=False, default=dict)
    return text if len(text) <= WINDOW_CHARS else f"{text[:WINDOW_CHARS]}..."


# --- why ------------------------------------------------------------------------------------------------------------


def guess(history: History, address: Address, fp: str, fields: Sequence[Field]) -> str:
    """Return the likely cause of a difference, in one line; ``""`` when nothing speaks for any."""
    for (path, seq), intent in history.intents.items():
        if path == address[0] and seq != address[1] and intent.fp and intent.fp == fp:
            what = "inserted" if seq < address[1] else "removed"
            return f"the same effect was recorded as {shown_address(path, seq)}, so one was {what} before it"
    pointer = fields[0].pointer if fields else ""
    for start, cause in CAUSES.items():
        if pointer.startswith(start):
            return cause
    return ""


CAUSES = {
    "/model": "another model",
    "/system_prompt": "the system prompt was changed, or it depends on something that is not recorded",
    "/tools": "the tools of the agent, or their descriptions or schemas, were changed",
    "/settings": "the model settings were changed",
    "/messages": "a prompt was changed, a hook changes the history differently, or the handler uses something that is not "
    "recorded: the clock (use ctx.now()), chance (use ctx.random), the environment, the order of a set",
    "/input": "the handler was edited, or computes the input from something that is not recorded: the clock (use "
    "ctx.now()), chance (use ctx.random), files, the environment",
    "/name": "the function was renamed, or another one is called; its name and its arguments are what it is known by",
    "/args": "the handler was edited, or computes an argument from something that is not recorded: the clock (use "
    "ctx.now()), chance (use ctx.random), the environment, the order of a set",
    "/kwargs": "the handler was edited, or computes an argument from something that is not recorded",
    "/type": "the handler yields something else here",
}
