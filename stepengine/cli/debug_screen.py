"""``DebugScreen``: prints the current position of a debugged run as text or JSON, and reports failed commands."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Options
from stepengine.cli.screen.render import format_cost, format_count, print_visible, truncate_text
from stepengine.errors import ReplayDivergence

if TYPE_CHECKING:
    from stepengine.debugging.debugger import Debugger
    from stepengine.engine.moments import Frame, Moment

FORMAT = "stepengine.debug/1"
AROUND = 7
"""The number of source lines on either side of the current one."""
MAX_PRINTED = 5
"""The most lines of a program's output; `print` shows all."""
SHORT = 40
"""The most characters of a value in a line with others."""
NO_MORE = "the run diverges from its record here and cannot continue; to continue from here, use fork or `stepengine resume --on-divergence extend`"


@frozen
class DebugOptions:
    """The options of `stepengine debug` alone."""

    at: str = ""
    commands: tuple[str, ...] = ()
    is_scripted: bool = attrs.field(default=False, kw_only=True)
    no_fork: bool = attrs.field(default=False, kw_only=True)
    quiet_handler: bool = attrs.field(default=False, kw_only=True)
    is_inner: bool = attrs.field(default=False, kw_only=True)


class SharedCounters:
    """Numbers that all processes of one debugger share: the next command, and the exit code."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self._shared[4 * place : 4 * place + 4], "big")

    def __setitem__(self, place: int, value: int) -> None:
        self._shared[4 * place : 4 * place + 4] = value.to_bytes(4, "big")

    def reserve_command_number(self) -> int:
        """Return the number of the next command, and increment it for all processes."""
        self[0] += 1
        return self[0] - 1

    @property
    def exit_code(self) -> int:
        """The exit code so far."""
        return self[1]

    def record_failure(self, code: Exit) -> None:
        """Record the exit code of a failed command; the first failure counts, and a divergence before all others."""
        self[1] = int(code) if not self[1] or code is Exit.DIVERGED else self[1]


@contextlib.contextmanager
def hide_or_redirect_handler_output(debug_options: DebugOptions, *, as_json: bool) -> Iterator[None]:
    """While the block runs, discard the output of the handler or redirect it to stderr, if the options request it."""
    if not (debug_options.quiet_handler or as_json):
        yield
        return
    with contextlib.redirect_stdout(io.StringIO() if debug_options.quiet_handler else sys.stderr):
        yield


class RefusedCommand(Exception):
    """A command cannot be executed; the message is the reason."""


class DebugScreen:
    """
    Prints the state of a debugger.

    Args:
        debugger: The debugger.
        options: The options that all commands have.
        asked: The options of `stepengine debug` alone.
        tally: The numbers that all processes of this debugger share.
        parked: The divergence at which the debugger was opened; ``None`` without one.

    Attributes:
        frame: The number of the frame that commands show, the outermost first.
        running: The frame that called ``breakpoint()``, while its loop is open.
    """

    def __init__(
        self,
        debugger: Debugger,
        options: Options,
        asked: DebugOptions,
        tally: SharedCounters,
        *,
        parked: ReplayDivergence | None = None,
    ) -> None:
        self.debugger = debugger
        self.options = options
        self.asked = asked
        self.tally = tally
        self.parked = parked
        self.frame = 0
        self.running: Frame | None = None
        self._began = time.time()

    @property
    def is_json(self) -> bool:
        """Whether commands print JSON, one object per line."""
        return self.options.as_json

    @property
    def width(self) -> int:
        """The width of the terminal in columns."""
        return shutil.get_terminal_size().columns

    def redact_and_escape(self, text: str) -> str:
        """Return *text* with secrets redacted and control characters escaped."""
        return self.debugger.texts.clean(text)

    def print_result(self, text: str, data: Mapping[str, object]) -> None:
        """Print the result of a command, as *text* or as JSON."""
        if self.is_json:
            print(json.dumps({"format": FORMAT, **data}).replace("\x7f", "\\u007f"), flush=True)
        else:
            print_visible(text)

    def report_divergence(self, message: str) -> None:
        """Print a divergence between the code and the record; the debugger then exits with ``DIVERGED``."""
        self.tally.record_failure(Exit.DIVERGED)
        if self.is_json:
            self.print_result("", {"error": self.redact_and_escape(message), "diverged": True})
        print_error(f"{message}\n  {NO_MORE}", Exit.DIVERGED)

    def report_failure(self, message: str) -> None:
        """Print that a command failed; a scripted session then ends with ``FAILED``."""
        if self.asked.is_scripted:
            self.tally.record_failure(Exit.FAILED)
        if self.is_json:
            self.print_result("", {"error": self.redact_and_escape(message), "diverged": False})
        print_error(self.redact_and_escape(message))

    def show_position(self) -> None:
        """Print the current position of the run."""
        moment = self.debugger.moment()
        self.print_result("\n".join(self._format_position_lines(moment)), self.debugger.to_dict())

    def _format_position_lines(self, moment: Moment) -> Iterator[str]:
        """Yield the lines for a position: head, source, request, answer and variables."""
        tape, state = self.debugger.stepper.tape, moment.state
        is_program = any(frame.kind == "program" for frame in moment.frames)  # which has no steps
        place = [
            *([] if is_program else [f"step {moment.step} of {tape.count_steps(moment.address.rpartition('#')[0])}"]),
            moment.address or "the end",
            str(timedelta(seconds=moment.at // 1000)).rjust(8, "0"),
        ]
        if self.debugger.places.followed_path is not None:
            place.append(f"inside {self.debugger.places.followed_path}")
        sums = f"{format_cost(state.cost)} · {state.context_tokens:,} tokens in view"
        head = f"── {' · '.join(place)} "
        yield f"{head}{'─' * max(2, self.width - len(head) - len(sums) - 4)} {sums} ──"
        frames = [frame for frame in moment.frames if frame.kind != "package" or self.options.verbose]
        selected = frames[min(self.frame, len(frames) - 1)] if frames else None
        if selected is not None:
            yield from self.format_source_lines(selected, 4)
            inner = [f"{frame.function.rpartition('.')[2]}:{frame.line}" for frame in frames[1:]]
            if inner:
                yield f"   in {' > '.join(inner)}"
        else:
            yield f"{moment.agent_id}: no code of the agent is suspended here"
        line = getattr(moment.effect, "program_line", 0)
        at = f"  (line {line})" if line and any(f.kind == "program" and f.line != line for f in frames) else ""
        yield f" asked     {truncate_text(self.redact_and_escape(moment.asked), self.width)}{at}"
        yield f" answer    {truncate_text(self._describe_outcome(moment), self.width)}"
        yield from self._format_variable_lines(selected)

    def _format_variable_lines(self, frame: Frame | None) -> Iterator[str]:
        """Yield lines with the variables of a frame, the output of a program and the variables that programs left."""
        texts = self.debugger.texts
        if frame is not None and frame.kind == "program":
            said = self.debugger.get_program_output(frame)
            nothing = "(nothing so far)" if said is not None else "(unknown: its sandbox is not installed)"
            printed = said.removesuffix("\n").split("\n") if said else [nothing]
            if len(printed) > MAX_PRINTED:
                printed = [f"... ({format_count(len(printed) - MAX_PRINTED, 'line')} before)", *printed[-MAX_PRINTED:]]
            for name, line in zip(("printed", *[""] * len(printed)), printed, strict=False):
                yield f" {name:<9} {truncate_text(line, self.width)}"
        elif frame is not None:
            values = [f"{n}={texts.format_variable(n, v, limit=SHORT)}" for n, v in frame.locals.items()]
            yield f" locals    {'  '.join(values)}"
        variables = self.debugger.variables()
        if variables:
            yield f" variables {truncate_text('  '.join([f'{n}={truncate_text(v, SHORT)}' for n, v in variables.items()]), self.width)}"

    def _describe_outcome(self, moment: Moment) -> str:
        """Return the outcome at a position as text, or why there is none."""
        from stepengine.debugging.debugger import format_outcome

        if moment.outcome is not None:
            return format_outcome(moment.outcome, self.debugger.texts)
        if self.parked is not None:
            return "none: the run differs from its record here"
        return "none is recorded" if moment.effect is not None else ""

    def format_source_lines(self, frame: Frame, max_lines: int) -> Iterator[str]:
        """Yield a heading and up to *max_lines* source lines around the line of a frame."""
        from stepengine.debugging.debugger import iterate_source_lines_around

        if frame.kind == "program":
            yield f"the program of {self._get_program_call_address()}, written by a model"
        else:
            yield (
                f"{self.redact_and_escape(make_path_relative(frame.file))}  {frame.function}"
                f"{' (package)' if frame.kind == 'package' else ''}"
            )
        if frame.kind == "opaque":
            yield "  the suspended code here cannot be inspected"
            return
        lines = list(iterate_source_lines_around(frame, max_lines))
        if frame.file and self._has_file_changed(frame.file):
            yield "  (the file was changed after its code was loaded)"
        if not lines:
            yield f"  > {frame.line}  (the file cannot be read)"
        for number, line in lines:
            yield f" {'>' if number == frame.line else ' '} {number:<4} {truncate_text(self.redact_and_escape(line), self.width)}"

    def _get_program_call_address(self) -> str:
        """Return the address of the tool call that runs the program."""
        from stepengine.journal.records import format_address, get_starter_address

        return format_address(*get_starter_address(self.debugger.moment().address.rpartition("#")[0]))

    def describe_frame_file(self, frame: Frame) -> str:
        """Return the file of a frame; for a program, the address of its call."""
        return (
            f"of {self._get_program_call_address()}"
            if frame.kind == "program"
            else self.redact_and_escape(make_path_relative(frame.file))
        )

    def _has_file_changed(self, file: str) -> bool:
        """Return whether a file changed after the debugger started."""
        with contextlib.suppress(OSError):
            return Path(file).stat().st_mtime > self._began
        return False

    def list_frames(self) -> list[Frame]:
        """Return the stack frames at this position, the outermost first; those of this package only with ``verbose``."""
        if self.running is not None:
            return [self.running]
        moment = self.debugger.moment()
        return [f for f in moment.frames if f.kind != "package" or self.options.verbose]

    def get_selected_frame(self) -> Frame:
        """Return the selected frame, or the innermost if there are fewer frames; raise ``RefusedCommand`` if there are none."""
        frames = self.list_frames()
        if not frames:
            msg = "no code of the agent is suspended here"
            raise RefusedCommand(msg)
        return frames[min(self.frame, len(frames) - 1)]

    def print_messages(self, head: Sequence[str], messages: Any) -> None:
        """Print messages, one per line, below *head*."""
        clean, width = self.debugger.texts.clean, self.width
        lines = [f"{n:>4} {m.role:<9} {clean(' '.join(m.text.split()), width)}" for n, m in enumerate(messages)]
        self.print_result("\n".join([*head, *lines]), {"head": head, "messages": lines})


def make_path_relative(file: str) -> str:
    """Return a file relative to the working folder, if it is inside."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def parse_count(text: str) -> int:
    """Parse a count, 1 for an empty text; raise ``RefusedCommand`` for anything else."""
    if not text:
        return 1
    if not text.isdecimal() or len(text) > 9 or int(text) == 0:  # noqa: PLR2004
        msg = f"{text[:40]!r} is not a count; use 1 or a larger number"
        raise RefusedCommand(msg)
    return int(text)
