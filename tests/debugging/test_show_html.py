"""
`stepengine show --html` as it is typed, and the server that follows a run under way.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import stepengine
from stepengine import Engine
from stepengine.cli.app import app
from stepengine.debugging.viewer import live_page
from stepengine.debugging.viewer.live_page import FollowedJournal, make_page_server
from stepengine.debugging.viewer.payload import PageTexts, RunPayload
from stepengine.engine import load_agent
from stepengine.journal import FileJournal, MemoryJournal, follower
from stepengine.journal.line_reader import read_more_lines
from stepengine.testing import ScriptedModel
from tests.evaluation.runs import read_all, reviewed, said, tool_call

from .pages import opened

AGENT = """
from stepengine import STEP, AgentDefinition, tool

@tool
def add(a: int, b: int) -> int:
    '''Add.'''
    return a + b

def handle_steps(ctx):
    total = 3
    yield STEP
    total += 1
    yield STEP

agent = AgentDefinition("adder", model="x/y", tools=[add], handle_steps=handle_steps)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A folder with an agent and a run of it, in which one stands.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "adder.py").write_text(AGENT)
    agent = load_agent("agents/adder.py")
    with Engine([agent], models=ScriptedModel([tool_call("add", {"a": 1, "b": 2}), "Three.", "Four."])) as engine:
        assert "completed" == engine.run_sync("adder", "Add.", journal="run.jsonl").status
    return tmp_path


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["show", "--html", *words])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG11", "evaluation:JG41", "evaluation:JG12")
def test_page_is_written_next_to_the_journal_without_overwriting(recorded: Path) -> None:
    first = typed("run.jsonl")
    again = typed("run.jsonl")
    forced = typed("run.jsonl", "--force")

    assert (0, "run.html\n") == (first.exit_code, first.stdout)
    assert f"lines and variables come from {Path('agents/adder.py')}" in first.stderr
    assert (2, True) == (again.exit_code, "--force" in again.stderr)
    assert 0 == forced.exit_code
    page = opened((recorded / "run.html").read_text())
    assert ["adder.py"] == [source["name"] for source in page["sources"]]
    assert "stepengine fork run.jsonl" == page["run"]["fork"]


@pytest.mark.spec("evaluation:JG40")
def test_page_and_terminal_options_cannot_be_combined(recorded: Path) -> None:
    show = [
        CliRunner().invoke(app, ["show", "run.jsonl", *words]) for words in (["run.jsonl"], ["--open"], ["--serve"])
    ]
    page = [typed("run.jsonl", *words) for words in (["--json"], ["--step", "1"], ["--left-out"])]

    assert [2] * 6 == [each.exit_code for each in [*show, *page]]
    assert all("add --html" in each.stderr for each in show)
    assert all("leave out --step, --left-out, --provenance and --json" in each.stderr for each in page)
    assert not (recorded / "run.html").exists()


@pytest.mark.spec("ecosystem:EC140")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--provenance --step 1", "leave out --step and --left-out"),
        ("--provenance --left-out", "leave out --step and --left-out"),
        ("--provenance --open", "need --html"),
        ("--provenance --html", "leave out --step, --left-out, --provenance and --json"),
        ("run.jsonl --html --serve", "pass only --port, --open and --title"),
        ("--html --serve --strict", "pass only --port, --open and --title"),
        ("--html --port 80", "add --serve"),
        ("--html --no-code --agent adder", "leave out --agent"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words: str, said: str, recorded: Path) -> None:
    refused = CliRunner().invoke(app, ["show", "run.jsonl", *words.split()])

    assert (2, True) == (refused.exit_code, said in refused.stderr)
    assert not (recorded / "run.html").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG41")
def test_page_is_private_and_keeps_the_mode_when_overwritten(recorded: Path) -> None:
    page = recorded / "run.html"

    assert 0 == typed("run.jsonl").exit_code
    new = stat.S_IMODE(page.stat().st_mode)
    page.chmod(0o644)
    assert 0 == typed("run.jsonl", "--force").exit_code

    assert (0o600, 0o644) == (new, stat.S_IMODE(page.stat().st_mode))


