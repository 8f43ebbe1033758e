"""
Files that are open in an editor, as tools ask for them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from acp import RequestError

from stepengine.adapters.acp import editor_files
from stepengine.adapters.acp.editor_files import EditorBuffers
from stepengine.errors import ToolError


class Client:
    """
    An editor with one file; ``None`` takes for ever.
    """

    def __init__(self, content: str | None) -> None:
        self.content = content
        self.asked: list[str] = []
        self.refuses = False

    async def read_text_file(self, *, session_id: str, path: str) -> Any:
        self.asked.append(path)
        if self.refuses:
            raise RequestError(-32002, "not open")
        if self.content is None:
            await asyncio.Event().wait()
        return SimpleNamespace(content=self.content)

    async def write_text_file(self, *, session_id: str, path: str, content: str) -> None:
        await self.read_text_file(session_id=session_id, path=path)
        self.content = content


def lent(client: Client, cwd: Path, **offers: bool) -> EditorBuffers:
    return EditorBuffers(client, "s1", cwd, **{"reads": True, "writes": True, **offers})  # type: ignore[arg-type]


@pytest.mark.spec("interfaces:IF52")
async def test_editor_buffers_use_named_paths_and_cache_on_the_loop(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real, client = str((tmp_path / "real" / "a.py").resolve()), Client("typed")
    buffers = lent(client, tmp_path / "link")

    assert buffers.read(real) is None
    assert "typed" == await asyncio.to_thread(buffers.read, real)
    client.content = "typed more"
    assert "typed" == buffers.read(real)
    assert await asyncio.to_thread(buffers.write, real, "new")
    assert ("new", "new") == (buffers.read(real), client.content)
    assert not buffers.write(real, "on the loop")
    assert {str(tmp_path / "link" / "a.py")} == set(client.asked)


async def test_editor_error_or_silence_falls_back_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, path = Client("typed"), str(tmp_path / "a.py")
    buffers = lent(client, tmp_path)
    await asyncio.to_thread(buffers.read, path)
    client.refuses = True
    assert await asyncio.to_thread(buffers.read, path) is None
    assert buffers.read(path) is None, "what it said before does not hold any more"
    with pytest.raises(ToolError, match="the editor did not write it: not open"):
        await asyncio.to_thread(buffers.write, path, "new")
    client.refuses, client.content = False, None
    monkeypatch.setattr(editor_files, "SECONDS", 0.05)
    assert await asyncio.to_thread(buffers.read, path) is None
    with pytest.raises(ToolError, match="the editor did not write it"):
        await asyncio.to_thread(buffers.write, path, "new")


async def test_unsupported_editor_features_are_not_requested(tmp_path: Path) -> None:
    client = Client("typed")
    buffers = lent(client, tmp_path, reads=False, writes=False)

    assert await asyncio.to_thread(buffers.read, "/a") is None
    assert not await asyncio.to_thread(buffers.write, "/a", "new")
    assert [] == client.asked
