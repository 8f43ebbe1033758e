"""
The reference console: shows a run through its handle, asks its questions, and sends the user's input to it.

``ConsoleRenderer`` uses only the public interface of a handle, and the engine does not know the console. ``TerminalInteractor``
asks the same questions for engines that have an interactor. Text of models and tools is made visible. Text that a person decides
about is printed after a gutter, so that it cannot look like the person's input.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import stat
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from stepengine.adapters.display_items import get_text_unless_shown
from stepengine.cli.screen.confirm import NO, YES, is_about_effect_in_doubt, is_doubt_result_answer, parse_result_answer
from stepengine.cli.screen.progress import COLORS, ProgressDisplay, get_indent_level, style_diff_lines
from stepengine.cli.screen.render import (
    ColorScheme,
    format_cost,
    format_value,
    one_line,
    truncate_text,
    visible,
    wrap_lines,
)
from stepengine.data import events as ev
from stepengine.data.call_text import (
    find_call_subject,
    find_question_diff,
    find_result_diff,
    find_shell_command,
    preview_parts,
)
from stepengine.data.choices import Choice, allows_all_edits, find_call_matcher, list_choices, make_lasting_approval
from stepengine.data.codec import plain
from stepengine.data.json import ABSENT, JsonDict, compact
from stepengine.data.origins import describe_origin, sort_origins
from stepengine.data.questions import Answer, Question, require_valid_answer
from stepengine.data.state import RunPhase, RunResult, RunStatus
from stepengine.data.visible import cut_end
from stepengine.errors import AnswerRejected, StepEngineError

if TYPE_CHECKING:
    from rich.console import Console

    from stepengine.runtime.handle import RunHandle

MAX_SHOWN = 40
"""The most lines of a question's subject that are shown at once."""
MAX_WIDTH = 100
MAX_BLOCK = 4_000
"""The length of a Markdown block, in characters, from which it is printed before it is complete."""
CONTINUED = frozenset({"bullet_list_open", "ordered_list_open", "code_block"})
"""Blocks that can continue after an empty line."""
LIVE_LINES = 8
"""The last lines of the open block that are shown above the prompt."""
LIVE_CHILDREN = 6
STOPPING = "interrupting; press Ctrl-C again to leave"
CHUNK = 65_536
KEYS = (
    "y yes, n no (n REASON), a always, e all edits, v all > ",
    "y yes, n no, a always, e all edits, v all > ",
    "y, n, a, e, v > ",
)
"""The answers to a permission question; the prompt has the first of these that fits, without answers that are not offered."""
BELOW = 6
"""Lines of a terminal that are reserved for the question, the prompt and the status line."""
ROOM = 8
"""The fewest characters of the subject in the prompt."""
TYPED = 12
"""Characters that are reserved after the prompt for the answer."""
WHICH = "which? a number, Enter for none > "
DECISIONS = "y do it again, n raise UnknownOutcome in the handler, result:JSON-or-TEXT if you know the result"
LATER = "Enter to decide later > "
DETAILS_CHARS = 1_000
ALWAYS, EDITS = ("a", "always"), ("e", "edits")
CONFIRM = "Type yes to confirm > "
ACCEPTED = "(all edits of files are accepted from now on; commands still need approval)"
QUIT = ("/quit", "/exit")
SKIP = "/skip"


def make_console(file: TextIO, *, color: str = "auto") -> Console:
    """Return a console that prints on *file*. By default it has colours only on a terminal, without ``NO_COLOR``."""
    from rich.console import Console

    return Console(
        file=file,
        highlight=False,
        no_color=True if color == "never" else False if color == "always" else None,
        force_terminal=True if color == "always" else None,
    )


# --- what is typed ----------------------------------------------------------------------------------------------------


