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
from stepengine.data.functions import innermost_own, is_thrown_away
from stepengine.data.hooks import StepContext
from stepengine.data.json import NOT_AWAITED, NOT_YIELDED, JsonDict
from stepengine.data.programs import RunsProgram
from stepengine.data.state import AgentState
from stepengine.data.yields import YIELD_FROM, Sentinel
from stepengine.errors import BadYield, HandlerError, LimitReached, StepEngineError
from stepengine.machine.protocol import By, names_of_yieldables, rows_for
from stepengine.machine.signals import is_callers

__all__ = ("Author", "Returned", "describe_yield", "handler_error", "note_location", "raised_at", "site")

ACCEPTED = names_of_yieldables()
YIELDABLES = {row.__name__: row for row in rows_for("handler")}
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
"""What the members of a dict are called that stands for something to yield elsewhere, and what is written here."""


class Returned(NamedTuple):
    """A generator's return value."""

    value: Any


def site(steps: object, program: RunsProgram | None = None) -> str:
    """
    Return ``file:line`` where a parked generator waits, in the innermost of its author's frames; ``""`` if none.

    Args:
        steps: The generator.
        program: What it runs elsewhere, if it does: a handler in the sandbox has its lines there.
    """
    if program is not None and program.file:
        return f"{program.file}:{program.line}"
    return innermost_own(_parked_places(steps))


def _parked_places(steps: object) -> Iterator[tuple[str, int]]:
    while steps is not None:
        frame = getattr(steps, "gi_frame", None)
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
        steps = getattr(steps, "gi_yieldfrom", None)


def _inside(frame: FrameType) -> Iterator[tuple[str, int]]:
    """Give the place in a file whose code runs elsewhere, on behalf of a frame of this package: it has no frames here."""
    if frame.f_globals.get("__package__") == "stepengine.sandbox":
        found = [value for value in frame.f_locals.values() if isinstance(value, RunsProgram) and value.file]
        yield from [(value.file, value.line) for value in found]


def raised_at(error: BaseException) -> str:
    """Return ``file:line`` where *error* was raised, in the innermost frame of the author's own code; ``""`` if none."""
    return innermost_own(_traceback_places(error))


