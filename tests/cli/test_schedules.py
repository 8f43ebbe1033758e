"""
``stepengine runs --schedules``: next and last, of the agents of a project.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine import Engine, Scheduler, load_schedules
from stepengine.cli.app import app
from stepengine.errors import DefinitionError
from tests.cli.command import command

FILE = """
from stepengine import AgentDefinition, Schedule


def handle_steps(ctx):
    yield from ()
    return "done"


agent = AgentDefinition("triage", handle_steps=handle_steps)
schedules = [
    Schedule(agent, cron="0 7 * * 1-5", timezone="Europe/Berlin", id="morning"),
    Schedule("triage", cron="0 0 L * *", id="month", enabled=False),
]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "triage.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def ran(runs: Path) -> None:
    schedules = load_schedules(Path("agents"))
    async with Engine([s.agent for s in schedules if not isinstance(s.agent, str)]) as engine:
        scheduler = Scheduler(engine, schedules, runs=runs)
        for day in (1, 8):
            await scheduler.tick(datetime(2026, 5, day, 12, tzinfo=UTC))
            await scheduler.wait_until_idle()


@pytest.mark.spec("waiting:WT30")
@pytest.mark.parametrize("place", ["runs", "runs.db"])
def test_schedules_list_next_and_last_runs(project: Path, place: str) -> None:
    asyncio.run(ran(project / place))
    shown = CliRunner().invoke(app, ["runs", "--schedules", "agents", "--runs", place])
    told = json.loads(CliRunner().invoke(app, ["runs", "--schedules", "agents", "--runs", place, "--json"]).stdout)

    assert 0 == shown.exit_code
    assert "when    0 7 * * 1-5, Europe/Berlin: At 07:00 on Monday through Friday" in shown.stdout
    assert "last    Fri 2026-05-08 07:00 +0200, morning-20260508T050000Z, completed" in shown.stdout
    assert "missed  4, the newest Thu 2026-05-07 07:00 +0200" in shown.stdout
    assert "next    never: the schedule is not enabled" in shown.stdout
    assert ["morning", "month"] == [one["id"] for one in told]
    assert {"at": "2026-05-08T05:00:00+00:00", "status": "completed", "run": "morning-20260508T050000Z", "error": None} == (
        told[0]["last"]
    )  # fmt: skip
    assert datetime.fromisoformat(told[0]["next"]) == datetime.fromisoformat(told[0]["next_local"])
    assert "07:00:00" in told[0]["next_local"]


@pytest.mark.spec("waiting:WT30")
def test_listing_schedules_writes_nothing(project: Path) -> None:
    assert "  last  " not in command("runs", "--schedules", "agents/triage.py", "--runs", "runs").stdout
    assert ["agents"] == [path.name for path in project.iterdir()]


def test_broken_agent_file_or_schedule_book_is_reported(project: Path) -> None:
    (project / "agents" / "broken.py").write_text("schedule = Schedule()")
    (project / "runs.db").write_bytes(b"no database " * 100)
    listed = CliRunner().invoke(app, ["runs", "--schedules", "agents"])
    damaged = CliRunner().invoke(app, ["runs", "--schedules", "agents", "--runs", "runs.db"])
    missing = CliRunner().invoke(app, ["runs", "--schedules", "agents/nobody.py"])

    assert (0, 1, 2) == (listed.exit_code, damaged.exit_code, missing.exit_code)
    assert "morning" in listed.stdout
    assert "broken.py" in listed.stderr
    assert "cannot store schedules" in damaged.stderr
    assert "there is no agent file 'agents/nobody.py'" in missing.stderr


def test_missing_schedules_show_how_to_write_one(project: Path) -> None:
    (project / "agents" / "triage.py").write_text(FILE.partition("schedules = ")[0])
    assert "schedule = Schedule(agent, cron=...)" in command("runs", "--schedules", "agents").stderr


@pytest.mark.spec("waiting:WT23")
@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("schedule = schedules[0]", "defines both 'schedule' and 'schedules'"),
        ("schedules = [*schedules, schedules[0]]", "two schedules have the id 'morning'"),
        ("schedules = [*schedules, 5]", "Schedule objects, not 5"),
    ],
)
def test_invalid_schedules_are_rejected_with_their_file(project: Path, end: str, told: str) -> None:
    file = project / "agents" / "triage.py"
    file.write_text(f"{FILE}{end}\n")
    with pytest.raises(DefinitionError, match=f"triage.py: .*{told}"):
        load_schedules(file)


@pytest.mark.spec("waiting:WT23")
def test_schedule_ids_are_unique_and_other_values_are_ignored(project: Path) -> None:
    other = project / "agents" / "zother.py"
    other.write_text('from stepengine import AgentDefinition\nagent = AgentDefinition("other")\nschedule = "mondays"\n')

    assert ["morning", "month"] == [one.id for one in load_schedules(Path("agents"))]
    third = project / "agents" / "zthird.py"
    third.write_text(FILE.replace("triage", "third"))
    with pytest.raises(DefinitionError, match=r"triage.py and .*zthird.py both have a schedule with the id 'morning'"):
        load_schedules(Path("agents"))


@pytest.mark.spec("waiting:WT23")
@pytest.mark.parametrize(
    ("word", "value"), [("schedule", "'mondays'"), ("schedule", "print"), ("schedules", "{}"), ("schedules", "['x']")]
)
def test_schedules_load_beside_an_unrelated_value(project: Path, word: str, value: str) -> None:
    """Either word may be one of the file's own, such as a module or function that it imports."""
    file = project / "agents" / "triage.py"
    given = (
        FILE
        if word == "schedule"
        else FILE.partition("schedules = [")[0] + "schedule = Schedule(agent, cron='0 7 * * *')\n"
    )
    file.write_text(f"{given}{word} = {value}\n")

    assert (2 if word == "schedule" else 1) == len(load_schedules(file)) == len(load_schedules(project / "agents"))


@pytest.mark.parametrize("words", [["--runs", "runs"], ["--db", "x"], ["--app", "shop"]])
def test_options_of_schedules_need_schedules(words: list[str]) -> None:
    said = CliRunner().invoke(app, ["runs", *words])
    both = CliRunner().invoke(app, ["runs", "--schedules", "--waiting"])

    assert (2, 2) == (said.exit_code, both.exit_code)
    assert "add --schedules" in said.stderr
    assert "leave out --all and --waiting" in both.stderr
