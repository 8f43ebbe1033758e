"""
An orchestrator with three specialists: its model selects the agents, and two of them run in parallel.

``python examples/multi_agent.py`` needs no key, because scripted replies replace the models. To call real models, omit ``models=`` and
set ANTHROPIC_API_KEY.
"""

from stepengine import AgentDefinition, Engine
from stepengine.events import AgentFinished, AgentSpawned
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call

MODEL = "anthropic/claude-sonnet-4-5"

historian = AgentDefinition("historian", description="Knows when things happened.", system_prompt="You know history.")
geographer = AgentDefinition("geographer", description="Knows where things are.", system_prompt="You know places.")
writer = AgentDefinition("writer", description="Writes a sentence from notes.", system_prompt="You write.")
desk = AgentDefinition(
    "desk",
    model=MODEL,  # the others have none, so they use that of whoever spawns them
    tools=["spawn_agents"],
    spawnable_agents=[historian, geographer, writer],
    system_prompt="You answer with the help of your agents.",
)

NOTES = "Founded in 1143. On the river Trave."
TOLD = {
    "You know history.": text("Founded in 1143."),
    "You know places.": text("On the river Trave."),
    "You write.": text("Lubeck, founded in 1143, lies on the river Trave."),
}
ASKED = [
    tool_call(
        "spawn_agents", {"agents": [{"agent_type": a, "prompt": "Lubeck?"} for a in ("historian", "geographer")]}
    ),
    tool_call("writer", {"prompt": NOTES}),  # an agent is also a tool of its own
    text("Lubeck, founded in 1143, lies on the river Trave."),
]


def reply(request: ModelRequest) -> ModelReply:
    """Play the model: the specialists have one reply each, the desk has one for each of its turns."""
    turn = sum(message.role == "assistant" for message in request.messages)
    return TOLD.get(request.system_prompt) or ASKED[turn]


def show(event: object) -> None:
    match event:
        case AgentSpawned():
            print(f"  start {event.agent_id}: {event.prompt}")
        case AgentFinished():
            print(f"  end   {event.agent_id}: {event.status}")
        case _:
            pass  # steps, model calls and more


def main() -> None:
    with Engine([desk], models=ScriptedModel([reply] * 6), observers=[show]) as engine:
        result = engine.run_sync(desk, "Tell me about Lubeck.")
    print(result.output)
    assert [child.agent_id for child in result.children] == ["historian", "geographer", "writer"]


if __name__ == "__main__":
    main()
