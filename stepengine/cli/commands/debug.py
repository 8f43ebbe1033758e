"""
``stepengine debug``: stands at any step of a recorded run, goes both ways, changes one thing and runs on.

Where this process may fork, the debugger is several processes (``ForkedWalk``), and the one that is awake has the terminal. What they
have to know together, which command of ``--exec`` is next and whether one has failed, stands in memory that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import mmap
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Never, cast

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at, name_of, new_journal, on_journal, recorded_agent
from stepengine.cli.options import File, Last, Options, with_options
from stepengine.cli.screen.render import counted, cut, money, say
from stepengine.cli.scripts import script_of
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import did_you_mean
from stepengine.data.outcomes import Failure
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from types import FrameType

    from stepengine.debugging.debugger import AnyWalk, Debugger, ForkedWalk
    from stepengine.engine import Engine
    from stepengine.engine.stepping import Frame, Moment, Stepper
    from stepengine.journal import Journal
    from stepengine.journal.history import History

__all__ = ("debug", "debug_divergence")

FORMAT = "stepengine.debug/1"
AGAIN = "code between yields runs again; nothing recorded is done again"
PARENT = 76
"""The exit code of a debugger that gives back to the one whose run it was forked from."""
LOOK_SECONDS = 3600.0
AROUND = 7
MAX_PRINTED = 5
SHORT = 40
NO_MORE = "the run differs from its record here, so there is no going on: fork goes on from here, `stepengine resume --on-divergence extend` too"


@with_options
def debug(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[str, typer.Option(help="Where to begin: a step, or an effect.", metavar="N|PATH#N")] = "",
    commands: Annotated[
        list[str] | None,
        typer.Option("--exec", help="A command; then quit. May be given several times.", metavar="CMD"),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the place of --at anew whenever a file of the agent is saved.")
    ] = False,
    no_fork: Annotated[bool, typer.Option("--no-fork", help="Keep paused replays, no processes.")] = False,
    quiet_handler: Annotated[bool, typer.Option("--quiet-handler", help="Drop what the handler prints.")] = False,
    width: Annotated[int, typer.Option(help="Columns of the screen; default: the terminal's.", min=0, metavar="N")] = 0,
) -> Exit:
    """
    Stand at any step of a recorded run, and go both ways.

    The handler's own variables, the line that waits, what was asked for and what came back: the present code of the
    agent is walked through again, and what is recorded answers. Code between yields runs again; nothing recorded is
    done again.

    `help` lists the commands; most have a short name: next, back, step, unstep, goto, first, last, until, rback, into,
    out, where, list, up, down, locals, print, pp, state, view, request, reply, result, hooks, cost, diff, fork, parent,
    quit.

    With --watch an edit is seen in a recorded run while it is made: at every save the run is walked under the new code,
    and what is different at that place is shown, or the first effect at which the code goes another way. What models said
    is taken from the record, no tool runs, and code that does not come back is ended after 5 seconds. A place that is
    typed is shown from then on; Ctrl-C or `quit` ends it.

    Leaves with 0; with 1 when a command of --exec failed, which a print whose expression raises does, too; with 5 when
    the code does something else than is recorded before the place that was asked for.

    Examples:
      stepengine debug --last
      stepengine debug run.jsonl --at 12
      stepengine debug run.jsonl --exec "goto 12" --exec "print len(seen)"
      stepengine debug run.jsonl --exec "until error" --json
      stepengine debug run.jsonl --agent ./agents/triage.py --at 12 --watch
    """
    if watch:
        from stepengine.cli.watching import watch_place

        if commands is not None or no_fork:
            msg = "--watch shows one place again and again, in processes of its own: leave out --exec and --no-fork"
            raise UsageProblem(msg)
        options = attrs.evolve(options, journal=file, last=last, quiet=True)
        return on_journal(options, lambda options: watch_place(options, at, width=width, prints=not quiet_handler))
    options = attrs.evolve(options, journal=file, last=last, quiet=True)
    asked = _DebugOptions(at, tuple(commands or ()), is_scripted=commands is not None, no_fork=no_fork, width=width)
    asked = attrs.evolve(asked, quiet_handler=quiet_handler)
    return on_journal(options, lambda options: _debug(options, asked, Tally()))


@frozen
class _DebugOptions:
    """What was typed for the debugger alone."""

    at: str = ""
    commands: tuple[str, ...] = ()
    is_scripted: bool = attrs.field(default=False, kw_only=True)
    no_fork: bool = attrs.field(default=False, kw_only=True)
    quiet_handler: bool = attrs.field(default=False, kw_only=True)
    width: int = attrs.field(default=0, kw_only=True)
    is_inner: bool = attrs.field(default=False, kw_only=True)


class Tally:
    """Numbers that all processes of one debugger share: which command is next, and with which code to leave."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self._shared[4 * place : 4 * place + 4], "big")

    def __setitem__(self, place: int, value: int) -> None:
        self._shared[4 * place : 4 * place + 4] = value.to_bytes(4, "big")

    def next_command(self) -> int:
        """Return the number of the next command, and count on."""
        self[0] += 1
        return self[0] - 1

    @property
    def code(self) -> int:
        """The exit code so far."""
        return self[1]

    def fail(self, code: Exit) -> None:
        """Note that a command failed; the first failure counts, and a divergence before all others."""
        self[1] = int(code) if not self[1] or code is Exit.DIVERGED else self[1]


def _stays_here(engine: Engine, history: History) -> str:
    """Return why a forked process cannot go on with a run, as far as that is because of what runs in it; else ``""``."""
    from stepengine.data.programs import runs_in_sandbox
    from stepengine.journal.programs import has_programs

    # Without code mode among what the agent's file has imported none of its tools runs programs.
    if "stepengine.sandbox.running" in sys.modules and has_programs(history):
        return "programs do not run in forked processes"
    is_theirs = any(runs_in_sandbox(agent.handle_steps) for agent in engine.agents)
    return "handlers in the sandbox do not run in forked processes" if is_theirs else ""


