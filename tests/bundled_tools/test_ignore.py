"""
`.gitignore` files: read as git reads them, and harmless whoever wrote them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools
from stepengine.tools.bundled.search.ignore import Ignore
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from stepengine.workspace.walk import WalkBudget

# fmt: off
PIECES = (
    "a", "b", "*", "**", "***", "?", "/", "!", "#", "é", " ", "\t", ".", "-", "{", "+", "(", "^", "$", "[", "]",
    "[a]", "[!a]", "[^b]", "[a-c]", "[]a]", "[a-]", "[b-a]", "[!b-a]", "[é]", "[a\\]]", "[\\a-c]", "[:]", "[/]",
    "[[:alpha:]]", "[[:punct:]]", "[[:space:]]", "[[:none:]]", "[![:upper:]b]", "\\a", "\\*", "\\ ", "\\", "/**/", "**/", "/**",
)
NAMES = (
    "a", "b", "ab", "abc", "aXb", "é", "*", "#", "!a", "[", "]", "a b", "a ", "-", "{", "\\", "+", "^", ".a", "a.b", "\t", " ",
)
# fmt: on
EARLIER_GIT = re.compile(r"(^|\n)!*/?[^*?\[\\\n]*[^*?\[\\\n/]\*\*+(/|$|\n)|\*\*\\/|\\/")
"""Git before 2.53 took the stars of `a**/b` for `**` against its manual; a backslash before a slash has no use."""


GIT = shutil.which("git")


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "init", "-q", folder], check=True)
        (Path(folder) / "a").mkdir()
        yield Path(folder)


def ignored_by_git(repository: Path, paths: list[str]) -> list[str]:
    command = ["git", "-C", str(repository), "check-ignore", "--no-index", "-z", "--stdin"]
    given_paths = "".join(f"{path}\0" for path in paths).encode()
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(command, input=given_paths, capture_output=True, check=False, env=environment)
    assert done.returncode in (0, 1), done.stderr
    return [name.decode() for name in done.stdout.split(b"\0")[:-1]]


def ignored_by_us(repository: Path, paths: list[str]) -> list[str]:
    root = Root(repository, PathPolicy())
    try:
        ignore = Ignore(root, WalkBudget())
        return [path for path in paths if ignore.is_path_ignored(tuple(path.split("/")))]
    finally:
        root.close()


line = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
path = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC33", "reliability:RS12")
@pytest.mark.skipif(GIT is None, reason="asks git what it ignores")
@settings(max_examples=100)
@given(st.lists(line, max_size=4), st.lists(line, max_size=2), st.lists(path, min_size=30, max_size=30, unique=True))
def test_ignored_paths_are_those_that_git_ignores(
    repository: Path, top: list[str], inner: list[str], paths: list[str]
) -> None:
    assume(not EARLIER_GIT.search("\n".join([*top, *inner])))
    (repository / ".gitignore").write_text("\ufeff" + "\r\n".join(top) if len(top) > 2 else "\n".join(top))
    (repository / "a/.gitignore").write_text("\n".join(inner))

    assert ignored_by_git(repository, paths) == ignored_by_us(repository, paths)


def hostile(lines: int) -> dict[str, str]:
    """Return the texts of hostile files, the long ones with so many lines."""
    return {
        "stars": "*a" * 8 + "*b",
        "stars in a row of folders": "/".join(["*a*a*a*a*a*a*b"] * 3),
        "folders at any depth": "**/a/" * 90 + "b",
        "many lines": "\n".join(f"{'*a' * 90}*b{n}" for n in range(lines)),
        "long runs": "\n".join(f"*{'a' * 120}b*{'a' * 60}{n}" for n in range(lines)),
        "classes": "\n".join(["*[!b]" * 120 + "*b"] * (lines // 40)),
    }


NAMES_OF_HOSTILE = [*hostile(0)]
CALLS: dict[str, dict[str, Any]] = {
    "glob": {"pattern": "**/*"},
    "code_search": {"pattern": "x"},
    "find_files": {"prompt": "aaa"},
    "read_subtree": {},
}


async def seconds_under(tmp_path: Path, content: str, prefer_python: bool) -> dict[str, float]:
    """Return how long each tool takes under a hostile file, seeing that each one answers."""
    (tmp_path / ".gitignore").write_text(content + "\n")
    deep = tmp_path / "/".join(["a"] * 30)
    deep.mkdir(parents=True)
    for place in (tmp_path, deep):
        (place / ("a" * 200)).write_text("x")
    registry = ToolRegistry([*file_tools(tmp_path), *search_tools(tmp_path, prefer_python=prefer_python)])
    taken = {}
    for tool, arguments in CALLS.items():
        before = time.process_time()
        result = await registry.execute(tool, arguments)
        taken[tool] = time.process_time() - before
        assert not result.is_error
    return taken


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:RS12", "reliability:R23")
@pytest.mark.parametrize("name", NAMES_OF_HOSTILE)
async def test_a_hostile_gitignore_breaks_no_tool(tmp_path: Path, name: str) -> None:
    assert CALLS.keys() == (await seconds_under(tmp_path, hostile(200)[name], prefer_python=True)).keys()


@pytest.mark.speed
@pytest.mark.spec("reliability:RS12", "reliability:R23")
@pytest.mark.parametrize("prefer_python", [False, True])
@pytest.mark.parametrize("name", NAMES_OF_HOSTILE)
async def test_a_hostile_gitignore_freezes_no_tool(tmp_path: Path, name: str, prefer_python: bool) -> None:
    taken = await seconds_under(tmp_path, hostile(2_000)[name], prefer_python)

    assert max(taken.values()) < 2.0, taken


async def test_an_exhausted_ignore_budget_hides_everything(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("secret\n")
    root = Root(tmp_path, PathPolicy())
    spent = Ignore(root, WalkBudget(seconds=-1))

    assert spent.is_ignored(("secret",), is_folder=False)
    assert spent.is_ignored(("anything",), is_folder=False)
    root.close()
