"""
Short guides and explanations are so: their Python runs, each block on its own, in an empty folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import blocks_of, execute, page

NAMES = (
    "why-generators",
    "the-machine",
    "determinism",
    "promises",
    "hooks",
    "dependencies",
    "tools-with-images",
    "stateless-bot",
    "coming-from/index",
    "coming-from/codebuff",
    "coming-from/bu-agent-sdk",
    "coming-from/pydantic-ai",
    "coming-from/langgraph",
)
BLOCKS = [(name, number, block) for name in NAMES for number, block in enumerate(blocks_of(page(f"{name}.md")))]


@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize(
    ("name", "block"), [(name, block) for name, _, block in BLOCKS if block.kind == "python"],
    ids=[f"{name} {number}" for name, number, block in BLOCKS if block.kind == "python"],
)  # fmt: skip
def test_every_block_runs(name: str, block: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    execute(block, f"{name}.md")  # type: ignore[arg-type]


def test_no_kind_of_block_is_passed_over() -> None:
    assert {"python", "{toctree}"} >= {block.kind for _, _, block in BLOCKS}
