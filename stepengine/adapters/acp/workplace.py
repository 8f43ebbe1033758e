"""
The requests of an external program for the workspace: to read and write files, and to run commands.

What must not be here: whether a file may be used or a command may run, which rules and people have decided before.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.adapters.acp.program import ALWAYS, select_default_and_named_variables
from stepengine.adapters.external.turns import shorten_text
from stepengine.data.json import JsonDict, replace_lone_surrogates
from stepengine.data.visible import cut_end, visible
from stepengine.errors import PathOutsideRoot, ToolError
from stepengine.tools.context import ToolContext
from stepengine.workspace import calls
from stepengine.workspace.calls import Fd
from stepengine.workspace.environment import MARKER, find_program
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.tools.bundled.shell.process import CommandProcess
    from stepengine.workspace.remote_files import RemoteSystem
    from stepengine.workspace.root import Root

# A file travels as one line of JSON, in which a letter takes up to three times its bytes (an e with an accent is six
# characters): 12 MiB at this size. So whatever a program was given to read fits into the 16 MiB of a line
# (`program.LINE_BYTES`) in which it sends the changed file back.
READ_BYTES = 4 * 1024 * 1024
ERROR_CHARS = 2_000
OUTPUT_BYTES = 1024 * 1024
OPEN = 20
"""How many commands one turn may have at a time, including ended ones that were not given back."""


def parse_command(request: Mapping[str, Any]) -> list[str]:
    """
    Return the command line that a program requests to run, as a list of words.

    Raises:
        ToolError: If they are not a list of words.
    """
    command, more = request.get("command"), request.get("args") or []
    words = [command, *more] if isinstance(more, list) else []
    if not words or not command or not all(isinstance(word, str) and "\0" not in word for word in words):
        msg = "command must be the name of a program, and args a list of its arguments"
        raise ToolError(msg)
    return [replace_lone_surrogates(word) for word in words]


@frozen
class RequestedFile:
    """
    A file of the workspace that the program asks for.

    Attributes:
        path: Its path below the workspace, with all links resolved.
        paths: The paths by which rules know it: as the program wrote it, and *path* where that is another one.
    """

    path: str
    paths: tuple[str, ...]


class ProgramFileAccess:
    """Access of an external program to the files of the workspace that our own tools may read or write."""

    def __init__(self, folder: Path, may: str) -> None:
        self.folder = folder
        self._may = may
        self._tools: dict[str, Any] | None = None

    def resolve_readable_file(self, request: Mapping[str, Any]) -> RequestedFile:
        """
        Return the file that a read request names; raise an error if the program may not read it.

        Raises:
            ToolError: If the program may not read files, and for a path outside of the workspace.
        """
        if self._may == "none":
            msg = "this client does not allow reading files"
            raise ToolError(msg)
        return self._resolve_file(request)

    def resolve_writable_file(self, request: Mapping[str, Any]) -> RequestedFile:
        """
        Return the file that a write request names; raise an error if the program may not write it.

        Raises:
            ToolError: If the program may not write files, for a path outside of the workspace, and for content that is not text.
        """
        if self._may != "write" or not isinstance(request.get("content"), str):
            msg = (
                "this client does not allow writing files"
                if self._may != "write"
                else "content must be the text of the file"
            )
            raise ToolError(msg)
        return self._resolve_file(request)

    def _resolve_file(self, request: Mapping[str, Any]) -> RequestedFile:
        """Return the file of a request, with links resolved; raise an error if it is outside of the workspace."""
        path = shorten_text(request.get("path"), 4_096)
        if not path or "\0" in path:
            msg = "path must be the path of a file"
            raise ToolError(msg)
        real = Path(os.path.realpath(self.folder / path))
        if not real.is_relative_to(self.folder):
            msg = f"{path!r} is outside of the workspace"
            raise PathOutsideRoot(msg)
        found = real.relative_to(self.folder).as_posix()
        written = Path(os.path.normpath(self.folder / path))
        # Where the program wrote a name outside of the workspace that leads into it, only the place in it counts.
        names = [written.relative_to(self.folder).as_posix()] if written.is_relative_to(self.folder) else []
        return RequestedFile(found, tuple(dict.fromkeys([*names, found])))

    async def read_requested_lines(self, file: RequestedFile, request: Mapping[str, Any]) -> str:
        """Return the text of a workspace file, or only the lines that the request names."""
        text = await asyncio.to_thread(self.read_whole_text, file)
        line, limit = request.get("line"), request.get("limit")
        if type(line) is not int and type(limit) is not int:
            return text
        first = max(1, line) - 1 if type(line) is int else 0
        # Only "\n" ends a line; `str.splitlines` would also split at page breaks.
        lines = io.StringIO(text).readlines()[first:]
        return "".join(lines[: max(0, limit)] if type(limit) is int else lines)

    def read_whole_text(self, file: RequestedFile) -> str:
        """
        Return the text of a file; raise ``ToolError`` if it is too large, no UTF-8, or another file by now.

        Raises:
            ToolError: If the file is missing, withheld, too large or not text, or its path now leads through a link.
        """
        from stepengine.workspace.root import Root
        from stepengine.workspace.text import read_if_small

        root = Root(self.folder, PathPolicy())
        try:
            opened = root.open_file(file.path)
            try:
                # A link that was put there after the request was judged leads to another file.
                if "/".join(opened.parts) != file.path:
                    msg = f"{file.path!r} is not the file that was allowed"
                    raise ToolError(msg)
                data = read_if_small(opened.fd, READ_BYTES)
            finally:
                calls.close(opened.fd)
        finally:
            root.close()
        if data is None:
            msg = f"{file.path!r} has more than {READ_BYTES:,} bytes"
            raise ToolError(msg)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            msg = f"{file.path!r} is not UTF-8 text"
            raise ToolError(msg) from None

    async def write(self, ctx: ToolContext, file: RequestedFile, content: str) -> None:
        """Write a file with our own tool: atomically, never a protected file, and with a record for undo."""
        if self._tools is None:
            from stepengine.tools.bundled import file_tools

            self._tools = {tool.spec.name: tool for tool in file_tools(self.folder, write=True)}
        tool = self._tools["write_file"]
        # The tool follows no links, so it writes the file that was judged or none.
        valid = tool.binding().validate(JsonDict({"path": file.path, "content": replace_lone_surrogates(content)}))
        # Without what the run has seen: the program changes files by itself, too.
        result = await tool.execute(valid.arguments, attrs.evolve(ctx, tool_name="write_file", belongings=None))
        if result.is_error:
            raise ToolError(cut_end(visible(result.text), ERROR_CHARS))


@attrs.define(eq=False)
class _Terminal:
    """A command and the end of its output."""

    process: CommandProcess
    kept: int
    output: bytes = b""
    is_cut: bool = False
    ended: tuple[int | None, str | None] | None = None

    def append_output(self, data: bytes) -> None:
        """Append output of the command, and drop the start of the output above the limit."""
        self.output += data
        if len(self.output) > self.kept:
            self.output, self.is_cut = self.output[-self.kept :] if self.kept else b"", True


class BorrowedTerminals:
    """
    The commands that a program started through us; all of them end with the turn.

    Args:
        folder: The folder of this machine that the workspace is: the program knows no other.
        workspace: The workspace; in a container or a sandbox, commands run there.
    """

    def __init__(self, folder: Path, workspace: Workspace) -> None:
        self._folder = folder
        self._place = workspace
        self._root: Root | None = None
        self._ids = itertools.count(1)
        self._open: dict[str, _Terminal] = {}

    async def start_command_in_terminal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a command in the workspace, without our keys in its environment, and return the id of its terminal."""
        from stepengine.tools.bundled.shell.process import CommandStart, start_command

        words = parse_command(request)
        if len(self._open) >= OPEN:
            msg = f"{OPEN} terminals are open already; release those that have ended"
            raise ToolError(msg)
        folder = self._resolve_working_folder(request.get("cwd"))
        system = self._place.system
        env = (
            select_default_and_named_variables(())
            if system is None
            else await asyncio.to_thread(_fetch_default_environment, system)
        )
        env |= {MARKER: secrets.token_hex(16)} | parse_variables(request)
        program = await asyncio.to_thread(_find_program, words[0], env.get("PATH", os.defpath), system)
        if program is None:
            msg = f"there is no program {words[0]!r:.200}"
            raise ToolError(msg)
        limit = request.get("outputByteLimit")
        kept = min(limit, OUTPUT_BYTES) if type(limit) is int and limit >= 0 else OUTPUT_BYTES
        heard: list[_Terminal] = []
        early: list[bytes] = []
        opened = await asyncio.to_thread(self._open_folder, folder)
        try:
            process = await start_command(
                CommandStart(
                    program=program,
                    argv=tuple(words),
                    env=env,
                    folder=opened,
                    on_output=lambda data: heard[0].append_output(data) if heard else early.append(data),
                )
            )
        finally:
            calls.close(opened)
        made = _Terminal(process, kept)
        for data in early:
            made.append_output(data)
        heard.append(made)
        name = f"t{next(self._ids)}"
        self._open[name] = made
        return {"terminalId": name}

    def _open_folder(self, folder: Path) -> Fd:
        """Open a folder of the workspace, on the workspace's machine."""
        if self._place.system is None:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if self._root is None:
            from stepengine.workspace.root import Root

            self._root = Root(self._place, PathPolicy())
        return self._root.open_folder(os.fspath(folder.relative_to(self._folder))).fd

    def _resolve_working_folder(self, cwd: object) -> Path:
        """Return the folder in which a command starts; raise ``PathOutsideRoot`` if it is outside of the workspace."""
        if cwd is None:
            return self._folder
        place = Path(os.path.realpath(self._folder / shorten_text(cwd, 4_096)))
        if not place.is_relative_to(self._folder):
            msg = "cwd must be a folder of the workspace"
            raise PathOutsideRoot(msg)
        return place

    def _get_terminal(self, request: Mapping[str, Any]) -> _Terminal:
        """Return the terminal that a request names; raise ``ToolError`` if there is none."""
        found = self._open.get(shorten_text(request.get("terminalId"), 100))
        if found is None:
            msg = "there is no such terminal"
            raise ToolError(msg)
        return found

    async def get_output(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the output of a command so far, and its exit status."""
        found = self._get_terminal(request)
        found.process.drain()
        ended = _find_exit_status(found)
        said = {"output": found.output.decode("utf-8", "replace"), "truncated": found.is_cut}
        return said if ended is None else {**said, "exitStatus": ended}

    async def wait_for_exit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the end of a command, and return its exit status."""
        found = self._get_terminal(request)
        await found.process.wait(None)
        return _find_exit_status(found) or {"exitCode": None, "signal": None}

    async def kill_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """End a command. Its output can still be read."""
        await _end_command(self._get_terminal(request))
        return {}

    async def release_terminal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """End a command, and remove its output."""
        found = self._get_terminal(request)
        self._open.pop(shorten_text(request.get("terminalId"), 100), None)
        await _end_command(found)
        return {}

    async def aclose(self) -> None:
        """End all commands."""
        left, self._open = list(self._open.values()), {}
        await asyncio.gather(*[_end_command(one) for one in left])


def _fetch_default_environment(system: RemoteSystem) -> dict[str, str]:
    """Return the remote values of the variables that every command gets, with ``HOME``, ``USER`` and ``LOGNAME``."""
    given, user, home = system.fetch_variables(ALWAYS)
    return {**given, "HOME": home, "USER": user, "LOGNAME": user}


def _find_program(name: str, search_path: str, system: RemoteSystem | None) -> str | None:
    """Return the path of a program on this machine or, with *system*, on a remote one; ``None`` if it is not found."""
    if system is None or "/" in name:
        return find_program(name, search_path, ())
    return system.find_program_outside(name, search_path.split(os.pathsep), ())


def parse_variables(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the valid environment variables among the first 1,000 in a request to run a command."""
    listed = request.get("env")
    pairs = listed[:1_000] if isinstance(listed, list) else []
    made = {one.get("name"): one.get("value") for one in pairs if isinstance(one, dict)}
    return {
        name: value
        for name, value in made.items()
        if isinstance(name, str) and isinstance(value, str) and name and "=" not in name and "\0" not in name + value
    }


def _find_exit_status(terminal: _Terminal) -> dict[str, Any] | None:
    """Return the exit status of a command as the protocol sends it; ``None`` while it runs."""
    how = terminal.process.get_ending()
    ended = terminal.ended or (None if how is None else (how.code, how.signal))
    return None if ended is None else {"exitCode": ended[0], "signal": ended[1]}


async def _end_command(terminal: _Terminal) -> None:
    """End a command unless it has ended, and store how it ended."""
    if terminal.ended is None:
        how = await terminal.process.end()
        terminal.ended = how.code, how.signal
