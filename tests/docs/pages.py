"""
A page of the documentation as what it holds: blocks to paste, to edit, to run, and what running them shows.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import attrs
import pytest

from tests import forked_processes

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([\w{}]+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"`([^`\s]+\.\w+)`:$")
IN_FILE = re.compile(r"`([^`\s]+\.py)`")
CODE = re.compile(r"# leaves with (\d+)$")
PROGRAMS: dict[str, list[str]] = {
    "python": [],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider", "-p", "syrupy", "-p", "stepengine.pytest_plugin"],
    "stepengine": ["-m", "stepengine.cli"],
}
SECONDS = 300
KERNEL = ("data", "machine", "runtime", "journal", "engine", "durable")
"""The packages whose modules have a row on the pages of the machine and the engine; the page of features has the others."""


@attrs.frozen
class Block:
    """
    A block of a page: its language, its text, what stands before it since the last block, the lines of the page before it.
    """

    kind: str
    text: str
    before: str
    line: int

    @property
    def path(self) -> str | None:
        """
        The file that the block is; `None` for what is shown or run.
        """
        found = NAMED.search(self.before)
        return found[1] if found and self.kind != "diff" else None


def execute(block: Block, name: str, names: dict[str, object] | None = None) -> None:
    """
    Run a block of Python on its own, or with the *names* of those before it; a failure shows its line of the page.
    """
    # A reader's file does not begin with what this one imports from `__future__`.
    code = compile("\n" * block.line + block.text, str(ROOT / "docs" / name), "exec", dont_inherit=True)
    exec(code, {"__name__": "page"} if names is None else names)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    found, end = [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(2))
        found.append(Block(match[1], match[2], text[end : match.start()].strip(), line))
        end = match.end()
    assert 2 * len(found) == text.count("```"), "a fence opens or closes no block that was found"
    return found


class Project:
    """
    The folder of somebody who follows a page.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paste(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="utf-8")

    def edit(self, block: Block) -> None:
        (name,) = set(IN_FILE.findall(block.before.rpartition("\n\n")[2]))
        old, new = ["".join([f"{x[1:]}\n" for x in block.text.splitlines() if x[0] == sign]) for sign in "-+"]
        text = (self.folder / name).read_text(encoding="utf-8")
        assert 1 == text.count(old), (name, old)
        (self.folder / name).write_text(text.replace(old, new), encoding="utf-8")

    def run(self, line: str, **variables: str) -> str:
        """
        Run one line as it stands on the page, and return what it printed, without the marks of pytest.
        """
        expected = CODE.search(line)
        program, *arguments = shlex.split(line, comments=True)
        command = [sys.executable, *PROGRAMS[program], *arguments] if program in PROGRAMS else [program, *arguments]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        # Only the plugins that the page's own group of dependencies brings: loading others each time costs seconds.
        state = str(self.folder.with_name(f"{self.folder.name}-state"))  # what is trusted, of this page alone
        made = {
            "XDG_STATE_HOME": state,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        run = forked_processes.run if program == "stepengine" else subprocess.run
        done = run(
            command, check=False, capture_output=True, text=True, cwd=self.folder,
            env={**kept, **made, **variables}, timeout=SECONDS,
        )  # fmt: skip
        said = (done.stdout + done.stderr).replace(f"{self.folder}/", "")
        assert (int(expected[1]) if expected else 0) == done.returncode, f"{line}\n{said}"
        return re.sub(r"^E +", "", said, flags=re.MULTILINE)


def assert_shown(shown: str, said: str) -> None:
    """
    Every line that a page shows was printed, in that order; `...` stands for lines that it leaves out.
    """
    lines = iter(said.splitlines())
    for line in filter(lambda s: s.strip() != "...", shown.splitlines()):
        assert any(line.strip() in printed for printed in lines), f"not printed, or not in this order: {line!r}\n{said}"


def follow(
    name: str, folder: Path, *, pictures: int = 0, names: dict[str, object] | None = None,
    run: Callable[[str], str] | None = None, others: Mapping[str, Callable[[Block, str], object]] | None = None,
) -> None:  # fmt: skip
    """
    Do in a folder what a page says behind its *pictures*, in order, since commands look at what Python recorded.

    Python's names end with its block, unless all of it shares *names*. *run* runs shell lines. *others* maps a kind of block to the
    function that handles it, which also receives the last shell output.
    """
    project, said = Project(folder), ""
    for block in blocks_of(page(name))[pictures:]:
        if block.path is not None:
            project.paste(block.path, block.text)
        elif others is not None and block.kind in others:
            others[block.kind](block, said)
        elif block.kind == "python":
            execute(block, name, names)
        elif block.kind == "diff":
            project.edit(block)
        elif block.kind == "sh":
            said = "".join([(run or project.run)(line) for line in block.text.splitlines()])
        elif block.kind == "text":
            assert_shown(block.text, said)
        else:
            pytest.fail(f"nobody runs a block of {block.kind}")


@cache
def public_modules() -> tuple[str, ...]:
    """
    The modules whose names are public, as the snapshot of the surface lists them.
    """
    tree = ast.parse((ROOT / "tests" / "test_surface.py").read_text(encoding="utf-8"))
    (listed,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["MODULES"]
    ]
    assert isinstance(listed, ast.Dict)
    return tuple([ast.literal_eval(key) for key in listed.keys if key is not None])
