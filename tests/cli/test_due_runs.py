"""
Runs that sleep, at the command line: what each waits for, who goes on with it, and what is sent to it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stepengine import Engine, load_agent
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.journal import FileJournal, SqliteJournal
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.recorded_runs import get_runs_folder
from stepengine.journal.sleepers import open_wake_index
from tests.cli.command import command

AGENTS = {
    "naps": """
def handle_steps(ctx):
    yield from Sleep(seconds=float(ctx.prompt or 3600))
    return "woke"
""",
    "waits": """
def handle_steps(ctx):
    got = yield from Receive("go", timeout=7200)
    return {"got": got}
""",
    "asks": """
def handle_steps(ctx):
    answer = yield from Ask("Ship it?", options=["yes", "no"])
    return str(answer)
""",
    "fails": """
def handle_steps(ctx):
    yield from Ask("Ship it?")
    raise ValueError("broken")
""",
    "breaks": """
def handle_steps(ctx):
    yield from Sleep(seconds=3600)
    raise ValueError("broken")
""",
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    Commands run in a folder with agents.
    """
    folder = tmp_path / "work"
    (folder / "agents").mkdir(parents=True)
    for name, handler in AGENTS.items():
        made = f'\nagent = AgentDefinition("{name}", handle_steps=handle_steps)\n'
        (folder / f"agents/{name}.py").write_text(f"from stepengine import *\n{handler}{made}")
    monkeypatch.chdir(folder)
    return folder


def suspended(agent: str, prompt: str = "") -> str:
    """
    Run until it waits, and return the name of the run.
    """
    command("run", agent, prompt, "-q", code=3)
    return list_recorded_runs()[0].stem


def place() -> Path:
    folder = get_runs_folder()
    assert folder is not None
    return folder


def make_due(run: str, where: Path) -> None:
    """
    Let a run be due, as if its time had come.
    """
    with open_wake_index(where) as index:
        index.postpone(run, datetime.now(UTC) - timedelta(days=1))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT20")
def test_suspended_run_tells_its_wait_and_how_to_continue() -> None:
    first = command("run", "waits", "-q", code=3)
    stem = list_recorded_runs()[0].stem
    listed = command("runs").stdout
    (told,) = json.loads(command("runs", "--json").stdout)
    again = command("resume", stem, "-q", code=3)
    whole = json.loads(command("resume", stem, "-q", "--json", code=3).stdout)

    for said in (first.stderr, again.stderr):
        assert "it waits for a message on 'go' until " in said
        assert f"stepengine send {stem} --topic go JSON" in said
        assert f"stepengine resume {stem} --now" in said
        assert "stepengine resume --due" in said
        assert "question" not in said
    assert "  ~ waits for a message on 'go' until " in listed
    assert ["message"] == [wait["kind"] for wait in told["waits"]]
    assert [("message", "go")] == [(one["kind"], one["topic"]) for one in whole["waits_for"]]
    assert whole["wakes_at"] == whole["waits_for"][0]["wakes_at"]


@pytest.mark.spec("waiting:WT20")
def test_resume_now_wakes_a_sleeping_run() -> None:
    stem = suspended("naps")
    command("resume", stem, "-q", code=3)

    assert "woke" in command("resume", stem, "--now", "-q").stdout
    assert "completed" in command("runs").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT2")
def test_message_is_posted_once_and_makes_its_run_due() -> None:
    stem = suspended("waits")
    suspended("waits")
    assert "" == command("resume", "--due").stdout
    first = command("send", stem, "--topic", "go", '{"n": 1}', "--id", "one").stdout
    again = command("send", stem, "--topic", "go", '{"n": 1}', "--id", "one").stdout
    as_json = json.loads(command("send", stem, "--topic", "go", "-", "--json", input="[2]").stdout)
    woken = command("resume", "--due").stdout
    shown = command("resume", stem, "-q").stdout

    assert "one" == first.strip()
    assert "one (already sent)" in again
    assert as_json["new"]
    assert woken.startswith(f"{stem} (waits): completed")
    assert 1 == woken.count("\n")
    assert "'n': 1" in shown or '"n": 1' in shown
    assert {"completed", "suspended"} == {entry.status for entry in list_recorded_runs()}


