"""
The output of a run: what the handler returned, else what the output mode says (generator-contract 2).

A run whose structured output is missing or invalid is resumed once: the finished handler is not started again; the
machine appends a note, offers ``set_output``, and runs one more turn inside the remaining budget (S12).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.wire import to_dicts
from stepengine.data.yields import StepWith
from stepengine.errors import HandlerError, ModelError, OutputMissing
from stepengine.machine.live import Live
from stepengine.machine.step import budgeted_step

__all__ = ("output_of", "settle_output", "text_of")

Steps = Generator[Any, Any, Any]


def text_of(live: Live) -> str:
    """
    Return the text of a run: what the handler returned or ``set_output`` set, when that is text; else its last words.

    Those are the message of ``end_turn``, else the text of the last assistant message of this run that has any (X63).
    """
    return live.output if live.has_output and isinstance(live.output, str) else _last_words(live)


def _last_words(live: Live) -> str:
    if live.last_word:
        return live.last_word
    for index in range(len(live.record) - 1, live.start - 1, -1):
        message = live.record[index]
        if type(message) is AssistantMessage and message.text.strip():
            return message.text
    return ""


def output_of(live: Live, returned: Any) -> Any:
    """
    Return the output of a run whose handler returned *returned*; a value other than ``None`` is the output.

    Raises:
        HandlerError: when the author's own type cannot be made of the output again.
    """
    plan = live.plan
    if live.agent.output_mode == "structured_output":
        if returned is not None and plan.validate_output is None:
            return returned
        return _decoded(live) if live.has_output else None
    if returned is not None:
        return returned
    if live.agent.output_mode == "all_messages":
        return to_dicts(live.added())
    return live.output if live.has_output else _last_words(live)


def _decoded(live: Live) -> Any:
    decode = live.plan.decode_output
    if decode is None:
        return live.output
    try:
        return decode(live.output)
    except Exception as error:
        msg = f"the output of agent {live.agent.id!r} cannot be read back: {type(error).__name__}: {error}"
        raise HandlerError(msg, kind=type(error).__name__) from error


def settle_output(live: Live, returned: Any) -> Steps:
    """
    Make sure that a run that has to give a structured output has one.

    A handler that asked for no step is not corrected by a model, which the run may not even have (requirements X64).

    Raises:
        OutputMissing: when there is none after one more turn.
        LimitReached: when a budget of the run was spent in that turn.
    """
    if returned is not None:
        _take_returned(live, returned)
    if live.agent.output_mode != "structured_output" or _is_settled(live, returned) or live.limit is not None:
        return
    issues = live.output_issues
    if not live.has_asked:
        if live.plan.validate_output is None:
            return
        raise _missing(live, issues)
    try:
        yield from _one_more_turn(live)
    except ModelError as error:
        raise _missing(live, live.output_issues or issues) from error
    if not live.has_output:
        raise _missing(live, live.output_issues or issues)


def _is_settled(live: Live, returned: Any) -> bool:
    return live.has_output or (returned is not None and live.plan.validate_output is None)


def _take_returned(live: Live, returned: Any) -> None:
    if live.plan.validate_output is None:
        try:
            live.set_output(freeze(returned))
        except Exception:  # noqa: BLE001 - an output that is no JSON is looked at by its own methods
            live.has_output = True
        return
    live.has_output = False
    try:
        live.set_output(live.check_output(returned))
    except OutputMissing as error:
        live.output_issues = error.issues or (error.message,)


def _one_more_turn(live: Live) -> Steps:
    why = f" Your last output was refused: {'; '.join(live.output_issues)}." if live.output_issues else ""
    schema = live.plan.output_json_schema
    shape = f" It must fit this JSON Schema: {compact(schema)}" if schema is not None else ""
    note = (
        f"<system-reminder>\nThe output of this task is missing.{why} Call set_output now.{shape}\n</system-reminder>"
    )
    live.add([UserMessage(note, ("OUTPUT_REMINDER",))])
    names = tuple(dict.fromkeys([*live.offered, "set_output"]))
    over, ended = StepWith(tools=names), False
    while live.steps_remaining > 0 and not (ended or live.has_output):
        ended = yield from budgeted_step(live, over)


def _missing(live: Live, issues: tuple[str, ...]) -> OutputMissing:
    why = f"; the last attempt was refused: {'; '.join(issues)}" if issues else ""
    msg = f"agent {live.agent.id!r} ended without the structured output that it must give{why}"
    return OutputMissing(msg, issues=issues)
