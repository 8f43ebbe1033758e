"""
The hashes of the files that a run has read, so that it does not overwrite later changes of others.

For reads before the start of this process, and in earlier runs of the conversation, the hashes are taken from the results of
``read_files`` in the message history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stepengine.data.messages import Message, ToolMessage
from stepengine.errors import ToolError
from stepengine.tools.context import ToolContext
from stepengine.workspace.paths import split_path

Parts = tuple[str, ...]
WRITERS = ("write_file", "str_replace", "delete_file")


class _SeenFiles(dict[Parts, str]):
    """The hashes of the files that one run has read or written; ``""`` if the hash of a file is unknown."""

    async def aclose(self) -> Iterable[str]:
        """Clear the hashes, and return no sentences for the run's result."""
        self.clear()
        return ()


def record_hash(ctx: ToolContext, root: Parts, parts: Parts, digest: str) -> None:
    """Record the hash of a file that the run has read or written below *root*; do nothing outside of a run."""
    if ctx.has_run:
        _get_or_create_seen_files(ctx, root)[parts] = digest


def get_recorded_hash(ctx: ToolContext, root: Parts, parts: Parts) -> str:
    """Return the hash of a file as the run last read or wrote it; ``""`` if that is unknown, and outside of a run."""
    return _get_or_create_seen_files(ctx, root).get(parts, "") if ctx.has_run else ""


def _get_or_create_seen_files(ctx: ToolContext, root: Parts) -> _SeenFiles:
    """Return the run's hashes of files below *root*; the first call takes them from its message history."""
    return ctx.get_or_create_run_object(
        ("files seen", root), lambda: _SeenFiles(_find_hashes_in_history(ctx.agent_state.message_history, root))
    )


def _find_hashes_in_history(history: Iterable[Message], root: Parts) -> dict[Parts, str]:
    """Return the file hashes in a history. A file that was written after it was read has the hash ``""``."""
    found: dict[Parts, str] = {}
    for message in history:
        if not isinstance(message, ToolMessage) or message.is_error:
            continue
        for path, digest in _iterate_file_hashes(message):
            try:
                found[split_path(path, root)] = digest
            except ToolError:
                continue
    return found


def _iterate_file_hashes(message: ToolMessage) -> Iterator[tuple[str, str]]:
    """Yield path and hash of each file that a tool result read; the hash is ``""`` for a written one."""
    value: object = message.result.data
    if message.tool_name == "read_files" and isinstance(value, list):
        for entry in value:
            path, digest = (entry.get("path"), entry.get("hash")) if isinstance(entry, Mapping) else (None, None)
            if isinstance(path, str) and isinstance(digest, str):
                yield path, digest
    elif message.tool_name in WRITERS and isinstance(value, Mapping) and isinstance(value.get("file"), str):
        yield value["file"], ""
