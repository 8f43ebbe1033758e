"""
A sandbox of child processes: programs of a model run in Python processes with an audit hook and limits of the operating system.

Two mechanisms confine a program. The kernel gives the child no new descriptors, no growing files and no more memory than its limit,
and its environment is empty. An audit hook refuses each event of the interpreter but a few, such as files, sockets and imports.

It does not protect against a program that gets around the hook, by a bug of the interpreter or of its own C code. Such a program may
delete or rename files of this user, send signals, or measure time; as root it can also raise its limits. Values of calls and results
are checked by the engine, whoever writes them. For code of attackers use `MontySandbox`, or run this one in a container as another
user.

``python examples/extending/sandbox.py`` needs no key and no network, but Linux.
"""

import ast
import contextlib
import json
import platform
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall, tool
from stepengine.errors import ToolError
from stepengine.sandbox import (
    CallAnswer,
    CheckedProgram,
    ProgramCall,
    ProgramEnded,
    ProgramProblem,
    ProgramRaised,
    ProgramTurn,
    ProgramWaiting,
    StopSignal,
    Stubs,
    code_mode,
)

# Neither `time` nor `datetime`: a program must see the same in a replay. `asyncio` is made by the child. Only `id`
# and generators of random numbers without a seed differ.
MODULES = "asyncio base64 bisect collections copy csv dataclasses decimal functools itertools json math random re typing unicodedata"

