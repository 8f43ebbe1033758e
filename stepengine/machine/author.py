"""
The author's generator: started once, advanced by sends and throws, closed on every way out.

Errors that an author sees name the author's own file and line: the deepest frame outside this package, found through
``yield from`` (prototype N5).
"""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType
from typing import Any, NamedTuple

import stepengine.errors
from stepengine.errors import BadYield, HandlerError, LimitReached, StepEngineError

__all__ = ("Author", "Returned", "describe_yield", "site")

PACKAGE = stepengine.errors.__file__.removesuffix("errors.py")
AGENTS = f"{PACKAGE}_agents"
ACCEPTED = (
    "ToolCall, AgentCall, STEP, STEP_ALL, StepWith, StepText, GenerateN, Complete, Parallel, Perform or Ask "
    "(all from stepengine)"
)
MAX_CLOSES = 3


class Returned(NamedTuple):
    """A generator's return value."""

    value: Any


def _is_author(file: str) -> bool:
    return not file.startswith(PACKAGE) or file.startswith(AGENTS)


def site(steps: Any) -> str:
    """Return ``file:line`` where a parked generator waits, in the deepest frame outside this package; ``""`` if none."""
    found = ""
    while steps is not None:
        frame = getattr(steps, "gi_frame", None)
        if frame is not None and _is_author(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        steps = getattr(steps, "gi_yieldfrom", None)
    return found


def raised_at(error: BaseException) -> str:
    """Return ``file:line`` where *error* was raised, in the deepest frame outside this package; ``""`` if none."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_author(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def describe_yield(what: str, value: Any, location: str) -> BadYield:
    """Return the error for a yielded value that the machine does not know, with a hint for what was probably meant."""
    hint = ""
    if value in ("STEP", "STEP_ALL") and isinstance(value, str):
        hint = f" Yield the sentinel, not its name: `from stepengine import {value}`."
    elif isinstance(value, GeneratorType):
        hint = " Did you mean `yield from`?"
    elif hasattr(value, "__await__"):
        close = getattr(value, "close", None)
        if close is not None:
            close()
        hint = " Handlers are not async: use `yield from Perform(fn, ...)`."
    elif isinstance(value, dict) and "toolName" in value:
        hint = " Write ToolCall(name, input)."
    elif isinstance(value, type):
        hint = f" This is the class; yield an instance, such as {value.__name__}(...)."
    msg = f"{what} ({location}) yielded {_short(value)}; it may yield {ACCEPTED}.{hint}"
    return BadYield(msg, location=location)


def _short(value: Any) -> str:
    if value is None or isinstance(value, str | int | float | bool):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


class Author:
    """One generator of the author's: a handler, or a hook that needs the outside world."""

    def __init__(self, what: str, steps: Generator[Any, Any, Any]) -> None:
        self.what = what
        self.steps = steps

    @property
    def location(self) -> str:
        """Where the generator waits."""
        return site(self.steps)

    def send(self, value: Any) -> Any:
        """Go on with *value*; return what is yielded, or ``Returned``."""
        try:
            return self.steps.send(value)
        except StopIteration as stop:
            return Returned(stop.value)
        except BaseException as error:
            raise self._blame(error) from _cause(error)

    def throw(self, error: BaseException) -> Any:
        """Go on by raising *error* at the yield; return what is yielded, or ``Returned``."""
        try:
            return self.steps.throw(error)
        except StopIteration as stop:
            return Returned(stop.value)
        except BaseException as raised:
            raise self._blame(raised) from _cause(raised)

    def _blame(self, error: BaseException) -> BaseException:
        if isinstance(error, StepEngineError):
            where = raised_at(error)
            if where and f"at {where}" not in getattr(error, "__notes__", ()):
                error.add_note(f"at {where}")
            return error
        if isinstance(error, LimitReached | KeyboardInterrupt | SystemExit):
            return error
        where = raised_at(error)
        kind = type(error).__name__
        msg = f"{self.what} raised {kind}: {error}" + (f" ({where})" if where else "")
        return HandlerError(msg, kind=kind, location=where)

    def close(self) -> tuple[str, ...]:
        """Close the generator, so that its ``finally`` blocks run; return what went wrong with that, if anything."""
        problems = []
        for _ in range(MAX_CLOSES):
            try:
                self.steps.close()
            except RuntimeError as error:
                where = site(self.steps)
                if not where:
                    return (*problems, self._trouble(error))
                problems.append(f"{self.what} yielded at {where} while it was closed; that yield is not carried out")
            except BaseException as error:  # noqa: BLE001
                return (*problems, self._trouble(error))
            else:
                break
        return tuple(problems)

    def _trouble(self, error: BaseException) -> str:
        where = raised_at(error)
        return f"{self.what} raised {type(error).__name__}: {error} while it was closed" + (f" ({where})" if where else "")


def _cause(error: BaseException) -> BaseException | None:
    if isinstance(error, StepEngineError | LimitReached | KeyboardInterrupt | SystemExit):
        return error.__cause__
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    return error