class TypedLines:
    """
    The lines of a terminal, a pipe, a file or a ``StringIO``, read on demand without blocking the event loop.

    Args:
        stream: The input. A terminal or pipe is read below its buffer, so no other code should read it meanwhile.

    Attributes:
        is_terminal: Whether the input is a terminal, where a person may type at any time.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd = _find_pollable_descriptor(stream)
        self.is_terminal = self._fd is not None and stream.isatty()
        self._bytes = bytearray()
        self._ended = False

    async def read_next_line(self) -> str | None:
        """Return the next line without its line end; ``None`` at the end of the input."""
        if self._fd is None:
            line = self._stream.readline()
            return line.rstrip("\n") if line else None
        while b"\n" not in self._bytes and not self._ended:
            await self._wait_until_readable(self._fd)
            self._read_chunk_into_buffer(self._fd)
        return self._pop_line()

    @contextlib.contextmanager
    def disable_echo(self) -> Iterator[None]:
        """Disable the terminal's echo within the block."""
        if self._fd is None or not self.is_terminal:
            yield
            return
        before, quiet = termios.tcgetattr(self._fd), termios.tcgetattr(self._fd)
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(self._fd, termios.TCSANOW, quiet)
        try:
            yield
        finally:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._fd, termios.TCSANOW, before)

    def drain_typed_lines(self) -> list[str]:
        """Remove and return the lines that were typed on a terminal before a read; discard an unfinished line."""
        if self._fd is None or not self.is_terminal:
            return []
        while not self._ended and select.select([self._fd], [], [], 0)[0]:
            self._read_chunk_into_buffer(self._fd)
        found = []
        while b"\n" in self._bytes:
            found.append(self._pop_line() or "")
        self._bytes.clear()
        with contextlib.suppress(termios.error):
            termios.tcflush(self._fd, termios.TCIFLUSH)
        return found

    def _pop_line(self) -> str | None:
        """Remove and return the first line of the buffer; ``None`` if it is empty."""
        line, end, rest = bytes(self._bytes).partition(b"\n")
        self._bytes[:] = rest
        return line.decode(errors="replace").removesuffix("\r") if line or end else None

    def _read_chunk_into_buffer(self, descriptor: int) -> None:
        """Read available bytes into the buffer; an empty read or an error marks the end of the input."""
        try:
            chunk = os.read(descriptor, CHUNK)
        except OSError:  # the terminal is gone
            chunk = b""
        self._bytes += chunk
        self._ended = not chunk

    async def _wait_until_readable(self, descriptor: int) -> None:
        """Wait until a descriptor can be read without blocking."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(descriptor, set_ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)


def _find_pollable_descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a terminal, pipe or socket; ``None`` for files and streams without a descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, io.UnsupportedOperation):
        return None
    mode = os.fstat(descriptor).st_mode
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor) else None


# --- what is shown ----------------------------------------------------------------------------------------------------


class Screen(ProgressDisplay):
    """
    A display that shows the root's text as it arrives, without a status line.

    Args:
        console: The console for all output.
        markdown: Show the text as Markdown, one block when it is complete; by default, each piece is printed at once as it is.
        options: As with ``ProgressDisplay``.

    Attributes:
        whole: The last thoughts, or the last result of a tool, in full.
        is_stopping: Whether the person has interrupted the run. Then only its end is shown, not the ends of its parts.
        diffs: The changes to files, by children too, as unified diffs.
    """

    def __init__(self, console: Console, *, markdown: bool = False, **options: Any) -> None:
        super().__init__(console, **options)
        self.shows_questions = False
        self._is_open = False
        self._block: str | None = "" if markdown else None
        self._is_after_block = False
        self._children: dict[str, _ChildLine] = {}
        self._said: list[str] = []
        self._notes: list[tuple[str, str]] = []
        self.whole = ""
        self.is_stopping = False
        self.diffs: list[str] = []

    def on_event(self, event: ev.Event) -> None:
        """Show an event, and store its data for the screen: running children, texts, diffs, the last full output."""
        if isinstance(event, ev.AgentSpawned):
            self._children[event.child_path] = _ChildLine(event.agent_id, event.prompt)
        elif isinstance(event, ev.AgentFinished):
            self._children.pop(event.child_path, None)
        elif child := self._children.get(event.path):
            child.update_from_event(event)
        if isinstance(event, ev.TextCompleted) and not event.path:
            self._said.append(event.text)
        elif isinstance(event, ev.ThinkingCompleted):
            self.whole = event.text
        elif isinstance(event, ev.ToolFinished):
            self.whole = event.result.text
            data = event.result.data if isinstance(event.result.data, dict) else {}
            # A file that is new is told in words.
            diff = find_result_diff(data) or ("file" in data and data.get("message"))
            self.diffs += [diff] if isinstance(diff, str) else []
        super().on_event(event)

    def print_or_delay_note(self, note: str, style: str = "") -> None:
        """Print a note of the program; while the root's text streams, hold it back until that text ends."""
        self._notes.append((note, style))
        if "" not in self._streamed:
            self.print_delayed_notes()

    def print_delayed_notes(self) -> None:
        """Print the lines that were held back while a text streamed."""
        if self._notes:
            self.close_line_or_block()
        while self._notes:
            print_wrapped(self._console, *self._notes.pop(0))

    def end_plain_text_line(self) -> None:
        """End the streaming line of plain text, so that lines can be printed; an open block of Markdown stays open."""
        if self._block is None:
            self.close_line_or_block()

    def print_run_summary(self, result: RunResult) -> None:
        """Print the output of the run if its model did not print it, and the summary line."""
        came_to = _format_output(result)
        if result.status is RunStatus.COMPLETED and get_text_unless_shown(came_to, self._said):
            self.close_line_or_block()
            self.add_streamed_text("", came_to)
        self._said.clear()
        super().print_run_summary(result)

    def render_live_area(self) -> str:
        """Return the coloured live area: the open block, running children and the status line."""
        from rich.text import Text

        console, width = self._console, self._console.width
        # A group of children is counted in the line below.
        working = [path for path in sorted(self._children) if not self.children.is_only_counted(path)]
        lines = [
            truncate_text(f"{'  ' * get_indent_level(path)}{self._children[path].line}", width - 1)
            for path in working[:LIVE_CHILDREN]
        ]
        if len(working) > LIVE_CHILDREN:
            lines.append(f"  ({len(working) - LIVE_CHILDREN} more at work)")
        with console.capture() as drawn:
            if self._block and self._block.strip():
                print_markdown(self._console, self._block)
        block = drawn.get().splitlines()[-LIVE_LINES:]
        with console.capture() as drawn:
            for text, style in self._notes:
                console.print(Text(truncate_text(text, width - 1), style=style), soft_wrap=True)
            for line in lines:
                console.print(Text(line, style=self.colors.agent), soft_wrap=True)
            status = Text(STOPPING, style=self.colors.note) if self.is_stopping else self.format_status_line()
            status.truncate(max(1, width - 1))
            console.print(status, soft_wrap=True)
        return "\n".join([*block, *drawn.get().splitlines()])

    def add_streamed_text(self, run_path: str, text: str) -> None:
        """Print a piece of the root's text; with Markdown, the blocks that it ends."""
        if run_path:
            super().add_streamed_text(run_path, text)
            return
        if self._block is not None:
            self._block += text
            if "\n" in text:
                *blocks, self._block = _split_markdown_blocks(self._block)
                for block in blocks:
                    self._print_markdown_block(block)
            return
        if not self._is_open:
            self._speaker = self.children.find_headed_path(run_path)
        self._print_streamed_text(visible(text))
        self._is_open = not text.endswith("\n") if text else self._is_open

    def flush_text(self, run_path: str) -> None:
        """End the text of a run: print the held-back line of a child, or end the line or block of the root."""
        if run_path:
            super().flush_text(run_path)
        else:
            self.close_line_or_block()

    def print_line(self, run_path: str, text: str, style: str = "") -> None:
        """End the streaming text of the root, then print a line of a run."""
        self.close_line_or_block()
        self._is_after_block = False
        super().print_line(run_path, text, style)

    def discard_text(self, run_path: str) -> None:
        """Drop the unprinted text of a discarded reply; end the line or block of the root, whose printed text stays."""
        if not run_path:
            self._block = self._block and ""
            self.close_line_or_block()
        super().discard_text(run_path)

    def _show_event(self, event: ev.Event) -> None:
        """Show an event; while the run is stopping, hide failed tools and the notice of a discarded reply."""
        if self.is_stopping and isinstance(event, ev.ReplyDiscarded):
            self.discard_text(event.path)
        elif not (self.is_stopping and isinstance(event, ev.ToolFinished) and event.result.is_error):
            super()._show_event(event)
        if isinstance(event, ev.TextCompleted | ev.ReplyDiscarded):
            self.print_delayed_notes()

    def _make_summary_parts(self, result: RunResult) -> list[str]:
        """Return the parts of the summary; after an interruption only that word, the steps and the cost."""
        if not self.is_stopping or result.status is not RunStatus.CANCELLED:
            return super()._make_summary_parts(result)
        return ["interrupted", *super()._make_summary_parts(result)[1:2], format_cost(result.cost, usage=result.usage)]

    def _print_markdown_block(self, text: str) -> None:
        """Print a block as Markdown. Links and images stay text, and control characters are made visible."""
        if text.strip():
            self._speaker = self.children.find_headed_path("")
            if self._is_after_block:
                self._console.print()
            self._is_after_block = True
            print_markdown(self._console, text)

    def close_line_or_block(self) -> None:
        """End the line or block that streams, if it is open."""
        if self._block:
            block, self._block = self._block, ""
            self._print_markdown_block(block)
        if self._is_open:
            self._is_open = False
            self._print_streamed_text("\n")

    def _print_streamed_text(self, text: str) -> None:
        """Print a piece of text without a line end, and flush it."""
        from rich.text import Text

        self._console.print(Text(text), end="", soft_wrap=True)
        self._console.file.flush()


