"""No path leads out of a root: the rows FS of the reliability page, for every tool that takes a path."""

# Descriptors and the functions that take them are what these tests are about.
# ruff: noqa: ASYNC240, PTH115, PTH116, PTH208

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine import ToolContext
from stepengine.data.messages import ToolResult
from stepengine.errors import DefinitionError, ToolError
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools
from stepengine.workspace.atomic import replace_file, stat_regular_file
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from stepengine.workspace.walk import WalkBudget, walk
from tests.phrases import OUTSIDE_ROOT

SECRET = "the secret beside the root"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """
    A root with files, and a secret beside it.
    """
    made = tmp_path / "proj"
    (made / "sub" / "deep").mkdir(parents=True)
    (made / "a.txt").write_text("inside\n")
    (made / "sub" / "b.txt").write_text("inside too\n")
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "proj-secret").mkdir()
    (tmp_path / "proj-secret" / "x").write_text(SECRET)
    return made


def registry(root: Path, **options: Any) -> ToolRegistry:
    reading = {k: v for k, v in options.items() if k != "allow_protected"}
    return ToolRegistry([*file_tools(root, write=True, **options), *search_tools(root, **reading)])


async def attempts(tools: ToolRegistry, path: str) -> dict[str, ToolResult]:
    """
    Let every tool that takes a path have it, in every way.
    """
    calls: dict[str, dict[str, Any]] = {
        "read_files": {"paths": [path]},
        "list_directory": {"path": path},
        "write_file": {"path": path, "content": "overwritten"},
        "str_replace": {"path": path, "replacements": [{"old_string": "secret", "new_string": "known"}]},
        "glob": {"pattern": "**/*", "cwd": path},
        "code_search": {"pattern": "secret", "cwd": path},
    }
    return {name: await tools.execute(name, arguments) for name, arguments in calls.items()}


def refused(results: dict[str, ToolResult], said: str) -> list[str]:
    """
    Return the tools that did not refuse with these words.
    """
    return [name for name, r in results.items() if said not in r.text or (name != "read_files" and not r.is_error)]


OUTSIDE = [
    "../secret", "a/../../secret", "a/b/../../../secret", "..", "./..//..", "sub/..", "sub/../a.txt", "/etc/passwd", "//etc/passwd",
    "{root}/../secret", "{root}-secret/x", "/", "{parent}", "{parent}/secret", "../proj-secret/x", "sub/../../proj/a.txt",
]  # fmt: skip


@pytest.mark.spec("reliability:FP1", "reliability:R17")
@pytest.mark.parametrize("path", OUTSIDE)
async def test_a_path_that_leads_out_is_refused_by_every_tool(root: Path, path: str) -> None:
    path = path.format(root=os.path.realpath(root), parent=os.path.realpath(root.parent))
    results = await attempts(registry(root), path)

    assert [] == refused(results, OUTSIDE_ROOT)
    assert SECRET == (root.parent / "secret").read_text()


@pytest.mark.spec("reliability:FP1")
@pytest.mark.parametrize("path", ["a.txt", "./a.txt", "{root}/a.txt"])
async def test_a_path_inside_is_fine_relative_or_absolute(root: Path, path: str) -> None:
    result = await registry(root).execute("read_files", {"paths": [path.format(root=os.path.realpath(root))]})

    assert "inside\n" == result.data[0]["content"]  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FP1")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a\0b", "control character"), ("a\nb", "control character"), ("\x1b[31m", "control character"), ("a\x7f", "control character"),
        ("a//b", "empty or '.'"), ("a/./b", "empty or '.'"), ("file:///etc/passwd", "empty or '.'"), ("x" * 5_000, "4,096 bytes"),
        ("x" * 300, "cannot be used"), (" a.txt", "does not exist"), ("a\u202etxt", r"\u202e"),
    ],
    ids=lambda v: ascii(v)[:24],
)  # fmt: skip
async def test_odd_paths_are_refused_or_taken_literally_and_shown_escaped(root: Path, path: str, said: str) -> None:
    result = await registry(root).execute("read_files", {"paths": [path]})

    assert said in result.data[0]["error"]  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FP2", "reliability:R17")
