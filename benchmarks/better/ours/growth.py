"""
Our side of "growth": a journal of a long conversation with 100 model calls grows by the new messages only.
"""

import time

from stepengine import AgentDefinition, Engine, Limits, tool
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text, tool_call

CALLS, CONVERSATION = 100, "word and word " * 60_000


@tool(in_thread=False)
def look(n: int) -> str:
    """Look something up."""
    return f"{n} " + "x y z w " * 640


looker = AgentDefinition("looker", model="test/model", tools=[look], limits=Limits(max_steps=CALLS))
for name, options in {"run.jsonl": {}, "once.jsonl": {"inline": 2_048}}.items():
    journal = FileJournal(name, **options)
    replies = [*[tool_call("look", {"n": n}) for n in range(CALLS - 1)], text("done")]
    with Engine([looker], models=ScriptedModel(replies)) as engine:
        engine.run_sync("looker", CONVERSATION, journal=journal).unwrap()
        start = time.process_time()
        engine.replay_sync(journal).unwrap()
        seconds = time.process_time() - start
    size = journal.path.stat().st_size / 2**20
    print(f"{options or 'by default'}: {size:.2f} MiB for {CALLS} model calls, replayed in {seconds:.2f} s of CPU")