@pytest.mark.spec("evaluation:JG12")
def test_page_never_overwrites_the_journal_it_shows(recorded: Path) -> None:
    (recorded / "old.html").write_bytes((recorded / "run.jsonl").read_bytes())
    (recorded / "link.html").symlink_to("run.jsonl")
    before = (recorded / "run.jsonl").read_bytes()
    done = [
        typed("run.jsonl", "-o", "run.jsonl", "--force"),
        typed("old.html", "--force"),
        typed("run.jsonl", "old.html", "-o", "old.html", "--force"),
        typed("run.jsonl", "-o", "link.html", "--force"),
    ]

    assert [2] * 4 == [each.exit_code for each in done]
    assert all("is the journal itself" in each.stderr for each in done)
    assert before == (recorded / "run.jsonl").read_bytes() == (recorded / "old.html").read_bytes()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG41", "evaluation:JG12")
def test_omissions_are_reported_and_strict_exits_with_5(recorded: Path) -> None:
    without = typed("run.jsonl", "--no-code", "-o", "a.html")
    strict = typed("run.jsonl", "--no-code", "-o", "b.html", "--strict")
    lines = typed("run.jsonl", "--no-locals", "-o", "c.html", "--strict")
    (recorded / "agents" / "other.py").write_text(AGENT.replace("    yield STEP\n    total", "    total"))
    changed = typed("run.jsonl", "-o", "d.html", "--strict", "--agent", "agents/other.py")

    assert (0, 5, 0, 5) == (without.exit_code, strict.exit_code, lines.exit_code, changed.exit_code)
    assert "--no-code" in without.stderr
    assert "locals" not in opened((recorded / "a.html").read_text())
    entries = opened((recorded / "c.html").read_text())["locals"].values()
    assert all("set" not in frame for entry in entries for frame in entry["frames"])
    assert "Handler lines from step" in changed.stderr
    assert (recorded / "d.html").is_file()


@pytest.mark.spec("evaluation:JG41")
def test_page_of_a_missing_agent_names_no_searched_folder(recorded: Path) -> None:
    (recorded / "agents" / "adder.py").unlink()
    made = typed("run.jsonl")
    page = json.dumps(opened((recorded / "run.html").read_text()))

    bundled = str(Path(stepengine.__file__).parents[1] / "agents")
    assert bundled in made.stderr
    assert "'adder' could not be loaded" in page
    assert bundled not in page


@pytest.mark.spec("evaluation:JG119", "evaluation:JG12")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["gone.jsonl"], "there is no journal"),
        (["empty.jsonl"], "holds no run"),
        (["notes.txt"], "is not a journal"),
        (["run.jsonl", "-o", "nowhere/run.html"], "cannot be written"),
        (["run.jsonl", "--port", "70000"], "--port"),
        ([], "name a run"),
    ],
)
def test_invalid_arguments_exit_with_2_and_a_message(words: list[str], part: str, recorded: Path) -> None:
    (recorded / "empty.jsonl").touch()
    (recorded / "notes.txt").write_text("hello\nthere\n")

    done = typed(*words)

    assert 2 == done.exit_code
    assert part in " ".join(done.stderr.replace("│", " ").split())
    assert not done.stdout


