"""
Recording by default: where runs go, how they are named, gone on with and listed, and which of them stay.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.engine.trust import trust_folder
from stepengine.errors import JournalError
from stepengine.journal import FileJournal, MemoryJournal, list_runs
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.recorded_runs import RecordedRun, get_runs_folder
from stepengine.journal.sources import as_journal
from stepengine.workspace.environment import MARKER
from tests.cli.command import command

ASKS = """
from stepengine import *

def handle_steps(ctx):
    answer = yield from Ask("Ship it?", options=["yes", "no"])
    return f"{ctx.prompt}: {answer}"

agent = AgentDefinition("asks", tools=["write_file"], handle_steps=handle_steps)
"""
DONE = """
from stepengine import *

def handle_steps(ctx):
    yield from ()
    return ctx.prompt

agent = AgentDefinition("done", handle_steps=handle_steps)
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    Commands run in a folder with two agents.
    """
    folder = tmp_path / "work"
    (folder / "agents").mkdir(parents=True)
    (folder / "agents/asks.py").write_text(ASKS)
    (folder / "agents/done.py").write_text(DONE)
    monkeypatch.chdir(folder)
    return folder


def runs() -> Path:
    folder = get_runs_folder()
    assert folder is not None
    return folder


def done(prompt: str = "go", *options: str) -> str:
    """
    Run to an end and return the name of the run.
    """
    command("run", "done", prompt, "-q", *options)
    return list_recorded_runs()[0].stem


def asked(prompt: str = "go", *options: str) -> str:
    """
    Run into a question and return the name of the run.
    """
    command("run", "asks", prompt, "-q", "--write", *options, code=3)
    return next(entry.stem for entry in list_recorded_runs() if prompt == entry.get_text("title"))


@pytest.mark.spec("requirements:X55", "interfaces:IF94", "interfaces:IF95")
def test_run_is_recorded_privately_with_its_options() -> None:
    command("run", "asks", "Ship sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789", "-q", "--write",
            "--base-url", "http://me:canary@localhost:1/v1", code=3)  # fmt: skip
    (entry,) = list_recorded_runs()
    stem = entry.stem
    file = runs() / f"{stem}.json"
    info = json.loads(file.read_text())
    history = FileJournal(runs() / f"{stem}.jsonl").history()

    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", stem)
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in runs().iterdir()}
    assert {0o700} == {stat.S_IMODE(path.stat().st_mode) for path in (runs(), runs().parent)}
    assert "canary" not in file.read_text()
    assert "abcdefghijkl" not in info["title"]
    assert (1, history.root["run_id"], "run", "suspended") == tuple(
        info[name] for name in ("version", "run_id", "command", "status")
    )
    assert ("asks", str(Path("agents/asks.py").resolve())) == (info["agent"]["id"], info["agent"]["file"])
    assert [{"id": "q0", "text": "Ship it?"}] == info["questions"]
    assert (True, False, "http://localhost:1/v1") == tuple(info["options"][n] for n in ("write", "shell", "base_url"))


@pytest.mark.spec("interfaces:IF94")
def test_state_folder_follows_variable_then_xdg_then_home() -> None:
    given = {"STEPENGINE_STATE_DIR": "/s", "XDG_STATE_HOME": "/x", "HOME": "/h"}

    assert Path("/s/runs") == get_runs_folder(given)
    assert Path("/x/stepengine/runs") == get_runs_folder({**given, "STEPENGINE_STATE_DIR": ""})
    assert Path("/h/.local/state/stepengine/runs") == get_runs_folder({"XDG_STATE_HOME": "x", "HOME": "/h"})
    assert get_runs_folder({}) is None


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X55", "interfaces:IF96")
def test_resume_takes_a_name_or_last_and_the_recorded_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = asked("one")
    said = command("resume", stem[:-1], code=3).stderr
    assert f"stepengine resume {stem} --answer q0=TEXT" in said
    monkeypatch.chdir(tmp_path)
    waiting = command("resume", "--last", code=2).stderr
    assert (
        "this folder has no run that waits or was interrupted; one that ended can be repeated with `replay`" in waiting
    )
    assert "`stepengine run AGENT` records one" in command("show", "--last", code=2).stderr
    assert "one: yes\n" == command("resume", stem, "--answer", "q0=yes", "-q").stdout
    monkeypatch.chdir(tmp_path / "work")
    assert "completed" == list_recorded_runs()[0].status
    other = asked("two")
    done("three")

    assert "two: no\n" == command("resume", "--last", "--answer", "q0=no", "-q").stdout
    assert "three\n" == command("replay", "--last", "-q").stdout
    assert "two: no\n" == command("replay", other, "-q").stdout
    assert "three" in command("show", "--last").stdout
    assert '"three"' in command("compare", "diff", "--last", code=1).stdout
    assert "no difference\n" == command("compare", "diff", list_recorded_runs()[0].stem, "--last").stdout
    assert "name two runs; pass one" in command("show", "run.jsonl", "--last", code=2).stderr
    assert "is the start of several run names" in command("show", stem[:4], code=2).stderr
    assert "name a run" in command("replay", code=2).stderr


@pytest.mark.spec("interfaces:IF95")
def test_changed_agent_is_reported_and_lost_companion_is_rebuilt() -> None:
    stem = asked("one")
    Path("agents/asks.py").write_text(ASKS + "\n")
    assert "agents/asks.py has changed since" in command("resume", stem, code=3).stderr
    before = list_recorded_runs()[0].info
    (runs() / f"{stem}.json").write_text("{")
    (rebuilt,) = list_recorded_runs()

    for name in ("run_id", "status", "title", "questions", "usage", "cost"):
        assert before[name] == rebuilt.info[name]
    assert "one: yes\n" == command("resume", stem, "--answer", "q0=yes", "-q", "--write").stdout


def test_python_lists_the_runs_that_the_command_prints(work: Path) -> None:
    waiting, ended = asked("one"), done("two")

    for words, found in (
        ([], list_runs(working_folder=work)),
        (["--all"], list_runs()),
        (["--waiting"], list_runs(working_folder=work, waiting=True)),
    ):
        assert json.loads(command("runs", *words, "--json").stdout) == [run.to_json() for run in found]
    assert {waiting, ended} == {run.stem for run in list_runs()}
    assert [waiting] == [run.stem for run in list_runs(waiting=True)]
    assert [] == list_runs(working_folder=work / "agents")
    runs().chmod(0o770)
    with pytest.raises(JournalError, match="others may write in"):
        list_runs()


@pytest.mark.spec("interfaces:IF95")
def test_unknown_members_of_a_companion_are_kept() -> None:
    stem = asked("one")
    file = runs() / f"{stem}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "later": [1]}))
    command("resume", stem, "--answer", "q0=yes", "-q")

    assert ("completed", [1]) == tuple(json.loads(file.read_text())[name] for name in ("status", "later"))


@pytest.mark.spec("interfaces:IF95")
def test_members_of_wrong_types_in_a_companion_are_ignored() -> None:
    stem = asked("one")
    file = runs() / f"{stem}.json"
    told = json.loads(file.read_text())
    odd = {"model": 5, "models": ["x"], "script": ["x"], "price": {}, "web": 1}
    file.write_text(
        json.dumps(
            {**told, "status": "running", "pid": 10**30, "journal": ["x"], "options": {**told["options"], **odd}}
        )
    )

    assert "interrupted" in command("runs").stdout
    assert "one: yes\n" == command("resume", stem, "--answer", "q0=yes", "-q").stdout


@pytest.mark.spec("interfaces:IF95")
@pytest.mark.parametrize("name", ["script", "config"])
def test_impossible_file_name_in_a_companion_is_reported(name: str) -> None:
    stem = asked("one")
    file = runs() / f"{stem}.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "options": {**told["options"], name: "a\0b"}}))

    assert "embedded null byte" in command("resume", stem, "--answer", "q0=yes", code=2).stderr


@pytest.mark.spec("requirements:X55", "interfaces:IF94", "interfaces:IF98")
@pytest.mark.parametrize("way", ["--no-journal", "setting"])
def test_recording_is_disabled_by_option_and_by_setting(way: str) -> None:
    options = [way] if way != "setting" else []
    if not options:
        Path("stepengine.toml").write_text("journal.record = false")
    said = command("run", "asks", "one", "--write", *options, code=3).stderr

    assert "was not recorded, so it cannot be resumed" in said
    assert not runs().exists()
    assert "exclude each other" in command("run", "done", "--no-journal", "--journal", "a.jsonl", code=2).stderr


@pytest.mark.spec("requirements:X55", "interfaces:IF94")
@pytest.mark.parametrize("what", ["a file", "of others"])
def test_unusable_state_folder_is_one_warning_and_the_run_continues(what: str) -> None:
    if what == "a file":
        runs().parent.parent.mkdir(parents=True)
        runs().parent.write_text("")
    else:
        runs().mkdir(parents=True)
        runs().chmod(0o770)
    result = command("run", "done", "one", "-q")

    assert ("one\n", 1) == (result.stdout, len(result.stderr.splitlines()))
    assert "this run is not recorded: " in result.stderr
    if what == "of others":
        assert "others may write" in command("resume", "--last", code=2).stderr


def test_rejected_run_leaves_no_files() -> None:
    command("run", "done", "one", "--params", "{}", "-q", "--model", "nowhere/x", code=2)

    assert [] == [path.name for path in runs().iterdir() if path.name != ".lock"]


@pytest.mark.spec("interfaces:IF94", "interfaces:IF96")
def test_own_journal_is_listed_and_stays_in_its_place(work: Path) -> None:
    stem = asked("one", "--journal", "mine.jsonl")

    assert [f"{stem}.json"] == [path.name for path in runs().iterdir() if path.name != ".lock"]
    assert str(work / "mine.jsonl") == list_recorded_runs()[0].journal
    assert "one: yes\n" == command("resume", "mine.jsonl", "--answer", "q0=yes", "-q", "--write").stdout
    assert "completed" == list_recorded_runs()[0].status
    assert "one: yes\n" == command("replay", stem, "-q").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF96")
def test_runs_lists_files_and_folders_of_any_store(work: Path) -> None:
    Path("kept/deep").mkdir(parents=True)
    asked("one", "--journal", "kept/a.jsonl")
    for place in ("kept/deep/b.db#first", "kept/deep/b.db#second"):
        done("two", "--journal", place)
    Path("kept/other.jsonl").write_text('{"a": 1}\n')
    Path("kept/app.db").write_bytes(b"")

    def names(*words: str) -> list[str]:
        return [told["journal"] for told in json.loads(command("runs", *words, "--json").stdout)]

    database = ["kept/deep/b.db#second", "kept/deep/b.db#first"]
    assert [*database, "kept/a.jsonl"] == names("kept")
    assert ["kept/a.jsonl"] == names("kept", "--waiting")
    assert database == names("kept/deep/b.db")
    assert database[1:] == names(database[1])
    shown = command("runs", "kept").stdout
    assert "suspended" in shown
    assert "? q0: Ship it?" in shown
    assert "no run is recorded in kept/other.jsonl" in command("runs", "kept/other.jsonl").stderr
    assert "there is no journal 'nope'" in command("runs", "nope", code=2).stderr


@pytest.mark.spec("interfaces:IF96")
def test_runs_filters_by_folder_all_and_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = done("one \x1b[2J"), asked("two")
    shown = command("runs").stdout

    assert shown.index(second) < shown.index(first)
    assert "suspended" in shown
    assert "? q0: Ship it?" in shown
    assert "\x1b" not in shown
    assert [second] == [entry["stem"] for entry in json.loads(command("runs", "--waiting", "--json").stdout)]
    monkeypatch.chdir(tmp_path)
    assert "--all lists" in command("runs").stderr
    assert 2 == len(json.loads(command("runs", "--all", "--json").stdout))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D11", "interfaces:IF95")
def test_a_fork_of_a_recorded_run_is_one_more() -> None:
    stem = asked("one")
    command("resume", stem, "--answer", "q0=yes", "-q")
    said = command("fork", stem, "--at", "0", "--edit", "no", "--allow-repeat")

    assert "one: no\n" == said.stdout
    assert {"stem": stem, "at": "0"} == list_recorded_runs()[0].info["forked_from"]
    assert f"recorded as {list_recorded_runs()[0].stem}" in said.stderr
    fork, parent = [entry.get_text("run_id") for entry in list_recorded_runs()]
    assert fork != parent
    # The id of a fork begins with the id of its parent, which still names the parent.
    assert "one: yes\n" == command("replay", parent, "-q").stdout
    assert "one: no\n" == command("replay", fork, "-q").stdout


STOPPED = """
import os
import signal
from stepengine import *

