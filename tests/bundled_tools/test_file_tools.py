"""What the file tools read and write, and how."""

# Modes and folders are checked with the functions that the tools use.
# ruff: noqa: PTH101, PTH116, PTH208

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, Question, RunResult, StepContext, ToolCall, ToolContext
from stepengine.data.events import Event, FileChanged
from stepengine.data.json import freeze_object
from stepengine.data.messages import SideEffect
from stepengine.errors import DefinitionError, ToolError
from stepengine.permissions import Policy as Permissions
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools
from stepengine.tools.bundled.files.edits import TextReplacement, apply_replacements, unified_diff
from stepengine.tools.bundled.files.read_tools import make_read_tools
from stepengine.tools.bundled.files.write_tools import make_write_tools
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from stepengine.workspace.text import short_content_hash
from tests.phrases import OUTSIDE_ROOT


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[ToolRegistry]:
    root = Root(tmp_path, PathPolicy())
    yield ToolRegistry([*make_read_tools(root), *make_write_tools(root)])
    root.close()


async def read(tools: ToolRegistry, *paths: Any, **options: Any) -> list[dict[str, Any]]:
    result = await tools.execute("read_files", {"paths": list(paths), **options})
    assert not result.is_error, result.text
    return result.data  # type: ignore[return-value]


