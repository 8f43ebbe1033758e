"""
``stepengine studio``: what it takes for agents and runs, what it refuses in words, and the link that lets a browser in.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from stepengine.engine import trust
from tests import forked_processes
from tests.cli.command import command
from tests.cli.in_process_server import run_until_settled, serve_in_process
from tests.offline import NO_NETWORK, ROOT

SECONDS = 30
IS_TRUSTED = trust.is_trusted
SHOP = """
from stepengine import AgentDefinition, Ask

def asks(ctx):
    return (yield from Ask("On which day?"))

agent = AgentDefinition("asker", handle_steps=asks)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """
    A folder with agents that its user trusts.
    """
    tmp_path.chmod(0o700)
    (tmp_path / "shop" / "agents").mkdir(parents=True)
    (tmp_path / "shop" / "agents" / "asker.py").write_text(SHOP)
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    return tmp_path / "shop"


def environment(project: Path) -> dict[str, str]:
    path = os.pathsep.join([str(project.parent), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XDG_STATE_HOME": str(project.parent / "state")}


def typed(project: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stepengine", *words]
    return forked_processes.run(line, cwd=cwd or project, env=environment(project), text=True, capture_output=True, timeout=SECONDS, check=False)  # fmt: skip


def link_again(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """
    Ask for another link by a process that may connect to this machine.
    """
    line = [sys.executable, "-m", "stepengine", "studio", *words, "--link"]
    given = environment(project) | {"PYTHONPATH": str(ROOT)}
    return forked_processes.run(
        line, cwd=project, env=given, text=True, capture_output=True, timeout=SECONDS, check=False
    )


@contextmanager
def open_studio(project: Path, *words: str, cwd: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """
    Give the process of a studio, and the link that it says.
    """
    line = [sys.executable, "-m", "stepengine", "studio", *words, "--port", "0", "--no-open"]
    process = forked_processes.Process(
        line, cwd=cwd or project, env=environment(project), text=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        said = ""
        assert process.stderr is not None
        while not (found := re.search(r"(http://\S+/#login=\S+)\n", said)):
            line_said = process.stderr.readline()
            assert line_said, said
            said += line_said
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def page_of(link: str) -> tuple[httpx2.Client, str]:
    """
    Return a client with the session of a link, and the page.
    """
    address, _, code = link.partition("/#login=")
    client = httpx2.Client(base_url=address, trust_env=False, timeout=SECONDS)
    entered = client.post("/login", json={"code": code})
    assert 200 == entered.status_code, entered.text
    client.headers["authorization"] = f"Bearer {entered.json()['token']}"
    return client, client.get("/").raise_for_status().text


def enter(client: TestClient, said: str) -> None:
    """
    Give a client the session of the link that a studio printed.
    """
    code = said.partition("/#login=")[2].split()[0]
    client.headers["authorization"] = f"Bearer {client.post('/login', json={'code': code}).json()['token']}"
    client.headers["origin"] = "http://localhost"


@pytest.mark.usefixtures("forks")
@pytest.mark.deep
@pytest.mark.spec("studio:ST1", "studio:ST10")
def test_studio_opens_a_project_by_a_single_use_link(project: Path) -> None:
    assert 0 == typed(project, "agents", "trust").returncode
    with open_studio(project) as (process, link):
        client, page = page_of(link)
        with closing(client):
            agents = client.get("/agents").json()["agents"]
            origin = {"origin": str(client.base_url).rstrip("/")}
            started = client.post("/runs", json={"agent": "asker"}, headers=origin).json()["run_id"]
            code = {"code": link.partition("/#login=")[2]}
            again = httpx2.post(f"{link.partition('/#')[0]}/login", json=code, trust_env=False)
            more = link_again(project)
            other, _ = page_of(more.stdout.strip())
            with closing(other):
                assert agents == other.get("/agents").json()["agents"]
            elsewhere = link_again(project, "agents")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)

    assert "studio/app.js" in page
    assert ["asker"] == [one["id"] for one in agents]
    assert 401 == again.status_code
    assert "set-cookie" not in again.headers
    assert 2 == elsewhere.returncode
    assert f"Running: {project}; name one as FOLDER" in elsewhere.stderr
    assert 0 == process.returncode
    gone = link_again(project)
    assert (2, True) == (gone.returncode, "`stepengine studio` starts one" in gone.stderr)
    assert (project / "runs" / f"{started}.jsonl").is_file()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST10", "studio:ST11")
def test_studio_shows_foreign_journals_and_starts_none(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with serve_in_process("studio", "--no-open") as (client, said):
        enter(client, said)
        run = run_until_settled(client, "asker")["run_id"]
    journals = project / "journals"
    journals.mkdir(mode=0o700)
    (journals / "theirs.jsonl").write_bytes((project / "runs" / f"{run}.jsonl").read_bytes())
    before = (journals / "theirs.jsonl").read_bytes()
    with serve_in_process("studio", "journals", "--no-open") as (client, said):
        enter(client, said)
        found = client.get("/foreign").json()["journals"]
        runs = client.get("/runs").json()["runs"]

    assert [("theirs", "asker")] == [(one["name"], one["agent"]) for one in found]
    assert [] == runs
    assert before == (journals / "theirs.jsonl").read_bytes()


@pytest.mark.spec("studio:ST10")
def test_project_with_other_jsonl_files_keeps_its_runs_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / "cases.jsonl").write_text('{"prompt": "Rome"}\n')
    with serve_in_process("studio", "--no-open") as (client, said):
        enter(client, said)
        run = run_until_settled(client, "asker")["run_id"]

    assert (project / "runs" / f"{run}.jsonl").is_file()


def test_studio_does_not_run_untrusted_agents(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "is_trusted", IS_TRUSTED)
    monkeypatch.chdir(project)
    (project / "agents" / "asker.py").write_text("raise SystemExit('it ran')")
    result = command("studio", "--no-open", "--port", "0", code=2)

    assert "are not trusted yet" in result.stderr
    assert "stepengine agents trust" in result.stderr
    assert "it ran" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no 'nowhere'"),
        (["empty"], "run `stepengine init DIR` to create a project"),
        (["asker.py"], "is not a folder; to name a file of agents, use --agents"),
        (["--link", "--model", "a/b"], "--link starts no studio, so other options have no effect; leave them out"),
        (["--allow-host", "example.com:70000"], "hosts= has the invalid name 'example.com:70000'"),
        (
            ["--runs", "asker.py"],
            "'asker.py' is a file; runs are stored in a folder or in a database such as 'runs.db'",
        ),
        (["--model", "nothing"], "no provider is known for the model 'nothing'"),
        (["--host", "999.1.1.1"], "--host 999.1.1.1 cannot be used: it is neither an IP address"),
        (["--host", "0.0.0.0"], "makes the server reachable from other machines"),
        (["--script", "none.json"], "--script 'none.json': none.json cannot be read"),
        (["--script", "bad.json"], "--script 'bad.json' must be a list of replies, not dict"),
        (["--script", "bad.yaml"], "a reply must be a text, a call"),
        (["--script", "bad.py"], "bad.py does not define 'replies'"),
        (["--script", "good.json", "--base-url", "http://localhost:1/v1"], "exclude each other"),
        (
            ["--script", "good.json", "--agents", "shop:make"],
            "shop:make returns an engine with its own models; leave --script out",
        ),
        (
            ["--script", "good.json", "--runs", "postgresql://nowhere/db"],
            "--script needs --runs with a folder or RUNS.db",
        ),
    ],
)
def test_invalid_studio_arguments_are_rejected(
    project: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "empty").mkdir()
    (project / "asker.py").write_text(SHOP)
    for name, held in (("bad.json", '{"a": 1}'), ("bad.yaml", "- 7"), ("bad.py", ""), ("good.json", '["yes"]')):
        (project / name).write_text(held)
    monkeypatch.chdir(project)
    result = command("studio", *words, "--no-open", "--port", "0", code=2)

    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.spec("studio:ST12")
@pytest.mark.parametrize("own", ["", "models = ScriptedModel(['of the file'])"])
def test_served_script_replaces_models_of_the_file(project: Path, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "one.py").write_text(
        "from stepengine import AgentDefinition\nfrom stepengine.testing import ScriptedModel\n"
        f"agent = AgentDefinition('one', model='anthropic/claude-haiku-4-5')\n{own}\n"
    )
    (project / "said.py").write_text("replies = [lambda request: f'asked {request.messages[-1].text}']\n")
    monkeypatch.chdir(project)
    with serve_in_process("serve", "one.py", "--script", "said.py") as (client, said):
        view = run_until_settled(client, "one", "this")

    assert ("completed", "asked this") == (view["status"], view["text"]), view["error"]
    assert "the script said.py supplies the replies; no model is called" in said


def test_studio_is_rejected_inside_a_tool(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    from stepengine.workspace.environment import MARKER

    monkeypatch.chdir(project)
    monkeypatch.setenv(MARKER, "1")
    assert "is only for people, and a tool of an agent called it" in command("studio", "--no-open", code=2).stderr


@pytest.mark.spec("studio:ST1")
def test_serve_shows_the_page_only_when_it_is_asked_to(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "asker.py").write_text(SHOP)
    monkeypatch.chdir(project)
    told = {}
    for more in ([], ["--ui"]):
        with serve_in_process("serve", "asker.py", *more) as (client, _):
            answer = client.get("/")
        told[bool(more)] = answer.status_code, answer.headers.get("content-type", "").partition(";")[0]

    assert {False: (404, "application/problem+json"), True: (200, "text/html")} == told
