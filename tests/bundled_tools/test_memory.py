"""
`memory_tools`: notes in one file per user and project, within caps, in the journal, and in whatever store somebody brings.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine
from stepengine.errors import DefinitionError, ToolError
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import FileMemory, MemoryStore, Note, memory_tools
from stepengine.tools.bundled.memory import FILE_BYTES, MAX_NOTES
from stepengine.tools.bundled.note_tools import get_project_scope

KEY = "sk-ant-api03-" + "A1b2C3d4" * 10
PROJECT = "project:" + "0" * 16


def run(
    tmp_path: Path,
    *calls: tuple[str, dict[str, Any]],
    store: MemoryStore | None = None,
    scopes: Any = None,
    **options: Any,
) -> Any:
    """
    Have a model make these calls; return what it was told, and the journal.
    """
    model = ScriptedModel([*[tool_call(name, said) for name, said in calls], "Done."])
    journal = MemoryJournal()
    given = {} if scopes is None else {"scopes": scopes}
    agent = AgentDefinition(
        "worker", tools=memory_tools(FileMemory(tmp_path / "notes") if store is None else store, **given)
    )
    (tmp_path / "project").mkdir(exist_ok=True)
    with Engine([agent], models=model, default_model="x/y", workspace=tmp_path / "project", **options) as engine:
        engine.run_sync("worker", "Go.", journal=journal).unwrap()
    return [m.text for m in model.calls[-1].messages if m.role == "tool"], journal, agent


@pytest.mark.spec("interfaces:IF105")
def test_a_note_is_recalled_later_until_it_is_forgotten(tmp_path: Path) -> None:
    note = {"text": "Tests need\nthe database.", "tags": ["tests"]}
    run(tmp_path, ("remember", note), ("remember", {"text": "Likes tea.", "scope": "user"}))
    told, _, _ = run(
        tmp_path, ("recall", {"query": "DATABASE"}), ("recall", {}), ("forget", {"id": "m1"}), ("recall", {})
    )
    found, everything, forgotten, left = told
    files = sorted(path for path in (tmp_path / "notes").rglob("*.md"))

    assert found.startswith("project - [m1] ")
    assert found.endswith(": Tests need the database.")
    assert " #tests run " in found
    assert "user - [m1] " in everything
    assert "Forgot m1 (project)." == forgotten
    assert "database" not in left
    assert "tea" in left
    assert 2 == len(files)
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in files}
    assert [] == list((tmp_path / "project").iterdir())


TAG_CHARACTERS = st.one_of(
    st.sampled_from("e\u0301\u0939\u093f\u0928\u094d\u0926\u0940\u200c\u200d_-\u203f"),
    st.characters(codec="utf-8", categories=["L", "M", "Nd", "Pc"]),
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF105")
@given(st.lists(st.text(TAG_CHARACTERS, min_size=1, max_size=33), max_size=6))
@example(["\u0939\u093f\u0928\u094d\u0926\u0940"])
@example(["cafe\u0301"])
def test_note_with_any_accepted_tags_is_recalled_and_forgotten(tags: list[str]) -> None:
    async def use() -> None:
        note = {"text": "A note.", "tags": tags, "scope": "user"}
        if (await registry.execute("remember", note)).is_error:
            return
        for query in ("", *[tag for tag in tags if any(c.isalnum() for c in tag)]):
            told = (await registry.execute("recall", {"query": query})).text
            assert "A note." in told
            assert all(f" #{tag}" in told for tag in tags)
        assert "Forgot m1" in (await registry.execute("forget", {"id": "m1", "scope": "user"})).text

    with tempfile.TemporaryDirectory() as folder:
        registry = ToolRegistry(memory_tools(FileMemory(Path(folder)), scopes=["user"]))
        asyncio.run(use())


@pytest.mark.spec("interfaces:IF105")
def test_a_replay_needs_no_notes_and_writes_none(tmp_path: Path) -> None:
    store = FileMemory(tmp_path / "notes")
    _, journal, agent = run(tmp_path, ("remember", {"text": "Tea."}), ("recall", {"query": "tea"}), store=store)
    for path in (tmp_path / "notes").rglob("*.md"):
        path.unlink()
    with Engine([agent]) as engine:
        again = engine.replay_sync(journal)

    assert journal.content() == again.journal.content()
    assert [] == list((tmp_path / "notes").rglob("*.md"))


@pytest.mark.spec("interfaces:IF105", "reliability:PM44")
def test_writing_a_note_asks_even_in_accept_edits_mode(tmp_path: Path) -> None:
    calls = [("remember", {"text": "Obey me."}), ("forget", {"id": "m1"}), ("recall", {})]
    asked: list[str] = []

    class Nobody:
        def ask(self, question: Any) -> bool:
            asked.append(question.tool_name)
            return False

    told, _, _ = run(tmp_path, *calls, permissions=Policy(mode="accept_edits"), interactor=Nobody())

    assert ["remember", "forget"] == asked
    assert "There are no such notes." == told[-1]


@pytest.mark.spec("interfaces:IF105")
def test_secrets_and_control_characters_are_removed_before_storing(tmp_path: Path) -> None:
    run(tmp_path, ("remember", {"text": f"The key is {KEY}\u202e\x1b[31m."}))
    (file,) = (tmp_path / "notes" / "projects").glob("*.md")
    text = file.read_text()

    assert KEY not in text
    assert "<redacted:" in text
    assert "\u202e" not in text
    assert "\x1b" not in text


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
async def test_lines_of_a_person_stay_and_ids_are_never_reused(tmp_path: Path) -> None:
    store, mine = FileMemory(tmp_path), b"# Mine\n\nremember\r\n\n\nthe caf\xe9\n"
    (tmp_path / "user.md").write_bytes(mine)
    await store.write("user", "one", (), "")
    await store.write("user", "two", (), "")
    (tmp_path / "user.md").write_bytes((tmp_path / "user.md").read_bytes().replace(b"two", b"tw\xf6"))
    found = await store.search("user", "", 10)
    await store.forget("user", "m1")

    assert ["tw\ufffd", "one"] == [note.text for note in found]
    assert (tmp_path / "user.md").read_bytes().startswith(mine + b"- [m2]")
    assert not await store.forget("user", "m1")
    assert await store.forget("user", "m2")
    assert "m3" == (await store.write("user", "three", (), "")).id


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
async def test_a_full_file_refuses_notes_and_names_the_oldest_three(tmp_path: Path) -> None:
    store = FileMemory(tmp_path)
    lines = [Note(id=f"m{n}", text=f"note {n}", date="2026-01-01").line for n in range(1, MAX_NOTES + 1)]
    (tmp_path / "user.md").write_text("\n".join(lines))
    with pytest.raises(ToolError, match=r"no room.*\n.*note 1\n.*note 2\n.*note 3$"):
        await store.write("user", "one more", (), "")
    (tmp_path / "projects").mkdir()
    (tmp_path / "projects" / f"{'0' * 16}.md").write_text("x" * FILE_BYTES)
    with pytest.raises(ToolError, match="no room"):
        await store.write(PROJECT, "one more", (), "")
    assert await store.forget("user", "m1")
    assert "m501" == (await store.write("user", "one more", (), "")).id


@pytest.mark.spec("interfaces:IF105", "reliability:FS18")
def test_writers_at_the_same_time_lose_no_note(tmp_path: Path) -> None:
    def write(n: int) -> None:
        asyncio.run(FileMemory(tmp_path).write("user", f"note {n}", (), ""))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = asyncio.run(FileMemory(tmp_path).search("user", "", 50))

    assert {f"note {n}" for n in range(8)} == {note.text for note in found}
    assert [f"m{n}" for n in range(8, 0, -1)] == [note.id for note in found]


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
async def test_search_ranks_whole_words_and_tags_before_prefixes(tmp_path: Path) -> None:
    store = FileMemory(tmp_path)
    for text, tags in (
        ("testing", ()),
        ("a \uff34\uff25\uff33\uff34", ()),
        ("other", ("test",)),
        ("nothing", ()),
        ("test", ("test",)),
    ):
        await store.write("user", text, tags, "")

    assert ["m5", "m3", "m2", "m1"] == [note.id for note in await store.search("user", "test", 10)]
    assert ["m5"] == [note.id for note in await store.search("user", "Test", 1)]


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
@pytest.mark.parametrize(("query", "found"), [("", ["m1"]), (" \n", ["m1"]), ("???", []), ("\u2026 !", [])])
async def test_a_query_without_words_finds_notes_only_if_empty(tmp_path: Path, query: str, found: list[str]) -> None:
    store = FileMemory(tmp_path)
    await store.write("user", "What???", (), "")

    assert found == [note.id for note in await store.search("user", query, 10)]


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
async def test_a_link_and_another_scope_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("- [m1] 2026-01-01: KEY")
    (tmp_path / "user.md").symlink_to(tmp_path / "secret")
    for scope in ("user", "../secret", "project:../../secret"):
        with pytest.raises(ToolError):
            await FileMemory(tmp_path).search(scope, "", 10)


@pytest.mark.anyio
@pytest.mark.spec("interfaces:IF105")
async def test_unusable_files_of_notes_raise_tool_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = FileMemory(tmp_path)
    (tmp_path / "user.md").mkdir()
    with pytest.raises(ToolError, match=r"'user\.md' cannot be read: Is a directory"):
        await memory.search("user", "", 10)
    (tmp_path / "user.md").rmdir()
    monkeypatch.setattr("stepengine.tools.bundled.memory.replace_path", fail)
    with pytest.raises(ToolError, match="notes cannot be kept: No space left on device"):
        await memory.write("user", "Likes tea.", (), "")


@pytest.mark.spec("interfaces:IF105")
def test_all_work_trees_of_a_repository_share_their_notes(tmp_path: Path) -> None:
    def git(*argv: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *argv], cwd=tmp_path / "one", check=True, capture_output=True)

    (tmp_path / "one" / "deep").mkdir(parents=True)
    git("init")
    git("commit", "--allow-empty", "-m", "one")
    git("worktree", "add", "../two")

    assert (
        get_project_scope(tmp_path / "one" / "deep")
        == get_project_scope(tmp_path / "one")
        == get_project_scope(tmp_path / "two")
    )
    assert get_project_scope(tmp_path / "one") != get_project_scope(tmp_path)


@pytest.mark.spec("interfaces:IF105")
def test_custom_memory_store_works_and_scopes_can_be_limited(tmp_path: Path) -> None:
    class Board:
        def __init__(self) -> None:
            self.said: list[Any] = []

        async def write(self, scope: str, text: str, tags: Any, origin: str) -> Note:
            self.said.append((scope.partition(":")[0], text, list(tags)))
            return Note(id="m7", text=text)

        async def search(self, scope: str, query: str, limit: int) -> list[Note]:
            return [Note(id="m7", text="x" * 5_000)] * 3

        async def forget(self, scope: str, id: str) -> bool:
            return False

    board = Board()
    told, _, _ = run(
        tmp_path, ("remember", {"text": "Tea."}), ("recall", {"scope": "user"}), ("forget", {"id": "m9"}), store=board
    )

    assert [("project", "Tea.", [])] == board.said
    assert "Remembered as m7 (project)." == told[0]
    assert len(told[1].encode()) < 8 * 1024
    assert "there are more" in told[1]
    assert "there is no note 'm9'" in told[2]
    only, _, _ = run(
        tmp_path, ("remember", {"text": "Tea.", "scope": "user"}), ("recall", {"scope": "project"}),
        ("forget", {"scope": "project", "id": "m7"}), store=board, scopes=["user"],
    )  # fmt: skip
    assert "Remembered as m7 (user)." == only[0]
    assert all("there are no notes of the scope 'project' here; user would be fine" in told for told in only[1:])
    assert [("project", "Tea.", []), ("user", "Tea.", [])] == board.said
    for scopes in ((), "user", ["team"]):
        with pytest.raises(DefinitionError, match="is not a list of scopes"):
            memory_tools(scopes=scopes)
