"""
An evaluation in the style of SWE-bench: an agent gets a repository and returns a patch, and hidden tests decide, each in a sandbox.

``stepengine eval examples/evaluations/patches.py --shell --workspace bubblewrap:.`` compares four scripted agents: one solves the
issue, one breaks other code, one changes the tests, and one does nothing. To measure a real agent, omit ``replies=`` and ``agents=``.
The variable PATCHES_IN sets the sandbox of the hidden tests, such as ``podman:python:3.13``. The default is ``bubblewrap:.``.
"""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from stepengine import AgentDefinition, Workspace
from stepengine.evaluation import Case, Evaluation, JudgedRun, Verdict
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import text, tool_call
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import shell_tools

TESTS = """\
import unittest
from {module} import *


class Tests(unittest.TestCase):
{body}
"""
GIT = ["git", "-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null", "-c", "init.defaultBranch=main"]


def tests(module: str, **bodies: str) -> str:
    """Return a file of tests: a method for each body."""
    methods = [f"    def {name}(self):\n        {body}\n" for name, body in bodies.items()]
    return TESTS.format(module=module, body="\n".join(methods))


class Task:
    """
    An issue of a repository, and the tests that nobody is shown.

    Attributes:
        files: The repository.
        issue: What the agent is told.
        hidden: A file of tests, which takes the place of one of that name.
        failing: Tests of it that fail before, and have to pass.
        passing: Tests of it that pass before, and have to go on.
    """

    def __init__(self, files: dict[str, str], issue: str, hidden: str, failing: list[str], passing: list[str]) -> None:
        self.files, self.issue, self.hidden, self.failing, self.passing = files, issue, hidden, failing, passing


TASKS = {
    "slug": Task(
        {
            "slugs.py": "def slug(text):\n    return text.lower().replace(' ', '-')\n",
            "test_it.py": tests("slugs", test_words="self.assertEqual('a-b', slug('A b'))"),
        },
        "slug(' A  b ') gives '-a--b-'. It should be 'a-b'.",
        tests(
            "slugs",
            test_words="self.assertEqual('a-b', slug('A b'))",
            test_empty="self.assertEqual('', slug(''))",
            test_blanks="self.assertEqual('a-b', slug(' A  b '))",
        ),
        ["test_blanks"],
        ["test_words", "test_empty"],
    ),
    "mean": Task(
        {
            "means.py": "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
            "test_it.py": tests("means", test_two="self.assertEqual(1.5, mean([1, 2]))"),
        },
        "mean([]) ends with a ZeroDivisionError. It should be None.",
        tests(
            "means",
            test_two="self.assertEqual(1.5, mean([1, 2]))",
            test_zero="self.assertEqual(0, mean([0]))",
            test_none="self.assertIsNone(mean([]))",
        ),
        ["test_none"],
        ["test_two", "test_zero"],
    ),
}
PLAYED = {  # what the agents write that stand in for real ones
    "repairs": {
        "slug": ("slugs.py", "def slug(text):\n    return '-'.join(text.lower().split())\n"),
        "mean": ("means.py", "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else None\n"),
    },
    "breaks": {
        "slug": ("slugs.py", "def slug(text):\n    return '-'.join(text.lower().split()) or None\n"),
        "mean": ("means.py", "def mean(numbers):\n    return sum(numbers) / len(numbers) if any(numbers) else None\n"),
    },
    "cheats": dict.fromkeys(TASKS, ("test_it.py", "import unittest\n")),
    "rests": {},
}


# --- the verdict ------------------------------------------------------------------------------------------------------


def patch_of(files: dict[str, str], folder: Path) -> bytes:
    """Return what an agent did to a repository, as git tells it."""
    with tempfile.TemporaryDirectory() as kept:
        before, store = Path(kept, "before"), f"--git-dir={kept}/git"
        write(before, files)
        git([*GIT, "init", "-q", "--bare", f"{kept}/git"])
        git([*GIT, "-C", str(before), store, f"--work-tree={before}", "add", "-A"])
        after = [*GIT, "-C", str(folder), store, f"--work-tree={folder}"]
        own = ["--", ".", ":!*.pyc"]
        git([*after, "add", "-N", *own])
        return git([*after, "diff", "--no-color", "--no-ext-diff", "--binary", *own])


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def git(command: list[str], given: bytes = b"") -> bytes:
    """Run git without settings of this machine; it runs nothing of the repository."""
    env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "HOME": os.devnull}
    return subprocess.run(command, input=given, capture_output=True, check=True, env=env).stdout  # noqa: S603


async def resolved(run: JudgedRun) -> Verdict:
    """Put the patch on a clean copy, and run the hidden tests there, in a sandbox of its own."""
    task = TASKS[run.case.id]
    patch = await asyncio.to_thread(patch_of, task.files, run.files.folder)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), task.files)
        if patch:
            await asyncio.to_thread(git, [*GIT, "-C", folder, "apply", "--whitespace=nowarn", "-"], patch)
        write(Path(folder), {"test_it.py": task.hidden})
        with Workspace.parse(os.environ.get("PATCHES_IN", "bubblewrap:."), folder) as place:
            shell = ToolRegistry(shell_tools(place))
            wrong = [name for name in [*task.failing, *task.passing] if not await passes(shell, name)]
    broken = [name for name in wrong if name in task.passing]
    why = f"{', '.join(wrong)} {'does' if len(wrong) == 1 else 'do'} not pass" if wrong else "all hidden tests pass"
    label = "broken" if broken else "open" if wrong else "resolved"
    return Verdict(0.0 if wrong else 1.0, not wrong, f"{why}; the patch has {len(patch.splitlines())} lines", label)


async def passes(shell: ToolRegistry, test: str) -> bool:
    command = ["python3", "-B", "-m", "unittest", f"test_it.Tests.{test}"]
    result = await shell.execute("run_terminal_command", {"command": command, "timeout_seconds": 60})
    return not result.is_error and result.data["exit_code"] == 0


# --- the agents -------------------------------------------------------------------------------------------------------


def played(case: str) -> Callable[[ModelRequest], ModelReply]:
    """Return what plays the models of all sides in a case: it looks, runs the tests that are there, writes, and says so."""

    def reply(request: ModelRequest) -> ModelReply:
        written = PLAYED[request.model.partition("/")[2]].get(case)
        path, content = written or ("", "")
        script = [tool_call("run_terminal_command", {"command": ["python3", "-B", "-m", "unittest", "-q"]})]
        script += [tool_call("write_file", {"path": path, "content": content})] if written else []
        said = sum(message.role == "assistant" for message in request.messages)
        return script[said] if said < len(script) else text("Done.")

    return reply


def coder(name: str) -> AgentDefinition:
    return AgentDefinition("coder", model=f"played/{name}", tools=["write_file", "run_terminal_command"])


evaluation = Evaluation(
    "patches",
    cases=[Case(name, task.issue, files=task.files, replies=played(name)) for name, task in TASKS.items()],
    agents={name: coder(name) for name in PLAYED},
    checks=[resolved],
)
