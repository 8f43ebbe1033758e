"""
What an editor lends to the tools of its agent: files that are open in it, with what is not saved yet.

What must not be here: which files may be touched; the tools have opened them before they ask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.data.visible import visible
from stepengine.errors import ToolError
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from acp.interfaces import Client

__all__ = ("EditorBuffers",)

SECONDS = 10.0
"""How long an editor may take to say what a file holds, or to write it."""
KNOWN = 200
SHOWN_CHARS = 200


class EditorBuffers:
    """
    The files that are open in an editor; see ``stepengine.system.buffers``.

    Args:
        client: The editor.
        session_id: The session that they are asked for in.
        cwd: The workspace as the editor named it: it knows its files by paths that begin so, whatever links they go through.
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
        """Return the text of a file as the editor has it; ``None`` where it does not say."""
        if not self._reads:
            return None
        if self._is_on_loop():
            return self._known.get(path)
        from acp import RequestError

        try:
            response = self._done(self._client.read_text_file(session_id=self._session_id, path=self._named(path)))
        except (RequestError, ConnectionError, ValueError):  # it is not open there, or the editor is gone
            response = None
        except TimeoutError:
            LOGGER.warning("the editor did not say within %g s what a file holds; it is read from the disk", SECONDS)
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
        Have the editor write a file and save it; return ``False`` where it does not offer to.

        Raises:
            ToolError: when it tried and could not.
        """
        if not self._writes or self._is_on_loop():
            return False
        from acp import RequestError

        try:
            self._done(self._client.write_text_file(session_id=self._session_id, path=self._named(path), content=text))
        except (RequestError, ConnectionError, ValueError, TimeoutError) as error:
            why = visible(str(error) or type(error).__name__)[:SHOWN_CHARS]
            msg = f"the file has changes in the editor that are not saved, and the editor did not write it: {why}"
            raise ToolError(msg) from None
        self._known[path] = text
        return True

    def _named(self, path: str) -> str:
        inside = path == self._real or path.startswith(f"{self._real}/")
        return self._cwd + path[len(self._real) :] if inside else path

    def _is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _done(self, call: Coroutine[Any, Any, Any]) -> Any:
        asked = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return asked.result(SECONDS)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            raise TimeoutError from None
