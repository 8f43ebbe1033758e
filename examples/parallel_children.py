"""
Children in parallel: the parent waits for all of them, and a failed child does not fail the others.

``python examples/parallel_children.py`` needs no key, because each child has a scripted model.
"""

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, StepContext, Steps
from stepengine.testing import ScriptedModel

SCHEMA = {
    "type": "object",
    "properties": {"points": {"type": "integer"}},
    "required": ["points"],
}


def count_words(ctx: StepContext) -> Steps[dict[str, int]]:
    """Give a structured output without asking any model."""
    yield from ()
    return {"points": len(ctx.prompt.split())}


counter = AgentDefinition("counter", output_schema=SCHEMA, handle_steps=count_words)
critic = AgentDefinition("critic", model="strict/critic")
broken = AgentDefinition("broken", model="silent/nobody")


def handle_steps(ctx: StepContext) -> Steps[dict[str, object]]:
    """Ask all three at the same time; each gives a ``ChildResult``."""
    words, opinion, failed = yield from Parallel(
        AgentCall(counter, ctx.prompt),
        AgentCall(critic, f"What do you think of: {ctx.prompt}"),
        AgentCall(broken, ctx.prompt),
    )
    return {
        "words": words.unwrap()["points"],
        "opinion": opinion.unwrap(),
        "failed": f"{failed.status}: {type(failed.error).__name__}",
    }


editor_in_chief = AgentDefinition(
    "editor-in-chief", spawnable_agents=[counter, critic, broken], handle_steps=handle_steps
)


def main() -> None:
    models = {"strict": ScriptedModel(["Too short."]), "silent": ScriptedModel([])}
    with Engine([editor_in_chief], models=models) as engine:
        result = engine.run_sync("editor_in_chief", "Colourless green ideas sleep furiously")

    for child in result.children:
        print(f"{child.agent_id:8} {child.status}")
    print(result.output)
    assert result.output["words"] == 5
    assert result.output["opinion"] == "Too short."


if __name__ == "__main__":
    main()
