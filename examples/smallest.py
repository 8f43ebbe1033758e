"""
The smallest agent: an id and a model. Without a handler, it takes model steps until the turn ends.

``python examples/smallest.py`` needs no key, because two scripted replies replace the model. To call the real model, omit ``models=``
and set ANTHROPIC_API_KEY.
"""

from stepengine import AgentDefinition, Engine
from stepengine.testing import ScriptedModel

greeter = AgentDefinition("greeter", model="anthropic/claude-sonnet-4-5", system_prompt="You are brief.")


def main() -> None:
    model = ScriptedModel(["Hello, Ada.", "You told me: Ada."])
    with Engine([greeter], models=model) as engine:
        first = engine.run_sync(greeter, "My name is Ada. Say hello.")
        second = engine.run_sync(greeter, "What is my name?", previous=first.state)  # the conversation goes on

    print(f"1st run: {first.status}: {first.output}")
    print(f"2nd run: {second.status}: {second.output}")
    print(f"the second request held {len(model.calls[1].messages)} messages; states never change, so both can be kept")
    assert "Ada" in second.text


if __name__ == "__main__":
    main()