@pytest.mark.parametrize("kind", ["file", "folder", "chain", "dangling", "absolute", "absolute dangling", "by parent"])
async def test_an_outside_link_is_refused_without_revealing_its_target(root: Path, kind: str) -> None:
    targets = {
        "file": "../secret",
        "folder": "..",
        "chain": "hop1",
        "dangling": "../nothing",
        "absolute": str(root.parent / "secret"),
        "absolute dangling": str(root.parent / "nothing"),
        "by parent": "sub/deep/../../../secret",
    }
    (root / "hop1").symlink_to("hop2")
    (root / "hop2").symlink_to("../secret")
    (root / "link").symlink_to(targets[kind])
    tools = registry(root)

    results = await attempts(tools, "link")
    writes = {name: results.pop(name) for name in ("write_file", "str_replace")}
    assert [] == refused(results, f"'link' is {OUTSIDE_ROOT}")
    assert ["'link' is a symbolic link; files are not written through links"] * 2 == [r.text for r in writes.values()]
    below = await attempts(tools, "link/x")
    assert [] == [name for name, r in below.items() if "link" not in r.text or SECRET in r.text]
    assert SECRET == (root.parent / "secret").read_text()
    assert not (root.parent / "x").exists()


@pytest.mark.spec("reliability:FP2")
async def test_inner_links_are_followed_for_reads_and_refused_for_writes(root: Path) -> None:
    (root / "link").symlink_to("sub/deep/../b.txt")
    (root / "dir").symlink_to(os.path.realpath(root / "sub"))
    (root / "sub" / "up").symlink_to("..")
    tools = registry(root)

    result = await tools.execute("read_files", {"paths": ["link", "dir/b.txt", "sub/up/dir/b.txt"]})
    assert ["inside too\n"] * 3 == [entry["content"] for entry in result.data]  # type: ignore[union-attr,index]
    for path in ("link", "dir/b.txt", "dir/new/c.txt"):
        written = await tools.execute("write_file", {"path": path, "content": "x"})
        assert "link" in written.text
        assert written.is_error
    assert not (root / "sub" / "new").exists()


