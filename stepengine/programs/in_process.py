"""
A stand-in for the sandbox, for tests: programs run by this Python, in a thread of this process.

It is not a wall. What a program has is what it has in the sandbox, as far as that takes no more than handing out other names; whoever
wants to get around that will. So that a program does here what it does there, its calls, waits and answers come in the same order.
"""

from __future__ import annotations

import ast
import builtins
import datetime as dt
import importlib
import inspect
import os
import posixpath
import queue
import random
import sys
import threading
import time as times
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from pathlib import PosixPath, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import Any

from stepengine.errors import ToolError
from stepengine.programs.check_workers import StopSignal
from stepengine.programs.checking import CheckedProgram, ProgramProblem
from stepengine.programs.sandbox import BUILTINS, MODULES
from stepengine.programs.sessions import (
    PRINTED,
    SLEEP,
    CallAnswer,
    ProgramCall,
    ProgramEnded,
    ProgramRaised,
    ProgramSession,
    ProgramWaiting,
    Turn,
)
from stepengine.programs.stubs import ALIASES, OURS, Stubs

__all__ = ("InProcessSandbox",)

TICK, VALUE, RETURN = f"{OURS}tick", f"{OURS}value", f"{OURS}return"
FILE = "<python-input-"
"""How the sandbox calls its programs: with the number of each in its session."""
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | annotations.compiler_flag
GRACE = 1.0
"""Seconds that a program has to notice that it was ended."""
LONGEST_SLEEP = 9_223_372_036.854774
"""Seconds; the sandbox waits no longer, and never for less than none."""
MOST_EQUAL = 3
"""Lines of a traceback that are shown of a function which calls itself."""


class InProcessSandbox:
    """
    Runs programs in this process and by this Python, for tests of programs that you trust, without the extra ``programs``.

    Calls, waits and results are those of the sandbox, so that a journal which was made with one is replayed with the other, for
    programs that do not depend on what differs:

    - **Nothing holds a program that wants out**: it is for programs that a test has written, never for a model's.
    - ``ProgramLimits(memory=)`` does not hold. ``seconds`` ends loops and calls of functions that Python runs; a thread in a long
      call of something built in is left behind.
    - Of the checks before a program runs, those of the text are done; what only the sandbox's own checker knows is not.
    - The language and the standard library are those of this Python, cut down to the names that the sandbox has; words of errors,
      addresses, and the order of sets of texts are Python's.
    """

    name = f"in-process/{sys.version_info[0]}.{sys.version_info[1]}"

    def check(self, code: str, stubs: Stubs, known: Collection[str], stop: StopSignal | None = None) -> CheckedProgram:
        """Return why this Python cannot read a program, if so."""
        try:
            _compile(code, FILE)
        except SyntaxError as error:
            place = max(1, error.lineno or 1), max(1, error.offset or 1)
            return CheckedProgram(
                (ProgramProblem(*place, f"the sandbox cannot read this: {error.msg}"),), is_whole=False
            )
        except (RecursionError, MemoryError):
            return CheckedProgram(
                (ProgramProblem(1, 1, "the program is nested too deeply to be read"),), is_whole=False
            )
        return CheckedProgram(is_whole=False)

    def open(
        self, functions: Collection[str], *, seconds: float, memory: int, printed: int, seed: int
    ) -> ProgramSession:
        """Return a new session; it takes no memory limit."""
        return _InProcessSession(functions, seconds, printed, seed)


