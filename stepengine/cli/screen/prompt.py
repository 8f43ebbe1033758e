"""
The input of a chat: lines with a history, attached files, and commands of the user's own shell.

On a terminal prompt_toolkit (extra ``chat``) reads them: several lines, history, completion. Elsewhere, and without it, single lines
are read. The commands of a chat are in ``commands.chat_commands``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import termios
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepengine.cli.screen.console import Terminal, TypedLines
from stepengine.cli.screen.interrupt_keys import call_on_interrupts
from stepengine.cli.screen.render import visible
from stepengine.errors import StepEngineError, ToolError
from stepengine.redaction import ANY
from stepengine.workspace.atomic import replace_path

if TYPE_CHECKING:
    from rich.console import Console

    from stepengine.workspace.root import Root

PASTED = "a !command that was pasted is not run; type it"
COMPLETIONS = 1_000
HISTORY_LINES = 1_000
HISTORY_CHARS = 10_000
FILE_BYTES = 64 * 1024
ALL_BYTES = 256 * 1024
SHELL_BYTES = 1024 * 1024
SHELL_SECONDS = 120
PASTE_LINES = 10
PASTE_CHARS = 2_000
PASTE_BYTES = 1024 * 1024
PASTE = re.compile(r"\[paste \d{1,9}: \d{1,9} lines\]")
ANSWERS = ("/skip",)
REFRESH = 0.1
"""The interval between redraws during a turn, in seconds."""
SOON = 2.0
"""The time after the first Ctrl-C in which a second one leaves, in seconds."""
ESCAPE = 0.1
"""The time after Esc in which the rest of a longer key, such as Alt-Enter, may arrive, in seconds."""


class UnreadMessage(str):
    """A message that a run did not read. Other people and programs send messages, too, so it is never a command."""

    __slots__ = ()


class AbovePromptStream:
    """
    A text stream that prints above the line that is being typed.

    Args:
        stream: The terminal; text is printed directly while no line is read.

    Attributes:
        reading: The prompt_toolkit application that reads a line now; ``None`` without one.
        encoding: The encoding of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = ""
        self.reading: Any = None
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Buffer *text* until it is flushed."""
        self._waiting += text
        return len(text)

    def flush(self) -> None:
        """Print the buffered text above the prompt, and redraw the prompt."""
        text, self._waiting = self._waiting, ""
        reading = self.reading if self.reading is not None and self.reading.is_running else None
        if reading is not None and text:
            reading.renderer.erase()
        self._stream.write(text)
        self._stream.flush()
        if reading is not None and text:
            reading.invalidate()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor of the stream."""
        return self._stream.fileno()


