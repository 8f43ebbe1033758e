"""
``Moment``: the state of a recorded run at a position, with the author's frames and the calls of hooks.

Here is also how frames are read from a waiting machine, and how effects and ends are described in a line.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.effects import (
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    EndRuns,
    Leaf,
    RunInBackground,
    SendToRun,
    Spawn,
    summarize_effect,
)
from stepengine.data.functions import PACKAGE
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, Value
from stepengine.data.programs import RunningProgram
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.visible import cut_after
from stepengine.machine.plan import Finished
from stepengine.machine.run import Machine

FrameKind: TypeAlias = Literal["handler", "helper", "hook", "tool", "program", "package", "opaque"]
TOPS = ("handler", "hook", "tool")
"""Kinds of the functions that the machine itself calls."""
MAX_FRAMES = 100
"""Handlers delegate a few levels deep; the bound ends a chain that a foreign object makes endless."""
SHOWN_CHARS = 200
"""About two lines for each effect in the list of a debugger."""


@frozen(kw_only=True)
class Frame:
    """
    One frame of author code that waits.

    Attributes:
        function: The function's qualified name; of what is ``opaque``, the name of its type.
        file: Its file; ``""`` where there is none.
        line: The line that waits; 0 where there is none.
        source: The text of that line, as the file has it now; ``""`` where that cannot be read.
        locals: Its variables, a copy: the objects themselves.
        kind: ``handler``, ``hook`` and ``tool`` are the functions that the machine called, ``helper`` a generator that they wait for,
            ``program`` a program that a model wrote, ``package`` one of this package, ``opaque`` what cannot be looked into, such as
            an iterator.
        globals: The globals of its code.
        text: The whole text of a program that is in no file.
        printed: Returns the output of a program so far, while it waits here; ``None`` if its sandbox does not report it.
    """

    function: str
    file: str = ""
    line: int = 0
    source: str = ""
    locals: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    kind: FrameKind = "helper"
    globals: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    text: str = attrs.field(default="", repr=False)
    printed: Callable[[], str | None] = attrs.field(default=lambda: None, eq=False, repr=False)


@frozen
class HookCall:
    """
    One call of a hook, made again by the replay.

    Attributes:
        point: Its point, such as ``"pre_step"``.
        hook: Its name.
        said: Its return value: a ``Change``, a ``Decision``, or ``None``; the error, if it raised one.
    """

    point: str
    hook: str
    said: Any = None


@frozen(kw_only=True)
class Moment:
    """
    The state before the outcome at a position is sent: the waiting effect, its run and the author's frames.

    Attributes:
        position: The number of results that were applied.
        step: The step of its run: the number of its model calls so far, this one included; 0 before the first.
        address: The address of the effect whose outcome comes next, such as ``"3.2#1"``; ``""`` after the last one.
        agent_id: The agent that waits for it.
        asked: The request of the effect in one line, with nothing redacted.
        effect: The effect; ``None`` after the last one.
        outcome: The recorded outcome of the effect; ``None`` without one.
        state: The state of the run that waits.
        view: The part of its history that its model sees.
        request: The last request that this run made, up to this effect; ``None`` before the first.
        frames: The author's waiting frames, outermost first; none if no code of the author waits.
        location: ``file:line`` of the innermost of them that is the author's own.
        hooks: The hooks of this run that were called since its last outcome.
        at: Milliseconds since the root run was created, when the outcome came; the last known time where there is none.
    """

    position: int
    step: int
    address: str
    agent_id: str
    asked: str
    effect: Leaf | None
    outcome: Value | Failure | None
    state: AgentState
    view: Transcript
    request: ModelRequest | None
    frames: tuple[Frame, ...]
    location: str
    hooks: tuple[HookCall, ...]
    at: int


def describe_end(finished: Finished) -> str:
    """Return how a run ended, in a line."""
    error, said = finished.error, f"the run ended as {finished.status.value}"
    return said if error is None else f"{said} with {type(error).__name__}: {getattr(error, 'message', error)}"


EFFECT_TEXTS: Mapping[type[Leaf], Callable[[Any], str]] = {
    CallModel: lambda effect: f"model {effect.request.model} with {len(effect.request.messages)} messages",
    CallTool: lambda effect: f"{effect.tool_name} {_format_as_short_json(effect.input)}",
    CallBody: lambda effect: f"{effect.tool_name} {_format_as_short_json(effect.input)}",
    Spawn: lambda effect: f"agent {effect.agent_id} {_format_as_short_json(effect.prompt)}",
    CallFunction: lambda effect: f"perform {effect.call.name}",
    AskPerson: lambda effect: " / ".join([question.text for question in effect.questions]),
    AwaitTime: lambda effect: (
        f"sleep until {effect.until}" if effect.seconds is None else f"sleep {effect.seconds:g} s"
    ),
    AwaitMessage: lambda effect: f"message on {effect.topic}",
    AwaitRuns: lambda effect: f"{effect.need} of the children at {', '.join(effect.children)}",
    SendToRun: lambda effect: f"to the child at {effect.child}: {_format_as_short_json(effect.value)}",
    EndRuns: lambda effect: f"the end of the children at {', '.join(effect.children)}",
    RunInBackground: lambda effect: f"the end of agent {effect.agent_id} in the background",
}
"""Texts for ``format_effect_request``; an effect without an entry is described by its row."""


def format_effect_request(effect: Leaf) -> str:
    """Return the request of an effect in one line, with nothing redacted."""
    return EFFECT_TEXTS.get(type(effect), summarize_effect)(effect)


def _format_as_short_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return cut_after(text, SHOWN_CHARS)


def _iterate_delegation_chain(generator: object) -> Iterator[object]:
    """Yield a generator, the one that it delegates to, and so on; the last may be any object."""
    for _ in range(MAX_FRAMES):
        if generator is None:
            return
        yield generator
        generator = getattr(generator, "gi_yieldfrom", None)


def iterate_author_frames(machine: object) -> Iterator[Frame]:
    """Yield the frames of the author's generator that a machine waits for, outermost first; of a hook while one runs."""
    if not isinstance(machine, Machine) or not machine.author_stack:
        return
    author = machine.author_stack[-1]
    top: FrameKind = author.by
    program = author.program
    for generator in _iterate_delegation_chain(author.steps):
        frame: FrameType | None = getattr(generator, "gi_frame", None)
        if frame is None:
            yield Frame(function=type(generator).__name__, kind="opaque")
            return
        if program is not None and program.file:
            yield _make_program_frame(program, frame.f_code.co_qualname, "handler")
            return
        file, is_ours = frame.f_code.co_filename, frame.f_code.co_filename.startswith(PACKAGE)
        kind: FrameKind = "package" if is_ours and not file.startswith(f"{PACKAGE}_agents") else top
        yield Frame(
            function=frame.f_code.co_qualname,
            file=file,
            line=frame.f_lineno,
            source=linecache.getline(file, frame.f_lineno).rstrip(),
            locals=dict(frame.f_locals),
            kind=kind,
            globals=frame.f_globals,
        )
        if kind == "package" and program is not None and program.line:
            yield _make_program_frame(program, "program", "program")
            program = None
        top = top if kind == "package" and top != "handler" else "helper"


def _make_program_frame(program: RunningProgram, function: str, kind: FrameKind) -> Frame:
    """Return the frame of a waiting program: a handler in the sandbox, which has a file, or code of a model."""
    lines = program.code.split("\n")
    return Frame(
        function=function,
        file=program.file,
        line=program.line,
        source=lines[program.line - 1].rstrip() if 0 < program.line <= len(lines) else "",
        kind=kind,
        text="" if program.file else program.code,
        printed=program.printed,
    )
