"""
Synchronous callers: one loop thread, any thread, inside a running loop, from inside a run, Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from stepengine import AgentDefinition, AgentState, Engine, RunStatus, UserMessage, tool
from stepengine.errors import StepEngineError
from stepengine.testing import ScriptedModel, tool_call


def plain(agent_id="plain", **fields):
    return AgentDefinition(agent_id, **{"model": "test/m", **fields})


ANY_SPEED = """
import logging

logging.getLogger("asyncio").addFilter(lambda record: not record.getMessage().startswith("Executing "))
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    """
    Return what became of a program of its own, with the checks of the interpreter's developer mode: all but that of slowness.
    """
    command = [sys.executable, "-X", "dev", "-c", ANY_SPEED + textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.spec("reliability:SS09")
def test_a_run_can_be_started_from_synchronous_code():
    with Engine(models=ScriptedModel(["hello", "a step"])) as engine:
        result = engine.run_sync(plain(), "hi")
        step = engine.step_sync(AgentState.from_messages([UserMessage("hi")]), plain())

    assert ("hello", True) == (result.text, step.steps_complete)


@pytest.mark.spec("reliability:SS09")
async def test_run_sync_works_in_a_running_loop_with_any_tools():
    here = asyncio.get_running_loop()
    loops, threads = [], []

    @tool
    async def asynchronous() -> str:
        """Look at the loop."""
        loops.append(asyncio.get_running_loop())
        return "a"

    @tool
    def synchronous() -> str:
        """Look at the thread."""
        threads.append(threading.current_thread())
        return "s"

    scripted = ScriptedModel([tool_call("asynchronous"), tool_call("synchronous"), "done"] * 2)
    with Engine(models=scripted) as engine:
        for _ in range(2):
            result = engine.run_sync(plain(tools=[asynchronous, synchronous]), "hi")
            assert RunStatus.COMPLETED is result.status

    assert loops[0] is loops[1] is not here
    assert loops[0].is_closed()
    assert threading.main_thread() not in threads


@pytest.mark.spec("reliability:SS09")
def test_it_works_from_many_threads_at_once():
    texts = []
    with Engine(models=ScriptedModel(["hi"] * 20)) as engine:
        definition = plain()
        threads = [
            threading.Thread(target=lambda: texts.append(engine.run_sync(definition, "go").text)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert ["hi"] * 20 == texts


@pytest.mark.spec("reliability:GN03", "reliability:SS09")
def test_a_handler_may_run_another_agent_synchronously_at_any_depth():
    def nested(level):
        def handle(ctx):
            return level if level == 0 else [level, engine.run_sync(nested(level - 1)).output]
            yield

        return plain(f"level-{level}", handle_steps=handle)

    with Engine(models=ScriptedModel([])) as engine:
        result = engine.run_sync(nested(2))

    assert [2, [1, 0]] == result.output


@pytest.mark.spec("reliability:TL17", "reliability:SS09")
def test_threaded_tool_may_run_another_agent_while_its_loop_waits():
    @tool
    def ask_another() -> str:
        """Ask another agent."""
        return engine.run_sync(plain("helper"), "help").text

    def handle(ctx):
        result = engine.run_sync(plain("inner", tools=[ask_another]), "go")
        return result.output
        yield

    with Engine(models=ScriptedModel([tool_call("ask_another"), "helped", "done"])) as engine:
        result = engine.run_sync(plain("outer", handle_steps=handle))

    assert "done" == result.output


@pytest.mark.spec("reliability:SS06")
def test_overrides_reach_the_loop_thread():
    with Engine(models=ScriptedModel([])) as engine, engine.override(models=ScriptedModel(["other"])):
        assert "other" == engine.run_sync(plain(), "hi").text


class Hanging(ScriptedModel):
    """
    A model that sends this process a signal and never answers.
    """

    def __init__(self):
        super().__init__([])
        self.left = False

    async def complete(self, request):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True


@pytest.mark.spec("reliability:I12")
def test_ctrl_c_cancels_the_run_and_waits_for_its_end():
    model = Hanging()
    with Engine(models=model) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.run_sync(plain(), "go")

        assert model.left


@pytest.mark.spec("reliability:SS09")
def test_a_signal_handler_is_refused():
    refused = []

    def handler(number, frame):
        try:
            engine.run_sync(plain(), "go")
        except StepEngineError as error:
            refused.append(error.message)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Engine(models=ScriptedModel(["never"])) as engine:
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 50
            while not refused and time.monotonic() < deadline:
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert "signal handler 'handler'" in refused[0]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SS10")
def test_unclosed_engine_ends_silently_with_the_interpreter():
    program = """
        import asyncio
        from stepengine import AgentDefinition, Engine
        from stepengine.testing import ScriptedModel

        class Hanging(ScriptedModel):
            async def complete(self, request):
                await asyncio.Event().wait()

        engine = Engine(models=ScriptedModel(["hi"]))
        print(engine.run_sync(AgentDefinition("x", model="test/m"), "go").text)

        async def background():
            hanging.start(AgentDefinition("x", model="test/m"), "go")
            await asyncio.sleep(0.01)

        hanging = Engine(models=Hanging([]))
        asyncio.run(background())
    """
    done = ran(program)

    assert (0, "hi\n", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.deep
@pytest.mark.smoke
def test_a_collected_engine_takes_its_loop_thread_along():
    import gc

    engine = Engine(models=ScriptedModel(["hi"]))
    engine.run_sync(plain(), "go")
    del engine
    gc.collect()
    deadline = time.monotonic() + 50
    while any(t.name == "stepengine-loop" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert not any(t.name == "stepengine-loop" for t in threading.enumerate())
