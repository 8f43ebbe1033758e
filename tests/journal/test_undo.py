"""
Undoing what a run wrote: the tree is what it was, or nothing is touched.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, ToolCall, tool
from stepengine.errors import DefinitionError, JournalCorrupt, JournalError, JournalLocked, UndoRefused, UnknownOutcome
from stepengine.journal import FileJournal, MemoryJournal, check, undo
from stepengine.journal.forks import branch
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import file_tools, shell_tools
from tests.journal.mutants import resealed

MIB = 1024 * 1024


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    return made


def tree_of(root):
    """
    Return everything below a folder: kinds, permission bits, contents, targets of links.
    """
    found = {}
    for path in sorted(Path(root).rglob("*")):
        if path.is_symlink():
            found[str(path)] = ("link", str(path.readlink()))
        else:
            mode = path.stat().st_mode & 0o7777
            found[str(path)] = ("folder", mode) if path.is_dir() else ("file", mode, path.read_bytes())
    return found


def done(tool_name, **given):
    return ToolCall(tool_name, given, include_tool_call=False)


def write(path, content="x"):
    return done("write_file", path=path, content=content)


def edit(path, old, new):
    return done("str_replace", path=path, replacements=[{"old_string": old, "new_string": new}])


def delete(path):
    return done("delete_file", path=path)


def ran(root, calls, journal=None, tools=(), **options):
    """
    Run an agent that makes these calls; return its journal, read anew from its lines.
    """

    def handle_steps(ctx):
        for call in calls:  # noqa: UP028  (a list takes nothing back)
            yield call

    journal = MemoryJournal(**options) if journal is None else journal
    writers = file_tools(root, write=True, delete=True)
    with Engine([AgentDefinition("writer", handle_steps=handle_steps)], [*writers, *tools]) as engine:
        engine.run_sync("writer", journal=journal).unwrap()
    if not isinstance(journal, MemoryJournal):
        return journal
    read = MemoryJournal(journal.lines())
    read.is_own = True
    return read


def forge(journal, old, new):
    """
    Return a journal with another text in place of one, and right checksums.
    """
    content = journal.content().decode()
    assert old in content
    return MemoryJournal(resealed(content.replace(old, new)))


@pytest.mark.spec("requirements:X122")
def test_undo_of_an_unknown_journal_requires_trust(root, tmp_path):
    """
    Whoever forges a journal decides which files undo writes, and their content.
    """
    (root / "a.txt").write_text("one")
    ran(root, [write("a.txt", "two"), write("new.txt")], FileJournal(tmp_path / "run.jsonl"))
    text = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "other.jsonl").write_bytes(resealed(text.replace('"path":"new.txt"', '"path":"old.txt"')))
    (root / "new.txt").rename(root / "old.txt")
    before = tree_of(root)

    for forged in (tmp_path / "other.jsonl", MemoryJournal((tmp_path / "other.jsonl").read_bytes())):
        with pytest.raises(UndoRefused, match=r"is not known to come from a run of yours.*trust=True") as refused:
            undo(forged, root)
        assert (("a.txt", "would be restored"), ("old.txt", "would be removed")) == refused.value.files
        with pytest.raises(UndoRefused, match="is not known to come from a run of yours"):
            branch(forged, -1, restore_files=root)
        assert before == tree_of(root)
    assert (("a.txt", b"one"),) == undo(forged, root, dry_run=True).contents
    assert ("a.txt",) == undo(tmp_path / "other.jsonl", root, trust=True).restored


@pytest.mark.spec("requirements:X122")
@pytest.mark.parametrize("act", ["undo", "fork"])
def test_an_unknown_journal_removes_no_folder_unasked(root, tmp_path, act):
    """Its file is as it was, so that a folder is all that would change."""
    made = ran(root, [write("new/file.txt")], FileJournal(tmp_path / "run.jsonl"))
    forged = forge(made, '"folders":["new"]', '"folders":["uploads"]')
    (root / "new" / "file.txt").unlink()
    (root / "uploads" / "deep").mkdir(parents=True)
    (root / "uploads" / "deep").rmdir()

    with pytest.raises(UndoRefused) as refused:
        undo(forged, root) if act == "undo" else branch(forged, -1, restore_files=root)
    assert (("uploads/", "would be removed"),) == refused.value.files
    assert (root / "uploads").is_dir()
    assert ("uploads/",) == undo(forged, root, trust=True).removed


@pytest.mark.deep
@pytest.mark.smoke
@settings(max_examples=8)
@given(files=st.lists(st.sampled_from(["a/x", "a/b/y", "a/b/c/z", "d/w"]), min_size=1, unique=True), kept=st.booleans())
def test_a_dry_run_names_the_folders_that_undo_removes(files, kept):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        journal = ran(root, [write(file) for file in files])
        if kept:
            (root / files[0]).with_name("other").write_text("mine")

        assert undo(journal, root, dry_run=True).removed == undo(journal, root).removed


def test_changed_created_and_deleted_files_are_restored(root):
    (root / "a.py").write_bytes(b"one\r\ntwo\r\n")
    (root / "a.py").chmod(0o751)
    (root / "old.bin").write_bytes(bytes(range(256)) * 300)
    (root / "old.bin").chmod(0o600)
    before = tree_of(root)
    calls = [edit("a.py", "two", "2"), write("new/deep/b.py"), edit("a.py", "2", "zwei"), delete("old.bin")]
    journal = ran(root, calls)
    assert check(journal).problems == ()
    preview = undo(journal, root, dry_run=True)
    assert before != tree_of(root)
    made = undo(journal, root)

    assert before == tree_of(root)
    assert (("a.py",), ("old.bin",)) == (made.restored, made.created) == (preview.restored, preview.created)
    assert ("new/deep/b.py", "new/deep/", "new/") == made.removed
    assert ("a.py", "new/deep/b.py", "old.bin") == undo(journal, root).unchanged
    assert "restored  a.py\nremoved   new/deep/b.py" in str(made)


# What a scripted agent may do, to few files so that it comes by each several times.
NAMES = st.sampled_from(["a", "b.py", "d/a", "d/e/c", "d/e/f/g"])
CONTENTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "\x01" * 50, "naïve\u2028\x85", "x" * 40_000, '{"$blob": "x"}'])
)
ACTS = st.one_of(
    st.builds(write, NAMES, CONTENTS),
    st.builds(edit, NAMES, st.sampled_from(["a", "x"]), CONTENTS),
    st.builds(delete, NAMES),
)
FILES = st.dictionaries(
    NAMES,
    st.tuples(st.one_of(st.binary(max_size=30), st.just(b"\xff\x00" * 40_000)), st.sampled_from([0o644, 0o755, 0o400])),
)


@pytest.mark.deep
@settings(max_examples=100)
@given(files=FILES, acts=st.lists(ACTS, max_size=12), at=st.integers(-1, 11))
def test_undo_restores_the_tree_byte_for_byte(files, acts, at):
    with tempfile.TemporaryDirectory() as folder:
        for name, (content, mode) in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(mode)
        trees = [tree_of(folder)]

        def watched():
            for act in acts:
                yield act
                trees.append(tree_of(folder))

        journal = ran(folder, watched())
        if at + 1 < len(trees):
            undo(journal, folder, at=at)
            assert files_of(trees[at + 1]) == files_of(tree_of(folder))
        undo(journal, folder)
        assert trees[0] == tree_of(folder)


def files_of(tree):
    return {path: what for path, what in tree.items() if what[0] != "folder"}


def test_file_changed_since_blocks_the_whole_undo(root):
    for name in ("a", "b", "c"):
        (root / name).write_text("old")
    journal = ran(root, [write("a"), write("b"), delete("c"), write("d"), write("e")])
    (root / "b").write_text("by hand")
    (root / "c").write_text("again")
    (root / "d").unlink()
    (root / "e").unlink()
    (root / "e").symlink_to("a")
    held = tree_of(root)
    with pytest.raises(UndoRefused) as caught:
        undo(journal, root)

    assert held == tree_of(root)
    assert ["b", "c", "e"] == [path for path, _ in caught.value.files]
    assert "b: it was changed later; c: it was changed later; e: 'e' is a symbolic link" in caught.value.message
    made = undo(journal, root, partial=True)
    assert (("a",), ("d",), ["b", "c", "e"]) == (made.restored, made.unchanged, [path for path, _ in made.left])
    assert "old" == (root / "a").read_text()
    assert "by hand" == (root / "b").read_text()


def test_foreign_write_between_two_writes_is_preserved(root):
    @tool
    def elsewhere() -> str:
        """Change the file behind the run's back."""
        (root / "a").write_text("by hand")
        return "done"

    (root / "a").write_text("old")
    journal = ran(
        root, [write("a", "one"), done("elsewhere"), done("read_files", paths=["a"]), delete("a")], tools=[elsewhere]
    )

    with pytest.raises(UndoRefused, match="another program changed it between two writes"):
        undo(journal, root)
    made = undo(journal, root, at=2)
    assert "by hand" == (root / "a").read_text()
    assert ("a",) == made.created


