"""
``stepengine demo``: works without network and keys, shows what really happened, and can be recorded again.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cassettes import record_demo
from stepengine.cli.app import app
from stepengine.cli.commands.demo import CASSETTE, HERE, HOST
from stepengine.cli.exits import Exit
from stepengine.testing import Cassette

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
def test_the_demo_needs_neither_network_nor_key(stepengine: Any, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()

    done = stepengine("demo", env={"TMPDIR": str(tmp_path / "temporary")})

    assert 0 == done.returncode, done.stderr
    assert "-    return sum(" in done.stdout
    assert "+    return price * 0.9 if price >= 100 else price\n" in done.stdout
    assert "Orders of 100 or more are 10 % cheaper." in done.stdout
    assert "def handle_steps(" in done.stdout
    assert "stepengine run editor" in done.stdout
    assert "  handler > read_files shop.py, README.md\n" in done.stderr
    assert "There is a parenthesis too many." in done.stderr
    assert "step 4\n" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert [] == [*(tmp_path / "temporary").iterdir()]


def test_the_demo_shows_the_handler_that_ran() -> None:
    from stepengine.engine import load_agent

    handler = load_agent("editor").handle_steps
    assert handler is not None

    assert inspect.getsource(handler) in CliRunner().invoke(app, ["demo", "-q"]).stdout
    assert 20 >= len(inspect.getsource(handler).splitlines())


def test_the_demo_reports_no_cost_and_the_estimated_live_cost() -> None:
    """
    3,020 tokens at 3 dollars and 303 at 15 dollars a million.
    """
    done = CliRunner().invoke(app, ["demo"])

    assert "| 3,020 tokens in, 303 out | $0.0000 | " in done.stderr
    assert "This cost nothing: the replies are a recording. Live, with " in done.stdout
    assert "it would have cost about $0.0136." in done.stdout


def test_a_kept_copy_has_the_edited_project() -> None:
    done = CliRunner().invoke(app, ["demo", "--keep", "-q"])
    folder = Path(re.findall(r"The edited project is in (.*)", done.stdout)[0])
    try:
        names: dict[str, Any] = {}
        exec((folder / "shop.py").read_text(), names)

        assert 112.5 == names["total"]({"cheese": 10})
        assert 3.0 == names["total"]({"bread": 1})
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_no_request_holds_a_path_of_the_recording_machine() -> None:
    for interaction in Cassette.load(CASSETTE).interactions:
        assert interaction.request.url.startswith(HOST)
        assert b"stepengine-demo-" not in interaction.request.body
        assert tempfile.gettempdir().encode() + b"/" not in interaction.request.body


@pytest.mark.deep
@pytest.mark.smoke
def test_recording_again_gives_the_same_cassette(tmp_path: Path) -> None:
    """
    Apart from the schemas of tools, which pydantic makes. When this fails: python -m cassettes.record_demo
    """
    again = Cassette.load(record_demo.record(tmp_path / "cassette.yaml"))

    def essence(cassette: Cassette) -> list[Any]:
        bodies = [json.loads(i.request.body) for i in cassette.interactions]
        replies = [i.response.body for i in cassette.interactions]
        return [
            ({k: v for k, v in body.items() if k != "tools"}, reply)
            for body, reply in zip(bodies, replies, strict=True)
        ]

    assert essence(Cassette.load(CASSETTE)) == essence(again)


def test_a_demo_that_asks_something_else_ends_as_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.cli.commands import demo

    monkeypatch.setattr(demo, "PROMPT", "Something else.")

    result = CliRunner().invoke(app, ["demo", "-q"])

    assert Exit.DIVERGED == result.exit_code
    assert "is not in" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.spec("ecosystem:EC122")
def test_the_wheel_carries_the_demo() -> None:
    """
    What hatchling would put into the wheel, without building it.
    """
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs the extra 'dev'")

    shipped = {
        Path(file.distribution_path).as_posix() for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()
    }

    data = {file.relative_to(ROOT).as_posix() for file in HERE.rglob("*") if file.is_file()}
    assert {"stepengine/cli/_demo/cassette.yaml", "stepengine/cli/_demo/project/shop.py.sample"} <= data <= shipped