@pytest.mark.spec("waiting:WT20")
def test_send_hint_works_for_any_journal_name() -> None:
    told = command("run", "waits", "-q", "--journal", "my run's.jsonl", code=3).stderr.splitlines()
    (line,) = [line for line in told if "send it with" in line]
    words = shlex.split(line.partition("send it with: stepengine ")[2].replace(" JSON", " 35"))
    command(*words)

    assert ["send", "my run's.jsonl", "--topic", "go", "35"] == words


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
def test_resume_due_reports_runs_as_json() -> None:
    for agent in ("naps", "waits", "fails"):
        suspended(agent)
    stems = {entry.get_text("agent", "id"): f"{entry.stem}.jsonl" for entry in list_recorded_runs()}
    for agent in ("naps", "waits"):
        make_due(stems[agent], place())
    FileJournal(place() / stems["fails"]).mailbox().send(MailboxMessage(kind="answer", topic="q0", value="yes"))
    with open_wake_index(place()) as index:
        index.wake_for_message(stems["fails"], "answer")
    result = command("resume", "--due", "--json", code=1)
    told = {line["agent"]: line["status"] for line in map(json.loads, result.stdout.splitlines())}

    # The clocks of two of them say that it is too early, so both are suspended again.
    assert {"naps": "suspended", "waits": "suspended", "fails": "failed"} == told


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
def test_resume_due_takes_a_database_and_its_agents(work: Path) -> None:
    """
    The runs were recorded by a program, and nothing says where their agents are but what is typed.
    """
    agents = {name: load_agent(str(work / f"agents/{name}.py")) for name in ("waits", "breaks")}
    other = work / "elsewhere"
    other.mkdir()
    (work / "agents/waits.py").rename(other / "mine.py")
    with Engine(agents.values()) as engine:
        for run in ("a", "b"):
            engine.run_sync("waits", journal=SqliteJournal(work / "R.db", run))
            engine.send_message_sync(SqliteJournal(work / "R.db", run), "go", run)
    lost = command("resume", "--due", "R.db", code=1)
    for run in ("a", "b"):
        make_due(run, work / "R.db")
    found = command("resume", "--due", "R.db", "--agents", "elsewhere/mine.py", "--json").stdout.splitlines()

    assert 2 == lost.stderr.count("could not be resumed")
    assert 2 == lost.stderr.count("next attempt at")
    assert {("a", "completed"), ("b", "completed")} == {(r["run"], r["status"]) for r in map(json.loads, found)}


@pytest.mark.spec("waiting:WT21")
@pytest.mark.parametrize("text", ["nowhere", "nowhere.db", "agents/naps.py", "R.db#a"])
def test_resume_due_rejects_an_invalid_place(text: str) -> None:
    result = command("resume", "--due", text, code=2)

    assert "name a folder of journals or a database" in result.stderr


@pytest.mark.spec("waiting:WT21")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--due", "--last"), "--last is for one run"),
        (("--due", "--answer", "q0=yes"), "--answer is for one run"),
        (("--due", "--agent", "naps"), "--agent is for one run"),
        (("--due", "--on-divergence", "keep"), "--on-divergence is for one run"),
        (("--due", "--every", "5"), "--every needs --watch"),
        (("--last", "--watch"), "--watch needs --due"),
        (("--last", "--agents", "agents"), "--agents needs --due"),
    ],
)
def test_single_run_options_do_not_mix_with_due(words: tuple[str, ...], said: str) -> None:
    assert said in command("resume", *words, code=2).stderr


@pytest.mark.spec("waiting:WT21")
def test_place_without_runs_has_nothing_due(work: Path) -> None:
    (work / "empty").mkdir()

    assert "" == command("resume", "--due", "empty").stdout
    assert "no run is recorded yet, so none is due" in command("resume", "--due").stderr


@pytest.mark.spec("waiting:WT23", "waiting:WT21")
def test_resume_due_starts_schedules_of_its_agents(work: Path) -> None:
    (work / "agents/hourly.py").write_text(
        "from stepengine import *\n"
        "def handle_steps(ctx):\n    yield from ()\n    return 'ran'\n"
        "agent = AgentDefinition('hourly', handle_steps=handle_steps)\n"
        "schedule = Schedule(agent, cron='* * * * *', timezone='UTC', id='hourly')\n"
    )
    from stepengine.engine.loader import load_schedules
    from stepengine.engine.schedule_book import ScheduleBook

    (schedule,) = load_schedules(work / "agents/hourly.py")
    lines = {"hourly": f"{schedule.line} {schedule.timezone}"}
    ScheduleBook(work / "R.db").register_and_get_decided_times(lines, datetime.now(UTC) - timedelta(hours=1))
    SqliteJournal(work / "R.db").runs()
    command("resume", "--due", "R.db", "--agents", "agents/hourly.py")

    assert 1 == len([run for run in SqliteJournal(work / "R.db").runs() if run.startswith("hourly-")])


@pytest.mark.deep
@pytest.mark.spec("waiting:WT21")
def test_watching_waker_resumes_quickly_and_stops_on_sigterm(work: Path) -> None:
    stem = suspended("waits")
    waker = subprocess.Popen(
        [sys.executable, "-m", "stepengine.cli", "resume", "--due", "--watch", "--every", "0.2", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        time.sleep(2)
        command("send", stem, "--topic", "go", "1")
        assert waker.stdout is not None
        told = json.loads(waker.stdout.readline())
    finally:
        waker.send_signal(signal.SIGTERM)
        code = waker.wait(20)
        waker.communicate()

    assert (f"{stem}.jsonl", "completed") == (told["run"], told["status"])
    assert 0 == code


@pytest.mark.spec("waiting:WT20")
def test_chat_resumed_on_a_timed_wait_leaves_without_asking() -> None:
    """
    It says what the turn waits for and leaves; there was a loop.
    """
    command("chat", "waits", "--plain", input="go\n", code=3)
    result = command("chat", "--resume", "--plain", input="hello\n", code=3)

    assert 1 == result.stderr.count("it waits for a message on 'go'")
