"""
The author's generator: started once, advanced by sends and throws, closed on every way out.

Errors that an author sees name the author's own file and line: the innermost frame of the author's own code, found through
``yield from``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import signature
from itertools import islice
from types import CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

from stepengine.data.alike import did_you_mean, list_names
from stepengine.data.functions import discards_result, find_author_line
from stepengine.data.hooks import StepContext
from stepengine.data.json import NOT_AWAITED, NOT_YIELDED, JsonDict
from stepengine.data.programs import RunningProgram
from stepengine.data.record_sizes import cut_error_texts, find_length_problem
from stepengine.data.state import AgentState
from stepengine.data.visible import truncate_text
from stepengine.data.yields import YIELD_FROM, Parallel, Perform, Sentinel
from stepengine.errors import BadYield, HandlerError, InputError, LimitReached, StepEngineError
from stepengine.machine.protocol import By, format_yieldable_names, get_yield_rows
from stepengine.machine.signals import belongs_to_caller

ACCEPTED = format_yieldable_names()
YIELDABLES = {row.__name__: row for row in get_yield_rows("handler")}
UNKNOWN_KEYWORD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
MAX_CLOSE_ATTEMPTS = 3
"""
A generator that yields in `finally` is closed again. Nested `try` blocks need one attempt each; a loop would never
end.
"""
SHOWN_CHARS = 80
"""What an author yielded is quoted up to the width of a terminal."""
SHOWN_MEMBERS = 6
"""Enough members to recognize a dict by its keys, and still one line of an error message."""
TOOL_KEYS = ("toolName", "tool_name", "tool", "name")
INPUT_KEYS = ("input", "args", "arguments", "params")
OTHER_KINDS = {
    "STEP": "STEP",
    "STEP_ALL": "STEP_ALL",
    "STEP_TEXT": "StepText(text)",
    "GENERATE_N": "GenerateN(n)",
}
"""Kinds of dicts that are yielded in other frameworks, with the value to yield here instead; for error messages."""
PASSES_ON = Parallel.__iter__.__code__
"""The code in which a generator waits at ``yield from Parallel(...)``."""


class ReturnValue(NamedTuple):
    """A generator's return value."""

    value: Any


def find_waiting_line(steps: object, program: RunningProgram | None) -> str:
    """
    Return ``file:line`` where a parked generator waits, in the innermost frame of its author; ``""`` if none.

    Args:
        steps: The generator.
        program: The program that the generator runs in another process, such as a sandboxed handler; its line is returned.
    """
    if program is not None and program.file:
        return f"{program.file}:{program.line}"
    return find_author_line(_iterate_generator_lines(steps))


def _iterate_generator_lines(steps: object) -> Iterator[tuple[str, int]]:
    """Yield file and line at which a generator waits, then those of the generators that it delegates to."""
    while steps is not None:
        frame = getattr(steps, "gi_frame", None)
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
        steps = getattr(steps, "gi_yieldfrom", None)


def _iterate_program_lines(frame: FrameType) -> Iterator[tuple[str, int]]:
    """Yield file and line of the sandboxed program that *frame* runs, since the program has no frames in this process."""
    if frame.f_globals.get("__package__") == "stepengine.sandbox":
        found = [value for value in frame.f_locals.values() if isinstance(value, RunningProgram) and value.file]
        yield from [(value.file, value.line) for value in found]


def find_raise_line(error: BaseException) -> str:
    """Return ``file:line`` where *error* was raised, in the innermost frame of the author's code; ``""`` if none."""
    return find_author_line(_iterate_traceback_lines(error))


