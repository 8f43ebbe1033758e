"""
Files as they stand in an editor: their bytes, and what an editor may be given to write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine
from stepengine.errors import ToolError
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools.bundled import file_tools
from stepengine.workspace.buffers import decode_text_for_editor, read_content_in_editor


class Editor:
    """
    An editor that keeps its texts without carriage returns, as many do.
    """

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.written: dict[str, str] = {}
        self.offers = True

    def read(self, path: str) -> str | None:
        return self.texts.get(Path(path).stem)

    def write(self, path: str, text: str) -> bool:
        if self.offers:
            self.written[Path(path).name] = text
            self.texts[Path(path).stem] = text
        return self.offers


@pytest.mark.spec("interfaces:IF52", "reliability:FS16")
def test_unsaved_lines_keep_the_line_ends_of_a_mixed_file() -> None:
    data = b"a\r\nb\nc\r\nd\n"

    assert read_content_in_editor(Editor(a="a\nb\nX\nd\n"), "/a.txt", data) == b"a\r\nb\nX\r\nd\n"
    assert read_content_in_editor(Editor(a="a\nY\nb\nd\n"), "/a.txt", data) == b"a\r\nY\r\nb\nd\n"


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=60)


@given(TEXTS, TEXTS, st.sampled_from(["\n", "\r\n"]), st.sampled_from([b"", b"\xef\xbb\xbf"]))
@pytest.mark.spec("interfaces:IF52")
def test_unsaved_text_has_the_bytes_that_saving_would_write(saved: str, typed: str, end: str, bom: bytes) -> None:
    if saved.startswith("\ufeff") or "\n" not in saved:
        end = "\n"
    data = bom + saved.replace("\n", end).encode()
    wanted = bom + typed.replace("\n", end).encode()

    assert data == read_content_in_editor(Editor(a=saved), "/a.txt", data)
    assert data == read_content_in_editor(Editor(), "/a.txt", data) == read_content_in_editor(None, "/a.txt", data)
    assert wanted == read_content_in_editor(Editor(a=typed), "/a.txt", data)
    assert decode_text_for_editor(wanted) in (None, wanted.decode())
    assert not bom or decode_text_for_editor(wanted) is None


def test_a_binary_file_is_read_from_disk_despite_an_editor() -> None:
    assert b"\0\1" == read_content_in_editor(Editor(a="words"), "/a.bin", b"\0\1")
    assert decode_text_for_editor(b"\xff\xfe\xfd") is None


async def run(tmp_path: Path, buffers: Any, *calls: Any) -> list[str]:
    bot = AgentDefinition("bot", model="m/m", tools=["read_files", "str_replace", "write_file", "propose_str_replace"])
    tools = file_tools(tmp_path, write=True, propose=True, buffers=buffers)
    async with Engine([bot], tools, ScriptedModel([*calls, "Done."])) as engine:
        result = await engine.run(bot, "go")
    return [message.text for message in result.state.message_history if message.role == "tool"]


def edit(path: str, old: str, new: str, name: str = "str_replace") -> Any:
    return tool_call(name, {"path": path, "replacements": [{"old_string": old, "new_string": new}]})


@pytest.mark.spec("interfaces:IF52")
@pytest.mark.parametrize("offers", [True, False])
async def test_an_edit_applies_to_the_buffer_and_is_saved_there(tmp_path: Path, *, offers: bool) -> None:
    editor = Editor(a="typed = 1\n")
    editor.offers = offers
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("saved = 1\n")
    read, proposed, changed, other = await run(
        tmp_path, editor, tool_call("read_files", {"paths": ["a.py"]}), edit("a.py", "typed", "shown", "propose_str_replace"),
        edit("a.py", "typed", "new"), edit("b.py", "saved", "new"),
    )  # fmt: skip

    assert "typed = 1" in read
    assert "+shown = 1" in proposed
    assert "+new = 1" in changed
    assert "+new = 1" in other
    assert ({"a.py": "new = 1\n"} if offers else {}) == editor.written
    assert ("saved = 1\n" if offers else "new = 1\n") == (tmp_path / "a.py").read_text()
    assert "new = 1\n" == (tmp_path / "b.py").read_text()


async def test_text_typed_since_the_last_read_is_not_overwritten(tmp_path: Path) -> None:
    class Typing(Editor):
        reads = 0

        def read(self, path: str) -> str | None:
            self.reads += 1
            return f"typed = {self.reads}\n"

    (tmp_path / "a.py").write_text("saved = 1\n")
    editor = Typing()
    read, changed = await run(
        tmp_path,
        editor,
        tool_call("read_files", {"paths": ["a.py"]}),
        tool_call("write_file", {"path": "a.py", "content": "x"}),
    )

    assert "typed = 1" in read
    assert "has changed since it was read" in changed
    assert ({}, "saved = 1\n") == (editor.written, (tmp_path / "a.py").read_text())


async def test_an_editor_refusing_a_write_is_an_error(tmp_path: Path) -> None:
    class Refusing(Editor):
        def write(self, path: str, text: str) -> bool:
            msg = "the editor did not write it"
            raise ToolError(msg)

    (tmp_path / "a.py").write_text("saved = 1\n")
    (said,) = await run(tmp_path, Refusing(a="typed = 1\n"), edit("a.py", "typed", "new"))

    assert "the editor did not write it" in said
    assert "saved = 1\n" == (tmp_path / "a.py").read_text()