class _InProcessSession:
    def __init__(self, functions: Collection[str], seconds: float, most_printed: int, seed: int) -> None:
        self._seconds = seconds
        self._process = os.getpid()
        self._world = _World(most_printed, seed)
        self._program: _Program | None = None
        self._is_closed = False
        self._fed = 0
        self.printed = ""
        own = {"print": self._world.print, "open": _make_refusing("open"), "__import__": self._world.load}
        own |= {each.__name__: _synchronous(each) for each in (map, filter)}
        given = {name: getattr(builtins, name) for name in BUILTINS if hasattr(builtins, name)}
        self._globals: dict[str, Any] = {
            "__builtins__": {**given, "__build_class__": builtins.__build_class__, **own},
            "__name__": "__main__",
            "__file__": "/program.py",
            TICK: self._world.tick,
            RETURN: _Returned,
            **{alias: getattr(builtins, error) for alias, error in ALIASES.items()},
            **{name: _Function(self, name) for name in functions},
        }
        self._world.sleep = self._slept
        self._world.run = self._awaited

    def feed(self, code: str, now: datetime) -> Turn:
        self._check_process()
        self._fed += 1
        self._world.begin(now)
        self._program = program = _Program(code, f"{FILE}{self._fed}>", self._globals, self._world)
        if self._is_closed:  # looked at behind the line above: who closes it looks for the program after it has said so
            self._world.stop = "closed"
        program.start()
        return self._turn(program)

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> Turn:
        self._check_process()
        program = self._program
        if program is None:
            return ProgramRaised("RuntimeError", "the program was ended", 0, is_fatal=True)
        self._world.now = now
        program.answers.put(answers)
        return self._turn(program)

    def close(self) -> None:
        self._is_closed = True
        program, self._program = self._program, None
        if program is not None and self._process == os.getpid():
            program.end("closed")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object = None) -> _Future:
        """Return a call of the program that is under way."""
        if self._program is None:
            raise _Stopped
        return self._program.called(name, args, kwargs, result)

    def _slept(self, delay: Any, result: object = None) -> _Future:
        if not isinstance(delay, int | float):
            msg = f"{type(delay).__name__!r} object cannot be interpreted as a number of seconds"
            raise TypeError(msg)
        if delay != delay:  # noqa: PLR0124 - as only NaN is
            msg = "Invalid delay: NaN (not a number)"
            raise ValueError(msg)
        return self.call(SLEEP, (float(min(max(0, delay), LONGEST_SLEEP)),), {}, result)

    def _awaited(self, main: Awaitable[Any]) -> Any:
        """Do what ``asyncio.run`` does, also inside of what is not a coroutine."""
        if self._program is None:
            raise _Stopped
        return self._program.until(self._program.future(main))

    def _turn(self, program: _Program) -> Turn:
        try:
            turn = program.turns.get(timeout=self._seconds)
        except queue.Empty:
            program.end("TimeoutError")
            turn = ProgramRaised("TimeoutError", "TimeoutError", 0, is_fatal=True)
        self.printed = "".join(self._world.out)
        if not isinstance(turn, ProgramWaiting):
            self._program = None
            program.join(GRACE)
        return turn

    def _check_process(self) -> None:
        if self._process != os.getpid():
            msg = "a program cannot go on in a process that was forked after it had begun; begin a new one"
            raise ToolError(msg)


# --- what a program has -------------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends a program; one that swallows it is told again at its next line that repeats."""


class _Returned(BaseException):
    """What ``return`` at the top of a program raises, with its value."""


class _World:
    """What is outside of a program: its clock, its chance, what it prints, its modules, and whether it is to end."""

    sleep: Callable[..., Any]
    run: Callable[[Awaitable[Any]], Any]

    def __init__(self, most_printed: int, seed: int) -> None:
        self.now = datetime.fromtimestamp(0, dt.UTC)
        self.stop = ""
        self.out: list[str] = []
        self._most_printed = most_printed
        self._size = 0
        self._chance = random.Random(seed)  # noqa: S311 - of a program
        self._modules: dict[str, ModuleType] = {}

    def begin(self, now: datetime) -> None:
        self.now, self.out, self._size, self.stop = now, [], 0, ""

    def tick(self) -> bool:
        if self.stop:
            raise _Stopped
        return True

    def print(self, *values: object, sep: str | None = None, end: str | None = None, **_: object) -> None:
        self.tick()
        text = (" " if sep is None else sep).join([str(value) for value in values]) + ("\n" if end is None else end)
        self._size += len(text.encode(errors="replace"))
        if self._size > self._most_printed:
            self.stop = PRINTED
            raise _Stopped
        self.out.append(text)

    def load(
        self,
        name: str,
        _globals: object = None,
        _locals: object = None,
        members: Collection[str] | None = (),
        *_: object,
    ) -> ModuleType:
        """Do what ``import`` does."""
        if name == "_strptime":  # imported by `strptime` itself, in the name of whoever calls it
            return importlib.import_module(name)
        if name not in MODULES:
            msg = f"No module named {name!r}"
            raise ModuleNotFoundError(msg)
        return self._module(name) if members else self._module(name.partition(".")[0])

    def _module(self, name: str) -> ModuleType:
        if name not in self._modules:
            real = importlib.import_module(name)
            made = self._modules[name] = ModuleType(name)
            for member in MODULES[name]:
                if hasattr(real, member):
                    setattr(made, member, getattr(real, member))
            for member, value in self._own(name).items():
                setattr(made, member, value)
        return self._modules[name]

    def _own(self, name: str) -> dict[str, Any]:
        """Return the members of a module that are not Python's own."""
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "asyncio": lambda: {"gather": _gather, "sleep": self.sleep, "run": self.run},
            "datetime": lambda: _dates(lambda: self.now),
            "time": self._time,
            "random": lambda: {"Random": _chance(self._chance), **_methods(self._chance)},
            "os": lambda: {**OF_OS, "path": self._module("os.path")},
            "os.path": _paths,
            "posixpath": _paths,
            "pathlib": lambda: {"Path": _Path},
            "sys": lambda: OF_SYS,
        }
        return made[name]() if name in made else {}

    def _time(self) -> dict[str, Any]:
        def seconds() -> float:
            return self.now.timestamp()

        def nanoseconds() -> int:
            return int(self.now.timestamp() * 1e9)

        def at(part: Callable[[float], Any]) -> Callable[..., Any]:
            return lambda given=None: part(seconds() if given is None else given)

        def shown(layout: str, moment: Any = None) -> str:
            return times.strftime(layout, times.gmtime(seconds()) if moment is None else moment)

        of_now = {each: nanoseconds if each.endswith("_ns") else seconds for each in MODULES["time"] if each in CLOCKS}
        parts = {each: at(getattr(times, part)) for each, part in PARTS.items()}
        return {
            **of_now,
            **parts,
            "asctime": lambda given=None: times.asctime(times.gmtime(seconds()) if given is None else given),
            "strftime": shown,
            "sleep": _make_refusing("time.sleep"),
        }


