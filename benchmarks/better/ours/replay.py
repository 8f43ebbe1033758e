"""
Our side of "replay": a hook, a policy and a message of a run are in its journal, and are not repeated.
"""

import asyncio
import json

from stepengine import AgentDefinition, Engine, Hooks, Limits, Perform, RunResult, StepContext, Steps, tool
from stepengine.context import summarize
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call

billed: list[str] = []


def bill(_: StepContext) -> Steps[None]:
    """Bill a model call before it happens."""
    yield from Perform(lambda: billed.append("a model call"))


@tool(in_thread=False)
def look(n: int) -> str:
    """Look something up."""
    return f"result {n} " * 400


hooks = Hooks(pre_step=[bill, summarize(max_tokens=1_500)])
looker = AgentDefinition("looker", model="test/model", tools=[look], hooks=hooks, limits=Limits(max_steps=4))
looks = [tool_call("look", {"n": n}) for n in range(4)]
replies = [*looks[:2], text("Looked up: 0, 1."), *looks[2:], text("Looked up: 2, 3.")]
journal = MemoryJournal()


async def record() -> RunResult:
    """Record a run that receives a message."""
    engine = Engine([looker], models=ScriptedModel(replies))
    async with engine, engine.start("looker", "Look.", journal=journal) as run:
        run.send_input("Be brief.")
        return await run.result()


result = asyncio.run(record())
with Engine([looker]) as engine:  # no model, no key: nothing happens again
    assert engine.replay_sync(journal) == result

lines = journal.lines()
steps = [n for n, line in enumerate(lines) if json.loads(line).get("effect", {}).get("purpose") == "step"]
billed.clear()
with Engine([looker], models=ScriptedModel(replies[3:])) as engine:  # its process died in the third model call
    resumed = engine.resume_sync(MemoryJournal(lines[: steps[2] + 1]))
assert resumed.state.view == result.state.view
print(f"4 model calls of the agent; the hook took effect {3 + len(billed)} times, 3 before the process died")