def print_wrapped(console: Console, text: str, style: str = "", *, gutter: str = "") -> None:
    """Print text, made visible and wrapped to the terminal; each line starts with *gutter*."""
    from rich.text import Text

    if console.is_terminal:
        text = wrap_lines(text, max(1, console.width - len(gutter)))
    lines = [f"{gutter}{line}" for line in text.split("\n")]
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)


def print_markdown(console: Console, text: str) -> None:
    """Print text as Markdown, with control characters made visible and without outer empty lines."""
    from rich.markdown import CodeBlock, Markdown
    from rich.segment import Segment, Segments
    from rich.syntax import Syntax

    class Code(CodeBlock):
        """A block of code without an empty line above and below it."""

        def __rich_console__(self, _console: Console, _options: object) -> Iterator[Syntax]:
            code = str(self.text).rstrip()
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1))

    class Tight(Markdown):
        elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "fence": Code, "code_block": Code}

    options = console.options.update_width(min(console.width, MAX_WIDTH))
    drawn = console.render_lines(Tight(visible(text).strip("\n"), hyperlinks=False), options, pad=False)
    kept: list[list[Segment]] = []
    for line in drawn:
        if not _is_blank_line(line) or (kept and not _is_blank_line(kept[-1])):
            kept.append(line)
    while kept and _is_blank_line(kept[-1]):
        kept.pop()
    for line in kept:
        console.print(Segments([*line, Segment.line()]), end="", soft_wrap=True)


def _is_blank_line(line: Sequence[Any]) -> bool:
    """Return whether a rendered line is blank; a line of a code block has a background, so it is not."""
    return all(not part.text.strip() and (part.style is None or part.style.bgcolor is None) for part in line)


def _format_output(result: RunResult) -> str:
    """Return the output of a run as text; nothing for a list of messages, which were printed as they streamed."""
    output = result.output
    if output is None or isinstance(output, str):
        return result.text
    is_messages = isinstance(output, list) and output and isinstance(output[0], dict) and "role" in output[0]
    return "" if is_messages else format_value(plain(output))