def handle_steps(ctx):
    for number in range(3):
        yield Perform.idempotent(abs, number)
        if number == 0 and os.environ.get("STOP_WITH"):
            signal.raise_signal(int(os.environ["STOP_WITH"]))
    return "ended"

agent = AgentDefinition("stopped", handle_steps=handle_steps)
"""


@pytest.fixture
def recorded(work: Path) -> str:
    """
    The name of a completed run whose handler sends itself the signal in the variable STOP_WITH.
    """
    (work / "agents/stopped.py").write_text(STOPPED)
    command("run", "stopped", "go", "-q")
    return list_recorded_runs()[0].stem


SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


@SIGNALS
@pytest.mark.parametrize("words", [["replay"], ["fork", "--tools", "recorded", "--at", "0"]], ids=["replay", "fork"])
def test_interrupted_command_without_a_record_advises_no_resume(
    recorded: str, monkeypatch: pytest.MonkeyPatch, words: list[str], number: int, code: int
) -> None:
    before = {file.name for file in runs().iterdir()}
    monkeypatch.setenv("STOP_WITH", str(int(number)))
    result = command(words[0], recorded, *words[1:], "-q", code=code)

    assert f"{signal.Signals(number).name}: stopped; nothing was recorded" in result.stderr
    assert "resume" not in result.stderr
    assert before == {file.name for file in runs().iterdir()}


@pytest.mark.deep
@pytest.mark.smoke
@SIGNALS
@pytest.mark.spec("requirements:X55")
def test_fork_interrupted_in_its_kept_part_is_listed_and_resumable(
    recorded: str, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    trust_folder(Path("agents"))
    words = [sys.executable, "-m", "stepengine.cli", "fork", recorded, "--at", "1", "-q"]
    with monkeypatch.context() as patch:
        patch.setenv("STOP_WITH", str(int(number)))
        stopped = subprocess.run(words, capture_output=True, text=True, check=False)
    found = {entry.stem: entry.status for entry in list_recorded_runs()}
    made = next(name for name in found if name != recorded)

    assert code == stopped.returncode, stopped.stderr
    assert f"resume it with: stepengine resume {made}\n" in stopped.stderr
    assert "interrupted" == found[made]
    assert {f"{name}.json" for name in found} | {f"{name}.jsonl" for name in found} == {
        file.name for file in runs().iterdir() if file.name != ".lock"
    }
    assert "ended\n" == command("resume", made, "-q").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X55", "interfaces:IF94", "interfaces:IF98")
def test_oldest_ended_runs_are_removed_and_resumable_ones_kept() -> None:
    user = Path(os.environ["XDG_CONFIG_HOME"], "stepengine/config.toml")
    user.parent.mkdir(parents=True)
    waiting = asked("waits")
    ended = [done(f"run {number}") for number in range(4)]
    with FileJournal(runs() / f"{ended[0]}.jsonl").path.open("rb") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        user.write_text("journal.keep_runs = 2")
        last = done("last")
        assert {waiting, ended[0], ended[3], last} == {entry.stem for entry in list_recorded_runs()}
    user.write_text("journal.keep_bytes = 1")
    (runs() / f"{last}.before-1.jsonl").write_text("as it was before it was extended")
    for stem in (last, waiting):
        FileJournal(runs() / f"{stem}.jsonl").mailbox().send(MailboxMessage(kind="input", value="to whoever holds it"))
    newest = done("newest")

    assert {waiting, newest} == {entry.stem for entry in list_recorded_runs()}
    left = {f"{stem}{suffix}" for stem in (waiting, newest) for suffix in (".json", ".jsonl")}
    assert {".lock", f"{waiting}.jsonl.mail", *left} == {path.name for path in runs().iterdir()}


@pytest.mark.deep
@pytest.mark.spec("requirements:X55", "interfaces:IF96")
def test_killed_run_is_interrupted_and_resumed_as_last() -> None:
    Path("agents/kills.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom stepengine import *\n\ndef die():\n"
        "    if not Path('died').exists():\n        Path('died').touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 'alive'\n\ndef handle_steps(ctx):\n    return (yield from Perform.idempotent(die))\n\n"
        "agent = AgentDefinition('kills', handle_steps=handle_steps)\n"
    )
    trust_folder(Path("agents"))
    killed = subprocess.run([sys.executable, "-m", "stepengine.cli", "run", "kills", "-q"], check=False)
    done("later")

    assert -signal.SIGKILL == killed.returncode
    assert ["completed", "interrupted"] == [entry.status for entry in list_recorded_runs()]
    assert "alive\n" == command("resume", "--last", "-q").stdout
    assert ["completed", "completed"] == [entry.status for entry in list_recorded_runs()]


@pytest.mark.spec("interfaces:IF96")
@pytest.mark.parametrize("store", ["runs.db#one", "odd#name.jsonl"])
def test_run_that_a_process_writes_is_running_in_any_store(store: str, tmp_path: Path) -> None:
    """Also where its process cannot be seen, as in another container."""
    (tmp_path / "odd").touch()
    journal = as_journal(f"{tmp_path}/{store}")
    entry = RecordedRun(
        "20261130T000000Z-00ff00", {"journal": journal.address, "status": "running", "pid": 2**22}, tmp_path
    )
    with closing(journal.writer()):
        assert "running" == entry.status
        with entry.lock() as is_free:
            assert not is_free
    assert "interrupted" == entry.status


# --- undo ---------------------------------------------------------------------------------------------------------------

WRITES = """
from stepengine import *

