"""
``run_script``: run a handler against a list of expected yields and replies.

There is no engine and no event loop, and no effect is performed. ``Walk`` runs the handler; this module compares and reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from attrs import frozen

from stepengine.data.json import ABSENT
from stepengine.data.state import AgentState
from stepengine.data.visible import cut_after
from stepengine.data.yields import YIELDABLES, Perform
from stepengine.errors import DataError, PerformError
from stepengine.testing.walk import Handler, Walk, is_same_yield

__tracebackhide__ = True  # a failed test ends at its author's line

MAX_SHOWN = 300


@frozen
class _ScriptLine:
    """One line of a script: the expected yield and its answer."""

    expected: Any
    reply: Any = ABSENT

    def matches(self, yielded: object) -> bool:
        """Return True if *yielded* matches the line: an equal value, an instance, or accepted by a function."""
        if isinstance(self.expected, YIELDABLES):
            return is_same_yield(self.expected, yielded)
        if isinstance(self.expected, type):
            return isinstance(yielded, self.expected)
        return bool(self.expected(yielded))

    def make_reply(self, yielded: object) -> Any:
        """Return the reply of the script to *yielded*; a function is called with it."""
        return self.reply(yielded) if callable(self.reply) else self.reply


def run_script(
    agent: Handler,
    script: Iterable[object],
    prompt: str = "",
    params: object = None,
    *,
    state: AgentState | None = None,
    model: str | None = None,
) -> object:
    """
    Run a handler against a script of expected yields and replies, and return its result.

    Each item of the script is ``(expected, reply)``, or ``expected`` alone where nothing needs to be sent, such as ``STEP``.

    - ``expected``: the value that is yielded; a class such as ``ToolCall``, of which it is an instance; or a function that
      receives the yielded value and returns whether it matches.
    - ``reply``: what ``Walk.send`` takes: a ``StepResult`` or its short form; an exception, which is thrown at the yield;
      or a function that receives the yielded value and returns one of these.

    Args:
        agent: A generator function of one context, a definition that has one, or a tool that yields.
        script: The expected yields and their replies, in order.
        prompt: ``ctx.prompt``.
        params: ``ctx.params``; for a tool, the input of its call.
        state: ``ctx.agent_state``.
        model: ``ctx.model``; the definition's by default.

    Raises:
        AssertionError: when the yields differ from the script; its text is the whole exchange.
        DataError: when an item is invalid, or a reply does not fit the yielded value.
        DefinitionError: when *agent* has no handler.
        BaseException: when the handler raises it; the exchange is a note.
    """
    lines = [_parse_script_item(item, index) for index, item in enumerate(script)]
    walk = Walk(agent, prompt, params, state, model=model)
    try:
        for index, line in enumerate(lines):
            _require_expected_yield(walk, lines, index)
            _send_or_throw_reply(walk, line)
        _require_handler_end(walk, lines)
    except BaseException as error:
        if walk.raised is error or not isinstance(error, AssertionError):
            error.add_note(_format_exchange_log(walk, lines))
        raise
    finally:
        # A handler that yields while it is closed has its own error elsewhere; the exchange is what counts here.
        with suppress(RuntimeError):
            walk.close()
    return walk.returned


def _parse_script_item(item: object, index: int) -> _ScriptLine:
    """Return an item of a script as a line; raise ``DataError`` for an invalid item."""
    parts = item if isinstance(item, tuple) else (item,)
    if 1 <= len(parts) <= 2 and (isinstance(parts[0], YIELDABLES) or callable(parts[0])):  # noqa: PLR2004
        return _ScriptLine(*parts)
    msg = (
        f"item {index} of the script is {item!r}; write (expected, reply) or expected alone, where expected is a "
        "yieldable, a class of them, or a function that returns whether a yield fits"
    )
    raise DataError(msg)


def _require_expected_yield(walk: Walk, lines: list[_ScriptLine], index: int) -> None:
    """Raise ``AssertionError`` unless the handler waits with the yield that the line at *index* expects."""
    if walk.finished:
        raise _make_script_error(
            walk, lines, f"the handler returned {_shorten_repr(walk.returned)} before the end of the script"
        )
    if not lines[index].matches(walk.asked):
        raise _make_script_error(walk, lines, "the handler yielded something else")


def _require_handler_end(walk: Walk, lines: list[_ScriptLine]) -> None:
    """Raise ``AssertionError`` unless the handler has ended with the script."""
    if not walk.finished:
        raise _make_script_error(walk, lines, "the script has ended, but the handler continues")


def _send_or_throw_reply(walk: Walk, line: _ScriptLine) -> None:
    """Send the reply of *line* to the handler, or throw it if it is an exception."""
    reply = line.make_reply(walk.asked)
    # A bare yield gets the error of a failed ``Perform`` as a value; it raises every other error.
    is_value = isinstance(walk.asked, Perform) and isinstance(reply, PerformError)
    if isinstance(reply, BaseException) and not is_value:
        walk.throw(reply)
    else:
        walk.send(reply)


def _make_script_error(walk: Walk, lines: list[_ScriptLine], problem: str) -> AssertionError:
    """Return the error for a *problem*, with the log of yields and replies."""
    return AssertionError(f"{problem}\n{_format_exchange_log(walk, lines)}")


def _format_exchange_log(walk: Walk, lines: list[_ScriptLine]) -> str:
    """Return the log: matched lines, the expected and the actual yield, and the remaining lines."""
    done = walk.history
    told = [
        f"  {i}  {_shorten_repr(e.asked)}\n     <- {_shorten_repr(e.answer, line=lines[i])}" for i, e in enumerate(done)
    ]
    shown = ["exchange so far:", *(told or ["  nothing"])]
    rest = lines[len(done) :]
    expected = _describe_expected(rest[0].expected) if rest else "the end of the handler"
    shown.append(f"expected at {len(done)}:\n  {expected}")
    where = f"   ({walk.location})" if walk.location else ""
    shown.append(f"came:\n  {_describe_actual(walk)}{where}")
    shown += [f"  {i}  {_describe_expected(line.expected)}" for i, line in enumerate(rest[1:], len(done) + 1)]
    if len(rest) > 1:
        shown.insert(len(shown) - len(rest) + 1, "left after that:")
    return "\n".join(shown)


def _describe_actual(walk: Walk) -> str:
    """Return in words whether the handler yielded, returned or raised, and its value."""
    if walk.raised is not None:
        return f"the handler raised {_shorten_repr(walk.raised)}"
    return f"the handler returned {_shorten_repr(walk.returned)}" if walk.finished else _shorten_repr(walk.asked)


def _describe_expected(expected: Any) -> str:
    """Return in words the yield that a line of the script expects."""
    if isinstance(expected, type):
        return f"any {expected.__name__}"
    if isinstance(expected, YIELDABLES):
        return _shorten_repr(expected)
    return f"a yield that {getattr(expected, '__qualname__', repr(expected))} accepts"


def _shorten_repr(value: object, line: _ScriptLine | None = None) -> str:
    """Return the ``repr`` of *value*, cut; an answer is shown as the script has it, not as a ``StepResult``."""
    if line is not None and not isinstance(value, BaseException) and not callable(line.reply):
        value = line.reply
    said = repr(value)
    return cut_after(said, MAX_SHOWN, f"... ({len(said)} characters)")