@pytest.mark.spec("generator-contract:T5", "generator-contract:T0")
async def test_one_unreadable_file_does_not_affect_the_others(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\ny")
    found = await read(tools, "a", "missing", "a", "./a")

    entry = {"path": "a", "content": "x\ny", "total_lines": 2, "offset": 1, "has_more": False}

    assert [
        {**entry, "hash": found[0]["hash"]},
        {"path": "missing", "error": "'missing' does not exist"},
    ] == found


@pytest.mark.spec("generator-contract:T5", "reliability:FP1", "reliability:FP5")
async def test_files_are_read_in_portions_of_lines(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{n}\n" for n in range(5_000)))
    (tmp_path / "empty").write_text("")

    whole, part, last, after, empty = await read(
        tools,
        "a",
        {"path": "a", "offset": 11, "limit": 2},
        {"path": "a", "offset": 5_000},
        {"path": "a", "offset": 5_001},
        "empty",
    )
    assert (2_000, True, 5_000) == (whole["content"].count("\n"), whole["has_more"], whole["total_lines"])
    assert ("10\n11\n", 11, True) == (part["content"], part["offset"], part["has_more"])
    assert ("4999\n", False) == (last["content"], last["has_more"])
    assert "offset 5001 is after the end; the file has 5000 lines, the first is 1" == after["error"]
    assert ("", 0, False) == (empty["content"], empty["total_lines"], empty["has_more"])
    (numbered,) = await read(tools, "a", offset=10, limit=1, line_numbers=True)
    assert "    10\t9\n" == numbered["content"]


@pytest.mark.spec("generator-contract:T5")
@pytest.mark.parametrize("name", ["offset", "start_line", "first_line"])
async def test_lines_count_from_1_as_in_search_and_codebuff(tools: ToolRegistry, tmp_path: Path, name: str) -> None:
    """
    codebuff reads ``{"path": "a", "offset": 2, "limit": 2}`` of l1 to l5 as l2 and l3.
    """
    codebuff = ["l2", "l3"]
    (tmp_path / "a").write_text("l1\nl2\nl3\nl4\nl5\n")
    searching = ToolRegistry(search_tools(tmp_path))
    found = (await searching.execute("code_search", {"pattern": "l2"})).data
    (number,) = [match["line"] for match in found["matches"]]
    (of_path,) = await read(tools, {"path": "a", name: number, "limit": 2})
    (of_call,) = await read(tools, "a", **{name: number}, limit=2)
    (whole,) = await read(tools, "a")

    assert "l2\nl3\n" == of_path["content"]
    assert codebuff == of_path["content"].splitlines()
    assert of_path == of_call
    assert (2, 1) == (of_path["offset"], whole["offset"])
    assert "first_line" not in of_path


@pytest.mark.spec("generator-contract:T5")
@pytest.mark.parametrize("given", [{"offset": 0}, {"offset": 1, "start_line": 2}])
async def test_an_invalid_or_duplicate_first_line_is_refused(
    tools: ToolRegistry, tmp_path: Path, given: dict[str, int]
) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")

    for value in ({"paths": ["a"], **given}, {"paths": [{"path": "a", **given}]}):
        result = await tools.execute("read_files", value)
        assert result.is_error
        assert "offset" in result.text or "start_line" in result.text


@pytest.mark.spec("generator-contract:T5")
async def test_paths_above_the_limit_get_an_error_entry_each(tools: ToolRegistry, tmp_path: Path) -> None:
    """
    codebuff takes any number of paths, and none.
    """
    names = [f"f{n}" for n in range(60)]
    codebuff, codebuff_of_none = names, []
    for name in names:
        (tmp_path / name).write_text(name)
    found = await read(tools, *names)

    assert names == [entry["path"] for entry in found]
    assert codebuff[:50] == [entry.get("content") for entry in found[:50]]
    assert {"not read: a call takes at most 50 paths; ask for this one in another call"} == {
        entry["error"] for entry in found[50:]
    }
    assert codebuff_of_none == await read(tools)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FP5")
@pytest.mark.parametrize("letter", ["x", "\u00e9"])
@pytest.mark.parametrize("length", [2_000, 2_003, 5_000, 50_000])
async def test_a_long_line_of_a_large_file_is_cut_once(
    tools: ToolRegistry, tmp_path: Path, letter: str, length: int
) -> None:
    (tmp_path / "large").write_bytes(f"{letter * length}\nnext\n".encode() + b"y\n" * 5_100_000)
    (found,) = await read(tools, {"path": "large", "limit": 2})
    line, after = found["content"].splitlines()
    shown, _, note = line.partition(" [... ")
    count = "".join(c for c in note if c.isdigit())

    assert ("next", letter * 2_000) == (after, shown)
    assert (note.count("were cut"), int(count or 0)) in {
        (length > 2_000, length - 2_000), (length > 2_000, (length - 2_000) * len(letter.encode()))
    }  # fmt: skip


@pytest.mark.spec("reliability:FP5", "generator-contract:T5")
async def test_long_lines_are_cut_and_many_characters_end_the_call(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 5_000 + "\nnext\n")
    (tmp_path / "wide").write_text(('"' * 1_000 + "\n") * 100)
    long, wide, none = await read(tools, "long", {"path": "wide", "offset": 5}, {"path": "long", "limit": 1_000})

    assert long["content"].startswith("x" * 2_000 + " [... 3,000 characters of this line were cut]\nnext\n")
    assert wide["has_more"]
    assert wide["message"].endswith(f"used up; read on at offset {5 + wide['content'].count(chr(10))}")
    assert "used up" in none["error"]
    result = await tools.execute("read_files", {"paths": ["wide"]})
    assert len(result.text) <= 100_000


@pytest.mark.spec("reliability:FP5")
async def test_a_huge_file_is_read_only_by_a_small_window(tools: ToolRegistry, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        for n in range(120):
            file.write(b"%d:" % n + b"y" * 100_000 + b"\n")
        file.write(b"end")
    whole, part, last = await read(
        tools, "huge", {"path": "huge", "offset": 101, "limit": 1}, {"path": "huge", "offset": 121, "limit": 5}
    )

    assert "read a part of it with offset and limit" in whole["error"]
    assert part["content"].startswith("100:yyy")
    assert ("end", False, 121) == (last["content"], last["has_more"], last["total_lines"])
    assert len(part["content"]) < 2_100


@pytest.mark.spec("reliability:FS16", "generator-contract:T5")
async def test_text_in_other_encodings_is_read_and_binary_is_named(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "u16").write_bytes("hé\r\n".encode("utf-16"))
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfhi\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "img.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "blob").write_bytes(b"a\0b")
    u16, bom, latin, image, blob = await read(tools, "u16", "bom", "latin", "img.png", "blob")

    assert ["hé\r\n", "hi\n", "caf\ufffd\n"] == [u16["content"], bom["content"], latin["content"]]
    assert "binary file (image/png, 10 bytes)" in image["error"]
    assert "list_directory" in image["error"]
    assert "unknown type" in blob["error"]


@pytest.mark.spec("generator-contract:T0", "reliability:FP1")
async def test_a_listing_has_sorted_names_and_nothing_special(tools: ToolRegistry, tmp_path: Path) -> None:
    for name in ("b", "a", "ü"):
        (tmp_path / name).write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"bad\xff")).write_text("")

    result = await tools.execute("list_directory", {})
    assert {"files": ["a", "b", r"bad\xff", "ü"], "directories": ["dir"], "path": "."} == result.data
    assert {"files": [], "directories": [], "path": "dir"} == (
        await tools.execute("list_directory", {"path": "dir/"})
    ).data


@pytest.mark.spec("generator-contract:T6", "requirements:E10", "requirements:E12")
async def test_a_file_is_created_with_its_parents_or_overwritten(tools: ToolRegistry, tmp_path: Path) -> None:
    events: list[Event] = []
    ctx = ToolContext.for_test(emit=events.append)
    first = await tools.execute("write_file", {"path": "x/y/z.txt", "content": "\nhé\n"}, ctx)
    second = await tools.execute("write_file", {"path": "x/y/z.txt", "content": "b", "instructions": "shorter"}, ctx)

    assert {"file": "x/y/z.txt", "message": "Created x/y/z.txt (2 lines, 5 bytes)."} == first.data
    assert {"file": "x/y/z.txt", "message": "Overwrote x/y/z.txt (1 lines, 1 bytes)."} == second.data
    assert "b" == (tmp_path / "x/y/z.txt").read_text()
    assert (SideEffect("file_written", "x/y/z.txt"),) == first.side_effects
    changed = {"file": "x/y/z.txt", "tool_name": "write_file", "tool_call_id": "c1"}
    assert [FileChanged(action="created", **changed), FileChanged(action="modified", **changed)] == events


@pytest.mark.spec("reliability:FS25")
async def test_writes_keep_modes_without_setuid_and_obey_the_umask(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    os.chmod(tmp_path / "old", 0o4751)
    before = os.umask(0)
    try:
        await tools.execute("write_file", {"path": "old", "content": "x"})
        await tools.execute("write_file", {"path": "open", "content": "x"})
        os.umask(0o077)
        await tools.execute("write_file", {"path": "tight", "content": "x"})
    finally:
        os.umask(before)

    modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("old", "open", "tight")}
    assert {"old": 0o751, "open": 0o644, "tight": 0o600} == modes


@pytest.mark.spec("reliability:FS19")
async def test_a_failed_write_keeps_the_old_content_without_leftovers(
    tools: ToolRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("old")
    for name in ("write", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            result = await tools.execute("write_file", {"path": "a", "content": "new"})
        assert (True, "old", ["a"]) == (result.is_error, (tmp_path / "a").read_text(), os.listdir(tmp_path))
        assert "No space left" in result.text


def fails(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.spec("reliability:FS19")
async def test_temporary_files_of_processes_that_are_gone_are_removed(tools: ToolRegistry, tmp_path: Path) -> None:
    stale, mine, other = (
        ".stepengine-999999999-" + "0" * 16,
        f".stepengine-{os.getpid()}-" + "0" * 16,
        ".stepengine-notes",
    )
    for name in (stale, mine, other):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    await tools.execute("write_file", {"path": "a", "content": "x"})

    assert {mine, other, "a"} == set(os.listdir(tmp_path))
    assert ["a"] == (await tools.execute("list_directory", {})).data["files"]  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FS18", "reliability:FS19")
async def test_a_write_with_an_outdated_hash_is_refused(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (entry,) = await read(tools, "a")
    (tmp_path / "a").write_text("two")

    edit = {"path": "a", "replacements": [{"old_string": "two", "new_string": "x"}], "expected_hash": entry["hash"]}
    for name, arguments in (
        ("write_file", {"path": "a", "content": "x", "expected_hash": entry["hash"]}),
        ("str_replace", edit),
    ):
        assert "has changed since it was read" in (await tools.execute(name, arguments)).text
    (entry,) = await read(tools, "a")
    assert not (await tools.execute("str_replace", {**edit, "expected_hash": entry["hash"]})).is_error


@pytest.mark.spec("reliability:FS18")
async def test_edits_of_one_file_at_once_are_all_made(tools: ToolRegistry, tmp_path: Path) -> None:
    import asyncio

    (tmp_path / "a").write_text("".join(f"<{n}>\n" for n in range(20)))
    calls = [
        tools.execute("str_replace", {"path": "a", "replacements": [{"old_string": f"<{n}>", "new_string": f"({n})"}]})
        for n in range(20)
    ]
    await asyncio.gather(*calls)

    assert "".join(f"({n})\n" for n in range(20)) == (tmp_path / "a").read_text()


@pytest.mark.spec("reliability:FP5")
async def test_write_refuses_oversized_content_and_folders(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    large = await tools.execute("write_file", {"path": "a", "content": "x" * (4 * 1024 * 1024 + 1)})

    assert "at most 4,194,304" in large.text
    assert [] == [name for name in os.listdir(tmp_path) if name != "dir"]
    assert "is a folder" in (await tools.execute("write_file", {"path": "dir", "content": ""})).text
    assert "root folder itself" in (await tools.execute("write_file", {"path": ".", "content": ""})).text


@pytest.mark.spec("generator-contract:T7")
async def test_replacements_are_made_in_order_and_shown_as_a_diff(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\nthree")
    replacements = [{"old_string": "two", "new_string": "2"}, {"old_string": "2\nthree", "new_string": "rest"}]
    result = await tools.execute("str_replace", {"path": "a", "replacements": replacements})

    assert {
        "file": "a",
        "message": "Changed a (2 replacements).",
        "unified_diff": "--- a/a\n+++ b/a\n@@ -1,3 +1,2 @@\n one\n-two\n-three\n\\ No newline at end of file\n+rest\n\\ No newline at end of file\n",
    } == result.data
    assert "one\nrest" == (tmp_path / "a").read_text()


@pytest.mark.spec("generator-contract:T7", "reliability:FS17")
async def test_if_one_replacement_fails_nothing_is_written(tools: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x y\nx\n")
    good = {"old_string": "y", "new_string": "z"}
    cases = [
        ([good, {"old_string": "q", "new_string": ""}], "replacement 2: old_string was found 0 times"),
        ([good, {"old_string": "x", "new_string": ""}], "found 2 times (lines 1, 2)"),
        ([{"old_string": "x", "new_string": "x"}], "are the same"),
        ([{"old_string": "", "new_string": "x"}], "Invalid parameters"),
        ([], "Invalid parameters"),
    ]
    for replacements, said in cases:
        result = await tools.execute("str_replace", {"path": "a", "replacements": replacements})
        assert result.is_error
        assert said in result.text
    assert "x y\nx\n" == (tmp_path / "a").read_text()
    missing = await tools.execute("str_replace", {"path": "b", "replacements": [good]})
    assert "use write_file" in missing.text
    (tmp_path / "bin").write_bytes(b"\0")
    assert "binary" in (await tools.execute("str_replace", {"path": "bin", "replacements": [good]})).text


@pytest.mark.spec("reliability:FS17")
def test_overlapping_matches_count_and_allow_multiple_replaces_disjoint_ones() -> None:
    with pytest.raises(ToolError, match="found 2 times"):
        apply_replacements("aaa", [TextReplacement("aa", "b")], "f")
    assert "ba" == apply_replacements("aaa", [TextReplacement("aa", "b", allow_multiple=True)], "f")
    with pytest.raises(ToolError, match="is empty"):
        apply_replacements("a", [TextReplacement("", "b")], "f")


@pytest.mark.spec("reliability:FS17", "reliability:R23")
def test_matches_are_counted_up_to_a_hundred() -> None:
    with pytest.raises(ToolError, match=r"found at least 100 times \(lines 1, 1,"):
        apply_replacements("a" * 1_000_000, [TextReplacement("a" * 500_000, "b")], "f")
    assert "bb" == apply_replacements("a" * 1_000_000, [TextReplacement("a" * 500_000, "b", allow_multiple=True)], "f")


HARD = (
    "".join(f"u{n}\ny{n % 110}\n" for n in range(10_000)),
    "".join(f"y{n % 110}\nv{n}\n" for n in range(10_000)),
)


@pytest.mark.spec("reliability:R23")
def test_texts_that_are_hard_to_compare_are_shown_as_replaced() -> None:
    """
    Lines that come nearly as often as `difflib` lets them pass made it take cubic time: hours for 20,000 of them.
    """
    diff = unified_diff(*HARD, "f")

    assert diff.startswith("--- a/f\n+++ b/f\n@@ -1,20000 +1,20000 @@\n-u0\n")


@pytest.mark.spec("reliability:FS16", "generator-contract:T7")
@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\r\nc\n", "a\nb", "1\n2", b"1\r\n2\r\nc\n"),
        (b"a\r\nb\nc", "b", "1\n2", b"a\r\n1\n2\nc"),
        (b"\xef\xbb\xbfa\n", "a", "b", b"\xef\xbb\xbfb\n"),
        (b"caf\xe9 a\n", "a\n", "b\n", b"caf\xe9 b\n"),
        ("é\r\na".encode("utf-16"), "a", "ü", "é\r\nü".encode("utf-16")),
        (b"a", "a", "b", b"b"),
        (b"a\nb\n", "a\r\nb", "1\r\n2\r\n3", b"1\n2\n3\n"),
        (b"a\r\nb", "b", "1\n2", b"a\r\n1\r\n2"),
        (b"a\r\nb\r\n", "\nb", "b", b"ab\r\n"),
    ],
    ids=[
        "crlf",
        "mixed",
        "bom",
        "latin",
        "utf-16",
        "no final newline",
        "crlf in an lf file",
        "last line",
        "a line end alone",
    ],
)
async def test_encoding_mark_and_line_ends_are_kept(  # noqa: PLR0917  (parametrised)
    tools: ToolRegistry, tmp_path: Path, before: bytes, old: str, new: str, after: bytes
) -> None:
    (tmp_path / "f").write_bytes(before)
    result = await tools.execute("str_replace", {"path": "f", "replacements": [{"old_string": old, "new_string": new}]})

    assert (after, "ok") == ((tmp_path / "f").read_bytes(), result.status)


texts = st.text(alphabet="ab \n\r", max_size=30)
unix_texts = st.text(alphabet="ab \n", max_size=30)


@pytest.mark.spec("generator-contract:T7", "reliability:FS17")
@given(unix_texts, unix_texts.filter(bool), st.text(alphabet="xys1\n$\\%{}", max_size=6), unix_texts)
def test_a_replacement_changes_its_one_place_and_nothing_else(before: str, old: str, new: str, after: str) -> None:
    """Line ends are another matter: half a CRLF is no place."""
    text = before + old + after
    places = [i for i in range(len(text)) if text.startswith(old, i)]
    if old == new or len(places) > 1:
        with pytest.raises(ToolError, match="are the same" if old == new else f"found {len(places)} times"):
            apply_replacements(text, [TextReplacement(old, new)], "f")
        return

    assert before + new + after == apply_replacements(text, [TextReplacement(old, new)], "f")


ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def changes_of_lines(draw: st.DrawFn) -> tuple[list[tuple[str, str]], int, int, list[str], bool]:
    """Lines with their ends, a stretch of them, its new lines, and whether its last line end belongs to it."""
    words = st.text(alphabet="ab $", max_size=3)
    lines = [(f"{n}{draw(words)}", draw(ENDS)) for n in range(draw(st.integers(1, 6)))]
    first = draw(st.integers(0, len(lines) - 1))
    end = draw(st.integers(first + 1, len(lines)))
    new = [f"x{draw(words)}"]
    for line, _ in lines[first:end]:
        new += [*([line] if draw(st.booleans()) else []), *([f"x{draw(words)}"] if draw(st.booleans()) else [])]
    return lines, first, end, new, draw(st.booleans())


@pytest.mark.spec("reliability:FS16", "generator-contract:T7")
@given(changes_of_lines(), ENDS, ENDS, st.booleans())
def test_every_line_that_stays_keeps_its_line_end(change, old_end, new_end, all_of_them) -> None:
    lines, first, end, new, with_end = change
    text = "".join([line + ends for line, ends in lines])
    tail_old, tail_new = (old_end, new_end) if with_end else ("", "")
    old = old_end.join([line for line, _ in lines[first:end]]) + tail_old
    made = TextReplacement(old, new_end.join(new) + tail_new, all_of_them)
    changed = re.findall(r"([^\r\n]*)(\r?\n)", apply_replacements(text, [made], "f"))

    assert [line for line, _ in changed] == [
        line for line, _ in [*lines[:first], *[(n, "") for n in new], *lines[end:]]
    ]
    stays = {line: ends for line, ends in lines if line in new or line not in dict(lines[first:end])}
    if not with_end and new[-1] != lines[end - 1][0]:
        stays.pop(lines[end - 1][0], None)
    assert stays == {line: ends for line, ends in changed if line in stays}
    assert {ends for _, ends in changed} <= {ends for _, ends in lines}


@pytest.mark.spec("reliability:FS16")
@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        (b"a\r\nb\r\n", "a\nc\n", b"a\r\nc\r\n"),
        (b"a\r\nb\nc\r\n", "x\na\nb\nc\n", b"x\r\na\r\nb\nc\r\n"),
        (b"a\nb\n", "a\r\nc\r\n", b"a\r\nc\r\n"),
        (b"a\r\nb\r\n", "a\r\nc\n", b"a\r\nc\n"),
        (b"a\0\r\n", "a\n", b"a\n"),
        (b"", "a\n", b"a\n"),
    ],
    ids=["crlf", "mixed", "to crlf", "as given", "binary", "empty"],
)
async def test_a_file_that_is_overwritten_keeps_its_line_ends(
    tools: ToolRegistry, tmp_path: Path, before: bytes, content: str, after: bytes
) -> None:
    (tmp_path / "f").write_bytes(before)
    result = await tools.execute("write_file", {"path": "f", "content": content})

    assert (after, "ok") == ((tmp_path / "f").read_bytes(), result.status)


@given(texts, texts)
def test_a_diff_turns_one_text_into_the_other(old: str, new: str) -> None:
    assert new == patched(old, unified_diff(old, new, "f"))


def patched(old: str, diff: str) -> str:
    """
    Apply a unified diff the slow way.
    """
    lines, out, at = old.split("\n"), [], 0
    lines = [*[line + "\n" for line in lines[:-1]], *([lines[-1]] if lines[-1] else [])]
    rows = diff.split("\n")[2:]
    for number, row in enumerate(rows):
        no_newline = number + 1 < len(rows) and rows[number + 1].startswith("\\")
        text = row[1:] + ("" if no_newline else "\n")
        if row.startswith("@@"):
            start, count = (row.split()[1][1:] + ",1").split(",")[:2]
            first = int(start) - (count != "0")
            out += lines[at:first]
            at = first
        elif row.startswith(("-", " ")):
            assert lines[at] == text
            at += 1
        if row.startswith(("+", " ")):
            out.append(text)
    return "".join([*out, *lines[at:]])


@pytest.mark.spec("reliability:FP6")
async def test_the_log_of_a_write_has_hashes_but_no_content(tmp_path: Path) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []

    class Log:
        def info(self, message: str, /, **data: Any) -> None:
            lines.append((message, data))

        debug = warning = error = info

    (tmp_path / "a").write_text("old canary")
    made = {t.spec.name: t for t in file_tools(tmp_path, write=True, delete=True)}
    for name, given_input in (("write_file", {"path": "./a", "content": "new canary"}), ("delete_file", {"path": "a"})):
        arguments = made[name].binding().validate(freeze_object(given_input)).arguments
        assert not (await made[name].execute(arguments, ToolContext.for_test(logger=Log()))).is_error
    (written,), (deleted,) = [
        [data for said, data in lines if said == f"file {what}"] for what in ("written", "deleted")
    ]

    assert ("a", 10, short_content_hash(b"old canary"), short_content_hash(b"new canary")) == tuple(
        written[name] for name in ("path", "size", "before", "after")
    )
    assert (short_content_hash(b"new canary"), None) == (deleted["before"], deleted["after"])
    assert isinstance(written["milliseconds"], int)
    assert "canary" not in str(lines)


# --- deleting, and what others changed meanwhile ----------------------------------------------------------------------


@pytest.mark.spec("reliability:FS24")
async def test_a_file_is_deleted_and_nothing_else_is(tmp_path: Path) -> None:
    registry = ToolRegistry(file_tools(tmp_path, write=True, delete=True))
    (tmp_path / "a").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / ".env").write_text("x")
    for path, said in (
        (".", "root folder itself"),
        ("folder", "is a folder"),
        ("link", "is a symbolic link"),
        ("none", "does not exist"),
        ("../a", OUTSIDE_ROOT),
        (".env", "secrets"),
    ):
        assert said in (await registry.execute("delete_file", {"path": path})).text
    assert {".env", "a", "folder", "link"} == set(os.listdir(tmp_path))
    result = await registry.execute("delete_file", {"path": "a"})

    assert {"file": "a", "message": "Deleted a."} == result.data
    assert {".env", "folder", "link"} == set(os.listdir(tmp_path))
    assert "delete_file" not in {t.spec.name for t in file_tools(tmp_path, write=True)}
    with pytest.raises(DefinitionError, match="write=True"):
        file_tools(tmp_path, delete=True)


def run_of(tmp_path: Path, steps: Callable[[], Iterator[Any]], **options: Any) -> RunResult[Any]:
    """
    Run an agent that makes calls with the tools for files below a folder.
    """

    def handle_steps(ctx: StepContext) -> Iterator[Any]:
        for call in steps():
            yield ToolCall(*call)

    tools = file_tools(tmp_path, write=True, delete=True)
    agent = AgentDefinition("writer", tools=tools, handle_steps=handle_steps)  # type: ignore[arg-type]
    with Engine([agent], **options.pop("engine", {})) as engine:
        return engine.run_sync("writer", **options)


@pytest.mark.spec("reliability:FS18")
@pytest.mark.parametrize(
    "change",
    [
        ("write_file", {"path": "a", "content": "mine"}),
        (
            "str_replace",
            {"path": "a", "replacements": [{"old_string": "o", "new_string": "O", "allow_multiple": True}]},
        ),
        ("delete_file", {"path": "a"}),
    ],
)
def test_a_file_changed_since_the_run_read_it_is_kept(tmp_path: Path, change: tuple[str, Any]) -> None:
    def steps() -> Iterator[Any]:
        (tmp_path / "a").write_text("one")
        yield "read_files", {"paths": ["a"]}
        (tmp_path / "a").write_text("two, by hand")
        yield change
        yield "read_files", {"paths": ["a"]}
        yield change

    refused, done = [call.result for call in run_of(tmp_path, steps).tool_calls if call.tool_name == change[0]]
    assert (True, False) == (refused.is_error, done.is_error)
    assert "'a' has changed since it was read; read it again" in refused.text


@pytest.mark.spec("reliability:FS18")
def test_a_runs_own_writes_are_no_external_change(tmp_path: Path) -> None:
    def steps() -> Iterator[Any]:
        yield "write_file", {"path": "a", "content": "one"}
        yield "read_files", {"paths": ["./a"]}
        yield "str_replace", {"path": "a", "replacements": [{"old_string": "one", "new_string": "two"}]}
        yield "str_replace", {"path": "a", "replacements": [{"old_string": "two", "new_string": "three"}]}
        yield "delete_file", {"path": "a"}
        yield "write_file", {"path": "a", "content": "four"}

    assert [False] * 6 == [call.is_error for call in run_of(tmp_path, steps).tool_calls]


@pytest.mark.spec("reliability:FS18")
def test_a_continued_run_knows_the_files_read_before(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("one")
    before = run_of(tmp_path, lambda: iter([("read_files", {"paths": ["a", "b"]})]))
    (tmp_path / "a").write_text("by hand")
    calls = [("write_file", {"path": name, "content": "mine"}) for name in ("a", "b")]
    after = run_of(tmp_path, lambda: iter(calls), previous=before.state)

    assert [True, False] == [call.is_error for call in after.tool_calls]
    assert "by hand" == (tmp_path / "a").read_text()


@pytest.mark.spec("reliability:FS18", "requirements:E19")
@pytest.mark.parametrize(
    ("wanted", "action", "line"),
    [
        (("write_file", {"path": "a", "content": "mine\n"}), "Write 'a'", "+mine"),
        (("write_file", {"path": "new/b", "content": "mine\n"}), "Write 'new/b'", "+++ b/new/b"),
        (
            ("str_replace", {"path": "a", "replacements": [{"old_string": "ne", "new_string": "NE"}]}),
            "Edit 'a'",
            "+oNE",
        ),
        (("delete_file", {"path": "a"}), "Delete 'a'", "+++ /dev/null"),
    ],
)
@pytest.mark.parametrize("meddles", [False, True])
def test_approval_shows_the_diff_and_later_changes_prevent_the_write(
    tmp_path: Path, wanted: tuple[str, Any], action: str, line: str, meddles: bool
) -> None:
    (tmp_path / "a").write_text("one\n")

    file = tmp_path / wanted[1]["path"]

    class Ana:
        def ask(self, question: Question) -> bool:
            self.seen = question
            if meddles:
                file.parent.mkdir(exist_ok=True)
                file.write_text("one by hand\n")
            return True

    ana = Ana()
    result = run_of(tmp_path, lambda: iter([wanted]), engine={"permissions": Permissions(), "interactor": ana})
    (call,) = result.tool_calls

    assert ana.seen.preview is not None
    assert action == ana.seen.preview["action"]
    assert line in str(ana.seen.preview["details"]["unified_diff"]).split("\n")
    assert call.is_error == meddles
    if meddles:
        assert "since its difference was shown" in call.result.text
        assert "one by hand\n" == file.read_text()


@pytest.mark.parametrize(
    "wanted",
    [
        ("write_file", {"path": ".env", "content": ""}),
        ("write_file", {"path": "a/b", "content": ""}),
        ("str_replace", {"path": "a", "replacements": [{"old_string": "nowhere", "new_string": "x"}]}),
        ("delete_file", {"path": "none"}),
    ],
    ids=str,
)
def test_a_doomed_write_is_refused_without_asking(tmp_path: Path, wanted: tuple[str, Any]) -> None:
    (tmp_path / "a").write_text("one\n")
    asked: list[Question] = []

    class Ana:
        def ask(self, question: Question) -> bool:
            asked.append(question)
            return True

    unasked, judged = [
        run_of(tmp_path, lambda: iter([wanted]), engine=options).tool_calls[0]
        for options in ({}, {"permissions": Permissions(), "interactor": Ana()})
    ]

    assert ([], "error", unasked.result.text) == (asked, judged.result.status, judged.result.text)
