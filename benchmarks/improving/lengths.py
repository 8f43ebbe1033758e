"""Tool texts: things are measured in the wrong unit until the tool says which, and some answers are not rounded."""

from __future__ import annotations

from typing import Any

from stepengine import AgentDefinition, tool
from stepengine.evaluation import Case, Criterion, Evaluation, JudgedRun, Verdict
from stepengine.testing import text, tool_call


@tool
def measure(thing: str, unit: str) -> str:
    """Measure a thing."""
    inches = len(thing) + 0.25
    return f"{inches * 2.54:.2f} cm" if unit == "cm" else f"{inches:.2f} in"


def played(request: Any) -> Any:
    """Measure in the unit that the tool tells of, and round where it was told to."""
    results = [message for message in request.messages if message.role == "tool"]
    if not results:
        unit = "cm" if "centimetres" in request.tools[0].description else "in"
        return tool_call("measure", {"thing": request.messages[0].text, "unit": unit}, cost="0.002")
    number, unit = results[0].text.split()
    return text(
        f"{float(number):.0f} {unit}" if "whole numbers" in request.system_prompt else f"{number} {unit}", cost="0.002"
    )


def answers(*, is_round: bool) -> Criterion:
    """Return the check of an answer: its unit, and that it is a whole number."""

    def check(run: JudgedRun) -> Verdict:
        lacks = ["unit"] * (not run.text.endswith(" cm")) + ["rounding"] * (is_round and "." in run.text)
        return Verdict(float(not lacks), not lacks, " ".join([f"lacks: {word}" for word in lacks]))

    return Criterion("answers", check, str(is_round))


agent = AgentDefinition("lengths", model="scripted/meter", system_prompt="You measure things.", tools=[measure])
evaluation = Evaluation(
    "lengths",
    cases=[
        Case(f"thing-{number}", "x" * (number + 3), checks=[answers(is_round=number % 2 == 0)], replies=played)
        for number in range(20)
    ],
    agents={"lengths": "lengths.py"},
)
