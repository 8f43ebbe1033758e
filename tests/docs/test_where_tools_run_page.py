"""
`docs/where-tools-run.md` is so: what it pastes and runs works in containers, and each place begins with the words of its table.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Workspace
from stepengine.cli.app import app
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools, shell_tools
from tests.bundled_tools.podman import NAME, as_command, podman, ran

from .pages import blocks_of, execute, page

PAGE = "where-tools-run.md"
AGENT_FILE, INSIDE, COMMAND, KEPT = [block for block in blocks_of(page(PAGE)) if block.kind in ("python", "console")]
AGENT = """
from stepengine import AgentDefinition, ToolCall

SEEN = "import os; print(os.getcwd(), sorted(os.listdir()))"

def handle_steps(ctx):
    yield ToolCall("write_file", {"path": "new.txt", "content": "made there"})
    seen = yield ToolCall("run_terminal_command", {"command": ["/usr/bin/python3", "-c", SEEN]})
    return seen.tool_result.data["stdout"]

agent = AgentDefinition("agent", tools=["write_file", "run_terminal_command"], handle_steps=handle_steps)
"""
DOCKER = """#!/bin/sh
for word; do
    shift
    case "$word" in
        python:3.13) word={image} ;;
        *ann-project*) word=$(printf %s "$word" | sed s/ann-project/{name}/) ;;
    esac
    set -- "$@" "$word"
done
exec {podman} "$@"
"""
"""Podman takes the same words; the image is one that is here, and the name one that nobody else uses."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    The folder of somebody who follows the page, with a program ``docker``.
    """
    found = podman(tmp_path)
    if found.why:
        pytest.skip(found.why)
    folder = as_command(found, tmp_path / "bin")
    told = DOCKER.format(image=NAME, name=f"stepengine-page-{os.getpid()}", podman=folder / "podman")
    (folder / "docker").write_text(told)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def test_the_agent_of_the_page_gets_all_its_tools(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "agent"}
    execute(AGENT_FILE, PAGE, names)
    given = [*file_tools(tmp_path, write=True), *search_tools(tmp_path), *shell_tools(tmp_path)]
    agent = names["agent"]

    assert isinstance(agent, AgentDefinition)
    assert set(names["tools"]) <= set(ToolRegistry(given).specs())


@pytest.mark.deep
@pytest.mark.spec("remote:WS1")
def test_program_and_command_of_the_page_work_in_a_container(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With an agent in the place of the page's, whose handler needs no model.
    """
    monkeypatch.syspath_prepend(project.parent)
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    names: dict[str, Any] = {"__name__": "page"}
    execute(INSIDE, PAGE, names)
    monkeypatch.delitem(sys.modules, "agent")
    assert "/workspace ['new.txt']\n" == names["result"].unwrap()

    (project / "new.txt").unlink()
    (words,) = re.findall(r"^\$ stepengine (.+)$", COMMAND.text, re.MULTILINE)
    said = CliRunner().invoke(app, shlex.split(words))
    assert (0, "/workspace ['new.txt']") == (said.exit_code, said.stdout.strip()), said.output
    assert "made there" == (project / "new.txt").read_text()


@pytest.mark.deep
@pytest.mark.spec("remote:WS9", "remote:WS10")
def test_the_container_example_keeps_its_snapshot_and_discards_the_rest(project: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    execute(KEPT, PAGE, names)
    inspect = ["docker", "container", "inspect", "ann-project"]
    try:
        assert ran("docker", "image", "inspect", "ann-project:before").returncode == 0
        assert ran(*inspect).returncode != 0
    finally:
        ran("docker", "rmi", "--force", "ann-project:before")


PLACES = {
    "docker(image, mounts=...)": Workspace.docker("image"),
    "docker(container=name)": Workspace.docker(container="name"),
    "ssh(host, folder)": Workspace.ssh("host", "/folder"),
    "kubernetes(pod)": Workspace.kubernetes("pod"),
}


@pytest.mark.spec("remote:WS3")
@pytest.mark.parametrize("place", [*PLACES, "bubblewrap(folder)"])
def test_each_workspace_starts_with_the_documented_command(place: str, tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| `Workspace\.(\w+\([^`]*\))` \| `([^`]+) \.\.\.` \|$", page(PAGE), re.MULTILINE))
    made = PLACES[place] if place in PLACES else Workspace.bubblewrap(tmp_path)
    assert made.system is not None
    words, shown = list(made.system.place.argv(())), rows[place].split()

    assert shown == words[: len(shown)]