def _debug(options: Options, asked: _DebugOptions, tally: Tally) -> Exit:
    from stepengine.debugging.debugger import Debugger, ForkedWalk, PausedWalk, Rewound, can_fork

    journal = journal_at(options.journal)
    try:
        history = journal.history()
        agent = recorded_agent(journal, options, history)
        bench = bench_for(options, agent, performs=False, recorded=history)
        with _hush_handler(asked, as_json=options.as_json):
            stepper = bench.engine.stepper(journal, agent=agent)
    except ReplayDivergence:
        raise
    except JournalError as error:
        # There is no run to stand in: that is not a failure of one.
        return complain(error.message)
    why = "--no-fork" if asked.no_fork else _stays_here(bench.engine, history) or can_fork()
    forked = None if why else ForkedWalk(stepper)
    walk: AnyWalk = forked or PausedWalk(stepper)
    debugger = Debugger(bench.engine, walk, agent)
    hook = sys.breakpointhook
    session = DebugSession(debugger, options, asked, tally, forked=forked)
    session.greet(f"snapshots: {'fork' if forked else f'paused replays ({why})'}")
    code: int | None
    try:
        if forked is None:
            code = session.serve(None)
        else:
            message: Mapping[str, object] | None = None
            try:
                code = forked.begin()
            except Rewound as woken:
                code, message = None, woken.message
            if code is None:
                session.end(message)
    finally:
        sys.breakpointhook = hook
        debugger.close()
        bench.engine.close()
    # A process that a signal ended, or that gives back to the debugger around it, has another code than those of the table.
    return cast("Exit", code)


@contextlib.contextmanager
def _hush_handler(asked: _DebugOptions, *, as_json: bool) -> Iterator[None]:
    """Keep what the handler prints away from what the commands tell."""
    if not (asked.quiet_handler or as_json):
        yield
        return
    with contextlib.redirect_stdout(io.StringIO() if asked.quiet_handler else sys.stderr):
        yield


class _Refused(Exception):
    """A command cannot be done; its message says why."""