class _ChildLine:
    """
    The status line of a running child.

    Attributes:
        line: The text of the line.
    """

    def __init__(self, agent_id: str, prompt: str) -> None:
        self._name = f"{agent_id}: {one_line(prompt, 40)}".rstrip(": ")
        self._doing = "starts"
        self._steps = 0
        self._start = time.monotonic()

    def update_from_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepStarted):
            self._steps = event.step + 1
        if isinstance(event, ev.ModelStarted):
            self._doing = "waits for its model"
        elif isinstance(event, ev.ToolStarted):
            self._doing = one_line(event.tool_name, 40)

    @property
    def line(self) -> str:
        """The line: name, step, activity and seconds."""
        step = f"step {self._steps} | " if self._steps else ""
        return f"{self._name} | {step}{self._doing} | {time.monotonic() - self._start:.0f} s"


def _split_markdown_blocks(text: str) -> list[str]:
    """Split Markdown into finished blocks and the open one last; an overlong block is split at its line ends."""
    from markdown_it import MarkdownIt

    # Which blocks there are is decided by their lines; a line that has not ended can still become anything.
    parser = MarkdownIt().enable("table").disable("inline")
    ended, mark, rest = text.rpartition("\n")
    lines = [f"{line}\n" for line in ended.split("\n")] if mark else []
    tokens = parser.parse(visible(ended + mark))
    found = [(token.type, token.map[0], token.map[1]) for token in tokens if token.map and not token.level]
    cuts = [0, *[start for _, start, _ in found[1:]], len(lines)]
    blocks = ["".join(lines[start:end]) for start, end in pairwise(cuts)]
    is_over = bool(found) and found[-1][0] not in CONTINUED and found[-1][2] < len(lines)
    return [*blocks, rest] if is_over or len(blocks[-1]) > MAX_BLOCK else [*blocks[:-1], blocks[-1] + rest]


