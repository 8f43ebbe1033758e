"""Settings and defaults: lists are too short by default, and in disorder where the temperature is high."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from stepengine import AgentDefinition, Complete, ModelSettings, StepContext, Steps, StepText
from stepengine.evaluation import Case, Criterion, Evaluation, JudgedRun, Verdict
from stepengine.testing import text

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]


class Length(BaseModel):
    """How long the list is."""

    limit: int = 3


def played(request: Any) -> Any:
    """List as many as it is asked for; in order where the temperature is low."""
    number, start = [int(word) for word in request.messages[-1].text.split() if word.isdigit()]
    words = WORDS[start % 2 :][:number]
    is_hot = (request.settings.temperature or 0) > 0.5 and start % 2 == 0
    return text(" ".join(reversed(words) if is_hot else words), cost="0.002")


def lists(run: JudgedRun) -> Verdict:
    """Return whether a list is long enough, and in order."""
    words = run.text.split()
    lacks = ["items"] * (len(words) < 5) + ["order"] * (words != sorted(words))
    return Verdict(float(not lacks), not lacks, " ".join([f"lacks: {word}" for word in lacks]))


def handle_steps(ctx: StepContext[Length]) -> Steps:
    """Ask for a list."""
    reply = yield from Complete(f"List {ctx.params.limit} animals, variant {ctx.prompt}", settings=agent.settings)
    yield StepText(reply.text)


agent = AgentDefinition(
    "lists",
    model="scripted/lister",
    system_prompt="You make lists.",
    input_schema=Length,
    settings=ModelSettings(temperature=1.0),
    handle_steps=handle_steps,
)
evaluation = Evaluation(
    "lists",
    cases=[
        Case(f"list-{number}", str(number), checks=[Criterion("lists", lists)], replies=played) for number in range(20)
    ],
    agents={"lists": "lists.py"},
)