def test_undo_never_leaves_the_root_or_touches_protected_files(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("new")
    (root / ".git").mkdir()
    (root / "plain").write_text("old")
    made = ran(root, [write("plain", "new")])
    for path in ("../outside/x", str(outside / "x"), "link/x", ".git/hook", ".env", "pl\\u0000ain"):
        if not (root / "link").is_symlink():
            (root / "link").symlink_to(outside)
        (root / ".git" / "hook").write_text("new")
        with pytest.raises(UndoRefused):
            undo(forge(made, '"path":"plain","before"', f'"path":"{path}","before"'), root, trust=True)
        assert "new" == (outside / "x").read_text()
        assert "new" == (root / ".git" / "hook").read_text()


@pytest.mark.parametrize("option", ["allow_secrets", "allow_protected"])
def test_undo_rejects_one_string_instead_of_patterns(root, option):
    """Its characters would be patterns: the ``*`` of ``"*.pem"`` would allow every file."""
    journal = ran(root, [write("a.txt")])

    with pytest.raises(DefinitionError, match=r"must be a list: expected a list, not '\*\.pem'"):
        undo(journal, root, **{option: "*.pem"})


@pytest.mark.parametrize(
    "change",
    [
        ('"mode":420', '"mode":2541'),
        ('"after":"', '"after":7,"x":"'),
        ('"text":"old"', '"base64":"?"'),
        ('"writes":[{', '"writes":[7,{'),
    ],
)
def test_forged_undo_data_is_corrupt(root, change):
    (root / "plain").write_text("old")
    forged = forge(ran(root, [write("plain", "new")]), *change)

    with pytest.raises(JournalCorrupt, match=r"record \d+ of .* is not valid: "):
        undo(forged, root)


def test_old_content_with_a_wrong_hash_is_not_written(root):
    (root / "plain").write_text("old")
    forged = forge(ran(root, [write("plain", "new")]), '"text":"old"', '"text":"evil"')

    with pytest.raises(UndoRefused, match="not undoable"):
        undo(forged, root)
    assert "new" == (root / "plain").read_text()


@pytest.mark.deep
@pytest.mark.smoke
def test_file_over_4_mib_is_reported_as_not_undoable(root):
    (root / "fits").write_bytes(b"x" * (4 * MIB))
    (root / "large").write_bytes(b"x" * (4 * MIB + 1))
    (root / "huge").write_bytes(b"x" * (11 * MIB))
    journal = ran(root, [write("fits"), write("large"), write("huge")])

    with pytest.raises(UndoRefused) as caught:
        undo(journal, root)
    assert [("large", True), ("huge", True)] == [(path, "4 MiB" in why) for path, why in caught.value.files]
    assert ("fits",) == undo(journal, root, partial=True).restored
    assert 4 * MIB == (root / "fits").stat().st_size
    (root / "huge").write_bytes(b"y" * (11 * MIB))
    with pytest.raises(UndoRefused, match="huge: it was changed later"):
        undo(journal, root)


@pytest.mark.parametrize(
    "before", [b"key = very-secret-7f3a9c", b"\xff\x00 very-secret-7f3a9c"], ids=["text", "binary"]
)
def test_secret_file_content_is_not_stored_for_undo(root, monkeypatch, before):
    monkeypatch.setenv("SERVICE_API_KEY", "very-secret-7f3a9c")
    (root / "a").write_bytes(before)
    journal = ran(root, [write("a")])

    text = b"".join(journal.lines())
    assert b'"lost":"secret"' in text
    assert b"very-secret" not in text
    assert b'"base64"' not in text
    with pytest.raises(UndoRefused, match="may be a secret"):
        undo(journal, root)


def test_undo_data_is_hidden_from_models_and_fingerprints(root):
    (root / "a").write_text("the old content")
    model = ScriptedModel(["Done."])

    def handle_steps(ctx):
        yield write("a", "new")
        yield STEP

    agent = AgentDefinition("writer", model="test/m", handle_steps=handle_steps)
    journal, plain = MemoryJournal(), None
    with Engine([agent], file_tools(root, write=True), models=model) as engine:
        result = engine.run_sync("writer", journal=journal)
        plain = engine.replay_sync(MemoryJournal(journal.lines()))

    assert "the old content" in b"".join(journal.lines()).decode()
    assert "the old content" not in str(model.calls)
    assert "the old content" not in str(result)
    assert plain.journal.lines() == journal.lines()


def test_other_effects_of_the_run_are_listed(root):
    @tool
    def send() -> str:
        """Send something."""
        return "sent"

    shell = shell_tools(root)
    run = done("run_terminal_command", command=["true"])
    journal = ran(root, [write("a"), run, run, done("send")], tools=[send, *shell])
    made = undo(journal, root)

    assert ("tool_call run_terminal_command (2 times)", "tool_call send (1 time)") == made.others
    assert "not undone: tool_call send (1 time), which records no undo data" in str(made)


def test_writes_of_children_are_undone(root):
    def handle_child(ctx):
        yield edit("a", "old", ctx.prompt)

    def handle_steps(ctx):
        yield AgentCall("child", "one")
        yield write("a", "old")
        yield AgentCall("child", "two")

    child = AgentDefinition("child", handle_steps=handle_child)
    parent = AgentDefinition("parent", spawnable_agents=["child"], handle_steps=handle_steps)
    (root / "a").write_text("an old one")
    journal = MemoryJournal()
    with Engine([parent, child], file_tools(root, write=True)) as engine:
        engine.run_sync("parent", journal=journal).unwrap()
    assert "two" == (root / "a").read_text()
    undo(journal, root, at="0#0")
    assert "an one one" == (root / "a").read_text()
    undo(journal, root)
    assert "an old one" == (root / "a").read_text()


def test_several_roots_are_distinguished_and_moved_ones_declared(root, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_text("x")
    journal = ran(root, [write("a"), write("b")])

    with pytest.raises(UndoRefused, match="it was written outside of the given folders"):
        undo(journal, other)
    with pytest.raises(DefinitionError, match="exactly one"):
        undo(journal, [root, other], moved=True)
    assert "x" == (other / "a").read_text()
    root.rename(tmp_path / "moved")
    assert ("a", "b") == undo(journal, [tmp_path / "moved"], moved=True).removed


def test_running_or_missing_run_is_not_undone(root, tmp_path):
    journal = ran(root, [write("a")], FileJournal(tmp_path / "run.jsonl"))
    writer = journal.writer()
    try:
        with pytest.raises(JournalLocked):
            undo(tmp_path / "run.jsonl", root)
    finally:
        writer.close()
    assert ("a",) == undo(tmp_path / "run.jsonl", root).removed
    with pytest.raises(JournalError, match="there is no journal"):
        undo(tmp_path / "none.jsonl", root)
    assert not (tmp_path / "none.jsonl").exists()


def test_fork_can_restore_files_of_its_step(root, tmp_path):
    (root / "a").write_text("start")

    def handle_steps(ctx):
        yield edit("a", "start", "one")
        yield edit("a", "one", "one two")
        yield write("b")
        return (root / "a").read_text()

    journal = MemoryJournal()
    with Engine([AgentDefinition("writer", handle_steps=handle_steps)], file_tools(root, write=True)) as engine:
        engine.run_sync("writer", journal=journal).unwrap()
        with pytest.raises(JournalError, match="allow_repeat"):
            engine.fork_sync(journal, at=0)
        forked = engine.fork_sync(journal, at=0, restore_files=root).unwrap()
        assert "one two" == forked == (root / "a").read_text()
        (root / "b").write_text("by hand")
        with pytest.raises(UndoRefused):
            engine.fork_sync(journal, at=0, restore_files=root, into=tmp_path / "fork.jsonl")

    assert not (tmp_path / "fork.jsonl").exists()
    assert "one two" == (root / "a").read_text()


@pytest.mark.spec("reliability:R3")
@pytest.mark.parametrize("act", ["write_file", "delete_file"])
def test_undo_reports_a_write_in_doubt_after_a_kill(root, tmp_path, act):
    """The process ends when the file is written and its result is not."""

    def handle_steps(ctx):
        yield write("a", "new")
        with suppress(UnknownOutcome):
            yield delete("b") if act == "delete_file" else write("b", "new")

    (root / "a").write_text("old")
    (root / "b").write_text("old")
    path = tmp_path / "run.jsonl"
    agent = AgentDefinition("writer", handle_steps=handle_steps)
    with Engine([agent], file_tools(root, write=True, delete=True)) as engine:
        engine.run_sync("writer", journal=path).unwrap()
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-2]))
        made = undo(path, root, dry_run=True)
        engine.resume_sync(path).unwrap()

    assert ((f"#1 tool_call {act}",), ("a",)) == (made.unknown, made.restored)
    assert f"unknown: #1 tool_call {act} started, and the journal does not record whether it finished" in str(made)
    if act == "write_file":  # it may be done again, and found what it had written itself
        with pytest.raises(UndoRefused, match="interrupted and repeated"):
            undo(path, root)
        assert "new" == (root / "a").read_text()
    else:
        assert (f"#1 tool_call {act}",) == undo(path, root).unknown
        assert "old" == (root / "a").read_text()


@pytest.mark.spec("requirements:X122")
@pytest.mark.parametrize("is_own", [True, False])
def test_resumed_or_forked_journal_stays_as_known_as_before(root, tmp_path, is_own):
    def handle_steps(ctx):
        yield write("a.txt", "two")
        yield from Ask("More?", options=["yes", "no"])
        yield write("b.txt", "three")

    path = tmp_path / "run.jsonl"
    agent = AgentDefinition("writer", tools=file_tools(root, write=True), handle_steps=handle_steps)
    with Engine([agent]) as engine:
        engine.run_sync("writer", journal=path)
        if not is_own:
            path.write_bytes(resealed(path.read_text().replace('"created":"20', '"created":"19')))
        fork = branch(path, 0, into=tmp_path / "fork.jsonl")
        engine.resume_sync(path, agent="writer", answers={"q1": "yes"}).unwrap()

    for journal in (path, fork):
        with nullcontext() if is_own else pytest.raises(UndoRefused, match="is not known to come from a run of yours"):
            undo(journal, root)
        (root / "a.txt").write_text("two")