class Terminal:
    """
    A person at a console: prompts, typed lines and the answers parsed from them.

    Args:
        console: The console for prompts.
        lines: The input.
        colors: The style of each kind of line.

    Attributes:
        accepts_edits: Called when the person accepts all edits.
        note: Prints a line during a run, after the streaming text.
    """

    def __init__(self, console: Console, lines: TypedLines, colors: ColorScheme = COLORS) -> None:
        self.lines = lines
        self.accepts_edits: Callable[[], object] = str
        self.note: Callable[[str, str], object] = self.print_text
        self._hidden = ""
        self._console = console
        self._colors = colors

    def print_text(self, text: str, style: str = "", *, gutter: str = "") -> None:
        """Print text, made visible and wrapped to the terminal; each line starts with *gutter*."""
        print_wrapped(self._console, text, style, gutter=gutter)

    async def read_line_with_prompt(self, prompt: str) -> str | None:
        """Read the next line, with *prompt* on a terminal; ``None`` at the end of the input."""
        from rich.text import Text

        if not self.lines.is_terminal:
            return await self.lines.read_next_line()
        self._console.print(Text(prompt, style=self._colors.question), end="", soft_wrap=True)
        self._console.file.flush()
        typed = await self.lines.read_next_line()
        if typed is None:
            self.print_text("")
        return typed

    async def read_line_during_run(self) -> str | None:
        """Read the next line typed during a run, without echo on a terminal; ``None`` at the end of the input."""
        if not (self.lines.is_terminal and self._console.is_terminal):
            return await self.lines.read_next_line()
        with self.lines.disable_echo():
            typed = await self.lines.read_next_line()
        self._hidden = f"> {visible(typed)}" if typed else ""
        return typed

    def echo_hidden_line(self, *, immediately: bool = False) -> None:
        """Print the line that was typed without echo, once: after the streaming text, or with *immediately* at once."""
        text, self._hidden = self._hidden, ""
        if text:
            (self.print_text if immediately else self.note)(text, self._colors.note)

    def is_chat_command(self, text: str) -> bool:
        """Return False: only a chat has commands, which are never answers."""
        return False

    def message_from_line(self, text: str) -> str:
        """Return the line itself; in a chat, two slashes at the start become one."""
        return text

    async def run_or_queue_chat_command(self, text: str) -> bool:
        """Return False and do nothing: only a chat has commands, which it executes or queues."""
        return False

    def print_or_queue_refused_line(self, text: str, error: StepEngineError) -> None:
        """Print why a run refused a typed line; a chat queues the line for its next turn instead."""
        self.print_text(visible(error.message))

    def drain_typed_lines(self) -> list[str]:
        """Remove and return the lines typed before a read, and discard an unfinished one; an empty list without a terminal."""
        return self.lines.drain_typed_lines()

    async def ask_until_answered(
        self,
        question: Question,
        accept: Callable[[Any], object],
        handle_other_line: Callable[[str], Awaitable[object]],
        *,
        may_skip: bool = False,
    ) -> bool:
        """
        Ask until *accept* accepts the typed answer; return whether it did, ``False`` at the end of the input.

        Lines that do not answer a permission question, and lines that were typed before the question was shown, are passed to
        *handle_other_line* (requirements:X47). With *may_skip*, an empty line leaves the question open.
        """
        for line in self.drain_typed_lines():
            await handle_other_line(line)
        is_whole = self._print_question(question, self._compute_max_subject_lines())
        prompt = (
            _format_permission_prompt(question, self._console.width, is_whole=is_whole) if question.tool_name else "> "
        )
        prompt = LATER if may_skip else prompt
        while (typed := await self.read_line_with_prompt(prompt)) is not None and not (
            may_skip and typed.strip() in ("", SKIP)
        ):
            if typed.strip() == "v" and (question.tool_name or not is_whole):
                self._print_question(question)
                continue
            said = await self._parse_answer_and_ask_scope(question, typed)
            try:
                if said is AGAIN:
                    continue
                if said is not None:
                    accept(said)
                    return True
            except AnswerRejected as error:
                self.print_text(visible(error.message), self._colors.warning)
            else:
                await handle_other_line(typed)
        return False

    async def _parse_answer_and_ask_scope(self, question: Question, typed: str) -> Any:
        """Parse a line as the answer, and ask for the scope of a lasting approval; ``None`` for no answer, ``AGAIN`` to ask again."""
        if self.is_chat_command(typed):
            return None
        if not question.tool_name:
            return _parse_question_answer(question, self.message_from_line(typed))
        word, _, which = typed.strip().partition(" ")
        edits = _find_edits_rule(question)
        if edits is not None and typed.strip().lower() in EDITS:
            self.print_text(ACCEPTED, self._colors.note)
            self.accepts_edits()
            return make_lasting_approval(edits)
        if word.lower() not in ALWAYS or question.remember is None:
            return _parse_permission_answer(typed)
        lasting = [one for one in list_choices(question, can_confirm=True) if one.rule not in (None, edits)]
        named = _find_typed_choice(lasting, which.strip())
        if which.strip() and named is None:
            return None
        return await self._choose_and_confirm_lasting_approval(lasting, named)

    async def _choose_and_confirm_lasting_approval(self, lasting: Sequence[Choice], chosen: Choice | None) -> object:
        """Let the person choose and confirm a lasting approval; return its answer, or ``AGAIN`` if none was chosen or confirmed."""
        if chosen is None:
            by = find_call_matcher(lasting[0].rule).get("agent")
            self.print_text(
                f"always, without asking again{f' when {one_line(str(by), 40)} requests it' if by else ''}:"
            )
            for number, choice in enumerate(lasting, start=1):
                self.print_text(f"  {number}. {one_line(choice.scope, 300)}")
            chosen = await self._read_lasting_choice(lasting)
        if chosen is None:
            return AGAIN
        if chosen.confirm:
            self.print_text(one_line(chosen.confirm, 200), self._colors.warning)
            if ((await self.read_line_with_prompt(CONFIRM)) or "").strip().lower() != "yes":
                return AGAIN
        return chosen.answer

    async def _read_lasting_choice(self, lasting: Sequence[Choice]) -> Choice | None:
        """Ask until a number of *lasting* is typed, and return its choice; ``None`` for an empty line or the end of the input."""
        while typed := ((await self.read_line_with_prompt(WHICH)) or "").strip():
            chosen = _find_typed_choice(lasting, typed)
            if chosen is not None:
                return chosen
            self.print_text(f"type a number from 1 to {len(lasting)}, or Enter for none", self._colors.warning)
        return None

    def _compute_max_subject_lines(self) -> int:
        """Return how many lines of a question's subject fit below the question."""
        return max(1, min(MAX_SHOWN, self._console.height - BELOW)) if self._console.is_terminal else MAX_SHOWN

    def _print_question(self, question: Question, max_lines: int | None = None) -> bool:
        """Print a question with at most *max_lines* lines about its subject; return whether these were all."""
        first, *rest = question.text.splitlines() or [""]
        self.print_text(f"? {one_line(first, 400)}", self._colors.question)
        lines = [*[(visible(line), "") for line in rest], *_format_question_details(question, self._colors)]
        for text, style in lines[:max_lines]:
            self.print_text(text, style, gutter="| ")
        if max_lines is not None and len(lines) > max_lines:
            self.print_text(f"({len(lines) - max_lines} more lines; v shows them)", self._colors.warning, gutter="| ")
        is_doubt = is_about_effect_in_doubt(question.id)
        if is_doubt:
            self.print_text(DECISIONS)
        # The text of a question that takes numbers lists the other answers.
        is_told = not (question.tool_name or question.number or is_doubt)
        told = zip_longest(question.options if is_told else [], question.descriptions, fillvalue="")
        for number, (option, about) in enumerate(told, start=1):
            self.print_text(f"  {number}. {one_line(option, 200)}")
            if about:
                self.print_text(one_line(about, 400), self._colors.note, gutter=" " * 5)
        return max_lines is None or len(lines) <= max_lines


def _format_question_details(question: Question, colors: ColorScheme) -> Iterator[tuple[str, str]]:
    """Yield the lines below a question as (text, style): details of an effect in doubt, origins of its data, parts of its call."""
    if is_about_effect_in_doubt(question.id):
        yield f"with: {visible(cut_end(compact(question.details), DETAILS_CHARS))}", ""
    # First, since the rest may be long and cut: a person must see that a third party chose the recipient.
    for origin in sort_origins(question.provenance):
        yield visible(describe_origin(origin), strict=True), "" if origin["trusted"] else colors.warning
    preview = question.preview or {"details": question.details}
    for kind, name, value in preview_parts(preview) if question.tool_name else ():
        text = value if isinstance(value, str) else _format_json(value)
        lines = visible(text).splitlines() or [""]
        if kind == "action":
            yield visible(text, strict=True), colors.summary
        elif kind == "command":
            yield from [(f"{'  ' if n else '$ '}{line}", "") for n, line in enumerate(lines)]
        elif kind == "diff":
            yield from style_diff_lines(text, colors)
        elif name and len(lines) == 1:
            yield f"{visible(name, strict=True)}: {lines[0]}", ""
        else:
            yield from [(f"{visible(name, strict=True)}:", "")] if name else []
            yield from [(f"  {line}", "") for line in lines]


