"""
`stepengine tokens`: who may use a server of runs.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli.app import app
from stepengine.server import Caller, Tokens
from stepengine.workspace.environment import MARKER


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def typed(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["tokens", *arguments, "--file", str(file)])


@pytest.mark.spec("studio:SV4")
def test_added_token_is_printed_once_and_valid(file: Path) -> None:
    made = typed(file, "add", "ci", "--scopes", "read, run", "--expires", "30d", "--owner", "anna")
    token = made.stdout.strip()
    days = Tokens.open(file).list_tokens()[0].expires - datetime.now(UTC)

    assert (0, 1) == (made.exit_code, len(made.stdout.splitlines()))
    assert "it is not shown again" in made.stderr
    assert Caller("anna", ["read", "run"]) == Tokens.open(file).find_caller(token)
    assert timedelta(days=29, hours=23) < days <= timedelta(days=30)
    assert token not in typed(file, "list").output + typed(file, "list", "--json").output


def test_token_list_shows_owner_scopes_and_expiry(file: Path) -> None:
    Tokens.open(file, clock=lambda: datetime(2020, 1, 1, tzinfo=UTC)).add(
        "old", ["admin"], expires=datetime(2020, 2, 1, tzinfo=UTC)
    )
    typed(file, "add", "laptop", "--owner", "anna")
    told = json.loads(typed(file, "list", "--json").stdout)

    assert (
        "old: admin; expired 2020-02-01 00:00 UTC\nlaptop, of anna: read, run, answer; until revoked\n"
        == typed(file, "list").stdout
    )
    assert [("old", "old", ["admin"]), ("laptop", "anna", ["read", "run", "answer"])] == [
        (one["name"], one["owner"], one["scopes"]) for one in told
    ]
    assert ["2020-02-01T00:00:00+00:00", None] == [one["expires"] for one in told]


def test_revoked_token_is_invalid(file: Path) -> None:
    token = typed(file, "add", "ci").stdout.strip()

    assert 0 == typed(file, "revoke", "ci").exit_code
    assert Tokens.open(file).find_caller(token) is None
    assert 2 == typed(file, "revoke", "ci").exit_code
    assert (0, "") == (typed(file, "list").exit_code, typed(file, "list").stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "ci", "--scopes", "root"], "valid scopes: read, run, answer, debug, metrics and 1 more"),
        (["add", "ci", "--scopes", ","], "unknown scope"),
        (["add", "ci", "--scopes", ""], "the value is empty"),
        (["add", "ci", "--expires", "soon"], "30d, 12h, 90m and 2w are valid"),
        (["add", "ci", "--expires", "0d"], "30d, 12h, 90m and 2w are valid"),
        (["add", "../ci"], "letters, digits"),
        (["list"], "tokens add` creates it"),
        (["revoke", "ci"], "tokens add` creates it"),
    ],
)
def test_invalid_token_command_is_one_error_line(file: Path, arguments: list[str], said: str) -> None:
    done = typed(file, *arguments)

    assert (2, "") == (done.exit_code, done.stdout)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not file.exists()


@pytest.mark.spec("studio:SV4")
@pytest.mark.parametrize("words", [["add", "me"], ["revoke", "anna"]])
def test_token_changes_are_rejected_inside_a_tool(
    file: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    Tokens.open(file).add("anna", ["read"])
    before = file.read_bytes()
    monkeypatch.setenv(MARKER, "1")
    done = typed(file, *words)

    assert (2, "") == (done.exit_code, done.stdout)
    assert before == file.read_bytes()
