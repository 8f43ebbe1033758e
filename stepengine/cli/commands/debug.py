"""
``stepengine debug``: steps through a recorded run forwards and backwards, and forks it with a changed outcome.

If this process can fork, the debugger consists of several processes (``ForkedWalk``), and the one that is awake has the terminal. The
number of the next ``--exec`` command and the exit code are in memory that they share.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Never, cast

import attrs
import typer

from stepengine.cli import debug_inspection as inspection
from stepengine.cli.debug_forks import fork_run
from stepengine.cli.debug_navigation import DebugNavigation
from stepengine.cli.debug_screen import (
    AROUND,
    NO_MORE,
    DebugOptions,
    DebugScreen,
    RefusedCommand,
    SharedCounters,
    hide_or_redirect_handler_output,
)
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import load_replay_setup, open_journal, run_on_journal
from stepengine.cli.options import File, Last, Options, with_shared_options
from stepengine.cli.screen.render import format_count, print_visible
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import did_you_mean
from stepengine.data.programs import is_sandboxed
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.debugging.walks import ForkedWalk
    from stepengine.engine import Engine
    from stepengine.engine.stepper import Stepper
    from stepengine.journal import Journal
    from stepengine.journal.history import History

AGAIN = "code between yields runs again; recorded effects do not"
PARENT = 76
"""The exit code of the debugger of a fork that returns to the debugger of the parent run."""


@with_shared_options
def debug(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[str, typer.Option(help="Where to start: a step, or an effect.", metavar="N|PATH#N")] = "",
    commands: Annotated[
        list[str] | None,
        typer.Option("--exec", help="Run this command and exit; may be repeated.", metavar="CMD"),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the position of --at again whenever a file of the agent is saved.")
    ] = False,
    no_fork: Annotated[bool, typer.Option("--no-fork", help="Use paused replays instead of processes.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide the output of the handler.")] = False,
) -> Exit:
    """
    Step through a recorded run, forwards and backwards.

    Shows the handler's variables, the current line, each request and its result. The agent's current code runs
    again, and the record supplies all results. Code between yields runs again; recorded effects do not.

    `help` lists the commands; most have a short name: next, back, step, unstep, goto, first, last, until, rback, into,
    out, where, list, up, down, locals, print, pp, state, view, request, reply, result, hooks, origins, cost, diff, fork,
    parent, quit.

    --watch shows the effect of edits on a recorded run: at every save, the run is replayed with the new code, and
    the differences at the chosen position are shown, or the first effect that diverges. Model replies come from the
    record, no tool runs, and code that hangs is stopped after 5 seconds. Type another position to watch it; Ctrl-C or
    `quit` exits.

    Exits with 0; with 1 if a command of --exec fails (a print whose expression raises fails, too); with 5 if the
    code diverges from the record before the requested place.

    Examples:
      stepengine debug --last
      stepengine debug run.jsonl --at 12
      stepengine debug run.jsonl --exec "goto 12" --exec "print len(seen)"
      stepengine debug run.jsonl --exec "until error" --json
      stepengine debug run.jsonl --agent ./agents/triage.py --at 12 --watch
    """
    options = attrs.evolve(options, journal=file, last=last, quiet=True)
    if watch:
        from stepengine.cli.debug_watch import watch_position

        if commands is not None or no_fork:
            msg = "--watch shows one position repeatedly, in its own processes; leave out --exec and --no-fork"
            raise UsageProblem(msg)
        return run_on_journal(options, lambda options: watch_position(options, at, prints=not quiet))
    asked = DebugOptions(
        at, tuple(commands or ()), is_scripted=commands is not None, no_fork=no_fork, quiet_handler=quiet
    )
    return run_on_journal(options, lambda options: _load_and_debug(options, asked, SharedCounters()))


def _find_process_fork_problem(engine: Engine, history: History) -> str:
    """Return why the run cannot continue in a forked process (``os.fork``), such as its programs; ``""`` if it can."""
    from stepengine.journal.programs import has_programs

    # If the agent's file did not import this module, none of its tools runs programs.
    if "stepengine.sandbox.program_tool" in sys.modules and has_programs(history):
        return "programs do not run in forked processes"
    is_theirs = any(is_sandboxed(agent.handle_steps) for agent in engine.agents)
    return "handlers in the sandbox do not run in forked processes" if is_theirs else ""


def _load_and_debug(options: Options, debug_options: DebugOptions, counters: SharedCounters) -> Exit:
    """Load a run and its agent, and debug it until the user leaves; return the exit code."""
    from stepengine.debugging.debugger import Debugger
    from stepengine.debugging.walks import ForkedWalk, PausedWalk, Rewound, find_os_fork_problem

    journal = open_journal(options.journal)
    try:
        history = journal.history()
        agent, bench = load_replay_setup(options, history)
        with hide_or_redirect_handler_output(debug_options, as_json=options.as_json):
            stepper = bench.engine.stepper(journal, agent=agent)
    except ReplayDivergence:
        raise
    except JournalError as error:
        # The journal cannot be debugged, which is wrong usage and not a failed run.
        return print_error(error.message)
    why = (
        "--no-fork"
        if debug_options.no_fork
        else _find_process_fork_problem(bench.engine, history) or find_os_fork_problem()
    )
    forked = None if why else ForkedWalk(stepper)
    debugger = Debugger(bench.engine, forked or PausedWalk(stepper), agent)
    hook = sys.breakpointhook
    session = DebugSession(DebugScreen(debugger, options, debug_options, counters), forked)
    session.print_overview(f"snapshots: {'fork' if forked else f'paused replays ({why})'}")
    code: int | None
    try:
        if forked is None:
            code = session.run_command_loop(None)
        else:
            message: Mapping[str, object] | None = None
            try:
                code = forked.fork_and_wait_in_parent()
            except Rewound as woken:
                code, message = None, woken.message
            if code is None:
                session.run_commands_and_exit_process(message)
    finally:
        sys.breakpointhook = hook
        debugger.close()
        bench.engine.close()
    # After a signal, or a return to the parent run, the code is not one of the table.
    return cast("Exit", code)


class DebugSession:
    """
    The command loop over one run.

    Args:
        screen: Shows the debugger.
        forked: The walk, if it consists of processes.

    Attributes:
        screen: Shows the debugger.
        navigation: The commands that move to another position.
    """

    def __init__(self, screen: DebugScreen, forked: ForkedWalk | None = None) -> None:
        self.screen = screen
        self.navigation = DebugNavigation(screen, forked)
        self._debugger = screen.debugger
        self._asked = screen.asked
        self._forked = forked
        self._warned = False
        self._code: int | None = None
        if forked is not None:
            forked.keeps = self._get_view_to_restore
        sys.breakpointhook = self._open_loop_at_breakpoint

    def print_overview(self, snapshots: str) -> None:
        """Print the run, its steps, its status, *snapshots* and a note about the replay; nothing with ``--json``."""
        tape = self._debugger.stepper.tape
        from stepengine.journal.show import get_run_status

        steps = format_count(tape.count_steps(), "step")
        head = [str(tape.history.root["agent_id"]), steps, get_run_status(tape.history), snapshots]
        if self.screen.is_json:
            return
        said = self.screen.redact_and_escape(f"{self.screen.options.journal}  {' · '.join(head)}")
        print_visible(f"{said}\n{AGAIN}")
        if not self._asked.is_scripted and sys.stdin.isatty():
            print_visible("`help` lists the commands, `quit` leaves")
        if tape.is_in_address_order:
            print_visible("the journal is sorted by address: sibling runs appear one after another")

    def run_commands_and_exit_process(self, message: Mapping[str, object] | None) -> Never:
        """Run the command loop in a child process, and end the process."""
        code = _call_printing_failure(lambda: self.run_command_loop(message))
        assert self._forked is not None  # noqa: S101 - it forked this process
        self._forked.end_all_processes(code)

    def run_command_loop(self, message: Mapping[str, object] | None) -> int:
        """Execute commands until there are none left; return the exit code. *message* is from the process that continues here."""
        from stepengine.debugging.walks import Rewound

        begins = message is None
        while self._code is None:
            start = self._debugger.position
            try:
                if begins:
                    begins = False
                    self._go_to_start_and_show()
                elif message is not None:
                    told, message = message, None
                    self._finish_handed_over_move(told)
                else:
                    self._read_and_run_next_command()
            except Rewound as woken:
                message = woken.message
            except KeyboardInterrupt:
                print_error("interrupted", Exit.INTERRUPTED)
                if self._asked.is_scripted:
                    return Exit.INTERRUPTED
                # The interrupted command left the run somewhere between two positions: replay it to the position before.
                self._restart_replay_at(start)
        return self._code

    def _read_and_run_next_command(self) -> None:
        """Read and run the next command; after the last one, end the loop with the exit code so far."""
        line = self._read_command()
        if line is None:
            self._code = self.screen.tally.exit_code
        else:
            self._run_command(line)

    def _restart_replay_at(self, start: int) -> None:
        """Replay the run from its beginning to position *start*; a forked walk wakes another process and ends this one."""
        if self._forked is not None:
            self._forked.wake_nearest_and_exit(start, then=None)
        from stepengine.debugging.walks import PausedWalk

        walk = self._debugger._walk  # noqa: SLF001
        if isinstance(walk, PausedWalk):
            walk.stepper = walk.stepper.copy_at_start()
            walk.move_to(start)

    def _go_to_start_and_show(self) -> None:
        """Go to the position of ``--at`` and show it; without one, show the current position unless commands are scripted."""
        if not self._asked.at:
            if not self._asked.is_scripted:
                self._call_reporting_errors(self.screen.show_position)
            return
        self._call_reporting_errors(lambda: self.navigation.go_to_typed_position(self._asked.at))

    def _get_view_to_restore(self) -> dict[str, Any]:
        """Return the followed run and the selected frame, for the process that takes over."""
        return {"inside": self._debugger.places.followed_path, "frame": self.screen.frame}

    def _finish_handed_over_move(self, message: Mapping[str, Any]) -> None:
        """Finish a move or search that another process started, with the view and the target in *message*."""
        self.screen.frame = message["frame"]
        if message.get("inside") is not None:
            self._debugger.places.follow_child(message["inside"], self._debugger.position)
        else:
            self._debugger.places.followed_path = None
        then = message.get("then")
        search = message.get("search")
        if search is not None:
            self._call_reporting_errors(lambda: self.navigation.search_back_and_move(*search))
            return

        def finish_move() -> None:
            """Move to the target, then show it, the divergence or the differences."""
            self.navigation.move_silently(message["position"])
            if message.get("refused"):
                self.screen.report_divergence(message["refused"])
            elif then == "show":
                self.screen.show_position()
            elif then is not None:
                self.navigation.print_differences(*then[1:], known=message["known"])

        self._call_reporting_errors(finish_move)

    def _read_command(self) -> str | None:
        """Read the next typed command, or the next one of ``--exec``; return ``None`` if there are no more."""
        if self._asked.is_scripted:
            number = self.screen.tally.reserve_command_number()
            commands = self._asked.commands
            return commands[number] if number < len(commands) else None
        tape, position = self._debugger.stepper.tape, self._debugger.position
        path, seq = tape.find_address_at(position) or ("", -1)
        # The body of a tool has no steps.
        prompt = f"({path}#{seq}) " if path and not tape.count_steps(path) else f"(step {tape.get_step_at(position)}) "
        return _read_terminal_line(prompt) if sys.stdin.isatty() else _read_pipe_line()

    def _call_reporting_errors(self, act: Callable[[], None]) -> None:
        """Call *act*; report an expected error as a failed command."""
        try:
            act()
        except ReplayDivergence as error:
            self.screen.report_divergence(error.message)
        except (StepEngineError, RefusedCommand, UsageProblem, OSError, ValueError) as error:
            self.screen.report_failure(error.message if isinstance(error, StepEngineError) else str(error))

    def _run_command(self, line: str) -> None:
        """Run a typed command; report a command that is unknown or not possible at this position."""
        name, _, typed = line.strip().partition(" ")
        if not name:
            return
        name = SHORTS.get(name, name)
        command = COMMANDS.get(name)
        if command is None:
            hint = did_you_mean(name, COMMANDS, min_similarity=0.5, otherwise="; `help` lists them")
            self.screen.report_failure(f"there is no command {name[:40]!r}{hint}")
            return
        if self.screen.parked is not None and command.goes:
            self.screen.report_failure(NO_MORE)
            return
        if self.screen.running is not None and not command.in_frame:
            self.screen.report_failure(
                "the handler is stopped at a breakpoint: use print, locals, list, where, quit, or `continue`"
            )
            return
        self._call_reporting_errors(lambda: command.act(self, typed.strip()))

    def fork_and_debug_run(self, typed: str) -> None:
        """Fork the run here into a new journal, and debug the fork until the command ``parent``."""
        self._debug_journal(fork_run(self.screen, typed, self._forked))

    def _debug_journal(self, journal: str) -> None:
        """Debug another run; after the command ``parent`` show this run again, else leave with its exit code."""
        options = attrs.evolve(self.screen.options, journal=journal, last=False, stem="")
        inner = attrs.evolve(self._asked, at="", is_inner=True)
        debug_there = partial(_load_and_debug, options, inner, self.screen.tally)
        if self._forked is None:
            code: int = debug_there()
            sys.breakpointhook = self._open_loop_at_breakpoint
        else:
            code = self._run_in_child_process(debug_there)
        if code == PARENT:
            self.screen.show_position()
        else:
            self._code = code

    def _run_in_child_process(self, act: Callable[[], int]) -> int:
        """Call *act* in a forked process, and return its exit code."""
        from stepengine.debugging.walks import exit_forked_process, wait_for_child

        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            exit_forked_process(_call_printing_failure(act))
        return wait_for_child(pid)

    def return_to_parent_run(self, typed: str) -> None:
        """End the loop of a fork with the exit code for its parent run; raise ``RefusedCommand`` if this run was not forked here."""
        if not self._asked.is_inner:
            msg = "this run was not forked here"
            raise RefusedCommand(msg)
        self._code = PARENT

    def _open_loop_at_breakpoint(self, *_: object, **__: object) -> None:
        """Open the command loop in the frame that called ``breakpoint()``, unless the debugger is moving."""
        from stepengine.debugging.debugger import make_frame

        if self.navigation.ignores_breakpoints:
            return
        caller = sys._getframe(1)  # noqa: SLF001
        if not self._asked.is_scripted and not sys.stdin.isatty():
            if not self._warned:
                self._warned = True
                warnings.warn("breakpoint() is ignored, because there is no terminal", stacklevel=2)
            return
        self.screen.running, kept, self.screen.frame = make_frame(caller), self.screen.frame, 0
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                self.screen.print_result(
                    "\n".join(["breakpoint()", *self.screen.format_source_lines(self.screen.running, AROUND)]),
                    {
                        "breakpoint": self.screen.running.function,
                        "file": self.screen.running.file,
                        "line": self.screen.running.line,
                    },
                )
                self._run_breakpoint_loop()
        finally:
            self.screen.running, self.screen.frame = None, kept

    def _run_breakpoint_loop(self) -> None:
        """Run typed commands in the frame of a breakpoint until ``continue``; ``quit`` ends the debugger."""
        while True:
            line = self._read_command()
            if line is None or line.strip() in ("continue", "c"):
                return
            if line.strip() in ("quit", "q"):
                if self._forked is not None:
                    self._forked.end_all_processes(self.screen.tally.exit_code)
                raise SystemExit(self.screen.tally.exit_code)
            self._run_command(line)

    def quit(self, typed: str) -> None:
        """End the command loop with the exit code so far."""
        self._code = self.screen.tally.exit_code

    def print_help(self, typed: str) -> None:
        """Print all commands with their help texts, or one of them in full."""
        command = COMMANDS.get(SHORTS.get(typed, typed)) if typed else None
        if typed and command is None:
            msg = f"there is no command {typed[:40]!r}"
            raise RefusedCommand(msg)
        shorts = {name: short for short, name in SHORTS.items()}
        rows = [(name, c) for name, c in COMMANDS.items() if command is None or c is command]
        lines = [
            f"{f'{name} {c.takes}'.strip():<32} {f'({shorts[name]}) ' if name in shorts else ''}{c.does}"
            for name, c in rows
        ]
        more = [command.more] if command is not None and command.more else []
        self.screen.print_result("\n".join([*lines, *more]), {"help": lines})


# --- lines ----------------------------------------------------------------------------------------------------------


def _call_printing_failure(act: Callable[[], int]) -> int:
    """Call *act* in a forked process, and return its exit code; an error is printed."""
    try:
        return act()
    except BaseException as error:  # noqa: BLE001 - nothing of this process goes back to where it was forked
        print_error(f"the debugger failed: {type(error).__name__}: {error}")
        return Exit.FAILED


def _read_terminal_line(prompt: str) -> str | None:
    """Read a typed line, with editing if the module ``readline`` exists; ``None`` at the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - what makes `input` remember lines
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def _read_pipe_line() -> str | None:
    """Read one line byte by byte, so that the next process can read the rest."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return None if not byte and not line else line.decode("utf-8", "replace")


# --- at a divergence ------------------------------------------------------------------------------------------------


def debug_divergence(stepper: Stepper, error: ReplayDivergence, journal: Journal, options: Options) -> None:
    """Open the command loop where a replay diverges from its record."""
    from stepengine.debugging.debugger import Debugger
    from stepengine.debugging.walks import PausedWalk
    from stepengine.engine import Engine

    print_error(error.message, Exit.DIVERGED)
    engine = Engine()
    screen = DebugScreen(
        Debugger(engine, PausedWalk(stepper)),
        attrs.evolve(options, journal=journal.address),
        DebugOptions(),
        SharedCounters(),
        parked=error,
    )
    session = DebugSession(screen)
    session.run_command_loop(None)
    engine.close()


def _wrap_screen_command(act: Callable[[DebugScreen, str], None]) -> Callable[[DebugSession, str], None]:
    """Return a function of *act* that gets the session in place of its screen."""
    return lambda session, typed: act(session.screen, typed)


def _wrap_move_command(act: Callable[[DebugNavigation, str], None]) -> Callable[[DebugSession, str], None]:
    """Return a function of *act* that gets the session in place of its navigation."""
    return lambda session, typed: act(session.navigation, typed)


class _Command(NamedTuple):
    """A command of the debugger: its arguments, its help text and its function."""

    act: Callable[[DebugSession, str], None]
    takes: str
    does: str
    goes: bool = False
    in_frame: bool = False
    more: str = ""


OWN_CODE = "the expression is your own code: it runs in a forked process, without network, but it can change files"
COMMANDS: dict[str, _Command] = {
    "next": _Command(_wrap_move_command(DebugNavigation.move_by), "[COUNT]", "go one position forward", goes=True),
    "back": _Command(lambda s, typed: s.navigation.move_by(typed, -1), "[COUNT]", "go one position back", goes=True),
    "step": _Command(
        lambda s, typed: s.navigation.move_by(typed, counts_steps=True), "[COUNT]", "go one step forward", goes=True
    ),
    "unstep": _Command(
        lambda s, typed: s.navigation.move_by(typed, -1, counts_steps=True), "[COUNT]", "go one step back", goes=True
    ),
    "goto": _Command(
        _wrap_move_command(DebugNavigation.go_to_typed_position), "N|PATH#N", "go to a step or an effect", goes=True
    ),
    "first": _Command(
        lambda s, _: s.navigation.go_to_first_or_last(last=False), "", "go to the first position", goes=True
    ),
    "last": _Command(
        lambda s, _: s.navigation.go_to_first_or_last(last=True),
        "",
        "go to the last position, or to the open question",
        goes=True,
    ),
    "until": _Command(
        _wrap_move_command(DebugNavigation.run_until),
        "LINE|@TOOL|error|EXPR",
        "go forward to the next match",
        goes=True,
    ),
    "rback": _Command(
        _wrap_move_command(DebugNavigation.run_back_until),
        "LINE|@TOOL|error|EXPR",
        "go back to the last match",
        goes=True,
    ),
    "into": _Command(
        _wrap_move_command(DebugNavigation.follow_child),
        "PATH",
        "follow one child: stop only at its positions",
        goes=True,
    ),
    "out": _Command(_wrap_move_command(DebugNavigation.follow_all_runs), "", "follow all runs again"),
    "where": _Command(_wrap_screen_command(inspection.show_frames), "", "the frames", in_frame=True),
    "list": _Command(
        _wrap_screen_command(inspection.show_source),
        "[LINES]",
        "the source around the current line",
        in_frame=True,
    ),
    "up": _Command(_wrap_screen_command(inspection.select_frame), "[COUNT]", "the frame outside of this one"),
    "down": _Command(
        lambda s, typed: inspection.select_frame(s.screen, typed, 1), "[COUNT]", "the frame inside of this one"
    ),
    "locals": _Command(_wrap_screen_command(inspection.show_locals), "", "all variables of the frame", in_frame=True),
    "print": _Command(
        _wrap_screen_command(inspection.print_expression),
        "EXPR",
        "an expression in the frame",
        in_frame=True,
        more=OWN_CODE,
    ),
    "pp": _Command(
        lambda s, typed: inspection.print_expression(s.screen, typed, pretty=True),
        "EXPR",
        "the same in several lines",
        in_frame=True,
        more=OWN_CODE,
    ),
    "state": _Command(_wrap_screen_command(inspection.show_state), "", "the full state of the agent"),
    "view": _Command(_wrap_screen_command(inspection.show_model_view), "", "the part of the state that the model sees"),
    "request": _Command(_wrap_screen_command(inspection.show_request), "", "the last request"),
    "reply": _Command(
        lambda s, typed: inspection.show_result(s.screen, typed, reply=True), "", "the results here, by member"
    ),
    "result": _Command(_wrap_screen_command(inspection.show_result), "", "the result here"),
    "hooks": _Command(_wrap_screen_command(inspection.show_hooks), "", "the hooks since the last outcome"),
    "origins": _Command(
        _wrap_screen_command(inspection.show_origins),
        "[VALUE]",
        "where the arguments of this call, or a value, come from",
    ),
    "cost": _Command(_wrap_screen_command(inspection.show_cost), "", "the cost and the tokens so far"),
    "diff": _Command(
        _wrap_move_command(DebugNavigation.diff_positions), "N M", "the differences between two positions", goes=True
    ),
    "fork": _Command(
        DebugSession.fork_and_debug_run,
        "[OPTIONS]",
        "continue from here in a new journal",
        goes=True,
        more="--reply TEXT|@FILE, --result JSON|@FILE or --raise KIND:TEXT: another outcome for the effect here\n"
        "--script FILE: replies in place of models, as for `stepengine compare impact`; without it the first model call fails. --live calls models after you confirm, --yes without confirmation\n"
        "--served: no tool runs; equal calls get the results recorded after this position, any other call fails the run\n"
        "--into FILE: the new journal; --allow-repeat: effects that changed the outside world may happen again\n"
        "--trust-journal: do not ask about calls that come only from a journal of other people",
    ),
    "parent": _Command(DebugSession.return_to_parent_run, "", "go back to the run that this one was forked from"),
    "recorded": _Command(
        lambda s, typed: inspection.show_divergence(s.screen, typed, recorded=True),
        "",
        "at a divergence: the recorded effect",
    ),
    "asked": _Command(
        lambda s, typed: inspection.show_divergence(s.screen, typed, recorded=False),
        "",
        "at a divergence: the current effect",
    ),
    "quit": _Command(DebugSession.quit, "", "leave"),
    "help": _Command(DebugSession.print_help, "[COMMAND]", "show this list", in_frame=True),
}
SHORTS = {
    "n": "next", "b": "back", "s": "step", "u": "until", "g": "goto", "w": "where", "l": "list", "p": "print", "q": "quit",
    "h": "help", "?": "help",
}  # fmt: skip