def _iterate_traceback_lines(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield file and line of each frame of an error, the innermost last, with those of programs."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        yield from _iterate_program_lines(trace.tb_frame)
        trace = trace.tb_next


def make_bad_yield_error(author_name: str, value: object, location: str, accepted: str = ACCEPTED) -> BadYield:
    """Return the error for an unknown yielded value, with a hint at the likely intention."""
    msg = f"{author_name} ({location}) yielded {_format_value(value)}; it may yield {accepted}.{_hint_at_yield(value)}"
    return BadYield(msg, location=location)


def find_yield_length_error(author_name: str, value: object) -> InputError | None:
    """Return the error for a yielded value that is too long for a record; ``None`` if it is not."""
    # The arguments of a function are its own, and may be anything: a record holds only what they are compared by. A sentinel
    # has no values.
    if isinstance(value, Perform | Sentinel) or not (why := find_length_problem(value)):
        return None
    msg = f"{author_name} yielded a {type(value).__name__} that is too long: {why}; write long values to a file and pass its path"
    return InputError(msg, issues=(why,))


def _hint_at_yield(value: Any) -> str:
    """Return a sentence about the value to yield instead of *value*, or ``""``; a coroutine is closed."""
    kind = type(value)  # never ask the value itself: proxies and arrays raise when they are compared or looked at
    if kind is str and value in ("STEP", "STEP_ALL"):
        return f" Yield the sentinel, not its name: `from stepengine import {value}`."
    if kind is GeneratorType:
        return " Did you mean `yield from`?"
    if hasattr(kind, "__await__"):
        if kind is CoroutineType:
            value.close()
        return " Handlers are not async: use `yield from Perform(fn, ...)`."
    if kind is dict:
        return f" Write {_suggest_yieldable(value)}."
    if issubclass(kind, type):
        return f" This is the class; yield an instance, such as {value.__name__}(...)."
    return ""


def _suggest_yieldable(value: dict[Any, Any]) -> str:
    """Return the stepengine code for a dict that a handler yielded, as handlers of other engines do."""
    kind = value.get("type")
    if type(kind) is str and kind in OTHER_KINDS:
        return OTHER_KINDS[kind]
    name = next((value[key] for key in TOOL_KEYS if type(value.get(key)) is str), None)
    if name is None:
        return "ToolCall(name, {...}) for a call of a tool"
    given: dict[Any, object] = next((value[key] for key in INPUT_KEYS if type(value.get(key)) is dict), {})
    return f"ToolCall({name!r}, {_format_value(given).removeprefix('the dict ')})"


def _format_value(value: Any) -> str:
    """Return *value* as text for an error, without calling methods of the author's classes."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        text = repr(value)
        return truncate_text(text, SHOWN_CHARS)
    if kind is Sentinel:
        return str(value)
    if kind is dict:
        return f"the dict {_format_dict(value)}"
    return f"the class {value.__name__}" if issubclass(kind, type) else f"a {kind.__name__}"


def _format_dict(value: dict[Any, object]) -> str:
    """Return the first members of a dict as source code, without calling the ``repr`` of the members' own classes."""
    members = [f"{_format_member(k)}: {_format_member(v)}" for k, v in islice(value.items(), SHOWN_MEMBERS)]
    more = [f"... {len(value) - SHOWN_MEMBERS} more"] if len(value) > SHOWN_MEMBERS else []
    return f"{{{', '.join([*members, *more])}}}"


def _format_member(value: object) -> str:
    kind = type(value)
    if kind is dict:
        return "{...}" if value else "{}"
    return ("[...]" if value else "[]") if kind is list else _format_value(value)


def make_handler_error(author_name: str, error: BaseException) -> HandlerError:
    """Return the error for an exception that the author's code *author_name* raised, with its location."""
    where = find_raise_line(error)
    kind = type(error).__name__
    msg = f"{author_name} raised {kind}: {_explain_error(error)}" + (f" ({where})" if where else "")
    return HandlerError(msg, kind=kind, location=where)


def _explain_error(error: BaseException) -> str:
    """Return the message of *error*, with a correction if a value was not unpacked or awaited."""
    said = _get_error_text_or_placeholder(error)
    if not isinstance(error, TypeError | AttributeError):
        return said
    hint = _hint_at_mistake(error, said)
    return f"{said}; {hint}" if hint and hint not in said else said


def _hint_at_mistake(error: BaseException, message: str) -> str:
    """Return a correction for a common mistake behind *error*, or ``""``, without running code of the value that caused it."""
    if "StepResult" in message:
        return YIELD_FROM
    if "coroutine" in message:
        return NOT_AWAITED
    if message.startswith("'generator' object"):
        return NOT_YIELDED
    unknown = UNKNOWN_KEYWORD.match(message)
    if unknown is not None and unknown[1] in YIELDABLES:
        return _suggest_keyword(YIELDABLES[unknown[1]], unknown[2])
    kind, name = type(getattr(error, "obj", None)), getattr(error, "name", None)
    if issubclass(kind, JsonDict) and name:
        return f"it is a dict, so write [{name!r}]; params have attributes where input_schema is a pydantic model"
    if issubclass(kind, StepContext) and name and hasattr(AgentState, name):
        return f"agent_state has it: ctx.agent_state.{name}"
    return ""


def _suggest_keyword(kind: type, unknown_word: str) -> str:
    """Return a text that lists the arguments of a yieldable, with the most similar one to *unknown_word* as a suggestion."""
    names = [p.name for p in signature(kind).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    near = did_you_mean(unknown_word, names).removeprefix("; ")
    return (
        " Valid arguments: ".join([part for part in (near, list_names(names)) if part])
        if near
        else f"valid arguments: {list_names(names)}"
    )


def _get_error_text_or_placeholder(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return "<an error that cannot be shown>"


def add_location(error: StepEngineError) -> StepEngineError:
    """Add the location in the author's code, if any, to *error* as ``where`` and as a note; return *error*."""
    where = find_raise_line(error)
    error.where = error.where or where
    if where and f"at {where}" not in getattr(error, "__notes__", ()):
        error.add_note(f"at {where}")
    if isinstance(error, BadYield) and not error.location:
        error.location = where
    return error


class Author:
    """
    A generator of the author's code: a handler, the body of a tool, or a hook that yields.

    Attributes:
        what: The name of the generator in messages.
        by: The kind of code: a handler, a tool or a hook.
        steps: The generator.
        program: The program that the generator runs in a sandbox; ``None`` if it runs none.
    """

    def __init__(self, what: str, steps: GeneratorType[Any, Any, Any], *, by: By) -> None:
        """Wrap the generator *steps*, which messages call *what*."""
        self.what = what
        self.by = by
        self.steps = steps
        self.program: RunningProgram | None = None

    @property
    def location(self) -> str:
        """The location where the generator waits."""
        return find_waiting_line(self.steps, self.program)

    @property
    def discards_answer(self) -> bool:
        """Whether the ``yield`` or ``yield from Parallel(...)`` at which the generator waits discards its value."""
        steps: Any = self.steps
        outer: Any = None
        while getattr(steps, "gi_yieldfrom", None) is not None:
            outer, steps = steps, steps.gi_yieldfrom
        # `Parallel` only passes the results on, so the line with its `yield from` decides. Those of other yieldables raise.
        if getattr(steps, "gi_code", None) is PASSES_ON and outer is not None:
            steps = outer
        frame = getattr(steps, "gi_frame", None)
        return frame is not None and discards_result(frame)

    def send(self, value: Any) -> Any:
        """
        Resume with *value*; return the next yielded value, or ``ReturnValue``.

        Raises:
            HandlerError: for an exception of the author's; a ``StepEngineError`` is raised as it is, with its location.
        """
        try:
            return self.steps.send(value)
        except StopIteration as stop:
            return ReturnValue(stop.value)
        except BaseException as error:
            if _is_passed_through(error):
                raise
            raise self._to_step_error(error) from _find_cause_to_chain(error)

    def throw(self, error: BaseException) -> Any:
        """
        Resume by raising *error* at the yield; return the next yielded value, or ``ReturnValue``.

        Raises:
            HandlerError: for an exception of the author's; a ``StepEngineError`` is raised as it is, with its location.
        """
        try:
            return self.steps.throw(error)
        except StopIteration as stop:
            return ReturnValue(stop.value)
        except BaseException as raised:
            if _is_passed_through(raised):
                raise
            raise self._to_step_error(raised) from _find_cause_to_chain(raised)

    def _to_step_error(self, error: BaseException) -> StepEngineError:
        """Return an exception of the author's as a ``StepEngineError`` with the author's line."""
        made = add_location(error) if isinstance(error, StepEngineError) else make_handler_error(self.what, error)
        return cut_error_texts(made)

    def close(self) -> tuple[str, ...]:
        """Close the generator, so that its ``finally`` blocks run; return the problems with that."""
        yielded: list[str] = []
        raised = ""
        for _ in range(MAX_CLOSE_ATTEMPTS):
            try:
                self.steps.close()
            except BaseException as error:
                if belongs_to_caller(error):
                    raise
                if self.steps.gi_frame is None:
                    raised = f"{make_handler_error(self.what, error).message} while it was closed"
                    break
                yielded.append(self.location)
            else:
                break
        said = (
            f"{self.what} yielded while it was closed, at {', '.join(yielded)}; these yields are ignored"
            if yielded
            else ""
        )
        return tuple([text for text in (said, raised) if text])


def _is_passed_through(error: BaseException) -> bool:
    """
    Return whether *error* is raised unchanged: a spent limit, which gets its location here, or an error of the caller's.

    Every other exception becomes a ``StepEngineError`` with the author's line.
    """
    if isinstance(error, LimitReached):
        error.error.where = error.error.where or find_raise_line(error)
        return True
    return belongs_to_caller(error)


def _find_cause_to_chain(error: BaseException) -> BaseException | None:
    """Return the cause for a new error: *error* without the machine's own frame, or the cause of a ``StepEngineError``."""
    if isinstance(error, StepEngineError):
        return error.__cause__
    # The first frame is the machine's own.
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
    return error
