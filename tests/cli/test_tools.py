"""
`stepengine agents tools`: a line for every bundled tool, and what one takes and gives.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.tools.bundled import document_tools
from stepengine.tools.bundled.names import BUNDLED


def typed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["agents", "tools", *arguments])


def test_every_bundled_tool_has_a_line_of_its_own() -> None:
    shown = typed()

    assert 0 == shown.exit_code
    assert list(BUNDLED) == [line.split()[0] for line in shown.output.splitlines()]


@pytest.mark.parametrize("name", BUNDLED)
def test_tool_page_shows_parameters_result_keys_and_a_call(name: str) -> None:
    (one,) = [each for each in document_tools() if each.name == name]
    shown = typed(name).output

    said = [*[p.name for p in one.parameters], *[key.name for form in one.forms for key in form.keys]]
    assert [] == [word for word in said if not re.search(rf"^ +{word}\b", shown, re.MULTILINE)]
    assert f"yield from call({name}" in shown
    for line in re.findall(r"^  (from stepengine.* import .*)$", shown, re.MULTILINE):
        exec(line, names := {})
        assert names.keys() & {"call", name}
    assert f"from stepengine.tools.bundled import {name}\n" in shown
    assert all(part in shown for part in (one.text, one.errors, one.limits, one.maker))


def test_tools_as_json_has_the_same_content() -> None:
    (search,) = json.loads(typed("code_search", "--json").output)
    (matches,) = [key for key in search["gives"][0]["keys"] if key["name"] == "matches"]

    assert list(BUNDLED) == [one["name"] for one in json.loads(typed("--json").output)]
    assert ["path", "line", "count"] == [key["name"] for key in matches["of"]["keys"]]
    assert [True, False, False] == [key["always"] for key in matches["of"]["keys"]]


@pytest.mark.parametrize(
    ("name", "hint"), [("read-file", "did you mean 'read_files'?"), ("zzz", "`stepengine agents tools`")]
)
def test_unknown_tool_suggests_the_nearest_one(name: str, hint: str) -> None:
    shown = typed(name)

    assert 2 == shown.exit_code
    assert hint in shown.stderr
