"""
acpx, an editor for the command line that others wrote, drives an agent: by one prompt, and in a session that it keeps.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .npm import needs, root_of

COUNTERPARTS = (
    (
        "npm:acpx",
        "0.1.15",
        "works",
        "exec, sessions, prompt, set-mode, set, permissions, fs/*, terminal/*, session loading",
    ),
)

ROOT = root_of("acpx")
pytestmark = [pytest.mark.deep, needs(ROOT)]
HERE = Path(__file__).parent
TRIES = 5
OWN_TROUBLES = ("queue owner failed to start", "Queue owner is closing")
"""acpx reports these of a process of its own, which starts late or ends just now; they say nothing about the agent."""
DENIED = 5
"""How acpx ends where everything that was asked for was denied."""


@pytest.fixture
def acpx(tmp_path: Path, project: Path) -> Callable[..., str]:
    small = shlex.join([sys.executable, str(HERE / "server.py"), "full1", str(tmp_path / "sessions")])
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])}

    def run(*arguments: str, code: int = 0, agent: str = small) -> str:
        assert ROOT is not None
        program = ROOT / "node_modules" / "acpx" / "dist" / "cli.js"
        command = ["node", str(program), "--agent", agent, "--cwd", str(project), "--ttl", "1"]
        for _ in range(TRIES):
            done = subprocess.run(
                [*command, *arguments], env=env, text=True, capture_output=True, timeout=100, check=False
            )
            if not any(trouble in done.stderr for trouble in OWN_TROUBLES):
                break
        else:
            # Its own process is given a few seconds by itself, whatever else the machine does; that says nothing of us.
            pytest.skip("acpx gave its own helper process no time to start on this machine")
        assert code == done.returncode, done.stderr + done.stdout
        return done.stdout

    return run


@pytest.mark.spec("interfaces:IF45", "interfaces:IF51", "interfaces:IF52")
def test_acpx_exec_edits_a_file_only_when_allowed(acpx: Callable[..., str], project: Path) -> None:
    refused = acpx("--deny-all", "exec", "edit shop.py rate tax", code=DENIED)
    assert ("rate = 1\nname = 2\n", True) == ((project / "shop.py").read_text(), "(failed)" in refused)

    allowed = acpx("--approve-all", "exec", "edit shop.py rate tax")
    assert ("tax = 1\nname = 2\n", True) == ((project / "shop.py").read_text(), "[done] end_turn" in allowed)
    assert "[terminal]" in acpx("--approve-all", "exec", "run git --version")


@pytest.mark.leaks_allowed("acpx keeps a process of its own for a second, in which the next command finds the agent")
@pytest.mark.spec("interfaces:IF49", "interfaces:IF50")
def test_acpx_reloads_a_session_and_sets_mode_and_model(acpx: Callable[..., str], project: Path) -> None:
    acpx("sessions", "new")
    assert "You said: hello" in acpx("--approve-all", "prompt", "hello")
    assert "plan" in acpx("set-mode", "plan")
    acpx("set", "model", "anthropic/claude-sonnet-4-5")
    assert "I am anthropic/claude-sonnet-4-5." in acpx("--approve-all", "prompt", "which model")
    assert "(failed)" in acpx("--approve-all", "prompt", "edit shop.py rate tax")
    assert "rate = 1\nname = 2\n" == (project / "shop.py").read_text()
    acpx("sessions", "close")


HANDLER = """
from stepengine import AgentDefinition, ToolCall


def handle(ctx):
    ran = yield ToolCall("run_terminal_command", {"command": ["git", "--version"]})
    yield ToolCall("write_file", {"path": "out.txt", "content": ran.tool_result.data["stdout"]})
    yield ToolCall("read_files", {"paths": ["out.txt"]})
    return "It is written."


agent = AgentDefinition("hand", tools=["run_terminal_command", "write_file", "read_files"], handle_steps=handle)
"""


@pytest.mark.spec("interfaces:IF45", "interfaces:IF52")
@pytest.mark.parametrize("terminals", [True, False])
def test_acp_command_serves_a_handler_that_runs_and_writes(
    acpx: Callable[..., str], tmp_path: Path, project: Path, *, terminals: bool
) -> None:
    (tmp_path / "hand.py").write_text(HANDLER)
    more = ["--terminals"] if terminals else []
    agent = shlex.join([sys.executable, "-m", "stepengine.cli", "acp", str(tmp_path / "hand.py"), *more])
    said = acpx("--approve-all", "exec", "go", agent=agent)

    assert (project / "out.txt").read_text().startswith("git version")
    assert terminals == ("terminal/create" in said)
    assert ["kind: execute", "kind: edit", "kind: read"] == [
        line.strip() for line in said.splitlines() if "kind: " in line
    ]
    assert "It is written." in said