CHILD = r"""
import ast, builtins, json, linecache, os, random, resource, signal, sys, traceback, types

requests, replies = os.fdopen(os.dup(0)), os.dup(1)
setup = json.loads(requests.readline())
FILE, OUT_OF_MEMORY = "program.py", b'{"kind": "MemoryError", "text": "MemoryError", "line": 0, "is_fatal": true}\n'
new, waiting, count = [], {}, 0


class ToolError(RuntimeError):
    pass


ERRORS = {kind.__name__: kind for kind in (ToolError, PermissionError, TimeoutError, TypeError, ValueError, NameError)}


def send(form):
    data = json.dumps({**form, "printed": output.take()}).encode() + b"\n"
    while data:
        data = data[os.write(replies, data):]


def raised(kind, text, line=0, is_fatal=False):
    return {"kind": kind, "text": text, "line": line, "is_fatal": is_fatal}


class Output:
    def __init__(self):
        self.parts, self.left = [], setup["printed"]

    def write(self, text):
        self.left -= len(text.encode(errors="replace"))
        if self.left < 0:
            send(raised("printed", "it printed too much", is_fatal=True))
            os._exit(1)
        self.parts.append(text)

    def flush(self):
        pass

    def take(self):
        parts, self.parts = self.parts, []
        return "".join(parts)


class Call:
    def __init__(self, name, args, kwargs):
        global count
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename != FILE:
            frame = frame.f_back
        count += 1
        self.form = {"id": count, "name": name, "args": args, "kwargs": kwargs, "line": frame.f_lineno}
        self.form = json.loads(json.dumps(self.form))  # as it is now, and an error in this line if it is no JSON
        self.answer = None
        new.append(self)

    def __await__(self):
        while self.answer is None:
            yield
        value, error = self.answer
        if error:
            raise ERRORS.get(error, ToolError)(value)
        return value


class Gather:
    def __init__(self, *members):
        self.members = [one.__await__() for one in members]

    def __await__(self):
        values = {}
        while True:
            for n, one in enumerate(self.members):
                if n not in values:
                    try:
                        one.send(None)
                    except StopIteration as end:
                        values[n] = end.value
            if len(values) == len(self.members):
                return [values[n] for n in range(len(values))]
            yield


def drive(coroutine):
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        if not new:
            raise RuntimeError("the program waits for nothing")
        send({"calls": [one.form for one in new], "line": coroutine.cr_frame.f_lineno})
        waiting.update({str(one.form["id"]): one for one in new})
        new.clear()
        for id, answer in read().items():
            waiting.pop(id).answer = answer


def read():
    signal.setitimer(signal.ITIMER_REAL, 0)
    line = requests.readline()
    if not line:
        os._exit(0)
    signal.setitimer(signal.ITIMER_REAL, setup["seconds"] + 1)  # for the case that nobody is there to kill it
    return json.loads(line)


def run(code):
    linecache.cache[FILE] = len(code), None, code.splitlines(True), FILE
    tree = ast.parse(code, FILE)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    for part, mode in ((tree, "exec"), (last, "eval")):
        if part is not None:
            value = eval(compile(part, FILE, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), variables)
            if isinstance(value, types.CoroutineType):
                value = drive(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        value = repr(value)
    return {"value": value, "unawaited": [one.form for one in new]}


def explain(error):
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    told.stack[:] = [frame for frame in told.stack if frame.filename == FILE]
    line = told.stack[-1].lineno if told.stack else getattr(error, "lineno", 0) or 0
    return raised(type(error).__name__, "".join(told.format(chain=False)).rstrip(), line)


def import_module(name, globals=None, locals=None, fromlist=(), level=0):
    inside = (globals or {}).get("__name__") == "__main__"
    if inside and name.partition(".")[0] not in modules:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return imported(name, globals, locals, fromlist, level)


def audit(event, _):
    if event not in ALLOWED:
        raise PermissionError(f"not allowed here: {event}")


ALLOWED = {"compile", "exec", "builtins.id", "sys._getframe", "signal.setitimer"}
ALLOWED |= {"object.__getattr__", "object.__setattr__", "sys._getframemodulename"}
output = sys.stdout = Output()
sys.stdin = sys.stderr = None
modules, imported = set(setup["modules"]), builtins.__import__
asyncio = types.ModuleType("asyncio")
asyncio.gather, asyncio.run = Gather, drive
asyncio.sleep = lambda delay, result=None: Call("asyncio.sleep", [delay], {})
sys.modules["asyncio"] = asyncio
for name in modules:
    __import__(name)
random.seed(setup["seed"])
variables = {"__name__": "__main__", "__builtins__": builtins, "ToolError": ToolError}
for name in setup["functions"]:
    variables[name] = lambda *args, _name=name, **kwargs: Call(_name, args, kwargs)
builtins.__import__ = import_module
try:
    eval("unknown", {})
except NameError as error:
    explain(error)  # loads what it needs
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for limit, most in (
    (resource.RLIMIT_AS, used + setup["memory"]), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 0),
):
    resource.setrlimit(limit, (most, most))
for descriptor in (0, 1, 2):
    os.close(descriptor)
sys.addaudithook(audit)
while True:
    code = read()["code"]
    new.clear()
    output.left = setup["printed"]
    try:
        reply = run(code)
    except MemoryError:
        os.write(replies, OUT_OF_MEMORY)
        os._exit(1)
    except BaseException as error:
        reply = explain(error)
    send(reply)
"""