@pytest.mark.spec("reliability:FP2")
async def test_loops_and_long_chains_of_links_are_refused(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    (root / "hop0").symlink_to("a.txt")
    for n in range(1, 50):
        (root / f"hop{n}").symlink_to(f"hop{n - 1}")

    result = await registry(root).execute("read_files", {"paths": ["loop", "a", "hop49", "hop8", "hop7"]})
    errors = [entry.get("error", "") for entry in result.data]  # type: ignore[union-attr]
    assert [True] * 4 + [False] == ["more than 8 symbolic links" in e for e in errors]


@pytest.mark.spec("reliability:FS08")
async def test_writing_a_hard_link_replaces_it_and_leaves_the_other(root: Path) -> None:
    outside = root.parent / "secret"
    os.link(outside, root / "hard")

    assert SECRET in (await registry(root).execute("read_files", {"paths": ["hard"]})).text
    strict = await registry(root, refuse_hardlinks=True).execute("read_files", {"paths": ["hard"]})
    assert "hard link" in strict.text
    await registry(root).execute("write_file", {"path": "hard", "content": "new"})
    assert (SECRET, "new", 1) == (outside.read_text(), (root / "hard").read_text(), os.stat(outside).st_nlink)


@pytest.mark.spec("reliability:FS09")
async def test_only_regular_files_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(root / "pipe")
    monkeypatch.chdir(root)  # the whole path would be too long for a socket
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        result = await registry(root).execute("read_files", {"paths": ["pipe", "sock", "sub"]})
        errors = [entry["error"] for entry in result.data]  # type: ignore[union-attr,index]

    assert "named pipe" in errors[0]
    assert "sock" in errors[1]
    assert "use list_directory" in errors[2]
    assert (await registry(root).execute("write_file", {"path": "pipe", "content": "x"})).is_error


@pytest.mark.spec("reliability:FS09")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
async def test_another_file_system_is_entered_only_with_cross_mounts(
    elsewhere: Any,
) -> None:
    elsewhere.needs_the_whole_system()
    options: Any = {"allow_wide_root": True}
    path = "proc/1/status"

    refused_there = await ToolRegistry(file_tools("/", **options)).execute("read_files", {"paths": [path]})
    assert "another file system" in refused_there.text
    allowed = await ToolRegistry(file_tools("/", cross_mounts=True, **options)).execute("read_files", {"paths": [path]})
    assert "Umask" in allowed.data[0]["content"]  # type: ignore[index,call-overload]


@pytest.mark.spec("reliability:FS09")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("cross_mounts", [False, True])
def test_a_walk_enters_other_file_systems_only_with_cross_mounts(cross_mounts: bool) -> None:
    held = Root("/", PathPolicy(allow_wide_root=True, cross_mounts=cross_mounts))
    opened = held.open_folder("/")
    entries = walk(held.may_enter, opened.fd, (), WalkBudget(), lambda place, _: place in {("proc",), ("proc", "sys")})
    found = [place for place, _ in entries if place[0] == "proc"]
    os.close(opened.fd)
    held.close()

    assert (("proc",) in found, len(found) > 1) == (True, cross_mounts)


SECRETS = [
    ".env", ".ENV", ".env.local", "sub/.env", "key.pem", "id_rsa", ".netrc", ".npmrc", ".pypirc", ".aws/credentials", ".ssh/ident",
    ".git/config", ".GIT/Config", "sub/.git/credentials", ".ssh/deep/er/thing",
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FS21", "reliability:FP4")
@pytest.mark.parametrize("path", SECRETS)
async def test_secrets_are_not_read_listed_searched_or_written(root: Path, path: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SECRET)
    (root / "alias").symlink_to(path)
    os.link(file, root / "twin")
    tools = registry(root)

    for name in (path, "alias", "twin"):
        results = [
            await tools.execute("read_files", {"paths": [name]}),
            await tools.execute(
                "str_replace", {"path": name, "replacements": [{"old_string": "secret", "new_string": "x"}]}
            ),
            await tools.execute("write_file", {"path": name, "content": "x"})
            if name == path
            else ToolResult.error("may hold secrets"),
        ]
        assert [] == [r.text for r in results if SECRET in r.text]
        assert "may hold secrets" in results[0].text
    for prefer_python in (False, True) if path == ".env" else (True,):
        searching = ToolRegistry(search_tools(root, prefer_python=prefer_python))
        for flags in ("", "-l", "-c", "-g '.env*'", "-g '!nothing'") if path == ".env" else ("",):
            found = await searching.execute("code_search", {"pattern": "beside the root", "flags": flags})
            assert Path(path).name not in found.text
            assert "twin" not in found.text
        assert Path(path).name not in (await searching.execute("glob", {"pattern": "**/*"})).text
    shown = (await tools.execute("list_directory", {"path": str(Path(path).parent)})).text
    assert f'"{Path(path).name}"' not in shown
    assert SECRET == file.read_text()


@pytest.mark.spec("reliability:FS21")
async def test_a_secret_can_be_allowed_by_name(root: Path) -> None:
    (root / ".env.example").write_text("KEY=example")
    (root / ".env").write_text(SECRET)
    tools = registry(root, allow_secrets=[".env.example"])

    result = await tools.execute("read_files", {"paths": [".env.example", ".env"]})
    assert "KEY=example" == result.data[0]["content"]  # type: ignore[index,call-overload]
    assert "error" in result.data[1]  # type: ignore[index,operator]
    found = await tools.execute("code_search", {"pattern": "KEY|secret", "flags": "-g '.env*'"})
    assert SECRET not in found.text


PROTECTED = [
    ".git/hooks/pre-commit", ".GIT/x", ".stepengine/rules.json", "journals/run.jsonl", "cassettes/a.yaml", "site.pth", "conftest.py",
    "src/conftest.py", ".bashrc", ".github/workflows/ci.yml", ".GitHub/Workflows/ci.yml", ".vscode/tasks.json", ".mcp.json", ".gitmodules",
]  # fmt: skip


@pytest.mark.spec("reliability:FS22", "reliability:FP4", "reliability:PM27")
@pytest.mark.parametrize("path", PROTECTED)
async def test_protected_files_are_not_written_unless_allowed(root: Path, path: str) -> None:
    result = await registry(root).execute("write_file", {"path": path, "content": "x"})
    assert "protected" in result.text
    assert not (root / path).exists()

    allowed = await registry(root, allow_protected=[path]).execute("write_file", {"path": path, "content": "x"})
    assert ("ok", "x") == (allowed.status, (root / path).read_text())


@pytest.mark.spec("reliability:FS22")
async def test_conftest_below_tests_is_an_ordinary_file(root: Path) -> None:
    assert not (await registry(root).execute("write_file", {"path": "tests/unit/conftest.py", "content": "x"})).is_error


@pytest.mark.spec("reliability:FS26")
async def test_the_root_is_opened_once_and_held(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    tools = ToolRegistry(file_tools(link))
    root.rename(root.parent / "moved")
    (root.parent / "proj").mkdir()
    (root.parent / "proj" / "a.txt").write_text("another")

    assert "inside" in (await tools.execute("read_files", {"paths": ["a.txt"]})).text


@pytest.mark.spec("reliability:FS26")
def test_a_root_that_is_missing_or_too_wide_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Any
) -> None:
    monkeypatch.setenv("HOME", str(root / "sub"))
    for wide, said in (
        ("/", elsewhere.of_the_whole_system), (root / "sub", "allow_wide_root"), (root, "allow_wide_root"),
    ):  # fmt: skip
        with pytest.raises(DefinitionError, match=said):
            file_tools(wide)
        with pytest.raises(DefinitionError, match=said):
            search_tools(wide)
    file_tools(root, allow_wide_root=True)
    for missing in (root / "nothing", root / "a.txt"):
        with pytest.raises(DefinitionError, match="cannot be opened as a folder"):
            file_tools(missing)


@pytest.mark.spec("reliability:FP7")
@pytest.mark.parametrize("lacking", ["open", "mkdir"])
def test_if_walk_by_descriptor_is_not_possible_tools_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """
    As under Windows: nothing weaker is made in their place.
    """
    monkeypatch.setattr(os, "supports_dir_fd", os.supports_dir_fd - {getattr(os, lacking)})
    for tools in (file_tools, search_tools):
        with pytest.raises(DefinitionError, match="tools cannot be confined to a root"):
            tools(root)


components = st.sampled_from(
    [
        "..",
        ".",
        "",
        "a.txt",
        "sub",
        "out",
        "in",
        "deep",
        "..\x00",
        " ",
        "...",
        "~",
        "*",
        "/",
        "secret",
        "up",
        "abs",
        "new",
        "..\\",
    ]
)


@pytest.fixture(scope="module")
def tangled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Root]]:
    """
    A tree full of links, some of which lead out.
    """
    base = tmp_path_factory.mktemp("tangled")
    root = base / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (base / "secret").write_text(SECRET)
    for folder in (root, root / "sub", root / "sub" / "deep"):
        (folder / "a.txt").write_text("inside")
        (folder / "out").symlink_to("../../secret" if folder != root else "../secret")
        (folder / "up").symlink_to("..")
        (folder / "in").symlink_to("a.txt")
        (folder / "abs").symlink_to(root / "sub")
    held = Root(root, PathPolicy())
    yield root, held
    held.close()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FP1", "reliability:FP2", "reliability:R17")
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(components, min_size=1, max_size=6), st.sampled_from(["", "/", "{root}/", "{root}", "{root}/..", "//"]))
def test_any_path_that_opens_is_inside_the_root(tangled: tuple[Path, Root], parts: list[str], prefix: str) -> None:
    folder, held = tangled
    check_inside(folder, held, prefix.format(root=os.path.realpath(folder)) + "/".join(parts))