def _format_json(value: object) -> str:
    """Return a value as JSON, in one line if that is short enough."""
    short = json.dumps(value, ensure_ascii=False)
    return short if len(short) <= MAX_WIDTH else json.dumps(value, indent=2, ensure_ascii=False)


def _parse_permission_answer(line: str) -> object:
    """Parse the answer to a permission question: ``True``, or a denial with its reason; ``None`` if the line is no answer."""
    word, _, reason = line.strip().partition(" ")
    word = word.lower()
    if word in NO:
        return Answer(declined=True, reason=reason.strip())
    if reason:
        return None
    return True if word in (*YES, *ALWAYS) else None


AGAIN = object()
"""The result in place of an answer if the question is to be asked again."""


def _find_edits_rule(question: Question) -> JsonDict | None:
    """Return the rule for all file edits that a question offers, else ``None``."""
    return next((rule for rule in question.wider if allows_all_edits(rule)), None)


def _format_permission_prompt(question: Question, width: int, *, is_whole: bool = False) -> str:
    """
    Return the prompt of a permission question: its subject on one line, shortened if necessary.

    Args:
        question: The question.
        width: The width of the terminal.
        is_whole: Whether nothing was cut, so that ``v`` need not be offered.
    """
    tool, size, about = (
        one_line(question.tool_name or "", 30),
        _format_diff_size(question),
        _shorten_subject(question, width),
    )
    missing = ["v all", "v"] if is_whole else []
    missing += ["a always", "a"] if question.remember is None else []
    missing += ["e all edits", "e"] if _find_edits_rule(question) is None else []
    offered = [", ".join([key for key in keys[:-3].split(", ") if key not in missing]) + keys[-3:] for keys in KEYS]
    taken = len(" ".join([part for part in (tool, about, size) if part])) + len(": ") + TYPED
    keys = next((keys for keys in offered if taken + len(keys) <= width), offered[-1])
    too_long = taken + len(keys) - width
    about = _shorten_subject(question, max(ROOM, len(about) - too_long)) if too_long > 0 else about
    return f"{' '.join([part for part in (tool, about, size) if part])}: {keys}"


def _format_diff_size(question: Question) -> str:
    """Return the added and removed lines of a question's diff, such as ``+3 -1``; ``""`` without a diff."""
    lines = find_question_diff(question).splitlines()
    if not lines:
        return ""
    files = sum(a.startswith("--- ") and b.startswith("+++ ") for a, b in pairwise(lines))
    added, removed = [sum(line.startswith(sign) for line in lines) - files for sign in "+-"]
    return f"+{added} -{removed}"


def _shorten_subject(question: Question, max_chars: int) -> str:
    """Return the subject of a call in at most *max_chars* characters; a command keeps its start, a long path its end."""
    if command := find_shell_command(question.details):
        return one_line(command, max_chars)
    shown = one_line(find_call_subject(question.details), 4_000)
    return shown if len(shown) <= max_chars else f"...{shown[3 - max_chars :]}"


def _find_typed_choice(choices: Sequence[Choice], typed: str) -> Choice | None:
    """Return the choice with the typed number or command prefix; ``None`` if no choice has it."""
    if typed.isascii() and typed.isdigit() and len(typed) < DIGITS and 0 < int(typed) <= len(choices):
        return choices[int(typed) - 1]
    words = [(" ".join(find_call_matcher(choice.rule).get("prefix", ())), choice) for choice in choices]
    return next((choice for prefix, choice in words if typed and prefix == " ".join(typed.split())), None)


SOON_SECONDS = 60.0
"""The longest wait of a run, in seconds, for which the console with piped input stays."""
DIGITS = 10
"""Numbers of options are shorter, and Python refuses to parse very long ones."""


def _parse_question_answer(question: Question, line: str) -> object:
    """Parse an answer: option numbers, text, ``/skip`` to decline, or the result of an effect in doubt; ``None`` for an empty line."""
    text = line.strip()
    if not text or text == SKIP:
        return Answer(declined=True) if text else None
    if is_about_effect_in_doubt(question.id):
        if is_doubt_result_answer(question.id, text):
            return parse_result_answer(text)
        if text.lower() in (*YES, *NO):
            return text.lower() in YES
    if question.number:
        return text
    numbers = [part.strip() for part in text.split(",")] if question.multi_select else [text]
    chosen = [
        question.options[int(number) - 1]
        for number in numbers
        if number.isascii() and number.isdigit() and len(number) < DIGITS and 0 < int(number) <= len(question.options)
    ]
    return Answer(selected=tuple(chosen)) if len(chosen) == len(numbers) else text