CLOCKS = frozenset(
    {each + end for each in ("time", "monotonic", "perf_counter", "process_time", "thread_time") for end in ("", "_ns")}
)
PARTS = {"gmtime": "gmtime", "localtime": "gmtime", "ctime": "ctime"}
OF_FILES = (
    *("chdir", "listdir", "makedirs", "mkdir", "remove", "rename", "replace", "rmdir", "scandir", "stat", "unlink"),
    "walk",
)
OF_PATHS = (
    *("exists", "getatime", "getctime", "getmtime", "getsize", "isdir", "isfile", "isjunction", "islink", "ismount"),
    *("lexists", "realpath", "samefile"),
)
UNSUPPORTED = frozenset({"os.getenv", "os.urandom", "time.sleep"})


def _make_refusing(name: str) -> Callable[..., Any]:
    """Return what stands for a function that reaches out."""

    def refuse(*args: object, **_: object) -> Any:
        if name in UNSUPPORTED:
            msg = f"{name!r} is not supported in this environment"
            raise RuntimeError(msg)
        path = posixpath.join("/", str(args[0])) if args else "/"
        msg = f"Permission denied: {path!r}"
        raise PermissionError(msg)

    return refuse


OF_OS = {
    **{name: _make_refusing(f"os.{name}") for name in (*OF_FILES, "getenv", "urandom")},
    "getcwd": lambda: "/",
    "getcwdb": lambda: b"/",
}
OF_MACHINE = ("base_exec_prefix", "base_prefix", "exec_prefix", "executable", "prefix")
OF_SYS = {**dict.fromkeys(OF_MACHINE, ""), "argv": ["program.py"], "stdout": object(), "stderr": object()}


def _paths() -> dict[str, Any]:
    def whole(path: str) -> str:
        return posixpath.normpath(posixpath.join("/", path))

    def relative(path: str, start: str = "/") -> str:
        return posixpath.relpath(whole(path), whole(start))

    unchanged = dict.fromkeys(("expanduser", "expandvars"), lambda path: path)
    return {**{each: _make_refusing(each) for each in OF_PATHS}, **unchanged, "abspath": whole, "relpath": relative}


_Path = type("PosixPath", (PurePosixPath,), {})
for _name in set(dir(PosixPath)) - set(dir(PurePosixPath)):
    if not _name.startswith("_"):
        setattr(_Path, _name, _make_refusing(_name))
_Path.cwd = classmethod(lambda cls: cls("/"))  # type: ignore[attr-defined]


def _methods(chance: random.Random) -> dict[str, Any]:
    names = MODULES["random"] - {"Random"}
    return {name: getattr(chance, name) for name in names if hasattr(chance, name)}


def _chance(chance: random.Random) -> type[random.Random]:
    """Return a class of generators that begin with the program's chance where nothing is said."""

    class Random(random.Random):
        def __init__(self, x: Any = None) -> None:
            super().__init__(chance.getrandbits(64) if x is None else x)

    return Random


