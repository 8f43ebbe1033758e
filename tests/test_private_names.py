"""The check for private names of dependencies, SQL on their tables, and generated code: what it finds, and what its allow list must say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "private_names.py"

PLANTED = {
    "from dbos._context import current_owner_xid": [("private name", "dbos._context.current_owner_xid")],
    "def clear(client):\n    client._custom_headers = {}": [("private name", "_custom_headers")],
    "class Ours:\n    def __init__(self, inner):\n        self._inner = inner\n\n    def f(self):\n        return self._inner._x": [
        ("private name", "_x")
    ],
    "Q = 'select status from dbos.workflow_status'": [("foreign table", "dbos.workflow_status")],
    "def q(table):\n    return f'update dbos.{table} set x = 1'": [("foreign table", "dbos.")],
    "def load(text):\n    return eval(compile(text, '<made>', 'eval'))": [
        ("generated code", "eval"),
        ("generated code", "compile"),
    ],
    "TEXT = 'exec(input())'": [("generated code", "exec")],
}
CLEAN = {
    "names of our own": "class Ours:\n    def __init__(self):\n        self._x = 1\n\n\ndef f(ours):\n    return ours._x",
    "an import of ours": "from stepengine.data import _levels",
    "documented names": "def f(pair):\n    return pair._asdict()",
    "tables of our own": "Q = 'select run from stepengine.served'",
    "a docstring": '"""Rows come from dbos.workflow_status, never by exec(text)."""',
}


@pytest.fixture
def check() -> ModuleType:
    return load_script(SCRIPT)


def found_in(check: ModuleType, tmp_path: Path, text: str, part: str = "durable") -> list[Any]:
    file = tmp_path / "stepengine" / part / "planted.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found: list[Any] = check.find(tmp_path / "stepengine")
    return found


@pytest.mark.parametrize("text", list(PLANTED))
def test_planted_private_names_and_generated_code_are_found(check: ModuleType, tmp_path: Path, text: str) -> None:
    found = found_in(check, tmp_path, text)

    assert PLANTED[text] == [(finding.kind, finding.name) for finding in found]
    assert {"stepengine/durable/planted.py"} == {finding.file for finding in found}


@pytest.mark.parametrize("what", list(CLEAN))
def test_our_own_and_public_names_are_not_reported(check: ModuleType, tmp_path: Path, what: str) -> None:
    assert [] == found_in(check, tmp_path, CLEAN[what])


ENTRY = {
    "file": "stepengine/durable/planted.py",
    "kind": "private name",
    "names": ["dbos._sys_db"],
    "promise": "durable:U32",
    "test": "tests/test_private_names.py::test_a_complete_allow_list_entry_permits_its_names",
    "why": "because",
}


def problems(check: ModuleType, tmp_path: Path, **changed: object) -> list[str]:
    found: list[str] = check.problems_of(
        found_in(check, tmp_path, "from dbos import _sys_db"), [{**ENTRY, **changed}], ROOT
    )
    return found


def test_a_complete_allow_list_entry_permits_its_names(check: ModuleType, tmp_path: Path) -> None:
    assert [] == problems(check, tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"file": "stepengine/durable/other.py"}, "planted.py:1: private name 'dbos._sys_db' is not in the allow list"),
        ({"names": ["dbos._sys_db", "dbos._core"]}, "'dbos._core' is not used any more"),
        ({"promise": "nowhere:U1"}, "'nowhere:U1' is no row"),
        ({"test": "tests/test_private_names.py::test_nothing"}, "test_nothing' does not exist"),
        ({"why": ""}, "says why"),
    ],
)
def test_an_incomplete_allow_list_entry_is_reported(
    check: ModuleType, tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    assert any(said in problem for problem in problems(check, tmp_path, **changed))


@pytest.mark.deep
def test_the_package_uses_only_allow_listed_names(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == check.main(ROOT / "stepengine", SCRIPT.with_suffix(".toml")), capsys.readouterr().out
