"""
Every example runs as a script, without keys and without network, and says something.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.sessions import FileSessions
from tests.bundled_tools.podman import NAME, as_command, podman
from tests.offline import ROOT, ran

pytestmark = pytest.mark.usefixtures("forks")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = {"live.py": ["--offline"]}
READ = {
    "chaos.py",
    "complete_setup.py",
    "nightly_triage.py",
    "three_coders.py",
}
"""Those that a test of their own runs, which reads what they print."""


def test_the_list_of_examples_matches_their_docstrings() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| \[([\w/]+\.py)\]\(\1\) \| (.+) \|$", page, re.MULTILINE))
    more = [
        file
        for folder in ("evaluations", "extending", "from_codebuff", "from_others", "unchanged_programs", "web_page")
        for file in (ROOT / "examples" / folder).glob("*.py")
        if not file.name.startswith("test_")
    ]
    files = [*EXAMPLES, *more]
    first = {file: (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0] for file in files}

    assert {
        file.relative_to(ROOT / "examples").as_posix(): " ".join(text.replace("``", "`").split())
        for file, text in first.items()
    } == listed
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "examples" / target).exists(), target


@pytest.mark.spec("requirements:Q13", "reliability:SS05", "requirements:D18")
def test_the_bot_keeps_chats_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each message is answered by an engine of its own, as another process would; what one user said nobody else is told.
    """
    monkeypatch.syspath_prepend(ROOT / "examples")
    import bot_webhook

    def say(user: str, words: str) -> str:
        store = FileSessions(tmp_path)
        answer: str = bot_webhook.on_message({"user": user, "chat": "c1", "text": words}, store)
        return answer

    asked = say("u1", "A table on Friday, please.")
    waiting = FileSessions(tmp_path).load("u1:c1")
    other = say("u2", "Thanks!")
    booked = say("u1", "six")
    (question,) = [
        m for m in FileSessions(tmp_path).load("u1:c1").messages if getattr(m, "tool_name", "") == "ask_user"
    ]

    assert ["At six or at eight?", "You are welcome.", "Booked for six."] == [asked, other, booked]
    assert (("six", "eight"), "suspended") == (waiting.state.pending[0].options, waiting.info.status)
    assert ["Thanks!", "You are welcome."] == [m.text for m in FileSessions(tmp_path).load("u2:c1").messages]
    assert "six" in question.text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:Q13")
def test_the_complete_setup_uses_all_injected_parts(tmp_path: Path) -> None:
    """
    The researcher, the person, the permissions, the log and the session each leave their mark.
    """
    printed = ran(ROOT / "examples" / "complete_setup.py", tmp_path).splitlines()

    assert "  asked: British or American? -> British" in printed
    assert [
        "spawn_agents: ok",
        "ask_user: ok",
        "write_file: ok",
        "run_terminal_command: denied",
        "read_files: denied",
    ] == [line.strip() for line in printed if line.endswith((": ok", ": denied"))]
    assert 3 == sum(line.startswith("  log: session ann:1:") for line in printed), "one line for each run"
    assert "What did I ask for? You asked for British English." in printed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT4", "waiting:WT20")
def test_the_nightly_triage_sleeps_and_does_each_thing_once(tmp_path: Path) -> None:
    """
    It is resumed by engines that know nothing but its journal, and says itself that a replay of it is equal.
    """
    printed = ran(ROOT / "examples" / "nightly_triage.py", tmp_path).splitlines()
    told = [line for line in printed if line[2:3] == ":"]

    assert [
        "02:00 started: suspended",
        "02:20 the build ended: suspended",
        "03:00 an hour has passed: suspended",
        "05:00 a person said yes: completed",
    ] == told
    assert 1 == sum("waits for a message on 'build-17' until 2026-03-02T06:00:00" in line for line in printed)
    assert 2 == sum("waits for 2026-03-02T03:00:00" in line for line in printed)
    assert [
        "paged: build: build-17 failed",
        "counted alarms at 2:00",
        "counted alarms at 3:00",
        "paged the team",
        "started the build",
    ] == [printed[printed.index(told[-1]) + 1], *sorted(printed[printed.index(told[-1]) + 2 :])]


@pytest.mark.spec("interfaces:IF120")
@pytest.mark.deep
@pytest.mark.parametrize("way", ["here", "podman"])
def test_the_coder_with_passing_tests_is_chosen(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Three programs are led, each in a container where there are some, and a replay without them says the same.
    """
    log = tmp_path / "log"
    if way == "podman":
        found = podman(tmp_path)
        if found.why:
            pytest.skip(found.why)
        # The image has no package of Python: this environment, and what it was made of, stand in it where they stand here.
        own = {
            os.path.realpath(path): path
            for path in ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(ROOT))
        }
        mounts = [f"--volume={real}:{path}:ro" for real, path in own.items() if Path(real).exists()]
        options = (*found.options, *mounts, f"--env=PATH={Path(sys.executable).parent}:/usr/bin:/bin")
        folder = as_command(attrs.evolve(found, options=options), tmp_path / "bin")
        command = folder / "podman"
        command.write_text(command.read_text().replace("\n", f'\necho "$@" >> {log}\n', 1))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("CODERS_IN", f"podman:{NAME}")
    printed = ran(ROOT / "examples" / "three_coders.py", tmp_path, seconds=500).splitlines()

    told = "bob, with 3 of 3 tests"
    assert [f"the best: {told}", f"replayed without them: {told}"] == printed
    # A container for each coder, and one for each run of the tests.
    assert (0 if way == "here" else 6) == (log.read_text().count("run --rm -i --init") if log.exists() else 0)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:K19")
def test_chaos_finds_the_careless_handler_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The script, and the command that its first lines name.
    """
    example = ROOT / "examples" / "chaos.py"
    printed = ran(example, tmp_path).splitlines()
    command = re.search(r"``stepengine (test --chaos examples/chaos.py .+)``", example.read_text())
    assert command is not None
    monkeypatch.chdir(ROOT)
    said = CliRunner().invoke(app, [*shlex.split(command[1]), "-n", "15"])

    assert printed[0].startswith("careless: fails in the world ")
    assert ", with 1 fault" in printed[0]
    assert printed[1].startswith("careful: 60 worlds with ")
    assert "and in this world: ordered 10 roses for 35" == printed[2]
    assert (0, True) == (said.exit_code, "every required property held" in said.output)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:P13")
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name not in READ], ids=lambda e: e.name)
def test_an_example_runs_offline(example: Path, tmp_path: Path) -> None:
    printed = ran(example, tmp_path, *OPTIONS.get(example.name, []))

    assert len(printed.splitlines()) >= 2
