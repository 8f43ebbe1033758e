"""
Best of N with a judge: several children get the same task, and a second model selects the best answer.

``python examples/best_of_n.py`` needs no key, because scripted replies replace the models. To call real models, omit ``models=`` and
set ANTHROPIC_API_KEY and OPENAI_API_KEY.
"""

from collections.abc import Sequence

from pydantic import BaseModel

from stepengine import AgentDefinition, Complete, Engine, StepContext, Steps, best_of
from stepengine.errors import ModelError
from stepengine.testing import ScriptedModel, failure

poet = AgentDefinition("poet", model="anthropic/claude-sonnet-4-5", system_prompt="You write one line of verse.")


class Verdict(BaseModel):
    """What the judge says: the number of the best line, counted from 0, and why."""

    best: int
    why: str


def choose(lines: Sequence[str]) -> Steps[int]:
    """A judge of ``best_of`` is a function of the outputs; as a generator it may call another model or agent."""
    numbered = "\n".join(f"{n}: {line}" for n, line in enumerate(lines))
    verdict = yield from Complete(f"Choose the best line:\n{numbered}", model="openai/gpt-5", schema=Verdict)
    return verdict.best


def handle_steps(ctx: StepContext) -> Steps[str]:
    return (yield from best_of(poet, ctx.prompt, n=4, judge=choose))


contest = AgentDefinition("contest", spawnable_agents=[poet], handle_steps=handle_steps)


def main() -> None:
    lines = ["The sea is wide.", failure(ModelError("no credit")), "Grey water folds its sheets.", "Sea, sea, sea."]
    poets = ScriptedModel(lines)
    judges = ScriptedModel(['{"best": 1, "why": "It shows something."}'])
    with Engine([contest], models={"anthropic": poets, "openai": judges}) as engine:
        result = engine.run_sync(contest, "A line about the sea.")

    for child in result.children:
        print(f"{child.agent_id:5} {child.status:9} {child.output or child.error}")
    print(f"the best: {result.output}")
    assert result.output == "Grey water folds its sheets."  # one competitor failed, so the judge chose among three


if __name__ == "__main__":
    main()