def _dates(now: Callable[[], datetime]) -> dict[str, Any]:
    """Return classes of dates whose clock is the program's; a date of Python's own is one of them, too."""

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, cls.__mro__[1])

    class date(dt.date, metaclass=Kind):  # noqa: N801 - as programs see it
        @classmethod
        def today(cls) -> Any:
            return cls(*now().timetuple()[:3])

        def __repr__(self) -> str:
            return f"datetime.{super().__repr__()}"

    class datetime(dt.datetime, metaclass=Kind):  # noqa: N801 - as programs see it
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            at = now().replace(tzinfo=None) if tz is None else now().astimezone(tz)
            return cls.combine(at.date(), at.timetz())

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        @classmethod
        def utcnow(cls) -> Any:
            msg = "type object 'datetime.datetime' has no attribute 'utcnow'"
            raise AttributeError(msg)

        def __repr__(self) -> str:
            return f"datetime.{super().__repr__()}"

    return {"date": date, "datetime": datetime}


class _Function:
    """A tool or an agent, as a program has it."""

    __slots__ = ("_name", "_session")

    def __init__(self, session: _InProcessSession, name: str) -> None:
        self._session = session
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> _Future:
        return self._session.call(self._name, _copy_value(args), _copy_value(kwargs))

    def __repr__(self) -> str:
        return self._name


def _copy_value(value: Any, around: frozenset[int] = frozenset()) -> Any:
    """Return a value as it is now: what a call was given does not change when the program goes on."""
    if id(value) in around:
        return _itself(value)
    if isinstance(value, dict):
        around |= {id(value)}
        return {key: _copy_value(inner, around) for key, inner in value.items()}
    if type(value) in (list, tuple, set):
        around |= {id(value)}
        return type(value)([_copy_value(inner, around) for inner in value])
    return value


def _itself(value: object) -> str:
    """Return what stands in the place of a value that holds itself."""
    return "{...}" if isinstance(value, dict) else "[...]"


