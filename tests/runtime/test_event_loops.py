"""
Other event loops than asyncio's own, and Python's development mode: the same runs with the same ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, json, logging, sys, time
from pathlib import Path
from stepengine import STEP, AgentCall, AgentDefinition, Engine, Parallel, Perform, ToolCall, tool
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import file_tools, shell_tools

folder, loop = Path(sys.argv[1]), sys.argv[2]
# Development mode reports a busy machine, by every loop, also that of `replay_sync`.
logging.getLogger("asyncio").addFilter(lambda record: not record.msg.startswith("Executing "))
factory = None
if loop == "uvloop":
    from uvloop import new_event_loop as factory

@tool(parallel_safe=True)
async def later(n: int) -> int:
    'Wait.'
    await asyncio.sleep(0.001)
    return n

@tool(parallel_safe=True)
def in_a_thread(n: int) -> int:
    'Block.'
    time.sleep(0.001)
    return -n

@tool
async def for_ever() -> str:
    'Never end.'
    await asyncio.sleep(600)
    return "never"

def child_steps(ctx):
    return (yield from ToolCall("write_file", {"path": f"{ctx.prompt}.txt", "content": ctx.prompt})).is_error

def handle_steps(ctx):
    yield STEP
    kids = yield from Parallel(*[AgentCall("child", name) for name in "abc"])
    printed = yield from ToolCall("run_terminal_command", {"command": "ls"})
    seen = yield from Perform(lambda: sorted(p.name for p in folder.iterdir() if p.suffix == ".txt"))
    return [[kid.output for kid in kids], printed.data["stdout"], seen, ctx.random.random() >= 0]

tools = [later, in_a_thread, *file_tools(folder, write=True), *shell_tools(folder)]
child = AgentDefinition("child", tools=tools, handle_steps=child_steps)
agent = AgentDefinition("a", model="t/m", tools=tools, spawnable_agents=[child], handle_steps=handle_steps)
endless = AgentDefinition("endless", model="t/m", tools=[for_ever])
CALLS = tool_calls(*[tool_call(name, {"n": n}) for n in range(4) for name in ("later", "in_a_thread")])

async def main():
    said = [type(asyncio.get_running_loop()).__module__.partition(".")[0]]
    journal = FileJournal(folder / "run.jsonl")
    async with Engine([agent, endless], models=ScriptedModel([CALLS, tool_call("for_ever", {})])) as engine:
        events = [type(event).__name__ async for event in engine.stream("a", "go", journal=journal)]
        said += [events[-1], engine.replay_sync(journal).output]
        handle = engine.start("endless", "go")
        await asyncio.sleep(0.05)
        handle.interrupt()
        said.append((await handle.result()).status.value)
        again = await engine.replay(journal)
        said += [again.status.value, [call.result.text for call in again.tool_calls][:8]]
    print(json.dumps(said))

with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


def said(folder: Path, loop: str, *options: str) -> Any:
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM, str(folder), loop],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.deep
@pytest.mark.spec("reliability:SS15")
@pytest.mark.parametrize("loop", ["asyncio in development mode", "uvloop"])
def test_runs_are_equal_on_uvloop_and_in_development_mode(loop: str, tmp_path: Path) -> None:
    if loop == "uvloop" and find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    name, *rest = said(tmp_path / "plain", "asyncio")
    other, *same = said(tmp_path / "other", loop, *(["-X", "dev", "-W", "error"] if "mode" in loop else []))

    assert ("asyncio", "uvloop" if loop == "uvloop" else "asyncio") == (name, other)
    assert rest == same
    assert "completed" in rest
    assert "cancelled" in rest
