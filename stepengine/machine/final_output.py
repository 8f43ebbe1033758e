"""
The final output of a run: the handler's return value, else the result of the output mode.

A run whose structured output is missing or invalid is resumed: the finished handler is not started again; the machine
appends a note, offers ``set_output``, and runs one more turn inside the remaining budget, as often as the agent's
``output_retries`` say. A final text that is the JSON which the schema asks for counts as output.
"""

from __future__ import annotations

from types import CoroutineType
from typing import Any

import attrs

from stepengine.data.functions import format_location, unwrap_function
from stepengine.data.json import JsonValue, compact, freeze, hint_at_mistake
from stepengine.data.messages import UserMessage
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.typed_values import is_model, model_to_json
from stepengine.data.visible import cut_after
from stepengine.data.wire import to_dicts
from stepengine.data.yields import StepWith
from stepengine.errors import DataError, HandlerError, ModelError
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState
from stepengine.machine.step import TurnComplete, run_step_within_budget

REMEDY = ". Return a value from the handler that fits output_schema, or pass one to set_output"
MAX_REFUSED_CHARS = 20_000
"""
About 5,000 tokens of a refused output are shown to the model: it has to see what to correct, and each attempt repeats
it.
"""
REFUSED_STATUSES = (400, 422)
"""How a provider says that it does not take a request as it stands."""


def get_final_text(run: RunState) -> str:
    """
    Return the text of a run: the handler's return value or ``set_output`` if that is text, else its last words.

    Those are the message of ``end_turn``, else the texts of the last adjacent assistant messages, joined with blank lines.
    """
    output = run.output
    if output.is_given and isinstance(output.value, str):
        return output.value
    return output.last_texts.get_joined_text()


def get_final_output(run: RunState, returned: object) -> object:
    """
    Return the output of a run by its output mode; a *returned* value wins unless it had to be validated.

    Raises:
        HandlerError: when the author's own type cannot be made of the output again, or all messages are too long for a record.
    """
    output, mode = run.output, run.plan.agent.definition.output_mode
    if mode == "structured_output":
        if returned is not None and not output.needs_validation:
            return returned
        return output.get_typed_value() if output.is_given else None
    if returned is not None:
        return returned
    if mode == "all_messages":
        messages = to_dicts(run.history.list_added_messages())
        if why := find_length_problem(messages):
            msg = (
                f"the output of agent {run.plan.agent.definition.id!r} is too long: {why}; "
                "output_mode='last_message' gives the answer alone, and result.state has all messages"
            )
            raise HandlerError(msg, kind="too_long")
        return messages
    return output.value if output.is_given else output.last_texts.get_joined_text()


def set_or_request_output(run: RunState, returned: object) -> Flow[None]:
    """
    Set the *returned* value as the output in every mode; request a missing structured output from the model.

    A handler that asked for no step is corrected by a model only where its output was refused and the run has a model
    (generator-contract:S12).

    Raises:
        HandlerError: when the returned value is too long, was not awaited, or must be recorded and is not JSON.
        OutputMissing: when there is none after all corrections and no budget is spent.
        LimitReached: when a budget of the run was spent in one of them.
    """
    if returned is not None:
        _set_returned_output(run, returned)
    if run.plan.agent.definition.output_mode != "structured_output" or _is_output_complete(run, returned):
        return
    remedy = "" if run.progress.has_asked else REMEDY
    if run.progress.has_asked or (run.output.issues and run.plan.model):
        yield from _read_or_request_output(run, returned, remedy)
    if not run.output.is_given and run.budget.reached is None:
        raise run.output.make_missing_error(remedy)


def _read_or_request_output(run: RunState, returned: object, remedy: str) -> Flow[None]:
    """Set the output from the final text; while that fails, request it as often as agent and budget allow."""
    # The final text first: a model that wrote the JSON as text has done the work, and to ask it to say it again by a
    # call costs a step (generator-contract:S12).
    if returned is None and not run.output.is_given:
        run.output.set_from_text(run.output.last_texts.get_last_text())
    for left in range(run.plan.agent.definition.output_retries, 0, -1):
        if run.output.is_given or run.budget.reached is not None or run.budget.steps_left <= 0:
            break
        yield from _request_correction(run, remedy, is_last=left == 1)
        if not run.output.is_given:
            run.output.set_from_text(run.output.last_texts.get_last_text())


def _is_output_complete(run: RunState, returned: object) -> bool:
    """Return whether no output is missing; without a schema and without steps none is needed."""
    return run.output.is_given or (
        not run.output.needs_validation and (returned is not None or not run.progress.has_asked)
    )