def handle_steps(ctx):
    yield ToolCall("write_file", {"path": "a.txt", "content": "one"})
    yield ToolCall("write_file", {"path": "new/b.txt", "content": "two"})
    yield ToolCall("write_file", {"path": "a.txt", "content": "three"})
    return ctx.prompt

agent = AgentDefinition("writes", tools=["write_file"], handle_steps=handle_steps)
"""


@pytest.fixture
def project(work: Path) -> Path:
    """
    The folder that a recorded run has written in; it is not the one in which commands run.
    """
    (work / "agents/writes.py").write_text(WRITES)
    (work / "project").mkdir()
    (work / "project/a.txt").write_text("as it was")
    command("run", "writes", "go", "-q", "--write", "--cwd", "project")
    return work / "project"


def test_undo_restores_and_lists_files_of_the_last_run(project: Path) -> None:
    listed = "restored  a.txt\nremoved   new/b.txt\nremoved   new/\n"

    assert listed == command("undo", "--last", "--dry-run").stdout
    assert "three" == (project / "a.txt").read_text()
    assert listed == command("undo", "--last").stdout
    assert ["a.txt"] == sorted(path.name for path in project.rglob("*"))
    assert "as it was" == (project / "a.txt").read_text()
    assert "2 unchanged\n" == command("undo", list_recorded_runs()[0].stem).stdout


def test_undo_rejects_files_changed_since_unless_partial(project: Path) -> None:
    (project / "a.txt").write_text("by hand")
    refused = command("undo", "--last", code=1)

    assert "changed   a.txt: it was changed later\n" == refused.stdout
    assert "nothing was undone; --partial skips these files" in refused.stderr
    assert (project / "new/b.txt").exists()
    done = command("undo", "--last", "--partial", "--cwd", "project").stdout
    assert "removed   new/b.txt\nremoved   new/\nleft      a.txt: it was changed later\n" == done
    assert "it was written outside of the given folders" in command("undo", "--last", "--cwd", ".", code=1).stdout


def _send_journal() -> None:
    """Write a journal that restores the same files, as somebody makes it who has not the user's key."""
    journal = MemoryJournal(next(runs().glob("*.jsonl")).read_bytes())
    journal.macs = "none"
    Path("sent.jsonl").write_bytes(journal.content())


