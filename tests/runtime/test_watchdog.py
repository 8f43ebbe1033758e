"""
The watchdog: whoever blocks the loop is named, and nothing is left of it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time

import pytest

from stepengine import tool
from stepengine.data.effects import CallFunction, CallTool
from stepengine.data.yields import Perform as Do
from stepengine.runtime import watchdog


@pytest.fixture
def quick(monkeypatch):
    """
    A watchdog that looks every few milliseconds, and is not so impatient that a busy machine makes it speak.
    """
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.005)
    for name in ("BLOCKING_TOOL_SECONDS", "BLOCKING_SECONDS"):
        monkeypatch.setattr(watchdog, name, 0.1)


def watchdogs():
    return [t for t in threading.enumerate() if t.name == "stepengine-watchdog"]


def block(caplog):
    deadline = time.monotonic() + 50
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.spec("reliability:TL08")
async def test_blocking_async_tool_is_reported_by_name(world, quick, caplog):
    """
    Also when it is the first thing that happens in the loop since the run began, and the last one before it ends.
    """

    @tool
    async def blocking() -> str:
        """Block the loop."""
        block(caplog)
        return "done"

    def machine(plan, state):
        outcome = yield CallTool(0, "blocking", {}, arguments={})
        return world.done(state, outcome.value.text)

    events = []
    plan = world.plan(tools={"blocking": blocking.binding()})
    with caplog.at_level(logging.WARNING, "stepengine"):
        finished = await world.tree(machine, plan=plan, observers=[events.append]).run()
    warned = [e.message for e in events if e.type == "warned"]

    assert "done" == finished.output
    assert "the tool 'blocking' blocks it at" in warned[0]
    assert "test_watchdog.py:" in warned[0]


@pytest.mark.spec("reliability:TL08")
async def test_non_yielding_handler_is_reported_with_its_line(world, quick, caplog):
    def machine(plan, state):
        block(caplog)
        return world.done(state)
        yield

    events = []
    with caplog.at_level(logging.WARNING, "stepengine"):
        await world.tree(machine, observers=[events.append]).run()
    warned = [e.message for e in events if e.type == "warned"]

    assert 1 == len(caplog.records)
    assert "test_watchdog.py:" in warned[0]


@pytest.mark.spec("reliability:TL08")
@pytest.mark.parametrize(
    ("code", "sdk"),
    [
        ("look(frame())", ""),
        ("import some_sdk", "look_at_sdk(sys._getframe())"),
        ("import some_sdk; some_sdk.client()", "def client(): look_at_sdk(sys._getframe())"),
        ("generated()", ""),
    ],
    ids=["itself", "an SDK", "the client of an SDK", "generated code"],
)
def test_watchdog_blames_no_tool_for_engine_and_sdk_work(caplog, monkeypatch, tmp_path, code, sdk):
    """
    The first import of a provider's SDK takes seconds on a cold disk, and its first client reads certificates; a newcomer's
    first run says nothing of it.
    """
    seen = []

    def look(frame):
        dog = watchdog.Watchdog(asyncio.get_running_loop())
        dog._asked -= 100
        dog._report_block(frame)
        seen.append(watchdog._find_blocking_code(frame))

    generated = {"__name__": "namedtuple_Sample", "look": look, "sys": sys}
    ours = {"look": look, "frame": sys._getframe, "generated": eval("lambda: look(sys._getframe())", generated)}
    file = tmp_path / "site-packages/some_sdk.py"
    file.parent.mkdir()
    file.write_text(f"import sys\n{sdk}\n")
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setattr("builtins.look_at_sdk", look, raising=False)
    monkeypatch.delitem(sys.modules, "some_sdk", raising=False)
    exec(compile(f"def imports(): {code}", f"{watchdog.MODELS}some_provider.py", "exec"), ours)

    async def main():
        asyncio.get_running_loop().call_soon(ours["imports"])
        await asyncio.sleep(0)

    asyncio.run(main())
    sys.modules.pop("some_sdk", None)

    assert [watchdog.NOBODY] == seen
    assert [] == caplog.records


def test_watchdog_blames_the_authors_transport(tmp_path):
    file, found = tmp_path / "transport.py", []
    transport, provider = {"sys": sys}, {}
    exec(compile("def send(look): look(sys._getframe())", str(file), "exec"), transport)
    exec(compile("def ask(send, look): send(look)", f"{watchdog.MODELS}some_provider.py", "exec"), provider)
    provider["ask"](transport["send"], lambda frame: found.append(watchdog._find_blocking_code(frame).place))

    assert [f"{file}:1"] == found


@pytest.mark.deep
@pytest.mark.spec("reliability:TL08")
async def test_runs_share_one_watchdog_thread_that_ends_after_the_last(world, monkeypatch):
    """
    A thread for each short run would cost a third of it, and without one its first second would not be seen.
    """
    seen = set()

    def machine(plan, state):
        seen.update(watchdogs())
        yield CallFunction(0, Do(asyncio.sleep, 0))
        return world.done(state)

    async def ended():
        async with asyncio.timeout(50):
            while watchdogs():  # noqa: ASYNC110  (nobody is told when a thread ends)
                await asyncio.sleep(0.001)

    await ended()  # that of a test before this one
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 2.0)  # a moment that no busy machine outlasts
    await asyncio.gather(*[world.tree(machine).run() for _ in range(3)])
    await world.tree(machine).run()

    assert 1 == len(seen)
    monkeypatch.undo()
    await ended()
    assert {} == watchdog._watchdogs
    await world.tree(machine).run()
    assert 2 == len(seen)
