"""
A run with a real model: set a key, or point ``--base-url`` at a server with a Chat Completions API.

    python examples/live.py --model anthropic/claude-sonnet-4-5                       # needs ANTHROPIC_API_KEY
    python examples/live.py --model llama3.2 --base-url http://localhost:11434/v1     # Ollama, no key
    python examples/live.py --offline                                                 # no key, no server
"""

import argparse
import asyncio

from stepengine import STEP_ALL, AgentDefinition, Engine, StepContext, Steps, Usage, tool
from stepengine.events import RunFinished, TextDelta, ToolFinished, ToolStarted
from stepengine.models import Models, OpenAIChatProvider, Provider
from stepengine.testing import ScriptedModel, text, tool_call


@tool
def word_count(of: str) -> int:
    """
    Count the words of a text.

    Args:
        of: The text.
    """
    return len(of.split())


def handle_steps(ctx: StepContext) -> Steps[str]:
    """Let the model work, then answer with its last words and with what they cost."""
    turn = yield STEP_ALL
    state = turn.agent_state
    cost = "unknown" if state.cost is None else f"${state.cost:.4f}"
    return f"{state.message_history[-1].text} [{state.usage.total_tokens} tokens, cost {cost}]"


def provider_of(options: argparse.Namespace) -> Models | Provider | None:
    if options.offline:
        used = Usage(input_tokens=200, output_tokens=20)
        call = tool_call("word_count", {"of": "to be or not to be"}, usage=used)
        return ScriptedModel([call, text("It has 6 words.", usage=used)])
    return OpenAIChatProvider(base_url=options.base_url) if options.base_url else None


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="anthropic/claude-sonnet-4-5")
    parser.add_argument("--base-url", default="")
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    counter = AgentDefinition("counter", model=options.model, tools=[word_count], handle_steps=handle_steps)

    async with Engine([counter], models=provider_of(options)) as engine:
        async for event in engine.stream(counter, "How many words has 'to be or not to be'? Use the tool."):
            match event:
                case TextDelta():
                    print(event.text, end="", flush=True)
                case ToolStarted():
                    print(f"\n> {event.tool_name} {event.input}")
                case ToolFinished():
                    print(f"< {event.result.text}")
                case RunFinished():  # the last event
                    print(f"\n{event.result.unwrap()}")
                case _:
                    pass  # steps, phases, log lines and more


if __name__ == "__main__":
    asyncio.run(main())