def _set_returned_output(run: RunState, returned: object) -> None:
    """Set the handler's return value as the output; with a schema, only if it is valid."""
    output = run.output
    if output.needs_validation:
        output.is_given = False
        if output.set_first_valid(returned):
            _require_recordable_length(run, output.value)
        return
    try:
        kept = freeze(returned)
    except Exception as error:  # noqa: BLE001 - an output that is no JSON is looked at by its own methods
        _refuse_non_json_output(run, returned, error)
        output.is_given = True
    else:
        _require_recordable_length(run, kept)
        output.set(kept)


def _refuse_non_json_output(run: RunState, returned: Any, error: Exception) -> None:
    """
    Raise for an output that is not JSON (*error* is the reason), if it is a mistake or must be recorded.

    Raises:
        HandlerError: for what was not awaited, and with a journal for whatever else is not JSON.
    """
    kind, handler = type(returned), run.plan.agent.definition.handle_steps
    where = format_location(unwrap_function(handler))
    what = f"handle_steps of agent {run.plan.agent.definition.id!r} ({where})"
    hint = hint_at_mistake(returned)
    if issubclass(kind, CoroutineType):
        returned.close()
    if hint:
        msg = f"{what} returned a {kind.__name__}{hint}"
    elif run.plan.records_output and (problem := _find_json_problem(returned, error)):
        msg = f"{what}: output is not JSON: {problem}; a run with a journal stores its output, so return JSON"
    else:
        return
    raise HandlerError(msg, kind=type(error).__name__, location=where)


def _require_recordable_length(run: RunState, output: JsonValue) -> None:
    """
    Raise for an output that is too long for a record.

    Raises:
        HandlerError: naming how long it is, and how long it may be.
    """
    # Also where nothing is recorded: a run must not end in another way because it has a journal.
    if why := find_length_problem(output):
        where = format_location(unwrap_function(run.plan.agent.definition.handle_steps))
        what = f"handle_steps of agent {run.plan.agent.definition.id!r} ({where})"
        msg = f"{what}: output is too long: {why}; write long values to a file and return its path"
        raise HandlerError(msg, kind="too_long", location=where)


def _find_json_problem(returned: object, error: Exception) -> str:
    """Return the reason why an output has no JSON form (*error* is the first one), or ``""``."""
    if not is_model(returned):
        return (
            error.message
            if isinstance(error, DataError)
            else f"a {type(returned).__name__} raised {type(error).__name__}"
        )
    try:
        model_to_json(returned)
    except DataError as found:
        return found.message
    return ""


def _request_correction(run: RunState, remedy: str, *, is_last: bool) -> Flow[None]:
    """Request the output and run one more turn; the last one forces the call. *remedy* is for handlers without steps."""
    output = run.output
    why = f" Your last output was refused: {'; '.join(output.issues)}." if output.issues else ""
    if remedy:
        why += _format_refused_output(output.refused)
    schema = run.plan.agent.output_schema
    shape = f" It must fit this JSON Schema: {compact(schema.json_schema)}" if schema is not None else ""
    note = (
        f"<system-reminder>\nThe output of this task is missing.{why} Call set_output now.{shape}\n</system-reminder>"
    )
    run.history.add([UserMessage(note, ("OUTPUT_REMINDER",))])
    plain = StepWith(tools=tuple(dict.fromkeys([*run.tools.offered, "set_output"])))
    try:
        ended = yield from _force_output_step(run, plain) if is_last else run_step_within_budget(run, plain)
        while run.budget.steps_left > 0 and not (ended or output.is_given):
            ended = yield from run_step_within_budget(run, plain)
    except ModelError as error:
        raise output.make_missing_error(remedy) from error


def _format_refused_output(value: object) -> str:
    """Return a refused output as text for the model, which did not write it; empty if it is not JSON."""
    try:
        text = compact(freeze(value))
    except DataError:
        return ""
    return f" It was: {cut_after(text, MAX_REFUSED_CHARS)}"


def _force_output_step(run: RunState, plain: StepWith) -> Flow[TurnComplete]:
    """Run a step that forces ``set_output``, or an ordinary step if the provider refuses to; return whether the turn is complete."""
    try:
        return (yield from run_step_within_budget(run, attrs.evolve(plain, tool_choice="set_output")))
    except ModelError as error:
        if error.status not in REFUSED_STATUSES:
            raise
    return (yield from run_step_within_budget(run, plain))