class DebugSession:
    """
    The command loop over one run.

    Args:
        debugger: What stands in the run.
        options: What was typed, for forks.
        asked: What was typed for the debugger alone.
        tally: What all processes share.
        forked: The walk, where it is one of processes.
        parked: A divergence at which this stands; then there is no going anywhere.
    """

    def __init__(
        self,
        debugger: Debugger,
        options: Options,
        asked: _DebugOptions,
        tally: Tally,
        *,
        forked: ForkedWalk | None = None,
        parked: ReplayDivergence | None = None,
    ) -> None:
        self._debugger = debugger
        self._options = options
        self._asked = asked
        self._tally = tally
        self._forked = forked
        self._parked = parked
        self._frame = 0
        self._running: Frame | None = None
        self._jumps = True
        self._warned = False
        self._began = time.time()
        self._code: int | None = None
        if forked is not None:
            forked.keeps = self._position
        sys.breakpointhook = self._breakpoint

    # --- the loop -----------------------------------------------------------------------------------------------------

    def greet(self, snapshots: str) -> None:
        """Say which run this is, and what happens when one walks through it."""
        history, stepper = self._debugger.stepper.history, self._debugger.stepper
        from stepengine.journal.show import status_of

        head = [str(history.root["agent_id"]), counted(stepper.steps(), "step"), status_of(history), snapshots]
        if self._is_json:
            return
        said = self._clean(f"{self._options.journal}  {' · '.join(head)}")
        say(f"{said}\n{AGAIN}")
        if not self._asked.is_scripted and sys.stdin.isatty():
            say("`help` lists what can be typed, `quit` leaves")
        order = self._debugger.stepper.is_in_address_order
        if order:
            say("the journal is in the order of addresses: siblings follow one another")

    def end(self, message: Mapping[str, object] | None) -> Never:
        """Serve in a process of its own, to its end."""
        code: int = Exit.FAILED
        try:
            code = self.serve(message)
        except BaseException as error:  # noqa: BLE001 - nothing of this process goes back to where it was forked
            complain(f"the debugger broke: {type(error).__name__}: {error}")
        assert self._forked is not None  # noqa: S101 - it forked this process
        self._forked.finish(code)

    def serve(self, message: Mapping[str, object] | None) -> int:
        """Do commands until there are no more; return the exit code."""
        from stepengine.debugging.debugger import Rewound

        begins = message is None
        while self._code is None:
            start = self._debugger.position
            try:
                if begins:
                    begins = False
                    self._begin()
                elif message is not None:
                    told, message = message, None
                    self._arrive(told)
                else:
                    self._do_next()
            except Rewound as woken:
                message = woken.message
            except KeyboardInterrupt:
                complain("interrupted", Exit.INTERRUPTED)
                if self._asked.is_scripted:
                    return Exit.INTERRUPTED
                # Whatever ran when it came is broken off in the middle: it is walked to its place again.
                self._recover(start)
        return self._code

    def _do_next(self) -> None:
        line = self._next_line()
        if line is None:
            self._code = self._tally.code
        else:
            self._do(line)

    def _recover(self, start: int) -> None:
        if self._forked is not None:
            self._forked.leave(start, then=None)
        from stepengine.debugging.debugger import PausedWalk

        walk = self._debugger._walk  # noqa: SLF001
        if isinstance(walk, PausedWalk):
            walk.stepper = walk.stepper.anew()
            walk.to(start)

    def _begin(self) -> None:
        if not self._asked.at:
            if not self._asked.is_scripted:
                self._try(self._show)
            return
        self._try(lambda: self._go(self._place(self._asked.at)))

    def _position(self) -> dict[str, Any]:
        return {"inside": self._debugger.inside, "frame": self._frame}

    def _arrive(self, message: Mapping[str, Any]) -> None:
        """Go on in place of the process that handed on."""
        self._frame = message["frame"]
        if message.get("inside") is not None:
            self._debugger.into(message["inside"])
        else:
            self._debugger.out()
        then = message.get("then")
        search = message.get("search")
        if search is not None:
            self._try(lambda: self._search_back(*search))
            return

        def arrived() -> None:
            self._walk_to(message["position"])
            if message.get("refused"):
                self._differs(message["refused"])
            elif then == "show":
                self._show()
            elif then is not None:
                self._compare(*then[1:], known=message["known"])

        self._try(arrived)

    def _next_line(self) -> str | None:
        """Return the next command; ``None`` when there are no more."""
        if self._asked.is_scripted:
            number = self._tally.next_command()
            commands = self._asked.commands
            return commands[number] if number < len(commands) else None
        stepper, position = self._debugger.stepper, self._debugger.position
        path, seq = stepper.address_at(position) or ("", -1)
        # The body of a tool has no steps.
        prompt = f"({path}#{seq}) " if path and not stepper.steps(path) else f"(step {stepper.step_at(position)}) "
        return _line_from_terminal(prompt) if sys.stdin.isatty() else _line_from_pipe()

    def _try(self, act: Callable[[], None]) -> None:
        """Do something; what cannot be done is told, and the session goes on."""
        try:
            act()
        except ReplayDivergence as error:
            self._differs(error.message)
        except (StepEngineError, _Refused, UsageProblem, OSError, ValueError) as error:
            self._fail(error.message if isinstance(error, StepEngineError) else str(error))

    def _differs(self, said: str) -> None:
        self._tally.fail(Exit.DIVERGED)
        if self._is_json:
            self._tell("", {"error": self._clean(said), "diverged": True})
        complain(f"{said}\n  {NO_MORE}", Exit.DIVERGED)

    def _fail(self, said: str) -> None:
        if self._asked.is_scripted:
            self._tally.fail(Exit.FAILED)
        if self._is_json:
            self._tell("", {"error": self._clean(said), "diverged": False})
        complain(self._clean(said))

    def _do(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if not name:
            return
        name = SHORTS.get(name, name)
        command = COMMANDS.get(name)
        if command is None:
            hint = did_you_mean(name, COMMANDS, alike=0.5, otherwise="; `help` lists them")
            self._fail(f"there is no command {name[:40]!r}{hint}")
            return
        if self._parked is not None and command.goes:
            self._fail(NO_MORE)
            return
        if self._running is not None and not command.in_frame:
            self._fail(
                "the handler stands in a breakpoint: print, locals, list, where and quit work here, `continue` goes on"
            )
            return
        self._try(lambda: command.act(self, rest.strip()))

    # --- going --------------------------------------------------------------------------------------------------------

    def _walk_to(self, position: int, *, jumps: bool = True, **kept: object) -> None:
        self._jumps = jumps
        try:
            with _hush_handler(self._asked, as_json=self._is_json):
                self._debugger.to(position, **kept)
        finally:
            self._jumps = True

    def _go(self, position: int, *, jumps: bool = True) -> None:
        self._frame = 0
        if position > self._debugger.position and self._debugger.position >= self._debugger.last:
            self._refuse_end()
        self._walk_to(position, jumps=jumps, then="show")
        self._show()

    def _refuse_end(self) -> Never:
        inside = self._debugger.inside
        msg = (
            f"the run ends here: it has {self._debugger.last} results"
            if inside is None
            else f"the run {inside} has nothing after this; `out` follows all runs again"
        )
        raise _Refused(msg)

    def _place(self, text: str) -> int:
        if not text:
            msg = "name a place: a step such as 12, or an effect such as #5 or 3.2#1"
            raise _Refused(msg)
        return self._debugger.place(text)

    def next(self, rest: str, sign: int = 1) -> None:
        """Go positions on or back."""
        target = self._debugger.position_after(sign * _count(rest))
        if target == self._debugger.position:
            self._refuse_end() if sign > 0 else self._refuse_start()
        self._go(target, jumps=False)

    def step(self, rest: str, sign: int = 1) -> None:
        """Go steps on or back."""
        target = self._debugger.position_of_step_after(sign * _count(rest))
        if target == self._debugger.position:
            self._refuse_end() if sign > 0 else self._refuse_start()
        self._go(target)

    def _refuse_start(self) -> Never:
        inside = self._debugger.inside
        msg = (
            "this is the first position"
            if inside is None
            else f"the run {inside} has nothing before this; `out` follows all runs again"
        )
        raise _Refused(msg)

    def goto(self, rest: str) -> None:
        """Go to a step or an effect."""
        self._go(self._place(rest))

    def ends(self, rest: str, *, last: bool) -> None:
        """Go to the first or the last position."""
        self._go_quietly(self._debugger.last if last else 0)

    def _go_quietly(self, position: int) -> None:
        self._frame = 0
        self._walk_to(position, then="show")
        self._show()

    def until(self, rest: str) -> None:
        """Go on to where something holds."""
        from stepengine.debugging.debugger import is_harmless

        if not rest:
            msg = "until what? A line (41, file.py:41), @tool_name, error, or an expression"
            raise _Refused(msg)
        start = self._debugger.position
        if self._forked is None or is_harmless(rest):
            with _hush_handler(self._asked, as_json=self._is_json):
                found = self._debugger.until(rest)
            self._tell_search(rest, self._debugger.problem, self._debugger.looked_at, found=found)
        else:
            told = self._looked_in_child(rest, start + 1, self._debugger.last, backwards=False)
            if told.get("differs"):
                self._walk_to(self._debugger.last)
                # The run by itself is as recorded: it is the expression that did something to it.
                self._fail(f"{rest} changes what the run does, so that there is no looking for it")
                self._walk_to(start, then=None)
                return
            self._tell_search(rest, told["problem"], told["looked_at"], found=told["found"] is not None)
            self._walk_to(self._debugger.last if told["found"] is None else told["found"])
        self._show()

    def _looked_in_child(self, what: str, first: int, last: int, *, backwards: bool) -> dict[str, Any]:
        """Look in a process that is thrown away: expressions may do something to what they look at."""
        from stepengine.debugging.debugger import in_child

        def look() -> str:
            if self._forked is not None:
                self._forked.stays = True
            try:
                with _hush_handler(self._asked, as_json=self._is_json):
                    return json.dumps(self._debugger.look(what, first, last, backwards=backwards))
            except ReplayDivergence as error:
                # Of the process that is thrown away: where this one goes itself, it says more, and stands there.
                return json.dumps({"found": None, "problem": error.message, "looked_at": 0, "differs": True})

        self._debugger.check(what)
        said = in_child(look, seconds=LOOK_SECONDS)
        if not said:
            msg = "looking for it ended early: its code, or that of the handler, ended the process"
            raise _Refused(msg)
        found: dict[str, object] = json.loads(said)
        return found

    def _tell_search(self, what: str, problem: str, looked_at: int, *, found: bool) -> None:
        if problem:
            complain(self._clean(f"{what}: {problem} (counted as false; shown once)"))
        if not found:
            self._fail(f"{what} never held: {looked_at} positions were looked at")

    def rback(self, rest: str) -> None:
        """Go back to where something held."""
        start = self._debugger.position
        if not rest:
            msg = "back to what? A line (41, file.py:41), @tool_name, error, or an expression"
            raise _Refused(msg)
        if start == 0:
            self._refuse_start()
        self._debugger.check(rest)
        if self._forked is None:
            with _hush_handler(self._asked, as_json=self._is_json):
                found = self._debugger.until(rest, backwards=True)
            self._tell_search(rest, self._debugger.problem, self._debugger.looked_at, found=found)
            self._show()
        else:
            self._forked.leave(start - 1, search=[rest, start, 0, ""])

    def _search_back(self, what: str, before: int, looked_at: int, problem: str) -> None:
        """Look through the positions from this place on; when there is nothing, the place before this one looks."""
        here = self._debugger.position
        told = self._looked_in_child(what, here, before - 1, backwards=True)
        looked_at, problem = looked_at + told["looked_at"], problem or told["problem"]
        if told["found"] is None and here > 0 and self._forked is not None:
            self._forked.leave(here - 1, search=[what, here, looked_at, problem])
        self._tell_search(what, problem, looked_at, found=told["found"] is not None)
        self._walk_to(told["found"] or 0)
        self._show()

    def into(self, rest: str) -> None:
        """Follow a child."""
        if not rest:
            msg = "into which child? Name its path, such as 3 or 3.2"
            raise _Refused(msg)
        self._go_quietly(self._debugger.into(rest))

    def out(self, rest: str) -> None:
        """Follow all runs."""
        self._debugger.out()
        self._tell("all runs count again", {"inside": None})

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def _is_json(self) -> bool:
        return self._options.as_json

    def _clean(self, text: str) -> str:
        return self._debugger.texts.clean(text)

    def _tell(self, text: str, data: Mapping[str, object]) -> None:
        """Print what a command has to say, as text or as one JSON object in a line."""
        if self._is_json:
            print(json.dumps({"format": FORMAT, **data}).replace("\x7f", "\\u007f"), flush=True)
        else:
            say(text)

    def _show(self) -> None:
        """Show where everybody stands."""
        moment = self._debugger.moment()
        self._tell("\n".join(self._screen(moment)), self._debugger.told())

    def _screen(self, moment: Moment) -> Iterator[str]:
        stepper, state = self._debugger.stepper, moment.state
        is_program = any(frame.kind == "program" for frame in moment.frames)  # which has no steps
        place = [
            *([] if is_program else [f"step {moment.step} of {stepper.steps(moment.address.rpartition('#')[0])}"]),
            moment.address or "the end",
            str(timedelta(seconds=moment.at // 1000)).rjust(8, "0"),
        ]
        if self._debugger.inside is not None:
            place.append(f"inside {self._debugger.inside}")
        sums = f"{money(state.cost)} · {state.context_tokens:,} tokens in view"
        head = f"── {' · '.join(place)} "
        yield f"{head}{'─' * max(2, self._width - len(head) - len(sums) - 4)} {sums} ──"
        frames = [frame for frame in moment.frames if frame.kind != "package" or self._options.verbose]
        if frames:
            shown = frames[0] if self._frame >= len(frames) else frames[self._frame]
            yield from self._source(shown, 4)
            inner = [f"{_last_part(frame)}:{frame.line}" for frame in frames[1:]]
            if inner:
                yield f"   in {' > '.join(inner)}"
        else:
            yield f"{moment.agent_id}: nothing of the author's waits here"
        line = getattr(moment.effect, "program_line", 0)
        at = f"  (line {line})" if line and any(f.kind == "program" and f.line != line for f in frames) else ""
        yield f" asked     {cut(self._clean(moment.asked), self._width)}{at}"
        yield f" answer    {cut(self._answer(moment), self._width)}"
        yield from self._values(frames[0 if self._frame >= len(frames) else self._frame] if frames else None)

    def _values(self, frame: Frame | None) -> Iterator[str]:
        """Give the variables of a frame in a line, what a program printed, and what programs have left."""
        texts = self._debugger.texts
        if frame is not None and frame.kind == "program":
            said = self._debugger.printed(frame)
            nothing = "(nothing so far)" if said is not None else "(unknown: its sandbox is not here to say so)"
            printed = said.removesuffix("\n").split("\n") if said else [nothing]
            if len(printed) > MAX_PRINTED:
                printed = [f"... ({counted(len(printed) - MAX_PRINTED, 'line')} before)", *printed[-MAX_PRINTED:]]
            for name, line in zip(("printed", *[""] * len(printed)), printed, strict=False):
                yield f" {name:<9} {cut(line, self._width)}"
        elif frame is not None:
            values = [f"{n}={texts.named(n, v, limit=SHORT)}" for n, v in frame.locals.items()]
            yield f" locals    {'  '.join(values)}"
        variables = self._debugger.variables()
        if variables:
            yield f" variables {cut('  '.join([f'{n}={cut(v, SHORT)}' for n, v in variables.items()]), self._width)}"

    def _answer(self, moment: Moment) -> str:
        from stepengine.debugging.debugger import outcome_text

        if moment.outcome is not None:
            return outcome_text(moment.outcome, self._debugger.texts)
        if self._parked is not None:
            return "none: the run differs from its record here"
        return "none is recorded" if moment.effect is not None else ""

    @property
    def _width(self) -> int:
        import shutil

        return self._asked.width or shutil.get_terminal_size().columns

    def _source(self, frame: Frame, most: int) -> Iterator[str]:
        from stepengine.debugging.debugger import lines_around

        if frame.kind == "program":
            yield f"the program of {self._caller()}, which a model wrote"
        else:
            yield f"{self._clean(_shown_file(frame.file))}  {frame.function}{' (package)' if frame.kind == 'package' else ''}"
        if frame.kind == "opaque":
            yield "  what waits here cannot be looked into"
            return
        lines = list(lines_around(frame, most))
        if frame.file and self._is_newer(frame.file):
            yield "  (the file was changed after its code was loaded)"
        if not lines:
            yield f"  > {frame.line}  (the file cannot be read)"
        for number, line in lines:
            yield f" {'>' if number == frame.line else ' '} {number:<4} {cut(self._clean(line), self._width)}"

    def _caller(self) -> str:
        """Return the address of the call whose body waits."""
        from stepengine.journal.history import parent_of
        from stepengine.journal.records import shown_address

        return shown_address(*parent_of(self._debugger.moment().address.rpartition("#")[0]))

    def _file(self, frame: Frame) -> str:
        return f"of {self._caller()}" if frame.kind == "program" else self._clean(_shown_file(frame.file))

    def _is_newer(self, file: str) -> bool:
        with contextlib.suppress(OSError):
            return Path(file).stat().st_mtime > self._began
        return False

    def _frames(self) -> list[Frame]:
        if self._running is not None:
            return [self._running]
        moment = self._debugger.moment()
        return [f for f in moment.frames if f.kind != "package" or self._options.verbose]

    def _frame_here(self) -> Frame:
        frames = self._frames()
        if not frames:
            msg = "nothing of the author's waits here"
            raise _Refused(msg)
        return frames[min(self._frame, len(frames) - 1)]

    def where(self, rest: str) -> None:
        """List the frames."""
        frames = self._frames()
        lines = [
            f"{'>' if n == self._frame else ' '} {n} {frame.kind:<8} {frame.function} {self._file(frame)}:{frame.line}"
            for n, frame in enumerate(frames)
        ]
        data = [{"function": f.function, "file": f.file, "line": f.line, "kind": f.kind} for f in frames]
        self._tell("\n".join(lines) or "nothing of the author's waits here", {"frames": data})

    def source(self, rest: str) -> None:
        """Show the source around the line that waits."""
        frame = self._frame_here()
        said = "\n".join(self._source(frame, _count(rest) if rest else 2 * AROUND))
        self._tell(said, {"file": frame.file, "line": frame.line, "source": self._clean(said)})

    def up(self, rest: str, by: int = -1) -> None:
        """Choose the frame outside of this one, or inside."""
        frames = self._frames()
        chosen = self._frame + by * _count(rest)
        if not 0 <= chosen < len(frames):
            msg = f"there is no frame {chosen}: 0 is the outermost, {len(frames) - 1} the innermost"
            raise _Refused(msg)
        self._frame = chosen
        self.source(str(AROUND))

    def locals(self, rest: str) -> None:
        """Show all variables: those of the frame, and those that programs have left."""
        frames, left = self._frames(), self._debugger.variables() if self._running is None else {}
        here = None if left and not frames else self._frame_here()
        if here is not None and here.kind == "program":
            self._tell("a program tells its variables when it has ended, not while it waits", {"locals": {}})
            return
        values = {**left, **({} if here is None else self._debugger.locals_of(here))}
        width = max([len(name) for name in values], default=0)
        lines = [f"{name:<{width}}  {text}" for name, text in values.items()]
        self._tell("\n".join(lines) or "no variables", {"locals": values})

    def print(self, rest: str, *, pretty: bool = False) -> None:
        """Show what an expression gives."""
        if not rest:
            msg = "print what? An expression, such as len(seen)"
            raise _Refused(msg)
        made = self._debugger.evaluate_in(self._frame_here(), rest, pretty=pretty)
        if made.raised and self._asked.is_scripted:
            self._tally.fail(Exit.FAILED)
        self._tell(made.text, {"expression": rest, "text": made.text, "raised": made.raised})

    def state(self, rest: str) -> None:
        """Show the state: the record."""
        state = self._debugger.moment().state
        texts = self._debugger.texts
        head = [
            f"run_id {state.run_id}  agent {state.agent_id}  steps remaining {state.steps_remaining}",
            f"usage {state.usage.total_tokens:,} tokens, {money(state.cost)}",
            f"output {texts.value(state.output)}",
            f"context {texts.value(state.context)}",
            f"{len(state.message_history)} messages",
        ]
        self._messages(head, state.message_history)

    def view(self, rest: str) -> None:
        """Show what the model is shown of the history."""
        view = self._debugger.moment().view
        self._messages([f"{len(view)} messages in view"], view)

    def _messages(self, head: Sequence[str], messages: Any) -> None:
        clean, width = self._debugger.texts.clean, self._width
        lines = [f"{n:>4} {m.role:<9} {clean(' '.join(m.text.split()), width)}" for n, m in enumerate(messages)]
        self._tell("\n".join([*head, *lines]), {"head": head, "messages": lines})

    def request(self, rest: str) -> None:
        """Show the last request that was made."""
        request = self._debugger.moment().request
        if request is None:
            msg = "no model was asked yet"
            raise _Refused(msg)
        head = [
            f"model {self._clean(request.model)}",
            f"tools {', '.join([spec.name for spec in request.tools]) or 'none'}",
            f"settings {self._debugger.texts.value(request.settings)}",
            f"system {self._clean(request.system_prompt)}",
        ]
        self._messages(head, [*request.messages, *request.tail])

    def result(self, rest: str, *, reply: bool = False) -> None:
        """Show what came back, whole."""
        moment = self._debugger.moment()
        if moment.outcome is None:
            msg = "nothing came back here"
            raise _Refused(msg)
        if isinstance(moment.outcome, Failure):
            error = moment.outcome.error
            text: Any = f"{type(error).__name__}: {error.message}"
            lines = [self._clean(text)]
        else:
            text = getattr(moment.outcome.value, "text", None)
            lines = self._debugger.texts.lines(moment.outcome.value, width=max(SHORT, self._width))
        said = [self._clean(text)] if isinstance(text, str) and text and not reply else lines
        self._tell("\n".join(said), {"result": said})

    def hooks(self, rest: str) -> None:
        """Show the hooks that were called since the last outcome, and what they said."""
        called = [(h.point, h.hook, self._debugger.texts.value(h.said)) for h in self._debugger.moment().hooks]
        lines = [f"{point} {name}: {said}" for point, name, said in called]
        self._tell("\n".join(lines) or "no hook was called here", {"hooks": [list(each) for each in called]})

    def cost(self, rest: str) -> None:
        """Show what was spent up to here."""
        state = self._debugger.moment().state
        cost = None if state.cost is None else str(state.cost)
        said = f"{money(state.cost)} · {state.usage.total_tokens:,} tokens · {state.context_tokens:,} in view"
        self._tell(said, {"cost": cost, "tokens": state.usage.total_tokens})

    def diff(self, rest: str) -> None:
        """Show what differs between two places."""
        places = rest.split()
        if len(places) != 2:  # noqa: PLR2004
            msg = "diff compares two places: diff 3 5, diff #2 3.2#1"
            raise _Refused(msg)
        one, two = self._place(places[0]), self._place(places[1])
        self._compare(one, two, self._debugger.position, known={})

    def _compare(self, one: int, two: int, stood: int, *, known: dict[str, dict[str, object]]) -> None:
        """Compare two positions, *known* being what was seen of them already, and go back to where this stood."""
        from stepengine.debugging.debugger import difference

        for position in sorted((one, two)):
            if str(position) not in known:
                self._walk_to(position, then=["diff", one, two, stood], known=known)
                known[str(position)] = self._debugger.summary()
        lines = difference(known[str(one)], known[str(two)])
        self._tell("\n".join(lines) or "nothing differs", {"diff": lines})
        self._walk_to(stood, then=None)

    # --- forks --------------------------------------------------------------------------------------------------------

    def fork(self, rest: str) -> None:
        """Go on from here, in a new journal."""
        from stepengine.journal.finding import database_of

        asked = _fork_of(rest)
        source = self._options.journal
        into = asked.into or _free_name(Path((database_of(source) or (source, ""))[0]))
        bench_options = attrs.evolve(self._options, journal=self._options.journal)
        act = partial(self._forked_run, asked, into, bench_options)
        if asked.live:
            self._confirm(asked)
        if self._forked is None:
            told = json.loads(act())
        else:
            from stepengine.debugging.debugger import in_child

            said = in_child(act, seconds=LOOK_SECONDS, network=True)
            if not said:
                msg = "the fork ended early"
                raise _Refused(msg)
            told = json.loads(said)
        if told.get("error"):
            raise _Refused(told["error"])
        place = self._debugger.stepper.address_at(self._debugger.position)
        at = "" if place is None else f"{place[0]}#{place[1]}"
        self._tell(
            f" new journal {into}, parent at {at}; {counted(told['steps'], 'step')}, {told['status']}"
            + (f": {told['said']}" if told["said"] else ""),
            {"journal": into, "at": at, **told},
        )
        self._stand_in(into)

    def _confirm(self, asked: _Fork) -> None:
        """Ask before models are asked for money."""
        from stepengine.evaluation.samples import course_from
        from stepengine.journal.records import shown_address

        stepper = self._debugger.stepper
        history, place = stepper.history, stepper.address_at(stepper.position)
        left = None if place is None else course_from(history, shown_address(*place)).cost
        models = sorted({history.model(i) for i in history.intents.values() if i.type == "model_call"})
        price = (
            "an unknown price"
            if left is None
            else f"about {money(left)} to {money(2 * left)}, as the recorded part after this"
        )
        if asked.is_agreed:
            return
        question = f"ask {', '.join(models) or 'the model'} for real, for {price}? [y/N] "
        if self._asked.is_scripted or not sys.stdin.isatty():
            msg = f"{question.removesuffix('? [y/N] ')}: nobody is here to agree; say --yes with --live"
            raise _Refused(msg)
        answer = _line_from_terminal(self._clean(question))
        if (answer or "").strip().lower() not in ("y", "yes"):
            msg = "no model was asked"
            raise _Refused(msg)

    def _forked_run(self, asked: _Fork, into: str, options: Options) -> str:
        """Run on from here; return what became of it as JSON."""
        from stepengine.journal.show import status_of
        from stepengine.testing import ScriptedModel

        try:
            target = new_journal(into)
            history = self._debugger.stepper.history
            agent = recorded_agent(self._debugger.journal, options, history)
            bench = bench_for(options, agent, into=name_of(target), recorded=history)
            debugger = self._debugger.with_engine(bench.engine)
            models = None if asked.live else ScriptedModel(asked.replies)
            edit = asked.edit

            async def ended() -> Any:
                async with bench.engine:
                    return await debugger.fork(
                        edit, models=models, into=target, allow_repeat=asked.allow_repeat, served=asked.served
                    )

            with _hush_handler(self._asked, as_json=self._is_json):
                result = asyncio.run(ended())
        except (StepEngineError, UsageProblem, OSError, ValueError) as error:
            said = error.message if isinstance(error, StepEngineError) else str(error)
            return json.dumps({"error": said})
        history = target.history()
        steps = sum(i.type == "model_call" and not i.path for i in history.intents.values())
        why = "" if result.error is None else str(result.error)
        if why and not asked.live:
            why += "\n   the models are scripted: --script FILE says what they reply, --live asks them"
        return json.dumps({"status": status_of(history), "steps": steps, "said": self._clean(why)})

    def _stand_in(self, journal: str) -> None:
        """Debug another run in this one's place, until somebody says ``parent``."""
        options = attrs.evolve(self._options, journal=journal, last=False, stem="")
        inner = attrs.evolve(self._asked, at="", is_inner=True)
        if self._forked is None:
            code = int(_debug(options, inner, self._tally))
            sys.breakpointhook = self._breakpoint
        else:
            code = self._in_process(lambda: int(_debug(options, inner, self._tally)))
        if code == PARENT:
            self._show()
        else:
            self._code = code

    def _in_process(self, act: Callable[[], int]) -> int:
        from stepengine.debugging.debugger import leave_process, waited

        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code: int = Exit.FAILED
            try:
                code = act()
            except BaseException as error:  # noqa: BLE001 - nothing of this process goes back to where it was forked
                complain(f"the debugger broke: {type(error).__name__}: {error}")
            leave_process(code)
        return waited(pid)

    def parent(self, rest: str) -> None:
        """Go back to the run that this one was forked from."""
        if not self._asked.is_inner:
            msg = "this run was not forked here"
            raise _Refused(msg)
        self._code = PARENT

    # --- breakpoints --------------------------------------------------------------------------------------------------

    def _breakpoint(self, *_: object, **__: object) -> None:
        """Open the loop in the frame that called ``breakpoint()``; not on the way to somewhere else."""
        from stepengine.debugging.debugger import frame_of

        if self._jumps:
            return
        caller: FrameType | None = sys._getframe(1)  # noqa: SLF001
        if caller is None:
            return
        if not self._asked.is_scripted and not sys.stdin.isatty():
            if not self._warned:
                self._warned = True
                warnings.warn("breakpoint() is ignored: no terminal is there to stop at", stacklevel=2)
            return
        self._running, kept, self._frame = frame_of(caller), self._frame, 0
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                self._tell(
                    "\n".join(["breakpoint()", *self._source(self._running, AROUND)]),
                    {"breakpoint": self._running.function, "file": self._running.file, "line": self._running.line},
                )
                self._serve_frame()
        finally:
            self._running, self._frame = None, kept

    def _serve_frame(self) -> None:
        while True:
            line = self._next_line()
            if line is None or line.strip() in ("continue", "c"):
                return
            if line.strip() in ("quit", "q"):
                if self._forked is not None:
                    self._forked.finish(self._tally.code)
                raise SystemExit(self._tally.code)
            self._do(line)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def both(self, rest: str, *, recorded: bool) -> None:
        """Show one side of a divergence."""
        if self._parked is None:
            msg = "the run does what is recorded; these show both sides where it does not"
            raise _Refused(msg)
        fields = [(f.pointer, f.recorded if recorded else f.now) for f in self._parked.diff]
        lines = [f"{pointer:<34} {value}" for pointer, value in fields]
        self._tell(
            self._clean("\n".join(lines)) or self._clean(self._parked.message), {"fields": [list(f) for f in fields]}
        )

    def quit(self, rest: str) -> None:
        """Leave."""
        self._code = self._tally.code

    def help(self, rest: str) -> None:
        """Tell of the commands."""
        command = COMMANDS.get(SHORTS.get(rest, rest)) if rest else None
        if rest and command is None:
            msg = f"there is no command {rest[:40]!r}"
            raise _Refused(msg)
        shorts = {name: short for short, name in SHORTS.items()}
        rows = [(name, c) for name, c in COMMANDS.items() if command is None or c is command]
        lines = [
            f"{f'{name} {c.takes}'.strip():<32} {f'({shorts[name]}) ' if name in shorts else ''}{c.does}"
            for name, c in rows
        ]
        more = [command.more] if command is not None and command.more else []
        self._tell("\n".join([*lines, *more]), {"help": lines})


# --- lines ----------------------------------------------------------------------------------------------------------


def _line_from_terminal(prompt: str) -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - what makes `input` remember lines
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def _line_from_pipe() -> str | None:
    """Read one line, and no byte more: what is left belongs to whichever process reads next."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return None if not byte and not line else line.decode("utf-8", "replace")


def _count(text: str) -> int:
    if not text:
        return 1
    if not text.isdecimal() or len(text) > 9 or int(text) == 0:  # noqa: PLR2004
        msg = f"{text[:40]!r} is no count; it is a number from 1 on"
        raise _Refused(msg)
    return int(text)


def _last_part(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


def _shown_file(file: str) -> str:
    with contextlib.suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def _free_name(source: Path) -> str:
    for number in range(1, 10_000):
        path = source.with_name(f"{source.stem}-{number}.jsonl")
        if not path.exists():
            return str(path)
    msg = f"{source} has ten thousand forks beside it; name another file with --into"
    raise _Refused(msg)


# --- what is typed for a fork ---------------------------------------------------------------------------------------


@frozen
class _Fork:
    """A fork as it was typed."""

    edit: Any = None
    replies: Any = ()
    live: bool = False
    is_agreed: bool = False
    allow_repeat: bool = False
    served: bool = False
    into: str = ""


FLAGS = {"--live": "live", "--yes": "is_agreed", "--allow-repeat": "allow_repeat", "--served": "served"}


def _fork_of(text: str) -> _Fork:
    try:
        words = shlex.split(text)
    except ValueError as error:
        msg = f"this cannot be read: {error}; quote texts with spaces"
        raise _Refused(msg) from None
    given: dict[str, Any] = {}
    while words:
        name = words.pop(0)
        if name in FLAGS:
            given[FLAGS[name]] = True
            continue
        if name not in ("--reply", "--result", "--raise", "--script", "--into") or not words:
            msg = (
                f"fork takes no {name[:40]!r}; it takes --reply TEXT|@FILE, --result JSON|@FILE, --raise KIND:TEXT, "
                "--script FILE or --live, --yes, --served, --allow-repeat, --into FILE"
            )
            raise _Refused(msg)
        value = words.pop(0)
        if name == "--into":
            given["into"] = value
        elif name == "--script":
            given["replies"] = script_of(value)
        else:
            given["edit"] = _edit_of(name, value)
    if given.get("live") and "replies" in given:
        msg = "--live and --script name two kinds of models; give one of them"
        raise _Refused(msg)
    return _Fork(**given)


def _edit_of(name: str, value: str) -> object:
    if name == "--raise":
        kind, _, said = value.partition(":")
        return _error_of(kind, said)
    if value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8")
    if name == "--reply":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _error_of(kind: str, said: str) -> StepEngineError:
    from stepengine import errors

    known = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, StepEngineError)}
    if kind not in known:
        msg = f"there is no error {kind[:40]!r}, such as ToolError:gone{did_you_mean(kind, known)}"
        raise _Refused(msg)
    return known[kind](said)


# --- at a divergence ------------------------------------------------------------------------------------------------


def debug_divergence(stepper: Stepper, error: ReplayDivergence, journal: Journal, options: Options) -> None:
    """Open the loop where a replay differs from its record: its machine still waits there."""
    from stepengine.debugging.debugger import Debugger, PausedWalk
    from stepengine.engine import Engine

    complain(error.message, Exit.DIVERGED)
    engine = Engine()
    session = DebugSession(
        Debugger(engine, PausedWalk(stepper)),
        attrs.evolve(options, journal=name_of(journal)),
        _DebugOptions(),
        Tally(),
        parked=error,
    )
    session.serve(None)
    engine.close()


class _Command(NamedTuple):
    """One command: what it takes, what it does in a few words, and how it is done."""

    act: Callable[[DebugSession, str], None]
    takes: str
    does: str
    goes: bool = False
    in_frame: bool = False
    more: str = ""


OWN_CODE = (
    "the expression is your own code: it runs in a forked process without network, and files are unprotected there"
)
COMMANDS: dict[str, _Command] = {
    "next": _Command(DebugSession.next, "[COUNT]", "one position on", goes=True),
    "back": _Command(lambda s, rest: s.next(rest, -1), "[COUNT]", "one position back", goes=True),
    "step": _Command(DebugSession.step, "[COUNT]", "one step on", goes=True),
    "unstep": _Command(lambda s, rest: s.step(rest, -1), "[COUNT]", "one step back", goes=True),
    "goto": _Command(DebugSession.goto, "N|PATH#N", "to a step or an effect", goes=True),
    "first": _Command(lambda s, rest: s.ends(rest, last=False), "", "to the first position", goes=True),
    "last": _Command(
        lambda s, rest: s.ends(rest, last=True), "", "to the last one, or the question that is open", goes=True
    ),
    "until": _Command(DebugSession.until, "LINE|@TOOL|error|EXPR", "on to where it holds", goes=True),
    "rback": _Command(DebugSession.rback, "LINE|@TOOL|error|EXPR", "back to where it held", goes=True),
    "into": _Command(DebugSession.into, "PATH", "follow a child: only its positions count", goes=True),
    "out": _Command(DebugSession.out, "", "follow all runs again"),
    "where": _Command(DebugSession.where, "", "the frames", in_frame=True),
    "list": _Command(DebugSession.source, "[LINES]", "the source around the line that waits", in_frame=True),
    "up": _Command(DebugSession.up, "[COUNT]", "the frame outside of this one"),
    "down": _Command(lambda s, rest: s.up(rest, 1), "[COUNT]", "the frame inside of this one"),
    "locals": _Command(DebugSession.locals, "", "all variables of the frame", in_frame=True),
    "print": _Command(DebugSession.print, "EXPR", "an expression in the frame", in_frame=True, more=OWN_CODE),
    "pp": _Command(
        lambda s, rest: s.print(rest, pretty=True), "EXPR", "the same in several lines", in_frame=True, more=OWN_CODE
    ),
    "state": _Command(DebugSession.state, "", "the state: the record"),
    "view": _Command(DebugSession.view, "", "what the model is shown of it"),
    "request": _Command(DebugSession.request, "", "the last request"),
    "reply": _Command(lambda s, rest: s.result(rest, reply=True), "", "what comes back here, by its members"),
    "result": _Command(DebugSession.result, "", "what comes back here"),
    "hooks": _Command(DebugSession.hooks, "", "the hooks since the last outcome"),
    "cost": _Command(DebugSession.cost, "", "what was spent"),
    "diff": _Command(DebugSession.diff, "N M", "what differs between two places", goes=True),
    "fork": _Command(
        DebugSession.fork,
        "[OPTIONS]",
        "go on from here in a new journal",
        goes=True,
        more="--reply TEXT|@FILE, --result JSON|@FILE or --raise KIND:TEXT: another outcome for what waits here\n"
        "--script FILE: what models reply, as for `stepengine compare impact`; without it the first model call fails. --live asks them, --yes without asking you\n"
        "--served: no tool runs; what was recorded after it serves where it is equal, else the run ends as failed\n"
        "--into FILE: the new journal; --allow-repeat: what changed the world may happen again",
    ),
    "parent": _Command(DebugSession.parent, "", "back to the run that this one was forked from"),
    "recorded": _Command(lambda s, rest: s.both(rest, recorded=True), "", "at a divergence: what is recorded"),
    "asked": _Command(lambda s, rest: s.both(rest, recorded=False), "", "at a divergence: what is asked for now"),
    "quit": _Command(DebugSession.quit, "", "leave"),
    "help": _Command(DebugSession.help, "[COMMAND]", "this list", in_frame=True),
}
SHORTS = {
    "n": "next", "b": "back", "s": "step", "u": "until", "g": "goto", "w": "where", "l": "list", "p": "print", "q": "quit",
    "h": "help", "?": "help",
}  # fmt: skip
