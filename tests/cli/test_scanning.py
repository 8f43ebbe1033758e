"""
`scan` and `scrub` in process: what they print, and exit codes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine import AgentDefinition, Engine, ToolCall
from stepengine.cli.app import app
from stepengine.journal import FileJournal

KEY = "sk-ant-api03-" + "Zz9" * 12


def typed(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def think(ctx):
    turn = yield ToolCall("think_deeply", {"thought": ctx.prompt})
    return turn.agent_state.message_history[0].text


@pytest.mark.spec("replay:K11", "reliability:R11")
def test_a_scan_leaves_with_1_where_it_found_something_and_prints_no_value(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(f"# Notes\n\nkey: {KEY}\n")
    found, clean = typed("scan", tmp_path), typed("scan", Path(__file__).parents[2] / "README.md")
    as_json = typed("scan", tmp_path, "--json")
    (leak,) = json.loads(as_json.stdout)

    assert (1, 0, 1) == (found.exit_code, clean.exit_code, as_json.exit_code)
    assert f"{tmp_path / 'notes.md'}:3: provider-key ({len(KEY)} characters)\n" == found.stdout
    assert "" == clean.output
    assert KEY not in found.output + as_json.output
    assert 0 == typed("scan", tmp_path, "--allow", leak["digest"]).exit_code
    assert 2 == typed("scan", tmp_path / "nothing").exit_code


@pytest.mark.spec("reliability:SC08", "replay:K13")
def test_a_scrubbed_copy_holds_no_key_and_replays(tmp_path: Path) -> None:
    source, copy = tmp_path / "run.jsonl", tmp_path / "public.jsonl"
    with Engine([AgentDefinition("a", handle_steps=think)]) as engine:
        engine.run_sync("a", f"use {KEY}", journal=source)
        assert KEY.encode() in source.read_bytes()

        made = typed("scrub", source, copy)
        assert 0 == made.exit_code, made.output
        assert KEY.encode() not in copy.read_bytes()
        assert "use <redacted:provider-key>" == engine.replay_sync(FileJournal(copy, redact="all")).unwrap()

    again = typed("scrub", source, copy)
    assert 2 == again.exit_code
    assert "exists already" in again.output
    (tmp_path / "empty.jsonl").write_text("")
    assert "holds no run" in typed("scrub", tmp_path / "empty.jsonl", tmp_path / "c.jsonl").output
