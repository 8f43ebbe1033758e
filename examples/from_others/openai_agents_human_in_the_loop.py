"""
Approvals, after the OpenAI Agents SDK's example: a person approves some tool calls, depending on their input, at any later time.

``python examples/from_others/openai_agents_human_in_the_loop.py`` uses scripted replies. To call a real model, omit ``models=``.

There the state of the run is written as JSON and read again. Here the journal is that state: each answer resumes it, in any process. A
denied call is an error result with the person's words, and the model continues from there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Decision, Engine, HookContext, Hooks, RunResult, ToolCallPart, tool
from stepengine.journal import JournalLike
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls

ANSWERS = {"Oakland": "yes", "Oakhurst": "Not there, the sensor is broken."}


@tool
def get_weather(city: str) -> str:
    """
    Get the weather of a city.

    Args:
        city: The city.
    """
    return f"It is sunny in {city}."


@tool
def get_temperature(city: str) -> str:
    """
    Get the temperature in a city.

    Args:
        city: The city.
    """
    return f"It is 20 °C in {city}."


def ask_for_some_cities(ctx: HookContext, call: ToolCallPart) -> Decision | None:
    """Have a person approve the temperature of cities whose name starts with Oak."""
    if call.tool_name == "get_temperature" and call.input["city"].startswith("Oak"):
        return Decision.ask(f"Measure the temperature in {call.input['city']}?")
    return None


agent = AgentDefinition(
    "weather",
    model="openai/gpt-5",
    system_prompt="Answer questions about weather and temperature by the tools.",
    tools=[get_weather, get_temperature],
    hooks=Hooks(pre_tool=ask_for_some_cities),
)


def make_model() -> ScriptedModel:
    """Return the replies of the model."""
    return ScriptedModel(
        [
            tool_calls(
                tool_call("get_weather", {"city": "Oakland"}),
                tool_call("get_temperature", {"city": "Oakland"}),
                tool_call("get_temperature", {"city": "Berkeley"}),
                tool_call("get_temperature", {"city": "Oakhurst"}),
            ),
            text("Sunny in Oakland, 20 °C there and in Berkeley. Nobody knows about Oakhurst."),
        ]
    )


def run(engine: Engine, journal: JournalLike) -> RunResult[Any]:
    """Run until nothing is left to answer."""
    result = engine.run_sync(agent, "Weather and temperature in Oakland? And is it warmer nearby?", journal=journal)
    while result.pending_questions:
        answers = {question.id: ANSWERS[question.details["city"]] for question in result.pending_questions}
        for question in result.pending_questions:
            print(f"{question.text} {answers[question.id]}")
        result = engine.resume_sync(journal, answers=answers)
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Engine([agent], models=make_model()) as engine:
        result = run(engine, Path(folder, "weather.jsonl"))
    for call in result.tool_calls:
        print(f"{call.tool_name} {call.input['city']}: {call.result.text}")
    print(result.output)
