"""
Our side of "forks": a fork behind the first effect of a child repeats only what comes after it.
"""

from stepengine import AgentCall, AgentDefinition, Ask, Engine, Perform, StepContext, Steps
from stepengine.journal import MemoryJournal

ran: list[str] = []


def did(name: str) -> str:
    """Note a piece of work."""
    ran.append(name)
    return name


def check(_: StepContext) -> Steps[None]:
    """Do two pieces of work, then ask a person."""
    a = yield from Perform(did, "a")
    b = yield from Perform(did, "b")
    yield from Ask(f"{a} and {b}: is it good?")


def lead(_: StepContext) -> Steps[None]:
    """Start the child."""
    yield from AgentCall(child)


child = AgentDefinition("child", handle_steps=check)
with Engine([AgentDefinition("lead", handle_steps=lead, spawnable_agents=[child])]) as engine:
    journal = MemoryJournal()
    engine.run_sync("lead", journal=journal)
    done = ", ".join(ran)
    ran.clear()
    fork = engine.fork_sync(journal, at="0#0", edit="A", allow_repeat=True)  # b runs again
    question = fork.pending_questions[0].text
    print(f"the run did {done}; forked behind a it did {', '.join(ran)}, and asks {question!r}")