def _synchronous(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builtin that calls what it is given by itself, where no call can wait."""

    def refuse(function: Any, *rest: Any) -> Any:
        if isinstance(function, _Function):
            msg = f"external function '{function!r}' cannot suspend in this synchronous context"
            raise RuntimeError(msg)  # noqa: TRY004 - as the sandbox does
        return builtin(function, *rest)

    return refuse


# --- calls, and who waits for them --------------------------------------------------------------------------------------


class _Future:
    """What may be awaited, any number of times."""

    def __init__(self, program: _Program, result: object = None) -> None:
        self.program = program
        self.result = result
        self.error: BaseException | None = None
        self.is_done = False
        self.waiting: list[_Task | _Gathered] = []

    def __await__(self) -> Generator[_Future, None, Any]:
        if not self.is_done:
            yield self
        if self.error is not None:
            raise self.error
        return self.result

    def settle(self, result: object = None, error: BaseException | None = None) -> None:
        if self.is_done:
            return
        self.is_done = True
        self.error = error
        self.result = result
        for each in self.waiting:
            each.woken(self)

    def __repr__(self) -> str:
        return "<coroutine external_future>"


class _Task(_Future):
    """A coroutine that goes on by itself."""

    def __init__(self, program: _Program, coroutine: Any) -> None:
        super().__init__(program)
        self.coroutine = coroutine

    def woken(self, _: _Future) -> None:
        self.program.wake(self)

    def step(self) -> None:
        try:
            awaited = self.coroutine.send(None)
        except StopIteration as stop:
            self.settle(stop.value)
        except (_Stopped, _Returned):
            raise
        except BaseException as error:  # noqa: BLE001 - a program's own, SystemExit too
            self.settle(error=error)
        else:
            if isinstance(awaited, _Future):
                awaited.waiting.append(self)
            else:
                self.settle(error=RuntimeError(f"a program cannot wait for {awaited!r}"))


class _Gathered(_Future):
    """Several at once."""

    def __init__(self, program: _Program, parts: Iterable[_Future]) -> None:
        super().__init__(program)
        self._parts = list(parts)
        for part in self._parts:
            part.waiting.append(self)
        self.woken(None)

    def woken(self, part: _Future | None) -> None:
        failed = next((each for each in self._parts if each.error is not None), None) if part is None else part
        if failed is not None and failed.error is not None:
            self.settle(error=failed.error)
        elif all(each.is_done for each in self._parts):
            self.settle([each.result for each in self._parts])


def _gather(*parts: Any) -> _Future:
    program = _Program.current()
    return _Gathered(program, [program.future(part) for part in parts])


class _Program(threading.Thread):
    """
    One program, which goes on in a thread of its own and waits there for what is told it.

    Args:
        code: Its text.
        file: What tracebacks call it.
        names: Its global variables, which programs after it have, too.
        world: What is outside.
    """

    def __init__(self, code: str, file: str, names: dict[str, Any], world: _World) -> None:
        super().__init__(name=f"program {file}", daemon=True)
        self._code, self._file, self._names, self._world = code, file, names, world
        self.turns: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Mapping[int, CallAnswer] | None] = queue.SimpleQueue()
        self.ready: deque[_Task] = deque()
        self._is_told = False
        self._open: dict[int, _Future] = {}
        self._calls: list[ProgramCall] = []
        self._tasks: list[_Task] = []
        self._roots: list[_Future] = []
        self._asked = 0

    @staticmethod
    def current() -> _Program:
        program = threading.current_thread()
        if not isinstance(program, _Program):
            raise _Stopped
        return program

    def end(self, why: str) -> None:
        """End it, from any thread; wait a moment until it has."""
        self._world.stop = why
        self.answers.put(None)
        if threading.current_thread() is not self:
            with suppress(RuntimeError):  # it has not begun, and ends when it does
                self.join(GRACE)

    def run(self) -> None:
        try:
            self._world.tick()
            turn = self._ran()
        except _Stopped:
            turn = self._error_of_stop()
        except BaseException as error:  # noqa: BLE001 - a program's own, SystemExit too
            turn = self._raised(error)
        if self._world.stop:  # the program may have caught what ended it
            turn = self._error_of_stop()
        self._close()
        self.turns.put(turn)

    def _ran(self) -> Turn:
        self._names.pop(VALUE, None)
        try:
            coroutine = eval(_compile(self._code, self._file), self._names)  # noqa: S307 - what this is for
            if inspect.iscoroutine(coroutine):
                self.until(self.future(coroutine))
            value = self._names.pop(VALUE, None)
        except _Returned as returned:
            value = returned.args[0]
        return ProgramEnded(_given_out(value), tuple(self._calls))

    def _error_of_stop(self) -> ProgramRaised:
        if self._world.stop == PRINTED:
            return ProgramRaised(PRINTED, "MemoryError: it printed more", 0, is_fatal=True)
        return ProgramRaised("RuntimeError", "the program was ended", 0, is_fatal=True)

    def _raised(self, error: BaseException) -> ProgramRaised:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FILE)]
        text = "\n".join(["Traceback (most recent call last):", *self._show_frames(frames), _last(error)])
        return ProgramRaised(type(error).__name__, text, frames[-1].lineno or 0 if frames else 0)

    def _show_frames(self, frames: list[traceback.FrameSummary]) -> Iterator[str]:
        lines = self._code.split("\n")
        for (file, number, name), equal in groupby(frames, lambda each: (each.filename, each.lineno or 0, each.name)):
            count = len(list(equal))
            shown = [f'  File "{file}", line {number}, in {name}']
            if file == self._file and 0 < number <= len(lines):
                shown.append(f"    {lines[number - 1].strip()}")
            yield from shown * min(count, MOST_EQUAL)
            if count > MOST_EQUAL:
                yield f"  [Previous line repeated {count - MOST_EQUAL} more times]"

    def _close(self) -> None:
        """Leave nothing that Python would warn of; what ends here says and does nothing more."""
        self._world.stop = self._world.stop or "closed"
        for task in self._tasks:
            if not task.is_done:
                with suppress(BaseException):
                    task.coroutine.close()

    # --- calls ------------------------------------------------------------------------------------------------------------

    def called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> _Future:
        self._world.tick()
        future = _Future(self, result)
        self._calls.append(ProgramCall(self._asked, name, args, kwargs, _line_of_caller()))
        self._open[self._asked] = future
        self._asked += 1
        return future

    def future(self, given: Any) -> _Future:
        """Return something awaitable as a future; a coroutine begins to go on by itself."""
        if isinstance(given, _Future):
            return given
        if not inspect.iscoroutine(given):
            msg = "An asyncio.Future, a coroutine or an awaitable is required"
            raise TypeError(msg)
        task = _Task(self, given)
        self._tasks.append(task)
        self.ready.append(task)
        return task

    def until(self, future: _Future) -> Any:
        """Go on until something is there."""
        self._roots.append(future)
        try:
            while not future.is_done:
                self._world.tick()
                if self.ready:
                    self.ready.popleft().step()
                else:
                    self._wait()
        finally:
            self._roots.pop()
        if future.error is not None:
            raise future.error
        return future.result

    def _wait(self) -> None:
        if not self._open:
            msg = "the program waits for something that nobody does"
            raise RuntimeError(msg)
        calls, self._calls = tuple(self._calls), []
        self.turns.put(ProgramWaiting(calls, self._line()))
        answers = self.answers.get()
        if answers is None:
            raise _Stopped
        self._is_told = True
        for number in sorted(answers):
            self._settle(number, answers[number])
        self._is_told = False

    def wake(self, task: _Task) -> None:
        """Let a task go on: in the order of the answers, or next where another one has ended that it waited for."""
        if self._is_told:
            self.ready.append(task)
        else:
            self.ready.appendleft(task)

    def _settle(self, number: int, answer: CallAnswer) -> None:
        future = self._open.pop(number)
        if answer.error:
            kind = getattr(builtins, ALIASES.get(answer.error, answer.error), RuntimeError)
            future.settle(error=kind(answer.value))
        else:
            future.settle(answer.value if future.result is None else future.result)

    def _line(self) -> int:
        """Return where the program waits."""
        root, line = self._roots[-1], 0
        coroutine = root.coroutine if isinstance(root, _Task) else None
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            line, coroutine = coroutine.cr_frame.f_lineno, coroutine.cr_await
        return line


def _line_of_caller() -> int:
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.startswith(FILE):
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def _last(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def _held_out(value: Any, around: frozenset[int]) -> Any:
    """Return what a value holds that stands inside of others."""
    return _itself(value) if id(value) in around else _given_out(value, around)


def _given_out(value: Any, around: frozenset[int] = frozenset()) -> Any:
    """Return the value of a program's last line as it leaves the program."""
    if isinstance(value, _Function | _Future):
        return repr(value)
    if isinstance(value, FunctionType):
        return f"<function {value.__name__!r}>"
    if getattr(type(value), "__repr__", None) is object.__repr__:
        return f"<{type(value).__name__} object>"  # without its address, which no replay has
    if isinstance(value, dict):
        around |= {id(value)}
        return {_given_out(key): _held_out(inner, around) for key, inner in value.items()}
    if type(value) in (list, tuple):
        around |= {id(value)}
        return type(value)([_held_out(inner, around) for inner in value])
    if inspect.iscoroutine(value):
        value.close()
        return f"<coroutine object {value.__name__}>"
    if isinstance(value, Iterator):
        return list(map(_given_out, value))
    return value


# --- reading ------------------------------------------------------------------------------------------------------------


def _compile(code: str, file: str) -> CodeType:
    tree = _Rewritten().visit(ast.parse(code))
    made: CodeType = compile(ast.fix_missing_locations(tree), file, "exec", FLAGS, dont_inherit=True)
    return made


class _Rewritten(ast.NodeTransformer):
    """
    A program as it is run here.

    The value of its last line is kept, ``return`` works at its top, and whatever may go on for ever looks whether it is to end.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        node.body = [self._top(each) for each in node.body]
        self.generic_visit(node)
        last = node.body[-1] if node.body else None
        if isinstance(last, ast.Expr):
            node.body[-1] = ast.copy_location(ast.Assign([ast.Name(VALUE, ast.Store())], last.value), last)
        return node

    def _top(self, node: ast.stmt) -> ast.stmt:
        return _Top().visit(node)  # type: ignore[no-any-return]

    def _repeating(self, node: Any) -> Any:
        self.generic_visit(node)
        has_words = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None
        at = 1 if has_words else 0
        look = ast.Expr(_ticking())
        node.body.insert(at, ast.copy_location(look, node.body[min(at, len(node.body) - 1)]))
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_For = visit_While = _repeating  # noqa: N815 - as `ast` calls them

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        node.ifs.insert(0, ast.copy_location(_ticking(), node.iter))
        return node


class _Top(ast.NodeTransformer):
    """What is outside of all functions: ``return`` ends the program there."""

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        value = node.value if node.value is not None else ast.Constant(None)
        return ast.copy_location(ast.Raise(ast.Call(ast.Name(RETURN, ast.Load()), [value], [])), node)

    def _inside(self, node: Any) -> Any:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _inside  # noqa: N815 - as `ast` calls them


def _ticking() -> ast.Call:
    return ast.Call(ast.Name(TICK, ast.Load()), [], [])