def check_inside(folder: Path, held: Root, path: str) -> None:
    """
    Reach a path in every way; whatever is reached is inside, and where it says that it is.
    """
    top = os.path.realpath(folder)
    for reach in (held.open_file, held.open_folder):
        try:
            opened = reach(path)
        except ToolError:
            continue
        real = os.readlink(f"/proc/self/fd/{opened.fd}") if Path("/proc/self/fd").exists() else top
        os.close(opened.fd)
        assert (real + "/").startswith(top + "/")
        assert real.removeprefix(top).strip("/") == "/".join(opened.parts)
    before = tree(folder)
    with suppress(ToolError), held.open_parent(path, create=True) as (fd, name):
        real = os.readlink(f"/proc/self/fd/{fd}") if Path("/proc/self/fd").exists() else top
        assert (real + "/").startswith(top + "/")
        assert name not in {"", ".", ".."}
        assert "/" not in name
        msg = "nothing is written, so the folders that were made go again"
        raise ToolError(msg)
    assert before == tree(folder)


def tree(folder: Path) -> list[str]:
    """
    Return the folders below a folder.
    """
    return sorted(place for place, _, _ in os.walk(folder))


SWAPPER = """
import os, sys, time
root, outside = sys.argv[1:]
os.chdir(root)
while True:
    for change in (lambda: os.rename("a", "kept"), lambda: os.symlink(outside, "a"), lambda: os.unlink("a"), lambda: os.rename("kept", "a")):
        change()
        end = time.perf_counter() + 0.0001
        while time.perf_counter() < end:
            pass
"""


