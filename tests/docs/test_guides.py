"""
Short guides and explanations are so: their Python runs, each block on its own, in an empty folder.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from stepengine import Tool
from stepengine.data.result_cuts import RESULT_CHARS
from stepengine.data.tools import TOOL_SECONDS
from stepengine.tools.definition import ToolOptions

from .pages import ROOT, blocks_of, execute, page

NAMES = (
    "the-machine",
    "the-engine",
    "promises",
    "words",
    "hooks",
    "system-prompt",
    "first-questions",
    "install",
    "human-in-the-loop",
    "streaming",
    "tools",
    "programs",
    "untrusted-agents",
    "schedules",
    "waiting",
    "coming-from/index",
    "coming-from/codebuff",
    "coming-from/bu-agent-sdk",
    "coming-from/pydantic-ai",
    "coming-from/smolagents",
    "coming-from/openai-agents",
    "coming-from/langgraph",
    "coming-from/deepagents",
    "coming-from/adk",
    "coming-from/temporal",
    "coming-from/designs",
)
WORKERS = pytest.mark.leaks_allowed("the workers of programs belong to the process, and wait for its next program")
BLOCKS = [(name, number, block) for name in NAMES for number, block in enumerate(blocks_of(page(f"{name}.md")))]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param(name, block, marks=[WORKERS] if any(word in block.text for word in ("code_mode", "sandboxed", "load_source")) else [])
        for name, _, block in BLOCKS
        if block.kind == "python"
    ],
    ids=[f"{name} {number}" for name, number, block in BLOCKS if block.kind == "python"],
)  # fmt: skip
def test_every_block_runs(name: str, block: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    execute(block, f"{name}.md")  # type: ignore[arg-type]


def test_no_kind_of_block_is_passed_over() -> None:
    # What pip and PyInstaller are told, which .ci/deep does with the wheel. A unit of systemd, whose command is tested where it is implemented; what `show` prints of a program, tested with it; commands and
    # a setting that tests/cli/test_sandboxed.py runs.
    shown = {"install": {"sh"}, "waiting": {"ini"}, "programs": {"text"}, "untrusted-agents": {"text", "toml"}}

    for name, _, block in BLOCKS:
        assert block.kind in {"python", "{toctree}"} | shown.get(name, set()), name


def test_the_table_of_tool_options_is_complete_with_defaults() -> None:
    """
    So does the docstring next to it; the guide has some of them.
    """
    rows = re.findall(
        r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", page("reference/options.md").partition("| option |")[2], re.MULTILINE
    )
    told = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    explained = set(re.findall(r"^    (\w+): ", inspect.getdoc(ToolOptions) or "", re.MULTILINE))
    usual = Tool("usual", "As it is by default.", {"type": "object"}, print)

    assert {*ToolOptions.__annotations__, "name", "description"} == set(told)
    assert set(ToolOptions.__annotations__) == explained
    for name, default in told.items():
        if re.fullmatch(r"`(?:True|False)`|\d+", default) and name not in ("idempotent", "timeout"):
            found = getattr(usual.spec, name, getattr(usual, name, None))

            assert default.strip("`") == str(found), name
    assert str(TOOL_SECONDS).removesuffix(".0") == told["timeout"]
    some = re.findall(r"`(\w+)=", page("tools.md").partition("| option |")[2].partition("\n\n")[0])
    assert some
    assert set(some) <= set(told)
    assert f"`timeout={told['timeout']}`" in page("tools.md")
    assert f"{RESULT_CHARS:,} characters" in page("tools.md")


def test_every_row_belongs_to_a_table() -> None:
    """
    A blank line inside of a table makes plain text of the rows below it.
    """
    loose = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        shown = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        blocks = [block.splitlines() for block in shown.split("\n\n") if block.startswith("|")]
        loose += [f"{path.name}: {block[0]}" for block in blocks if not re.fullmatch(r"[|:\- ]+", [*block, ""][1])]

    assert [] == loose
