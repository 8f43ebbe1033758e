"""
``Debugger``: stands at any position of a recorded run, with the handler's own variables, and goes both ways.

A generator goes forward only, so going back is walking again from some earlier place. Which one is the business of a
``AnyWalk``: ``PausedWalk`` keeps steppers that were left behind, ``ForkedWalk`` keeps processes that wait at spaced positions.
Nothing here prints; whoever shows something takes its texts from ``SafeTexts``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import json
import mmap
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Protocol, Self

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer
from stepengine.data.state import AgentState, ChildResult, RunResult
from stepengine.debugging.texts import SafeTexts
from stepengine.engine.moments import Frame, Moment
from stepengine.engine.stepper import Stepper
from stepengine.errors import InputError, JournalError, ReplayDivergence, StepEngineError
from stepengine.journal import Journal, JournalLike, MemoryJournal, as_journal
from stepengine.journal.pending_items import open_questions
from stepengine.journal.provenance import replace_with_derived
from stepengine.journal.questions import make_outcome
from stepengine.journal.recorded_part import parse_address
from stepengine.journal.records import ROOT, Address, Result, format_address

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.options import AgentLike

MAX_EXPRESSION = 10_000
SECONDS = 2.0
MAX_TEXT = 64 * 1024
MAX_PAUSED = 9
MAX_SNAPSHOTS = 24
SPACING = 64
PARTS = 8
"""Each place costs a fork and a copy of every page that is touched after it, so a walk holds few of them."""
NAP = 0.3
"""After so many seconds a process that sleeps looks whether the others are still there, and whether it was told something."""
WRITTEN = 5.0
"""Seconds until what one process writes must stand in the memory that it shares: it was killed in the middle of it."""
MESSAGE = 1 << 24
"""The most bytes that can be handed on; memory is taken only for as many as are."""
LINE = re.compile(r"(?:(?P<file>[^:]*):)?(?P<line>[0-9]{1,9})")
HARMLESS_CALLS = frozenset(
    {"len", "str", "int", "float", "bool", "isinstance", "min", "max", "sum", "any", "all", "type"}
)
HARMLESS = (
    ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Slice,
    ast.Tuple, ast.List, ast.Load, ast.boolop, ast.unaryop, ast.cmpop, ast.BinOp, ast.operator,
)  # fmt: skip


# --- walks ----------------------------------------------------------------------------------------------------------


class AnyWalk(Protocol):
    """Moves a stepper to any position."""

    stepper: Stepper

    def move_to(self, position: int, **kept: Any) -> None:
        """
        Move ``stepper`` to *position*, or to the last position before the run differs from its record.

        Where another process goes on in this one's place, *kept* is told to it, and this does not return.

        Raises:
            ReplayDivergence: when the run differs before it; it stands at the last position that is good.
        """

    def replay_again(self) -> None:
        """Replay to the same position with new objects, which expressions have not changed."""

    def close(self) -> None:
        """Close all steppers or processes."""


def explain_no_fork() -> str:
    """Return the reason why this process cannot fork; ``""`` if it can."""
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if not hasattr(signal, "sigtimedwait"):
        return "this system has no sigtimedwait"
    # Those of `threading` alone would not do: any that runs Python may hold a lock that the new process would wait for.
    count = len(sys._current_frames())  # noqa: SLF001 - the interpreter's own list of its threads
    return f"{count} threads run, and a fork needs to be alone" if count > 1 else ""


class PausedWalk:
    """
    Moves by replaying, and stores the last few steppers at their positions for later moves.

    Args:
        stepper: Where to begin.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._paused: list[Stepper] = []

    def move_to(self, position: int, **kept: Any) -> None:
        """Move to *position* with the nearest stored stepper before it, or with a new one."""
        if position < self.stepper.position or self.stepper.diverged is not None:
            self._leave()
            before = [each for each in self._paused if each.position <= position]
            nearest = max(before, key=lambda each: each.position, default=None)
            if nearest is not None:
                self._paused.remove(nearest)
            self.stepper = nearest or self.stepper.copy_at_start()
        try:
            self.stepper.advance_to(position)
        except ReplayDivergence as error:
            self._move_before_divergence(error)
            raise

    def _move_before_divergence(self, error: ReplayDivergence) -> None:
        """Move to the last position before the divergence."""
        good = self.stepper.position - 1
        if good >= 0:
            with contextlib.suppress(ReplayDivergence):
                self.move_to(good)

    def _leave(self) -> None:
        if self.stepper.diverged is not None:
            self.stepper.close()
            return
        self._paused.append(self.stepper)
        if len(self._paused) > MAX_PAUSED:
            self._paused.pop(0).close()

    def replay_again(self) -> None:
        """Replay to the same position with a new stepper."""
        position, old = self.stepper.position, self.stepper
        self.stepper = old.copy_at_start()
        old.close()
        self.stepper.advance_to(position)

    def close(self) -> None:
        """Close all steppers."""
        for each in (*self._paused, self.stepper):
            each.close()
        self._paused.clear()


