"""
What effects and outcomes look like in a record: member names are Python field names (design 10).

Pure data only: functions are stored as their names, a value that is not JSON as the name of its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never, cast

import attrs

from stepengine.data.codec import STORED, bare, bare_any, restored, restored_any
from stepengine.data.effects import Ask, CallModel, CallTool, Perform, Spawn
from stepengine.data.fields import within
from stepengine.data.json import freeze, thaw
from stepengine.data.outcomes import Failure, Value, quick_value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import DataError, StepEngineError
from stepengine.runtime.performer import Item

__all__ = (
    "bare",
    "comparable",
    "describe",
    "is_repeatable",
    "must_last",
    "name_of",
    "outcome_members",
    "outcome_of",
    "questions_of",
    "restored",
    "storable",
    "touched_world",
)

Form = Mapping[str, Any]
COMPARED_CHILD = ("agent_id", "run_id", "status", "output")


def describe(item: Item) -> CallModel | Form:
    """Return the stored form of an effect; a model call stays as it is, it is stored as a difference to earlier ones."""
    effect = item.effect
    match effect:
        case CallModel():
            return effect
        case CallTool():
            form: dict[str, Any] = {"type": "CallTool", "tool_name": effect.tool_name, "input": effect.input}
            form |= {"tool_call_id": effect.tool_call_id, "source": effect.source}
            return form | ({"idempotent": True} if is_repeatable(item) else {})
        case Spawn():
            form = {"type": "Spawn", "agent_id": effect.agent_id, "prompt": effect.prompt, "params": effect.params}
            return form | ({"tool_call_id": effect.tool_call_id} if effect.tool_call_id else {})
        case Perform(call=call):
            form = {"type": "Perform", "name": name_of(call.fn), "args": [_argument(a) for a in call.args]}
            form["kwargs"] = {k: _argument(v) for k, v in call.kwargs.items()}
            return form | ({"idempotent": True} if call.is_idempotent else {})
        case Ask():
            form = {"type": "Ask", "questions": [_asked(q) for q in effect.questions], "purpose": effect.purpose}
            return form | ({"tool_call_id": effect.tool_call_id} if effect.tool_call_id else {})
        case _ as never:
            assert_never(never)


def _asked(question: Question) -> dict[str, Any]:
    """Return the stored form of a question, without what is made anew whenever it is shown."""
    return bare(question if question.remember is None else attrs.evolve(question, remember=None))


def _argument(value: Any) -> Any:
    try:
        return freeze(value)
    except DataError:
        pass
    if STORED.get(type(value).__name__) is type(value):
        return bare(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None and not isinstance(value, type):
        return freeze(dump(mode="json"))
    return {"type": "object", "name": name_of(value if hasattr(value, "__qualname__") else type(value))}


def name_of(thing: Any) -> str:
    """Return the name of a function or class without its module: the same file may be loaded under several names."""
    thing = getattr(thing, "func", thing)
    name: str = getattr(thing, "__qualname__", type(thing).__qualname__)
    return name.rpartition("<locals>.")[2]


def is_repeatable(item: Item) -> bool:
    """Return whether an effect may simply happen again when nobody knows whether it has (reliability R3)."""
    effect = item.effect
    if type(effect) is CallTool:
        binding = item.plan.tools.get(effect.tool_name)
        notes = binding.spec.annotations if binding is not None else None
        return notes is not None and (notes.idempotent or notes.read_only)
    return effect.call.is_idempotent if type(effect) is Perform else True


def must_last(item: Item) -> bool:
    """Return whether it has to outlive a crash that an effect was begun: it cannot happen again, may be undone, or people see it."""
    effect = item.effect
    if type(effect) is Ask:
        return True
    if type(effect) is CallTool:
        binding = item.plan.tools.get(effect.tool_name)
        if binding is not None and binding.spec.category == "write":
            return not binding.spec.annotations.read_only
    return not is_repeatable(item)


def touched_world(form: Any) -> bool:
    """Return whether a recorded effect may have changed something outside that a second time would change again."""
    return isinstance(form, Mapping) and form["type"] in ("CallTool", "Perform") and not form.get("idempotent")


def questions_of(form: Any) -> tuple[Question, ...]:
    """Return the questions of a recorded ``Ask``; none of any other effect."""
    if isinstance(form, Mapping) and form.get("type") == "Ask":
        return tuple([restored(q) for q in form["questions"]])
    return ()


# --- outcomes -------------------------------------------------------------------------------------------------------


def storable(error: StepEngineError) -> StepEngineError:
    """
    Return *error*, or its nearest ancestor that can be stored, with the same message.

    A subclass that only this process knows cannot be read back; whoever catches it must see the same live and on replay.
    """
    kind = type(error)
    if STORED.get(kind.__name__) is kind:
        return error
    known = cast("type[StepEngineError]", next(c for c in kind.__mro__ if STORED.get(c.__name__) is c))
    named: Callable[..., StepEngineError] = known
    made = named(error.message, **{f: getattr(error, f) for f in known.fields})
    made.__cause__ = error
    return made


def outcome_members(outcome: Value | Failure) -> dict[str, Any]:
    """Return the members of a result record that an outcome makes."""
    if type(outcome) is Failure:
        members = {"error": bare(Failure(outcome.error))["error"]}
    else:
        value = cast("Value", outcome).value
        if isinstance(value, ChildResult):
            value = _plain_child(value)
        members = {"value": _stored_value(value)}
    if outcome.inputs:
        members["inputs"] = [bare(message) for message in outcome.inputs]
    return members


def _stored_value(value: Any) -> Any:
    try:
        return bare_any(value)
    except DataError as error:
        raise within(error, ".value") from None


def outcome_of(members: Mapping[str, Any]) -> Value | Failure:
    """
    Return the outcome that a result record holds.

    Raises:
        DataError: when it does not fit the codec any more.
    """
    inputs = tuple([restored(message) for message in members["inputs"]]) if "inputs" in members else ()
    at = members["at"]
    if "error" in members:
        return Failure(restored({"type": "Failure", "error": members["error"]}).error, at, inputs)
    try:
        return quick_value(restored_any(members["value"]), at, inputs)
    except DataError as error:
        raise within(error, ".value") from None


def _plain_child(child: ChildResult[Any]) -> ChildResult[Any]:
    """Return a child's result with an output that is JSON; in process the child is run again, so it is only compared."""
    output = _argument(child.output)
    error = storable(child.error) if child.error is not None else None
    return attrs.evolve(child, output=output, error=error)


def comparable(child: ChildResult[Any]) -> Form:
    """
    Return what two results of one child are compared by.

    Lines and paths in error texts may differ. So may what follows from the rest by rules that journals outlive: the text, and
    the error that names a spent budget. What a parent does with these is compared by itself.
    """
    data = bare(_plain_child(child))
    same = {name: data.get(name) for name in COMPARED_CHILD}
    error = None if child.status is RunStatus.MAX_STEPS else child.error
    return {**thaw(same), "error": type(error).__name__ if error is not None else None}
