"""
What the rules against injection cost a coding agent: the recorded runs of bundled agents and of examples, made again under policies.

Models are scripted, tools, files and commands are real. Everything is approved, so no question hides a later one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

from cassettes import record_agents, record_others, record_ports
from stepengine import Engine
from stepengine.permissions import Policy, Rule

ACTING = ("write", "execute", "network", "memory")
NEEDED: Mapping[tuple[str, str], str] = MappingProxyType(
    {("ports", "tmux_cli"): "tmux", ("ports", "librarian"): "git", ("ports", "git_committer"): "git"}
)

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "against injection": Policy.guard_injection,
        "commands after untrusted": lambda: Policy(
            [Rule.allow_tool("*"), Rule.ask_after_untrusted("run_terminal_command")]
        ),
        "every effect": lambda: Policy(
            [*[Rule.ask_for_category(name) for name in ACTING], Rule.allow_tool("*")],
        ),
    }
)


class Run(NamedTuple):
    """
    A recorded run.

    Attributes:
        folder: Where its recording is, below ``cassettes``.
        name: Its file, without the ending.
        script: Records it.
    """

    folder: str
    name: str
    script: Any

    @property
    def program(self) -> str | None:
        """The program that it needs."""
        return NEEDED.get((self.folder, self.name))


def runs() -> list[Run]:
    """Return all recorded runs whose programs are here."""
    found = [Run("agents", name, record_agents) for name in record_agents.PLAYS]
    found += [Run("ports", name, record_ports) for name in record_ports.PLAYS]
    found += [Run("others", file.stem, record_others) for file in sorted(record_others.EXAMPLES.glob("*.py"))]
    return [run for run in found if run.program is None or shutil.which(run.program)]


class Approver:
    """
    A person who approves everything.

    Attributes:
        asked: The tools that somebody was asked about.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, question: Any) -> bool | None:
        """Approve a permission; leave other questions to whoever answers them in the recording."""
        if question.tool_name is None:
            return None
        self.asked.append(question.tool_name)
        return True


def questions_in(run: Run, policy: Policy) -> list[str]:
    """Make a run again under a policy, and return the tools that somebody was asked about."""
    person = Approver()
    engine = partial(Engine, permissions=policy, interactor=person)
    # Some of the programs print what they would show a person.
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(run.script, "Engine", engine),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        run.script.record(run.name, Path(folder))
    return person.asked


def measure() -> dict[str, dict[str, list[str]]]:
    """Return, by policy and run, the tools that somebody was asked about."""
    return {
        name: {f"{run.folder}/{run.name}": questions_in(run, make()) for run in runs()}
        for name, make in POLICIES.items()
    }