class PromptReader(Terminal):
    """
    Reads the next prompt, and the input typed while a run works.

    Args:
        console: The console for questions.
        lines: The input without prompt_toolkit.
        above: The stream of *console*.
        commands: The commands that are completed.
        root: The folder whose files are completed.
        history: The earlier inputs; new ones are added.
        plain: Read plain lines even at a terminal.

    Attributes:
        is_rich: Whether prompt_toolkit reads.
        was_pasted: Whether a part of the last input was pasted.
        keys: The functions of Ctrl-O (``"c-o"``) and Shift-Tab (``"s-tab"``).
        run_if_immediate: Executes a command of the chat that need not wait for the end of the turn; returns whether it did.
        status: Returns the last line of the terminal while a person may type.
    """

    def __init__(
        self,
        console: Console,
        lines: TypedLines,
        above: AbovePromptStream,
        *,
        commands: Sequence[str],
        root: Path,
        history: PromptHistory,
        plain: bool,
    ) -> None:
        super().__init__(console, lines)
        self._above = above
        self._session: Any = None
        self._answers: Any = None
        if not plain:
            self._session, self._answers = self._make_prompt_sessions(commands, root, history)
        self._draft = ""
        self._is_draft_pasted = False
        self._accepted: str | None = None
        self._pastes: list[str] = []
        self._unsent: list[str] = []
        self._live: Callable[[], str] = str
        self._interrupt: Callable[[], object] | None = None
        self._is_interrupted = False
        self.is_rich = self._session is not None
        self.was_pasted = False
        self.keys: dict[str, Callable[[], object]] = {}
        self.run_if_immediate: Callable[[str], Awaitable[bool]] | None = None
        self.status: Callable[[], str] = str

    @contextlib.contextmanager
    def set_raw_terminal_mode(self) -> Iterator[None]:
        """
        Put the terminal into raw mode during the block, so that early input is not echoed twice and Enter stays Enter.

        Ctrl-C sends a signal while no line is read.
        """
        if self._session is None:
            yield
            return
        before = termios.tcgetattr(sys.stdin)
        mine = termios.tcgetattr(sys.stdin)
        mine[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        mine[3] &= ~(termios.ECHO | termios.ICANON)
        mine[6] = [*mine[6]]
        mine[6][termios.VMIN], mine[6][termios.VTIME] = b"\x01", b"\x00"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mine)
        try:
            yield
        finally:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(sys.stdin, termios.TCSANOW, before)

    @contextlib.contextmanager
    def set_turn_display_and_interrupt(
        self, get_live_text: Callable[[], str], interrupt: Callable[[], object]
    ) -> Iterator[None]:
        """
        Show the text of *get_live_text* above the input while the block runs, and call *interrupt* at Ctrl-C and at the first Esc.

        Only Ctrl-C calls it again, since a second call leaves the chat.
        """
        self._live, self._interrupt, self._is_interrupted = get_live_text, interrupt, False
        try:
            yield
        finally:
            self._live, self._interrupt = str, None

    async def read_next_prompt(self) -> str | None:
        """Read the next prompt, or take a queued line; return ``None`` if the person leaves with Ctrl-D or with Ctrl-C twice."""
        if self._unsent:
            said, self.was_pasted = self._unsent.pop(0), False  # a pasted !command was refused before it was queued
            self.print_text(f"> {visible(said)}", "dim")
            return said
        if self._session is None:
            return await super().read_line_with_prompt("> ")
        last = -SOON
        while True:
            try:
                return await self._read_session_line(self._session, "> ")
            except EOFError:
                return None
            except KeyboardInterrupt:
                now = asyncio.get_running_loop().time()
                if now - last < SOON:
                    return None
                last = now
                self.print_text("(press Ctrl-C again or Ctrl-D to leave)", "dim")

    async def read_line_during_run(self) -> str | None:
        """Read the next line typed during a run; with prompt_toolkit, the end of the input raises ``EOFError``."""
        if self._session is None:
            return await super().read_line_during_run()

        def make_prompt() -> Any:
            """Return the prompt below the current live text."""
            from prompt_toolkit.formatted_text import ANSI

            live = self._live()
            return ANSI(f"{live}\n> " if live else "> ")

        said = await self._read_session_line(self._session, make_prompt, refresh_interval=REFRESH)
        self._hidden = "\n".join([f"> {line}" for line in visible(said).splitlines()])
        return said

    async def read_line_with_prompt(self, prompt: str) -> str | None:
        """
        Read an answer; ``None`` at the end of the input.

        Ctrl-C interrupts the turn, and the read then waits until the question is cancelled. Without a turn it returns ``""``.
        """
        if self._answers is None:
            return await super().read_line_with_prompt(prompt)
        while True:
            try:
                answer: str = await self._read_session_line(self._answers, prompt, keeps_draft=False)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._interrupt is None:
                    return ""
                self._interrupt_turn(None)
                await asyncio.Event().wait()  # until the ending run cancels the question
            else:
                return answer

    def is_chat_command(self, text: str) -> bool:
        """Return whether a line is a command of the chat and not an answer; ``/skip`` is an answer."""
        word = "".join(text.split(maxsplit=1)[:1])
        return word.startswith("/") and word[1:].isascii() and word[1:].isalpha() and text.strip() not in ANSWERS

    async def run_or_queue_chat_command(self, text: str) -> bool:
        """Execute a chat command that need not wait, or queue it; refuse a pasted ``!command``. Return whether it was a command."""
        is_command = text.startswith(("/", "!")) and not text.startswith("//")
        if is_command and self.was_pasted and text.startswith("!"):
            self.echo_hidden_line()
            self.note(PASTED, "yellow")
        elif is_command and not (
            text.startswith("/") and self.run_if_immediate is not None and await self.run_if_immediate(text)
        ):
            self.queue_line(text)
            self.echo_hidden_line()
            self.note("(runs when the turn ends)", "dim")
        return is_command

    @property
    def queued_lines(self) -> tuple[str, ...]:
        """The queued lines, which are sent after the turn."""
        return tuple(self._unsent)

    def clear_queue(self, *, to_input_line: bool) -> None:
        """
        Remove all queued lines; with *to_input_line* and prompt_toolkit, put messages back into the input line.

        Queued commands are dropped; only if there are no messages, the last command is put back. A message of the run counts
        as pasted.
        """
        unread = [text for text in self._unsent if isinstance(text, UnreadMessage)]
        typed = [
            text
            for text in self._unsent
            if not (isinstance(text, UnreadMessage) or self.is_chat_command(text) or text.startswith("!"))
        ]
        words = [f"/{text.lstrip()}" if text.lstrip().startswith("/") else text for text in unread] + typed
        if to_input_line and self.is_rich:
            self._draft = "\n".join([*(words or self._unsent[-1:]), *([self._draft] if self._draft else [])])
            self._is_draft_pasted = self._is_draft_pasted or bool(unread)
        self._unsent.clear()

    def message_from_line(self, text: str) -> str:
        """Return the message to the agent; two slashes at the start become one."""
        return text.removeprefix("/") if text.startswith("//") else text

    def queue_messages_first(self, texts: Iterable[str]) -> None:
        """Queue messages that a run did not read, before typed lines."""
        self._unsent[:0] = map(UnreadMessage, texts)

    def queue_line(self, text: str) -> None:
        """Queue a typed line for the next turn."""
        self._unsent.append(text)

    def print_or_queue_refused_line(self, text: str, error: StepEngineError) -> None:
        """Queue a line that the run refused, usually because it had just ended, for the next turn. Print nothing."""
        self.queue_line(text)

    def drain_typed_lines(self) -> list[str]:
        """With prompt_toolkit, discard keys typed before a read and return no lines; the text of the input line stays."""
        if self._session is None:
            return super().drain_typed_lines()
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._session.app.input)
        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        return []

    async def _read_session_line(
        self, session: Any, message: object, *, keeps_draft: bool = True, refresh_interval: float = 0
    ) -> str:
        """Read a line with prompt_toolkit; with *keeps_draft*, text that is unsent when the read is cancelled returns at the next read."""
        self.was_pasted, self._accepted = keeps_draft and self._is_draft_pasted, None
        self._above.reading = session.app
        session.bottom_toolbar = (lambda: [("class:bottom-toolbar.text", self.status())]) if self.status() else None
        session.app.erase_when_done = bool(refresh_interval)
        draft = self._draft if keeps_draft else ""
        sent = False
        try:
            said: str = await session.prompt_async(
                message, default=draft, refresh_interval=refresh_interval, handle_sigint=self._interrupt is None
            )
            sent = True
        except (EOFError, KeyboardInterrupt):
            sent = True
            raise
        except asyncio.CancelledError:
            if self._accepted is None:
                raise
            said, sent = self._accepted, True  # Enter came before the cancellation
        finally:
            self._above.reading = None
            if keeps_draft:
                self._draft = "" if sent else session.default_buffer.text
                self._is_draft_pasted = self.was_pasted and bool(self._draft)
        return self._expand_pastes(said)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _make_prompt_sessions(self, commands: Sequence[str], root: Path, history: PromptHistory) -> tuple[Any, Any]:
        """Return the prompt_toolkit sessions for prompts and for answers; both are ``None`` without prompt_toolkit."""
        try:
            from prompt_toolkit import PromptSession
        except ImportError:
            return None, None
        keys = self._make_key_bindings()
        from prompt_toolkit.history import DummyHistory
        from prompt_toolkit.styles import Style

        style = Style.from_dict({"bottom-toolbar": "noreverse", "bottom-toolbar.text": "ansibrightblack"})
        said: Any = PromptSession(
            history=_make_stored_history(history, self._expand_pastes, lambda: self.was_pasted), completer=_make_completer(commands, root), complete_while_typing=False,
            multiline=True, key_bindings=keys, prompt_continuation="  ", enable_history_search=False, style=style,
        )  # fmt: skip
        answers: Any = PromptSession(history=DummyHistory(), style=style, key_bindings=self._make_answer_bindings())
        for session in (said, answers):
            session.app.ttimeoutlen = session.app.timeoutlen = ESCAPE
        return said, answers

    def _make_key_bindings(self) -> Any:
        """Return the key bindings in addition to those of a line editor."""
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()
        is_typed = Condition(lambda: self._session is not None and bool(self._session.default_buffer.text))
        is_working = Condition(lambda: self._interrupt is not None)
        is_interrupted = Condition(lambda: self._is_interrupted)
        for names, does, when in (
            (("enter",), self._accept_line, None),
            (("c-j",), lambda event: event.current_buffer.insert_text("\n"), None),
            (("escape", "enter"), lambda event: event.current_buffer.insert_text("\n"), None),
            (("c-c",), lambda event: event.current_buffer.reset(), is_typed),
            (("c-c",), _erase_line_and_interrupt, ~is_working & ~is_typed),
            (("escape",), self._interrupt_turn, is_working & ~is_interrupted),
            (("c-c",), self._interrupt_turn, is_working & ~is_typed),
            (("<sigint>",), self._interrupt_turn, is_working),
            # A run that works is left with Ctrl-C.
            (("c-d",), lambda _: None, is_working & ~is_typed),
            (("c-o",), lambda _: self.keys.get("c-o", str)(), None),
            (("s-tab",), lambda _: self.keys.get("s-tab", str)(), None),
            ((Keys.BracketedPaste,), self._insert_pasted_text, None),
        ):
            keys.add(*names, filter=True if when is None else when)(does)
        return keys

    def _make_answer_bindings(self) -> Any:
        """Return the key bindings of a question: Esc works like Ctrl-C, and a paste is marked as one."""
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()
        keys.add("escape")(lambda event: event.app.exit(exception=KeyboardInterrupt()))
        keys.add(Keys.BracketedPaste)(self._insert_pasted_text)
        return keys

    def _accept_line(self, event: Any) -> None:
        """Store the typed text, and end the read with it."""
        self._accepted = event.current_buffer.text
        event.current_buffer.validate_and_handle()

    def _interrupt_turn(self, _: object) -> None:
        """Interrupt the running turn, and mark it as interrupted."""
        if self._interrupt is not None:
            self._is_interrupted = True
            self._interrupt()

    def _insert_pasted_text(self, event: Any) -> None:
        """Insert a paste into the input line, a long one as a placeholder, and mark the input as pasted."""
        self.was_pasted = True
        event.current_buffer.insert_text(self._store_long_paste(event.data.replace("\r\n", "\n").replace("\r", "\n")))

    # --- pastes -------------------------------------------------------------------------------------------------------

    def _store_long_paste(self, pasted: str) -> str:
        """Return a short paste unchanged; store a long one and return its placeholder; discard one above 1 MiB and return ``""``."""
        lines = pasted.count("\n") + 1
        if len(pasted.encode(errors="replace")) > PASTE_BYTES:
            self.print_text(
                f"(the paste has more than {PASTE_BYTES >> 20} MiB and was discarded; @file sends a part of a file)",
                "yellow",
            )
            return ""
        if lines <= PASTE_LINES and len(pasted) <= PASTE_CHARS:
            return pasted
        self._pastes.append(pasted)
        return f"[paste {len(self._pastes)}: {lines} lines]"

    def _expand_pastes(self, typed: str) -> str:
        """Return the typed text with placeholders replaced by the stored pastes."""
        known = {
            f"[paste {number}: {pasted.count(chr(10)) + 1} lines]": pasted
            for number, pasted in enumerate(self._pastes, start=1)
        }
        # In one pass, so that placeholders inside a paste are not replaced.
        return PASTE.sub(lambda word: known.get(word[0], word[0]), typed)