class Rewound(BaseException):
    """
    Raised in a woken process: it continues from its earlier position in place of another process.

    Attributes:
        message: The message of that process.
    """

    def __init__(self, message: Mapping[str, object]) -> None:
        super().__init__()
        self.message = message


class ForkedWalk:
    """
    Moves by forking a process every few positions; going back wakes the one that sleeps nearest before the target.

    One process is active, and has the terminal. To go back, or far forward to where a process sleeps already, it exits with
    a message: the process that sleeps nearest before the target forks another one, and sleeps again. Messages are in shared
    memory that only the active process writes; a signal wakes the other process. There are no pipes that a process could
    inherit. A process whose parent is gone exits.

    Args:
        stepper: The first stepper, at position 0.

    Attributes:
        keeps: Returns the values that every message to the next process has.
        stays: Whether this process never wakes another one, because it is discarded afterwards.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.keeps: Callable[[], Mapping[str, Any]] = dict
        self.stays = False
        self._shared = mmap.mmap(-1, MESSAGE)
        self._spacing = max(SPACING, stepper.tape.last // PARTS)
        self._first = os.getpid()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def begin(self) -> int | None:
        """Fork the first process: return ``None`` in the child, and the exit code in the parent at the end."""
        self._write({"places": [], "active": 0})
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        # The mask is this thread's. One that a library started, such as one for numbers, lets the signal through, and
        # what it does by default is to end the process.
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            return self._fork_and_sleep_here()
        finally:
            if os.getpid() == self._first:
                # Whoever sleeps above the process that ended wakes this one as well, which may be awake by then: what is still
                # pending would end it when it is let through. All others are gone, so nothing comes after it.
                while signal.sigtimedwait({signal.SIGUSR1}, 0):
                    pass
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)

    # --- sleeping -----------------------------------------------------------------------------------------------------

    def _fork_and_sleep_here(self) -> int | None:
        """Fork a process that continues, and sleep at this position; return in the child, and in the first process at the end."""
        known = self._read()
        self._write({**known, "places": [*known["places"], [os.getpid(), self.stepper.position]]})
        sys.stdout.flush()
        sys.stderr.flush()
        if not known["places"]:
            # Once: what is alive does not get less, and a collection of it takes long.
            gc.collect()
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_on_signal)
        parent, message = os.getppid(), None
        while True:
            if self._fork_active_process():
                if message is not None:
                    raise Rewound(message)
                return None
            told = self._sleep_until_message(parent)
            if "end" in told:
                return self._wait_for_forks(told["end"])
            message = told

    def _fork_active_process(self) -> bool:
        """Fork, and return True in the child, which becomes the active process."""
        if os.fork():
            return False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handlers[number])
        self._write({**self._read(), "active": os.getpid()})
        return True

    def _sleep_until_message(self, parent: int) -> Mapping[str, Any]:
        """Sleep until this process receives a message or has to end, and return the message; exit if the parent process is gone."""
        while True:
            # Whether the signal came says nothing: another thread may have got it.
            signal.sigtimedwait({signal.SIGUSR1}, NAP)
            known = self._read()
            if "end" in known:
                return known
            if known.get("to") == os.getpid():
                message: Mapping[str, object] = known["message"]
                # Taken, before it would be read a second time; whoever told it has left, so nobody else writes here.
                self._write({name: said for name, said in known.items() if name not in ("to", "message")})
                return message
            if os.getppid() != parent:
                os._exit(1)
            self._collect_ended_children(known)

    def _collect_ended_children(self, known: Mapping[str, object]) -> None:
        """Collect child processes that ended; if the active one did, end all of them with its exit code."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == known["active"]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._end(code if code >= 0 else 128 - code)

    def _end_on_signal(self, *_: object) -> None:
        """Kill the active process and end all others; a signal handler."""
        known = self._read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(known["active"], signal.SIGKILL)
        self._end(128 + signal.SIGTERM)

    def _end(self, code: int) -> None:
        known = self._read()
        if "end" not in known:
            self._write({**known, "end": code})
        os.kill(self._first, signal.SIGUSR1)

    def _wait_for_forks(self, code: int) -> int:
        """Wait for the processes forked here, then exit; the first process returns the exit code instead."""
        if os.getpid() == self._first:
            for pid, _ in self._read()["places"]:
                if pid != self._first:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if os.getpid() != self._first:
            os._exit(0)
        gc.unfreeze()
        return code

    # --- awake --------------------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        # Those that sleep read by the clock, too, and may do so while another one writes.
        until = time.monotonic() + WRITTEN
        while time.monotonic() < until:
            size = int.from_bytes(self._shared[:4], "big")
            with contextlib.suppress(ValueError):
                known: dict[str, object] = json.loads(self._shared[4 : 4 + size])
                return known
            time.sleep(0.0005)
        return {"places": [], "active": 0, "end": 1}

    def _write(self, known: Mapping[str, object]) -> None:
        text = json.dumps(known).encode()
        if len(text) > MESSAGE - 4:
            msg = f"the debugger cannot hand on {len(text)} bytes"
            raise InputError(msg)
        self._shared[:4] = bytes(4)
        self._shared[4 : 4 + len(text)] = text
        self._shared[:4] = len(text).to_bytes(4, "big")

    def _place(self, position: int) -> tuple[int, int]:
        """Return id and position of the sleeping process that is nearest at or before *position*."""
        pid, stands = max(self._read()["places"], key=lambda each: each[1] if each[1] <= position else -1)
        return pid, stands

    def move_to(self, position: int, **kept: Any) -> None:
        """Move forwards, and fork sleeping processes on the way; to move backwards, wake one of them and exit as ``leave`` does."""
        stepper = self.stepper
        if position < stepper.position or stepper.diverged is not None:
            self.leave(min(position, stepper.position), **kept)
        if not self.stays and kept and self._place(position)[1] > stepper.position + self._spacing:
            with contextlib.suppress(InputError):  # what is too long to be told is walked with
                self.leave(position, **kept)
        position = min(position, stepper.tape.last)
        while stepper.position < position:
            if not self.stays and self._should_fork_here():
                self._fork_and_sleep_here()
            try:
                stepper.advance_to(min(position, stepper.position - stepper.position % SPACING + SPACING))
            except ReplayDivergence as error:
                if stepper.position and not self.stays:
                    self.leave(stepper.position - 1, refused=error.message)
                raise

    def _should_fork_here(self) -> bool:
        """Return whether a process should sleep at this position, because none does nearby."""
        here = self.stepper.position
        if here % SPACING:
            return False
        return here - self._place(here)[1] >= self._spacing and len(self._read()["places"]) < MAX_SNAPSHOTS

    def leave(self, position: int, **kept: object) -> Never:
        """Wake the process that sleeps nearest at or before *position*, which raises ``Rewound`` with a message; exit this process."""
        pid, _ = self._place(position)
        message = {**self.keeps(), **kept, "position": position}
        self._write({**self._read(), "active": 0, "to": pid, "message": message})
        os.kill(pid, signal.SIGUSR1)
        leave_process(0)

    def finish(self, code: int) -> Never:
        """End all processes with the exit code *code*."""
        known = self._read()
        self._write({**known, "active": 0, "end": code})
        os.kill(self._first, signal.SIGUSR1)
        leave_process(0)

    def replay_again(self) -> None:
        """Do nothing: expressions with side effects run in a child process."""

    def close(self) -> None:
        """Close the stepper and the shared memory in the first process."""
        if os.getpid() == self._first:
            self.stepper.close()
            self._shared.close()


