"""
A handoff, after the OpenAI Agents SDK's example: the second agent has another prompt, no tools and a filtered history.

``python examples/from_others/openai_agents_handoffs.py`` uses scripted replies. To call real models, omit ``models=``.

There the filter belongs to the handoff and cuts the history for good. Here it is a hook of the receiving agent that returns a view, so
the model sees less and the record stays whole. The next message goes to the receiving agent by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Change, Engine, HookContext, Hooks, RunResult, tool
from stepengine.journal import JournalLike
from stepengine.testing import ScriptedModel, text, tool_call

SPANISH = "Por favor, en español. ¿Cómo me llamo y dónde vivo?"


@tool
def population(city: str) -> int:
    """
    Look up how many people live in a city.

    Args:
        city: The city.
    """
    return {"New York": 8_500_000}[city]


def filter_history(ctx: HookContext) -> Change | None:
    """Once, when the agent takes over: show the model no tool calls, no results, and not the first two messages."""
    if not ctx.path or ctx.step_index:  # a later step or run, which keeps the view and adds to it
        return None
    shown = [m for m in ctx.state.view if m.role == "user" or (m.role == "assistant" and not m.tool_calls)]
    return Change(view=shown[2:])


spanish = AgentDefinition(
    "spanish",
    model="openai/gpt-5-mini",
    description="An assistant that speaks Spanish.",
    system_prompt="You speak only Spanish, and in few words.",
    hooks=Hooks(pre_step=filter_history),
)
agent = AgentDefinition(
    "assistant",
    model="openai/gpt-5",
    system_prompt="Be a helpful assistant. If the user speaks Spanish, hand off to the Spanish assistant.",
    tools=[population, "hand_off"],
    spawnable_agents=[spanish],
)


def make_model() -> ScriptedModel:
    """Return the replies of both agents, in order."""
    return ScriptedModel(
        [
            text("Hello, Sora."),
            tool_call("population", {"city": "New York"}),
            text("About 8.5 million people live in New York."),
            tool_call("hand_off", {"agent": "spanish"}),
            text("Vives en Nueva York. No sé tu nombre."),
            text("De nada."),
        ]
    )


def run(engine: Engine, journal: JournalLike) -> RunResult[Any]:
    """Talk in English, then in Spanish; the message that causes the handoff is recorded."""
    said, state = [], None
    for words in ("Hi, my name is Sora.", "I live in New York. How many live there?"):
        result = engine.run_sync(agent, words, previous=state)
        said.append(result.text)
        state = result.state
    handed = engine.run_sync(agent, SPANISH, previous=state, journal=journal)
    thanked = engine.run_sync(agent, "Gracias.", previous=handed.state)
    print("\n".join([*said, f"{handed.state.handed_to}: {handed.text}", f"{thanked.state.handed_to}: {thanked.text}"]))
    return handed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Engine([agent], models=(model := make_model())) as engine:
        run(engine, Path(folder, "handoff.jsonl"))
    received = model.calls[-2]
    print(f"{received.model} was shown:", *(f"{m.role}: {m.text}" for m in received.messages), sep="\n  ")
