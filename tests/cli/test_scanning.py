"""
`check` and `scrub` in process: what they print, and exit codes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from stepengine import AgentDefinition, Engine, ToolCall
from stepengine.journal import FileJournal
from tests.cli.command import command, typed

KEY = "sk-ant-api03-" + "Zz9" * 12


def think(ctx):
    turn = yield ToolCall("think_deeply", {"thought": ctx.prompt})
    return turn.agent_state.message_history[0].text


@pytest.mark.spec("replay:K11", "reliability:R11")
def test_check_exits_with_1_on_a_secret_without_printing_it(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(f"# Notes\n\nkey: {KEY}\n")
    found, clean = (
        typed("journal", "check", tmp_path),
        typed("journal", "check", Path(__file__).parents[2] / "README.md"),
    )
    as_json = typed("journal", "check", tmp_path, "--json")
    ((leak,),) = [found["leaks"] for found in json.loads(as_json.stdout)]

    assert (1, 0, 1) == (found.exit_code, clean.exit_code, as_json.exit_code)
    assert f"{tmp_path / 'notes.md'}:3: provider-key ({len(KEY)} characters)\n" == found.stdout
    assert "" == clean.output
    assert KEY not in found.output + as_json.output
    assert 0 == typed("journal", "check", tmp_path, "--allow", leak["digest"]).exit_code
    assert 2 == typed("journal", "check", tmp_path / "nothing").exit_code


@pytest.mark.spec("reliability:SC08", "replay:K13")
def test_a_scrubbed_copy_holds_no_key_and_replays(tmp_path: Path) -> None:
    source, copy = tmp_path / "run.jsonl", tmp_path / "public.jsonl"
    with Engine([AgentDefinition("a", handle_steps=think)]) as engine:
        engine.run_sync("a", f"use {KEY}", journal=source)
        assert KEY.encode() in source.read_bytes()

        command("journal", "scrub", source, copy)
        assert KEY.encode() not in copy.read_bytes()
        assert "use <redacted:provider-key>" == engine.replay_sync(FileJournal(copy, redact="all")).unwrap()

    assert "exists already" in command("journal", "scrub", source, copy, code=2).output
    (tmp_path / "empty.jsonl").write_text("")
    assert "holds no run" in typed("journal", "scrub", tmp_path / "empty.jsonl", tmp_path / "c.jsonl").output


@pytest.mark.spec("replay:K11")
def test_check_takes_a_folder_of_journals_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "shop.db").write_bytes(b"no database of stepengine")
    with Engine([AgentDefinition("a", handle_steps=think)]) as engine:
        engine.run_sync("a", "use it", journal=tmp_path / "run.jsonl")
        engine.run_sync("a", "use it", journal=f"{tmp_path}/runs.db#one")
        good = typed("journal", "check", tmp_path)
        engine.run_sync("a", f"use {KEY}", journal=tmp_path / "leaking.jsonl")
    whole = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[5:])

    bad = typed("journal", "check", tmp_path)
    (found,) = json.loads(typed("journal", "check", tmp_path / "leaking.jsonl", "--json").stdout)
    allowed = typed(
        "journal", "check", tmp_path / "leaking.jsonl", *[f"--allow={leak['digest']}" for leak in found["leaks"]]
    )

    assert (0, ["run.jsonl", "runs.db"]) == (good.exit_code, names(good))
    assert (1, ["cut.jsonl", "leaking.jsonl", "run.jsonl", "runs.db"]) == (bad.exit_code, names(bad))
    assert ["BAD", "BAD", "ok", "ok"] == [line.split()[0] for line in bad.stdout.splitlines() if line[0] in "Bo"]
    assert "looks like a secret: record " in bad.stdout
    assert KEY not in bad.output
    assert "remove them, and replace keys that were shared" in bad.stderr
    assert (0, "ok") == (allowed.exit_code, allowed.stdout[:2])


def names(result: Result) -> list[str]:
    """
    Return the names of the journals that were checked.
    """
    return [
        Path(line[4:].partition("  ")[0]).name for line in result.stdout.splitlines() if line.startswith(("ok", "BAD"))
    ]


@pytest.mark.parametrize("option", [["--seen", "0" * 64], ["--allow-unsigned"]])
def test_options_about_signatures_need_a_key(tmp_path: Path, option: list[str]) -> None:
    said = typed("journal", "check", tmp_path, *option)

    assert (2, True) == (said.exit_code, "need --key PUB; add it" in said.stderr)