def _traceback_places(error: BaseException) -> Iterator[tuple[str, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        yield from _inside(trace.tb_frame)
        trace = trace.tb_next


def describe_yield(what: str, value: object, location: str, accepted: str = ACCEPTED) -> BadYield:
    """Return the error for a yielded value that the machine does not know, with a hint at what was probably meant."""
    msg = f"{what} ({location}) yielded {_short(value)}; it may yield {accepted}.{_hint(value)}"
    return BadYield(msg, location=location)


def _hint(value: Any) -> str:
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
    """Return what to write in place of a dict such as handlers of other engines yield."""
    kind = value.get("type")
    if type(kind) is str and kind in OTHER_KINDS:
        return OTHER_KINDS[kind]
    name = next((value[key] for key in TOOL_KEYS if type(value.get(key)) is str), None)
    if name is None:
        return "ToolCall(name, {...}) for a call of a tool"
    given: dict[Any, object] = next((value[key] for key in INPUT_KEYS if type(value.get(key)) is dict), {})
    return f"ToolCall({name!r}, {_short(given).removeprefix('the dict ')})"


def _short(value: Any) -> str:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        text = repr(value)
        return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
    if kind is Sentinel:
        return str(value)
    if kind is dict:
        return f"the dict {_short_dict(value)}"
    return f"the class {value.__name__}" if issubclass(kind, type) else f"a {kind.__name__}"


def _short_dict(value: dict[Any, object]) -> str:
    """Return a dict as source code, as far as it is plain and short; no ``repr`` of a member's own class is called."""
    members = [f"{_short_member(k)}: {_short_member(v)}" for k, v in islice(value.items(), SHOWN_MEMBERS)]
    more = [f"... {len(value) - SHOWN_MEMBERS} more"] if len(value) > SHOWN_MEMBERS else []
    return f"{{{', '.join([*members, *more])}}}"


def _short_member(value: object) -> str:
    kind = type(value)
    if kind is dict:
        return "{...}" if value else "{}"
    return ("[...]" if value else "[]") if kind is list else _short(value)


def handler_error(what: str, error: BaseException) -> HandlerError:
    """Return the error that says that *what*, author code, raised *error*, and where."""
    where = raised_at(error)
    kind = type(error).__name__
    msg = f"{what} raised {kind}: {_explain_error(error)}" + (f" ({where})" if where else "")
    return HandlerError(msg, kind=kind, location=where)


def _explain_error(error: BaseException) -> str:
    """Return the message of *error*; if a value was not unpacked or awaited, with what to write instead."""
    said = _error_text(error)
    if not isinstance(error, TypeError | AttributeError):
        return said
    hint = _hint_about(error, said)
    return f"{said}; {hint}" if hint and hint not in said else said


def _hint_about(error: BaseException, said: str) -> str:
    """Return what to write instead of the values that are most often yielded by mistake; the value itself is never called."""
    if "StepResult" in said:
        return YIELD_FROM
    if "coroutine" in said:
        return NOT_AWAITED
    if said.startswith("'generator' object"):
        return NOT_YIELDED
    unknown = UNKNOWN_KEYWORD.match(said)
    if unknown is not None and unknown[1] in YIELDABLES:
        return _suggest_keyword(YIELDABLES[unknown[1]], unknown[2])
    kind, name = type(getattr(error, "obj", None)), getattr(error, "name", None)
    if issubclass(kind, JsonDict) and name:
        return f"it is a dict, so write [{name!r}]; params have attributes where input_schema is a pydantic model"
    if issubclass(kind, StepContext) and name and hasattr(AgentState, name):
        return f"agent_state has it: ctx.agent_state.{name}"
    return ""


def _suggest_keyword(kind: type, word: str) -> str:
    """Return which arguments a yieldable takes, the one that *word* was probably meant for first; ``""`` if it takes none by name."""
    names = [p.name for p in signature(kind).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    near = did_you_mean(word, names).removeprefix("; ")
    return (
        " It takes: ".join([part for part in (near, list_names(names)) if part])
        if near
        else f"it takes: {list_names(names)}"
    )


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return "<an error that cannot be shown>"


def note_location(error: StepEngineError) -> StepEngineError:
    """Return *error* with the author's line that it came from, if it came from one, as its ``where`` and as a note."""
    where = raised_at(error)
    error.where = error.where or where
    if where and f"at {where}" not in getattr(error, "__notes__", ()):
        error.add_note(f"at {where}")
    if isinstance(error, BadYield) and not error.location:
        error.location = where
    return error


class Author:
    """
    One generator of the author's: a handler, a tool, or a hook that needs the outside world.

    Attributes:
        what: Its name in messages.
        by: Whose generator it is.
        steps: The generator.
        program: The program that it runs elsewhere, in a sandbox; ``None`` for none.
    """

    def __init__(self, what: str, steps: GeneratorType[Any, Any, Any], *, by: By) -> None:
        """Step *steps*, which messages name as *what*."""
        self.what = what
        self.by = by
        self.steps = steps
        self.program: RunsProgram | None = None

    @property
    def location(self) -> str:
        """Where the generator waits."""
        return site(self.steps, self.program)

    @property
    def drops_answer(self) -> bool:
        """Whether the ``yield`` at which the generator waits stands alone: what it is sent is thrown away."""
        steps: Any = self.steps
        while getattr(steps, "gi_yieldfrom", None) is not None:
            steps = steps.gi_yieldfrom
        frame = getattr(steps, "gi_frame", None)
        return frame is not None and is_thrown_away(frame)

    def send(self, value: Any) -> Any:
        """Go on with *value*; return what is yielded, or ``Returned``."""
        try:
            return self.steps.send(value)
        except StopIteration as stop:
            return Returned(stop.value)
        except BaseException as error:
            if _passes(error):
                raise
            raise self._blame(error) from _cause(error)

    def throw(self, error: BaseException) -> Any:
        """Go on by raising *error* at the yield; return what is yielded, or ``Returned``."""
        try:
            return self.steps.throw(error)
        except StopIteration as stop:
            return Returned(stop.value)
        except BaseException as raised:
            if _passes(raised):
                raise
            raise self._blame(raised) from _cause(raised)

    def _blame(self, error: BaseException) -> StepEngineError:
        return note_location(error) if isinstance(error, StepEngineError) else handler_error(self.what, error)

    def close(self) -> tuple[str, ...]:
        """Close the generator, so that its ``finally`` blocks run; return what went wrong with that, if anything."""
        yielded: list[str] = []
        raised = ""
        for _ in range(MAX_CLOSE_ATTEMPTS):
            try:
                self.steps.close()
            except BaseException as error:
                if is_callers(error):
                    raise
                if self.steps.gi_frame is None:
                    raised = f"{handler_error(self.what, error).message} while it was closed"
                    break
                yielded.append(self.location)
            else:
                break
        said = (
            f"{self.what} yielded while it was closed, at {', '.join(yielded)}; that is not carried out"
            if yielded
            else ""
        )
        return tuple([text for text in (said, raised) if text])


def _passes(error: BaseException) -> bool:
    """Return whether *error* passes through author code unchanged; for a spent limit, note where the author met it."""
    if isinstance(error, LimitReached):
        error.error.where = error.error.where or raised_at(error)
        return True
    return is_callers(error)


def _cause(error: BaseException) -> BaseException | None:
    if isinstance(error, StepEngineError):
        return error.__cause__
    # The first frame is the machine's own.
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
    return error
