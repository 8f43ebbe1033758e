"""``stepengine run --web``: the web is read when that is allowed, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.cli.options import Options
from stepengine.cli.perform import format_shared_options
from tests.cli.command import command

AGENT = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    turn = yield ToolCall("read_url", {"url": "http://127.0.0.1:1/"})
    again = yield ToolCall("web_search", {"query": "x"})
    return [turn.tool_result.text, again.tool_result.text]

agent = AgentDefinition("reader", tools=["read_url", "web_search", "read_docs"], handle_steps=handle_steps)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(AGENT)
    return tmp_path


@pytest.mark.spec("remote:WP6", "generator-contract:T35")
def test_the_web_is_not_reached_without_the_flag(folder: Path) -> None:
    done = command("run", "reader.py", code=2)

    assert (
        "agent 'reader' reaches the web with read_docs, read_url, web_search; allow that with --web URL" in done.stderr
    )


@pytest.mark.spec("remote:NW01")
def test_web_flag_searches_its_instance_and_blocks_private_addresses(folder: Path) -> None:
    done = command("run", "reader.py", "--web", "http://127.0.0.1:1", "--journal", "run.jsonl")

    assert "is not fetched" in done.stdout
    assert "the search at 127.0.0.1:1 failed" in done.stdout
    command("replay", "run.jsonl", "--agent", "reader.py")


def test_invalid_web_address_is_rejected(folder: Path) -> None:
    assert (
        "--web: 'localhost:8080' is not the address of a search service"
        in command("run", "reader.py", "--web", "localhost:8080", code=2).stderr
    )


def test_resume_options_repeat_the_web_flag() -> None:
    assert ["--web", "'http://a b'"] == format_shared_options(Options(agent="x", web="http://a b"), "x")
