"""Descriptions of a recorded run: its steps, effects and compactions, as JSON and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.choices import question_to_json
from stepengine.data.codec import plain, to_json
from stepengine.data.effects import KINDS
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Value
from stepengine.data.questions import Answer
from stepengine.data.state import ChildResult
from stepengine.data.visible import to_ascii_json
from stepengine.data.waits import wait_to_json
from stepengine.errors import InputError
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.journal.reading_limit import estimate_json_size
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import ROOT, format_address
from stepengine.journal.sources import JournalLike, as_journal

if TYPE_CHECKING:
    from stepengine.data.messages import Message
    from stepengine.journal.compactions import Compaction
    from stepengine.journal.history import History
    from stepengine.journal.reading_limit import ReadingLimit
    from stepengine.journal.records import Intent, Result


def describe_run(journal: JournalLike, *, step: str = "") -> dict[str, Any]:
    """
    Return a recorded run, or one step of it, as JSON: agent, prompt, status, output, usage, cost and effects.

    Args:
        journal: The run.
        step: The number of a step of the root run, or the address of an effect such as ``"3.2#1"``. The result then has the
            complete request, the totals before it and its effects.

    Raises:
        InputError: when the run has no such step.
        JournalError: when the journal cannot be read.
    """
    history = as_journal(journal).history()
    shown = list(_iterate_effects(history))
    chosen = _get_step_effects(history, shown, step) if step else shown
    told = _step_header_to_dict(history, shown, chosen) if step else _run_header_to_dict(history)
    return {**told, "effects": [_effect_to_dict(history, entry) for entry in chosen]}


def render_text(journal: JournalLike, *, step: str = "") -> str:
    """
    Return a recorded run, or one step of it, as text in the format of test snapshots.

    Args:
        journal: The run.
        step: The number of a step, or the address of an effect such as ``"3.2#1"``.

    Raises:
        InputError: when the run has no such step.
        JournalError: when the journal cannot be read.
    """
    from stepengine.journal.show import make_run_tree, redact_and_shorten_tree, render, render_effects

    opened = as_journal(journal)
    history = opened.history()
    shown = list(_iterate_effects(history))
    chosen = _get_step_effects(history, shown, step) if step else []
    tree = redact_and_shorten_tree(make_run_tree(opened), keeps_long_texts=bool(step))
    lines, text = (
        (
            _step_request_lines(_step_header_to_dict(history, shown, chosen)),
            render_effects(tree, {e.address for e in chosen}),
        )
        if step
        else (_run_heading_lines(_run_header_to_dict(history)), render(tree))
    )
    return "\n".join([*lines, text.removesuffix("\n")])


def describe_compactions(journal: JournalLike) -> dict[str, Any]:
    """
    Return the compactions of a recorded run as JSON: the messages that each one left out, and their replacements.

    Raises:
        JournalError: when the journal cannot be read.
    """
    from stepengine.journal.compactions import find_compactions

    history = as_journal(journal).history()
    limit = history.blobs.limit.copy_with_zero_count()
    return {
        "journal": history.name,
        "compactions": [_compaction_to_dict(history, found, limit) for found in find_compactions(history)],
    }


def render_compactions(journal: JournalLike) -> str:
    """
    Return the compactions of a recorded run as text.

    Raises:
        JournalError: when the journal cannot be read.
    """
    from stepengine.journal.show import redact_and_shorten_tree

    return "\n".join(_compaction_lines(redact_and_shorten_tree(describe_compactions(journal), keeps_long_texts=True)))


@frozen
class _ShownEffect:
    """
    One effect of a run.

    Attributes:
        address: Its number, with the path of its run for a child's.
        step: The model step of its run in which it happened, from 1; 0 before the first one.
        kind: The kind of effect, such as ``"model_call"``; a key of ``KINDS`` in ``data.effects``.
        what: The kind and the name of the called model, tool or agent.
        intent: Its record.
        result: The record of its outcome; ``None`` without one.
    """

    address: str
    step: int
    kind: str
    what: str
    intent: Intent
    result: Result | None


def _iterate_effects(history: History) -> Iterator[_ShownEffect]:
    """Yield every effect of a run and its children, in the order in which they started."""
    steps: dict[str, int] = {}
    for address, intent in history.intents.items():
        if address == ROOT:
            continue
        kind = intent.type
        steps[intent.path] = steps.get(intent.path, 0) + (kind == "model_call")
        name = history.model(intent) if kind == "model_call" else history.form(intent).get(KINDS[kind].name, "")
        what = f"{kind} {name}".rstrip()
        yield _ShownEffect(
            format_address(*address), steps[intent.path], kind, what, intent, history.results.get(address)
        )


# --- as JSON ----------------------------------------------------------------------------------------------------------


def _run_header_to_dict(history: History) -> dict[str, object]:
    """Return the data of a run without its effects: agent, status, prompt, output, questions, usage and cost."""
    from stepengine.journal.show import compute_spending, find_root_end, get_run_id, get_run_status

    root, head = history.root, history.head
    spending = compute_spending(history)
    usage, cost = spending.usage, spending.cost
    questions = [question_to_json(question) for _, question in find_open_questions(history).values()]
    ended = find_root_end(history)
    waits = find_waits(history) if get_run_status(history) == "suspended" else []
    return {
        "journal": history.name,
        "run": get_run_id(history),
        "agent": root["agent_id"],
        "status": get_run_status(history),
        "created": history.started or None,
        "parent": plain(head.parent) if head is not None else None,
        "packages": {} if head is None else plain(head.packages),
        "prompt": root.get("prompt", ""),
        "params": plain(root.get("params")),
        "output": None if ended is None else plain(ended.output),
        "text": "" if ended is None else ended.text,
        "questions": [] if history.is_complete else questions,
        "waits_for": [wait_to_json(one) for one in waits],
        "milliseconds": history.duration_ms,
        "usage": {**attrs.asdict(usage), "total_tokens": usage.total_tokens},
        "cost": None if cost is None else str(cost),
        "warnings": [] if ended is None else [plain(text) for text in ended.warnings],
    }


def _effect_to_dict(history: History, entry: _ShownEffect) -> dict[str, Any]:
    """Return an effect as a dict: address, step, name, time, attempts and outcome; without the request of a model call."""
    told = {
        "address": entry.address,
        "path": entry.intent.path,
        "step": entry.step,
        "kind": entry.kind,
        "what": entry.what,
        "at": None if entry.result is None else entry.result.at,
        "attempts": [] if entry.result is None else plain(list(entry.result.attempts)),
        "outcome": _outcome_to_dict(history, entry),
        "came": _format_full_outcome(history, entry),
    }
    if entry.intent.program_line:
        told["program_line"] = entry.intent.program_line
    if entry.kind != "model_call":
        told["effect"] = plain(history.form(entry.intent))
    return told


def _outcome_to_dict(history: History, entry: _ShownEffect) -> dict[str, Any] | None:
    """Return the error or value of an effect as JSON; ``None`` without a result."""
    if entry.result is None:
        return None
    outcome = history.outcome(entry.result)
    if isinstance(outcome, Failure):
        return {"error": {"type": type(outcome.error).__name__, "message": plain(str(outcome.error))}}
    return {"value": plain(outcome.value)}


def _format_full_outcome(history: History, entry: _ShownEffect) -> str:
    """Return the outcome of an effect as text, in full: a reply with its calls, a result, an error or answers."""
    if entry.result is None:
        return "(no result yet)"
    outcome = history.outcome(entry.result)
    if isinstance(outcome, Failure):
        return f"{type(outcome.error).__name__}: {outcome.error}"
    value = outcome.value
    if isinstance(value, ModelReply):
        calls = [f"-> {call.tool_name}({_format_json(call.input)})" for call in value.tool_calls]
        return " ".join([part for part in (value.text, *calls) if part])
    if isinstance(value, ToolResult):
        return ("error: " if value.is_error else "") + value.text
    if isinstance(value, ChildResult):
        return f"{value.status.value}: {value.text if value.output is None else _format_json(value.output)}"
    if isinstance(value, tuple) and value and isinstance(value[0], Answer):
        return "; ".join([answer.value or "(declined)" for answer in value])
    return value if isinstance(value, str) else _format_json(value)


def _format_json(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _get_step_effects(history: History, effects: list[_ShownEffect], step: str) -> list[_ShownEffect]:
    """
    Return the effects of one step of the root, or one effect; raise ``InputError`` if there is no such step.

    Raises:
        InputError: when there is no such step.
    """
    if step.isdecimal():
        chosen = [e for e in effects if not e.intent.path and str(e.step) == (step.lstrip("0") or "0")]
    else:
        chosen = [e for e in effects if e.address == step]
    if not chosen:
        last = max([e.step for e in effects if not e.intent.path], default=0)
        msg = f"{history.name} has no step {step!r}; use a step from 0 to {last}, or an effect such as '#0' or '3.2#1'"
        raise InputError(msg)
    return chosen


def _step_header_to_dict(
    history: History, effects: list[_ShownEffect], chosen: list[_ShownEffect]
) -> dict[str, object]:
    """Return the address of a step, the totals before it, and its complete model request; ``None`` without one."""
    request = history.form(chosen[0].intent)["request"] if chosen[0].kind == "model_call" else None
    if request is not None:
        messages = [*RecordedRequests(history).get_messages(chosen[0].intent), *request.get("tail", ())]
        request = {**plain(request), "messages": plain(messages)}
    return {
        "journal": history.name,
        "step": chosen[0].step,
        "address": chosen[0].address,
        "so_far": _sum_earlier_effects(history, effects[: effects.index(chosen[0])]),
        "request": request,
    }


def _sum_earlier_effects(history: History, before: list[_ShownEffect]) -> dict[str, object]:
    """Return the numbers of effects, ended model calls and tokens before a step, and the time of the run until then in milliseconds."""
    replies = [history.outcome(e.result) for e in before if e.kind == "model_call" and e.result is not None]
    usages = [r.value.usage for r in replies if isinstance(r, Value) and r.value.usage is not None]
    return {
        "effects": len(before),
        "model_calls": len(replies),
        "tokens": sum([usage.total_tokens for usage in usages]),
        "milliseconds": max(
            [history.compute_time_since_start(e.result.at) for e in before if e.result is not None], default=0
        ),
    }


def _compaction_to_dict(history: History, compaction: Compaction, limit: ReadingLimit) -> dict[str, Any]:
    """Return a compaction as JSON, and count the size of its messages towards *limit*, which may raise."""
    with history.convert_damage_errors(history.intents[compaction.address]):
        left_out, instead = [
            [_message_to_dict_within_limit(message, limit) for message in messages]
            for messages in (compaction.left_out, compaction.instead)
        ]
    return {
        "address": format_address(*compaction.address),
        "path": compaction.address[0],
        "step": compaction.step,
        "tokens": compaction.removed_tokens,
        "tokens_instead": compaction.replacement_tokens,
        "left_out": left_out,
        "instead": instead,
        "unrecorded_results": compaction.unrecorded,
    }


def _message_to_dict_within_limit(message: Message, limit: ReadingLimit) -> dict[str, Any]:
    """Return a message as JSON and text, and count its size towards a limit that may raise."""
    from stepengine.tools.bundled.history_tool import message_to_text

    told = {"role": message.role, "text": message_to_text(message), "message": to_json(message)}
    # A journal may leave out the same messages at each step.
    limit.count_bytes_or_raise(estimate_json_size(told))
    return told


# --- as text ----------------------------------------------------------------------------------------------------------


def _compaction_lines(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the compactions of a run as lines of text: the messages left out and their replacements."""
    if not description["compactions"]:
        yield "Nothing was left out of the conversation."
    for one in description["compactions"]:
        left, instead = one["left_out"], one["instead"]
        gone = f"{_format_message_count(left)} of {one['tokens']} tokens left out"
        came = (
            f"{_format_message_count(instead)} of {one['tokens_instead']} tokens in their place"
            if instead
            else "nothing in their place"
        )
        yield f"before {one['address']}, step {one['step']}: {gone}, {came}"
        yield from _message_lines(left, "left out")
        if one["unrecorded_results"]:
            yield f"  {one['unrecorded_results']} more results, of the run or its children, that no request contained"
        yield from _message_lines(instead, "in their place")


