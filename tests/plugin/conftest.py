"""
Runs of pytest inside a test, with the plugin, in a project of their own.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

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
from tests import forked_processes
from tests.forked_processes import template_process

# Runs in this process forget what they import; a second copy of these would not know the first one's classes.
SHARED = (
    yaml, stepengine.redaction, stepengine.engine, stepengine.journal, stepengine.models, stepengine.testing,
    stepengine.pytest_plugin,
)  # fmt: skip

INSTALLED = any(e.value == plugin.__name__ for e in entry_points(group="pytest11"))
LOADED = () if INSTALLED else ("-p", "stepengine.pytest_plugin")

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


@pytest.fixture
def run(pytester, monkeypatch):
    """
    Write a test module and run pytest over it with the plugin.
    """
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(plugin.__file__).parents[2]))
    pytester.makeini("[pytest]\n")

    def ran(body: str, *args: str, apart: bool = False, **options: bool):
        pytester.makepyfile(test_it=HTTP + body)
        words = (*LOADED, "-p", "no:cacheprovider", "-p", "no:randomly", *args)
        return run_apart(pytester.path, *words) if apart else pytester.runpytest_inprocess(*words, **options)

    return ran


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