def validate_typed_answer(answer: Any, question: Question) -> Answer:
    """
    Return a typed answer; raise ``AnswerRejected`` for an invalid one. Results of effects in doubt are not checked here.

    Raises:
        AnswerRejected: when *answer* does not answer *question*.
    """
    return (
        answer if isinstance(answer, Answer) and answer.result is not ABSENT else require_valid_answer(answer, question)
    )


# --- a run and somebody who looks at it -------------------------------------------------------------------------------


class ConsoleRenderer:
    """
    Displays a run on a console, asks its questions, and sends the user's input to the run.

    Text is shown as it arrives, together with tool calls, children, todos and diffs. A question stays until it is answered: ``y``,
    ``n REASON``, ``a`` for always; a number or text. On a terminal, lines typed during the run are sent to it (``send_input``). If the
    handle is kept open, it gets the next line whenever it is idle; ``/quit`` or the end of the input shuts it down. If the input ends
    at a question, the question stays open and the run suspends.

    Args:
        handle: The run's handle.
        colors: The style of each kind of line. Colours are off if *output* is not a terminal or ``NO_COLOR`` is set.
        input: The input; stdin by default.
        output: The output; stdout by default.
        verbose: Show thoughts, complete inputs of tools and every log line.
    """

    def __init__(
        self,
        handle: RunHandle,
        *,
        colors: ColorScheme = COLORS,
        input: TextIO | None = None,
        output: TextIO | None = None,
        verbose: bool = False,
    ) -> None:
        console = make_console(output or sys.stdout)
        self._handle = handle
        self._screen = Screen(console, colors=colors, verbose=verbose)
        self._terminal = Terminal(console, TypedLines(input or sys.stdin), colors)
        self._colors = colors

    async def run(self) -> RunResult:
        """Display the run to its end and return its result. For a handle that is kept open, return the result of the last turn."""
        return await show_run(self._handle, self._screen, self._terminal)


async def show_run(
    handle: RunHandle,
    screen: Screen,
    terminal: Terminal,
    *,
    asks_permissions: bool = True,
    answered_ids: Collection[str] = (),
) -> RunResult:
    """
    Show a run to its end, ask its questions and send typed lines; see ``ConsoleRenderer``.

    Without *asks_permissions* the person is not asked whether a tool may run: the engine decides that. Questions with the ids in
    *answered_ids* were answered before the run was resumed and are not asked.
    """
    somebody = _ConsoleInput(handle, screen, terminal, answered_ids)
    terminal.note = screen.print_or_delay_note
    person = asyncio.create_task(somebody.ask_questions_and_read_input())
    is_over = False

    def stop_showing_events(_: object) -> None:
        """End the display of events when the person's input ends, unless the run is over."""
        if not is_over:
            shown.reschedule(0)

    person.add_done_callback(stop_showing_events)
    with contextlib.suppress(TimeoutError):
        try:
            async with asyncio.timeout(None) as shown:
                # In this task, so that questions can be answered before the run asks its first one.
                await _show_events_and_queue_questions(handle, screen, somebody, asks_permissions=asks_permissions)
        finally:
            is_over = True
            person.cancel()
            await asyncio.wait((person,))
            terminal.note = terminal.print_text
            screen.close_line_or_block()
            screen.print_delayed_notes()
    if not person.cancelled() and (error := person.exception()) is not None:
        raise error
    return await handle.result()


async def _show_events_and_queue_questions(
    handle: RunHandle, screen: Screen, console_input: _ConsoleInput, *, asks_permissions: bool
) -> None:
    """Show each event of a run and queue its questions for the person; return early if the run waits and the console does not."""
    async with contextlib.aclosing(handle.events(answers=True)) as events:
        async for event in events:
            screen.on_event(event)
            if isinstance(event, ev.QuestionAsked) or (
                asks_permissions and isinstance(event, ev.PermissionRequested) and not event.question.problem
            ):
                console_input.news.put_nowait(event.question)
            elif isinstance(event, ev.AnswerReceived):
                console_input.stop_asking_question(event.question_id)
            elif (
                isinstance(event, ev.WaitStarted)
                and event.kind != "child"
                and not console_input.should_wait_and_print_hint(event)
            ):
                return
            elif isinstance(event, ev.RunFinished):
                screen.print_run_summary(event.result)
            elif isinstance(event, ev.PhaseChanged) and not event.path and event.phase is RunPhase.IDLE:
                console_input.news.put_nowait(None)