def _format_message_count(messages: Sequence[object]) -> str:
    """Return the number of messages in words, such as ``"3 messages"``."""
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"


def _message_lines(messages: Sequence[Mapping[str, Any]], heading: str) -> Iterator[str]:
    """Yield lines of text for messages: role and tags after *heading*, then the indented text."""
    for message in messages:
        tags = "".join([f" {tag}" for tag in message["message"].get("tags", ())])
        yield f"  {heading}: {message['role']}{tags}"
        yield from [f"    {line}".rstrip() for line in message["text"].splitlines()]


def _run_heading_lines(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about a run as a whole: agent, time, fork, waits and warnings."""
    yield f"{header['agent']}  run {header['run']} of {header['created']}, {header['milliseconds'] / 1000:.1f} s"
    if header["parent"]:
        yield f"  forked from run {header['parent']['run']} at {header['parent']['at']}"
    for wait in header["waits_for"]:
        if wait["kind"] != "question":
            yield f"  it {wait['said']}"
    yield from [f"  warning: {text}" for text in header["warnings"]]


def _step_request_lines(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield the totals before a step, and the model request of the step, as lines of text."""
    so_far, request = header["so_far"], header["request"]
    counts = f"{so_far['effects']} effects, {so_far['model_calls']} model calls, {so_far['tokens']} tokens"
    yield f"before {header['address']}: {counts}, {so_far['milliseconds'] / 1000:.1f} s"
    if request is None:
        return
    yield f"sent to {request['model']}"
    if request.get("system_prompt"):
        yield from ["  system:", *[f"    {line}" for line in request["system_prompt"].splitlines()]]
    for message in request["messages"]:
        yield f"  {message.get('type', 'message')}:"
        yield from [f"    {line}" for line in _request_message_text(message).splitlines()]
    names = [str(spec.get("name", "")) for spec in request.get("tools", ())]
    if names:
        yield f"  tools: {', '.join(names)}"
    yield "came back"


def _request_message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message of a request; parts without text are JSON."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text")
        texts.append(
            text if isinstance(text, str) else to_ascii_json({k: v for k, v in part.items() if v not in (None, "")})
        )
    return "\n".join(texts)