def _erase_line_and_interrupt(event: Any) -> None:
    """End the read of an empty line with ``KeyboardInterrupt``, and remove the line from the screen."""
    event.app.erase_when_done = True
    event.app.exit(exception=KeyboardInterrupt())


def _make_stored_history(
    history: PromptHistory, expand_pastes: Callable[[str], str], was_pasted: Callable[[], bool]
) -> Any:
    """Return a prompt_toolkit history that loads and appends *history*, with pastes expanded and secrets redacted."""
    from prompt_toolkit.history import History as Shown

    class Kept(Shown):
        """The earlier inputs, newest first."""

        def load_history_strings(self) -> Iterable[str]:
            return reversed(history.load())

        def append_string(self, string: str) -> None:
            # A pasted !command is not run, so it must not return from the history as a typed one.
            if not (was_pasted() and expand_pastes(string).startswith("!")):
                super().append_string(string)

        def store_string(self, string: str) -> None:
            history.append_redacted(expand_pastes(string))

    return Kept()


def _make_completer(commands: Sequence[str], root: Path) -> Any:
    """Return a completer for commands after a slash at the start, and for files after an at sign."""
    from prompt_toolkit.completion import Completer, Completion

    class Names(Completer):
        """Commands and files."""

        def get_completions(self, document: Any, complete_event: object) -> Iterator[Any]:
            before = document.text_before_cursor
            word = document.get_word_before_cursor(WORD=True)
            known = commands if before.startswith("/") and before == word else []
            found = [name for name in known if name.startswith(word)]
            if word.startswith("@"):
                found = [f"@{path}" for path in _complete_path(root, word[1:])]
            for name in found:
                yield Completion(name, start_position=-len(word))

    return Names()