@pytest.mark.spec("evaluation:JG119")
def test_force_shows_the_records_before_damage_and_reports_its_place(recorded: Path) -> None:
    lines = (recorded / "run.jsonl").read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"Three."' in line and b'"kind":"result"' in line)
    lines[number] = lines[number].replace(b"Three.", b"Seven.")
    (recorded / "run.jsonl").write_bytes(b"".join(lines))

    plain = typed("run.jsonl")
    forced = typed("run.jsonl", "--force")

    assert 2 == plain.exit_code
    assert f"record {number + 1} (byte {len(b''.join(lines[:number]))})" in plain.stderr
    assert not (recorded / "agents" / "run.html").exists()
    assert 0 == forced.exit_code
    page = opened((recorded / "run.html").read_text())
    (damage, *_) = [each["text"] for each in page["missing"] if each.get("banner")]
    assert f"record {number + 1} (byte" in damage
    assert "stepengine journal repair" in damage
    assert [True, False] == ["reply" in row for row in page["steps"] if row["kind"] == "model"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG43", "evaluation:JG12")
def test_page_over_max_size_exits_with_1_and_writes_nothing(recorded: Path) -> None:
    def make(number: int) -> Any:
        return said(os.urandom(3_000).hex(), tool_call("read_file", {"path": f"{number}"}), number=number)

    read_all(20, make, FileJournal("large.jsonl", sync="write"))

    done = typed("large.jsonl", "--max-mb", "0.12", "--no-code")

    assert 1 == done.exit_code
    assert "the page would have" in done.stderr
    assert not (recorded / "large.html").exists()


# --- following ----------------------------------------------------------------------------------------------------------


@contextmanager
def served(following: FollowedJournal) -> Iterator[tuple[str, Any]]:
    """
    Give the path of the page, and what asks for something: its status and its text.
    """
    server, address = make_page_server(following)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    ask.port = server.server_port  # type: ignore[attr-defined]
    try:
        yield "/" + address.split("/", 3)[3], ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.spec("evaluation:JG50")
def test_page_server_requires_the_secret_address_and_is_read_only(tmp_path: Path) -> None:
    journal = reviewed(FileJournal(tmp_path / "run.jsonl", sync="write"))
    with served(FollowedJournal(journal, "run.jsonl")) as (page, ask):
        statuses = [
            ask(page)[0],
            ask(f"{page}records?after=0")[0],
            ask("/")[0],
            ask("/records?after=0")[0],
            ask(f"{page}other")[0],
            ask(page[:-3] + "/")[0],
            ask(page, Host="evil.example")[0],
            ask(page, method="POST")[0],
            ask(page, method="OPTIONS")[0],
        ]
        _, text = ask(page)

    assert [200, 200, 404, 404, 404, 404, 403, 501, 501] == statuses
    assert "connect-src 'self'" in text
    assert opened(text)["follow"] == journal.path.stat().st_size
    assert "Access-Control" not in text


NUMBERS = {
    "t",
    "input",
    "result",
    "error",
    "reply",
    "system",
    "tools",
    "settings",
    "change",
    "did",
    "prompt",
    "output",
    "origins",
}


def resolved(value: Any, texts: list[Any], name: str = "") -> Any:
    """
    Return rows with their texts in place of the numbers, which depend on the order in which texts were met.
    """
    if isinstance(value, dict):
        return {key: resolved(member, texts, key) for key, member in value.items()}
    if isinstance(value, list):
        return [resolved(member, texts) for member in value]
    return texts[value] if name in NUMBERS and isinstance(value, int) else value


@pytest.mark.spec("evaluation:JG50")
def test_completing_the_last_line_is_no_change_for_the_page(tmp_path: Path) -> None:
    whole = b"".join(reviewed().lines())
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole[:-1])
    following = FollowedJournal(FileJournal(path), "run.jsonl")
    page = opened(following.render_html())
    path.write_bytes(whole)
    following.read_new_records()

    assert {"after": page["follow"]} == following.get_changes_after(page["follow"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG50")
@pytest.mark.parametrize("step", [1, 700])
def test_incremental_page_updates_equal_a_page_rendered_at_the_end(step: int, tmp_path: Path) -> None:
    """
    Whatever the moments at which the file is read, a line that is not whole yet waits.
    """
    whole = b"".join(reviewed().lines())
    path = tmp_path / "run.jsonl"
    begun = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    path.write_bytes(whole[:begun])
    following = FollowedJournal(FileJournal(path), "run.jsonl")
    page = opened(following.render_html())
    ends = [*range(begun, len(whole), max(step, len(whole) // 60)), len(whole)]
    for end in ends:
        path.write_bytes(whole[:end])
        os.utime(path, ns=(end, end))
        following.read_new_records()
        news = following.get_changes_after(page["follow"])
        assert news["after"] <= end
        assert whole[: news["after"]].endswith((b"\n", b"}"))
        if news["after"] != page["follow"]:
            page["texts"][news["from"] :] = news["texts"]
            page["images"][news["images_from"] :] = news["images"]
            for number, row in news["steps"]:
                page["steps"][number : number + 1] = [row]
            series = news["series"]
            for name in ("row", "context", "cached", "cost"):
                series[name] = [*page["series"][name][: series.get("from", 0)], *series[name]]
            series.pop("from", None)
            page |= {name: news[name] for name in ("run", "agents", "series")} | {"follow": news["after"]}

    made = RunPayload(PageTexts(), "run.jsonl")
    made.add_new_records(FileJournal(path).history())
    expected = json.loads(json.dumps(made.to_dict()))
    assert resolved(expected["steps"], made.texts.all) == resolved(page["steps"], page["texts"])
    assert resolved(expected["agents"], made.texts.all) == resolved(page["agents"], page["texts"])
    assert expected["series"] == page["series"]
    assert expected["run"]["status"] == page["run"]["status"] == "completed"


@pytest.mark.spec("evaluation:JG50")
def test_follower_reads_only_new_bytes_and_rereads_a_replaced_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = reviewed(MemoryJournal(link=True)).lines()
    path, other = tmp_path / "run.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(b"".join(lines[:3]))
    following = FollowedJournal(FileJournal(path), "run.jsonl")
    read: list[int] = []
    monkeypatch.setattr(
        follower, "read_more_lines", lambda data, *a, **o: read.append(len(data)) or read_more_lines(data, *a, **o)
    )
    for line in lines[3:]:
        with path.open("ab") as file:
            file.write(line)
        following.read_new_records()
    other.write_bytes(b"".join(reviewed(MemoryJournal()).lines()[:4]))
    other.replace(path)
    following.read_new_records()

    assert [*[len(line) for line in lines[3:]], path.stat().st_size] == read
    assert path.stat().st_size == following.offset


@pytest.mark.spec("evaluation:JG50")
def test_page_is_served_while_other_connections_are_idle(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever waited for one of them would wait for longer than a test may take.
    monkeypatch.setattr(live_page._PageHandler, "timeout", 3_000)
    with served(FollowedJournal(FileJournal("run.jsonl"), "run.jsonl")) as (page, ask), ExitStack() as idle:
        for _ in range(4):
            idle.enter_context(socket.create_connection(("127.0.0.1", ask.port)))
        status, _ = ask(page)

    assert 200 == status


@pytest.mark.spec("evaluation:JG50", "evaluation:JG119")
def test_damage_during_following_and_a_used_port_are_reported(recorded: Path) -> None:
    following = FollowedJournal(FileJournal("run.jsonl"), "run.jsonl")
    with served(following) as (page, ask), socket.create_server(("127.0.0.1", 0)) as taken:
        content = Path("run.jsonl").read_bytes()
        Path("run.jsonl").write_bytes(content.replace(b"Three.", b"Seven.!"))
        _, text = ask(f"{page}records?after=0")
        used = typed("run.jsonl", "--serve", "--port", str(taken.getsockname()[1]))

    assert "damaged" in json.loads(text)["error"]
    assert 2 == used.exit_code


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG50")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_sigint_and_sigterm_stop_the_page_server(number: int, code: int, recorded: Path) -> None:
    command = [sys.executable, "-m", "stepengine.cli", "show", "run.jsonl", "--html", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        host, _, path = address.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", f"/{path}")
        assert "<!doctype html>" in connection.getresponse().read().decode()
        connection.close()
        process.send_signal(number)
        assert code == process.wait(50)
