"""
What a person types at a chat: lines with a history, files that go along with them, and commands of their own shell.

On a terminal prompt_toolkit (extra ``chat``) reads them: several lines, history, completion. Elsewhere, and without it, one line
is read after the other. Must not be here: what the commands of a chat do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from stepengine.cli.console import Terminal
from stepengine.cli.perform import interruptible
from stepengine.cli.recording import HISTORY, runs_folder
from stepengine.redaction import ANY

__all__ = ("Attached", "Prompt", "attached", "shell_output")

HISTORY_LINES = 1_000
HISTORY_CHARS = 10_000
FILE_BYTES = 64 * 1024
ALL_BYTES = 256 * 1024
SHELL_BYTES = 1024 * 1024
SHELL_SECONDS = 120
SOON = 2.0
"""How soon after the first Ctrl-C the second one leaves, in seconds."""


class Prompt:
    """
    Reads what a person says next.

    Args:
        terminal: Where lines are read without prompt_toolkit.
        commands: The commands that are completed.
        root: The folder whose files are completed.
        plain: Read plain lines even at a terminal.

    Attributes:
        is_rich: Whether prompt_toolkit reads.
    """

    def __init__(self, terminal: Terminal, *, commands: Sequence[str], root: Path, plain: bool) -> None:
        self._terminal = terminal
        self._session = None if plain else _session(commands, root)
        self.is_rich = self._session is not None

    async def next(self) -> str | None:
        """Return what is said next; ``None`` when the person leaves: with Ctrl-D, or with Ctrl-C twice."""
        if self._session is None:
            return await self._terminal.line("> ")
        last = -SOON
        while True:
            try:
                said: str = await self._session.prompt_async("> ")
            except EOFError:
                return None
            except KeyboardInterrupt:
                now = asyncio.get_running_loop().time()
                if now - last < SOON:
                    return None
                last = now
                self._terminal.say("(Ctrl-C once more leaves, and so does Ctrl-D)", "dim")
            else:
                return said


def _session(commands: Sequence[str], root: Path) -> Any:
    """Return what reads at a terminal; ``None`` without prompt_toolkit."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import History
    except ImportError:
        return None

    class Kept(History):
        """What was said before, newest first."""

        def load_history_strings(self) -> Iterable[str]:
            return reversed(_history())

        def store_string(self, string: str) -> None:
            _remember(string)

    class Names(Completer):
        """Commands behind a slash at the start, files behind an at sign."""

        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Any]:
            before = document.text_before_cursor
            word = document.get_word_before_cursor(WORD=True)
            known = commands if before.startswith("/") and before == word else []
            found = [name for name in known if name.startswith(word)]
            if word.startswith("@"):
                found = [f"@{path}" for path in _paths(root, word[1:])]
            for name in found:
                yield Completion(name, start_position=-len(word))

    return PromptSession(
        history=Kept(), completer=Names(), complete_while_typing=False, multiline=True, key_bindings=_keys(),
        prompt_continuation="  ", enable_history_search=False,
    )  # fmt: skip


def _keys() -> Any:
    """Return the keys that are not those of a line editor: Enter sends, Alt-Enter and Ctrl-J begin a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _paths(root: Path, begun: str) -> list[str]:
    folder, _, start = begun.rpartition("/")
    place = root / folder
    if ".." in Path(folder).parts or Path(folder).is_absolute() or not place.is_dir():
        return []
    found = sorted(place.iterdir())[:HISTORY_LINES]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in found if path.name.startswith(start)]
    return [f"{folder}/{name}" if folder else name for name in names if not name.startswith(".") or start]


# --- history ----------------------------------------------------------------------------------------------------------


def _history_file() -> Path | None:
    runs = runs_folder()
    return None if runs is None else runs.parent / HISTORY


def _history() -> list[str]:
    """Return what was said in chats before, oldest first."""
    file = _history_file()
    try:
        lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()[-HISTORY_LINES:]
    except (OSError, ValueError):
        return []
    said: list[str] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            said += [text] if isinstance(text := json.loads(line), str) else []
    return said


def _remember(said: str) -> None:
    """Add what was said, without secrets; where that cannot be written, nothing is kept."""
    file = _history_file()
    if file is None or len(said) > HISTORY_CHARS:
        return
    kept = [*_history(), ANY.text(said)][-HISTORY_LINES:]
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:  # noqa: PTH123 - it is open already
            stream.writelines([f"{json.dumps(text)}\n" for text in kept])
        made.replace(file)


# --- files ------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Attached:
    """
    What is sent.

    Attributes:
        text: What was said, with the files behind it.
        notes: A line for each file: that it goes along, or why not.
    """

    text: str
    notes: tuple[str, ...]


def attached(said: str, folder: Path, withhold: Sequence[str] = ()) -> Attached:
    """
    Return what was said with the files that it names as ``@path`` at the start of a word; ``@@`` stands for ``@``.

    Only files inside *folder* that the file tools would read go along, up to 64 KiB each and 256 KiB together.
    """
    words = [word for word in said.split() if word.startswith("@") and len(word) > 1]
    names = list(dict.fromkeys([word[1:].rstrip(",.;:)") for word in words if not word.startswith("@@")]))
    parts: list[str] = []
    notes: list[str] = []
    left = ALL_BYTES
    for name in names:
        content = _content(name, folder, withhold, min(left, FILE_BYTES))
        if isinstance(content, str):
            left -= len(content.encode())
            notes.append(f"+ {name} ({len(content.encode()):,} bytes)")
            parts.append(f'<file path="{name}">\n{content}\n</file>')
        else:
            notes.append(f"{name} does not go along: {content}")
    for word in {word for word in words if word.startswith("@@")}:
        said = said.replace(word, word[1:])
    return Attached("\n\n".join([said, *parts]), tuple(notes))


def _content(name: str, folder: Path, withhold: Sequence[str], most: int) -> str | Exception:
    from stepengine.errors import ToolError
    from stepengine.tools.files.policy import Policy
    from stepengine.tools.files.root import Root

    try:
        root = Root(folder, Policy(withhold=tuple(withhold), allow_wide_root=True))
        try:
            with open(root.open_file(name).fd, "rb") as file:  # noqa: PTH123 - it is open already
                content = file.read(most + 1)
        finally:
            root.close()
    except (ToolError, OSError) as error:
        return error
    if len(content) > most:
        return ValueError(f"it has more than {most:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ValueError("it is no text in UTF-8")


# --- the person's own shell -------------------------------------------------------------------------------------------


async def shell_output(command: str, folder: Path) -> str:
    """Run a command that the person typed in their own shell, and return what it printed; Ctrl-C and 120 s end it."""
    process = await asyncio.create_subprocess_shell(
        command, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    said = b""
    try:
        with interruptible(end):
            async with asyncio.timeout(SHELL_SECONDS):
                while process.stdout is not None and (chunk := await process.stdout.read(65_536)):
                    said = (said + chunk)[:SHELL_BYTES]
                code = await process.wait()
    except TimeoutError:
        end()
        code = await process.wait()
        said += f"\n(ended after {SHELL_SECONDS} s)".encode()
    text = said.decode(errors="replace").rstrip("\n")
    return text if code == 0 else f"{text}\n(exit code {code})".lstrip("\n")