def _complete_path(root: Path, typed: str) -> list[str]:
    """Return the paths below *root* that start with the typed text; an empty list if they cannot be listed."""
    folder, _, start = typed.rpartition("/")
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        return []
    try:
        fitting = [path for path in (root / folder).iterdir() if path.name.startswith(start)]
        found = sorted([path for path in fitting if start or not path.name.startswith(".")])[:COMPLETIONS]
        names = [f"{path.name}/" if path.is_dir() else path.name for path in found]
    except (OSError, ValueError):
        return []
    return [f"{folder}/{name}" if folder else name for name in names]


# --- history ----------------------------------------------------------------------------------------------------------


class PromptHistory:
    """
    The stored inputs of chats.

    Args:
        file: The file for the inputs; ``None`` to store none.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def load(self) -> list[str]:
        """Load the earlier inputs, oldest first."""
        try:
            lines = [] if self._file is None else self._file.read_text(encoding="utf-8").splitlines()[-HISTORY_LINES:]
        except (OSError, ValueError):
            return []
        said: list[str] = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                said += [text] if isinstance(text := json.loads(line), str) else []
        return said

    def append_redacted(self, typed: str) -> None:
        """Append an input to the file, with secrets redacted; ignore write errors."""
        file = self._file
        if file is None or len(typed) > HISTORY_CHARS:
            return
        kept = [*self.load(), ANY.text(typed)][-HISTORY_LINES:]
        with contextlib.suppress(OSError):
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            replace_path(file, "".join([f"{json.dumps(text)}\n" for text in kept]).encode(), mode=0o600)


# --- files ------------------------------------------------------------------------------------------------------------


def expand_attachments(message: str, folder: Path) -> tuple[str, list[str]]:
    """
    Return a message with the content of the files named ``@path`` at word starts, and a note about each file.

    There, ``@@`` is a plain ``@``. Only files inside *folder* that the file tools would read are added, up to 64 KiB each
    and 256 KiB together. For a folder, the names of its entries are added.
    """
    names = list(dict.fromkeys([word.rstrip(",.;:)") for word in re.findall(r"(?<!\S)@([^@\s]\S*)", message)]))
    parts: list[str] = []
    notes: list[str] = []
    left = ALL_BYTES
    for name in names:
        read, kind = (_list_folder, "folder") if os.path.isdir(folder / name) else (_read_file, "file")  # noqa: PTH112  (never raises)
        content = _read_attachment_or_error(folder, read, name, min(left, FILE_BYTES))
        if isinstance(content, str):
            left -= len(content.encode())
            notes.append(f"+ {name} ({len(content.encode()):,} bytes)")
            parts.append(f'<{kind} path="{name}">\n{content}\n</{kind}>')
        else:
            notes.append(f"{name} is not attached: {content}")
    return "\n\n".join([re.sub(r"(?<!\S)@@", "@", message), *parts]), notes


def _read_attachment_or_error(
    folder: Path, read: Callable[[Root, str, int], str], name: str, max_bytes: int
) -> str | Exception:
    """Call *read* for *name* below *folder*; return its text, or the error."""
    from stepengine.workspace.path_policy import PathPolicy
    from stepengine.workspace.root import Root

    try:
        with contextlib.closing(Root(folder, PathPolicy(allow_wide_root=True))) as root:
            return read(root, name, max_bytes)
    except UnicodeDecodeError:
        return ValueError("it is not UTF-8 text")
    except (ToolError, OSError, ValueError) as error:
        return error


def _read_file(root: Root, name: str, max_bytes: int) -> str:
    """Return the text of a file; raise ``ValueError`` if it has more than *max_bytes*."""
    from stepengine.workspace import calls
    from stepengine.workspace.text import read_if_small

    fd = root.open_file(name).fd
    try:
        content = read_if_small(fd, max_bytes)
    finally:
        calls.close(fd)
    if content is None:
        msg = f"it has more than {max_bytes:,} bytes"
        raise ValueError(msg)
    return content.decode()


def _list_folder(root: Root, name: str, max_bytes: int) -> str:
    """Return the sorted names in a folder except secret files; raise ``ValueError`` if they have more than *max_bytes*."""
    from stepengine.workspace import calls

    opened = root.open_folder(name)
    try:
        with calls.scandir(opened.fd) as entries:
            names = [
                f"{e.name}/" if e.is_dir() else e.name
                for e in entries
                if not root.secrets.match((*opened.parts, e.name))
            ]
    finally:
        calls.close(opened.fd)
    listed = "\n".join(sorted(names))
    if len(listed.encode(errors="replace")) > max_bytes:
        msg = f"the names in this folder have more than {max_bytes:,} bytes"
        raise ValueError(msg)
    return visible(listed)


# --- the person's own shell -------------------------------------------------------------------------------------------


async def run_shell_command(command: str, folder: Path) -> str:
    """Run a command in the shell and return its output, with the exit code if it failed; Ctrl-C or 120 s end the command."""
    process: asyncio.subprocess.Process | None = None
    is_ended = False
    ended = ""

    def kill_command() -> None:
        """Kill the command and its children, and store that it was ended early."""
        nonlocal is_ended
        is_ended = True
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    said, total = b"", 0
    with call_on_interrupts(kill_command):  # before it is started: Ctrl-C may come as soon as it runs
        process = await asyncio.create_subprocess_shell(
            command, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if is_ended:
            kill_command()
        try:
            async with asyncio.timeout(SHELL_SECONDS):
                while process.stdout is not None and (chunk := await process.stdout.read(65_536)):
                    total += len(chunk)
                    said = (said + chunk)[:SHELL_BYTES]
                code = await process.wait()
        except TimeoutError:
            kill_command()
            code = await process.wait()
            ended = f"\n(ended after {SHELL_SECONDS} s)"
    missing = f"\n({total - len(said):,} more bytes are not shown)" if total > len(said) else ""
    text = said.decode(errors="replace").rstrip("\n") + missing + ended
    return text if code == 0 else f"{text}\n(exit code {code})".lstrip("\n")
