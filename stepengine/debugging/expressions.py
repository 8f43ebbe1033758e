"""
Expressions and conditions of a debugger's user: compiling, evaluating, and running functions in a forked process.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Never

from stepengine.data.outcomes import Failure
from stepengine.debugging.texts import SafeTexts
from stepengine.engine.moments import Frame
from stepengine.engine.stepper import Stepper
from stepengine.errors import InputError

MAX_EXPRESSION = 10_000
SECONDS = 2.0
MAX_TEXT = 64 * 1024
LINE = re.compile(r"(?:(?P<file>[^:]*):)?(?P<line>[0-9]{1,9})")
READING_CALLS = frozenset({"len", "str", "int", "float", "bool", "isinstance", "type"})
"""Built-in functions that do not iterate over their argument: ``sum`` and others would consume an iterator."""
READING_NODES = (
    ast.Expression, ast.Name, ast.Attribute, ast.Constant, ast.BoolOp, ast.UnaryOp, ast.Slice,
    ast.Tuple, ast.List, ast.Load, ast.boolop, ast.unaryop, ast.cmpop, ast.BinOp, ast.operator,
)  # fmt: skip


def compile_expression(expression: str) -> Any:
    """
    Return the code object of an expression; raise ``InputError`` for a statement, invalid or too long text.

    Raises:
        InputError: when the text is a statement, is not Python, or is too long.
    """
    if len(expression) > MAX_EXPRESSION:
        msg = f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION} are allowed"
        raise InputError(msg)
    try:
        return compile(expression.strip(), "<print>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        msg = f"{expression.strip()[:80]!r} is not an expression ({getattr(error, 'msg', error)}); the debugger runs no statements"
        raise InputError(msg) from None


def has_read_only_syntax(expression: str) -> bool:
    """
    Return whether an expression has only names, attributes, numeric indexes, operators and built-ins that consume no iterator.

    ``in`` counts only before a tuple, list or string literal. Invalid text counts as read-only, since it never runs. The classes of the
    values may still run any code, for example in a property.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return True  # never run
    return all(_is_read_only_node(node) for node in ast.walk(tree))


def _is_read_only_node(node: ast.AST) -> bool:
    """Return whether a syntax node reads values without consuming an iterator or inserting a key."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in READING_CALLS and not node.keywords
    if isinstance(node, ast.Compare):
        # A test of membership consumes an iterator.
        pairs = zip(node.ops, node.comparators, strict=True)
        containers = [right for op, right in pairs if isinstance(op, ast.In | ast.NotIn)]
        return all(isinstance(each, ast.Tuple | ast.List | ast.Constant) for each in containers)
    if isinstance(node, ast.Subscript):
        # A `defaultdict` inserts a missing key.
        return isinstance(node.slice, ast.Slice) or _is_integer_literal(node.slice)
    return isinstance(node, READING_NODES)


def _is_integer_literal(node: ast.expr) -> bool:
    """Return whether a node is an integer literal, also with a sign."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int)


def call_in_fork(act: Callable[[], str], *, seconds: float = SECONDS, allows_network: bool = False) -> str | None:
    """
    Call *act* in a forked process, and return its text, at most 64 KiB; ``None`` if it took too long, ``""`` if the process ended early.

    Its changes to objects are lost. It has no network access unless *allows_network* is set. Files are unprotected.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _write_result_to_pipe_and_exit(act, writing, allows_network=allows_network)
    os.close(writing)
    said: bytes | None = None
    try:
        said = _read_all_until_deadline(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        if said is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None if said is None else said.decode("utf-8", "replace")


def _write_result_to_pipe_and_exit(act: Callable[[], str], writing: int, *, allows_network: bool) -> Never:
    """Write the text of *act* to a pipe, without network access unless *allows_network* is set, and exit the process."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        for name in () if allows_network else ("connect", "connect_ex", "sendto", "bind"):
            setattr(socket.socket, name, refuse_network)
        text = act().encode("utf-8", "replace")[:MAX_TEXT]
        while text:
            text = text[os.write(writing, text) :]
    finally:
        os._exit(0)


def refuse_network(*_: object) -> Never:
    """Raise an error; it replaces functions of ``socket`` in child processes."""
    msg = "the debugger allows no network while it evaluates an expression"
    raise OSError(msg)


def _read_all_until_deadline(pipe: int, deadline: float) -> bytes | None:
    """Return all bytes of a pipe until it is closed; ``None`` after the deadline."""
    said = bytearray()
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, MAX_TEXT)
        if not part:
            return bytes(said)
        said += part


class ExpressionResult(NamedTuple):
    """
    The value or error of an expression, as safe text.

    Attributes:
        text: The value or the error, as safe text.
        raised: Whether there is no value: the expression raised, or took too long.
    """

    text: str
    raised: bool = False

    def to_text(self) -> str:
        """Return the object as a text for ``from_text``."""
        return f"{'!' if self.raised else '='}{self.text}"

    @classmethod
    def from_text(cls, text: str) -> ExpressionResult:
        """Parse a text of ``to_text``. An empty text means that the process exceeded its time limit or ended early."""
        return cls(text[1:], text[0] == "!") if text else cls(f"<no result within {SECONDS:g} s>", raised=True)


def evaluate_expression(expression: str, names: Mapping[str, object], *, pretty: bool) -> ExpressionResult:
    """Evaluate an expression in this process, and return its value or error as safe text; ``__repr__`` methods run."""
    code, texts = compile_expression(expression), SafeTexts(runs_reprs=True)
    try:
        value = eval(code, {**names})  # noqa: S307 - the user's own expression
        return ExpressionResult(
            "\n".join(texts.format_lines(value)) if pretty else texts.format_value(value, limit=MAX_TEXT)
        )
    except BaseException as error:  # noqa: BLE001 - the user sees any error
        return ExpressionResult(
            f"{type(error).__name__}: {texts.clean(format_error_safely(error), 2_000)}", raised=True
        )


def format_error_safely(error: BaseException) -> str:
    """Return the text of an error; a placeholder if its ``__str__`` raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001
        return "<an error that cannot be shown>"


def merge_frame_variables(frame: Frame) -> dict[str, Any]:
    """Return the globals and locals of a frame in one dict, so that comprehensions see both."""
    return {"__builtins__": builtins, **frame.globals, **frame.locals}


def parse_condition(condition: str) -> Callable[[Stepper], object]:
    """
    Return the test of a position for a condition of ``Debugger.run_until``.

    Raises:
        InputError: when *condition* is not an expression.
    """
    condition = condition.strip()
    line = LINE.fullmatch(condition)
    if line is not None:
        parts, number = Path(line["file"] or "").parts, int(line["line"])
        return lambda stepper: any(
            frame.line == number
            and (Path(frame.file).parts[-len(parts) :] == parts if parts else frame.kind != "package")
            for frame in stepper.frames()
        )
    if condition.startswith("@"):
        return lambda stepper: getattr(stepper.effect(), "tool_name", None) == condition[1:]
    if condition == "error":
        return _has_error_outcome
    code = compile_expression(condition)

    def evaluate_in_outermost_frame(stepper: Stepper) -> object:
        """Return the value of the condition in the outermost frame of the author's code."""
        frame = stepper.outermost_frame() or Frame(function="")
        return eval(code, merge_frame_variables(frame))  # noqa: S307 - the user's own expression

    return evaluate_in_outermost_frame


def _has_error_outcome(stepper: Stepper) -> bool:
    """Return whether the next outcome is a failure or an error result of a tool."""
    outcome = stepper.outcome()
    return isinstance(outcome, Failure) or bool(getattr(getattr(outcome, "value", None), "is_error", False))
