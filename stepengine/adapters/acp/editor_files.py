"""
Access of tools to the editor: open files with their unsaved text, and terminals.

What must not be here: which files may be touched; the tools have opened them before they ask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.data.visible import visible
from stepengine.errors import ToolError
from stepengine.runtime.logs import LOGGER
from stepengine.workspace.terminals import TerminalResult

if TYPE_CHECKING:
    from acp.interfaces import Client

SECONDS = 10.0
"""Seconds that an editor may take to return the content of a file, or to write a file."""
KNOWN = 200
SHOWN_CHARS = 200


class EditorBuffers:
    """
    The files that are open in an editor; see ``stepengine.workspace.buffers``.

    Args:
        client: The editor.
        session_id: The session that they are asked for in.
        cwd: The workspace as the editor named it, with which the editor's paths start, with unresolved links.
        reads: Whether the editor offers to read files.
        writes: Whether it offers to write them.
    """

    def __init__(self, client: Client, session_id: str, cwd: Path, *, reads: bool, writes: bool) -> None:
        self._client = client
        self._session_id = session_id
        self._cwd, self._real = str(cwd), str(cwd.resolve())
        self._reads, self._writes = reads, writes
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[str, str] = OrderedDict()

    def read(self, path: str, /) -> str | None:
        """Return the text of a file in the editor; on the event loop the last known text. ``None`` if the editor provides none."""
        if not self._reads:
            return None
        if self._is_on_loop():
            return self._known.get(path)
        from acp import RequestError

        try:
            response = self._run_on_loop_with_timeout(
                self._client.read_text_file(
                    session_id=self._session_id, path=_replace_folder_by_editor_folder(path, self._real, self._cwd)
                )
            )
        except (RequestError, ConnectionError, ValueError):  # it is not open there, or the editor is gone
            response = None
        except TimeoutError:
            LOGGER.warning(
                "the editor did not return the text of a file within %g s; the file is read from the disk", SECONDS
            )
            response = None
        self._known.pop(path, None)
        if response is None:
            return None
        self._known[path] = response.content
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return str(response.content)

    def write(self, path: str, text: str, /) -> bool:
        """
        Write and save a file in the editor; return False if the editor cannot, or on the event loop.

        Raises:
            ToolError: If the editor fails to write the file.
        """
        if not self._writes or self._is_on_loop():
            return False
        from acp import RequestError

        try:
            self._run_on_loop_with_timeout(
                self._client.write_text_file(
                    session_id=self._session_id,
                    path=_replace_folder_by_editor_folder(path, self._real, self._cwd),
                    content=text,
                )
            )
        except (RequestError, ConnectionError, ValueError, TimeoutError) as error:
            why = visible(str(error) or type(error).__name__)[:SHOWN_CHARS]
            msg = f"the file has changes in the editor that are not saved, and the editor did not write it: {why}"
            raise ToolError(msg) from None
        self._known[path] = text
        return True

    def _is_on_loop(self) -> bool:
        """Return whether this code runs on the event loop of the connection, which must not be blocked."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _run_on_loop_with_timeout(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a request on the event loop from another thread, and return its result; raise ``TimeoutError`` if it takes too long."""
        asked = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return asked.result(SECONDS)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            raise TimeoutError from None


class EditorTerminals:
    """
    The terminals of an editor; see ``stepengine.workspace.terminals``.

    Args:
        client: The editor.
        session_id: The session that they are opened in.
        cwd: The workspace as the editor named it.
        show: Shows a terminal at a tool call. Its arguments are the path of the run in its tree, the id of the call, and the id of the
            terminal.
    """

    def __init__(
        self, client: Client, session_id: str, cwd: Path, show: Callable[[str, str, str], Awaitable[object]]
    ) -> None:
        self._client = client
        self._session_id = session_id
        self._cwd, self._real = str(cwd), str(cwd.resolve())
        self._show = show

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        output_bytes: int,
        seconds: float | None,
        path: str,
        call_id: str,
    ) -> TerminalResult:
        """
        Run a program in an editor's terminal, show the terminal at its call, kill the program after *seconds*, and release the terminal.

        Raises:
            ToolError: If the editor cannot start the program, or disconnects.
        """
        from acp import RequestError
        from acp.schema import EnvVariable

        try:
            made = await self._client.create_terminal(
                session_id=self._session_id,
                command=argv[0],
                args=list(argv[1:]),
                env=[EnvVariable(name=name, value=value) for name, value in env.items()],
                cwd=_replace_folder_by_editor_folder(cwd, self._real, self._cwd),
                output_byte_limit=output_bytes,
            )
            terminal = made.terminal_id
            try:
                await self._show(path, call_id, terminal)
                in_time = await self._wait_or_kill_at_timeout(terminal, seconds)
                return await self._read_terminal_result(terminal, in_time=in_time)
            finally:
                await self._release_terminal(terminal)
        except (RequestError, ConnectionError, ValueError) as error:
            why = visible(str(error) or type(error).__name__)[:SHOWN_CHARS]
            msg = f"the editor did not run {argv[0]!r} in a terminal: {why}"
            raise ToolError(msg) from None

    async def _wait_or_kill_at_timeout(self, terminal: str, seconds: float | None) -> bool:
        """Wait for the end of a program, or kill it after the time limit; return True if it was not killed."""
        try:
            async with asyncio.timeout(seconds):
                await self._client.wait_for_terminal_exit(session_id=self._session_id, terminal_id=terminal)
        except TimeoutError:
            await self._client.kill_terminal(session_id=self._session_id, terminal_id=terminal)
            return False
        return True

    async def _read_terminal_result(self, terminal: str, *, in_time: bool) -> TerminalResult:
        """Return the output and the exit status of a terminal; *in_time* is False for a killed program."""
        said = await self._client.terminal_output(session_id=self._session_id, terminal_id=terminal)
        ended = said.exit_status
        return TerminalResult(
            output=said.output,
            is_cut=said.truncated,
            code=None if ended is None else ended.exit_code,
            signal="" if ended is None else ended.signal or "",
            in_time=in_time,
        )

    async def _release_terminal(self, terminal: str) -> None:
        """Release a terminal, which ends its processes, also while the run is being cancelled."""
        from acp import RequestError

        call = self._client.release_terminal(session_id=self._session_id, terminal_id=terminal)
        giving = asyncio.ensure_future(asyncio.wait_for(call, SECONDS))
        try:
            await asyncio.shield(giving)
        except (RequestError, ConnectionError, ValueError, TimeoutError) as error:
            LOGGER.warning("the editor did not release a terminal: %s", error)


def _replace_folder_by_editor_folder(path: str, real_folder: str, editor_folder: str) -> str:
    """Replace the resolved workspace folder *real_folder* at the start of a path by *editor_folder*, its name in the editor."""
    return (
        editor_folder + path[len(real_folder) :] if path == real_folder or path.startswith(f"{real_folder}/") else path
    )
