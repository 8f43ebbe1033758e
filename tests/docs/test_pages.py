"""
Pages of which every block runs and shows what it says, in one folder and in order; and their small tables.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stepengine import evaluation
from stepengine.cli.commands.undo import undo
from stepengine.evaluation.evaluation_files import MAKERS
from stepengine.journal import modes
from stepengine.journal.records import Blob, Head, Input, Intent, Result
from stepengine.permissions.policy import MODES
from stepengine.tools.bundled import memory
from stepengine.workspace import repository, skills

from .pages import follow, page

SHARED = {"__name__": "page"}
"""All of Python is one module: each block uses the names of those before."""


@pytest.mark.parametrize(
    ("name", "names", "made"),
    [
        pytest.param("coming-from/inspect.md", None, {}, marks=pytest.mark.deep),
        pytest.param(
            "evaluations.md",
            None,
            {"first/report.html": ["report.html"], "first/cases/ann/new/1.jsonl": ["1.jsonl"]},
            marks=[pytest.mark.deep, pytest.mark.spec("evaluation:JG60", "evaluation:JG67")],
        ),
        pytest.param("files-and-undo.md", None, {}, marks=pytest.mark.deep),
        pytest.param(
            "improving.md",
            None,
            {"better/report.html": ["report.html"], "same/improvement.diff": []},
            marks=[pytest.mark.deep, pytest.mark.spec("evaluation:JG140", "evaluation:JG144", "evaluation:JG146")],
        ),
        pytest.param(
            "journals.md",
            SHARED,
            {},
            marks=[pytest.mark.deep, pytest.mark.spec("replay:J1", "replay:J34", "requirements:P13")],
        ),
        pytest.param(
            "layered-agents.md",
            None,
            {},
            marks=[pytest.mark.deep, pytest.mark.spec("requirements:P13", "generator-contract:L3", "requirements:J13")],
        ),
        pytest.param(
            "permissions.md",
            SHARED,
            {},
            marks=[pytest.mark.deep, pytest.mark.spec("requirements:M11", "requirements:M15", "requirements:M18")],
        ),
        pytest.param("prompt-injection.md", SHARED, {}, marks=pytest.mark.spec("provenance:PV7", "provenance:PV12")),
        pytest.param("repositories.md", None, {}, marks=pytest.mark.spec("requirements:X60", "interfaces:IF88")),
        pytest.param(
            "sessions.md",
            None,
            {"*": ["chats.db", "chats.turns.db", "sessions"]},
            marks=pytest.mark.spec(
                "requirements:L1",
                "requirements:L4",
                "requirements:L2",
                "requirements:P13",
                "requirements:K3",
            ),
        ),
        pytest.param(
            "viewing-runs.md",
            None,
            {"*.html": ["before.html", "both.html"]},
            marks=[pytest.mark.deep, pytest.mark.spec("evaluation:JG40", "evaluation:JG49")],
        ),
    ],
)
def test_every_block_runs_and_shows_what_it_says(
    name: str, names: Any, made: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follow(name, tmp_path, names=names and {**names})

    for pattern, expected in made.items():
        found = sorted(path.name for path in tmp_path.glob(pattern) if not path.name.endswith(("-wal", "-shm")))
        assert expected == found, pattern


def test_the_options_of_the_table_are_those_of_the_commands() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", page("files-and-undo.md"), re.MULTILINE)

    assert ["--dry-run", "--partial", "--trust-journal", "--at", "--moved"] == rows
    assert "--dry-run" in (undo.__doc__ or "")


def test_the_modes_are_all_there() -> None:
    rows = page("permissions.md").partition("| mode |")[2].partition("\n\n")[0]

    assert list(MODES) == re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)


def test_the_tables_have_every_kind_of_record_and_every_mode() -> None:
    listed = re.findall(r"^\| `?(\w+)`? \|", page("journals.md"), re.MULTILINE)

    assert {kind.kind for kind in (Head, Intent, Result, Input, Blob)} | {
        kind.name
        for kind in vars(modes).values()
        if isinstance(kind, type) and issubclass(kind, modes.Mode) and kind.name
    } <= set(listed)


@pytest.mark.spec("evaluation:JG61")
def test_the_table_has_every_check() -> None:
    assert [] == [name for name in MAKERS if f"`{name}(" not in page("evaluations.md")]
    assert {*MAKERS} <= {*evaluation.__all__}


def test_the_numbers_are_those_of_the_code() -> None:
    kib = 1024
    said = {
        f"cuts each file at {repository.FILE_BYTES // kib} KiB and all files together at {repository.ALL_BYTES // kib} KiB",
        f"at most {repository.DEEPER_FILES} paths",
        f"at most {repository.CHANGED_FILES} changed files",
        f"front matter exceeds {skills.HEAD_BYTES // kib} KiB",
        f"{memory.NOTE_CHARS:,} characters per note, and {memory.MAX_NOTES} notes and {memory.FILE_BYTES // kib} KiB per file",
        ", ".join([f"`{place}`" for place in skills.PLACES]),
        f"a whole word or tag scores {memory.WHOLE_WEIGHT} and a prefix {memory.PREFIX}",
    }
    text = " ".join(page("repositories.md").split())

    assert set() == {words for words in said if words not in text}