def leave_process(code: int) -> Never:
    """Exit a forked process at once, without running ``finally`` blocks of handlers."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for_child(pid: int) -> int:
    """Wait for a child process that has the terminal, and return its exit code. SIGTERM is passed on to the child."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# --- evaluating -----------------------------------------------------------------------------------------------------


def compile_expression(expression: str) -> Any:
    """
    Return the code object of an expression.

    Raises:
        InputError: for a statement, and for what is not Python, or too long.
    """
    if len(expression) > MAX_EXPRESSION:
        msg = f"the expression has {len(expression)} characters; {MAX_EXPRESSION} are the most"
        raise InputError(msg)
    try:
        return compile(expression.strip(), "<print>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        msg = f"{expression.strip()[:80]!r} is not an expression ({getattr(error, 'msg', error)}); statements are not run here"
        raise InputError(msg) from None


def is_harmless(expression: str) -> bool:
    """Return whether an expression has no side effects: names, attributes, subscripts, comparisons, some built-ins."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return True  # never run
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in HARMLESS_CALLS and not node.keywords):
                return False
        elif not isinstance(node, HARMLESS):
            return False
    return True


def call_in_fork(act: Callable[[], str], *, seconds: float = SECONDS, network: bool = False) -> str | None:
    """
    Call *act* in a forked process, and return its text, at most 64 KiB; ``None`` if it took too long and was killed.

    Its changes to objects are lost. It reaches no network unless *network* is set. Files are unprotected.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _write_result_and_exit(act, writing, network=network)
    os.close(writing)
    said: bytes | None = None
    try:
        said = _read_until_deadline(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        if said is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None if said is None else said.decode("utf-8", "replace")


def _write_result_and_exit(act: Callable[[], str], writing: int, *, network: bool) -> Never:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        for name in () if network else ("connect", "connect_ex", "sendto", "bind"):
            setattr(socket.socket, name, refuse_network)
        text = act().encode("utf-8", "replace")[:MAX_TEXT]
        while text:
            text = text[os.write(writing, text) :]
    finally:
        os._exit(0)


def refuse_network(*_: object) -> Never:
    """Raise an error; it replaces functions of ``socket`` in child processes."""
    msg = "there is no network while the debugger evaluates"
    raise OSError(msg)


def _read_until_deadline(pipe: int, deadline: float) -> bytes | None:
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
        text: What it gave, or raised, as safe text.
        raised: Whether it gave nothing: it raised, or took too long.
    """

    text: str
    raised: bool = False

    def to_text(self) -> str:
        """Return the object as a text for ``from_text``."""
        return f"{'!' if self.raised else '='}{self.text}"

    @classmethod
    def from_text(cls, text: str) -> ExpressionResult:
        """Parse a text of ``to_text``; an empty text comes from a process that took too long."""
        return cls(text[1:], text[0] == "!") if text else cls(f"<nothing came in {SECONDS:g} s>", raised=True)


def evaluate_expression(expression: str, names: Mapping[str, object], *, pretty: bool = False) -> ExpressionResult:
    """Evaluate an expression and return its value or error as safe text; ``__repr__`` methods run."""
    code, texts = compile_expression(expression), SafeTexts(runs_reprs=True)
    try:
        value = eval(code, {**names})  # noqa: S307 - the user's own expression
        return ExpressionResult("\n".join(texts.lines(value)) if pretty else texts.value(value, limit=MAX_TEXT))
    except BaseException as error:  # noqa: BLE001 - whatever it raises is what is to be seen
        return ExpressionResult(f"{type(error).__name__}: {texts.clean(_safe_error_text(error), 2_000)}", raised=True)


def _safe_error_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001
        return "<an error that cannot be shown>"


def merge_frame_names(frame: Frame) -> dict[str, Any]:
    """Return the globals and locals of a frame in one dict, so that comprehensions see both."""
    return {"__builtins__": builtins, **frame.globals, **frame.locals}


# --- telling --------------------------------------------------------------------------------------------------------


def format_outcome(outcome: Any, texts: SafeTexts) -> str:
    """Return the outcome of an effect as safe text of one line."""
    if isinstance(outcome, Failure):
        return f"{type(outcome.error).__name__}: {texts.clean(outcome.error.message, 200)}"
    value = outcome.value
    if isinstance(value, ChildResult):
        return f"child {value.agent_id} {value.status.value}: {texts.clean(value.text, 160)}"
    if isinstance(value, tuple) and value and all(isinstance(answer, Answer) for answer in value):
        return texts.clean("; ".join([answer.value or "(declined)" for answer in value]), 200)
    text = getattr(value, "text", None)
    return texts.clean(text, 200) if isinstance(text, str) and text else texts.value(value)


def summarize_moment(moment: Moment, texts: SafeTexts) -> dict[str, Any]:
    """Return the values of a moment that ``diff`` compares: messages, context, budgets, usage and locals."""
    state: AgentState = moment.state
    frame = next((each for each in moment.frames if each.kind in ("handler", "hook", "tool")), None)
    return {
        "agent": moment.agent_id,
        "messages": [f"{message.role}: {texts.clean(message.text, 100)}" for message in state.message_history],
        "context": {key: texts.named(key, value) for key, value in state.context.items()},
        "budgets": {"steps_remaining": state.steps_remaining},
        "usage": {"tokens": state.usage.total_tokens, "cost": None if state.cost is None else str(state.cost)},
        "locals": {} if frame is None else {name: texts.named(name, value) for name, value in frame.locals.items()},
    }


def diff_summaries(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences of two summaries, a line each: ``+`` added, ``-`` removed, ``~`` changed."""
    lines: list[str] = []
    if before["agent"] != after["agent"]:
        lines.append(f"~ agent {before['agent']} -> {after['agent']}")
    old, new = before["messages"], after["messages"]
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    left = min(len(old), len(new)) - same
    alike = next((n for n in range(left) if old[-1 - n] != new[-1 - n]), left)
    lines += [f"- message {n} {text}" for n, text in enumerate(old[same : len(old) - alike], same)]
    lines += [f"+ message {n} {text}" for n, text in enumerate(new[same : len(new) - alike], same)]
    for part in ("context", "budgets", "usage", "locals"):
        name = "" if part == "locals" else f"{part} "
        for key in dict.fromkeys([*before[part], *after[part]]):
            was, now = before[part].get(key), after[part].get(key)
            if key not in before[part]:
                lines.append(f"+ {name}{key} {now}")
            elif key not in after[part]:
                lines.append(f"- {name}{key} {was}")
            elif was != now:
                lines.append(f"~ {name}{key} {was} -> {now}")
    return lines


# --- the debugger ---------------------------------------------------------------------------------------------------


@frozen
class _UntilCondition:
    """The condition of ``run_until``."""

    holds: Callable[[Stepper], bool]
    expression: str = ""


def debug(engine: Engine, journal: JournalLike, *, agent: AgentLike | None = None) -> Debugger:
    """
    Return a debugger at the start of a recorded run; it goes both ways, and is a context manager.

    Args:
        engine: The engine that the agents belong to; forks run in it.
        journal: The journal, or the path of its file; it is only read.
        agent: Id or definition of the agent; by default the engine's agent that the journal names.

    Raises:
        AgentError: when the engine has no agent of the recorded id.
        JournalError: when the journal is damaged, of a newer version, or holds no run.
        ReplayDivergence: when the run begins with something else than is recorded.
    """
    return Debugger(engine, PausedWalk(engine.stepper(journal, agent=agent)), agent)


class Debugger:
    """
    Moves forwards and backwards in a recorded run. Use it as a context manager, or close it.

    Make one with ``debug``. What it gives are the real objects of the handler as it is walked through again: code
    between yields has run again, and nothing that is recorded was done again.

    Args:
        engine: The engine, for forks.
        walk: What goes.
        agent: The agent that stands in for the recorded one.

    Attributes:
        texts: What makes safe texts.
        problem: The first error that the expression of the last ``run_until`` raised, in a line; ``""`` for none.
        looked_at: At how many positions the last ``run_until`` looked.
    """

    def __init__(self, engine: Engine, walk: AnyWalk, agent: AgentLike | None = None) -> None:
        self.texts = SafeTexts()
        self.problem = ""
        self.looked_at = 0
        self._engine = engine
        self._agent = agent
        self._walk = walk
        self._inside: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all suspended handlers."""
        self._walk.close()

    # --- where --------------------------------------------------------------------------------------------------------

    @property
    def stepper(self) -> Stepper:
        """The stepper at the current position."""
        return self._walk.stepper

    @property
    def journal(self) -> Journal:
        """The journal of the run."""
        return self.stepper.tape.journal

    @property
    def position(self) -> int:
        """The current position: the number of results sent to handlers."""
        return self.stepper.position

    @property
    def last(self) -> int:
        """The last position."""
        return self.stepper.tape.last

    @property
    def followed_path(self) -> str | None:
        """The path of the child to which moves are restricted; ``None`` for all runs."""
        return self._inside

    def moment(self) -> Moment:
        """Return the state of the run whose outcome comes next at the current position."""
        return self.stepper.moment()

    def to_dict(self) -> dict[str, Any]:
        """
        Return the current position as JSON, with safe texts of the author's values.

        Its keys are ``position``, ``step``, ``address``, ``agent_id``, ``asked``, ``outcome``, ``location``, ``at``, ``messages`` (how
        many the model is shown), ``frames`` (of handlers, hooks and programs, each with its ``locals``), ``hooks``, ``variables`` (of
        programs that have ended) and what else ``debug --json`` prints of a place.
        """
        moment, texts = self.moment(), self.texts
        outcome = moment.outcome
        return {
            "position": moment.position,
            "step": moment.step,
            "address": moment.address,
            "agent_id": moment.agent_id,
            "asked": texts.clean(moment.asked, 200),
            "outcome": None if outcome is None else format_outcome(outcome, texts),
            "location": moment.location,
            "at": moment.at,
            "messages": len(moment.view),
            "frames": [
                {
                    "function": frame.function,
                    "file": frame.file,
                    "line": frame.line,
                    "kind": frame.kind,
                    "source": texts.clean(frame.source, 400),
                    **({"printed": self.printed(frame)} if frame.kind == "program" else {}),
                    "locals": {name: texts.named(name, value) for name, value in frame.locals.items()},
                }
                for frame in moment.frames
                if frame.kind != "package"
            ],
            "hooks": [{"point": h.point, "hook": h.hook, "said": texts.value(h.said)} for h in moment.hooks],
            "cost": None if moment.state.cost is None else str(moment.state.cost),
            "tokens": moment.state.usage.total_tokens,
            "variables": self.variables(),
        }

    def printed(self, frame: Frame) -> str | None:
        """Return the output of a frame's program as safe text; ``None`` if its sandbox is not installed."""
        printed = frame.printed()
        return None if printed is None else self.texts.clean(printed, MAX_TEXT)

    def variables(self) -> dict[str, str]:
        """Return the variables that programs left, by name as safe texts; nothing while a program runs."""
        found, texts = self.stepper.variables(), self.texts
        is_secret = {name for name, text in found.items() if texts.named(name, text) == "<redacted>"}
        return {name: "<redacted>" if name in is_secret else texts.clean(text) for name, text in found.items()}

    def place(self, at: int | str) -> int:
        """
        Return the position of a step such as ``3``, or of an effect such as ``"3.2#1"``; steps are those of the followed run, else of the root.

        Raises:
            JournalError: when there is no such place; it says what there is.
        """
        tape, path = self.stepper.tape, self._inside or ""
        if isinstance(at, int) or at.isdecimal():
            if len(str(at)) > 9:  # noqa: PLR2004
                at = 10**9
            found = 0 if int(at) == 0 else tape.position_of_step(int(at), path)
            if found is None:
                msg = f"the run has {tape.count_steps(path)} steps, so there is no step {at}"
                raise JournalError(msg)
            return found
        address = parse_address(at)
        found = tape.position_of(*address)
        if found is None:
            known = address in tape.history.intents and address != ROOT
            why = "never finished" if known else f"is not in {self.journal.name}"
            msg = f"effect {format_address(*address)} {why}; there are {self.last} effects with a result"
            raise JournalError(msg)
        return found

    # --- going --------------------------------------------------------------------------------------------------------

    def goto(self, at: int | str, **kept: object) -> Moment:
        """
        Move to a step or an effect, before its outcome is sent.

        Raises:
            JournalError: when there is no such place.
            ReplayDivergence: when the run differs from its record before it.
        """
        self._walk.move_to(self.place(at), **kept)
        return self.moment()

    def move_to(self, position: int, **kept: Any) -> Moment:
        """Move to a position, at most to the last one. Raises the errors of ``goto``."""
        self._walk.move_to(max(0, min(position, self.last)), **kept)
        return self.moment()

    def next(self, count: int = 1) -> Moment:
        """Move forward by *count* positions; of a followed child, of its own."""
        return self.move_to(self.position_after(count))

    def back(self, count: int = 1) -> Moment:
        """Move back by *count* positions; of a followed child, of its own."""
        return self.move_to(self.position_after(-count))

    def position_after(self, count: int) -> int:
        """Return the position *count* positions from here; if a child is followed, only its own positions count."""
        if self._inside is None:
            return max(0, min(self.position + count, self.last))
        mine = [n for n in range(self.last + 1) if self._is_of_followed_child(n)]
        ahead = [n for n in mine if n > self.position] if count > 0 else [n for n in mine[::-1] if n < self.position]
        return ahead[min(abs(count), len(ahead)) - 1] if ahead and count else self.position

    def position_of_step_after(self, count: int) -> int:
        """Return the position of the step *count* steps from here, in the followed run or the root run."""
        tape, path = self.stepper.tape, self._inside or ""
        steps = range(1, tape.count_steps(path) + 1)
        calls = [position for step in steps if (position := tape.position_of_step(step, path)) is not None]
        ahead = [p for p in calls if p > self.position] if count > 0 else [p for p in calls[::-1] if p < self.position]
        if not ahead or not count:
            return self.last if count > 0 else 0
        return ahead[min(abs(count), len(ahead)) - 1]

    def _is_of_followed_child(self, position: int) -> bool:
        address = self.stepper.tape.address_at(position)
        return address is not None and address[0] == self._inside

    def follow_child(self, path: str) -> int:
        """
        Follow a child, so that only its positions count; return its first position from here on, else its first.

        Returns:
            Where it waits: this position or the next one of its own; of a child that is over by now its first.

        Raises:
            JournalError: when there is no run at that path.
        """
        if not any(intent.path == path for intent in self.stepper.tape.history.intents.values()):
            paths = sorted({i.path for i in self.stepper.tape.history.intents.values() if i.path})
            msg = f"there is no run at {path[:80]!r}; there are: {list_names(paths, path, none='none but the root')}"
            raise JournalError(msg)
        self._inside = path
        mine = [n for n in range(self.last + 1) if self._is_of_followed_child(n)]
        return next((n for n in mine if n >= self.position), mine[0] if mine else self.position)

    def follow_all(self) -> None:
        """Follow all runs again."""
        self._inside = None

    # --- looking for something ----------------------------------------------------------------------------------------

    def run_until(self, what: str, *, backwards: bool = False) -> bool:
        """
        Move to the next, *backwards* the previous, position where a condition holds; return whether there is one.

        Without one, move to the last position, *backwards* to the first. Runs of children are stepped over unless one of them is
        followed.

        Args:
            what: ``"file.py:41"`` or ``"41"``, a line that waits; ``"@name"``, a call of a tool; ``"error"``, a failure or an
                error result; else an expression, in the variables of the handler. One that raises does not hold.
            backwards: Search towards the start.

        Raises:
            InputError: when *what* is not an expression.
        """
        wanted, start = self._parse_condition(what), self.position
        found = self._find_position_where(
            wanted, 0 if backwards else start + 1, start - 1 if backwards else self.last, backwards
        )
        self._walk.move_to(found if found is not None else (0 if backwards else self.last))
        return found is not None

    def _find_position_where(self, wanted: _UntilCondition, first: int, last: int, backwards: bool) -> int | None:  # noqa: FBT001
        self.problem, self.looked_at = "", 0
        found: int | None = None
        for position in range(first, last + 1):
            if not self._is_searchable(position):
                continue
            self._walk.move_to(position)
            self.looked_at += 1
            if self.holds(wanted):
                found = position
                if not backwards:
                    break
        if wanted.expression and not is_harmless(wanted.expression):
            self._walk.replay_again()
        return found

    def search(self, what: str, first: int, last: int, *, backwards: bool = False) -> dict[str, Any]:
        """Move from *first* to *last*, and return as JSON the first, *backwards* the last, position where *what* holds."""
        found = self._find_position_where(self._parse_condition(what), first, last, backwards)
        return {"found": found, "problem": self.problem, "looked_at": self.looked_at}

    def check(self, what: str) -> None:
        """Raise ``InputError`` unless *what* is a valid condition for ``run_until``."""
        self._parse_condition(what)

    def with_engine(self, engine: Engine) -> Debugger:
        """Return a debugger at the same position whose forks run in another engine."""
        made = Debugger(engine, self._walk, self._agent)
        made._inside = self._inside
        return made

    def _is_searchable(self, position: int) -> bool:
        if self._inside is not None:
            return self._is_of_followed_child(position)
        address = self.stepper.tape.address_at(position)
        return address is None or address[0] == ""

    def holds(self, wanted: _UntilCondition) -> bool:
        """Return whether a condition is true at the current position."""
        try:
            return bool(wanted.holds(self.stepper))
        except StepEngineError:
            raise
        except Exception as error:  # noqa: BLE001 - the expression is the user's own
            self.problem = self.problem or f"{type(error).__name__}: {self.texts.clean(_safe_error_text(error), 200)}"
            return False

    def _parse_condition(self, what: str) -> _UntilCondition:
        what = what.strip()
        line = LINE.fullmatch(what)
        if line is not None:
            file, number = line["file"] or "", int(line["line"])
            return _UntilCondition(
                lambda stepper: any(
                    frame.line == number and (frame.file.endswith(file) if file else frame.kind != "package")
                    for frame in stepper.frames()
                )
            )
        if what.startswith("@"):
            return _UntilCondition(lambda stepper: getattr(stepper.effect(), "tool_name", None) == what[1:])
        if what == "error":
            return _UntilCondition(_has_error_outcome)
        code = compile_expression(what)
        return _UntilCondition(lambda stepper: eval(code, merge_frame_names(_waiting_author_frame(stepper))), what)  # noqa: S307 - the user's own

    # --- looking at values --------------------------------------------------------------------------------------------

    def list_author_frames(self) -> list[Frame]:
        """Return the Python stack frames of the author's code at this position, the outermost first."""
        return [frame for frame in self.moment().frames if frame.kind != "package"]

    def evaluate(self, expression: str, frame: int = 0, *, pretty: bool = False) -> str:
        """
        Evaluate an expression in a frame, and return its value as safe text.

        It runs in a forked process, for at most two seconds, so that nothing it does stays. Where that is impossible it
        runs here, and unless it only looks, the handler is walked to its place again.

        Args:
            expression: An expression; the variables of the frame are its names.
            frame: The number of the frame, from the outermost one, which is the handler or hook itself.
            pretty: Show members in lines of their own.

        Raises:
            InputError: for a statement, or a frame that does not exist.
        """
        return self.evaluate_in(self.frame(frame), expression, pretty=pretty).text

    def evaluate_in(self, frame: Frame, expression: str, *, pretty: bool = False) -> ExpressionResult:
        """Evaluate an expression in a given frame; see ``evaluate``."""
        compile_expression(expression)
        names = merge_frame_names(frame)
        if not explain_no_fork():
            said = call_in_fork(lambda: evaluate_expression(expression, names, pretty=pretty).to_text())
            return ExpressionResult.from_text(said or "")
        made = evaluate_expression(expression, names, pretty=pretty)
        if not is_harmless(expression):
            self._walk.replay_again()
        return made

    def frame(self, number: int) -> Frame:
        """Return one of the author's frames by its number, from the outermost one; raise ``InputError`` if there is none."""
        frames = self.list_author_frames()
        if not 0 <= number < len(frames):
            why = f"there are {len(frames)} frames" if frames else "nothing of the author's waits here"
            msg = f"there is no frame {number}: {why}"
            raise InputError(msg)
        return frames[number]

    def locals(self, frame: int = 0) -> dict[str, str]:
        """Return the variables of a frame as safe texts; ``__repr__`` methods run only in a forked process."""
        return self.locals_of(self.frame(frame))

    def locals_of(self, frame: Frame) -> dict[str, str]:
        """Return the variables of a given frame; see ``locals``."""
        values = frame.locals

        def texts(made: SafeTexts) -> dict[str, str]:
            return {name: made.named(name, value) for name, value in values.items()}

        if explain_no_fork() or all("<" not in text for text in texts(self.texts).values()):
            return texts(self.texts)
        said = call_in_fork(lambda: json.dumps(texts(SafeTexts(runs_reprs=True))))
        with contextlib.suppress(ValueError, TypeError):
            found: dict[str, str] = json.loads(said or "")
            return found
        return texts(self.texts)

    def summary(self) -> dict[str, Any]:
        """Return the values at this position that ``diff`` compares, as JSON."""
        return summarize_moment(self.moment(), self.texts)

    def diff(self, a: int | str, b: int | str) -> list[str]:
        """
        Return the differences between two places, a line each; places are those of ``goto``. The debugger does not move.

        Messages and members that came (``+``), went (``-``) or changed (``~``), variables by name and safe text.
        """
        stood, one, two = self.position, self.place(a), self.place(b)
        known: dict[int, dict[str, object]] = {}
        for position in sorted({one, two}):
            self._walk.move_to(position)
            known[position] = self.summary()
        self._walk.move_to(stood)
        return diff_summaries(known[one], known[two])

    # --- going on from here -------------------------------------------------------------------------------------------

    async def fork(
        self,
        edit: object = None,
        *,
        models: Any = None,
        into: JournalLike | None = None,
        allow_repeat: bool = False,
        served: bool = False,
        limits: object = None,
        trust: bool | None = None,
    ) -> RunResult:
        """
        Run a copy of the recorded run from the waiting effect on, in a new journal that the result names.

        Args:
            edit: Another outcome for it, as for ``Engine.fork``; of a question that is open, its answer.
            models: Who answers from there on, such as a ``ScriptedModel``; by default the engine's own models.
            into: Where the new journal goes; by default into memory.
            allow_repeat: As for ``Engine.fork``.
            served: Whether what was recorded after it serves where it is equal, and no tool runs, as for ``Engine.fork``.
            limits: As for ``Engine.fork``.
            trust: As for ``Engine.fork``.

        Raises:
            JournalError: as ``Engine.fork``; when nothing waits here.
        """
        address = self.stepper.tape.address_at(self.position)
        if address is None:
            msg = "the run has ended here; go back to an effect, and fork there"
            raise JournalError(msg)
        options: dict[str, Any] = {"agent": self._agent, "limits": limits, "trust": trust}
        with self._engine.override(models=models) if models is not None else contextlib.nullcontext():
            if served:
                edited = self._copy_with_edit(address, edit)
                return (await self._engine.fork(edited, tools="recorded", into=into, **options)).result
            if address in self.stepper.tape.history.results:
                return await self._engine.fork(
                    self.journal,
                    at=format_address(*address),
                    edit=edit,
                    into=into,
                    allow_repeat=allow_repeat,
                    **options,
                )
            return await self._answer_on_copy(address, edit, into, options)

    def _copy_with_edit(self, address: Address, edit: object) -> Journal:
        """Return a copy of the whole journal in which the effect at *address* has the outcome *edit*."""
        history = self.stepper.tape.history
        known = history.results.get(address)
        if known is None or edit is None:
            msg = f"what is served stands after another outcome: say which one effect {format_address(*address)} has"
            raise JournalError(msg)
        made = make_outcome(history, history.intents[address], edit, known.at)
        changed = Result(known.path, known.seq, known.at, attrs.evolve(made, inputs=history.outcome(known).inputs))
        copy = MemoryJournal(redact="off", link=self.journal.link).with_rules_of(self.journal)
        records = [changed if record is known else record for record in history.records]
        replace_with_derived(copy, records, self.journal)
        return copy

    async def _answer_on_copy(self, address: Address, answer: Any, into: JournalLike | None, options: Any) -> RunResult:
        """Answer an open question in a copy of the journal, and resume the copy."""
        questions = [q.id for where, q in open_questions(self.stepper.tape.history).values() if where == address]
        if not questions or answer is None:
            msg = f"effect {format_address(*address)} has no result"
            raise JournalError(f"{msg}; say what it is with an answer" if questions else f"{msg}: fork before it")
        given = answer if isinstance(answer, list | tuple) else [answer] * len(questions)
        target = MemoryJournal(redact="off") if into is None else as_journal(into)
        if target.records():
            msg = f"{target.name} holds a run already; a fork needs a journal of its own"
            raise JournalError(msg)
        replace_with_derived(target, self.stepper.tape.history.records, self.journal)
        return await self._engine.resume(target, answers=dict(zip(questions, given, strict=False)), **options)


def _waiting_author_frame(stepper: Stepper) -> Frame:
    """Return the author's frame that waits, in which expressions are evaluated; an empty one if none waits."""
    return stepper.outermost() or Frame(function="")


def _has_error_outcome(stepper: Stepper) -> bool:
    outcome = stepper.outcome()
    return isinstance(outcome, Failure) or bool(getattr(getattr(outcome, "value", None), "is_error", False))


def make_frame(frame: FrameType) -> Frame:
    """Return a running frame as a ``Frame``, for ``breakpoint()``."""
    code = frame.f_code
    return Frame(
        function=code.co_qualname,
        file=code.co_filename,
        line=frame.f_lineno,
        locals=dict(frame.f_locals),
        globals=frame.f_globals,
    )


def lines_around(frame: Frame, most: int = 5) -> Iterator[tuple[int, str]]:
    """Yield up to *most* source lines around the current one, with their numbers, as first read."""
    import linecache

    line = frame.line
    lines = frame.text.removesuffix("\n").split("\n") if frame.kind == "program" else linecache.getlines(frame.file)
    first = max(1, line - most // 2)
    for number in range(first, min(len(lines), first + most - 1) + 1):
        yield number, lines[number - 1].rstrip("\r\n")