class _ConsoleInput:
    """
    Reads the person's answers and messages while a run is shown.

    Attributes:
        news: The open questions; ``None`` when the run is idle.
    """

    def __init__(
        self, handle: RunHandle, screen: Screen, terminal: Terminal, answered_ids: Collection[str] = ()
    ) -> None:
        self._handle = handle
        self._screen = screen
        self._terminal = terminal
        self.news: asyncio.Queue[Question | None] = asyncio.Queue()
        self._answered_ids = set(answered_ids)
        self._asking: tuple[str, asyncio.Task[bool]] | None = None

    def should_wait_and_print_hint(self, wait: ev.WaitStarted) -> bool:
        """
        Return whether the console stays while a run waits for a message or a time; for a long wait at a terminal, print how to leave.

        It stays for waits of up to a minute, and at a terminal for all. Otherwise the run is left to be suspended, since piped input
        ends and the wait may take days.
        """
        until = datetime.fromisoformat(wait.wakes_at) if wait.wakes_at else None
        if until is not None and (until - datetime.now(UTC)).total_seconds() <= SOON_SECONDS:
            return True
        if self._terminal.lines.is_terminal:
            what = f"a message on {one_line(wait.topic, 80)!r}" if wait.kind == "message" else wait.wakes_at
            self._terminal.print_text(
                f"(the run waits for {what}; press Ctrl-C to leave and continue later with `stepengine resume`)"
            )
        return self._terminal.lines.is_terminal

    def stop_asking_question(self, question_id: str) -> None:
        """Stop asking a question that was answered, here or elsewhere."""
        self._answered_ids.add(question_id)
        if self._asking is not None and self._asking[0] == question_id:
            self._asking[1].cancel()

    async def ask_questions_and_read_input(self) -> None:
        """Ask each question of the run, and read input while it is idle; return at the end of the input."""
        while True:
            question = await self._send_lines_until_question()
            self._screen.close_line_or_block()
            if question is None:
                if not await self._send_next_input_or_shut_down():
                    return
            elif not await self._ask_question(question):
                return

    async def _send_lines_until_question(self) -> Question | None:
        """Send typed lines until the run asks or is idle; return the question, ``None`` if the run is idle."""
        if not self._terminal.lines.is_terminal:
            return await self.news.get()
        news = asyncio.ensure_future(self.news.get())
        try:
            while not news.done():
                line = asyncio.ensure_future(self._read_and_send_next_line())
                try:
                    await asyncio.wait((news, line), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # Wait for its end, so that the reader of keys has restored the terminal before the next read.
                    line.cancel()
                    await asyncio.wait((line,))
                if not line.cancelled() and not line.result():
                    break
            return await news
        finally:
            news.cancel()

    async def _read_and_send_next_line(self) -> bool:
        """Read and send the next line; return ``False`` if the input has ended."""
        text = await self._terminal.read_line_during_run()
        if text is not None:
            await self._send_line_or_run_command(text)
        return text is not None

    async def _send_line_or_run_command(self, text: str) -> None:
        """Send a typed line to the run, or run it as a chat command; print or queue a line that the run refuses."""
        if not text.strip() or await self._terminal.run_or_queue_chat_command(text):
            return
        self._terminal.echo_hidden_line()
        try:
            self._handle.send_input(self._terminal.message_from_line(text))
        except StepEngineError as error:
            self._terminal.print_or_queue_refused_line(text, error)
        else:
            self._terminal.note("(sent; the run reads it before its next model call)", "")

    async def _send_next_input_or_shut_down(self) -> bool:
        """Read the next input of an idle run; return ``False`` and shut the run down if the person quits."""
        while True:
            line = await self._terminal.read_line_with_prompt("> ")
            if line is None or line.strip() in QUIT:
                await self._handle.shutdown()
                return False
            if line.strip():
                self._handle.send_input(line)
                return True

    async def _ask_question(self, question: Question) -> bool:
        """Ask a question until it is answered here or elsewhere; return ``False`` if the input has ended."""

        def send_answer(answer: Any) -> None:
            self._handle.answer(question.id, answer)

        if question.id in self._answered_ids:
            return True
        self._screen.record_shown_diff(question)
        asking = asyncio.create_task(
            self._terminal.ask_until_answered(question, send_answer, self._send_line_or_run_command)
        )
        self._asking = question.id, asking
        try:
            await asyncio.wait((asking,))
        finally:
            asking.cancel()
            self._asking = None
            await asyncio.wait((asking,))
        if not asking.cancelled():
            return asking.result()
        self._terminal.print_text("(answered elsewhere)")
        return True


class TerminalInteractor:
    """
    Asks the person at a terminal, for ``Engine(interactor=...)`` and ``ask_user_tool(interactor)``.

    Args:
        input: The input; stdin by default.
        output: The output of questions; stderr by default.
        colors: The style of each kind of line.
        progress: The display of the run on the same terminal; its status line is hidden while a question is open.
        color: ``"auto"``, ``"always"`` or ``"never"``.
    """

    def __init__(
        self,
        *,
        input: TextIO | None = None,
        output: TextIO | None = None,
        colors: ColorScheme = COLORS,
        progress: ProgressDisplay | None = None,
        color: str = "auto",
    ) -> None:
        self._terminal = Terminal(
            make_console(output or sys.stderr, color=color), TypedLines(input or sys.stdin), colors
        )
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()
        if progress is not None:
            progress.shows_questions = False

    async def ask(self, question: Question, /) -> Any:
        """Return the typed answer; ``None`` at the end of the input, or if an effect in doubt is left undecided."""
        answers: list[object] = []

        def store_answer(answer: Any) -> None:
            answers.append(validate_typed_answer(answer, question))

        held = contextlib.nullcontext() if self._progress is None else self._progress.hide_status_line()
        async with self._one_at_a_time:
            with held:
                may_skip = is_about_effect_in_doubt(question.id)
                await self._terminal.ask_until_answered(
                    question, store_answer, self._print_unsent_line, may_skip=may_skip
                )
        if self._progress is not None:
            self._progress.record_shown_diff(question)
        return answers[0] if answers else None

    async def _print_unsent_line(self, typed: str) -> None:
        """Print that a line was neither an answer nor sent; ignore an empty line."""
        if typed.strip():
            self._terminal.print_text(f"(no answer, and not sent: {one_line(typed)})")
