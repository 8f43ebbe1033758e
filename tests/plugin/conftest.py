"""
Runs of pytest inside a test, with the plugin, in a project of their own.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import anyio.pytest_plugin
import pytest
import yaml

import stepengine.engine
import stepengine.journal
import stepengine.models.presets
import stepengine.pytest_plugin as plugin
import stepengine.redaction
import stepengine.testing.engines
import stepengine.testing.prefixes
import stepengine.testing.recordings
import stepengine.testing.transport
from stepengine.journal import MemoryJournal
from stepengine.testing import CassetteFixture
from tests import forked_processes
from tests.forked_processes import template_process

# Runs in this process forget what they import; a second copy of these would not know the first one's classes.
SHARED = (
    yaml, stepengine.redaction, stepengine.engine, stepengine.journal, stepengine.models, stepengine.testing,
    stepengine.pytest_plugin,
)  # fmt: skip

INSTALLED = any(e.value == plugin.__name__ for e in entry_points(group="pytest11"))
LOADED = () if INSTALLED else ("-p", "stepengine.pytest_plugin")

LATE = (
    "genai_prices.data", "httpcore2", "stepengine.evaluation", "stepengine.journal.replayer", "stepengine.testing.patching",
    "stepengine.testing.placeholders",
)  # fmt: skip
"""What projects of this folder import only when they run."""

IMPORTED = (
    "anthropic", "hypothesis", "openai.resources.chat", "openai.resources.responses", "openai.types.chat", "pytest", "trio.testing", "unittest",
)  # fmt: skip
"""What processes of this folder need not import: the SDKs of the programs, and what plugins of pytest import."""

HTTP = """
import httpx2, pytest

def answer(request):
    return httpx2.Response(200, json={"to": request.content.decode()})

def ask(cassette, *bodies):
    with httpx2.Client(transport=cassette.transport(httpx2.MockTransport(answer))) as client:
        return [client.post("https://api.test/v1", content=body).json() for body in bodies]
"""

AGENT = """
import anyio, asyncio, pytest
from stepengine import AgentDefinition, Engine, STEP, ToolCall, tool
from stepengine.errors import ReplayDivergence
from stepengine.testing import ScriptedModel, text

LIVE = LIVE_RUNS
LOOKED = []

@tool
def look(path: str) -> str:
    '''Look.'''
    LOOKED.append(path)
    return "seen"

def handle(ctx):
    yield ToolCall("look", {"path": "a"})
    yield STEP
    MORE
    return "done"

agent = AgentDefinition("watcher", tools=[look], system_prompt="PROMPT", handle_steps=handle)

def engine():
    return Engine([agent], [], ScriptedModel([text("fine")] * LIVE), default_model="x/y")
"""

ONE_RUN = """
def test_one(journal):
    with engine() as made:
        result = made.run_sync("watcher", "go", journal=journal)
    assert (result.output, LOOKED) == ("done", ["a"] * LIVE)
"""


def agent_project(live: int, prompt: str = "Watch.", more: str = "pass") -> str:
    return AGENT.replace("LIVE_RUNS", str(live)).replace("PROMPT", prompt).replace("MORE", more)


@pytest.fixture
def agent_test():
    """
    A project with an agent, and a test of one run of it unless another one is given.
    """

    def made(live: int, test: str = ONE_RUN, **options: str) -> str:
        return agent_project(live, **options) + test

    return made


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    """
    The inner run is no worker of the outer one.
    """
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def late_imports():
    """
    A run in this process forgets what it has imported. So what such projects use is imported before the first of them.
    """
    for name in LATE:
        importlib.import_module(name)
    names: dict[str, Any] = {}
    exec(HTTP + agent_project(1), names)
    with names["engine"]() as engine:
        engine.run_sync("watcher", "go", journal=MemoryJournal())
    assert [{"to": "a"}] == names["ask"](CassetteFixture(Path("unused.yaml"), "once"), "a")


@pytest.fixture
def run(pytester, monkeypatch, late_imports):
    """
    Write a test module and run pytest over it with the plugin.
    """
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(plugin.__file__).parents[2]))
    pytester.makeini("[pytest]\n")

    def ran(body: str, *args: str, apart: bool = False, **options: bool):
        pytester.makepyfile(test_it=HTTP + body)
        words = ("-p", "no:cacheprovider", "-p", "no:randomly", *args)
        if apart:
            return run_apart(pytester.path, *LOADED, *words)
        if any(word.startswith("-n") for word in args):  # workers load the plugins that are installed
            return pytester.runpytest_inprocess(*LOADED, *words, **options)
        return run_here(pytester, *words, plugins=[anyio.pytest_plugin, plugin], **options)

    return ran


def run_here(pytester: pytest.Pytester, *words: str, plugins: list[Any], **options: Any) -> pytest.RunResult:
    """
    Run pytest in this process with some plugins alone: looking for those that are installed takes most of the time of a run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        return pytester.runpytest_inprocess(*words, plugins=plugins, **options)


@pytest.fixture(scope="module")
def processes():
    """
    Processes that `run(..., apart=True)` forks have imported an SDK.
    """
    with template_process(*IMPORTED):
        yield


def run_apart(folder: Path, *words: str) -> pytest.RunResult:
    """
    Run pytest in a process of its own, as `Pytester.runpytest_subprocess` does.
    """
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    done = forked_processes.run(
        [sys.executable, "-m", "pytest", f"--basetemp={folder / 'runpytest'}", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)