@pytest.mark.spec("reliability:R17", "reliability:FP1")
@pytest.mark.deep
def test_swapping_folders_for_links_meanwhile_never_leads_out(root: Path) -> None:
    """
    A process swaps a folder in the path for a link to the outside while others read, list and write through it.
    """
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "f").write_text(SECRET)
    (outside / "beside").write_text(SECRET)
    (root / "a").mkdir()
    (root / "a" / "f").write_text("inside")
    held = Root(root, PathPolicy())
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + 120
    with subprocess.Popen([sys.executable, "-c", SWAPPER, str(root), str(outside)]) as swapper:
        try:
            while (seen["inside"] < 500 or seen["refused"] < 500) and time.monotonic() < deadline:
                seen[reading(held)] += 1
                seen[listing(held)] += 1
                seen[writing(held)] += 1
        finally:
            swapper.kill()
            held.close()

    assert (0, {"f", "beside"}, SECRET) == (seen["escaped"], set(os.listdir(outside)), (outside / "f").read_text())
    assert min(seen["inside"], seen["refused"]) >= 500, seen


def reading(held: Root) -> str:
    try:
        opened = held.open_file("a/f")
    except ToolError:
        return "refused"
    data = os.read(opened.fd, 100)
    os.close(opened.fd)
    return "inside" if data == b"inside" else "escaped"


def listing(held: Root) -> str:
    try:
        opened = held.open_folder("a")
    except ToolError:
        return "refused"
    names = os.listdir(opened.fd)
    os.close(opened.fd)
    return "escaped" if "beside" in names else "inside"


def writing(held: Root) -> str:
    try:
        with held.open_parent("a/g", create=False) as (folder, name):
            replace_file(folder, name, b"inside", stat_regular_file(folder, name, "a/g"))
    except (ToolError, FileNotFoundError):
        return "refused"
    return "inside"


@pytest.mark.spec("reliability:FP1")
async def test_a_missing_folder_that_appears_as_a_link_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        os.symlink(root.parent, name, dir_fd=dir_fd)
        real(name, mode, dir_fd=dir_fd)

    tools = registry(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        result = await tools.execute("write_file", {"path": "new/x", "content": "x"})

    assert "symbolic link" in result.text
    assert not (root.parent / "x").exists()


async def test_a_cancelled_call_stops_reading(root: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    result = await registry(root).execute(
        "read_files", {"paths": ["a.txt", "sub/b.txt"]}, ToolContext.for_test(cancelled=cancelled)
    )

    assert 1 == len(result.data)  # type: ignore[arg-type]