@pytest.mark.spec("requirements:X122")
def test_undo_shows_and_asks_before_using_an_unknown_journal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _send_journal()
    refused = command("undo", "sent.jsonl", "--cwd", "project", code=1)

    mode = f"{(project / 'a.txt').stat().st_mode & 0o777:o}"
    listed = "restored  a.txt\nremoved   new/b.txt\nremoved   new/\n"
    assert f"{listed}a.txt would have the mode {mode} and this content:\n  | as it was\n" == refused.stdout
    assert "sent.jsonl was not written by a known run of yours" in refused.stderr
    assert "--trust-journal" in refused.stderr
    assert "three" == (project / "a.txt").read_text()
    monkeypatch.setattr("stepengine.cli.commands.undo.can_ask_at_terminal", lambda: True)
    for typed, code in (("\n", 1), ("n\n", 1), ("y\n", 0)):
        assert "three" == (project / "a.txt").read_text()
        asked = CliRunner().invoke(app, ["undo", "sent.jsonl", "--cwd", "project"], input=typed)
        assert code == asked.exit_code, asked.stderr
    assert "as it was" == (project / "a.txt").read_text()


@pytest.mark.spec("requirements:X122")
def test_trust_journal_allows_undo_except_inside_a_tool(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _send_journal()
    with monkeypatch.context() as inside:
        inside.setenv(MARKER, "1")
        command("undo", "sent.jsonl", "--cwd", "project", "--trust-journal", code=2)
    assert "three" == (project / "a.txt").read_text()

    command("undo", "sent.jsonl", "--cwd", "project", "--trust-journal")
    assert "as it was" == (project / "a.txt").read_text()


def test_fork_with_restore_files_starts_from_the_earlier_files(project: Path) -> None:
    command("fork", "--last", "--at", "1", "--restore-files", "-q")
    assert ["three", "two"] == [(project / name).read_text() for name in ("a.txt", "new/b.txt")]
    (project / "a.txt").write_text("by hand")
    refused = command("fork", "--last", "--at", "0", "--restore-files", "-q", code=1)

    assert "nothing was undone" in refused.stderr
    assert "by hand" == (project / "a.txt").read_text()
    assert 2 == len(list_recorded_runs())


READER = """
from stepengine import AgentDefinition, ToolCall

NAMES = [".state/runs/one.jsonl", ".state/editors/one.json", ".state/chat-history.jsonl", ".state/mine.txt"]

def handle_steps(ctx):
    shown = []
    for name in NAMES:
        read = yield ToolCall("read_files", {"paths": [name]})
        shown += [name] if "a word" in read.tool_result.text else []
    return shown

agent = AgentDefinition(id="reader", tools=["read_files"], handle_steps=handle_steps)
"""


def test_agent_cannot_read_recorded_runs_sessions_and_chats(tmp_path, monkeypatch):
    state = tmp_path / ".state"
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(state))
    for name in ("runs/one.jsonl", "editors/one.json", "chat-history.jsonl", "mine.txt"):
        (state / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / name).write_text("a word")
    (tmp_path / "reader.py").write_text(READER)

    done = CliRunner().invoke(app, ["run", str(tmp_path / "reader.py"), "--cwd", str(tmp_path), "--json"])

    assert json.loads(done.stdout)["output"] == [".state/mine.txt"], done.stderr
