"""
`docs/testing-your-agent.md` is so: its files are pasted into an empty folder, and its commands are run there in order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from .pages import Project, blocks_of, execute, page

PAGE = page("testing-your-agent.md")
BLOCKS = blocks_of(PAGE)

pytestmark = pytest.mark.deep


@pytest.mark.spec("requirements:P13", "replay:Y3", "evaluation:JG99")
def test_following_the_page_records_and_replays(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for block in BLOCKS:
        if block.path is not None:
            project.paste(block.path, block.text)
        elif block.kind == "sh":
            # `stepengine run` asks for a key before it knows that no model is needed; the page says so.
            key = {"ANTHROPIC_API_KEY": "none"} if "stepengine run" in block.text else {}
            for line in block.text.splitlines():
                project.run(line, **key)

    journal = tmp_path / "tests/journals/test_triage/test_a_run.jsonl"
    assert "customer-4711" not in journal.read_text()
    assert "in one line" in (tmp_path / "tests/__snapshots__/test_triage/test_a_run.run.md").read_text()
    assert (tmp_path / "tests/cassettes/test_triage/test_the_wire.yaml").exists()

    # "With a real model, leave `models=` out": then nothing but the journal answers, without a key.
    file = tmp_path / "tests/test_triage.py"
    file.write_text(file.read_text().replace(", models=ScriptedModel(script)", ""))
    project.run("pytest tests/test_triage.py::test_a_run")


def test_blocks_without_a_file_run_on_their_own() -> None:
    alone = [b for b in BLOCKS if b.kind == "python" and b.path is None]

    assert alone
    for block in alone:
        execute(block, "testing-your-agent.md")


def test_the_table_of_modes_is_complete() -> None:
    from stepengine.testing.recordings import MODES

    table = PAGE.partition("| mode | effect |")[2].partition("\n\n")[0]

    assert set(MODES) == set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_the_tables_of_options_settings_and_marks_are_complete() -> None:
    from stepengine import pytest_plugin
    from stepengine.pytest_plugin.settings import MARK_ARGUMENTS

    class Parser:
        """
        Notes what the plugin adds.
        """

        def __init__(self) -> None:
            self.options: dict[str, tuple[str, ...]] = {}
            self.settings: set[str] = set()

        def getgroup(self, *_: str) -> Parser:
            return self

        def addoption(self, name: str, **given: Any) -> None:
            self.options[name] = given.get("choices", ())

        def addini(self, name: str, *_: Any, **__: Any) -> None:
            self.settings.add(name)

    parser = Parser()
    pytest_plugin.pytest_addoption(parser)  # type: ignore[arg-type]
    section = page("reference/pytest.md")
    options, settings, marks = [
        part.partition("\n\n")[0] for part in re.split(r"^\|---\|---\|$", section, flags=re.MULTILINE)[1:]
    ]
    rows = dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.*) \|$", options, re.MULTILINE))

    assert parser.options.keys() == rows.keys()
    assert {"stepengine-record"} == {
        name.strip("-")
        for name, words in parser.options.items()
        if not all(f"`{word}`" in rows[name] for word in words)
    }
    assert parser.settings == set(re.findall(r"`(stepengine_\w+)`", settings))
    assert MARK_ARGUMENTS == set(re.findall(r"^\| `(\w+)=", marks, re.MULTILINE))