class ChildSession:
    """One process. A turn holds the lock; `close` kills the process, which ends the turn."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.printed = ""
        self._seconds, self._most = setup["seconds"], 2 * setup["memory"]
        self._turns = threading.Lock()
        self._is_closed = self._is_late = False
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a text of this file
            [sys.executable, "-S", "-s", "-P", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            env={"PYTHONHASHSEED": str(setup["seed"] % 2**32)},
        )
        self._write(setup)

    def feed(self, code: str, now: datetime) -> ProgramTurn:
        """Start a program."""
        self.printed = ""
        return self._turn({"code": code})

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        """Resume the program."""
        return self._turn({str(id_): list(answer) for id_, answer in answers.items()})

    def close(self) -> None:
        """End the process, from any thread."""
        self._is_closed = True
        self._process.kill()
        with self._turns:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    # What could not be written to a killed process would be written here once more.
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process.wait()

    def _turn(self, request: Mapping[str, Any]) -> ProgramTurn:
        with self._turns:
            if self._is_closed:
                return ProgramRaised("", "the session was closed", 0, is_fatal=True)
            timer = threading.Timer(self._seconds, self._kill_late)
            timer.start()
            try:
                self._write(request)
                turn = self._read()
            finally:
                timer.cancel()
                timer.join()
        if isinstance(turn, ProgramRaised) and turn.is_fatal:
            self.close()
        return turn

    def _kill_late(self) -> None:
        self._is_late = True
        self._process.kill()

    def _write(self, request: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except OSError:
            pass  # it has ended, as the reader sees

    def _read(self) -> ProgramTurn:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline(self._most)
        if not line.endswith(b"\n"):
            if self._is_closed:
                return ProgramRaised("", "the session was closed", 0, is_fatal=True)
            if self._is_late:
                return ProgramRaised("TimeoutError", "TimeoutError", 0, is_fatal=True)
            return ProgramRaised("RuntimeError", "the process of the program ended", 0, is_fatal=True)
        try:
            return self._parse_turn(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            return ProgramRaised("RuntimeError", "the process of the program wrote nonsense", 0, is_fatal=True)

    def _parse_turn(self, form: dict[str, Any]) -> ProgramTurn:
        self.printed += str(form.pop("printed", ""))
        if "calls" in form:
            return ProgramWaiting(tuple(map(parse_call, form["calls"])), int(form["line"]))
        if "kind" in form:
            return ProgramRaised(
                str(form["kind"]), str(form["text"]), int(form["line"]), is_fatal=bool(form["is_fatal"])
            )
        return ProgramEnded(form["value"], tuple(map(parse_call, form["unawaited"])))


def parse_call(form: dict[str, Any]) -> ProgramCall:
    return ProgramCall(int(form["id"]), str(form["name"]), tuple(form["args"]), dict(form["kwargs"]), int(form["line"]))


class ChildSandbox:
    """Makes sessions in child processes."""

    @property
    def name(self) -> str:
        """The name and version, for journals."""
        return f"child/{platform.python_version()}"

    def check(self, code: str, stubs: Stubs, known: Collection[str], stop: StopSignal | None = None) -> CheckedProgram:
        """Refuse syntax errors and modules that the child does not have."""
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            return CheckedProgram((ProgramProblem(error.lineno or 1, error.offset or 1, f"{error.msg}"),))
        names = {
            name: node
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        }
        return CheckedProgram(
            tuple(
                ProgramProblem(
                    node.lineno, node.col_offset + 1, f"there is no module {name!r} here; there are {MODULES}"
                )
                for name, node in names.items()
                if name.partition(".")[0] not in MODULES.split()
            )
        )

    def open(self, functions: Collection[str], *, seconds: float, memory: int, printed: int, seed: int) -> ChildSession:
        """Start a process."""
        setup = {"functions": list(functions), "modules": MODULES.split(), "seconds": seconds, "memory": memory}
        try:
            return ChildSession({**setup, "printed": printed, "seed": seed})
        except OSError as error:
            msg = f"no process for a program: {error}"
            raise ToolError(msg) from error


PRICES = {"tea": 3, "cake": 5}
PROGRAM = """
import asyncio
prices = await asyncio.gather(price("tea"), price("cake"))
print(f"{len(prices)} prices")
sum(prices)
"""


@tool
def price(item: str) -> int:
    """
    Look up a price.

    Args:
        item: What is sold.
    """
    return PRICES[item]


def add_up(ctx: StepContext) -> Steps[str]:
    found = yield from ToolCall("run_code", {"code": PROGRAM})
    try:
        yield from ToolCall("run_code", {"code": "import os\nos.listdir('/')"})
    except ToolError as error:
        return f"{found.text}\n{error}"
    return found.text


def main() -> None:
    cashier = AgentDefinition("cashier", tools=[code_mode(price, sandbox=ChildSandbox())], handle_steps=add_up)
    with Engine([cashier]) as engine:
        said = engine.run_sync(cashier).unwrap()
    print(said)
    assert said.startswith("2 prices\n8\n")
    assert "there is no module 'os'" in said


if __name__ == "__main__":
    main()
